r"""Variance of one step's gradient at fixed weights and data, times the step's CPU time, for every method of the races.

Weights are those that lean leave-one-out with eight samples reaches after some steps of training. There each method
takes steps on fresh batches that move no weights, so that its critics, baselines and running statistics learn; then
all draw gradients on one batch, in turns. What can be told to stand still (``elbo.eval()``) does so in the draws. Of a
gradient the part counts that reaches the guide's parameters, since the model's is one and the same in all. Several
steps' gradients can be averaged in the time of one slower step, so variance times time compares methods.

    python benchmarks/gradients.py [--full | --smoke] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import chorales
import pyro
import sbn
import torch
import vae
from common import Row, arguments, flat, median, progress, table, write_csv, write_markdown
from pyro import poutine
from race import Data, Method, Runner, Task, plain_leave_one_out
from torch import Tensor, nn

RATE = 3e-3
# How their means are compared: an exact method has no guide, or other parameters.
COMPARED = ("ours", "TraceGraph", "leave-one-out", "unbiased", "biased")


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        checkpoints: Steps of training ahead of each measurement.
        learning: Steps in which a method learns at fixed weights.
        draws: Gradients of each method.
        seeds: Number of seeds.
        depths: Layers of the belief networks.
        frames: Length of the chorales.
    """

    checkpoints: tuple[int, ...]
    learning: int
    draws: int
    seeds: int
    depths: tuple[int, ...]
    frames: int = 16


QUICK = Size((100, 1000), learning=100, draws=100, seeds=1, depths=(2, 4))
FULL = Size((100, 1000, 5000), learning=500, draws=500, seeds=3, depths=(2, 4, 8, 16), frames=60)
SMOKE = Size((1,), learning=2, draws=3, seeds=1, depths=(2,), frames=3)


def guide_parameters(programs: nn.Module, data: Data) -> list[str]:
    """Names of the parameters that the guide's log-probabilities depend on."""
    named = {name: p for name, p in programs.named_parameters() if not name.startswith("baseline")}
    with pyro.get_param_store().scope():
        log_q = poutine.trace(programs.guide).get_trace(*data).log_prob_sum()
    found = torch.autograd.grad(log_q, list(named.values()), allow_unused=True)
    return [name for name, gradient in zip(named, found, strict=True) if gradient is not None]


class Drawer:
    """One method at fixed weights.

    Args:
        task: The task.
        method: The method.
        weights: Weights by name.
        seed: Seed of batches.
    """

    def __init__(self, task: Task, method: Method, weights: dict[str, Tensor], seed: int) -> None:
        self.runner = Runner(task, method, RATE, seed)
        self.method, self.programs, self.elbo = method, self.runner.programs, self.runner.elbo
        # Those of a baseline net of the guide are its own.
        self.programs.load_state_dict(weights, strict=False)
        for group in self.runner.optimizer.param_groups:
            group["lr"] = 0.0 if group["lr"] == RATE else group["lr"]
        self.seconds: list[float] = []
        self.gradients: list[Tensor] = []

    def learn(self, steps: int) -> None:
        """Steps that move no weights but those of a baseline."""
        with pyro.get_param_store().scope(self.runner.state) as self.runner.state:
            for _ in range(steps):
                self.runner.step()
        if isinstance(self.elbo, nn.Module):
            self.elbo.eval()

    def draw(self, data: Data, names: Sequence[str]) -> None:
        """Another gradient, and the CPU time it took."""
        named = dict(self.programs.named_parameters())
        self.runner.optimizer.zero_grad()
        with pyro.get_param_store().scope(self.runner.state) as self.runner.state:
            start = time.process_time()
            self.elbo.loss_and_grads(self.programs.model, self.programs.guide, *data)
            self.seconds.append(time.process_time() - start)
        found = (named[name].grad for name in names)
        self.gradients.append(
            flat(torch.zeros_like(named[n]) if g is None else g for n, g in zip(names, found, strict=True))
        )

    def moments(self) -> tuple[Tensor, float]:
        """Mean gradient, and the variance of one, summed over parameters."""
        drawn = torch.stack(self.gradients)
        return drawn.mean(0), float(drawn.var(0).sum())


def compare(drawers: Sequence[Drawer]) -> Iterator[Row]:
    """A row per method: variance over the squared long-run gradient, that of the unbiased methods together."""
    found = {drawer.method.name: drawer.moments() for drawer in drawers}
    draws = len(drawers[0].gradients)
    unbiased = [drawer.method.name for drawer in drawers if drawer.method.group != "biased"]
    for drawer in drawers:
        mean, variance = found[drawer.method.name]
        # The others', each with a weight that goes with its precision; their mean is as exact as all draws together.
        others = [found[name] for name in unbiased if name != drawer.method.name]
        weights = [1.0 / max(v, 1e-30) for _, v in others]
        long_run = sum(w * m for w, (m, _) in zip(weights, others, strict=True)) / sum(weights)
        noise = 1.0 / sum(weights) / draws
        squared = max(float(long_run.square().sum()) - noise, 0.0)
        gap, expected = float((mean - long_run).square().sum()), variance / draws + noise
        milliseconds = 1e3 * median(drawer.seconds)
        yield {
            "method": drawer.method.name + (" (biased)" if drawer.method.group == "biased" else ""),
            "variance / squared gradient": variance / squared,
            "squared bias / squared gradient": max(gap - expected, 0.0) / squared,
            "z": gap / expected,
            "ms": milliseconds,
            "variance x ms": milliseconds * variance / squared,
        }


def measure(task: Task, methods: Sequence[Method], size: Size, seed: int) -> list[Row]:
    """All checkpoints of a task."""
    warnings.filterwarnings("ignore", module="pyro")
    trainer = Runner(task, plain_leave_one_out(8), RATE, seed)
    methods = [method for method in methods if method.group in COMPARED]
    data, rows = task.batch(torch.Generator().manual_seed(seed + 1000)), []
    names = guide_parameters(trainer.programs, data)
    for checkpoint in size.checkpoints:
        with pyro.get_param_store().scope(trainer.state) as trainer.state:
            while trainer.steps < checkpoint:
                trainer.step()
        drawers = [Drawer(task, method, trainer.programs.state_dict(), seed) for method in methods]
        for drawer in progress(drawers, f"{task.name}, {checkpoint} steps: learning"):
            drawer.learn(size.learning)
        for _ in progress(range(size.draws), f"{task.name}, {checkpoint} steps: gradients"):
            for drawer in drawers:
                drawer.draw(data, names)
        rows += [{"task": task.name, "seed": seed, "steps": checkpoint, **row} for row in compare(drawers)]
    return rows


def tasks(size: Size) -> Iterator[tuple[Task, Sequence[Method]]]:
    """The tasks of the races whose data is there, and their methods."""
    digits = vae.load_digits({"curve": 1, "valid": 1, "test": 1})
    if digits is not None:
        for kind in ("linear", "nonlinear"):
            yield replace(digits, name=f"{kind} VAE", kind=kind), vae.METHODS
        for depth in size.depths:
            yield replace(digits, name=f"{depth} layers", depth=depth), sbn.METHODS
    music = chorales.load_chorales(size.frames, 16)
    if music is not None:
        yield music, chorales.METHODS


def averages(rows: Sequence[Row], name: str, checkpoint: int) -> list[Row]:
    """Medians over seeds at a checkpoint of a task, least variance times time first."""
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [r for r in rows if (r["task"], r["steps"], r["method"]) == (name, checkpoint, method)]
        if mine:
            columns = [column for column in mine[0] if column not in ("task", "seed", "steps", "method")]
            found.append({"method": method, **{c: median(row[c] for row in mine) for c in columns}})
    return sorted(found, key=lambda row: row["variance x ms"])


def main() -> None:
    """Measures, prints, writes ``gradients.csv`` and ``gradients.md``."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    size = FULL if options.full else SMOKE if options.smoke else QUICK
    seeds = options.seeds or size.seeds
    rows: list[Row] = []
    for task, methods in tasks(size):
        rows += [row for seed in range(seeds) for row in measure(task, methods, size, seed)]
        # After each task, since all of them take long.
        write(options.output, rows, size, seeds)
    if not rows:
        print("gradients.py: skipped, PYRO_BPQ_DATA names no folder with mnist.npz or jsb.npz")


def write(output: Path, rows: Sequence[Row], size: Size, seeds: int) -> None:
    """Writes CSV and Markdown, prints the last task's tables."""
    parts = [
        "Gradients of the guide's parameters on one batch, at weights that leave-one-out of 8 reaches after so many "
        f"steps of Adam ({RATE:g}); {size.draws} draws of each method after {size.learning} steps in which it learned "
        f"at these weights; medians over {seeds} seed(s). The squared gradient is that of the mean over all draws of "
        "the other unbiased methods. *z*: squared distance from that mean in units of its expectation, 1 if unbiased. "
        "*ms*: CPU time of loss and gradients, critics and baselines at rest. Where latents are many, more steps at "
        "less cost can matter more than variance: see the races."
    ]
    for name in dict.fromkeys(row["task"] for row in rows):
        for checkpoint in size.checkpoints:
            parts += [f"## {name}, after {checkpoint} steps", table(averages(rows, name, checkpoint))]
    print("\n\n".join(parts[-2 * len(size.checkpoints) :]), flush=True)
    write_csv(output / "gradients.csv", rows)
    write_markdown(output / "gradients.md", "Gradients at fixed weights", parts)


if __name__ == "__main__":
    main()
