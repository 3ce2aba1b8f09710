r"""Differences of costs one step from a count: the exact gradient of an expectation over counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_bpq.errors import check_option
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm, Statistics, site_mean, unit_scale
from pyro_bpq.estimators.hindsight import Changes, centred_cost
from pyro_bpq.rollout.features import Components, Neighbours

# Components up to which all of a site are evaluated.
_FEW = 4
# Ratio of the probabilities of what is drawn later from which on the count one step on stands for itself.
_MOST = 3.0
# Weight of the past in the moments.
_DECAY = 0.99


class HeldCounts(NamedTuple):
    """What one step of ``G`` like-shaped counts changes while all other sites keep their values.

    All tensors but ``mean`` and ``dispersion`` are detached. Costs are in nats.

    Args:
        names: Names of the sites.
        mean: Means of the counts, ``(G, M, plates, D)``.
        near: The steps, and their weights.
        changes: The changes of all components, or predictions of them, ``(G, M, plates, D)``.
        settled: Sum ``(G, M, plates)`` of the immediate costs at the drawn values.
        rest: Sum of the costs that read the site and are not known at other values; ``None`` if there are none.
        lost: Whether nothing is known at other values of a site, ``(G,)``; ``None`` if something is at each.
        particle: Index ``(1,)`` of the particle in which changes are known; ``None`` if they are in all.
        drawn: Indices ``(G, M or 1, plates, n)`` of the components whose changes are known; ``None`` if all are.
        share: For each of them the inverse of the number of times that it is drawn on average.
        exact: True changes ``(G, M or 1, plates, n)`` of the drawn components, or of all.
        back: Change of ``log q`` of the sites that read the site one step to the other side, in the same shape.
        excess: Of later and of immediate costs, how much more they were in the run than where ``exact`` comes from,
            ``(G, M or 1, plates)`` each; ``None`` if it is the run itself.
        dispersion: ``log q`` as a function of a negative binomial's ``total_count`` alone, ``(G, M, plates)``; or
            ``None``.
    """

    names: tuple[str, ...]
    mean: Tensor
    near: Neighbours
    changes: Changes
    settled: Tensor
    rest: Tensor | None
    lost: Tensor | None
    particle: Tensor | None
    drawn: Tensor | None
    share: Tensor | None
    exact: Changes
    back: Tensor
    excess: tuple[Tensor, Tensor] | None = None
    dispersion: Tensor | None = None


@dataclass(frozen=True)
class Differences(Estimator):
    r"""Compares the costs of a count with those one step on; for Poisson, binomial, negative binomial, geometric sites.

        g_d = s_d [w_d A_d + (1 - λ) (u_d - w_d) T + λ (w_d v_d (T + B_d) - w_d T + 1[r_d > 3] u_d T)] ∇μ_d,
        T = L - b,    v_d = p_d 1[p_d ≤ 3]

    ``μ`` is the mean of a component, ``s`` the step from its value to the next one (down for a binomial whose
    probability is above one half), and ``w`` makes the difference exact: ``∇_μ E f(z) = E[s w (f(z + s) - f(z))]``.
    ``u`` is the weight of the step that leads to ``z``, so that ``s (u - w) ∇μ`` is the score. All costs are in nats.
    ``A_d`` is the change of the *immediate* costs: they read the site and no site downstream. ``L`` are the other costs
    downstream, and ``B_d`` is the change of those of them that read the site. Sites downstream keep their values:
    ``p_d`` is the ratio of their probabilities, ``q(children | z + s) / q(children | z)``, and ``r_d`` the one of the
    step that leads to ``z``. Where a ratio is above 3, ``z + s`` stands for itself when it is drawn. So the estimator
    is unbiased also where ``z`` excludes what ``z + s`` allows. ``λ`` in ``[0, 1]`` is fitted to earlier steps for each
    site. ``b`` is the mean of ``L`` over the other particles or, with one particle, over earlier steps.

    A site of up to four components is evaluated exactly, in one extra row of the recording for each. In a larger one
    all changes are predicted, from slopes and curvatures, and exactly for the laws of the site itself. ``draws``
    components of each row, drawn with probability ``π``, are evaluated and add ``(exact - predicted) / π``. This is
    unbiased for any prediction. Costs that are not known at other values multiply the score, with a baseline. So does
    all that a ``total_count`` with a gradient costs.

    It pays where a count has little effect on what is drawn next. If a child shows its parent's value, ``λ`` is zero,
    and later costs multiply the score.

    Args:
        draws: Number of components of a large site that are evaluated for each row.
        curvature: Whether predictions use curvatures.

    Raises:
        OptionError: If ``draws`` is not a positive number.

    References:
        | Stochastic simulation (Asmussen and Glynn, 2007), for expectations as differences
        | Hindsight network credit assignment (Young, 2022), for sites downstream
    """

    draws: int = 1
    curvature: bool = True

    is_unbiased: ClassVar[bool] = True
    takes_outdated: ClassVar[bool] = True
    needs = frozenset({"hindsight", "program"})

    def __post_init__(self) -> None:
        check_option(self, "draws", self.draws >= 1, "a positive number")

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs counts."""
        if site.counts is not None:
            return None
        other = "AllAction()" if site.components is not None else "ScoreFunction()"
        needed = "Poisson, Binomial, NegativeBinomial or Geometric"
        return f"Differences() needs {needed}, not {site.distribution}; use {other}"

    def split(self, site: SiteInfo) -> Components | None:
        """The components of a site that take other values."""
        return site.counts

    def number(self, split: Components) -> int:
        """Number of components that are evaluated."""
        return split.size if split.size <= _FEW else self.draws

    def statistics(self) -> Statistics:
        """Running means of the costs, for a single particle, and the moments that fit ``λ``."""
        return {"baseline": 0.0, "rest": 0.0, "whole": 0.0, "moments": (0.0, 0.0)}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights every mean by its difference."""
        held: HeldCounts = context.signals["hindsight"]
        with torch.no_grad():
            rest, later = held.rest, context.cost - held.settled
            later = later if rest is None else later - rest
            if held.lost is not None:
                is_lost = held.lost.reshape(-1, *(1,) * (later.dim() - 1))
                rest = torch.where(is_lost, context.cost, torch.zeros_like(later) if rest is None else rest)
                later = later.masked_fill(is_lost, 0.0)
            level, statistics = centred_cost(later, context, "baseline")
            kept = unit_scale(*context.statistics["moments"].unbind(1))
            table, new = _table(held, level.unsqueeze(-1), kept.reshape(-1, *(1,) * level.dim()))
            table = table * held.near.step
            statistics = {**statistics, "moments": context.running_mean("moments", new, _DECAY)}
            if held.lost is not None:
                table = table.masked_fill(is_lost.unsqueeze(-1), 0.0)
            rest = _with_excess(held, rest, later)
        surrogate = (table * held.mean).sum(-1)
        for cost, score, name in ((rest, context.score, "rest"), (held.settled + later, held.dispersion, "whole")):
            if cost is not None and score is not None:
                centred, own = centred_cost(cost, context, name)
                surrogate, statistics = surrogate + centred * score, {**statistics, **own}
        return SiteTerm(surrogate, statistics)


def _table(held: HeldCounts, level: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The coefficients of all means, without their signs, and new moments ``(G, 2)``."""
    near = held.near
    if held.drawn is None:
        first, change = _differences(held.exact, held.back, near, level)
        return torch.addcmul(first, kept, change), _moments(first, change)

    def pick(tensor: Tensor) -> Tensor:
        return tensor if held.particle is None else tensor.index_select(1, held.particle)

    first, change = _differences(held.changes, torch.zeros_like(near.weight), near, level)
    predicted = torch.addcmul(first, kept, change)
    own, at, level = pick(predicted), held.drawn, pick(level)
    level = level if held.excess is None else level - held.excess[0].unsqueeze(-1)
    first, change = _differences(
        held.exact, held.back, Neighbours(*(pick(part).gather(-1, at) for part in near)), level
    )
    exact = torch.addcmul(first, kept, change)
    assert held.share is not None
    own = own.scatter_add(-1, at, ((exact - own.gather(-1, at)) * held.share).to(own))
    return own if held.particle is None else predicted.index_copy(1, held.particle, own), _moments(first, change)


def _differences(changes: Changes, before: Tensor, near: Neighbours, level: Tensor) -> tuple[Tensor, Tensor]:
    """The coefficients by the score, and what later values that are kept change in them; its mean is zero.

    ``before`` is the change of laws one step to the other side.
    """
    ratio, none = changes.law.exp(), torch.zeros_like(changes.law)
    after = torch.where(ratio > _MOST, none, ratio * (level + changes.later))
    # An impossible value costs infinitely much, and counts for nothing.
    after = torch.where(ratio > 0.0, after, none)
    stands = torch.where((-before).exp() > _MOST, near.back, none) - near.back
    scored = torch.where(near.weight > 0.0, near.weight * changes.immediate, none)
    return scored + (near.back - near.weight) * level, torch.addcmul(near.weight * after, stands, level)


def _moments(first: Tensor, change: Tensor) -> Tensor:
    """Means of ``-first * change`` and of ``change²``, by site."""
    return torch.stack((-site_mean(first * change), site_mean(change.square())), 1)


def _with_excess(held: HeldCounts, rest: Tensor | None, like: Tensor) -> Tensor | None:
    """What is not known at other values, in expectation over the particle that is drawn."""
    if held.excess is None:
        return rest
    excess = held.excess[0] + held.excess[1]
    if held.particle is not None:
        excess = torch.zeros_like(like).index_copy_(1, held.particle, (like.shape[1] * excess).to(like))
    return excess if rest is None else rest + excess
