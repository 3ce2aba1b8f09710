r"""Score-function estimators, the centred cost-to-go times ``log q``, and the baselines that centre it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyro_bpq.errors import Checked, option
from pyro_bpq.estimators.base import (
    Estimator,
    SiteContext,
    SiteInfo,
    SiteTerm,
    Statistics,
    past,
    site_mean,
    unit_scale,
    update_mean,
)
from pyro_bpq.estimators.requirements import needs_particles

# The centred cost, and new running statistics.
Centred = tuple[Tensor, Mapping[str, Tensor]]


@runtime_checkable
class Baseline(Protocol):
    """Subtracts from a cost-to-go a prediction of its mean that does not depend on the site's value."""

    def unsupported(self, site: SiteInfo) -> str | None:
        """Reason why the site cannot be served, or ``None`` if it can."""
        return None

    def statistics(self) -> Statistics:
        """Running statistics that the baseline keeps, with their initial values."""
        return {}

    def __call__(self, cost: Tensor, statistics: Mapping[str, Tensor], count: Tensor) -> Centred:
        """The centred cost and new statistics."""
        ...


def leave_one_out(cost: Tensor, dims: tuple[int, ...] = (1,)) -> Tensor:
    """Subtracts the mean over the other particles, or over the other samples of some dimensions.

    Args:
        cost: Costs-to-go ``(G, M, plates)``, in nats, of two particles or more.
        dims: These dimensions.

    Returns:
        Costs of the same shape, less their baselines.
    """
    number = math.prod(cost.shape[dim] for dim in dims)
    return (cost - cost.mean(dims, keepdim=True)) * (number / (number - 1.0))


@dataclass(frozen=True)
class LeaveOneOut(Baseline):
    """The mean cost-to-go of the other particles at the same data point; needs two particles.

    If sampled values steer a program, a site may have a single particle. It then uses the running mean of earlier
    steps.

    References:
        | Buy 4 REINFORCE samples, get a baseline for free (Kool et al., 2019)
        | Variational inference for Monte Carlo objectives (Mnih and Rezende, 2016)
    """

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs two particles."""
        refused = needs_particles(self, site)
        return refused and f"{refused} or ScoreFunction(baseline=RunningBaseline())"

    def statistics(self) -> Statistics:
        """Running statistics of :class:`RunningBaseline`."""
        return {"baseline": 0.0}

    def __call__(self, cost: Tensor, statistics: Mapping[str, Tensor], count: Tensor) -> Centred:
        """Subtracts the mean over the other particles, if there are any."""
        if cost.shape[1] == 1:
            return RunningBaseline()(cost, statistics, count)
        return leave_one_out(cost), {}


@dataclass(frozen=True)
class RunningBaseline(Checked, Baseline):
    r"""A running mean of the cost-to-go of earlier steps and of plate rows, one number per site.

        b ← b + max(1/(n+1), 1 - decay) (mean C - b)

    Args:
        decay: Weight of the past, in ``[0, 1)``.
    """

    decay: float = past(0.95)

    def statistics(self) -> Statistics:
        """The running mean."""
        return {"baseline": 0.0}

    def __call__(self, cost: Tensor, statistics: Mapping[str, Tensor], count: Tensor) -> Centred:
        """Subtracts the mean of earlier steps."""
        mean = statistics["baseline"]
        centred = cost - mean.reshape(-1, *(1,) * (cost.dim() - 1))
        return centred, {"baseline": update_mean(mean, site_mean(cost), count, self.decay)}


@dataclass(frozen=True)
class TrimmedBaseline(Baseline):
    r"""The mean of the last 32 costs-to-go of earlier steps without the 4 largest and the 4 smallest, one per site.

    Unlike a running mean it leaves outliers out. Until there are 32 costs it is their median. The costs are means over
    plate rows. With ten rows or more whose costs do not depend on each other, the mean over the other rows takes its
    place.
    """

    recent: ClassVar[int] = 32
    cut: ClassVar[int] = 4

    def statistics(self) -> Statistics:
        """The baseline, and the costs-to-go that it is made of, the last one at the end."""
        return {"baseline": 0.0, "recent": (0.0,) * self.recent}

    def __call__(self, cost: Tensor, statistics: Mapping[str, Tensor], count: Tensor) -> Centred:
        """Subtracts the trimmed mean of earlier steps."""
        centred = cost - statistics["baseline"].reshape(-1, *(1,) * (cost.dim() - 1))
        recent = torch.cat([statistics["recent"][:, 1:], site_mean(cost).unsqueeze(1)], 1)
        trimmed = recent.sort(1).values[:, self.cut : -self.cut].mean(1)
        known = torch.arange(self.recent, device=cost.device) >= self.recent - 1.0 - count.unsqueeze(1)
        median = torch.where(known, recent, torch.nan).nanmedian(1).values
        baseline = torch.where(count < self.recent - 1.0, median, trimmed)
        return centred, {"baseline": baseline, "recent": recent}


def baseline_option() -> Any:
    """An option: a baseline or none."""

    def is_valid(given: Any) -> bool:
        # Estimators have the methods of a baseline too.
        return given is None or (isinstance(given, Baseline) and not isinstance(given, (type, Estimator)))

    return option(None, is_valid, "a baseline, e.g. LeaveOneOut() or RunningBaseline(), or None")


class WithBaseline(Estimator):
    """Base of the estimators with a field ``baseline``. Unbiased."""

    baseline: Baseline | None

    is_unbiased: ClassVar[bool] = True

    def unsupported(self, site: SiteInfo) -> str | None:
        """Serves every site that its baseline serves."""
        return None if self.baseline is None else self.baseline.unsupported(site)

    def statistics(self) -> Statistics:
        """Running statistics of the baseline."""
        return {} if self.baseline is None else self.baseline.statistics()

    def centred(self, cost: Tensor, context: SiteContext) -> Centred:
        """The cost minus the baseline, and new running statistics."""
        if self.baseline is None:
            return cost, {}
        centred, statistics = self.baseline(cost, context.statistics, context.count)
        if isinstance(self.baseline, TrimmedBaseline) and context.others:
            centred = leave_one_out(cost, context.others)  # a later step may have too few rows
        return centred, statistics


@dataclass(frozen=True)
class ScoreFunction(WithBaseline):
    r"""Score function (REINFORCE, likelihood ratio), for any site.

        g_X = (C_X - b) ∇ log q(x)

    ``C_X`` is the cost-to-go of this run. Without a baseline this is the estimator of ``TraceGraph_ELBO``.

    Args:
        baseline: ``None``, :class:`LeaveOneOut`, :class:`RunningBaseline` or :class:`TrimmedBaseline`. For a baseline
            that depends on the data see :class:`CriticBaseline`.

    References:
        | Simple statistical gradient-following algorithms (Williams, 1992)
        | Backprop-Q (Xu et al., 2018), Eq. 18
    """

    baseline: Baseline | None = baseline_option()

    needs = frozenset[str]()
    by_component = True

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The centred cost-to-go times ``log q``."""
        cost, statistics = self.centred(context.cost, context)
        return SiteTerm(cost * context.score, statistics)


@dataclass(frozen=True)
class PyroBaseline(WithBaseline):
    r"""Score function with a baseline ``b`` from a network or a tensor of the user, ``infer={"baseline": {...}}``.

        g_X = (C_X - b - r) ∇ log q(x),    loss of the baseline: (C_X - b - r)²

    The user's optimiser trains the baseline, as in ``TraceGraph_ELBO``: the baseline's loss is part of the surrogate.
    ``r`` is a further baseline, a :class:`RunningBaseline` or none.
    """

    baseline: Baseline | None = baseline_option()

    needs = frozenset({"baseline", "table"})

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The centred cost-to-go times ``log q``, and the loss of the baseline."""
        cost, statistics = self.centred(context.cost, context)
        residual = cost - context.signals["baseline"]
        return SiteTerm(residual.detach() * context.score + residual.square(), statistics)


@dataclass(frozen=True)
class SecondRun(Estimator):
    r"""Score function whose baseline is the cost-to-go of an independent run on the same data.

        g_X = (C_X - b - a (C'_X - b)) ∇ log q(x),    a = Cov(C_X, C'_X) / Var(C_X) in [0, 1]

    ``C'_X`` is the cost-to-go, in nats, of a run that draws every site afresh, without gradients. It estimates the mean
    cost of this data point. The mean ``b`` and the scale ``a`` come from earlier steps, over plate rows. ``a`` is the
    share of the cost's variance that is due to the data. Unbiased, for any site. One more run of guide and model for
    each particle serves all sites. With several particles, leave-one-out gives the same without an extra run.

    Args:
        decay: Weight of the past in the running moments, in ``[0, 1)``.

    References:
        Buy 4 REINFORCE samples, get a baseline for free (Kool et al., 2019)
    """

    decay: float = past(0.99)

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program"})
    takes_outdated: ClassVar[bool] = True
    by_component = True

    def statistics(self) -> Statistics:
        """Running mean, and second moments of a pair of runs."""
        return {"mean": 0.0, "square": 1.0, "product": 1.0}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The centred cost-to-go times ``log q``."""
        cost, second, old = context.cost, context.program.independent(), context.statistics
        variance, covariance = (old[name] - old["mean"].square() for name in ("square", "product"))
        # With zero variance, or before any step, the second run is as good as any other baseline: the scale is 1.
        scale = unit_scale(covariance, variance).masked_fill(variance <= 0.0, 1.0)
        first, other = (tensor - context.per_site(old["mean"]) for tensor in (cost, second))
        new = {"mean": 0.5 * (cost + second), "product": cost * second}
        new["square"] = 0.5 * (cost.square() + second.square())
        return SiteTerm(
            (first - context.per_site(scale) * other) * context.score,
            {name: context.running_mean(name, site_mean(tensor), self.decay) for name, tensor in new.items()},
        )


@dataclass(frozen=True)
class CrossedLeaveOneOut(Estimator):
    r"""Score function whose baseline is the cost of other particles' values given this particle's past.

        g_X = (C_i - C̄_i - a (Δ_i - d)) ∇ log q(x_i),    a = Cov(C_i - C̄_i, Δ_i) / Var(Δ_i) in [0, 1],  d = E[Δ_i]

    ``C_i`` is the cost-to-go of particle ``i``, and ``C̄_i`` is the mean cost-to-go of the other particles. ``Δ_i``, in
    nats, is the change of that mean when everything that does not depend on ``X`` is set to its state in particle
    ``i``. ``Δ_i`` needs no further run for log-probabilities at sites of finite support whose law reads only the past,
    such as ``log q(x_j | past_i)``, or whose value lies in the past, such as ``log p(past_i | x_j)``. In a layered
    model it shows how well a layer explains the layer below it in the same particle. ``a`` and ``d`` come from earlier
    steps, over plate rows. If nothing is sampled before a site, this is leave-one-out. Unbiased.

    Use it for layers of many units. With few units leave-one-out can have less variance, because its terms cancel
    where two particles have the same value.

    Args:
        decay: Weight of the past in the running moments, in ``[0, 1)``.

    References:
        | Buy 4 REINFORCE samples, get a baseline for free (Kool et al., 2019), for leave-one-out
        | Neural variational inference and learning in belief networks (Mnih and Gregor, 2014), for signals by layer
    """

    decay: float = past(0.99)

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"crossed"})
    unsupported = LeaveOneOut.unsupported

    def statistics(self) -> Statistics:
        """Moments of the change, and those of leave-one-out."""
        return {**LeaveOneOut().statistics(), "moments": (0.0, 0.0, 0.0)}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The centred cost-to-go times ``log q``."""
        change = context.crossed
        if change is None or context.cost.shape[1] == 1:
            return ScoreFunction(LeaveOneOut())(context)
        centred = leave_one_out(context.cost)
        mean, product, square = context.statistics["moments"].unbind(1)
        # Other particles' values cost more on average with this particle's past. That mean change is no information.
        scale = context.per_site(unit_scale(product, square - mean.square()))
        new = torch.stack((change, centred * change, change.square()), -1).flatten(1, -2).mean(1)
        return SiteTerm(
            (centred - scale * (change - context.per_site(mean))) * context.score,
            {"moments": context.running_mean("moments", new, self.decay)},
        )
