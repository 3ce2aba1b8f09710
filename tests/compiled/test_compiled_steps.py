"""A compiled step gives the numbers of an eager one, or says why it does not run."""

from __future__ import annotations

import functools
import io
import random
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
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
from steps import coin_guide, filtered, fresh, repeat, rows, seeing, stepped, trained
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
    config_bpq,
)
from pyro_bpq.errors import BPQWarning
from pyro_bpq.estimators import (
    RELAX,
    AllAction,
    Concrete,
    DebiasedStraightThrough,
    DisARM,
    GumbelStraightThrough,
    Hindsight,
    SecondRun,
)

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


def compared(take: Any, make: Any = TraceBackpropQ_ELBO, start: Any = pyro.clear_param_store) -> Any:
    """The compiled objective, whose numbers are those of an eager one."""
    found = []
    for options in ({}, {"compile": "eager"}):
        fresh(1)
        start()
        elbo = make(**options)
        found.append(torch.tensor(take(elbo)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
    return elbo


def both(make: Callable[..., Any], start: Callable[[], None], *program: Any, steps: int = STEPS) -> Any:
    """The compiled objective, after it was compared with an eager one along gradient steps."""
    return compared(lambda elbo: run(elbo, *program, steps=steps), make, start)


OPTIONS: dict[str, Callable[..., Any]] = {
    "default": TraceBackpropQ_ELBO,
    "particles in a plate": lambda **own: TraceBackpropQ_ELBO(3, 3, vectorize_particles=True, **own),
    "particles in turn": lambda **own: TraceBackpropQ_ELBO(2, estimator=ScoreFunction(LeaveOneOut()), **own),
    "one particle": lambda **own: TraceBackpropQ_ELBO(1, **own),
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
    elbo = both(OPTIONS[options], case.params, *case.programs)
    assert entries(elbo)[0].steps > 3


def test_sites_may_share_a_critic() -> None:
    def guide() -> None:
        z, p = torch.tensor(0.0), pyro.param("p", torch.zeros(4))
        for t in range(4):
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=p[t] + z))

    def model() -> None:
        z = torch.tensor(0.0)
        for t in range(4):
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=0.5 - z))
            pyro.factor(f"f{t}", torch.sin(z + t))

    elbo = both(OPTIONS["one particle"], pyro.clear_param_store, model, config_bpq(guide, share="z"))
    assert entries(elbo)[0].steps > 3


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
    assert elbo.compiled is not None, compile_report(elbo)
    return list(elbo.compiled.entries)


def test_new_data_of_one_shape_take_one_recording_and_another_shape_a_second() -> None:
    torch.manual_seed(3)
    batches = [torch.randn(2 if i % 4 == 3 else 3) for i in range(40)]
    elbo = compared(lambda elbo: [elbo.loss_and_grads(slope_model, slope_guide, batch) for batch in batches])
    assert len(entries(elbo)) == 2


def weighed(weight: Any) -> Any:
    half = weight
    half *= 0.5
    return weight


# What programs do with a float, and not with a tensor.
OF_FLOATS: dict[str, Callable[[Any], Any]] = {
    "a tensor is written": weighed,
    "its type is asked": lambda weight: weight if isinstance(weight, float) else 1.0,
    "it has methods": lambda weight: weight if weight.is_integer() else 2.0 * weight,
}


@pytest.mark.parametrize("name", OF_FLOATS)
def test_programs_that_need_floats_get_floats(name: str) -> None:
    def model(weight: Any) -> None:
        slope_model(ROWS, OF_FLOATS[name](weight))

    def guide(weight: Any) -> None:
        slope_guide(ROWS, weight)

    with pytest.warns(BPQWarning, match="if a float among its arguments is a tensor"):
        elbo = compared(lambda elbo: [elbo.loss_and_grads(model, guide, 0.1 * (n + 1)) for n in range(12)])
    assert not entries(elbo)


@pytest.mark.parametrize("kind", [float, numpy.float32])
def test_a_float_argument_that_changes_becomes_an_input(kind: Any) -> None:
    def take(elbo: TraceBackpropQ_ELBO) -> list[float]:
        return [elbo.loss_and_grads(slope_model, slope_guide, ROWS, kind(0.125 * (n + 1))) for n in range(25)]

    (found,) = entries(compared(take))
    assert found.steps > 10


EXPANDED = dist.Normal(0.0, 1.0, validate_args=True).expand([3]).to_event(1)


def test_laws_that_were_made_under_validation_are_recorded() -> None:
    def model() -> None:
        w = pyro.sample("w", EXPANDED)
        pyro.sample("x", dist.Normal(w.sum(-1), 1.0), obs=torch.tensor(0.3))

    def guide() -> None:
        pyro.sample("w", dist.Normal(pyro.param("m", torch.zeros(3)), 1.0).to_event(1))

    assert entries(both(TraceBackpropQ_ELBO, pyro.clear_param_store, model, guide))


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
    def take(elbo: TraceBackpropQ_ELBO) -> list[float]:
        guide = Net()
        optim = torch.optim.Adam(guide.parameters(), lr=0.05)
        for _ in range(15):
            optim.zero_grad()
            elbo.differentiable_loss(slope_model, guide, ROWS).backward()
            optim.step()
        return torch.cat([value.double().flatten() for value in guide.state_dict().values()]).tolist()

    assert entries(compared(take))[0].steps > 5


def test_an_argument_gets_its_gradient_and_a_closure_its_too() -> None:
    weight = torch.tensor(0.7, requires_grad=True)
    guide = rows(float, ROWS, lambda x: weight * x)[1]

    def take(elbo: TraceBackpropQ_ELBO) -> list[float]:
        found = []
        for _ in range(10):
            x, weight.grad = ROWS.clone().requires_grad_(), None
            elbo.loss_and_grads(slope_model, guide, x)
            found += [*x.grad.tolist(), float(weight.grad)]
        return found

    assert entries(compared(take))[0].steps > 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [GumbelStraightThrough, Concrete])
def test_temperatures_are_not_frozen(make: Any) -> None:
    objective = functools.partial(TraceBackpropQ_ELBO, estimator=make(temperature=lambda n: 2.0 / (1 + n)))
    both(objective, pyro.clear_param_store, seeing(lambda z: z), coin_guide)


def test_numbers_of_data_guard_a_recording() -> None:
    """Numbers that come again have a recording each, others none."""
    rate = torch.tensor(0.0)
    model = seeing(lambda z: z * rate.item() + (2.0 if (rate > 10.0).any() else 0.0))
    rates = [10] * 9 + [11] * 4 + [10] * 3 + [*range(12, 50)]

    def take(elbo: TraceBackpropQ_ELBO) -> list[float]:
        return [elbo.loss_and_grads(model, coin_guide) for number in rates if rate.fill_(number) is rate]

    with pytest.warns(BPQWarning, match="calls differed 32 times, the last time because Python reads"):
        assert len(entries(compared(take))) == 2


def seen(mean: Callable[[Tensor], Any]) -> tuple[Any, Any]:
    """Programs with one coin, which an observation reads in some way."""
    return seeing(mean), coin_guide


def latent(law: Callable[[Tensor], Any]) -> tuple[Any, Any]:
    """Programs with one latent."""
    start = torch.tensor([0.3, 0.1])
    return lambda: pyro.sample("z", law(2.0 * start)), lambda: pyro.sample("z", law(pyro.param("q", 3.0 * start)))


def projected(z: Tensor) -> Tensor:
    """The value times the same random number in each step."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return z * torch.randn(())


RATE = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
MASKED = latent(lambda q: dist.NanMaskedNormal(q, 1.0).to_event(1))
NOISY = seen(lambda z: torch.nn.functional.dropout(z + 1.0))
REPLAY = {"learner": CriticLearner(replay=Replay(capacity=4))}
EAGER: dict[str, tuple[Any, dict[str, Any], str]] = {
    "branch": (seen(lambda z: 2.0 if z.item() else 0.0), {}, "sampled values of z"),
    "parameter": (seen(lambda z: z * torch.tensor(RATE.item())), {}, r"number of a tensor, in .*RATE\.item\(\)"),
    "distribution": (MASKED, {"num_particles": 1}, r"number of a tensor, in log_prob of pyro.*nanmasked"),
    "noise, and costs are computed again": (NOISY, {"estimator": AllAction(exact=True)}, "values that are no sites"),
    "a seed": (seen(projected), {}, "it seeds torch's generator"),
    "second run": (seen(lambda z: z), {"estimator": SecondRun()}, "second run that draws all sites anew"),
    "replay": (seen(lambda z: z), REPLAY, "critics learn from stored rollouts"),
    "Python": (seen(lambda z: z + random.random()), {}, r"it draws from random or numpy\.random"),
    "NumPy": (seen(lambda z: z + numpy.random.rand()), {}, r"it draws from random or numpy\.random"),
}


@pytest.mark.parametrize("name", EAGER)
def test_what_cannot_be_recorded_runs_eagerly_and_says_why(name: str) -> None:
    programs, options, words = EAGER[name]
    elbo = TraceBackpropQ_ELBO(compile="eager", **options)
    with pytest.warns(BPQWarning, match=f"eagerly.*{words}"):
        repeat(10, elbo.loss_and_grads, *programs)
    assert not entries(elbo) and re.search(words, compile_report(elbo))


RECORDED: dict[str, tuple[Any, Any]] = {
    "log_prob writes where a mask holds": latent(lambda q: dist.Multinomial(3, logits=q)),
    "values of its own": latent(lambda q: Die(q, torch.tensor([1.0, 4.0]))),
    "an initial value is drawn": seen(lambda z: z * pyro.param("w", torch.randn(()))),
    "by a function": seen(lambda z: z * pyro.param("w", lambda: torch.randn(()))),
}


@pytest.mark.parametrize("programs", RECORDED.values(), ids=RECORDED)
def test_what_is_recorded(programs: tuple[Any, Any]) -> None:
    assert entries(both(TraceBackpropQ_ELBO, pyro.clear_param_store, *programs))


def test_lstms_in_single_precision_are_recorded() -> None:
    net, elbo = torch.nn.LSTM(1, 1, dtype=torch.float32), TraceBackpropQ_ELBO(compile="eager")
    repeat(10, elbo.loss_and_grads, *seen(lambda z: net(z.float().reshape(1, 1, 1))[0].sum().double()))
    assert entries(elbo)[0].steps > 3


def test_steps_within_svi_and_outside_are_alike() -> None:
    """SVI runs steps under a handler, under which Pyro constrains parameters."""
    model = seeing(lambda z: z * pyro.param("w", torch.tensor(0.5), constraint=dist.constraints.positive))
    elbo = TraceBackpropQ_ELBO(num_particles=1, compile="eager")
    svi = SVI(model, coin_guide, Adam({"lr": 0.01}), elbo)
    with filtered("error", BPQWarning):
        for _ in range(20):
            svi.step()
            elbo.loss_and_grads(model, coin_guide)
    assert len(entries(elbo)) == 1


def test_a_hidden_number_that_changes_is_told_at_the_next_check() -> None:
    box = ContextVar("box", default=1.0)  # no guard looks into it
    model = seeing(lambda z: box.get() * z)
    elbo = trained(TraceBackpropQ_ELBO(compile="eager"), model, coin_guide, steps=12)
    assert entries(elbo)
    box.set(3.0)
    with pytest.warns(BPQWarning, match="no longer does what its programs do"):
        repeat(12, elbo.loss_and_grads, model, coin_guide)


def test_numbers_of_a_closure_and_a_new_closure_tensor_are_seen_at_once() -> None:
    def programs(factor: float, rate: Tensor) -> tuple[Any, Any]:
        return seeing(lambda z: factor * z + rate), lambda: coin_guide()

    ways = [(1.0, 0.4)] * 8 + [(2.0, 0.4)] * 6 + [(2.0, 0.9)] * 6
    elbo = compared(lambda elbo: [elbo.loss_and_grads(*programs(w, torch.tensor(rate))) for w, rate in ways])
    assert len(entries(elbo)) == 2


def test_a_loss_that_is_not_finite_teaches_nothing() -> None:
    elbo = stepped(10, TraceBackpropQ_ELBO(compile="eager"), slope_model, slope_guide, ROWS, torch.tensor(1.0))
    taken, steps = entries(elbo)[0].steps, elbo.num_steps
    before = {name: value.clone() for name, value in elbo.state_dict().items() if isinstance(value, Tensor)}
    with filtered("ignore"):
        elbo.loss_and_grads(slope_model, slope_guide, ROWS, torch.tensor(torch.inf))
    assert before and entries(elbo)[0].steps == taken + 1 and elbo.num_steps == steps
    for name, value in before.items():
        torch.testing.assert_close(elbo.state_dict()[name], value, rtol=0.0, atol=0.0, equal_nan=True)


def test_info_is_that_of_the_last_step() -> None:
    case = BY_NAME["chain"]

    def take(elbo: TraceBackpropQ_ELBO) -> list[float]:
        run(elbo, *case.programs)
        told = (value for own in elbo.info.values() for key, value in own.items() if key != "estimator")
        return torch.cat([value.double().nan_to_num().flatten() for value in told]).tolist()

    compared(take, start=case.params)


def test_handlers_around_the_call_count() -> None:
    def take(elbo: TraceBackpropQ_ELBO) -> list[float]:
        found = repeat(10, elbo.loss_and_grads, slope_model, slope_guide, ROWS)
        with poutine.scale(scale=0.1):
            return found + repeat(8, elbo.loss_and_grads, slope_model, slope_guide, ROWS)

    assert len(entries(compared(take))) == 2


def test_examples_have_the_strides_of_the_inputs() -> None:
    seen = []

    def backend(graph: Any, examples: list[Tensor]) -> Any:
        strides = [example.stride() for example in examples]

        def run(*tensors: Tensor) -> Any:
            seen.append([tensor.stride() for tensor in tensors] == strides)
            return graph(*tensors)

        return run

    rows = torch.linspace(-1.0, 1.0, 6)[::2]
    trained(TraceBackpropQ_ELBO(compile=backend), slope_model, slope_guide, rows, steps=10)
    assert len(seen) > 2 and all(seen)


@pytest.mark.parametrize("estimator", [DebiasedStraightThrough(), DisARM(), RELAX()], ids=repr)
def test_estimators_with_other_values_or_networks_of_their_own_are_recorded(estimator: Any) -> None:
    make = functools.partial(TraceBackpropQ_ELBO, 2, estimator=estimator)
    # Eager steps look for slopes again after 8 steps; what the estimators draw does not depend on it.
    assert entries(both(make, pyro.clear_param_store, slope_model, slope_guide, ROWS, steps=14))[0].steps > 4


def test_layers_whose_values_are_averaged_are_recorded() -> None:
    """The drawn particle and its components are inputs of the recording."""
    case, options = BY_NAME["vector_layers"], {"vectorize_particles": True, "max_plate_nesting": 1}
    make = functools.partial(TraceBackpropQ_ELBO, 3, estimator=Hindsight(draws=1, crossed=True), **options)
    assert entries(both(make, case.params, *case.programs, steps=14))[0].steps > 4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [Terminal, io.StringIO])
def test_a_line_says_what_the_first_compiled_step_waits_for(monkeypatch: Any, terminal: type[io.StringIO]) -> None:
    shown = terminal()
    monkeypatch.setattr(sys, "stderr", shown)

    def backend(graph: Any, examples: list[Tensor]) -> Any:
        shown.write("<compiles>")
        return graph

    trained(TraceBackpropQ_ELBO(compile=backend), slope_model, slope_guide, ROWS, steps=10)
    before, after = shown.getvalue().split("<compiles>")
    assert "Compiling a step of" in before
    # A terminal's line is cleared.
    assert not after.strip() or not shown.isatty()


@pytest.mark.filterwarnings("ignore")
def test_without_a_compiler_the_recorded_operators_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    elbo = TraceBackpropQ_ELBO(compile=True)
    with pytest.warns(BPQWarning, match="No working C\\+\\+ compiler"):
        repeat(10, elbo.loss_and_grads, slope_model, slope_guide, ROWS)
    assert entries(elbo)[0].steps > 3


def test_the_number_of_recordings_is_bounded() -> None:
    elbo = TraceBackpropQ_ELBO(compile=Compile("eager", max_recordings=2))
    with pytest.warns(BPQWarning, match="recorded 2 times, the last time because"):
        for rows in (3, 2, 4):
            repeat(14, elbo.loss_and_grads, slope_model, slope_guide, torch.ones(rows))
    assert len(entries(elbo)) == 2


def test_reports() -> None:
    elbo = TraceBackpropQ_ELBO()
    assert "write compile=True" in compile_report(elbo)
    elbo = TraceBackpropQ_ELBO(compile="eager")
    assert "Nothing is recorded yet" in compile_report(elbo)
    repeat(10, elbo.loss_and_grads, slope_model, slope_guide, ROWS)
    assert "operators" in compile_report(elbo) and "it gives 1 gradients to the optimiser" in compile_report(elbo)
