"""Which graph a run has: when it is tracked, cached, merged, or dense."""

from __future__ import annotations

import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, Case, each_case
from pyro_bpq.tracing.structure_cache import STRUCTURES, StructureCache, dense_graph, merged_graph
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning, OptionError
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


def fresh(number: int, track: bool) -> TracedRun:
    """A run of two sites, the second of which does not read the first, with names of its own."""

    def program() -> None:
        pyro.sample(f"a_{number}", dist.Bernoulli(0.5))
        pyro.sample(f"b_{number}", dist.Bernoulli(0.5))

    choose = TraceBackpropQ_ELBO().planner.choose
    return trace_run(program, program, (), {}, TraceOptions(choose, track=track))


@pytest.mark.parametrize("every", [1, 2, 5])
def test_programs_with_new_names_do_not_stay_dense(every: int) -> None:
    cache, dense = StructureCache("auto"), []
    for number in range(60):
        if number % every == every - 1:
            graph = cache.graph(fresh(number, cache.wants_tracking()))
            dense.append(f"a_{number}" in graph.node(f"b_{number}").parents)
        else:
            cache.graph(run(BY_NAME["chain"], cache.wants_tracking()))
    assert sum(dense) <= 3 and not any(dense[5:])
    assert len(dense) >= 10


def test_new_names_now_and_then_are_tracked_for_a_while() -> None:
    cache, tracked = StructureCache("auto"), []
    for number in range(40):
        tracked.append(cache.wants_tracking())
        cache.graph(fresh(number, tracked[-1]) if number in (8, 30) else run(BY_NAME["chain"], tracked[-1]))
    # Dense at 8 and 30, then as long as nothing new has come twice in a row, and four times.
    assert [n for n, track in enumerate(tracked) if track] == [0, 1, 2, 9, 10, 21, 31, 32, 33, 34]


def test_what_is_used_is_not_forgotten() -> None:
    cache = StructureCache("auto")
    for _ in range(4):
        cache.graph(run(BY_NAME["chain"], cache.wants_tracking()))
    key = run(BY_NAME["chain"], False).key
    for number in range(300):
        cache.graph(fresh(number, True))
        if number % 100 == 0:
            cache.graph(run(BY_NAME["chain"], number % 200 == 0))
    assert key in cache.graphs and fresh(0, False).key not in cache.graphs
    assert len(cache.graphs) == len(cache.reads) == 256


def test_rows_are_looked_at_in_first_runs_and_later_looks() -> None:
    cache = StructureCache("dynamic")
    looks = []
    for i in range(102):
        if cache.follows_rows:
            looks.append(i)
        cache.graph(run(BY_NAME["plate"], True))
    assert looks == [0, 10, 100]
    cache.crosses = True
    assert not cache.follows_rows


def test_dense_looks_once_for_escapes() -> None:
    cache = StructureCache("dense")
    assert steps(cache, BY_NAME["chain"], 10) == [True] + [False] * 9
    assert not cache.is_dynamic(run(BY_NAME["chain"], False))
    # A structure that nobody has looked at may be steered by values.
    assert cache.is_dynamic(run(BY_NAME["diamond"], False)) and not cache.cuts_plates(run(BY_NAME["plate"], False))


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
    elbo = TraceBackpropQ_ELBO()
    for _ in range(5):
        elbo.loss_and_grads(model, guide)
    switch.fill_(True)
    with pytest.warns(BPQWarning, match=r"-log p\(x\) also reads \['z'\].*dynamic"):
        for _ in range(20):
            elbo.loss_and_grads(model, guide)
    (graph,) = elbo.runner.structure.graphs.values()
    assert set(graph.parents("-log p(x)")) == {"z", "w"}
    switch.fill_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(200):
            elbo.loss_and_grads(model, guide)
    (graph,) = elbo.runner.structure.graphs.values()
    assert set(graph.parents("-log p(x)")) == {"z", "w"}  # a superset is always right


def test_graph_of_an_unknown_structure_is_dense_until_it_is_tracked() -> None:
    cache = StructureCache("auto")
    steps(cache, BY_NAME["chain"], 4)
    traced = run(BY_NAME["fork"], cache.wants_tracking())
    assert traced.reads is None
    assert cache.graph(traced) == dense_graph(traced)
    assert cache.wants_tracking()


@pytest.mark.parametrize("mode", STRUCTURES)
def test_graph_without_learning_changes_nothing(mode: str) -> None:
    cache = StructureCache(mode)
    before = dict(vars(cache))
    first = cache.graph(run(BY_NAME["python_branch"], True), learn=False)
    cache.graph(run(BY_NAME["chain"], False), learn=False)
    assert cache.graph(run(BY_NAME["python_branch"], True), learn=False) == first
    assert vars(cache) == before and not cache.graphs


def test_merge_is_the_union() -> None:
    cache = StructureCache("dynamic")
    model, guide, switch = drifting()
    case = Case("drifting", model, guide, {}, 4)
    graphs = []
    for on in (False, True):
        switch.fill_(on)
        graphs.append(cache.graph(run(case, True)))
    assert graphs[0] != graphs[1]
    assert merged_graph(run(case, True), graphs) == graphs[1]


def test_particles_with_different_graphs_share_the_union() -> None:
    calls = []

    def model() -> None:
        calls.append(None)
        z, w = pyro.sample("z", dist.Bernoulli(0.4)), pyro.sample("w", dist.Bernoulli(0.3))
        pyro.sample("x", dist.Normal(w + (z if len(calls) % 2 else 0.0), 1.0), obs=torch.tensor(0.7))

    elbo = TraceBackpropQ_ELBO(num_particles=2, structure="dynamic", estimator=ScoreFunction())
    elbo.loss_and_grads(model, drifting()[1])
    (plan,) = elbo.runner.plans.plans.values()
    assert set(plan.graph.parents("-log p(x)")) == {"z", "w"}


def test_caches_stay_bounded() -> None:
    def model(n: int) -> None:
        pyro.sample("z", dist.Bernoulli(torch.full((n,), 0.4)).to_event(1))

    def guide(n: int) -> None:
        pyro.sample("z", dist.Bernoulli(torch.full((n,), 0.3)).to_event(1))

    for mode in ("auto", "dense"):
        elbo = TraceBackpropQ_ELBO(structure=mode, estimator=ScoreFunction())
        for n in range(1, 300):
            elbo.differentiable_loss(model, guide, n)
        assert len(elbo.runner.structure.graphs) <= 256 and len(elbo.runner.plans.plans) <= 64


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


def test_unknown_mode_raises() -> None:
    with pytest.raises(OptionError, match="'dynamic'"):
        StructureCache("statc")


def test_log_q_reads_nothing_that_was_drawn_later() -> None:
    # All views are of one table: each depends on what chose it, and on nothing that chose another one.
    def chain() -> None:
        table, z = pyro.param("table", torch.zeros(3, 2)), torch.tensor(0)
        for t in range(3):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=table[t, z.long()]))

    pyro.clear_param_store()
    elbo = TraceBackpropQ_ELBO()
    elbo.loss_and_grads(chain, chain)
    assert [elbo.graph.cost(f"log q(z_{t})").parents for t in range(3)] == [
        ("z_0",),
        ("z_0", "z_1"),
        ("z_1", "z_2"),
    ]
