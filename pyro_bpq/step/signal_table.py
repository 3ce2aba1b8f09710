"""What estimators may ask for beyond the tensors of every site: a function for each signal, and the table of them.

A function gets the tensors of a rollout and the position of a class of sites. An estimator that names the signal in its
``needs`` finds the result in ``context.signals``. Longer functions have a file of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.estimators.q_estimators import ParentAdvantage
from pyro_bpq.estimators.reparameterise import reparameterise
from pyro_bpq.rollout.features import base_distribution
from pyro_bpq.rollout.runs import SiteRecord
from pyro_bpq.step import site_program
from pyro_bpq.step.critic_step import CriticBatch
from pyro_bpq.step.returns import by_name, predictions
from pyro_bpq.targets.advantages import advantages

if TYPE_CHECKING:
    from pyro_bpq.step.signals import Signals

# Needs that are met by something else than a signal.
OTHER_NEEDS = frozenset({"table", "slope"})


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
    return _per_site(signals, c, lambda critic: critic.says.value.detach())


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
    """Sums what is picked of critics over the Q-nodes of each site of a class."""
    total = signals.batches[c].score.detach().new_zeros(*signals.shape(c), *event)
    for critic in signals.critics.values():
        part = pick(critic) if critic.group.c == c else None
        total = total if part is None else total + critic.group.sum_to_sites(part)
    return total


def crossed(signals: Signals, c: int) -> Tensor | None:
    """How the other particles' costs-to-go change with this particle's past, ``(G, M, plates)`` in nats, detached.

    The change is averaged over the other particles. ``None`` if no change is known.
    """
    layout, rollout = signals.layout, signals.rollout
    if rollout.num_particles == 1:
        return None
    groups = layout.crossed_costs
    changes = signals.once("crossed", lambda: [group.changes(rollout, signals.costs) for group in groups])
    return layout.crossed.sums(c, changes, signals.shape(c))


def parent_advantage(signals: Signals, c: int) -> Tensor | None:
    """The advantage over what the parents' critics predicted, ``(G, M, plates)`` in nats; ``None`` without critics."""
    layout, names = signals.layout, signals.layout.classes[c].names
    estimator = layout.classes[c].spec.estimator
    assert isinstance(estimator, ParentAdvantage)
    if layout.is_steered:
        # Which sites come after a site, and so which count as siblings, follows from its value.
        raise UnsupportedProgramError(
            f"Sites {', '.join(map(repr, names))}: sampled values steer this program, so which sites a parent's critic "
            "predicts besides follows from the value; use LambdaReturn() or ScoreFunction(RunningBaseline()) there."
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
        "program": site_program.of_class,
        "crossed": crossed,
        "hindsight": lambda signals, c: site_program.of_class(signals, c).rerun.hindsight(signals, c),
        # The user's own predictions of the cost-to-go, with their gradient.
        "baseline": lambda signals, c: signals.batches[c].baseline,
        "q_value": q_value,
        "q_slope": q_slope,
        "moved_value": moved_value,
        "advantage": parent_advantage,
    }
)
