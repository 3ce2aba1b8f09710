r"""Graphs and recordings by structure, and when a run is recorded.

A superset of a site's downstream costs gives an unbiased gradient. A subset in general does not. So dependencies of
runs that look alike are joined and never replaced. A run whose structure is not known is recorded before it counts.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyro_bpq.errors import BPQWarning, check_choice
from pyro_bpq.graph.bitsets import Reads, named
from pyro_bpq.graph.scg import CostNode, StochasticComputationGraph, StochasticNode, cost_of_guide
from pyro_bpq.record.components import Patterns
from pyro_bpq.record.key import Keys, reach
from pyro_bpq.record.recorded import Recorded
from pyro_bpq.tracing.traced_run import TracedRun

LOG = logging.getLogger("pyro_bpq")
STRUCTURES = ("auto", "dynamic", "dense")

# Programs of at most so many operators are recorded at every step.
SMALL = 200
# Largest number of steps in a row that are not recorded.
_LONGEST = 64
# Largest numbers of structures and of kinds of calls that are kept.
_CAPACITY = 256
# Fewer rows of a plate than these need no word.
_FEW_ROWS = 3


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of a structure.

    Args:
        graph: Its graph.
        reads: The sites that each cost reads, over all recorded runs.
        patterns: What components costs read, where all recorded runs agree.
        self_read: Costs of the model whose law, scale or mask reads the value that it scores.
        recorded: The last recorded run; ``alone`` that of one particle where several run in one call.
    """

    graph: StochasticComputationGraph
    reads: Reads
    patterns: Patterns
    self_read: frozenset[str]
    recorded: Recorded
    alone: Recorded | None = None


@dataclass
class _Timetable:
    """When calls that look alike are recorded again: after 1, 2, 4, ... steps, and then every 64."""

    steps: int = 0
    next: int = 1
    always: bool = False  # whether the program is small, or its structure changes

    @property
    def is_due(self) -> bool:
        return self.always or self.steps >= self.next


class Recordings:
    """What is known of the structures of a program, and when its runs are recorded.

    The mode is one of:

    - ``"auto"``: a run is recorded if its call looks new, after 1, 2, 4, ... steps and then every 64, and at every step
      if the program is small or sampled values steer it;
    - ``"dynamic"``: every run is recorded;
    - ``"dense"``: none is; every earlier site is an ancestor.

    Attributes:
        known: What is known, by the key of the run.
        escaping: Sites whose values steer the program.
        crosses: Whether rows of a plate may meet.
        in_order: Whether steps of a steered program go in program order; ``needs_graphs`` whether they may not.
        said: What was found last.
    """

    def __init__(self, mode: str) -> None:
        check_choice("structure", mode, STRUCTURES)
        self.mode = mode
        self.escaping: tuple[str, ...] = ()
        self.crosses = self.in_order = self.needs_graphs = False
        self.known: OrderedDict[Any, Known] = OrderedDict()
        self.said = ""
        self.num_recorded = 0
        self._calls: OrderedDict[Hashable, _Timetable] = OrderedDict()
        self._keys = Keys()
        self._now = _Timetable()
        self._must = False

    def __repr__(self) -> str:
        return f"Recordings({self.mode!r}, {len(self.known)} structures, escapes={self.escapes})"

    def state_dict(self) -> dict[str, Any]:
        """What runs have shown of the program; recordings are made again."""
        names = ("escaping", "crosses", "in_order")
        # It is saved only if values steer the program; else it has no meaning.
        return {**{name: getattr(self, name) for name in names}, "needs_graphs": self.escapes and self.needs_graphs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.escaping, self.crosses = tuple(state["escaping"]), state["crosses"]
        self.in_order, self.needs_graphs = state["in_order"], state["needs_graphs"]

    @property
    def escapes(self) -> bool:
        """Whether sampled values steer the program."""
        return bool(self.escaping)

    # When a run is recorded.

    def meet(self, roots: Mapping[str, Any], learning: bool) -> None:
        """Looks at a call before it runs."""
        key = self._keys.of(reach(roots))
        now = self._calls.get(key)
        if now is None:
            now = _Timetable(next=0)
            if learning:
                self._calls[key] = now
                if len(self._calls) > _CAPACITY:
                    self._calls.popitem(last=False)
        self._now = now

    def is_new(self) -> None:
        """Notes that a run of a call that looks known has another structure: from now on its runs are recorded."""
        self._now.always = True

    def look_again(self) -> None:
        """Records the next run: what is known may no longer be so."""
        self._must = True

    @property
    def wants(self) -> bool:
        """Whether the next run is recorded."""
        if self.is_ordered or self.mode == "dense":
            return False
        return self._must or self.always or self._now.is_due

    @property
    def always(self) -> bool:
        """Whether every run whose graph is asked for is recorded, also the runs of stored rollouts."""
        return self.mode == "dynamic" or (self.escapes and self.mode == "auto")

    @property
    def is_ordered(self) -> bool:
        """Whether values are known to steer the program, and every cost is to count."""
        return self.escapes and (self.mode == "dense" or (self.mode == "auto" and self.in_order))

    # What is known.

    def knows(self, traced: TracedRun) -> bool:
        """Whether the structure of a run is known."""
        return traced.recorded is not None or traced.key in self.known or self.mode == "dense"

    def of(self, traced: TracedRun) -> Known | None:
        """What is known of the structure of a run."""
        return self.known.get(traced.key)

    def is_dynamic(self, traced: TracedRun) -> bool:
        """Whether sampled values may steer the program, so that the next run may differ in structure.

        A value must leave torch before it can steer Python, and it does so in every run. So one recorded run shows it.
        """
        return self.escapes or traced.escaped or self._is_unseen(traced)

    def cuts_plates(self, traced: TracedRun) -> bool:
        """Whether rows of a plate stay apart: no rows met, and no value sampled in a plate left torch."""
        return not (self.crosses or traced.crosses or self._is_unseen(traced))

    def _is_unseen(self, traced: TracedRun) -> bool:
        return self.mode == "dense" and traced.key not in self.known

    def graph(self, traced: TracedRun, learn: bool = True) -> StochasticComputationGraph:
        """Returns the graph of a run, and learns what a recorded one shows."""
        if learn:
            self._now.steps += 1
        if traced.recorded is None:
            known = self.known.get(traced.key)
            return dense_graph(traced) if known is None else known.graph
        if learn:
            self._note(traced)
        if self.mode == "dynamic" or (self.mode == "auto" and (self.escapes or traced.escaped)):
            # Reads of other runs with the same key are not joined: the key may depend on sampled values.
            return build_graph(traced, traced.recorded.reads)
        known = self._joined(traced, traced.recorded)
        if learn or traced.key not in self.known:
            self.known[traced.key] = known
            self.known.move_to_end(traced.key)
            if len(self.known) > _CAPACITY:
                self.known.popitem(last=False)
        return known.graph

    def _note(self, traced: TracedRun) -> None:
        assert traced.recorded is not None
        self.num_recorded += 1
        self._must, now = False, self._now
        now.steps, now.next = 0, min(max(2 * now.next, 1), _LONGEST)
        now.always |= len(traced.recorded.recording.nodes) <= SMALL
        if traced.escaped and not self.escapes:
            self._say(f"Values of {', '.join(sorted(traced.escaped_sites))} leave torch: every run is recorded.")
        self.escaping = tuple(sorted({*self.escaping, *traced.escaped_sites}))
        if not self.crosses and traced.crosses:
            if text := _crossing(traced):
                warnings.warn(text, BPQWarning, stacklevel=2)
            self.crosses = True

    def _joined(self, traced: TracedRun, new: Recorded) -> Known:
        """What is known of a structure after a recorded run of it."""
        old = self.known.get(traced.key)
        if old is not None and old.recorded.is_like(new):
            old.recorded.adopt(new)
            return old
        patterns = frozenset(new.patterns.items())
        if old is None:
            return Known(build_graph(traced, new.reads), new.reads, patterns, new.self_read, new)
        reads = old.reads.union(new.reads)
        added = {cost: sorted(reads[cost] - old.reads[cost]) for cost in reads}
        lost = sorted({pair for pair, _ in old.patterns - patterns})
        texts = [f"{cost} also reads {names}" for cost, names in added.items() if names]
        texts += [f"{cost} reads other components of {site}" for site, cost in lost]
        if texts and self._now.steps:
            warnings.warn(
                f"Dependencies changed within the last {self._now.steps} steps: {'; '.join(texts)}. They are "
                'taken into account from now on; write structure="dynamic" to record every step.',
                BPQWarning,
                stacklevel=3,
            )
        graph = old.graph if reads.bits == old.reads.bits else build_graph(traced, reads)
        self_read = old.self_read | new.self_read
        return replace(
            old, graph=graph, reads=reads, patterns=old.patterns & patterns, self_read=self_read, recorded=new
        )

    def settle_order(self, fits: bool) -> None:
        """Settles whether steps of a program that values steer go in program order; once refused, they never do."""
        self.needs_graphs |= not fits
        if not self.escapes or self.mode != "auto" or self.in_order is not self.needs_graphs:
            return
        self.in_order = not self.needs_graphs
        if self.in_order:
            self._say(f"Values of {', '.join(self.escaping)} steer the program: steps go in program order, unrecorded.")
        else:
            self._say("A site in a plate, a choice at a site or a cost statement needs the graph: every run is recorded.")

    def _say(self, text: str) -> None:
        self.said = text
        LOG.info("%s", text)


def _crossing(traced: TracedRun) -> str:
    """Says that rows of a plate may meet, although the plate declares them independent; empty for few rows."""
    if not traced.met:
        return _left_a_plate(traced)
    assert traced.recorded is not None
    cost, (plate, why) = next(iter(traced.met.items()))
    inside = [n for n in sorted(traced.recorded.reads[cost]) if any(own.name == plate for own in traced.plates[n])]
    first = f"a row of it reads other rows of {', '.join(map(repr, inside))}"
    if why:
        first = f"it reads {', '.join(map(repr, inside))} by {why!r}, of which it is not known that rows stay apart"
    return (
        f"Rows of the plate {plate!r} meet in {cost}: {first}, although a plate declares its rows independent. From now "
        "on each row is charged with the costs of all rows, which is unbiased, with more variance; Pyro's own ELBOs "
        f"would be biased. If that is not meant, look at the dimensions in which the program of {cost} reduces, flips "
        "or indexes; if it is, take the dimension into the event with .to_event()."
    )


def _left_a_plate(traced: TracedRun) -> str:
    # Gradients of sites without a score come through their values: no costs are charged to them.
    scored = {name for name, record in traced.run.sites.items() if record.score is not None}
    sites = [name for name in sorted(scored & traced.escaped_sites) if traced.plates[name]]
    plates = dict.fromkeys(plate for name in sites for plate in traced.plates[name])
    rows = math.prod(traced.plate_sizes[plate] for plate in plates)
    if rows < _FEW_ROWS:
        return ""
    return (
        f"Values of {', '.join(map(repr, sites))}, drawn in the plate {', '.join(repr(p.name) for p in plates)}, leave "
        "torch (as by .numpy(), .item(), .tolist(), if), so that a row may read the others. Each row is charged with "
        f"the costs of all {rows} rows, which is unbiased, with a variance that grows with their number. Stay "
        "in torch, as by torch.where(z > 0, a, b) or table[z.long()]; or give what a simulator in numpy returns "
        "as the cost of each row, pyro_bpq.cost(name, function, z)."
    )


def dense_graph(traced: TracedRun) -> StochasticComputationGraph:
    """The dense graph: every site reads all earlier sites, and every cost of the model reads all sites.

    It is a superset of any graph that the program can have. So it is right whatever the program does, at the price of
    more variance.
    """
    return build_graph(traced, _dense_reads(traced))


def _dense_reads(traced: TracedRun) -> Reads:
    names, bits, earlier = tuple(traced.run.sites), dict[str, int](), 0
    position = {name: i for i, name in enumerate(names)}
    for (name, *_), cost in zip(traced.entries, traced.run.costs, strict=True):
        if cost == cost_of_guide(name):
            # The log-probability of a latent site's own draw. Data of the guide have no position.
            earlier |= 1 << position[name] if name in position else 0
        bits[cost] = earlier
    return Reads(names, bits)


def build_graph(traced: TracedRun, reads: Mapping[str, frozenset[str]]) -> StochasticComputationGraph:
    """The graph of a run whose sites and costs read what ``reads`` says."""
    sites = tuple(traced.run.sites)
    bits, nodes = Reads.over(sites, reads).bits, []
    until: dict[str, int] = {}
    for i, name in enumerate(sites):
        # A draw and its log q read no later site. The mask drops sites that only chose later views of the same table.
        before = bits[cost_of_guide(name)] & (1 << i) - 1
        until[name] = before | 1 << i
        nodes.append(StochasticNode(name, named(sites, before), traced.plates[name]))
    costs = []
    for (name, where, *_), cost in zip(traced.entries, traced.run.costs, strict=True):
        if traced.only_costs and cost not in traced.user_costs:
            continue
        members = until.get(name, bits[cost]) if cost == cost_of_guide(name) else bits[cost]
        costs.append(CostNode(cost, named(sites, members), where, name, cost in traced.of_guide))
    return StochasticComputationGraph(tuple(nodes), tuple(costs))


def merged_graph(traced: TracedRun, graphs: Sequence[StochasticComputationGraph]) -> StochasticComputationGraph:
    """Returns the union of the graphs of runs that have the key of ``traced``."""
    bits = dict[str, int]()
    for graph in graphs:
        read = {cost_of_guide(node.name): node.parents for node in graph.nodes}
        for name, parents in (*read.items(), *((cost.name, cost.parents) for cost in graph.costs)):
            bits[name] = bits.get(name, 0) | graph.bits_of(parents)
    return build_graph(traced, Reads(tuple(traced.run.sites), bits))
