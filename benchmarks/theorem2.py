r"""The error bound of Backprop-Q's Theorem 2 beside the error that it bounds, on chains of growing depth.

Binary chains ``X_L -> ... -> X_1 -> f`` with random tables: a critic for each node, learned by sampled TD as in the
paper. ``Q_l`` is the critic at distance ``l`` from the cost, ``Q_0 = f``. All expectations are sums over joint states:

    e_l = E[(Q_l - Q_{l-1})²],   d_l = E[(Q_l - E[Q_{l-1} | X_l])²],   h_l = E[(Q_l - exact Q_l)²]

- *theorem*: ``h_l <= (3 2^(l-1) - 2) max e``.
- *triangle*: ``h_l <= l² max e``, by the triangle inequality in place of ``(a + b)² <= 2 a² + 2 b²``.
- *expected*: ``h_l <= (Σ √d)²``, with the expected differences.

``e`` holds the variance of a draw, ``e_l = d_l + E Var[Q_{l-1} | X_l]``, which no training removes. The first two
bounds stay away from zero where critics are exact, the third does not.

    python benchmarks/theorem2.py [--full] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from common import Row, arguments, progress, table, write_csv, write_markdown
from convergence import GROWTH, Tables
from torch import Tensor

from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.testing import TabularProgram

ROUNDING = 1e-20
DEPTHS = (2, 3, 4, 6, 8, 10, 12)


class Deviations(NamedTuple):
    """Mean squared differences by distance from the cost, the nearest first.

    Args:
        sampled: ``e_l``, between a critic and the next one at the drawn value.
        expected: ``d_l``, between a critic and the expectation of the next one.
        error: ``h_l``, between a critic and the exact Q-function.
    """

    sampled: tuple[float, ...]
    expected: tuple[float, ...]
    error: tuple[float, ...]

    def theorem(self, distance: int) -> float:
        """The bound of Theorem 2 on ``h`` at a distance."""
        return (3.0 * 2.0 ** (distance - 1) - 2.0) * max(self.sampled[:distance])

    def triangle(self, distance: int) -> float:
        """The bound by the triangle inequality."""
        return float(distance) ** 2 * max(self.sampled[:distance])

    def by_expectation(self, distance: int) -> float:
        """The bound by expected differences."""
        return sum(max(d, 0.0) ** 0.5 for d in self.expected[:distance]) ** 2


def chain(depth: int, seed: int) -> tuple[TabularProgram, BackpropQNetwork]:
    """A chain with random tables and a cost of variance 1 at its end, and its network with every Q learned."""
    names = [f"x{depth - i}" for i in range(depth)]
    parents = {name: names[i - 1 : i] if i else [] for i, name in enumerate(names)}
    graph = StochasticComputationGraph.from_parents(parents, {"f": ["x1"]})
    program = TabularProgram.random(graph, torch.Generator().manual_seed(seed), sizes=(2,))
    cost = program.costs["f"] - (program.joint * program.costs["f"]).sum()
    cost = cost / (program.joint * cost.square()).sum().sqrt()
    program = TabularProgram(graph, program.conditionals, {"f": cost})
    return program, BackpropQNetwork.build(graph, immediate="learned")


def deviations(program: TabularProgram, network: BackpropQNetwork, q: Mapping[str, Tensor]) -> Deviations:
    """All differences of critics on a chain, exact by enumeration."""
    exact, joint = program.exact_q(network), program.joint
    sampled, expected, error = [], [], []
    upstream = program.costs["f"]
    for distance in range(1, len(q) + 1):
        own = q[f"x{distance}"]
        mean = program.expect(upstream, program.known(f"x{distance}", network.form))
        sampled.append(float((joint * (own - upstream).square()).sum()))
        expected.append(float((joint * (own - mean).square()).sum()))
        error.append(float((joint * (own - exact[f"x{distance}"]).square()).sum()))
        upstream = own
    return Deviations(tuple(sampled), tuple(expected), tuple(error))


def learned(program: TabularProgram, network: BackpropQNetwork, rollouts: int, seed: int) -> dict[str, Tensor]:
    """Tables after a number of rollouts of sampled TD; each cell is the mean of its targets."""
    tables, generator, done = Tables(program, network, "sampled TD"), torch.Generator().manual_seed(seed), 0
    while done < rollouts:
        count = min(max(1, int(GROWTH * done)), rollouts - done)
        tables.update(count, generator)
        done += count
    return tables.q


def measure(depth: int, seeds: int, rollouts: int) -> Row:
    """Means over random chains of the critic furthest from the cost, with learned and with exact critics."""
    rows = []
    for seed in range(seeds):
        program, network = chain(depth, seed)
        found = deviations(program, network, learned(program, network, rollouts, seed))
        exact = deviations(program, network, program.exact_q(network))
        rows.append(
            (
                max(found.sampled),
                found.error[-1],
                found.theorem(depth),
                found.triangle(depth),
                found.by_expectation(depth),
                exact.error[-1],
                exact.theorem(depth),
                exact.by_expectation(depth),
            )
        )
    names = (
        "largest e",
        "error h",
        "theorem",
        "triangle",
        "expected",
        "exact: error",
        "exact: theorem",
        "exact: expected",
    )
    means = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
    row: Row = {"depth": depth, **dict(zip(names, means, strict=True))}
    row = {name: 0.0 if isinstance(value, float) and abs(value) < ROUNDING else value for name, value in row.items()}
    return {
        **row,
        "theorem / error": row["theorem"] / row["error h"],
        "expected / error": row["expected"] / row["error h"],
    }


def main() -> None:
    """Measures, prints, writes ``theorem2.csv`` and ``theorem2.md``."""
    options = arguments(__doc__)
    torch.set_default_dtype(torch.float64)
    seeds = options.seeds or (40 if options.full else 10)
    rollouts = 200 if options.smoke else 10_000
    rows = [measure(depth, seeds, rollouts) for depth in progress(DEPTHS[:3] if options.smoke else DEPTHS, "depths")]
    write_csv(options.output / "theorem2.csv", rows)
    page = table(rows)
    print(page)
    text = (
        f"{seeds} random binary chains of each depth with one cost of variance 1 at the end, every Q a table, sampled "
        f"TD with {rollouts} rollouts. *largest e*: the theorem's epsilon. *error h*: mean squared error of the critic "
        "furthest from the cost. *theorem*, *triangle*, *expected*: bounds on it. *exact*: the same for exact "
        "Q-functions. All are sums over joint states."
    )
    write_markdown(options.output / "theorem2.md", "The bound of Theorem 2", [text, page])


if __name__ == "__main__":
    main()
