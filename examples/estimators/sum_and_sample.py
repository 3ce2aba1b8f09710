"""Sum-and-sample: the most likely values exactly, the rest by one sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import Estimator, SiteContext, SiteTerm, cost_per_row, gumbel, needs_single


@dataclass(frozen=True)
class SumAndSample(Estimator):
    r"""Sums the ``k`` most likely values exactly and samples the rest; for a site of one finite component.

        g_X = Σ_{z ∈ C} ∇q(z) (f(z) - b) + (1 - q(C)) (f(v) - b) ∇ log q(v),    v ~ q(· | not C)

    ``C`` is the set of the ``k`` most likely values, ``f`` is the cost-to-go in nats, ``b`` is the mean of ``f`` over
    ``C``. ``v`` is the sample of this run if it lies outside ``C``, else a fresh sample. Unbiased. If there are at most
    ``k`` values, it sums over all of them. It needs ``k + 1`` more runs of guide and model for every site and
    particle. If a cost reads several plate rows, it needs as many runs for every row.

    Args:
        heaviest: Number ``k`` of values that are summed exactly, at least one.

    References:
        Rao-Blackwellized stochastic gradients for discrete distributions (Liu et al., 2019)
    """

    heaviest: int = 4

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})
    unsupported = needs_single

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights the log-probabilities of the most likely values and of the sample."""
        log_probs, index = context.table[0].squeeze(-2), context.table[1]
        with torch.no_grad():
            heavy = log_probs.topk(min(self.heaviest, log_probs.shape[-1]), -1).indices
            costs = torch.stack([_cost_at(context, z.unsqueeze(-1)) for z in heavy.unbind(-1)], -1)
            probs = log_probs.exp().gather(-1, heavy)
            baseline = (probs * costs).sum(-1, keepdim=True) / probs.sum(-1, keepdim=True)
            weights = torch.zeros_like(log_probs).scatter_(-1, heavy, probs * (costs - baseline))
            if heavy.shape[-1] < log_probs.shape[-1]:
                is_inside = (index == heavy).any(-1, keepdim=True)
                rest = log_probs.scatter(-1, heavy, float("-inf"))
                fresh = (rest + gumbel(rest, context.program.generator)).argmax(-1, keepdim=True)
                outside = torch.where(is_inside, fresh, index)
                cost = context.cost.unsqueeze(-1)
                if bool(is_inside.any()):
                    cost = torch.where(is_inside, _cost_at(context, outside).unsqueeze(-1), cost)
                # A sum, because 1 - q(C) would lose precision.
                mass = rest.exp().sum(-1, keepdim=True)
                weights = weights.scatter_add(-1, outside, mass * (cost - baseline))
        return SiteTerm(weights * log_probs)


def _cost_at(context: SiteContext, index: Tensor) -> Tensor:
    """Costs-to-go ``(G, M, plates)`` at the values of an index ``(G, M, plates, 1)``."""
    return cost_per_row(context.program, context.program.from_index(index), context.cost.dim())


def model() -> None:
    z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.1, 0.3, 0.25, 0.15])))
    pyro.sample("x", dist.Normal(z * 0.8, 1.0), obs=torch.tensor(1.4))


def guide() -> None:
    logits = pyro.param("logits", torch.tensor([0.4, -0.3, 0.1, -0.8, 0.6]))
    pyro.sample("z", dist.Categorical(logits=logits))


if __name__ == "__main__":
    svi = SVI(model, guide, Adam({"lr": 0.05}), TraceBackpropQ_ELBO(1, estimator=SumAndSample(heaviest=2)))
    print("mean loss of 200 steps:", sum(svi.step() for _ in range(200)) / 200)
