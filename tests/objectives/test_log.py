"""What the default settles is said once, at level INFO, which is off unless a user asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import trained

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.plan import particles

ROWS = 12
DATA = torch.linspace(-1.0, 1.0, ROWS)


def steps(
    read: Callable[[torch.Tensor], Any], number: int = 6, rows: bool = True, **options: Any
) -> TraceBackpropQ_ELBO:
    def guide() -> None:
        w = pyro.param("w", lambda: torch.zeros(2))
        with pyro.plate("rows", ROWS) if rows else pyro.plate("one", 1):
            y = pyro.sample("y", dist.Bernoulli(logits=w[0] * DATA[: ROWS if rows else 1]))
            pyro.sample("z", dist.Bernoulli(logits=w[1] + y))

    def model() -> None:
        with pyro.plate("rows", ROWS) if rows else pyro.plate("one", 1):
            y = pyro.sample("y", dist.Bernoulli(torch.tensor(0.4)))
            z = pyro.sample("z", dist.Bernoulli(0.2 + 0.5 * y))
            pyro.sample("x", dist.Normal(read(z), 1.0), obs=DATA[: ROWS if rows else 1])

    return trained(TraceBackpropQ_ELBO(**options), model, guide, steps=number)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "pyro_bpq"]


IN_A_PLATE = "in one call, in a plate of their own."
HIDDEN = (
    "8 particles run in one call, in a dimension that the program does not see. 8 particles do not run in a plate: it "
    "failed: shape '[12]' is invalid for input of size 96."
)
CASES: dict[str, tuple[Callable[[torch.Tensor], Any], bool, str]] = {
    "plate": (lambda z: z, True, f"8 particles run {IN_A_PLATE}"),
    "sums": (lambda z: z, True, f"All values run {IN_A_PLATE}"),
    "hidden": (lambda z: z.reshape(ROWS), True, HIDDEN),
    "steered": (lambda z: z if z.sum() > 0 else -z, False, "Values of z leave torch: every run is recorded."),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_settled_is_said_once(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, rows, text = CASES[name]
    if name == "sums":
        monkeypatch.setattr(particles, "DRAWN_STEPS", (1, 1))
    with caplog.at_level("INFO", "pyro_bpq"):
        elbo = steps(read, rows=rows)
    assert said(caplog).count(text) == 1, said(caplog)
    # The same is shown to those who print the objective.
    assert text in repr(elbo)


def test_nothing_is_said_unless_asked_for(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    steps(lambda z: z)
    assert not said(caplog) and capsys.readouterr() == ("", "")
