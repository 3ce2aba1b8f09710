r"""``TraceBackpropQ_IWAE``: the importance-weighted bound, with leave-one-out signals and critics."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.batching.classes import SiteSpec
from pyro_bpq.batching.layout import Layout
from pyro_bpq.compiled.options import Backend, Compile
from pyro_bpq.critics.learner import CriticLearner
from pyro_bpq.critics.nets import Critic
from pyro_bpq.errors import BPQWarning, OptionError, PlateError, is_whole
from pyro_bpq.graph.scg import Plate
from pyro_bpq.objectives.multi_sample import BoundPlanner, bound_rollout, is_plain
from pyro_bpq.objectives.objective import Objective
from pyro_bpq.objectives.observation import Mode, NoiseSource, Observation, Runner, Staged
from pyro_bpq.objectives.options import check_options
from pyro_bpq.objectives.programs import programs_of, traced_with
from pyro_bpq.plan.written import unread_options
from pyro_bpq.reruns.rows_apart import rows_that_meet
from pyro_bpq.rollout.runs import Particles, Program
from pyro_bpq.short import short, short_call
from pyro_bpq.step.bound_signals import MEANS, features_of_others, leave_one_out_signal, multi_sample_bound
from pyro_bpq.step.estimate import may_learn
from pyro_bpq.step.signals import Signals
from pyro_bpq.step.surrogate import step
from pyro_bpq.step.values import Step
from pyro_bpq.tracing.hidden_particles import trace_particles
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.tracer import trace_run
from pyro_bpq.tracing.watch import TraceOptions

# So many structures of a program are looked at for rows that meet. Programs that values steer have many.
_JUDGED = 3


class TraceBackpropQ_IWAE(Objective):
    r"""Importance-weighted bound on the evidence, with unbiased gradients for sites of any kind.

    .. math::
        J = -E\Big[\log\tfrac1K\sum_k w_k\Big],\quad
        \nabla J = -E\Big[\sum_k (\hat L - \hat L_{-k})\,\nabla\log q(z_k) + \sum_k \tilde w_k\,\nabla\log w_k\Big]

    ``w = exp(log p - log q - costs)`` is the weight of a sample, ``w̃`` the normalised weight, and ``L̂ = log mean w``.
    In ``L̂_-k`` the weight ``w_k`` is replaced by the geometric mean of the other weights, or it is left out
    (arithmetic mean). So ``L̂_-k`` does not depend on ``z_k``. The first term of ``∇J`` is that of the sites that are
    not reparameterised; the other sites have pathwise gradients.

    With critics the cost-to-go of the sites of a sample is ``C_k = w̃_k - (L̂ - L̂_-k)``, the factor of their
    ``∇ log q``. The critic ``Q_s`` of a site ``s`` predicts it from the values sampled so far and the other samples'
    weights. It corrects the gradient as in :class:`~pyro_bpq.AllAction`,

    .. math::
        (C_k - Q_s(z_{ks}) - \sum_{t > s} A_t)\,\nabla\log q(z_{ks}) + \nabla E_q[Q_s],\quad
        A_t = Q_t(z_{kt}) - E_q[Q_t]

    with adaptive scales. Samples of one bound depend on each other, so none is another's baseline. The baseline is the
    mean of the other bounds or, with ``num_outer=1``, that of earlier steps. The gradient is unbiased for any critics.

    Args:
        num_particles: Number of samples ``K`` of one bound, at least 1.
        num_outer: Number of independent bounds whose mean is taken.
        plate: Name of an outermost plate that all sites are in, such as the data points': every row then has
            weights and a bound of its own. ``None``: one weight for all that a sample draws. If a row reads values of
            other rows, the gradient is biased; a warning says so where other values show it.
        baseline: ``"geometric"`` or ``"arithmetic"`` mean of the other samples' weights, or ``None``: the plain
            score function.
        max_plate_nesting: As in Pyro's ELBOs.
        vectorize_particles: Whether all samples run in one vectorised call.
        critic: How to build the critics of sites that do not choose their own, ``infer={"bpq": {"critic": ...}}``, by
            the rules of :class:`TraceBackpropQ_ELBO`; ``None`` for none. Finite sites then have
            :class:`~pyro_bpq.AllAction`, others that are not reparameterised :class:`~pyro_bpq.QProp`.
        learner: Trains the critics with an optimiser of its own; ``None`` adds their loss to the surrogate, so that the
            user's optimiser trains them.
        lam: Weight of the lambda-return against the critic in targets, in ``[0, 1]``, or a function of the step.
        seed: Seed of what the bound itself draws, such as the initial weights of critics.
        compile: As in :class:`TraceBackpropQ_ELBO`.

    Attributes:
        info: As in :class:`TraceBackpropQ_ELBO`, where there are critics; ``cost_to_go`` is ``(num_outer, K, plates)``.

    Raises:
        OptionError: If an option is out of range.
        PlateError: If ``plate`` is not a plate of every site.
        UnsupportedSiteError: If the estimator that a site chose cannot serve it.
        UnsupportedProgramError: If there are critics and the samples of a step have different sites.

    References:
        | Importance Weighted Autoencoders (Burda et al., 2016), Eqs. 8 and 14
        | Variational Inference for Monte Carlo Objectives (Mnih and Rezende, 2016), Eqs. 8 to 11
        | Backprop-Q (Xu et al., 2018), Eq. 27
    """

    runner: BoundRunner

    def __init__(
        self,
        num_particles: int = 5,
        num_outer: int = 1,
        plate: str | None = None,
        baseline: str | None = "geometric",
        max_plate_nesting: float = float("inf"),
        vectorize_particles: bool = False,
        *,
        critic: Critic | None = None,
        learner: CriticLearner | None = CriticLearner(),
        lam: float | Callable[[int], float] = 0.97,
        seed: int = 0,
        compile: bool | Backend | Compile = False,
    ) -> None:
        made_by = short_call(type(self), TraceBackpropQ_IWAE, locals())
        for name, number in (("num_particles", num_particles), ("num_outer", num_outer)):
            if not is_whole(number, 1):
                raise OptionError(f"{name}={number!r}: write a positive integer.")
        if baseline not in MEANS:
            raise OptionError(f'baseline={baseline!r}: write "geometric", "arithmetic" or None.')
        check_options(None, critic, "single", lam, 1.0, learner)
        if learner is not None and (learner.replay is not None or learner.first_order > 0.0):
            raise OptionError(
                f"learner={learner}: critics of a bound learn from their own steps; leave replay and first_order out."
            )
        if learner is not None and learner.sweep is not None:
            raise OptionError(
                f"learner={learner}: critics of a bound learn after its gradient; leave sweep out. The paper's "
                "algorithm is for one sample: write TraceBackpropQ_ELBO(**paper_settings())."
            )
        super().__init__(
            *(learner, seed, lam, 1.0, compile),
            num_particles=num_particles * num_outer,
            max_plate_nesting=max_plate_nesting,
            vectorize_particles=vectorize_particles,
        )
        self.made_by = made_by
        self.num_inner, self.num_outer, self.plate, self.baseline = num_particles, num_outer, plate, baseline
        planner = BoundPlanner(
            *(None, critic, "single"),
            num_bounds=num_outer,
            num_features=2 if num_particles > 1 else 0,
        )
        self.runner = BoundRunner(planner, plate)

    @property
    def planner(self) -> BoundPlanner:
        """The options that decide what is done at a site."""
        return self.runner.planner

    def _chosen(self) -> list[tuple[str, str, str]]:
        specs = self.runner.specs.items()
        return [(name, short(spec.estimator), short(spec.critic) if spec.critic else "none") for name, spec in specs]

    def _why_so_many(self) -> str:
        return f"{self.num_inner} for each bound, because of num_particles; num_outer={self.num_outer} bounds"

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the bound, in nats, of one draw of all samples."""
        with torch.no_grad():
            return float(self.differentiable_loss(model, guide, *args, **kwargs))

    @property
    def _num_draws(self) -> int:
        return self.num_outer

    def run_program(self, program: Program) -> TracedRun:
        """Runs guide and model as a step does."""
        return self.runner.trace(program, self.particles.now, self.num_steps)

    def stage(self, traced: Sequence[TracedRun], programs: Sequence[Program]) -> Staged:
        """Critics of a bound learn from their own steps only."""
        raise NotImplementedError("Critics of a bound learn from their own steps only.")

    def _evaluate(self, program: Program, mode: Mode) -> Step:
        """Takes a step: the loss is the mean over bounds; the surrogates with its gradient are sums over bounds."""
        start = time.perf_counter()
        runs = self._observe(program, mode).runs
        if not any(run.run.costs for run in runs):
            return self._plain(torch.zeros(()), torch.zeros(()), mode)
        found = [self.runner.layout(run) for run in runs]
        layout, rows = found[0]
        drawn = [index for run in runs for name, index in run.subsamples.items() if name == self.plate]
        if any(not torch.equal(drawn[0], index) for index in drawn[1:]):
            raise PlateError(
                f"Each of the samples of plate {self.plate!r} drew a subsample of its own, so that no row has more "
                "than one. Write vectorize_particles=True, or hand minibatches to the model."
            )
        scale = 1.0 if rows is None else _row_scale(runs[0], rows.name)
        shape, dim = (self.num_outer, self.num_inner, -1), None if rows is None else rows.dim
        parts = [self._rows(run, dim, scale) for run in runs]
        log_w, score = (torch.cat([part[n] for part in parts]).reshape(shape) for n in (0, 1))
        ready = time.perf_counter()
        if all(is_plain(each) for each, _ in found) or not torch.is_grad_enabled():
            signal = leave_one_out_signal(log_w, self.baseline)
            loss, surrogate = multi_sample_bound(log_w, score, signal)
            return self._plain(scale * loss / self.num_outer, scale * surrogate, mode)
        # What the weights' own gradient holds of the scores goes to the critics too: it nearly cancels the signals.
        weights, signal = log_w.detach().softmax(1), leave_one_out_signal(log_w, self.baseline)
        loss, surrogate = multi_sample_bound(log_w, score, weights)
        is_vectorized = self.particles.now.has_plate
        ndim = int(self.max_plate_nesting) - 1 if is_vectorized else runs[0].plate_ndim
        costs, features = scale * (weights - signal), features_of_others(log_w)
        rollout = bound_rollout(runs, costs, features, rows, ndim, is_vectorized)
        signals = Signals(layout, rollout, {}, self.critics, mode.learning)
        staged = Staged(tuple(runs), (), signals)
        result = step([signals], scale * loss / self.num_outer, self.critics, self.learning(mode), mode.learning)
        result = replace(result, paths=scale * surrogate)
        if self.trainer.keeps_staged:
            self.trainer.keep([staged], result)
        self._note(ms={"runs": 1e3 * (ready - start), "signals": 1e3 * (time.perf_counter() - ready)})
        return result

    def _plain(self, loss: Tensor, paths: Tensor, mode: Mode) -> Step:
        """A step that teaches no critic."""
        learns = mode.learning and may_learn(loss, self.learning(mode))
        return Step(loss, torch.zeros(()), learns=learns, paths=paths)

    def _rows(self, traced: TracedRun, dim: int | None, scale: float) -> tuple[Tensor, Tensor]:
        """Log-weights with their gradients, and ``log q`` of the sites that need it, ``(samples, rows)`` each."""
        costs = list(traced.run.costs.values())
        scores = [record.score for record in traced.run.sites.values() if record.score is not None]
        log_w = -sum((self._reduce(cost, dim) for cost in costs), costs[0].new_zeros((1, 1))) / scale
        score = sum((self._reduce(log_q, dim) for log_q in scores), torch.zeros_like(log_w.detach()))
        return log_w, score.expand_as(log_w)

    def _reduce(self, value: Tensor, dim: int | None) -> Tensor:
        """From a batch shape to ``(samples, rows)``."""
        if self.particles.now.has_plate:
            ndim = int(self.max_plate_nesting)
            value = value.reshape((1,) * (ndim - value.dim()) + value.shape)
        else:
            value = value.unsqueeze(0)
        if dim is not None:
            return value.movedim(dim, 1).reshape(value.shape[0], value.shape[dim], -1).sum(-1)
        return value.reshape(value.shape[0], -1).sum(1, keepdim=True)


class BoundRunner(Runner):
    """Runs the programs of a bound, whose rows are those of a plate if it has a name."""

    def __init__(self, planner: BoundPlanner, plate: str | None) -> None:
        self.planner, self.plate, self.noise = planner, plate, NoiseSource(0)
        self._layouts: dict[Any, tuple[Layout, Plate | None]] = {}

    def trace(
        self,
        program: Program,
        particles: Particles,
        num_steps: int,
        *,
        warns: bool = True,
        put: Callable[[Any], Any] = lambda part: part,
    ) -> TracedRun:
        """Runs a program once."""
        model, guide, args, kwargs = program
        return trace_run(put(model), put(guide), args, kwargs, self._options(particles, warns))

    def _options(self, particles: Particles, warns: bool = True) -> TraceOptions:
        return TraceOptions(self.planner.choose, particles.nesting, particles.number, warns=warns)

    def observe(self, program: Program, particles: Particles, mode: Mode) -> Observation:
        """The runs of a step."""
        if particles.is_hidden:
            programs, single = [program], replace(particles, number=1, is_hidden=False)
            runs = tuple(trace_particles(*program, self._options(particles), is_checked=mode.is_checked))
        else:
            programs, single = [*programs_of(program, particles)], particles
            runs = tuple(self.trace(each, particles, mode.num_steps) for each in programs)
        is_new = len(self._layouts) < _JUDGED and runs[0].key not in self._layouts
        if self.plate is not None and runs[0].entries and is_new and not mode.is_recorded:
            self._warn_of_rows(self.plate, runs[0], programs[0], single, mode.num_steps)
        return Observation(runs)

    def _warn_of_rows(self, plate: str, run: TracedRun, program: Program, particles: Particles, num_steps: int) -> None:
        """Warns if a row of the plate reads values of other rows, which runs at other values show."""
        trace = traced_with(self, particles, num_steps)
        _row_plate(run, plate)  # an error where a site is not in it
        judged = replace(run, unfollowed=dict.fromkeys(run.run.costs, (plate,)))
        met = rows_that_meet(trace, program, judged, True, num_steps, is_first=True)
        if met:
            warnings.warn(
                f"Rows of the plate {plate!r} meet in {next(iter(met))}: a row of it reads values of other rows. With "
                f"plate={plate!r} each row has weights of its own, so that the gradient is biased. Write plate=None, "
                "or keep the rows apart.",
                BPQWarning,
                stacklevel=2,
            )

    @property
    def specs(self) -> Mapping[str, SiteSpec]:
        """How the sites of the structure that was met last are served; empty before the first step."""
        return next((layout.specs for layout, _ in reversed(self._layouts.values())), {})

    def layout(self, traced: TracedRun) -> tuple[Layout, Plate | None]:
        """The batching of the sites of a run, and the plate of its rows."""
        if traced.key not in self._layouts:
            if len(self._layouts) >= 64:
                self._layouts.clear()
            rows = None if self.plate is None else _row_plate(traced, self.plate)
            layout = self.planner.layout(traced, rows)
            unread = unread_options(traced, {name: spec.critic for name, spec in layout.specs.items()})
            if unread and not self._layouts:
                warnings.warn(unread, BPQWarning, stacklevel=2)
            self._layouts[traced.key] = layout, rows
        return self._layouts[traced.key]


def _row_plate(traced: TracedRun, plate: str) -> Plate:
    """The plate of the rows, in which all sites have to be."""
    rows = None
    for name, plates, *_ in traced.entries:
        rows = next((p for p in plates if p.name == plate), None)
        if rows is None:
            raise PlateError(
                f"Site {name!r} is not in the plate {plate!r} (its plates: {[p.name for p in plates]}), so its rows "
                "have no weights of their own; write plate=None."
            )
    assert rows is not None
    return rows


def _row_scale(traced: TracedRun, plate: str) -> float:
    """The scale by which the plate's subsample stands for all."""
    nodes = (*traced.guide_trace.nodes.values(), *traced.model_trace.nodes.values())
    frames = [f for node in nodes for f in node.get("cond_indep_stack", ()) if f.name == plate]
    full = frames[0].full_size
    return 1.0 if full is None or full < 0 else full / frames[0].size
