r"""The recording in force of a step with the tensors of its runs, and its costs at other values of sites, in rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bpq.graph.scg import Plate
from pyro_bpq.plan.flips import ALL, Flips, Moves, Terms
from pyro_bpq.plan.plan import Plan
from pyro_bpq.record.key import Call
from pyro_bpq.record.recorded import Bound, Recorded
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.runs import Rollout, align, sum_to_plates
from pyro_bpq.rollout.sums import total

Plates = Sequence[Plate]


@dataclass(frozen=True, eq=False)
class Values:
    """What costs at other values are computed from.

    Args:
        recorded: The recording of each run.
        alone: That of a run of one particle; ``None`` if all particles run in one call and none has run alone.
        traced: The runs of the step.
        call: What the call of the programs looks like.
        nesting: Number of batch dimensions where all particles run in one call, that of the particles included.
        compiles: Whether the step is compiled, which joins operators that are equal.
    """

    recorded: tuple[Recorded, ...]
    alone: Recorded | None
    traced: tuple[TracedRun, ...]
    call: Call
    nesting: int = 0
    compiles: bool = False

    @cached_property
    def bound(self) -> tuple[Bound, ...]:
        """The tensors of each run."""
        return tuple(run.bound(own, self.call) for own, run in zip(self.recorded, self.traced, strict=True))

    @property
    def is_outdated(self) -> bool:
        """Whether costs come from an earlier run than the step's own."""
        return any(run.recorded is None for run in self.traced)

    def of_runs(self, particle: Tensor | None) -> list[tuple[TracedRun, Bound, Mapping[str, Tensor]]]:
        """Each run of the step, its tensors and its costs; those of one particle, whose number ``(1,)`` is given."""
        runs = [(run, own, run.run.costs) for run, own in zip(self.traced, self.bound, strict=True)]
        if particle is None:
            return runs
        if not self.nesting:
            return [runs[int(particle)]]
        costs = {name: self.particle_of(cost, particle) for name, cost in runs[0][2].items()}
        return [(self.traced[0], self.of_particle(particle), costs)]

    def of_particle(self, index: Tensor) -> Bound:
        """The tensors of one of the particles that ran in one call, by its number ``(1,)``."""
        assert self.alone is not None
        (run,), alone = self.traced, self.alone
        values = {}
        for name, record in run.run.sites.items():
            own = self.particle_of(record.value, index, len(record.fn.event_shape))
            # A value may stand for a whole plate.
            shape = record.fn.shape()[len(record.fn.batch_shape) == self.nesting :]
            values[name] = own.expand(shape).reshape(alone.recording.shapes[alone.drawn[name].value])
        weights = {name: tuple(self.particle_of(part, index) for part in pair) for name, pair in run.weights.items()}
        return alone.bound(values, run.subsamples, self.call, weights)

    def particle_of(self, item: Any, index: Tensor, event_ndim: int = 0) -> Any:
        """The entry of one particle; the whole if it does not depend on the particle."""
        if not isinstance(item, Tensor) or item.dim() - event_ndim < self.nesting or item.shape[0] == 1:
            return item
        return item.index_select(0, index)[0]


@torch.no_grad()
def are_alike(values: Values, numbers: Iterable[int]) -> bool:
    """Whether particles, which ran among others, have cost what each of them costs alone.

    A program may read a shape, as of ``z.mean()``. In single precision a large cost would hide it, and rounding may
    look like it: such costs are computed again in double.
    """
    (run,), (recorded,), (among,), own = values.traced, values.recorded, values.bound, values.alone
    assert own is not None
    if not (run.is_dear or all(map(own.can_compute, own.costs))):
        return False
    names = [name for name in own.costs if name in recorded.costs and own.can_compute(name) and not own.draws(name)]
    known, places = [name for name in names if recorded.can_compute(name)], torch.tensor([*numbers]).split(1)

    def compared(twice: list[str]) -> Iterator[bool]:
        costs = {**run.run.costs, **among.again(twice, in_double=True)}
        for alone, index in ((values.of_particle(index), index) for index in places):
            found = {**alone.again(set(names).difference(twice)), **alone.again(twice, in_double=True)}
            for name in names:
                limit = 5e-8 if name in twice else 5e-5
                yield bool(torch.isclose(found[name], values.particle_of(costs[name], index), limit, limit).all())

    try:
        return all(compared([n for n in known if (run.run.costs[n].abs() > 100.0).any()])) or all(compared(known))
    except RuntimeError:  # an operator of single precision
        return all(compared([]))


# Costs where sites take other values while all others keep theirs.


class Rows(NamedTuple):
    """Values of sites, and costs and laws of a run ``(rows, batch)``, by name; the first row is at those of the run."""

    flips: Flips
    moves: Moves
    traced: TracedRun
    bound: Bound
    values: Mapping[str, Tensor]
    costs: Mapping[str, Tensor]

    @staticmethod
    def of(flips: Flips, traced: TracedRun, bound: Bound, moves: Moves, wanted: Sequence[str]) -> Rows:
        """Evaluates what is wanted, where components of sites take other values."""
        recorded, sites = bound.recorded, traced.run.sites
        values = {name: bound.tensors[recorded.drawn[name].value] for name in flips.sites}
        moved = {name: flips.moved(name, value, sites[name].fn, moves) for name, value in values.items()}
        if not moves.is_apart:
            return Rows(flips, moves, traced, bound, moved, bound.at_rows(wanted, moved))
        rows = [bound.again(wanted, {n: value[row] for n, value in moved.items()}) for row in range(flips.rows)]
        costs = {name: torch.stack([row[name] for row in rows]) for name in wanted}
        return Rows(flips, moves, traced, bound, moved, costs)

    def change(self, name: str, terms: Terms, plates: Plates, shape: tuple[int, ...]) -> Tensor:
        """The change of some costs at all values of a site, ``(M, plates, D, K)``, zero at the sampled one.

        If components are drawn, those of the drawn ones. Of counts, and of bits that are drawn, it is the change at
        the other value, ``(M, plates, D)``.
        """
        site, drawn, like = self.flips.sites[name], self.moves.drawn.get(name), self.traced.run.loss.detach()
        start, split = self.flips.start[name], site.components
        kept = ((self.costs[c][start : start + site.rows] - self.costs[c][:1], own) for c, own in terms.items())
        found = summed(kept, plates, shape, like).to(like).expand(site.rows, *shape)
        if split.kind == "count" or (drawn is not None and split.kind == "bernoulli"):
            return found.movedim(0, -1)
        index = self._index(name, shape)
        return by_value(found, like.new_zeros(()), index if drawn is None else index.gather(-1, drawn), split)

    def table(self, name: str, terms: Terms, plates: Plates, shape: tuple[int, ...]) -> Tensor:
        """Some costs at all values of a site, ``(M, plates, D, K)``."""
        site, start, like = self.flips.sites[name], self.flips.start[name], self.traced.run.loss.detach()
        sample, others = (
            summed(((self.costs[c][rows], own) for c, own in terms.items()), plates, shape, like).to(like)
            for rows in (slice(1), slice(start, start + site.rows))
        )
        return by_value(others.expand(-1, *shape), sample[0], self._index(name, shape), site.components)

    def _index(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The sampled values of a site, ``(M, plates, D)``."""
        value = self.bound.tensors[self.bound.recorded.drawn[name].value]
        return self.flips.sites[name].components.index(value, self.traced.run.sites[name].fn).expand(*shape, -1)

    def excess(self, costs: Mapping[str, Tensor], terms: Terms, plates: Plates, shape: tuple[int, ...]) -> Tensor:
        """How much more costs ``(batch)`` were in the run than at the sample here, ``(M, plates)``.

        Costs that are infinite in both are equal.
        """
        more = (((costs[c].detach() - self.costs[c][0]).nan_to_num(0.0)[None], own) for c, own in terms.items())
        return summed(more, plates, shape, self.traced.run.loss.detach())[0].expand(shape)


@torch.no_grad()
def flipped_costs(plan: Plan, values: Values, rollout: Rollout) -> dict[str, Tensor]:
    """The immediate costs of each flipped site, at all values in nats, ``(M, plate dims, D, K)``."""
    flips, tables = plan.flips, dict[str, Tensor]()
    rows = [Rows.of(flips, *pair, ALL, flips.wanted) for pair in zip(values.traced, values.bound, strict=True)]
    for name, site in flips.sites.items():
        plates = plan.graph.node(name).plates
        shape = rollout.run_shape(plates)
        tables[name] = torch.cat([one.table(name, site.costs, plates, shape) for one in rows])
    return tables


def summed(terms: Iterable[tuple[Tensor, Plates]], plates: Plates, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The sum ``(rows, M, plates)`` of costs ``(rows, batch)`` over all dimensions but the plates of a site."""
    found = ((cost, [plate for plate in own if -plate.dim < cost.dim()]) for cost, own in terms)
    parts = [align(sum_to_plates(cost, own, plates), shape, 0) for cost, own in found]
    return total(parts) if parts else like.new_zeros(1, *shape)


def by_value(rows: Tensor, sample: Tensor, index: Tensor, split: Components) -> Tensor:
    """Turns numbers by row into numbers by component and value, ``(M, plates, D, K)``.

    Args:
        rows: Numbers ``(D (K - 1), M, plates)`` at each step from the sample of each component.
        sample: Those at the sample, ``(M, plates)``.
        index: Sampled values ``(M, plates, D)``.
        split: The components.
    """
    steps = rows.unflatten(0, (index.shape[-1], split.cardinality - 1)).movedim((0, 1), (-2, -1))
    steps = torch.cat((sample[..., None, None].expand(*steps.shape[:-1], 1), steps), -1)
    values = torch.arange(split.cardinality, device=index.device)
    return steps.gather(-1, (values - index.unsqueeze(-1)) % split.cardinality)
