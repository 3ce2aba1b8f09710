r"""RELAX: a network or the critic as a free-form control variate of a relaxed value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError, check_option
from pyro_bpq.estimators import relaxation
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm, Statistics
from pyro_bpq.estimators.q_estimators import local_cost
from pyro_bpq.estimators.rebar import RELAXES_ALL, parts, relaxed_cost
from pyro_bpq.estimators.relaxation import Annealed, fill
from pyro_bpq.estimators.requirements import needs_finite, needs_float_value
from pyro_bpq.estimators.scaled import OptimalScale, Scale, Scaled, centre, read_scale, update_means
from pyro_bpq.estimators.variates import NetworkVariate


@dataclass(frozen=True)
class RELAX(Estimator):
    r"""Score function with a trained control variate of a relaxed value. Unbiased; any finite components.

        g = (C - c(z̃) - b) ∇log q(x) + ∇c(z) - ∇c(z̃),   c(z) = c_φ(softmax(z/τ)) + η C(softmax(z/τ))

    ``z`` and ``z̃`` are as in :class:`REBAR`. The network ``c_φ``, ``τ`` and ``η`` learn along the gradient of
    ``|g|²``; ``c_φ`` also sees the log-probabilities, detached. Without ``uses_cost`` there is no ``η`` term, no extra
    run and no condition on the costs. With it, the conditions and the extra runs are those of :class:`REBAR`.

    Args:
        variate: The network and its training options.
        temperature: Temperature ``τ`` of the first step.
        uses_cost: Whether the cost at the relaxed value is part of the control variate, as in the paper.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backpropagation through the void: Optimizing control variates for black-box gradient estimation
          (Grathwohl et al., 2018), Eq. 8
    """

    variate: NetworkVariate = NetworkVariate()
    temperature: float = 0.5
    uses_cost: bool = False

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "table"})

    def __post_init__(self) -> None:
        check_option(self, "variate", isinstance(self.variate, NetworkVariate), "NetworkVariate(...)")
        if isinstance(self.temperature, Annealed):
            raise OptionError("RELAX learns its temperature: write the number that it starts from.")
        relaxation.check_temperature(self)

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs finite components; with ``uses_cost`` values that can be relaxed."""
        if not self.uses_cost:
            return needs_finite(self, site)
        refused = needs_float_value(self, site, RELAXES_ALL)
        return refused and refused.replace("RELAX()", "RELAX(uses_cost=True)", 1)

    def sized_statistics(self, width: int) -> Statistics:
        """The network's weights, then ``log τ`` relative to its initial value, then ``η``."""
        return self.variate.statistics(2 * width, (0.0, 0.0))

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Attaches the gradient to the parameters of the relaxation, and takes a training step of the network."""
        (log_probs, index), program, variate = context.table, context.program, self.variate
        params = relaxation.parameters(log_probs)
        with torch.enable_grad():
            leaf = params.detach().requires_grad_()
            weights = context.statistics["phi"].detach().requires_grad_()
            temperature = self.temperature * context.per_site(weights[:, -2].exp()).unsqueeze(-1)
            if self.uses_cost:
                held = program.held(relaxation.independent_value(leaf, index, program))
            state = program.generator.get_state()
            pair = relaxation.draw_pair(leaf, index, program.generator)
            free, given = (
                variate.evaluate(weights, _features(z, leaf.detach(), temperature, index), context) for z in pair
            )
            (path,) = torch.autograd.grad((free - given).sum(), leaf, create_graph=True)
            if self.uses_cost:
                eta = context.per_site(weights[:, -1])
                # The cost sees the same relaxed values as the network.
                program.generator.set_state(state)
                cost, cost_path = relaxed_cost(leaf, index, temperature.detach(), program, held)
                given = given + eta * cost
                path = path + fill(eta, path) * cost_path
            centred, control = centre(context.cost, given, context)
            score = relaxation.score(leaf.detach(), index)
            gradient = fill(centred - control, score) * score + path
            objective = relaxation.natural(gradient, leaf, index).square().flatten(1).mean(1)
            statistics = variate.train(weights, objective, context)
        means = update_means(context.cost, given.detach(), context, variate.decay)
        return SiteTerm(gradient.detach() * params, {**statistics, **means})


def _features(z: Tensor, params: Tensor, temperature: Tensor, index: Tensor) -> Tensor:
    """Inputs of the network ``(G, M, plates, F)``: the relaxed value, centred, and the parameters."""
    weights = relaxation.relax(z, temperature, index)
    if z.dim() == index.dim():
        return torch.cat((2.0 * weights[..., 1] - 1.0, params.clamp(-6.0, 6.0) / 2.0), -1)
    shifted = (params - params.mean(-1, keepdim=True)).clamp(-6.0, 6.0) / 2.0
    return torch.cat((weights.flatten(-2) - 1.0 / weights.shape[-1], shifted.flatten(-2)), -1)


@dataclass(frozen=True)
class RELAXQ(Scaled):
    r"""RELAX with the critic, linear in the relaxed value, as the free-form control variate. Unbiased.

        g = (C - a c(z̃) - b) ∇log q(x) + a ∇c(z) - a ∇c(z̃),   c(z) = V + Σ_d Σ_k softmax(z/τ)[d,k] Q[d,k]

    ``Q`` is the critic plus the immediate costs that are known at every value. No extra run.

    Args:
        temperature: A number or :class:`Annealed`.
        scale, decay: Scale ``a``, a number or :class:`OptimalScale`; weight of the past in the running means.

    References:
        | Backprop-Q (Xu et al., 2018), Eq. 27
        | Backpropagation through the void (Grathwohl et al., 2018), Eq. 8
    """

    temperature: float | Annealed = 0.5
    scale: Scale = OptimalScale()
    decay: float = 0.98

    uses_critic: ClassVar[bool] = True
    needs = frozenset({"program", "table"})

    def __post_init__(self) -> None:
        super().__post_init__()
        relaxation.check_temperature(self)

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Attaches the gradient to the parameters of the relaxation."""
        log_probs, index = context.table
        params = relaxation.parameters(log_probs)
        zero = torch.zeros_like(log_probs, requires_grad=False)
        # Terms that read the sampled value are left out, e.g. costs of one component at the values of the others.
        learned = context.learned if context.own is None else None
        exact = context.exact if zero.shape[-2] == 1 else None
        table = sum((part for part in (learned, exact) if part is not None), zero)
        temperature = relaxation.temperature_of(self.temperature, context)
        with torch.enable_grad():
            leaf = params.detach().requires_grad_()
            pair = relaxation.draw_pair(leaf, index, context.program.generator)
            free, given = ((relaxation.relax(z, temperature, index) * table).sum((-1, -2)) for z in pair)
            (path,) = torch.autograd.grad((free - given).sum(), leaf)
        with torch.no_grad():
            level = context.cost.new_zeros(()) if context.level is None else context.level
            value = level + given.detach()
            plain, variate = parts(context, leaf, value, path)
            gradient = plain - fill(read_scale(self.scale, context), plain) * variate
            natural = (relaxation.natural(part, leaf, index) for part in (plain, variate))
            statistics = self.updated(context, value, *natural)
        return SiteTerm(gradient * params, statistics)


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
