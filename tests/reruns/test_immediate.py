"""Immediate costs of every value by one extra run, against running the model at each value."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import Case, coin, each_case
from pyro import poutine
from steps import fresh, repeat
from torch import Tensor, nn

from pyro_bpq import AllAction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.graph.scg import Plate, StochasticComputationGraph
from pyro_bpq.plan.flips import FlippedSite, Flips
from pyro_bpq.plan.structure import Structure, StructureFacts
from pyro_bpq.record.watch import PARTICLES
from pyro_bpq.reruns import flips as module
from pyro_bpq.rollout.features import finite_components
from pyro_bpq.testing import assert_unbiased

Graph = StochasticComputationGraph


class Spy:
    """Records what the extra runs of the model yielded, and the arguments that they got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        inner = module.flipped_costs

        def spy(*args: Any, **kwargs: Any) -> Any:
            found = inner(*args, **kwargs)
            self.calls.append((found, args))
            return found

        monkeypatch.setattr("pyro_bpq.objectives.runner.flipped_costs", spy)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def log_probs(case: Case, values: dict[str, Any], subsamples: dict[str, Any], particles: int) -> dict[str, Tensor]:
    """Log-probabilities of the model's sites at given values."""
    program: Any = case.model
    if particles > 1:
        program = pyro.plate(PARTICLES, particles, dim=-3)(program)
    trace = poutine.trace(poutine.condition(program, {**values, **subsamples})).get_trace(*case.args)
    trace.compute_log_prob()
    return {name: site["log_prob"].detach() for name, site in trace.nodes.items() if site["type"] == "sample"}


def brute_force(case: Case, args: tuple[Any, ...], run: int, name: str) -> Tensor:
    """The table of a site: each component of each plate row set alone to each of its values."""
    plan, values, rollout = args
    graph, one, split = plan.graph, values.traced[run], plan.flips.sites[name].components
    values = {
        n: s["value"].detach()
        for n, s in one.model_trace.nodes.items()
        if s["type"] == "sample" and not s["is_observed"]
    }
    value, fn = values[name], one.run.sites[name].fn
    index = split.index(value, fn)
    particles = rollout.num_particles if rollout.is_vectorized else 1
    shape = rollout.batch_shape(graph.node(name).plates)
    shape = shape if rollout.is_vectorized else (1, *shape[1:])
    table = torch.zeros(*shape, split.size, split.cardinality)
    flat = index.reshape(-1, split.size)
    view = table.reshape(-1, split.size, split.cardinality)
    for row, d, k in itertools.product(range(flat.shape[0]), range(split.size), range(split.cardinality)):
        changed = flat.clone()
        changed[row, d] = k
        new = split.value(changed.reshape(index.shape), fn).to(value.dtype)
        found = log_probs(case, {**values, name: new}, dict(one.subsamples), particles)
        total = torch.zeros(())
        for cost in plan.flips.costs[name]:
            log_prob = found[cost[len("-log p(") : -1]]
            # Costs of the other rows do not depend on this one: keep those of its own row.
            dims = [p.dim for p in graph.cost(cost).plates if p not in graph.node(name).plates]
            summed = -log_prob.sum(dims, keepdim=True) if dims else -log_prob
            total = total + summed.expand(shape).reshape(-1)[row] if flat.shape[0] > 1 else total + summed.sum()
        view[row, d, k] = total
    return table


PARTICLES_OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_particles": 2},
    {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 2},
]


@pytest.mark.parametrize("options", PARTICLES_OPTIONS, ids=["one", "sequential", "vectorised"])
@each_case(lambda case: case.is_static)
def test_flipped_costs_equal_runs_at_each_value(case: Case, options: dict[str, Any], spy: Spy) -> None:
    elbo = TraceBackpropQ_ELBO(estimator=AllAction(exact=True), **options)
    case.params()
    for seed in range(3):
        pyro.set_rng_seed(seed)
        elbo.loss_and_grads(case.model, case.guide, *case.args)
    if not spy.calls:
        pytest.skip("no site with an immediate cost of the model")
    for (tables, shifts), args in spy.calls:
        for name, table in tables.items():
            torch.testing.assert_close(shifts[name], torch.zeros_like(shifts[name]))
            expected = torch.cat([brute_force(case, args, i, name) for i in range(len(args[1].traced))])
            torch.testing.assert_close(table.expand(expected.shape), expected)


# Programs that cannot be run with a dimension to the left of their plates


def guide() -> None:
    with pyro.plate("rows", 3):
        a = coin("a", pyro.param("qa", torch.tensor([0.3, -0.2, 0.4])))
        coin("b", pyro.param("qb", torch.tensor(0.4)) * (a - 0.3))


def reshaping_model() -> None:
    with pyro.plate("rows", 3):
        a, b = coin("a", torch.tensor(0.2)), coin("b", torch.tensor(-0.3))
        z = torch.stack((a, b), -1).reshape(3, 2)
        pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=torch.tensor([0.1, 1.2, 2.0]))


def summing_model() -> None:
    rows = pyro.plate("rows", 3)
    with rows:
        a, b = coin("a", torch.tensor(0.2)), coin("b", torch.tensor(-0.3))
    # The first dimension is meant to be that of the rows.
    pyro.sample("x", dist.Normal((a * b).sum(0), 1.0), obs=torch.tensor(1.2))
    with rows:
        pyro.sample("y", dist.Normal(a + b, 1.0), obs=torch.tensor([0.1, 1.2, 2.0]))


def matrix_model() -> None:
    with pyro.plate("rows", 3):
        a, b = coin("a", torch.tensor(0.2)), coin("b", torch.tensor(-0.3))
        mixed = torch.mv(torch.diag(torch.tensor([1.0, 0.3, 0.7])), a)
        pyro.sample("x", dist.Normal(mixed + b, 1.0), obs=torch.tensor([0.1, 1.2, 2.0]))


def branching_model() -> None:
    with pyro.plate("rows", 3):
        a, b = coin("a", torch.tensor(0.2)), coin("b", torch.tensor(-0.3))
        shift = 0.7 if bool(b.sum() > 1) else -0.4
        pyro.sample("x", dist.Normal(a + shift, 1.0), obs=torch.tensor([0.1, 1.2, 2.0]))


def wrong_dimension_model() -> None:
    # Runs with any number of rows in front, but takes the first one for the rows of the plate.
    with pyro.plate("rows", 3):
        a, b = coin("a", torch.tensor(0.2)), coin("b", torch.tensor(-0.3))
        pyro.sample("x", dist.Normal(a + b - 0.0 * a.mean(0) + 0.1 * a.dim(), 1.0), obs=torch.tensor([0.1, 1.2, 2.0]))


def buffer_model() -> None:
    """Writes into memory of its own, which a hidden dimension does not fit into."""
    with pyro.plate("rows", 3):
        a, b = coin("a", torch.tensor(0.2)), coin("b", torch.tensor(-0.3))
        memory = torch.zeros(torch.broadcast_shapes(a.shape, b.shape))
        memory[...] = a + b
        pyro.sample("x", dist.Normal(memory, 1.0), obs=torch.tensor([0.1, 1.2, 2.0]))


def buffer_from_the_left_model() -> None:
    """The same, and takes the first dimension for that of the rows."""
    with pyro.plate("rows", 3):
        a, b = coin("a", torch.tensor(0.2)), coin("b", torch.tensor(-0.3))
        memory = torch.zeros(3)
        for i in range(3):
            memory[i] = (a + b)[i]
        pyro.sample("x", dist.Normal(memory, 1.0), obs=torch.tensor([0.1, 1.2, 2.0]))


@pytest.mark.parametrize("exact", [True, "auto", False])
@pytest.mark.parametrize(
    "model",
    [
        *(reshaping_model, summing_model, matrix_model, branching_model, wrong_dimension_model),
        *(buffer_model, buffer_from_the_left_model),
    ],
)
def test_models_that_do_not_broadcast_stay_unbiased(model: Callable[[], None], exact: Any) -> None:
    elbo = TraceBackpropQ_ELBO(estimator=AllAction(exact=exact))
    # Two of them put rows together, by a matrix product and by a mean; of the one that branches it is not known.
    meets = model in (matrix_model, wrong_dimension_model, branching_model)
    with (
        pytest.warns(BPQWarning, match="Rows of the plate|drawn in the plate 'rows', leave torch")
        if meets
        else contextlib.nullcontext()
    ):
        repeat(8, elbo.loss_and_grads, model, guide)
    elbo.eval()
    assert_unbiased(elbo, model, guide)


# What the extra run must not leave behind, or be fooled by


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(2, 4), layer, nn.Linear(4, 1)

    def forward(self, z: Tensor) -> Tensor:
        hidden = self.first(z)
        return self.last(self.layer(hidden.reshape(-1, 4)).reshape(hidden.shape)).squeeze(-1)


def make(net: nn.Module, register: bool) -> tuple[Any, Any]:
    def model(data: Tensor) -> None:
        if register:
            pyro.module("net", net)
        with pyro.plate("rows", len(data)):
            z = pyro.sample("z", dist.Bernoulli(torch.full((len(data), 2), 0.4)).to_event(1))
            pyro.sample("x", dist.Normal(net(z), 1.0), obs=data)

    def guide(data: Tensor) -> None:
        with pyro.plate("rows", len(data)):
            logits = pyro.param("q", torch.tensor([[0.3, -0.4], [0.1, 0.6], [0.0, 0.2]]))
            pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))

    return model, guide


DATA = torch.tensor([0.4, 1.2, -0.3], dtype=torch.float64)


@pytest.mark.parametrize("register", [True, False])
@pytest.mark.parametrize("is_training", [True, False])
def test_buffers_of_modules_are_as_after_one_run(register: bool, is_training: bool, spy: Spy) -> None:
    after = []
    for elbo in (TraceBackpropQ_ELBO(estimator=AllAction(exact=True)), pyro.infer.Trace_ELBO()):
        torch.manual_seed(0)
        net = Net(nn.BatchNorm1d(4)).train(is_training)
        originals = dict(net.layer.named_buffers())
        model, guide = make(net, register)
        fresh(1)
        is_ours = isinstance(elbo, TraceBackpropQ_ELBO)
        # Batch statistics mix the rows of the data too.
        with pytest.warns(BPQWarning, match="meet in") if is_ours and is_training else contextlib.nullcontext():
            elbo.loss_and_grads(model, guide, DATA)
        assert all(net.layer.get_buffer(name) is buffer for name, buffer in originals.items())
        after.append({name: buffer.clone() for name, buffer in originals.items()})
    # Rows that meet are not flipped; their runs at other values leave buffers alone.
    assert len(spy.calls) == (not is_training) and all(found is not None for found, _ in spy.calls)
    for name, buffer in after[1].items():
        assert torch.equal(after[0][name], buffer)


# Structure


def test_immediate_costs_go_to_the_node_that_is_sampled_last() -> None:
    graph = Graph.from_parents({"x": [], "y": ["x"], "z": []}, {"f": ["x"], "g": ["x", "z"], "h": [], "k": ["y", "x"]})
    assert graph.last_costs == {"x": ("f",), "y": ("k",), "z": ("g",)}


def test_immediate_model_costs_need_the_plates_of_the_node() -> None:
    rows = Plate("rows", -1)
    graph = Graph.from_parents(
        {"z": []},
        {"log q(z)": ["z"], "-log p(z)": ["z"], "-log p(x)": ["z"], "-log p(total)": ["z"]},
        {"z": [rows], "log q(z)": [rows], "-log p(z)": [rows], "-log p(x)": [rows]},
    )
    structure = Structure(None, graph, StructureFacts(recorded=SimpleNamespace(can_cut=lambda cost, site: True)))
    assert structure.readable == {"z": ("-log p(x)",)}


def test_flip_plan_shares_rows_where_no_cost_reads_both() -> None:
    three = finite_components(dist.Categorical(torch.ones(3)))
    two = finite_components(dist.Bernoulli(torch.ones(4) / 2).to_event(1))
    assert three is not None and two is not None
    graph = Graph.from_parents({"a": [], "b": ["a"], "c": ["b"]}, {"fa": ["a"], "fb": ["b"], "fc": ["b", "c"]})
    components = {"a": three, "b": two, "c": three}
    plan = Flips.of(graph, {n: FlippedSite(own, own.size, {f"f{n}": ()}, ()) for n, own in components.items()})
    # a and b share rows 1..4 (b needs four of them, a two); c, whose cost reads b, has rows 5 and 6.
    assert plan.start == {"a": 1, "b": 1, "c": 5} and plan.rows == 7


def test_nothing_known_at_other_values_is_no_excess() -> None:
    assert torch.equal(module.excess({"x": torch.ones(2)}, {}, {}, (), ()), torch.zeros(()))
