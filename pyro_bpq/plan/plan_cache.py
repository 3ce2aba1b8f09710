r"""The plans of structures that steps have met, and what was found out that a plan depends on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.plan.plan import Plan
from pyro_bpq.plan.planner import Planner
from pyro_bpq.plan.structure import StructureFacts
from pyro_bpq.tracing.traced_run import TracedRun

# What a plan may ask for: a run of the model at other values, gradients of costs to the values of sites, and a run of
# the programs with sites held.
Asked = Literal["flips", "slopes", "holding"]

# Largest numbers of plans and of findings that are kept.
_PLANS, _FINDINGS = 64, 768


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made for."""

    key: Any  # key of the runs
    graph: StochasticComputationGraph  # their graph
    facts: StructureFacts  # what else is known of their structure
    plan: Plan  # the plan


class PlanCache:
    """Plans by structure, and what was found out of the structures.

    Attributes:
        last: The plan of the last step; ``None`` before the first one.
        plans: All plans, by what they were made for.
        found: Whether something that a plan may ask for works, by what it is and the key of the structure. It has an
            entry only where that was looked at.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.last: Planned | None = None
        self.plans: dict[Any, Plan] = {}
        self.found: dict[tuple[Asked, Any], bool] = {}

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
            can_flip, has_slopes = self.works("flips", traced.key), self.works("slopes", traced.key)
            plan = self.planner.plan(traced, graph, facts, can_flip, has_slopes, self.works("holding", traced.key))
            self.plans[key] = replace(plan, has_buffers=facts.has_buffers)
        self.last = Planned(traced.key, graph, facts, self.plans[key])
        return self.last.plan

    def works(self, asked: Asked, key: Any) -> bool:
        """Whether something that a plan may ask for works on a structure, as far as is known."""
        return self.found.get((asked, key), True)

    def know(self, asked: Asked, key: Any, works: bool) -> None:
        """Notes whether something that a plan may ask for works; plans are made anew where it does not."""
        if len(self.found) >= _FINDINGS:
            self.found.clear()
        self.found[asked, key] = works
        if not works:
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
