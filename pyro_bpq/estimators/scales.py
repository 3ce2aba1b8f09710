r"""Adaptive scales of four control variates, from running moments of the gradient itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bpq.estimators.base import SiteContext, Statistics, site_mean, update_mean
from pyro_bpq.estimators.baselines import leave_one_out

__all__ = ["PAIRS", "SIZE", "ScaledTerms", "initial_statistics", "solve"]

SIZE = 4  # control variates
PAIRS = tuple((i, j) for i in range(SIZE) for j in range(i, SIZE))
# A running moment looks back on so many samples, however few there are in a step: rare values show in it.
_SAMPLES = 1000


def initial_statistics() -> Statistics:
    """Gram matrix of the control variates, their products with the plain gradient, means, scales."""
    return {"gram": (0.0,) * (len(PAIRS) + SIZE), "means": (0.0,) * 3, "scales": (1.0,) * SIZE}


@dataclass(frozen=True)
class ScaledTerms:
    r"""The plain gradient ``u`` and the control variates ``v_i`` of each component, ``g = u - Σ a_i v_i``.

        u = r s,  v_0 = r_0 s - m_0,  v_1 = r_1 s,  v_2 = r_2 s - m_2,  v_3 = r_3 s

    with the score ``s`` and the analytic terms ``m_0`` of the exact costs and ``m_2`` of the critic, all with respect
    to the same parameters. The residuals ``r_i`` are the exact costs, the critic's expectation, its own residual and
    the control variates of later sites.

    Args:
        score: ``s``, ``(..., D, K)``.
        cost: ``r``, centred by the other particles or by earlier steps, ``(...)``.
        residuals: ``r_0`` to ``r_3``, centred alike.
        offsets: ``m_0`` to ``m_3``, ``(..., D, K)``; ``None`` stands for zero.
        means: Means of cost, exact costs and level in this step, ``(G, 3)``.
    """

    score: Tensor
    cost: Tensor
    residuals: tuple[Tensor, ...]
    offsets: tuple[Tensor | None, ...]
    means: Tensor

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
            critic: ``m_2``.
            exact: ``m_0``.
        """
        cost = context.cost
        zero = cost.new_zeros(()).expand_as(cost)
        known = zero if context.exact_cost is None else context.exact_cost
        later = zero if context.correction is None else context.correction
        means = torch.stack((site_mean(cost), site_mean(known), site_mean(level)), 1)
        if context.num_particles > 1:
            parts = [leave_one_out(part) for part in (cost, known, level, own, later)]
        else:
            shift = context.statistics["means"].reshape(-1, 3, *(1,) * (cost.dim() - 1))
            parts = [cost - shift[:, 0], known - shift[:, 1], level - shift[:, 2], own, later]
        return cls(score, parts[0], tuple(parts[1:]), (exact, None, critic, None), means)

    def residual(self, scales: Tensor) -> Tensor:
        """``r - Σ a_i r_i``; scales ``(G, 4)``."""
        return self.cost - sum(self.scale(scales, i) * part for i, part in enumerate(self.residuals))

    def scale(self, scales: Tensor, i: int) -> Tensor:
        """The ``i``-th scale, broadcastable to the costs."""
        return scales[:, i].reshape(-1, *(1,) * (self.cost.dim() - 1))

    def updated(self, context: SiteContext, scales: Tensor, decay: float, max_scale: float) -> dict[str, Tensor]:
        """New running statistics after a step with these scales."""
        assert context.count is not None
        old, count = context.statistics, context.count
        means = {"means": update_mean(old["means"], self.means, count, decay)}
        if all(part is None for part in (context.exact, context.level, context.learned, context.correction)):
            # Nothing to scale.
            return {} if context.num_particles > 1 else means
        moments, elements = context.joint(self.moments(scales))
        slow = 1.0 - elements / _SAMPLES
        slow = slow.clamp(min=decay) if isinstance(slow, Tensor) else max(slow, decay)
        gram = update_mean(old["gram"], moments, count, slow)
        solved = solve(gram, old["scales"], 3.0 / ((count + 1.0) * elements), max_scale)
        return {**means, "gram": gram, "scales": solved}

    def moments(self, scales: Tensor) -> Tensor:
        """Mean products ``v_i·v_j`` and ``u·v_i``, shape ``(G, 14)``.

        Given all but the sampled value every ``v_i`` has mean zero. So a vector that does not read it may be taken
        from ``u``: with what is known of the gradient taken away, products are less noisy. Given all that the others
        read, ``v_3`` has mean zero: its products with them are zero, not what a few rare values make of them.
        """
        known = torch.zeros_like(self.score)
        for i, offset in enumerate(self.offsets):
            known = known if offset is None else known + self.scale(scales, i)[..., None, None] * offset
        # (r s - m)·(r' s - m'), where only what is there is multiplied; index 3 is that of the later sites.
        variates = list(zip(self.residuals, self.offsets, strict=True))
        pairs = [(variates[i], variates[j]) for i, j in PAIRS]
        pairs += [((self.cost, known), variate) for variate in variates]
        norm = self.score.square().sum((-1, -2))
        products = []
        for (left, m), (right, n) in pairs:
            value = left * right * norm
            value = value if m is None else value - right * (self.score * m).sum((-1, -2))
            value = value if n is None else value - left * (self.score * n).sum((-1, -2))
            products.append(value if m is None or n is None else value + (m * n).sum((-1, -2)))
        for k, (i, j) in enumerate(PAIRS):
            products[k] = torch.zeros_like(products[k]) if i < j == 3 else products[k]
        return torch.stack([site_mean(value) for value in products], 1)


def solve(gram: Tensor, scales: Tensor, ridge: Tensor, max_scale: float) -> Tensor:
    """Scales in ``[0, max_scale]`` that minimise ``|u - Σ a_i v_i|²``: coordinate descent, warm start.

    A ridge towards 1 that fades with the number of samples steadies the first steps.
    """
    square = gram.new_zeros(gram.shape[0], SIZE, SIZE)
    for n, (i, j) in enumerate(PAIRS):
        square[:, i, j] = square[:, j, i] = gram[:, n]
    diagonal = torch.diagonal(square, dim1=1, dim2=2)
    prior = ridge.unsqueeze(1) * diagonal
    right = gram[:, len(PAIRS) :] + prior
    below = (diagonal + prior).clamp(min=torch.finfo(gram.dtype).tiny)
    scales = scales.clone()
    for _ in range(2):
        for i in range(SIZE):
            rest = right[:, i] - (square[:, i] * scales).sum(1) + diagonal[:, i] * scales[:, i]
            scales[:, i] = (rest / below[:, i]).clamp(0.0, max_scale)
    # A control variate that is zero throughout leaves its scale where it was: 0/0 above gives 0.
    return torch.where(diagonal > 0, scales, torch.ones_like(scales))
