r"""``TraceBackpropQ_ELBO``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from pyro.util import warn_if_nan
from torch import Tensor

from pyro_bpq.compiled.options import Backend, Compile
from pyro_bpq.critics.learner import CriticLearner
from pyro_bpq.critics.nets import Critic, MLPCritic
from pyro_bpq.errors import BPQWarning
from pyro_bpq.estimators import Estimator
from pyro_bpq.graph.network import Reduction
from pyro_bpq.graph.scg import Form
from pyro_bpq.objectives.analytic import analytic_paths
from pyro_bpq.objectives.imagined import bootstrapped_surrogate
from pyro_bpq.objectives.observation import Mode
from pyro_bpq.objectives.options import check_counts, planner_of
from pyro_bpq.objectives.planned import PlannedObjective
from pyro_bpq.objectives.runner import StepRunner
from pyro_bpq.rollout.runs import Program
from pyro_bpq.short import listed, short_call
from pyro_bpq.step.values import Step


class TraceBackpropQ_ELBO(PlannedObjective):
    r"""ELBO whose gradients through non-reparameterised sites come from Backprop-Q.

    Each latent site of the guide gets a gradient estimator that fits it; :mod:`pyro_bpq.plan.rules` has the rules.
    Roughly, these are

    - for reparameterised sites the pathwise estimator;
    - in programs of fewer than ten sites, in rows of data and at sites of many components
      :class:`~pyro_bpq.ScoreFunction` with leave-one-out over several particles;
    - for other sites with finite components :class:`~pyro_bpq.AllAction`, with the immediate costs summed exactly over
      their values, critics for the costs further downstream, graph-wise control variates and adaptive scales;
    - for a single site of many components that explains much data
      :class:`~pyro_bpq.estimators.DebiasedStraightThrough`;
    - for several layers of many components :class:`~pyro_bpq.estimators.Hindsight` or
      :class:`~pyro_bpq.estimators.CrossedLeaveOneOut`;
    - for others the score function. From two particles on its baseline is the mean of the other particles. With one
      particle it is a trimmed mean of earlier costs or, at sites of many components, the cost of a second run.

    All of these are unbiased for any state of the critics, first call included. The guide runs ``num_particles`` times.
    The model runs once more if that pays. If the loss can be summed over all values (:mod:`pyro_bpq.reruns.tables`),
    nothing is drawn after the first steps, and the gradient is exact.

    Args:
        num_particles: Number of particles ``M``. ``None`` leaves it open: up to eight run in one vectorised call if
            :func:`~pyro_bpq.plan.particles.num_particles_for` asks for several, and if a particle among others has the
            same costs as one alone. This check runs the program some twenty times more in the first step, and six times
            after 1, 2, 4, 8, ... steps and then every 128. One particle runs if you choose an estimator or
            ``vectorize_particles=True``. It also runs with cost statements, summed-out sites or several processes, and
            if sampled values steer the program. If the loss is summed over all values, there are no particles; options
            about critics turn that sum off. ``print(elbo)`` says which option did what.
        max_plate_nesting: As in Pyro's ELBOs.
        max_iarange_nesting: Deprecated, as in Pyro's ELBOs.
        vectorize_particles: Whether particles run in one vectorised call.
        strict_enumeration_warning: As in Pyro's ELBOs.
        ignore_jit_warnings: As in Pyro's ELBOs.
        jit_options: As in Pyro's ELBOs.
        retain_graph: Passed to ``backward``.
        tail_adaptive_beta: As in Pyro's ELBOs.
        estimator: Estimator of every site without ``rsample`` that does not choose its own; ``None`` picks per site.
        critic: How to build the critics of sites that do not choose their own; ``None`` for none. A site of many
            components (``to_event``) has none by default. Sites that :class:`~pyro_bpq.QProp` serves have a
            :class:`~pyro_bpq.MomentCritic`; reparameterised sites only where ``infer`` or ``config_bpq`` asks for it.
        reduction: Reduction of the Backprop-Q network.
        lam: Weight of the lambda-return against the critic in targets, in ``[0, 1]``, or a function of the step.
        gamma: Discount of targets, in ``(0, 1]``, or a function of the step: a cost that is ``d`` edges away, on the
            longest way, counts ``gamma ** d``, whatever the reduction (:mod:`pyro_bpq.targets.lambda_return`).
        learner: Trains the critics with an optimiser of its own; ``None`` adds their loss to the surrogate,
            so that the user's optimiser trains them.
        structure: ``"auto"``, ``"dynamic"`` or ``"dense"``: when dependencies are tracked.
        analytic_kl: Whether the gradient of ``log q - log p`` at reparameterised sites is that of its expectation
            where that is known: the KL divergence, else the entropy. The reported loss stays that of the sample.
        seed: Seed of what the ELBO itself draws: initial weights of critics, noise of estimators, further runs, replay.
        enumeration: What ``infer={"enumerate": ...}`` means: ``"sample"``, the site is sampled, with a warning;
            ``"exact"``, it is summed out as by Pyro's ``TraceEnum_ELBO``.
        window: Number of most recent sites of each kind in its scope that a critic sees as they are; it sees the others
            as one sum. A :class:`~pyro_bpq.TabularCritic` sees its whole scope. ``print(elbo.plan)`` shows what each
            critic reads.
        compile: Whether steps are recorded once and compiled, from then on without the programs' Python: ``True``, the
            name of a backend, or :class:`~pyro_bpq.Compile`. See :doc:`/compiled`.
        immediate: ``"exact"`` sums immediate costs over the values of a site where they are known. ``"learned"``, the
            paper's form, leaves all costs to the critics; there is no extra run of the model.
        form: What a Q-function conditions on: the site and its ancestors, ``"ancestor"``, or all that was sampled so
            far, ``"history"``. Where sampled values steer the program it is always the history.

    Attributes:
        info: After each training step a dictionary for each site, by name; tensors are detached and on their device.
            ``estimator``: the site's gradient estimator. ``cost_to_go``: ``(M, plates)`` in nats, or ``(M, plates, D)``
            if each component has its own. ``baseline``: the running or trimmed mean of earlier costs, in nats, if the
            estimator keeps one. ``scales``: the scales of its control variates, ``(n,)``. ``AllAction`` has five: for
            exact costs, level and differences of the critic, later sites, and exact costs of later sites. ``td_loss``:
            squared error of the critic in units of its targets' spread, with ``sweep`` in squared nats. ``explained``:
            share of the targets' variance that the critic explains, between the particles of a data point or, with one
            particle, between data points; absent with ``sweep``. ``ms``: milliseconds of the host in the estimator and
            the critic's regression. The time of a batched call is shared equally among its sites. A site that is summed
            over all values has only ``estimator``.
        ms: Milliseconds of the host in the last step without ``backward``: ``runs`` for the programs, the graph and the
            critics, ``signals`` for estimators and regression.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backprop-Q: Generalized Backpropagation for Stochastic Computation Graphs (Xu et al., 2018)
        | https://arxiv.org/abs/1807.09511
    """

    # Whether cost statements are all that counts: an expected cost instead of an ELBO.
    _only_costs = False

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
        window: int = 4,
        compile: bool | Backend | Compile = False,
        immediate: Literal["exact", "learned"] = "exact",
        form: Form = "ancestor",
    ) -> None:
        made_by = short_call(type(self), TraceBackpropQ_ELBO, locals())
        check_counts(num_particles, window)
        planner = planner_of(
            *(estimator, critic, reduction, lam, gamma, learner, window),
            immediate=immediate,
            form=form,
            enumeration=enumeration,
            only_costs=self._only_costs,
        )
        super().__init__(
            *(learner, seed, lam, gamma, compile),
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
        self.made_by = made_by
        self.enumeration, self.analytic_kl, enumerates = enumeration, analytic_kl, enumeration == "exact"
        self.runner = StepRunner(
            *(planner, structure, self.critics, self._only_costs, enumerates, strict_enumeration_warning)
        )
        fixing = {
            f"{num_particles=}": num_particles is not None,
            "vectorize_particles=True": vectorize_particles,
            "its cost statements": self._only_costs,
            'enumeration="exact"': enumerates,
        }
        self._fixed_by = next((text for text, fixes in fixing.items() if fixes), "")
        if not self._fixed_by:
            self.particles.leave_open()
        # Whether options that nothing reads were told.
        self._has_told = False

    def recorded_options(self) -> dict[str, Any]:
        """Further options that a recording depends on, by name."""
        return {**super().recorded_options(), "kl": self.analytic_kl}

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the ELBO of ``num_particles`` draws, in nats; nothing learns."""
        with torch.no_grad():
            seen = self.particles.observe(
                self.runner, self._prepared(Program(model, guide, args, kwargs)), self.mode(False)
            )
            loss = seen.loss / self.num_particles
        warn_if_nan(loss, "loss")
        return float(loss.item())

    def _evaluate(self, program: Program, mode: Mode) -> Step:
        start = time.perf_counter()
        seen = self._observe(program, mode)
        self._tell_unread(mode)
        ready = time.perf_counter()
        loss, number = seen.loss, self.num_particles
        loss = loss / number if number > 1 else loss
        result = self.step_on(seen, loss, mode)
        if self.analytic_kl:
            result = replace(result, paths=analytic_paths(seen))
        self._note(ms={"runs": 1e3 * (ready - start), "signals": 1e3 * (time.perf_counter() - ready)})
        if self.trainer.keeps_staged:
            self.trainer.keep(seen.items, result)
        return result

    def _tell_unread(self, mode: Mode) -> None:
        """Warns once of options of sites that nothing reads."""
        if mode.learning and not self._has_told and self.plan and self.plan.unread:
            self._note(_has_told=True)
            warnings.warn(self.plan.unread, BPQWarning, stacklevel=2)

    def bootstrapped_loss(self, model: Any, guide: Any, *args: Any, entropy: float = 0.0, **kwargs: Any) -> Tensor:
        r"""A loss in which critics stand for the costs. It calls no cost function, and no critic learns from it.

            S = Σ_X Σ_x q_X(x) (I_X(x) + Q_X(x) + α log q_X(x)),   new values of all sites from the present guide

        A continuous site adds other terms, see :func:`~pyro_bpq.objectives.imagined.bootstrapped_surrogate`. The
        gradient is **biased** by the errors of the critics; with exact ones it is that of the loss, as far as that
        comes through the guide's probabilities. Values are drawn from a generator of the ELBO's own.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments, not necessarily those of a rollout.
            entropy: Weight ``α`` of the sites' negative entropies, in nats of cost per nat. It keeps the guide random:
                from a nearly deterministic guide critics learn nothing about other values.
            **kwargs: Their keyword arguments.

        Returns:
            A scalar, the mean over particles; only its gradient has meaning.

        Raises:
            UnsupportedSiteError: If a site has no critic by choice.
        """
        signals = self.without_costs(Program(model, guide, args, kwargs))
        return bootstrapped_surrogate(signals, entropy, self.learning().gamma) / self.num_particles

    def _why_so_many(self) -> str:
        number, plan = self.num_particles, self.plan
        if plan and plan.sums:
            return "none, as the loss is summed over all values"
        fixed_by = "" if self.particles.is_open else self._fixed_by or "what was set later"
        drawn_by = fixed_by or ("analytic_kl=True" if self.analytic_kl else "")
        drawn = f"; the loss is not summed over all values, because of {drawn_by}" if drawn_by and plan.summed else ""
        if fixed_by:
            return f"{number}, because of {fixed_by}{drawn}"
        noisy = [name for name in plan.layout.specs if name in plan.noisy | plan.compared] if number > 1 else []
        return f"{number}, left open{drawn}" + (f"; the gradient of {listed(noisy)} is noisy" if noisy else "")
