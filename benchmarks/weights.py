"""Seconds of a call of an operator, a floating-point operation and a byte, for ``pyro_bpq.tracing.work.Weights``.

Each is measured where it dominates: products of large matrices, convolutions of many small images, elementwise
operators on large tensors, and steps of ``Trace_ELBO`` on a chain of binary sites, whose tensors have one element. It
prints the machine and the number of threads. The weights in the library were fitted by least squares of relative errors
to the CPU times of steps of candidates on seven programs of ``programs.py``, one thread of an Intel Xeon that others
used meanwhile. Its byte is dearer than what this shows, as elementwise operators do more than copy.

    python benchmarks/weights.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import machine
from overhead import chain
from pyro.infer import Trace_ELBO

from pyro_bpq.tracing.work import Work, WorkMode


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


def main() -> None:
    torch.set_num_threads(1)
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
