"""``CompiledSVI`` moves parameters, critics and the optimiser's state as ``SVI`` does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import SGD, Adam, AdamW, ClippedAdam, ExponentialLR, PyroOptim, RMSprop
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


def chain_model() -> None:
    logit = pyro.param("logit", torch.tensor(0.5))
    first = pyro.sample("first", dist.Bernoulli(logits=logit))
    second = pyro.sample("second", dist.Bernoulli(logits=first - 0.5))
    pyro.sample("x", dist.Normal(second + logit, 1.0), obs=ROWS[1])


def chain_guide() -> None:
    q = pyro.param("q", torch.zeros(3))
    first = pyro.sample("first", dist.Bernoulli(logits=q[0]))
    pyro.sample("second", dist.Bernoulli(logits=q[1] + q[2] * first))


def plain() -> TraceBackpropQ_ELBO:
    return TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None)


def by_name(name: str) -> dict[str, float]:
    return {"lr": 0.05 if name == "q" else 0.01}


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adam": lambda: Adam({"lr": 0.02}),
    "AdamW": lambda: AdamW({"lr": 0.02, "amsgrad": True, "weight_decay": 0.1}),
    "SGD": lambda: SGD({"lr": 0.01, "momentum": 0.8, "nesterov": True}),
    "plain SGD": lambda: SGD({"lr": 0.01}),
    "ClippedAdam": lambda: ClippedAdam({"lr": 0.05, "lrd": 0.9, "clip_norm": 0.3, "weight_decay": 0.1}),
    "centred": lambda: ClippedAdam({"lr": 0.05, "centered_variance": True}),
    "clipped norm": lambda: PyroOptim(torch.optim.Adam, {"lr": 0.02}, {"clip_norm": 0.2, "clip_value": 0.1}),
    "by name": lambda: Adam(by_name),
    "schedule": lambda: ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.8}),
    "RMSprop": lambda: RMSprop({"lr": 0.01}),
}


def both_kinds() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Pyro's loop and the compiled one, with options, each from the start."""
    for kind, options in ((SVI, {}), (CompiledSVI, {"compile": "eager"})):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        yield kind, options


def train(
    kind: Any, optim: Any, elbo: Any, steps: int = 14, program: Any = (model, guide), **options: Any
) -> tuple[list[Tensor], Any]:
    """Losses, parameters and the states of optimiser and critics after some steps, as tensors; and the loop."""
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    svi = kind(*program, optim, elbo, **options)
    losses = []
    for _ in range(steps):
        losses.append(svi.step())
        if hasattr(optim, "pt_scheduler_constructor"):
            optim.step()
    store = dict(pyro.get_param_store().named_parameters())
    found = [torch.tensor(losses), *(value.detach() for _, value in sorted(store.items()))]
    by_param = {pyro.get_param_store().param_name(key): owner for key, owner in optim.optim_objs.items()}
    for _, owner in sorted(by_param.items()):
        inner = getattr(owner, "optimizer", owner)
        found.append(torch.tensor(float(inner.param_groups[0]["lr"])))
        found += [torch.as_tensor(value).double() for state in inner.state.values() for value in state.values()]
    found += [value.double().nan_to_num() for value in elbo.state_dict().values() if isinstance(value, Tensor)]
    return found, svi


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_svi(name: str) -> None:
    expected, _ = train(SVI, OPTIMIZERS[name](), plain())
    found, svi = train(CompiledSVI, OPTIMIZERS[name](), plain(), compile="eager")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    report = compile_report(svi.loss_and_grads.__self__)
    assert "steps taken" in report
    assert svi.objective.compiled.entries[0].steps >= 8
    assert ("RMSprop" in report) == (name == "RMSprop")


def test_the_comparison_sees_a_step_size_that_is_frozen() -> None:
    expected, _ = train(SVI, OPTIMIZERS["schedule"](), plain())
    found, _ = train(CompiledSVI, Adam({"lr": 0.1}), plain(), compile="eager")
    assert (found[0] - expected[0]).abs().max() > 1e-4


@pytest.mark.parametrize(
    "options", [{"num_particles": 1}, {"learner": None}], ids=["critics", "critics of the optimiser"]
)
@pytest.mark.parametrize("kind", [SVI, CompiledSVI])
def test_critics_learn_as_in_eager_steps(kind: Any, options: dict[str, Any]) -> None:
    program = chain_model, chain_guide
    expected, _ = train(SVI, Adam({"lr": 0.02}), TraceBackpropQ_ELBO(critic=MLPCritic(), **options), program=program)
    elbo = TraceBackpropQ_ELBO(critic=MLPCritic(), compile="eager", **options)
    found, _ = train(kind, Adam({"lr": 0.02}), elbo, program=program)
    assert elbo.critics.weights()
    assert elbo.compiled is not None and elbo.compiled.entries[0].steps >= 5
    assert len(found) == len(expected)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_a_change_of_the_step_size_takes_no_recording() -> None:
    optim = Adam({"lr": 0.02})
    _, svi = train(CompiledSVI, optim, plain(), compile="eager")
    for owner in optim.optim_objs.values():
        owner.param_groups[0]["lr"] = 0.0
    before = [value.detach().clone() for _, value in pyro.get_param_store().named_parameters()]
    svi.step()
    after = [value.detach() for _, value in pyro.get_param_store().named_parameters()]
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)
    (entry,) = svi.objective.compiled.entries
    assert entry.recording.num_operators > 10


@pytest.mark.parametrize("change", ["betas", "state", "optimiser"])
def test_a_change_of_the_optimiser_is_seen_at_once(change: str) -> None:
    found = []
    for kind, options in ((SVI, {}), (CompiledSVI, {"compile": "eager"})):
        optim = Adam({"lr": 0.02})
        _, svi = train(kind, optim, plain(), **options)
        if change == "optimiser":
            svi.optim = SGD({"lr": 0.1})
        for owner in optim.optim_objs.values():
            if change == "betas":
                owner.param_groups[0]["betas"] = (0.1, 0.2)
            if change == "state":
                state = owner.state_dict()
                owner.load_state_dict({**state, "state": {0: {k: 2 * v for k, v in state["state"][0].items()}}})
        found.append([svi.step() for _ in range(6)])
    assert found[1] == pytest.approx(found[0], abs=1e-9)


def test_saved_states_go_on_in_both_directions() -> None:
    kinds: list[tuple[Any, dict[str, Any]]] = [(SVI, {}), (CompiledSVI, {"compile": "eager"})]
    whole, _ = train(SVI, Adam({"lr": 0.02}), plain(), steps=20)
    for first, second in (kinds, kinds[::-1]):
        optim = Adam({"lr": 0.02})
        train(first[0], optim, plain(), steps=12, **first[1])
        state, store, draws = optim.get_state(), pyro.get_param_store().get_state(), torch.get_rng_state()
        pyro.clear_param_store()
        pyro.get_param_store().set_state(store)
        optim = Adam({"lr": 0.02})
        optim.set_state(state)
        svi = second[0](model, guide, optim, plain(), **second[1])
        # Whatever a new objective draws first, both directions draw alike.
        torch.set_rng_state(draws)
        losses = [svi.step() for _ in range(8)]
        assert losses == pytest.approx(whole[0][12:].tolist(), abs=1e-9)


def test_run_over_batches_and_over_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    pyro.set_rng_seed(1)
    svi = CompiledSVI(model, guide, Adam({"lr": 0.02}), plain(), compile="eager")
    losses = svi.run([(ROWS,), ROWS, [ROWS[:2]]] * 6)
    assert losses.shape == (18,) and losses.isfinite().all() and not losses.requires_grad
    assert "loss" in capsys.readouterr().err
    assert svi.run(5, ROWS, progress=False).shape == (5,)
    assert svi.run(0, progress=False).shape == (0,)
    assert svi.run(iter([ROWS]), progress=False).shape == (1,)
    assert not capsys.readouterr().err
    assert [entry.steps > 0 for entry in svi.objective.compiled.entries] == [True, True]


def of_shift(shift: Tensor) -> None:
    model(ROWS + shift)


def test_a_tensor_that_no_optimiser_moves_collects_its_gradient() -> None:
    found = []
    for kind, options in both_kinds():
        shift = torch.zeros((), requires_grad=True)
        svi = kind(functools.partial(of_shift, shift), lambda: guide(ROWS), Adam({"lr": 0.02}), plain(), **options)
        for _ in range(12):
            svi.step()
        assert shift.grad is not None
        found.append(shift.grad.item())
    assert svi.objective.compiled.entries[0].steps > 5
    assert found[1] == pytest.approx(found[0], abs=1e-9)


def test_a_parameter_that_has_lost_its_gradient_still_moves_by_its_momentum() -> None:
    found = []
    for kind, options in both_kinds():

        def switched(weight: float) -> None:
            extra = pyro.param("extra", torch.tensor(0.5))
            model(ROWS + (extra if weight > 0 else extra.detach()))

        svi = kind(switched, lambda weight: guide(ROWS), SGD({"lr": 0.01, "momentum": 0.9}), plain(), **options)
        for step in range(14):
            svi.step(1.0 if step < 3 else 0.0)
        found.append(pyro.param("extra").item())
    assert svi.objective.compiled.entries[-1].steps > 3
    assert found[1] == pytest.approx(found[0], abs=1e-9)


def test_a_program_that_branches_runs_eagerly() -> None:
    def steered() -> None:
        if pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.zeros(())))) > 0:
            pyro.sample("y", dist.Normal(0.0, 1.0))

    def of_model() -> None:
        if pyro.sample("z", dist.Bernoulli(0.3)) > 0:
            pyro.sample("y", dist.Normal(0.0, 1.0))

    pyro.set_rng_seed(0)
    svi = CompiledSVI(of_model, steered, Adam({"lr": 0.1}), plain())
    with pytest.warns(BPQWarning, match="steps run eagerly"):
        svi.run(30, progress=False)
    assert pyro.param("q").item() < -0.1


def test_a_compiler_gets_the_whole_step() -> None:
    seen = []

    def backend(graph: Any, examples: Any) -> Any:
        seen.append(len(examples))
        return graph

    _, svi = train(CompiledSVI, Adam({"lr": 0.02}), plain(), compile=backend)
    (entry,) = svi.objective.compiled.entries
    # Loss alone: no gradient leaves the graph.
    assert seen == [len(entry.recording.used) + len(entry.recording.constants)]
    assert entry.recording.graded == ()


@pytest.mark.parametrize("loss", [Trace_ELBO(), lambda *args: 0.0])
def test_another_loss_is_refused(loss: Any) -> None:
    with pytest.raises(OptionError, match="write loss=TraceBackpropQ_ELBO"):
        CompiledSVI(model, guide, Adam({"lr": 0.1}), loss)


def test_an_optimiser_of_torch_is_refused() -> None:
    weight = torch.zeros(1, requires_grad=True)
    with pytest.raises(OptionError, match=r"pyro\.optim"):
        CompiledSVI(model, guide, torch.optim.Adam([weight]), TraceBackpropQ_ELBO())  # type: ignore[arg-type]


def test_new_parameters_and_a_cleared_store_start_anew() -> None:
    found = []
    for kind, options in both_kinds():
        wants = {"more": False}

        def grown(x: Tensor = ROWS, wants: dict[str, bool] = wants) -> None:
            model(x + pyro.param("shift", torch.tensor(0.2)) if wants["more"] else x)

        svi = kind(grown, guide, Adam({"lr": 0.02}), plain(), **options)
        losses = [svi.step() for _ in range(9)]
        wants["more"] = True
        losses += [svi.step() for _ in range(9)]
        assert pyro.param("shift").item() != 0.2
        pyro.clear_param_store()
        losses += [svi.step() for _ in range(9)]
        found.append([*losses, pyro.param("shift").item()])
    assert found[1] == pytest.approx(found[0], abs=1e-9)


def test_two_loops_on_one_objective_keep_apart() -> None:
    found = []
    for kind, options in ((SVI, {}), (CompiledSVI, {})):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        elbo = TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None, compile="eager" if kind is not SVI else None)
        loops = [kind(model, guide, optim, elbo, **options) for optim in (Adam({"lr": 0.1}), SGD({"lr": 0.01}))]
        losses = [loop.step() for _ in range(12) for loop in loops]
        found.append([*losses, *pyro.param("q").tolist()])
    assert len(loops[1].objective.compiled.entries) == 2
    assert found[1] == pytest.approx(found[0], abs=1e-9)


def test_an_error_of_the_program_leaves_everything_as_it_was() -> None:
    def breaks(x: Tensor) -> None:
        if len(x) == 2:
            raise RuntimeError("planted")
        model(x)

    pyro.set_rng_seed(1)
    svi = CompiledSVI(breaks, guide, Adam({"lr": 0.1}), plain(), compile="eager")
    for _ in range(8):
        svi.step(ROWS)
    before = pyro.param("q").tolist()
    with pytest.raises(RuntimeError, match="planted"):
        svi.step(ROWS[:2])
    assert pyro.param("q").tolist() == before
    assert torch.isfinite(torch.tensor(svi.step(ROWS)))
    assert len(svi.objective.compiled.entries) == 1
