"""The choice by measurement: what it may not touch, that it is repeatable, kept, and unbiased whatever it chooses."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD
from steps import chosen_entries

from pyro_bpq import CompiledSVI, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.choice import FIXED, Candidate
from pyro_bpq.choice.candidates import BY_NAME
from pyro_bpq.errors import BPQWarning, OptionError
from pyro_bpq.estimators import debiased_straight_through
from pyro_bpq.estimators.base import SiteContext, SiteTerm
from pyro_bpq.plan import rules
from pyro_bpq.testing import ChoiceNoise, assert_unbiased
from pyro_bpq.tracing.work import COMPILED, EAGER

DEAR = Candidate("dear", ScoreFunction(), 16, critics=False, in_order=True)
"""Many particles without a baseline: it is not chosen for long."""


def steered(q: torch.Tensor) -> torch.Tensor:
    a = pyro.sample("a", dist.Bernoulli(logits=q[0]))
    return 1.5 * pyro.sample("b", dist.Bernoulli(logits=q[1])) if a > 0 else -a


def guide() -> None:
    steered(pyro.param("q", torch.tensor([0.3, -0.4])))


def model() -> None:
    mean = steered(torch.zeros(2)) + pyro.param("w", torch.tensor(0.2))
    pyro.sample("x", dist.Normal(mean, 0.8), obs=torch.tensor(1.3))


def trained(steps: int, choice: Any = "auto", **options: Any) -> tuple[TraceBackpropQ_ELBO, list[float]]:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(choice=choice, **options)
    # Tests are short.
    elbo.choice.share = 1.0
    elbo.choice.candidates = FIXED, DEAR
    if choice == "auto":
        elbo.choice.chosen = DEAR
        elbo._rules.apply(DEAR)
    svi = SVI(model, guide, SGD({"lr": 1e-3}), elbo)
    return elbo, [svi.step() for _ in range(steps)]


@functools.cache
def measured() -> tuple[TraceBackpropQ_ELBO, list[float]]:
    return trained(100)


def test_what_is_dear_is_not_done_for_long() -> None:
    elbo, _ = measured()
    assert elbo.choice.looks == 1 and elbo.choice.chosen == FIXED, str(elbo.choice)
    assert elbo.runner.structure.mode == "auto" and elbo.runner.structure.is_ordered
    for text in ("dear", "the rules", "ms counted"):
        assert text in str(elbo.choice)


def test_trials_touch_neither_losses_nor_parameters() -> None:
    elbo, losses = measured()
    # Until the choice changes, steps are those of the candidate that it starts with.
    until = next(i for i in range(20, 100) if trained_dearly()[1][: i + 1] != losses[: i + 1])
    assert until > 25
    assert elbo.choice.dropped == {}


@functools.cache
def trained_dearly() -> tuple[TraceBackpropQ_ELBO, list[float]]:
    return trained(100, DEAR)


def test_the_choice_is_kept() -> None:
    elbo, _ = measured()
    other = TraceBackpropQ_ELBO(choice="auto")
    other.load_state_dict(elbo.state_dict())
    assert other.choice.chosen == elbo.choice.chosen and other.choice.looks == 1
    assert other.runner.structure.mode == "auto"
    # A choice that is no more is measured anew.
    other.choice.load_state_dict({**elbo.choice.state_dict(), "chosen": "gone"}, 0)
    assert other.choice.chosen == elbo.choice.chosen
    pinned = TraceBackpropQ_ELBO(choice="fixed")
    pinned.load_state_dict(elbo.state_dict())
    assert pinned.choice.chosen == FIXED


@pytest.mark.parametrize("name", ["program order, 4 particles", "no critics"])
def test_a_pinned_candidate_is_unbiased(name: str) -> None:
    elbo, _ = trained(6, BY_NAME[name])
    assert elbo.choice.chosen == BY_NAME[name] and not elbo.choice.is_due(10**6)
    again = TraceBackpropQ_ELBO(choice=elbo.choice)
    assert again.choice is not elbo.choice and again.choice.chosen == BY_NAME[name]
    assert_unbiased(elbo.eval(), model, guide)


@functools.cache
def chain(seen: float = 1.0) -> tuple[Any, Any]:
    """Two coins, the second of which leans on the first, and a cost that reads both."""

    def coins(q: torch.Tensor) -> torch.Tensor:
        a = pyro.sample("a", dist.Bernoulli(logits=q[0]))
        return a + 2.0 * pyro.sample("b", dist.Bernoulli(logits=q[1] + a))

    def model() -> None:
        pyro.sample(
            "x", dist.Normal(coins(torch.zeros(2)) * pyro.param("w", torch.tensor(0.6)), 0.8), obs=torch.tensor(seen)
        )

    def guide() -> None:
        coins(pyro.param("q", torch.tensor([0.3, -0.4])))

    return model, guide


ONE = BY_NAME["the rules, one particle"]
"""With critics, and few outcomes."""
CHANGES = {**BY_NAME, "no critics": replace(BY_NAME["no critics"], num_particles=1)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ONE.name, "no critics"),
        ("no critics", ONE.name),
        ("leave-one-out, 4 particles", ONE.name),
        ("no critics", "the rules"),
        pytest.param(ONE.name, "leave-one-out, 4 particles", marks=pytest.mark.slow),
        pytest.param("the rules", "leave-one-out, 2 particles", marks=pytest.mark.slow),
    ],
)
def test_a_change_of_choice_is_unbiased(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The outcomes of eight particles are too many.
    monkeypatch.setattr(rules, "MOST_PARTICLES", 4)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(choice="auto")
    svi = SVI(*chain(), SGD({"lr": 1e-3}), elbo)
    for name in (before, after):
        elbo._rules.apply(CHANGES[name])
        assert_unbiased(copy.deepcopy(elbo).eval(), *chain())
        for _ in range(4):
            svi.step()
    assert_unbiased(elbo.eval(), *chain())


@functools.cache
def bits() -> tuple[Any, Any]:
    """A single site of three coins, and a cost that reads all of them."""

    def coins(q: torch.Tensor) -> torch.Tensor:
        return pyro.sample("z", dist.Bernoulli(logits=q).to_event(1))

    def model() -> None:
        w = pyro.param("w", torch.tensor([0.6, -0.4, 1.1], dtype=torch.float64))
        mean = (coins(torch.zeros(3, dtype=torch.float64)) * w).sum(-1)
        pyro.sample("x", dist.Normal(mean.square(), 0.8), obs=torch.tensor(1.0, dtype=torch.float64))

    def guide() -> None:
        coins(pyro.param("q", torch.tensor([0.3, -0.4, 0.2], dtype=torch.float64)))

    return model, guide


@pytest.mark.parametrize("name", ["no extra run", "corrected slopes, 2 particles", "leave-one-out, 2 particles"])
def test_candidates_of_a_single_site_are_unbiased(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = ChoiceNoise()
    monkeypatch.setattr(debiased_straight_through, "_draw", chosen_entries(noise))
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(choice="auto")
    svi = SVI(*bits(), SGD({"lr": 1e-3}), elbo)
    svi.step()
    elbo._rules.apply(BY_NAME[name])
    for _ in range(4):
        svi.step()
    assert elbo.info["z"]["estimator"] == BY_NAME[name].estimator
    assert elbo.num_particles == (BY_NAME[name].num_particles or 1)
    assert_unbiased(elbo.eval(), *bits(), noise=noise)


@functools.cache
def coin() -> tuple[Any, Any]:
    """A single site of one coin."""

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.sample("x", dist.Normal(1.5 * z, 0.8), obs=torch.tensor(1.0, dtype=torch.float64))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3, dtype=torch.float64))))

    return model, guide


@pytest.mark.parametrize(
    ("programs", "tried"),
    [
        (bits(), {"corrected slopes, 2 particles", "leave-one-out, 4 particles"}),
        (coin(), {"no extra run", "the rules, 8 particles"}),
    ],
    ids=["many components", "one component"],
)
def test_what_is_tried_follows_from_the_plan(programs: Any, tried: set[str]) -> None:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(choice="all")
    svi = SVI(*programs, SGD({"lr": 1e-3}), elbo)
    for _ in range(22):
        svi.step()
    names = {candidate.name for candidate in elbo.choice.candidates}
    assert tried <= names, str(elbo.plan)
    assert not names & {"no extra run", "corrected slopes, 2 particles"} - tried


PROGRAM = """
import pyro, torch, pyro.distributions as dist
from pyro.infer import SVI
from pyro.optim import Adam
from pyro_bpq import TraceBackpropQ_ELBO

data, table = torch.linspace(-1.0, 1.0, 12), torch.linspace(-1.0, 1.0, 4)

def sites(q, obs=None):
    kind = pyro.sample("kind", dist.Categorical(logits=q))
    with pyro.plate("rows", 12):
        z = pyro.sample("z", dist.Bernoulli(logits=table[kind] + data))
        y = pyro.sample("y", dist.Bernoulli(logits=z - 0.5))
        n = pyro.sample("n", dist.Poisson(1.0 + y))
        if obs is not None:
            pyro.sample("x", dist.Normal(z + n * pyro.param("w", torch.tensor(0.3)), 1.0), obs=obs)

def model():
    sites(torch.zeros(4), data)

def guide():
    sites(pyro.param("q", torch.zeros(4)))

for choice in ("fixed", "auto"):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(choice=choice)
    elbo.choice.share = 0.5
    svi = SVI(model, guide, Adam({"lr": 0.05}), elbo)
    for _ in range(50):
        svi.step()
    print({name: value.tolist() for name, value in pyro.get_param_store().items()}, elbo.choice)
    print({name: weight.sum().item() for name, weight in elbo.critics.weights().items()})
"""


def test_processes_with_one_seed_agree() -> None:
    # The order of sets differs between them.
    found = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] and "'q'" in found[0]


def test_options_of_the_user_stay() -> None:
    elbo, _ = trained(25, estimator=ScoreFunction())
    assert not elbo.choice.is_measured and elbo.choice.known == {}
    with pytest.raises(OptionError, match="write it alone"):
        TraceBackpropQ_ELBO(choice=Candidate("mine", in_order=True), num_particles=2)
    with pytest.raises(OptionError, match="choice='best' is unknown"):
        TraceBackpropQ_ELBO(choice="best")  # type: ignore[arg-type]


NOISY = Candidate("noisy", ScoreFunction(), 1, critics=False)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("making", [0.0, COMPILED.making])
def test_compiled_steps_are_measured_too(making: float, is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_bpq.objectives.elbo.COMPILED", replace(COMPILED, making=making))
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(choice="auto", compile="eager")
    elbo.choice.share, elbo.choice.candidates = 1e6, (ONE, NOISY)
    elbo.choice.chosen = NOISY
    elbo._rules.apply(NOISY)
    # The level of the costs is high.
    svi = (CompiledSVI if is_whole else SVI)(*chain(6.0), SGD({"lr": 1e-4}), elbo)
    for _ in range(40):
        svi.step()
    assert elbo.choice.weights.making == making and elbo.choice.dropped == {}
    if making == 0.0:
        assert elbo.choice.chosen == ONE, str(elbo.choice)
    else:
        # Some hundred operators take more to compile than forty steps.
        assert elbo.choice.chosen == NOISY
        assert "would not win back its compilation" in str(elbo.choice)
    # Steps were compiled before and after the change.
    assert len(elbo.compiled.entries) == (2 if making == 0.0 else 1)
    assert all(entry.steps > 5 for entry in elbo.compiled.entries)
    assert_unbiased(elbo.eval(), *chain(6.0))


def test_compiled_steps_of_steered_programs_count_as_eager() -> None:
    with pytest.warns(BPQWarning, match="steps run eagerly"):
        elbo, _ = trained(24, compile="eager")
    assert elbo.choice.weights is EAGER and elbo.choice.known


class Failing(ScoreFunction):
    """An estimator that makes a parameter and fails."""

    def __call__(self, context: SiteContext) -> SiteTerm:
        pyro.param("left behind", torch.ones(2))
        raise RuntimeError("on purpose")


def test_a_trial_that_fails_leaves_no_parameters() -> None:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(choice="auto")
    elbo.choice.share, elbo.choice.candidates = 1.0, (FIXED, Candidate("failing", Failing(), 2, in_order=True))
    svi = SVI(model, guide, SGD({"lr": 1e-3}), elbo)
    for _ in range(60):
        svi.step()
    assert "on purpose" in elbo.choice.dropped["failing"]
    assert "left behind" not in pyro.get_param_store()


@functools.cache
def table() -> tuple[Any, Any]:
    """Three dice, the laws of which read each other, and a cost that reads all of them."""

    def dice(q: torch.Tensor) -> torch.Tensor:
        total = torch.tensor(0)
        for i in range(3):
            total = total + pyro.sample(f"z_{i}", dist.Categorical(logits=q[total % 4]))
        return total

    def model() -> None:
        pyro.sample("x", dist.Normal(0.2 * dice(torch.zeros(4, 4)).square(), 0.8), obs=torch.tensor(1.0))

    def guide() -> None:
        dice(pyro.param("q", torch.zeros(4, 4)))

    return model, guide


def test_the_default_measures_beside_training() -> None:
    def losses(elbo: TraceBackpropQ_ELBO) -> list[float]:
        elbo.choice.share = 1.0
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        svi = SVI(*table(), SGD({"lr": 1e-3}), elbo)
        return [svi.step() for _ in range(40)]

    elbo, fixed = TraceBackpropQ_ELBO(), TraceBackpropQ_ELBO(choice="fixed")
    assert losses(elbo) == losses(fixed)
    tried = elbo.choice.known["sums over values, 8 particles"]
    assert tried.squares and elbo.choice.dropped == {} and len(elbo.choice.candidates) == 2
    assert not fixed.choice.is_measured and fixed.choice.known == {}


class Own(TraceBackpropQ_ELBO):
    """An ELBO of a user's own."""


def test_subclasses_are_not_measured() -> None:
    assert TraceBackpropQ_ELBO().choice.is_measured and not Own().choice.is_measured
    assert Own(choice=ONE).choice.chosen == ONE


def test_nothing_is_tried_where_particles_are_hidden() -> None:
    def dice(q: torch.Tensor) -> torch.Tensor:
        # Reductions over all dimensions mix particles.
        return sum(pyro.sample(f"z_{i}", dist.Categorical(logits=q[i])).sum() for i in range(3))

    def model() -> None:
        pyro.sample("x", dist.Normal(0.2 * dice(torch.zeros(3, 4)) ** 2, 0.8), obs=torch.tensor(1.0))

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO()
    svi = SVI(model, lambda: dice(pyro.param("q", torch.zeros(3, 4))), SGD({"lr": 1e-3}), elbo)
    for _ in range(22):
        svi.step()
    assert elbo.particles.now.is_hidden and elbo.choice.candidates == (FIXED,)
