r"""Baselines: numbers subtracted from the cost-to-go that do not depend on the value of the site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyro_bpq.errors import check_option
from pyro_bpq.estimators.base import Estimator, SiteInfo, Statistics, check_decay, site_mean, update_mean

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

    def __call__(self, cost: Tensor, statistics: Mapping[str, Tensor], count: Tensor | None) -> Centred:
        """The centred cost and new statistics."""
        ...


def check_baseline(owner: Any) -> None:
    """Raises an OptionError if the field ``baseline`` is neither ``None`` nor a baseline."""
    given = owner.baseline
    # Estimators have the methods of a baseline too.
    is_valid = given is None or (isinstance(given, Baseline) and not isinstance(given, (type, Estimator)))
    check_option(owner, "baseline", is_valid, "a baseline, e.g. LeaveOneOut() or RunningBaseline(), or None")


def leave_one_out(cost: Tensor) -> Tensor:
    """Subtracts the mean over the other particles, in dimension 1 of ``cost``."""
    particles = cost.shape[1]
    return (cost - cost.mean(1, keepdim=True)) * (particles / (particles - 1.0))


@dataclass(frozen=True)
class ConstantBaseline(Baseline):
    """A constant that the user supplies.

    Args:
        value: The number, in nats. It is a cost, so its sign is opposite to that of Pyro's objective.
    """

    value: float = 0.0

    def __call__(self, cost: Tensor, statistics: Mapping[str, Tensor], count: Tensor | None) -> Centred:
        """Subtracts the number."""
        return cost - self.value, {}


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
        if site.num_particles < 2:
            return (
                "LeaveOneOut() needs at least two particles: write TraceBackpropQ_ELBO(num_particles=2, ...) "
                "or ScoreFunction(baseline=RunningBaseline())"
            )
        return None

    def statistics(self) -> Statistics:
        """Running statistics of :class:`RunningBaseline`."""
        return RunningBaseline().statistics()

    def __call__(self, cost: Tensor, statistics: Mapping[str, Tensor], count: Tensor | None) -> Centred:
        """Subtracts the mean over the other particles, if there are any."""
        if cost.shape[1] == 1:
            return RunningBaseline()(cost, statistics, count)
        return leave_one_out(cost), {}


@dataclass(frozen=True)
class RunningBaseline(Baseline):
    r"""A running mean of the cost-to-go of earlier steps and of plate rows, one number per site.

        b ← b + max(1/(n+1), 1 - decay) (mean C - b)

    Args:
        decay: Weight of the past, in ``[0, 1)``.
    """

    decay: float = 0.95

    def __post_init__(self) -> None:
        check_decay(self)

    def statistics(self) -> Statistics:
        """The running mean."""
        return {"baseline": 0.0}

    def __call__(self, cost: Tensor, statistics: Mapping[str, Tensor], count: Tensor | None) -> Centred:
        """Subtracts the mean of earlier steps."""
        assert count is not None
        mean = statistics["baseline"]
        centred = cost - mean.reshape(-1, *(1,) * (cost.dim() - 1))
        return centred, {"baseline": update_mean(mean, site_mean(cost), count, self.decay)}


@dataclass(frozen=True)
class TrimmedBaseline(Baseline):
    r"""The mean of the last 32 costs-to-go of earlier steps without the 4 largest and the 4 smallest, one per site.

    Unlike a running mean it leaves outliers out. Until there are 32 costs it is their median. The costs are means over
    plate rows.
    """

    recent: ClassVar[int] = 32
    cut: ClassVar[int] = 4

    def statistics(self) -> Statistics:
        """The baseline, and the costs-to-go that it is made of, the last one at the end."""
        return {"baseline": 0.0, "recent": (0.0,) * self.recent}

    def __call__(self, cost: Tensor, statistics: Mapping[str, Tensor], count: Tensor | None) -> Centred:
        """Subtracts the trimmed mean of earlier steps."""
        assert count is not None
        centred = cost - statistics["baseline"].reshape(-1, *(1,) * (cost.dim() - 1))
        recent = torch.cat([statistics["recent"][:, 1:], site_mean(cost).unsqueeze(1)], 1)
        trimmed = recent.sort(1).values[:, self.cut : -self.cut].mean(1)
        known = torch.arange(self.recent, device=cost.device) >= self.recent - 1.0 - count.unsqueeze(1)
        median = torch.where(known, recent, torch.nan).nanmedian(1).values
        baseline = torch.where(count < self.recent - 1.0, median, trimmed)
        return centred, {"baseline": baseline, "recent": recent}
