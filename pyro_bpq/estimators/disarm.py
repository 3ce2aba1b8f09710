r"""ARM and DisARM: antithetic pairs of binary values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm
from pyro_bpq.estimators.noise import uniform_given
from pyro_bpq.estimators.requirements import needs_binary


@dataclass(frozen=True)
class ARM(Estimator):
    r"""Compares the sample with an antithetic one, weighted by the noise; for binary components.

        g_d = (f(b̃) - f(b)) (u_d - ½) ∇α_d,    b_d = 1[u_d < σ(α_d)],  b̃_d = 1[1 - u_d < σ(α_d)]

    ``α`` are the logits and ``f`` is the cost-to-go in nats. Unbiased. :class:`DisARM` is the expectation of this
    estimator given the pair. It costs the same and never has more variance. ARM is here for reference.

    References:
        ARM: Augment-REINFORCE-merge gradient for stochastic binary networks (Yin and Zhou, 2019)
    """

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs binary components."""
        return needs_binary("ARM", site)

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The difference of the costs times the centred noise."""
        assert context.log_probs is not None and context.index is not None
        logits = context.log_probs[..., 1] - context.log_probs[..., 0]
        with torch.no_grad():
            p = logits.sigmoid()
            u = uniform_given(p, context.index, context.program.generator)
            partner = (1.0 - u < p).long()
            difference = context.program.cost(context.program.from_index(partner)) - context.cost
            weight = difference.unsqueeze(-1) * (u - 0.5)
        return SiteTerm(weight * logits)


@dataclass(frozen=True)
class DisARM(Estimator):
    r"""Compares the sample with an antithetic one; for binary components.

        g_d = ½ (f(b) - f(b̃)) (-1)^{b̃_d} 1[b_d ≠ b̃_d] σ(|α_d|) ∇α_d,
        b_d = 1[u_d < σ(α_d)],  b̃_d = 1[1 - u_d < σ(α_d)]

    ``α`` are the logits and ``f`` is the cost-to-go in nats. Unbiased: it is the expectation of :class:`ARM` given
    the pair, since ``E[½ - u_d | b_d = 1, b̃_d = 0] = ½ σ(|α_d|)``. It needs one more run of guide and model for
    every site and particle. In that run all components and plate rows of the site take their antithetic values
    at once, and sites downstream are drawn afresh.

    References:
        | DisARM: An antithetic gradient estimator for binary latent variables (Dong et al., 2020)
        | Probabilistic best subset selection via gradient-based optimization, U2G (Yin et al., 2020)
    """

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs binary components."""
        return needs_binary("DisARM", site)

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Half the difference of the costs, signed, where the pair differs."""
        assert context.log_probs is not None and context.index is not None
        logits = context.log_probs[..., 1] - context.log_probs[..., 0]
        with torch.no_grad():
            p, b = logits.sigmoid(), context.index
            partner = (1.0 - uniform_given(p, b, context.program.generator) < p).long()
            difference = context.cost - context.program.cost(context.program.from_index(partner))
            sign = (b - partner).to(p.dtype)
            weight = 0.5 * difference.unsqueeze(-1) * sign * logits.abs().sigmoid()
        return SiteTerm(weight * logits)
