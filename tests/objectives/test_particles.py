"""The number of particles that nobody chose: how many, when, and for which programs."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoHierarchicalNormalMessenger, AutoNormalMessenger
from pyro.optim import Adam
from steps import dear, filtered, fresh, from_seed, limited, repeat, stepped, trained

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning, TooManyOutcomesError
from pyro_bpq.plan import plan as particles
from pyro_bpq.plan import rules
from pyro_bpq.plan.rules import ELEMENTS, FEW_PARTICLES, MANY_SITES, SOME_PARTICLES
from pyro_bpq.rollout.runs import Particles
from pyro_bpq.testing import expected_gradient

ROWS = 12


# Reads of rows that meet those of other particles, though the rows of one particle on its own stay apart.
MIXES: dict[str, Any] = {
    "no": lambda z: z,
    "mean": lambda z: z - z.mean(0) if z.dim() > 2 else z,
    "first": lambda z: z + z[0] if z.dim() > 2 else z,
    "shape": lambda z: z.reshape(ROWS, 3),
    # A large cost hides it in single precision.
    "number": lambda z: 1e6 + z * ROWS / z.numel(),
    # Python looks at a value.
    "steers": lambda z: z + float(z.sum().item() > 10.0),
}


class Layers:
    """Two layers of three units over rows of data.

    Args:
        rows: Number of rows.
        width: Elements of a row's data.
        mixes: What the data read of the lower layer, of ``MIXES``.
    """

    def __init__(self, rows: int = ROWS, width: int = 4, mixes: str = "no") -> None:
        self.rows, self.mixed = rows, MIXES[mixes]
        self.data = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))

    def model(self) -> None:
        with pyro.plate("rows", self.rows):
            y = pyro.sample("y", dist.Bernoulli(logits=torch.zeros(3)).to_event(1))
            z = pyro.sample("z", dist.Bernoulli(logits=y - 0.5).to_event(1))
            mean = self.mixed(z).sum(-1, keepdim=True).expand(z.shape[:-1] + self.data.shape[-1:])
            pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=self.data)

    def guide(self) -> None:
        w = pyro.param("w", lambda: 0.1 * torch.ones(2, 3))
        with pyro.plate("rows", self.rows):
            z = pyro.sample("z", dist.Bernoulli(logits=w[0] * self.data[:, :1]).to_event(1))
            pyro.sample("y", dist.Bernoulli(logits=w[1] + z).to_event(1))


class Chain:
    """States, each conditioned on the one before, with an observation each.

    Args:
        rows: Number of rows of data, in a plate; 0 for one row and no plate.
        length: Number of states.
        size: Components of a state; 0 for a scalar.
    """

    def __init__(self, rows: int = ROWS, length: int = 3, size: int = 0) -> None:
        self.rows, self.size = rows, size
        self.data = torch.randn((length, rows)[: 2 if rows else 1], generator=torch.Generator().manual_seed(1))

    def states(self, logit: torch.Tensor, is_observed: bool) -> None:
        state: Any = 0.0
        with pyro.plate("rows", self.rows) if self.rows else contextlib.nullcontext():
            for t, own in enumerate(self.data):
                logits = logit + state + torch.zeros_like(own)
                if self.size:
                    parts = logits.unsqueeze(-1) + torch.zeros(self.size)
                    state = pyro.sample(f"z_{t}", dist.Bernoulli(logits=parts).to_event(1)).sum(-1)
                else:
                    state = pyro.sample(f"z_{t}", dist.Bernoulli(logits=logits))
                if is_observed:
                    pyro.sample(f"x_{t}", dist.Normal(state, 1.0), obs=own)

    def model(self) -> None:
        self.states(torch.tensor(-0.4), True)

    def guide(self) -> None:
        self.states(pyro.param("w", torch.tensor(0.5)), False)


def train(programs: Any, steps: int = 4, **options: Any) -> TraceBackpropQ_ELBO:
    return trained(TraceBackpropQ_ELBO(**options), programs.model, programs.guide, steps=steps)


def losses(elbo: Any, programs: Any, steps: int = 5) -> list[float]:
    return from_seed(3, repeat, steps, elbo.loss_and_grads, programs.model, programs.guide)


@pytest.fixture(autouse=True)
def some(monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs are small enough for some particles; how many more they are good for depends on each."""
    monkeypatch.setattr(rules, "MOST_PARTICLES", SOME_PARTICLES)


@pytest.mark.parametrize(
    "programs",
    [Layers(), Chain(), Layers(rows=4), Chain(4), Chain(0), Chain(0, 1, 3)],
    ids=["layers", "chain", "few rows of layers", "few rows", "no plate", "one vector"],
)
def test_small_programs_get_the_most_particles(programs: Any) -> None:
    elbo = train(programs)
    assert (elbo.num_particles, elbo.vectorize_particles) == (SOME_PARTICLES, True)
    assert all("LeaveOneOut" in str(known["estimator"]) for known in elbo.info.values())


LEAST: list[tuple[Any, float]] = [(Chain(), 2), (Chain(4), FEW_PARTICLES), (Chain(0), FEW_PARTICLES)]
NEVER: list[tuple[Any, float]] = [(Chain(0, 1), float("inf")), (dear(Chain()), float("inf"))]


@pytest.mark.parametrize("number", [2, FEW_PARTICLES - 1, FEW_PARTICLES])
@pytest.mark.parametrize(("programs", "least"), [*LEAST, *NEVER])
def test_a_number_that_was_chosen_serves_alike(programs: Any, least: float, number: int) -> None:
    """Rows of data are compared, and few sites by four particles; where costs may be dear, sites keep critics."""
    elbo = train(programs, num_particles=number)
    assert elbo.num_particles == number
    assert all(("AllAction" in str(known["estimator"])) is (number < least) for known in elbo.info.values())


@pytest.mark.parametrize("width", [1000, 2000, 20_000])
def test_large_values_get_fewer(width: int) -> None:
    """Each particle takes longer than what all of them share; also where earlier batches were small."""
    programs = Layers()
    elbo = train(programs)
    assert elbo.num_particles == SOME_PARTICLES
    programs.data = Layers(width=width).data
    repeat(2, elbo.loss_and_grads, programs.model, programs.guide)
    assert elbo.num_particles == max(2, min(FEW_PARTICLES, ELEMENTS // (ROWS * width)))


ONE: dict[str, tuple[Any, dict[str, Any]]] = {
    "told": (Layers(), {"num_particles": 1}),
    "dynamic": (Layers(), {"structure": "dynamic"}),
    "few rows": (Layers(rows=4), {"num_particles": 1}),
    "no plate": (Chain(0), {"num_particles": 1}),
    "one site": (Chain(0, 1), {}),
    "all known": (Chain(length=1), {}),
    "steered": (Layers(mixes="steers"), {}),
    "a cost that leaves torch": (dear(Layers()), {}),
}


@pytest.mark.parametrize("name", ONE)
@pytest.mark.filterwarnings("ignore:Values of 'z', drawn in the plate 'rows', leave torch")
def test_others_keep_one(name: str) -> None:
    programs, options = ONE[name]
    elbo = train(programs, **options)
    assert (elbo.num_particles, elbo.vectorize_particles) == (1, False)


@pytest.mark.parametrize("programs", [Layers(), Chain()], ids=["layers", "chains"])
@pytest.mark.parametrize("nesting", [float("inf"), 2])
def test_it_draws_as_pyro_does_with_that_number(programs: Any, nesting: float) -> None:
    found = losses(TraceBackpropQ_ELBO(max_plate_nesting=nesting), programs)
    pyro.clear_param_store()
    together = Trace_ELBO(SOME_PARTICLES, vectorize_particles=True, max_plate_nesting=1 if nesting > 2 else 2)
    torch.testing.assert_close(found, losses(together, programs))


@pytest.mark.parametrize("number", [MANY_SITES - 1, MANY_SITES])
@pytest.mark.parametrize("particles", [None, 1])
def test_many_sites_get_the_most_particles_and_keep_critics(number: int, particles: int | None) -> None:
    elbo = train(Chain(0, number), num_particles=particles)
    assert elbo.num_particles == (particles or SOME_PARTICLES)
    assert elbo.plan is not None and len(elbo.plan.noisy) == number
    # Few sites have critics only if one particle runs.
    has_critic = elbo.plan.layout.specs["z_0"].critic is not None
    assert has_critic == (particles == 1 or number >= MANY_SITES) and not elbo.particles.now.is_hidden


def test_evaluation_takes_the_number_of_its_programs_where_it_is_known() -> None:
    """Its programs may be others than those that the number was settled for: they run once."""
    programs, other = Layers(), Layers(mixes="shape")
    elbo = train(programs).eval()
    together = Trace_ELBO(SOME_PARTICLES, vectorize_particles=True, max_plate_nesting=1)
    pyro.set_rng_seed(4)
    found = elbo.loss(other.model, other.guide), elbo.loss(programs.model, programs.guide)
    pyro.set_rng_seed(4)
    expected = Trace_ELBO().loss(other.model, other.guide), together.loss(programs.model, programs.guide)
    torch.testing.assert_close(found, expected)
    assert elbo.num_particles == SOME_PARTICLES


@pytest.mark.parametrize("mixes", ["mean", "first", "shape", "number"])
def test_programs_that_do_not_keep_particles_apart_are_found_out(mixes: str) -> None:
    """Their particles are hidden, and nobody is warned of what never was."""
    with filtered("error", BPQWarning):
        elbo = train(Layers(mixes=mixes))
    assert elbo.particles.now == Particles(SOME_PARTICLES, is_hidden=True)


@pytest.mark.filterwarnings("ignore:Particles run in one call")
def test_an_empty_parameter_keeps_particles_in_one_call() -> None:
    def model() -> None:
        x, z = pyro.sample("x", dist.Normal(0.0, 1.0)), pyro.sample("z", dist.Bernoulli(0.5))
        pyro.factor("f", torch.stack([x.squeeze(), z.squeeze()]).sum())

    def guide() -> None:
        empty = pyro.param("e", torch.zeros(0)).detach().sum()
        x = pyro.sample("x", dist.Normal(pyro.param("m", torch.tensor(0.2)) + empty, 1.0))
        pyro.sample("z", dist.Bernoulli(torch.sigmoid(x)))

    elbo = TraceBackpropQ_ELBO(4, vectorize_particles=True)
    assert stepped(1, elbo, model, guide).particles.now.is_hidden


# The mask in the plate of rows is told, and nothing else.
@pytest.mark.filterwarnings("error::pyro_bpq.errors.BPQWarning", "ignore:Values of 'z', drawn in the plate")
@pytest.mark.parametrize("mixes", ["mean", "first", "shape"])
def test_programs_that_vmap_refuses_too_draw_what_they_would_have_drawn(mixes: str) -> None:
    programs = Layers(mixes=mixes)
    mixed = programs.mixed
    programs.mixed = lambda z: mixed(z) if z[z > 0.5].sum() is not None else z
    elbo = TraceBackpropQ_ELBO()
    found = losses(elbo, programs)
    assert (elbo.num_particles, elbo.vectorize_particles, elbo.max_plate_nesting) == (1, False, float("inf"))
    pyro.clear_param_store()
    torch.testing.assert_close(found, losses(Trace_ELBO(), programs))


@pytest.mark.parametrize("mixes", ["mean", "shape"])
def test_a_program_that_changes_goes_on_with_one(mixes: str) -> None:
    programs = Layers()
    elbo = train(programs)
    assert elbo.num_particles == SOME_PARTICLES
    programs.mixed = MIXES[mixes]
    with filtered("error", BPQWarning):
        repeat(12, elbo.loss_and_grads, programs.model, programs.guide)
    assert elbo.particles.now.is_hidden
    programs.mixed = lambda z: z.numpy() is not None and z
    with pytest.warns(BPQWarning, match="leave torch"):
        repeat(12, elbo.loss_and_grads, programs.model, programs.guide)
    assert elbo.num_particles == 1


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("way", ["warm_up", "bootstrapped_loss"])
def test_who_asks_for_critics_gets_them(way: str, steps: int) -> None:
    programs = Chain()
    elbo = train(programs, steps)
    if way == "warm_up":
        elbo.warm_up(programs.model, programs.guide, steps=3)
    else:
        elbo.bootstrapped_loss(programs.model, programs.guide).backward()
    elbo.loss_and_grads(programs.model, programs.guide)
    assert elbo.num_particles == 1
    assert "explained" in elbo.info["z_0"]


def test_noise_that_is_no_site_keeps_particles_apart() -> None:
    """Dropout differs between runs, so that their costs cannot be compared; each element has noise of its own."""
    programs = Layers()
    programs.mixed = torch.nn.functional.dropout
    assert train(programs).particles.now == Particles(SOME_PARTICLES, True, nesting=2)


def test_straight_through_differences_take_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no baseline; two particles measured best."""
    for module in (rules, particles):
        monkeypatch.setattr(module, "MANY_READS", 1)
    programs = Chain(length=1, size=3)
    elbo = stepped(4, limited(0), programs.model, programs.guide)
    assert "DebiasedStraightThrough" in str(elbo.info["z_0"]["estimator"])
    assert elbo.num_particles == 2


# What a run of many must not leave behind.


@pytest.mark.parametrize("restarts", [False, True])
def test_parameters_made_later_have_the_shapes_of_one_particle(restarts: bool) -> None:
    programs = Layers()
    elbo = train(programs, 16)
    assert elbo.num_particles > 1

    def biased(z: torch.Tensor) -> torch.Tensor:
        pyro.factor("bias", (pyro.param("b", lambda: torch.zeros(z.shape)) * z).sum(-1))
        return z

    programs.mixed = biased
    if restarts:
        pyro.clear_param_store()
    repeat(8, elbo.loss_and_grads, programs.model, programs.guide)
    assert pyro.param("b").shape == (ROWS, 3) and elbo.num_particles > 1


def test_a_buffer_keeps_its_shape_when_a_trial_is_rejected() -> None:
    programs, net = Layers(), torch.nn.Module()
    net.register_buffer("mean", torch.zeros(3))

    def centred(z: torch.Tensor) -> torch.Tensor:
        """Subtracts a running mean over the leftmost dimension, which is of rows or of particles."""
        net.mean = 0.9 * net.mean + 0.1 * z.detach().mean(0)
        return z - net.mean

    programs.mixed = centred
    elbo = TraceBackpropQ_ELBO()
    with pytest.warns(BPQWarning, match="Rows of the plate 'rows' meet"):
        repeat(5, elbo.loss_and_grads, programs.model, programs.guide)
    assert net.mean.shape == (3,) and elbo.particles.now.is_hidden


def test_an_error_of_a_settled_program_changes_nothing() -> None:
    programs = Layers()
    errors = deque[bool]()  # of a library: a call with other contents does not look new

    def failing(z: torch.Tensor) -> torch.Tensor:
        if errors and errors.pop():
            raise RuntimeError("boom")
        return z

    programs.mixed = failing
    elbo = train(programs, 20)
    plan = elbo.plan
    for is_learning in (False, True):
        elbo.train(is_learning)
        errors.append(True)
        with pytest.raises(RuntimeError, match="boom"):
            elbo.loss_and_grads(programs.model, programs.guide)
        assert elbo.num_particles == SOME_PARTICLES
    with filtered("error"):
        elbo.loss_and_grads(programs.model, programs.guide)
    assert elbo.num_particles == SOME_PARTICLES and elbo.plan is plan
    with pytest.raises(TooManyOutcomesError):
        expected_gradient(elbo.eval(), programs.model, programs.guide)
    assert elbo.num_particles == SOME_PARTICLES


@pytest.mark.parametrize("when", [0, 3])
def test_a_number_set_later_counts(when: int) -> None:
    elbo = train(programs := Layers(), when)
    elbo.num_particles = 3
    for _ in range(when, 6):
        elbo.loss_and_grads(programs.model, programs.guide)
        assert elbo.num_particles == 3


WRAPPERS: dict[str, Any] = {
    "handler": lambda program, scale: pyro.poutine.scale(program, scale=scale),
    "handlers": lambda program, scale: pyro.poutine.scale(pyro.poutine.mask(program, mask=True), scale=scale),
    "partial": lambda program, scale: functools.partial(lambda rate: program(), scale),
    "lambda": lambda program, scale: lambda: program(),
}


@pytest.mark.parametrize("wrapped", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_made_anew_at_each_step_are_one_program(wrapped: Any) -> None:
    programs, elbo = Layers(), TraceBackpropQ_ELBO()
    for scale in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5):
        elbo.loss_and_grads(wrapped(programs.model, scale), wrapped(programs.guide, scale))
    assert elbo.num_particles == SOME_PARTICLES


@pytest.mark.parametrize("wrapped", WRAPPERS.values(), ids=WRAPPERS)
def test_another_program_in_the_same_wrapper_is_another_one(wrapped: Any) -> None:
    first, second, elbo = Layers(), Chain(), TraceBackpropQ_ELBO()
    for _ in range(4):
        elbo.loss_and_grads(wrapped(first.model, 1.0), wrapped(first.guide, 1.0))
    assert elbo.num_particles == SOME_PARTICLES
    fresh(4)
    found = elbo.loss_and_grads(wrapped(second.model, 1.0), wrapped(second.guide, 1.0))
    together = Trace_ELBO(SOME_PARTICLES, vectorize_particles=True, max_plate_nesting=1)
    assert found == pytest.approx(from_seed(4, together.loss, second.model, second.guide))


@pytest.mark.parametrize("kind", [AutoNormalMessenger, AutoHierarchicalNormalMessenger])
def test_guides_that_make_parameters_in_the_shape_of_a_run_serve_vectorised_particles(kind: Any) -> None:
    x = torch.tensor([0.3, -1.2, 2.0])

    def model() -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("d", 3, dim=-1):
            z = pyro.sample("z", dist.Normal(mean, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    guide = kind(model)
    elbo = TraceBackpropQ_ELBO(2, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(model, guide, Adam({"lr": 0.01}), elbo)
    with filtered("error", BPQWarning):
        repeat(3, svi.step)
    assert elbo.particles.now.has_plate
    assert max(value.dim() for value in guide.parameters()) == 1


def test_writes_of_attempts_that_fail_are_taken_back() -> None:
    calls, table = torch.zeros(()), torch.zeros(3)

    def model() -> None:
        z = pyro.sample("z", dist.Categorical(torch.ones(3)))
        pyro.sample("y", dist.Bernoulli(torch.tensor([0.3, 0.5, 0.9])[z]))
        calls.add_(1.0)
        table.add_(torch.nn.functional.one_hot(z, 3))  # fails with values of several particles

    def guide() -> None:
        z = pyro.sample("z", dist.Categorical(logits=pyro.param("q", torch.zeros(3))))
        pyro.sample("y", dist.Bernoulli(logits=pyro.param("r", torch.zeros(3))[z]))

    repeat(3, TraceBackpropQ_ELBO().loss_and_grads, model, guide)
    assert calls == 3.0 and table.sum() == 3.0
