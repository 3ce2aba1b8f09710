r"""Graphs and recordings by structure, and when a run is recorded.

A superset of a site's downstream costs gives an unbiased gradient. A subset in general does not. So dependencies of
runs of one structure are joined and never replaced. A run whose structure is not known is recorded before it counts.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyro_bpq.errors import check_choice, warn
from pyro_bpq.graph.bitsets import Reads
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.record.calls import Logs
from pyro_bpq.record.components import Patterns
from pyro_bpq.record.function import Check
from pyro_bpq.record.further import Draws, costs_agree
from pyro_bpq.record.jumps import Path, jumps_of, told
from pyro_bpq.record.key import Call, Keys
from pyro_bpq.record.program_warnings import crossing
from pyro_bpq.record.recorded import Bound, Recorded
from pyro_bpq.record.traced_run import TracedRun, build_graph, dense_graph
from pyro_bpq.record.values import RecordingError
from pyro_bpq.rollout.runs import Particles

LOG = logging.getLogger("pyro_bpq")
STRUCTURES = ("auto", "dynamic", "dense")

# Largest number of steps in a row that are not recorded.
_LONGEST = 64
# Largest numbers of structures and of kinds of calls that are kept.
_CAPACITY = 256
# What a run may have that recorded ones do not.
_OTHER_COSTS, _OTHER_NUMBERS = "other costs, as of a number that is no tensor,", "another number"
_COUNTS = f"it has {_OTHER_COSTS} from step to step"


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of a structure.

    Args:
        graph: Its graph.
        reads: The sites that each cost reads, over all recorded runs.
        patterns: What components costs read, where all recorded runs agree.
        self_read: Costs of the model whose law, scale or mask reads the value that it scores.
    """

    graph: StochasticComputationGraph
    reads: Reads
    patterns: Patterns
    self_read: frozenset[str]


@dataclass(eq=False)
class Alike:
    """What is known of calls that look alike, in which Python reads the same numbers.

    Recorded again are their runs after 4 and 16 steps, and then every 64.

    Attributes:
        particles: How their particles run, once that is settled, by what the user asks for.
        sums: How all values may run, over which the loss is summed after ``drawn`` steps that draw; the next one if the
            first one fails. Empty where it cannot be summed, ``None`` before that was looked at.
        always: Why every one of their runs is recorded; empty if it is not.
        steps: Number of steps since the last recorded run; ``next`` that from which on the next one is due.
        unscored: Plans of structures without scores, by how particles run and by their sites.
        recorded: The last recorded run, by modes of torch, structure, number of particles in it and sizes of plates.
        looks: Number of recorded runs that were looked at for jumps; ``paths`` what Python has done in the first ones.
        numbers: Numbers of the last recorded call that tell no calls apart, since they change from step to step;
            ``counts`` whether they have changed, and no operator has shown it.
    """

    particles: dict[Any, Particles] = field(default_factory=dict)
    sums: tuple[Particles, ...] | None = None
    drawn: int = 0
    always: str = ""
    steps: int = 0
    next: float = 0
    unscored: dict[Any, Any] = field(default_factory=dict)
    recorded: OrderedDict[Any, Recorded] = field(default_factory=OrderedDict)
    looks: int = 0
    paths: list[Path] = field(default_factory=list)
    numbers: list[Hashable] = field(default_factory=list)
    counts: bool = False


_Kind = list[tuple[Check, dict[Any, Alike]]]


class Recordings:
    """What is known of the structures of a program, and when its runs are recorded.

    The mode is one of:

    - ``"auto"``: a run is recorded if its call looks new, after 4 and 16 steps and then every 64, and at every step
      where what is computed from it must be fresh, or where sampled values steer the program;
    - ``"dynamic"``: every run is recorded;
    - ``"dense"``: none is, but one of particles in a plate, to show that they keep apart; steps go in program order, or
      every earlier site is an ancestor.

    Attributes:
        call: The call that is looked at; ``now`` what is known of calls like it.
        known: What is known of structures, by the key of their runs.
        escaping: Sites whose values steer the program.
        jumps: Reparameterised sites that are scored, because costs jump with their values.
        externals: Those of the last recorded run that called some, with all attributes that they have changed.
        crosses: Whether rows of a plate may meet.
        failed: What stopped a recording; empty if nothing has.
        in_order: Whether steps of a steered program go in program order; ``needs_graphs`` whether they may not.
        said: What was found last.
        logs: What calls may change, since no code of the programs reads it.
    """

    def __init__(self, mode: str) -> None:
        check_choice("structure", mode, STRUCTURES)
        self.mode = mode
        self.escaping: tuple[str, ...] = ()
        self.jumps: frozenset[str] = frozenset()
        self.externals: Mapping[int, tuple[Any, set[str]]] = {}
        self.crosses = self.in_order = self.needs_graphs = False
        self.known: OrderedDict[Any, Known] = OrderedDict()
        self.said, self.failed, self.num_recorded = "", "", 0
        self.call, self.now = Call(), Alike()
        # By the keys of calls: what Python reads in them, and what is known of them by these numbers.
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._keys, self.logs, self._kind, self._must = Keys(), Logs(), _Kind(), False

    def __reduce__(self) -> Any:
        return Recordings, (self.mode,), self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """What runs have shown of the program; recordings are made again."""
        own = {name: getattr(self, name) for name in ("escaping", "crosses", "in_order")}
        # What needs graphs has a meaning only if values steer the program.
        return {**own, "jumps": tuple(sorted(self.jumps)), "needs_graphs": self.escapes and self.needs_graphs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.escaping, self.crosses = tuple(state["escaping"]), state["crosses"]
        self.in_order, self.needs_graphs = state["in_order"], state["needs_graphs"]
        self.jumps = frozenset(state["jumps"])

    __setstate__ = load_state_dict  # of another process, or of a copy: recordings are made again

    @property
    def escapes(self) -> bool:
        """Whether sampled values steer the program, as far as is known."""
        return bool(self.escaping or self.failed)

    # When a run is recorded.

    def meet(self, call: Call) -> None:
        """Looks at a call before its programs run."""
        self.call, self._kind = call, self._kinds.setdefault(self._keys.of(call), _Kind())
        _trim(self._kinds)
        known = (found.get(check.numbers(call)) for check, found in self._kind)
        self.now = next(filter(None, known), Alike())

    def _learn(self, check: Check) -> None:
        """Notes what Python reads in calls like this one, as a recorded run has shown."""
        known = next((pair for pair in self._kind if pair[0] == check), None)
        if known is None:
            known = check, {}
            self._kind.append(known)
        self.now = known[1].setdefault(known[0].numbers(self.call), self.now)

    def mark(self) -> Draws:
        """A mark to which a step of the call can go back, in its draws and in the buffers of its modules."""
        return Draws(self.call.modules)

    def is_new(self, what: str) -> None:
        """Notes that a run has something that no run of such calls had: from now on they are recorded."""
        if what is not _OTHER_NUMBERS:
            self.now.always = self.now.always or f"it has {what} from step to step"

    def look_again(self) -> None:
        """Records the next run: what is known may no longer be so."""
        self._must = True

    def wants(self, particles: Particles, is_step: bool = True) -> bool:
        """Whether the next run is recorded; other runs than those of steps leave what is due to the next step."""
        knows = any(key[::2] == (self.call.modes, particles.in_call) for key in self.now.recorded)
        if self.is_ordered:
            # In a plate of particles one run has to show that they keep apart.
            return not (knows or self.failed or particles.in_call == 1)
        is_due = self._must or (is_step and self.now.steps >= self.now.next)
        return not knows or is_due or bool(self.always or self.now.always)

    @property
    def always(self) -> bool:
        """Whether every run whose graph is asked for is recorded, also the runs of stored rollouts."""
        return not self.failed and (self.mode == "dynamic" or (self.escapes and self.mode == "auto"))

    @property
    def is_ordered(self) -> bool:
        """Whether every cost is to count: values steer the program, or no run is recorded."""
        return self.is_dense or (self.mode == "auto" and self.escapes and self.in_order)

    @property
    def is_dense(self) -> bool:
        """Whether no run is recorded."""
        return self.mode == "dense" or bool(self.failed)

    def give_up(self, error: RecordingError) -> None:
        """Records no further run."""
        self.failed = str(error)
        warn(
            f"The program cannot be recorded, because of {error} ({error.__cause__}). Steps go in program order: "
            "unbiased, each site is charged with all later costs. That has more variance."
        )

    def when(self) -> str:
        """When runs are recorded, in words."""
        if self.is_ordered:
            return "No run is recorded."
        if self.mode == "dynamic":
            return 'Every run is recorded, because you wrote structure="dynamic".'
        if self.now.always:
            return f"Every run is recorded, because {self.now.always}."
        if self.now.next == math.inf:
            return "Runs like it are not recorded again."
        return f"It was recorded {self.now.steps} steps ago." if self.now.steps else "It was recorded."

    # What is known.

    def recorded(self, traced: TracedRun, number: int) -> Recorded | None:
        """The recording in force for a run of so many particles."""
        return traced.recorded or self.now.recorded.get(self.key_of(traced, number))

    def shown(self, traced: TracedRun, number: int) -> TracedRun:
        """A run of so many particles with the recording in force for it."""
        return replace(traced, recorded=self.recorded(traced, number))

    def key_of(self, traced: TracedRun, number: int) -> tuple[Any, ...]:
        """Modes of torch, structure, number of particles, and sizes of plates, which a number that counts may set."""
        return self.call.modes, traced.key, number, frozenset(traced.plate_sizes.items())

    def news(self, runs: Sequence[TracedRun], particles: Particles, bound: Bound | None) -> str:
        """What runs that were not recorded have that no recording of such calls has; empty if there is nothing.

        ``bound`` is the run from which those of hidden particles are computed.
        """
        if not all(self.knows(run, particles.in_call) for run in runs):
            return "another structure"
        # What further particles cost is no control variate: it must not be outdated. Their values may show another
        # number where those of the first particle do not. Once more recorded, the run shows if an operator has it.
        if bound is None or (self._counts_only and costs_agree(runs[0], bound)):
            return ""
        return _OTHER_COSTS if self._counts_only else _OTHER_NUMBERS

    @property
    def _counts_only(self) -> bool:
        """Whether numbers that have changed since the last recorded run are no operator's, as far as is known."""
        return self.now.counts or self._keys.left_out() == self.now.numbers

    def recognises(self, traced: TracedRun, number: int) -> bool:
        """Whether an earlier run did the same as a recorded one, which then takes over what that has been asked."""
        before, new = self.now.recorded.get(self.key_of(traced, number)), traced.recorded
        if before is None or new is None:
            return False
        is_like = before.is_like(new)
        if self._keys.left_out() != self.now.numbers:
            self.now.counts = is_like and new.has_constants_of(before)
            if not self.now.counts:
                self.now.always = self.now.always or _COUNTS
        elif is_like and self.now.always == _COUNTS:  # it has come to its end, as annealing does
            self.now.always = ""
        if not is_like:
            return False
        new.take_over(before)
        return True

    def knows(self, traced: TracedRun, number: int) -> bool:
        """Whether the structure of a run is known."""
        return self.is_dense or self.recorded(traced, number) is not None

    def is_dynamic(self, traced: TracedRun) -> bool:
        """Whether sampled values may steer the program, so that the next run may differ in structure.

        A value must leave torch before it can steer Python, and it does so in every run. So one recorded run shows it.
        """
        return self.escapes or self.is_dense or bool(traced.escaped_sites)

    def cuts_plates(self, traced: TracedRun) -> bool:
        """Whether rows of a plate stay apart: no rows met, and no value sampled in a plate left torch."""
        return not (self.crosses or traced.crosses or self.is_dense)

    def graph(self, traced: TracedRun, number: int, learn: bool = True) -> StochasticComputationGraph:
        """Returns the graph of a run of so many particles in one call, and notes what a recorded one shows."""
        # Where the structure may depend on sampled values, reads of other runs of it are not joined.
        is_joined = not (self.mode == "dynamic" or self.is_dynamic(traced))
        if not is_joined:
            # Which numbers Python reads is not looked at.
            self._learn(Check())
        new, key = traced.recorded, self.key_of(traced, number)
        if new is None or self.is_dense:
            if new is not None:
                self.now.recorded[key] = new
            known = self.known.get(traced.key)
            return dense_graph(traced) if known is None else known.graph
        self._must &= not learn
        if is_joined:
            self.known[traced.key] = self._joined(traced, new, number)
            _trim(self.known)
        if learn:
            self._note(traced)
        return self.known[traced.key].graph if is_joined else build_graph(traced, new.reads)

    def finds_jumps(self, traced: TracedRun) -> bool:
        """Whether a recorded run shows that pathwise gradients of sites miss jumps; they are scored from now on."""
        now = self.now
        found = dict(jumps_of(traced, self.call, now.looks, now.paths, bool(self._keys.counters)))
        now.looks += 1
        for name, seen in found.items():
            warn(told(name, seen))
        if found:
            self.jumps |= found.keys()
            # Nothing that is known of the program is so any longer.
            self.known.clear()
            self._kinds.clear()
            self.meet(self.call)
        return bool(found)

    def _note(self, traced: TracedRun) -> None:
        assert traced.recorded is not None
        self.num_recorded += 1
        for key in traced.externals.keys() & self.externals.keys():
            traced.externals[key][1].update(self.externals[key][1])
        self.externals = traced.externals or self.externals
        now = self.now
        if now.steps or not now.next:  # else another run of the same step was recorded
            now.next = min(4 * now.next, _LONGEST) or 4
        now.steps, now.numbers = 0, self._keys.left_out()
        if traced.escaped_sites and not self.escapes:
            self._say(f"Values of {', '.join(sorted(traced.escaped_sites))} leave torch: every run is recorded.")
        self.escaping = tuple(sorted({*self.escaping, *traced.escaped_sites}))
        if not self.crosses and traced.crosses:
            if text := crossing(traced):
                warn(text)
            self.crosses = True

    def _joined(self, traced: TracedRun, new: Recorded, number: int) -> Known:
        """What is known of a structure after a recorded run of it."""
        old, before = self.known.get(traced.key), self.now.recorded.get(self.key_of(traced, number))
        if not self.recognises(traced, number):
            check = new.check()
            if check is None:
                check, self.now.always = Check(), "Python reads numbers that change from step to step"
            self._learn(check)
        self.now.recorded[self.key_of(traced, number)] = new
        _trim(self.now.recorded)
        patterns = frozenset(new.patterns.items())
        if old is None:
            return Known(build_graph(traced, new.reads), new.reads, patterns, new.self_read)
        reads, kept = old.reads.union(new.reads), old.patterns & patterns
        if reads.bits == old.reads.bits and kept == old.patterns and new.self_read <= old.self_read:
            return old
        added = {cost: sorted(reads[cost] - old.reads[cost]) for cost in reads}
        lost = sorted({pair for pair, _ in old.patterns - kept})
        texts = [f"{cost} also reads {names}" for cost, names in added.items() if names]
        texts += [f"{cost} reads other components of {site}" for site, cost in lost]
        if texts and before is not None and self.now.steps:
            warn(
                f"Dependencies changed within the last {self.now.steps} steps: {'; '.join(texts)}. They are "
                'taken into account from now on; write structure="dynamic" to record every step.'
            )
        graph = old.graph if reads.bits == old.reads.bits else build_graph(traced, reads)
        return Known(graph, reads, kept, old.self_read | new.self_read)

    def settle_order(self, fits: bool) -> None:
        """Settles whether steps of a program that values steer go in program order; once refused, they never do."""
        self.needs_graphs |= not fits
        if not self.escapes or self.mode != "auto" or self.in_order is not self.needs_graphs:
            return
        self.in_order = not self.needs_graphs
        if self.in_order:
            self._say(f"Values of {', '.join(self.escaping)} steer the program: steps go in program order, unrecorded.")
        else:
            self._say(
                "A site in a plate, a choice at a site or a cost statement needs the graph: every run is recorded."
            )

    def _say(self, text: str) -> None:
        self.said = text
        LOG.info("%s", text)


def _trim(known: OrderedDict[Any, Any]) -> None:
    """Drops what was met first, if there is too much."""
    if len(known) > _CAPACITY:
        known.popitem(last=False)
