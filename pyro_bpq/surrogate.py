r"""From a rollout to the sum of the sites' surrogate terms, and to the critics' loss.

Backwards along the graph: cost-to-go, exact immediate costs, critics, graph-wise control variates,
lambda-returns; then one estimator call per class of like-shaped sites.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_bpq.bank import Block, CriticBank, Selection, Write
from pyro_bpq.critic_step import CriticBatch, evaluate_critics, regression
from pyro_bpq.estimators.base import SiteContext, Statistics
from pyro_bpq.estimators.pyro_baseline import PyroBaseline
from pyro_bpq.layout import Layout, matrix
from pyro_bpq.returns import lambda_returns
from pyro_bpq.rollout import Rollout, sum_to_plates
from pyro_bpq.site_batch import SiteBatch

__all__ = ["Learning", "StepResult", "critic_loss", "critic_targets", "step"]


@dataclass(frozen=True)
class Learning:
    """How critics learn, as far as targets are concerned.

    Args:
        lam: Weight of the return against the critic.
        gamma: Discount per edge.
        level_weight: Weight of the level against differences within a data point.
        slow: Whether targets are formed with slow copies of the critics.
    """

    lam: float = 0.9
    gamma: float = 1.0
    level_weight: float = 0.1
    slow: bool = False


@dataclass(frozen=True)
class StepResult:
    """What one step yields.

    Args:
        surrogate: Sum of the sites' surrogate terms over particles; only its gradient has meaning.
        critic_loss: Regression loss of the critics, or ``None``.
        writes: New running statistics, to be committed after the step.
        info: Detached diagnostics, by name of site.
        log_q: By class of sites, what the surrogate differentiates: ``log q`` of every value of every component,
            ``(G, M, plates, D, K)``, or of the sample, ``(G, M, plates)``.
    """

    surrogate: Tensor
    critic_loss: Tensor | None
    writes: list[Write] = field(default_factory=list)
    info: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    log_q: dict[int, Tensor] = field(default_factory=dict)


def step(
    layout: Layout,
    rollout: Rollout,
    tables: Mapping[str, Tensor],
    bank: CriticBank,
    learning: Learning,
    build: bool,
) -> StepResult:
    """Computes surrogate and critic loss of one rollout.

    Args:
        layout: The batching of its graph.
        rollout: Its tensors.
        tables: Immediate costs of the model after setting one component of a site, by site:
            ``(M, plate dims, D, K)`` in nats, detached.
        bank: Critics and running statistics.
        learning: How targets are formed.
        build: Whether the step learns: missing critics and statistics are built, a critic loss is formed.

    Returns:
        The result; nothing in the bank has changed but for newly built rows.
    """
    return _Step(layout, rollout, tables, bank, learning, build).run()


def critic_loss(
    layout: Layout,
    rollouts: Sequence[tuple[Rollout, Mapping[str, Tensor], Tensor | float]],
    bank: CriticBank,
    learning: Learning,
    chosen: Container[str] | None = None,
) -> Tensor | None:
    r"""Regression loss of critics alone, on a weighted sum of the targets of several rollouts.

        L = |q - Σ_k w_k target_k|²

    Args:
        layout: The batching of their graph.
        rollouts: Rollouts in which the learning critics see the same values, each with its tables of immediate
            costs and its weight ``w_k``, broadcastable to ``(M, plates)``.
        bank: Critics and running statistics; nothing is built or written.
        learning: How targets are formed.
        chosen: Names of the Q-nodes that learn; ``None`` for all.

    Returns:
        The loss, a scalar, or ``None`` where no critic learns.
    """
    steps = [(_Step(layout, rollout, tables, bank, learning, False), w) for rollout, tables, w in rollouts]
    parts = [(each, {c: each.critic(c) for c in each.active}, w) for each, w in steps]
    first, critics, _ = parts[0]
    learners = {
        c: [chosen is None or node.name in chosen for node in layout.q_nodes[c]]
        for c, critic in critics.items()
        if critic is not None
    }
    learners = {c: those for c, those in learners.items() if any(those)}
    if not learners:
        return None
    targets: dict[int, Tensor] = {}
    for each, evaluated, weight in parts:
        _, found = each.values_and_targets(evaluated, each.exacts())
        for c in learners:
            targets[c] = targets[c] + weight * found[c] if c in targets else weight * found[c]
    total = first.costs[0].new_zeros(())
    for c, those in learners.items():
        critic = critics[c]
        assert critic is not None
        value, _ = first.value_and_mean(c, critic)
        loss, _, _ = regression(
            critic, value, targets[c].expand_as(value), first.level_weight(c), chosen=value.new_tensor(those)
        )
        total = total + loss
    return total


def critic_targets(
    layout: Layout, rollout: Rollout, tables: Mapping[str, Tensor], bank: CriticBank, learning: Learning
) -> dict[str, tuple[Tensor, Tensor]]:
    """What each learned Q-node predicts at a rollout, and its target.

    Args:
        layout: The batching of its graph.
        rollout: Its tensors.
        tables: Immediate costs by site, as in :func:`step`.
        bank: Critics and running statistics; nothing is built or written.
        learning: How targets are formed.

    Returns:
        Value and target by name of the Q-node, ``(M, plates)`` each, in nats, detached.
    """
    each = _Step(layout, rollout, tables, bank, learning, False)
    values, targets = each.values_and_targets({c: each.critic(c) for c in each.active}, each.exacts())
    return {
        node.name: (values[c][i].detach(), targets[c].expand_as(values[c])[i])
        for c in values
        for i, node in enumerate(layout.q_nodes[c])
    }


class _Step:
    """The intermediate tensors of one step, by position of the class of sites."""

    def __init__(
        self,
        layout: Layout,
        rollout: Rollout,
        tables: Mapping[str, Tensor],
        bank: CriticBank,
        learning: Learning,
        build: bool,
    ) -> None:
        self.layout, self.rollout, self.tables = layout, rollout, tables
        self.bank, self.learning, self.build = bank, learning, build
        self.batches = [SiteBatch(cls, rollout) for cls in layout.classes]
        self.costs = [
            rollout.stack(lambda run, name: run.costs[name].detach(), cls.names, cls.plates)
            for cls in layout.cost_classes
        ]
        self.active = [c for c, cls in enumerate(layout.classes) if not cls.spec.estimator.is_pathwise]

    def run(self) -> StepResult:
        exact = self.exacts()
        critics = {c: self.critic(c) for c in self.active}
        learned = {c: self.per_site(c, critic) for c, critic in critics.items()}
        ahead = {c: self.control_variate(c, exact[c], learned[c]) for c in self.active}
        result = StepResult(self.costs[0].new_zeros(()) if self.costs else torch.zeros(()), None)
        surrogate, writes, info = result.surrogate, result.writes, result.info
        for c in self.active:
            surrogate = surrogate + self.estimate(c, exact[c], learned[c], ahead, writes, info)
        loss = None
        if self.build and any(critic is not None for critic in critics.values()):
            loss = self.critic_loss(critics, exact, writes, info)
        log_q = {c: self.batches[c].log_q for c in self.active}
        return StepResult(surrogate, loss, writes, info, log_q)

    # Sums over the graph.

    def sum_costs(self, kind: str, c: int) -> Tensor | None:
        """For each site of a class the sum of the costs that a matrix of the layout selects."""
        total, plates = None, () if kind == "crossing" else self.layout.classes[c].spec.plates
        for k, (cls, costs) in enumerate(zip(self.layout.cost_classes, self.costs, strict=True)):
            selected = self.layout.matrix(kind, c, k, costs)
            if selected is not None:
                term = matrix(selected, sum_to_plates(costs, cls.plates, plates))
                total = term if total is None else total + term
        return total

    def correction(self, c: int, ahead: Mapping[int, Tensor | None]) -> Tensor | None:
        """For each site the sum of the control variates of later sites."""
        total, plates = None, self.layout.classes[c].spec.plates
        for k, variate in ahead.items():
            if variate is None:
                continue
            selected = self.layout.matrix("later", c, k, variate)
            if selected is not None:
                source = self.layout.classes[k].spec.plates
                term = matrix(selected, sum_to_plates(variate, source, plates))
                total = term if total is None else total + term
        return total

    # Parts of the signal.

    def exacts(self) -> dict[int, Tensor | None]:
        """:meth:`exact` of all classes."""
        return {c: self.exact(c) for c in self.active}

    def exact(self, c: int) -> Tensor | None:
        """Immediate costs at every value of every component, up to a constant per component."""
        cls, batch = self.layout.classes[c], self.batches[c]
        if not cls.spec.tabled:
            return None
        table = torch.zeros_like(batch.probs)
        if "q" in cls.spec.tabled:
            table = table + batch.own_q
        if "p" in cls.spec.tabled:
            table = table + batch.own_p
        if "model" in cls.spec.tabled:
            table = table + torch.stack([self.tables[name].expand(table.shape[1:]) for name in cls.names])
        return table.masked_fill(batch.probs == 0, 0.0)

    def critic(self, c: int) -> CriticBatch | None:
        if self.layout.classes[c].spec.critic is None:
            return None
        return evaluate_critics(self.layout, c, self.batches, self.bank, self.build)

    def per_site(self, c: int, critic: CriticBatch | None) -> tuple[Tensor, Tensor | None] | None:
        """Level and advantage of each site, summed over its Q-nodes, detached."""
        if critic is None:
            return None
        level = critic.level.detach()
        advantage = None if critic.advantage is None else critic.advantage.detach()
        member = self.layout.membership(c, level)
        if member is None:
            return level, advantage
        return matrix(member, level), None if advantage is None else matrix(member, advantage)

    def control_variate(
        self, c: int, exact: Tensor | None, learned: tuple[Tensor, Tensor | None] | None
    ) -> Tensor | None:
        """``A_Y = Q_Y(y) - E_Y[Q_Y]`` of each site of a class."""
        table = exact
        if learned is not None and learned[1] is not None:
            table = learned[1] if table is None else table + learned[1]
        return None if table is None else self.batches[c].centred(table)

    def estimate(
        self,
        c: int,
        exact: Tensor | None,
        learned: tuple[Tensor, Tensor | None] | None,
        ahead: Mapping[int, Tensor | None],
        writes: list[Write],
        info: dict[str, dict[str, Tensor]],
    ) -> Tensor:
        """Calls the estimator of a class of sites."""
        cls, batch = self.layout.classes[c], self.batches[c]
        estimator = cls.spec.estimator
        selection, statistics = self.statistics(c, estimator.statistics(self.rollout.num_particles))
        shape = (len(cls.names), *batch.batch_shape)
        finite = cls.spec.components is not None
        uses = estimator.uses_critic
        cost = batch.score.detach().new_zeros(shape)
        for kind in ("downstream", "crossing"):
            total = self.sum_costs(kind, c)
            cost = cost if total is None else cost + total
        context = SiteContext(
            names=cls.names,
            score=batch.score,
            cost=cost,
            num_particles=self.rollout.num_particles,
            log_probs=batch.log_probs if finite else None,
            index=batch.index if finite else None,
            exact=exact if uses else None,
            exact_cost=_expand(self.sum_costs("tabled", c), shape) if uses and exact is not None else None,
            learned=learned[1] if uses and learned is not None else None,
            level=learned[0] if uses and learned is not None else None,
            correction=_expand(self.correction(c, ahead), shape) if uses else None,
            statistics=statistics,
            count=statistics.get("count"),
            baseline=batch.baseline if isinstance(estimator, PyroBaseline) else None,
        )
        term = estimator(context)
        if selection is not None and self.build:
            for name, value in term.statistics.items():
                writes += selection.write(name, value)
            writes += selection.write("count", statistics["count"] + 1)
        if self.build:
            for i, name in enumerate(cls.names):
                info[name] = {k: v[i] for k, v in term.statistics.items() if k in ("scales", "baseline")}
                info[name]["cost_to_go"] = context.cost[i]
        return term.surrogate.sum()

    def statistics(self, c: int, initial: Statistics) -> tuple[Selection | None, dict[str, Tensor]]:
        """Rows of running statistics of a class of sites; initial values where there are none yet."""
        if not initial:
            return None, {}
        cls, like = self.layout.classes[c], self.batches[c].score.detach()

        def make(keys: tuple[str, ...]) -> Block:
            buffers = {k: torch.tensor([v] * len(keys)) for k, v in initial.items()}
            buffers["count"] = torch.zeros(len(keys))
            return Block(kind, keys, None, buffers).to(like.device, like.dtype)

        kind = f"statistics {type(cls.spec.estimator).__name__} {tuple(initial)}"
        selection = self.bank.select(kind, cls.names, make if self.build else None)
        if selection is not None:
            return selection, {name: selection.read(name) for name in (*initial, "count")}
        # Which other sites are missing must not matter to a site: they come with its value.
        rows = [self.bank.select(kind, (site,), None) for site in cls.names]
        new = make(cls.names)
        found = {
            name: torch.cat(
                [getattr(new, name)[i : i + 1] if row is None else row.read(name) for i, row in enumerate(rows)]
            )
            for name in (*initial, "count")
        }
        return None, found

    # Learning.

    def critic_loss(
        self,
        critics: Mapping[int, CriticBatch | None],
        exact: Mapping[int, Tensor | None],
        writes: list[Write],
        info: dict[str, dict[str, Tensor]],
    ) -> Tensor:
        """Regression of all critics on their lambda-returns."""
        values, targets = self.values_and_targets(critics, exact)
        total = self.costs[0].new_zeros(())
        for c, value in values.items():
            critic = critics[c]
            assert critic is not None
            loss, wrote, found = regression(critic, value, targets[c].expand_as(value), self.level_weight(c))
            total = total + loss
            writes += wrote
            for i, node in enumerate(self.layout.q_nodes[c]):
                info.setdefault(node.site, {}).update({k: v[i] for k, v in found.items()})
        return total

    def level_weight(self, c: int) -> float:
        """Weight of the level in the regression of a class."""
        return self.learning.level_weight if self.layout.classes[c].spec.has_params else 1.0

    def values_and_targets(
        self, critics: Mapping[int, CriticBatch | None], exact: Mapping[int, Tensor | None]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Value at the sample, with gradient, and target of every learned Q-node, by class."""
        pairs = {c: self.value_and_mean(c, critic) for c, critic in critics.items() if critic is not None}
        values, means = ({c: pair[i] for c, pair in pairs.items()} for i in (0, 1))
        if not self.learning.slow:
            return values, self.targets(values, means, exact)
        with torch.no_grad():
            slow = {c: evaluate_critics(self.layout, c, self.batches, self.bank, False, True) for c in pairs}
            pairs = {c: self.value_and_mean(c, critic) for c, critic in slow.items() if critic is not None}
        ahead, behind = ({c: pair[i] for c, pair in pairs.items()} for i in (0, 1))
        return values, self.targets(ahead, behind, exact)

    def value_and_mean(self, c: int, critic: CriticBatch) -> tuple[Tensor, Tensor]:
        """``q_X(x)`` with gradient and ``E_X[q_X]`` without, ``(Q, M, plates)`` each."""
        if critic.advantage is None:
            return critic.level, critic.level.detach()
        batch = self.batches[c]
        sites = [self.layout.place[node.site][1] for node in self.layout.q_nodes[c]]
        index, probs = batch.index[sites].unsqueeze(-1), batch.probs[sites]
        value = critic.level + critic.advantage.gather(-1, index).squeeze(-1).sum(-1)
        mean = critic.level.detach() + (probs * critic.advantage.detach()).sum((-1, -2))
        return value, mean

    def targets(
        self,
        values: Mapping[int, Tensor],
        means: Mapping[int, Tensor],
        exact: Mapping[int, Tensor | None],
    ) -> dict[int, Tensor]:
        """The lambda-return of every learned Q-node, by class."""
        ahead = {}
        for c, mean in means.items():
            variate = exact[c]
            ahead[c] = mean
            if variate is not None:
                # Immediate costs in expectation instead of sampled, where the Q-node has all of them.
                nodes, tabled = self.layout.q_nodes[c], self.layout.tabled
                whole = [float(set(node.immediate) >= set(tabled[node.site])) for node in nodes]
                sites = [self.layout.place[node.site][1] for node in nodes]
                centred = self.batches[c].centred(variate)[sites]
                ahead[c] = mean - centred * mean.new_tensor(whole).reshape(-1, *(1,) * (mean.dim() - 1))
        detached = {c: value.detach() for c, value in values.items()}
        return lambda_returns(self.layout, self.costs, detached, ahead, self.learning.lam, self.learning.gamma)


def _expand(tensor: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    return None if tensor is None else tensor.expand(shape)
