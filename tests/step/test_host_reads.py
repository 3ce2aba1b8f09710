"""A cached step asks the device for few numbers, and sends it none: what the host of a GPU would wait for."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import CHAIN, reads_numbers, repeat
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_bpq import LinearCritic, TraceBackpropQ_ELBO

# A tensor from numbers of Python or numpy; on a GPU it is copied there.
SENDS = frozenset({"lift_fresh"})


class Watch(TorchDispatchMode):
    """Counts the functions of this package in which the host waits; generators' states lie on the host anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    @staticmethod
    def hands_on(frame: Any) -> bool:
        """Whether a frame only calls what the frame before asks for: torch, and modes that watch the program."""
        is_mode = frame.f_code.co_name == "__torch_function__"
        return is_mode or f"{torch.__name__}/" in frame.f_code.co_filename.replace("\\", "/")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rsplit(".", 1)[0].removeprefix("aten.")
        is_state = name == "equal" and args[0].dtype == torch.uint8
        if (reads_numbers(name, args) or name in SENDS) and not is_state:
            frame: Any = sys._getframe(1)
            while frame is not None and self.hands_on(frame):
                frame = frame.f_back
            if frame is not None and "pyro_bpq" in frame.f_globals.get("__name__", ""):
                self.found[frame.f_code.co_name] += 1
            elif frame is not None and frame.f_code.co_name == "warn_if_nan":
                self.found["warn_if_nan"] += 1
        return func(*args, **(kwargs or {}))


def mixed() -> tuple[Callable[[], None], Callable[[], None]]:
    def sites(rate: Tensor) -> Tensor:
        total = torch.zeros(())
        z = pyro.sample("real", dist.Normal(rate, 1.0))
        for t in range(7):  # more than a critic sees as they are
            logits = torch.stack((z, -z, rate + total), -1)
            total = total + pyro.sample(f"k_{t}", dist.Categorical(logits=logits)).to(z)
        bits = pyro.sample("bits", dist.Bernoulli(logits=torch.stack((z, total), -1)).to_event(1))
        return total + bits.sum(-1) + pyro.sample("count", dist.Poisson(rate.exp()))

    def model() -> None:
        with pyro.plate("rows", 100, subsample_size=3):
            pyro.sample("x", dist.Normal(sites(torch.zeros(3)), 1.0), obs=torch.ones(3))

    def guide() -> None:
        with pyro.plate("rows", 100, subsample_size=3):
            sites(pyro.param("rate", torch.zeros(3)))

    return model, guide


OPTIONS = [{}, {"num_particles": 2}, {"critic": LinearCritic()}, {"learner": None}, {"reduction": "per_cost"}]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS, ids=["default", "two particles", "linear", "no learner", "per cost"])
@pytest.mark.parametrize("make", [lambda: CHAIN.params().programs, mixed], ids=["chain", "mixed"])
def test_a_cached_step_reads_two_numbers(make: Any, options: dict[str, Any]) -> None:
    model, guide = make()
    elbo = TraceBackpropQ_ELBO(**options)
    with pyro.validation_enabled(False):
        repeat(14, elbo.loss_and_grads, model, guide)
        with Watch() as watch:
            for _ in range(2):
                elbo.differentiable_loss(model, guide).backward()
    # Whether the loss is finite; whether a recording that further particles come from has the costs of the first one.
    assert watch.found.pop("may_learn") == 2
    assert watch.found.pop("costs_agree", 0) <= 2
    # The seeds of two other runs of each particle, which a generator of the CPU draws.
    assert watch.found.pop("_seed", 0) <= 4 * options.get("num_particles", 1)
    assert not watch.found


def test_the_watch_sees_what_it_is_for() -> None:
    package = {"torch": torch, "__name__": "pyro_bpq.somewhere"}
    function = eval("lambda x: (x.sum().item(), x[x > 0], torch.tensor([1.0, 2.0]), x[[0, 1]])", package)
    with Watch() as watch:
        function(torch.ones(3))
    assert watch.found == {"<lambda>": 4}
