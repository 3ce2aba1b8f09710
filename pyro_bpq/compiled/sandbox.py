r"""Runs a step without a trace: generators, learned state, buffers and parameters are as before."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy
import pyro
import torch
from torch import Tensor

from pyro_bpq.compiled.watch import NotYet
from pyro_bpq.errors import Unrecordable
from pyro_bpq.tracing.sandbox import Draws


class Marked(Protocol):
    """Something that can be taken back to an earlier state."""

    def mark(self) -> Any:
        """A mark of the present state."""
        ...

    def go_back(self, mark: Any) -> None:
        """Goes back to a mark."""
        ...


@contextlib.contextmanager
def untraced(subject: Marked, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Undoes what a step does to an objective, to tensors, to the parameter store and to torch's generators."""
    draws, mark, known = Draws(), subject.mark(), set(pyro.get_param_store().keys())
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        draws.again()
        if of_devices:
            torch.cuda.set_rng_state_all(of_devices)
        subject.go_back(mark)
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        created = set(pyro.get_param_store().keys()) - known
        for name in created:
            del pyro.get_param_store()[name]
        moved = random.getstate() != of_python
        random.setstate(of_python)
        now: Any = numpy.random.get_state()
        moved = moved or not all(numpy.array_equal(a, b) for a, b in zip(now, of_numpy, strict=True))
        numpy.random.set_state(of_numpy)
    if moved:
        raise Unrecordable("it draws from random or numpy.random, whose numbers a recording would freeze")
    if created:
        raise NotYet(f"it makes parameters: {', '.join(sorted(created))}")
