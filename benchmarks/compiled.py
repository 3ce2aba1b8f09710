r"""Whether ``torch.jit.trace`` or ``torch.compile`` of a step would pay on a CPU.

A step is ``differentiable_loss`` and its ``backward``, without optimiser, on programs of ``overhead.py``: plain,
traced by ``torch.jit.trace`` (as Pyro's ``JitTrace_ELBO`` does), and compiled by ``torch.compile``. Our ELBO is in
``eval()`` mode with a cached structure: critics are trained but do not learn, since a traced step cannot train them.
*same loss* and *same gradient* compare ten seeds with the plain step, after the step was made at another seed.

    python benchmarks/compiled.py [--full] [--output DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pyro
import pyro.ops.jit
import torch
from common import RESULTS, Row, median, table, write_csv, write_markdown
from overhead import Program, belief_network, chain, cpu_seconds
from pyro.infer import ELBO, SVI, Trace_ELBO
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_bpq import TraceBackpropQ_ELBO

Step = Callable[[], Tensor]


def parameters() -> list[Tensor]:
    """The leaves of the param store."""
    return [value for _, value in sorted(pyro.get_param_store().named_parameters())]


def traced(loss: Step) -> Step:
    """The loss traced as a function of the parameters, by the tool behind Pyro's own Jit classes."""
    return pyro.ops.jit.trace(loss, ignore_warnings=True, jit_options={"check_trace": False})


def compiled(loss: Step) -> Step:
    """The loss compiled, with graph breaks where the compiler needs them."""
    torch._dynamo.reset()
    return torch.compile(loss)


WAYS: Mapping[str, Callable[[Step], Step]] = {"torch.jit.trace": traced, "torch.compile": compiled}


def backward(step: Step) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one step."""
    for leaf in parameters():
        leaf.grad = None
    loss = step()
    loss.backward()
    return loss.item(), [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters()]


def agrees(step: Step, reference: Step) -> Row:
    """Whether ten seeds give the same losses and gradients."""
    found: Row = {"same loss": True, "same gradient": True}
    for seed in range(10):
        pyro.set_rng_seed(seed)
        left, grads = backward(step)
        pyro.set_rng_seed(seed)
        right, expected = backward(reference)
        found["same loss"] &= abs(left - right) < 1e-4 * abs(right)
        for a, b in zip(grads, expected, strict=True):
            found["same gradient"] &= float((a - b).abs().max()) <= 1e-3 * float(b.abs().max())
    return found


PROGRAMS: Mapping[str, Callable[[], Program]] = {
    "chain, 50 sites": lambda: chain(50, False),
    "belief network 64-20-20": lambda: belief_network(64, 20),
}
ELBOS: Mapping[str, Callable[[], ELBO]] = {"Trace_ELBO": Trace_ELBO, "default": TraceBackpropQ_ELBO}


def measure(program: str, elbo_name: str, way: str, rounds: int) -> Row:
    """One way for one program, taking turns with the plain step; for a process of its own."""
    row: Row = {"program": program, "elbo": elbo_name, "way": way}
    row |= dict.fromkeys(("seconds to make", "same loss", "same gradient", "milliseconds", "plain", "failed"), "")
    programs, elbo = PROGRAMS[program](), ELBOS[elbo_name]()
    pyro.set_rng_seed(0)
    svi = SVI(*programs, Adam({"lr": 1e-3}), elbo)
    for _ in range(20):
        svi.step()
    if isinstance(elbo, nn.Module):
        elbo.eval()

    def loss() -> Tensor:
        return elbo.differentiable_loss(*programs)

    start = time.perf_counter()
    try:
        pyro.set_rng_seed(100)
        step = WAYS[way](loss)
        for _ in range(2):
            backward(step)
        row["seconds to make"] = time.perf_counter() - start
        row |= agrees(step, loss)
    except RuntimeError as error:
        row["failed"] = (str(error).strip().splitlines() or [""])[0][:60]
        return row
    times = cpu_seconds({way: lambda: backward(step), "plain": lambda: backward(loss)}, rounds, 30.0)
    return {**row, "milliseconds": 1000 * median(times[way]), "plain": 1000 * median(times["plain"])}


def in_new_process(*case: object) -> Row:
    """The same; a process in which a trace has failed, or that has compiled, does not trace again."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", json.dumps(case)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    """Measures, prints, and writes CSV and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="more rounds")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    rounds = 200 if options.full else 30
    rows = [in_new_process(program, elbo, way, rounds) for way in WAYS for program in PROGRAMS for elbo in ELBOS]
    write(options.output, rows)


def write(output: Path, rows: list[Row]) -> None:
    """Writes and prints the table."""
    write_csv(output / "compiled.csv", rows)
    text = table(rows)
    write_markdown(output / "compiled.md", "Traced and compiled steps", ["CPU time in milliseconds.", text])
    print(text)


if __name__ == "__main__":
    main()
