r"""All-action gradient with learned and exact control variates and adaptive scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import SiteContext, SiteInfo, SiteTerm, Statistics, site_mean, update_mean
from pyro_bpq.estimators.baselines import leave_one_out

__all__ = ["AllAction"]

_PAIRS = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))


@dataclass(frozen=True)
class AllAction:
    r"""All values of a finite site, with a correction that keeps it unbiased for any critic.

        g_X = Σ_d Σ_k ∇q_d(k) (I_X[d,k] + a_2 A_X[d,k]) + R_X ∇ log q(x)
        R_X = (C_X - I_X(x)) - a_1 E[Q_X] - a_2 (Q_X(x) - E[Q_X]) - a_3 Σ_Y A_Y - b

    ``I_X`` are the immediate costs that are known exactly at every value of every component, ``Q_X`` the
    critic of the rest, ``A_Y`` the graph-wise control variates of later sites. ``b`` is the mean of
    the same over the other particles or, with one particle, over earlier steps. The scales ``a`` minimise the
    second moment of the gradient with respect to the logits, from running moments of earlier steps, and
    lie in ``[0, max_scale]``: a useless critic leaves leave-one-out, or the running baseline.

    Args:
        exact: Whether the immediate costs of the model are evaluated at every value by one extra run of the
            model: ``"auto"`` where that pays, ``True`` always, ``False`` never.
        adaptive: Whether the scales adapt; otherwise they are 1.
        decay: Weight of the past in the running moments.
        max_scale: Upper end of the scales.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Gradient Estimators with Q-functions
        | Local expectation gradients for black box variational inference (Titsias and
          Lázaro-Gredilla, 2015)
    """

    exact: bool | str = "auto"
    adaptive: bool = True
    decay: float = 0.98
    max_scale: float = 1.2

    is_unbiased: ClassVar[bool] = True
    is_pathwise: ClassVar[bool] = False
    uses_critic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.exact not in (True, False, "auto"):
            raise OptionError(f'AllAction(exact={self.exact!r}): write True, False or "auto".')
        if not 0.0 <= self.decay < 1.0:
            raise OptionError(f"AllAction(decay={self.decay!r}): write a number in [0, 1).")
        if not self.max_scale > 0.0:
            raise OptionError(f"AllAction(max_scale={self.max_scale!r}): write a positive number.")

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs finite components."""
        if site.components is not None:
            return None
        other = "Pathwise()" if site.has_rsample else "ScoreFunction()"
        return f"AllAction() needs a finite support, which {site.distribution} lacks; use {other}"

    def statistics(self, num_particles: int) -> Statistics:
        """Gram matrix of the control variates, their products with the plain gradient, means, scales."""
        return {"gram": (0.0,) * 9, "means": (0.0, 0.0), "scales": (1.0, 1.0, 1.0)}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights every log-probability by what it has to move the surrogate with."""
        assert context.log_probs is not None and context.index is not None
        with torch.no_grad():
            terms = _Terms.of(context)
            scales = context.statistics["scales"] if self.adaptive else torch.ones_like(terms.ones)
            a1, a2, a3 = (scales[:, i].reshape(-1, *(1,) * (context.cost.dim() - 1)) for i in range(3))
            residual = terms.cost - a1 * terms.level - a2 * terms.own - a3 * terms.later
            weights = residual[..., None, None] * terms.sampled
            if context.exact is not None:
                weights = weights + terms.probs * context.exact
            if context.learned is not None:
                weights = weights + a2[..., None, None] * terms.probs * context.learned
            statistics = self._update(context, terms)
        return SiteTerm(weights * context.log_probs, statistics)

    def _update(self, context: SiteContext, terms: _Terms) -> dict[str, Tensor]:
        assert context.count is not None
        old, count = context.statistics, context.count
        if context.level is None and context.learned is None and context.correction is None:
            # Nothing to scale: the immediate costs are all there is.
            return (
                {}
                if context.num_particles > 1
                else {"means": update_mean(old["means"], terms.means, count, self.decay)}
            )
        gram = update_mean(old["gram"], terms.moments(context), count, self.decay)
        means = update_mean(old["means"], terms.means, count, self.decay)
        samples = (count + 1.0) * terms.cost[0].numel()
        scales = _solve(gram, old["scales"], 3.0 / samples, self.max_scale)
        return {"gram": gram, "means": means, "scales": scales}


@dataclass(frozen=True)
class _Terms:
    """The plain gradient ``u`` and the control variates ``v_i`` of each element, in logit space.

    u = r_0 s + e,  v_1 = r_1 s,  v_2 = r_2 s - m,  v_3 = r_3 s

    with the score ``s = onehot(x) - p``, the exact term ``e`` and the critic's all-action term ``m``.
    """

    probs: Tensor
    sampled: Tensor
    cost: Tensor
    level: Tensor
    own: Tensor
    later: Tensor
    means: Tensor

    @property
    def ones(self) -> Tensor:
        return self.cost.new_ones(self.cost.shape[0], 3)

    @classmethod
    def of(cls, context: SiteContext) -> _Terms:
        assert context.log_probs is not None and context.index is not None
        probs = context.log_probs.detach().exp()
        sampled = torch.zeros_like(probs).scatter_(-1, context.index.unsqueeze(-1), 1.0)
        zero = context.cost.new_zeros(()).expand_as(context.cost)
        cost = context.cost if context.exact_cost is None else context.cost - context.exact_cost
        level = zero if context.level is None else context.level
        own = zero
        if context.learned is not None:
            level = level + (probs * context.learned).sum((-1, -2))
            own = ((sampled - probs) * context.learned).sum((-1, -2))
        later = zero if context.correction is None else context.correction
        means = torch.stack((site_mean(cost), site_mean(level)), 1)
        if context.num_particles > 1:
            parts = [leave_one_out(part) for part in (cost, level, own, later)]
        else:
            shift = context.statistics["means"].reshape(-1, 2, *(1,) * (cost.dim() - 1))
            parts = [cost - shift[:, 0], level - shift[:, 1], own, later]
        return cls(probs, sampled, parts[0], parts[1], parts[2], parts[3], means)

    def moments(self, context: SiteContext) -> Tensor:
        """Mean products ``v_i·v_j`` (six) and ``u·v_i`` (three), shape ``(G, 9)``."""
        score = self.sampled - self.probs
        r = (self.level, self.own, self.later)
        ss = score.square().sum((-1, -2))
        sm = mm = se = me = None
        if context.learned is not None:
            m = self.probs * (context.learned - (self.probs * context.learned).sum(-1, keepdim=True))
            sm, mm = (score * m).sum((-1, -2)), m.square().sum((-1, -2))
        if context.exact is not None:
            e = self.probs * (context.exact - (self.probs * context.exact).sum(-1, keepdim=True))
            se = (score * e).sum((-1, -2))
            me = (m * e).sum((-1, -2)) if context.learned is not None else None
        products = []
        for i, j in _PAIRS:
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


def _solve(gram: Tensor, scales: Tensor, ridge: Tensor, max_scale: float) -> Tensor:
    """Scales in ``[0, max_scale]`` that minimise ``|u - Σ a_i v_i|²``: coordinate descent, warm start.

    A ridge towards 1 that fades with the number of samples steadies the first steps.
    """
    square = gram.new_zeros(gram.shape[0], 3, 3)
    for n, (i, j) in enumerate(_PAIRS):
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
