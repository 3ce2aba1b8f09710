r"""Straight-through: the sampled value with the gradient of a probability. Biased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm
from pyro_bpq.estimators.requirements import needs_float_value


@dataclass(frozen=True)
class StraightThrough(Estimator):
    r"""The sampled value, with the gradient of its mean. Biased; a reference.

        z = b + p - stop(p)

    Serves Bernoulli and OneHotCategorical, also in ``to_event``, whose costs are differentiable in the value. The
    gradient through ``log q`` of a OneHotCategorical with respect to its value is zero, as torch computes it.

    References:
        | Estimating or propagating gradients through stochastic neurons for conditional computation
          (Bengio et al., 2013)
    """

    is_unbiased: ClassVar[bool] = False
    is_pathwise: ClassVar[bool] = True
    attaches: ClassVar[bool] = True

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs values that can carry a gradient."""
        return needs_float_value("StraightThrough", site)

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value, with the gradient of the distribution's mean."""
        mean = fn.mean
        return value + (mean - mean.detach())

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Returns a zero term: the value carries the gradient."""
        return SiteTerm(context.score.new_zeros(()))
