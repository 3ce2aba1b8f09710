"""Immediate costs of every value: what their rows leave behind, and which costs and rows they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import assert_equal, fresh, told
from torch import nn

from pyro_bpq import AllAction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.graph.scg import Plate, StochasticComputationGraph
from pyro_bpq.plan.flips import FlippedSite, Flips
from pyro_bpq.plan.structure import Structure, StructureFacts
from pyro_bpq.reruns import values as module
from pyro_bpq.rollout.features import finite_components

Graph = StochasticComputationGraph


@pytest.mark.parametrize("is_training", [True, False])
def test_buffers_of_modules_are_as_after_one_run(is_training: bool) -> None:
    after = []
    for elbo in (TraceBackpropQ_ELBO(estimator=AllAction(exact=True)), pyro.infer.Trace_ELBO()):
        fresh(1)
        layer = nn.BatchNorm1d(2).train(is_training)
        originals = dict(layer.named_buffers())

        def model(layer: nn.Module = layer) -> None:
            with pyro.plate("rows", 3):
                z = pyro.sample("z", dist.Bernoulli(torch.full((3, 2), 0.4)).to_event(1))
                mean = layer(z.reshape(-1, 2)).reshape(z.shape).sum(-1)
                pyro.sample("x", dist.Normal(mean, 1.0), obs=torch.tensor([0.4, 1.2, -0.3]))

        def guide() -> None:
            with pyro.plate("rows", 3):
                logits = pyro.param("q", torch.tensor([[0.3, -0.4], [0.1, 0.6], [0.0, 0.2]]))
                pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))

        with told(BPQWarning) as said:
            elbo.loss_and_grads(model, guide)
        if isinstance(elbo, TraceBackpropQ_ELBO):
            # Batch statistics mix the rows of the data, too. Rows that meet are not flipped.
            assert any("meet in" in text for text in said) == is_training == (not elbo.plan.flips.sites)
        assert all(layer.get_buffer(name) is buffer for name, buffer in originals.items())
        after.append({name: buffer.clone() for name, buffer in originals.items()})
    assert_equal(*after)


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
    traced: Any = SimpleNamespace(run=SimpleNamespace(loss=torch.ones(())))
    rows = module.Rows(Flips.of(Graph.from_parents({}, {}), {}), module.ALL, traced, None, {})  # type: ignore[arg-type]
    assert torch.equal(rows.excess({"x": torch.ones(2)}, {}, (), ()), torch.zeros(()))
