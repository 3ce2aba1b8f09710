r"""Advantages: Q-functions minus the prediction of them one step earlier.

Let ``Q_X`` be a Q-node at a parent of ``Y`` whose rule reads ``Y``. It predicts ``Q_Y`` and the other summands of its
rule, the *siblings*. The baseline of ``Y`` is the part of that prediction that belongs to ``Y``:

    A_Y = γ Q_Y(y) - avg_X [ Q_X(x) - γ Σ_S Q_S(s) ]

The paper's four cases are instances. A single parent gives ``Q_Y - Q_X``. Two parents give minus their average. A
sibling of another cost gives ``Q_Y1 - (Q_X - Q_Y2)``. The fourth case has parents and siblings (our reading, the
picture is lost). Siblings stand in other summands of a rule. A child that is averaged with ``Y`` has the same costs and
is no sibling. A baseline must not depend on ``y``. So a sibling is dropped if it reads ``Y`` or a descendant of ``Y``,
or if ``Y`` descends from it.

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
from pyro_bpq.targets.lambda_return import lambda_return

__all__ = ["advantages"]


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
        costs: Each cost of this run, in nats.
        lam: Weight of the return against the critic, in ``[0, 1]``.
        gamma: Discount per edge.
        expected: For Q-nodes, ``E_S[γ I_S + q_S]`` over the support of their sites. Siblings then enter by their
            expectation instead of their sample, and returns use expected backups.

    Returns:
        Advantages by site, in nats, detached. A site that no rule reads has no baseline: its advantage is its Q.

    Raises:
        PlateError: If a site lies in plates that its reader is outside of. The rows would be siblings of each other.
        OptionError: If ``gamma`` is not 1 and the network was not built for it, or has edges that pass levels by.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Cases for Advantage Functions
    """
    if gamma != 1.0 and network.skips_levels:
        raise OptionError(
            f"gamma={gamma}: an edge of this network passes levels by, so a site is discounted differently by "
            "different readers. Write gamma=1.0, or build the network with reduction='chain'."
        )
    returns = lambda_return(network, q, costs, lam, gamma, expected)
    totals = {name: cost.detach() for name, cost in costs.items()}
    for node in network.nodes:
        immediate = gamma * sum((totals[cost] for cost in node.immediate), torch.zeros(()))
        totals[node.name] = immediate + (q[node.name].detach() if node.name in q else returns[node.name])
    ahead = {**totals, **({} if expected is None else {name: value.detach() for name, value in expected.items()})}
    found = {}
    for site in network.graph.index:
        own = network.q_nodes(site)
        if own:
            first = sum(totals[n.name] + lam * (returns[n.name] - q.get(n.name, returns[n.name])) for n in own)
            found[site] = (gamma * first - _baseline(network, site, q, returns, ahead, gamma)).detach()
    return found


def _baseline(
    network: BackpropQNetwork,
    site: str,
    q: Mapping[str, Tensor],
    returns: Mapping[str, Tensor],
    ahead: Mapping[str, Tensor],
    gamma: float,
) -> Tensor:
    """The readers' prediction of a site: a weighted mean over the readers of each of its Q-nodes."""
    names = [node.name for node in network.q_nodes(site)]
    readers = [node for node in network.nodes if set(names) & set(network.children(node.name))]
    total = torch.zeros(())
    for reader, weight in zip(readers, _weights(network, names, readers), strict=True):
        _check_plates(network, site, reader)
        prediction = q.get(reader.name, returns[reader.name])
        for average in reader.rule:
            if not set(names) & set(average.children):
                siblings = [child for child in average.children if is_independent(network, site, child)]
                if siblings:
                    prediction = prediction - gamma * sum(ahead[child] for child in siblings) / len(siblings)
        total = total + weight * prediction
    return total


def _weights(network: BackpropQNetwork, names: list[str], readers: list[QNode]) -> list[float]:
    """Weights of the readers of a site: they sum to 1 for each of its Q-nodes, and are equal if possible."""
    reads = [[float(name in network.children(reader.name)) for reader in readers] for name in names]
    matrix = torch.tensor(reads, dtype=torch.float64).reshape(len(names), len(readers))
    weights: list[float] = (torch.linalg.pinv(matrix) @ torch.ones(len(names), dtype=torch.float64)).tolist()
    return weights


def is_independent(network: BackpropQNetwork, site: str, child: str) -> bool:
    """Whether ``child`` does not depend on ``site``, nor ``site`` on the site of the Q-node ``child``.

    Args:
        network: The network.
        site: A stochastic node.
        child: A Q-node or a cost.

    Returns:
        Whether the child's Q-function may stand in a baseline of the site.
    """
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
    inner = [p.name for p in network.graph.node(site).plates if p not in network.graph.node(reader.site).plates]
    if inner:
        raise PlateError(
            f"Site {site!r} lies in the plates {inner}, which site {reader.site!r} above it is outside of: its rows "
            "share one prediction. Use leave-one-out or the graph-wise control variates there instead of advantages."
        )
