r"""The figures that tools return: moments of the gradient, and the quality of critics."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field

from torch import Tensor

from pyro_bpq.short import number, table
from pyro_bpq.testing import Moments

_LEGEND = (
    "explained variance compares the critic's predictions with the costs that then came, between samples of the same",
    "    data point: 1 if it predicts all of their differences, 0 if no more than a constant does.",
    "cosine and difference compare the gradient that the critic alone would give with the site's true gradient:",
    "    1 and 0 if they are the same; a constant critic has difference 1.",
    "Costs that are known exactly at every value are left out of both.",
)


@dataclass(frozen=True)
class GradientMoments:
    r"""Moments of the gradient of one step.

    Args:
        mean: Mean of the gradient of the loss by parameter, in nats per unit, in the parameter's shape, detached.
        variance: Variance of a single step's gradient, in the same form.
        sites: Mean and variance of each site's summand. The means add up to the mean gradient; the variances do not
            add up if summands are correlated. ``COSTS`` names the rest. Empty if the ELBO has no such summands.
        num_samples: Number of steps that were run.
        is_exact: Whether these steps were all outcomes of a step, weighted by their probability.
        total_variance_error: Standard error of the total variance; 0 if exact.
        site_variance_errors: Standard error of the total variance of each site's summand.
    """

    mean: dict[str, Tensor]
    variance: dict[str, Tensor]
    sites: dict[str, Moments]
    num_samples: int
    is_exact: bool
    total_variance_error: float = 0.0
    site_variance_errors: dict[str, float] = field(default_factory=dict)

    @property
    def standard_error(self) -> dict[str, Tensor]:
        """Standard error of the mean; zero if exact."""
        scale = 0.0 if self.is_exact else 1.0 / self.num_samples
        return {name: (variance * scale).sqrt() for name, variance in self.variance.items()}

    @property
    def total_variance(self) -> float:
        """Sum of the variances of all components."""
        return sum(float(variance.sum()) for variance in self.variance.values())

    @property
    def signal_to_noise(self) -> float:
        r"""Squared norm of the mean, less its sampling noise, over the total variance."""
        return self._ratio(self.mean, self.total_variance)

    def site_ratios(self) -> dict[str, float]:
        """The same of each site's summand, where that varies."""
        found = {site: (part.mean, part.total_variance) for site, part in self.sites.items()}
        return {site: self._ratio(mean, noise) for site, (mean, noise) in found.items() if noise > 0}

    def _ratio(self, mean: dict[str, Tensor], noise: float) -> float:
        signal = sum(float(part.square().sum()) for part in mean.values())
        if not self.is_exact:
            signal = max(0.0, signal - noise / self.num_samples)
        return signal / noise if noise > 0 else math.inf

    def site_shares(self) -> dict[str, float]:
        """Share of each site's summand in the sum of variances, largest first; empty if the sum is zero."""
        found = {site: moments.total_variance for site, moments in self.sites.items()}
        total = sum(found.values())
        ordered = sorted(found.items(), key=lambda item: -item[1])
        return {site: variance / total for site, variance in ordered} if total > 0 else {}

    def __str__(self) -> str:
        how = f"all {self.num_samples} outcomes" if self.is_exact else f"{self.num_samples} sampled steps"
        rows = [[n, number(float(self.mean[n].norm())), number(float(v.sum()))] for n, v in self.variance.items()]
        lines = table(["parameter", "|mean|", "variance"], rows)
        if self.sites:
            shares = self.site_shares()
            parts = [[site, number(self.sites[site].total_variance), f"{share:.0%}"] for site, share in shares.items()]
            lines += ["", *table(["site", "variance", "share"], parts)]
        error = "" if self.is_exact else f" ± {number(self.total_variance_error)}"
        total = f"total variance {number(self.total_variance)}{error}, signal to noise {number(self.signal_to_noise)}"
        return "\n".join([f"Gradient of one step, from {how}: {total}", "", *lines])


@dataclass(frozen=True)
class Fit:
    r"""Quality of the critic of a site.

    Args:
        explained: Explained variance within a data point, ``1 - Var(target - q) / Var(target)``: it compares the
            critic's predictions with the costs that then came, between samples of the same data point. These costs
            are the target, the return with graph-wise corrections (lambda = 1) and without the costs that are known
            exactly. A constant critic has 0.
        cosine: Cosine between the critic's all-action gradient and its reference. The reference is the site's true
            gradient without the part of the exact immediate costs. ``None`` if there is no all-action gradient, or if
            the reference is zero up to noise.
        difference: Norm of the difference between the critic's gradient and the reference, over the norm of the
            reference, or ``None``. A constant critic has 1.
        difference_error: Size that the difference would have from sampling alone; 0 if exact.
    """

    explained: float | None = None
    cosine: float | None = None
    difference: float | None = None
    difference_error: float = 0.0


@dataclass(frozen=True)
class CriticFit:
    """Quality of the critics of a program.

    Args:
        sites: Quality of each critic, by name of the site.
        moments: Moments of the gradient, from the same runs.
    """

    sites: dict[str, Fit]
    moments: GradientMoments

    def __str__(self) -> str:
        how = "exact" if self.moments.is_exact else f"from {self.moments.num_samples} steps"
        rows = [[site, *map(number, astuple(fit))] for site, fit in self.sites.items()]
        head = ["site", "explained variance", "cosine", "difference", "its error"]
        return "\n".join([f"Critics ({how}):", *table(head, rows), *_LEGEND])
