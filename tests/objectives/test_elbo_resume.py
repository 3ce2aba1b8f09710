"""Copies, pickles and interrupted training: what follows is the same as without the interruption."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME
from pyro.infer import SVI
from pyro.optim import Adam
from steps import CHAIN, DATA, OPTIONS, Guide, Model, assert_equal, repeat, run, state_of
from torch import Tensor, nn

from pyro_bpq import AllAction, LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO


def through_pickle(elbo: Any) -> Any:
    return pickle.loads(pickle.dumps(elbo))


def through_torch(elbo: Any) -> Any:
    file = io.BytesIO()
    torch.save(elbo, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


THROUGH: dict[str, Callable[[Any], Any]] = {"pickle": through_pickle, "torch": through_torch, "deepcopy": copy.deepcopy}
each_way = pytest.mark.parametrize("through", list(THROUGH.values()), ids=list(THROUGH))
# The modules' guide does not vectorise.
PLATED = [name for name in OPTIONS if name != "vectorised"]
each_options = pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))


@each_way
@each_options
@pytest.mark.parametrize("steps", [0, 1, 10])
@pytest.mark.parametrize("is_waiting", [False, True], ids=["applied", "waiting"])
def test_copies_continue_alike(
    options: dict[str, Any], through: Callable[[Any], Any], steps: int, is_waiting: bool
) -> None:
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


class Session:
    """SVI with all that has to be saved."""

    def __init__(self, elbo: TraceBackpropQ_ELBO) -> None:
        pyro.clear_param_store()
        self.elbo, self.optimiser = elbo, Adam({"lr": 0.02})
        self.case = CHAIN

    def train(self, steps: int) -> list[float]:
        svi = SVI(self.case.model, self.case.guide, self.optimiser, self.elbo)
        return [svi.step() for _ in range(steps)]

    def save(self, how: str) -> bytes:
        store = pyro.get_param_store().get_state()
        elbo = self.elbo if how == "pickle" else self.elbo.state_dict()
        file = io.BytesIO()
        torch.save((elbo, store, self.optimiser.get_state(), torch.get_rng_state()), file)
        return file.getvalue()

    @staticmethod
    def load(saved: bytes, options: dict[str, Any]) -> Session:
        loaded, store, optimiser, rng = torch.load(io.BytesIO(saved), weights_only=False)
        elbo = loaded
        if isinstance(loaded, dict):
            elbo = TraceBackpropQ_ELBO(**options)
            elbo.load_state_dict(loaded)
        resumed = Session(elbo)
        pyro.get_param_store().set_state(store)
        resumed.optimiser.set_state(optimiser)
        torch.set_rng_state(rng)
        return resumed


def stored() -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in pyro.get_param_store().named_parameters()}


def _plain(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


@each_options
@pytest.mark.parametrize("how", ["pickle", "state_dict"])
def test_svi_resumes_with_the_same_numbers(options: dict[str, Any], how: str) -> None:
    whole = Session(TraceBackpropQ_ELBO(**options))
    CHAIN.params()
    pyro.set_rng_seed(1)
    whole.train(8)
    saved = whole.save(how)
    expected, parameters, state = whole.train(8), stored(), state_of(whole.elbo)
    resumed = Session.load(saved, options)
    assert_equal(resumed.train(8), expected)
    assert_equal(stored(), parameters)
    found = state_of(resumed.elbo)
    # Critics of the first look, at one particle, that no later step uses wait in a loaded state.
    waiting = {key for key in state if key.startswith("critics.blocks.") and key not in found}
    assert not waiting or not options
    assert_equal(_plain(found, "critics._extra_state"), _plain(state, "critics._extra_state", *waiting))
    # The comparison tells: without the optimiser's state the numbers differ.
    forgetful = Session.load(saved, options)
    forgetful.optimiser._state_waiting_to_be_consumed.clear()
    assert forgetful.train(8) != expected


def train(fit: nn.Module, optimiser: torch.optim.Optimizer, data: Tensor, number: int = 6) -> list[float]:
    """Losses of steps in plain torch."""
    losses = []
    for _ in range(number):
        optimiser.zero_grad()
        loss = fit(data)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [OPTIONS[name] for name in PLATED], ids=PLATED)
@pytest.mark.parametrize("how", ["pickle", "state_dict"])
def test_torch_optimiser_resumes_with_the_same_numbers(options: dict[str, Any], how: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return TraceBackpropQ_ELBO(**options)(Model(), Guide())

    with pyro.settings.context(module_local_params=True):
        fit = make()
        fit(DATA)  # the critics appear
        optimiser = torch.optim.Adam(fit.parameters(), lr=0.02)
        train(fit, optimiser, DATA)
        file = io.BytesIO()
        torch.save((fit if how == "pickle" else fit.state_dict(), optimiser.state_dict(), torch.get_rng_state()), file)
        expected, state = train(fit, optimiser, DATA), copy.deepcopy(dict(fit.state_dict()))
        file.seek(0)
        loaded, optimised, rng = torch.load(file, weights_only=False)
        resumed = loaded
        if isinstance(loaded, dict):
            resumed = make()
            resumed(DATA)
            resumed.load_state_dict(loaded)
        optimiser = torch.optim.Adam(resumed.parameters(), lr=0.02)
        optimiser.load_state_dict(optimised)
        torch.set_rng_state(rng)
        assert_equal(train(resumed, optimiser, DATA), expected)
        assert_equal(dict(resumed.state_dict()), state)


def test_pickle_continues_in_a_new_process(tmp_path: Path) -> None:
    session = Session(TraceBackpropQ_ELBO())
    CHAIN.params()
    session.train(6)
    (tmp_path / "saved").write_bytes(session.save("pickle"))
    program = (
        "import pathlib, sys, torch\n"
        "torch.set_default_dtype(torch.float64)\n"
        "from test_elbo_resume import Session\n"
        "session = Session.load(pathlib.Path(sys.argv[1]).read_bytes(), {})\n"
        "print(*(loss.hex() for loss in session.train(5)))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "saved")]
    folder = Path(__file__).parent
    paths = [str(folder.parent), str(folder.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [loss.hex() for loss in session.train(5)]


# Several ELBOs whose critics the user's optimiser trains


def names_in_store() -> set[str]:
    return {name.split("$$$")[0] for name in pyro.get_param_store().keys() if "bpq_critics" in name}


def other_model() -> None:
    k = pyro.sample("k", dist.Bernoulli(0.4))
    m = pyro.sample("m", dist.Bernoulli(0.2 + 0.5 * k))
    pyro.sample("x", dist.Normal(k + m, 0.7), obs=torch.tensor(1.2))


def other_guide() -> None:
    logits = pyro.param("other_logits", torch.tensor([0.3, -0.2, 0.1]))
    k = pyro.sample("k", dist.Bernoulli(logits=logits[0]))
    pyro.sample("m", dist.Bernoulli(logits=logits[1] + logits[2] * k))


@pytest.mark.parametrize("other", [(CHAIN.model, CHAIN.guide), (other_model, other_guide)], ids=["same", "other"])
def test_two_elbos_train_their_critics_in_one_param_store(other: tuple[Any, Any]) -> None:
    elbos = [TraceBackpropQ_ELBO(learner=None, seed=seed, estimator=AllAction(exact=False)) for seed in range(2)]
    steppers = [
        SVI(*programs, Adam({"lr": 0.02}), elbo)
        for programs, elbo in zip(((CHAIN.model, CHAIN.guide), other), elbos, strict=True)
    ]

    def train(steps: int) -> list[dict[str, Tensor]]:
        for _ in range(steps):
            for svi in steppers:
                svi.step()
        return [{n: p.detach().clone() for n, p in elbo.critics.named_parameters()} for elbo in elbos]

    CHAIN.params()
    before, size = train(1), len(stored())
    after = train(10)
    assert names_in_store() == {"bpq_critics", "bpq_critics_1"}
    assert len(stored()) == size
    for old, new in zip(before, after, strict=True):
        assert old and all(not torch.equal(old[name], new[name]) for name in old if old[name].numel())


def rows_guide() -> None:
    with pyro.plate("rows", 3):
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q")))


def rows_model(is_masked: bool) -> None:
    with pyro.plate("rows", 3):
        z = pyro.sample("z", dist.Bernoulli(0.4))
        shift = torch.zeros(3)
        if is_masked:
            shift[z > 0] = 1.7
        pyro.sample("x", dist.Normal(shift if is_masked else 1.7 * z, 1.0), obs=torch.tensor([0.3, -1.0, 0.8]))


def pairs_guide() -> None:
    with pyro.plate("rows", 12):
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q").expand(12, 3)).to_event(1))
        pyro.sample("w", dist.Bernoulli(logits=z + pyro.param("r")).to_event(1))


def pairs_model() -> None:
    with pyro.plate("rows", 12):
        z = pyro.sample("z", dist.Bernoulli(0.4 * torch.ones(12, 3)).to_event(1))
        w = pyro.sample("w", dist.Bernoulli(logits=z - 0.2).to_event(1))
        pyro.sample("x", dist.Normal(w.sum(-1) * z[..., 0], 1.0), obs=torch.linspace(-1.0, 2.0, 12))


PROGRAMS = {
    "steered": BY_NAME["python_branch"].programs,
    "pairs": (pairs_model, pairs_guide),
    "rows": (partial(rows_model, True), rows_guide),
    "apart": (partial(rows_model, False), rows_guide),
}


@pytest.mark.parametrize("steps", [1, 2, 30])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("steered", {}),
        ("steered", {"num_particles": 2}),
        ("steered", {"estimator": ScoreFunction(), "structure": "dense"}),
        ("steered", {"estimator": ScoreFunction(LeaveOneOut()), "structure": "dense", "num_particles": 4}),
        ("pairs", {}),
        ("rows", {}),
        ("apart", {"num_particles": 2, "vectorize_particles": True, "estimator": ScoreFunction(LeaveOneOut())}),
    ],
)
def test_what_was_found_of_a_program_goes_on(name: str, options: dict[str, Any], steps: int) -> None:
    model, guide = PROGRAMS[name]

    def session(elbo: TraceBackpropQ_ELBO) -> SVI[..., Any]:
        return SVI(model, guide, Adam({"lr": 0.05}), elbo)

    pyro.set_rng_seed(2)
    BY_NAME["python_branch"].params()
    pyro.param("q", torch.tensor(0.3)), pyro.param("r", torch.tensor(-0.2))
    elbo = TraceBackpropQ_ELBO(**options)
    first = session(elbo)
    repeat(steps, first.step)
    file = io.BytesIO()
    torch.save((elbo.state_dict(), pyro.get_param_store().get_state(), first.optim.get_state()), file)
    pyro.set_rng_seed(5)
    expected = [first.step() for _ in range(4)], stored()
    file.seek(0)
    state, store, optimiser = torch.load(file, weights_only=False)
    pyro.get_param_store().set_state(store)
    resumed = TraceBackpropQ_ELBO(**options)
    resumed.load_state_dict(state)
    second = session(resumed)
    second.optim.set_state(optimiser)
    pyro.set_rng_seed(5)
    assert_equal(([second.step() for _ in range(4)], stored()), expected)
    assert resumed.plan is not None


def test_a_compiled_objective_goes_on_with_the_state_that_was_loaded() -> None:
    elbo, programs = TraceBackpropQ_ELBO(1, compile="eager"), CHAIN.params().programs
    repeat(12, elbo.loss_and_grads, *programs)
    assert elbo.compiled is not None and elbo.compiled.entries
    state, found = copy.deepcopy(elbo.state_dict()), []
    for _ in range(2):
        elbo.load_state_dict(copy.deepcopy(state))
        pyro.set_rng_seed(1)
        repeat(4, elbo.loss_and_grads, *programs)
        found.append(state_of(elbo.critics))
    assert_equal(*found)
