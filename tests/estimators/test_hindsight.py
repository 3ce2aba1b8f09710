"""Hindsight: exact over all values and all draws of components, what it says of other values, and what is won."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, CASES
from pyro import poutine
from torch import Tensor

from pyro_bpq import ExpectedCost, LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO, cost
from pyro_bpq.errors import OptionError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.estimators import Hindsight, StraightThrough
from pyro_bpq.estimators import hindsight as estimator_module
from pyro_bpq.reruns import linear_reads
from pyro_bpq.step import hindsight_signal as module
from pyro_bpq.testing import (
    ChoiceNoise,
    assert_unbiased,
    exact_gradient,
    expected_gradient,
    expected_moments,
    sample_gradients,
)

Program = tuple[Callable[[], None], Callable[[], None]]
VECTORISED = {"vectorize_particles": True, "max_plate_nesting": 1}
# Those that Python control flow steers are refused; values of reparameterised sites are not enumerated.
SERVED = [case for case in CASES if case.is_static and not case.has_reparameterised]
QUICK = ("chain", "diamond", "plate", "onehot", "mask_scale", "component_chain")


def real(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def trained(program: Program, particles: int, steps: int = 5, **options: Any) -> TraceBackpropQ_ELBO:
    elbo = TraceBackpropQ_ELBO(particles, **{"estimator": Hindsight(), **options})
    for _ in range(steps):
        elbo.loss_and_grads(*program)
    return elbo.eval()


# One component, all values.


def cases() -> Iterator[Any]:
    for case in SERVED:
        for particles in (1, 2):
            if particles == 1 or case.num_states <= 8:
                is_quick = particles == 1 and case.name in QUICK
                marks = () if is_quick else (pytest.mark.slow,)
                yield pytest.param(case, particles, id=f"{case.name}-{particles}", marks=marks)


@pytest.mark.parametrize(("case", "particles"), list(cases()))
def test_expected_gradient_is_exact(case: Any, particles: int) -> None:
    case.params()
    elbo = TraceBackpropQ_ELBO(particles, estimator=Hindsight())
    for _ in range(5):
        elbo.loss_and_grads(case.model, case.guide, *case.args)
    assert_unbiased(elbo.eval(), case.model, case.guide, *case.args)


def chain(scale: float = 1.0) -> Program:
    """Three sites of two, three and two values; the first is read by all, the second is scaled and masked."""

    def table(name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        return pyro.param(name, 1.2 * torch.sin(1.7 * torch.arange(size) + len(name)).double().reshape(shape))

    def run(kind: str) -> None:
        a = pyro.sample("a", dist.Bernoulli(logits=table(f"{kind}a"))).long()
        with poutine.scale(scale=0.5), poutine.mask(mask=scale > 0.0):
            b = pyro.sample("b", dist.Categorical(logits=scale * table(f"{kind}bb", 2, 3)[a]))
        c = pyro.sample("c", dist.OneHotCategorical(logits=table(f"{kind}ccc", 3, 2)[b]))
        if kind == "p":
            pyro.sample("x", dist.Normal(a + c[..., 0] * table("mean", 3)[b], 0.7), obs=real(0.4)[0])

    return (lambda: run("p")), (lambda: run("q"))


def largest_error(elbo: TraceBackpropQ_ELBO, program: Program, noise: ChoiceNoise | None = None) -> float:
    truth = exact_gradient(*program)
    found = expected_gradient(elbo, *program, noise=noise)
    return max(float((found[key] - truth[key]).abs().max()) for key in truth)


@pytest.mark.parametrize("particles", [1, 2])
@pytest.mark.parametrize("scale", [1.3, 0.0], ids=["scaled", "masked"])
def test_scaled_and_masked_chain_is_exact(scale: float, particles: int) -> None:
    pyro.clear_param_store()
    program = chain(scale)
    assert largest_error(trained(program, particles, vectorize_particles=True, max_plate_nesting=0), program) < 1e-10


def test_a_wrong_weight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    weighted = estimator_module._weighted
    monkeypatch.setattr(
        estimator_module, "_weighted", lambda log_q, law, changes: weighted(log_q, 1.01 * law, changes)
    )
    pyro.clear_param_store()
    program = chain()
    assert largest_error(trained(program, 1), program) > 1e-5


def test_own_particle_in_the_baseline_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimator_module, "leave_one_out", lambda cost: cost - cost.mean(1, keepdim=True))
    pyro.clear_param_store()
    program = chain()
    assert largest_error(trained(program, 2, vectorize_particles=True, max_plate_nesting=0), program) > 1e-5


def test_weights_are_the_law_given_the_children() -> None:
    pyro.clear_param_store()
    program, seen = chain(), []

    class Seen(Hindsight):
        def __call__(self, context: Any) -> Any:
            seen.append((context.names, context.log_probs.detach(), context.index, context.signals["hindsight"]))
            return super().__call__(context)

    trained(program, 1, steps=1, estimator=Seen())
    q = pyro.param("qbb").detach().log_softmax(-1)
    values = {name: int(index[i]) for names, _, index, _ in seen for i, name in enumerate(names)}
    (own, held) = next((log_q, held) for names, log_q, _, held in seen if names == ("a",))
    b = values["b"]
    expected = (pyro.param("qa").detach() * real(0.0, 1.0) + 1.3 * 0.0 + q[:, b]).softmax(-1)
    torch.testing.assert_close((own + held.law).softmax(-1).flatten(), expected)


# Many components, some of which are drawn.


def layers(kind: str, is_smooth: bool = True, is_masked: bool = False) -> Program:
    """Two layers above data that reads both, with a factor that reads the lower one alone; in a plate of one row."""
    values = 3 if kind != "bits" else 2

    def table(name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        return pyro.param(name, 1.1 * torch.sin(1.3 * torch.arange(size) + 2.3 * len(name)).double().reshape(shape))

    def draw(name: str, logits: Tensor) -> Tensor:
        if kind == "bits" or name == "top":
            return pyro.sample(name, dist.Bernoulli(logits=logits[..., 0]).to_event(1))
        if kind == "hot":
            return pyro.sample(name, dist.OneHotCategorical(logits=logits).to_event(1)).flatten(-2)
        found = pyro.sample(name, dist.Categorical(logits=logits).to_event(1))
        return torch.nn.functional.one_hot(found, values).to(logits.dtype).flatten(-2)

    width = 2 if kind == "bits" else 2 * values

    def guide() -> None:
        with pyro.plate("rows", 1), poutine.scale(scale=2.0):
            low = draw("low", table("qlow", 2, values).expand(1, 2, values))
            with poutine.mask(mask=not is_masked):
                draw("top", torch.nn.functional.linear(2.0 * low - 1.0, table("w", 2, width), table("b", 2)).unsqueeze(-1))

    def model() -> None:
        with pyro.plate("rows", 1), poutine.scale(scale=2.0):
            with poutine.mask(mask=not is_masked):
                top = draw("top", table("ptop", 2, 1).expand(1, 2, 1))
            logits = (top @ table("pw", 2, 2 * values)).reshape(1, 2, values)
            low = draw("low", logits)
            both = torch.cat((low, top), -1)
            mean = torch.nn.functional.linear(both if is_smooth else torch.tanh(both), table("v", 3, width + 2))
            pyro.sample("x", dist.Bernoulli(logits=mean).to_event(1), obs=real(1.0, 0.0, 1.0).expand(1, 3))
            pyro.factor("low only", (low - 0.3).square().sum(-1).sin())

    return model, guide


def with_choices(monkeypatch: pytest.MonkeyPatch) -> ChoiceNoise:
    """Lets the drawn components be enumerated; random signs are all one."""
    noise = ChoiceNoise()

    def draw(chance: Tensor, number: int, generator: Any) -> Tensor:
        return torch.stack([noise.draw_choice(chance) for _ in range(number)], -1)

    monkeypatch.setattr(module, "_draw", draw)
    monkeypatch.setattr(linear_reads, "_signs", lambda like, generator: torch.ones_like(like))
    return noise


LAYERS = {
    "bits": layers("bits"),
    "nonlinear": layers("bits", is_smooth=False),
    "masked": layers("bits", is_masked=True),
    "hot": layers("hot"),
    "dice": layers("dice"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_drawn_components_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = LAYERS[name]
    pyro.clear_param_store()
    elbo = trained(program, 1, steps=3, estimator=Hindsight(draws=1))
    noise = with_choices(monkeypatch)
    assert largest_error(elbo, program, noise) < 1e-10


def test_a_correction_that_is_too_small_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    program = LAYERS["bits"]
    pyro.clear_param_store()
    elbo = trained(program, 1, steps=3, estimator=Hindsight(draws=1))
    noise = with_choices(monkeypatch)
    drawn = module._drawn
    monkeypatch.setattr(module, "_drawn", lambda *arguments: (drawn(*arguments)[0], 0.9 * drawn(*arguments)[1]))
    assert largest_error(elbo, program, noise) > 1e-6
