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

# Weight of the past in the moments of crossed costs.
_DECAY = 0.99


class HeldCosts(NamedTuple):
    """What other values of ``G`` like-shaped sites change while all other sites keep their values.

    Changes are relative to the drawn value, where they are zero. Of bits the dimension ``K`` is left out: the changes
    are those of the other value. All tensors but ``log_q`` are detached.

    Args:
        names: Names of the sites.
        log_q: Log-probabilities of all values, ``(G, M, plates, D, K)``, or log-odds of bits, ``(G, M, plates, D)``.
        value: Indices of the drawn values, ``(G, M, plates, D)``; of bits in the type of ``log_q``.
        law: Change of ``log q`` of the sites that read the site, ``(G, M, plates, D, K)``, or a prediction of it.
        cost: Change of the costs that read the site, ``(G, M, plates, D, K)`` in nats, or a prediction of it.
        rest: Sum ``(G, M, plates)``, in nats, of the costs that read the site and are not known at other values;
            ``None`` if there are none.
        particle: Index ``(1,)`` of the particle in which changes are known; ``None`` if they are in all.
        drawn: Indices ``(G, M or 1, plates, n)`` of the components whose changes are known; ``None`` if all changes
            are.
        share: For each of them the inverse of the number of times that it is drawn on average.
        exact_law: True changes ``(G, M or 1, plates, n, K)`` of the drawn components.
        exact_cost: The same of the costs.
    """

    names: tuple[str, ...]
    log_q: Tensor
    value: Tensor
    law: Tensor
    cost: Tensor
    rest: Tensor | None = None
    particle: Tensor | None = None
    drawn: Tensor | None = None
    share: Tensor | None = None
    exact_law: Tensor | None = None
    exact_cost: Tensor | None = None

    @property
    def has_bits(self) -> bool:
        """Whether the changes are those of the other value of a bit."""
        return self.law.dim() == self.value.dim()


@dataclass(frozen=True)
class Hindsight(Estimator):
    r"""Averages the score function over the values that a site may have had, given what was drawn after it.

        g = Σ_d Σ_v w_d(v) (I_d(v) + L - b_d) ∇ log q_d(v),   w_d(v) ∝ q_d(v) q(children | x with x_d = v)

    ``I_d(v)`` are the costs that read the site, at ``x`` with ``x_d = v``, in nats. The log-probabilities of its
    children, the sites of the guide that read it, are among them. ``L`` are the other costs downstream. All other sites
    keep their values. ``w`` is the law of the component given all of these. So this is the expectation of the
    score-function gradient given the other values. It has the same mean and, for the same baseline, never more
    variance. ``b_d`` is the mean of ``Σ_v w_d(v) I_d(v) + L`` over the other particles or, with one particle, over
    earlier steps. In a site that is predicted it is the mean of the cost-to-go. A baseline may read whatever does not
    depend on the site's own value.

    A site of up to ``draws`` components is evaluated at all values, in one extra run of guide and model. In a larger
    site, changes of costs and log-probabilities come from their slopes and curvatures at the drawn values. ``draws``
    components of each row of one particle, drawn with probability ``π``, are evaluated. Each adds
    ``(exact - predicted) / π``. This is unbiased for any prediction. Only Bernoulli and OneHotCategorical have slopes;
    predictions for others are zero. Curvatures are exact where one linear map reads the site and costs add up over its
    outputs, but for their average over particles in a plate.

    It pays where one value has little effect on what is drawn next: layers of many units, chains that forget. If a
    child shows its parent's value, nothing is averaged. Costs that are not known at other values multiply the plain
    score. If a child's law is not known at other values, as where rows of a plate meet, the site gets leave-one-out.
    Programs that sampled values steer are refused.

    Args:
        draws: Number of components that are evaluated for each row of a particle. Where a site has more components,
            slopes predict those of all sites that have slopes; if that is all sites, one random particle is evaluated.
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
        asked = frozenset({"hindsight", "program"})
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
        held = _of_sites(context)
        with torch.no_grad():
            later = context.cost if held.rest is None else context.cost - held.rest
            log_q = held.log_q.detach()
            if held.has_bits:
                # Of the other value, relative to the drawn one.
                log_q = log_q * (1.0 - 2.0 * held.value)
            weights, mean = _weighted(log_q, held.law, held.cost, held.has_bits)
            # Predictions read all particles: in a baseline they would bring in the own value.
            costs = mean.sum(-1) if held.drawn is None else mean.new_zeros(())
            centred, statistics = _centred(later.unsqueeze(-1) + costs, context, "baseline")
            if self.crossed and context.crossed is not None and context.cost.shape[1] > 1:
                centred, moments = _without_crossed(centred, context.crossed, context)
                statistics = {**statistics, **moments}
            # Centred as a whole: the own mean is put back by the costs below.
            level = centred - costs
            table = _coefficients(log_q, weights, mean, level, held.has_bits)
            if held.drawn is not None:
                table = _corrected(table, log_q, level, held)
            if held.rest is not None:
                rest, own = _centred(held.rest, context, "rest")
                table, statistics = table + _of_drawn(rest, log_q, held), {**statistics, **own}
            if held.has_bits:
                table = table * (1.0 - 2.0 * held.value)
        return SiteTerm(table * held.log_q, statistics)


def _of_sites(context: SiteContext) -> HeldCosts:
    """The changes for the sites of a call."""
    held: HeldCosts = context.signals["hindsight"]
    if held.names != context.names or held.value.shape[:-1] != context.cost.shape:
        raise UnsupportedProgramError(
            "Hindsight() cannot serve a program whose particles have different sites: write AllAction() or "
            "ScoreFunction(RunningBaseline())."
        )
    return held


def _weighted(log_q: Tensor, law: Tensor, cost: Tensor, has_bits: bool) -> tuple[Tensor, Tensor]:
    """Probabilities of the values given all other sites, and these times the costs; impossible values cost nothing."""
    weights = (log_q + law).sigmoid() if has_bits else _softmax(log_q + law)
    return weights, weights * cost.masked_fill(weights == 0.0, 0.0)


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension; two values take a fraction of the time of torch's."""
    if logits.shape[-1] != 2:
        return logits.softmax(-1)
    first, second = logits.unbind(-1)
    return torch.stack(((first - second).sigmoid(), (second - first).sigmoid()), -1)


def _coefficients(log_q: Tensor, weights: Tensor, costs: Tensor, level: Tensor, has_bits: bool) -> Tensor:
    """What multiplies the gradients of the log-probabilities or, of bits, of the log-odds of the other value."""
    if not has_bits:
        return costs + weights * level.unsqueeze(-1)
    # The gradient of log q is 1 - q of the log-odds' at the other value, and -q at the drawn one.
    chance = log_q.sigmoid()
    return torch.addcmul(costs - costs * chance, level, weights - chance)


def _of_drawn(rest: Tensor, log_q: Tensor, held: HeldCosts) -> Tensor:
    """Coefficients of costs that multiply the score of the drawn values."""
    if held.has_bits:
        return -rest.unsqueeze(-1) * log_q.sigmoid()
    return rest[..., None, None] * torch.zeros_like(log_q).scatter_(-1, held.value.unsqueeze(-1), 1.0)


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
    drawn, share = held.drawn, held.share
    assert drawn is not None and share is not None and held.exact_law is not None and held.exact_cost is not None

    def pick(tensor: Tensor) -> Tensor:
        return tensor if held.particle is None else tensor.index_select(1, held.particle)

    dim, at = -1, drawn
    if not held.has_bits:
        dim, at, share = -2, drawn.unsqueeze(-1).expand(*drawn.shape, table.shape[-1]), share.unsqueeze(-1)
    own, values = pick(table), pick(log_q).gather(dim, at)
    weights, costs = _weighted(values, held.exact_law, held.exact_cost, held.has_bits)
    exact = _coefficients(values, weights, costs, pick(level), held.has_bits)
    own = own.scatter_add(dim, at, (exact - own.gather(dim, at)) * share)
    return own if held.particle is None else table.index_copy(1, held.particle, own)


def _centred(cost: Tensor, context: SiteContext, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Subtracts the mean over the other particles or, with a single particle, that of earlier steps."""
    if cost.shape[1] > 1:
        return leave_one_out(cost), {}
    centred, new = RunningBaseline()(cost, {"baseline": context.statistics[name]}, context.count)
    return centred, {name: new["baseline"]}
