"""Copies, pickles and interrupted training: what follows is the same as without the interruption."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, Case
from pyro.infer import SVI
from pyro.optim import Adam
from steps import (
    CHAIN,
    DATA,
    OPTIONS,
    assert_equal,
    called_module,
    from_seed,
    repeat,
    rows,
    run,
    state_of,
    stored,
    through_file,
)
from torch import Tensor, nn

from pyro_bpq import AllAction, LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.estimators import REBAR, DisARM

THROUGH = {"pickle": lambda elbo: pickle.loads(pickle.dumps(elbo)), "torch": through_file, "deepcopy": copy.deepcopy}
# The modules' guide does not vectorise.
PLATED = [name for name in OPTIONS if name != "vectorised"]


@pytest.mark.parametrize("through", list(THROUGH.values()), ids=list(THROUGH))
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
@pytest.mark.parametrize("steps", [0, 1, 10])
@pytest.mark.parametrize("is_waiting", [False, True], ids=["applied", "waiting"])
def test_copies_continue_alike(options: dict[str, Any], through: Any, steps: int, is_waiting: bool) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    run(elbo, steps=steps)
    if is_waiting:
        elbo.differentiable_loss(CHAIN.model, CHAIN.guide)
    twin = through(elbo)
    before = state_of(elbo)
    assert_equal(state_of(twin), before)
    # A copy holds no recording, so that it cannot say how old one is.
    assert re.sub("(?m)^runs:.*", "", repr(twin)) == re.sub("(?m)^runs:.*", "", repr(elbo))
    found = run(twin, steps=5, seed=4)
    assert_equal(state_of(elbo), before)  # its twin's steps leave it alone
    assert_equal(run(elbo, steps=5, seed=4), found)
    assert_equal(state_of(elbo), state_of(twin))


# Interrupted training


def masked(z: Tensor) -> Tensor:
    shift = torch.zeros(3)
    shift[z > 0] = 1.7
    return shift


def pairs_guide() -> None:
    with pyro.plate("rows", 12):
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q").expand(12, 3)).to_event(1))
        pyro.sample("w", dist.Bernoulli(logits=z + pyro.param("r")).to_event(1))


def pairs_model() -> None:
    with pyro.plate("rows", 12):
        z = pyro.sample("z", dist.Bernoulli(0.4 * torch.ones(12, 3)).to_event(1))
        w = pyro.sample("w", dist.Bernoulli(logits=z - 0.2).to_event(1))
        pyro.sample("x", dist.Normal(w.sum(-1) * z[..., 0], 1.0), obs=torch.linspace(-1.0, 2.0, 12))


STEERED = BY_NAME["python_branch"]
PAIRS = Case("pairs", pairs_model, pairs_guide, {"q": (), "r": ()})
READS = masked, lambda z: 1.7 * z
ROWS, APART = (Case("rows", *rows(read, DATA[:3], lambda: pyro.param("q")), {"q": ()}) for read in READS)


class Session:
    """SVI of a program, with all that has to be saved."""

    def __init__(self, elbo: TraceBackpropQ_ELBO, case: Case = CHAIN) -> None:
        self.elbo, self.case, self.optimiser = elbo, case.params(seed=1), Adam({"lr": 0.02})

    def train(self, steps: int) -> list[float]:
        return repeat(steps, SVI(*self.case.programs, self.optimiser, self.elbo).step)

    def save(self, how: str) -> tuple[Any, ...]:
        elbo = self.elbo if how == "pickle" else self.elbo.state_dict()
        return elbo, pyro.get_param_store().get_state(), self.optimiser.get_state(), torch.get_rng_state()

    @staticmethod
    def load(saved: tuple[Any, ...], options: dict[str, Any], case: Case = CHAIN) -> Session:
        elbo, store, optimiser, rng = saved
        if isinstance(elbo, dict):
            state, elbo = elbo, TraceBackpropQ_ELBO(**options)
            elbo.load_state_dict(state)
        resumed = Session(elbo, case)
        pyro.get_param_store().set_state(store)
        resumed.optimiser.set_state(optimiser)
        torch.set_rng_state(rng)
        return resumed


# What was found of a program goes on.
FOUND: list[tuple[Case, dict[str, Any]]] = [
    (APART, {"num_particles": 2, "vectorize_particles": True, "estimator": ScoreFunction(LeaveOneOut())}),
    (STEERED, {"num_particles": 2}),
    (STEERED, {}),
    (PAIRS, {}),
    (STEERED, {"estimator": ScoreFunction(LeaveOneOut()), "structure": "dense", "num_particles": 4}),
    (ROWS, {}),
    (STEERED, {"estimator": ScoreFunction(), "structure": "dense"}),
    *((PAIRS, {"estimator": own}) for own in (REBAR(), DisARM())),  # which draw noise of their own
]


@pytest.mark.parametrize(
    ("case", "options", "steps", "how"),
    [
        *((CHAIN, options, 8, how) for how in ("pickle", "state_dict") for options in OPTIONS.values()),
        *((case, options, steps, "state_dict") for steps in (1, 2, 30) for case, options in FOUND),
    ],
)
def test_svi_resumes_with_the_same_numbers(case: Case, options: dict[str, Any], steps: int, how: str) -> None:
    session = Session(TraceBackpropQ_ELBO(**options), case)
    session.train(steps)
    saved = through_file(session.save(how))
    expected = session.train(8), stored()
    resumed = Session.load(saved, options, case)
    assert_equal((resumed.train(8), stored()), expected)
    assert resumed.elbo.plan is not None


@pytest.mark.parametrize("options", [OPTIONS[name] for name in PLATED], ids=PLATED)
@pytest.mark.parametrize("how", ["pickle", "state_dict"])
def test_torch_optimiser_resumes_with_the_same_numbers(options: dict[str, Any], how: str) -> None:
    def train(fit: nn.Module, state: Any = None) -> tuple[torch.optim.Optimizer, list[float]]:
        optimiser, losses = torch.optim.Adam(fit.parameters(), lr=0.02), []
        optimiser.load_state_dict(copy.deepcopy(state) or optimiser.state_dict())
        for _ in range(6):
            optimiser.zero_grad()
            loss = fit(DATA)
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return optimiser, losses

    with pyro.settings.context(module_local_params=True):
        fit = called_module(TraceBackpropQ_ELBO(**options))
        optimiser, _ = train(fit)
        saved, state = through_file((fit if how == "pickle" else fit.state_dict(), optimiser.state_dict()))
        rng = torch.get_rng_state()
        expected = train(fit, state)[1], state_of(fit)
        resumed = saved if how == "pickle" else called_module(TraceBackpropQ_ELBO(**options))
        if how == "state_dict":
            resumed.load_state_dict(saved)
        torch.set_rng_state(rng)
        assert_equal((train(resumed, state)[1], state_of(resumed)), expected)


def test_pickle_continues_in_a_new_process(tmp_path: Path) -> None:
    session = Session(TraceBackpropQ_ELBO())
    session.train(6)
    torch.save(session.save("pickle"), tmp_path / "saved")
    program = (
        "import sys, torch\n"
        "torch.set_default_dtype(torch.float64)\n"
        "from test_elbo_resume import Session\n"
        "session = Session.load(torch.load(sys.argv[1], weights_only=False), {})\n"
        "print(*(loss.hex() for loss in session.train(5)))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "saved")]
    folder = Path(__file__).parent
    paths = [str(folder.parent), str(folder.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [loss.hex() for loss in session.train(5)]


# Several ELBOs whose critics the user's optimiser trains


@pytest.mark.parametrize("other", [CHAIN, APART], ids=["same", "other"])
def test_two_elbos_train_their_critics_in_one_param_store(other: Case) -> None:
    elbos = [TraceBackpropQ_ELBO(learner=None, seed=seed, estimator=AllAction(exact=False)) for seed in range(2)]
    steppers = [SVI(*case.programs, Adam({"lr": 0.02}), elbo) for case, elbo in zip((CHAIN, other), elbos, strict=True)]

    def train(steps: int) -> list[dict[str, Tensor]]:
        for _ in range(steps):
            for svi in steppers:
                svi.step()
        return [{n: p.detach().clone() for n, p in elbo.critics.named_parameters()} for elbo in elbos]

    CHAIN.params()
    pyro.param("q", torch.tensor(0.3))
    before, size = train(1), len(stored())
    after = train(10)
    names = {name.split("$$$")[0] for name in pyro.get_param_store().keys()}
    assert {name for name in names if "bpq_critics" in name} == {"bpq_critics", "bpq_critics_1"}
    assert len(stored()) == size
    for old, new in zip(before, after, strict=True):
        assert old and all(not torch.equal(old[name], new[name]) for name in old if old[name].numel())


def test_a_compiled_objective_goes_on_with_the_state_that_was_loaded() -> None:
    elbo, programs = TraceBackpropQ_ELBO(1, compile="eager"), CHAIN.params().programs
    repeat(12, elbo.loss_and_grads, *programs)
    assert elbo.compiled is not None and elbo.compiled.entries
    state, found = copy.deepcopy(elbo.state_dict()), []
    for _ in range(2):
        elbo.load_state_dict(copy.deepcopy(state))
        from_seed(1, repeat, 4, elbo.loss_and_grads, *programs)
        found.append(state_of(elbo.critics))
    assert_equal(*found)
