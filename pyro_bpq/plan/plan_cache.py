r"""The plans of structures that steps have met, and what was found out that a plan depends on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.plan.plan import Plan
from pyro_bpq.plan.planner import Planner
from pyro_bpq.plan.structure import StructureFacts
from pyro_bpq.tracing.traced_run import TracedRun

_PLANS, _STRUCTURES = 64, 256


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made for."""

    key: Any  # key of the runs
    graph: StochasticComputationGraph  # their graph
    facts: StructureFacts  # what else is known of their structure
    plan: Plan  # the plan


class PlanCache:
    """Plans by structure, and the structures for which something has failed that a plan may ask for.

    Attributes:
        last: The plan of the last step; ``None`` before the first one.
        plans: All plans, by what they were made for.
        unflippable: Keys of structures whose model could not be run at other values.
        unheld: Keys of structures whose programs could not be run at other values with all other sites held.
        slopes: Whether costs have gradients to the values of sites, by key, where that was looked at.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.last: Planned | None = None
        self.plans: dict[Any, Plan] = {}
        self.unflippable: set[Any] = set()
        self.unheld: set[Any] = set()
        self.slopes: dict[Any, bool] = {}

    def __repr__(self) -> str:
        return f"PlanCache({len(self.plans)} plans)"

    def plan(self, traced: TracedRun, graph: StochasticComputationGraph, facts: StructureFacts) -> Plan:
        """The plan of a structure, a new one where there is none."""
        last = self.last
        # Comparing with the last step is much cheaper than hashing a structure of hundreds of sites.
        if last is not None and last.graph is graph and last.facts == facts and last.key == traced.key:
            return last.plan
        key = (traced.key, graph, facts)
        if key not in self.plans:
            if len(self.plans) >= _PLANS:
                self.plans.clear()
            can_flip, has_slopes = traced.key not in self.unflippable, self.slopes.get(traced.key, True)
            plan = self.planner.plan(traced, graph, facts, can_flip, has_slopes, traced.key not in self.unheld)
            self.plans[key] = replace(plan, has_buffers=facts.has_buffers)
        self.last = Planned(traced.key, graph, facts, self.plans[key])
        return self.last.plan

    def do_without_flips(self, key: Any) -> None:
        """Notes that the model cannot be run at other values; plans are made anew."""
        if len(self.unflippable) >= _STRUCTURES:
            self.unflippable.clear()
        self.unflippable.add(key)
        self.forget()

    def do_without_holding(self, key: Any) -> None:
        """Notes that the programs do not run at other values with all other sites held; plans are made anew."""
        if len(self.unheld) >= _STRUCTURES:
            self.unheld.clear()
        self.unheld.add(key)
        self.forget()

    def know_slopes(self, key: Any, there: bool) -> None:
        """Notes whether costs have gradients to the values of sites; plans are made anew where they have none."""
        if len(self.slopes) >= _STRUCTURES:
            self.slopes.clear()
        self.slopes[key] = there
        if not there:
            self.forget()

    def use(self, planner: Planner) -> None:
        """Plans with other options from now on."""
        self.planner = planner
        self.forget()

    @contextlib.contextmanager
    def keeping_last(self) -> Iterator[None]:
        """The plan of the last step stays the same, whatever is planned within."""
        last = self.last
        try:
            yield
        finally:
            self.last = last

    def forget(self) -> None:
        """Forgets all plans."""
        self.plans.clear()
        self.forget_last()

    def forget_last(self) -> None:
        """Forgets the last step: the next one is planned anew."""
        self.last = None
