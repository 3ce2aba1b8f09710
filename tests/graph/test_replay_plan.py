"""What replay redraws: worked case 7 of the design, and redrawn targets against exact Q-functions."""

from __future__ import annotations

import itertools

import torch
from tabular import FORMS, REDUCTIONS, WORKED, graph_of, largest, random_program

from pyro_bpq.critics.replay_buffer import held_sites
from pyro_bpq.critics.targets import lambda_return
from pyro_bpq.graph.network import BackpropQNetwork

build = BackpropQNetwork.build


def test_case_7_loss_by_hand() -> None:
    # One stored tuple (x, a, b1, b2), y1 and y2 drawn twice.
    network = build(graph_of(*WORKED["replay"]), "chain", immediate="learned")
    q_x, y1, y2 = torch.tensor(4.0), torch.tensor([1.0, 3.0]), torch.tensor([2.5, 2.0])
    costs = dict.fromkeys(("f1", "f2"), torch.zeros(2))
    target = lambda_return(network, {"x": q_x, "y1": y1, "y2": y2}, costs, lam=0.0)["x"]
    assert target.tolist() == [3.5, 5.0]
    assert float((target - q_x).square().mean()) == (0.5**2 + 1.0**2) / 2


def test_redrawing_gives_the_q_function_on_every_scope() -> None:
    for seed, reduction, form in itertools.product(range(60), REDUCTIONS, FORMS):
        program = random_program(seed)
        network = build(program.graph, reduction, form=form)
        q = program.exact_q(network)
        for node in network.learned:
            held = held_sites(network, node.site)
            assert set(node.scope) <= held
            value = lambda_return(network, q, program.costs, lam=0.0)[node.name]
            for site in reversed([name for name in program.graph.index if name not in held]):
                axis = program.graph.index[site]
                value = (program.conditionals[site] * value).sum(axis, keepdim=True)
            assert largest(value - q[node.name]) < 1e-10, (seed, network)
