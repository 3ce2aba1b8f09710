"""Adaptive scales of five control variates, computed from running moments of the gradient itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.estimators.base import Estimator, SiteContext, Statistics, site_mean
from pyro_bpq.estimators.score_function import leave_one_out

SIZE = 5  # control variates
# A running moment covers at least this many samples, so that it contains rare values.
_SAMPLES = 1000
# The scale of a learned control variate is zero unless its gain exceeds this many standard errors.
_ERRORS = 2.0
# Indices of control variates: exact costs, differences of the critic (1 is its level), later sites, their exact costs.
EXACT, CRITIC, _LATER, _LATER_EXACT = 0, 2, 3, 4
_NOT_LEARNED = EXACT, _LATER_EXACT
# One of the last two is zero.
START = (1.0, 1.0, 1.0, 1.0, 0.0)
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
        return {"gram": gram, "squares": (0.0,) * SIZE, "means": (0.0,) * 3, "scales": START}

    def scales(self, context: SiteContext) -> Tensor:
        """The scales of this step, ``(G, 5)``."""
        scales = context.statistics["scales"]
        return scales if self.adaptive else scales.new_tensor(START).expand_as(scales)


@dataclass(frozen=True)
class ScaledTerms:
    r"""The plain gradient ``u`` and the control variates ``v_i`` of each component, ``g = u - Σ a_i v_i``.

        u = r s,  v_0 = r_0 s - m_0,  v_1 = r_1 s,  v_2 = r_2 s - m_2,  v_3 = r_3 s,  v_4 = r_4 s

    ``s`` is the score. ``m_0`` and ``m_2`` are the analytic terms of the exact costs and of the critic. The residuals
    ``r_i`` are, in order: the exact costs, the critic's expectation, the critic's own residual, the control variates of
    later sites, and what of these is known without critics. The last two replace each other: one has the scale zero.
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
        later, known = context.correction, context.exact_correction
        if known is not None:
            later, known = (known, None) if later is None else (later + known, known)
        parts = (cost, context.exact_cost, level, own, later, known)
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
        trusted = _NOT_LEARNED if context.correction is not None else (*_NOT_LEARNED, _LATER)
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
        if not set(present) <= set(trusted):
            noise = (squares - _partial(gram, scales).square()).clamp(min=0.0) / samples.unsqueeze(1)
        ridge = 3.0 / ((count + 1.0) * elements)
        solved = solve(gram, old["scales"], ridge, options.max_scale, noise, present, trusted)
        return {**means, "gram": gram, "squares": squares, "scales": solved}

    def moments(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Mean products of ``v_0`` to ``v_4`` and ``u``, ``(G, 6, 6)``; mean squares ``((u - Σ_{j≠i} a_j v_j)·v_i)²``.

        The squares have shape ``(G, 5)``; those of exact costs stay zero. Every ``v_i`` has mean zero given
        everything except the sampled value. So the known part of the gradient is subtracted from ``u``, which makes
        products less noisy. ``v_3`` and ``v_4`` have mean zero given everything that the other variates read. So their
        products with them are set to zero, as is that with each other, which nothing asks for.
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
        rest = plain
        for n, i in enumerate(present):
            rest = rest if i >= _LATER else rest - scaled[n] * rows[:, n]
        for n, i in enumerate(present):
            if i not in _NOT_LEARNED:
                without = plain if i == _LATER else rest + scaled[n] * rows[:, n]
                squares[:, i] = site_mean((without * rows[:, n]).sum((-1, -2)).square())
        return squares


@lru_cache(maxsize=32)
def _index(at: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(at, device=device)


@lru_cache(maxsize=32)
def _unrelated(at: tuple[int, ...], device: torch.device) -> Tensor:
    """Products of later sites with other control variates, whose mean is zero, and of ``u``, which nobody asks for."""
    found = [[(_LATER <= max(i, j) < SIZE and i != j) or min(i, j) == SIZE for j in at] for i in at]
    return torch.tensor(found, device=device)


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
    trusted: tuple[int, ...] = _NOT_LEARNED,
) -> Tensor:
    """Scales ``(G, 5)`` in ``[0, max_scale]`` that minimise ``|u - Σ a_i v_i|²``: coordinate descent, warm start.

    A ``ridge`` towards 1, ``(G,)``, steadies the first steps. If few rare samples dominate a moment, the minimiser fits
    noise. So the scales of learned control variates, which are not ``trusted``, shrink, unless ``noise`` is ``None``:

        a_i ← a_i max(0, 1 - 4 e_i² / b_i²),   b_i = E[(u - Σ_{j≠i} a_j v_j)·v_i],   noise = e_i², its squared error

    Of the last two, later sites with and without their critics, only the one that takes off more is used: critics have
    to do better than exact costs alone. ``gram`` holds running means of products, ``(G, 6, 6)``, with ``u`` last. The
    scales of control variates that are not ``present`` stay.
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
            if noise is not None and i not in trusted:
                found = found * (1.0 - _ERRORS**2 * noise[:, i] / signal.square().clamp(min=tiny)).clamp(min=0.0)
            chosen[:, n] = found
    if _LATER in present and _LATER_EXACT in present:
        chosen = _one_of_the_last(chosen, right, diagonal)
    # A control variate that is always zero gives 0/0, hence 0, above: its scale is set to 1 instead.
    return scales.index_copy(1, at, torch.where(diagonal > 0, chosen, torch.ones_like(chosen)))


def _one_of_the_last(scales: Tensor, right: Tensor, diagonal: Tensor) -> Tensor:
    """Sets the scale of the last or the last but one control variate to zero: of the one that takes off less."""
    gain = scales * (2.0 * right - scales * diagonal)
    wins = gain[:, -2:-1] > gain[:, -1:]
    return torch.cat((scales[:, :-2], scales[:, -2:-1] * wins, scales[:, -1:] * ~wins), 1)
