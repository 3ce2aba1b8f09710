"""DisARM-Tree: antithetic decisions on the way through a balanced tree of values."""

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
from pyro_bpq.estimators import Estimator, SiteContext, SiteTerm, needs_finite, uniform, uniform_given


@dataclass(frozen=True)
class DisARMTree(Estimator):
    r"""Compares the sample with one that is antithetic in every binary decision of a balanced tree.

    A value ``z`` of a component is a path through the tree. At node ``n`` the path goes right with probability
    ``σ(α_n)``, the share of the right subtree in the probability of node ``n``. The partner ``z̃`` takes antithetic
    decisions. With ``f`` the cost-to-go in nats,

        g = ½ (f(z) - f(z̃)) Σ_n w_n ∇α_n,
        w_n = (b_n - b̃_n) σ(|α_n|)  on both paths,  b_n - σ(α_n)  on that of z only,  σ(α_n) - b̃_n  on that of z̃ only

    This is DisARM for all decisions of the tree, averaged over the decisions off the paths. Unbiased. It needs one more
    run of guide and model for every site and particle. With two values it is DisARM.

    References:
        Coupled gradient estimators for discrete latent variables (Dong et al., 2021), DisARM-Tree
    """

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})
    unsupported = needs_finite

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Half the difference of the costs times the logits along both paths."""
        log_probs, index = context.table
        levels, program = _levels(log_probs), context.program
        own, other = torch.zeros_like(index), torch.zeros_like(index)
        terms = []
        for level, logits in enumerate(levels):
            # z passes node `own` of this level; the next bit of z says where it goes.
            at_own, at_other = _at(logits, own), _at(logits, other)
            with torch.no_grad():
                b = (index >> (len(levels) - 1 - level)) & 1
                p, q = at_own.sigmoid(), at_other.sigmoid()
                together = own == other
                antithetic = (1.0 - uniform_given(p, b, program.generator) < p).long()
                alone = (uniform(q, program.generator) < q).long()
                c = torch.where(together, antithetic, alone)
                weight = torch.where(together, (b - c) * at_own.abs().sigmoid(), b - p)
                weight_other = torch.where(together, torch.zeros_like(q), q - c)
                own, other = 2 * own + b, 2 * other + c
            terms.append(weight * at_own + weight_other * at_other)
        with torch.no_grad():
            partner = other.clamp(max=log_probs.shape[-1] - 1)
            difference = 0.5 * (context.cost - program.cost(program.from_index(partner)))
        return SiteTerm(difference.unsqueeze(-1) * sum(terms[1:], terms[0]))


def _levels(log_probs: Tensor) -> list[Tensor]:
    """Logits of going right at the nodes of a balanced binary tree, ``(..., 2^level)``, root first."""
    cardinality = log_probs.shape[-1]
    depth = max(cardinality - 1, 1).bit_length()
    missing = 2**depth - cardinality
    if missing:
        # A log-probability far below that of any real value, so that padding is never drawn.
        padding = log_probs.new_full((*log_probs.shape[:-1], missing), -1e8)
        log_probs = torch.cat((log_probs, padding), -1)
    levels = []
    for _ in range(depth):
        pairs = log_probs.reshape(*log_probs.shape[:-1], -1, 2)
        levels.append(pairs[..., 1] - pairs[..., 0])
        log_probs = torch.logsumexp(pairs, -1)
    return levels[::-1]


def _at(table: Tensor, node: Tensor) -> Tensor:
    return table.gather(-1, node.unsqueeze(-1)).squeeze(-1)


def model() -> None:
    z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.1, 0.3, 0.25, 0.15])))
    pyro.sample("x", dist.Normal(z * 0.8, 1.0), obs=torch.tensor(1.4))


def guide() -> None:
    logits = pyro.param("logits", torch.tensor([0.4, -0.3, 0.1, -0.8, 0.6]))
    pyro.sample("z", dist.Categorical(logits=logits))


if __name__ == "__main__":
    svi = SVI(model, guide, Adam({"lr": 0.05}), TraceBackpropQ_ELBO(1, estimator=DisARMTree()))
    print("mean loss of 200 steps:", sum(svi.step() for _ in range(200)) / 200)
