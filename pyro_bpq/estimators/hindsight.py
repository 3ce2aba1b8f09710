r"""Hindsight: the law of a site's value given what was drawn after it, in place of the drawn value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_bpq.errors import positive
from pyro_bpq.estimators.base import (
    Estimator,
    SiteContext,
    SiteInfo,
    SiteTerm,
    Statistics,
    site_mean,
    unit_scale,
)
from pyro_bpq.estimators.requirements import needs_finite
from pyro_bpq.estimators.score_function import LeaveOneOut
from pyro_bpq.rollout.features import Components, Neighbours
from pyro_bpq.rollout.sums import common_type, in_single

# Weight of the past in the moments of crossed costs.
_DECAY = 0.99


class Changes(NamedTuple):
    """What other values of sites change, relative to the drawn values, where the changes are zero.

    The shapes are ``(G, M, plates, D, K)``. Of bits the dimension ``K`` is left out: the changes are those of the other
    value. All tensors are in nats and detached.

    Args:
        law: Change of ``log q`` of the sites that read the site, their values held.
        later: Change of the costs that read the site and a site downstream.
        immediate: Change of the costs that read the site and no site downstream.
    """

    law: Tensor
    later: Tensor
    immediate: Tensor


class HeldCosts(NamedTuple):
    """What other values of ``G`` like-shaped sites change while all other sites keep their values.

    All tensors but ``log_q`` are detached.

    Args:
        log_q: Log-probabilities of all values, ``(G, M, plates, D, K)``, or log-odds of bits, ``(G, M, plates, D)``;
            of counts their means.
        value: Indices of the drawn values, ``(G, M, plates, D)``; of bits in the type of ``log_q``.
        changes: The changes at all values, or predictions of them.
        settled: Sum ``(G, M, plates)``, in nats, of the immediate costs at the drawn values.
        sign: Of bits the sign of the step to the other value, 1 or -1, ``(G, M, plates, D)``; else ``None``.
        rest: Sum of the costs that read the site and are not known at other values; ``None`` if there are none.
        particle: Index ``(1,)`` of the particle in which changes are known; ``None`` if they are in all.
        drawn: Indices ``(G, M or 1, plates, n)`` of the components whose changes are known; ``None`` if all changes
            are.
        share: For each of them the inverse of the number of times that it is drawn on average in a particle, the choice
            of the particle included.
        exact: True changes ``(G, M or 1, plates, n, K)`` of the drawn components.
        excess: Of later and of immediate costs, how much more they were in the run than where ``exact`` comes from,
            ``(G, M or 1, plates)`` each; ``None`` if it is the run itself.
        near: Of counts the weights of the steps.
        back: Of counts the change of ``log q`` of the sites that read them one step to the other side, as ``exact``.
        ahead: Of drawn counts the change of immediate costs that slopes at the other value predict, as ``exact``;
            ``None`` where curvatures predict.
        dispersion: ``log q`` of negative binomials as a function of ``total_count`` alone, ``(G, M, plates)``, with its
            gradient; ``None`` if there is none.
    """

    log_q: Tensor
    value: Tensor
    changes: Changes
    settled: Tensor
    sign: Tensor | None = None
    rest: Tensor | None = None
    particle: Tensor | None = None
    drawn: Tensor | None = None
    share: Tensor | None = None
    exact: Changes | None = None
    excess: tuple[Tensor, Tensor] | None = None
    near: Neighbours | None = None
    back: Tensor | None = None
    ahead: Tensor | None = None
    dispersion: Tensor | None = None

    @property
    def has_bits(self) -> bool:
        """Whether the changes are those of the other value of a bit."""
        return self.sign is not None


@dataclass(frozen=True)
class Hindsight(Estimator):
    r"""Averages the score function over the values that a site may have had, given what was drawn after it.

        g = Σ_d Σ_v [q_d(v) (1 - λ) A_d(v) + w_d(v) (B_d(v) + λ A_d(v) + L - b_d)] ∇ log q_d(v),
        w_d(v) ∝ q_d(v) q(children | x with x_d = v)

    All costs are in nats. ``A_d(v)`` are the *immediate* costs, at ``x`` with ``x_d = v``: they read the site and no
    site downstream. ``B_d(v)`` are the costs that read both. The log-probabilities of its children, the sites of the
    guide that read it, are among them. ``L`` are the other costs downstream. All other sites keep their values. ``w``
    is the law of the component given all of these. So ``w (B + L)`` is the expectation of the score-function gradient
    given the other values: it has the same mean and, for the same baseline, never more variance. Immediate costs do not
    depend on what is drawn later, so the law ``q`` serves them as well. A part ``λ`` of them stays beside ``B + L``, as
    they often cancel: a good guide makes the sum nearly the same for all values. ``λ`` in ``[0, 1]`` is fitted to
    earlier steps for each site. ``b_d`` is the mean of ``Σ_v w_d(v) (B_d(v) + λ A_d(v)) + L`` over the other particles
    or, with one particle, over earlier steps. In a site that is predicted it is the mean of ``B + λ A + L``. A baseline
    may read whatever does not depend on the site's own value.

    A site of up to ``draws`` components is evaluated at all values, in one extra run of guide and model. In a larger
    site, changes of costs and log-probabilities come from their slopes and curvatures at the drawn values. ``draws``
    components of each row of one particle, drawn with probability ``π``, are evaluated. Each adds
    ``(exact - predicted) / π``. This is unbiased for any prediction. Only Bernoulli and OneHotCategorical have slopes;
    predictions for others are zero. Curvatures are averaged over particles in a plate. Apart from this they are exact
    if one linear map reads the site and costs add up over its outputs.

    It pays where one value has little effect on what is drawn next: layers of many units, chains that forget. If a
    child shows its parent's value, nothing is averaged. Costs that are not known at other values multiply the plain
    score. If a child's law is not known at other values, as where rows of a plate meet, the site gets leave-one-out.
    Programs that sampled values steer are refused.

    Args:
        draws: Number of components that are evaluated for each row of a particle. Where a site has more components,
            slopes predict those of all sites that have slopes. If that is all sites, a step evaluates one random
            particle.
        curvature: Whether predictions use curvatures.
        crossed: Whether the baseline takes the other particles' values beside the particle's own past, as in
            :class:`CrossedLeaveOneOut`.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Hindsight network credit assignment (Young, 2022)
        | Sampling-based approaches to calculating marginal densities (Gelfand and Smith, 1990), for Rao-Blackwell
        | Local expectation gradients for black box variational inference (Titsias and Lázaro-Gredilla, 2015)
    """

    draws: int = positive(4)
    curvature: bool = True
    crossed: bool = False

    is_unbiased: ClassVar[bool] = True
    takes_outdated: ClassVar[bool] = True
    unsupported = needs_finite

    def split(self, site: SiteInfo) -> Components | None:
        """The components of a site that take other values."""
        return site.components

    def number(self, split: Components) -> int:
        """Number of components that are evaluated."""
        return self.draws

    @property
    def needs(self) -> frozenset[str]:
        """What other values change, and crossed costs if ``crossed`` is set."""
        asked = frozenset({"hindsight", "program"})
        return asked | {"crossed"} if self.crossed else asked

    def statistics(self) -> Statistics:
        """Running means of the costs, for a single particle, and the moments that fit the scales."""
        return {"baseline": 0.0, "rest": 0.0, "settled": 0.0, "moments": (0.0,) * 6}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights every log-probability by its expected coefficient."""
        held: HeldCosts = context.signals["hindsight"]
        with torch.no_grad():
            later = context.cost - held.settled
            later = later if held.rest is None else later - held.rest
            log_q = held.log_q.detach()
            # Of the other values of bits, relative to the drawn ones.
            log_q = log_q if held.sign is None else log_q * held.sign
            means = _means(log_q, held.changes, held.has_bits, held.drawn is not None)
            level, kept, statistics = self._level(context, held, later, means)
            table = _coefficients(means, level, kept, held.has_bits)
            if held.drawn is not None:
                table = _corrected(table, log_q, level, kept, held)
            if (uncut := unknown_costs(held, later)) is not None:
                rest, own = centred_cost(uncut, context, "rest")
                table, statistics = table + _of_drawn(rest, log_q, held), {**statistics, **own}
            table = table if held.sign is None else table.mul_(held.sign)
        return SiteTerm(table * held.log_q, statistics)

    def _level(
        self, context: SiteContext, held: HeldCosts, later: Tensor, means: Means
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The centred sum ``B + λ A + L`` at the drawn values ``(..., D or 1)``, ``λ``, and new statistics."""
        # Predictions read all particles: in a baseline they would bring in the own value.
        own = [means.later.sum(-1), means.held.sum(-1)] if held.drawn is None else [later.new_zeros(())] * 2
        centred, new = centred_cost(later.unsqueeze(-1) + own[0], context, "baseline")
        immediate, more = centred_cost(held.settled.unsqueeze(-1) + own[1], context, "settled")
        crossed = context.crossed if self.crossed and context.cost.shape[1] > 1 else None
        shape = (-1, *(1,) * later.dim())
        kept, scale = (part.reshape(shape) for part in _scales(context.statistics["moments"]))
        moments = _moments(centred.mean(-1), immediate.mean(-1), crossed, context)
        # Centred as a whole: the own means are put back by the costs.
        level = centred - own[0] + kept * (immediate - own[1])
        if crossed is not None:
            mean = context.statistics["moments"][:, 0].reshape(shape)
            level = level - scale * (crossed.unsqueeze(-1) - mean)
        return level, kept, {**new, **more, "moments": moments}


class Means(NamedTuple):
    """The laws of the values, and changes of costs times probabilities.

    Args:
        weights: Probabilities given all other sites.
        chance: Probabilities given the past.
        later: Later costs times ``weights``.
        held: Immediate costs times ``weights``.
        immediate: Immediate costs times ``chance``.
    """

    weights: Tensor
    chance: Tensor
    later: Tensor
    held: Tensor
    immediate: Tensor


def _means(log_q: Tensor, changes: Changes, has_bits: bool, is_predicted: bool = False) -> Means:
    """The laws of the values and the costs; impossible values cost nothing. Predictions are numbers."""
    chance = log_q.sigmoid() if has_bits else log_q.exp()
    # Given an impossible value, a later law may be no number.
    law = log_q + changes.law.masked_fill(chance == 0.0, 0.0)
    weights = law.sigmoid_() if has_bits else law.softmax(-1)

    def weighted(weights: Tensor, cost: Tensor) -> Tensor:
        return weights * (cost if is_predicted else cost.masked_fill((weights == 0.0) | cost.isinf(), 0.0))

    later, immediate = changes.later, changes.immediate
    return Means(weights, chance, weighted(weights, later), weighted(weights, immediate), weighted(chance, immediate))


def _coefficients(means: Means, level: Tensor, kept: Tensor, has_bits: bool) -> Tensor:
    """What multiplies the gradients of the log-probabilities or, of bits, of the log-odds of the other value."""
    kept = kept if has_bits else kept.unsqueeze(-1)
    own = (means.immediate, means.held, kept, means.later, level)
    dtype = common_type(*own)
    immediate, held, kept, later, level = (each.to(dtype) for each in own)
    costs = torch.lerp(immediate, held, kept).add_(later)
    if not has_bits:
        return costs + means.weights * level.unsqueeze(-1)
    # The gradient of log q is 1 - q of the log-odds' at the other value, and -q at the drawn one.
    return costs.addcmul_(costs, means.chance, value=-1.0).addcmul_(level, means.weights - means.chance)


def _of_drawn(rest: Tensor, log_q: Tensor, held: HeldCosts) -> Tensor:
    """Coefficients of costs that multiply the score of the drawn values."""
    if held.has_bits:
        return -rest.unsqueeze(-1) * log_q.sigmoid()
    return rest[..., None, None] * torch.zeros_like(log_q).scatter_(-1, held.value.unsqueeze(-1), 1.0)


def unknown_costs(held: HeldCosts, like: Tensor) -> Tensor | None:
    """What is not known at other values, in expectation over the particle that is drawn."""
    if held.excess is None:
        return held.rest
    excess = held.excess[0] + held.excess[1]
    if held.particle is not None:
        excess = torch.zeros_like(like).index_copy_(1, held.particle, (like.shape[1] * excess).to(like))
    return excess if held.rest is None else held.rest + excess


def _moments(centred: Tensor, immediate: Tensor, crossed: Tensor | None, context: SiteContext) -> Tensor:
    """Running mean of crossed costs ``c``, and of ``A²``, ``A c``, ``c²``, ``T A``, ``T c`` for centred costs."""
    other = torch.zeros_like(centred) if crossed is None else crossed
    pairs = ((immediate, immediate), (immediate, other), (other, other), (centred, immediate), (centred, other))
    new = torch.stack([site_mean(other), *(site_mean(a * b) for a, b in pairs)], 1)
    return context.running_mean("moments", new, _DECAY)


def _scales(moments: Tensor) -> tuple[Tensor, Tensor]:
    r"""The part of immediate costs and the scale of crossed ones that leave the least of ``T + λ A - κ c``."""
    # Half precision has no number as small as the bounds below.
    mean, own, mixed, square, of_own, of_crossed = in_single(moments).unbind(1)
    spread = (square - mean.square()).clamp(min=1e-12)
    left = (own - mixed.square() / spread).clamp(min=1e-3 * own + 1e-12)
    kept = ((mixed * of_crossed / spread - of_own) / left).clamp(0.0, 1.0)
    return kept.to(moments), unit_scale(of_crossed + kept * mixed, spread).to(moments)


def _corrected(table: Tensor, log_q: Tensor, level: Tensor, kept: Tensor, held: HeldCosts) -> Tensor:
    """Replaces, in expectation over the draws, the predicted coefficients by exact ones."""
    drawn, share = held.drawn, held.share
    assert drawn is not None and share is not None and held.exact is not None

    def pick(tensor: Tensor) -> Tensor:
        return tensor if held.particle is None else tensor.index_select(1, held.particle)

    dim, at = -1, drawn
    if not held.has_bits:
        dim, at, share = -2, drawn.unsqueeze(-1).expand(*drawn.shape, table.shape[-1]), share.unsqueeze(-1)
    own, values = pick(table), pick(log_q).gather(dim, at)
    level = pick(level)
    if held.excess is not None:
        later, immediate = (part.unsqueeze(-1) for part in held.excess)
        level = level - later - kept * immediate
    exact = _coefficients(_means(values, held.exact, held.has_bits), level, kept, held.has_bits)
    own = own.scatter_add(dim, at, ((exact - own.gather(dim, at)) * share).to(own))
    return own if held.particle is None else table.index_copy_(1, held.particle, own)


def centred_cost(cost: Tensor, context: SiteContext, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Subtracts the mean over the other particles or, with a single particle, that of earlier steps."""
    centred, new = LeaveOneOut()(cost, {"baseline": context.statistics[name]}, context.count)
    return centred, {name: new["baseline"]} if new else {}
