r"""Finds the graph of a run: tracks the run if it must, and reuses a cached graph if it may.

A superset of a site's downstream costs gives an unbiased gradient. A subset in general does not. So cached
dependencies are merged and never replaced. A run that was not tracked and whose key is unknown gets the dense graph.
"""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

from pyro_bpq.errors import BPQWarning, check_choice
from pyro_bpq.graph.bitsets import Reads, named
from pyro_bpq.graph.scg import CostNode, StochasticComputationGraph, StochasticNode, cost_of_guide
from pyro_bpq.tracing.component_costs import Patterns
from pyro_bpq.tracing.plain_values import MetValues
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.work import Work

LOG = logging.getLogger("pyro_bpq")
STRUCTURES = ("auto", "dynamic", "dense")

# Number of tracked runs that must agree before a key counts as static.
_AGREEMENTS = 3
# Fewer rows than these that are charged with each other's costs are not worth a word.
_FEW_ROWS = 3
# Largest number of keys that are kept.
_CAPACITY = 256
# Rows that meet are looked for after these numbers of tracked runs.
_LOOKS = frozenset((0, *(10**k for k in range(1, 10))))
# Largest number of untracked steps in a row; the same where numbers count the steps, and may switch something on.
_LONGEST, _LONGEST_COUNTED = 1000, 100
# Largest number of runs in a row that must bring no new structure before runs go untracked again.
_MOST_PATIENCE = 64


@dataclass(frozen=True)
class _Facts:
    """What tracked runs of a structure have shown besides its graph; ``patterns`` is ``None`` if never followed."""

    handed: frozenset[str] = frozenset()
    has_buffers: bool = True
    work: tuple[Work, Work] | None = None
    patterns: Patterns | None = None

    @cached_property
    def varying(self) -> Patterns:
        """The patterns that fit only one number of rows."""
        return frozenset(pair for pair in self.patterns or () if not pair[1].is_uniform)


class StructureCache:
    """Caches graphs by the key of the run; it keeps the 256 that were used last.

    The mode is one of:

    - ``"auto"``: track until the structure proves static, then reuse the graph and track again now and then. A program
      that lets a sampled value leave torch stays tracked, unless its steps may go in program order.
    - ``"dynamic"``: always track.
    - ``"dense"``: every earlier site is an ancestor.

    An untracked run with a new key gets the dense graph once. Then runs are tracked until 2 in a row bring nothing
    new. After the next untracked run with a new key, 4 in a row are needed, and so on up to 64. So if new keys come
    often, as with names of subsampled data points, every run is tracked, and no run is dense for long.
    """

    def __init__(self, mode: str) -> None:
        check_choice("structure", mode, STRUCTURES)
        self.mode = mode
        self.escapes = False
        self.escaping: tuple[str, ...] = ()
        self.crosses = False
        # Whether steps of a steered program may go in program order; and whether a run has shown that they may not.
        self.in_order = self.needs_graphs = False
        self.unknown = True
        self.untracked_steps = 0
        self.next_look = 10
        self.tracked_runs = 0
        self.patience = self.calm = 0
        # Whether the next tracked run looks in any case whether rows of plates meet.
        self.doubts_rows = False
        self.met = MetValues()
        self.reads: OrderedDict[Any, tuple[Reads, int]] = OrderedDict()
        self.graphs: dict[Any, StochasticComputationGraph] = {}
        self.facts: dict[Any, _Facts] = {}
        # The counted work of structures in a loaded state. Counted in a run of more particles it would be another.
        self.counted: dict[str, tuple[Work, Work]] = {}
        # What was found last.
        self.said = ""

    def __repr__(self) -> str:
        return f"StructureCache({self.mode!r}, {len(self.graphs)} graphs, escapes={self.escapes})"

    def state_dict(self) -> dict[str, Any]:
        """What runs have shown of any structure of the program, and what these compute; graphs are found again."""
        works = {_digest(key): facts.work for key, facts in self.facts.items() if facts.work is not None}
        return {
            "escaping": self.escaping,
            "crosses": self.crosses,
            "in_order": self.in_order,
            # It is saved only if values steer the program; else it has no meaning.
            "needs_graphs": self.escapes and self.needs_graphs,
            "work": {key: tuple(map(astuple, work)) for key, work in {**self.counted, **works}.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.escaping, self.crosses = tuple(state["escaping"]), state["crosses"]
        self.escapes = bool(self.escaping)
        self.in_order, self.needs_graphs = state["in_order"], state["needs_graphs"]
        self.counted = {key: (Work(*guide), Work(*model)) for key, (guide, model) in state.get("work", {}).items()}

    def wants_tracking(self) -> bool:
        """Whether the next run must be tracked."""
        if self.is_ordered:
            return False
        if self.unknown or self.always_tracks or self.calm < self.patience:
            return True
        longest = _LONGEST_COUNTED if self.met.counts else _LONGEST
        return self.mode != "dense" and self.untracked_steps >= min(self.next_look, longest)

    def meet(self, kind: str, values: tuple[Any, ...], has_counters: bool = False) -> None:
        """Tracks the next run if plain values of a kind are new: they may switch parts of it on."""
        met = self.met.after(kind, values, has_counters)
        if met.has_switched and met.known is not self.met.known:
            self.look_again()
        self.met = met

    def look_again(self) -> None:
        """Tracks the next run, its rows of plates too: what is known may no longer be so."""
        self.unknown = self.doubts_rows = True

    @property
    def is_ordered(self) -> bool:
        """Whether values are known to steer the program, and every cost is to count."""
        return self.escapes and (self.mode == "dense" or (self.mode == "auto" and self.in_order))

    @property
    def always_tracks(self) -> bool:
        """Whether every run whose graph is asked for is tracked, also the runs of stored rollouts."""
        return self.mode == "dynamic" or (self.escapes and self.mode == "auto")

    @property
    def follows_components(self) -> bool:
        """Whether tracked runs follow which components of a site a cost reads."""
        return self.mode == "auto" and not self.escapes

    @property
    def follows_rows(self) -> bool:
        """Whether the next tracked run checks if rows of a plate meet.

        The first one checks, and so does each one after untracked steps, or for which plain values are new. If every
        run is tracked, the runs after 10, 100, ... tracked runs check.
        """
        is_due = self.doubts_rows or self.untracked_steps > 0 or self.tracked_runs in _LOOKS
        return not self.crosses and is_due

    def _facts(self, traced: TracedRun) -> _Facts:
        return self.facts.get(traced.key, _Facts())

    def patterns_of(self, runs: Sequence[TracedRun]) -> Patterns:
        """Returns the patterns of costs on which these and all earlier runs of the same structure agree."""
        first, *others = runs
        if any(run.key != first.key for run in others):
            return frozenset()
        facts = self._facts(first)
        if facts.patterns is not None:
            # A tracked run that nothing is learned from may show others.
            shown = [frozenset(run.patterns.items()) for run in runs if run.reads is not None]
            found, varying = facts.patterns.intersection(*shown), facts.varying
        else:
            found = frozenset(first.patterns.items()).intersection(*(run.patterns.items() for run in others))
            varying = found
        lost = frozenset(pair for pair in varying if not pair[1].fits(first.run.costs[pair[0][1]].shape))
        return found - lost if lost else found

    def handed_of(self, runs: Sequence[TracedRun]) -> frozenset[str]:
        """Returns model costs that read the guide's own values, in these or earlier runs of that structure."""
        return frozenset().union(*(self._facts(run).handed | run.handed for run in runs))

    def has_buffers(self, runs: Sequence[TracedRun]) -> bool:
        """Whether runs of the same structure may call modules with buffers."""
        return any(run.has_buffers and self._facts(run).has_buffers for run in runs)

    def work_of(self, traced: TracedRun) -> tuple[Work, Work] | None:
        """Returns what guide and model of that structure compute, as first counted; ``None`` if it never was."""
        known = self._facts(traced).work
        # This runs at each step: a structure is named only where a state was loaded, and it was not counted since.
        if known is None and self.counted:
            known = self.counted.get(_digest(traced.key))
        return known or traced.work

    def knows(self, traced: TracedRun) -> bool:
        """Whether the run was tracked, a run with its key was tracked, or the mode is ``"dense"``."""
        return traced.reads is not None or traced.key in self.graphs or self.mode == "dense"

    def is_dynamic(self, traced: TracedRun) -> bool:
        """Whether sampled values may have steered Python, so that the next run may differ in structure.

        A value must leave torch before it can steer Python, and it does so in every run. So one tracked run shows it.
        """
        return self.escapes or traced.escaped or self._is_unseen(traced)

    def cuts_plates(self, traced: TracedRun) -> bool:
        """Whether rows of a plate stayed apart: no rows met, and no value sampled in a plate left torch."""
        return not (self.crosses or traced.crosses or self._is_unseen(traced))

    def _is_unseen(self, traced: TracedRun) -> bool:
        return self.mode == "dense" and traced.reads is None and traced.key not in self.graphs

    def graph(self, traced: TracedRun, learn: bool = True) -> StochasticComputationGraph:
        """Returns the graph of a run."""
        if traced.reads is not None:
            return self._tracked(traced, traced.reads, learn)
        graph = self.graphs.get(traced.key)
        if learn:
            self.untracked_steps += 1
            # This structure was never tracked. So the run gets the dense graph, and the next run is tracked.
            self.unknown |= graph is None
            self._count(traced, graph is None)
            if graph is None and self.mode != "dense":
                self.patience = min(max(2 * self.patience, 2), _MOST_PATIENCE)
        return dense_graph(traced) if graph is None else graph

    def _tracked(
        self, traced: TracedRun, reads: Mapping[str, frozenset[str]], learn: bool
    ) -> StochasticComputationGraph:
        if learn:
            self.tracked_runs += 1
            self.doubts_rows = False
            if traced.escaped and not self.escapes:
                self._say(f"Values of {', '.join(sorted(traced.escaped_sites))} leave torch: every run is tracked.")
            self.escapes |= traced.escaped
            self.escaping = tuple(sorted({*self.escaping, *traced.escaped_sites}))
            if traced.crosses and not self.crosses:
                _warn_of_rows(traced, reads)
            self.crosses |= traced.crosses
        if self.mode == "dynamic" or (self.mode == "auto" and (self.escapes or traced.escaped)):
            # Reads of other runs with the same key are not merged in: the key may depend on sampled values.
            return build_graph(traced, reads)
        if learn:
            self._learn_facts(traced)
            self._count(traced, traced.key not in self.reads)
        new = _dense_reads(traced) if self.mode == "dense" else Reads.over(traced.run.sites, reads)
        known, agreements = self.reads.get(traced.key, (Reads(new.sites, {}), 0))
        merged = known.union(new)
        changed = bool(known) and merged.bits != known.bits
        if changed:
            self._contradicted(known, merged)
        if not learn:
            return build_graph(traced, merged) if changed or not known else self.graphs[traced.key]
        agreements = 1 if changed else agreements + 1
        self.reads[traced.key] = (merged, agreements)
        self._learn_patterns(traced)
        if len(self.reads) > _CAPACITY:
            forgotten, _ = self.reads.popitem(last=False)
            self.graphs.pop(forgotten, None)
            self.facts.pop(forgotten, None)
        was_unknown, self.unknown = self.unknown, self.mode == "auto" and agreements < _AGREEMENTS
        if was_unknown and not self.unknown and self.mode != "dense":
            self._say(f"The structure is known after {self.tracked_runs} tracked runs.")
        self.met = self.met.seen()
        if self.untracked_steps >= self.next_look:
            self.next_look = min(10 * self.next_look, _LONGEST)
        self.untracked_steps = 0
        if changed or traced.key not in self.graphs:
            self.graphs[traced.key] = build_graph(traced, merged)
        return self.graphs[traced.key]

    def settle_order(self, fits: bool) -> None:
        """Settles whether steps of a program that values steer go in program order; once refused, they never do."""
        self.needs_graphs |= not fits
        if not self.escapes or self.mode != "auto" or self.in_order is not self.needs_graphs:
            return
        self.in_order = not self.needs_graphs
        if self.in_order:
            self._say(f"Values of {', '.join(self.escaping)} steer the program: steps go in program order, untracked.")
        else:
            self._say(
                "A site in a plate, a choice at a site or a cost statement needs the graph: every run is tracked."
            )

    def _say(self, text: str) -> None:
        self.said = text
        LOG.info("%s", text)

    def _count(self, traced: TracedRun, is_new: bool) -> None:
        """Counts the runs since the last new structure, and marks the key as used last."""
        self.calm = 0 if is_new else self.calm + 1
        if traced.key in self.reads:
            self.reads.move_to_end(traced.key)

    def _learn_facts(self, traced: TracedRun) -> None:
        """Stores the facts that extra runs need."""
        known = self._facts(traced)
        handed, work = known.handed | traced.handed, self.work_of(traced)
        self.facts[traced.key] = replace(known, handed=handed, has_buffers=traced.has_buffers, work=work)

    def _learn_patterns(self, traced: TracedRun) -> None:
        """Keeps only the patterns that every run has shown."""
        facts, new = self._facts(traced), frozenset(traced.patterns.items())
        known = new if facts.patterns is None else facts.patterns
        lost = sorted({pair for pair, _ in known - new})
        if lost or facts.patterns is None:
            self.facts[traced.key] = replace(facts, patterns=known & new)
        if lost and self.untracked_steps:
            warnings.warn(
                f"Which components of a site a cost reads changed within the last {self.untracked_steps} steps: "
                f"{', '.join(f'{cost} of {site}' for site, cost in lost)}. From now on these costs count as reading "
                'all of them; write structure="dynamic" to track every step.',
                BPQWarning,
                stacklevel=2,
            )

    def _contradicted(self, known: Mapping[str, frozenset[str]], merged: Mapping[str, frozenset[str]]) -> None:
        added = {cost: sorted(merged[cost] - known[cost]) for cost in merged}
        new = [f"{cost} also reads {names}" for cost, names in added.items() if names]
        if self.untracked_steps and not self.met.has_switched:
            warnings.warn(
                f"Dependencies changed within the last {self.untracked_steps} steps: {'; '.join(new)}. They are "
                'taken into account from now on; write structure="dynamic" to track every step.',
                BPQWarning,
                stacklevel=2,
            )


def _warn_of_rows(traced: TracedRun, reads: Mapping[str, frozenset[str]]) -> None:
    """Warns that rows of a plate may meet, although the plate declares them independent."""
    text = _met(traced, reads) if traced.met else _left_a_plate(traced)
    if text:
        warnings.warn(text, BPQWarning, stacklevel=3)


def _met(traced: TracedRun, reads: Mapping[str, frozenset[str]]) -> str:
    cost, plates = next(iter(traced.met.items()))
    inside = [n for n in sorted(reads[cost]) if any(plate.name in plates for plate in traced.plates[n])]
    return (
        f"Rows of the plate {', '.join(map(repr, plates))} meet in {cost}: a row of it reads other rows of "
        f"{', '.join(map(repr, inside))}, although a plate declares its rows independent. From now on each row is "
        "charged with the costs of all rows, which is unbiased, with more variance; Pyro's own ELBOs would be biased. "
        f"If that is not meant, look at the dimensions in which the program of {cost} reduces, flips or indexes; if it "
        "is, take the dimension into the event with .to_event()."
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


def _digest(key: tuple[Any, ...]) -> str:
    """A name of a structure that another process finds too."""
    return hashlib.sha256(repr(key).encode()).hexdigest()


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
