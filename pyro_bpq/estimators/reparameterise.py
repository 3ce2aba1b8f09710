r"""Pathwise gradients: values as functions of the parameters of their distributions, and LAX for costs without slopes.

LAX takes a network or the critic as control variate for continuous sites whose costs have no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributions as td

from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm, Statistics
from pyro_bpq.estimators.q_estimators import local_cost
from pyro_bpq.estimators.requirements import alternative, needs_continuous
from pyro_bpq.estimators.variates import (
    NetworkVariate,
    OptimalScale,
    Scaled,
    centre,
    network,
    read_scale,
)
from pyro_bpq.rollout.features import base_distribution


@dataclass(frozen=True)
class Pathwise(Estimator):
    r"""Reparameterisation: the gradient flows through the value ``z(ε; θ)`` itself.

        g_X = ∂C/∂z ∂z/∂θ

    It needs no surrogate term: the differentiable costs carry it.

    References:
        | Auto-encoding variational Bayes (Kingma and Welling, 2014)
        | Backprop-Q (Xu et al., 2018), Eq. 22
    """

    is_unbiased: ClassVar[bool] = True
    is_pathwise: ClassVar[bool] = True

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs a reparameterised distribution."""
        if site.has_rsample:
            return None
        return f"Pathwise() needs a distribution with rsample, which {site.distribution} lacks; use {alternative(site)}"


def parameter_names(fn: Any) -> tuple[str, ...]:
    """Names of the parameters from which a univariate distribution can be rebuilt."""
    base = base_distribution(fn)
    kind = type(base)
    names = tuple(name for name in kind.arg_constraints if name not in ("logits", "probs"))
    if base.event_shape or not names or kind.__name__ == "TransformedDistribution":
        raise UnsupportedSiteError(
            f"LAX() needs a univariate distribution of torch, in a plate or .to_event(), not a {kind.__name__}; "
            "use Pathwise() or ScoreFunction() at this site."
        )
    return names


@singledispatch
def reparameterise(fn: Any, value: Tensor) -> Tensor:
    r"""A drawn value of a univariate distribution, with the gradient of the distribution's parameters.

        dx/dθ = -∂F(x; θ)/∂θ / p(x; θ),   F the distribution function

    Register a function for a distribution of your own with ``reparameterise.register``.

    References:
        | Implicit reparameterization gradients (Figurnov et al., 2018)
    """
    value = value.detach()
    try:
        cumulative = fn.cdf(value)
    except NotImplementedError as error:
        raise UnsupportedSiteError(
            f"{type(fn).__name__} has no cdf to reparameterise by; use Pathwise() or ScoreFunction() at this site, or "
            "register a function with pyro_bpq.estimators.reparameterise.reparameterise."
        ) from error
    density = fn.log_prob(value).exp().detach()
    return value - (cumulative - cumulative.detach()) / density


@reparameterise.register(td.Gamma)
def _gamma(fn: td.Gamma, value: Tensor) -> Tensor:
    standard = (value * fn.rate).detach()
    slope = torch._standard_gamma_grad(fn.concentration.detach(), standard)
    return (standard + slope * (fn.concentration - fn.concentration.detach())) / fn.rate


@reparameterise.register(td.Beta)
def _beta(fn: td.Beta, value: Tensor) -> Tensor:
    value, a, b = value.detach(), fn.concentration1, fn.concentration0
    total = (a + b).detach()
    rise = torch._dirichlet_grad(value, a.detach(), total)
    fall = torch._dirichlet_grad(1.0 - value, b.detach(), total)
    # A Beta is a Dirichlet of two components: raising one concentration moves mass away from the other.
    return value + (1.0 - value) * rise * (a - a.detach()) - value * fall * (b - b.detach())


@dataclass(frozen=True)
class LAX(Estimator):
    r"""Score function with a trained control variate whose own gradient is pathwise. Unbiased.

        g = (C - c_φ(x) - b) ∇log q(x) + ∂c_φ/∂x ∇x

    For continuous univariate distributions, in plates and ``to_event``, whose value can be reparameterised. The costs
    need no gradient; if they have one, :class:`Pathwise` is better. The network ``c_φ`` sees the value and the mean of
    its distribution, detached. It learns along the gradient of ``|g|²``; each parameter of the distribution is measured
    in units of its own score. ``b`` is a mean over earlier steps and the other particles. There is no extra run.

    Args:
        variate: The network and its training options.

    References:
        | Backpropagation through the void (Grathwohl et al., 2018), Eq. 5 and 6
        | Backprop-Q (Xu et al., 2018), Eq. 24
    """

    variate: NetworkVariate = network()

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})
    takes_outdated: ClassVar[bool] = True

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs a continuous distribution that can be reparameterised."""
        refused = needs_continuous(self, site)
        return refused and refused.replace("use ", "use RELAX() or " if site.components else "use ")

    def sized_statistics(self, width: int) -> Statistics:
        """The network's weights and the moments of its inputs."""
        moments = {"input_mean": torch.zeros(width), "input_square": torch.ones(width)}
        return {**self.variate.statistics(2 * width), **moments}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Attaches the gradient to the distribution's parameters, and takes a training step of the network."""
        value = context.program.value
        event_ndim = value.dim() - context.cost.dim()
        groups, mean = _groups(context, event_ndim)
        with torch.enable_grad():
            weights = context.statistics["phi"].detach().requires_grad_()
            x = value.detach().requires_grad_()
            control = self.variate.evaluate(weights, _features(x, mean, context), context)
            (slope,) = torch.autograd.grad(control.sum(), x, create_graph=True)
            centred, variate = centre(context.cost, control, context)
            residual = (centred - variate).reshape(*context.cost.shape, *(1,) * event_ndim)
            surrogate, norms = context.cost.new_zeros(()), context.cost.new_zeros(len(context.names))
            for rows, kind, params in groups:
                leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
                fn = kind(**leaves, validate_args=False)
                scores = _gradients(fn.log_prob(value[rows]), leaves)
                paths = _gradients(reparameterise(fn, value[rows]), leaves)
                for name, param in params.items():
                    gradient = residual[rows] * scores[name] + slope[rows] * paths[name]
                    surrogate = surrogate + (gradient.detach() * param).sum()
                    unit = scores[name].square().flatten(1).mean(1).clamp(min=torch.finfo(value.dtype).tiny)
                    norms = norms.index_add(0, rows, gradient.square().flatten(1).mean(1) / unit)
            statistics = self.variate.train(weights, norms, control, context)
        flat = value.detach().reshape(len(context.names), -1, mean.shape[-1])
        for name, new in (("input_mean", flat.mean(1)), ("input_square", flat.square().mean(1))):
            statistics[name] = context.running_mean(name, new, self.variate.decay)
        return SiteTerm(surrogate, statistics)


def _groups(context: SiteContext, event_ndim: int) -> tuple[list[tuple[Tensor, Any, dict[str, Tensor]]], Tensor]:
    """Groups sites by class of distribution: rows, class and parameters; also the flat means of all."""
    found: list[tuple[Any, tuple[str, ...]]] = []

    def mean_of(fn: Any) -> Tensor:
        base = base_distribution(fn)
        found.append((type(base), parameter_names(base)))
        return base.mean.detach().nan_to_num(0.0, 0.0, 0.0)

    def parameter(kind: Any, name: str) -> Tensor:
        def pick(fn: Any) -> Tensor:
            base = base_distribution(fn)
            return getattr(base, name).expand(base.batch_shape) if type(base) is kind else base.mean.detach()

        return context.program.stack(pick, event_ndim)

    mean = context.program.stack(mean_of, event_ndim)
    kinds = found[: len(context.names)]
    groups = []
    for kind, names in dict.fromkeys(kinds):
        rows = torch.tensor([i for i, (other, _) in enumerate(kinds) if other is kind], device=mean.device)
        groups.append((rows, kind, {name: parameter(kind, name)[rows] for name in names}))
    return groups, mean.reshape(*context.cost.shape, -1)


def _features(x: Tensor, mean: Tensor, context: SiteContext) -> Tensor:
    """Value and mean, standardised by the running moments of values of earlier steps."""
    lead = (-1, *(1,) * (context.cost.dim() - 1), mean.shape[-1])
    centre = context.statistics["input_mean"].reshape(lead)
    square = context.statistics["input_square"].reshape(lead) - centre.square()
    spread = square.clamp(min=1e-4).sqrt()
    return torch.cat([(part - centre) / spread for part in (x.reshape(mean.shape), mean)], -1)


def _gradients(tensor: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    # The graph is kept, because both gradients of a distribution share the set-up of its parameters.
    found = torch.autograd.grad(tensor.sum(), list(leaves.values()), retain_graph=True, allow_unused=True)
    zeros = [torch.zeros_like(leaf) for leaf in leaves.values()]
    return {name: zero if g is None else g.detach() for name, g, zero in zip(leaves, found, zeros, strict=True)}


@dataclass(frozen=True)
class LAXQ(Scaled):
    r"""Score function with the critic as control variate, whose own gradient is pathwise. Unbiased.

        g = (C - a Q(x) - b) ∇log q(x) + a ∂Q(x)/∂x ∇x(ε; θ)

    For continuous values that can be reparameterised; the costs need no gradient. The critic is fitted to the costs of
    all runs, where the network of :class:`LAX` is trained to lower the variance. It is a :class:`ValueCritic` unless
    another is chosen. ``b`` is a mean of ``C - a Q(x)`` over earlier steps and the other particles. An
    :class:`OptimalScale` is that of the gradient with respect to ``μ / σ`` and ``log σ`` of a normal distribution.

    Args:
        scale, decay: Scale ``a``, a number or :class:`OptimalScale`; weight of the past in the running means.

    References:
        | Backprop-Q (Xu et al., 2018), Eq. 27
        | Backpropagation through the void (Grathwohl et al., 2018), Eq. 5
    """

    uses_critic: ClassVar[bool] = True
    needs = frozenset({"moved_value", "q_slope", "q_value"})
    unsupported = needs_continuous

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The corrected cost-to-go times ``log q``, and the slope of the critic through the value."""
        with torch.no_grad():
            value, slope, a = local_cost(context), context.signals["q_slope"], read_scale(self.scale, context)
            centred, control = centre(context.cost, value, context)
            parts: tuple[Tensor, ...] = ()
            if isinstance(self.scale, OptimalScale) and context.moments is not None:
                powers, spread = context.moments.powers, context.moments.spread
                path = (slope * spread).unsqueeze(-1)
                path = torch.cat((path, path * powers[..., :1]), -1)
                plain, variate = (part[..., None, None] * powers for part in (centred, control))
                parts = plain, variate - path
            statistics = self.updated(context, value, *parts)
        path = (slope * context.signals["moved_value"]).sum(-1)
        return SiteTerm((centred - a * control) * context.score + a * path, statistics)
