r"""A cost at the end of a chain: what the extra run tells of it, and critics beside that.

The chain ``markov`` of ``chains.py``. Guide, along the exact gradient, and critics train together. All-action with and
without critics, with the extra run where its price speaks for it, always and never. Rows of the same *label* are
replaced in the CSV, so that two states of the library stand side by side.

    python benchmarks/end_costs.py [--full | --smoke] [--label NAME] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import pyro
import torch
from chains import LEARNING_RATE, VECTORIZED, Markov
from common import Row, arguments, flat, median, progress, read_csv, table, write_csv, write_markdown
from hindsight_critics import MarkovProblem, exact_gradient, figures
from torch import Tensor

from pyro_bpq import AllAction, TraceBackpropQ_ELBO

KEYS = ("label", "steps", "particles", "exact", "critic")


@dataclass(frozen=True)
class Size:
    """How much is measured: sites, particles, steps of training ahead of a measurement, gradients, timed steps."""

    sites: int
    particles: tuple[int, ...]
    checkpoints: tuple[int, ...]
    draws: int
    timed: int = 15


QUICK = Size(20, (4,), (30, 100), 200)
FULL = Size(50, (1, 4, 8), (30, 100, 300, 1000), 1000)
SMOKE = Size(3, (2,), (2,), 4, 2)


def measure(size: Size, particles: int, seed: int) -> Iterator[Row]:
    """Rows of a number of particles."""
    torch.manual_seed(seed)
    pyro.clear_param_store()
    problem = MarkovProblem(Markov(size.sites, seed))
    programs = problem.chain.model, problem.chain.guide
    elbos = {}
    for exact in (False, "auto", True):
        for critic in ("on", "off"):
            off = {"critic": None} if critic == "off" else {}
            elbo = TraceBackpropQ_ELBO(particles, estimator=AllAction(exact=exact), **VECTORIZED, **off)
            elbos[str(exact), critic] = elbo
    optimizer, taken = torch.optim.Adam(problem.parameters, lr=LEARNING_RATE), 0

    def call(elbo: TraceBackpropQ_ELBO) -> Tensor:
        for parameter in problem.parameters:
            parameter.grad = None
        elbo.loss_and_grads(*programs)
        return flat(parameter.grad for parameter in problem.parameters)

    for checkpoint in size.checkpoints:
        for _ in progress(range(taken, checkpoint), f"{particles} particles, {checkpoint} steps"):
            for elbo in elbos.values():
                elbo.loss_and_grads(*programs)
            along = exact_gradient(problem).float()
            for parameter, part in zip(problem.parameters, split(along, problem.parameters), strict=True):
                parameter.grad = part
            optimizer.step()
        taken, exact_one = checkpoint, exact_gradient(problem)
        for (exact, critic), elbo in elbos.items():
            frozen = copy.deepcopy(elbo).eval()
            found = figures(lambda frozen=frozen: call(frozen), exact_one, size.draws)
            learning, seconds = copy.deepcopy(elbo), []
            for _ in range(size.timed):
                start = time.process_time()
                learning.loss_and_grads(*programs)
                seconds.append(time.process_time() - start)
            variance, ms = found["variance / squared gradient"], 1e3 * median(seconds)
            about = {"steps": checkpoint, "particles": particles, "exact": exact, "critic": critic, "seed": seed}
            yield {**about, "variance": variance, "z": found["z"], "ms": ms, "variance x ms": variance * ms}


def split(vector: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The parts of a flat vector, shaped as other tensors."""
    sizes = [tensor.numel() for tensor in like]
    return [part.reshape(tensor.shape) for part, tensor in zip(vector.split(sizes), like, strict=True)]


def main() -> None:
    """Measures, prints, writes ``end_costs.csv`` and ``end_costs.md``."""
    label = "now"
    if "--label" in sys.argv:
        at = sys.argv.index("--label")
        label = sys.argv[at + 1]
        del sys.argv[at : at + 2]
    options = arguments(__doc__)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="pyro")
    pyro.enable_validation(False)
    size = FULL if options.full else SMOKE if options.smoke else QUICK
    path = options.output / "end_costs.csv"
    rows: list[Row] = [row for row in read_csv(path) if row["label"] != label] if path.is_file() else []
    for seed in range(options.seeds or 1):
        for particles in size.particles:
            rows += [{"label": label, **row} for row in measure(size, particles, seed)]
    write_csv(path, rows)
    found = []
    for key in dict.fromkeys(tuple(row[name] for name in KEYS) for row in rows):
        own = [row for row in rows if tuple(row[name] for name in KEYS) == key]
        told = {name: median(float(row[name]) for row in own) for name in ("variance", "ms", "variance x ms", "z")}
        found.append({**dict(zip(KEYS, key, strict=True)), **told})
    text = (
        f"Chains of {size.sites} sites, a cost of the last state; {size.draws} gradients. *steps*: how long guide (by "
        "the exact gradient) and critics trained. *variance*: of the gradient over its squared norm. *ms*: CPU "
        "time of a training step. *z*: 1 if unbiased."
    )
    parts = [text, table(found)]
    print("\n\n".join(parts))
    write_markdown(options.output / "end_costs.md", "Costs at the end of a chain", parts)


if __name__ == "__main__":
    main()
