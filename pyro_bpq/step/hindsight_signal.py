r"""What other values of sites change while all other sites, their children too, keep their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_bpq.batching.site_batch import SiteBatch
from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.estimators.hindsight import Changes, HeldCosts
from pyro_bpq.estimators.noise import uniform
from pyro_bpq.plan.held import HeldPlan

if TYPE_CHECKING:
    from pyro_bpq.step.signals import Signals

# Share of uniform chances in those with which components are drawn; the rest is proportional to their uncertainty.
_EVEN = 0.5


def of_class(signals: Signals, c: int) -> HeldCosts:
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
    drawn, particle, found, excess, predicted = signals.shared["hindsight"]
    batch, is_drawn = signals.batches[c], c in drawn
    has_bits = is_drawn and batch.components.kind == "bernoulli"
    log_q = batch.log_odds if has_bits else batch.log_probs
    value = batch.flat(batch.value).to(log_q.dtype) if has_bits else batch.index
    sign = 1.0 - 2.0 * value if has_bits else None
    rows = [
        _row(log_q[g].detach(), value[g], name, drawn[c][0][g] if is_drawn else None, found, predicted)
        for g, name in enumerate(cls.names)
    ]
    changes = Changes(*map(torch.stack, zip(*(row[0] for row in rows), strict=True)))
    plan: HeldPlan | None = signals.rerun.held
    sites = {} if plan is None else {name: plan.sites[name] for name in cls.names if name in plan.sites}
    settled = _sums(signals, c, {name: site.immediate for name, site in sites.items()})
    rest = _sums(signals, c, {name: site.rest for name, site in sites.items()})
    more = None
    if any(name in excess for name in cls.names):
        none = (torch.zeros_like(next(excess[name][0] for name in cls.names if name in excess)),) * 2
        own = zip(*(excess.get(name, none) for name in cls.names), strict=True)
        later, immediate = map(torch.stack, own)
        more = later, immediate
    if not is_drawn:
        if more is not None:
            settled = -immediate if settled is None else settled - immediate
            rest = later + immediate if rest is None else rest + later + immediate
        return HeldCosts(cls.names, log_q, value, changes, sign, settled, rest)
    index, share = drawn[c]
    exact = Changes(*map(torch.stack, zip(*(row[1] for row in rows), strict=True)))
    return HeldCosts(cls.names, log_q, value, changes, sign, settled, rest, particle, index, share, exact, more)


def _sums(signals: Signals, c: int, costs: Mapping[str, tuple[str, ...]]) -> Tensor | None:
    """Sums ``(G, M, plates)`` of costs of the sites of a class; ``None`` if there are none."""
    if not any(costs.values()):
        return None
    none = signals.batches[c].score.detach().new_zeros(signals.batches[c].batch_shape)
    of_sites = ((name, costs.get(name)) for name in signals.layout.classes[c].names)
    return torch.stack([signals.rerun.sums(n, own, signals.rollout) if own else none for n, own in of_sites])


def _runs(signals: Signals) -> tuple[Any, ...]:
    """Draws components, and runs guide and model at other values of all sites that want it."""
    plan: HeldPlan | None = signals.rerun.held
    drawn: dict[int, tuple[Tensor, Tensor]] = {}
    if plan is None:
        return drawn, None, {}, {}, {}
    number, particle, group = signals.rollout.num_particles, None, None
    groups, generator = 1 + max(plan.group_of.values()), signals.rerun.generator
    if plan.all_drawn:
        # The first sites may be reparameterised, and have no score.
        like = signals.rollout.runs[0].loss.detach()
        if number > 1 and signals.rerun.runs_apart:
            particle = _draw(like.new_full((number,), 1.0 / number), 1, generator)
        if groups > 1:
            group = _draw(like.new_full((groups,), 1.0 / groups), 1, generator)
    by_site: dict[str, Tensor] = {}
    for c, cls in enumerate(signals.layout.classes):
        sites = [plan.sites.get(name) for name in cls.names]
        numbers = [site.number for site in sites if site is not None and site.is_drawn]
        if numbers:
            index, share = _drawn(_openness(signals.batches[c], particle), numbers[0], generator)
            share = share if particle is None else number * share
            if group is not None:
                share = share * groups * _of_group(group, [plan.group_of.get(name, -1) for name in cls.names], share)
            drawn[c] = index, share
            by_site.update({n: index[g] for g, n in enumerate(cls.names) if n in plan.sites})
    return drawn, particle, *signals.rerun.hindsight(by_site, signals.rollout, particle, group)


def _of_group(group: Tensor, groups: Sequence[int], like: Tensor) -> Tensor:
    """1 for the sites of the group that is evaluated, 0 for others; the first axis is that of the sites."""
    own = torch.tensor(groups, device=like.device) == group
    return own.to(like.dtype).reshape(-1, *(1,) * (like.dim() - 1))


def _openness(batch: SiteBatch, particle: Tensor | None) -> Tensor:
    """The uncertainty of each component: the chance that two draws of it differ, ``(G, M or 1, plates, D)``."""
    has_bits = batch.components.kind == "bernoulli"
    log_q = (batch.log_odds if has_bits else batch.log_probs).detach()
    log_q = log_q if particle is None else log_q.index_select(1, particle)
    if has_bits:
        return 2.0 * log_q.sigmoid() * (-log_q).sigmoid()
    return 1.0 - log_q.exp().square().sum(-1)


def _drawn(open_: Tensor, number: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draws ``number`` components of each row, uncertain ones more often; ``open_`` are their uncertainties.

    Returns:
        Their indices, and for each the inverse of the number of times that it is drawn on average.
    """
    chance = (1.0 - _EVEN) * open_ / open_.sum(-1, keepdim=True).clamp(min=1e-30) + _EVEN / open_.shape[-1]
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
    log_q: Tensor, value: Tensor, name: str, drawn: Tensor | None, found: Any, predicted: Any
) -> tuple[Changes, Changes]:
    """Changes of one site, and the true changes of drawn components."""
    has_bits = log_q.dim() == value.dim()
    at = drawn if drawn is None or has_bits else drawn.unsqueeze(-1).expand(*drawn.shape, log_q.shape[-1])
    if name not in found:
        # No changes are known. With all weight on the drawn value the estimator is the plain score function.
        kept, none = torch.full_like(log_q, -torch.inf), torch.zeros_like(log_q)
        plain = Changes(kept if has_bits else kept.scatter_(-1, value.unsqueeze(-1), 0.0), none, none)
        if at is None:
            return plain, plain
        return plain, Changes(*(part[: len(at)].gather(-1 if has_bits else -2, at) for part in plain))
    if at is None:
        tables = Changes(*(table.expand_as(log_q) for table in found[name]))
        return tables, tables
    exact = Changes(*(table.expand(at.shape) for table in found[name]))
    return Changes(*(table.to(log_q) for table in predicted[name])), exact
