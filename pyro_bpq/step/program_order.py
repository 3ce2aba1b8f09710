r"""A step in program order: the whole loss of a run is charged to each of its sites, and nothing else is looked at.

    g = Σ_X (L - b_X) ∇ log q(x),   L = Σ_Y log q(y) + all other costs

``L`` is the loss of a run in nats, and ``b_X`` is a baseline. Dependencies are not needed, so there is no graph, no
plan and no tracking. The gradient is unbiased, since costs that do not depend on ``X`` add zero on average. Among these
is ``log q`` of earlier sites. It nearly cancels their ``-log p``: for a guide near its optimum, ``L`` is nearly the
same in all runs. A baseline may also come from other particles that have the site, whatever their structure: their
values do not depend on this particle's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.critics.bank import CriticBank
from pyro_bpq.estimators.base import Estimator, SiteContext
from pyro_bpq.estimators.score_function import TrimmedBaseline
from pyro_bpq.record.traced_run import PlainRun, TracedRun
from pyro_bpq.rollout.sums import total
from pyro_bpq.short import alike
from pyro_bpq.step.learning import Learning, Notes
from pyro_bpq.step.surrogate import Step, estimate, may_learn


@dataclass(frozen=True, eq=False)
class RunInOrder:
    """A run in program order.

    Args:
        estimators: The estimators of the sites that have a score, by name, in the order of draws.
        scores: Their ``log q``, ``(sites,)``, neither scaled nor masked, with gradient.
        loss: The loss of the run, a scalar in nats, detached.
        differentiable: Sum of all costs through which pathwise gradients flow, a scalar.
        traces: Pyro's traces of model and guide.
    """

    estimators: Mapping[str, Estimator]
    scores: Tensor
    loss: Tensor
    differentiable: Tensor
    traces: tuple[Any, Any]


def in_order(run: TracedRun | PlainRun, estimators: Mapping[str, Estimator]) -> RunInOrder:
    """Reads a run in program order, with the estimators of its sites that have a score."""
    scores = [score.sum() if score.dim() else score for score in map(run.scored.__getitem__, estimators)]
    stacked = torch.stack(scores) if scores else torch.zeros(0)
    return RunInOrder(estimators, stacked, run.run.loss.detach(), run.run.differentiable, run.traces)


class RecentCosts:
    """The last costs of each site, in nats, and the baseline of :class:`~pyro_bpq.estimators.TrimmedBaseline`.

    They are plain numbers: a step of few sites is too short for calls of tensor operators.

    Args:
        max_idle: Number of sites that are remembered besides those of the last step.
    """

    def __init__(self, max_idle: int) -> None:
        self.max_idle = max_idle
        # The sites that were used last are at the end.
        self._costs: dict[str, list[float]] = {}

    def baselines(self, names: Iterable[str]) -> list[float]:
        """The baseline of each site; zero for new ones."""
        return [_centre(self._costs.get(name, [0.0])) for name in names]

    def add(self, new: Mapping[str, float]) -> None:
        """Adds the costs that sites had."""
        for name, cost in new.items():
            self._costs[name] = [*self._costs.pop(name, ())[1 - TrimmedBaseline.recent :], cost]
        surplus = len(self._costs) - self.max_idle - len(new) if new else 0
        for name in list(islice(self._costs, max(surplus, 0))):
            del self._costs[name]

    def state_dict(self) -> dict[str, list[float]]:
        """The costs by site."""
        return {name: list(costs) for name, costs in self._costs.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self._costs = {name: list(costs) for name, costs in state.items()}


def _centre(costs: Sequence[float]) -> float:
    """The median of few costs, the trimmed mean of all of them."""
    ordered, cut = sorted(costs), TrimmedBaseline.cut
    if len(costs) < TrimmedBaseline.recent:
        return ordered[(len(costs) - 1) // 2]
    return sum(ordered[cut:-cut]) / (len(costs) - 2 * cut)


def lone_step(run: RunInOrder, recent: RecentCosts, learning: Learning, is_learning: bool) -> Step:
    """A step of one particle whose sites all have the baseline of their recent costs.

    Args:
        run: The run.
        recent: These costs.
        learning: Whether several processes learn together, and other things that serve no site here.
        is_learning: Whether something is learned, unless the loss is not finite.

    Returns:
        The step.
    """
    names, loss = tuple(run.estimators), run.loss
    learns, notes = is_learning and may_learn(loss, learning), Notes()
    baselines = torch.tensor(recent.baselines(names), dtype=loss.dtype, device=loss.device)
    term = (loss - baselines) * run.scores
    for (name, own), baseline in zip(run.estimators.items(), baselines.unbind(), strict=True) if learns else ():
        notes.show(name, estimator=own, baseline=baseline, cost_to_go=loss.expand(1))
    seen = dict.fromkeys(names, loss.item()) if learns else {}
    return Step(loss, term.sum(), None, [], notes.info, learns, run.differentiable, seen)


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
    learns, notes, terms = is_learning and may_learn(loss, learning), Notes(), []
    for estimator, names, score, cost in _groups(runs):
        context = SiteContext(names, score, cost, score.shape[1])
        notes.info |= {name: {"estimator": estimator} for name in names if learns}
        terms.append(estimate(estimator, context, bank, learning.num_steps, notes if learns else None).sum())
    paths = total([run.differentiable for run in runs])
    return Step(loss, total(terms), None, notes.writes, notes.info, learns, paths)


def _groups(runs: Sequence[RunInOrder]) -> Iterator[tuple[Estimator, tuple[str, ...], Tensor, Tensor]]:
    """Sites that are served together, since equally many particles have them: scores and losses, ``(sites, M)``."""
    # Where the scores of a site are among those of all particles.
    found = alike(enumerate(pair for run in runs for pair in run.estimators.items()))
    together = alike(((name, places), (own, len(places))) for (name, own), places in found.items())
    scores = torch.cat([run.scores for run in runs])
    losses = torch.cat([run.loss.expand(len(run.scores)) for run in runs])
    for (estimator, _), members in together.items():
        names, places = zip(*members, strict=True)
        rows = torch.tensor(places)
        yield estimator, names, scores[rows], losses[rows]
