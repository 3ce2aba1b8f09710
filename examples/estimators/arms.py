"""ARMS: leave-one-out over samples that repel each other, with two laws of their noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import Estimator, SiteContext, SiteTerm, exponential, needs_binary, uniform, uniform_given


class Copula(Protocol):
    """Exchangeable uniform variables that repel each other."""

    def complete(self, first: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Draws the other ``samples - 1`` variables given the first, ``(samples - 1, *shape)``."""

    def both(self, p: Tensor, samples: int) -> Tensor:
        """Probability that two of the variables are both below ``p``, for ``p`` in [0, ½]."""


@dataclass(frozen=True)
class DirichletCopula:
    r"""Uniform variables from a flat Dirichlet distribution.

        u_i = (1 - d_i)^{n-1},  d ~ Dirichlet(1, ..., 1),
        P(u_i < p, u_j < p) = max(0, 2 p^{1/(n-1)} - 1)^{n-1}

    References:
        ARMS: Antithetic-REINFORCE-multi-sample gradient for binary variables (Dimitriev and Zhou, 2021)
    """

    def complete(self, first: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Breaks the rest of the stick at random."""
        rest = first ** (1.0 / (samples - 1))
        shares = exponential(first.expand(samples - 1, *first.shape), generator)
        return (1.0 - rest * shares / shares.sum(0)).clamp(min=0.0) ** (samples - 1)

    def both(self, p: Tensor, samples: int) -> Tensor:
        """Probability that two variables are below ``p``, in closed form."""
        return (2.0 * p ** (1.0 / (samples - 1)) - 1.0).clamp(min=0.0) ** (samples - 1)


@dataclass(frozen=True)
class RotationCopula:
    r"""Uniform variables on a randomly rotated grid, in random order.

        u_i = (u + π(i)/n) mod 1,   P(u_i < p, u_j < p) = k (k - 1 + 2 (np - k)) / (n (n - 1)),  k = ⌊np⌋

    The number of ones among the samples is ``k`` or ``k + 1``: no exchangeable coupling has a lower correlation.

    References:
        On the theory of systematic sampling, II (Madow, 1949)
    """

    def complete(self, first: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Returns the other points of the grid, in random order."""
        order = uniform(first.expand(samples - 1, *first.shape), generator).argsort(0) + 1
        return (first + order.to(first.dtype) / samples) % 1.0

    def both(self, p: Tensor, samples: int) -> Tensor:
        """Probability that two variables are below ``p``, in closed form."""
        k = (samples * p).floor()
        return k * (k - 1.0 + 2.0 * (samples * p - k)) / (samples * (samples - 1.0))


@dataclass(frozen=True)
class ARMS(Estimator):
    r"""Leave-one-out over ``n`` negatively correlated samples, for binary components.

        g_d = 1/(n-1) Σ_i (f(b^i) - f̄) b^i_d / (1 - ρ_d) ∇α_d

    ``f`` is the cost-to-go. ``ρ_d`` is the correlation of ``b^i_d`` and ``b^j_d``. Unbiased. Two samples give DisARM.
    Every particle has its own ``n`` samples: ``n - 1`` more runs of guide and model for every site and particle.

    Args:
        samples: Number of samples ``n``, at least two.
        copula: The joint law of the samples' noise.

    References:
        ARMS: Antithetic-REINFORCE-multi-sample gradient for binary variables (Dimitriev and Zhou, 2021)
    """

    samples: int = 4
    copula: Copula = DirichletCopula()

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})
    unsupported = needs_binary

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The centred costs times the samples."""
        (log_probs, index), program = context.table, context.program
        logits = log_probs[..., 1] - log_probs[..., 0]
        with torch.no_grad():
            # Noise below the probability gives the rarer value: the samples repel each other most in this form.
            rarer = torch.where(logits > 0, 0, 1)
            p = (-logits.abs()).sigmoid()
            first = (index == rarer).long()
            others = self.copula.complete(uniform_given(p, first, program.generator), self.samples, program.generator)
            rare = torch.cat((first.unsqueeze(0), (others < p).long()))
            values = torch.where(rarer == 1, rare, 1 - rare)
            costs = torch.stack([context.cost, *(program.cost(program.from_index(each)) for each in values[1:])])
            total = ((costs - costs.mean(0)).unsqueeze(-1) * values).sum(0) / (self.samples - 1.0)
            # 1 / (1 - ρ); p is never quite zero, but its product with another may be.
            apart = (p - self.copula.both(p, self.samples)).clamp(min=torch.finfo(p.dtype).tiny)
            weight = total * (p * ((1.0 - p) / apart)).clamp(max=1.0)
        return SiteTerm(weight * logits)


def model() -> None:
    z = pyro.sample("z", dist.Bernoulli(torch.full((3,), 0.4)).to_event(1))
    pyro.sample("x", dist.Normal(z.sum(-1) ** 2, 1.0), obs=torch.tensor(2.5))


def guide() -> None:
    logits = pyro.param("logits", torch.tensor([0.4, -0.3, 0.1]))
    pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))


if __name__ == "__main__":
    svi = SVI(model, guide, Adam({"lr": 0.05}), TraceBackpropQ_ELBO(1, estimator=ARMS()))
    print("mean loss of 200 steps:", sum(svi.step() for _ in range(200)) / 200)
