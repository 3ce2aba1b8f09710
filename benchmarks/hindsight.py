r"""Hindsight against leave-one-out at fixed weights: chains by how strongly sites are coupled, layers, chorales.

Layers and chorales are those of ``gradients.py``, after 1,000 steps, and measured as there: variance of the gradient of
the guide's parameters over its squared norm, times CPU time. Chains have 50 sites of 8 states, random transitions in
guide and model with logits of this standard deviation, and a random cost of every state. All methods take turns.

    python benchmarks/hindsight.py [--full | --smoke] [--seeds N] [--only TASK [--resume]] [--output DIRECTORY]
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import chorales
import pyro
import pyro.distributions as dist
import sbn
import torch
import vae
from common import Row, arguments, median, read_csv, table, write_csv, write_markdown
from gradients import FULL, QUICK, SMOKE, Drawer, Size, compare, measure
from race import Data, Method, Task, leave_one_out, ours, plain_leave_one_out
from torch import nn

from pyro_bpq.estimators import Hindsight


@dataclass(frozen=True)
class Chain:
    """A chain of given transitions, as a task.

    Args:
        name: Name in tables.
        coupling: Standard deviation of the logits.
        sites: Number of sites.
        states: Number of states.
    """

    name: str
    coupling: float
    sites: int = 50
    states: int = 8
    unit: str = "chain"

    def programs(self, program: str) -> Transitions:
        """Guide and model."""
        return Transitions(self)

    def batch(self, generator: torch.Generator) -> Data:
        """No data."""
        return ()


class Transitions(nn.Module):
    """Logits of guide and model, and the costs of states."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        generator, shape = torch.Generator().manual_seed(0), (chain.sites, chain.states, chain.states)
        self.q = nn.Parameter(chain.coupling * torch.randn(shape, generator=generator))
        self.register_buffer("p", chain.coupling * torch.randn(shape, generator=generator))
        self.register_buffer("cost", torch.randn(shape[:2], generator=generator))

    def guide(self) -> None:
        """A chain of states."""
        pyro.module("chain", self)
        z = torch.tensor(0)
        for t, logits in enumerate(self.q):
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=logits[z]))

    def model(self) -> None:
        """The same with fixed transitions, and a cost of every state."""
        z = torch.tensor(0)
        for t, logits in enumerate(self.p):
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=logits[z]))
            pyro.factor(f"cost_{t}", -self.cost[t][z])


def chain_rows(chain: Chain, methods: Sequence[Method], size: Size, seed: int) -> list[Row]:
    """Figures of a chain."""
    weights = chain.programs("").state_dict()
    drawers = [Drawer(chain, method, weights, seed) for method in methods]
    for drawer in drawers:
        drawer.learn(min(size.learning, 10))
    for _ in range(size.draws):
        for drawer in drawers:
            drawer.draw((), ("q",))
    return [{"task": chain.name, "seed": seed, "steps": 0, **row} for row in compare(drawers)]


def hindsight(particles: int) -> Method:
    """Hindsight."""
    return Method(f"hindsight, {particles}", lambda: ours(Hindsight(), particles), group="ours")


def crossed(particles: int) -> Method:
    """Hindsight with other particles' values beside the own past."""
    estimator = Hindsight(crossed=True)
    return Method(f"hindsight, crossed, {particles}", lambda: ours(estimator, particles), group="ours")


def tasks(size: Size) -> Iterator[Task]:
    """The tasks whose data is there."""
    digits = vae.load_digits({"curve": 1, "valid": 1, "test": 1})
    if digits is not None:
        for depth in size.depths:
            yield replace(digits, name=f"{depth} layers", depth=depth)
    music = chorales.load_chorales(size.frames, 16)
    if music is not None:
        yield music


def drawn(particles: int) -> Method:
    """What the default is on large layers: one component of a row is corrected."""
    kind = Hindsight(draws=1, crossed=True)
    return Method(f"hindsight, crossed, one component, {particles}", lambda: ours(kind, particles), group="ours")


def main() -> None:
    """Measures, prints, writes ``hindsight.csv`` and ``hindsight.md``."""
    options = arguments(__doc__, resumes=True)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="pyro")
    quick = replace(QUICK, checkpoints=(1000,), learning=20, draws=40)
    size = FULL if options.full else SMOKE if options.smoke else quick
    seeds = options.seeds or size.seeds
    rows: list[Row] = read_csv(options.output / "hindsight.csv") if options.resume else []
    rows = [row for row in rows if not row["task"].startswith(options.only)]
    several = [plain_leave_one_out(particles) for particles in (8, 16, 32)]
    for name, coupling in (("weakly", 0.3), ("medium", 1.0), ("strongly", 3.0)):
        methods = (Method("leave-one-out, 8", leave_one_out(8).elbo, group="ours"), hindsight(4), hindsight(8))
        chain = Chain(f"{name} coupled chain", coupling)
        if not chain.name.startswith(options.only):
            continue
        rows += [row for seed in range(seeds) for row in chain_rows(chain, methods, size, seed)]
        # After each task, since all of them take long.
        write(options.output, rows, size, seeds)
    for task in tasks(size):
        if not task.name.startswith(options.only):
            continue
        methods = (*several, sbn.crossed(8), crossed(4), crossed(8), *(drawn(particles) for particles in (4, 8, 16)))
        if isinstance(task, chorales.Chorales):
            methods = (*several, hindsight(2), hindsight(4), hindsight(8), crossed(4))
        rows += [row for seed in range(seeds) for row in measure(task, methods, size, seed)]
        write(options.output, rows, size, seeds)


def write(output: Path, rows: Sequence[Row], size: Size, seeds: int) -> None:
    """Writes CSV and Markdown, prints the tables."""
    columns = ("method", "variance / squared gradient", "z", "ms", "variance x ms")
    parts = [
        f"Gradients at fixed weights; {size.draws} draws of each method, which took turns; medians over {seeds} "
        "seed(s). *z*: squared distance from the mean of the other methods in units of its expectation, 1 if unbiased. "
        "*ms*: median CPU time of loss and gradients."
    ]
    for name in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == name and row["steps"] in (0, size.checkpoints[-1])]
        found = []
        for method in dict.fromkeys(row["method"] for row in mine):
            own = [row for row in mine if row["method"] == method]
            found.append({"method": method, **{c: median(row[c] for row in own) for c in columns[1:]}})
        parts += [f"## {name}", table(found)]
    print("\n\n".join(parts))
    write_csv(output / "hindsight.csv", rows)
    write_markdown(output / "hindsight.md", "Hindsight", parts)


if __name__ == "__main__":
    main()
