"""Slopes at the sampled values: those of the step's own run, the same as another run finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from steps import fresh, limited, stepped
from torch import Tensor, nn

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.estimators import DebiasedStraightThrough
from pyro_bpq.reruns.at_values import SiteProgramRuns

F64 = torch.float64
ROWS = 3
DATA = torch.tensor([[0.3, -1.2], [0.8, 0.1], [-0.4, 0.9]], dtype=F64)
MASK = torch.tensor([True, False, True])
TOGETHER: dict[str, Any] = {"vectorize_particles": True, "max_plate_nesting": 1}
Program = Callable[[], Any]


def programs(kind: str, data: Tensor = DATA) -> tuple[Program, Program]:
    """Model and guide: sites of bits or of faces, scaled or masked, or with a reparameterised site below."""

    def run(side: str) -> None:
        logits = pyro.param(side)
        scale = 2.5 if kind == "faces" else data.sum().item() if kind == "number" else 1.0
        mask = MASK if kind == "masked" else True
        with pyro.plate("rows", ROWS), poutine.scale(scale=scale), poutine.mask(mask=mask):
            if kind == "faces":
                z = pyro.sample("z", dist.OneHotCategorical(logits=logits.reshape(2, 2)).expand([ROWS, 2]).to_event(1))
                z = z.flatten(-2)
            else:
                z = pyro.sample("z", dist.Bernoulli(logits=logits.expand(ROWS, 4)).to_event(1))
            mean = (z @ pyro.param("w")).square()
            if kind == "mixed":
                u = pyro.sample("u", dist.Normal(*((z.sum(-1), 1.0) if side == "p" else (logits[:ROWS], 0.5))))
                mean = (z @ pyro.param("w")) * u.unsqueeze(-1)
            if side == "p":
                pyro.sample("x", dist.Normal(mean, 0.8).to_event(1), obs=data)

    return (lambda: run("p")), (lambda: run("q"))


bits_model, bits_guide = programs("bits")


def straight_through(particles: int | None, **options: Any) -> TraceBackpropQ_ELBO:
    return TraceBackpropQ_ELBO(particles, estimator=DebiasedStraightThrough(), **options)


def set_params() -> None:
    fresh()
    for name, shape in {"q": (4,), "p": (4,), "w": (4, 2)}.items():
        pyro.param(name, torch.randn(shape, dtype=F64))


params = pytest.fixture(autouse=True)(set_params)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Slopes that the estimator is given, and those of a run of their own."""
    slope, found = SiteProgramRuns.slope, []

    def both(self: SiteProgramRuns) -> Tensor:
        found.append((slope(self), self.gradient(self.value)[1]))
        return found[-1][0]

    monkeypatch.setattr(SiteProgramRuns, "slope", both)
    return found


@pytest.mark.parametrize("vectorized", [False, True])
@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("kind", ["bits", "faces", "masked", "mixed", "number"])
def test_slopes_are_those_of_a_run_of_their_own(kind: str, particles: int, vectorized: bool, compared: Any) -> None:
    """The operators are written down once; the values, parameters and data that they read are those of each step."""
    data = DATA.clone()
    elbo = straight_through(particles, **(TOGETHER if vectorized else {}))
    for _ in range(8):
        stepped(1, elbo, *programs(kind, data))
        with torch.no_grad():
            pyro.param("w").mul_(1.1)
            if kind != "bits":
                data.add_(0.2)
    assert len(compared) == 8 == len({float(own.sum()) for own, _ in compared})
    for own, other in compared:
        assert own.shape == other.shape and own.abs().max() > 0.1
        torch.testing.assert_close(own, other)


def test_slopes_take_no_run() -> None:
    # Of a list the length would be seen, and looked at.
    calls = Counter[str]()

    def counted() -> None:
        calls["model"] += 1
        bits_model()

    elbo = stepped(3, straight_through(2, **TOGETHER), counted, bits_guide)
    before = calls["model"]
    stepped(1, elbo, counted, bits_guide)
    assert calls["model"] == before + 1


# Programs that torch refuses when values carry gradients.


def same(value: Tensor) -> Tensor:
    return value


def decoded(read: Callable[[Tensor], Tensor] = same, watch: Callable[[Tensor], Tensor] = same) -> Program:
    """A model that looks at the values, and at what it has decoded."""

    def model() -> None:
        with pyro.plate("rows", ROWS):
            z = pyro.sample("z", dist.Bernoulli(logits=torch.zeros(ROWS, 4, dtype=F64)).to_event(1))
            pyro.sample("x", dist.Normal(watch(read(z) @ pyro.param("w")), 0.8).to_event(1), obs=DATA)

    return model


def estimator_after(model: Program, steps: int) -> str:
    # A sum over all values would be too large.
    elbo = stepped(steps, limited(1, num_particles=1), model, bits_guide)
    return type(elbo.info["z"]["estimator"]).__name__


def overwritten(z: Tensor) -> Tensor:
    """The square's backward pass needs what this overwrites."""
    squares = z.square()
    z.zero_()
    return squares


def test_the_default_asks_for_slopes_where_it_can() -> None:
    assert estimator_after(decoded(), 5) == "DebiasedStraightThrough"
    assert estimator_after(decoded(overwritten), 5) == "DisARM"


class Usage(nn.Module):
    """A decoder that counts in a buffer how its inputs are used."""

    usage: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("usage", torch.zeros(4, dtype=F64))

    def forward(self, z: Tensor) -> Tensor:
        self.usage.mul_(0.9).add_(0.1 * z.reshape(-1, 4).mean(0))
        return z


def test_buffers_keep_no_graph() -> None:
    net, elbo = Usage(), limited(1, num_particles=1)
    model = decoded(net)
    for _ in range(8):
        elbo.loss_and_grads(model, bits_guide)
        assert not net.usage.requires_grad and net.usage.grad_fn is None
    assert isinstance(elbo.info["z"]["estimator"], DebiasedStraightThrough)
    assert net.usage.abs().max() > 0.0


def test_slopes_that_cannot_be_had_are_zero_with_a_warning() -> None:
    with pytest.warns(BPQWarning, match="taken for zero"):
        straight_through(2, **TOGETHER).loss_and_grads(decoded(overwritten), bits_guide)


def test_slopes_are_had_of_a_program_that_refuses_gradients() -> None:
    def read(z: Tensor) -> Tensor:
        if z.requires_grad:
            raise RuntimeError("no gradients here")
        return z

    found = []
    for program in (decoded(read), decoded()):
        set_params()
        stepped(1, straight_through(None), program, bits_guide)
        found.append(pyro.param("q").grad.clone())
    torch.testing.assert_close(*found)


def test_hooks_within_the_program_see_the_gradient_of_the_loss_once() -> None:
    seen: list[Tensor] = []

    def hooked(mean: Tensor) -> Tensor:
        if mean.requires_grad:
            mean.register_hook(lambda gradient: seen.append(gradient) or gradient.clamp(-0.1, 0.1))
        return mean

    model = decoded(watch=hooked)
    elbo = stepped(3, straight_through(2, **TOGETHER), model, bits_guide)
    seen.clear()
    elbo.loss_and_grads(model, bits_guide)
    assert len(seen) == 1 and float(seen[0].abs().max()) > 0.1
