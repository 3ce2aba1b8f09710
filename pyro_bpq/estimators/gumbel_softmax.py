r"""Relaxed discrete values: straight-through Gumbel-softmax, and the Concrete relaxation. Biased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_bpq.estimators.base import SiteContext, SiteInfo, SiteTerm
from pyro_bpq.estimators.noise import gumbel, gumbel_given, uniform, uniform_given
from pyro_bpq.estimators.requirements import needs_float_value
from pyro_bpq.estimators.substitution import event_sum
from pyro_bpq.estimators.temperature import Attached, Temperature, Tempered, temperature_at
from pyro_bpq.rollout.features import finite_components


@dataclass(frozen=True)
class GumbelStraightThrough(Tempered, Attached):
    r"""The sampled value, with the gradient of the relaxed value that belongs to it. Biased.

        z + s - stop(s),    s = softmax((log p + G) / τ),   G Gumbel noise given argmax(log p + G) = z

    The program sees the discrete value, and the noise is drawn given that value. For Bernoulli and OneHotCategorical,
    also in ``to_event``, whose costs are differentiable in the value. A Bernoulli has ``s = σ((α + L)/τ)`` with
    logistic noise ``L``. The gradient through ``log q`` of a OneHotCategorical with respect to its value is zero, as
    torch computes it.

    Args:
        temperature: Temperature ``τ``, or a function of the number of steps taken.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Categorical reparameterization with Gumbel-softmax (Jang et al., 2017)
        | The Concrete distribution (Maddison et al., 2017)
    """

    temperature: Temperature = 1.0

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value, with the gradient of the relaxed value."""
        split = finite_components(fn)
        assert split is not None
        logits, hard = split.parameters(fn).expand(value.shape), value.detach()
        with torch.no_grad():
            if split.kind == "bernoulli":
                # With u < p where the value is one, α + L = logit(p) + logit(1 - u) has the sign of the value.
                perturbed = logits - torch.logit(uniform_given(logits.sigmoid(), hard, generator))
            else:
                log_probs = logits.log_softmax(-1)
                perturbed = gumbel_given(log_probs, hard.argmax(-1), generator)
        shifted = perturbed + (logits - logits.detach())
        soft = _soften(shifted, split.kind == "bernoulli", temperature_at(self.temperature, 0))
        return value + (soft - soft.detach())


@dataclass(frozen=True)
class Concrete(Tempered):
    r"""The slope of the cost at a relaxed value (Concrete, Gumbel-softmax). Biased.

        g_X = f'(s)·∇s,    s = softmax((log p + G) / τ),   G Gumbel noise

    ``f`` is the cost-to-go in nats. The program itself runs with the discrete value, so the loss and the gradients of
    all other parameters are exact. Only an extra run sees the relaxed value. In that run torch computes the site's
    ``log q`` and ``-log p`` at the relaxed value: for a Bernoulli ``s α - log(1 + e^α)``, linear in ``s``; for a
    OneHotCategorical the values at the largest entry, without slope. For Bernoulli (``s = σ((α + L)/τ)``) and
    OneHotCategorical, also in ``to_event``, whose costs are differentiable in the value. A program that turns the
    value into an integer yields no gradient. It needs one more run of guide and model, with a backward pass, for every
    site and particle.

    Args:
        temperature: Temperature ``τ``, or a function of the number of steps taken.

    Raises:
        OptionError: If an option is out of range.

    References:
        | The Concrete distribution (Maddison et al., 2017)
        | Categorical reparameterization with Gumbel-softmax (Jang et al., 2017)
        | Backprop-Q (Xu et al., 2018), Eq. 23
    """

    temperature: Temperature = 0.5

    is_unbiased: ClassVar[bool] = False
    needs = frozenset({"program", "table"})

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs values that can move continuously."""
        return needs_float_value("Concrete", site)

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The slope at the relaxed value times that value."""
        assert context.log_probs is not None
        program, log_probs = context.program, context.log_probs
        is_binary = program.value.numel() < log_probs.numel()
        if is_binary:
            logits = (log_probs[..., 1] - log_probs[..., 0]).reshape(program.value.shape)
            perturbed = logits - torch.logit(uniform(logits, program.generator))
        else:
            logits = log_probs.reshape(program.value.shape)
            perturbed = logits + gumbel(logits, program.generator)
        soft = _soften(perturbed, is_binary, temperature_at(self.temperature, 0))
        _, slope = program.gradient(soft.detach())
        return SiteTerm(event_sum(slope * soft, context.cost.dim()))


def _soften(perturbed: Tensor, is_binary: bool, temperature: float | Tensor) -> Tensor:
    return (perturbed / temperature).sigmoid() if is_binary else (perturbed / temperature).softmax(-1)
