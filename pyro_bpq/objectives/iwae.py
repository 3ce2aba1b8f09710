r"""``TraceBackpropQ_IWAE``: the importance-weighted bound with leave-one-out signals.

Log-weights ``log_w`` have the shape ``(outer, K, rows)``, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.compiled.options import Backend, Compile
from pyro_bpq.errors import OptionError, PlateError, UnsupportedProgramError, UnsupportedSiteError, is_whole, warn
from pyro_bpq.estimators import Estimator, Pathwise, ScoreFunction
from pyro_bpq.estimators.base import SiteInfo
from pyro_bpq.objectives.objective import Objective
from pyro_bpq.objectives.observation import Mode, Observation, Runner
from pyro_bpq.plan.plan import unread_options
from pyro_bpq.record.config import SiteOptions
from pyro_bpq.record.program_errors import left_torch, quoted
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.tracer import trace_run
from pyro_bpq.record.watch import TraceOptions
from pyro_bpq.rollout.runs import Particles, Program
from pyro_bpq.short import changed_options, short
from pyro_bpq.step.surrogate import Step, may_learn

MEANS = ("geometric", "arithmetic", None)
_NO_CRITICS = "TraceBackpropQ_IWAE has no critics. Leave them out, or train with TraceBackpropQ_ELBO."


class TraceBackpropQ_IWAE(Objective):
    r"""Importance-weighted bound on the evidence, with unbiased gradients for sites of any kind.

    .. math::
        J = -E\Big[\log\tfrac1K\sum_k w_k\Big],\quad
        \nabla J = -E\Big[\sum_k (\hat L - \hat L_{-k})\,\nabla\log q(z_k) + \sum_k \tilde w_k\,\nabla\log w_k\Big]

    ``w = exp(log p - log q - costs)`` is the weight of a sample, ``w̃`` the normalised weight, and ``L̂ = log mean w``.
    In ``L̂_-k`` the weight ``w_k`` is replaced by the geometric mean of the other weights, or it is left out
    (arithmetic mean). So ``L̂_-k`` does not depend on ``z_k``. The first term of ``∇J`` is that of the sites that are
    not reparameterised; the other sites have pathwise gradients. There are no other estimators, and no critics.

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
        compile: As in :class:`TraceBackpropQ_ELBO`.

    Raises:
        OptionError: If an option is out of range.
        PlateError: If ``plate`` is not a plate of every site.
        UnsupportedSiteError: If the estimator that a site chose cannot serve it.

    References:
        | Importance Weighted Autoencoders (Burda et al., 2016), Eqs. 8 and 14
        | Variational Inference for Monte Carlo Objectives (Mnih and Rezende, 2016), Eqs. 8 to 11
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
        compile: bool | Backend | Compile = False,
    ) -> None:
        changed = changed_options(TraceBackpropQ_IWAE, locals())
        for name, number in (("num_particles", num_particles), ("num_outer", num_outer)):
            if not is_whole(number, 1):
                raise OptionError(f"{name}={number!r}: write a positive integer.")
        if baseline not in MEANS:
            raise OptionError(f'baseline={baseline!r}: write "geometric", "arithmetic" or None.')
        super().__init__(
            *(None, 0, 1.0, 1.0, compile),
            num_particles=num_particles * num_outer,
            max_plate_nesting=max_plate_nesting,
            vectorize_particles=vectorize_particles,
        )
        self.made_by = f"{type(self).__name__}({', '.join(changed.values())})"
        self.num_outer, self.plate, self.baseline = num_outer, plate, baseline
        self.runner = BoundRunner(plate)

    @property
    def num_inner(self) -> int:
        """Number of samples of one bound."""
        return self.num_particles // self.num_outer

    def _chosen(self) -> list[tuple[str, str, str]] | None:
        return [(name, short(estimator), "none") for name, estimator in self.runner.estimators.items()] or None

    def _why_so_many(self) -> str:
        return f"{self.num_inner} for each bound, because of num_particles; num_outer={self.num_outer} bounds"

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the bound, in nats, of one draw of all samples."""
        with torch.no_grad():
            return float(self.differentiable_loss(model, guide, *args, **kwargs))

    @property
    def _num_draws(self) -> int:
        return self.num_outer

    def _evaluate(self, seen: Observation, mode: Mode) -> Step:
        runs = seen.runs
        loss, paths = self._bound(runs) if any(run.run.costs for run in runs) else (torch.zeros(()), torch.zeros(()))
        learns = mode.learning and may_learn(loss, self.learning(mode))
        return Step(loss, torch.zeros(()), learns=learns, paths=paths)

    def _bound(self, runs: Sequence[TracedRun]) -> tuple[Tensor, Tensor]:
        """The loss, the mean over bounds, and a surrogate with its gradient, the sum over bounds."""
        frames = [None if self.plate is None else _frame(run, self.plate) for run in runs]
        drawn = [index for run in runs for name, index in run.subsamples.items() if name == self.plate]
        if any(not torch.equal(drawn[0], index) for index in drawn[1:]):
            raise PlateError(
                f"Each of the samples of plate {self.plate!r} drew a subsample of its own, so that no row has more "
                "than one. Write vectorize_particles=True, or hand minibatches to the model."
            )
        scale, dim = 1.0, None
        if (frame := frames[0]) is not None:
            # The plate's subsample stands for all.
            dim, is_full = frame.dim, frame.full_size is None or frame.full_size < 0
            scale = 1.0 if is_full else frame.full_size / frame.size
        parts = [self._rows(run, dim, scale) for run in runs]
        shape = self.num_outer, self.num_inner, -1
        log_w, score = (torch.cat(part).reshape(shape) for part in zip(*parts, strict=True))
        loss, surrogate = multi_sample_bound(log_w, score, leave_one_out_signal(log_w, self.baseline))
        return scale * loss / self.num_outer, scale * surrogate

    def _rows(self, traced: TracedRun, dim: int | None, scale: float) -> tuple[Tensor, Tensor]:
        """Log-weights with their gradients, and ``log q`` of the sites that need it, ``(samples, rows)`` each."""
        costs = list(traced.run.costs.values())
        log_w = -sum((self._reduce(cost, dim) for cost in costs), costs[0].new_zeros((1, 1))) / scale
        score = sum((self._reduce(log_q, dim) for log_q in traced.scored.values()), torch.zeros_like(log_w.detach()))
        return log_w, score.expand_as(log_w)

    def _reduce(self, value: Tensor, dim: int | None) -> Tensor:
        """From a batch shape to ``(samples, rows)``."""
        missing = int(self.max_plate_nesting) - value.dim() if self.particles.now.has_plate else 1
        value = value.reshape((1,) * missing + value.shape)
        if dim is not None:
            return value.movedim(dim, 1).reshape(value.shape[0], value.shape[dim], -1).sum(-1)
        return value.reshape(value.shape[0], -1).sum(1, keepdim=True)


class BoundRunner(Runner):
    """Runs the programs of a bound, whose rows are those of a plate if it has a name.

    Attributes:
        estimators: The estimators of the sites that were met last; empty before the first step.
    """

    def __init__(self, plate: str | None) -> None:
        super().__init__("auto", 0)
        self.plate = plate
        self.recordings.crosses = True  # rows that meet are told of in words of its own
        self.estimators: dict[str, Estimator] = {}

    def trace(self, program: Program, particles: Particles, **options: Any) -> TracedRun:
        """Runs a program once, with further options of its trace."""
        given = TraceOptions(_choose, particles.nesting, particles.number, call=self.recordings.call, **options)
        return trace_run(*program, given)

    def observe(self, program: Program, particles: Particles, mode: Mode) -> Observation:
        """The runs of a step."""
        _, runs = self._recorded_runs(program, particles, mode)
        first = runs[0]
        if first.escaped_sites and particles.has_plate and first.scored:
            raise UnsupportedProgramError(left_torch(first.escaped_sites, particles.number))
        if not self.estimators and (unread := unread_options(first, {}, _NO_CRITICS)):
            warn(unread)
        self.estimators = {name: _choose(info, first.options[name]) for name, info in first.infos.items()}
        if first.recorded is not None:
            left = sorted(first.escaped_sites.intersection(first.scored).difference(self.recordings.escaping))
            self.recordings.graph(first, particles.in_call, mode.learning)
            # Rows and particles that meet are told once.
            self.recordings.now.next = math.inf
            mixed = [cost for cost, (plate, _) in first.met.items() if plate == self.plate]
            met = [(f"meet in {cost}: a row reads", "is") for cost in mixed]
            if self.plate is not None and left and torch.is_grad_enabled():
                leaving = f"values of {quoted(left)} leave torch (by .item(), if, .numpy())"
                met.append((f"may meet, as {leaving}: a row may read", "may be"))
            for does, biased in met[:1]:
                warn(
                    f"Rows of the plate {self.plate!r} {does} values of other rows. With "
                    f"plate={self.plate!r} each row has weights of its own, so that the gradient {biased} biased. "
                    "Write plate=None, or keep the rows apart."
                )
        return Observation(tuple(runs))


def _choose(site: SiteInfo, options: SiteOptions) -> Estimator:
    """The estimator of a site: its own option, else pathwise where it is reparameterised."""
    chosen = options.estimator or (Pathwise() if site.has_rsample else ScoreFunction())
    reason = chosen.unsupported(site)
    if reason is None and chosen not in (Pathwise(), ScoreFunction()):
        reason = f"{chosen} is for one-sample objectives; write ScoreFunction() or Pathwise(), or leave it out"
    if reason is None and options.baseline is not None:
        reason = "TraceBackpropQ_IWAE has none of Pyro's baselines; leave them out"
    if reason is not None:
        raise UnsupportedSiteError(f"Site {site.name!r} ({site.distribution}): {reason}.")
    return chosen


def _frame(traced: TracedRun, plate: str) -> Any:
    """Pyro's frame of the plate of the rows, in which all sites have to be."""
    for name, plates, *_ in traced.entries:
        own = [p.name for p in plates]
        if plate not in own:
            raise PlateError(
                f"Site {name!r} is not in the plate {plate!r} (its plates: {own}), so its rows have no weights of "
                "their own; write plate=None."
            )
    nodes = (*traced.guide_trace.nodes.values(), *traced.model_trace.nodes.values())
    return next(frame for node in nodes for frame in node.get("cond_indep_stack", ()) if frame.name == plate)


def multi_sample_bound(log_w: Tensor, score: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
    """Minus the bound, detached, and its surrogate, both summed over outer samples and rows.

    ``score`` is ``log q`` of the sites that are not reparameterised, and ``signal`` that of
    :func:`leave_one_out_signal`, detached; both have the shape of ``log_w``.
    """
    bound = _bound(log_w)
    return -bound.detach().sum(), -(signal * score).sum() - bound.sum()


@torch.no_grad()
def leave_one_out_signal(log_w: Tensor, baseline: str | None) -> Tensor:
    """Signal of each sample, of the shape of ``log_w``: ``L̂ - L̂_-k`` with a baseline of :data:`MEANS`, else ``L̂``.

    ``L̂`` is the logarithm of the mean weight of all samples. In ``L̂_-k`` the weight of sample ``k`` is replaced by
    the geometric or arithmetic mean of the others. A single sample has no baseline.
    """
    signal = _bound(log_w).unsqueeze(1).expand_as(log_w)
    return signal if baseline is None or log_w.shape[1] == 1 else signal - _without_each(log_w, baseline)


def _bound(log_w: Tensor) -> Tensor:
    return log_w.logsumexp(1) - math.log(log_w.shape[1])


def _without_each(log_w: Tensor, baseline: str) -> Tensor:
    """``L̂_-k`` of every sample."""
    number = log_w.shape[1]
    own = torch.eye(number, dtype=torch.bool, device=log_w.device).unsqueeze(-1)
    # (outer, k, samples, rows)
    others = log_w.unsqueeze(1).expand(-1, number, -1, -1)
    arithmetic = others.masked_fill(own, -math.inf).logsumexp(2) - math.log(number - 1)
    if baseline == "arithmetic":
        return arithmetic
    geometric = others.masked_fill(own, 0.0).sum(2) / (number - 1)
    return torch.logaddexp(arithmetic + math.log(number - 1), geometric) - math.log(number)
