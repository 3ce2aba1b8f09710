"""``CompiledSVI`` moves parameters, critics and the optimiser's state as ``SVI`` does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import SGD, Adam, AdamW, ClippedAdam, ExponentialLR, PyroOptim, RMSprop, clipped_adam
from steps import filtered, fresh, no_gradients, repeat
from torch import Tensor

from pyro_bpq import CompiledSVI, MLPCritic, ScoreFunction, TraceBackpropQ_ELBO, compile_report
from pyro_bpq.errors import BPQWarning, OptionError

ROWS = torch.tensor([-0.4, 0.9, 1.7])


def model(x: Tensor = ROWS) -> None:
    loc = pyro.param("loc", torch.tensor(0.3))
    scale = pyro.param("scale", torch.tensor(0.8), constraint=dist.constraints.positive)
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.sample("x", dist.Normal(loc + z, scale), obs=x)


def guide(x: Tensor = ROWS) -> None:
    q = pyro.param("q", torch.zeros(2))
    with pyro.plate("rows", len(x)):
        pyro.sample("z", dist.Bernoulli(logits=q[0] + q[1] * x))


def idle_guide() -> None:
    pyro.param("idle", torch.zeros(2))  # has no gradient, but a step size, which decays
    guide()


plain = functools.partial(TraceBackpropQ_ELBO, estimator=ScoreFunction(), critic=None)
two = functools.partial(TraceBackpropQ_ELBO, num_particles=2)
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adam": lambda: Adam({"lr": 0.02}),
    "AdamW": lambda: AdamW({"lr": 0.02, "amsgrad": True, "weight_decay": 0.1}),
    "SGD": lambda: SGD({"lr": 0.01, "momentum": 0.8, "nesterov": True}),
    "plain SGD": lambda: SGD({"lr": 0.01}),
    "ClippedAdam": lambda: ClippedAdam({"lr": 0.05, "lrd": 0.9, "clip_norm": 0.3, "weight_decay": 0.1}),
    "centred": lambda: ClippedAdam({"lr": 0.05, "centered_variance": True}),
    "clipped norm": lambda: PyroOptim(torch.optim.Adam, {"lr": 0.02}, {"clip_norm": 0.2, "clip_value": 0.1}),
    "by name": lambda: Adam(lambda name: {"lr": 0.05 if name == "q" else 0.01}),
    "schedule": lambda: ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.8}),
    "RMSprop": lambda: RMSprop({"lr": 0.01}),
}


def adam() -> Adam:
    return Adam({"lr": 0.02})


def both(
    take: Callable[[Any], list[float]],
    programs: Any = (model, guide),
    optim: Callable[[], Any] = adam,
    elbo: Callable[..., Any] = plain,
    kind: Any = CompiledSVI,
) -> Any:
    """A compiled loop, after it has given the numbers of Pyro's loop."""
    found = []
    for each, options in ((SVI, {}), (kind, {"compile": "eager"})):
        fresh(1)
        svi = each(*programs, optim(), elbo(**options))
        found.append(take(svi))
    assert found[1] == pytest.approx(found[0], abs=1e-9)
    return svi


def everything(svi: Any, steps: int = 14) -> list[float]:
    """Losses, parameters and the states of optimiser and critics after some steps."""
    optim, store, losses = svi.optim, pyro.get_param_store(), []
    for _ in range(steps):
        losses.append(svi.step())
        if hasattr(optim, "pt_scheduler_constructor"):
            optim.step()
    found = [torch.tensor(losses), *(value for _, value in sorted(store.named_parameters()))]
    by_param = {store.param_name(key): owner for key, owner in optim.optim_objs.items()}
    for _, owner in sorted(by_param.items()):
        inner = getattr(owner, "optimizer", owner)
        found.append(torch.tensor(float(inner.param_groups[0]["lr"])))
        found += [torch.as_tensor(value) for state in inner.state.values() for value in state.values()]
    found += [value for value in objective_of(svi).state_dict().values() if isinstance(value, Tensor)]
    return torch.cat([value.detach().double().nan_to_num().flatten() for value in found]).tolist()


def objective_of(svi: Any) -> TraceBackpropQ_ELBO:
    return svi.loss_and_grads.__self__


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_svi(name: str) -> None:
    if name == "centred" and "centered_variance" not in inspect.signature(clipped_adam.ClippedAdam).parameters:
        pytest.skip("Pyro 1.9.1 has no centred variance")
    # Pyro does not clip the norm of parameters without a gradient.
    svi = both(everything, (model, guide if name == "clipped norm" else idle_guide), OPTIMIZERS[name])
    report = compile_report(objective_of(svi))
    assert "steps taken" in report and ("RMSprop" in report) == (name == "RMSprop")
    assert svi.objective.compiled.entries[0].steps >= 8


@pytest.mark.parametrize("options", [{"num_particles": 1}, {"learner": None}], ids=str)
@pytest.mark.parametrize("kind", [SVI, CompiledSVI])
def test_critics_learn_as_in_eager_steps(kind: Any, options: dict[str, Any]) -> None:
    def chain(part: str) -> None:
        q = pyro.param(part, torch.zeros(3))
        first = pyro.sample("first", dist.Bernoulli(logits=q[0]))
        second = pyro.sample("second", dist.Bernoulli(logits=q[1] + q[2] * first))
        if part == "p":
            pyro.sample("x", dist.Normal(second + q[0], 1.0), obs=ROWS[1])

    programs = functools.partial(chain, "p"), functools.partial(chain, "q")
    elbo = functools.partial(TraceBackpropQ_ELBO, critic=MLPCritic(), **options)
    objective = objective_of(both(everything, programs, elbo=elbo, kind=kind))
    assert objective.critics.weights() and objective.compiled.entries[0].steps >= 5


@pytest.mark.parametrize("change", ["lr", "betas", "state", "optimiser"])
def test_a_change_of_the_optimiser_is_seen_at_once(change: str) -> None:
    def take(svi: Any) -> list[float]:
        found = repeat(14, svi.step)
        for owner in svi.optim.optim_objs.values():
            if change == "lr":
                owner.param_groups[0]["lr"] = 0.0
            if change == "betas":
                owner.param_groups[0]["betas"] = (0.1, 0.2)
            if change == "state":
                state = owner.state_dict()
                doubled = {key: {k: 2 * v for k, v in own.items()} for key, own in state["state"].items()}
                owner.load_state_dict({**state, "state": doubled})
        if change == "optimiser":
            svi.optim = SGD({"lr": 0.1})
        return found + repeat(6, svi.step)

    svi = both(take)
    assert change != "lr" or len(svi.objective.compiled.entries) == 1


def test_saved_states_go_on_in_both_directions() -> None:
    kinds: list[Any] = [SVI, functools.partial(CompiledSVI, compile="eager")]
    fresh(1)
    whole = repeat(20, SVI(model, guide, adam(), plain()).step)
    for first, second in (kinds, kinds[::-1]):
        fresh(1)
        optim = adam()
        repeat(12, first(model, guide, optim, plain()).step)
        state, store, draws = optim.get_state(), pyro.get_param_store().get_state(), torch.get_rng_state()
        pyro.clear_param_store()
        pyro.get_param_store().set_state(store)
        optim = adam()
        optim.set_state(state)
        svi = second(model, guide, optim, plain())
        # Whatever a new objective draws first, both directions draw alike.
        torch.set_rng_state(draws)
        assert repeat(8, svi.step) == pytest.approx(whole[12:], abs=1e-9)


def test_run_over_batches_and_over_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    pyro.set_rng_seed(1)
    svi = CompiledSVI(model, guide, adam(), plain(), compile="eager")
    losses = svi.run([(ROWS,), ROWS, [ROWS[:2]]] * 6)
    assert losses.shape == (18,) and losses.isfinite().all() and not losses.requires_grad
    assert "loss" in capsys.readouterr().err
    assert svi.run(5, ROWS, progress=False).shape == (5,)
    assert svi.run(0, progress=False).shape == (0,)
    assert svi.run(iter([ROWS]), progress=False).shape == (1,)
    assert not capsys.readouterr().err
    assert [entry.steps > 0 for entry in svi.objective.compiled.entries] == [True, True]


def test_a_tensor_that_no_optimiser_moves_collects_its_gradient() -> None:
    shift = torch.zeros((), requires_grad=True)

    def take(svi: Any) -> list[float]:
        shift.grad = None
        repeat(12, svi.step)
        return [float(shift.grad)]

    svi = both(take, (lambda: model(ROWS + shift), guide))
    assert svi.objective.compiled.entries[0].steps > 5


def test_a_parameter_that_has_lost_its_gradient_still_moves_by_its_momentum() -> None:
    def switched(is_learned: bool) -> None:
        extra = pyro.param("extra", torch.tensor(0.5))
        model(ROWS + (extra if is_learned else extra.detach()))

    def take(svi: Any) -> list[float]:
        found = [svi.step(step < 3) for step in range(14)]
        return [*found, pyro.param("extra").item()]

    svi = both(take, (switched, lambda is_learned: guide()), lambda: SGD({"lr": 0.01, "momentum": 0.9}))
    assert svi.objective.compiled.entries[-1].steps > 3


@pytest.mark.parametrize("loss", [Trace_ELBO(), lambda *args: 0.0])
def test_another_loss_and_an_optimiser_of_torch_are_refused(loss: Any) -> None:
    with pytest.raises(OptionError, match="write loss=TraceBackpropQ_ELBO"):
        CompiledSVI(model, guide, Adam({"lr": 0.1}), loss)
    weight = torch.zeros(1, requires_grad=True)
    with pytest.raises(OptionError, match=r"pyro\.optim"):
        CompiledSVI(model, guide, torch.optim.Adam([weight]), TraceBackpropQ_ELBO())  # type: ignore[arg-type]


def test_new_parameters_and_a_cleared_store_start_anew() -> None:
    wants = {"more": False}

    def grown() -> None:
        model(ROWS + pyro.param("shift", torch.tensor(0.2)) if wants["more"] else ROWS)

    def take(svi: Any) -> list[float]:
        wants["more"] = False
        losses = repeat(9, svi.step)
        wants["more"] = True
        losses += repeat(9, svi.step)
        assert pyro.param("shift").item() != 0.2
        pyro.clear_param_store()
        return [*losses, *repeat(9, svi.step), pyro.param("shift").item()]

    both(take, (grown, guide))


def set_scale() -> None:
    pyro.get_param_store()["scale"] = torch.tensor(2.0)


def reload() -> None:
    store = pyro.get_param_store()
    store.set_state(store.get_state())


@pytest.mark.parametrize("optim", [Adam, ClippedAdam])
@pytest.mark.parametrize(("change", "often"), [(set_scale, False), (reload, False), (no_gradients, True)])
def test_parameters_go_on_learning_as_in_svi(change: Callable[[], None], often: bool, optim: Any) -> None:
    def take(svi: Any) -> list[float]:
        for step in range(26):
            if often or step == 16:
                change()
            svi.step()
        # A parameter that stays behind is off by more than 0.01.
        return [value for name in ("loc", "scale", "q") for value in pyro.param(name).reshape(-1).tolist()]

    svi = both(take, optim=lambda: optim({"lr": 0.05}), elbo=two)
    assert "updates 3 parameters" in str(compile_report(svi.objective))


class Settings:
    """What a schedule sets."""

    beta = 1.0


def scaled(x: Any) -> None:
    with poutine.scale(scale=Settings.beta):
        model(torch.as_tensor(x))


def test_plain_attributes_of_classes_are_a_part_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(svi: Any) -> list[float]:
        found = []
        for beta in (1.0, 0.5):
            monkeypatch.setattr(Settings, "beta", beta)
            with filtered("error", BPQWarning):
                found += repeat(12, svi.step, ROWS)
        return found

    both(take, (scaled, guide), elbo=two)


def test_new_arrays_in_each_call_run_eagerly_and_are_named() -> None:
    data = numpy.random.RandomState(0).randn(30, 3)
    svi = CompiledSVI(scaled, lambda x: guide(torch.as_tensor(x)), adam(), plain(), compile="eager")
    with pytest.warns(BPQWarning, match=r"args\[0\] is a new array of numpy in each call; hand over torch.as_tensor"):
        for row in data:
            svi.step(row)
    assert svi.objective.compiled is not None and not svi.objective.compiled.entries
    repeat(12, svi.step, row)
    assert svi.objective.compiled.entries
