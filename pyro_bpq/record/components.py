r"""What a cost reads of a site, from a recording: which component, and whether rows of a plate or particles stay apart.

A site with ``D`` independent components has one ``log q_d`` for each component ``d``. ``∇ log q_d`` needs only the
costs that depend on component ``d``. An element of a cost that reads only component ``d`` is charged to it alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_bpq.graph.scg import cost_of_guide
from pyro_bpq.record.elements import MANY, NONE, Labels, Reader, Unknown
from pyro_bpq.record.function import Recording
from pyro_bpq.record.values import Value
from pyro_bpq.rollout.features import batch_of, element_log_prob, independent_components
from pyro_bpq.rollout.runs import SiteRecord

# Largest number of operators that are followed for components, over all sites.
_MOST_FOLLOWED = 20_000


@dataclass(frozen=True)
class Pattern:
    """The component of a site that each element of a cost reads."""

    # Shape of the elements: batch dimensions (size 1 where all rows are alike), then event dimensions
    shape: tuple[int, ...]
    event_ndim: int  # number of event dimensions
    # The component that each element reads, flattened; `NONE` where an element reads none
    components: tuple[int, ...]
    number: int  # number of components `D` of the site

    @cached_property
    def _index(self) -> Tensor | None:
        """The components with the event dimensions flattened to one; ``None`` if each element reads its own."""
        lead = self.shape[: len(self.shape) - self.event_ndim]
        is_own = math.prod(lead) == 1 and self.components == tuple(range(self.number))
        return None if is_own else torch.tensor(self.components).reshape(*lead, -1)

    def charge(self, elements: Tensor, batch: torch.Size) -> Tensor:
        """Sums elements ``batch_of_cost + event`` by component, ``batch + (D,)``, with the batch shape of the site."""
        lead = elements.shape[: elements.dim() - self.event_ndim]
        flat = elements.reshape(*lead, -1)
        if self._index is not None:
            index = self._index.to(flat.device).expand(flat.shape)
            # Elements that read no component are added to an extra component, which is dropped.
            charged = flat.new_zeros(*lead, self.number + 1)
            flat = charged.scatter_add(-1, index % (self.number + 1), flat)[..., : self.number]
        return flat.sum_to_size(*batch, self.number)


# Pairs of (site, cost) with their pattern.
Patterns = frozenset[tuple[tuple[str, str], Pattern]]


@dataclass(frozen=True)
class Drawn:
    """A drawn site: its value, its batch shape, its components, the elements of its ``log q``, and its plates."""

    value: Value
    scored: Value  # the value as its own log-probabilities read it; of bits and one-hot values another one
    batch: torch.Size
    number: int  # number of independent components; 0 if they are not known, or if it is reparameterised
    elements: Value
    plates: Mapping[str, int]  # dimension of each vectorised plate, from the right
    hidden: int = 0  # sources that its draw reads, and its log-probability does not, as bits


@dataclass(frozen=True)
class Scored:
    """A cost: its elements in the batch and the event, and its plates."""

    elements: Value
    event_ndim: int
    plates: Mapping[str, int]


def elements_of(site: Any) -> tuple[Tensor, int]:
    """The scaled, masked elements of a log-probability, and their number of event dimensions."""
    is_one = (independent_components(site["fn"]) or 1) == 1
    log_prob, event_ndim = (site["unscaled_log_prob"], 0) if is_one else element_log_prob(site["fn"], site["value"])
    weights = [site["scale"], site["mask"]]
    wide = [w.reshape(w.shape + (1,) * event_ndim) if isinstance(w, Tensor) else w for w in weights]
    return scale_and_mask(log_prob, *wide), event_ndim


def labels_of(
    recording: Recording, wanted: Sequence[Value], starts: Mapping[Value, Labels | Unknown], ends: Iterable[Value] = ()
) -> tuple[list[Labels | Unknown], int]:
    """What elements of a source each wanted value reads, and how many operators were followed.

    Args:
        recording: The run.
        wanted: The values.
        starts: The labels of the source, and of what was drawn from it, by value.
        ends: Values that may read any element.
    """
    function, known = recording.cut(wanted, {*starts, *ends}, sees_all=True), recording.known
    # A view that no operator shows may read anything.
    own = {v: Unknown(recording.opaque[v]) for v in function.given if v in recording.opaque} | {**starts}
    function = replace(function, nodes=tuple(function.reading(own.keys())))
    if function.writes:
        try:
            whole, names = recording.plain
            own = {names[value]: of for value, of in own.items() if value in names or value not in starts}
        except (RuntimeError, NotImplementedError, KeyError) as error:
            return [Unknown(str(error).split("\n")[0])] * len(wanted), 0
        function, known = whole.cut([names[value] for value in wanted], {*whole.given}), lambda value: None
    read = Reader(function, own, known)
    return [read.labels(value) for value in function.wanted], len(function.nodes)


def rows_that_meet(
    recording: Recording, drawn: Mapping[str, Drawn], costs: Mapping[str, Scored]
) -> dict[str, tuple[str, str]]:
    """Costs in which a row of a plate reads other rows: the plate, and an operator without a rule, or ``""``."""
    found: dict[str, tuple[str, str]] = {}
    for plate in dict.fromkeys(plate for site in drawn.values() for plate in site.plates):
        starts = {}
        for name, site in drawn.items():
            if plate in site.plates and site.hidden:
                found.setdefault(cost_of_guide(name), (plate, "a law that its log-probability does not show"))
            dim, rank = site.plates.get(plate), len(recording.shapes[site.value])
            if dim is not None and -dim <= len(site.batch) and site.batch[dim] > 1:
                starts[site.value] = _rows(rank, dim - rank + len(site.batch), site.batch[dim])
        own = {c: cost for c, cost in costs.items() if starts and plate in cost.plates and c not in found}
        labels, _ = labels_of(recording, [cost.elements for cost in own.values()], starts)
        for (name, cost), each in zip(own.items(), labels, strict=True):
            dim = cost.plates[plate] - cost.event_ndim
            if isinstance(each, Unknown):
                found[name] = plate, str(each)
                continue
            row = _rows(each.ndim, dim, recording.shapes[cost.elements][dim]) if -dim <= each.ndim else NONE
            if ((each != NONE) & (each != row)).any():
                found[name] = plate, ""
    return found


def _rows(rank: int, dim: int, size: int) -> Labels:
    return np.arange(size, dtype=np.int32).reshape([-1 if i == dim % rank else 1 for i in range(rank)])


def patterns_of(
    recording: Recording, drawn: Mapping[str, Drawn], costs: Mapping[str, Scored], met: Mapping[str, Any]
) -> dict[tuple[str, str], Pattern]:
    """What components of sites costs read, where their rows stay apart; ``met`` are costs where rows meet."""
    found, left, masks = {}, _MOST_FOLLOWED, recording.masks
    for name, site in drawn.items():
        if site.number < 2 or left < 0:
            continue
        shape, batch = recording.shapes[site.value], len(site.batch)
        size = math.prod(shape[batch:]) // site.number
        own = np.arange(site.number, dtype=np.int32).repeat(size).reshape(*(1,) * batch, *shape[batch:])
        # Bits of the site and of those that are drawn from it; of those that read many components, as all that reads
        # them is taken to do.
        below, mixed, starts = masks[site.value], 0, {site.value: own}
        for other in drawn.values():
            if other.value <= site.value or not (masks[other.elements] | other.hidden) & below:
                continue
            below |= masks[other.value]
            read: Labels | Unknown = Unknown()
            if not (other.hidden & below or masks[other.elements] & mixed) and _keeps_rows(site, other):
                (read,), number = labels_of(recording, [other.elements], starts, recording.opaque)
                left -= number
            if isinstance(read, Unknown) or (read == MANY).any():
                mixed |= masks[other.value]
            else:
                # What is drawn reads the elements that its law reads.
                extra = (1,) * (len(recording.shapes[other.value]) - read.ndim)
                starts[other.value] = read.reshape(read.shape + extra)
        reading = {c: masks[cost.elements] for c, cost in costs.items() if c not in met}
        apart = {c: costs[c] for c, mask in reading.items() if mask & below and not mask & mixed}
        # What leaves torch keeps rows apart, by promise; it may read any component.
        elements = [cost.elements for cost in apart.values()]
        labels, number = labels_of(recording, elements, starts, recording.opaque)
        left -= number
        for (c, cost), read in zip(apart.items(), labels, strict=True):
            if not isinstance(read, Unknown) and (pattern := _pattern(recording, read, cost, site)) is not None:
                found[name, c] = pattern
    return found


def _keeps_rows(site: Drawn, other: Drawn) -> bool:
    """Whether another site has the rows of a site: outside of a plate it reads all of them."""
    dims = [dim for dim in site.plates.values() if -dim <= len(site.batch)]
    return all(-dim <= len(other.batch) and other.batch[dim] == site.batch[dim] for dim in dims)


def _pattern(recording: Recording, labels: Labels, cost: Scored, site: Drawn) -> Pattern | None:
    """The pattern of a cost if its rows are rows of the site, all rows alike."""
    shape = recording.shapes[cost.elements]
    lead = shape[: len(shape) - cost.event_ndim]
    if (labels == MANY).any() or len(site.batch) > len(lead):
        return None
    # Rows of a batch that is no plate may meet.
    plates = {len(lead) + dim for dim in site.plates.values()}
    first = len(lead) - len(site.batch)
    for i, size in enumerate(site.batch, first):
        if size > 1 and not (size == lead[i] and i in plates and labels.shape[i] == 1):
            return None
    event = np.broadcast_to(labels, (*labels.shape[: len(lead)], *shape[len(lead) :]))
    while event.ndim > cost.event_ndim and event.shape[0] == 1:
        event = event[0]
    return Pattern(event.shape, cost.event_ndim, tuple(event.reshape(-1).tolist()), site.number)


@torch.no_grad()
def charge_sites(
    records: Mapping[str, SiteRecord],
    patterns: Mapping[tuple[str, str], Pattern],
    elements: Mapping[str, tuple[float, Tensor]],
) -> dict[str, SiteRecord]:
    """Charges the components of sites with the elements of the costs that read them, each with its sign."""
    charged: dict[str, Tensor] = {}
    for (name, cost), pattern in patterns.items():
        sign, own = elements[cost]
        term = pattern.charge(sign * own, batch_of(records[name].fn, records[name].value))
        charged[name] = charged[name] + term if name in charged else term
    return {name: replace(record, charged=charged.get(name)) for name, record in records.items()}
