"""What replay redraws: redrawn targets against exact Q-functions."""

from __future__ import annotations

import itertools

from tabular import FORMS, REDUCTIONS, largest, random_program

from pyro_bpq.critics.replay_buffer import held_sites
from pyro_bpq.critics.targets import lambda_return
from pyro_bpq.graph.network import BackpropQNetwork

build = BackpropQNetwork.build


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
