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

_SIZE = 4  # control variates
_PAIRS = tuple((i, j) for i in range(_SIZE) for j in range(i, _SIZE))
# A running moment looks back on so many samples, however few there are in a step: rare values show in it.
_SAMPLES = 1000


@dataclass(frozen=True)
class AllAction:
    r"""All values of a finite site, with a correction that keeps it unbiased for any critic.

        g_X = Σ_d Σ_k ∇q_d(k) (a_0 I_X[d,k] + a_2 A_X[d,k]) + R_X ∇ log q(x)
        R_X = C_X - a_0 I_X(x) - a_1 E[Q_X] - a_2 (Q_X(x) - E[Q_X]) - a_3 Σ_Y A_Y - b

    ``I_X`` are the immediate costs that are known exactly at every value of every component, ``Q_X`` the
    critic of the rest, ``A_Y`` the graph-wise control variates of later sites. ``b`` is the mean of
    the same over the other particles or, with one particle, over earlier steps. The scales ``a`` minimise the
    second moment of the gradient with respect to the logits, from running moments of earlier steps, and
    lie in ``[0, max_scale]``: a useless critic leaves leave-one-out, or the running baseline. Exact costs have a
    scale too, since what is left without them may vary more than their sum: ``log q`` of a rare value and a
    large cost of it cancel.

    Args:
        exact: Whether the immediate costs of the model are evaluated at every value by one extra run of the
            model: ``"auto"`` where that pays, ``True`` always, ``False`` never.
        adaptive: Whether the scales adapt; otherwise they are 1.
        decay: Weight of the past in the running moments; more where a step has few samples.
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
        return {"gram": (0.0,) * (len(_PAIRS) + _SIZE), "means": (0.0,) * 3, "scales": (1.0,) * _SIZE}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights every log-probability by what it has to move the surrogate with."""
        assert context.log_probs is not None and context.index is not None
        with torch.no_grad():
            terms = _Terms.of(context)
            scales = context.statistics["scales"] if self.adaptive else torch.ones_like(context.statistics["scales"])
            a = [scales[:, i].reshape(-1, *(1,) * context.cost.dim(), 1) for i in range(_SIZE)]
            residual = terms.cost - sum(a[i][..., 0, 0] * r for i, r in enumerate(terms.residuals))
            weights = residual[..., None, None] * terms.sampled
            if context.exact is not None:
                weights = weights + a[0] * terms.probs * context.exact
            if context.learned is not None:
                weights = weights + a[2] * terms.probs * context.learned
            statistics = self._update(context, terms, a)
        return SiteTerm(weights * context.log_probs, statistics)

    def _update(self, context: SiteContext, terms: _Terms, a: list[Tensor]) -> dict[str, Tensor]:
        assert context.count is not None
        old, count = context.statistics, context.count
        means = {"means": update_mean(old["means"], terms.means, count, self.decay)}
        if all(part is None for part in (context.exact, context.level, context.learned, context.correction)):
            return {} if context.num_particles > 1 else means
        elements = terms.cost[0].numel()
        decay = max(self.decay, 1.0 - elements / _SAMPLES)
        gram = update_mean(old["gram"], terms.moments(a), count, decay)
        scales = _solve(gram, old["scales"], 3.0 / ((count + 1.0) * elements), self.max_scale)
        return {**means, "gram": gram, "scales": scales}


@dataclass(frozen=True)
class _Terms:
    """The plain gradient ``u`` and the control variates ``v_i`` of each element, in logit space.

    u = r s,  v_0 = r_0 s - m_0,  v_1 = r_1 s,  v_2 = r_2 s - m_2,  v_3 = r_3 s

    with the score ``s = onehot(x) - p`` and the all-action terms ``m_0`` of the exact costs, ``m_2`` of the critic.
    """

    probs: Tensor
    sampled: Tensor
    cost: Tensor
    residuals: tuple[Tensor, ...]
    offsets: tuple[Tensor | None, ...]
    means: Tensor

    @classmethod
    def of(cls, context: SiteContext) -> _Terms:
        assert context.log_probs is not None and context.index is not None
        probs = context.log_probs.detach().exp()
        sampled = torch.zeros_like(probs).scatter_(-1, context.index.unsqueeze(-1), 1.0)
        zero = context.cost.new_zeros(()).expand_as(context.cost)
        exact = zero if context.exact_cost is None else context.exact_cost
        level = zero if context.level is None else context.level
        own = zero
        if context.learned is not None:
            level = level + (probs * context.learned).sum((-1, -2))
            own = ((sampled - probs) * context.learned).sum((-1, -2))
        later = zero if context.correction is None else context.correction
        means = torch.stack((site_mean(context.cost), site_mean(exact), site_mean(level)), 1)
        if context.num_particles > 1:
            parts = [leave_one_out(part) for part in (context.cost, exact, level, own, later)]
        else:
            shift = context.statistics["means"].reshape(-1, 3, *(1,) * (context.cost.dim() - 1))
            parts = [context.cost - shift[:, 0], exact - shift[:, 1], level - shift[:, 2], own, later]
        offsets = (_all_action(probs, context.exact), None, _all_action(probs, context.learned), None)
        return cls(probs, sampled, parts[0], tuple(parts[1:]), offsets, means)

    def moments(self, a: list[Tensor]) -> Tensor:
        """Mean products ``v_i·v_j`` and ``u·v_i``, shape ``(G, 14)``.

        Given all but the sampled value every ``v_i`` has mean zero. So a vector that does not read it may be taken
        from ``u``: with what is known of the gradient taken away, products are less noisy. Given all that the others
        read, ``v_3`` has mean zero: its products with them are zero, not what a few rare values make of them.
        """
        score = self.sampled - self.probs
        known = torch.zeros_like(score)
        for scale, offset in zip(a, self.offsets, strict=True):
            known = known if offset is None else known + scale * offset
        # (r s - m)·(r' s - m'), where only what is there is multiplied; index 3 is that of the later sites.
        variates = list(zip(self.residuals, self.offsets, strict=True))
        pairs = [(variates[i], variates[j]) for i, j in _PAIRS]
        pairs += [((self.cost, known), variate) for variate in variates]
        norm = score.square().sum((-1, -2))
        products = []
        for (left, m), (right, n) in pairs:
            value = left * right * norm
            value = value if m is None else value - right * (score * m).sum((-1, -2))
            value = value if n is None else value - left * (score * n).sum((-1, -2))
            products.append(value if m is None or n is None else value + (m * n).sum((-1, -2)))
        for k, (i, j) in enumerate(_PAIRS):
            products[k] = torch.zeros_like(products[k]) if i < j == 3 else products[k]
        return torch.stack([site_mean(value) for value in products], 1)


def _all_action(probs: Tensor, table: Tensor | None) -> Tensor | None:
    """``Σ_k ∇q(k) table[k]`` with respect to the logits."""
    return None if table is None else probs * (table - (probs * table).sum(-1, keepdim=True))


def _solve(gram: Tensor, scales: Tensor, ridge: Tensor, max_scale: float) -> Tensor:
    """Scales in ``[0, max_scale]`` that minimise ``|u - Σ a_i v_i|²``: coordinate descent, warm start.

    A ridge towards 1 that fades with the number of samples steadies the first steps.
    """
    size = scales.shape[1]
    square = gram.new_zeros(gram.shape[0], size, size)
    for n, (i, j) in enumerate(_PAIRS):
        square[:, i, j] = square[:, j, i] = gram[:, n]
    diagonal = torch.diagonal(square, dim1=1, dim2=2)
    prior = ridge.unsqueeze(1) * diagonal
    right = gram[:, len(_PAIRS) :] + prior
    below = (diagonal + prior).clamp(min=torch.finfo(gram.dtype).tiny)
    scales = scales.clone()
    for _ in range(2):
        for i in range(size):
            rest = right[:, i] - (square[:, i] * scales).sum(1) + diagonal[:, i] * scales[:, i]
            scales[:, i] = (rest / below[:, i]).clamp(0.0, max_scale)
    # A control variate that is zero throughout leaves its scale where it was: 0/0 above gives 0.
    return torch.where(diagonal > 0, scales, torch.ones_like(scales))
