r"""What other values of sites change while all other sites, their children too, keep their values."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_bpq.errors import BPQWarning, UnsupportedProgramError
from pyro_bpq.estimators.hindsight import HeldCosts
from pyro_bpq.estimators.noise import uniform
from pyro_bpq.plan.held import HeldPlan
from pyro_bpq.rollout.runs import Rollout
from pyro_bpq.step.asked import RolloutTensors

__all__ = ["HeldRuns", "of_class"]

# Share of the chance of a component that does not depend on how far its values are open.
_EVEN = 0.5


class HeldRuns(Protocol):
    """Runs guide and model at other values while all other sites keep their values."""

    def held_plan(self) -> HeldPlan | None:
        """The plan of the extra run."""
        ...

    def at_other_values(
        self, drawn: Mapping[str, Tensor], rollout: Rollout
    ) -> Mapping[str, tuple[Tensor, Tensor, Tensor]] | None:
        """Changes of the children's laws and of the costs, and the costs that are not known at other values, by site.

        Args:
            drawn: The components ``(M, plates, n)`` that are evaluated, for the sites where not all of them are.
            rollout: The tensors of the step's runs.
        """
        ...

    def predicted(self, rollout: Rollout, generator: torch.Generator | None) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Predicted changes ``(M, plates, D, K)`` of laws and costs, for the sites where components are drawn."""
        ...


def of_class(signals: RolloutTensors, c: int) -> HeldCosts:
    """The changes for the sites of a class.

    Raises:
        UnsupportedProgramError: If sampled values steer the program.
    """
    cls = signals.layout.classes[c]
    if signals.rerun is None:
        raise UnsupportedProgramError(
            f"Sites {', '.join(map(repr, cls.names))}: sampled values steer this program, so {cls.spec.estimator} "
            "cannot compare other values with all later sites held; use AllAction() or "
            "ScoreFunction(RunningBaseline()) there."
        )
    if "hindsight" not in signals.shared:
        # The same for all classes.
        signals.shared["hindsight"] = _runs(signals)
    drawn, found, predicted = signals.shared["hindsight"]
    rows = [_row(signals, c, g, name, drawn, found, predicted) for g, name in enumerate(cls.names)]
    law, cost = (torch.stack([row[i] for row in rows]) for i in range(2))
    rest: Tensor | None = torch.stack([row[2] for row in rows])
    plan: HeldPlan | None = signals.rerun.held_plan()
    has_rest = plan is not None and any(plan.sites[name].rest for name in cls.names if name in plan.sites)
    rest = rest if has_rest else None
    if c not in drawn:
        return HeldCosts(cls.names, law, cost, rest)
    index, share = drawn[c]
    exact_law, exact_cost = (torch.stack([row[i] for row in rows]) for i in (3, 4))
    return HeldCosts(cls.names, law, cost, rest, index, share, exact_law, exact_cost)


def _runs(signals: RolloutTensors) -> tuple[Any, Any, Any]:
    """Draws components, and runs guide and model at other values of all sites that want it."""
    plan: HeldPlan | None = signals.rerun.held_plan()
    drawn: dict[int, tuple[Tensor, Tensor]] = {}
    if plan is None:
        return drawn, None, {}
    by_site: dict[str, Tensor] = {}
    for c, cls in enumerate(signals.layout.classes):
        sites = [plan.sites.get(name) for name in cls.names]
        numbers = [site.number for site in sites if site is not None and site.is_drawn]
        if numbers:
            drawn[c] = _drawn(signals.batches[c].probs, numbers[0], signals.generator)
            by_site.update({n: drawn[c][0][g] for g, n in enumerate(cls.names) if n in plan.sites})
    found = signals.rerun.at_other_values(by_site, signals.rollout)
    if found is None:
        warnings.warn(
            f"Sites {', '.join(map(repr, plan.sites))}: guide and model do not run at other values of them, so "
            "Hindsight() is leave-one-out there. Write ScoreFunction(LeaveOneOut()), which costs less.",
            BPQWarning,
            stacklevel=2,
        )
    predicted = {}
    if drawn and found is not None:
        predicted = signals.rerun.predicted(signals.rollout, signals.generator)
    return drawn, found, predicted


def _drawn(probs: Tensor, number: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draws components of each row, rather where several values are likely; returns indices and shares."""
    open_ = 1.0 - probs.square().sum(-1)
    chance = (1.0 - _EVEN) * open_ / open_.sum(-1, keepdim=True).clamp(min=1e-30) + _EVEN / probs.shape[-2]
    chance = chance / chance.sum(-1, keepdim=True)
    index = _draw(chance, number, generator)
    return index, 1.0 / (number * chance.gather(-1, index))


def _draw(chance: Tensor, number: int, generator: torch.Generator | None) -> Tensor:
    """Draws ``number`` components of each row, evenly spaced on the cumulative chance."""
    assert generator is not None
    bounds = chance.cumsum(-1)
    at = (torch.arange(number, device=chance.device) + uniform(bounds[..., :1], generator)) / number
    return torch.searchsorted(bounds, at * bounds[..., -1:], right=True).clamp(max=chance.shape[-1] - 1)


def _row(
    signals: RolloutTensors, c: int, g: int, name: str, drawn: Any, found: Any, predicted: Any
) -> tuple[Tensor, ...]:
    """Changes of one site: law, costs, unknown costs, and the true changes of drawn components."""
    batch = signals.batches[c]
    probs, index = batch.probs[g], batch.index[g]
    shape = tuple(batch.batch_shape)
    if found is None or name not in found:
        # Only the drawn value is possible given itself: the plain score function.
        kept = torch.zeros_like(probs).scatter_(-1, index.unsqueeze(-1), 1.0).log()
        none, rest = torch.zeros_like(probs), probs.new_zeros(shape)
        if c not in drawn:
            return kept, none, rest
        at = _at(drawn[c][0][g], probs)
        return kept, none, rest, kept.gather(-2, at), none.gather(-2, at)
    law, cost, rest = found[name]
    rest = rest.expand(shape)
    if c not in drawn:
        return law.expand_as(probs), cost.expand_as(probs), rest
    like = _at(drawn[c][0][g], probs)
    guess, change = predicted[name]
    sites = signals.rerun.held_plan().sites
    known = [sites[n].is_own_known if n in sites else (False, False) for n in signals.layout.classes[c].names]
    change = change + _own(signals, c, g, (all(q for q, _ in known), all(p for _, p in known)))
    return guess.to(probs), change, rest, law.expand(like.shape), cost.expand(like.shape)


def _own(signals: RolloutTensors, c: int, g: int, is_known: tuple[bool, bool]) -> Tensor:
    """Changes of a site's own log-probabilities, which are sums over components."""
    batch = signals.batches[c]
    total = torch.zeros_like(batch.probs[g])
    if is_known[0]:
        total = total + batch.own_q[g]
    if is_known[1]:
        total = total + batch.own_p[g]
    # An impossible value weighs nothing, but may have infinite costs.
    total = total.masked_fill(batch.probs[g] == 0, 0.0)
    return total - total.gather(-1, batch.index[g].unsqueeze(-1))


def _at(drawn: Tensor, probs: Tensor) -> Tensor:
    return drawn.unsqueeze(-1).expand(*drawn.shape, probs.shape[-1])
