r"""The update rules of a network as sums over Q-nodes and costs, in blocks of Q-nodes.

A rule reads a few children, but the triangular solve for all lambda-returns needs a square matrix. So the solve goes
through blocks of at most ``BLOCK`` Q-nodes, from the last to the first. Memory and time are linear in the number of
Q-nodes:

    G_k = solve(1 - γ R_kk diag(λ_k),  γ (roots_k + R_k,later T_later) + ...),     T = ahead + λ (G - learned).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.rollout.sums import Sums, subset_sums, weighted_sums
from pyro_bpq.targets.lambda_return import lambda_return_solve

BLOCK = 256

# Row, column, weight.
Entries = list[tuple[int, int, float]]


@dataclass(frozen=True)
class RuleBlock:
    """The rules of a block of consecutive Q-nodes in program order.

    Args:
        where: Positions of the Q-nodes of the block.
        within: Weights of the block's Q-nodes in each rule, ``(b, b)``, strictly upper triangular.
        beyond: Weights of the Q-nodes after the block in each rule, ``(b, Q - stop)``, or ``None`` for none.
    """

    where: slice
    within: Tensor
    beyond: Sums | None


@dataclass(frozen=True)
class Rules:
    """The rules of a network as matrices.

    Args:
        blocks: Averages over Q-nodes, in program order.
        root: Averages over costs that are not immediate, ``(Q, costs)``, or ``None`` for none.
        immediate: Immediate costs, ``(Q, costs)``, or ``None`` for none.
    """

    blocks: tuple[RuleBlock, ...]
    root: Sums | None
    immediate: Sums | None


def network_rules(network: BackpropQNetwork, order: dict[str, int], like: Tensor, block: int = BLOCK) -> Rules:
    """Builds the rules of a network.

    Args:
        network: The network.
        order: Position of each Q-node in program order.
        like: Gives dtype and device.
        block: Largest number of Q-nodes in a block.
    """
    graph, size = network.graph, len(order)
    starts = range(0, size, block)
    within: list[Entries] = [[] for _ in starts]
    beyond: list[Entries] = [[] for _ in starts]
    roots: Entries = []
    immediate = [0] * size
    for node in network.nodes:
        i = order[node.name]
        k, row = divmod(i, block)
        stop = min((k + 1) * block, size)
        immediate[i] = graph.cost_bits_of(node.immediate)
        for average in node.rule:
            weight = 1.0 / len(average.children)
            for child in average.children:
                if child not in order:
                    roots.append((i, graph.cost_index[child], weight))
                elif order[child] < stop:
                    within[k].append((row, order[child] - k * block, weight))
                else:
                    beyond[k].append((row, order[child] - stop, weight))
    blocks = []
    for k, start in enumerate(starts):
        stop = min(start + block, size)
        square = like.new_zeros(stop - start, stop - start)
        for i, j, weight in within[k]:
            square[i, j] += weight
        rest = weighted_sums((stop - start, size - stop), beyond[k], like) if beyond[k] else None
        blocks.append(RuleBlock(slice(start, stop), square, rest))
    root = weighted_sums((size, len(graph.costs)), roots, like) if roots else None
    return Rules(tuple(blocks), root, subset_sums(immediate, range(len(graph.costs)), like))


def solve_rules(rules: Rules, costs: Tensor, mean: Tensor, learned: Tensor, lam: Tensor, gamma: float) -> Tensor:
    r"""Computes the lambda-returns of Q-nodes with the same plates.

    Args:
        rules: The rules of the Q-nodes.
        costs: Stacked costs, in nats.
        mean: ``E_Y[Q_Y]`` of each node without its immediate costs, ``(Q, ...)``, in nats; zero if not learned.
        learned: ``q_Y(y)``, ``(Q, ...)``, zero for a node that is not learned.
        lam: Weight of the return, ``(Q,)``, 1 for a node that is not learned.
        gamma: Discount per edge; not 1 only if no edge passes levels by.

    Returns:
        Returns ``(Q, ...)`` in nats.
    """
    ahead = mean
    if rules.immediate is not None:
        immediate = rules.immediate @ costs
        ahead = mean + (immediate if gamma == 1.0 else gamma * immediate)
    roots = torch.zeros_like(mean) if rules.root is None else gamma * (rules.root @ costs)
    if len(rules.blocks) == 1:
        return lambda_return_solve(rules.blocks[0].within, roots, ahead, learned, lam, gamma)
    weight = lam.reshape(-1, *(1,) * (learned.dim() - 1))
    returns = torch.zeros_like(mean)
    for block in reversed(rules.blocks):
        here, later = block.where, slice(block.where.stop, None)
        known = roots[here]
        if block.beyond is not None:
            backups = ahead[later] + weight[later] * (returns[later] - learned[later])
            known = known + gamma * (block.beyond @ backups)
        returns[here] = lambda_return_solve(block.within, known, ahead[here], learned[here], lam[here], gamma)
    return returns
