r"""Advantages: Q-functions minus the prediction of them one step earlier.

Let ``Q_X`` be a Q-node at a parent of ``Y`` whose rule reads ``Y``. It predicts ``Q_Y`` and the other summands of its
rule, the *siblings*. The baseline of ``Y`` is the part of that prediction that belongs to ``Y``:

    A_Y = γ Q_Y(y) - avg_X [ Q_X(x) - γ Σ_S Q_S(s) ]

The paper's four cases are instances: a single parent, ``Q_Y - Q_X``; two parents, minus their average; a sibling of
another cost, ``Q_Y1 - (Q_X - Q_Y2)``; parents and siblings (our reading, because the paper's picture of it is missing).
Siblings stand in other summands of a rule. A child that is averaged with ``Y`` predicts the same costs, so it is no
sibling. A baseline must not depend on ``y``. So a sibling is dropped if it reads ``Y`` or a descendant of ``Y``, or if
``Y`` descends from it. If ``Y`` is in a plate and its parent is not, the other rows of ``Y`` are siblings. If only the
parent is in a plate, each row of the parent counts as a parent.

An advantage replaces a Q-function in a gradient estimator that is biased by the critics' errors. The baseline adds no
further bias.

References:
    | Backprop-Q (Xu et al., 2018), Appendix, Cases for Advantage Functions
    | High-dimensional continuous control using generalized advantage estimation (Schulman et al., 2016)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError, PlateError
from pyro_bpq.graph.network import BackpropQNetwork, QNode
from pyro_bpq.rollout.runs import sum_to_plates
from pyro_bpq.targets.lambda_return import lambda_return


def advantages(
    network: BackpropQNetwork,
    q: Mapping[str, Tensor],
    costs: Mapping[str, Tensor],
    lam: float = 0.0,
    gamma: float = 1.0,
    expected: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    r"""The advantage of each site at the sample.

    With ``lam`` above 0 the first term is estimated from the returns, ``Q_Y + λ (G_Y - q_Y)``. In a chain the advantage
    is then the λ-error ``δ_X = G_X - Q_X`` of the parent (generalised advantage estimation). At ``γ λ = 1`` it is the
    return minus ``Q_X``.

    Args:
        network: The network. All Q-nodes of a site give one advantage.
        q: Learned part of each Q-node at the sample, in nats. A missing Q-node is not learned.
        costs: Each cost of this run, in nats. Plate dimensions stand where their ``dim`` says, as in
            :func:`~pyro_bpq.targets.lambda_return.lambda_return`.
        lam: Weight of the return against the critic, in ``[0, 1]``.
        gamma: Discount per edge.
        expected: For Q-nodes, ``E_S[γ I_S + q_S]`` over the support of their sites. Siblings then enter by their
            expectation instead of their sample, and returns use expected backups.

    Returns:
        Advantages by site, in nats, detached. A site that no learned rule reads has no baseline: its advantage is its
        Q-function.

    Raises:
        OptionError: If ``gamma`` is not 1 and the network was not built for it, or has edges that pass levels by.
        PlateError: If a site lies in plates that its reader is outside of, and a cost downstream reads several rows.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Cases for Advantage Functions
    """
    if gamma != 1.0 and network.skips_levels:
        raise OptionError(
            f"gamma={gamma}: an edge of this network passes levels by, so a site is discounted differently by "
            "different readers. Write gamma=1.0, or leave out of the graph the edges that a longer way leads around."
        )
    returns = lambda_return(network, q, costs, lam, gamma, expected)
    totals, plates = {name: cost.detach() for name, cost in costs.items()}, network.plates
    for node in network.nodes:
        own = plates[node.name]
        found_here = [sum_to_plates(totals[c], plates[c], own) for c in node.immediate]
        immediate = gamma * sum(found_here, torch.zeros(()))
        totals[node.name] = immediate + (q[node.name].detach() if node.name in q else returns[node.name])
    ahead = totals | {name: value.detach() for name, value in (expected or {}).items()}
    found = {}
    for site in network.graph.index:
        nodes = network.q_nodes(site)
        if nodes:
            first = sum(totals[n.name] + lam * (returns[n.name] - q.get(n.name, returns[n.name])) for n in nodes)
            found[site] = (gamma * first - _baseline(network, site, q, ahead, gamma)).detach()
    return found


def _baseline(
    network: BackpropQNetwork, site: str, q: Mapping[str, Tensor], ahead: Mapping[str, Tensor], gamma: float
) -> Tensor:
    """The readers' prediction of a site: a weighted mean over the readers of each of its Q-nodes."""
    plates, own, costs = network.plates, network.graph.node(site).plates, network.graph.cost_index
    names = {node.name for node in network.q_nodes(site)}
    # The return of a reader that nobody learned contains what came of the site's own value.
    readers = [node for node in network.nodes if node.name in q and names & set(network.children(node.name))]
    total = torch.zeros(())
    for reader, weight in zip(readers, _weights(network, sorted(names), readers), strict=True):
        _check_plates(network, site, reader)
        outer = plates[reader.name]
        prediction = q[reader.name].detach()
        for average in reader.rule:
            mine = names & set(average.children)
            # A child that is learned and not in q knows no more than the return of this run.
            known = [c for c in average.children if c in costs or c in q or not network.q_node(c).is_learned]
            siblings = [c for c in known if is_independent(network, site, c)]
            if mine:
                # The other rows of a plate that the reader is outside of.
                rows = [sum_to_plates(ahead[child], own, outer) - ahead[child] for child in mine]
                prediction = prediction - gamma * sum(rows[1:], rows[0])
            elif siblings:
                sums = [sum_to_plates(ahead[child], plates[child], outer) for child in siblings]
                prediction = prediction - gamma * sum(sums[1:], sums[0]) / len(siblings)
        pooled = [plate.dim for plate in outer if plate not in own]
        total = total + weight * (prediction.mean(pooled, keepdim=True) if pooled else prediction)
    return total


def _weights(network: BackpropQNetwork, names: list[str], readers: list[QNode]) -> list[float]:
    """Weights of the readers of a site: they sum to 1 for each of its Q-nodes, and are equal if possible."""
    reads = [[float(name in network.children(reader.name)) for reader in readers] for name in names]
    matrix = torch.tensor(reads, dtype=torch.float64).reshape(len(names), len(readers))
    return (torch.linalg.pinv(matrix) @ torch.ones(len(names), dtype=torch.float64)).tolist()


def is_independent(network: BackpropQNetwork, site: str, child: str) -> bool:
    """Whether ``child`` does not depend on ``site``, nor ``site`` on the site of the Q-node ``child``."""
    graph = network.graph
    if child in graph.cost_index:
        reads = set(graph.cost(child).parents)
    else:
        node = network.q_node(child)
        reads = {node.site, *node.scope}.union(*(graph.cost(cost).parents for cost in node.immediate))
        if node.site in graph.ancestors(site):
            return False
    return not reads & (graph.descendants(site) | {site})


def _check_plates(network: BackpropQNetwork, site: str, reader: QNode) -> None:
    graph = network.graph
    inner = [p.name for p in graph.node(site).plates if p not in graph.node(reader.site).plates]
    if inner and graph.leaves_plates(site):
        raise PlateError(
            f"Site {site!r} lies in the plates {inner}, which site {reader.site!r} above it is outside of, and a cost "
            "reads several of its rows: they share one prediction. Use ScoreFunction(LeaveOneOut()) there instead of "
            "advantages."
        )
