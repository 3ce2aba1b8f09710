r"""Baselines: numbers subtracted from the cost-to-go that do not depend on the value of the site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from pyro_bpq.estimators.base import SiteInfo, Statistics, check_decay, site_mean, update_mean


@runtime_checkable
class Baseline(Protocol):
    """Subtracts from a cost-to-go a prediction of its mean that does not depend on the site's value."""

    def unsupported(self, site: SiteInfo) -> str | None:
        """Reason why the site cannot be served, or ``None`` if it can."""
        ...

    def statistics(self) -> Statistics:
        """Running statistics that the baseline keeps, with their initial values."""
        ...

    def __call__(
        self, cost: Tensor, statistics: Mapping[str, Tensor], count: Tensor | None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The centred cost and new statistics."""
        ...


def leave_one_out(cost: Tensor) -> Tensor:
    """Subtracts the mean over the other particles.

        C_i - 1/(M-1) Σ_{j≠i} C_j = M/(M-1) (C_i - mean C)

    Args:
        cost: Shape ``(G, M, ...)``, ``M > 1``.

    Returns:
        Tensor of the same shape.
    """
    particles = cost.shape[1]
    return (cost - cost.mean(1, keepdim=True)) * (particles / (particles - 1.0))


@dataclass(frozen=True)
class ConstantBaseline:
    """A constant that the user supplies.

    Args:
        value: The number, in nats. It is a cost, so its sign is opposite to that of Pyro's objective.
    """

    value: float = 0.0

    def unsupported(self, site: SiteInfo) -> str | None:
        """Serves every site."""
        return None

    def statistics(self) -> Statistics:
        """No running statistics."""
        return {}

    def __call__(
        self, cost: Tensor, statistics: Mapping[str, Tensor], count: Tensor | None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Subtracts the number."""
        return cost - self.value, {}


@dataclass(frozen=True)
class LeaveOneOut:
    """The mean cost-to-go of the other particles at the same data point; needs two particles.

    If sampled values steer a program, its particles may have different sites. A site with a single particle then uses
    the running mean of earlier steps instead.

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

    def __call__(
        self, cost: Tensor, statistics: Mapping[str, Tensor], count: Tensor | None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Subtracts the mean over the other particles, if there are any."""
        if cost.shape[1] == 1:
            return RunningBaseline()(cost, statistics, count)
        return leave_one_out(cost), {}


@dataclass(frozen=True)
class RunningBaseline:
    r"""A running mean of the cost-to-go of earlier steps, one number per site.

        b ← b + max(1/(n+1), 1 - decay) (mean C - b)

    It averages over plate rows, so that batches of any size and order go together.

    Args:
        decay: Weight of the past, in ``[0, 1)``.

    Raises:
        OptionError: If an option is out of range.
    """

    decay: float = 0.95

    def __post_init__(self) -> None:
        check_decay("RunningBaseline", self.decay)

    def unsupported(self, site: SiteInfo) -> str | None:
        """Serves every site."""
        return None

    def statistics(self) -> Statistics:
        """The running mean."""
        return {"baseline": 0.0}

    def __call__(
        self, cost: Tensor, statistics: Mapping[str, Tensor], count: Tensor | None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Subtracts the mean of earlier steps."""
        assert count is not None
        mean = statistics["baseline"]
        centred = cost - mean.reshape(-1, *(1,) * (cost.dim() - 1))
        return centred, {"baseline": update_mean(mean, site_mean(cost), count, self.decay)}
