"""Double control variates: leave-one-out with first-order terms from the slopes of the other particles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import (
    Estimator,
    SiteContext,
    SiteInfo,
    SiteTerm,
    Statistics,
    event_sum,
    leave_one_out,
    needs_float_value,
    needs_particles,
    site_mean,
)


class OnSlopes(Estimator):
    """Leave-one-out minus scaled control variates: powers of a linear prediction of the cost, and its baseline.

    ``degree`` is the highest power. ``scale`` is the scale of all of them; ``None`` takes those of least variance, from
    running moments of earlier steps with the weight ``decay`` of the past.
    """

    scale: float | None = None
    decay: float
    degree: ClassVar[int] = 1

    is_unbiased: ClassVar[bool] = True
    needs = frozenset({"program", "slope", "table"})

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
            # For each control variate: the weight of the sample's log-probability, and its table.
            tables = [linear**power for power in range(1, self.degree + 1)]
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
                variates = [own * score - probs * (h - (probs * h).sum(-1, keepdim=True)) for own, h in parts]
                variates.append(-ahead * score)
                products = [site_mean(v * other) for v in variates for other in [*variates, centred * score]]
                gram = context.running_mean("gram", torch.stack(products, 1), self.decay)
                ridge = 3.0 / ((context.count + 1.0) * context.cost[0].numel())
                statistics = {"gram": gram, "scales": _solve(gram, len(variates), ridge)}
        return SiteTerm(weights * log_probs, statistics)


@dataclass(frozen=True)
class DoubleCV(OnSlopes):
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


def _predicted(context: SiteContext, probs: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """What the slopes of the other particles predict.

    These are ``t_k`` with component ``d`` at value ``v``, ``(..., D, K)``, and the mean over the other particles of
    ``f'(x_j)·(x_j - μ_j)``, ``(..., 1, 1)``.
    """
    slope, value, ndim = context.program.slope(), context.program.value, context.cost.dim()
    slope = torch.where(slope.isfinite(), slope, torch.zeros_like(slope))
    # A one-hot value has an entry for each of the values, a Bernoulli only one for the value 1.
    is_hot = value.numel() == probs.expand(*value.shape[: probs.dim() - 2], *probs.shape[-2:]).numel()
    mean = probs if is_hot else probs[..., 1]
    centred = value - mean.expand(*value.shape[:ndim], *mean.shape[ndim:]).reshape(value.shape)
    own, particles = event_sum(slope * centred, ndim), context.cost.shape[1]
    others, ahead = ((part.sum(1, keepdim=True) - part) / (particles - 1.0) for part in (slope, own))
    table = others.reshape(probs.shape if is_hot else probs.shape[:-1])
    table = table if is_hot else torch.stack((torch.zeros_like(table), table), -1)
    moved = table - (table * sampled).sum(-1, keepdim=True)
    return event_sum(others * centred, ndim)[..., None, None] + moved, ahead[..., None, None]


def _solve(gram: Tensor, count: int, ridge: Tensor) -> Tensor:
    """Scales of least second moment, with a ridge towards zero."""
    wide = gram.to(torch.promote_types(gram.dtype, torch.float32))
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


def model() -> None:
    z = pyro.sample("z", dist.Bernoulli(torch.full((3,), 0.4)).to_event(1))
    pyro.sample("x", dist.Normal(z.sum(-1) ** 2, 1.0), obs=torch.tensor(2.5))


def guide() -> None:
    logits = pyro.param("logits", torch.tensor([0.4, -0.3, 0.1]))
    pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))


if __name__ == "__main__":
    svi = SVI(model, guide, Adam({"lr": 0.05}), TraceBackpropQ_ELBO(4, estimator=DoubleCV()))
    print("mean loss of 200 steps:", sum(svi.step() for _ in range(200)) / 200)
