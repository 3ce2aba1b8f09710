r"""Where the time of our default step goes, by part, on the CPU.

Each part is a function of the package that a step calls once or a few times; its time excludes that of other parts
that it calls. The functions are wrapped by :mod:`cProfile`, whose overhead falls on code with many small Python calls;
the shares are therefore those of profiled time, and the milliseconds of a whole step are measured without it.

    python benchmarks/profile_step.py [--full] [--output DIRECTORY]
"""

from __future__ import annotations

import cProfile
import pstats
import time
import warnings
from collections.abc import Callable, Mapping

import pyro
from common import Row, arguments, median, table, write_csv, write_markdown
from overhead import Program, autoencoder, belief_network, chain
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_bpq import TraceBackpropQ_ELBO

# Function of the package -> part. Time inside of it is its part's until another one of these is entered.
PARTS: Mapping[tuple[str, str], str] = {
    ("tracer.py", "trace_run"): "run guide and model, read their traces",
    ("structure_cache.py", "graph"): "graph and plan (cached)",
    ("planner.py", "plan"): "graph and plan (cached)",
    ("flipped_costs.py", "flipped_costs"): "extra run of the model",
    ("at_values.py", "_fresh_run"): "runs at other values",
    ("at_values.py", "_run"): "runs at other values",
    ("shared_backward.py", "shared_backward"): "backward through the costs, slopes with it",
    ("site_program.py", "slope_of"): "backward through the costs, slopes with it",
    ("critic_step.py", "evaluate_critics"): "evaluate critics",
    ("surrogate.py", "step"): "returns, control variates, surrogate",
    ("critic_loss.py", "critic_loss"): "critics' loss",
    ("critic_trainer.py", "prepare"): "gradients of the critics",
    ("critic_trainer.py", "learn"): "update critics and statistics",
    ("_tensor.py", "backward"): "backward of the loss",
    ("optim.py", "__call__"): "the user's optimiser",
}
OTHER = "the rest of SVI and of the ELBO"


def part_of(key: tuple[str, int, str]) -> str | None:
    """The part that a profiled function begins."""
    file, _, name = key
    return PARTS.get((file.rsplit("/", 1)[-1], name))


def by_part(stats: pstats.Stats) -> dict[str, float]:
    """Seconds by part: what a part takes less what it spends in parts that it calls."""
    raw = stats.stats  # type: ignore[attr-defined]
    # Cumulative time of each (caller, callee) edge tells how much of a part's time passes through each function.
    seconds: dict[str, float] = dict.fromkeys([*PARTS.values(), OTHER], 0.0)
    for key, (_, _, _, cumulative, _) in raw.items():
        part = part_of(key)
        if part is not None:
            seconds[part] += cumulative
    # A part that runs within another one is taken from it; who contains whom is fixed by the code.
    for inner, outer in INSIDE.items():
        seconds[outer] -= seconds[inner]
    total = max(entry[3] for entry in raw.values())
    seconds[OTHER] = total - sum(seconds.values())
    return seconds


INSIDE = {
    "evaluate critics": "returns, control variates, surrogate",
    "runs at other values": "returns, control variates, surrogate",
    "backward through the costs, slopes with it": "returns, control variates, surrogate",
    "critics' loss": "returns, control variates, surrogate",
}


def measure(name: str, program: Program, rounds: int) -> list[Row]:
    """Milliseconds and shares of a step's parts."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    step: Callable[[], object] = SVI(*program, Adam({"lr": 1e-4}), TraceBackpropQ_ELBO()).step
    for _ in range(15):
        step()
    whole = []
    for _ in range(rounds):
        start = time.process_time()
        step()
        whole.append(time.process_time() - start)
    profiler = cProfile.Profile(time.process_time)
    for _ in range(rounds):
        profiler.runcall(step)
    seconds = by_part(pstats.Stats(profiler))
    total, milliseconds = sum(seconds.values()), 1000 * median(whole)
    return [
        {
            "program": name,
            "part": part,
            "share": f"{100 * taken / total:.0f} %",
            "milliseconds": milliseconds * taken / total,
        }
        for part, taken in sorted(seconds.items(), key=lambda item: -item[1])
    ] + [{"program": name, "part": "**whole step**", "share": "100 %", "milliseconds": milliseconds}]


def main() -> None:
    """Measures, prints, and writes CSV and Markdown."""
    options = arguments(__doc__)
    warnings.filterwarnings("ignore", category=UserWarning)
    programs = {
        "chain, 50 sites": chain(50, False),
        "belief network 64-20-20": belief_network(64, 20),
        "autoencoder 784-200": autoencoder(784, 200),
    }
    rows = [row for name, program in programs.items() for row in measure(name, program, 200 if options.full else 50)]
    write_csv(options.output / "profile_step.csv", rows)
    text = table(rows)
    write_markdown(options.output / "profile_step.md", "Where a step's time goes", [text])
    print(text)


if __name__ == "__main__":
    main()
