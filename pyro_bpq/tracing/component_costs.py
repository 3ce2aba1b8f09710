r"""Finds which component of a site each element of a cost reads, and sums the costs of each component.

A site with ``D`` independent components has one ``log q_d`` for each component ``d``. ``∇ log q_d`` needs only the
costs that depend on component ``d``. An element of a cost that reads only component ``d`` is charged to it alone.

Most programs treat the components of a value alike and keep them apart: by elementwise operators, views, ``cat``,
``stack``, products with one-hot rows. ``ElementTracker`` follows components through such operators. The answer is a
superset of the dependencies. Every operator that is not known to keep elements apart mixes all of them. So does a
gather by positions that may differ in the next run.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_bpq.rollout.features import batch_of, element_log_prob, independent_components
from pyro_bpq.rollout.runs import SiteRecord
from pyro_bpq.tracing.element_rules import MANY, NONE, SHAPING, Positions, Unknown, plan_of, tensors_in
from pyro_bpq.tracing.ledger import NO_STORAGE, Ledger, OperatorMode, memory_of
from pyro_bpq.tracing.provenance import DependencyTracker
from pyro_bpq.tracing.substitute import unchecked

# Largest number of sites whose components are followed.
_MAX_FOLLOWED = 32


@dataclass(frozen=True)
class Pattern:
    """The component of a site that each element of a cost reads."""

    # Shape of the elements: batch dimensions (size 1 where all rows are alike), then event dimensions
    shape: tuple[int, ...]
    event_ndim: int  # number of event dimensions
    # The component that each element reads, flattened; `NONE` where an element reads none
    components: tuple[int, ...]
    number: int  # number of components `D` of the site

    def fits(self, batch: torch.Size) -> bool:
        """Whether the pattern applies to a cost of this batch shape: if rows differ, their number must match."""
        if self.is_uniform:
            return True
        own = self.shape[: len(self.shape) - self.event_ndim]
        given = (1,) * (len(own) - len(batch)) + tuple(batch)
        return all(size in (1, have) for size, have in zip(own, given[len(given) - len(own) :], strict=True))

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all rows of the cost are alike."""
        return math.prod(self.shape[: len(self.shape) - self.event_ndim]) == 1

    @cached_property
    def _index(self) -> Tensor:
        """The components with the event dimensions flattened to one."""
        return torch.tensor(self.components).reshape(*self.shape[: len(self.shape) - self.event_ndim], -1)

    def charge(self, elements: Tensor, batch: torch.Size) -> Tensor:
        """Sums elements ``batch_of_cost + event`` by component, ``batch + (D,)``, with the batch shape of the site."""
        lead = elements.shape[: elements.dim() - self.event_ndim]
        flat = elements.reshape(*lead, -1)
        if not self.is_uniform or self.components != tuple(range(self.number)):
            index = self._index.to(flat.device).expand(flat.shape)
            # Elements that read no component are added to an extra component, which is dropped.
            charged = flat.new_zeros(*lead, self.number + 1)
            flat = charged.scatter_add(-1, index % (self.number + 1), flat)[..., : self.number]
        return flat.sum_to_size(*batch, self.number)


# Pairs of (site, cost) with the pattern that all runs of a structure share.
Patterns = frozenset[tuple[tuple[str, str], Pattern]]


class ElementWatch:
    """Follows the components of latent sites through a tracked run of guide and model."""

    def __init__(self, tracker: DependencyTracker, components: bool, rows: bool) -> None:
        self.tracker, self.elements = tracker, ElementTracker(tracker.ledger)
        self.rows = PlateRows(self.elements) if rows else None
        self.particles = PlateRows(self.elements) if rows else None
        self.components = components
        self.sizes: dict[str, tuple[torch.Size, int]] = {}

    def drawn(self, name: str, fn: Any, value: Tensor, frames: Sequence[Any], particles: Sequence[Any]) -> None:
        """Starts to follow a newly drawn site in vectorised plates; both trackers must be active."""
        if name in self.sizes:
            return
        for rows, own in ((self.rows, frames), (self.particles, particles)):
            if rows is not None:
                rows.drawn(name, fn, value, own)
        if not self.components:
            return
        if self.elements.followed:
            self.elements.inherit(name, fn, value)
        number = independent_components(fn)
        if number is None or number == 1 or getattr(fn, "has_rsample", False) or len(self.sizes) >= _MAX_FOLLOWED:
            return
        batch = batch_of(fn, value)
        self.sizes[name] = (batch, number)
        elements = np.arange(batch.numel() * number, dtype=np.int32)
        width = value.numel() // max(len(elements), 1)
        self.elements.follow(name, name, value, elements.repeat(width).reshape(tuple(value.shape)))

    def patterns(self, sites: Iterable[tuple[str, Any]]) -> dict[tuple[str, str], Pattern]:
        """Returns the patterns of costs; both trackers must be active."""
        if all(self.elements.mixes(name) for name in self.sizes):
            return {}
        costs, found = {cost: _elements(site) for cost, site in sites}, {}
        # Computing the elements may itself read values in Python, so mixing is checked again.
        followed = [name for name in self.sizes if not self.elements.mixes(name)]
        for cost, (elements, event_ndim) in costs.items():
            for name in followed:
                positions = self.elements.positions(name, elements)
                pattern = None if positions is None else _pattern(positions, event_ndim, *self.sizes[name])
                if pattern is not None:
                    found[name, cost] = pattern
        return found


def _elements(site: Any) -> tuple[Tensor, int]:
    """Returns the scaled, masked elements of a log-probability, and their number of event dimensions."""
    log_prob, event_ndim = element_log_prob(site["fn"], site["value"])
    weights = [site["scale"], site["mask"]]
    for i, weight in enumerate(weights):
        if isinstance(weight, Tensor):
            weights[i] = weight.reshape(weight.shape + (1,) * event_ndim)
    return scale_and_mask(log_prob, *weights), event_ndim


def _pattern(positions: np.ndarray, event_ndim: int, batch: torch.Size, number: int) -> Pattern | None:
    """Returns the pattern of a cost if each row reads only the same row of the site, all rows alike."""
    lead = positions.shape[: positions.ndim - event_ndim]
    if (positions == MANY).any() or len(batch) > len(lead):
        return None
    own = (1,) * (len(lead) - len(batch)) + tuple(batch)
    if any(size not in (1, have) for size, have in zip(own, lead, strict=True)):
        return None
    rows = np.arange(batch.numel()).reshape(own + (1,) * event_ndim)
    if not ((positions == NONE) | (positions // number == rows)).all():
        return None
    components = np.where(positions == NONE, NONE, positions % number)
    alike = tuple(slice(0, 1) if size > 1 else slice(None) for size in own)
    first = components[alike]
    if not (components == first).all():
        return None
    for i in [i for i, size in enumerate(first.shape[: len(lead)]) if size > 1]:
        one = first.take([0], i)
        first = one if (first == one).all() else first
    # A plate of particles adds such a dimension; the pattern is the same without it.
    while first.ndim > event_ndim and first.shape[0] == 1:
        first = first[0]
    return Pattern(first.shape, event_ndim, tuple(first.reshape(-1).tolist()), number)


@torch.no_grad()
def charge_sites(
    records: Mapping[str, SiteRecord],
    patterns: Mapping[tuple[str, str], Pattern],
    sites: Mapping[str, tuple[float, Any]],
) -> dict[str, SiteRecord]:
    """Charges the components of sites with the costs that read them."""
    elements = {}
    for cost in dict.fromkeys(cost for _, cost in patterns):
        sign, site = sites[cost]
        elements[cost] = sign * _elements(site)[0]
    charged: dict[str, Tensor] = {}
    for (name, cost), pattern in patterns.items():
        term = pattern.charge(elements[cost], batch_of(records[name].fn, records[name].value))
        charged[name] = charged[name] + term if name in charged else term
    return {name: replace(record, charged=charged.get(name)) for name, record in records.items()}


# Plates, each by its name and its dimension.
_Plates = tuple[tuple[str, int], ...]


class PlateRows:
    """Follows the rows of latent sites in plates to the costs in the same plates."""

    def __init__(self, elements: ElementTracker) -> None:
        self.elements = elements
        self.plates: dict[_Plates, tuple[int, ...]] = {}

    def drawn(self, name: str, fn: Any, value: Tensor, frames: Sequence[Any]) -> None:
        """Starts to follow the rows of a newly drawn site."""
        batch = batch_of(fn, value)
        plates = tuple(sorted((frame.name, frame.dim) for frame in frames))
        if not plates or max(-dim for _, dim in plates) > len(batch):
            return
        sizes = tuple(batch[dim] for _, dim in plates)
        # Other plate sizes number their rows differently: such sites cannot be followed as one source.
        if math.prod(sizes) == 1 or self.plates.setdefault(plates, sizes) != sizes:
            return
        rows = _rows(batch, plates).reshape(*batch, *(1,) * (value.dim() - len(batch)))
        self.elements.follow(plates, name, value, np.broadcast_to(rows, tuple(value.shape)))

    def meeting(self, costs: Iterable[tuple[str, Any]]) -> dict[str, tuple[str, ...]]:
        """Finds the costs in which a row reads another row of a site in the same plates, with these plates.

        It reports only certain cases: after an unknown operator, it reports nothing. See :meth:`unfollowed`.
        """
        return self._costs_where(_meet, costs)

    def unfollowed(self, costs: Iterable[tuple[str, Any]]) -> dict[str, tuple[str, ...]]:
        """Finds the costs that read sites of their own plates by an unknown operator, with these plates."""
        return self._costs_where(lambda positions, *_: positions is None, costs)

    def _costs_where(
        self, holds: Callable[[Positions | None, _Plates, tuple[int, ...]], bool], costs: Iterable[tuple[str, Any]]
    ) -> dict[str, tuple[str, ...]]:
        found = {}
        for cost, site in costs if self.plates else ():
            where = {(frame.name, frame.dim) for frame in site["cond_indep_stack"] if frame.vectorized}
            own = dict[str, None]()
            for plates, sizes in self.plates.items():
                if where.issuperset(plates) and holds(self.elements.positions(plates, site["log_prob"]), plates, sizes):
                    own.update((name, None) for name, _ in plates)
            if own:
                found[cost] = tuple(own)
        return found


def _meet(positions: Positions | None, plates: _Plates, sizes: tuple[int, ...]) -> bool:
    """Whether a row of these plates reads another row."""
    if positions is None or any(-dim > positions.ndim for _, dim in plates):
        return False
    is_alike = tuple(positions.shape[dim] for _, dim in plates) == sizes
    return is_alike and bool(((positions != NONE) & (positions != _rows(positions.shape, plates))).any())


def _rows(batch: Sequence[int], plates: _Plates) -> np.ndarray:
    """Returns, for each element of a batch, the number of its row in the given plates."""
    rows = np.zeros((1,) * len(batch), dtype=np.int32)
    for _, dim in plates:
        size = batch[dim]
        rows = rows * size + np.arange(size, dtype=np.int32).reshape(-1, *(1,) * (-dim - 1))
    return np.broadcast_to(rows, tuple(batch))


class ElementTracker(OperatorMode):
    """Follows elements of sources through the operators of a program, in an active ``DependencyTracker``.

    What is followed has a key: the name of a source for its elements, a tuple of plates for their rows. The records are
    kept per slot of memory. So views need no rules, and a write into a view also shows in its base.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        # For each key: the bits of its sources and of those drawn from them.
        self._followed: dict[Hashable, int] = {}
        self._slots: dict[Hashable, dict[int, _Slots]] = {}

    @property
    def followed(self) -> tuple[str, ...]:
        """Names of the sources whose elements are followed."""
        return tuple(key for key in self._followed if isinstance(key, str))

    def follow(self, key: Hashable, name: str, value: Tensor, positions: Positions) -> None:
        """Follows a source of the ledger, starting from the element or row number of each element of its value."""
        self._followed[key] = self._followed.get(key, 0) | self._ledger.bits[name]
        self._slots.setdefault(key, {})
        self._record(key, value, positions)

    def inherit(self, name: str, fn: Any, value: Tensor) -> None:
        """Records what each element of a new source was drawn from: the elements that its log-probability reads.

        What depends on the new source then depends on those that it was drawn from too.
        """
        ledger, (log_prob, _) = self._ledger, element_log_prob(unchecked(fn), value)
        origins = ledger.origins.get(name, 0)
        scored = ledger.mask(log_prob) & ~ledger.bits[name]
        for source in self.followed:
            if not (origins | scored | ledger.escaped) & self._followed[source]:
                continue
            positions = self.positions(source, log_prob)
            self._followed[source] |= ledger.bits[name]
            # If the draw depended on a source that the log-probability does not depend on, the elements are unknown.
            if positions is not None and not origins & ~scored:
                extra = (1,) * (value.dim() - positions.ndim)
                self._record(source, value, np.broadcast_to(positions.reshape(positions.shape + extra), value.shape))

    def mixes(self, name: str) -> bool:
        """Whether a source, or one drawn from it, has left torch: anything may then depend on any element."""
        return bool(self._ledger.escaped & self._followed[name])

    def positions(self, key: Hashable, tensor: Tensor) -> Positions | None:
        """The element that each element of a tensor depends on (or ``NONE``, or ``MANY``); ``None`` if unknown."""
        if not self._ledger.mask(tensor) & self._followed[key]:
            return np.broadcast_to(np.int32(NONE), tuple(tensor.shape))
        slots = self._find(key, tensor)
        return None if slots is None else slots.view(tensor)

    def _known(self, key: Hashable, tensor: Tensor) -> Positions:
        positions = self.positions(key, tensor)
        if positions is None:
            raise Unknown
        return positions

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = self._ledger.mask([*kwargs.values()]) if self._followed else 0
        mask = named | self._ledger.mask(args) if self._followed else 0
        keys = [key for key, bits in self._followed.items() if mask & bits]
        plan = plan_of(func) if keys else None
        if plan is None or plan.is_view:
            return func(*args, **kwargs)
        found = {}
        shaping = {name: kwargs[name] for name in SHAPING & kwargs.keys()}
        for key in keys:
            # Rules see no tensors that are given by name.
            if named & self._followed[key]:
                continue
            with contextlib.suppress(Unknown, ValueError, IndexError, TypeError, ArithmeticError, *NO_STORAGE):
                rule = plan.rule if isinstance(key, str) else plan.row_rule
                found[key] = rule(partial(self._known, key), *args, **shaping)
        targets = [kwargs.get(name) if isinstance(name, str) else args[name] for name in plan.writes]
        written = self._ledger.mask(targets)
        result = func(*args, **kwargs)
        for key in keys:
            if targets:
                self._write(key, targets, found.get(key), not written & self._followed[key])
            elif key in found:
                self._keep(key, result, found[key])
        return result

    def _keep(self, key: Hashable, result: Any, found: Positions) -> None:
        """Records the positions of a result in new memory. Without a record it counts as mixed."""
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, Tensor) and found.shape == part.shape and self._find(key, part) is None:
                self._record(key, part, found)

    def _write(self, key: Hashable, targets: Sequence[Any], found: Positions | None, is_clean: bool) -> None:
        """Records the positions of what an operator wrote into tensors that were free of the sources if clean."""
        for target in tensors_in(targets):
            slots = self._find(key, target)
            if found is None or not _fits(found.shape, tuple(target.shape)):
                for memory in memory_of(target):
                    self._slots[key].pop(id(memory), None)
            elif slots is not None:
                slots.view(target)[...] = found
            elif is_clean:
                self._record(key, target, np.broadcast_to(found, tuple(target.shape)))

    def _find(self, key: Hashable, tensor: Tensor) -> _Slots | None:
        memory = memory_of(tensor)
        slots = self._slots[key].get(id(memory[0])) if len(memory) == 1 else None
        return slots if slots is not None and slots.fits(tensor, memory[0]) else None

    def _record(self, key: Hashable, tensor: Tensor, positions: Positions) -> None:
        memory = memory_of(tensor)
        if len(memory) != 1 or tensor.layout is not torch.strided:
            return
        known = self._slots[key]
        slots = _Slots(memory[0], lambda ref: known.pop(ref.key, None))
        slots.key, slots.itemsize = id(memory[0]), tensor.element_size()
        slots.array = np.full(memory[0].nbytes() // slots.itemsize, NONE, dtype=np.int32)
        slots.view(tensor)[...] = positions
        known[slots.key] = slots


def _fits(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a shape can be broadcast to another one."""
    return len(shape) <= len(target) and all(
        own in (1, size) for own, size in zip(reversed(shape), reversed(target), strict=False)
    )


class _Slots(weakref.ref[torch.UntypedStorage]):
    """Positions of every element of one storage; the record vanishes with the storage."""

    key: int
    itemsize: int
    array: Positions

    def fits(self, tensor: Tensor, memory: torch.UntypedStorage) -> bool:
        """Whether a tensor divides the storage into the same slots as the record."""
        return tensor.element_size() == self.itemsize and memory.nbytes() // self.itemsize == len(self.array)

    def view(self, tensor: Tensor) -> Positions:
        """Returns the slots of a tensor as a writable view."""
        with torch._C.DisableTorchFunction():  # the offset may reveal the value that chose the view
            offset = tensor.storage_offset()
        strides = tuple(stride * self.array.itemsize for stride in tensor.stride())
        return np.lib.stride_tricks.as_strided(self.array[offset:], tuple(tensor.shape), strides)
