"""Credit per component: each component of a site is charged with the costs that depend on it, and no others."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, Case
from pyro.infer import SVI
from pyro.optim import Adam
from steps import repeat
from torch import Tensor

from pyro_bpq import AllAction, LeaveOneOut, RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.record.elements import rule_of
from pyro_bpq.testing import assert_unbiased, expected_moments

# Two rows of a plate, whose components differ.
ROWS = replace(
    BY_NAME["component_plate"],
    name="component_rows",
    shapes={"pz": (2, 2), "pw": (), "mean": (2,), "qz": (2, 2), "qw": (2,)},
    args=(torch.tensor([0.7, -0.5], dtype=torch.float64),),
)
CASES = {"component_rows": ROWS, "component_chain": BY_NAME["component_chain"]}
OPTIONS: dict[str, dict[str, Any]] = {
    "score_function": {"estimator": ScoreFunction()},
    "running_baseline": {"estimator": ScoreFunction(RunningBaseline())},
    "all_action": {"estimator": AllAction(exact=False), "critic": None},
}


def _trained(case: Case, **options: Any) -> TraceBackpropQ_ELBO:
    """An ELBO with running statistics of 20 steps, at the case's own parameters."""
    case.params()
    elbo = TraceBackpropQ_ELBO(**options)
    svi = SVI(case.model, case.guide, Adam({"lr": 0.02}), loss=elbo)
    repeat(20, svi.step, *case.args)
    case.params()
    return elbo.eval()


def _charged(elbo: TraceBackpropQ_ELBO) -> dict[str, set[str]]:
    assert elbo.runner.plans.last is not None
    return {name: set(costs) for name, costs in elbo.runner.plans.last.plan.layout.charged.items() if costs}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_charging_components_is_exactly_unbiased(name: str, options: str) -> None:
    case = CASES[name]
    elbo = _trained(case, **OPTIONS[options])
    assert_unbiased(elbo, case.model, case.guide, *case.args)
    charged = _charged(elbo)
    if name == "component_chain":
        # What sums over all components is charged to none of them.
        assert "-log p(x)" in charged["z"]
        assert "-log p(both)" not in charged["z"]
    else:
        assert charged["z"] >= {"-log p(x)", "-log p(y)", "log q(w)"}


def test_leave_one_out_by_component_is_exactly_unbiased() -> None:
    case = BY_NAME["component_chain"]
    options = {"estimator": ScoreFunction(LeaveOneOut()), "num_particles": 2, "vectorize_particles": True}
    elbo = _trained(case, **options)
    assert_unbiased(elbo, case.model, case.guide)
    assert _charged(elbo)["z"] >= {"-log p(x)"}


def test_a_wrong_charge_is_a_bias_that_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["component_rows"]
    flip = torch.ops.aten.flip.default
    monkeypatch.setattr(
        "pyro_bpq.record.elements.rule_of",
        lambda func: (lambda read, tensor, dims: read(tensor)) if func is flip else rule_of(func),
    )
    elbo = _trained(case, estimator=ScoreFunction())
    with pytest.raises(AssertionError, match="is biased"):
        assert_unbiased(elbo, case.model, case.guide, *case.args)


NUMBER = 6


def _joined_guide(data: Tensor) -> None:
    pyro.sample("z", dist.Bernoulli(logits=pyro.param("q")).to_event(1))


def _joined_model(data: Tensor) -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=torch.zeros(NUMBER, dtype=data.dtype)).to_event(1))
    pyro.sample("x", dist.Normal(3.0 * z, 1.0).to_event(1), obs=data)


def _apart_guide(data: Tensor) -> None:
    q = pyro.param("q")
    for i in range(NUMBER):
        pyro.sample(f"z_{i}", dist.Bernoulli(logits=q[i]))


def _apart_model(data: Tensor) -> None:
    for i in range(NUMBER):
        z = pyro.sample(f"z_{i}", dist.Bernoulli(logits=torch.zeros((), dtype=data.dtype)))
        pyro.sample(f"x_{i}", dist.Normal(3.0 * z, 1.0), obs=data[i])


def test_joined_components_vary_as_little_as_separate_sites() -> None:
    data = torch.linspace(-1.0, 3.0, NUMBER, dtype=torch.float64)
    variance = {}
    for name, model, guide, structure in (
        ("apart", _apart_model, _apart_guide, "auto"),
        ("joined", _joined_model, _joined_guide, "auto"),
        ("as one", _joined_model, _joined_guide, "dense"),
    ):
        pyro.clear_param_store()
        pyro.param("q", torch.linspace(-0.5, 0.8, NUMBER, dtype=torch.float64))
        elbo = TraceBackpropQ_ELBO(estimator=ScoreFunction(), structure=structure).eval()
        variance[name] = float(expected_moments(elbo, model, guide, data).variance["q"].sum())
    assert variance["joined"] == pytest.approx(variance["apart"], rel=1e-9)
    assert variance["as one"] > 10.0 * variance["joined"]


class Turns:
    """A model whose observation reads another component after some steps; the key of a call does not see which."""

    @property
    def component(self) -> int:
        return int(os.environ["PYRO_BPQ_TEST_COMPONENT"])

    def guide(self) -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.zeros(3))).to_event(1))

    def model(self) -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=torch.zeros(3)).to_event(1))
        pyro.sample("x", dist.Normal(z[self.component], 1.0), obs=torch.tensor(0.3))


def test_a_changed_reader_is_told_and_then_charged_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYRO_BPQ_TEST_COMPONENT", "0")
    turns, elbo = Turns(), TraceBackpropQ_ELBO(estimator=ScoreFunction())
    repeat(5, elbo.loss_and_grads, turns.model, turns.guide)
    assert "-log p(x)" in _charged(elbo)["z"]
    monkeypatch.setenv("PYRO_BPQ_TEST_COMPONENT", "2")
    with pytest.warns(BPQWarning, match=r"-log p\(x\) reads other components of z"):
        repeat(20, elbo.loss_and_grads, turns.model, turns.guide)
    assert not _charged(elbo)
