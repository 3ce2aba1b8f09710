"""Which graph a run has: when it is tracked, cached, merged, or dense."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, Case, each_case
from pyro_bpq.tracing.structure_cache import StructureCache, dense_graph
from steps import filtered, repeat, trained
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.tracer import trace_run
from pyro_bpq.tracing.watch import TraceOptions


def run(case: Case, track: bool, seed: int = 0) -> TracedRun:
    case.params()
    pyro.set_rng_seed(seed)
    planner = TraceBackpropQ_ELBO().planner
    return trace_run(case.model, case.guide, case.args, {}, TraceOptions(planner.choose, track=track))


def steps(cache: StructureCache, case: Case, count: int) -> list[bool]:
    """Runs some steps; returns which of them were tracked."""
    tracked = []
    for seed in range(count):
        tracked.append(cache.wants_tracking())
        cache.graph(run(case, tracked[-1], seed))
    return tracked


def test_static_programs_are_tracked_three_times_and_looked_at_again() -> None:
    tracked = steps(StructureCache("auto"), BY_NAME["chain"], 30)
    assert tracked == [True] * 3 + [False] * 10 + [True] + [False] * 16


def test_programs_whose_values_escape_stay_tracked() -> None:
    cache = StructureCache("auto")
    assert all(steps(cache, BY_NAME["python_table"], 20))
    assert cache.is_dynamic(run(BY_NAME["python_table"], True))


def test_dynamic_is_always_tracked() -> None:
    cache = StructureCache("dynamic")
    assert all(steps(cache, BY_NAME["chain"], 20))
    assert not cache.is_dynamic(run(BY_NAME["chain"], True)) and not cache.graphs
    steps(cache, BY_NAME["python_branch"], 1)
    assert cache.escapes


@each_case(lambda case: case.is_static)
def test_tracked_graph_is_within_the_dense_one(case: Case) -> None:
    traced = run(case, True)
    dense, graph = dense_graph(traced), StructureCache("auto").graph(traced)
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
    runs = (run(BY_NAME[name], True, seed) for seed in seeds)
    traced = next(r for r in runs if "w" in r.run.sites) if name == "python_branch" else run(BY_NAME[name], True)
    graph = StructureCache("auto").graph(traced)
    assert {key: set(graph.parents(key)) for key in EDGES[name]} == EDGES[name]


def drifting() -> tuple[Any, Any, Tensor]:
    """A program whose dependencies change by a switch that no site and no plain value shows."""
    switch = torch.tensor(False)

    def model() -> None:
        z, w = pyro.sample("z", dist.Bernoulli(0.4)), pyro.sample("w", dist.Bernoulli(0.3))
        pyro.sample("x", dist.Normal(w + (z if switch else 0.0), 1.0), obs=torch.tensor(0.7))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))
        pyro.sample("w", dist.Bernoulli(0.2))

    return model, guide, switch


def test_auto_merges_what_it_sees_and_warns() -> None:
    model, guide, switch = drifting()
    elbo = trained(TraceBackpropQ_ELBO(), model, guide, steps=5)
    switch.fill_(True)
    with pytest.warns(BPQWarning, match=r"-log p\(x\) also reads \['z'\].*dynamic"):
        repeat(20, elbo.loss_and_grads, model, guide)
    (graph,) = elbo.runner.structure.graphs.values()
    assert set(graph.parents("-log p(x)")) == {"z", "w"}
    switch.fill_(False)
    with filtered("error"):
        repeat(200, elbo.loss_and_grads, model, guide)
    (graph,) = elbo.runner.structure.graphs.values()
    assert set(graph.parents("-log p(x)")) == {"z", "w"}  # a superset is always right


def test_control_flow_is_not_a_matter_of_luck() -> None:
    # The exact gradient by hand: the branch's cost reaches the site through Python only.
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.factor("f", torch.tensor(-2.0 if z.item() else -0.5))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.0))))

    gradients = []
    for seed in range(6):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        elbo = TraceBackpropQ_ELBO(estimator=ScoreFunction())
        elbo.loss_and_grads(model, guide)
        gradient = pyro.param("q").grad
        assert isinstance(gradient, Tensor)
        gradients.append(round(float(gradient), 9))
    # (cost - 0) * (z - 1/2): 2 * 1/2 and 0.5 * -1/2.
    assert set(gradients) == {1.0, -0.25}


def test_log_q_reads_nothing_that_was_drawn_later() -> None:
    # All views are of one table: each depends on what chose it, and on nothing that chose another one.
    def chain() -> None:
        table, z = pyro.param("table", torch.zeros(3, 2)), torch.tensor(0)
        for t in range(3):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=table[t, z.long()]))

    elbo = trained(TraceBackpropQ_ELBO(), chain, chain, steps=1)
    assert [elbo.graph.cost(f"log q(z_{t})").parents for t in range(3)] == [("z_0",), ("z_0", "z_1"), ("z_1", "z_2")]
