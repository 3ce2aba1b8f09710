"""The gradients of a step that goes back through the model once: the same as of one that does so twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from steps import repeat
from torch import Tensor, nn

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import DebiasedStraightThrough
from pyro_bpq.reruns import shared_backward

F64 = torch.float64
ROWS = 3
DATA = torch.tensor([[0.3, -1.2], [0.8, 0.1], [-0.4, 0.9]], dtype=F64)
MASK = torch.tensor([True, False, True])
Program = Callable[[], Any]


class Square(torch.autograd.Function):
    """Squares, and counts how often a backward pass comes by."""

    passes: ClassVar = Counter[str]()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> Tensor:
        Square.passes["backward"] += 1
        return 2.0 * ctx.saved_tensors[0] * outer


class Nets(nn.Module):
    """Parameters of guide and model, one that both read, and an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in {"q": (4,), "p": (4,), "w": (4, 2), "shared": (4,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=F64)))
        self.table = nn.Embedding(ROWS, 2, sparse=True, dtype=F64)

    def bits_guide(self) -> None:
        with pyro.plate("rows", ROWS):
            pyro.sample("z", dist.Bernoulli(logits=(self.q + self.shared).expand(ROWS, 4)).to_event(1))

    def bits_model(self) -> None:
        with pyro.plate("rows", ROWS):
            z = pyro.sample("z", dist.Bernoulli(logits=self.p.expand(ROWS, 4)).to_event(1))
            mean = Square.apply((z * self.shared) @ self.w) + self.table(torch.arange(ROWS))
            pyro.sample("x", dist.Normal(mean, 0.8).to_event(1), obs=DATA)

    def faces_guide(self) -> None:
        with pyro.plate("rows", ROWS), poutine.scale(scale=2.5):
            pyro.sample("z", dist.OneHotCategorical(logits=self.q.reshape(2, 2)).expand([ROWS, 2]).to_event(1))

    def faces_model(self) -> None:
        with pyro.plate("rows", ROWS), poutine.scale(scale=2.5), poutine.mask(mask=MASK):
            z = pyro.sample("z", dist.OneHotCategorical(logits=self.p.reshape(2, 2)).expand([ROWS, 2]).to_event(1))
            pyro.sample("x", dist.Normal(Square.apply(z.flatten(-2) @ self.w), 0.8).to_event(1), obs=DATA)

    def two_guide(self) -> None:
        with pyro.plate("rows", ROWS):
            pyro.sample("z", dist.Bernoulli(logits=self.q.expand(ROWS, 4)).to_event(1))
            pyro.sample("y", dist.Bernoulli(logits=self.w[:2, 0].expand(ROWS, 2)).to_event(1))
            pyro.sample("u", dist.Normal(self.q[:ROWS], 0.5))

    def two_model(self) -> None:
        with pyro.plate("rows", ROWS):
            y = pyro.sample("y", dist.Bernoulli(logits=torch.zeros(ROWS, 2, dtype=F64)).to_event(1))
            # The prior of one sloped site reads another.
            z = pyro.sample("z", dist.Bernoulli(logits=y @ self.w.T + self.p).to_event(1))
            u = pyro.sample("u", dist.Normal(z.sum(-1), 1.0))
            mean = Square.apply(z @ self.w) * u.unsqueeze(-1) + y
            pyro.sample("x", dist.Normal(mean, 0.8).to_event(1), obs=DATA)


PROGRAMS = ("bits", "faces", "two")


def programs(nets: Nets, name: str) -> tuple[Program, Program]:
    return getattr(nets, f"{name}_model"), getattr(nets, f"{name}_guide")


def gradients(name: str, take: Callable[[Any, Program, Program], object], **options: Any) -> Any:
    """Gradients of a step after some others, and how often it went back through the model."""
    pyro.set_rng_seed(0)
    nets = Nets()
    elbo = TraceBackpropQ_ELBO(**options)
    model, guide = programs(nets, name)
    repeat(3, elbo.loss_and_grads, model, guide)
    nets.zero_grad()
    before = Square.passes["backward"]
    assert elbo.runner.plans.last.plan.led_back
    take(elbo, model, guide)
    passes = Square.passes["backward"] - before
    return {n: None if p.grad is None else p.grad.to_dense() for n, p in nets.named_parameters()}, passes


def in_one(elbo: Any, model: Program, guide: Program) -> None:
    elbo.loss_and_grads(model, guide)


def in_two(elbo: Any, model: Program, guide: Program) -> None:
    elbo.differentiable_loss(model, guide).backward()


@pytest.mark.parametrize(("particles", "vectorized"), [(2, True), (2, False), (1, False)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_two_passes(name: str, vectorized: bool, particles: int) -> None:
    options = {
        "num_particles": particles,
        "vectorize_particles": vectorized,
        "max_plate_nesting": 1,
        "estimator": DebiasedStraightThrough(),
    }
    one, passes = gradients(name, in_one, **options)
    two, more = gradients(name, in_two, **options)
    runs = 1 if vectorized else particles
    assert (passes, more) == (runs, 2 * runs)
    assert {n for n, g in one.items() if g is not None} == {n for n, g in two.items() if g is not None}
    for n, gradient in one.items():
        assert gradient is None or (gradient.norm() > 0.0 and torch.allclose(gradient, two[n], rtol=1e-10, atol=1e-12))


def test_a_gradient_that_is_off_in_the_eighth_digit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerances above are for sums in another order, in float64."""
    forward = shared_backward._Known.forward

    def wrong(ctx: Any, value: Tensor, gradients: Any, weight: float, *inputs: Tensor) -> Tensor:
        return forward(ctx, value, gradients, weight * (1.0 + 1e-8), *inputs)

    monkeypatch.setattr(shared_backward._Known, "forward", staticmethod(wrong))
    with pytest.raises(AssertionError):
        test_gradients_are_those_of_two_passes("bits", True, 2)


SLOPED: dict[str, Any] = {
    "num_particles": 2,
    "vectorize_particles": True,
    "max_plate_nesting": 1,
    "estimator": DebiasedStraightThrough(),
}


def test_gradients_are_added_to_those_that_are_there() -> None:
    once, _ = gradients("bits", in_one, **SLOPED)

    def twice(elbo: Any, model: Program, guide: Program) -> None:
        for p in model.__self__.parameters():  # type: ignore[attr-defined]
            p.grad = torch.ones_like(p)
        elbo.loss_and_grads(model, guide)

    added, _ = gradients("bits", twice, **SLOPED)
    for name, gradient in added.items():
        assert torch.allclose(gradient, 1.0 + once[name], rtol=1e-10, atol=1e-12)


def test_hooks_of_parameters_are_called_once_with_the_whole_gradient() -> None:
    seen: list[Tensor] = []

    def hooked(elbo: Any, model: Program, guide: Program) -> None:
        handle = model.__self__.shared.register_hook(lambda g: seen.append(g.clone()) or 0.5 * g)  # type: ignore
        elbo.loss_and_grads(model, guide)
        handle.remove()

    plain, _ = gradients("bits", in_one, **SLOPED)
    halved, _ = gradients("bits", hooked, **SLOPED)
    assert len(seen) == 1
    assert torch.allclose(seen[0], plain["shared"]) and torch.allclose(halved["shared"], 0.5 * plain["shared"])
    assert torch.allclose(halved["w"], plain["w"])


def test_hooks_within_the_model_see_the_gradients_of_the_loss() -> None:
    """Once; a hook that is not linear, such as a clamp, does to the parameters what it does in a plain step."""
    seen: list[Tensor] = []

    def clamped(take: Callable[[Any, Program, Program], None]) -> Callable[[Any, Program, Program], None]:
        def taken(elbo: Any, model: Program, guide: Program) -> None:
            table = model.__self__.table  # type: ignore[attr-defined]

            def clamp(gradient: Tensor) -> Tensor:
                seen.append(gradient)
                return gradient.clamp(-0.1, 0.1)

            def hook(module: nn.Module, given: Any, out: Tensor) -> None:
                if out.requires_grad:
                    out.register_hook(clamp)

            handle = table.register_forward_hook(hook)
            take(elbo, model, guide)
            handle.remove()

        return taken

    one, _ = gradients("bits", clamped(in_one), **SLOPED)
    assert len(seen) == 1
    two, _ = gradients("bits", clamped(in_two), **SLOPED)
    assert torch.allclose(seen[0], seen[-1]) and seen[0].abs().max() > 0.1
    assert torch.allclose(one["table.weight"], two["table.weight"]) and one["table.weight"].abs().max() == 0.1


@pytest.mark.parametrize("options", [{"retain_graph": True}, {"analytic_kl": True}], ids=str)
def test_two_passes_where_one_would_not_do(options: dict[str, Any]) -> None:
    plain, _ = gradients("bits", in_one, **SLOPED)
    other, passes = gradients("bits", in_one, **SLOPED, **options)
    assert passes == 2
    assert all(torch.allclose(gradient, plain[name]) for name, gradient in other.items())


def test_a_graph_from_outside_of_the_programs_is_kept() -> None:
    """Features with a graph of their own are read by guide and model."""
    features = nn.Parameter(torch.randn(4, dtype=F64))
    found = []
    for take in (in_one, in_two):
        pyro.set_rng_seed(0)
        nets, elbo = Nets(), TraceBackpropQ_ELBO(**SLOPED)
        for step in range(4):
            features.grad = None
            outside = features.exp()

            def guide(outside: Tensor = outside) -> None:
                with pyro.plate("rows", ROWS):
                    pyro.sample("z", dist.Bernoulli(logits=outside.expand(ROWS, 4)).to_event(1))

            def model(outside: Tensor = outside, nets: Nets = nets) -> None:
                with pyro.plate("rows", ROWS):
                    z = pyro.sample("z", dist.Bernoulli(logits=nets.p.expand(ROWS, 4)).to_event(1))
                    pyro.sample("x", dist.Normal((z * outside) @ nets.w, 0.8).to_event(1), obs=DATA)

            (take if step == 3 else in_one)(elbo, model, guide)
        found.append(features.grad)
    assert torch.allclose(*found, rtol=1e-10)
