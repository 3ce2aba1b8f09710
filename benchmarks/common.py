"""What the benchmarks share: timing, result files, and training runs that take turns.

A task names its programs and its data, a method its ELBO. All methods see the same batches and start from the same
weights; each has the learning rate of a fixed grid that does best on validation data. Only training is on the clock:
gradients, critics and their update, the optimiser. Drawing batches, measuring and compiling are not.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import itertools
import math
import os
import platform
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, ClassVar

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.infer import ELBO, SVI, TraceGraph_ELBO
from pyro.infer.enum import get_importance_trace
from pyro.optim import Adam
from torch import Tensor, nn
from tqdm import tqdm

from pyro_bpq import LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.estimators import Estimator

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]


OPTIONS: Mapping[str, dict[str, Any]] = {
    "smoke": {"action": "store_true", "help": "a few steps, to see that it runs"},
    "compiled": {"action": "store_true", "help": "compiled steps"},
    "seeds": {"type": int, "default": 0, "help": "number of seeds"},
    "resume": {"action": "store_true", "help": "keep the runs that the result file has"},
    "only": {"default": "", "help": "beginnings of what to measure, with ; between; the rest keeps its rows"},
}


def arguments(doc: str | None, names: str = "", **more: dict[str, Any]) -> argparse.Namespace:
    """``--full``, ``--output``, some of :data:`OPTIONS`, by name, and more; from here on one thread, no warnings."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", "--long", dest="full", action="store_true", help="the published figures")
    parser.add_argument("--output", type=Path, default=RESULTS)
    for name, option in ({name: OPTIONS[name] for name in names.split()} | more).items():
        parser.add_argument(f"--{name}", **option)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return parser.parse_args()


def only(options: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """The names with which ``--only`` is content."""
    return [name for name in names if name.startswith(tuple(options.only.split(";")))]


def others(options: argparse.Namespace, path: Path, names: Sequence[str]) -> list[Row]:
    """The rows of a result file that ``--only`` leaves as they are: those of programs that are not measured anew."""
    return [row for row in read_csv(path) if options.only and row["program"] not in names]


def net(*sizes: int, between: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Affine layers."""
    parts = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), between())]
    return nn.Sequential(*parts[:-1])


def about(doc: str | None) -> list[str]:
    """The paragraphs of a script's docstring, for its page: all but the title and the command."""
    parts = [" ".join(part.split()) for part in (doc or "").split("\n\n")[1:]]
    return [part for part in parts if not part.startswith("python ")]


def data_file(name: str) -> Path | None:
    """A file in the folder that ``PYRO_BPQ_DATA`` names; says so where there is none."""
    folder = os.environ.get("PYRO_BPQ_DATA", "")
    path = Path(folder) / name
    if folder and path.exists():
        return path
    print(f"{Path(sys.argv[0]).name}: skipped, PYRO_BPQ_DATA names no folder with {name}")
    return None


@contextlib.contextmanager
def picture(path: Path, width: float, height: float, panels: int = 1) -> Iterator[Any]:
    """Axes side by side, each of so many inches, whose figure is written to a file in the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=(width * panels, height), squeeze=False)
    yield axes[0]
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def machine() -> str:
    """Processor, threads and versions, in a line."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    name = found[1].strip() if found else platform.processor() or platform.machine()
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


def interleaved(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of functions that take turns, so that all see the same machine, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.process_time()
            function()
            seconds[name].append(time.process_time() - start)
    return {name: median(taken) for name, taken in seconds.items()}


def timed_step(step: Callable[[], object], elbo: object) -> tuple[float, float]:
    """CPU seconds of a training step of a loss, and apart from them, by the clock, what making a compiled one takes."""
    start, begun = time.process_time(), time.perf_counter()
    step()
    taken = time.process_time() - start
    is_making = taken > MAKING and getattr(elbo, "compiled", None) is not None
    return (0.0, time.perf_counter() - begun) if is_making else (taken, 0.0)


def quartiles(values: Iterable[float]) -> str:
    """Median and quartiles as text."""
    low, middle, high = np.quantile(list(values), [0.25, 0.5, 0.75])
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def flat(gradients: Iterable[Tensor]) -> Tensor:
    """Gradients as one vector in float64."""
    return torch.cat([gradient.detach().double().reshape(-1) for gradient in gradients])


def gradients(parameters: Iterable[Tensor], call: Callable[[], object], repeats: int) -> Tensor:
    """What a call leaves in ``.grad`` of some parameters, a row for each time."""
    leaves, found = list(parameters), []
    for _ in range(repeats):
        for leaf in leaves:
            leaf.grad = None
        call()
        found.append(flat(leaf.grad for leaf in leaves))
    return torch.stack(found)


@dataclass(frozen=True)
class Error:
    """Error of one step's gradient at fixed parameters.

    Args:
        variance: Its total variance.
        bias: Its squared bias, less what the finite number of repeats adds; may come out negative.
        z: Squared distance of the mean from the exact gradient in units of its expectation; 1 if unbiased.
    """

    variance: float
    bias: float
    z: float

    @classmethod
    def of(cls, exact: Tensor, parameters: Iterable[Tensor], call: Callable[[], object], repeats: int) -> Error:
        """Measures a call that leaves gradients in some parameters."""
        found = gradients(parameters, call, repeats)
        variance = float(found.var(0).sum())
        distance = float((found.mean(0) - exact).square().sum())
        return cls(variance, distance - variance / repeats, distance * repeats / max(variance, 1e-300))

    @property
    def mse(self) -> float:
        """Variance plus squared bias."""
        return self.variance + max(self.bias, 0.0)


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


def grouped(rows: Iterable[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    """The rows by their values in some columns."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[column] for column in columns), []).append(row)
    return found


def cases(**values: Iterable[Any]) -> list[Row]:
    """All combinations of values, by name."""
    return [dict(zip(values, case, strict=True)) for case in itertools.product(*values.values())]


def measured(path: Path, cases: Iterable[Row], measure: Callable[..., Iterable[Row]], resumes: bool) -> list[Row]:
    """The rows of all cases, written after each one; with ``resumes`` the file keeps the cases that it has."""
    rows = read_csv(path) if resumes else []
    for case in cases:
        if not any(case.items() <= row.items() for row in rows):
            rows += [case | row for row in measure(**case)]
            write_csv(path, rows)
    return rows


def columns(rows: Sequence[Row]) -> list[str]:
    """Names of all columns."""
    return [*dict.fromkeys(name for row in rows for name in row)]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows; cells of columns that a row lacks stay empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns(rows))
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
    """A Markdown table."""
    names = columns(rows)
    lines = [names, ["---"] * len(names)]
    for row in rows:
        cells = [row.get(name, "") for name in names]
        lines.append([f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def publish(path: Path, title: str, doc: str | None, rows: Sequence[Row], *parts: str | Sequence[Row]) -> None:
    """Writes rows, and prints and writes a page: title, what the script's docstring says, text and tables, machine."""
    write_csv(path.with_suffix(".csv"), rows)
    page = [part if isinstance(part, str) else table(part) for part in parts]
    print(*page, sep="\n\n", flush=True)
    page = [f"# {title}", *about(doc), *page, f"Machine: {machine()}."]
    path.with_suffix(".md").write_text("\n\n".join(page) + "\n")


# Training runs that take turns.

Data = tuple[Tensor, ...]
CHUNK = 5000  # rows times samples that are evaluated at once
MAKING = 0.3  # a step of a compiled loss that takes more seconds records and compiles


@dataclass(frozen=True)
class Method:
    """A rival.

    Args:
        name: Its name in tables.
        elbo: Builds its ELBO.
        program: How model and guide are written for it; what words there are is the task's affair.
        group: ``"ours"``, ``"TraceGraph"``, ``"leave-one-out"``, ``"unbiased"``, ``"biased"`` or ``"exact"``. The last
            two are references: no rival whose end point is to be reached.
    """

    name: str
    elbo: Callable[[], ELBO]
    program: str = ""
    group: str = "unbiased"


@dataclass(frozen=True)
class Task:
    """What is trained.

    Args:
        name: Name in tables.
        splits: Arguments of model and guide, rows first, by split: ``"curve"``, ``"valid"``, ``"test"``.
    """

    name: str
    splits: dict[str, Data]
    unit: ClassVar[str] = "row"  # what held-out figures are per

    def programs(self, program: str) -> Any:
        """A module with the methods ``model`` and ``guide``; ``pyro.module`` registers its parameters in the guide."""
        raise NotImplementedError

    def batch(self, generator: torch.Generator) -> Data:
        """Arguments of model and guide for a step."""
        raise NotImplementedError

    def measure(self, programs: Any, data: Data, samples: int) -> tuple[float, float]:
        """ELBO and importance bound with so many samples, in nats per unit."""
        return bounds(programs, data, samples)


@dataclass(frozen=True)
class Size:
    """How long a race is.

    Args:
        rates: Learning rates that are tried, on the first seeds.
        seeds: Number of seeds.
        seconds: CPU seconds of training of each run.
        slices: Number of turns, each followed by a measurement.
        samples: Samples of the importance bound.
        tuning: Number of seeds on which rates are tried. One does where seeds differ less than rates.
        decay: The last turn's learning rate over the first one's; it falls geometrically.
    """

    rates: tuple[float, ...]
    seeds: int
    seconds: float
    slices: int
    samples: int = 100
    tuning: int = 1
    decay: float = 1.0


def scored(trace: poutine.Trace) -> Tensor:
    """The log-probability of all sites, by sample and row."""
    return sum(node["log_prob"] for node in trace.nodes.values() if node["type"] == "sample" and "log_prob" in node)


@torch.no_grad()
def bounds(programs: nn.Module, data: Data, samples: int) -> tuple[float, float]:
    """ELBO and importance bound with so many samples, means over rows."""
    many, found, size = pyro.plate("samples", samples, dim=-2), [], max(CHUNK // samples, 1)
    with poutine.block():
        for part in zip(*(argument.split(size) for argument in data), strict=True):
            guide = poutine.trace(many(programs.guide)).get_trace(*part)
            model = poutine.trace(poutine.replay(many(programs.model), trace=guide)).get_trace(*part)
            for trace in (model, guide):
                trace.compute_log_prob()
            found.append((scored(model) - scored(guide)).expand(samples, len(part[0])))
    weights = torch.cat(found, 1)
    return float(weights.mean()), float((weights.logsumexp(0) - math.log(samples)).mean())


class PlainLeaveOneOut(ELBO):
    """Leave-one-out on Pyro's traces with nothing around it, for rows of one plate or of none: the lean rival."""

    def __init__(self, particles: int, max_plate_nesting: int = 1) -> None:
        super().__init__(particles, max_plate_nesting=max_plate_nesting, vectorize_particles=True)

    def _get_trace(self, model, guide, args, kwargs):
        return get_importance_trace("flat", self.max_plate_nesting, model, guide, args, kwargs)

    def loss_and_grads(self, model, guide, *args, **kwargs):
        """Adds the gradients; returns the loss."""
        ((model_trace, guide_trace),) = self._get_traces(model, guide, args, kwargs)
        log_p, log_q = scored(model_trace), scored(guide_trace)
        cost = (log_q - log_p).detach()
        centred = (cost - cost.mean(0)) * (self.num_particles / (self.num_particles - 1.0))
        ((centred * log_q - log_p).sum() / self.num_particles).backward()
        return float(cost.sum()) / self.num_particles


def baseline_options(kind: str, net: nn.Module | None = None, seen: Tensor | None = None) -> dict[str, Any]:
    """Options of a site for ``TraceGraph_ELBO``'s baselines: ``"average"``, ``"net"`` of what it sees, else none."""
    kinds = {"average": {"use_decaying_avg_baseline": True}, "net": {"nn_baseline": net, "nn_baseline_input": seen}}
    return {"baseline": kinds[kind]} if kind in kinds else {}


def with_averages(guide: Callable[..., Any]) -> Callable[..., Any]:
    """A guide with the decaying-average baseline of ``TraceGraph_ELBO`` at every site."""
    return poutine.infer_config(guide, lambda site: {**site["infer"], **baseline_options("average")})


class Runner:
    """A training run, which takes turns with others; parameters and random numbers are its own.

    Args:
        task: What is trained.
        method: By whom.
        rate: Learning rate of Adam; a baseline net of the guide, ``baseline``, has ten times as much.
        seed: Seed of weights, batches and draws.
    """

    def __init__(self, task: Task, method: Method, rate: float, seed: int) -> None:
        self.task, self.method, self.rate, self.seed = task, method, rate, seed
        self.seconds, self.making, self.steps, self.elbo = 0.0, 0.0, 0, method.elbo()
        self.curve: list[Row] = []
        self.generator = torch.Generator().manual_seed(seed)
        adam = Adam(lambda name: {"lr": rate * (10.0 if "baseline" in name else 1.0)})
        with pyro.get_param_store().scope() as self.state:
            pyro.set_rng_seed(seed)
            self.programs = task.programs(method.program)
            self.svi = SVI(self.programs.model, self.programs.guide, adam, None, self.elbo.loss_and_grads)
            self.draws = torch.get_rng_state()

    def train(self, until: float) -> None:
        """Trains until so many seconds are spent in all; only the part of a step after the batch is timed."""
        with pyro.get_param_store().scope(self.state) as self.state:
            torch.set_rng_state(self.draws)
            while self.seconds < until:
                step = partial(self.svi.step, *self.task.batch(self.generator))
                seconds, making = timed_step(step, self.elbo)
                self.seconds, self.making, self.steps = self.seconds + seconds, self.making + making, self.steps + 1
            self.draws = torch.get_rng_state()

    def slow(self, factor: float) -> None:
        """From now on learning rates are so many times what they were at first."""
        for group in (group for adam in self.svi.optim.optim_objs.values() for group in adam.param_groups):
            group["lr"] = factor * group.setdefault("initial_lr", group["lr"])

    def measure(self, samples: int) -> None:
        """Adds a point to the curve."""
        elbo, bound = self.figures("curve", samples)
        self.curve.append({"seconds": self.seconds, "steps": self.steps, "elbo": elbo, "bound": bound})

    def figures(self, split: str, samples: int) -> tuple[float, float]:
        """Held-out figures; minus infinity where training broke down."""
        with pyro.get_param_store().scope():
            found = self.task.measure(self.programs, self.task.splits[split], samples)
        return tuple(value if math.isfinite(value) else -math.inf for value in found)

    def smooth(self, column: str = "bound") -> list[float]:
        """A column of the curve, each point averaged with up to two before it; the untrained one stands alone."""
        values = [row[column] for row in self.curve]
        return values[:1] + [mean(values[max(i - 2, 1) : i + 1]) for i in range(1, len(values))]

    def best(self) -> tuple[float, float]:
        """Best smoothed bound, and the seconds at which it was there."""
        values = self.smooth()
        at = max(range(len(values)), key=values.__getitem__)
        return values[at], self.reach(values[at])

    def reach(self, goal: float) -> float:
        """Seconds until the smoothed bound is at the goal, between points along a line; infinite if it never is.

        Seconds are averaged over the same points as bounds: a mean of three points belongs to their middle.
        """
        values, times = self.smooth(), self.smooth("seconds")
        for i, value in enumerate(values):
            if value >= goal:
                if i == 0 or not math.isfinite(values[i - 1]):
                    return times[i]
                share = (goal - values[i - 1]) / (value - values[i - 1])
                return times[i - 1] + share * (times[i] - times[i - 1])
        return math.inf


@dataclass
class Race:
    """A finished race.

    Args:
        task: The task.
        size: How long it was.
        runs: By method, one run per seed, with the chosen rate.
        tried: All runs.
    """

    task: Task
    size: Size
    runs: dict[str, list[Runner]] = field(default_factory=dict)
    tried: list[Runner] = field(default_factory=list)


def sized(options: argparse.Namespace, quick: Any, full: Any, compiled: Any = None, smoke: Any = None) -> Any:
    """How much the command line asks for: of its seeds, if it names any."""
    size = compiled if compiled and options.compiled else full if options.full else quick
    if getattr(options, "smoke", False):
        size = smoke or replace(quick, seeds=2, seconds=0.01, slices=2, samples=3)
    return replace(size, seeds=options.seeds or size.seeds)


def result(name: str, options: argparse.Namespace) -> Path:
    """The result files of a script, without their ending: long and compiled runs have their own."""
    is_compiled = getattr(options, "compiled", False)
    return options.output / f"{name}{'_compiled' if is_compiled else '_long' if options.full else ''}"


def run_race(task: Task, methods: Sequence[Method], size: Size) -> Race:
    """Runs all methods with all rates on the first seeds, and with the best one on the others."""
    for method in methods:
        # Nobody pays for loading code.
        Runner(task, method, size.rates[0], 0).train(1e-9)
    race = Race(task, size)
    tuning = min(size.tuning, size.seeds)
    for seed in range(size.seeds):
        rates = {m.name: size.rates if seed < tuning else [race.runs[m.name][0].rate] for m in methods}
        lanes = [Runner(task, m, rate, seed) for m in methods for rate in rates[m.name]]
        turns(lanes, size, f"{task.name}, seed {seed}")
        race.tried += lanes
        for method in methods if seed >= tuning - 1 else ():
            mine = [run for run in race.tried if run.method.name == method.name]
            if method.name in race.runs:
                race.runs[method.name].append(mine[-1])
            else:
                race.runs[method.name] = of_best_rate(mine, size.samples)
    return race


def of_best_rate(runs: Sequence[Runner], samples: int) -> list[Runner]:
    """The runs of a method with the rate whose median validation bound over seeds is best."""
    by_rate = [[run for run in runs if run.rate == rate] for rate in dict.fromkeys(run.rate for run in runs)]
    return max(by_rate, key=lambda mine: median(run.figures("valid", samples)[1] for run in mine))


def turns(lanes: Sequence[Runner], size: Size, text: str) -> None:
    """Lets runs take turns, in changing order."""
    shuffle = random.Random(0)
    for lane in lanes:
        lane.measure(size.samples)
    for turn in progress(range(1, size.slices + 1), text):
        for lane in shuffle.sample(list(lanes), len(lanes)):
            lane.slow(size.decay ** ((turn - 1) / max(size.slices - 1, 1)))
            lane.train(size.seconds * turn / size.slices)
            lane.measure(size.samples)


def plain_leave_one_out(particles: int) -> Method:
    """The lean rival with so many samples."""
    return Method(f"plain leave-one-out, {particles}", lambda: PlainLeaveOneOut(particles), group="leave-one-out")


def ours(estimator: Estimator, particles: int = 1, compile: bool = False) -> TraceBackpropQ_ELBO:
    """One of our estimators at all sites, without critics."""
    many = {"vectorize_particles": True, "max_plate_nesting": 1} if particles > 1 else {}
    return TraceBackpropQ_ELBO(particles, estimator=estimator, critic=None, compile=compile, **many)


def leave_one_out(particles: int, compile: bool = False) -> Method:
    """Leave-one-out with so many samples."""
    score = ScoreFunction(LeaveOneOut())
    return Method(f"leave-one-out, {particles}", lambda: ours(score, particles, compile), group="leave-one-out")


DEFAULT = Method("default", TraceBackpropQ_ELBO, group="ours")
AVERAGE = Method("TraceGraph, decaying average", TraceGraph_ELBO, "average", "TraceGraph")
DEFAULT_COMPILED = Method("default", lambda: TraceBackpropQ_ELBO(compile=True), group="ours")


# Reporting.


def ratio(chaser: Runner, leader: Runner) -> float:
    """Time of one run to the best bound of another over its own; not a number if that was before all training."""
    goal, own = leader.best()
    return chaser.reach(goal) / own if own > 0.0 else math.nan


def ratios(race: Race, chaser: str, leader: str) -> str:
    """Median and range over seeds of :func:`ratio`; ``> x`` where the leader's bound was not reached in time."""
    pairs = list(zip(race.runs[chaser], race.runs[leader], strict=True))
    found = [ratio(*pair) for pair in pairs]
    if any(math.isnan(value) for value in found):
        return "-"
    if not math.isfinite(median(found)):
        least = median(late.smooth("seconds")[-1] / early.best()[1] for late, early in pairs)
        return f"not reached, > {least:.2f}"
    text = f"{median(found):.2f}"
    return text if len(found) == 1 else f"{text} ({min(found):.2f} to {max(found):.2f})"


def summary(race: Race) -> list[Row]:
    """A row per method, best bound first."""
    ours, rows, is_compiled = our_name(race), [], any(run.making > 0.0 for run in race.tried)
    for name, runs in race.runs.items():
        elbos, bounds = zip(*(run.figures("test", race.size.samples) for run in runs), strict=True)
        row: Row = {"method": name + {"biased": " (biased)", "exact": " (exact)"}.get(runs[0].method.group, "")}
        row |= {"rate": f"{runs[0].rate:g}", "steps": int(median(run.steps for run in runs))}
        row["ms a step"] = median(1e3 * run.seconds / max(run.steps, 1) for run in runs)
        row |= {"seconds to make": f"{median(run.making for run in runs):.0f}"} if is_compiled else {}
        held_out = {"ELBO": elbos, "bound": bounds}
        row |= {column: f"{median(values):.2f}" for column, values in held_out.items()}
        row |= {"lowest": f"{min(bounds):.2f}", "highest": f"{max(bounds):.2f}"}
        times = ("", "") if name == ours else (ratios(race, ours, name), ratios(race, name, ours))
        row["default's time to its best bound / its own"] = times[0]
        row["its time to default's best bound / default's own"] = times[1]
        rows.append(row)
    return sorted(rows, key=lambda row: -float(row["bound"]))


def our_name(race: Race) -> str:
    """Name of the first method of the group ``"ours"``."""
    return next(name for name, runs in race.runs.items() if runs[0].method.group == "ours")


def headlines(race: Race) -> list[Row]:
    """The default beside the best of each kind of rivals."""
    groups = {
        "TraceGraph_ELBO": {"TraceGraph"},
        "leave-one-out at its best": {"leave-one-out"},
        "the best unbiased rival": {"TraceGraph", "leave-one-out", "unbiased"},
    }
    found = []
    for text, names in groups.items():
        rivals = [name for name, runs in race.runs.items() if runs[0].method.group in names]
        if rivals:
            best = max(rivals, key=lambda name: median(run.best()[0] for run in race.runs[name]))
            took = ratios(race, our_name(race), best)
            row = {"against": text, "which is": best, "default's time / its own": took}
            found.append(row | {"its time to default's best / default's own": ratios(race, best, our_name(race))})
    return found


def curves(race: Race) -> list[Row]:
    """All points of all runs."""
    return [
        {"task": race.task.name, "method": run.method.name, "rate": run.rate, "seed": run.seed}
        | {"chosen": run in race.runs[run.method.name], **point}
        for run in race.tried
        for point in run.curve
    ]


def plot(races: Sequence[Race], path: Any) -> None:
    """Held-out bound over CPU time; medians over seeds, a panel per task."""
    with picture(path, 6.0, 4.2, len(races)) as axes:
        for race, axis in zip(races, axes, strict=True):
            ends = []
            for number, (name, runs) in enumerate(race.runs.items()):
                points = list(zip(*(run.smooth() for run in runs), strict=True))
                values = [median(point) for point in points]
                times = [median(point) for point in zip(*(run.smooth("seconds") for run in runs), strict=True)]
                is_ours = runs[0].method.group == "ours"
                style = {"biased": ":", "exact": "--"}.get(runs[0].method.group, "-")
                axis.plot(times, values, style, label=name, color=f"C{number % 10}", linewidth=2.5 if is_ours else 1.2)
                ends += values[len(values) // 5 :]
            axis.set_ylim(min(filter(math.isfinite, ends), default=None), None)
            axis.set(xlabel="CPU seconds of training", ylabel=f"held-out bound, nats per {race.task.unit}")
            axis.set_title(race.task.name)
            axis.legend(fontsize=7)


def report(path: Path, title: str, doc: str | None, races: Sequence[Race], *more: Row) -> None:
    """Prints the tables, and more rows; writes CSV, Markdown and a picture."""
    size = races[0].size
    how = (
        f"Held-out figures in nats per {races[0].task.unit}: ELBO and importance bound with "
        f"{size.samples} samples, on fixed data; medians over {size.seeds} seed(s), lowest and highest bound beside. "
        f"{size.seconds:g} s of CPU time a run, in {size.slices} turns; Adam with the rate of {size.rates} that does "
        f"best on validation data with the first {'seed' if size.tuning == 1 else f'{size.tuning} seeds'}. Times to a "
        "bound are read off the curve, whose points are means over three turns, of seconds and of bounds. *default* is "
        "`TraceBackpropQ_ELBO()` as it comes."
    )
    parts = [part for race in races for part in (f"## {race.task.name}", headlines(race), summary(race)) if part]
    parts += [[*more]] if more else []
    rows = [row for race in races for row in curves(race)]
    publish(path, title, doc, rows, how, *parts, f"![Held-out bound over CPU time]({path.name}.png)")
    plot(races, path.with_suffix(".png"))  # last: hours are lost where it fails
