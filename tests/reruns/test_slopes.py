"""Slopes at the sampled values: those of the step's own run, the same as another run finds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from steps import fresh, repeat, stepped
from torch import Tensor, nn

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.estimators import DebiasedStraightThrough
from pyro_bpq.step.site_program import SiteProgramRuns

F64 = torch.float64
ROWS = 3
DATA = torch.tensor([[0.3, -1.2], [0.8, 0.1], [-0.4, 0.9]], dtype=F64)
MASK = torch.tensor([True, False, True])
Program = Callable[[], Any]


def bits_guide() -> None:
    with pyro.plate("rows", ROWS):
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q").expand(ROWS, 4)).to_event(1))


def bits_model() -> None:
    with pyro.plate("rows", ROWS):
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("p").expand(ROWS, 4)).to_event(1))
        pyro.sample("x", dist.Normal((z @ pyro.param("w")).square(), 0.8).to_event(1), obs=DATA)


def faces_guide() -> None:
    logits = pyro.param("q").reshape(2, 2)
    with pyro.plate("rows", ROWS), poutine.scale(scale=2.5):
        pyro.sample("z", dist.OneHotCategorical(logits=logits).expand([ROWS, 2]).to_event(1))


def faces_model() -> None:
    logits = pyro.param("p").reshape(2, 2)
    with pyro.plate("rows", ROWS), poutine.scale(scale=2.5):
        z = pyro.sample("z", dist.OneHotCategorical(logits=logits).expand([ROWS, 2]).to_event(1))
        pyro.sample("x", dist.Normal((z.flatten(-2) @ pyro.param("w")).square(), 0.8).to_event(1), obs=DATA)


def masked_guide() -> None:
    with poutine.mask(mask=MASK):
        bits_guide()


def masked_model() -> None:
    with poutine.mask(mask=MASK):
        bits_model()


def mixed_guide() -> None:
    with pyro.plate("rows", ROWS):
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q").expand(ROWS, 4)).to_event(1))
        pyro.sample("u", dist.Normal(pyro.param("q")[:ROWS], 0.5))


def mixed_model() -> None:
    with pyro.plate("rows", ROWS):
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("p").expand(ROWS, 4)).to_event(1))
        u = pyro.sample("u", dist.Normal(z.sum(-1), 1.0))
        pyro.sample("x", dist.Normal((z @ pyro.param("w")) * u.unsqueeze(-1), 0.8).to_event(1), obs=DATA)


PROGRAMS: dict[str, tuple[Program, Program]] = {
    "bits": (bits_model, bits_guide),
    "faces": (faces_model, faces_guide),
    "masked": (masked_model, masked_guide),
    "mixed": (mixed_model, mixed_guide),
}


def set_params() -> None:
    fresh()
    for name, shape in {"q": (4,), "p": (4,), "w": (4, 2)}.items():
        pyro.param(name, torch.randn(shape, dtype=F64))


@pytest.fixture(autouse=True)
def params() -> None:
    set_params()


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
@pytest.mark.parametrize("name", PROGRAMS)
def test_slopes_are_those_of_a_run_of_their_own(name: str, particles: int, vectorized: bool, compared: Any) -> None:
    options = {"vectorize_particles": True, "max_plate_nesting": 1} if vectorized else {}
    stepped(8, TraceBackpropQ_ELBO(particles, estimator=DebiasedStraightThrough(), **options), *PROGRAMS[name])
    assert len(compared) == 8
    for own, other in compared:
        assert own.shape == other.shape and own.abs().max() > 0.1
        torch.testing.assert_close(own, other)


def runs_of_a_step(estimator: Any, particles: int, model: Program = bits_model, guide: Program = bits_guide) -> int:
    """Calls of the model in a step, when the structure is known."""
    # Of a list the length would be seen, and looked at.
    calls = Counter[str]()

    def counted() -> None:
        calls["model"] += 1
        model()

    elbo = TraceBackpropQ_ELBO(particles, estimator=estimator, vectorize_particles=True, max_plate_nesting=1)
    repeat(3, elbo.loss_and_grads, counted, guide)
    before = calls["model"]
    elbo.loss_and_grads(counted, guide)
    return calls["model"] - before


def test_slopes_take_no_run() -> None:
    assert runs_of_a_step(DebiasedStraightThrough(), 2) == 1


# Programs that torch refuses when values carry gradients.


def rows_guide() -> None:
    with pyro.plate("rows", 12):
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q").expand(12, 4)).to_event(1))


def default_elbo() -> TraceBackpropQ_ELBO:
    """One whose plan for :func:`rows_guide` and a smooth decoder too large to sum over asks for slopes."""
    elbo = TraceBackpropQ_ELBO(1)
    elbo.planner = replace(elbo.planner, max_elements=1)
    return elbo


def decoded(z: Tensor) -> None:
    pyro.sample("x", dist.Normal(z @ pyro.param("w"), 0.8).to_event(1), obs=torch.zeros(12, 2, dtype=F64))


def prior() -> dist.Distribution:
    return dist.Bernoulli(logits=torch.zeros(12, 4, dtype=F64)).to_event(1)


def estimator_after(model: Program, steps: int) -> str:
    elbo = stepped(steps, default_elbo(), model, rows_guide)
    return type(elbo.info["z"]["estimator"]).__name__


def rows_model() -> None:
    with pyro.plate("rows", 12):
        decoded(pyro.sample("z", prior()))


def test_the_default_asks_for_slopes_where_it_can() -> None:
    assert estimator_after(rows_model, 5) == "DebiasedStraightThrough"


def overwritten() -> None:
    with pyro.plate("rows", 12):
        z = pyro.sample("z", prior())
        squares = z.square()
        decoded(squares)
        # The square's backward pass needs what this overwrites.
        z.zero_()


def test_the_default_does_without_slopes_where_the_program_cannot_run_with_them() -> None:
    assert estimator_after(overwritten, 5) == "DisARM"


def test_values_carry_no_gradients() -> None:
    # Nobody sees it count, so that the step is not recorded.
    calls = itertools.count()

    def model() -> None:
        with pyro.plate("rows", 12):
            z = pyro.sample("z", prior())
            if next(calls) > 20:
                z.numpy()
            decoded(z)

    assert estimator_after(model, 22) == "DebiasedStraightThrough"


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
    net = Usage()

    def model() -> None:
        with pyro.plate("rows", 12):
            decoded(net(pyro.sample("z", prior())))

    elbo = default_elbo()
    for _ in range(8):
        elbo.loss_and_grads(model, rows_guide)
        assert not net.usage.requires_grad and net.usage.grad_fn is None
    assert isinstance(elbo.info["z"]["estimator"], DebiasedStraightThrough)
    assert net.usage.abs().max() > 0.0


def test_slopes_that_cannot_be_had_are_zero_with_a_warning() -> None:
    elbo = TraceBackpropQ_ELBO(2, estimator=DebiasedStraightThrough(), vectorize_particles=True, max_plate_nesting=1)
    with pytest.warns(BPQWarning, match="taken for zero"):
        elbo.loss_and_grads(overwritten, rows_guide)


def test_slopes_are_had_of_a_program_that_refuses_gradients() -> None:
    def model() -> None:
        with pyro.plate("rows", 12):
            z = pyro.sample("z", prior())
            if z.requires_grad:
                raise RuntimeError("no gradients here")
            decoded(z)

    found = []
    for program in (model, rows_model):
        set_params()
        elbo = TraceBackpropQ_ELBO(estimator=DebiasedStraightThrough())
        elbo.loss_and_grads(program, rows_guide)
        found.append(pyro.param("q").grad.clone())
    torch.testing.assert_close(*found)


def test_hooks_within_the_program_see_the_gradient_of_the_loss_once() -> None:
    seen: list[Tensor] = []

    def model() -> None:
        with pyro.plate("rows", ROWS):
            z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("p").expand(ROWS, 4)).to_event(1))
            mean = z @ pyro.param("w")
            if mean.requires_grad:
                mean.register_hook(lambda gradient: seen.append(gradient) or gradient.clamp(-0.1, 0.1))
            pyro.sample("x", dist.Normal(mean, 0.8).to_event(1), obs=DATA)

    elbo = TraceBackpropQ_ELBO(2, estimator=DebiasedStraightThrough(), vectorize_particles=True, max_plate_nesting=1)
    repeat(3, elbo.loss_and_grads, model, bits_guide)
    seen.clear()
    elbo.loss_and_grads(model, bits_guide)
    assert len(seen) == 1 and float(seen[0].abs().max()) > 0.1


@pytest.mark.parametrize("changes", ["nothing", "noise", "number"])
def test_slopes_are_those_at_the_values_and_parameters_of_the_step(changes: str, compared: Any) -> None:
    """The operators are written down once; what they read is that of each step."""
    data = DATA.clone()

    def model() -> None:
        with pyro.plate("rows", ROWS), poutine.scale(scale=data.sum().item() if changes == "number" else 1.0):
            z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("p").expand(ROWS, 4)).to_event(1))
            pyro.sample("x", dist.Normal((z @ pyro.param("w")).square(), 0.8).to_event(1), obs=data)

    elbo = TraceBackpropQ_ELBO(1, estimator=DebiasedStraightThrough())
    for _ in range(6):
        elbo.loss_and_grads(model, bits_guide)
        with torch.no_grad():
            pyro.param("w").mul_(1.3)
            if changes != "nothing":
                data.add_(0.2)
    assert len(compared) == 6 and len({float(own.sum()) for own, _ in compared}) == 6
    for own, other in compared:
        torch.testing.assert_close(own, other)
