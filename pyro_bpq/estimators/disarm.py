r"""DisARM: an antithetic sample of binary components, compared by its cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pyro_bpq.estimators.base import Estimator, SiteContext, SiteTerm
from pyro_bpq.estimators.noise import uniform_given
from pyro_bpq.estimators.relaxation import parameters
from pyro_bpq.estimators.requirements import needs_binary


@dataclass(frozen=True)
class DisARM(Estimator):
    r"""Compares the sample with an antithetic one; for binary components.

        g_d = ½ (f(b) - f(b̃)) (-1)^{b̃_d} 1[b_d ≠ b̃_d] σ(|α_d|) ∇α_d,
        b_d = 1[u_d < σ(α_d)],  b̃_d = 1[1 - u_d < σ(α_d)]

    ``α`` are the logits and ``f`` is the cost-to-go in nats. Unbiased. It needs one more run of guide and model for
    every site and particle. In that run all components and plate rows of the site take their antithetic values at once,
    and sites downstream are drawn afresh.

    References:
        | DisARM: An antithetic gradient estimator for binary latent variables (Dong et al., 2020)
        | Probabilistic best subset selection via gradient-based optimization, U2G (Yin et al., 2020)
    """

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})
    unsupported = needs_binary

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Half the difference of the costs, signed, where the pair differs."""
        (log_probs, index), program = context.table, context.program
        logits = parameters(log_probs)
        with torch.no_grad():
            p = logits.sigmoid()
            partner = (1.0 - uniform_given(p, index, program.generator) < p).long()
            difference = program.cost(program.from_index(partner)) - context.cost
            sign = (index - partner).to(logits.dtype)
            weight = -0.5 * difference.unsqueeze(-1) * sign * logits.abs().sigmoid()
        return SiteTerm(weight * logits)
