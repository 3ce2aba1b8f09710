r"""Sum-and-sample: sums the most likely values exactly and samples the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm
from pyro_bpq.estimators.noise import gumbel
from pyro_bpq.estimators.requirements import needs_single
from pyro_bpq.estimators.substitution import cost_per_row


@dataclass(frozen=True)
class SumAndSample(Estimator):
    r"""Sums the ``k`` most likely values exactly and samples the rest; for a site of one finite component.

        g_X = Σ_{z ∈ C} ∇q(z) (f(z) - b) + (1 - q(C)) (f(v) - b) ∇ log q(v),    v ~ q(· | not C)

    ``C`` is the set of the ``k`` most likely values, ``f`` is the cost-to-go in nats, ``b`` is the mean of ``f`` over
    ``C``. ``v`` is the sample of this run if it lies outside ``C``, else a fresh sample. Unbiased. If there are at most
    ``k`` values, it sums over all of them. It needs ``k + 1`` more runs of guide and model for every site and
    particle. If a cost reads several plate rows, it needs as many runs for every row.

    Args:
        heaviest: Number ``k`` of values that are summed exactly.

    Raises:
        OptionError: If an option is out of range.

    References:
        Rao-Blackwellized stochastic gradients for discrete distributions (Liu et al., 2019)
    """

    heaviest: int = 4

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})

    def __post_init__(self) -> None:
        if self.heaviest < 1:
            raise OptionError(f"SumAndSample(heaviest={self.heaviest!r}): write a positive number.")

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs a single finite component."""
        return needs_single("SumAndSample", site)

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights the log-probabilities of the most likely values and of the sample."""
        assert context.log_probs is not None and context.index is not None
        program, ndim = context.program, context.cost.dim()
        log_probs = context.log_probs.squeeze(-2)
        with torch.no_grad():
            heavy = log_probs.topk(min(self.heaviest, log_probs.shape[-1]), -1).indices
            costs = torch.stack(
                [cost_per_row(program, program.from_index(z.unsqueeze(-1)), ndim) for z in heavy.unbind(-1)], -1
            )
            probs = log_probs.exp().gather(-1, heavy)
            inside = probs.sum(-1, keepdim=True)
            baseline = (probs * costs).sum(-1, keepdim=True) / inside
            weights = torch.zeros_like(log_probs).scatter_(-1, heavy, probs * (costs - baseline))
            if heavy.shape[-1] < log_probs.shape[-1]:
                is_inside = (context.index == heavy).any(-1, keepdim=True)
                rest = log_probs.scatter(-1, heavy, float("-inf"))
                fresh = (rest + gumbel(rest, program.generator)).argmax(-1, keepdim=True)
                outside = torch.where(is_inside, fresh, context.index)
                cost = context.cost.unsqueeze(-1)
                if bool(is_inside.any()):
                    found = cost_per_row(program, program.from_index(outside), ndim)
                    cost = torch.where(is_inside, found.unsqueeze(-1), cost)
                # The mass outside C is computed as a sum, because 1 - q(C) would lose precision.
                mass = rest.exp().sum(-1, keepdim=True)
                weights = weights.scatter_add(-1, outside, mass * (cost - baseline))
        return SiteTerm(weights * log_probs)
