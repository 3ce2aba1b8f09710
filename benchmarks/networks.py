r"""Build time of Backprop-Q networks: chains of up to 1,000 sites with a cost each, by reduction.

Seconds of processor time, and the exponent of the growth from 250 to 1,000 sites in ``sites × costs``: 1 is linear.
``recurrent`` chains read all earlier sites.

    python benchmarks/networks.py [--full] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

import math
import time
from typing import get_args

from common import Row, arguments, table, write_csv, write_markdown

from pyro_bpq.graph.network import BackpropQNetwork, Reduction
from pyro_bpq.graph.scg import StochasticComputationGraph

SITES = (125, 250, 500, 1000)


def chain(sites: int, is_recurrent: bool) -> StochasticComputationGraph:
    """A chain with a cost on every site; nothing is cached on a new one."""
    nodes = {f"x{t}": [f"x{s}" for s in range(0 if is_recurrent else max(t - 1, 0), t)] for t in range(sites)}
    return StochasticComputationGraph.from_parents(nodes, {f"f{t}": [f"x{t}"] for t in range(sites)})


def seconds(sites: int, reduction: Reduction, is_recurrent: bool, repeats: int) -> float:
    """Shortest time of building a network from a graph on which nothing is cached."""
    found = []
    for _ in range(repeats):
        graph = chain(sites, is_recurrent)
        start = time.process_time()
        BackpropQNetwork.build(graph, reduction)
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    """Measures, prints, writes ``networks.csv`` and ``networks.md``."""
    options = arguments(__doc__)
    repeats = options.seeds or (3 if options.full else 2)
    rows: list[Row] = []
    for is_recurrent in (False, True):
        # Where every site reads all earlier ones, a network per cost has a thousand times as many children.
        names = [r for r in get_args(Reduction) if not is_recurrent or r in ("chain", "tree", "single")]
        for reduction in names:
            taken = {n: seconds(n, reduction, is_recurrent, repeats) for n in SITES}
            row: Row = {"graph": "recurrent" if is_recurrent else "chain", "reduction": reduction}
            row.update({f"{n} sites": s for n, s in taken.items()})
            row["exponent in sites x costs"] = math.log(taken[1000] / taken[250]) / math.log(16)
            rows.append(row)
            print(row, flush=True)
    write_csv(options.output / "networks.csv", rows)
    page = table(rows)
    print(page)
    text = (
        f"Seconds of processor time to build a network with exact immediate costs, the shortest of {repeats} runs, and "
        "the exponent of its growth from 250 to 1,000 sites: 1 is linear in sites times costs."
    )
    write_markdown(options.output / "networks.md", "Build time of networks", [text, page])


if __name__ == "__main__":
    main()
