"""What estimators may ask for beyond the tensors of every site: a function for each signal, and the table of them.

A function gets the tensors of a rollout and the position of a class of sites. An estimator that names the signal in its
``needs`` finds the result in ``context.signals``. Longer functions have a file of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_bpq.critics.targets import advantages
from pyro_bpq.errors import UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.estimators.q_estimators import ParentAdvantage
from pyro_bpq.estimators.reparameterise import reparameterise
from pyro_bpq.rollout.features import base_distribution
from pyro_bpq.rollout.runs import Rollout, Run, SiteRecord
from pyro_bpq.step.classes import CrossedCosts
from pyro_bpq.step.critic_step import CriticBatch
from pyro_bpq.step.learning import by_name, predictions

if TYPE_CHECKING:
    from pyro_bpq.step.signals import Signals

# Needs that are met by something else than a signal.
OTHER_NEEDS = frozenset({"table", "slope"})
# Least log-probability of a component's value in crossed costs, in nats.
_LEAST = -100.0
# Sites whose values have so many elements get a call each, because copies would take longer than calls.
_LARGE = 1 << 14


def program(signals: Signals, c: int) -> Any:
    """The costs of a class of sites at other values, a :class:`~pyro_bpq.estimators.base.SiteProgram`."""
    cls = signals.layout.classes[c]
    if signals.rerun is None:
        raise UnsupportedProgramError(
            f"Sites {', '.join(map(repr, cls.names))}: sampled values steer this program, so {cls.spec.estimator} "
            "cannot compare its costs at other values; use AllAction() or ScoreFunction(RunningBaseline()) there."
        )
    return signals.rerun.of_class(signals, c)


def moved_value(signals: Signals, c: int) -> Tensor:
    """The sampled values, ``(G, M, plates, D)``, with the gradient of their distributions' parameters."""
    batch = signals.batches[c]

    def moved(site: SiteRecord) -> Tensor:
        value = site.value.detach()
        return reparameterise(base_distribution(site.fn), value).expand(value.shape)

    try:
        values = batch.stack(moved, batch.cls.value_ndim)
    except UnsupportedSiteError as error:
        raise error.at(*batch.cls.names) from error
    return values.reshape(*values.shape[: values.dim() - batch.cls.value_ndim], batch.cls.width)


def q_value(signals: Signals, c: int) -> Tensor:
    """``Q(x)`` at the sample, ``(G, M, plates)`` in nats, detached; zero without critics."""
    return _per_site(signals, c, lambda critic: critic.says.value)


def q_slope(signals: Signals, c: int) -> Tensor:
    """``∂Q/∂x`` at the sample, ``(G, M, plates, D)`` in nats per unit of ``x``, detached.

    It is zero where there is no critic that reads the value as a whole.
    """

    def slope(critic: CriticBatch) -> Tensor | None:
        value = critic.says.value
        if critic.leaf is None or not value.requires_grad:
            return None
        (found,) = torch.autograd.grad(value.sum(), critic.leaf, retain_graph=True)
        return found.reshape(*value.shape, -1)

    return _per_site(signals, c, slope, signals.layout.classes[c].width)


def _per_site(signals: Signals, c: int, pick: Callable[[CriticBatch], Tensor | None], *event: int) -> Tensor:
    """What is picked of critics for the sites of a class; zero for nothing."""
    found = signals.learned(c, pick)
    return signals.batches[c].score.detach().new_zeros(*signals.shape(c), *event) if found is None else found


def crossed(signals: Signals, c: int) -> Tensor | None:
    """How the other particles' costs-to-go change with this particle's past, ``(G, M, plates)`` in nats, detached.

    Leave-one-out subtracts the cost-to-go of particle ``j``, which has another past than particle ``i``. A closer
    baseline is the cost of the values of ``j``, from the site on, given the past of ``i``. A log-probability is known
    for such a pair without another run if its law reads only the past, ``log p(y_j | parents_i)``, or if its value lies
    in the past and its law reads nothing of the past, ``log p(y_i | parents_j)``. The values of ``i`` that enter do not
    depend on the site. The change is averaged over the other particles. ``None`` if no change is known.
    """
    layout, rollout, costs = signals.layout, signals.rollout, signals.costs
    if rollout.num_particles == 1:
        return None
    changes = signals.once("crossed", lambda: [_changes(own, rollout, costs) for own in layout.crossed_costs])
    return layout.crossed.sums(c, changes, signals.shape(c))


@torch.no_grad()
def _changes(group: CrossedCosts, rollout: Rollout, costs: Sequence[Tensor]) -> Tensor:
    """Change of each cost given another particle's past, averaged over the other particles.

    A change is the cost given particle ``i``'s past minus the cost of particle ``j``, averaged over ``j``. The
    result holds the changes under the own law, then those at the own value, ``(2 costs, M, plates)`` in nats.
    """
    own, names = costs[group.k], list(group.costs)
    own = own[group.indices("at", own, lambda: group.at)]
    size = rollout.runs[0].sites[group.costs[names[0]].site or ""].value.numel()
    parts = [names] if size < _LARGE else [[name] for name in names]
    pairs = torch.cat([_pairs(group, rollout, part, own) for part in parts])
    change = torch.cat((pairs, pairs.transpose(1, 2))) - torch.cat((own, own)).unsqueeze(1)
    itself = torch.eye(rollout.num_particles, dtype=torch.bool, device=own.device)
    itself = itself.reshape(*itself.shape, *(1,) * (own.dim() - 2))
    return change.masked_fill(itself, 0.0).sum(2) / (rollout.num_particles - 1)


def _pairs(group: CrossedCosts, rollout: Rollout, names: Sequence[str], like: Tensor) -> Tensor:
    """Costs under the law of particle ``i`` at the value of particle ``j``, ``(costs, i, j, plates)``.

    They are linear in an encoded value, so one matrix product gives all pairs. Particle ``i``'s own value must not
    enter the result, not even through rounding.
    """
    components = group.components

    def stack(pick: Callable[[SiteRecord, bool], Tensor], event_ndim: int) -> Tensor:
        def from_run(run: Run, name: str) -> Tensor:
            cost = group.costs[name]
            return pick(run.sites[cost.site or ""], cost.is_of_guide)

        return rollout.stack(from_run, names, group.plates, event_ndim)

    def law(site: SiteRecord, of_guide: bool) -> Tensor:
        return components.parameters(site.fn if of_guide else site.prior)

    def weight(site: SiteRecord, of_guide: bool) -> Tensor:
        one, scale, mask = (1.0, site.scale, site.mask) if of_guide else (-1.0, site.prior_scale, site.prior_mask)
        weight = like.new_full((), one) * scale
        return weight if mask is None else weight * torch.as_tensor(mask, device=like.device)

    slopes, base = components.linear(stack(law, components.event_ndim), _LEAST)
    values = stack(lambda site, _: components.encoded(site.value.detach(), site.fn), 1).to(slopes.dtype)
    log_prob = torch.einsum("ci...f,cj...f->cij...", slopes, values) + base.unsqueeze(2)
    weights = stack(weight, 0).unsqueeze(2)
    # Masked log-probabilities may be infinite or NaN.
    return torch.where(weights == 0.0, 0.0, weights * log_prob)


def parent_advantage(signals: Signals, c: int) -> Tensor | None:
    """The advantage over what the parents' critics predicted, ``(G, M, plates)`` in nats; ``None`` without critics."""
    layout, names = signals.layout, signals.layout.classes[c].names
    estimator = layout.classes[c].spec.estimator
    assert isinstance(estimator, ParentAdvantage)
    why = ""
    if layout.is_steered:
        # Which sites come after a site, and so which count as siblings, follows from its value.
        why = "sampled values steer this program, so which sites a parent's critic predicts besides follows from them"
    elif any(map(layout.rows_mix, names)):
        why = "a cost reads other rows of their plate, and critics predict the costs of their own row alone"
    if why:
        raise UnsupportedProgramError(
            f"Sites {', '.join(map(repr, names))}: {why}; use LambdaReturn() or ScoreFunction(RunningBaseline()) there."
        )
    if layout.network is None or not signals.critics:
        return None
    network, lam, zero = layout.network, estimator.lam, signals.costs[0].new_zeros(())

    def all_advantages() -> dict[str, Tensor]:
        q, expected = by_name(signals, network, predictions(signals, signals.critics, 1.0), 1.0)
        return advantages(network, q, signals.costs_by_name, lam, 1.0, expected)

    # All classes share one backward pass.
    found = signals.once(("advantages", lam), all_advantages)
    return torch.stack([found.get(name, zero).expand(signals.shape(c)[1:]) for name in names])


SIGNALS: Mapping[str, Callable[[Signals, int], Any]] = MappingProxyType(
    {
        "program": program,
        "crossed": crossed,
        "hindsight": lambda signals, c: program(signals, c).rerun.hindsight(signals, c),
        # The user's own predictions of the cost-to-go, with their gradient.
        "baseline": lambda signals, c: signals.batches[c].baseline,
        "q_value": q_value,
        "q_slope": q_slope,
        "moved_value": moved_value,
        "advantage": parent_advantage,
    }
)
