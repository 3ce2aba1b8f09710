r"""What other values of sites change while all other sites, their children too, keep their values.

Costs and laws of a site are evaluated at all values, or at those of a few drawn components. The changes of all other
components are then predicted. With ``g`` and ``H`` the first and second derivatives of the costs that read a site, a
step of component ``d`` from its value to ``v`` changes them by about

    g · δ + ½ δ · H δ,   δ = e_v - e_{x_d}.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_bpq.errors import BPQError, warn
from pyro_bpq.estimators.hindsight import Changes, HeldCosts
from pyro_bpq.estimators.relaxation import signs, uniform
from pyro_bpq.plan.flips import Moves, SlopedCosts
from pyro_bpq.record.recorded import Bound
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.reruns.slopes import Wanted, expansions
from pyro_bpq.reruns.values import Rows, summed
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.runs import SiteRecord
from pyro_bpq.step.signals import Signals
from pyro_bpq.step.site_batch import SiteBatch

if TYPE_CHECKING:
    from pyro_bpq.reruns.at_values import Reruns

# Share of uniform chances in those with which components are drawn; the rest is proportional to their uncertainty.
_EVEN = 0.2
# Rows that are evaluated one by one in compiled steps.
_MOST_APART = 3
# Slopes and curvatures that add up; ``None`` where there are none.
Derivatives = list[tuple[Tensor | None, Tensor | None]]


class HeldRuns:
    """The changes in a step, for all classes of sites: as evaluated, and as predicted.

    Args:
        rerun: The recording, the runs of the step, the plan, and a generator.
        signals: The tensors of the runs.

    Attributes:
        particle: Index ``(1,)`` of the only particle that is evaluated; ``None`` for all. The first dimension of
            ``drawn`` and ``exact`` is then 1.
        drawn: The evaluated components ``(G, M, plates, n)`` of classes of sites of which not all are, and the inverse
            of the number of times that each is drawn on average in a particle, the choice of the particle included.
        exact: The changes by site and by what changes, ``(M, plates, n, K)``; of drawn bits those of the other values,
            ``(M, plates, n)``. Of counts ``back`` is the change of laws one step to the other side, and ``ahead`` what
            slopes at the other value predict of immediate costs. If the runs were not recorded, ``excess of later`` and
            ``excess of immediate`` costs ``(M, plates)`` tell how much more they were in the runs than there.
        expanded: The sites that are predicted at the drawn value alone: by curvatures too, or by nothing.
        predicted: The changes of all components of sites of which some are drawn, ``(M, plates, D, K)``, of bits
            ``(M, plates, D)``; zero where nothing is known.
    """

    def __init__(self, rerun: Reruns, signals: Signals) -> None:
        self.plan, self.graph, self.values = rerun.plan.held, rerun.plan.graph, rerun.values
        self.signals, self.rollout, self.generator = signals, signals.rollout, rerun.generator
        self.particle: Tensor | None = None
        self.drawn: dict[int, tuple[Tensor, Tensor]] = {}
        self.exact: dict[str, dict[str, Tensor]] = {}
        self.predicted: dict[str, Changes] = {}
        self.expanded = set[str]()
        self._choose()
        self._predict()
        self._evaluate()

    def _choose(self) -> None:
        """Draws what is evaluated: a particle, if that serves all, and components."""
        plan, number, generator = self.plan, self.rollout.num_particles, self.generator
        values = self.values
        if number > 1 and plan.picks_one and (not values.nesting or values.alone is not None):
            # The first sites may be reparameterised, and have no score.
            like = self.rollout.runs[0].loss.detach()
            self.particle = _draw(like.new_full((number,), 1.0 / number), 1, generator)
        for c, cls in enumerate(self.signals.layout.classes):
            # Sites of a class are alike.
            site = plan.sites.get(cls.names[0])
            if site is not None and site.is_drawn:
                index, share = _drawn(_openness(self.signals.batches[c], self.particle), site.number, generator)
                share = share if self.particle is None else number * share
                self.drawn[c] = index, share

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Changes of costs and laws in rows of values."""
        plan, values, place = self.plan, self.values, self.signals.layout.place
        parts = {name: defaultdict[str, list[Tensor]](list) for name in plan.sites}
        runs = values.of_runs(self.particle)
        by_site = {name: self.drawn[c][0][g] for name, (c, g) in place.items() if c in self.drawn}
        for i, (traced, bound, costs) in enumerate(runs):
            drawn = by_site if len(runs) == 1 else {name: own[i : i + 1] for name, own in by_site.items()}
            steps, back = self._steps(traced, bound)
            # Few rows are evaluated one by one, if the operators of each are joined with others. Rows are made without
            # writes: where there are some, all rows are to come from one function.
            is_few = plan.rows <= _MOST_APART and bool(drawn) and self.particle is None
            is_apart = values.compiles and is_few and not bound.recorded.core.writes
            rows = Rows.of(plan, traced, bound, Moves(drawn, steps, is_apart), plan.wanted)
            laws = tuple(law for name in back for law in plan.sites[name].laws)
            before = Rows.of(plan, traced, bound, Moves(drawn, back, is_apart), laws) if laws else rows
            for name, ahead in self._ahead(rows).items():
                parts[name]["ahead"].append(ahead)
            for name, site in plan.sites.items():
                plates, found = self.graph.node(name).plates, parts[name]
                shape = self.rollout.run_shape(plates)
                own = plates, shape if self.particle is None else (1, *shape[1:])
                for side, terms in site.changes.items():
                    found[side].append(rows.change(name, terms, *own))
                if name in back:
                    found["back"].append(before.change(name, site.laws, *own))
                for side in ("later", "immediate") if values.is_outdated else ():
                    found[f"excess of {side}"].append(rows.excess(costs, site.changes[side], *own))
        for name, found in parts.items():
            self.exact[name] = {what: torch.cat(own) for what, own in found.items()}

    def _steps(self, traced: TracedRun, bound: Bound) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The steps of counts to the values that they are compared with, and those to the other side."""
        ahead, back = {}, {}
        for name, site in self.plan.sites.items():
            if site.components.kind == "count":
                near, shape = traced.run.sites[name].near, bound.tensors[bound.recorded.drawn[name].value].shape
                ahead[name] = (near.step * (near.weight != 0.0)).reshape(shape)
                back[name] = (-near.step * (near.back != 0.0)).reshape(shape)
        return ahead, back

    def _ahead(self, rows: Rows) -> dict[str, Tensor]:
        """The immediate changes that slopes at the drawn counts' other values predict, ``(M, plates, n)``."""
        plan, bound, drawn = self.plan, rows.bound, rows.moves.drawn
        groups = tuple(group for group in plan.groups if group.immediate | group.own)
        sites = {name: site for name, site in plan.sites.items() if name in rows.moves.steps and site.is_drawn}
        moving, found = defaultdict[int, list[str]](list), defaultdict[str, list[Tensor]](list)
        for name in sites.keys() - self.expanded:
            for at in range(sites[name].rows):
                moving[plan.start[name] + at].append(name)
        for row, names in sorted(moving.items()):
            values = {bound.recorded.drawn[name].value: value[row] for name, value in rows.values.items()}
            moved = replace(bound, tensors={**bound.tensors, **values})
            derivatives = self._derivatives(moved, names, groups, laws=(), is_curved=False)
            for name in names:
                table = self._table(name, rows.traced.run.sites[name], derivatives[name, "immediate"])
                at = row - plan.start[name]
                found[name].append(table.gather(-1, drawn[name][..., at : at + 1]))
        return {name: torch.cat(parts, -1) for name, parts in found.items()}

    @torch.no_grad()
    def _predict(self) -> None:
        """Changes that slopes and curvatures predict."""
        plan, found = self.plan, defaultdict[str, list[list[Tensor]]](list)
        drawn = tuple(name for name, site in plan.sites.items() if site.is_drawn)
        is_curved = any(site.curvature for site in plan.sites.values() if site.is_sloped)
        for traced, bound in zip(self.values.traced, self.values.bound, strict=True) if drawn else ():
            derivatives = self._derivatives(bound, drawn, plan.groups, plan.laws, is_curved)
            curved = {name for (name, _), terms in derivatives.items() if any(own[1] is not None for own in terms)}
            self.expanded |= curved if derivatives else {*drawn}
            for name in drawn:
                record = traced.run.sites[name]
                found[name].append([self._table(name, record, derivatives[name, side]) for side in Changes._fields])
        self.predicted = {name: Changes(*map(torch.cat, zip(*own, strict=True))) for name, own in found.items()}

    def _table(self, name: str, record: SiteRecord, derivatives: Derivatives) -> Tensor:
        """What derivatives predict, in the shape of the run; zero where that is no number."""
        split, shape = self.plan.sites[name].components, self.rollout.run_shape(self.graph.node(name).plates)
        return _predicted(split, record, derivatives).nan_to_num_(0.0, 0.0, 0.0).expand(*shape, *split.table_shape)

    def _derivatives(
        self, bound: Bound, drawn: Sequence[str], groups: Sequence[SlopedCosts], laws: tuple[str, ...], is_curved: bool
    ) -> dict[tuple[str, str], Derivatives]:
        """The derivatives of groups of costs and of laws, by site and by the changes that they predict."""
        recorded, terms = bound.recorded, defaultdict[tuple[str, str], Derivatives](list)
        sites = {name: site for name, site in self.plan.sites.items() if site.is_sloped and name in drawn}
        values = {name: bound.tensors[recorded.drawn[name].value] for name in sites}
        names = tuple(name for name, value in values.items() if value.is_floating_point())
        if not names:
            return terms
        splits = [sites[name].components for name in names]
        # In deeper nets slopes of counts at both values make up for second derivatives, which take their time.
        blocks = tuple({"one_hot": split.cardinality, "count": 0}.get(split.kind, 1) for split in splits)
        rollout = self.rollout
        nesting = rollout.plate_ndim + 1 if rollout.is_vectorized and rollout.num_particles > 1 else 0
        try:
            wanted = Wanted((*(group.costs for group in groups), laws), names, blocks if is_curved else None, nesting)
            *of_costs, of_laws = expansions(bound, wanted, lambda own: _signs(own, self.generator))
        except BPQError:
            raise
        except RuntimeError as error:
            warn(
                f"Sites {', '.join(map(repr, names))}: costs have no gradient in their values. Changes of costs that "
                f"it would predict are taken for zero: {error} Estimates stay unbiased, with more variance. Write "
                "z.detach() where a value is changed in place, or use CrossedLeaveOneOut() there."
            )
            return terms
        for name in names:
            terms[name, "law"].append(of_laws[name][1:])
            for group, own in zip(groups, of_costs, strict=True):
                terms[name, "immediate" if name in group.immediate else "later"].append(own[name][1:])
                terms[name, "immediate" if name in group.own else "later"].append((own[name].own, None))
        return terms

    def of_class(self, c: int) -> HeldCosts:
        """What the estimator of a class of sites gets."""
        names, batch = self.signals.layout.classes[c].names, self.signals.batches[c]
        index, share = self.drawn.get(c, (None, None))
        is_count, has_bits = batch.cls.spec.components is None, False
        if is_count:
            log_q, value = batch.means, batch.widened(batch.value)
        elif index is not None and batch.components.kind == "bernoulli":
            log_q, has_bits = batch.log_odds, True
            value = batch.widened(batch.value).to(log_q.dtype)
        else:
            log_q, value = batch.log_probs, batch.index
        shape = log_q.shape[1:] if index is None else (*index.shape[1:], *log_q.shape[value.dim() :])
        exact = Changes(*(self._stack(names, side).expand(-1, *shape) for side in Changes._fields))
        changes = exact
        if index is not None:
            predicted = zip(*(self.predicted[name] for name in names), strict=True)
            changes = Changes(*(torch.stack(own).to(log_q.detach()) for own in predicted))
        settled, rest, excess = self._known(names, index)
        sign = 1.0 - 2.0 * value if has_bits else None
        held = HeldCosts(log_q, value, changes, settled, sign, rest, self.particle, index, share, exact, excess)
        if not is_count:
            return held
        back = self._stack(names, "back").expand_as(exact.law)
        has_ahead = index is not None and self.expanded.isdisjoint(names)
        ahead = self._stack(names, "ahead").to(exact.law) if has_ahead else None
        return held._replace(near=batch.near, back=back, ahead=ahead, dispersion=batch.dispersion)

    def _stack(self, names: Sequence[str], what: str) -> Tensor:
        return torch.stack([self.exact[name][what] for name in names])

    def _known(
        self, names: Sequence[str], index: Tensor | None
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
        """Sums of immediate costs, of costs that are not known at other values, and what the run has cost more."""
        sites, excess = [self.plan.sites[name] for name in names], None
        settled = self._sum(names, [site.changes["immediate"] for site in sites])
        rest = self._sum(names, [site.rest for site in sites]) if any(site.rest for site in sites) else None
        if self.values.is_outdated:
            later, immediate = excess = self._stack(names, "excess of later"), self._stack(names, "excess of immediate")
            if index is None:
                rest, excess = later + immediate if rest is None else rest + later + immediate, None
                settled = settled - immediate
        return settled, rest, excess

    def _sum(self, names: Sequence[str], costs: Sequence[Collection[str]]) -> Tensor:
        """Sums ``(G, M, plates)``, in nats, of costs that read each site, of all rows if these may meet."""

        def of_run(traced: TracedRun, name: str, own: Collection[str]) -> Tensor:
            plates, run = self.graph.node(name).plates, traced.run
            known = ((run.costs[cost].detach().unsqueeze(0), self.graph.cost(cost).plates) for cost in own)
            over, shape = plates if self.signals.layout.cuts_plates else (), self.rollout.run_shape(plates)
            return summed(known, over, self.rollout.run_shape(over), run.loss.detach())[0].expand(shape)

        pairs = zip(names, costs, strict=True)
        return torch.stack([torch.cat([of_run(traced, *pair) for traced in self.values.traced]) for pair in pairs])


def _openness(batch: SiteBatch, particle: Tensor | None) -> Tensor:
    """The uncertainty of each component: the chance that two draws of it differ, ``(G, M or 1, plates, D)``.

    Of counts the mean, which multiplies the differences in the gradient.
    """
    if batch.cls.spec.components is None:
        return batch.means.detach()
    has_bits = batch.components.kind == "bernoulli"
    log_q = (batch.log_odds if has_bits else batch.log_probs).detach()
    log_q = log_q if particle is None else log_q.index_select(1, particle)
    if has_bits:
        return 2.0 * log_q.sigmoid() * (-log_q).sigmoid()
    return 1.0 - log_q.exp().square().sum(-1)


def _drawn(open_: Tensor, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws ``number`` components of each row, uncertain ones more often; ``open_`` are their uncertainties.

    Returns:
        Their indices, and for each the inverse of the number of times that it is drawn on average.
    """
    chance = (1.0 - _EVEN) * open_ / open_.sum(-1, keepdim=True).clamp(min=1e-30) + _EVEN / open_.shape[-1]
    chance = chance / chance.sum(-1, keepdim=True)
    index = _draw(chance, number, generator)
    return index, 1.0 / (number * chance.gather(-1, index))


def _draw(chance: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Draws ``number`` components of each row, evenly spaced on the cumulative chance."""
    bounds = chance.cumsum(-1)
    at = (torch.arange(number, device=chance.device) + uniform(bounds[..., :1], generator)) / number
    return torch.searchsorted(bounds, at * bounds[..., -1:], right=True).clamp(max=chance.shape[-1] - 1)


def _signs(slopes: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Random signs for each slope."""
    parts = signs(torch.cat([torch.zeros_like(one) for one in slopes]), generator).split([len(one) for one in slopes])
    return [part.to(slope.dtype) for part, slope in zip(parts, slopes, strict=True)]


def _predicted(split: Components, record: SiteRecord, terms: Derivatives) -> Tensor:
    """Changes ``(M, plates, D, K)``, of pairs ``(M, plates, D)``, from derivatives at the drawn values."""
    value, fn = record.value.detach(), record.fn
    slopes = [slope for slope, _ in terms if slope is not None]
    if not slopes:
        return value.new_zeros((), dtype=torch.get_default_dtype())
    slope, bent = sum(slopes[1:], slopes[0]), [curved for _, curved in terms if curved is not None]
    batch = value.shape[: value.dim() - split.value_ndim]
    if split.has_pairs:
        step = 1.0 - 2.0 * value if split.kind == "bernoulli" else record.near.step
        change = slope * step
        return (change + 0.5 * sum(bent[1:], bent[0]) if bent else change).reshape(*batch, split.size)
    index, table = split.index(value, fn).unsqueeze(-1), slope.reshape(*batch, split.size, split.cardinality)
    table = table - table.gather(-1, index)
    if not bent:
        return table
    mixed = sum(bent[1:], bent[0]).expand(*value.shape, split.cardinality)
    mixed = mixed.reshape(*batch, split.size, split.cardinality, split.cardinality)
    own = mixed.diagonal(dim1=-2, dim2=-1)
    across = mixed.gather(-1, index.unsqueeze(-2).expand(*mixed.shape[:-1], 1)).squeeze(-1)
    return table + 0.5 * (own + own.gather(-1, index) - 2.0 * across)
