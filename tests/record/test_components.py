"""Credit per component: each component of a site is charged with the costs that depend on it, and no others."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from models import BY_NAME, real, sizes
from steps import WAYS, coins_guide, fresh, repeat, seeing, trained

from pyro_bpq import AllAction, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.testing import assert_unbiased, expected_moments

# Two rows of a plate, whose components differ.
ROWS = {"shapes": sizes("pz:2,2 pw mean:2 qz:2,2 qw:2"), "args": (real(0.7, -0.5),)}
CASES = {
    "component_rows": replace(BY_NAME["component_plate"], name="component_rows", **ROWS),
    "component_chain": BY_NAME["component_chain"],
}
CHARGED = {"component_rows": {"-log p(x)", "-log p(y)", "log q(w)"}, "component_chain": {"-log p(x)"}}
OPTIONS = ("score_function", "running_baseline", "no_critic", "pair")


def charged(elbo: TraceBackpropQ_ELBO) -> set[str]:
    """The costs that are charged to components of ``z``."""
    return set(elbo.runner.plans.last.layout.charged.get("z", ()))


PAIRS = [(name, own) for name in CASES for own in OPTIONS if (name, own) != ("component_rows", "pair")]


@pytest.mark.parametrize(("name", "options"), PAIRS)
def test_charging_components_is_exactly_unbiased(name: str, options: str) -> None:
    case = CASES[name]
    elbo = trained(TraceBackpropQ_ELBO(**WAYS[options]), *case.programs, params=case.params, lr=0.02).eval()
    assert_unbiased(elbo, *case.programs)
    # What sums over all components is charged to none of them.
    assert charged(elbo) >= CHARGED[name] and "-log p(both)" not in charged(elbo)


def test_immediate_costs_are_split_by_component_by_the_extra_run() -> None:
    """Then nothing of a factorised program varies."""

    model = seeing(lambda z: 6.0 * z - 0.3, 3)

    def variance(estimator: Any) -> float:
        fresh()
        elbo = TraceBackpropQ_ELBO(estimator=estimator, critic=None).eval()
        return float(expected_moments(elbo, model, coins_guide).variance["q"].sum())

    assert variance(AllAction()) < 1e-20 and variance(ScoreFunction()) > 1.0


def test_a_changed_reader_is_told_and_then_charged_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """An observation reads another component after some steps; the key of a call does not see which."""
    model = seeing(lambda z: z[int(os.environ["PYRO_BPQ_TEST_COMPONENT"])], 3)
    elbo = TraceBackpropQ_ELBO(estimator=ScoreFunction())
    monkeypatch.setenv("PYRO_BPQ_TEST_COMPONENT", "0")
    repeat(5, elbo.loss_and_grads, model, coins_guide)
    assert "-log p(x)" in charged(elbo)
    monkeypatch.setenv("PYRO_BPQ_TEST_COMPONENT", "2")
    with pytest.warns(BPQWarning, match=r"-log p\(x\) reads other components of z"):
        repeat(20, elbo.loss_and_grads, model, coins_guide)
    assert not charged(elbo)
