r"""Control variates from the slopes of costs: MuProp, double control variates, discrete Stein operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_bpq.estimators.base import (
    Estimator,
    SiteContext,
    SiteInfo,
    SiteTerm,
    Statistics,
    check_decay,
    event_sum,
    site_mean,
)
from pyro_bpq.estimators.requirements import needs_float_value, needs_particles
from pyro_bpq.estimators.score_function import Baseline, WithBaseline, leave_one_out
from pyro_bpq.rollout.sums import in_single


@dataclass(frozen=True)
class MuProp(WithBaseline):
    r"""Score function of the residual of a first-order expansion at the mean, plus its gradient.

        g_X = (f(x) - f(μ) - f'(μ)·(x - μ) - b) ∇ log q(x) + f'(μ)·∇μ

    ``f`` is the cost-to-go in nats and ``μ`` is the mean of the site. Unbiased, even if costs are not differentiable in
    the value (``f' = 0``) or not finite at the mean (then ``f(μ) = 0``). It needs one more run of guide and model, with
    a backward pass, for every site and particle. For Bernoulli and OneHotCategorical, also in ``to_event``. Programs
    that turn the value into an integer see the mean rounded down.

    Args:
        baseline: Baseline ``b`` of the residual: ``None``, :class:`LeaveOneOut` or :class:`RunningBaseline`.
        mean_field: Whether Bernoulli, one-hot and reparameterised sites downstream take their means in the extra run,
            as in the papers, instead of being drawn afresh. The expansion then has no noise, but it is that of another
            program.

    References:
        | MuProp: Unbiased backpropagation for stochastic neural networks (Gu et al., 2016)
        | Backprop-Q (Xu et al., 2018), Eq. 19 to 21
    """

    baseline: Baseline | None = None
    mean_field: bool = False

    needs = frozenset({"program", "table"})

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs values that can be set to their mean, and the requirements of the baseline."""
        return needs_float_value(self, site) or super().unsupported(site)

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The residual times ``log q``, and the slope times the mean."""
        mean, ndim = mean_value(context), context.cost.dim()
        with torch.no_grad():
            program = context.program.mean_field() if self.mean_field else context.program
            level, slope = program.gradient(mean.detach())
            level, slope = (torch.where(t.isfinite(), t, torch.zeros_like(t)) for t in (level, slope))
            residual = context.cost - level - event_sum(slope * (context.program.value - mean), ndim)
            residual, statistics = self.centred(residual, context)
        return SiteTerm(residual * context.score + event_sum(slope * mean, ndim), statistics)


class _OnSlopes(Estimator):
    """Base of :class:`DoubleCV` and :class:`RODEO`, which both read slopes of the costs."""

    scale: float | None = None
    decay: float
    degree: ClassVar[int] = 1  # That of the cost's prediction in the value

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "slope", "table"})

    def __post_init__(self) -> None:
        check_decay(self)

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs values that can carry a gradient, and two particles."""
        return needs_float_value(self, site) or needs_particles(self, site)

    def statistics(self) -> Statistics:
        """Products of the control variates with each other and with the plain gradient, and the scales."""
        if self.scale is not None:
            return {}
        count = self.degree + 1
        return {"gram": (0.0,) * (count * (count + 1)), "scales": (0.0,) * count}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Leave-one-out minus scaled control variates: those of the prediction, and that of the baseline."""
        log_probs, index = context.table
        with torch.no_grad():
            probs, score = context.score_table
            sampled = torch.zeros_like(probs).scatter_(-1, index.unsqueeze(-1), 1.0)
            linear, ahead = _predicted(context, probs, sampled)
            tables = [linear] if self.degree == 1 else [linear, linear.square()]
            # For each control variate: the weight of the sample's log-probability, and its table.
            parts = [((table * sampled).sum(-1, keepdim=True), table) for table in tables]
            centred = leave_one_out(context.cost)[..., None, None]
            if self.scale is None:
                scales = context.statistics["scales"]
            else:
                scales = context.cost.new_full((len(probs), self.degree + 1), self.scale)
            a = scales.reshape(*scales.shape, *(1,) * (probs.dim() - 1)).unbind(1)
            # Sign of the baseline term: f_k - mean (f_j - a t_j) = (f_k - mean f_j) + a mean t_j.
            weights = (centred + a[-1] * ahead) * sampled
            for scale, (own, table) in zip(a, parts, strict=False):
                weights = weights + scale * (probs * table - own * sampled)
            statistics = {}
            if self.scale is None:
                assert context.count is not None
                plain = centred * score
                variates = [own * score - probs * (h - (probs * h).sum(-1, keepdim=True)) for own, h in parts]
                variates.append(-ahead * score)
                products = torch.stack([site_mean(v * other) for v in variates for other in [*variates, plain]], 1)
                gram = context.running_mean("gram", products, self.decay)
                ridge = 3.0 / ((context.count + 1.0) * context.cost[0].numel())
                statistics = {"gram": gram, "scales": _solve(gram, len(variates), ridge)}
        return SiteTerm(weights * log_probs, statistics)


@dataclass(frozen=True)
class DoubleCV(_OnSlopes):
    r"""Leave-one-out with first-order terms from the slopes of the other particles.

        g_k = (f_k - a_1 c_k·(x_k - μ_k) - b_k) ∇ log q(x_k) + a_1 c_k·∇μ_k,
        c_k = 1/(M-1) Σ_{j≠k} f'(x_j),   b_k = 1/(M-1) Σ_{j≠k} (f_j - a_2 f'(x_j)·(x_j - μ_j))

    ``x_k`` is the value of particle ``k`` of ``M``, and ``μ_k`` the mean of its distribution. ``f_k = f(x_k)`` is its
    cost-to-go in nats, and ``f'`` the slope. Neither ``c_k`` nor ``b_k`` reads particle ``k``. Unbiased. If costs have
    no slope, it is leave-one-out.

    It needs two particles and a backward pass to their values. If sites are sampled downstream,
    the backward pass needs another run of guide and model for every site and particle. For Bernoulli and
    OneHotCategorical, also in ``to_event``.

    Args:
        scale: The scales ``a_1 = a_2``; ``None`` takes the scales of least variance, from running moments of earlier
            steps.
        decay: Weight of the past in these moments.

    References:
        Double control variates for gradient estimation in discrete latent variable models (Titsias and Shi, 2022)
    """

    scale: float | None = None
    decay: float = 0.98


@dataclass(frozen=True)
class RODEO(_OnSlopes):
    r"""Leave-one-out with control variates from a discrete Stein operator on functions of the slopes.

    With ``t_k(y) = c_k·(y - μ_k)`` and ``c_k`` the mean slope of the other particles, as in :class:`DoubleCV`, the
    function ``h_k(y) = a_1 t_k(y) + a_2 t_k(y)²`` predicts the cost. For component ``d`` the operator averages over
    its values with the other components kept:

        g_{k,d} = (f_k - h_k(x_k) - b_k) ∇ log q_d(x_{k,d}) + Σ_v ∇q_d(v) h_k(x_k with x_{k,d} = v)

    ``b_k`` is as in :class:`DoubleCV`. The paper trains a network in place of ``h``. Here the weights of ``h`` are
    those of least variance, from running moments of earlier steps. Unbiased for any weights. It has the same
    requirements as DoubleCV.

    Args:
        decay: Weight of the past in the running moments.

    References:
        Gradient estimation with discrete Stein operators (Shi et al., 2022)
    """

    decay: float = 0.98

    degree: ClassVar[int] = 2


def _predicted(context: SiteContext, probs: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """What the slopes of the other particles predict.

    These are ``t_k`` with component ``d`` at value ``v``, ``(..., D, K)``, and the mean over the other particles of
    ``f'(x_j)·(x_j - μ_j)``, ``(..., 1, 1)``.
    """
    slope, ndim = context.program.slope(), context.cost.dim()
    slope = torch.where(slope.isfinite(), slope, torch.zeros_like(slope))
    centred = context.program.value - mean_value(context)
    own, particles = event_sum(slope * centred, ndim), context.cost.shape[1]
    others, ahead = ((part.sum(1, keepdim=True) - part) / (particles - 1.0) for part in (slope, own))
    table = _to_table(others, probs)
    moved = table - (table * sampled).sum(-1, keepdim=True)
    return event_sum(others * centred, ndim)[..., None, None] + moved, ahead[..., None, None]


def _solve(gram: Tensor, count: int, ridge: Tensor) -> Tensor:
    """Scales of least second moment, with a ridge towards zero."""
    wide = in_single(gram)
    square = wide.reshape(-1, count, count + 1)
    left, right = square[..., :-1], square[..., -1:]
    diagonal = torch.diagonal(left, dim1=1, dim2=2)
    tiny = torch.finfo(wide.dtype)
    scaled = diagonal.clamp(min=tiny.tiny**0.5).rsqrt()
    # The system is in units of the control variates' sizes. A control variate that is always zero keeps scale zero.
    system = scaled.unsqueeze(-1) * left * scaled.unsqueeze(-2)
    eye = torch.eye(count, dtype=wide.dtype, device=wide.device)
    system = system * (1 - eye) + eye * (1.0 + ridge.reshape(-1, 1, 1) + 10 * tiny.eps)
    found = torch.linalg.solve(system, scaled.unsqueeze(-1) * right)
    return (scaled * found.squeeze(-1)).clamp(-4.0, 4.0).to(gram)


def mean_value(context: SiteContext) -> Tensor:
    """Mean of a Bernoulli or OneHotCategorical site, with gradient, in the shape of its value."""
    return _to_value(context.table[0].exp(), context.program.value)


def _to_value(table: Tensor, like: Tensor) -> Tensor:
    """Reshapes a table ``(G, M, plates, D, K)`` to a value's shape; takes the last column for a Bernoulli."""
    table = table.expand(*like.shape[: table.dim() - 2], *table.shape[-2:])
    return (table if table.numel() == like.numel() else table[..., 1]).reshape(like.shape)


def _to_table(value: Tensor, like: Tensor) -> Tensor:
    """Inverse of :func:`_to_value`; the first column is zero for a Bernoulli."""
    if value.numel() == like.numel():
        return value.reshape(like.shape)
    flat = value.reshape(like.shape[:-1])
    return torch.stack((torch.zeros_like(flat), flat), -1)
