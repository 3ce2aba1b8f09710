"""The measure-valued derivative: differences of costs under two distributions, component by component."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import (
    Estimator,
    SiteContext,
    SiteInfo,
    SiteProgram,
    SiteTerm,
    base_distribution,
    cost_per_row,
    exponential,
)

PARAMETRIC = ("Normal", "Poisson", "Exponential")


@dataclass(frozen=True)
class MeasureValued(Estimator):
    r"""Writes the derivative of a density as a difference of two densities.

        ∇_θ q(x; θ) = c_θ (q⁺(x) - q⁻(x)),    g = Σ_d c_d (f(x with x_d ~ q⁺) - f(x with x_d ~ q⁻)) ∇θ_d

    ``f`` is the cost-to-go in nats; all other components keep their values. With ``x`` the sample:

    ================  ===========  =============================  ==============================  ====
    parameter         constant     q⁺                             q⁻                              runs
    ================  ===========  =============================  ==============================  ====
    Normal, mean      1/(σ √2π)    μ + σ W, W Rayleigh            μ - σ W, the same W             2
    Normal, scale     1/σ          μ + σ M, M two-sided Maxwell   x, coupled: M² = ε² + 2 E       1
    Poisson, rate     1            x + 1                          x                               1
    Exponential rate  1/λ          x                              x + E/λ                         1
    finite            q_d(k)       x with x_d = k, for every k    the mean of these               K-1
    ================  ===========  =============================  ==============================  ====

    Unbiased, whether or not costs are differentiable. The table counts the runs of guide and model for every component
    of every site and particle. If a cost reads several plate rows, each row takes as many.

    References:
        | Monte Carlo gradient estimation in machine learning (Mohamed et al., 2020)
        | Measure-valued derivatives for approximate Bayesian inference (Rosca et al., 2019)
    """

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs a distribution that the table in the class docstring lists."""
        if site.components is not None or site.distribution in PARAMETRIC:
            return None
        known = "Normal, Poisson, Exponential and finite supports"
        return f"MeasureValued() knows {known}, not {site.distribution}; use ScoreFunction()"

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The differences of the costs times the parameters."""
        return SiteTerm(_finite(context) if context.log_probs is not None else _parametric(context))


def _finite(context: SiteContext) -> Tensor:
    """``Σ_d Σ_k q_d(k) f(x with x_d = k) log q_d(k)``, with gradient through the last factor."""
    (log_probs, index), program, ndim = context.table, context.program, context.cost.dim()
    size, cardinality = log_probs.shape[-2:]
    with torch.no_grad():
        # Costs are relative to the cost of the sample, so the entry at the sampled index is zero.
        table = torch.zeros_like(log_probs)
        for d in range(size):
            for step in range(1, cardinality):
                other = index.clone()
                other[..., d] = (index[..., d] + step) % cardinality
                cost = cost_per_row(program, program.from_index(other), ndim) - context.cost
                table[..., d, :] = table[..., d, :].scatter(-1, other[..., d : d + 1], cost.unsqueeze(-1))
        weights = log_probs.exp() * table
    return weights * log_probs


def _parametric(context: SiteContext) -> Tensor:
    """Cost differences times mean and scale, or times the rate; one component after the other."""
    program, value = context.program, context.program.value
    event_ndim = value.dim() - context.cost.dim()
    first = program.stack(_first, event_ndim).expand(value.shape)
    second = program.stack(_second, event_ndim).expand(value.shape)
    kind = program.stack(_kind, event_ndim).detach().expand(value.shape)
    with torch.no_grad():
        is_normal, is_poisson = kind == 0, kind == 1
        noise = exponential(value, program.generator)
        scale = torch.where(is_normal, second, torch.ones_like(second))
        steps = torch.where(is_poisson, torch.ones_like(value), noise / first.abs().clamp(min=1e-30))
        rayleigh = scale * (2.0 * noise).sqrt()
        ups = _costs(program, torch.where(is_normal, first + rayleigh, value + steps), context.cost)
        spread = torch.zeros_like(value)
        now = context.cost.reshape(*context.cost.shape, *(1,) * event_ndim)
        slope = torch.where(is_poisson, ups - now, (now - ups) / first)
        if bool(is_normal.any()):
            downs = _costs(program, torch.where(is_normal, first - rayleigh, value), context.cost)
            slope = torch.where(is_normal, (ups - downs) / (scale * math.sqrt(2.0 * math.pi)), slope)
            centred = (value - first) / scale
            maxwell = (centred.square() + 2.0 * exponential(value, program.generator)).sqrt()
            wide = torch.where(is_normal, first + scale * torch.copysign(maxwell, centred), value)
            spread = torch.where(is_normal, (_costs(program, wide, context.cost) - now) / scale, spread)
    return slope * first + spread * second


def _costs(program: SiteProgram, value: Tensor, like: Tensor) -> Tensor:
    """Costs when one component at a time takes another value, in the shape of the value."""
    flat, own = (tensor.reshape(*like.shape, -1) for tensor in (value, program.value))
    costs = []
    for d in range(flat.shape[-1]):
        moved = own.clone()
        moved[..., d] = flat[..., d]
        costs.append(cost_per_row(program, moved.reshape(value.shape), like.dim()))
    return torch.stack(costs, -1).reshape(value.shape)


def _first(fn: Any) -> Tensor:
    base = base_distribution(fn)
    return base.loc if hasattr(base, "loc") else base.rate


def _second(fn: Any) -> Tensor:
    base = base_distribution(fn)
    return base.scale if hasattr(base, "loc") else torch.ones_like(base.rate)


def _kind(fn: Any) -> Tensor:
    """0 for Normal, 1 for Poisson, 2 for Exponential."""
    names = [cls.__name__ for cls in type(base_distribution(fn)).__mro__]
    return torch.full_like(_first(fn), next(k for k, name in enumerate(PARAMETRIC) if name in names))


def model() -> None:
    with pyro.plate("rows", 2):
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
    pyro.sample("x", dist.Normal(z.sum(-1) ** 2, 1.0), obs=torch.tensor(2.5))


def guide() -> None:
    with pyro.plate("rows", 2):
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("logits", torch.tensor([0.4, -0.3]))))


if __name__ == "__main__":
    svi = SVI(model, guide, Adam({"lr": 0.05}), TraceBackpropQ_ELBO(1, estimator=MeasureValued()))
    print("mean loss of 200 steps:", sum(svi.step() for _ in range(200)) / 200)
