r"""A recorded run of guide and model: its costs as functions of the values of its sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import pyro
import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_bpq.graph.bitsets import Reads
from pyro_bpq.record.components import Drawn, Pattern, Scored, patterns_of, rows_that_meet
from pyro_bpq.record.function import Check, Function, Recording, Uncut
from pyro_bpq.record.key import Call
from pyro_bpq.record.laws import Draw
from pyro_bpq.record.operators import effects_of
from pyro_bpq.record.tape import Tape
from pyro_bpq.record.values import Tensors, Value, results_of

# Largest number of cost elements in rows that run at once.
MOST_ELEMENTS = 1 << 21
# Largest number of entries that Python has read whose numbers are compared in each call.
_MOST_READ = 4096
# Bits of what a value reads directly: what nothing makes again, random numbers besides the values of sites, sites.
_LOST, _NOISE, _FIRST_SITE = 1, 2, 4


Outside = tuple[str, Any]
# Scale and mask of costs, by name.
Weights = Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recording whose values have names.

    Args:
        recording: The operators.
        reads: The latent sites that each cost reads, by name of the cost.
        self_read: Costs of the model whose law, scale or mask reads the value that it scores.
        drawn: The latent sites of the guide.
        scored: The costs that are log-probabilities, and cost statements.
        costs: The value of each cost in nats, before it is scaled and masked if no site decides how.
        unweighted: Costs that are to be scaled and masked.
        laws: The log-probability of the value of each site of the guide, neither scaled nor masked.
        outside: Values of what comes from elsewhere, by what it is, see :func:`outside_of`.
        parameters: Values of the guide's parameters, by name, as ``pyro.param`` has returned them.
        traced: The values of the tensors in the traces of the run, in a fixed order.
        differentiable: The sum of all costs through which pathwise gradients flow.
    """

    recording: Recording
    reads: Reads
    self_read: frozenset[str]
    drawn: Mapping[str, Drawn]
    scored: Mapping[str, Scored]
    costs: Mapping[str, Value]
    unweighted: frozenset[str]
    laws: Mapping[str, Value]
    outside: Mapping[Outside, Value]
    parameters: Mapping[str, Value]
    traced: tuple[Value, ...] = ()
    differentiable: Value | None = None
    # Functions that were asked for, by what was asked.
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was asked for before, or is made now."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def is_like(self, other: Recorded) -> bool:
        """Whether another run did the same: the same operators on the same values, with the same numbers."""
        return self._made is other._made or (self.named == other.named and self.core.nodes == other.core.nodes)

    def has_constants_of(self, other: Recorded) -> bool:
        """Whether tensors that a run which did the same has made of numbers, as by ``torch.tensor``, are equal."""
        recording, sites = self.recording, {site.value for site in self.drawn.values()}
        made = {value for value in self.core.given if value in recording.tensors and recording.lasts([value])}
        pairs = ((recording.tensors[v], other.recording.tensors[v]) for v in made - {*self.outside.values()} - sites)
        return all(torch.equal(*pair) for pair in pairs)

    @cached_property
    def core(self) -> Function:
        """The operators of all that may be asked for: scales and masks may change from run to run."""
        return self.recording.cut(self.named.values(), sees_all=True)

    def take_over(self, other: Recorded) -> None:
        """Takes over what an earlier run that did the same has been asked."""
        known = ("_made", "met", "patterns", "cuts", "core", "_direct")
        vars(self).update({name: vars(other)[name] for name in known if name in vars(other)})

    @cached_property
    def met(self) -> dict[str, tuple[str, str]]:
        """Costs in which a row of a plate reads other rows: the plate, and an operator without a rule, or ``""``."""
        return rows_that_meet(self.recording, self.drawn, self.scored)

    @cached_property
    def patterns(self) -> dict[tuple[str, str], Pattern]:
        """What components of sites costs read, by site and cost."""
        return patterns_of(self.recording, self.drawn, self.scored, self.met)

    def read_parameters(self) -> frozenset[str]:
        """The parameters of the guide that operators read; views read no numbers."""
        reading = {name: self.recording.whole.reading({value}) for name, value in self.parameters.items()}
        return frozenset(n for n, nodes in reading.items() if not all(effects_of(node.func).is_view for node in nodes))

    def bound(self, values: Mapping[str, Tensor], subsamples: Mapping[str, Any], call: Call, weights: Weights) -> Bound:
        """The tensors of another run with the same operators.

        Args:
            values: The values of its sites.
            subsamples: The indices that its plates have drawn.
            call: The call that it was.
            weights: Scale and mask of each of its costs.
        """
        found, now = dict(self.recording.tensors), outside_of(call, subsamples)
        found.update({value: now[key] for key, value in self.outside.items() if key in now})
        # Operators were recorded for a copy where the value of a site was a view.
        own = {site.value: values[name] for name, site in self.drawn.items() if name in values}
        found.update({value: tensor.detach().contiguous() for value, tensor in own.items()})
        return Bound(self, found, {name: weight for name, weight in weights.items() if name in self.unweighted})

    def come_from(self, place: str) -> dict[Any, Value]:
        """The values of what comes from a call, from parameters, or from plates."""
        return {name: value for (own, name), value in self.outside.items() if own == place}

    def check(self) -> Check | None:
        """The check of the calls of such runs; ``None`` if what Python has read cannot be told in advance."""
        recording, stored = self.recording, tuple(self.come_from("parameter"))
        wanted = tuple(dict.fromkeys(guard.value for guard in recording.guards))
        if not wanted:
            return Check(stored=stored)
        try:
            function = recording.cut(wanted)
        except Uncut:
            return None
        place = {value: i for i, value in self.come_from("call").items()}
        others = {value: recording.tensors[value] for value in function.given if value not in place}
        size = sum(math.prod(recording.shapes[value]) for value in wanted)
        lasts = recording.lasts(others) and others.keys().isdisjoint(self.come_from("plate").values())
        if function.draws or size > _MOST_READ or not lasts:
            return None
        counts = (own.value for own in recording.guards if isinstance(own.read, tuple))
        sized = frozenset(value for value in counts if recording.dtypes[value] is torch.bool)
        reached = tuple((value, place[value]) for value in function.given if value in place)
        return Check((function.nodes, wanted), stored, reached, sized, others, function)

    def can_compute(self, cost: str) -> bool:
        """Whether a cost can be computed again."""
        return cost in self.named and not self._direct[self.named[cost]] & _LOST

    def can_cut(self, cost: str, site: str) -> bool:
        """Whether a cost is known at other values of a site."""
        return self.can_compute(cost) and bool(self._direct[self.named[cost]] & self._direct[self.drawn[site].value])

    @staticmethod
    def law(child: str) -> str:
        """Name of the log-probability of the value of a site, neither scaled nor masked."""
        return f"law({child})"

    @cached_property
    def named(self) -> dict[str, Value]:
        """All that may be asked for: costs, laws, elements and sites, by name."""
        laws = {self.law(name): value for name, value in self.laws.items()}
        elements = {f"elements of {cost}": scored.elements for cost, scored in self.scored.items()}
        sites = {name: site.value for name, site in self.drawn.items()}
        return {**laws, **elements, **sites, **self.costs}

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """What all that may be asked for reads directly."""
        return tuple(self._direct[value] for value in self.named.values())

    @cached_property
    def _direct(self) -> list[int]:
        """For each value the sites that it reads other than through a draw, as bits, and the other bits."""
        recording = self.recording
        bits = {site.value: _FIRST_SITE << i for i, site in enumerate(self.drawn.values())}
        found = [_LOST] * len(recording.masks)
        for value in recording.tensors:
            found[value] = _NOISE if value in recording.noise else bits.get(value, 0)
        of_node = list[int]()
        for node in recording.nodes:
            mask = _NOISE if isinstance(node.func, Draw) or effects_of(node.func).is_random else 0
            for value in node.reads:
                mask |= found[value]
            for i in node.after:
                mask |= of_node[i]
            of_node.append(mask)
            for value in results_of(node):
                if value not in recording.tensors:
                    found[value] = mask | _LOST if value in recording.opaque else mask
        return found

    def num_elements(self, cost: str) -> int:
        """Number of elements of a cost, or of what it is summed from."""
        known = self.scored.get(cost)
        values = [self.named[cost], *(() if known is None else (known.elements,))]
        return max(math.prod(self.recording.shapes[value]) for value in values)

    def draws(self, cost: str) -> bool:
        """Whether it reads random numbers besides the values of sites."""
        return bool(self._direct[self.named[cost]] & _NOISE)


@dataclass(frozen=True, eq=False)
class Bound:
    """The tensors of a run with the operators of a recording.

    Args:
        recorded: The recording.
        tensors: Its leaves by value.
        weights: Scale and mask of each cost.
    """

    recorded: Recorded
    tensors: Tensors
    weights: Weights

    def weighted(self, name: str, cost: Tensor) -> Tensor:
        """A cost at other values, scaled and masked as that of the run."""
        return cost if self.is_plain(name) else scale_and_mask(cost, *self.weights[name])

    def is_plain(self, name: str) -> bool:
        """Whether a cost is neither scaled nor masked."""
        scale, mask = self.weights.get(name, (1.0, None))
        return mask is None and isinstance(scale, float) and scale == 1.0

    def again(
        self,
        names: Iterable[str],
        given: Mapping[str, Tensor] = MappingProxyType({}),
        redrawn: frozenset[str] = frozenset(),
        means: bool = False,
        seed: int = 0,
        in_double: bool = False,
    ) -> dict[str, Tensor]:
        """What is named, and the values of redrawn sites, where sites have given values and others are drawn anew.

        Args:
            names: Costs, elements of costs, laws and sites.
            given: Other values of sites.
            redrawn: Sites that are drawn anew.
            means: Whether these take their means, where they have one.
            seed: Seed of these draws; the global generators stay as they are.
            in_double: Whether in double precision.

        Raises:
            Uncut: If something on the way cannot be computed again.
        """
        own, wanted = self.recorded, (*names, *sorted(redrawn))

        def made() -> Function:
            drawn = frozenset(own.named[name] for name in redrawn)
            function = own.recording.cut([own.named[name] for name in wanted], redrawn=drawn)
            function = function.with_draws(lambda draw: draw.mean) if means else function
            return function.in_double() if in_double else function

        function = own.kept((wanted, redrawn, means, in_double), made)
        tensors = {**self.tensors, **{own.named[name]: value for name, value in given.items()}}
        tensors = {value: tensors[value] for value in function.given}
        found = zip(wanted, function.at(doubled(tensors) if in_double else tensors, seed), strict=True)
        return {name: self.weighted(name, value) for name, value in found}

    @torch.no_grad()
    def at_rows(self, costs: Iterable[str], moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Costs ``(rows, batch)`` where some sites have other values ``(rows, batch, event)``; detached."""
        names, own, number = tuple(costs), self.recorded, len(next(iter(moved.values())))
        wanted, values = [own.named[name] for name in names], [own.named[name] for name in moved]
        size = sum(math.prod(own.recording.shapes[value]) for value in wanted)
        rows = max(1, min(number, MOST_ELEMENTS // max(size, 1)))

        def few(*parts: Tensor) -> list[Tensor]:
            tensors = {**self.tensors, **dict(zip(values, parts, strict=True))}
            key = names, tuple(moved), len(parts[0])
            function = own.kept(key, lambda: own.recording.cut(wanted).in_rows({*values}, tensors))
            found: list[Tensor] = function.at(tensors)
            return found

        found = zip(*map(few, *(value.split(rows) for value in moved.values())), strict=True)
        return {name: self.weighted(name, torch.cat(parts)) for name, parts in zip(names, found, strict=True)}


def doubled(tensors: Tensors) -> dict[Value, Tensor]:
    """The same in double precision."""
    return {value: own.double() if own.is_floating_point() else own for value, own in tensors.items()}


def outside_of(call: Call, subsamples: Mapping[str, Any]) -> dict[Outside, Tensor]:
    """What a run takes from elsewhere: tensors of its call, by position; parameters and indices of plates, by name."""
    found: dict[Outside, Tensor] = {("call", i): own for i, own in enumerate(call.tensors)}
    found.update({("parameter", name): own for name, own in pyro.get_param_store().named_parameters()})
    found.update({("plate", name): own for name, own in subsamples.items() if isinstance(own, Tensor)})
    return found


def inputs_in(tape: Tape, call: Call, subsamples: Mapping[str, Any]) -> dict[Outside, Tensor]:
    """Of these what a tape has met, and nothing that was written into."""
    written = {id(tape.inputs[value]) for value in tape.before}

    def is_input(own: Tensor) -> bool:
        return tape.knows(own) and id(own) not in written and not tape.mask_of(own)

    return {key: own for key, own in outside_of(call, subsamples).items() if key[0] == "plate" or is_input(own)}
