r"""REBAR: the cost at a relaxed value as control variate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError
from pyro_bpq.estimators import relaxation
from pyro_bpq.estimators.base import SiteContext, SiteInfo, SiteProgram, SiteTerm, Statistics, site_mean
from pyro_bpq.estimators.relaxation import Annealed, fill
from pyro_bpq.estimators.requirements import needs_float_value
from pyro_bpq.estimators.scaled import OptimalScale, Scale, Scaled, centre, read_scale

# What serves other finite sites.
RELAXES_ALL = "OneHotCategorical, RELAX() or "


@dataclass(frozen=True)
class LearnedTemperature:
    r"""A temperature that follows the slope of the gradient's second moment.

        log τ ← log τ - lr (m(τ') - m(τ)) / (m(τ') + m(τ)) / δ,   m = running E|g|²,  τ' = (1 + δ) τ

    The noise is the same at both temperatures. It takes two more runs of guide and model.

    Args:
        start: Temperature of the first step.
        lr: Step size.
        delta: Relative difference ``δ`` of the two temperatures.
        decay: Weight of the past in the running moments.

    Raises:
        OptionError: If an option is out of range.

    References:
        | REBAR (Tucker et al., 2017); with a difference quotient in place of the derivative
    """

    start: float = 0.5
    lr: float = 0.02
    delta: float = 0.1
    decay: float = 0.9

    def __post_init__(self) -> None:
        if not (self.start > 0.0 and self.lr >= 0.0 and self.delta > 0.0 and 0.0 <= self.decay < 1.0):
            raise OptionError(f"{self!r}: write start > 0, lr >= 0, delta > 0 and a decay in [0, 1).")


@dataclass(frozen=True)
class REBAR(Scaled):
    r"""Score function whose control variate is the cost itself at a relaxed value. Unbiased.

        g = (C - a C(z̃) - b) ∇log q(x) + a ∇C(z) - a ∇C(z̃)

    ``z`` and ``z̃`` are Gumbel-softmax (binary: logistic) relaxations drawn given the sample ``x``. The derivative of
    ``z`` is that of the unconditional draw; the derivative of ``z̃`` is that of the conditional draw. ``b`` is the mean
    over the other particles or, with one particle, over earlier steps.

    For Bernoulli and OneHotCategorical, also in ``to_event``. The costs must be defined and continuous between the
    values of the support: a program that rounds the value or uses it as an index gives a biased gradient. It takes two
    more runs of guide and model for every site and particle, three if sites are sampled downstream. The third run draws
    these sites at an independent value of the site; the other two keep their values.

    Args:
        temperature: A number, :class:`Annealed` or :class:`LearnedTemperature`.
        scale, decay: Scale ``a``, a number or :class:`OptimalScale`; weight of the past in the running means.

    References:
        | REBAR: Low-variance, unbiased gradient estimates for discrete latent variable models (Tucker et al., 2017)
        | Backprop-Q (Xu et al., 2018), Eq. 26
    """

    temperature: float | Annealed | LearnedTemperature = 0.5
    scale: Scale = OptimalScale(max_scale=1.5)
    decay: float = 0.98

    needs = frozenset({"program", "table"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.temperature, LearnedTemperature):
            relaxation.check_temperature(self)

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs values that can be relaxed."""
        return needs_float_value(self, site, RELAXES_ALL)

    def statistics(self) -> Statistics:
        """Running means, products for the scale, and the temperature."""
        learned: Statistics = {"log_temperature": 0.0, "moments": (0.0, 0.0)}
        own = learned if isinstance(self.temperature, LearnedTemperature) else {}
        return {**super().statistics(), **own}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Attaches the gradient to the parameters of the relaxation."""
        (log_probs, index), program = context.table, context.program
        params = relaxation.parameters(log_probs)
        free = params.detach()
        temperature = self._temperature(context)
        held = program.held(relaxation.independent_value(free, index, program))
        state = program.generator.get_state()
        cost, path = relaxed_cost(free, index, temperature, program, held)
        plain, variate = parts(context, free, cost, path)
        a = fill(read_scale(self.scale, context), plain)
        gradient = plain - a * variate
        statistics = self.updated(context, cost, *(relaxation.natural(part, free, index) for part in (plain, variate)))
        if isinstance(self.temperature, LearnedTemperature):
            program.generator.set_state(state)
            moved = temperature * (1.0 + self.temperature.delta)
            plain, other = parts(context, free, *relaxed_cost(free, index, moved, program, held))
            found = [relaxation.natural(part, free, index) for part in (gradient, plain - a * other)]
            statistics |= self._update_temperature(context, *found)
        return SiteTerm(gradient * params, statistics)

    def _temperature(self, context: SiteContext) -> Tensor:
        if isinstance(self.temperature, LearnedTemperature):
            factor = context.statistics["log_temperature"].exp()
            return self.temperature.start * context.per_site(factor).unsqueeze(-1)
        return relaxation.temperature_of(self.temperature, context)

    def _update_temperature(self, context: SiteContext, gradient: Tensor, moved: Tensor) -> dict[str, Tensor]:
        assert isinstance(self.temperature, LearnedTemperature)
        option = self.temperature
        new = torch.stack([site_mean(part.square()) for part in (gradient, moved)], 1)
        moments = context.running_mean("moments", new, option.decay)
        tiny = torch.finfo(new.dtype).tiny
        slope = (moments[:, 1] - moments[:, 0]) / moments.sum(1).clamp(min=tiny) / option.delta
        log = context.statistics["log_temperature"] - option.lr * slope.clamp(-1.0, 1.0)
        return {"moments": moments, "log_temperature": log.clamp(-3.0, 3.0)}


def parts(context: SiteContext, params: Tensor, cost: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient without the control variate, and the control variate to subtract from it."""
    score = relaxation.score(params, context.table[1])
    centred, variate = (fill(part, score) for part in centre(context.cost, cost, context))
    return centred * score, variate * score - path


def relaxed_cost(
    params: Tensor, index: Tensor, temperature: Tensor, program: SiteProgram, held: SiteProgram
) -> tuple[Tensor, Tensor]:
    """Cost-to-go at ``z̃``, and the derivative of ``C(z) - C(z̃)`` with respect to the parameters.

    The costs come from the program ``held``, in which sites downstream keep their values.
    """
    with torch.enable_grad():
        leaf = params.detach().requires_grad_()
        pair = relaxation.draw_pair(leaf, index, program.generator)
        values = [relaxation.to_value(relaxation.relax(z, temperature, index), program) for z in pair]
        _, slope = held.gradient(values[0])
        cost, slope_given = held.gradient(values[1])
        total = (slope * values[0]).sum() - (slope_given * values[1]).sum()
        (path,) = torch.autograd.grad(total, leaf)
    # If no gradient flows through the cost, its slope is unknown. Without the slope it is no valid control variate.
    return cost * (slope.any() | slope_given.any()), path
