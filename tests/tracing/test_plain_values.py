"""The plain values that a call hands over, and those that programs can reach besides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from steps import repeat
from torch import nn

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.objectives.runner import StepRunner
from pyro_bpq.plan import particles as rule
from pyro_bpq.rollout.runs import Program
from pyro_bpq.testing import assert_unbiased
from pyro_bpq.tracing.plain_values import ReachedValues, plain_arguments


class Settings:
    """Settings of the user's own."""

    mode = "plain"

    def __init__(self) -> None:
        self.is_on, self.parents, self.rate = False, [[0], [1]], 0.0


class Net(nn.Module):
    """A program that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.settings, self.calls = nn.Linear(2, 2), Settings(), 0

    def forward(self) -> None:
        """Counts its calls."""
        self.calls += 1


def nothing() -> None:
    """A program that reads nothing."""


def _seen(part: Any) -> Callable[[], tuple[Any, ...]]:
    reached = ReachedValues()
    return lambda: reached.of(Program(part, nothing, (), {}))


def _set(name: str) -> Callable[[Net], None]:
    return lambda net: setattr(net.settings, name, True)


@pytest.mark.parametrize(
    "change",
    [
        _set("is_on"),
        _set("rate"),
        lambda net: net.settings.parents[1].append(0),
        lambda net: net.inner.eval(),
        lambda net: setattr(net, "settings", None),
        lambda net: setattr(net, "calls", 1),
    ],
)
@pytest.mark.parametrize(
    "wrap", [lambda net: net, lambda net: net.forward, lambda net: functools.partial(net), lambda net: lambda: net()]
)
def test_a_change_of_what_a_module_holds_is_seen(change: Callable[[Net], None], wrap: Callable[[Net], Any]) -> None:
    net = Net()
    seen = _seen(wrap(net))
    before = seen()
    assert seen() == before
    change(net)
    assert seen() != before


def test_plain_arguments_tell_kinds_zeros_and_lengths() -> None:
    values = (1, True, 1.0, 2.0, 0.0, numpy.int64(1), [1], [1, 2], {"a": 1}, torch.ones(2), None)
    found = [plain_arguments(((value,), {})) for value in values]
    # Numbers with a fraction differ where one is zero; tensors say nothing.
    assert found[2] == found[3] and len(set(found)) == len(found) - 1
    assert plain_arguments(({i: i for i in range(10**5)},))[0] is not None


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("switch", ["attribute", "closure"])
def test_a_switch_that_no_argument_shows_is_seen_at_once(
    sums: bool, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "DRAWN_STEPS", (2, 2) if sums else (10**6, 10**6))
    # The values of many particles are too many to enumerate.
    monkeypatch.setattr(StepRunner, "good_for", lambda *_: 1)
    settings, is_on = Settings(), False

    def model() -> None:
        w = pyro.param("w", torch.tensor([0.5, 1.5]))
        with pyro.plate("d", 2):
            a, b = (pyro.sample(name, dist.Bernoulli(0.4)) for name in "ab")
            is_full = settings.is_on if switch == "attribute" else is_on
            loc = w[0] * a + w[1] * b * (1 - 2 * a) if is_full else w[0] * a
            pyro.sample("x", dist.Normal(loc, 0.5), obs=torch.tensor([0.3, -1.0]))

    def guide() -> None:
        with pyro.plate("d", 2):
            for name in "ab":
                pyro.sample(name, dist.Bernoulli(logits=pyro.param(f"q{name}", torch.zeros(2))))

    pyro.clear_param_store()
    elbo = TraceBackpropQ_ELBO()
    svi = SVI(model, guide, Adam({"lr": 0.01}), elbo)
    repeat(40, svi.step)
    assert elbo.particles.now.sums == sums
    settings.is_on = is_on = True
    looks = elbo.runner.structure.tracked_runs
    svi.step()
    assert elbo.runner.structure.tracked_runs > looks and not elbo.particles.now.sums
    assert_unbiased(elbo.eval(), model, guide)
