r"""What a plan is made for: a run, its graph, and what else is known of its structure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.record.components import Pattern, Patterns
from pyro_bpq.record.recorded import Recorded
from pyro_bpq.rollout.features import have_same_values
from pyro_bpq.tracing.traced_run import TracedRun


@dataclass(frozen=True)
class StructureFacts:
    """What is known of a structure besides its graph."""

    is_dynamic: bool = False  # whether sampled values may steer the program
    cuts_plates: bool = True  # whether rows of a plate stay apart
    patterns: Patterns = frozenset()  # which component of a site each element of a cost reads, by site and cost
    # Costs of the model whose law, scale or mask reads the value that it scores.
    self_read: frozenset[str] = frozenset()
    num_particles: int = 1  # number of particles
    is_ordered: bool = False  # whether steps on the structure are to go in program order
    sums: bool = False  # whether the loss is to be summed over all values
    # A recorded run. It tells structures apart only by the sites whose other values give the costs that read them.
    recorded: Recorded | None = field(default=None, compare=False)
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Structure:
    """What a plan is made for."""

    traced: TracedRun  # a run
    graph: StochasticComputationGraph  # its graph
    facts: StructureFacts  # what else is known of its structure
    is_exact: bool = True  # whether immediate costs are known at other values than the sampled one

    @cached_property
    def immediate(self) -> dict[str, tuple[str, ...]]:
        """The immediate costs of each site that are known at other values."""
        own, is_known = self.facts.self_read, self.is_exact and not self.facts.is_dynamic
        return {n: tuple(c for c in costs if is_known and c not in own) for n, costs in self.graph.last_costs.items()}

    @cached_property
    def patterns(self) -> dict[tuple[str, str], Pattern]:
        """What components of sites read, by site and cost, in an order that is the same in every process."""
        return dict(sorted(self.facts.patterns, key=lambda pair: pair[0]))


def has_like_prior(traced: TracedRun, name: str) -> bool:
    """Whether the model's distribution of a site has the values and the batch shape of the guide's."""
    fn, prior = traced.run.sites[name].fn, traced.run.sites[name].prior
    return prior is not None and have_same_values(prior, fn) and prior.batch_shape == fn.batch_shape
