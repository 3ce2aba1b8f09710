"""The regression loss of critics on their targets."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.critics.bank import CriticBank, Write
from pyro_bpq.rollout.distributed import writes_of_ranks
from pyro_bpq.step.estimate import add_time
from pyro_bpq.step.regression import CriticRows, regression
from pyro_bpq.step.returns import values_and_targets
from pyro_bpq.step.signals import Signals
from pyro_bpq.step.values import Info, Learning

# Value and target of the Q-nodes of each group.
Pairs = Mapping[int, tuple[Tensor, Tensor]]


def critic_loss(
    signals: Sequence[Signals],
    bank: CriticBank,
    learning: Learning,
    chosen: Container[str] | None = None,
    writes: list[Write] | None = None,
    info: Info | None = None,
) -> Tensor | None:
    """Regression loss of the ``chosen`` Q-nodes' critics (``None``: of all); ``None`` if none learns.

    There is one of ``signals`` for all particles, or one for each in steered programs. Nothing is built or written:
    new running statistics are added to ``writes``, and diagnostics of sites to ``info``.
    """
    pairs = [(one, _pairs(one, learning)) for one in signals]
    return _regress(pairs, bank, learning, [] if writes is None else writes, {} if info is None else info, chosen)


def expected_critic_loss(
    weighted: Sequence[tuple[Signals, Tensor]], bank: CriticBank, learning: Learning, chosen: Container[str]
) -> Tensor | None:
    r"""Regression loss of critics on a weighted sum of the targets of several rollouts.

        L = |q - Σ_k w_k target_k|²

    The rollouts have one structure, and the learning critics see the same values in all of them. The weights ``w_k``
    broadcast to ``(M, plates)``. Nothing is built or written.
    """
    first = weighted[0][0]
    found = [(_pairs(one, learning), weight) for one, weight in weighted]
    learners = [g for g in found[0][0] if any(node.name in chosen for node in first.critics[g].group.nodes)]
    pairs = {}
    for g in learners:
        terms = [weight * own[g][1] for own, weight in found]
        pairs[g] = found[0][0][g][0], sum(terms[1:], terms[0])
    return _regress([(first, pairs)], bank, learning, [], {}, chosen)


def _pairs(signals: Signals, learning: Learning) -> Pairs:
    return values_and_targets(signals, learning.lam, learning.gamma, learning.slow)


def _regress(
    rollouts: Sequence[tuple[Signals, Pairs]],
    bank: CriticBank,
    learning: Learning,
    writes: list[Write],
    info: Info,
    chosen: Container[str] | None,
) -> Tensor | None:
    """Regression loss of critics on their lambda-returns; ``None`` if no critic learns."""
    found: dict[Any, list[tuple[CriticRows, Tensor, Tensor]]] = {}
    learners: dict[Any, list[bool]] = {}
    for one, pairs in rollouts:
        for g, (value, target) in pairs.items():
            critic = one.critics[g]
            writes += writes_of_ranks(learning.ranks, critic.writes, value[0].numel())
            weight = learning.level_weight if one.layout.classes[critic.group.c].spec.has_params else 1.0
            learns = [chosen is None or node.name in chosen for node in critic.group.nodes]
            if len(rollouts) == 1:
                sites = tuple(node.site for node in critic.group.nodes)
                found[g, weight] = [(CriticRows(sites, critic.selection, critic.unit), value, target)]
                learners[g, weight] = learns
                continue
            for i, node in enumerate(critic.group.nodes):
                key = (node.name, critic.group.kind, value.shape[2:], weight)
                selection = bank.select(critic.group.kind, critic.group.keys[i : i + 1], None)
                assert selection is not None
                rows = CriticRows((node.site,), selection, critic.unit[i : i + 1])
                found.setdefault(key, []).append((rows, value[i : i + 1], target[i : i + 1]))
                learners[key] = learns[i : i + 1]
    losses = []
    for key, parts in found.items():
        learns, weight = learners[key], key[-1]
        if not any(learns):
            continue
        start = time.perf_counter()
        rows = replace(parts[0][0], unit=torch.cat([part[0].unit for part in parts], 1))
        value, target = (torch.cat([part[k] for part in parts], 1) for k in (1, 2))  # type: ignore[misc]
        mask = None if all(learns) else value.new_tensor(learns)
        loss, wrote, diagnostics = regression(rows, value, target, weight, chosen=mask, ranks=learning.ranks)
        losses.append(loss)
        writes += wrote
        for i, site in enumerate(rows.sites):
            info.setdefault(site, {}).update({k: v[i] for k, v in diagnostics.items()})
        add_time(info, rows.sites, start)
    return sum(losses[1:], losses[0]) if losses else None
