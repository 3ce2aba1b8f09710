"""ARM: an antithetic sample, weighted by the noise that both share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import Estimator, SiteContext, SiteTerm, needs_binary, uniform_given


@dataclass(frozen=True)
class ARM(Estimator):
    r"""Compares the sample with an antithetic one, weighted by the noise; for binary components.

        g_d = (f(b̃) - f(b)) (u_d - ½) ∇α_d,    b_d = 1[u_d < σ(α_d)],  b̃_d = 1[1 - u_d < σ(α_d)]

    ``α`` are the logits, ``σ`` is the logistic function, ``u`` is uniform noise given the sample ``b``, ``b̃`` is the
    antithetic sample, and ``f`` is the cost-to-go in nats. Unbiased. ``DisARM`` of the library is the expectation of
    this estimator given the pair: it costs the same and never has more variance.

    References:
        ARM: Augment-REINFORCE-merge gradient for stochastic binary networks (Yin and Zhou, 2019)
    """

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})
    unsupported = needs_binary

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The difference of the costs times the centred noise."""
        (log_probs, index), program = context.table, context.program
        logits = log_probs[..., 1] - log_probs[..., 0]
        with torch.no_grad():
            p = logits.sigmoid()
            u = uniform_given(p, index, program.generator)
            partner = (1.0 - u < p).long()
            difference = program.cost(program.from_index(partner)) - context.cost
        return SiteTerm(difference.unsqueeze(-1) * (u - 0.5) * logits)


def model() -> None:
    z = pyro.sample("z", dist.Bernoulli(torch.full((3,), 0.4)).to_event(1))
    pyro.sample("x", dist.Normal(z.sum(-1) ** 2, 1.0), obs=torch.tensor(2.5))


def guide() -> None:
    logits = pyro.param("logits", torch.tensor([0.4, -0.3, 0.1]))
    pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))


if __name__ == "__main__":
    svi = SVI(model, guide, Adam({"lr": 0.05}), TraceBackpropQ_ELBO(1, estimator=ARM()))
    print("mean loss of 200 steps:", sum(svi.step() for _ in range(200)) / 200)
