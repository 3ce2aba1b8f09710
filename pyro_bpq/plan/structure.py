r"""What a plan is made for: a run, its graph, what else is known of its structure; what this tells, what runs cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.graph.scg import (
    CostNode,
    Plate,
    StochasticComputationGraph,
    StochasticNode,
    cost_of_guide,
    cost_of_model,
)
from pyro_bpq.record.components import Pattern, Patterns
from pyro_bpq.record.operators import effects_of
from pyro_bpq.record.recorded import Recorded
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.values import Node, Value, values_in
from pyro_bpq.record.watch import carried, samples
from pyro_bpq.rollout.features import Components, have_same_values
from pyro_bpq.step.classes import Known

# Seconds of one CPU and thread: of a call of an operator with its Python, of an operation of a matrix product, of one
# of a convolution, of a byte of a result, and of a step's Python that no operator is called for.
OPERATOR, FLOP, CONVOLVED, BYTE, STEP = 8.3e-6, 1.3e-11, 3.2e-11, 3.3e-10, 1.8e-3

Shapes = Sequence[Any]


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
    is_reused: bool = False  # whether the guide moves further on a step's runs, by the probabilities of their values
    sums: bool = False  # whether the loss is to be summed over all values
    # A recorded run. It tells structures apart only by the sites whose other values give the costs that read them.
    recorded: Recorded | None = field(default=None, compare=False)
    cuts: tuple[int, ...] = ()
    # Looks whether costs have gradients to the values of a site, where a rule asks; ``None``: they have.
    has_slope: Callable[[str], bool] | None = field(default=None, compare=False)


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

    @cached_property
    def readable(self) -> dict[str, tuple[str, ...]]:
        """For each site the immediate costs of other sites of the model that are known at its other values."""

        def is_readable(name: str, cost: str) -> bool:
            is_other = cost not in (cost_of_guide(name), cost_of_model(name)) and not self.graph.cost(cost).is_of_guide
            return is_other and self.knows(name, cost)

        return {n: tuple(c for c in costs if is_readable(n, c)) for n, costs in self.graph.last_costs.items()}

    def knows(self, name: str, cost: str) -> bool:
        """Whether a cost is known, row by row, where a site has another value in all rows of its plates at once."""
        recorded = self.facts.recorded
        can_cut = recorded is not None and recorded.can_cut(cost, name)
        return can_cut and self.keeps_rows(name, self.graph.cost(cost).plates)

    def keeps_rows(self, name: str, plates: Sequence[Plate]) -> bool:
        """Whether what has these plates tells one row of a site from the others."""
        own = {plate.name for plate in self.graph.node(name).plates}
        return not own or (self.facts.cuts_plates and own <= {plate.name for plate in plates})

    def own_costs(self, name: str) -> dict[Known, str]:
        """The own costs of a finite site that follow from its distributions alone."""
        traced, graph, cost, found = self.traced, self.graph, cost_of_model(name), dict[Known, str]()
        if traced.infos[name].components is None:
            return found
        fn, prior = traced.run.sites[name].fn, traced.run.sites[name].prior
        has_like_prior = prior is not None and have_same_values(prior, fn) and prior.batch_shape == fn.batch_shape
        if has_like_prior and cost in self.immediate[name] and graph.cost(cost).plates == graph.node(name).plates:
            found[Known.LOG_P] = cost
        if not (name in traced.untraced or traced.only_costs):
            found[Known.LOG_Q] = cost_of_guide(name)
        return found

    def is_complete(self, name: str, evaluated: Collection[str]) -> bool:
        """Whether nothing of a site's cost-to-go is unknown at its other values once some costs are evaluated there."""
        return {*evaluated, *self.own_costs(name).values()}.issuperset(self.graph.downstream_costs(name))

    def charged(self, name: str, evaluated: Collection[str] = ()) -> frozenset[str]:
        """The costs that are charged to single components of a site, if there are any but its own log-probabilities."""
        costs = self.graph.downstream_costs(name)
        found = frozenset(cost for cost in costs if (name, cost) in self.patterns and cost not in evaluated)
        return found if found - {cost_of_guide(name), cost_of_model(name)} else frozenset()

    def is_separate(self, name: str) -> bool:
        """Whether every cost of a site reads one of its components."""
        others = {*self.graph.downstream_costs(name)} - {cost_of_guide(name), cost_of_model(name)}
        return self.size(name) == 1 or all((name, cost) in self.patterns for cost in others)

    def size(self, name: str) -> int:
        """Number of components of finitely many values."""
        components = self.traced.infos[name].components
        return 0 if components is None else components.size

    def num_rows(self, name: str) -> int:
        """Number of rows of the plates of a site."""
        return math.prod(self.traced.plate_sizes[plate] for plate in self.graph.node(name).plates)

    def crossable(self) -> dict[str, bool]:
        """The log-probabilities that may be costed beside another particle's past, and whether they are the guide's.

        All values of their sites occur under any law: the support is finite. A model's law that reads values of the
        guide itself may read the value that it scores.
        """
        traced, graph = self.traced, self.graph
        found: dict[str, bool] = {}
        for name, site in traced.run.sites.items() if not traced.enumerated else ():
            cost = cost_of_model(name)
            if not self.size(name) or name in traced.untraced or not is_plated(traced.guide_trace.nodes[name]):
                continue
            found[cost_of_guide(name)] = True
            if site.prior is not None and have_same_values(site.prior, site.fn):
                if graph.cost(cost).plates == graph.node(name).plates and is_plated(traced.model_trace.nodes[name]):
                    found[cost] = False
        return {cost: of_guide for cost, of_guide in found.items() if cost not in self.facts.self_read}


def check_gradients(traced: TracedRun) -> None:
    """Checks that costs carry gradients to the reparameterised sites that they read; tracked runs only."""
    for cost in traced.user_costs:
        if traced.reads is None or traced.run.costs[cost].requires_grad:
            continue
        for name in sorted(traced.reads[cost]):
            if traced.run.sites[name].value.requires_grad:
                raise UnsupportedSiteError(
                    f"Site {name!r} is reparameterised, but {cost} depends on its value without a gradient. Write "
                    f'infer={{"bpq": {{"estimator": ScoreFunction()}}}} at the site or config_bpq(guide, '
                    "estimator=ScoreFunction()), LAXQ() in its place for a learned Q of the value, or make the cost "
                    "differentiable."
                )


def num_reads(traced: TracedRun, name: str) -> int:
    """The values of all components of a site times the observed elements of a row.

    Leave-one-out compares the costs of whole values. Its noise grows with the number of components, and with the data
    that they explain. Slopes compare the costs of single components, so their noise hardly grows.
    """
    components = traced.infos[name].components
    own = {frame.name for frame in traced.guide_trace.nodes[name]["cond_indep_stack"]}
    observed = 0
    for site in samples(traced.model_trace).values():
        if site["is_observed"]:
            others = [frame.size for frame in site["cond_indep_stack"] if frame.name not in own]
            observed += site["fn"].event_shape.numel() * math.prod(others)
    return 0 if components is None else components.size * components.cardinality * observed


def is_plated(site: Any) -> bool:
    """Whether all batch dimensions of a traced site are plates, or that of the particles."""
    dims = {frame.dim for frame in site["cond_indep_stack"] if frame.vectorized}
    return all(size == 1 or -1 - i in dims for i, size in enumerate(reversed(site["fn"].batch_shape)))


# Sums over all values.


@dataclass(frozen=True)
class SumPlan:
    r"""The tables of a program that is summed over all values of all its sites, in one run and without a draw.

    The law of a site with ``V`` values is a table ``q(v | u)``, if it reads at most one other such site. So is every
    cost that reads no more than one. One run of ``V`` rows fills all these tables: in row ``u`` every site has its
    value ``u``, and the distributions tell the rest, since they know their log-probabilities at all values.
    Reparameterised sites that read none of these sites are drawn once, for all rows.
    """

    components: Mapping[str, Components]  # values of each site, in the order of draws
    parents: Mapping[str, str | None]  # the site that the law of a site reads; ``None`` if it reads none
    priors: Mapping[str, str | None]  # the site that the model's law of a site reads
    others: Mapping[str, str | None]  # the site that another cost of a model or guide site reads, by name of the cost
    shared: frozenset[str] = frozenset()  # reparameterised sites that are drawn once, for all rows

    @property
    def rows(self) -> int:
        """Number of rows of the run."""
        return max(split.cardinality for split in self.components.values())


def sum_plan(structure: Structure, max_support: int) -> SumPlan | None:
    """Plans the sum; ``None`` if a site has more values or a law or a cost reads more."""
    traced, graph = structure.traced, structure.graph
    if structure.facts.self_read or traced.is_dear or traced.untraced or traced.enumerated:
        return None
    shared = frozenset(name for name, info in traced.infos.items() if info.has_rsample)
    names = [name for name in traced.infos if name not in shared]
    own = {cost_of_guide(name): name for name in names} | {cost_of_model(name): name for name in names}
    reads = dict[str, str | None]()
    readers: list[StochasticNode | CostNode] = [*graph.nodes, *graph.costs]
    for reader in readers:
        read = [name for name in reader.parents if name not in shared and name != own.get(reader.name)]
        # In every row of whose plates there must be something that reads it.
        if len(read) > 1 or not all(set(graph.node(name).plates) <= set(reader.plates) for name in read):
            return None
        reads[reader.name] = next(iter(read), None)
    for name in shared:
        record = traced.run.sites[name]
        if reads[name] or record.score is not None or carried(record.value):
            return None
    components = dict[str, Components]()
    for name in names:
        split, record = traced.infos[name].components, traced.run.sites[name]
        if split is None or split.size != 1 or not 2 <= split.cardinality <= max_support:
            return None
        if not is_plated(traced.guide_trace.nodes[name]) or reads.get(cost_of_guide(name)) not in (None, reads[name]):
            return None
        if cost_of_model(name) in reads and not (record.prior and have_same_values(record.prior, record.fn)):
            return None
        components[name] = split
    priors = {name: reads[cost_of_model(name)] for name in names if cost_of_model(name) in reads}
    others = {cost.name: reads[cost.name] for cost in graph.costs if cost.name not in own}
    return SumPlan(components, {name: reads[name] for name in names}, priors, others, shared) if names else None


# What runs cost, counted instead of timed: a count is the same in every run and on every machine, a clock is not. Only
# ratios of such seconds are used.


class Work(NamedTuple):
    """Seconds that rows of one call share, and seconds that each row adds."""

    shared: float = 0.0
    added: float = 0.0

    def seconds(self, rows: int = 1) -> float:
        """Estimated seconds of so many rows at once."""
        return self.shared + rows * self.added


def work_of_run(recorded: Recorded) -> Work:
    """The cost of a recorded run."""
    run = recorded.recording
    found: Work = recorded.kept("work", lambda: work_of(run.nodes, run.shapes, run.dtypes))
    return found


def work_at(recorded: Recorded, costs: Iterable[str], sites: Iterable[str]) -> Work:
    """The cost of a row of :meth:`Bound.at_rows`."""
    run = recorded.recording
    function = run.cut([recorded.named[name] for name in costs], sees_all=True)
    return work_of(function.reading({recorded.drawn[name].value for name in sites}), run.shapes, run.dtypes)


def work_of(nodes: Iterable[Node], shapes: Shapes, dtypes: Sequence[torch.dtype]) -> Work:
    """The cost of some operators."""
    shared = added = 0.0
    for node in nodes:
        kind = effects_of(node.func)
        shared += OPERATOR
        if kind.is_view:
            continue
        for value in values_in(node.result):
            if shapes[value] is not None:
                added += BYTE * prod(shapes[value]) * dtypes[value].itemsize
        rule = _RULES.get(kind.name)
        if rule is not None:
            added += rule(node, shapes)
        if (times := _DRAWN.get(kind.name)) and node.args[0].__class__ is Value:
            added += times * BYTE * prod(shapes[node.args[0]]) * dtypes[node.args[0]].itemsize
    return Work(shared, added)


def _product(node: Node, shapes: Shapes) -> float:
    left, right = [shapes[value] for value in values_in(node.args)][-2:]
    return FLOP * 2 * prod(left) * (right[-1] if len(right) > 1 else 1)


def _convolution(node: Node, shapes: Shapes) -> float:
    value, weight, *_ = node.args
    result = next(values_in(node.result))
    # Channels come in full blocks of 16, as CPUs compute them.
    first, second = (16 * -(-size // 16) for size in shapes[weight][:2])
    image = shapes[value] if node.args[6] else shapes[result]
    return CONVOLVED * 2 * shapes[value][0] * prod(image[2:]) * first * second * prod(shapes[weight][2:])


def _attention(node: Node, shapes: Shapes) -> float:
    query, key = node.args[:2]
    return FLOP * 4 * prod(shapes[query]) * shapes[key][-2]


def _recurrent(node: Node, shapes: Shapes) -> float:
    value, *weights = [*values_in(node.args)]
    return FLOP * 2 * prod(shapes[value][:-1]) * sum(prod(shapes[weight]) for weight in weights[:2])


_RULES: Mapping[str, Callable[[Node, Shapes], float]] = MappingProxyType(
    {
        **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"), _product),
        "convolution": _convolution,
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "mkldnn_rnn_layer": _recurrent,
    }
)
# Operators that draw: how many times the bytes of their argument are written in the time.
_DRAWN: Mapping[str, int] = MappingProxyType({"bernoulli": 4, "multinomial": 9, "_standard_gamma": 20})
