r"""Tabular critics under a fixed guide: how fast they get to the exact Q-functions, and what targets are worth.

Random graphs of up to seven binary and ternary nodes with several costs and bypasses. A critic is a table over its
scope; every cell is the running average of the targets of the rollouts that visited it. Targets come from
``pyro_bpq.targets.lambda_return`` and the rules of the network:

- *sampled TD*: the child's table at the child's sampled value,
- *expected TD*: its expectation over the child's conditional, co-parents sampled,
- *Monte Carlo*: the cost-to-go of the rollout.

The error is the root of the mean squared error of the tables over visited states, in units of the spread of the
cost-to-go. It falls as N^-1/2 where targets are noisy. With a *wrong scope* (one variable left out) it does not fall
to zero.

    python benchmarks/convergence.py [--full] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from common import Row, arguments, progress, table, write_csv, write_markdown
from torch import Tensor

from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.targets.lambda_return import monte_carlo_return, td_target
from pyro_bpq.testing import TabularProgram

ROLLOUTS = (100, 300, 1000, 3000, 10_000, 30_000)
METHODS = ("sampled TD", "expected TD", "Monte Carlo")
GROWTH = 0.05  # rollouts of one update, relative to those so far


def random_program(seed: int, min_nodes: int = 4, max_nodes: int = 7) -> TabularProgram:
    """A random graph on which some critic has more to read than its own site, with random tables."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        count = int(torch.randint(min_nodes, max_nodes + 1, (), generator=generator))
        names = [f"x{i}" for i in range(count)]
        edges = torch.rand(count, count, generator=generator) < 0.45
        reads = torch.rand(3, count, generator=generator) < 0.4
        nodes = {name: [names[j] for j in range(i) if edges[i, j]] for i, name in enumerate(names)}
        costs = {f"f{k}": [n for n, read in zip(names, row, strict=True) if read] for k, row in enumerate(reads)}
        graph = StochasticComputationGraph.from_parents(nodes, costs)
        learned = BackpropQNetwork.build(graph).learned
        if len(learned) > 1 and any(len(node.scope) > 1 for node in learned):
            return TabularProgram.random(graph, generator)


def with_wrong_scope(network: BackpropQNetwork) -> BackpropQNetwork:
    """The network without one of the variables that its critics have to read besides their own sites."""
    nodes = tuple(
        replace(node, scope=tuple(name for name in node.scope if name == node.site)) if len(node.scope) > 1 else node
        for node in network.nodes
    )
    return replace(network, nodes=nodes)


class Tables:
    """Critics of a network: running averages of targets, a cell for each joint state of a scope.

    Args:
        program: The tables of the graph.
        network: Its network.
        method: One of ``METHODS``.
    """

    def __init__(self, program: TabularProgram, network: BackpropQNetwork, method: str) -> None:
        self.program, self.network, self.method = program, network, method
        self.total = {node.name: torch.zeros(self._shape(node.scope), dtype=torch.float64) for node in network.learned}
        self.visits = {name: torch.zeros_like(total) for name, total in self.total.items()}

    def _shape(self, scope: Sequence[str]) -> list[int]:
        axes = {self.program.graph.index[name] for name in scope}
        return [size if axis in axes else 1 for axis, size in enumerate(self.program.joint.shape)]

    @property
    def q(self) -> dict[str, Tensor]:
        """The tables; zero in cells that were never visited."""
        return {name: total / self.visits[name].clamp(min=1.0) for name, total in self.total.items()}

    def update(self, count: int, generator: torch.Generator) -> None:
        """Learns from ``count`` new rollouts, whose targets read the tables as they were."""
        values = self.program.sample(count, generator)
        for name, target in self.targets(values, count).items():
            if name in self.total:
                cells = self.program.cells(self.total[name], values, count)
                self.total[name].view(-1).index_add_(0, cells, target.expand(count))
                self.visits[name].view(-1).index_add_(0, cells, torch.ones(count, dtype=torch.float64))

    def targets(self, values: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Targets of each critic, ``(count,)``."""
        program, network = self.program, self.network

        def seen(tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: program.at(t.expand(program.joint.shape), values, count) for name, t in tables.items()}

        costs = seen(program.costs)
        if self.method == "Monte Carlo":
            return monte_carlo_return(network, costs)
        if self.method == "sampled TD":
            return td_target(network, seen(self.q), costs)
        # A node whose costs are all immediate has a critic too: zero.
        zero = {node.name: torch.zeros_like(program.joint) for node in network.nodes if not node.is_learned}
        q = {**self.q, **zero}
        return td_target(network, seen(q), costs, 1.0, seen(program.expected(network, q)))

    def squared_error(self, exact: Mapping[str, Tensor]) -> float:
        """Mean squared error over states, summed over critics."""
        joint = self.program.joint
        return sum(float((joint * (q - exact[name]).square()).sum()) for name, q in self.q.items())


def spread(program: TabularProgram, network: BackpropQNetwork) -> float:
    """Variance of the cost-to-go, summed over critics."""
    total = 0.0
    for node in network.learned:
        cost = sum((program.costs[name] for name in node.remote), torch.zeros(()))
        total += float((program.joint * (cost - (program.joint * cost).sum()).square()).sum())
    return total


def errors(
    program: TabularProgram, method: str, seed: int, is_wrong: bool = False, rollouts: Sequence[int] = ROLLOUTS
) -> list[float]:
    """Relative squared error after each number of rollouts.

    Args:
        program: The tables of the graph.
        method: One of ``METHODS``.
        seed: Seed of the rollouts.
        is_wrong: Whether critics have a wrong scope.
        rollouts: Numbers of rollouts, ascending.

    Returns:
        One number for each of ``rollouts``.
    """
    generator = torch.Generator().manual_seed(seed)
    network = BackpropQNetwork.build(program.graph)
    exact, unit = program.exact_q(network), spread(program, network)
    critics = Tables(program, with_wrong_scope(network) if is_wrong else network, method)
    found, done = [], 0
    for target in rollouts:
        while done < target:
            count = min(max(1, int(GROWTH * done)), target - done)
            critics.update(count, generator)
            done += count
        found.append(critics.squared_error(exact) / unit)
    return found


def slope(rollouts: Sequence[int], error: Sequence[float]) -> float:
    """Slope of log error over log N by least squares."""
    x = torch.tensor(rollouts, dtype=torch.float64).log()
    y = torch.tensor(error, dtype=torch.float64).log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def measure(programs: int, seeds: int) -> list[Row]:
    """Root mean squared errors over programs and seeds, with their slopes.

    Args:
        programs: Number of random programs.
        seeds: Number of runs on each.

    Returns:
        One row per method and kind of scope.
    """
    rows = []
    for is_wrong in (False, True):
        for method in METHODS:
            runs = [
                errors(random_program(p), method, 1000 * p + s, is_wrong)
                for p in progress(range(programs), f"{method}{', wrong scope' if is_wrong else ''}")
                for s in range(seeds)
            ]
            error = torch.tensor(runs, dtype=torch.float64).mean(0).sqrt().tolist()
            row: Row = {"targets": method, "scope": "wrong" if is_wrong else "right"}
            row.update({f"N = {n}": e for n, e in zip(ROLLOUTS, error, strict=True)})
            rows.append({**row, "slope": slope(ROLLOUTS, error), "slope from 1000": slope(ROLLOUTS[2:], error[2:])})
    return rows


def main() -> None:
    """Measures, prints, writes ``convergence.csv`` and ``convergence.md``."""
    options = arguments(__doc__)
    torch.set_default_dtype(torch.float64)
    programs, seeds = (40, options.seeds or 5) if options.full else (12, options.seeds or 2)
    rows = measure(programs, seeds)
    write_csv(options.output / "convergence.csv", rows)
    page = table(rows)
    print(page)
    text = (
        f"Tables on {programs} random graphs, {seeds} runs each: root mean squared error of the learned Q-functions "
        '(`reduction="chain"`, exact immediate costs) relative to the spread of the cost-to-go, after N rollouts, and '
        "the slope of log error over log N. *Wrong scope*: critics see their own site only."
    )
    assert all(math.isfinite(row["slope"]) for row in rows)
    write_markdown(options.output / "convergence.md", "Convergence of tabular critics", [text, page])


if __name__ == "__main__":
    main()
