r"""Score functions with learned and exact control variates and adaptive scales, for finite sites and for others.

The scales of the five control variates are computed from running moments of the gradient itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.errors import option, positive
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm, Statistics, past, site_mean
from pyro_bpq.estimators.requirements import alternative, needs_finite
from pyro_bpq.estimators.score_function import leave_one_out

SIZE = 5  # control variates
# A running moment covers at least this many samples, so that it contains rare values.
_SAMPLES = 1000
# The scale of a learned control variate is zero unless its gain exceeds this many standard errors.
_ERRORS = 2.0
# Indices of control variates: exact costs, differences of the critic (1 is its level), what critics predict of later
# sites, and what is known of them exactly.
EXACT, CRITIC, _LATER, _LATER_EXACT = 0, 2, 3, 4
_NOT_LEARNED = EXACT, _LATER_EXACT
# Of a gradient or a control variate; `None` if it is absent.
Part = Tensor | None


class Adaptive(Estimator):
    """Base of the estimators with these control variates and fields of these names. Unbiased."""

    adaptive: bool
    decay: float
    max_scale: float

    is_unbiased: ClassVar[bool] = True
    uses_critic: ClassVar[bool] = True

    def statistics(self) -> Statistics:
        """Products of control variates with each other and the plain gradient, squares, means, and scales."""
        gram = torch.zeros(SIZE + 1, SIZE + 1)
        return {"gram": gram, "squares": (0.0,) * SIZE, "means": (0.0,) * 3, "scales": (1.0,) * SIZE}

    def scales(self, context: SiteContext) -> Tensor:
        """The scales of this step, ``(G, 5)``."""
        scales = context.statistics["scales"]
        return scales if self.adaptive else torch.ones_like(scales)


@dataclass(frozen=True)
class ScaledTerms:
    r"""The plain gradient ``u`` and the control variates ``v_i`` of each component, ``g = u - Σ a_i v_i``.

        u = r s,  v_0 = r_0 s - m_0,  v_1 = r_1 s,  v_2 = r_2 s - m_2,  v_3 = r_3 s,  v_4 = r_4 s

    ``s`` is the score. ``m_0`` and ``m_2`` are the analytic terms of the exact costs and of the critic. The residuals
    ``r_i`` are, in order: the exact costs, the critic's expectation, the critic's own residual, and the control
    variates of later sites, those by critics and those by exact costs.
    """

    score: Tensor  # `s`, `(..., D, K)`
    cost: Tensor  # `r`, centred by the other particles or by earlier steps, `(...)`
    # `r_0` to `r_4`, centred like `r`; `None` for a control variate that is absent
    residuals: tuple[Part, ...]
    offsets: tuple[Part, ...]  # `m_0` to `m_4`, `(..., D, K)`; `None` stands for zero
    means: Tensor  # Means of cost, exact costs and level in this step, `(G, 3)`

    @classmethod
    def of(cls, context: SiteContext, score: Tensor, level: Part, own: Part, critic: Part, exact: Part) -> ScaledTerms:
        """Centres the residuals.

        ``level`` and ``own`` are the expectation and the residual of the critic; ``critic`` is ``m_2``, ``exact``
        ``m_0``.
        """
        cost = context.cost
        parts = (cost, context.exact_cost, level, own, context.correction, context.exact_correction)
        zero = cost.new_zeros(cost.shape[0])
        means = torch.stack([zero if part is None else site_mean(part) for part in parts[:3]], 1)
        if context.others:
            centred = [None if part is None else leave_one_out(part.expand_as(cost), context.others) for part in parts]
        else:
            shift = context.statistics["means"].reshape(-1, 3, *(1,) * (cost.dim() - 1))
            centred = [None if p is None else p - shift[:, n] if n < 3 else p for n, p in enumerate(parts)]
        assert centred[0] is not None
        return cls(score, centred[0], tuple(centred[1:]), (exact, None, critic, None, None), means)

    @property
    def present(self) -> tuple[int, ...]:
        """Indices of the control variates that are not absent."""
        return tuple(i for i, part in enumerate(self.residuals) if part is not None)

    def residual(self, scales: Tensor) -> Tensor:
        """``r - Σ a_i r_i``; scales ``(G, 5)``."""
        rest = self.cost
        for i, part in enumerate(self.residuals):
            if part is not None:
                rest = rest - self.scale(scales, i) * part
        return rest

    def scale(self, scales: Tensor, i: int) -> Tensor:
        """The ``i``-th scale, broadcastable to the costs."""
        return scales[:, i].reshape(-1, *(1,) * (self.cost.dim() - 1))

    def updated(self, context: SiteContext, scales: Tensor, options: Adaptive) -> dict[str, Tensor]:
        """New running statistics after a step with these scales."""
        old, count = context.statistics, context.count
        means = {"means": context.running_mean("means", self.means, options.decay)}
        present = self.present
        if not present:
            return {} if context.num_particles > 1 else means
        new = torch.cat([part.flatten(1) for part in self.moments(scales)], 1)
        moments, elements = context.joint(new)
        # Sites of half precision keep their statistics in the default precision.
        moments = moments.to(old["gram"].dtype)
        slow = 1.0 - elements / _SAMPLES
        slow = slow.clamp(min=options.decay) if isinstance(slow, Tensor) else max(slow, options.decay)
        gram = context.running_mean("gram", moments[:, :-SIZE].reshape(old["gram"].shape), slow)
        squares = context.running_mean("squares", moments[:, -SIZE:], slow)
        samples = elements * (count + 1.0).clamp(max=(1.0 + slow) / (1.0 - slow))
        noise = None
        if not set(present) <= set(_NOT_LEARNED):
            noise = (squares - _partial(gram, scales).square()).clamp(min=0.0) / samples.unsqueeze(1)
        ridge = 3.0 / ((count + 1.0) * elements)
        solved = solve(gram, old["scales"], ridge, options.max_scale, noise, present)
        return {**means, "gram": gram, "squares": squares, "scales": solved}

    def moments(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Mean products of ``v_0`` to ``v_4`` and ``u``, ``(G, 6, 6)``; mean squares ``((u - Σ_{j≠i} a_j v_j)·v_i)²``.

        The squares have shape ``(G, 5)``; those of exact costs stay zero. Every ``v_i`` has mean zero given
        everything except the sampled value. So the known part of the gradient is subtracted from ``u``, which makes
        products less noisy. ``v_3`` and ``v_4`` have mean zero given everything that the other variates read. So their
        products with them are set to zero.
        """
        present, vectors, known = self.present, [], []
        for i, (part, offset) in enumerate(zip(self.residuals, self.offsets, strict=True)):
            if part is None:
                continue
            vector = part[..., None, None] * self.score
            if offset is not None:
                vector = vector - offset
                known.append(self.scale(scales, i)[..., None, None] * offset)
            vectors.append(vector)
        plain = self.cost[..., None, None] * self.score
        vectors.append(plain - sum(known[1:], known[0]) if known else plain)
        rows = torch.stack([vector.expand_as(plain) for vector in vectors], 1)
        flat, at = rows.flatten(2), _index((*present, SIZE), rows.device)
        products = flat @ flat.mT / self.cost[0].numel()
        gram = products.new_zeros(len(products), SIZE + 1, SIZE + 1)
        gram[:, at.unsqueeze(1), at] = products.masked_fill(_unrelated((*present, SIZE), rows.device), 0.0)
        return gram, self._squares(rows, present, scales)

    def _squares(self, rows: Tensor, present: tuple[int, ...], scales: Tensor) -> Tensor:
        squares = scales.new_zeros(scales.shape)
        if set(present) <= set(_NOT_LEARNED):
            return squares
        plain, scaled = rows[:, -1], [self.scale(scales, i)[..., None, None] for i in present]
        for n, i in enumerate(present):
            if i not in _NOT_LEARNED:
                others = [m for m, j in enumerate(present) if m != n and not _are_unrelated(i, j)]
                without = plain - sum(scaled[m] * rows[:, m] for m in others)
                squares[:, i] = site_mean((without * rows[:, n]).sum((-1, -2)).square())
        return squares


@lru_cache(maxsize=32)
def _index(at: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(at, device=device)


def _are_unrelated(i: int, j: int) -> bool:
    """Whether a product has mean zero: of a variate of later sites with another. Nobody asks for ``u·u``."""
    return min(i, j) < _LATER <= max(i, j) < SIZE or min(i, j) == SIZE


@lru_cache(maxsize=32)
def _unrelated(at: tuple[int, ...], device: torch.device) -> Tensor:
    """The products that are zero."""
    return torch.tensor([[_are_unrelated(i, j) for j in at] for i in at], device=device)


def _partial(gram: Tensor, scales: Tensor) -> Tensor:
    """Means of ``(u - Σ_{j≠i} a_j v_j)·v_i``, ``(G, 5)``."""
    square = gram[:, :SIZE, :SIZE]
    own = torch.diagonal(square, dim1=1, dim2=2) * scales
    return gram[:, :SIZE, SIZE] - (square @ scales.unsqueeze(-1)).squeeze(-1) + own


def solve(
    gram: Tensor,
    scales: Tensor,
    ridge: Tensor,
    max_scale: float,
    noise: Tensor | None = None,
    present: tuple[int, ...] = tuple(range(SIZE)),
) -> Tensor:
    """Scales ``(G, 5)`` in ``[0, max_scale]`` that minimise ``|u - Σ a_i v_i|²``: coordinate descent, warm start.

    A ``ridge`` towards 1, ``(G,)``, steadies the first steps. If few rare samples dominate a moment, the minimiser fits
    noise. So the scales of learned control variates shrink, unless ``noise`` is ``None``:

        a_i ← a_i max(0, 1 - 4 e_i² / b_i²),   b_i = E[(u - Σ_{j≠i} a_j v_j)·v_i],   noise = e_i², its squared error

    ``gram`` holds running means of products, ``(G, 6, 6)``, with ``u`` last. The scales of control variates that are
    not ``present`` stay.
    """
    at = _index(present, gram.device)
    square, right = gram[:, at.unsqueeze(1), at], gram[:, at, SIZE]
    diagonal = torch.diagonal(square, dim1=1, dim2=2)
    prior = ridge.unsqueeze(1) * diagonal
    tiny = torch.finfo(gram.dtype).tiny
    below = (diagonal + prior).clamp(min=tiny)
    others = square - torch.diag_embed(diagonal)
    chosen = scales[:, at]
    for _ in range(2 if len(present) > 1 else 1):
        for n, i in enumerate(present):
            signal = right[:, n] - torch.linalg.vecdot(others[:, n], chosen)
            found = ((signal + prior[:, n]) / below[:, n]).clamp(0.0, max_scale)
            if noise is not None and i not in _NOT_LEARNED:
                found = found * (1.0 - _ERRORS**2 * noise[:, i] / signal.square().clamp(min=tiny)).clamp(min=0.0)
            chosen[:, n] = found
    # A control variate that is always zero gives 0/0, hence 0, above: its scale is set to 1 instead.
    return scales.index_copy(1, at, torch.where(diagonal > 0, chosen, torch.ones_like(chosen)))


@dataclass(frozen=True)
class AllAction(Adaptive):
    r"""Sums over all values of a finite site; a correction keeps it unbiased for any critic.

        g_X = Σ_d Σ_k ∇q_d(k) (a_0 I_X[d,k] + a_2 A_X[d,k]) + R_X ∇ log q(x)
        R_X = C_X - a_0 I_X(x) - a_1 E[Q_X] - a_2 (Q_X(x) - E[Q_X]) - Σ_Y (a_3 A_Y + a_4 B_Y) - b

    ``I_X`` are the immediate costs that are known exactly at every value of every component. ``Q_X`` is the critic of
    the remaining costs, with table ``A_X`` and residual ``Q_X(x) - E[Q_X]`` (see also :mod:`pyro_bpq.critics.nets`).
    ``A_Y`` are the graph-wise control variates of later sites by their critics, ``B_Y`` those by their exact costs.
    ``b`` is the mean of the other terms of ``R_X`` over the other particles; with one particle, over the other rows, if
    there are ten or more and they stay apart, else over earlier steps. The scales ``a`` minimise the second moment of
    the gradient with respect to the logits. They come from running moments of earlier steps and lie in
    ``[0, max_scale]``.
    With a useless critic the estimator becomes leave-one-out, or the score function with a running baseline. Exact
    costs have a scale too, because the remaining costs alone may vary more than all costs together.

    Args:
        exact: Whether one extra run of the model evaluates its immediate costs at every value: ``"auto"`` if
            that pays, ``True`` always, ``False`` never.
        adaptive: Whether the scales adapt; otherwise they are 1.
        decay: Weight of the past in running moments; it is raised if a step has few samples.
        max_scale: Upper end of the scales.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backprop-Q (Xu et al., 2018), Eq. 27
        | Local expectation gradients for black box variational inference (Titsias and Lázaro-Gredilla, 2015)
    """

    exact: bool | str = option("auto", lambda exact: exact in (True, False, "auto"), 'True, False or "auto"')
    adaptive: bool = True
    decay: float = past(0.98)
    max_scale: float = positive(1.2)

    needs = frozenset({"table"})
    by_component = True
    exact_costs = property(attrgetter("exact"))
    unsupported = needs_finite

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights every log-probability by its coefficient in the gradient."""
        log_probs, _ = context.table
        with torch.no_grad():
            probs, score = context.score_table
            terms = _terms(context, probs, score)
            scales = self.scales(context)
            weights = terms.residual(scales)[..., None, None] * (score + probs)
            for i, table in ((EXACT, context.exact), (CRITIC, context.learned)):
                if table is not None:
                    weights = weights + terms.scale(scales, i)[..., None, None] * probs * table
            statistics = terms.updated(context, scales, self)
        return SiteTerm(weights * log_probs, statistics)


def _terms(context: SiteContext, probs: Tensor, score: Tensor) -> ScaledTerms:
    """Gradient and control variates in logit space."""
    level, own, critic, exact = context.level, None, None, context.exact
    if context.learned is not None:
        mean = (probs * context.learned).sum(-1, keepdim=True)
        critic = probs * (context.learned - mean)
        level = mean.sum((-1, -2)) if level is None else level + mean.sum((-1, -2))
        own = (score * context.learned).sum((-1, -2))
    if exact is not None:
        exact = probs * (exact - (probs * exact).sum(-1, keepdim=True))
    return ScaledTerms.of(context, score, level, own, critic, exact)


@dataclass(frozen=True)
class QProp(Adaptive):
    r"""Score function with a critic that is quadratic in the value, so that its expectation is known.

        g_X = R_X ∇ log q(x) + a_2 ∇E_q[Q_X]
        R_X = C_X - a_1 V - a_2 (Q_X(x) - V) - a_3 Σ_Y A_Y - b
        Q_X(x) = V + Σ_i g_i e_i + ½ h_i (e_i² - 1),   e_i = (x_i - μ_i) / σ_i

    ``Q_X`` is held fixed as a function of ``x``: ``∇E_q[Q_X] = Σ_i g_i ∇μ_i / σ_i + ½ h_i ∇σ_i² / σ_i²``. This is exact
    for every distribution with finite mean and variance. ``A_Y`` are the graph-wise control variates of later sites.
    ``b`` is the mean of the other terms of ``R_X`` over the other particles; with one particle, over the other rows, if
    there are ten or more and they stay apart, else over earlier steps.
    The scales ``a`` minimise the second moment of the gradient with respect to ``μ / σ`` and ``log σ`` of a normal
    distribution. They come from running moments of earlier steps and lie in ``[0, max_scale]``. Without a critic
    (``critic=False``) the baseline and the later sites' corrections remain.

    Args:
        adaptive: Whether the scales adapt; otherwise they are 1.
        decay: Weight of the past in the running moments.
        max_scale: Upper end of the scales.

    References:
        | Q-Prop: Sample-efficient policy gradient with an off-policy critic (Gu et al., 2017)
        | Backprop-Q (Xu et al., 2018), Eq. 27
    """

    adaptive: bool = True
    decay: float = past(0.995)
    max_scale: float = positive(1.2)

    def unsupported(self, site: SiteInfo) -> str | None:
        """Serves sites without finite components."""
        if site.components is None:
            return None
        other = alternative(site)
        return f"QProp() is for values without finite support, and {site.distribution} has one; use {other}"

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The residual times ``log q``, plus the critic's expectation."""
        with torch.no_grad():
            terms = _moment_terms(context)
            scales = self.scales(context)
            residual = terms.residual(scales)
            statistics = terms.updated(context, scales, self)
        surrogate = residual * context.score
        if context.moments is not None and context.learned is not None:
            expected = (context.learned * context.moments.expected).sum((-1, -2))
            surrogate = surrogate + terms.scale(scales, CRITIC) * expected
        return SiteTerm(surrogate, statistics)


def _moment_terms(context: SiteContext) -> ScaledTerms:
    if context.moments is None or context.learned is None or context.own is None:
        # Without a critic there is no score of the moments: the scales weigh the residual alone.
        return ScaledTerms.of(context, torch.ones_like(context.cost)[..., None, None], context.level, None, None, None)
    # The table's second entry is h/2, and d/dlogσ of ½ h σ² / s² is h.
    critic = context.learned * torch.arange(1, 3, device=context.learned.device)
    return ScaledTerms.of(context, context.moments.powers, context.level, context.own, critic, None)
