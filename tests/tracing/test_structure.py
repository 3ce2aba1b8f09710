"""Which graph a run has: when it is recorded, kept, joined, or dense."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, Case, each_case
from steps import filtered, repeat, trained

from pyro_bpq import AllAction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.record.graphs import build_graph, dense_graph
from pyro_bpq.record.recordings import Recordings
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.tracer import trace_run
from pyro_bpq.record.watch import TraceOptions


def run(case: Case, seed: int = 0) -> TracedRun:
    case.params()
    pyro.set_rng_seed(seed)
    planner = TraceBackpropQ_ELBO().planner
    return trace_run(case.model, case.guide, case.args, {}, TraceOptions(planner.choose, track=True))


def graph_of(traced: TracedRun) -> StochasticComputationGraph:
    assert traced.recorded is not None
    return build_graph(traced, traced.recorded.reads)


def recorded(case: Case, count: int, **options: Any) -> tuple[list[int], Recordings]:
    """Which of some steps were recorded, and the recordings."""
    elbo, found = TraceBackpropQ_ELBO(num_particles=1, **options), list[int]()
    case.params()
    for seed in range(count):
        before = elbo.runner.recordings.num_recorded
        pyro.set_rng_seed(seed)
        elbo.loss_and_grads(case.model, case.guide, *case.args)
        found += [seed] * (elbo.runner.recordings.num_recorded > before)
    return found, elbo.runner.recordings


def test_static_programs_are_recorded_after_4_16_and_64_steps() -> None:
    assert recorded(BY_NAME["chain"], 160)[0] == [0, 5, 22, 87, 152]


def test_programs_that_values_steer_are_recorded_at_every_step_where_graphs_are_needed() -> None:
    steps, recordings = recorded(BY_NAME["python_table"], 20, estimator=AllAction())
    assert steps == [*range(20)] and recordings.escapes


def test_dynamic_is_always_recorded() -> None:
    steps, recordings = recorded(BY_NAME["chain"], 20, structure="dynamic")
    assert steps == [*range(20)] and not recordings.escapes and not recordings.known
    assert recorded(BY_NAME["python_branch"], 1, structure="dynamic")[1].escapes


@each_case(lambda case: case.is_static)
def test_recorded_graph_is_within_the_dense_one(case: Case) -> None:
    traced = run(case)
    dense, graph = dense_graph(traced), graph_of(traced)
    assert [n.name for n in graph.nodes] == [n.name for n in dense.nodes]
    for node in graph.nodes:
        assert set(node.parents) <= set(dense.node(node.name).parents)
        assert set(graph.downstream_costs(node.name)) <= set(dense.downstream_costs(node.name))


EDGES = {
    "chain": {"b": {"a"}, "c": {"b"}, "-log p(x)": {"b", "c"}, "-log p(c)": {"b", "c"}, "log q(b)": {"a", "b"}},
    "fork": {"b": {"a"}, "c": {"a"}, "-log p(x)": {"b"}, "-log p(y)": {"c"}},
    "diamond": {"d": {"a", "b", "c"}, "-log p(x)": {"a", "b", "c", "d"}},
    "global_local": {"z": {"g"}, "-log p(x)": {"g", "z"}},
    "plate": {"z": set(), "-log p(x)": {"z"}},
    "reordered_guide": {"c": set(), "b": {"c"}, "a": {"b", "c"}, "-log p(b)": {"a", "b"}},
    "python_branch": {"-log p(x)": {"z", "w"}},
}


@pytest.mark.parametrize("name", list(EDGES))
def test_graph_has_the_edges_of_the_program(name: str) -> None:
    seeds = range(20)
    runs = (run(BY_NAME[name], seed) for seed in seeds)
    graph = graph_of(next(r for r in runs if "w" in r.run.sites) if name == "python_branch" else run(BY_NAME[name]))
    assert {key: set(graph.parents(key)) for key in EDGES[name]} == EDGES[name]


def drifting(read: Callable[[], Any]) -> tuple[Any, Any]:
    """A program whose dependencies change by a switch that no site shows."""

    def model() -> None:
        z, w = pyro.sample("z", dist.Bernoulli(0.4)), pyro.sample("w", dist.Bernoulli(0.3))
        pyro.sample("x", dist.Normal(w + (z if read() else 0.0), 1.0), obs=torch.tensor(0.7))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))
        pyro.sample("w", dist.Bernoulli(0.2))

    return model, guide


def parents_of_x(elbo: TraceBackpropQ_ELBO) -> set[str]:
    (known,) = elbo.runner.recordings.known.values()
    return set(known.graph.parents("-log p(x)"))


def test_auto_joins_what_it_sees_and_warns() -> None:
    switch = deque([False])  # an object of a library, into which nobody looks
    model, guide = drifting(lambda: switch[0])
    elbo = trained(TraceBackpropQ_ELBO(num_particles=1), model, guide, steps=5)
    switch[0] = True
    with pytest.warns(BPQWarning, match=r"-log p\(x\) also reads \['z'\].*dynamic"):
        repeat(20, elbo.loss_and_grads, model, guide)
    assert parents_of_x(elbo) == {"z", "w"}
    switch[0] = False
    with filtered("error"):
        repeat(200, elbo.loss_and_grads, model, guide)
    assert parents_of_x(elbo) == {"z", "w"}  # a superset is always right


def test_a_tensor_that_python_reads_is_looked_at_in_each_step() -> None:
    switch = torch.tensor(False)
    model, guide = drifting(lambda: switch)
    elbo = trained(TraceBackpropQ_ELBO(num_particles=1), model, guide, steps=5)
    assert parents_of_x(elbo) == {"w"}
    switch.fill_(True)
    with filtered("error"):
        elbo.loss_and_grads(model, guide)
    assert parents_of_x(elbo) == {"z", "w"}


def test_log_q_reads_nothing_that_was_drawn_later() -> None:
    # All views are of one table: each depends on what chose it, and on nothing that chose another one.
    def chain() -> None:
        table, z = pyro.param("table", torch.zeros(3, 2)), torch.tensor(0)
        for t in range(3):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=table[t, z.long()]))

    elbo = trained(TraceBackpropQ_ELBO(), chain, chain, steps=1)
    assert [elbo.graph.cost(f"log q(z_{t})").parents for t in range(3)] == [("z_0",), ("z_0", "z_1"), ("z_1", "z_2")]
