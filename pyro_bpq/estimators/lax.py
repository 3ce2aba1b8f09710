r"""LAX: a trained control variate for continuous sites whose costs have no gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm, Statistics, update_mean
from pyro_bpq.estimators.reparameterise import base_distribution, parameter_names, reparameterise
from pyro_bpq.estimators.requirements import alternative, is_infinite
from pyro_bpq.estimators.variates import NetworkVariate, centre, update_means


@dataclass(frozen=True)
class LAX(Estimator):
    r"""Score function with a trained control variate whose own gradient is pathwise. Unbiased.

        g = (C - c_φ(x) - b) ∇log q(x) + ∂c_φ/∂x ∇x

    For continuous univariate distributions, in plates and ``to_event``, whose value can be reparameterised. The costs
    need no gradient. The network ``c_φ`` sees the value and the mean of its distribution, detached. It learns along
    the gradient of ``|g|²``; each parameter of the distribution is measured in units of its own score. ``b`` is the
    mean over the other particles or, with one particle, over earlier steps. There is no extra run.

    If the costs do have a gradient, :class:`Pathwise` is simpler and better.

    Args:
        variate: The network and its training options.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backpropagation through the void (Grathwohl et al., 2018), Eq. 5 and 6
        | Backprop-Q (Xu et al., 2018), Eq. 24
    """

    variate: NetworkVariate = NetworkVariate()

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})

    def __post_init__(self) -> None:
        if not isinstance(self.variate, NetworkVariate):
            raise OptionError(f"LAX(variate={self.variate!r}): write NetworkVariate(...).")

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs a continuous distribution that can be reparameterised."""
        # has_rsample cannot be read: it may be hidden when the site is planned, because the value is detached.
        if site.components is None and not is_infinite(site):
            return None
        other = f"RELAX() or {alternative(site)}" if site.components is not None else alternative(site)
        return f"LAX() needs a continuous distribution, not a {site.distribution}; use {other}"

    def sized_statistics(self, width: int) -> Statistics:
        """The network's weights and the moments of its inputs."""
        moments = {"input_mean": torch.zeros(width), "input_square": torch.ones(width)}
        return {**self.variate.statistics(2 * width), **moments}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Attaches the gradient to the distribution's parameters, and takes a training step of the network."""
        assert context.count is not None
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
            statistics = self.variate.train(weights, norms, context)
        statistics |= update_means(context.cost, control.detach(), context, self.variate.decay)
        flat = value.detach().reshape(len(context.names), -1, mean.shape[-1])
        for name, new in (("input_mean", flat.mean(1)), ("input_square", flat.square().mean(1))):
            statistics[name] = update_mean(context.statistics[name], new, context.count, self.variate.decay)
        return SiteTerm(surrogate, statistics)


def _groups(context: SiteContext, event_ndim: int) -> tuple[list[tuple[Tensor, Any, dict[str, Tensor]]], Tensor]:
    """Groups sites by class of distribution: rows, class and parameters; also the flat means of all."""
    found: list[Any] = []

    def mean_of(fn: Any) -> Tensor:
        base = base_distribution(fn)
        parameter_names(base)
        found.append(type(base))
        return base.mean.detach().nan_to_num(0.0, 0.0, 0.0)

    mean = context.program.stack(mean_of, event_ndim)
    kinds = found[: len(context.names)]
    groups = []
    for kind in dict.fromkeys(kinds):
        rows = torch.tensor([i for i, other in enumerate(kinds) if other is kind], device=mean.device)
        names = [n for n in kind.arg_constraints if n not in ("logits", "probs")]
        stacked = {name: context.program.stack(_picker(kind, name), event_ndim)[rows] for name in names}
        groups.append((rows, kind, stacked))
    return groups, mean.reshape(*context.cost.shape, -1)


def _picker(kind: Any, name: str) -> Any:
    def pick(fn: Any) -> Tensor:
        base = base_distribution(fn)
        if type(base) is not kind:
            return base.mean.detach()
        parameter: Tensor = getattr(base, name)
        return parameter.expand(base.batch_shape)

    return pick


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
