"""A step is recorded with any distribution that reads no number itself: nothing else reads one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from distributions import LAWS, names
from pyro import poutine
from pyro.optim import SGD
from steps import reads_numbers, repeat, rows
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_bpq import CompiledSVI, TraceBackpropQ_ELBO, compile_report

# Pyro scores no value of it, or the gradient of the score fails in stock Pyro.
UNSCORED = frozenset(["GaussianScaleMixture", "LinearHMM"])
# It has one value only, which moves with the latent.
UNOBSERVED = frozenset(["Delta"])
# Values of distributions that Pyro has no way to draw from.
VALUES: dict[str, Callable[[], Tensor]] = {
    "CoalescentTimesWithRate": lambda: torch.tensor([-1.0, -2.0]),
    "GammaGaussianHMM": lambda: torch.ones(2, 2, 1),
    "GaussianMRF": lambda: torch.ones(2, 2, 1),
    "GroupedNormalNormal": lambda: torch.ones(2),
    "ImproperUniform": lambda: torch.ones(2),
    "LogNormalNegativeBinomial": lambda: torch.ones(2),
    "VonMises3D": lambda: torch.tensor([1.0, 0.0, 0.0]).expand(2, 3),
}


class Reads(TorchDispatchMode):
    """Counts the numbers that Python reads."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += reads_numbers(func.overloadpacket._qualified_op_name.removeprefix("aten::"), args)
        return func(*args, **(kwargs or {}))


class HandedOver(TorchFunctionMode):
    """Counts the tensors that are handed to Python whole."""

    number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func in (Tensor.numpy, Tensor.tolist, Tensor.__array__)
        return func(*args, **(kwargs or {}))


def plate_of(name: str) -> Any:
    return pyro.plate("law", 2) if LAWS[name](torch.tensor([0.4, 0.7])).batch_shape else contextlib.nullcontext()


def latent(name: str) -> tuple[Any, Any]:
    """A latent in rows, if the distribution has rows."""

    def model() -> None:
        with plate_of(name) as rows:
            z = pyro.sample("z", LAWS[name](torch.tensor([0.8, 0.9])))
            shape = () if rows is None else (2,)
            pyro.factor("f", -0.1 * (z.to(torch.get_default_dtype()).reshape(*shape, -1).sum(-1) - 1.0) ** 2)

    def guide() -> None:
        with plate_of(name):
            pyro.sample("z", LAWS[name](pyro.param("q", torch.tensor([0.4, 0.7]))))

    return model, guide


def observed(name: str) -> tuple[Any, Any]:
    """An observation whose law reads a latent."""
    pyro.set_rng_seed(0)
    value = VALUES[name]() if name in VALUES else LAWS[name](torch.tensor([0.4, 0.7])).sample()

    def model() -> None:
        with pyro.plate("rows", 2):
            z = pyro.sample("z", dist.Bernoulli(0.4))
        with plate_of(name):
            pyro.sample("x", LAWS[name](0.4 + 0.3 * z), obs=value)

    return model, rows(float, torch.ones(2))[1]


def own_reads(model: Any, guide: Any) -> int:
    """How many numbers the programs read themselves: in their draws and log-probabilities."""
    with pyro.validation_enabled(False), Reads() as reads, HandedOver() as handed:
        trace = poutine.trace(guide).get_trace()
        for traced in (trace, poutine.trace(poutine.replay(model, trace=trace)).get_trace()):
            traced.compute_log_prob()
            traced.compute_score_parts()
    return reads.number + handed.number


def test_all_distributions_are_tried() -> None:
    assert LAWS.keys() == names()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(LAWS.keys() - VALUES.keys() - UNSCORED))
def test_a_latent_of_any_distribution(name: str) -> None:
    assert_recorded(*latent(name))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(LAWS.keys() - UNSCORED - UNOBSERVED))
def test_an_observation_of_any_distribution(name: str) -> None:
    assert_recorded(*observed(name))


def assert_recorded(model: Any, guide: Any) -> None:
    reads = own_reads(model, guide)
    pyro.clear_param_store()
    svi = CompiledSVI(model, guide, SGD({"lr": 1e-3}), TraceBackpropQ_ELBO(num_particles=2), compile="eager")
    repeat(8, svi.step)
    said = compile_report(svi)
    assert said.startswith("Recorded") or (reads and "of pyro_bpq" not in said), (reads, said)
