r"""Sigmoid belief networks by steps instead of seconds, beside gradients with next to no noise.

The tasks of ``sbn.py``, at the learning rate that all methods choose in the long races. Hindsight with 32 particles
shows what no estimator can do better at that rate: some steps are needed even without noise.

    python benchmarks/sbn_steps.py [--smoke] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import pyro
from common import Row, arguments, progress, table, write_csv, write_markdown
from race import Method, Runner, ours, plain_leave_one_out
from sbn import FULL, LONG, QUICK, SMOKE
from vae import DEFAULT, Digits, begin

from pyro_bpq.estimators import Hindsight

RATE, POINTS = 3e-3, 24


@dataclass(frozen=True)
class Length:
    """How many steps are taken, by depth, and with how many samples bounds are measured."""

    steps: tuple[tuple[int, int], ...]
    samples: int


STEPS, FEW = Length(((4, 1200), (2, 2040)), 100), Length(((2, 24),), 3)


def quiet() -> Method:
    """Hindsight with so many particles that little noise is left."""
    return Method("hindsight, 32", lambda: ours(Hindsight(draws=1, crossed=True), 32), group="ours")


def steps_to(run: Runner, goal: float) -> float:
    """Steps until the smoothed bound of a run is at the goal; infinite if it never is."""
    at = next((i for i, value in enumerate(run.smooth()) if value >= goal), None)
    return inf if at is None else run.smooth("steps")[at]


def trained(task: Digits, steps: int, samples: int, seed: int) -> list[Runner]:
    """Leave-one-out, the default, and hindsight with little noise."""
    runs = [Runner(task, method, RATE, seed) for method in (plain_leave_one_out(8), DEFAULT, quiet())]
    for run in runs:
        run.measure(samples)
    for _ in progress(range(POINTS), f"{task.name}, seed {seed}"):
        for run in runs:
            with pyro.get_param_store().scope(run.state) as run.state:
                for _ in range(steps // POINTS):
                    run.step()
            run.measure(samples)
    return runs


def ends(runs: list[Runner]) -> Iterator[Row]:
    """A row per run."""
    goal = runs[0].best()[0]
    for run in runs:
        share = steps_to(run, goal) / steps_to(runs[0], goal)
        yield {
            "method": run.method.name,
            "seed": run.seed,
            "steps": run.steps,
            "bound": f"{run.smooth()[-1]:.2f}",
            "steps to the first one's best": steps_to(run, goal),
            "over its own": share,
        }


def main() -> None:
    """Trains, prints, writes ``sbn_steps.csv`` and ``sbn_steps.md``."""
    options = arguments(__doc__)
    _, digits, _ = begin(options, (QUICK, FULL, SMOKE, LONG), "sbn_steps.py")
    if digits is None:
        return
    length, points = FEW if options.smoke else STEPS, list[Row]()
    parts = [
        f"Held-out importance bound after so many steps of Adam ({RATE:g}), in nats per image, averaged over three of "
        f"{POINTS} points. *hindsight, 32* has next to no noise left, so at this rate fewer steps are hardly possible."
    ]
    for depth, steps in length.steps:
        task, rows = replace(digits, name=f"{depth} layers", depth=depth), list[Row]()
        for seed in range(options.seeds or 1):
            runs = trained(task, steps, length.samples, seed)
            rows += ends(runs)
            points += [
                {"task": task.name, "method": run.method.name, "seed": seed, **point}
                for run in runs
                for point in run.curve
            ]
        parts += [f"## {task.name}", table(rows)]
        print("\n\n".join(parts[-2:]), flush=True)
        # After each task, since all of them take long.
        write_csv(options.output / "sbn_steps.csv", points)
        write_markdown(options.output / "sbn_steps.md", "Sigmoid belief networks by steps", parts)


if __name__ == "__main__":
    main()
