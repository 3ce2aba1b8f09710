"""Seconds of a call of an operator, a floating-point operation and a byte, for ``pyro_bpq.tracing.work.Weights``.

Each is measured where it dominates: products of large matrices, convolutions of many small images, elementwise
operators on large tensors, and steps of ``Trace_ELBO`` on a chain of binary sites, whose tensors have one element. It
prints the machine and the number of threads. A byte of a program is dearer than what this shows, as elementwise
operators do more than copy.

``--eager`` fits the weights of the library, by least squares of relative errors: to the CPU times in ``criterion.csv``
of the rules and of candidates on all programs of ``programs.py``, from what the same steps call. They were measured on
one thread of an AMD EPYC. ``--compiled`` does the same for compiled steps and the times in ``choice_compiled.csv``,
from what the same steps call when they run eagerly. The seconds of an operator's compilation are those of all operators
that were compiled, caches of the compiler warm or not.

    python benchmarks/weights.py [--eager] [--compiled]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple

import numpy as np
import pyro
import torch
from choice import digits
from common import RESULTS, Row, machine, read_csv
from overhead import chain
from programs import PROGRAMS
from pyro.infer import Trace_ELBO
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.choice.candidates import BY_NAME, FIXED
from pyro_bpq.tracing.work import Work, WorkMode

# Eager steps before some are counted, and how many are.
SETTLING, COUNTED = 10, 6


def measured(function: Callable[[], object], rounds: int = 30) -> tuple[float, Work]:
    """Least CPU seconds of a call, and its work."""
    with WorkMode() as mode:
        function()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times), mode.total


def counted(name: str, method: str, data: Tensor) -> Work:
    """Least work of an eager step of a candidate on a program."""
    program = next(one for one in PROGRAMS if one.name == name)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    module, elbo = program.make(), TraceBackpropQ_ELBO(choice=BY_NAME.get(method, FIXED))
    found = []
    for _ in range(SETTLING + COUNTED):
        args = (data[torch.randint(len(data), (program.rows,))],) if program.rows else ()
        module.zero_grad()
        with WorkMode() as mode:
            elbo.loss_and_grads(module.model, module.guide, *args)
        found.append(mode.total)
    return min(found[SETTLING:], key=lambda work: work.operators)


def fitted(work: Sequence[Work], seconds: Sequence[float]) -> dict[str, float]:
    """Weights, none of them negative, with the least relative errors; and these errors."""
    names = ("operator", "flop", "convolved", "byte", "step")
    times = np.array(seconds)
    table = np.array([(*astuple(one), 1.0) for one in work]) / times[:, None]
    tried = [list(some) for size in range(1, 6) for some in itertools.combinations(range(5), size)]
    fits = [(some, np.linalg.lstsq(table[:, some], np.ones(len(times)), rcond=None)[0]) for some in tried]
    errors = {
        i: np.mean((table[:, some] @ found - 1.0) ** 2) for i, (some, found) in enumerate(fits) if min(found) >= 0
    }
    best = min(errors, key=errors.__getitem__)
    some, found = fits[best]
    weights = dict.fromkeys(names, 0.0) | {names[i]: float(weight) for i, weight in zip(some, found, strict=True)}
    return weights | {"relative error": float(errors[best] ** 0.5)}


def fit(rows: Sequence[Row], method: str, milliseconds: str) -> list[Work]:
    """Prints weights, from the columns that name the method and its time, and returns the work of the steps."""
    data = digits()
    work = [counted(str(row["program"]), str(row[method]), data) for row in rows]
    for name, weight in fitted(work, [1e-3 * float(row[milliseconds]) for row in rows]).items():
        print(f"{name}: {weight:.2g}")
    return work


def eager() -> None:
    """Prints the weights of eager steps."""
    fit(read_csv(RESULTS / "criterion.csv"), "candidate", "ms")


def compiled() -> None:
    """Prints the weights of compiled steps."""
    rows = [row for row in read_csv(RESULTS / "choice_compiled.csv") if row["method"] in ("default", *BY_NAME)]
    work = fit(rows, "method", "ms a step")
    making = sum(float(row["seconds to make"]) for row in rows) / sum(one.operators for one in work)
    print(f"making: {making:.2g} s for an operator")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eager", action="store_true", help="the weights of eager steps")
    parser.add_argument("--compiled", action="store_true", help="the weights of compiled steps")
    torch.set_num_threads(1)
    options = parser.parse_args()
    if options.eager or options.compiled:
        (eager if options.eager else compiled)()
        print(machine())
        return
    left, images, large = torch.randn(600, 600), torch.randn(1000, 32, 4, 4), torch.randn(2_000_000)
    layer = torch.nn.ConvTranspose2d(32, 32, 4, 2, 1)
    model, guide = chain(20, True)
    elbo = Trace_ELBO()
    with torch.no_grad():
        seconds, work = measured(lambda: left @ left)
        print(f"flop: {seconds / work.flops:.2g} s")
        seconds, work = measured(lambda: layer(images))
        print(f"convolved: {seconds / work.convolved:.2g} s")
        seconds, work = measured(lambda: large + 1.0)
        print(f"byte: {seconds / work.bytes:.2g} s")
    seconds, work = measured(lambda: elbo.loss_and_grads(model, guide))
    print(f"operator: {seconds / work.operators:.2g} s")
    print(machine())


if __name__ == "__main__":
    main()
