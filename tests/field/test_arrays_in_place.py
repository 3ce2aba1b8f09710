"""NumPy arrays that are written in place between compiled steps: no step runs with the old numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD
from steps import fresh, told

from pyro_bpq import CompiledSVI, TraceBackpropQ_ELBO, compile_report

STEPS = 50
READS: dict[str, Callable[[Any], Any]] = {
    "a number": lambda array: float(array[1]),
    "a mean": lambda array: float(array.mean()),
    "a copy": lambda array: torch.tensor(array)[1],
    "a view": lambda array: torch.from_numpy(array)[1],
}
WRITES: dict[str, Callable[[int], bool]] = {
    "once": lambda step: step == 15,
    "now and then": lambda step: step % 20 == 15,
    "in each step": lambda step: step > 15,
}


def losses(kind: type, read: str, write: str, is_argument: bool) -> tuple[list[float], str, list[str]]:
    """The losses of some steps, what is said of compiled ones, and what is warned of."""
    fresh()
    array = np.zeros(3)

    def model(given: Any = None) -> None:
        z = pyro.sample("z", dist.Bernoulli(0.4))
        mean = z + READS[read](array if given is None else given)
        pyro.sample("x", dist.Normal(mean, 1.0), obs=torch.tensor(0.7))

    def guide(given: Any = None) -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))

    options = {"compile": "eager"} if kind is CompiledSVI else {}
    svi, found = kind(model, guide, SGD({"lr": 0.01}), TraceBackpropQ_ELBO(num_particles=1), **options), []
    with told() as texts:
        for step in range(STEPS):
            array += float(WRITES[write](step))
            found.append(svi.step(*[array] * is_argument))
    return found, compile_report(svi) if options else "", texts


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", READS)
def test_all_steps_are_those_of_the_present_numbers(read: str, write: str, is_argument: bool) -> None:
    compiled, said, _ = losses(CompiledSVI, read, write, is_argument)
    assert "Recorded" in said
    assert compiled == pytest.approx(losses(SVI, read, write, is_argument)[0], rel=1e-5)


def test_an_array_that_changes_now_and_then_needs_other_recordings() -> None:
    _, said, told = losses(CompiledSVI, "a mean", "now and then", False)
    assert said.count("Recorded") == 3 and not told, said


def test_an_array_that_changes_in_each_step_is_named() -> None:
    told = losses(CompiledSVI, "a mean", "in each step", False)[2]
    assert len(told) == 1 and "the numbers of array" in told[0], told
