r"""Hindsight: the law of a site's value given what was drawn after it, in place of the drawn value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError, UnsupportedProgramError
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteInfo, SiteTerm, Statistics, update_mean
from pyro_bpq.estimators.baselines import RunningBaseline, leave_one_out
from pyro_bpq.estimators.requirements import needs_finite

__all__ = ["HeldCosts", "Hindsight"]

# Weight of the past in the moments of crossed costs.
_DECAY = 0.99


class HeldCosts(NamedTuple):
    """What other values of ``G`` like-shaped sites change while all other sites keep their values, detached.

    Changes are relative to the drawn value, where they are zero.

    Args:
        names: Names of the sites.
        law: Change of ``log q`` of the sites that read the site, ``(G, M, plates, D, K)``, or a prediction of it.
        cost: Change of the costs that read the site, ``(G, M, plates, D, K)`` in nats, or a prediction of it.
        rest: Sum ``(G, M, plates)``, in nats, of the costs that read the site and are not known at other values;
            ``None`` if there are none.
        drawn: Indices ``(G, M, plates, n)`` of the components whose changes are known; ``None`` if all changes are.
        share: For each of them the inverse of the number of times that it is drawn on average.
        exact_law: True changes ``(G, M, plates, n, K)`` of the drawn components.
        exact_cost: The same of the costs.
    """

    names: tuple[str, ...]
    law: Tensor
    cost: Tensor
    rest: Tensor | None = None
    drawn: Tensor | None = None
    share: Tensor | None = None
    exact_law: Tensor | None = None
    exact_cost: Tensor | None = None


@dataclass(frozen=True)
class Hindsight(Estimator):
    r"""Averages the score function over the values that a site may have had, given what was drawn after it.

        g = Σ_d Σ_v w_d(v) (I_d(v) + L - b_d) ∇ log q_d(v),   w_d(v) ∝ q_d(v) q(children | x with x_d = v)

    ``I_d(v)`` are the costs that read the site, at ``x`` with ``x_d = v``, in nats. The log-probabilities of its
    children, the sites of the guide that read it, are among them. ``L`` are the other costs downstream. All other sites
    keep their values. ``w`` is the law of the component given all of these. So this is the expectation of the
    score-function gradient given the other values. It has the same mean and, for the same baseline, never more
    variance. ``b_d`` is the mean of ``Σ_v w_d(v) I_d(v) + L`` over the other particles or, with one particle, over
    earlier steps. A baseline may read whatever does not depend on the site's own value.

    A site of up to ``draws`` components is evaluated at all values, in one extra run of guide and model. In a larger
    site, changes of costs and log-probabilities come from their slopes and curvatures at the drawn values. ``draws``
    components of each row, drawn with probability ``π``, are evaluated. Each adds ``(exact - predicted) / π``. This is
    unbiased for any prediction. Only Bernoulli and OneHotCategorical have slopes; predictions for others are zero.
    Curvatures are exact where one linear map reads the site and costs add up over its outputs.

    It pays where one value has little effect on what is drawn next: layers of many units, chains that forget. If a
    child shows its parent's value, nothing is averaged. Costs that are not known at other values multiply the plain
    score. If a child's law is not known at other values, as where rows of a plate meet, the site gets leave-one-out.
    Programs that sampled values steer are refused.

    Args:
        draws: Number of components that are evaluated for each row.
        curvature: Whether predictions use curvatures.
        crossed: Whether the baseline takes the other particles' values beside the particle's own past, as in
            :class:`CrossedLeaveOneOut`.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Hindsight network credit assignment (Young, 2022)
        | Sampling-based approaches to calculating marginal densities (Gelfand and Smith, 1990), for Rao-Blackwell
        | Local expectation gradients for black box variational inference (Titsias and Lázaro-Gredilla, 2015)
    """

    draws: int = 4
    curvature: bool = True
    crossed: bool = False

    is_unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise OptionError(f"Hindsight(draws={self.draws!r}): write a positive number.")

    @property
    def needs(self) -> frozenset[str]:
        """What other values change, and crossed costs if they are asked for."""
        asked = frozenset({"hindsight", "program", "table"})
        return asked | {"crossed"} if self.crossed else asked

    def unsupported(self, site: SiteInfo) -> str | None:
        """Needs finite components."""
        return needs_finite("Hindsight", site)

    def statistics(self, num_particles: int) -> Statistics:
        """Running means of the costs, for a single particle, and moments of crossed costs."""
        means = {"baseline": 0.0, "rest": 0.0}
        return {**means, "moments": (0.0, 0.0, 0.0)} if self.crossed else means

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights every log-probability by its expected coefficient."""
        assert context.log_probs is not None
        held = _of_sites(context)
        with torch.no_grad():
            later = context.cost if held.rest is None else context.cost - held.rest
            log_q = context.log_probs.detach()
            weights, costs = _weighted(log_q, held.law, held.cost)
            mean = (weights * costs).sum(-1)
            centred, baseline = _centred(later.unsqueeze(-1) + mean, context, "baseline")
            if self.crossed and context.crossed is not None and context.cost.shape[1] > 1:
                centred, moments = _without_crossed(centred, context.crossed, context)
                baseline = {**baseline, **moments}
            # Centred as a whole: the own mean is put back by the costs below.
            level = centred - mean
            table = weights * (costs + level.unsqueeze(-1))
            if held.drawn is not None:
                table = _corrected(table, log_q, level, held)
            statistics = baseline
            if held.rest is not None:
                assert context.index is not None
                rest, own = _centred(held.rest, context, "rest")
                drawn = torch.zeros_like(table).scatter_(-1, context.index.unsqueeze(-1), 1.0)
                table, statistics = table + rest[..., None, None] * drawn, {**baseline, **own}
        return SiteTerm(table * context.log_probs, statistics)


def _of_sites(context: SiteContext) -> HeldCosts:
    """The changes for the sites of a call."""
    held: HeldCosts = context.signals["hindsight"]
    if held.names != context.names or held.law.shape[:-2] != context.cost.shape:
        raise UnsupportedProgramError(
            "Hindsight() cannot serve a program whose particles have different sites: write AllAction() or "
            "ScoreFunction(RunningBaseline())."
        )
    return held


def _weighted(log_q: Tensor, law: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities of the values given all other sites, and costs; impossible values cost nothing."""
    weights = _softmax(log_q + law)
    return weights, cost.masked_fill(weights == 0.0, 0.0)


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension; two values take a fraction of the time of torch's."""
    if logits.shape[-1] != 2:
        return logits.softmax(-1)
    first, second = logits.unbind(-1)
    return torch.stack(((first - second).sigmoid(), (second - first).sigmoid()), -1)


def _without_crossed(centred: Tensor, change: Tensor, context: SiteContext) -> tuple[Tensor, dict[str, Tensor]]:
    """Subtracts what the own past explains of the other particles' costs, as :class:`CrossedLeaveOneOut` does."""
    assert context.count is not None
    mean, product, square = context.statistics["moments"].unbind(1)
    scale = (product / (square - mean.square()).clamp(min=1e-12)).clamp(0.0, 1.0)
    shape = (-1, *(1,) * (change.dim() - 1))
    own = centred.mean(-1)
    new = torch.stack((change, own * change, change.square()), -1).flatten(1, -2).mean(1)
    part = scale.reshape(shape) * (change - mean.reshape(shape))
    moments = update_mean(context.statistics["moments"], new, context.count, _DECAY)
    return centred - part.unsqueeze(-1), {"moments": moments}


def _corrected(table: Tensor, log_q: Tensor, level: Tensor, held: HeldCosts) -> Tensor:
    """Replaces, in expectation over the draws, the predicted coefficients by exact ones."""
    assert held.drawn is not None and held.share is not None
    assert held.exact_law is not None and held.exact_cost is not None
    at = held.drawn.unsqueeze(-1).expand(*held.drawn.shape, table.shape[-1])
    weights, costs = _weighted(log_q.gather(-2, at), held.exact_law, held.exact_cost)
    exact = weights * (costs + level.gather(-1, held.drawn).unsqueeze(-1))
    error = (exact - table.gather(-2, at)) * held.share.unsqueeze(-1)
    return table.scatter_add(-2, at, error)


def _centred(cost: Tensor, context: SiteContext, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Subtracts the mean over the other particles or, with a single particle, that of earlier steps."""
    if cost.shape[1] > 1:
        return leave_one_out(cost), {}
    centred, new = RunningBaseline()(cost, {"baseline": context.statistics[name]}, context.count)
    return centred, {name: new["baseline"]}
