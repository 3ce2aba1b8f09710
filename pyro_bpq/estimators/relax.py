r"""Relaxed values: as control variates (REBAR and RELAX), in place of the value, and straight through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_bpq.errors import is_real, option
from pyro_bpq.estimators import relaxation
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm, Statistics, event_sum
from pyro_bpq.estimators.q_estimators import LocalCost, local_cost, local_q, q_table
from pyro_bpq.estimators.relaxation import Temperature, Tempered, temperature_option
from pyro_bpq.estimators.requirements import needs_finite, needs_float_value
from pyro_bpq.estimators.variates import (
    NetworkVariate,
    OptimalScale,
    Scale,
    Scaled,
    centre,
    network,
    scale_option,
)
from pyro_bpq.rollout.features import finite_components

# A function of a relaxed draw ``z`` with values ``(G, M, plates)``.
Variate = Callable[[Tensor], Tensor]


def _slopes(context: SiteContext, variate: Variate, keeps: bool = False) -> tuple[Tensor, Tensor]:
    """``c(z̃)``, and the derivative of ``c(z) - c(z̃)`` to free logits; ``keeps`` their graph."""
    log_probs, index = context.table
    with torch.enable_grad():
        leaf = relaxation.parameters(log_probs).detach().requires_grad_()
        free, given = map(variate, relaxation.draw_pair(leaf, index, context.program.generator))
        (path,) = torch.autograd.grad((free - given).sum(), leaf, create_graph=keeps)
    return given, relaxation.of_logits(path, leaf.detach(), index)


class Relaxed(Scaled, Tempered):
    """Base of the estimators whose control variate is a function ``c`` of a relaxed value. Unbiased."""

    needs = frozenset({"program", "table"})
    takes_outdated: ClassVar[bool] = True

    def variate(self, context: SiteContext) -> Variate:
        """The function ``c``, with its derivative."""
        raise NotImplementedError

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Attaches the gradient to the log-probabilities."""
        value, path = _slopes(context, self.variate(context))
        # Without a slope it is no valid control variate: a cost may have one that no gradient shows.
        return self.corrected(context, value.detach() * path.any(), path)


@dataclass(frozen=True, kw_only=True)
class REBAR(Relaxed):
    r"""Score function whose control variate is the cost itself at a relaxed value. Unbiased.

        g = (C - a C(z̃) - b) ∇log q(x) + a ∇C(z) - a ∇C(z̃)

    ``z`` and ``z̃`` are Gumbel-softmax (binary: logistic) relaxations drawn given the sample ``x``. The derivative of
    ``z`` is that of the unconditional draw; the derivative of ``z̃`` is that of the conditional draw. ``b`` is a mean
    over earlier steps and the other particles.

    For Bernoulli and OneHotCategorical, also in ``to_event``. The costs must be defined and continuous between the
    values of the support: a program that rounds the value or uses it as an index gives a biased gradient. It takes two
    more runs of guide and model for every site and particle, three if sites are sampled downstream. The third run draws
    these sites at an independent value of the site; the other two keep their values.

    Args:
        temperature: A number, or a function of the number of steps taken, such as :class:`Annealed`.
        scale, decay: Scale ``a``, a number or :class:`OptimalScale`; weight of the past in the running means.

    References:
        | REBAR: Low-variance, unbiased gradient estimates for discrete latent variable models (Tucker et al., 2017)
        | Backprop-Q (Xu et al., 2018), Eq. 26
    """

    scale: Scale = scale_option(OptimalScale(max_scale=1.5))

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs values that can be relaxed."""
        refused = needs_float_value(self, site)
        return refused and refused.replace("use ", "use OneHotCategorical, RELAX() or " if site.components else "use ")

    def variate(self, context: SiteContext) -> Variate:
        """The cost-to-go in the program in which sites downstream keep the values of a third run."""
        program, (log_probs, index) = context.program, context.table
        held = program.held(relaxation.independent_value(relaxation.parameters(log_probs), index, program))

        def cost(z: Tensor) -> Tensor:
            value = relaxation.to_value(relaxation.relax(z, self.tau, index), program)
            known, slope = held.gradient(value.detach())
            return known + event_sum(slope * (value - value.detach()), known.dim())

        return cost


@dataclass(frozen=True)
class RELAX(Estimator):
    r"""Score function with a trained control variate of a relaxed value. Unbiased; any finite components.

        g = (C - c(z̃) - b) ∇log q(x) + ∇c(z) - ∇c(z̃),   c(z) = c_φ(softmax(z/τ))

    ``z`` and ``z̃`` are as in :class:`REBAR`. The network ``c_φ`` and ``τ`` learn along the gradient of ``|g|²``;
    ``c_φ`` also sees the log-probabilities, detached. There is no extra run, and no condition on the costs.

    Args:
        variate: The network and its training options.
        temperature: Temperature ``τ`` of the first step.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backpropagation through the void: Optimizing control variates for black-box gradient estimation
          (Grathwohl et al., 2018), Eq. 8
    """

    variate: NetworkVariate = network()
    temperature: float = option(
        0.5, lambda t: is_real(t) and t > 0.0, "the positive number that it starts from: RELAX learns it"
    )

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})
    takes_outdated: ClassVar[bool] = True
    unsupported = needs_finite

    def sized_statistics(self, width: int) -> Statistics:
        """The network's weights, then ``log τ`` relative to its initial value."""
        return self.variate.statistics(2 * width, extra=1)

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Attaches the gradient to the parameters of the relaxation, and takes a training step of the network."""
        (log_probs, index), variate = context.table, self.variate
        params = relaxation.parameters(log_probs).detach()
        with torch.enable_grad():
            weights = context.statistics["phi"].detach().requires_grad_()
            temperature = self.temperature * weights[:, -1].exp().reshape(-1, *(1,) * (params.dim() - 1))

            def cost(z: Tensor) -> Tensor:
                return variate.evaluate(weights, _features(z, params, temperature, index), context)

            given, path = _slopes(context, cost, keeps=True)
            centred, control = centre(context.cost, given, context)
            gradient = (centred - control)[..., None, None] * context.score_table[1] + path
            statistics = variate.train(weights, gradient.square().flatten(1).mean(1), given, context)
        return SiteTerm(gradient.detach() * log_probs, statistics)


def _features(z: Tensor, params: Tensor, temperature: Tensor, index: Tensor) -> Tensor:
    """Inputs of the network ``(G, M, plates, F)``: the relaxed value, centred, and the parameters."""
    weights = relaxation.relax(z, temperature, index)
    if z.dim() == index.dim():
        return torch.cat((2.0 * weights[..., 1] - 1.0, params.clamp(-6.0, 6.0) / 2.0), -1)
    shifted = (params - params.mean(-1, keepdim=True)).clamp(-6.0, 6.0) / 2.0
    return torch.cat((weights.flatten(-2) - 1.0 / weights.shape[-1], shifted.flatten(-2)), -1)


@dataclass(frozen=True)
class RELAXQ(Relaxed):
    r"""RELAX with the critic, linear in the relaxed value, as the free-form control variate. Unbiased.

        g = (C - a c(z̃) - b) ∇log q(x) + a ∇c(z) - a ∇c(z̃),   c(z) = V + Σ_d Σ_k softmax(z/τ)[d,k] Q[d,k]

    ``Q`` is the critic plus the immediate costs that are known at every value. No extra run.

    Args:
        temperature: A number, or a function of the number of steps taken, such as :class:`Annealed`.
        scale, decay: Scale ``a``, a number or :class:`OptimalScale`; weight of the past in the running means.

    References:
        | Backprop-Q (Xu et al., 2018), Eq. 27
        | Backpropagation through the void (Grathwohl et al., 2018), Eq. 8
    """

    uses_critic: ClassVar[bool] = True

    def variate(self, context: SiteContext) -> Variate:
        """The critic's ``Q``."""
        index, table = context.table[1], q_table(context)
        level = 0.0 if context.level is None else context.level
        return lambda z: level + (relaxation.relax(z, self.tau, index) * table).sum((-1, -2))


@dataclass(frozen=True)
class QRELAX(RELAXQ):
    r"""The learned Q as local cost, by RELAX with the same Q as control variate. Biased by the errors of the critic.

        g = (Q(b) - a c(z̃) - b₀) ∇log q(b) + a ∇c(z) - a ∇c(z̃),   c(z) = V + Σ_d Σ_k softmax(z/τ)[d,k] Q[d,k]

    :class:`RELAXQ` with the critic's value in place of the cost-to-go. In expectation it is the gradient of
    ``E_q[Q(b)]`` at any temperature, so it has no bias if the critic is exact. :class:`QAllAction` has the same
    expectation and no noise of its own.

    Args:
        temperature, scale, decay: As in :class:`RELAXQ`.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Gradient Estimators with Q-functions
        | Backpropagation through the void (Grathwohl et al., 2018), Eq. 8
    """

    is_unbiased: ClassVar[bool] = False
    replaces_costs: ClassVar[bool] = True

    def __call__(self, context: SiteContext) -> SiteTerm:
        """RELAX of the critic's value."""
        with torch.no_grad():
            cost = local_cost(context)
        return super().__call__(replace(context, cost=cost))


@dataclass(frozen=True)
class QRelaxation(Tempered, LocalCost):
    r"""The learned Q as local cost, through a relaxation of the value. Biased, even with an exact critic.

        g = ∇ Σ_d Σ_k softmax(z/τ)[d,k] Q[d,k]

    ``z`` is drawn given the sample. Q is linear in the relaxed value, so :class:`QAllAction` is better. This one is a
    reference. For a fair coin with ``Q(1) - Q(0) = 1`` the gradient to the logit is 0.25, and the relaxed one is 0.215
    at temperature 0.5 and 0.167 at 1. :class:`QRELAX` corrects this bias, as the paper's RELAX with ``f = Q(b)`` does.

    Args:
        temperature: A number, or a function of the number of steps taken, such as :class:`Annealed`.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Gradient Estimators with Q-functions
        | Categorical reparameterization with Gumbel-softmax (Jang et al., 2017)
    """

    needs = frozenset({"program", "table"})
    takes_outdated: ClassVar[bool] = True
    unsupported = needs_finite

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Q at the relaxed value, with its gradient."""
        (log_probs, index), table = context.table, local_q(context)[0]
        z = relaxation.draw_given(relaxation.parameters(log_probs), index, context.program.generator)
        return SiteTerm(relaxation.relax(z, self.tau, index) * table)


@dataclass(frozen=True)
class Concrete(Tempered):
    r"""The slope of the cost at a relaxed value (Concrete, Gumbel-softmax). Biased.

        g_X = f'(s)·∇s,    s = softmax((log p + G) / τ),   G Gumbel noise

    ``f`` is the cost-to-go in nats. The program itself runs with the discrete value, so the loss and the gradients of
    all other parameters are exact. Only an extra run sees the relaxed value, with ``log q`` and ``-log p`` as torch
    computes them there: for a Bernoulli (``s = σ((α + L)/τ)``) linear in ``s``; for a OneHotCategorical those of the
    largest entry, without slope. It serves the sites that :class:`StraightThrough` serves. A program that turns the
    value into an integer yields no gradient. It needs one more run of guide and model, with a backward pass, for every
    site and particle.

    Args:
        temperature: Temperature ``τ``, or a function of the number of steps taken.

    References:
        | The Concrete distribution (Maddison et al., 2017)
        | Categorical reparameterization with Gumbel-softmax (Jang et al., 2017)
        | Backprop-Q (Xu et al., 2018), Eq. 23
    """

    needs = frozenset({"program", "table"})
    takes_outdated: ClassVar[bool] = True
    unsupported = needs_float_value

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The slope at the relaxed value times that value."""
        program, (log_probs, index) = context.program, context.table
        z = relaxation.draw(relaxation.parameters(log_probs), index, program.generator)
        soft = relaxation.to_value(relaxation.relax(z, self.tau, index), program)
        _, slope = program.gradient(soft.detach())
        return SiteTerm(event_sum(slope * soft, context.cost.dim()))


class Attached(Estimator):
    """Base of the estimators whose value carries the gradient. Biased."""

    is_pathwise: ClassVar[bool] = True
    attaches: ClassVar[bool] = True

    unsupported = needs_float_value


@dataclass(frozen=True)
class StraightThrough(Attached):
    r"""The sampled value, with the gradient of its mean. Biased; a reference.

        z = b + p - stop(p)

    For Bernoulli and OneHotCategorical, also in ``to_event``, whose costs are differentiable in the value. The gradient
    through ``log q`` of a OneHotCategorical with respect to its value is zero, as torch computes it.

    References:
        | Estimating or propagating gradients through stochastic neurons for conditional computation
          (Bengio et al., 2013)
    """

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value, with the gradient of the distribution's mean."""
        return _carrying(value, fn.mean)


@dataclass(frozen=True)
class GumbelStraightThrough(Tempered, Attached):
    r"""The sampled value, with the gradient of the relaxed value that belongs to it. Biased.

        z + s - stop(s),    s = softmax((log p + G) / τ),   G Gumbel noise given argmax(log p + G) = z

    The program sees the discrete value, and the noise is drawn given that value. A Bernoulli has ``s = σ((α + L)/τ)``
    with logistic noise ``L``. It serves the sites that :class:`StraightThrough` serves.

    Args:
        temperature: Temperature ``τ``, or a function of the number of steps taken.

    References:
        | Categorical reparameterization with Gumbel-softmax (Jang et al., 2017)
        | The Concrete distribution (Maddison et al., 2017)
    """

    temperature: Temperature = temperature_option(1.0)

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value, with the gradient of the relaxed value."""
        logits, is_binary = _logits(fn, value)
        index = value.long() if is_binary else value.argmax(-1)
        z = relaxation.draw_given(logits if is_binary else logits.log_softmax(-1), index, generator)
        return _carrying(value, _probs(z / self.tau, is_binary))


@dataclass(frozen=True)
class ReinMax(Tempered, Attached):
    r"""The sampled value, with a gradient that is exact for quadratic costs of one component. Biased.

        z + s - stop(s),   s = 2 π_1 - ½ π_0,
        π_0 = softmax(θ),   π_1 = softmax(stop(log((z + softmax(θ/τ))/2) - θ) + θ)

    Straight-through of second order: a trapezoidal rule (Heun's) replaces Euler's rule. At ``τ = 1`` there is no bias
    for a single component with costs that are quadratic in its value. It serves the sites that
    :class:`StraightThrough` serves; a Bernoulli counts as a pair of values.

    Args:
        temperature: Temperature ``τ`` of at least one, as the paper advises, or a function of the steps taken.

    References:
        Bridging discrete and backpropagation: straight-through and beyond (Liu et al., 2023)
    """

    temperature: Temperature = temperature_option(1.0)

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value, with the gradient of ``s``."""
        logits, is_binary = _logits(fn, value)
        with torch.no_grad():
            half = 0.5 * (value.detach() + _probs(logits / self.tau, is_binary))
        # A tensor whose derivative is that of a softmax where the softmax equals `half`.
        if is_binary:
            first = half * (1.0 - half) * logits
        else:
            first = half * (logits - (half * logits).sum(-1, keepdim=True))
        return _carrying(value, 2.0 * first - 0.5 * _probs(logits, is_binary))


def _carrying(value: Tensor, soft: Tensor) -> Tensor:
    """The value, with the gradient of ``soft``."""
    return value + (soft - soft.detach())


def _logits(fn: Any, value: Tensor) -> tuple[Tensor, bool]:
    """Logits in the shape of the value, and whether they are those of a Bernoulli."""
    split = finite_components(fn)
    assert split is not None
    return split.parameters(fn).expand(value.shape), split.kind == "bernoulli"


def _probs(logits: Tensor, is_binary: bool) -> Tensor:
    return logits.sigmoid() if is_binary else logits.softmax(-1)
