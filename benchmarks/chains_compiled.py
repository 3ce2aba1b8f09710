r"""Chains at equal time, compiled against compiled: our default beside leave-one-out with its best number of particles.

The chains of ``chains.py`` with 50 sites. ``CompiledSVI`` trains guide and critics of ``TraceBackpropQ_ELBO`` for 1,000
steps with some number of particles; then both are frozen, and the error of one step's gradient is measured. *ms*: CPU
time of whole compiled steps, the optimiser and the critics' learning included. The rival is leave-one-out without
critics, compiled in the same way; of its numbers of particles the one counts that has the least error times time.
*gain*: its error times time over ours. *ceiling*: the same with the exact Q in place of our critics, in our time.

    python benchmarks/chains.py --compiled [--particles 1 8 32 100 1000] [--seeds 1] [--only CHAIN] [--output DIRECTORY]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path

import pyro
import torch
from chains import LEARNING_RATE, VECTORIZED, Chain, Count, Error, LeaveOneOutELBO, Markov
from common import RESULTS, Row, median, progress, table, write_csv, write_markdown
from pyro.optim import Adam

from pyro_bpq import CompiledSVI, LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO, compile_report

SITES, STEPS, RIVALS = 50, 1000, (64, 512, 4096)
KINDS: dict[str, type[Chain]] = {"markov": Markov, "count": Count}


def milliseconds(step: Callable[[], object], rounds: int = 15) -> float:
    """CPU time of a step: the median over rounds of ten."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(10):
            step()
        times.append((time.process_time() - start) / 10)
    return 1000 * median(times)


def compiled(chain: Chain, elbo: TraceBackpropQ_ELBO, lr: float, steps: int) -> CompiledSVI:
    """A compiled loop after some steps."""
    svi = CompiledSVI(chain.model, chain.guide, Adam({"lr": lr}), elbo)
    svi.run(steps, progress=False)
    if elbo.compiled is None or not elbo.compiled.entries or elbo.compiled.entries[-1].note:
        raise RuntimeError(compile_report(elbo))
    return svi


def times_of_rivals(kind: type[Chain]) -> dict[int, float]:
    """Milliseconds of compiled leave-one-out, by its number of particles; they do not depend on the weights."""
    found = {}
    for number in RIVALS:
        pyro.clear_param_store()
        chain = kind(SITES, seed=0)
        estimator = ScoreFunction(LeaveOneOut())
        elbo = TraceBackpropQ_ELBO(num_particles=number, estimator=estimator, critic=None, **VECTORIZED)
        found[number] = milliseconds(compiled(chain, elbo, LEARNING_RATE, 30).step)
    return found


def measure(name: str, particles: int, seed: int, rivals: dict[int, float]) -> Row:
    """One number of particles of ours."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    chain = KINDS[name](SITES, seed=seed)
    options = VECTORIZED if particles > 1 else {}
    elbo = TraceBackpropQ_ELBO(num_particles=particles, **options)
    svi = compiled(chain, elbo, LEARNING_RATE, STEPS)
    own = milliseconds(svi.step)
    exact, repeats = chain.gradient(), 400 if particles < 100 else 100
    frozen = copy.deepcopy(elbo).eval()
    ours = Error.of(chain, exact, lambda: frozen.loss_and_grads(chain.model, chain.guide), repeats)
    best = Error.of(chain, exact, lambda: chain.ideal(particles).backward(), repeats)
    errors = {}
    for number in rivals:
        rival = LeaveOneOutELBO(num_particles=number, **VECTORIZED)
        errors[number] = Error.of(chain, exact, lambda: rival.loss_and_grads(chain.model, chain.guide), 60)  # noqa: B023
    number = min(rivals, key=lambda n: errors[n].variance * rivals[n])
    product = errors[number].variance * rivals[number]
    return {
        "chain": name,
        "particles": particles,
        "seed": seed,
        "ms": own,
        "variance over squared gradient": ours.variance / float(exact @ exact),
        "z of bias": ours.z,
        "rival's particles": number,
        "rival's ms": rivals[number],
        "gain": product / (ours.mse * own),
        "ceiling": product / (best.variance * own),
    }


def main() -> None:
    """Measures, prints, and writes CSV and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiled", action="store_true", help="said to chains.py, which comes here")
    parser.add_argument("--particles", type=int, nargs="+", default=[1, 8, 32, 100, 1000])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="one chain")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, kind in KINDS.items():
        if not name.startswith(options.only):
            continue
        rivals = times_of_rivals(kind)
        cases = [(p, seed) for p in options.particles for seed in range(options.seeds)]
        for particles, seed in progress(cases, name):
            rows.append(measure(name, particles, seed, rivals))
            write_csv(options.output / "chains_compiled.csv", rows)
    text = table(rows)
    write_markdown(options.output / "chains_compiled.md", "Chains, compiled", [text])
    print(text)


if __name__ == "__main__":
    main()
