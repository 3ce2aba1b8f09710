"""What the default settles is said once, at level INFO, which is off unless a user asks for it."""

from __future__ import annotations

from typing import Any

import pytest
from test_particles import ROWS, Chain, Layers, train

from pyro_bpq.plan import plan as particles
from pyro_bpq.plan import rules


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "pyro_bpq"]


IN_A_PLATE = "in one call, in a plate of their own."
HIDDEN = (
    "8 particles run in one call, in a dimension that the program does not see. 16 particles do not run in a plate: it "
    f"failed: shape '[{ROWS}, 3]' is invalid for input of size {16 * 3 * ROWS}."
)
CASES: dict[str, tuple[Any, str]] = {
    "plate": (Chain(), f"16 particles run {IN_A_PLATE}"),
    "sums": (Chain(), f"All values run {IN_A_PLATE}"),
    "hidden": (Layers(mixes="shape"), HIDDEN),
    "steered": (Layers(mixes="steers"), "Values of z leave torch: every run is recorded."),
}


@pytest.mark.filterwarnings("ignore:Values of 'z', drawn in the plate 'rows', leave torch")
@pytest.mark.parametrize("name", CASES)
def test_what_is_settled_is_said_once(name: str, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, text = CASES[name]
    monkeypatch.setattr(rules, "MOST_PARTICLES", 16)
    if name == "sums":
        monkeypatch.setattr(particles, "DRAWN_STEPS", (1, 1))
    with caplog.at_level("INFO", "pyro_bpq"):
        elbo = train(programs, 6)
    assert said(caplog).count(text) == 1, said(caplog)
    # The same is shown to those who print the objective.
    assert text in repr(elbo)


def test_nothing_is_said_unless_asked_for(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    train(Chain(), 6)
    assert not said(caplog) and capsys.readouterr() == ("", "")
