"""The unordered-set estimator: costs of several distinct values, whatever their order."""

from __future__ import annotations

import itertools
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
class UnorderedSet(Estimator):
    r"""Averages over the order of draws of a set of distinct values; for a site of one finite component.

        g_X = Σ_{s ∈ S} P(b_1 = s | S) (f(s) - B_s) ∇ log q(s),
        B_s = q(s) f(s) + (1 - q(s)) Σ_{t ≠ s} P(b_2 = t | b_1 = s, S) f(t)

    ``S`` is the set of the first ``k`` values of draws ``b_1, b_2, ...`` without replacement; the sample of this run
    comes first. ``f`` is the cost-to-go in nats. ``B_s`` is a baseline whose mean given ``b_1 = s`` is that of ``f``.
    Unbiased. If there are at most ``k`` values, it sums over all of them. It needs ``k - 1`` more runs of guide and
    model for every site and particle, or as many for every row if a cost reads several plate rows. It also sums over
    ``k!`` orders.

    Args:
        samples: Number of values ``k``, from 2 to 6.

    References:
        Estimating gradients for discrete random variables by sampling without replacement (Kool et al., 2020)
    """

    samples: int = 4

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})
    unsupported = needs_single

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights the log-probabilities of the set."""
        log_probs, index = context.table[0].squeeze(-2), context.table[1]
        with torch.no_grad():
            size = min(self.samples, log_probs.shape[-1])
            rest = log_probs + gumbel(log_probs, context.program.generator)
            rest = rest.scatter(-1, index, float("-inf"))
            chosen = torch.cat((index, rest.topk(size - 1, -1).indices), -1)
            f = torch.stack([context.cost, *(_cost_at(context, z.unsqueeze(-1)) for z in chosen.unbind(-1)[1:])], -1)
            q = log_probs.exp().gather(-1, chosen)
            first, second = orders(q)
            baseline = q * f + (1.0 - q) * (second * f.unsqueeze(-2)).sum(-1)
            weights = torch.zeros_like(log_probs).scatter_(-1, chosen, first * (f - baseline))
        return SiteTerm(weights * log_probs)


def _cost_at(context: SiteContext, index: Tensor) -> Tensor:
    """Costs-to-go ``(G, M, plates)`` at the values of an index ``(G, M, plates, 1)``."""
    return cost_per_row(context.program, context.program.from_index(index), context.cost.dim())


def orders(q: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities ``P(b_1 = s | S)``, ``(..., k)``, and ``P(b_2 = t | b_1 = s, S)``, ``(..., k, k)``, from ``q``."""
    # A value of probability zero is drawn only after all other values.
    p = q.double().clamp(min=1e-40)
    size = p.shape[-1]
    if size == 1:
        return torch.ones_like(q), torch.zeros_like(q).unsqueeze(-1)
    pairs = p.new_zeros(*p.shape, size)
    for order in itertools.permutations(range(size)):
        left, total = torch.ones_like(p[..., 0]), torch.ones_like(p[..., 0])
        for s in order:
            total = total * (p[..., s] / torch.maximum(left, p[..., s]))
            left = left - p[..., s]
        pairs[..., order[0], order[1]] += total
    firsts = pairs.sum(-1)
    first = firsts / firsts.sum(-1, keepdim=True)
    return first.to(q.dtype), (pairs / firsts.unsqueeze(-1)).to(q.dtype)


def model() -> None:
    z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.1, 0.3, 0.25, 0.15])))
    pyro.sample("x", dist.Normal(z * 0.8, 1.0), obs=torch.tensor(1.4))


def guide() -> None:
    logits = pyro.param("logits", torch.tensor([0.4, -0.3, 0.1, -0.8, 0.6]))
    pyro.sample("z", dist.Categorical(logits=logits))


if __name__ == "__main__":
    svi = SVI(model, guide, Adam({"lr": 0.05}), TraceBackpropQ_ELBO(1, estimator=UnorderedSet(samples=3)))
    print("mean loss of 200 steps:", sum(svi.step() for _ in range(200)) / 200)
