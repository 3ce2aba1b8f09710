"""What the benchmarks share: interleaved timing, the machine, result files."""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor
from tqdm import tqdm

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]


def arguments(description: str | None, resumes: bool = False) -> argparse.Namespace:
    """Options of every benchmark: quick by default.

    Args:
        description: Text of ``--help``.
        resumes: Whether the benchmark can leave out what a result file already has.

    Returns:
        ``full``, ``all``, ``long``, ``smoke``, ``compiled``, ``seeds``, ``output``; ``resume`` and ``only``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the published figures instead of the quick check")
    parser.add_argument("--all", action="store_true", help="every method and size, each as long as in a quick run")
    parser.add_argument("--long", action="store_true", help="the strongest rivals, five times as long as a quick run")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--compiled", action="store_true", help="compiled steps, where the benchmark has some")
    parser.add_argument("--seeds", type=int, default=None, help="number of seeds")
    parser.add_argument("--output", type=Path, default=RESULTS)
    if resumes:
        parser.add_argument("--resume", action="store_true", help="keep the runs that the result file has")
        parser.add_argument("--only", default="", help="beginning of the tasks to measure")
    return parser.parse_args()


def machine() -> str:
    """Processor, threads and versions, in a line."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":")[1].strip() if models else name
    return (
        f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) used, Python "
        f"{platform.python_version()}, torch {torch.__version__}, Pyro {pyro.__version__}"
    )


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python's garbage collector at rest, after it has run, as in ``timeit``."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interleaved(
    functions: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of functions that take turns, so that all see the same machine.

    Args:
        functions: What to time, by name.
        rounds: Number of calls of each.
        clock: Tells the time; the wall clock, or ``time.process_time`` where others use the machine as well.

    Returns:
        Seconds by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = clock()
            function()
            seconds[name].append(clock() - start)
    return {name: median(taken) for name, taken in seconds.items()}


def timed_step(step: Callable[[], object], elbo: object, longest: float) -> tuple[float, float]:
    """CPU seconds of a training step, and apart from them, by the clock, what it takes to make a compiled one.

    Args:
        step: Takes the step.
        elbo: Its loss, ours or another.
        longest: A step of a compiled loss that takes more seconds records and compiles.
    """
    start, begun = time.process_time(), time.perf_counter()
    step()
    taken = time.process_time() - start
    is_making = taken > longest and getattr(elbo, "compiled", None) is not None
    return (0.0, time.perf_counter() - begun) if is_making else (taken, 0.0)


def median(values: Iterable[float]) -> float:
    """The median."""
    return float(torch.tensor(list(values), dtype=torch.float64).quantile(0.5))


def quartiles(values: Iterable[float]) -> str:
    """Median and quartiles as text."""
    low, middle, high = torch.tensor(list(values), dtype=torch.float64).quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    )
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def flat(gradients: Iterable[Tensor]) -> Tensor:
    """Gradients as one vector in float64."""
    return torch.cat([gradient.detach().double().reshape(-1) for gradient in gradients])


def progress(items: Sequence[Any], text: str) -> Iterable[Any]:
    """A progress bar."""
    return tqdm(items, desc=text, leave=False, mininterval=1.0)


def read_csv(path: Path) -> list[Row]:
    """Rows of a file, numbers as such; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: _number(value) for name, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows with the columns of the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_tables(path: Path) -> list[list[dict[str, str]]]:
    """The Markdown tables of a page, as rows of text by column."""
    found = []
    for text in re.findall(r"(?:^\|.*\n)+", path.read_text(), flags=re.MULTILINE):
        names, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        found.append([dict(zip(names, line, strict=True)) for line in lines])
    return found


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with the columns of the first row."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [
        [f"{v:.3g}" if isinstance(v, float) else str(v) for v in (row.get(name, "") for name in rows[0])]
        for row in rows
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_markdown(path: Path, title: str, parts: Sequence[str]) -> None:
    """Writes a page: title, machine, parts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join((f"# {title}", *parts, f"Machine: {machine()}.")) + "\n")
