r"""A step in program order: every cost that comes after a draw is charged to it, and nothing else is looked at.

    g = Σ_X (C_X - b_X) ∇ log q(x),   C_X = Σ_{Y at or after X} log q(y) + all other costs

Without dependencies there is no graph, no plan and no tracking. A superset of a site's costs is always unbiased, and so
are baselines from other particles that have the site: their values do not depend on this particle's, whatever
structure they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.batching.classes import SiteClass, SiteSpec
from pyro_bpq.critics.bank import CriticBank, Write
from pyro_bpq.estimators.base import Estimator, SiteContext
from pyro_bpq.step.surrogate import Learning, Step, estimate, may_learn
from pyro_bpq.tracing.traced_run import TracedRun, cost_of_guide

__all__ = ["RunInOrder", "in_order", "order_step"]


@dataclass(frozen=True, eq=False)
class RunInOrder:
    """What a run tells in program order.

    Args:
        estimators: Estimators of the sites that have a score, by name, in the order of draws.
        scores: Their ``log q``, ``(sites,)``, neither scaled nor masked, with gradient.
        costs: Their costs-to-go, ``(sites,)``, in nats, detached.
        differentiable: Sum of all costs through which pathwise gradients flow, a scalar.
    """

    estimators: Mapping[str, Estimator]
    scores: Tensor
    costs: Tensor
    differentiable: Tensor


def in_order(traced: TracedRun, estimators: Mapping[str, Estimator]) -> RunInOrder:
    """Reads a run in program order.

    Args:
        traced: The run.
        estimators: The estimators of its sites that have a score.
    """
    run = traced.run
    counted = traced.user_costs if traced.only_costs else run.costs
    drawn = {cost_of_guide(name) for name in run.sites}
    others = [run.costs[cost].detach() for cost in counted if cost not in drawn]
    rest = _total(others)
    own, scores = [], []
    for name in run.sites if not traced.only_costs else ():
        own.append(_whole(run.costs[cost_of_guide(name)]))
    for name in estimators:
        score = run.sites[name].score
        assert score is not None
        scores.append(_whole(score))
    if not scores:
        empty = torch.zeros(0)
        return RunInOrder({}, empty, empty, run.differentiable)
    stacked = torch.stack(scores)
    if own:
        later = torch.stack(own).detach().flip(0).cumsum(0).flip(0)
        position = {name: i for i, name in enumerate(run.sites)}
        at = [position[name] for name in estimators]
        costs = (later if len(at) == len(own) else later[at]) + rest
    else:
        costs = rest.expand(len(scores))
    return RunInOrder(estimators, stacked, costs, run.differentiable)


def order_step(
    runs: Sequence[RunInOrder], loss: Tensor, bank: CriticBank, learning: Learning, is_learning: bool
) -> Step:
    """A step of particles that ran one after the other, each with sites of its own.

    Args:
        runs: The runs.
        loss: The loss of the step, a scalar in nats.
        bank: Running statistics.
        learning: Number of steps taken, for estimators with a schedule.
        is_learning: Whether something is learned, unless the loss is not finite.

    Returns:
        The step.
    """
    build = is_learning and may_learn((), loss, learning)
    writes: list[Write] = []
    info: dict[str, dict[str, Any]] = {}
    found: dict[tuple[str, Estimator], list[tuple[int, int]]] = {}
    for m, run in enumerate(runs):
        for i, pair in enumerate(run.estimators.items()):
            found.setdefault(pair, []).append((m, i))
    # Sites that equally many particles have are served together.
    groups: dict[tuple[Estimator, int], list[tuple[str, list[tuple[int, int]]]]] = {}
    for (name, estimator), places in found.items():
        groups.setdefault((estimator, len(places)), []).append((name, places))
    starts, total = [], 0
    for run in runs:
        starts.append(total)
        total += len(run.estimators)
    terms = []
    if total:
        scores, costs = (torch.cat([getattr(run, part) for run in runs]) for part in ("scores", "costs"))
    for (estimator, number), members in groups.items():
        names = tuple(name for name, _ in members)
        score, cost = scores, costs
        if len(runs) > 1 or len(groups) > 1:
            at = torch.tensor([[starts[m] + i for m, i in places] for _, places in members])
            score, cost = scores[at], costs[at]
        context = SiteContext(names, score.reshape(-1, number), cost.reshape(-1, number), number)
        cls = SiteClass(SiteSpec((), None, (), estimator), names)
        terms.append((names, estimate(cls, estimator.at(learning.num_steps), context, bank, build, writes, info)))
    sums = [term.sum() for _, term in terms]
    paths = _total([run.differentiable for run in runs])
    return Step(loss, _total(sums), None, writes, info, tuple(terms), build, paths)


def _whole(value: Tensor) -> Tensor:
    return value.sum() if value.dim() else value


def _total(values: Sequence[Tensor]) -> Tensor:
    """The sum of everything in some tensors."""
    parts = [_whole(value) for value in values]
    return sum(parts[1:], parts[0]) if parts else torch.zeros(())
