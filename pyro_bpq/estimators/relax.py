r"""REBAR and RELAX: the cost, a network or the critic at a relaxed value as control variate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.errors import is_real
from pyro_bpq.estimators import relaxation
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm, Statistics, option, past
from pyro_bpq.estimators.q_estimators import local_cost, q_table
from pyro_bpq.estimators.relaxation import Temperature, Tempered
from pyro_bpq.estimators.requirements import needs_finite, needs_float_value
from pyro_bpq.estimators.variates import NetworkVariate, OptimalScale, Scale, Scaled, centre, fill, network


class Relaxed(Tempered, Scaled):
    """Base of the estimators whose control variate is a function ``c`` of a relaxed value. Unbiased."""

    needs = frozenset({"program", "table"})
    takes_outdated: ClassVar[bool] = True

    def variate(self, context: SiteContext, params: Tensor) -> tuple[Tensor, Tensor]:
        """``c(z̃)``, and the derivative of ``c(z) - c(z̃)`` with respect to the parameters, detached."""
        raise NotImplementedError

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Attaches the gradient to the parameters of the relaxation."""
        log_probs, index = context.table
        params = relaxation.parameters(log_probs)
        leaf = params.detach()
        value, path = self.variate(context, leaf)
        score, natural = relaxation.score(leaf, index), lambda part: relaxation.natural(part, leaf, index)
        gradient, statistics = self.corrected(context, value, score, path, natural)
        return SiteTerm(gradient * params, statistics)


@dataclass(frozen=True)
class REBAR(Relaxed):
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
        temperature: A number, or a function of the number of steps taken, such as :class:`Annealed`.
        scale, decay: Scale ``a``, a number or :class:`OptimalScale`; weight of the past in the running means.

    References:
        | REBAR: Low-variance, unbiased gradient estimates for discrete latent variable models (Tucker et al., 2017)
        | Backprop-Q (Xu et al., 2018), Eq. 26
    """

    temperature: Temperature = 0.5
    scale: Scale = OptimalScale(max_scale=1.5)
    decay: float = past(0.98)

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs values that can be relaxed."""
        return needs_float_value(self, site, "OneHotCategorical, RELAX() or ")

    def variate(self, context: SiteContext, params: Tensor) -> tuple[Tensor, Tensor]:
        """The cost-to-go in the program in which sites downstream keep the values of a third run."""
        program, index = context.program, context.table[1]
        held = program.held(relaxation.independent_value(params, index, program))
        with torch.enable_grad():
            leaf = params.detach().requires_grad_()
            pair = relaxation.draw_pair(leaf, index, program.generator)
            values = [relaxation.to_value(relaxation.relax(z, self.tau, index), program) for z in pair]
            _, slope = held.gradient(values[0])
            cost, slope_given = held.gradient(values[1])
            total = (slope * values[0]).sum() - (slope_given * values[1]).sum()
            (path,) = torch.autograd.grad(total, leaf)
        # If no gradient flows through the cost, its slope is unknown. Without the slope it is no valid control variate.
        return cost * (slope.any() | slope_given.any()), path


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
        return self.variate.statistics(2 * width, (0.0,))

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Attaches the gradient to the parameters of the relaxation, and takes a training step of the network."""
        (log_probs, index), variate = context.table, self.variate
        params = relaxation.parameters(log_probs)
        with torch.enable_grad():
            leaf = params.detach().requires_grad_()
            weights = context.statistics["phi"].detach().requires_grad_()
            temperature = self.temperature * fill(weights[:, -1].exp(), leaf)
            pair = relaxation.draw_pair(leaf, index, context.program.generator)
            features = [_features(z, leaf.detach(), temperature, index) for z in pair]
            free, given = (variate.evaluate(weights, own, context) for own in features)
            (path,) = torch.autograd.grad((free - given).sum(), leaf, create_graph=True)
            centred, control = centre(context.cost, given, context)
            score = relaxation.score(leaf.detach(), index)
            gradient = fill(centred - control, score) * score + path
            objective = relaxation.natural(gradient, leaf, index).square().flatten(1).mean(1)
            statistics = variate.train(weights, objective, given, context)
        return SiteTerm(gradient.detach() * params, statistics)


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

    temperature: Temperature = 0.5
    scale: Scale = OptimalScale()
    decay: float = past(0.98)

    uses_critic: ClassVar[bool] = True

    def variate(self, context: SiteContext, params: Tensor) -> tuple[Tensor, Tensor]:
        """The critic's ``Q``."""
        index, table = context.table[1], q_table(context)
        with torch.enable_grad():
            leaf = params.detach().requires_grad_()
            pair = relaxation.draw_pair(leaf, index, context.program.generator)
            free, given = ((relaxation.relax(z, self.tau, index) * table).sum((-1, -2)) for z in pair)
            (path,) = torch.autograd.grad((free - given).sum(), leaf)
        level = context.cost.new_zeros(()) if context.level is None else context.level
        return level + given.detach(), path


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
