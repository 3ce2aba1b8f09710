r"""What critics learn in a step: lambda-returns, by a regression on them or in a backward sweep.

The regression is in units of the targets' running spread. In the sweep of the paper's Algorithm 1 each critic learns
from children that have just learned; Q-nodes of the same height do not read each other, so they learn together.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_bpq.critics.bank import CriticBank, Selection, Write
from pyro_bpq.critics.targets import Backups, check_discount, lambda_return, network_rules, solve_rules
from pyro_bpq.estimators.base import site_mean, update_mean
from pyro_bpq.graph.network import BackpropQNetwork, QNode
from pyro_bpq.rollout.runs import sum_to_plates
from pyro_bpq.rollout.sums import Ranks, common_type, joint_mean, total, writes_of_ranks
from pyro_bpq.step.classes import QGroup
from pyro_bpq.step.critic_step import CriticBatch, evaluate_critics
from pyro_bpq.step.layout import Layout

if TYPE_CHECKING:
    from pyro_bpq.step.signals import Signals

# Largest number of Q-nodes whose rules are solved as one dense matrix.
MOST_SOLVED = 2048
# What critics say of each group of Q-nodes, `(Q, M, plates)` in nats, detached: `q_X(x)`, and `E_X[q_X]` plus what
# takes the (discounted) exact immediate costs to their expectation.
Told = Mapping[int, tuple[Tensor, Tensor]]
# Decay of the running moments of targets.
DECAY = 0.98
# Estimator and detached diagnostics, by name of the site.
Info = dict[str, dict[str, Any]]


@dataclass
class Notes:
    """What a step notes of what it learns: nothing of it takes effect before the step is over."""

    writes: list[Write] = field(default_factory=list)  # New running statistics
    info: Info = field(default_factory=dict)

    def show(self, site: str, **found: Any) -> None:
        """Adds diagnostics of a site."""
        self.info.setdefault(site, {}).update(found)


@dataclass(frozen=True)
class Learning:
    """How the critics' targets and loss are formed."""

    lam: float | Tensor = 0.97  # Weight of the return against the critic
    gamma: float = 1.0  # Discount per level
    level_weight: float = 0.1  # Weight of the level against differences within a data point
    slow: bool = False  # Whether slow copies of the critics form the targets
    num_steps: int = 0  # Number of steps taken, for estimators with a schedule
    ranks: Ranks | None = None  # The processes that learn together, or `None`
    is_recorded: bool = False  # Whether the step's operators are recorded; the loss is then not checked for finiteness
    # Step size of a backward sweep before the gradient; `None` for a regression on all targets at once
    sweep: float | None = None


def values_and_targets(signals: Signals, learning: Learning) -> dict[int, tuple[Tensor, Tensor]]:
    """``q_X(x)`` with the critics' gradient and its lambda-return, ``(Q, M, plates)`` each, by group."""
    found = predictions(signals, signals.slow_critics if learning.slow else signals.critics, learning.gamma)
    targets = lambda_returns(signals, found, learning.lam, learning.gamma)
    return {g: (c.says.value, targets[g].expand_as(c.says.value)) for g, c in signals.critics.items()}


def bootstrap(signals: Signals, c: int, gamma: float) -> Tensor | None:
    """Lambda-return minus cost-to-go of a class, for an estimator with a ``return_weight``; else ``None``."""
    lam = signals.layout.classes[c].spec.estimator.return_weight
    if lam is None:
        return None

    def returns() -> dict[int, Tensor]:
        return lambda_returns(signals, predictions(signals, signals.critics, gamma), lam, gamma)

    def plain() -> dict[int, Tensor]:
        zeros = {g: torch.zeros_like(critic.says.value) for g, critic in signals.critics.items()}
        return lambda_returns(signals, {g: (zero, zero) for g, zero in zeros.items()}, 1.0, 1.0)

    mixed, summed = signals.once(("returns", lam, gamma), returns), signals.once("plain returns", plain)
    groups = [(g, critic.group) for g, critic in signals.critics.items() if critic.group.c == c]
    # The cost-to-go, times gamma, contains the costs that are not immediate, too.
    shifts = [group.sum_to_sites(mixed[g] - gamma * summed[g]) for g, group in groups]
    return total(shifts) if shifts else None


def predictions(signals: Signals, critics: Mapping[int, CriticBatch], gamma: float) -> Told:
    """What critics say, by group."""
    return {g: (critic.says.value.detach(), _ahead(signals, critic, gamma)) for g, critic in critics.items()}


def _ahead(signals: Signals, critic: CriticBatch, gamma: float) -> Tensor:
    """Replaces sampled immediate costs by their expectation if all tabled costs of the site are the Q-node's."""
    group, tabled, mean = critic.group, signals.layout.tabled, critic.says.mean
    exact = signals.exact(group.c)
    if exact is None:
        return mean

    def is_whole() -> Tensor:
        return mean.new_tensor([set(node.immediate) >= set(tabled[node.site]) for node in group.nodes])

    whole = group.made("whole", mean, is_whole)
    centred = group.pick(critic.batch.centred(exact if gamma == 1.0 else gamma * exact))
    return mean - centred * whole.reshape(-1, *(1,) * (mean.dim() - 1))


def lambda_returns(signals: Signals, told: Told, lam: float | Tensor, gamma: float) -> dict[int, Tensor]:
    """Targets of all learned Q-nodes, ``(Q, M, plates)`` in nats, by group.

    They come from one triangular solve if all nodes and costs share their plates, else from a backward pass.
    """
    layout, network = signals.layout, signals.layout.network
    if not told or network is None:
        return {}
    plates = {cls.plates for cls in layout.cost_classes} | {cls.spec.plates for cls in layout.classes}
    check_discount(network, gamma)
    is_like = len(plates) == 1 and 2 < len(network.nodes) <= MOST_SOLVED
    if is_like and (gamma == 1.0 or not network.skips_levels):
        return _solved(signals, network, told, lam, gamma)
    q, expected = by_name(signals, network, told, gamma)
    returns = lambda_return(network, q, signals.costs_by_name, lam, gamma, expected)
    return {
        g: torch.stack([returns[node.name].expand(value.shape[1:]) for node in signals.critics[g].group.nodes])
        for g, (value, _) in told.items()
    }


def _solved(
    signals: Signals, network: BackpropQNetwork, told: Told, lam: float | Tensor, gamma: float
) -> dict[int, Tensor]:
    """The lambda-returns by one triangular solve."""
    # Costs are in single precision at least, as a solve needs.
    (costs,) = signals.costs
    costs = costs.to(common_type(costs, *(part for pair in told.values() for part in pair)))
    rules = signals.layout.made("rules", costs, lambda: network_rules(network, costs))
    places = {g: signals.critics[g].group.places(rules.order, costs) for g in told}
    size = (len(rules.order), *costs.shape[1:])
    learned, mean, weight = costs.new_zeros(size), costs.new_zeros(size), costs.new_ones(size[0])
    for g, (value, ahead) in told.items():
        learned[places[g]], mean[places[g]] = value.to(costs), ahead.to(costs)
        weight = weight.index_fill(0, places[g], lam)
    returns = solve_rules(rules, costs, mean, learned, weight, gamma)
    return {g: returns[rows] for g, rows in places.items()}


def by_name(
    signals: Signals, network: BackpropQNetwork, told: Told, gamma: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Q-values, and expected Q-values plus immediate costs, by name, ``(M, plates)``."""
    costs, plates, q, expected = signals.costs_by_name, network.plates, dict[str, Tensor](), dict[str, Tensor]()
    for g, pair in told.items():
        for node, value, ahead in zip(signals.critics[g].group.nodes, *pair, strict=True):
            q[node.name] = value
            for cost in node.immediate:
                ahead = ahead + gamma * sum_to_plates(costs[cost], plates[cost], plates[node.name])
            expected[node.name] = ahead
    return q, expected


# The regression.


def critic_loss(
    signals: Sequence[Signals], learning: Learning, chosen: Container[str] | None = None, notes: Notes | None = None
) -> Tensor | None:
    """Regression loss of the ``chosen`` Q-nodes' critics (``None``: of all); ``None`` if none learns.

    There is one of ``signals`` for all particles, or one for each in steered programs. Nothing is built or written:
    new running statistics and diagnostics of sites are added to ``notes``.
    """
    notes = notes or Notes()
    found: dict[Any, list[tuple[CriticRows, Tensor, Tensor]]] = {}
    for one in signals:
        for g, (value, target) in values_and_targets(one, learning).items():
            critic, group = one.critics[g], one.critics[g].group
            notes.writes += writes_of_ranks(learning.ranks, critic.writes, value[0].numel())
            weight = learning.level_weight if critic.batch.cls.spec.has_params else 1.0
            # Particles of their own may have different Q-nodes.
            alone = len(signals) > 1
            for at in [slice(i, i + 1) for i in range(len(group.nodes))] if alone else [slice(None)]:
                nodes, selection = group.nodes[at], one.bank.select(group.kind, group.keys[at], None)
                assert selection is not None
                rows = CriticRows(tuple(node.site for node in nodes), selection, critic.unit[at])
                key = (tuple(node.name for node in nodes), group.kind, value.shape[2:], weight)
                found.setdefault(key, []).append((rows, value[at], target[at]))
    losses = []
    for (names, _, _, weight), parts in found.items():
        learns = [chosen is None or name in chosen for name in names]
        if not any(learns):
            continue
        all_rows, values, targets = zip(*parts, strict=True)
        rows = replace(all_rows[0], unit=torch.cat([each.unit for each in all_rows], 1))
        value, target = torch.cat(values, 1), torch.cat(targets, 1)
        mask = None if all(learns) else value.new_tensor(learns)
        loss, writes, diagnostics = regression(rows, value, target, weight, chosen=mask, ranks=learning.ranks)
        losses.append(loss)
        notes.writes += writes
        for i, site in enumerate(rows.sites):
            notes.show(site, **{name: values[i] for name, values in diagnostics.items()})
    return total(losses) if losses else None


@dataclass(frozen=True)
class CriticRows:
    """Critics in a regression."""

    sites: tuple[str, ...]  # Site of each
    selection: Selection  # Their rows in the bank
    unit: Tensor  # Scale of the sites (subsampling), broadcastable to `(Q, M, plates)`; targets are divided by it


def regression(
    critic: CriticRows,
    value: Tensor,
    target: Tensor,
    level_weight: float,
    chosen: Tensor | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, list[Write], dict[str, Tensor]]:
    """Squared error of the critics, in units of their targets' spread.

    With several particles, differences within a data point count fully and the level ``level_weight``:

        L = |δ - mean_m δ|² / σ_A² + w |mean_m δ|² / σ_V²,   δ = q - target

    ``value`` and ``target`` are in nats, ``(Q, M, plates)``. ``chosen`` holds a one for each Q-node that learns, else a
    zero. The mean of the losses of several processes, ``ranks``, is that of the joint batch. The results are the loss,
    the writes of the running statistics, and diagnostics per Q-node.
    """
    particles, samples = target.shape[1], value[0].numel()
    error, scaled = (value - target) / critic.unit, target / critic.unit
    selection, names = critic.selection, ("count", "mean", "spread_level", "spread_advantage")
    count, mean, old_level, old_step = (selection.read(name, target.dtype) for name in names)
    own_mean, number = joint_mean(ranks, site_mean(scaled), samples)
    new_mean = update_mean(mean, own_mean, count, DECAY)
    lead = (-1, *(1,) * (target.dim() - 1))
    if particles > 1:
        row = scaled.mean(1, keepdim=True)
        inner = (scaled - row).square() * (particles / (particles - 1.0))
        outer = row - new_mean.reshape(lead)
    else:
        # Not the critic's own error, because a scale that the critic moves itself feeds back.
        outer = scaled - new_mean.reshape(lead)
        inner = outer.square()
    squares, _ = joint_mean(ranks, torch.stack((site_mean(outer.square()), site_mean(inner))), samples)
    level = update_mean(old_level.square(), squares[0], count, DECAY).sqrt()
    step = update_mean(old_step.square(), squares[1], count, DECAY).sqrt()
    floor = 1e-3 * (new_mean.abs() + level) + torch.finfo(target.dtype).tiny
    step = torch.maximum(step, floor)
    # The mean over particles varies less than the particles. In its own unit it would drown their differences.
    level = torch.maximum(level, step)
    loss = _loss(error, level.reshape(lead), step.reshape(lead), level_weight)
    # The first step only sets the statistics, because the level is still unknown.
    seen = (count > 0).to(loss.dtype)
    seen = seen if chosen is None else seen * chosen
    new = {"mean": new_mean, "spread_level": level, "spread_advantage": step}
    new |= {"rows": selection.read("rows") * 0.0 + number, "count": selection.read("count") + 1}
    writes = [write for name, found in new.items() for write in selection.write(name, found)]
    with torch.no_grad():
        variance = site_mean(_centre(scaled).square())
        # A single particle and row has no variance.
        explained = torch.where(variance > 0, 1.0 - site_mean(_centre(error).square()) / variance, torch.nan)
    # The mean of the ranks' gradients weights all ranks alike, but they may have different numbers of rows.
    weight = 1.0 if ranks is None else samples * ranks.size / number
    return (weight * loss * seen).sum(), writes, {"td_loss": loss.detach(), "explained": explained}


def _loss(error: Tensor, level: Tensor, step: Tensor, weight: float) -> Tensor:
    particles = error.shape[1]
    if particles == 1:
        return site_mean((error / step).square())
    row = error.mean(1, keepdim=True)
    inner = site_mean(((error - row) / step).square()) * (particles / (particles - 1.0))
    return inner + weight * site_mean((row / level).square())


def _centre(value: Tensor) -> Tensor:
    if value.shape[1] > 1:
        return value - value.mean(1, keepdim=True)
    return value - site_mean(value).reshape(-1, *(1,) * (value.dim() - 1))


# The backward sweep.


def sweep(signals: Signals, learning: Learning, notes: Notes) -> None:
    """Takes one step of each critic, in place, from the Q-nodes next to the costs backwards.

    It notes new moments of the context features, and for each site ``"td_loss"``, the squared error before the step, in
    squared nats.
    """
    layout, ranks = signals.layout, learning.ranks
    if layout.network is None:
        return
    backups = Backups(layout.network, signals.costs_by_name, learning.lam, learning.gamma)
    for groups, others in _waves(layout):
        for node in others:
            backups.put(node, backups.target(node), None)
        for group in groups:
            critic = evaluate_critics(signals, group)
            if critic is None:  # not built yet, in a steered program
                continue
            value, nodes = critic.says.value, critic.group.nodes
            targets = torch.stack([backups.target(node).expand(value.shape[1:]) for node in nodes])
            loss = site_mean((value.detach() - targets).square())
            _descend(value / critic.unit, targets / critic.unit, critic, signals.bank, learning)
            again = evaluate_critics(signals, critic.group)
            assert again is not None
            for node, target, own, error in zip(nodes, targets, again.says.value.detach(), loss, strict=True):
                backups.put(node, target, own)
                notes.show(node.site, td_loss=error)
            notes.writes += writes_of_ranks(ranks, critic.writes, value[0].numel())
            notes.writes += critic.selection.write("count", critic.selection.read("count") + 1)


def _descend(value: Tensor, target: Tensor, critic: CriticBatch, bank: CriticBank, learning: Learning) -> None:
    """One step on half the squared error, averaged over all samples; for tables over the samples of each entry."""
    is_table, ranks, error = critic.group.critic.uses_cells, learning.ranks, (value - target).square()
    loss = 0.5 * (error.sum() if is_table else site_mean(error).sum())
    blocks = [key for key, *_ in critic.selection.parts]
    weights, gradients = bank.weights(blocks), bank.gradients(loss, blocks, retain_graph=is_table)
    # Of a table, the number of samples that read an entry is the derivative of the sum of what was read.
    seen = torch.autograd.grad(value.sum(), [weights[name] for name in gradients]) if is_table else ()
    numbers = dict(zip(gradients, seen, strict=is_table))
    if ranks is not None:
        gradients = ranks.average(gradients, 1 if is_table else value[0].numel())
        numbers = ranks.average(numbers)
    with torch.no_grad():
        for name, gradient in gradients.items():
            if is_table:
                gradient = gradient / torch.where(numbers[name] > 0.0, numbers[name], 1.0)
            weights[name].sub_(gradient, alpha=learning.sweep)


def _waves(layout: Layout) -> Iterator[tuple[list[QGroup], list[QNode]]]:
    """The Q-nodes of a layout by their height above the costs: groups that critics predict, and other Q-nodes."""
    network, height = layout.network, dict[str, int]()
    assert network is not None
    for node in network.nodes:
        height[node.name] = 1 + max((height.get(child, 0) for child in network.children(node.name)), default=0)
    predicted = {node.name for group in layout.groups for node in group.nodes}
    for level in sorted(set(height.values())):
        chosen = [(g, [k for k, n in enumerate(g.nodes) if height[n.name] == level]) for g in layout.groups]
        others = [n for n in network.nodes if height[n.name] == level and n.name not in predicted]
        yield [group.take(places) for group, places in chosen if places], others
