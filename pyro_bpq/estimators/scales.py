r"""Adaptive scales of three control variates, from running moments of the gradient itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bpq.estimators.base import SiteContext, Statistics, site_mean, update_mean
from pyro_bpq.estimators.baselines import leave_one_out

__all__ = ["PAIRS", "ScaledTerms", "initial_statistics", "solve"]

PAIRS = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))


def initial_statistics() -> Statistics:
    """Gram matrix of the control variates, their products with the plain gradient, means, scales."""
    return {"gram": (0.0,) * 9, "means": (0.0, 0.0), "scales": (1.0, 1.0, 1.0)}


@dataclass(frozen=True)
class ScaledTerms:
    r"""The plain gradient ``u`` and the control variates ``v_i`` of each component, ``g = u - Σ a_i v_i``.

        u = r_0 s + e,  v_1 = r_1 s,  v_2 = r_2 s - m,  v_3 = r_3 s

    with the score ``s``, the exact term ``e`` and the critic's analytic term ``m`` with respect to the same parameters.

    Args:
        score: ``s``, ``(..., D, K)``.
        cost: ``r_0``, centred by the other particles or by earlier steps, ``(...)``.
        level: ``r_1``, the critic's expectation, centred alike.
        own: ``r_2``.
        later: ``r_3``.
        means: Means of cost and level in this step, ``(G, 2)``.
        critic: ``m``, or ``None``.
        exact: ``e``, or ``None``.
    """

    score: Tensor
    cost: Tensor
    level: Tensor
    own: Tensor
    later: Tensor
    means: Tensor
    critic: Tensor | None = None
    exact: Tensor | None = None

    @classmethod
    def of(
        cls,
        context: SiteContext,
        score: Tensor,
        level: Tensor,
        own: Tensor,
        critic: Tensor | None,
        exact: Tensor | None,
    ) -> ScaledTerms:
        """Centres the parts of a residual.

        Args:
            context: The tensors of the sites.
            score: ``s``.
            level: Expectation of the critic, ``(...)``.
            own: Its residual, ``(...)``.
            critic: ``m``.
            exact: ``e``.
        """
        cost = context.cost if context.exact_cost is None else context.cost - context.exact_cost
        later = context.cost.new_zeros(()).expand_as(cost) if context.correction is None else context.correction
        means = torch.stack((site_mean(cost), site_mean(level)), 1)
        if context.num_particles > 1:
            cost, level, own, later = (leave_one_out(part) for part in (cost, level, own, later))
        else:
            shift = context.statistics["means"].reshape(-1, 2, *(1,) * (cost.dim() - 1))
            cost, level = cost - shift[:, 0], level - shift[:, 1]
        return cls(score, cost, level, own, later, means, critic, exact)

    def residual(self, scales: Tensor) -> Tensor:
        """``r_0 - Σ a_i r_i``; scales ``(G, 3)``."""
        a1, a2, a3 = (self.scale(scales, i) for i in range(3))
        return self.cost - a1 * self.level - a2 * self.own - a3 * self.later

    def scale(self, scales: Tensor, i: int) -> Tensor:
        """The ``i``-th scale, broadcastable to the costs."""
        return scales[:, i].reshape(-1, *(1,) * (self.cost.dim() - 1))

    def updated(self, context: SiteContext, decay: float, max_scale: float) -> dict[str, Tensor]:
        """New running statistics."""
        assert context.count is not None
        old, count = context.statistics, context.count
        means = update_mean(old["means"], self.means, count, decay)
        if context.level is None and context.learned is None and context.correction is None:
            # Nothing to scale: the immediate costs are all there is.
            return {} if context.num_particles > 1 else {"means": means}
        gram = update_mean(old["gram"], self.moments(), count, decay)
        samples = (count + 1.0) * self.cost[0].numel()
        return {"gram": gram, "means": means, "scales": solve(gram, old["scales"], 3.0 / samples, max_scale)}

    def moments(self) -> Tensor:
        """Mean products ``v_i·v_j`` (six) and ``u·v_i`` (three), shape ``(G, 9)``."""
        r = (self.level, self.own, self.later)
        s, m, e = self.score, self.critic, self.exact
        ss = s.square().sum((-1, -2))
        sm = None if m is None else (s * m).sum((-1, -2))
        mm = None if m is None else m.square().sum((-1, -2))
        se = None if e is None else (s * e).sum((-1, -2))
        me = None if m is None or e is None else (m * e).sum((-1, -2))
        products = []
        for i, j in PAIRS:
            value = r[i] * r[j] * ss
            if sm is not None and mm is not None and 1 in (i, j):
                value = value - (r[i] if j == 1 else r[j]) * sm
                value = value - r[1] * sm + mm if i == j else value
            products.append(value)
        for i in range(3):
            value = self.cost * r[i] * ss
            if se is not None:
                value = value + r[i] * se
            if i == 1 and sm is not None:
                value = value - self.cost * sm
                value = value - me if me is not None else value
            products.append(value)
        return torch.stack([site_mean(value) for value in products], 1)


def solve(gram: Tensor, scales: Tensor, ridge: Tensor, max_scale: float) -> Tensor:
    """Scales in ``[0, max_scale]`` that minimise ``|u - Σ a_i v_i|²``: coordinate descent, warm start.

    A ridge towards 1 that fades with the number of samples steadies the first steps.
    """
    square = gram.new_zeros(gram.shape[0], 3, 3)
    for n, (i, j) in enumerate(PAIRS):
        square[:, i, j] = square[:, j, i] = gram[:, n]
    diagonal = torch.diagonal(square, dim1=1, dim2=2)
    prior = ridge.unsqueeze(1) * diagonal
    right = gram[:, 6:] + prior
    below = (diagonal + prior).clamp(min=torch.finfo(gram.dtype).tiny)
    scales = scales.clone()
    for _ in range(2):
        for i in range(3):
            rest = right[:, i] - (square[:, i] * scales).sum(1) + diagonal[:, i] * scales[:, i]
            scales[:, i] = (rest / below[:, i]).clamp(0.0, max_scale)
    # A control variate that is zero throughout leaves its scale where it was: 0/0 above gives 0.
    return torch.where(diagonal > 0, scales, torch.ones_like(scales))
