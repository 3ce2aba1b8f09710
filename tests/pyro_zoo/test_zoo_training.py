"""Every animal of the zoo through every way to train it."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import SGD, Adam
from torch import Tensor, nn
from zoo import Animal, Host, each_animal, one_plate, one_plate_guide

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "one": {"num_particles": 1},
    "two": {"num_particles": 2},
    "vectorised": {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 2},
    "score": {"estimator": ScoreFunction(), "critic": None},
    "dense": {"structure": "dense"},
    "user_trains": {"learner": None},
}


def each_elbo(*names: str) -> pytest.MarkDecorator:
    """Parametrises a test over ``options`` of the ELBO."""
    return pytest.mark.parametrize("options", [pytest.param(OPTIONS[n], id=n) for n in names or OPTIONS])


def serves(elbo: TraceBackpropQ_ELBO, each: Animal) -> None:
    if elbo.vectorize_particles and not each.is_vectorisable:
        pytest.skip("does not vectorise")


class only_pyros:
    """Lets only the warnings through that Pyro's own ELBOs give for this animal."""

    def __init__(self, each: Animal, repeats: bool = True) -> None:
        # Ours warns once for an objective, Pyro's at each call.
        self.each, self.repeats, self.catcher = each, repeats, warnings.catch_warnings(record=True)

    def __enter__(self) -> None:
        self.found = self.catcher.__enter__()
        warnings.simplefilter("always")

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self.catcher.__exit__(kind, *rest)
        texts = [str(warning.message) for warning in self.found or ()]
        wanted = self.each.warns
        assert all(wanted is not None and wanted in text for text in texts), texts
        assert kind is not None or wanted is None or texts or not self.repeats


def assert_finite(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        assert torch.isfinite(tensor).all(), name
        assert tensor.grad is None or torch.isfinite(tensor.grad).all(), name


@each_elbo()
@each_animal()
def test_svi(each: Animal, options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    serves(elbo, each)
    svi = SVI(*each.programs(), Adam({"lr": 0.01}), elbo)
    with only_pyros(each):
        losses = [svi.step(*args) for args in each.calls]
    assert all(isinstance(loss, float) and loss == loss for loss in losses)
    assert_finite(dict(pyro.get_param_store().named_parameters()))


@each_elbo("default", "vectorised", "user_trains")
@each_animal()
def test_module_with_a_torch_optimiser(each: Animal, options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    serves(elbo, each)
    with pyro.settings.context(module_local_params=True), only_pyros(each):
        fit = elbo(Host(each.model), Host(each.guide))
        for args in each.calls:
            fit(*args)
        optimiser = torch.optim.Adam(list(fit.parameters()) or [torch.zeros(1, requires_grad=True)], lr=0.01)
        for args in each.calls:
            optimiser.zero_grad()
            loss = fit(*args)
            assert type(loss) is Tensor and loss.shape == ()
            if loss.requires_grad:
                loss.backward()
            optimiser.step()
        copied = copy.deepcopy(fit)
        fit(*each.calls[0])
    assert not list(pyro.get_param_store().keys()) or elbo.learner is None
    assert_finite(dict(fit.named_parameters()))
    assert {n for n, _ in copied.named_parameters()} <= {n for n, _ in fit.named_parameters()}


@each_elbo("two", "user_trains")
@each_animal()
def test_evaluation_changes_nothing(each: Animal, options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    serves(elbo, each)
    svi = SVI(*each.programs(), Adam({"lr": 0.01}), elbo)
    with only_pyros(each):
        svi.step(*each.calls[0])
        before = {name: tensor.clone() for name, tensor in state(elbo).items()}
        grads = {name: tensor.grad for name, tensor in pyro.get_param_store().named_parameters()}
        with torch.no_grad():
            for args in each.calls:
                assert isinstance(svi.evaluate_loss(*args), float)
                assert isinstance(elbo.loss_and_grads(*each.programs(), *args), float)
                assert not elbo.differentiable_loss(*each.programs(), *args).requires_grad
    after = state(elbo)
    # Branches that no step has taken may bring parameters of their own.
    assert {n for n in before if "store" not in n} == {n for n in after if "store" not in n}
    assert not [n for n in after.keys() - before.keys() if "critics" in n]
    assert all(torch.equal(before[name], after[name]) for name in before)
    leaves = dict(pyro.get_param_store().named_parameters())
    assert all(leaves[name].grad is grad for name, grad in grads.items())


def state(elbo: TraceBackpropQ_ELBO) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(elbo.critics.blocks.state_dict())
    tensors |= {f"store.{n}": p.detach() for n, p in pyro.get_param_store().named_parameters()}
    return tensors


@each_elbo("one", "two", "vectorised")
@each_animal(lambda each: each.name not in ("untraced",))  # TraceGraph_ELBO raises a KeyError
def test_loss_and_draws_are_pyros(each: Animal, options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    serves(elbo, each)
    stock = TraceGraph_ELBO(elbo.num_particles, 2, vectorize_particles=elbo.vectorize_particles)
    elbo.max_plate_nesting = stock.max_plate_nesting
    found = []
    for loss in (stock.loss, elbo.loss, elbo.loss_and_grads, elbo.loss_and_grads):
        pyro.set_rng_seed(7)
        with only_pyros(each, repeats=loss == stock.loss):
            found.append((loss(*each.programs(), *each.calls[0]), torch.get_rng_state()))
    for value, generator in found[1:]:
        assert value == pytest.approx(found[0][0], rel=1e-9)
        assert torch.equal(generator, found[0][1])


@each_animal()
def test_steps_accumulate_gradients(each: Animal) -> None:
    elbo = TraceBackpropQ_ELBO().eval()
    grads = []
    for repeats in (1, 2):
        pyro.clear_param_store()
        for _ in range(repeats):
            pyro.set_rng_seed(3)
            elbo.num_noises = 0  # other runs draw from generators of the ELBO's own
            with only_pyros(each):
                elbo.loss_and_grads(*each.programs(), *each.calls[0])
        params = dict(pyro.get_param_store().named_parameters())
        grads.append({name: param.grad for name, param in params.items() if param.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(2 * grad, grads[1][name], msg=name)


@each_elbo("user_trains")
@each_animal()
def test_pickled_elbo_continues_alike(each: Animal, options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    losses: list[list[float]] = []
    with only_pyros(each):
        for i in range(3):
            svi = SVI(*each.programs(), SGD({"lr": 0.0}), elbo)
            pyro.set_rng_seed(i > 0)
            losses.append([svi.step(*args) for args in each.calls])
            if i == 0:
                saved = pickle.dumps(elbo)
                before = state(elbo)
            elbo = pickle.loads(saved)
    assert losses[1] == losses[2]
    assert {n for n in before if "store" not in n} == {n for n in state(elbo) if "store" not in n}


def test_gradients_accumulate_while_critics_learn() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(n) for n in (4, 3, 5)]

    def make() -> tuple[nn.Module, TraceBackpropQ_ELBO]:
        pyro.set_rng_seed(2)
        fit = TraceBackpropQ_ELBO(1)(Host(one_plate), Host(one_plate_guide))
        fit(batches[0])
        return fit, fit.elbo

    def gradients(fit: nn.Module) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in fit.named_parameters() if p.grad is not None}

    with pyro.settings.context(module_local_params=True):
        (fit, elbo), (other, twin) = make(), make()
        pyro.set_rng_seed(3)
        for batch in batches:
            fit(batch).backward()
        pyro.set_rng_seed(3)
        total: dict[str, Tensor] = {}
        for batch in batches:
            other.zero_grad()
            other(batch).backward()
            total = {name: total.get(name, 0.0) + g for name, g in gradients(other).items()}
    assert total and elbo.num_steps == twin.num_steps == len(batches)
    for name, gradient in gradients(fit).items():
        torch.testing.assert_close(gradient, total[name])
