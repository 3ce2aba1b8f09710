r"""Differences of costs one step from a count: the exact gradient of an expectation over counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

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
from pyro_bpq.estimators.hindsight import Changes, HeldCosts, centred_cost, unknown_costs
from pyro_bpq.estimators.requirements import needs_counts
from pyro_bpq.rollout.features import Components, Neighbours

# Ratio of the probabilities of what is drawn later from which on the count one step on stands for itself.
_MOST = 3.0
# Weight of the past in the moments.
_DECAY = 0.99
# Number of components of a site up to which a map from all to all is learned.
_MOST_LINEAR = 512


@dataclass(frozen=True)
class Differences(Estimator):
    r"""Compares the costs of a count with those one step on; for Poisson, binomial, negative binomial, geometric sites.

        g_d = (s_d [w_d A_d + (1 - λ) (u_d - w_d) T + λ (w_d v_d (T + B_d) - w_d T + 1[r_d > 3] u_d T)] - c_d) ∇μ_d,
        T = L - b,    v_d = p_d 1[p_d ≤ 3],    c = κ H (z - μ)

    ``μ`` is the mean of a component, ``s`` the step from its value to the next one (down for a binomial whose
    probability is above one half), and ``w`` makes the difference exact: ``∇_μ E f(z) = E[s w (f(z + s) - f(z))]``.
    ``u`` is the weight of the step that leads to ``z``, so that ``s (u - w) ∇μ`` is the score. All costs are in nats.
    ``A_d`` is the change of the *immediate* costs: they read the site and no site downstream. ``L`` are the other costs
    downstream, and ``B_d`` is the change of those of them that read the site. Sites downstream keep their values:
    ``p_d`` is the ratio of their probabilities, ``q(children | z + s) / q(children | z)``, and ``r_d`` the one of the
    step that leads to ``z``. Where a ratio is above 3, ``z + s`` stands for itself when it is drawn. So the estimator
    is unbiased also where ``z`` excludes what ``z + s`` allows. ``b`` is the mean of ``L`` over the other particles or,
    with one particle, over earlier steps. ``λ`` and, for each component, ``κ`` in ``[0, 1]``, and the regression ``H``
    of the differences of a site on its own value, are fitted to earlier steps; ``c``, for sites of up to 512
    components, has mean zero.

    A site of up to ``whole`` components is evaluated exactly, in one extra row of the recording for each. In a larger
    one all changes are predicted, and ``draws`` components of each row, drawn with probability ``π``, are evaluated and
    add ``(exact - predicted) / π``. This is unbiased for any prediction. Where a single linear map leads to the costs,
    slopes and curvatures predict. Elsewhere ``(w_d + ½ τ_d (u_d - w_d)) a_d(z)`` predicts ``w_d A_d``, with
    ``a_d(z) = s_d ∂A/∂z_d``, and drawn components add ``w_d (A_d - a_d(z) - ½ τ_d (a_d(z + s_d) - a_d(z))) / π``. As
    ``E[u_d a_d(z)] = E[w_d a_d(z + s_d)]``, this is unbiased for any ``τ``. ``τ = 1`` is the trapezoid rule, whose
    error is of third order; ``τ`` in ``[0, 1]`` weighs what it saves against the noise of ``u``, by earlier steps.
    Costs that are not known at other values multiply the score, with a baseline. So does all that a ``total_count``
    with a gradient costs.

    It pays where a count has little effect on what is drawn next. If a child shows its parent's value, ``λ`` is zero,
    and later costs multiply the score.

    Args:
        draws: Number of components of a large site that are evaluated for each row.
        curvature: Whether curvatures predict, where a single linear map leads to the costs.
        whole: Number of components up to which all of a site are evaluated.

    Raises:
        OptionError: If ``draws`` or ``whole`` is not a positive number.

    References:
        | Stochastic simulation (Asmussen and Glynn, 2007), for expectations as differences
        | Hindsight network credit assignment (Young, 2022), for sites downstream
    """

    draws: int = positive(1)
    curvature: bool = True
    whole: int = positive(4)

    is_unbiased: ClassVar[bool] = True
    takes_outdated: ClassVar[bool] = True
    needs = frozenset({"hindsight", "program"})

    unsupported = needs_counts

    def split(self, site: SiteInfo) -> Components | None:
        """The components of a site that take other values."""
        return site.counts

    def number(self, split: Components) -> int:
        """Number of components that are evaluated."""
        return split.size if split.size <= self.whole else self.draws

    def statistics(self) -> Statistics:
        """Running means of the costs, for a single particle, and the moments that fit ``λ``."""
        return {"baseline": 0.0, "rest": 0.0, "whole": 0.0, "moments": (0.0, 0.0)}

    def sized_statistics(self, width: int) -> Statistics:
        """Of each component draws, and sums of errors and changes of slopes; moments for ``τ``, ``κ`` and ``H``."""
        linear = {"level": (width,), "squares": (width,), "products": (width, width), "fit": (width, 2)}
        sizes = {"drawn": (width, 3), "noise": (width, 2), **(linear if width <= _MOST_LINEAR else {})}
        return {name: torch.zeros(size) for name, size in sizes.items()}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights every mean by its difference."""
        held: HeldCosts = context.signals["hindsight"]
        assert held.near is not None
        with torch.no_grad():
            later = context.cost - held.settled
            later = later if held.rest is None else later - held.rest
            level, statistics = centred_cost(later, context, "baseline")
            kept = unit_scale(*context.statistics["moments"].unbind(1))
            kept = kept.reshape(-1, *(1,) * level.dim())
            table, new, sums = _table(held, level.unsqueeze(-1), kept, context.statistics)
            table, linear = _without_linear(table * held.near.step, held, context)
            new |= linear
            statistics |= sums | {name: context.running_mean(name, own, _DECAY) for name, own in new.items()}
            rest = unknown_costs(held, later)
        surrogate = (table * held.log_q).sum(-1)
        for cost, score, name in ((rest, context.score, "rest"), (held.settled + later, held.dispersion, "whole")):
            if cost is not None and score is not None:
                centred, own = centred_cost(cost, context, name)
                surrogate, statistics = surrogate + centred * score, {**statistics, **own}
        return SiteTerm(surrogate, statistics)


def _without_linear(table: Tensor, held: HeldCosts, context: SiteContext) -> tuple[Tensor, dict[str, Tensor]]:
    """Subtracts from coefficients what is linear in the counts' distances from their means; its mean is zero."""
    known = context.statistics
    if "products" not in known:
        return table, {}
    slope = known["products"] / known["squares"].clamp(min=1e-12).unsqueeze(-2)
    # Counts may have another type than costs.
    away, own = (part.flatten(1, -2).to(slope) for part in (held.value - held.log_q.detach(), table))
    centred, linear = own - known["level"].unsqueeze(1), away @ slope.mT
    # Means weigh in the gradient as well.
    weighed = held.log_q.detach().flatten(1, -2) * linear
    new = {
        "level": own.mean(1),
        "squares": away.square().mean(1),
        "products": centred.mT @ away / away.shape[1],
        "fit": torch.stack(((weighed * centred).mean(1), (weighed * linear).mean(1)), -1),
    }
    return (own - unit_scale(*known["fit"].unbind(-1)).unsqueeze(1) * linear).reshape(table.shape), new


def _table(
    held: HeldCosts, level: Tensor, kept: Tensor, known: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The coefficients of all means, without their signs; of new statistics the means of this step; new sums."""
    near, back, exact, at, share = held.near, held.back, held.exact, held.drawn, held.share
    assert near is not None and back is not None and exact is not None
    if at is None:
        first, change = _differences(exact, back, near, level)
        return torch.addcmul(first, kept, change), {"moments": _moments(first, change)}, {}
    assert share is not None
    slope = held.changes.immediate
    first, change = _differences(held.changes, torch.zeros_like(near.weight), near, level)
    predicted = torch.addcmul(first, kept, change)

    def pick(part: Tensor) -> Tensor:
        return part.expand_as(slope).gather(-1, at)

    drawn = Neighbours(*map(pick, near))
    level = level if held.excess is None else level - held.excess[0].unsqueeze(-1)
    first, change = _differences(exact, back, drawn, level)
    errors = torch.addcmul(first, kept, change) - pick(predicted)
    # Sites of a group that takes no other values tell nothing.
    is_known = (share > 0.0).to(errors)
    new = {"moments": _moments(is_known * first, is_known * change)}
    shape, means = (len(at), *(1,) * (at.dim() - 2), -1), known["drawn"][..., 1:] / (known["drawn"][..., :1] + 1.0)
    offset, bent = (part.reshape(shape) for part in means.unbind(-1))
    left, turn = errors, torch.zeros_like(errors)
    if held.ahead is not None:
        # Half of the slope's change. In expectation it is half of the slope, by the weights of the steps to the value.
        turn = 0.5 * drawn.weight * (held.ahead - pick(slope))
        tau = unit_scale(*known["noise"].unbind(-1)).reshape(shape)
        predicted = torch.addcmul(predicted, tau, 0.5 * (near.back - near.weight) * slope)
        offset, left = offset - tau * bent, left - pick(tau) * turn
        squares = pick(held.log_q.detach()) * ((turn - pick(bent)) * share).square()
        squares = torch.zeros_like(slope).scatter_add(-1, at, squares.to(slope))
        new["noise"] = torch.stack((squares, squares + 0.25 * slope.square()), -1).flatten(1, -3).mean(1)
    told = (is_known, is_known * errors, is_known * turn)
    zeros = torch.zeros_like(known["drawn"][..., 0])
    sums = torch.stack([zeros.scatter_add(1, at.flatten(1), part.flatten(1).to(zeros)) for part in told], -1)
    table = (predicted + offset).scatter_add(-1, at, (left - pick(offset)).mul(share).to(predicted))
    return table, new, {"drawn": _DECAY * known["drawn"] + sums}


def _differences(changes: Changes, before: Tensor, near: Neighbours, level: Tensor) -> tuple[Tensor, Tensor]:
    """The coefficients by the score, and what later values that are kept change in them; its mean is zero.

    ``before`` is the change of laws one step to the other side.
    """
    ratio, none = changes.law.exp(), torch.zeros_like(changes.law)
    # An impossible value costs infinitely much, and counts for nothing.
    after = torch.where((ratio > 0.0) & (ratio <= _MOST), ratio * (level + changes.later), none)
    stands = torch.where((-before).exp() > _MOST, near.back, none) - near.back
    scored = torch.where(near.weight > 0.0, near.weight * changes.immediate, none)
    return scored + (near.back - near.weight) * level, torch.addcmul(near.weight * after, stands, level)


def _moments(first: Tensor, change: Tensor) -> Tensor:
    """Means of ``-first * change`` and of ``change²``, by site."""
    return torch.stack((-site_mean(first * change), site_mean(change.square())), 1)
