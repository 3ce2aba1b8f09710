r"""``TraceBackpropQ_ELBO``: wiring only."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal

import torch
from pyro.infer import ELBO
from pyro.infer.util import is_validation_enabled
from pyro.util import check_if_enumerated, warn_if_nan
from torch import Tensor, nn

from pyro_bpq.critics.learner import CriticLearner
from pyro_bpq.critics.nets import Critic, MLPCritic
from pyro_bpq.errors import BPQWarning, OptionError
from pyro_bpq.estimators import Estimator
from pyro_bpq.graph.network import Reduction
from pyro_bpq.objectives.analytic import differentiable_cost
from pyro_bpq.objectives.critic_training import CriticTraining
from pyro_bpq.objectives.options import check_options
from pyro_bpq.objectives.particles import OpenParticles
from pyro_bpq.objectives.replayer import Replayer, Transient
from pyro_bpq.plan.plan_cache import PlanCache
from pyro_bpq.plan.planner import Planner, check_gradients
from pyro_bpq.reruns.elimination import eliminate
from pyro_bpq.reruns.enumeration import enumerated_programs
from pyro_bpq.reruns.row_runs import RowRuns
from pyro_bpq.step.surrogate import StepResult, step
from pyro_bpq.tracing.cost_statement import SkipCosts
from pyro_bpq.tracing.structure_cache import StructureCache
from pyro_bpq.tracing.traced_run import TracedRun, trace_run

__all__ = ["TraceBackpropQ_ELBO"]

_NOTHING_ENUMERATED = (
    'enumeration="exact" found no site to sum out. Mark sites with infer={"enumerate": "parallel"} or '
    'pyro.infer.config_enumerate, or write enumeration="sample".'
)


class TraceBackpropQ_ELBO(OpenParticles, CriticTraining, ELBO, nn.Module):
    r"""ELBO whose gradients through non-reparameterised sites come from Backprop-Q.

    Each latent site of the guide gets a gradient estimator that fits it. By default: reparameterised sites the
    pathwise one; sites with finite components :class:`~pyro_bpq.AllAction`, with the immediate costs summed
    exactly over their values, critics for the costs further downstream, graph-wise control variates and
    adaptive scales; a single site of many components that is too large for that sum
    :class:`~pyro_bpq.estimators.DebiasedStraightThrough`; others the score function. Its baseline is the mean of the
    other particles from ``num_particles=2`` on; with one a running mean, or, at sites of many components, a second run.
    All of these are unbiased for any state of the critics, first
    call included. The guide runs ``num_particles`` times; the model runs once more where that pays.

    Args:
        num_particles: Number of particles ``M``. ``None``: up to eight in one vectorised call, where baselines of other
            particles know rows of data that critics do not see, and the program is found to compute the same costs for
            a particle among others as for one alone (:func:`~pyro_bpq.objectives.particles.num_particles_for`). For
            that it runs some twenty times more in the first step, and six times after 1, 2, 4, 8, ... steps and then
            every 128. One where an estimator or an option about critics is chosen, with ``vectorize_particles=True``,
            cost statements, summed-out sites and several processes, and where sampled values steer the program.
        max_plate_nesting: As in Pyro's ELBOs.
        max_iarange_nesting: Deprecated, as in Pyro's ELBOs.
        vectorize_particles: Whether particles run in one vectorised call.
        strict_enumeration_warning: As in Pyro's ELBOs.
        ignore_jit_warnings: As in Pyro's ELBOs.
        jit_options: As in Pyro's ELBOs.
        retain_graph: Passed to ``backward``.
        tail_adaptive_beta: As in Pyro's ELBOs.
        estimator: Estimator of every site without ``rsample`` that does not choose its own;
            ``None`` picks per site.
        critic: How to build the critics of sites that do not choose their own; ``None`` for none. A site of many
            components (``to_event``) has none by default; ``critic=FlipCritic()``, which reads the value as a whole,
            lowers the variance there and makes a step slower. Sites that :class:`~pyro_bpq.QProp` serves have a
            :class:`~pyro_bpq.MomentCritic`; reparameterised sites only where ``infer`` or ``config_bpq`` asks for it.
        reduction: Reduction of the Backprop-Q network.
        lam: Weight of the lambda-return against the critic in targets, in ``[0, 1]``, or a function of the step.
        gamma: Discount of targets per edge, in ``(0, 1]``, or a function of the step.
        learner: Trains the critics with an optimiser of its own; ``None`` adds their loss to the surrogate,
            so that the user's optimiser trains them.
        structure: ``"auto"``, ``"dynamic"``, ``"dense"`` or ``"static"``: when dependencies are tracked.
        analytic_kl: Whether the gradient of ``log q - log p`` at reparameterised sites is that of its expectation
            where that is known: the KL divergence, else the entropy. The reported loss stays that of the sample.
        seed: Seed of what the ELBO itself draws: the initial weights of critics.
        enumeration: What ``infer={"enumerate": ...}`` means: ``"sample"``, the site is sampled, with a warning;
            ``"exact"``, it is summed out as by Pyro's ``TraceEnum_ELBO``.

    Attributes:
        info: After each training step what is known of each site, by name; tensors are detached and on their device.
            ``estimator``: its gradient estimator. ``cost_to_go``: ``(M, plates)``, in nats; ``(M, plates, D)`` where
            each component has one of its own.
            ``baseline``: the running mean of ``RunningBaseline``, in nats. ``scales``: those of ``AllAction``, ``(4,)``
            for exact costs, level and differences of the critic, and later sites. ``td_loss``: squared error of the
            critic in units of its targets' spread. ``explained``: share of the targets' variance that the critic
            explains, between particles of a data point; with one particle between data points. ``ms``: milliseconds of
            the host in the estimator and the critic's regression, a batched call shared out among its sites.
        ms: Milliseconds of the host in the last step but for ``backward``: ``runs``, those of the programs, the graph
            and the critics; ``signals``, estimators and regression.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backprop-Q: Generalized Backpropagation for Stochastic Computation Graphs (Xu et al., 2018)
        | https://arxiv.org/abs/1807.09511
    """

    def __init__(
        self,
        num_particles: int | None = None,
        max_plate_nesting: float = float("inf"),
        max_iarange_nesting: float | None = None,
        vectorize_particles: bool = False,
        strict_enumeration_warning: bool = True,
        ignore_jit_warnings: bool = False,
        jit_options: dict[str, Any] | None = None,
        retain_graph: bool | None = None,
        tail_adaptive_beta: float = -1.0,
        *,
        estimator: Estimator | None = None,
        critic: Critic | None = MLPCritic(),
        reduction: Reduction = "chain",
        lam: float | Callable[[int], float] = 0.97,
        gamma: float | Callable[[int], float] = 1.0,
        learner: CriticLearner | None = CriticLearner(),
        structure: str = "auto",
        analytic_kl: bool = False,
        seed: int = 0,
        enumeration: Literal["sample", "exact"] = "sample",
    ) -> None:
        is_number = isinstance(num_particles, Integral) and not isinstance(num_particles, bool)
        if num_particles is not None and not (is_number and num_particles >= 1):
            raise OptionError(f"num_particles={num_particles!r}: write a positive integer, or None to leave it open.")
        nn.Module.__init__(self)
        ELBO.__init__(
            self,
            num_particles=1 if num_particles is None else num_particles,
            max_plate_nesting=max_plate_nesting,
            max_iarange_nesting=max_iarange_nesting,
            vectorize_particles=vectorize_particles,
            strict_enumeration_warning=strict_enumeration_warning,
            ignore_jit_warnings=ignore_jit_warnings,
            jit_options=jit_options,
            retain_graph=retain_graph,
            tail_adaptive_beta=tail_adaptive_beta,
        )
        check_options(estimator, critic, reduction, lam, gamma, learner)
        if enumeration not in ("sample", "exact"):
            raise OptionError(f"enumeration={enumeration!r} is unknown; write 'sample' or 'exact'.")
        self.enumeration = enumeration
        chosen = (reduction, lam, gamma, learner) != ("chain", 0.97, 1.0, CriticLearner())
        planner = Planner(estimator, critic, reduction, asks_for_critics=chosen or critic not in (None, MLPCritic()))
        self._plans = PlanCache(planner)
        self.lam, self.gamma, self.analytic_kl = lam, gamma, analytic_kl
        self._start(learner, seed)
        replay = None if learner is None else learner.replay
        self._replayer = None if learner is None or replay is None else Replayer(learner, replay, seed)
        self.keeps_staged = replay is not None or (learner is not None and learner.steps > 1)
        self._structure = StructureCache(structure)
        self._row_runs = RowRuns()
        is_plain = not (vectorize_particles or self._only_costs) and enumeration == "sample"
        self._leave_open(num_particles is None and is_plain)

    __call__ = ELBO.__call__

    # Whether cost statements are all that counts: an expected cost instead of an ELBO.
    _only_costs = False

    @property
    def planner(self) -> Planner:  # type: ignore[override]
        """The options that decide what is done on a structure."""
        return self._plans.planner

    @planner.setter
    def planner(self, planner: Planner) -> None:
        self._plans.planner = planner

    def forward(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The same as :meth:`differentiable_loss`."""
        return self.differentiable_loss(model, guide, *args, **kwargs)

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the ELBO of ``num_particles`` draws, of one where that is left open, in nats; nothing learns.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments.
            **kwargs: Their keyword arguments.

        Returns:
            The loss.
        """
        with torch.no_grad(), self._one_if_open():
            runs = [self._trace(*arguments, track=False) for arguments in self._arguments(model, guide, args, kwargs)]
            loss = self._mean([traced.run.loss for traced in runs])
        warn_if_nan(loss, "loss")
        return float(loss.item())

    # One step.

    def _arguments(self, model: Any, guide: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any, Any, Any]]:
        """The programs of each run, wrapped for vectorised particles as Pyro does."""
        model, guide = self._alone(model, guide)
        if self.enumeration == "exact" and math.isinf(self.max_plate_nesting):
            # Dimensions of values lie to the left of all plates.
            self._guess_max_plate_nesting(model, guide, args, kwargs)
        return list(self._get_traces(model, guide, args, kwargs))

    def _alone(self, model: Any, guide: Any) -> tuple[Any, Any]:
        """Model and guide as they run for one particle."""
        return model, guide

    def _guess_max_plate_nesting(self, model: Any, guide: Any, args: Any, kwargs: Any) -> None:
        super()._guess_max_plate_nesting(SkipCosts()(model), SkipCosts()(guide), args, kwargs)

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any, Any]:
        return model, guide, args, kwargs

    def _trace(
        self,
        model: Any,
        guide: Any,
        args: Any,
        kwargs: Any,
        track: bool,
        sloped: frozenset[str] = frozenset(),
        put: Callable[[Any], Any] = lambda program: program,
    ) -> TracedRun:
        def run(model: Any, guide: Any) -> TracedRun:
            planner = self.planner
            again: Any = model if model is None else put(model)
            # Values that are put in stand outside of enumeration, which follows the sites that it passes.
            return trace_run(
                *(
                    again,
                    put(guide),
                    args,
                    kwargs,
                    self.max_plate_nesting,
                    planner.choose,
                    self.num_particles,
                    track,
                ),
                attach=planner.attach,
                noise=self._noise,
                step=self.num_steps,
                only_costs=self._only_costs,
                components=self._structure.follows_components and self.enumeration == "sample",
                sloped=sloped,
                rows=self._structure.follows_rows and self.enumeration == "sample",
            )

        if self.enumeration == "exact":
            nesting = int(self.max_plate_nesting)
            with enumerated_programs(model, guide, nesting) as programs:
                traced = run(*programs)
            if self.strict_enumeration_warning and is_validation_enabled() and not traced.enumerated:
                warnings.warn(_NOTHING_ENUMERATED, BPQWarning, stacklevel=2)
            return eliminate(traced, nesting)
        traced = run(model, guide)
        check_gradients(traced)
        if is_validation_enabled():
            check_if_enumerated(traced.guide_trace)
        return traced

    def _evaluate(
        self, model: Any, guide: Any, args: Any, kwargs: Any, learning: bool
    ) -> tuple[Tensor, Tensor, StepResult]:
        """The loss, the differentiable costs, and what the step yields."""
        start = time.perf_counter()
        runs, items = self._observe(model, guide, args, kwargs, learning)
        ready = time.perf_counter()
        signals = [item.signals for item in items]
        loss = self._mean([traced.run.loss for traced in runs])
        result = step(signals, self.critics, self.learning(), learning and self._may_learn(items, loss))
        costs = [cost for item in items for cost in item.differentiable()]
        if self.analytic_kl:
            # One graph for all particles, or one for each.
            graphs = [one.layout.graph for one in signals] * (len(runs) // len(signals))
            costs = [differentiable_cost(*pair) for pair in zip(runs, graphs, strict=True)]
        self.ms = {"runs": 1e3 * (ready - start), "signals": 1e3 * (time.perf_counter() - ready)}
        if self.keeps_staged:
            self.staged = Transient([replace(item, result=result) for item in items])
        return loss, sum(costs, torch.zeros(())), result

    @property
    def _share(self) -> float | None:  # type: ignore[override]
        return 1.0 / self.num_particles if self._goes_back and not (self.analytic_kl or self.retain_graph) else None

    def _mean(self, losses: list[Tensor]) -> Tensor:
        return sum(losses[1:], losses[0]) / self.num_particles

    def extra_repr(self) -> str:
        """The options."""
        planner = self.planner
        return (
            f"num_particles={self.num_particles}, estimator={planner.estimator}, critic={planner.critic}, "
            f"reduction={planner.reduction!r}, lam={self.lam}, gamma={self.gamma}, learner={self.learner}, "
            f"structure={self._structure.mode!r}, enumeration={self.enumeration!r}"
        )
