r"""A recorded run of guide and model: its costs as functions of the values of its sites."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_bpq.graph.bitsets import Reads
from pyro_bpq.graph.scg import cost_of_guide
from pyro_bpq.record.components import Drawn, Pattern, Scored, patterns_of, rows_that_meet
from pyro_bpq.record.function import Function, arguments_of, flat, values_in
from pyro_bpq.record.operators import kind_of
from pyro_bpq.record.recording import Recording, Uncut
from pyro_bpq.record.tape import Value
from pyro_bpq.record.work import Work, work_of

# Largest number of cost elements in rows that run at once.
MOST_ELEMENTS = 1 << 21


@dataclass(frozen=True, eq=False)
class Bound:
    """The tensors of a run with the operators of a recording.

    Args:
        tensors: Its leaves by value.
        weights: Scale and mask of each cost.
    """

    tensors: Mapping[Value, Tensor]
    weights: Mapping[str, tuple[Any, Any]]

    def weighted(self, name: str, cost: Tensor) -> Tensor:
        """A cost at other values, scaled and masked as that of the run."""
        scale, mask = self.weights.get(name, (1.0, None))
        return cost if mask is None and isinstance(scale, float) and scale == 1.0 else scale_and_mask(cost, scale, mask)



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
        arguments: Values of the arguments by their position.
        subsamples: Values of the indices that plates have drawn, by name of the plate.
        parameters: Values of the guide's parameters, by name.
        num_of_guide: Number of operators of the guide.
    """

    recording: Recording
    reads: Reads
    self_read: frozenset[str]
    drawn: Mapping[str, Drawn]
    scored: Mapping[str, Scored]
    costs: Mapping[str, Value]
    unweighted: frozenset[str]
    laws: Mapping[str, Value]
    arguments: Mapping[int, Value]
    subsamples: Mapping[str, Value]
    parameters: Mapping[str, Value]
    num_of_guide: int
    # Functions that were asked for, by what was asked.
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def is_like(self, other: Recorded) -> bool:
        """Whether another run did the same: the same operators on the same values, with the same numbers."""
        return self.named == other.named and self._core == other._core

    @cached_property
    def _core(self) -> tuple[Any, ...]:
        """The operators of all that may be asked for: scales and masks may change from run to run."""
        return self.recording.cut(self.named.values(), sees_all=True).nodes

    def adopt(self, other: Recorded) -> None:
        """Takes the tensors of a run that did the same."""
        self.recording.tensors.clear()
        self.recording.tensors.update(other.recording.tensors)

    def release(self) -> None:
        """Forgets the tensors of the run that another run has anew."""
        sites = (site.value for site in self.drawn.values())
        self.recording.release((*sites, *self.arguments.values(), *self.subsamples.values()))

    @cached_property
    def met(self) -> dict[str, tuple[str, str]]:
        """Costs in which a row of a plate reads other rows: the plate, and an operator without a rule, or ``""``."""
        plates = dict.fromkeys(plate for site in self.drawn.values() for plate in site.plates)
        found: dict[str, tuple[str, str]] = {}
        for plate in plates:
            meeting = rows_that_meet(self.recording, self.drawn.values(), self.scored, plate)
            found |= {cost: (plate, why) for cost, why in meeting.items() if cost not in found}
        return found

    @cached_property
    def patterns(self) -> dict[tuple[str, str], Pattern]:
        """What components of sites costs read, by site and cost."""
        return patterns_of(self.recording, self.drawn, self.scored, self.met)

    @cached_property
    def work(self) -> Work:
        """The cost of the run."""
        recording = self.recording
        return work_of(recording.nodes, recording.shapes, recording.dtypes)

    def read_parameters(self) -> frozenset[str]:
        """The parameters of the guide that its operators read; views read no numbers."""
        names, read = {value: name for name, value in self.parameters.items()}, set[str]()
        for node in self.recording.nodes[: self.num_of_guide]:
            found = {names[value] for value in arguments_of(node) if value in names}
            if found and kind_of(node.func).is_view:
                names.update(dict.fromkeys(values_in(node.result), found.pop()))
            read |= found
        return frozenset(read)

    def bound(
        self,
        values: Mapping[str, Tensor],
        subsamples: Mapping[str, Any],
        arguments: Any,
        weights: Mapping[str, tuple[Any, Any]],
    ) -> Bound:
        """The tensors of another run with the same operators.

        Args:
            values: The values of its sites.
            subsamples: The indices that its plates have drawn.
            arguments: Its arguments.
            weights: Scale and mask of each of its costs.
        """
        leaves = tree_leaves(arguments) if self.arguments else []
        found = dict(self.recording.tensors)
        found.update({value: leaves[i] for i, value in self.arguments.items()})
        found.update({value: subsamples[name] for name, value in self.subsamples.items() if name in subsamples})
        found.update({site.value: values[name].detach() for name, site in self.drawn.items() if name in values})
        return Bound(found, {name: weight for name, weight in weights.items() if name in self.unweighted})

    def can_cut(self, cost: str, site: str) -> bool:
        """Whether a cost is known at other values of a site."""
        return (cost, site) in self._cuttable

    def law(self, child: str) -> str:
        """Name of the log-probability of the value of a site; that of its cost where this is the same."""
        own = cost_of_guide(child)
        return own if self.costs.get(own) == self.laws[child] else f"law({child})"

    @cached_property
    def named(self) -> dict[str, Value]:
        """All that may be asked for: costs, laws, elements and sites, by name."""
        laws = {self.law(name): value for name, value in self.laws.items()}
        elements = {f"elements of {cost}": scored.elements for cost, scored in self.scored.items()}
        sites = {name: site.value for name, site in self.drawn.items()}
        return {**laws, **elements, **sites, **self.costs}

    @cached_property
    def _cuttable(self) -> frozenset[tuple[str, str]]:
        found = set()
        laws = {self.law(name): value for name, value in self.laws.items()}
        for cost, value in {**laws, **self.costs}.items():
            try:
                function = self.recording.cut([value])
            except Uncut:
                continue
            found |= {(cost, name) for name, site in self.drawn.items() if site.value in function.given}
        return frozenset(found)

    def num_elements(self, cost: str) -> int:
        """Number of elements of a cost, or of what it is summed from."""
        known = self.scored.get(cost)
        values = [self.named[cost], *(() if known is None else (known.elements,))]
        return max(torch.Size(self.recording.shapes[value]).numel() for value in values)  # type: ignore[arg-type]

    def work_at(self, costs: Iterable[str], sites: Iterable[str]) -> Work:
        """The cost of a row of :meth:`at_rows`."""
        recording = self.recording
        function = recording.cut([self.named[name] for name in costs], sees_all=True)
        moved = {self.drawn[name].value for name in sites}
        return work_of(function.reading(moved), recording.shapes, recording.dtypes)

    def again(
        self,
        names: Sequence[str],
        bound: Bound,
        given: Mapping[str, Tensor],
        redrawn: frozenset[str],
        means: bool,
        seed: int,
    ) -> dict[str, Tensor]:
        """What is named, and the values of redrawn sites, where sites have given values and others are drawn anew.

        Args:
            names: Costs, elements of costs, laws and sites.
            bound: The tensors of the run.
            given: Other values of sites.
            redrawn: Sites that are drawn anew.
            means: Whether these take their means, where they have one.
            seed: Seed of these draws; the global generators stay as they are.

        Raises:
            Uncut: If something on the way cannot be computed again.
        """
        wanted, values = (*names, *sorted(redrawn)), {name: site.value for name, site in self.drawn.items()}
        key = wanted, redrawn, means
        if key not in self._made:
            function = self.recording.cut(
                [self.named[name] for name in wanted],
                [values[name] for name in given],
                frozenset(values[name] for name in redrawn),
            )
            self._made[key] = function.with_means() if means else function
        function = self._made[key]
        tensors = {**bound.tensors, **{values[name]: value for name, value in given.items()}}
        taken = [tensors[value] for value in function.given]
        taken = [tensor.clone() for tensor in taken] if function.writes else taken
        with _drawing(function, seed):
            found = zip(wanted, function(*taken), strict=True)
            return {name: bound.weighted(name, value) for name, value in found}

    def sign_of(self, cost: str) -> float:
        """The sign with which the elements of a log-probability enter the loss."""
        return 1.0 if cost == cost_of_guide(self.scored[cost].site) else -1.0

    def at_rows(
        self, costs: Sequence[str], bound: Bound, moved: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Costs ``(rows, batch)`` where some sites have other values ``(rows, batch, event)``; detached."""
        names, sites, number = tuple(costs), tuple(moved), len(next(iter(moved.values())))
        size = sum(torch.Size(self.recording.shapes[self.named[c]]).numel() for c in names)  # type: ignore[arg-type]
        rows = max(1, min(number, MOST_ELEMENTS // max(size, 1)))
        parts = []
        for start in range(0, number, rows):
            own = {name: value[start : start + rows] for name, value in moved.items()}
            parts.append(self._at_few(names, sites, bound, own))
        return {name: bound.weighted(name, torch.cat([part[i] for part in parts])) for i, name in enumerate(names)}

    @torch.no_grad()
    def _at_few(
        self, costs: tuple[str, ...], sites: tuple[str, ...], bound: Bound, moved: Mapping[str, Tensor]
    ) -> list[Tensor]:
        number = len(next(iter(moved.values())))
        tensors = {**bound.tensors, **{self.drawn[name].value: value for name, value in moved.items()}}
        key = costs, sites, number
        if key not in self._made:
            self._made[key] = self._flat(costs, sites, tensors)
        function, given, constants = self._made[key]
        with _drawing(function):
            found = function(*(tensors[value] for value in given), *constants)
        shapes = [self.recording.shapes[self.named[name]] for name in costs]
        pairs = zip(found, shapes, strict=True)
        return [cost if cost.dim() > len(own) else cost.expand(number, *own) for cost, own in pairs]  # type: ignore[arg-type]

    def _flat(
        self, costs: tuple[str, ...], sites: tuple[str, ...], tensors: Mapping[Value, Tensor]
    ) -> tuple[Function, tuple[Value, ...], list[Tensor]]:
        """The function of all rows, the values that it takes, and constants."""
        moved = {self.drawn[name].value for name in sites}
        function = self.recording.cut([self.named[name] for name in costs], moved)
        given, constants = function.given, list[Tensor]()
        with torch.random.fork_rng():
            if function.writes:
                plain = [tensors[value].detach()[0] if value in moved else tensors[value].detach() for value in given]
                plain = [tensor.clone() for tensor in plain]
                function, constants = flat(torch.func.functionalize(_called(function)), plain)
            dims = (*(0 if value in moved else None for value in given), *(None for _ in constants))
            if all(dim is None for dim in dims):
                return function, given, constants
            asked = [tensors[value] for value in given]
            run = torch.func.vmap(_called(function), dims, randomness="different")
            function, more = flat(run, [*asked, *constants])
        return function, given, constants + more


def _called(function: Function) -> Callable[..., Any]:
    return lambda *tensors: tuple(function(*tensors))


@contextlib.contextmanager
def _drawing(function: Function, seed: int = 0) -> Iterator[None]:
    """Draws of a function leave the global generators as they are."""
    if not function.draws:
        yield
        return
    with torch.random.fork_rng():
        # torch.manual_seed() is slow: it formats the call stack for every kind of device that is absent.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        yield


def arguments_in(tape: Any, args: Any, kwargs: Any) -> dict[int, Value]:
    """The positions of the arguments that a tape knows, and their values; the tape must be active."""
    leaves = enumerate(tree_leaves((args, kwargs)))
    return {i: tape.value_of(leaf) for i, leaf in leaves if isinstance(leaf, Tensor) and tape.knows(leaf)}
