"""A compiled step gives the numbers of an eager one, or says why it does not run."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import random
import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy
import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, Die
from pyro import poutine
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_bpq import (
    Compile,
    CriticLearner,
    LeaveOneOut,
    Replay,
    ScoreFunction,
    TraceBackpropQ_ELBO,
    TraceBackpropQ_IWAE,
    compile_report,
)
from pyro_bpq.errors import BPQWarning, OptionError
from pyro_bpq.estimators import Concrete, DebiasedStraightThrough, DisARM, GumbelStraightThrough, Hindsight, SecondRun

STEPS = 12


def run(elbo: Any, model: Any, guide: Any, *args: Any, steps: int = STEPS) -> list[float]:
    """Losses and sums of gradients, along gradient steps."""
    found = []
    for _ in range(steps):
        found.append(elbo.loss_and_grads(model, guide, *args))
        leaves = [*dict(pyro.get_param_store().named_parameters()).values(), *elbo.parameters()]
        with torch.no_grad():
            for leaf in leaves:
                if leaf.grad is not None:
                    found.append(float(leaf.grad.sum()))
                    leaf.sub_(0.01 * leaf.grad)
                    leaf.grad = None
    state = elbo.state_dict().values()
    return found + [float(value.double().nan_to_num().sum()) for value in state if isinstance(value, Tensor)]


def coin_guide() -> None:
    pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))


def runs_eagerly(model: Any, match: str) -> TraceBackpropQ_ELBO:
    """An objective that says why it does not compile the steps of a model."""
    elbo = TraceBackpropQ_ELBO(compile="eager")
    with pytest.warns(BPQWarning, match=match):
        for _ in range(10):
            elbo.loss_and_grads(model, coin_guide)
    assert not entries(elbo)
    return elbo


def both(make: Callable[..., Any], start: Callable[[], None], *program: Any, steps: int = STEPS) -> Any:
    """The compiled objective, after it was compared with an eager one."""
    found = []
    for options in ({}, {"compile": "eager"}):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        start()
        elbo = make(**options)
        found.append(run(elbo, *program, steps=steps))
    assert len(found[0]) == len(found[1])
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-9, atol=1e-9)
    return elbo


OPTIONS: dict[str, Callable[..., Any]] = {
    "default": TraceBackpropQ_ELBO,
    "particles in a plate": lambda **own: TraceBackpropQ_ELBO(3, 3, vectorize_particles=True, **own),
    "particles in turn": lambda **own: TraceBackpropQ_ELBO(2, estimator=ScoreFunction(LeaveOneOut()), **own),
    "no learner": lambda **own: TraceBackpropQ_ELBO(learner=None, **own),
    "schedule": lambda **own: TraceBackpropQ_ELBO(lam=lambda n: 1.0 / (1 + n), **own),
    "analytic": lambda **own: TraceBackpropQ_ELBO(analytic_kl=True, **own),
    "bound": lambda **own: TraceBackpropQ_IWAE(num_particles=3, **own),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["chain", *(pytest.param(n, marks=pytest.mark.slow) for n in ("plate", "onehot"))])
def test_equals_the_eager_step(name: str, options: str) -> None:
    case = BY_NAME[name]
    elbo = both(OPTIONS[options], case.params, case.model, case.guide, *case.args)
    assert elbo.compiled.entries, compile_report(elbo)
    assert elbo.compiled.entries[0].steps > 3


@pytest.mark.filterwarnings("ignore")
def test_the_comparison_sees_a_frozen_schedule() -> None:
    case, make = BY_NAME["chain"], OPTIONS["schedule"]

    def planted(**own: Any) -> Any:
        elbo = make(**own)
        if own:  # a schedule that the compiled steps do not follow
            elbo.lam = elbo.lam(0)
        return elbo

    with pytest.raises(AssertionError, match="not close"):
        both(planted, case.params, case.model, case.guide)


def slope_model(x: Tensor, weight: Any = 1.0) -> None:
    with pyro.plate("rows", len(x)), poutine.scale(scale=weight):
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def slope_guide(x: Tensor, weight: Any = 1.0) -> None:
    q = pyro.param("q", torch.tensor(0.3))
    with pyro.plate("rows", len(x)), poutine.scale(scale=weight):
        pyro.sample("z", dist.Bernoulli(logits=q * x))


ROWS = torch.tensor([0.4, -1.0, 2.0], dtype=torch.float64)


def entries(elbo: Any) -> list[Any]:
    return list(elbo.compiled.entries)


def test_new_data_of_one_shape_take_one_recording_and_another_shape_a_second() -> None:
    torch.manual_seed(3)
    batches = [torch.randn(2 if i % 4 == 3 else 3) for i in range(40)]
    losses = []
    for compiled in (False, "eager"):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        elbo = TraceBackpropQ_ELBO(compile=compiled)
        losses.append([elbo.loss_and_grads(slope_model, slope_guide, batch) for batch in batches])
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-9, atol=1e-9)
    assert len(entries(elbo)) == 2
    assert "shapes (2,)" in compile_report(elbo)


def test_a_float_argument_that_changes_becomes_an_input() -> None:
    losses = []
    for compiled in (False, "eager"):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        elbo = TraceBackpropQ_ELBO(compile=compiled)
        losses.append([elbo.loss_and_grads(slope_model, slope_guide, ROWS, 0.1 * (n + 1)) for n in range(25)])
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-9, atol=1e-9)
    assert len(entries(elbo)) == 1
    assert entries(elbo)[0].steps > 10


def test_svi_is_told_the_parameters() -> None:
    found = []
    for compiled in (False, "eager"):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        elbo = TraceBackpropQ_ELBO(compile=compiled)
        svi = SVI(slope_model, slope_guide, Adam({"lr": 0.1}), elbo)
        found.append(([svi.step(ROWS) for _ in range(20)], pyro.param("q").item()))
    assert entries(elbo)[0].steps > 5
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-9)
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-9)


class Net(nn.Module):
    """A guide with a network, batch norm included."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> None:
        with pyro.plate("rows", len(x)):
            pyro.sample("z", dist.Bernoulli(logits=self.net(x.unsqueeze(-1)).squeeze(-1)))


def test_modules_train_by_torch_optimisers_and_buffers_go_on() -> None:
    found = []
    for compiled in (False, "eager"):
        pyro.set_rng_seed(1)
        guide, elbo = Net(), TraceBackpropQ_ELBO(compile=compiled)
        optim = torch.optim.Adam(guide.parameters(), lr=0.05)
        for _ in range(15):
            optim.zero_grad()
            elbo.differentiable_loss(slope_model, guide, ROWS).backward()
            optim.step()
        found.append({name: value.double() for name, value in guide.state_dict().items()})
    assert entries(elbo)[0].steps > 5
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-8, atol=1e-8)


def test_an_argument_gets_its_gradient_and_a_closure_its_too() -> None:
    weight = torch.tensor(0.7, requires_grad=True)

    def guide(x: Tensor) -> None:
        with pyro.plate("rows", 3):
            pyro.sample("z", dist.Bernoulli(logits=weight * x))

    found = []
    for compiled in (False, "eager"):
        pyro.set_rng_seed(1)
        elbo, gradients = TraceBackpropQ_ELBO(compile=compiled), []
        for _ in range(10):
            x = ROWS.clone().requires_grad_()
            weight.grad = None
            elbo.loss_and_grads(slope_model, guide, x)
            gradients += [x.grad.clone(), weight.grad.reshape(1).clone()]  # type: ignore[union-attr]
        found.append(torch.cat(gradients))
    assert entries(elbo)[0].steps > 3
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [GumbelStraightThrough, Concrete])
def test_temperatures_are_not_frozen(make: Any) -> None:
    case = BY_NAME["chain"]

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.3))

    estimator = make(temperature=lambda n: 2.0 / (1 + n))
    both(functools.partial(TraceBackpropQ_ELBO, estimator=estimator), lambda: None, model, coin_guide)
    assert case


def test_a_program_that_branches_runs_eagerly_and_says_why() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
        pyro.sample("x", dist.Normal(2.0 if z.item() else 0.0, 1.0), obs=torch.tensor(0.3))

    elbo = runs_eagerly(model, "steps run eagerly, because sampled values of z")
    assert "sampled values of z" in compile_report(elbo)


def test_a_number_read_from_a_closure_runs_eagerly() -> None:
    rate = torch.tensor(0.4)

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(rate.item())))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.3))

    runs_eagerly(model, r"reads a number of a tensor, in model: .*rate\.item\(\)")


def test_a_number_that_a_distribution_reads_is_told_as_such() -> None:
    def model() -> None:
        pyro.sample("z", dist.Multinomial(3, logits=torch.tensor([0.1, 0.2])))

    def own_guide() -> None:
        pyro.sample("z", dist.Multinomial(3, logits=pyro.param("q", torch.tensor([0.3, 0.1]))))

    elbo = TraceBackpropQ_ELBO(num_particles=1, compile="eager")
    with pytest.warns(BPQWarning, match=r"reads a number of a tensor, in log_prob of torch.*multinomial"):
        for _ in range(10):
            elbo.loss_and_grads(model, own_guide)


@pytest.mark.parametrize("is_function", [False, True])
def test_initial_values_that_every_run_draws_run_eagerly_and_functions_do_not(is_function: bool) -> None:
    def model() -> None:
        w = pyro.param("w", (lambda: torch.randn(())) if is_function else torch.randn(()))
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
        pyro.sample("x", dist.Normal(w * z, 1.0), obs=torch.tensor(0.3))

    elbo = TraceBackpropQ_ELBO(compile="eager")
    with contextlib.nullcontext() if is_function else pytest.warns(BPQWarning, match=r"lambda: torch\.randn\(2\)"):
        for _ in range(20):
            elbo.loss_and_grads(model, coin_guide)
    assert bool(entries(elbo)) == is_function


def test_a_second_run_that_draws_sites_anew_is_told_as_such() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.3))

    elbo = TraceBackpropQ_ELBO(estimator=SecondRun(), compile="eager")
    with pytest.warns(BPQWarning, match="second run that draws all sites anew"):
        for _ in range(10):
            elbo.loss_and_grads(model, coin_guide)


def test_steps_within_svi_and_outside_are_alike() -> None:
    """SVI runs steps under a handler, under which Pyro constrains parameters."""

    def model() -> None:
        w = pyro.param("w", torch.tensor(0.5), constraint=dist.constraints.positive)
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
        pyro.sample("x", dist.Normal(w * z, 1.0), obs=torch.tensor(0.3))

    elbo = TraceBackpropQ_ELBO(num_particles=1, compile="eager")
    svi = SVI(model, coin_guide, Adam({"lr": 0.01}), elbo)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BPQWarning)
        for _ in range(20):
            svi.step()
            elbo.loss_and_grads(model, coin_guide)
    assert len(entries(elbo)) == 1


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_draws_of_python_run_eagerly(draw: Callable[[], float]) -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
        pyro.sample("x", dist.Normal(z, 1.0 + draw()), obs=torch.tensor(0.3))

    runs_eagerly(model, r"because it draws from random or numpy\.random")


def test_a_hidden_number_that_changes_is_told_at_the_next_check() -> None:
    box = ContextVar("box", default=1.0)  # no guard looks into it

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
        pyro.sample("x", dist.Normal(box.get() * z, 1.0), obs=torch.tensor(0.3))

    elbo = TraceBackpropQ_ELBO(compile="eager")
    for _ in range(12):
        elbo.loss_and_grads(model, coin_guide)
    assert entries(elbo)
    box.set(3.0)
    with pytest.warns(BPQWarning, match="no longer does what its programs do"):
        for _ in range(12):
            elbo.loss_and_grads(model, coin_guide)


def test_numbers_of_a_closure_and_a_new_closure_tensor_are_seen_at_once() -> None:
    def programs(factor: float, rate: Tensor) -> tuple[Any, Any]:
        def model() -> None:
            z = pyro.sample("z", dist.Bernoulli(rate))
            pyro.sample("x", dist.Normal(factor * z, 1.0), obs=torch.tensor(0.3))

        def guide() -> None:
            coin_guide()

        return model, guide

    ways = [(1.0, 0.4)] * 8 + [(2.0, 0.4)] * 6 + [(2.0, 0.9)] * 6
    losses = []
    for compiled in (False, "eager"):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        elbo = TraceBackpropQ_ELBO(compile=compiled)
        found = [elbo.loss_and_grads(*programs(factor, torch.tensor(rate))) for factor, rate in ways]
        losses.append(torch.tensor(found))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=1e-9)
    assert len(entries(elbo)) == 2


def test_clearing_the_parameter_store_and_new_parameters_start_anew() -> None:
    elbo = TraceBackpropQ_ELBO(compile="eager")
    for _ in range(10):
        elbo.loss_and_grads(slope_model, slope_guide, ROWS)
    assert entries(elbo)
    pyro.clear_param_store()
    elbo.loss_and_grads(slope_model, slope_guide, ROWS)
    assert "q" in pyro.get_param_store()
    assert pyro.get_param_store()._params["q"].grad is not None


def test_loaded_states_go_on_in_both_directions() -> None:
    case = BY_NAME["chain"]
    case.params()
    first = TraceBackpropQ_ELBO(compile="eager")
    run(first, case.model, case.guide, steps=10)
    assert entries(first)
    params = copy.deepcopy(pyro.get_param_store().get_state())
    ends = []
    for compiled in (False, "eager"):
        pyro.get_param_store().set_state(copy.deepcopy(params))
        elbo = TraceBackpropQ_ELBO(compile=compiled)
        elbo.load_state_dict(copy.deepcopy(first.state_dict()))
        pyro.set_rng_seed(5)
        ends.append(run(elbo, case.model, case.guide, steps=10))
    torch.testing.assert_close(torch.tensor(ends[0]), torch.tensor(ends[1]), rtol=1e-9, atol=1e-9)
    again = copy.deepcopy(first)
    assert not entries(again)


def test_a_loss_that_is_not_finite_teaches_nothing() -> None:
    elbo = TraceBackpropQ_ELBO(compile="eager")
    for _ in range(10):
        elbo.loss_and_grads(slope_model, slope_guide, ROWS, torch.tensor(1.0))
    taken = entries(elbo)[0].steps
    before = {name: value.clone() for name, value in elbo.state_dict().items() if isinstance(value, Tensor)}
    steps = elbo.num_steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        elbo.loss_and_grads(slope_model, slope_guide, ROWS, torch.tensor(torch.inf))
    assert entries(elbo)[0].steps == taken + 1
    assert elbo.num_steps == steps
    assert before
    for name, value in before.items():
        torch.testing.assert_close(elbo.state_dict()[name], value, rtol=0.0, atol=0.0, equal_nan=True)


def test_info_is_that_of_the_last_step() -> None:
    case, shown = BY_NAME["chain"], []
    for compiled in (False, "eager"):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        case.params()
        elbo = TraceBackpropQ_ELBO(compile=compiled)
        run(elbo, case.model, case.guide)
        shown.append(elbo.info)
    assert list(shown[0]) == list(shown[1])
    for site, own in shown[0].items():
        assert own.keys() - {"ms"} == shown[1][site].keys()
        for key in own.keys() - {"ms", "estimator"}:
            torch.testing.assert_close(shown[1][site][key], own[key], equal_nan=True)


def test_handlers_around_the_call_count() -> None:
    losses = []
    for compiled in (False, "eager"):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        elbo = TraceBackpropQ_ELBO(compile=compiled)
        found = [elbo.loss_and_grads(slope_model, slope_guide, ROWS) for _ in range(10)]
        with poutine.scale(scale=0.1):
            found += [elbo.loss_and_grads(slope_model, slope_guide, ROWS) for _ in range(8)]
        losses.append(torch.tensor(found))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=1e-9)
    assert len(entries(elbo)) == 2


def test_replay_runs_eagerly() -> None:
    elbo = TraceBackpropQ_ELBO(compile="eager", learner=CriticLearner(replay=Replay(capacity=4)))
    case = BY_NAME["chain"]
    case.params()
    with pytest.warns(BPQWarning, match="critics learn from stored rollouts"):
        run(elbo, case.model, case.guide, steps=3)


def test_a_callable_backend_gets_graph_and_examples() -> None:
    seen = []

    def backend(graph: Any, examples: list[Tensor]) -> Any:
        seen.append((graph, len(examples)))
        return graph

    elbo = TraceBackpropQ_ELBO(compile=Compile(backend=backend))
    for _ in range(10):
        elbo.loss_and_grads(slope_model, slope_guide, ROWS)
    assert len(seen) == 1
    assert seen[0][1] == len(list(seen[0][0].graph.find_nodes(op="placeholder")))


def test_examples_have_the_strides_of_the_inputs() -> None:
    seen = []

    def backend(graph: Any, examples: list[Tensor]) -> Any:
        strides = [example.stride() for example in examples]

        def run(*tensors: Tensor) -> Any:
            seen.append([tensor.stride() for tensor in tensors] == strides)
            return graph(*tensors)

        return run

    rows = torch.linspace(-1.0, 1.0, 6)[::2]
    elbo = TraceBackpropQ_ELBO(compile=backend)
    for _ in range(10):
        elbo.loss_and_grads(slope_model, slope_guide, rows)
    assert len(seen) > 2 and all(seen)


def test_a_compiler_that_fails_leaves_the_recorded_operators() -> None:
    def backend(graph: Any, examples: list[Tensor]) -> Any:
        raise RuntimeError("no luck")

    elbo = TraceBackpropQ_ELBO(compile=Compile(backend=backend))
    with pytest.warns(BPQWarning, match="the compiler failed .no luck.; the recorded operators run as they are"):
        for _ in range(10):
            elbo.loss_and_grads(slope_model, slope_guide, ROWS)
    assert entries(elbo)[0].steps > 3


@pytest.mark.parametrize("estimator", [DebiasedStraightThrough(), DisARM()], ids=repr)
def test_estimators_that_run_the_model_at_other_values_are_recorded(estimator: Any) -> None:
    def make(**own: Any) -> TraceBackpropQ_ELBO:
        return TraceBackpropQ_ELBO(2, estimator=estimator, **own)

    # Eager steps look for slopes again after 8 steps; what the estimators draw does not depend on it.
    elbo = both(make, lambda: None, slope_model, slope_guide, ROWS, steps=14)
    assert elbo.compiled.entries and elbo.compiled.entries[0].steps > 4, compile_report(elbo)


def test_layers_whose_values_are_averaged_are_recorded() -> None:
    """The drawn particle and its components are inputs of the recording."""
    data = torch.linspace(-1.0, 1.0, 12 * 8).reshape(12, 8).sin()

    def model() -> None:
        with pyro.plate("rows", 12):
            y = pyro.sample("y", dist.Bernoulli(logits=torch.zeros(6)).to_event(1))
            z = pyro.sample("z", dist.Bernoulli(logits=y @ pyro.param("p", lambda: torch.ones(6, 6))).to_event(1))
            mean = torch.nn.functional.linear(2.0 * z - 1.0, pyro.param("v", lambda: 0.2 * torch.ones(8, 6)))
            pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=data)

    def guide() -> None:
        with pyro.plate("rows", 12):
            logits = data @ pyro.param("w", lambda: torch.linspace(-1.0, 1.0, 48).reshape(8, 6))
            z = pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))
            pyro.sample("y", dist.Bernoulli(logits=z @ pyro.param("u", lambda: 0.3 * torch.ones(6, 6))).to_event(1))

    def make(**own: Any) -> TraceBackpropQ_ELBO:
        estimator = Hindsight(crossed=True)
        return TraceBackpropQ_ELBO(3, estimator=estimator, vectorize_particles=True, max_plate_nesting=1, **own)

    elbo = both(make, lambda: None, model, guide, steps=14)
    assert elbo.compiled.entries and elbo.compiled.entries[0].steps > 4, compile_report(elbo)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [Terminal, io.StringIO])
def test_a_line_on_terminals_says_what_the_first_compiled_step_waits_for(
    monkeypatch: pytest.MonkeyPatch, terminal: type[io.StringIO]
) -> None:
    shown = terminal()
    monkeypatch.setattr(sys, "stderr", shown)

    def backend(graph: Any, examples: list[Tensor]) -> Any:
        shown.write("<compiles>")
        return graph

    elbo = TraceBackpropQ_ELBO(compile=backend)
    for _ in range(10):
        elbo.loss_and_grads(slope_model, slope_guide, ROWS)
    before, after = shown.getvalue().split("<compiles>")
    assert ("Compiling a step of" in before) is shown.isatty()
    # The line is cleared.
    assert not after.strip()


def test_without_a_compiler_the_recorded_operators_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    elbo = TraceBackpropQ_ELBO(compile=True)
    with pytest.warns(BPQWarning, match="has no C\\+\\+ compiler"):
        for _ in range(10):
            elbo.loss_and_grads(slope_model, slope_guide, ROWS)
    assert entries(elbo)[0].steps > 3


@pytest.mark.parametrize(("version", "runs_eagerly"), [("2.4.1+cu121", True), ("2.100.0", False), ("3.0", False)])
def test_an_old_torch_runs_eagerly_with_one_warning(
    version: str, runs_eagerly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    elbo = TraceBackpropQ_ELBO(compile="eager")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(8):
            elbo.loss_and_grads(slope_model, slope_guide, ROWS)
    texts = [str(each.message) for each in told if "older than" in str(each.message)]
    assert len(texts) == runs_eagerly and bool(entries(elbo)) != runs_eagerly
    assert f"torch {version} is older than" in compile_report(elbo) or not runs_eagerly


def test_numpy_within_a_program_runs_eagerly() -> None:
    def model(x: Tensor) -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
        pyro.sample("x", dist.Normal(z + float(x.numpy().mean()), 1.0), obs=torch.tensor(0.3))

    def guide(x: Tensor) -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))

    elbo = TraceBackpropQ_ELBO(compile="eager")
    with pytest.warns(BPQWarning, match=r"reads a number of a tensor, in model: .*x\.numpy\(\)"):
        for _ in range(10):
            elbo.loss_and_grads(model, guide, ROWS)
    assert not entries(elbo)


def test_the_number_of_recordings_is_bounded() -> None:
    elbo = TraceBackpropQ_ELBO(compile=Compile("eager", max_recordings=2))
    with pytest.warns(BPQWarning, match="recorded 2 times, the last time because"):
        for rows in (3, 2, 4):
            for _ in range(14):
                elbo.loss_and_grads(slope_model, slope_guide, torch.ones(rows))
    assert len(entries(elbo)) == 2


@pytest.mark.parametrize("option", [3, "fast", Compile])
def test_bad_options(option: Any) -> None:
    if option is Compile:
        with pytest.raises(OptionError, match="max_recordings"):
            Compile(max_recordings=0)
    else:
        with pytest.raises(OptionError, match="compile"):
            TraceBackpropQ_ELBO(compile=option)


def test_reports() -> None:
    elbo = TraceBackpropQ_ELBO()
    assert "write compile=True" in compile_report(elbo)
    elbo = TraceBackpropQ_ELBO(compile="eager")
    assert "Nothing is recorded yet" in compile_report(elbo)
    for _ in range(10):
        elbo.loss_and_grads(slope_model, slope_guide, ROWS)
    assert "operators" in compile_report(elbo) and "it gives 1 gradients to the optimiser" in compile_report(elbo)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [SimpleNamespace, argparse.Namespace])
def test_attributes_of_namespaces_are_seen(make: Any) -> None:
    options = make(mean=0.5)

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
        pyro.sample("x", dist.Normal(z * options.mean, 1.0), obs=torch.tensor(0.7))

    pyro.clear_param_store()
    compiled, eager = TraceBackpropQ_ELBO(compile="eager"), TraceBackpropQ_ELBO()
    for _ in range(STEPS):
        compiled.loss_and_grads(model, coin_guide)
        eager.loss_and_grads(model, coin_guide)
    assert entries(compiled)
    options.mean = 50.0
    assert compiled.loss_and_grads(model, coin_guide) == pytest.approx(eager.loss_and_grads(model, coin_guide))


def test_a_class_is_no_backend() -> None:
    with pytest.raises(OptionError, match="backend"):
        TraceBackpropQ_ELBO(compile=Compile(Compile))


def test_reports_are_about_objectives() -> None:
    with pytest.raises(OptionError, match="compile_report"):
        compile_report(3)


def test_a_distribution_with_values_of_its_own_is_recorded() -> None:
    faces = torch.tensor([1.0, 2.0, 4.0])

    def model() -> None:
        z = pyro.sample("z", Die(torch.zeros(3), faces))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.3))

    def own_guide() -> None:
        pyro.sample("z", Die(pyro.param("q", torch.tensor([0.1, 0.2, 0.3])), faces))

    elbo = TraceBackpropQ_ELBO(num_particles=1, compile="eager")
    for _ in range(12):
        elbo.loss_and_grads(model, own_guide)
    assert len(entries(elbo)) == 1
