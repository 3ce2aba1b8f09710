r"""Costs that jump where the value of a site moves continuously. A pathwise gradient misses such jumps."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bpq.record.function import Function, arguments_of, results_of
from pyro_bpq.record.operators import kind_of
from pyro_bpq.record.recorded import MOST_ELEMENTS, Bound, Recorded, drawing
from pyro_bpq.record.values import Value

# Operators whose results are piecewise constant, besides those that make no floating-point numbers.
_STEPS = frozenset(("round", "floor", "ceil", "trunc", "sign", "sgn", "heaviside", "floor_divide"))
_EXPAND, _EQUAL = torch.ops.aten.expand.default, torch.ops.aten.eq.Tensor
# Number of lines that are followed, how often each is halved, and how much further a jump goes than slopes explain.
_LINES, _HALVINGS, _FURTHER = 32, 32, 8.0


class Jump(NamedTuple):
    """A jump of a cost, in nats, where an operator switches."""

    size: float
    cost: str
    operator: str


def switches(function: Function, sources: Set[Value]) -> dict[Value, str]:
    """Values on the way that change by steps while sources move, and the operators that make them."""
    found, moving, dtypes, copied = dict[Value, str](), {*sources}, function.dtypes, dict[Value, Value]()
    taken = {*function.wanted}.union(*map(arguments_of, function.nodes))
    for node in function.nodes:
        read = moving.intersection(arguments_of(node))
        if not read:
            continue
        made = {*results_of(node)}
        moving |= made
        own = {copied.get(value, value) for value in arguments_of(node)}
        if node.func is _EXPAND or getattr(node.func, "is_copy", False):
            copied[node.result] = copied.get(node.args[0], node.args[0])
        # Else a number is compared with itself, as where a Delta scores its value.
        elif any(dtypes[value].is_floating_point for value in read) and (len(own) > 1 or node.func is not _EQUAL):
            name = kind_of(node.func).name.rstrip("_")
            steps = name in _STEPS or "rounding_mode" in node.kwargs
            found.update({v: name for v in sorted(made & taken) if steps or not dtypes[v].is_floating_point})
    return found


def may_jump(recorded: Recorded, names: Set[str], passing: Set[str]) -> bool:
    """Whether an operator between some sites and the costs may switch."""
    sites, through = ({recorded.drawn[name].value for name in own} for own in (names, passing))
    costs = [value for cost, value in recorded.costs.items() if recorded.can_compute(cost)]
    return bool(switches(recorded.recording.cut(costs, sites, through, sees_all=True), sites))


@torch.no_grad()
def jump_of(recorded: Recorded, bound: Bound, name: str, passing: Set[str], seed: int) -> Jump | None:
    """The largest jump of a cost on lines from the value of a site to others that are drawn; ``None`` if none jumps.

    Each line is halved until the two sides of a switch are close. A cost jumps if it changes between them by more than
    it has changed on either side, in the last half of the halvings. That is computed in double precision.

    Args:
        recorded: A recorded run.
        bound: Its tensors.
        name: The site.
        passing: Sites that pass on what their laws are made of.
        seed: Seed of the draws; the global generators stay as they are.

    Raises:
        Uncut: If a cost cannot be computed again.
    """
    recording, site = recorded.recording, recorded.drawn[name].value
    through = frozenset(recorded.drawn[other].value for other in passing - {name})
    values = {cost: value for cost, value in recorded.costs.items() if recorded.can_compute(cost)}
    whole = recording.cut(values.values(), {site}, through)
    moving = {site}.union(*map(results_of, whole.reading({site})))
    found, costs = switches(whole, {site}), [cost for cost in values if values[cost] in moving]
    if not found or not costs:
        return None
    wanted = [*(values[cost] for cost in costs), *found]
    number = max(2, min(_LINES, MOST_ELEMENTS // sum(recording.shapes[value].numel() + 1 for value in wanted)))
    draws = [recorded.again((), bound, {}, frozenset((name,)), False, seed + i)[name] for i in range(number)]
    tensors = {value: own.double() if own.is_floating_point() else own for value, own in bound.tensors.items()}
    right = torch.stack(draws).double()
    left, tensors[site] = tensors[site].expand_as(right), right
    function, given, constants = recorded.in_rows(recording.cut(wanted, {site}, through).in_double(), {site}, tensors)

    def at(value: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Costs and switches, ``(lines, elements)``."""
        tensors[site] = value
        with drawing(function, seed):
            rows = function(*(tensors[own] for own in given), *constants)
        rows[: len(costs)] = map(bound.weighted, costs, rows)
        rows = [row.reshape(number, -1) for row in rows]
        return rows[: len(costs)], rows[len(costs) :]

    (before, old), (after, new) = at(left), at(right)
    changed = torch.stack([(a != b).any(1) for a, b in zip(old, new, strict=True)], 1)
    # Lines that pass several switches follow one of them each.
    turn = torch.arange(number) % changed.sum(1).clamp(min=1)
    followed = ((changed.cumsum(1) - 1 == turn[:, None]) & changed).int().argmax(1)
    sides = [torch.zeros_like(cost) for cost in before]
    for step in range(_HALVINGS if changed.any() else 0):
        middle = torch.lerp(left, right, 0.5)
        between, now = at(middle)
        same = torch.stack([(a == b).all(1) for a, b in zip(old, now, strict=True)], 1)
        stays = same.gather(1, followed[:, None])
        if step >= _HALVINGS // 2:
            for side, a, b, c in zip(sides, before, after, between, strict=True):
                side += torch.where(stays, c - a, c - b).abs()
        before = [torch.where(stays, c, a) for c, a in zip(between, before, strict=True)]
        after = [torch.where(stays, b, c) for c, b in zip(between, after, strict=True)]
        old = [torch.where(stays, c, a) for c, a in zip(now, old, strict=True)]
        row = stays.reshape(number, *(1 for _ in middle.shape[1:]))
        left, right = torch.where(row, middle, left), torch.where(row, right, middle)
    jumps, operators = list[Jump](), [*found.values()]
    for cost, a, b, side in zip(costs, before, after, sides, strict=True):
        size, noise = (b - a).abs(), 64.0 * torch.finfo(a.dtype).eps * (a.abs() + b.abs() + 1.0)
        is_jump = size.isfinite() & changed.any(1, keepdim=True) & (size > _FURTHER * side + noise)
        largest, line = torch.where(is_jump, size, 0.0).amax(1).max(0)
        jumps.append(Jump(float(largest), cost, operators[int(followed[line])]))
    best = max(jumps)
    return best if best.size > 0.0 else None


class Path(NamedTuple):
    """What Python has read of other sites than some, and the operators of the run with their constants."""

    read: list[Any]
    operators: list[Any]

    def turns_off(self, other: Path) -> bool:
        """Whether another run has done something else, although Python has read the same of these other sites.

        Reads of a number that change nothing, as for a log, steer nothing.
        """
        # Up to where the one has read more than the other.
        pairs = zip(self.read, other.read, strict=False)
        return all(own is not None and own == its for own, its in pairs) and self.operators != other.operators


def path_of(recorded: Recorded, names: Set[str], has_counters: bool) -> Path:
    """The path that Python has taken, without what it has read of some sites; values are numbered as they are met.

    Where numbers count steps, no number tells paths apart.
    """
    recording = recorded.recording
    function, bits = recording.cut(recorded.named.values(), sees_all=True), sum(recording.bits[name] for name in names)
    numbers = dict[Value, int]()

    def put(item: Any) -> Any:
        if item.__class__ is Value:
            return numbers.setdefault(item, len(numbers))
        if item.__class__ in (tuple, list):
            return tuple(map(put, item))
        return None if has_counters and item.__class__ in (int, float) else item

    found: list[Any] = [sorted(recorded.named)]
    for node in function.nodes:
        found.append((node.func, put(node.args), put(sorted(node.kwargs.items(), key=str)), put(node.result)))
    # A run that makes parameters has their first numbers.
    constants = recording.constants - {*recorded.stored.values()}
    found += [(put(value), put(recording.tensors[value].tolist())) for value in function.given if value in constants]
    return Path([read for mask, read in recording.told if mask & ~bits], found)
