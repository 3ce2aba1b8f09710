"""The ELBO as an object: its two interfaces, its state, and what it survives."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, Case
from pyro.infer import ELBO, SVI, Trace_ELBO
from pyro.nn import PyroModule, PyroParam
from pyro.optim import SGD, Adam
from torch import Tensor, nn

from pyro_bpq import AllAction, CriticLearner, LeaveOneOut, MLPCritic, RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import OptionError

CHAIN = BY_NAME["chain"]


def run(elbo: TraceBackpropQ_ELBO, case: Case = CHAIN, steps: int = 10, seed: int | None = 0) -> list[dict[str, Tensor]]:
    """Gradients of some steps at fixed parameters."""
    case.params()
    if seed is not None:
        pyro.set_rng_seed(seed)
    return [step(elbo, case) for _ in range(steps)]


def step(elbo: TraceBackpropQ_ELBO, case: Case = CHAIN, through_loss: bool = False) -> dict[str, Tensor]:
    leaves = dict(pyro.get_param_store().named_parameters())
    for leaf in leaves.values():
        leaf.grad = None
    if through_loss:
        elbo.differentiable_loss(case.model, case.guide, *case.args).backward()
    else:
        elbo.loss_and_grads(case.model, case.guide, *case.args)
    leaves = dict(pyro.get_param_store().named_parameters())
    return {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
        for name, leaf in leaves.items()
        if not name.startswith("bpq_critics")
    }


def state_of(elbo: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(dict(elbo.state_dict()))


def assert_equal(left: Any, right: Any, path: str = "") -> None:
    """Equality of nested state, tensors bit by bit."""
    assert type(left) is type(right), path
    if isinstance(left, Tensor):
        assert torch.equal(left, right), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_equal(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for i, pair in enumerate(zip(left, right, strict=True)):
            assert_equal(*pair, f"{path}/{i}")
    else:
        assert left == right, path


def is_equal(left: Any, right: Any) -> bool:
    try:
        assert_equal(left, right)
    except AssertionError:
        return False
    return True


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no_learner": {"learner": None},
    "two_particles": {"num_particles": 2},
    "vectorised": {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 0},
    "running_baseline": {"estimator": ScoreFunction(RunningBaseline())},
    "clip": {"learner": CriticLearner(lr=0.1, clip=0.5)},
}


@pytest.fixture(params=list(OPTIONS))
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return OPTIONS[request.param]


# One computation behind both interfaces


@pytest.mark.parametrize("name", ["chain", "global_local_subsample", "discrete_above_reparam", "python_branch"])
def test_differentiable_loss_gives_the_gradients_of_loss_and_grads(name: str) -> None:
    case = BY_NAME[name]
    one, other = TraceBackpropQ_ELBO(), TraceBackpropQ_ELBO()
    case.params()
    for seed in range(8):
        pyro.set_rng_seed(seed)
        expected = step(one, case)
        pyro.set_rng_seed(seed)
        assert_equal(step(other, case, through_loss=True), expected)
    assert one.num_steps == other.num_steps + 1 == 8  # the last update waits for the next call
    other._learn()
    assert_equal(state_of(one), state_of(other))


def test_differentiable_loss_returns_the_loss(options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    CHAIN.params()
    for seed in range(4):
        pyro.set_rng_seed(seed)
        loss = elbo.differentiable_loss(CHAIN.model, CHAIN.guide)
        assert loss.shape == () and loss.requires_grad
        pyro.set_rng_seed(seed)
        assert loss.item() == pytest.approx(elbo.loss(CHAIN.model, CHAIN.guide), rel=1e-12)


def test_forward_is_differentiable_loss_and_call_is_pyros() -> None:
    elbo = TraceBackpropQ_ELBO()
    CHAIN.params()
    pyro.set_rng_seed(0)
    expected = elbo.differentiable_loss(CHAIN.model, CHAIN.guide)
    pyro.set_rng_seed(0)
    assert elbo.forward(CHAIN.model, CHAIN.guide).item() == expected.item()


class Model(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(0.4))
        self.table = PyroParam(torch.tensor([[0.3, -0.6], [0.9, 0.2]]))

    def forward(self, data: Tensor) -> None:
        with pyro.plate("rows", len(data)):
            a = pyro.sample("a", dist.Bernoulli(logits=self.shift)).long()
            b = pyro.sample("b", dist.Categorical(logits=self.table[a]))
            pyro.sample("x", dist.Normal(1.3 * a + b, 0.7), obs=data)


class Guide(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1)
        self.second = nn.Linear(2, 2)

    def forward(self, data: Tensor) -> None:
        with pyro.plate("rows", len(data)):
            x = data.unsqueeze(-1)
            a = pyro.sample("a", dist.Bernoulli(logits=self.first(x).squeeze(-1)))
            pyro.sample("b", dist.Categorical(logits=self.second(torch.cat((x, a.unsqueeze(-1)), -1))))


DATA = torch.tensor([0.2, 1.9, -0.4, 2.6, 0.9], dtype=torch.float64)


def module(elbo: TraceBackpropQ_ELBO) -> nn.Module:
    pyro.clear_param_store()
    torch.manual_seed(0)
    return elbo(Model(), Guide())


@pytest.mark.parametrize("structure", ["auto", "dense"])
def test_elbo_module_trains_with_a_torch_optimiser(structure: str) -> None:
    elbo = TraceBackpropQ_ELBO(num_particles=2, structure=structure)
    fit = module(elbo)
    optimiser = torch.optim.Adam(fit.parameters(), lr=0.05)
    losses = []
    for _ in range(150):
        optimiser.zero_grad()
        loss = fit(DATA)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-30:]) < 0.85 * sum(losses[:30])
    assert elbo.num_steps == 149


def test_own_learner_keeps_critics_out_of_the_parameters() -> None:
    fit = module(TraceBackpropQ_ELBO())
    names = {name for name, _ in fit.named_parameters()}
    fit(DATA)
    assert {name for name, _ in fit.named_parameters()} == names
    assert any("critics.blocks" in name and "weights" in name for name in fit.state_dict())
    assert not any("critics" in name for name in names)


def test_without_learner_critics_are_parameters_after_one_call() -> None:
    elbo = TraceBackpropQ_ELBO(learner=None)
    fit = module(elbo)
    fit(DATA)
    critics = {name for name, _ in fit.named_parameters() if "critics.blocks" in name}
    assert critics and critics <= set(fit.state_dict())
    optimiser = torch.optim.Adam(fit.parameters(), lr=0.01)
    before = {name: tensor.clone() for name, tensor in elbo.critics.named_parameters()}
    for _ in range(30):
        optimiser.zero_grad()
        fit(DATA).backward()
        optimiser.step()
    after = dict(elbo.critics.named_parameters())
    assert after.keys() == before.keys()
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_without_learner_svi_trains_the_critics() -> None:
    elbo = TraceBackpropQ_ELBO(learner=None)
    CHAIN.params()
    svi = SVI(CHAIN.model, CHAIN.guide, Adam({"lr": 0.01}), elbo)
    svi.step()
    before = {name: tensor.clone() for name, tensor in elbo.critics.named_parameters()}
    for _ in range(30):
        svi.step()
    after = dict(elbo.critics.named_parameters())
    assert any(t.numel() for t in after.values())
    assert all(not torch.equal(t, before[n]) for n, t in after.items() if t.numel())


def test_without_learner_gradient_of_model_and_guide_is_the_same() -> None:
    # The critics' loss is added to the surrogate, and reaches the critics only.
    one, other = run(TraceBackpropQ_ELBO(), steps=1), run(TraceBackpropQ_ELBO(learner=None), steps=1)
    assert_equal(one, other)


# What learns, and when


def test_eval_freezes_everything(options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    run(elbo)
    elbo.eval()
    before = state_of(elbo)
    run(elbo, steps=5, seed=9)
    for seed in range(3):
        pyro.set_rng_seed(seed)
        step(elbo, through_loss=True)
    assert_equal(state_of(elbo), before)


def test_eval_before_the_first_step_builds_nothing(options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options).eval()
    before = state_of(elbo)
    run(elbo, steps=3)
    assert_equal(state_of(elbo), before)
    assert not list(elbo.critics.blocks)


def test_train_learns_again(options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    run(elbo)
    before = state_of(elbo.eval())
    elbo.train()
    run(elbo, steps=2)
    assert elbo.num_steps == 12
    changed = [name for name, tensor in elbo.critics.blocks.state_dict().items() if not torch.equal(tensor, before[f"critics.blocks.{name}"])]
    assert changed


def test_nothing_changes_between_forward_and_backward() -> None:
    elbo = TraceBackpropQ_ELBO()
    run(elbo)
    elbo.differentiable_loss(CHAIN.model, CHAIN.guide)
    tensors = {name: tensor.clone() for name, tensor in elbo.critics.blocks.state_dict().items()}
    loss = elbo.differentiable_loss(CHAIN.model, CHAIN.guide)
    middle = {name: tensor.clone() for name, tensor in elbo.critics.blocks.state_dict().items()}
    loss.backward()
    assert_equal({n: t.clone() for n, t in elbo.critics.blocks.state_dict().items()}, middle)
    assert not is_equal(tensors, middle)  # the update of the call before came first


def test_no_grad_learns_nothing(options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    run(elbo)
    before = state_of(elbo)
    with torch.no_grad():
        loss = elbo.differentiable_loss(CHAIN.model, CHAIN.guide)
        elbo.loss_and_grads(CHAIN.model, CHAIN.guide)
    assert not loss.requires_grad
    assert_equal(state_of(elbo), before)


def test_loss_and_evaluate_loss_change_nothing(options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    run(elbo)
    elbo.differentiable_loss(CHAIN.model, CHAIN.guide)
    before = state_of(elbo)
    svi = SVI(CHAIN.model, CHAIN.guide, SGD({"lr": 0.1}), elbo)
    grads = {n: p.grad for n, p in pyro.get_param_store().named_parameters()}
    assert isinstance(elbo.loss(CHAIN.model, CHAIN.guide), float)
    assert isinstance(svi.evaluate_loss(), float)
    assert_equal(state_of(elbo), before)
    assert all(p.grad is grads[n] for n, p in pyro.get_param_store().named_parameters())


def test_two_backward_passes_need_retain_graph() -> None:
    CHAIN.params()
    model, weight = CHAIN.model, torch.tensor(0.3, requires_grad=True)
    scaled = weight.exp() * 1.0

    def guide() -> None:
        CHAIN.guide()
        pyro.factor("f", scaled.sin(), has_rsample=True)

    elbo = TraceBackpropQ_ELBO(retain_graph=True)
    for _ in range(2):
        elbo.loss_and_grads(model, guide)
    torch.testing.assert_close(weight.grad, 2 * (scaled * scaled.cos()).detach())
    elbo = TraceBackpropQ_ELBO()
    elbo.loss_and_grads(model, guide)
    with pytest.raises(RuntimeError, match="second time"):
        elbo.loss_and_grads(model, guide)


# Saving and loading


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("through", [copy.deepcopy, through_file], ids=["state_dict", "file"])
@pytest.mark.parametrize("is_waiting", [False, True], ids=["applied", "waiting"])
def test_state_dict_continues_in_a_new_process(
    options: dict[str, Any], through: Callable[[Any], Any], is_waiting: bool
) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    run(elbo)
    if is_waiting:
        elbo.differentiable_loss(CHAIN.model, CHAIN.guide)
    state = through(elbo.state_dict())
    fresh = TraceBackpropQ_ELBO(**options)
    fresh.load_state_dict(state)
    assert_equal(through(fresh.state_dict()).keys() >= {"_extra_state"}, True)
    # What was loaded before the critics exist is kept when it is saved again.
    again = TraceBackpropQ_ELBO(**options)
    again.load_state_dict(through(fresh.state_dict()))
    for other in (fresh, again):
        expected, found = run(copy.deepcopy(elbo), steps=5, seed=4), run(other, steps=5, seed=4)
        assert_equal(found, expected)


def test_state_dict_continues_when_critics_exist(options: dict[str, Any]) -> None:
    elbo, other = TraceBackpropQ_ELBO(**options), TraceBackpropQ_ELBO(**options, seed=3)
    run(elbo)
    run(other, steps=3, seed=8)
    other.load_state_dict(elbo.state_dict())
    run_one, run_other = run(elbo, steps=5, seed=4), run(other, steps=5, seed=4)
    assert_equal(run_other, run_one)
    assert_equal(state_of(other), state_of(elbo))


@pytest.mark.parametrize("through", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["deepcopy", "pickle"])
def test_copies_continue_alike_and_apart(options: dict[str, Any], through: Callable[[Any], Any]) -> None:
    if "learner" in options and options["learner"] is None and through is not copy.deepcopy:
        pytest.skip("pyro.module hangs a weak reference on every parameter, which pickle refuses")
    elbo = TraceBackpropQ_ELBO(**options)
    run(elbo)
    twin, before = through(elbo), state_of(elbo)
    assert_equal(state_of(twin), before)
    found = run(twin, steps=5, seed=4)
    assert_equal(state_of(elbo), before)  # its twin's steps leave it alone
    assert_equal(run(elbo, steps=5, seed=4), found)
    assert_equal(state_of(elbo), state_of(twin))


def test_elbo_module_state_dict_round_trip() -> None:
    with pyro.settings.context(module_local_params=True):
        check_elbo_module_state_dict_round_trip()


def check_elbo_module_state_dict_round_trip() -> None:
    fit = module(TraceBackpropQ_ELBO())
    optimiser = torch.optim.SGD(fit.parameters(), lr=0.01)
    for _ in range(5):
        optimiser.zero_grad()
        fit(DATA).backward()
        optimiser.step()
    state = through_file(fit.state_dict())
    fresh = module(TraceBackpropQ_ELBO())
    fresh.load_state_dict(state)
    grads = []
    for each in (fit, fresh):
        each.zero_grad()
        pyro.set_rng_seed(3)
        each(DATA).backward()
        grads.append([p.grad.clone() for p in each.parameters()])
    assert_equal(grads[0], grads[1])


# What it survives


def test_batch_size_may_change() -> None:
    case = BY_NAME["global_local"]
    for options in ({}, {"num_particles": 2}, {"estimator": ScoreFunction(RunningBaseline())}, {"learner": None}):
        elbo = TraceBackpropQ_ELBO(**options)
        case.params()
        svi = SVI(case.model, case.guide, SGD({"lr": 0.01}), elbo)
        for size in (3, 5, 1, 3, 2):
            svi.step(torch.linspace(-1.0, 1.0, size))
        assert elbo.num_steps == 5


def test_two_elbos_share_nothing() -> None:
    alone = TraceBackpropQ_ELBO()
    expected = run(alone, steps=6)
    one, other = TraceBackpropQ_ELBO(), TraceBackpropQ_ELBO(num_particles=2)
    run(other)
    found = run(one, steps=3)
    state = torch.get_rng_state()
    run(other, BY_NAME["reordered_guide"], steps=4, seed=5)
    CHAIN.params()
    torch.set_rng_state(state)
    assert_equal(found + [step(one) for _ in range(3)], expected)


def test_one_elbo_may_serve_two_programs_with_the_same_names() -> None:
    elbo = TraceBackpropQ_ELBO()
    for name in ("chain", "fork", "diamond", "vector", "nested_plates", "chain", "global_local", "plate"):
        grads = run(elbo, BY_NAME[name], steps=4)
        assert all(bool(torch.isfinite(g).all()) for grad in grads for g in grad.values())
    assert elbo.num_steps == 32


def test_clear_param_store_in_between() -> None:
    for options in ({}, {"learner": None}):
        elbo = TraceBackpropQ_ELBO(**options)
        for _ in range(3):
            CHAIN.params()
            svi = SVI(CHAIN.model, CHAIN.guide, Adam({"lr": 0.01}), elbo)
            for _ in range(3):
                svi.step()
        assert elbo.num_steps == 9


class Stop(Exception):
    pass


@pytest.mark.parametrize("where", ["model", "guide", "backward", "critic"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_exception_leaves_everything_as_before(where: str, is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    elbo = TraceBackpropQ_ELBO()
    CHAIN.params()
    if not is_first:
        run(elbo)

    def model() -> None:
        CHAIN.model()
        if where == "model":
            raise Stop

    def guide() -> None:
        CHAIN.guide()
        if where == "guide":
            raise Stop

    def fail(*_: Any, **__: Any) -> None:
        raise Stop

    if where == "backward":
        monkeypatch.setattr(Tensor, "backward", fail)
    if where == "critic":
        monkeypatch.setattr("pyro_bpq.surrogate.regression", fail)
    before, rest = state_of(elbo), elbo.num_steps
    with pytest.raises(Stop):
        elbo.loss_and_grads(model, guide)
    monkeypatch.undo()
    assert_equal(state_of(elbo), before)
    assert elbo.num_steps == rest
    assert_equal(run(elbo, steps=1), run(copy_without_waiting(before), steps=1))


def copy_without_waiting(state: dict[str, Any]) -> TraceBackpropQ_ELBO:
    elbo = TraceBackpropQ_ELBO()
    elbo.load_state_dict(copy.deepcopy(state))
    return elbo


def warned(elbo: ELBO, case: Case) -> set[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        elbo.loss_and_grads(case.model, case.guide)
    return {str(w.message) for w in caught}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_warns_as_pyro_does_and_reaches_no_critic(options: dict[str, Any], bad: float) -> None:
    scale = torch.tensor(1.0)

    def model() -> None:
        CHAIN.model()
        pyro.sample("f", dist.Unit(1.0 - scale, validate_args=False), obs=torch.empty(0))

    elbo = TraceBackpropQ_ELBO(**options)
    case = Case("nan", model, CHAIN.guide, CHAIN.shapes, 0)
    run(elbo, case)
    before = state_of(elbo)
    scale.fill_(bad)
    names = ("num_particles", "vectorize_particles", "max_plate_nesting")
    theirs = Trace_ELBO(**{name: value for name, value in options.items() if name in names})
    assert warned(elbo, case) == warned(theirs, case)
    scale.fill_(1.0)
    elbo._learn()
    assert_equal(state_of(elbo), before)
    assert all(bool(torch.isfinite(g).all()) for g in run(elbo, case, steps=1)[0].values())


def test_nan_in_one_particle_reaches_no_critic() -> None:
    calls = []

    def model() -> None:
        CHAIN.model()
        calls.append(None)
        factor = torch.tensor(float("nan") if len(calls) == 42 else 0.0)
        pyro.sample("f", dist.Unit(factor, validate_args=False), obs=torch.empty(0))

    elbo = TraceBackpropQ_ELBO(num_particles=2, estimator=AllAction(exact=True))
    case = Case("nan", model, CHAIN.guide, CHAIN.shapes, 0)
    run(elbo, case)
    before = state_of(elbo)
    with pytest.warns(UserWarning, match="NaN"):
        elbo.loss_and_grads(case.model, case.guide)
    assert_equal(state_of(elbo), before)


def test_impossible_values_give_finite_gradients() -> None:
    def model() -> None:
        k = pyro.sample("k", dist.Categorical(logits=torch.tensor([0.3, -torch.inf, 0.1])))
        pyro.sample("x", dist.Normal(torch.tensor([0.0, torch.nan, 2.0])[k], 1.0), obs=torch.tensor(1.3))

    def guide() -> None:
        logits = pyro.param("q", torch.tensor([0.2, 0.4, -0.3]))
        pyro.sample("k", dist.Categorical(logits=logits + torch.tensor([0.0, -torch.inf, 0.0])))

    elbo = TraceBackpropQ_ELBO(estimator=AllAction(exact=True))
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    for _ in range(5):
        assert elbo.loss_and_grads(model, guide) == pytest.approx(elbo.loss(model, guide), abs=5.0)
        gradient = pyro.param("q").grad
        assert bool(torch.isfinite(gradient).all())
        assert gradient[1] == 0.0
        assert float(gradient.abs().max()) > 1e-3
        pyro.param("q").grad = None


# Dtypes and options


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_of_the_program_is_the_critics(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    elbo = TraceBackpropQ_ELBO(num_particles=2)
    fit = module(elbo)
    for _ in range(5):
        loss = fit(DATA.to(dtype))
        loss.backward()
    assert loss.dtype == dtype
    tensors = list(elbo.critics.blocks.state_dict().values())
    assert tensors and all(t.dtype == dtype for t in tensors if isinstance(t, Tensor))


def test_float64_program_under_a_float32_default() -> None:
    torch.set_default_dtype(torch.float32)
    elbo = TraceBackpropQ_ELBO()
    run(elbo, BY_NAME["chain"], steps=5)
    tensors = list(elbo.critics.blocks.state_dict().values())
    assert tensors and all(t.dtype == torch.float64 for t in tensors if isinstance(t, Tensor))


def test_to_moves_the_critics() -> None:
    elbo = TraceBackpropQ_ELBO()
    run(elbo)
    elbo.to(torch.float32).to(torch.float64)
    run(elbo, steps=5)
    assert elbo.num_steps == 15


def test_learner_has_an_optimiser_of_its_own() -> None:
    made = []

    def sgd(tensors: Any, lr: float) -> torch.optim.Optimizer:
        made.append(lr)
        return torch.optim.SGD(tensors, lr=lr)

    elbo = TraceBackpropQ_ELBO(learner=CriticLearner(lr=0.3, optimizer=sgd))
    run(elbo)
    assert made and set(made) == {0.3}


def test_lam_and_gamma_may_be_functions_of_the_step() -> None:
    seen: list[int] = []

    def lam(at: int) -> float:
        seen.append(at)
        return 1.0 / (1 + at)

    run(TraceBackpropQ_ELBO(lam=lam, gamma=lambda at: 1.0), steps=4)
    assert seen == [0, 1, 2, 3]


def test_seed_decides_the_initial_critics() -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        elbo = TraceBackpropQ_ELBO(seed=seed)
        run(elbo, steps=1)
        return {n: t.clone() for n, t in elbo.critics.weights().items()}

    assert_equal(weights(1), weights(1))
    assert not is_equal(weights(1), weights(2))


def test_info_names_sites() -> None:
    elbo = TraceBackpropQ_ELBO()
    run(elbo)
    assert set(elbo.info) == {"a", "b", "c"}
    assert {"scales", "cost_to_go", "td_loss", "explained"} <= set(elbo.info["a"])
    assert not any(t.requires_grad for values in elbo.info.values() for t in values.values())


def test_repr_shows_the_options() -> None:
    text = repr(TraceBackpropQ_ELBO(num_particles=2, critic=MLPCritic((8,)), lam=0.5))
    for part in ("num_particles=2", "MLPCritic(hidden=(8,))", "lam=0.5", "structure='auto'"):
        assert part in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"estimator": "allaction"}, "AllAction()"),
        ({"estimator": AllAction}, "AllAction()"),
        ({"critic": "mlp"}, "MLPCritic()"),
        ({"critic": MLPCritic}, "MLPCritic()"),
        ({"reduction": "tre"}, "'tree'"),
        ({"lam": 1.5}, "[0, 1]"),
        ({"lam": float("nan")}, "[0, 1]"),
        ({"gamma": 0.0}, "(0, 1]"),
        ({"learner": 0.1}, "CriticLearner(lr="),
        ({"structure": "statik"}, "'static'"),
        ({"num_particles": 0}, "num_particles"),
    ],
)
def test_bad_options_raise(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        TraceBackpropQ_ELBO(**options)
    assert isinstance(caught.value, ValueError) and words in str(caught.value)


def test_constructor_takes_all_of_pyros_arguments() -> None:
    import inspect

    from pyro.infer import ELBO

    theirs = list(inspect.signature(ELBO.__init__).parameters)
    assert list(inspect.signature(TraceBackpropQ_ELBO.__init__).parameters)[: len(theirs)] == theirs
    with pytest.warns(DeprecationWarning):
        assert TraceBackpropQ_ELBO(max_iarange_nesting=1).max_plate_nesting == 1
