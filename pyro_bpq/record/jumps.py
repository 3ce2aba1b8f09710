r"""Costs that jump where the value of a site moves continuously: a pathwise gradient misses the jumps.

Sites with such costs get the score function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from pyro.distributions import Delta
from torch import Tensor

from pyro_bpq.record.function import Function, Uncut, seeded
from pyro_bpq.record.key import Call
from pyro_bpq.record.operators import effects_of
from pyro_bpq.record.recorded import MOST_ELEMENTS, Bound, Recorded, doubled
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.values import Node, Tensors, Value, results_of
from pyro_bpq.record.watch import carried
from pyro_bpq.rollout.features import base_distribution
from pyro_bpq.short import number as in_short

# Recorded runs whose operators are compared with those of the run before.
_COMPARED = 16
# Operators whose results are piecewise constant, besides those that make no floating-point numbers.
STEPS = frozenset(("round", "floor", "ceil", "trunc", "sign", "sgn", "heaviside", "floor_divide"))
# Operators with a slope that jump too, and what switches where they jump.
_WITHIN: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "remainder": lambda x, y: (x / y).floor(),
        "fmod": lambda x, y: (x / y).trunc(),
        "frac": torch.trunc,
        "hardshrink": lambda x, limit=0.5: x.abs() > limit,
        "threshold": lambda x, limit, _: x > limit,
        "copysign": lambda _, sign: torch.as_tensor(sign) < 0,
        "atan2": lambda y, x: (x < 0) & (y < 0),
    }
)
_COPIES = (torch.ops.aten.expand.default, torch.ops.aten.clone.default)
_EQUAL = torch.ops.aten.eq.Tensor
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
    taken = {*function.wanted}.union(*(node.reads for node in function.nodes))
    for node in function.nodes:
        read = moving.intersection(node.reads)
        if not read:
            continue
        made = {*results_of(node)}
        moving |= made
        own = {copied.get(value, value) for value in node.reads}
        if node.func in _COPIES or getattr(node.func, "is_copy", False):
            copied[node.result] = copied.get(node.args[0], node.args[0])
        # Else a number is compared with itself, as where a Delta scores its value.
        elif any(dtypes[value].is_floating_point for value in read) and (len(own) > 1 or node.func is not _EQUAL):
            name = _name(node)
            steps = name in STEPS or name in _WITHIN or "rounding_mode" in node.kwargs
            found.update({v: name for v in sorted(made & taken) if steps or not dtypes[v].is_floating_point})
    return found


def _name(node: Node) -> str:
    return effects_of(node.func).name.rstrip("_")


def _with_switches(function: Function, number: int) -> Function:
    """The same, in which what switches within operators is wanted in place of their results, but for the first ones."""
    nodes, inside = list[Node](), dict[Value, Value]()
    for node in function.nodes:
        for value in {*function.wanted[number:]}.intersection(results_of(node)) if _name(node) in _WITHIN else ():
            inside[value] = Value(len(function.shapes) + len(inside))
            # Before the operator, which may write in place.
            nodes.append(Node(_WITHIN[_name(node)], node.args, {}, inside[value], node.reads))
        nodes.append(node)
    wanted = (*function.wanted[:number], *(inside.get(value, value) for value in function.wanted[number:]))
    return replace(function, nodes=tuple(nodes), wanted=wanted)


@torch.no_grad()
def jump_of(
    bound: Bound, fn: Any, site: Value, values: Mapping[str, Value], whole: Function, tensors: Tensors, seed: int
) -> Jump | None:
    """The largest jump of a cost on lines from the value of a site to others that are drawn; ``None`` if none jumps.

    Each line is halved until the two sides of a switch are close. A cost jumps if it changes between them by more than
    it has changed on either side, in the last half of the halvings.

    Args:
        bound: A recorded run.
        fn: The distribution of the site.
        site: Its value.
        values: Costs that can be computed again.
        whole: The operators between the sites and these costs, none of which writes in place.
        tensors: What they read, in the precision in which to compute.
        seed: Seed of the draws; the global generators stay as they are.
    """
    moving = {site}.union(*map(results_of, whole.reading({site})))
    found, costs = switches(whole, {site}), [cost for cost in values if values[cost] in moving]
    if not found or not costs:
        return None
    sizes = [whole.shapes[value].numel() for value in (*(values[cost] for cost in costs), *found)]
    number = max(2, min(_LINES, MOST_ELEMENTS // sum(size + 1 for size in sizes)))
    with seeded(seed):
        right = torch.stack([fn() for _ in range(number)]).to(tensors[site].dtype)
    tensors, left = {**tensors, site: right}, tensors[site].expand_as(right)

    def rows_of(*costs: Value) -> Function:
        cut = _with_switches(whole.cut((*costs, *found), {*whole.given}), len(costs))
        return (cut.in_double() if right.dtype is torch.float64 else cut).in_rows({site}, tensors)

    alone = rows_of()
    if all(map(torch.equal, *(alone.at({**tensors, site: value}, seed) for value in (left, right)))):
        return None
    function = rows_of(*(values[cost] for cost in costs))

    # What each column of the costs, and of the switches, belongs to.
    owners = [name for name, size in zip((*costs, *found.values()), sizes, strict=True) for _ in range(size)]
    width = sum(sizes[: len(costs)])

    def at(value: Tensor) -> tuple[Tensor, ...]:
        """Costs and switches, ``(lines, elements)``."""
        rows = function.at({**tensors, site: value}, seed)
        rows[: len(costs)] = map(bound.weighted, costs, rows)
        return torch.cat([row.reshape(number, -1) for row in rows], 1).split((width, len(owners) - width), 1)

    (before, old), (after, new) = at(left), at(right)
    changed = old != new
    # Lines that pass several switches follow one of them each.
    turn = torch.arange(number) % changed.sum(1).clamp(min=1)
    followed = ((changed.cumsum(1) - 1 == turn[:, None]) & changed).int().argmax(1, keepdim=True)
    side = torch.zeros_like(before)
    for step in range(_HALVINGS):
        middle = torch.lerp(left, right, 0.5)
        between, now = at(middle)
        stays = (old == now).gather(1, followed)
        if step >= _HALVINGS // 2:
            side += torch.where(stays, between - before, between - after).abs()
        before, after = torch.where(stays, between, before), torch.where(stays, after, between)
        old = torch.where(stays, now, old)
        row = stays.reshape(number, *(1 for _ in middle.shape[1:]))
        left, right = torch.where(row, middle, left), torch.where(row, right, middle)
    size, noise = (after - before).abs(), 64.0 * torch.finfo(before.dtype).eps * (after.abs() + before.abs() + 1.0)
    is_jump = size.isfinite() & changed.any(1, keepdim=True) & (size > _FURTHER * side + noise)
    largest, place = torch.where(is_jump, size, 0.0).flatten().max(0)
    line, column = divmod(int(place), width)
    return Jump(float(largest), owners[column], owners[width + int(followed[line])]) if largest > 0.0 else None


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
    bits, numbers = sum(recording.bits[name] for name in names), dict[Value, int]()

    def put(item: Any) -> Any:
        if item.__class__ is Value:
            return numbers.setdefault(item, len(numbers))
        if item.__class__ in (tuple, list):
            return tuple(map(put, item))
        return None if has_counters and item.__class__ in (int, float) else item

    found: list[Any] = [sorted(recorded.named)]
    for node in recorded.core.nodes:
        found.append((node.func, put(node.args), put(sorted(node.kwargs.items(), key=str)), put(node.result)))
    # A run that makes parameters has their first numbers.
    constants = {*recorded.core.given} & recording.constants - {*recorded.come_from("parameter").values()}
    found += [(put(value), put(recording.tensors[value].tolist())) for value in sorted(constants)]
    return Path([read for mask, read in recording.told if mask & ~bits], found)


def _is_delta(fn: Any) -> bool:
    return isinstance(base_distribution(fn), Delta)


def open_sites(run: TracedRun) -> frozenset[str]:
    """The sites of a recorded run whose gradient is pathwise, and that nobody chose an estimator for."""
    assert run.recorded is not None
    return frozenset(
        name
        for name, site in run.run.sites.items()
        if name in run.recorded.drawn and run.infos[name].has_rsample and run.options[name].estimator is None
        if site.value.requires_grad and not carried(site.value) and not _is_delta(site.fn)
    )


def is_undecided(run: TracedRun, looks: int) -> bool:
    """Whether it is not yet known if reads of such sites steer the program."""
    return run.recorded is not None and looks < _COMPARED and not open_sites(run).isdisjoint(run.escaped_sites)


def jumps_of(
    run: TracedRun, call: Call, looks: int, paths: list[Path], has_counters: bool
) -> Iterator[tuple[str, str]]:
    """Such sites whose costs jump, and what was seen.

    Args:
        run: A recorded run.
        call: Its call.
        looks: Number of recorded runs of such calls before it.
        paths: The paths that they have taken; that of the run is added.
        has_counters: Whether numbers change from step to step.
    """
    recorded, sites = run.recorded, open_sites(run)
    if recorded is None or not sites:
        return
    steering = sites & run.escaped_sites
    if steering and looks < _COMPARED:
        path = path_of(recorded, steering, has_counters)
        steers = any(map(path.turns_off, paths))
        paths.append(path)
        for name in sorted(steering) if steers else ():
            bit = recorded.recording.bits[name]
            line = next((line for mask, line in recorded.recording.lines.items() if mask & bit), "the program")
            costs = sorted(cost for cost in recorded.reads if name in recorded.reads[cost])
            yield name, f"other operators or numbers follow in {', '.join(costs[:4])} where {line} reads other values"
    # Looked at are the first recorded run, the second, the fourth, and so on.
    if (looks + 1).bit_count() > 1:
        return
    # Deltas pass on what their laws are made of.
    passing = {own.value for name, own in recorded.drawn.items() if _is_delta(run.run.sites[name].fn)}
    bound, costs = run.bound(recorded, call), [cost for cost in recorded.costs if recorded.can_compute(cost)]
    try:
        whole = run_of = recorded.recording.cut([recorded.costs[cost] for cost in costs], redrawn=passing)
    except Uncut:
        return
    with contextlib.suppress(RuntimeError):  # of an operator that torch runs line by line only
        whole = run_of.without_writes(bound.tensors)
    names = dict(zip((*run_of.given, *run_of.wanted), (*whole.given, *whole.wanted), strict=True))
    values, whole = {cost: names[recorded.costs[cost]] for cost in costs}, replace(whole, asked=())
    moved = {name: names[recorded.drawn[name].value] for name in sorted(sites) if recorded.drawn[name].value in names}
    tensors = {names[value]: bound.tensors[value] for value in run_of.given}
    for name, site in moved.items() if switches(whole, {*moved.values()}) else ():
        for given in (doubled(tensors), tensors):  # some operators have single precision only
            try:
                jump = jump_of(bound, run.run.sites[name].fn, site, values, whole, given, 1 + looks)
            except (Uncut, RuntimeError, ValueError, IndexError, TypeError, ArithmeticError):
                continue  # a program may fail in any way at other values
            if jump is not None:
                yield name, f"{jump.cost} jumps by {in_short(jump.size)} nats where {jump.operator!r} switches"
            break


def told(name: str, seen: str) -> str:
    """The warning that a site gets the score function."""
    return (
        f"Site {name!r} is reparameterised, but a pathwise gradient misses jumps: {seen}. From now on it gets the "
        "score function, with leave-one-out where several particles run. To keep the pathwise gradient, write "
        'infer={"bpq": {"estimator": Pathwise()}} at the site.'
    )
