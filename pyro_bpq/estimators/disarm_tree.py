r"""DisARM-Tree: antithetic pairs of categorical values, reached by binary decisions along a tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm
from pyro_bpq.estimators.noise import uniform, uniform_given
from pyro_bpq.estimators.requirements import needs_finite


@dataclass(frozen=True)
class DisARMTree(Estimator):
    r"""Compares the sample with one that is antithetic in every binary decision of a balanced tree.

    A value ``z`` of a component is a path through the tree. At node ``n`` the path goes right with probability
    ``σ(α_n)``, the share of the right subtree in the probability of node ``n``. The partner ``z̃`` takes antithetic
    decisions. With ``f`` the cost-to-go in nats,

        g = ½ (f(z) - f(z̃)) Σ_n w_n ∇α_n,
        w_n = (b_n - b̃_n) σ(|α_n|)  on both paths,  b_n - σ(α_n)  on that of z only,  σ(α_n) - b̃_n  on that of z̃ only

    This is :class:`DisARM` for all decisions of the tree, averaged over the decisions off the paths. Unbiased. It needs
    one more run of guide and model for every site and particle. With two values it is DisARM.

    References:
        Coupled gradient estimators for discrete latent variables (Dong et al., 2021), DisARM-Tree
    """

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs finite components."""
        return needs_finite("DisARMTree", site)

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Half the difference of the costs times the logits along both paths."""
        assert context.log_probs is not None and context.index is not None
        levels, program = _levels(context.log_probs), context.program
        depth, cardinality = len(levels), context.log_probs.shape[-1]
        own, other = torch.zeros_like(context.index), torch.zeros_like(context.index)
        terms = []
        for level, logits in enumerate(levels):
            # Node `own` of this level is where z passes; the next bit of z says where it goes.
            at_own, at_other = _at(logits, own), _at(logits, other)
            with torch.no_grad():
                b = (context.index >> (depth - 1 - level)) & 1
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
            partner = other.clamp(max=cardinality - 1)
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
