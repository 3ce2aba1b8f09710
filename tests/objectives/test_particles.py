"""The number of particles that nobody chose: how many, when, and for which programs."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoHierarchicalNormalMessenger, AutoNormalMessenger
from pyro.optim import Adam
from steps import dear, filtered, fresh, repeat, stepped, trained

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.plan.rules import ELEMENTS, FEW_PARTICLES, MANY_SITES, MOST_PARTICLES
from pyro_bpq.rollout.runs import Particles

ROWS = 12


class Layers:
    """Two layers of three units over rows of data.

    Args:
        rows: Number of rows.
        width: Elements of a row's data.
        mixes: How rows of different particles meet: ``"no"``, ``"mean"``, ``"first"`` or ``"shape"``.
    """

    def __init__(self, rows: int = ROWS, width: int = 4, mixes: str = "no") -> None:
        self.rows, self.mixes = rows, mixes
        self.data = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))

    def mixed(self, z: torch.Tensor) -> torch.Tensor:
        # Of one particle on its own the rows stay apart.
        if self.mixes == "mean":
            return z - z.mean(0) if z.dim() > 2 else z
        if self.mixes == "first":
            return z + z[0] if z.dim() > 2 else z
        if self.mixes == "shape":
            return z.reshape(self.rows, 3)
        return z

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


class Chains:
    """Three states in a row of data each."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows
        self.data = torch.randn(3, rows, generator=torch.Generator().manual_seed(1))

    def model(self) -> None:
        state = torch.zeros(self.rows)
        with pyro.plate("rows", self.rows):
            for t in range(3):
                state = pyro.sample(f"z_{t}", dist.Categorical(logits=torch.ones(3) * state.unsqueeze(-1))).float()
                pyro.sample(f"x_{t}", dist.Normal(state, 1.0), obs=self.data[t])

    def guide(self) -> None:
        w = pyro.param("w", lambda: torch.ones(3))
        state = torch.zeros(self.rows)
        with pyro.plate("rows", self.rows):
            for t in range(3):
                logits = w * (state + self.data[t]).unsqueeze(-1)
                state = pyro.sample(f"z_{t}", dist.Categorical(logits=logits)).float()


class Alone(Chains):
    """Without a plate."""

    def __init__(self) -> None:
        super().__init__(1)
        self.data = self.data[:, 0]

    def model(self) -> None:
        state = torch.tensor(0.0)
        for t in range(3):
            state = pyro.sample(f"z_{t}", dist.Bernoulli(logits=state)).float()
            pyro.sample(f"x_{t}", dist.Normal(state, 1.0), obs=self.data[t])

    def guide(self) -> None:
        w, state = pyro.param("w", lambda: torch.tensor(0.5)), torch.tensor(0.0)
        for t in range(3):
            state = pyro.sample(f"z_{t}", dist.Bernoulli(logits=w * state)).float()


class Coin(Alone):
    """One site without a plate, whose costs are all known."""

    def model(self) -> None:
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.sample("x", dist.Normal(z, 1.0), obs=self.data[0])

    def guide(self) -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("w", lambda: torch.tensor(0.5))))


class Vector(Alone):
    """One site of three components, whose costs are all known."""

    def model(self) -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.full((3,), 0.4)).to_event(1))
        pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=self.data[0])

    def guide(self) -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("w", lambda: torch.zeros(3))).to_event(1))


class Mixture(Chains):
    """One state a row: all that it costs is known at its other values."""

    def model(self) -> None:
        with pyro.plate("rows", self.rows):
            state = pyro.sample("z", dist.Categorical(logits=torch.ones(3)))
            pyro.sample("x", dist.Normal(state.float(), 1.0), obs=self.data[0])

    def guide(self) -> None:
        w = pyro.param("w", lambda: torch.ones(3))
        with pyro.plate("rows", self.rows):
            pyro.sample("z", dist.Categorical(logits=w * self.data[0].unsqueeze(-1)))


class Steered(Layers):
    """Python looks at a value."""

    def model(self) -> None:
        with pyro.plate("rows", self.rows):
            y = pyro.sample("y", dist.Bernoulli(logits=torch.zeros(3)).to_event(1))
            z = pyro.sample("z", dist.Bernoulli(logits=y - 0.5).to_event(1))
            mean = 1.0 if float(z.sum()) > 10 else 0.0
            pyro.sample("x", dist.Normal(z.sum(-1) + mean, 1.0), obs=self.data[:, 0])


def train(programs: Layers, steps: int = 4, **options: object) -> TraceBackpropQ_ELBO:
    return trained(TraceBackpropQ_ELBO(**options), programs.model, programs.guide, steps=steps)  # type: ignore[arg-type]


def losses(elbo: object, programs: Layers, steps: int = 5) -> list[float]:
    pyro.set_rng_seed(3)
    return [elbo.loss_and_grads(programs.model, programs.guide) for _ in range(steps)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "programs",
    [Layers(), Chains(), Layers(rows=4), Chains(rows=4), Alone(), Vector()],
    ids=["layers", "chains", "few rows of layers", "few rows", "no plate", "vector"],
)
def test_small_programs_get_the_most_particles(programs: Layers) -> None:
    elbo = train(programs)
    assert (elbo.num_particles, elbo.vectorize_particles) == (MOST_PARTICLES, True)
    assert all("LeaveOneOut" in str(known["estimator"]) for known in elbo.info.values())


@pytest.mark.parametrize(
    ("programs", "number", "keeps"),
    [
        (Chains(), 2, False),
        (Chains(rows=4), 2, True),
        (Chains(rows=4), FEW_PARTICLES - 1, True),
        (Chains(rows=4), FEW_PARTICLES, False),
        (Alone(), FEW_PARTICLES - 1, True),
        (Alone(), FEW_PARTICLES, False),
        (Coin(), FEW_PARTICLES, True),
        (dear(Chains()), 2, True),
        (dear(Chains()), FEW_PARTICLES, True),
    ],
)
def test_a_number_that_was_chosen_serves_alike(programs: Layers, number: int, keeps: bool) -> None:
    """Rows of data are compared, and few sites by four particles; where costs may be dear, sites keep critics."""
    elbo = train(programs, num_particles=number)
    assert elbo.num_particles == number
    assert all(("AllAction" in str(known["estimator"])) is keeps for known in elbo.info.values())


@pytest.mark.parametrize("width", [1000, 2000, 20_000])
def test_large_values_get_fewer(width: int) -> None:
    found = train(Layers(width=width)).num_particles
    # Each particle takes longer than what all of them share.
    assert found == max(2, min(FEW_PARTICLES, ELEMENTS // (ROWS * width)))


@pytest.mark.parametrize(
    ("programs", "options"),
    [
        (Layers(), {"num_particles": 1}),
        (Layers(), {"structure": "dynamic"}),
        (Layers(rows=4), {"num_particles": 1}),
        (Alone(), {"num_particles": 1}),
        (Coin(), {}),
        (Mixture(), {}),
        (Steered(), {}),
        (dear(Layers()), {}),
    ],
    ids=["told", "dynamic", "few rows", "no plate", "one site", "all known", "steered", "cost statement"],
)
@pytest.mark.filterwarnings("ignore:Values of 'z', drawn in the plate 'rows', leave torch")
def test_others_keep_one(programs: Layers, options: dict[str, object]) -> None:
    elbo = train(programs, **options)
    assert (elbo.num_particles, elbo.vectorize_particles) == (1, False)


@pytest.mark.parametrize("programs", [Layers(), Chains()], ids=["layers", "chains"])
@pytest.mark.parametrize("nesting", [float("inf"), 2])
def test_it_draws_as_pyro_does_with_that_number(programs: Layers, nesting: float) -> None:
    found = losses(TraceBackpropQ_ELBO(max_plate_nesting=nesting), programs)
    pyro.clear_param_store()
    together = Trace_ELBO(MOST_PARTICLES, vectorize_particles=True, max_plate_nesting=1 if nesting > 2 else 2)
    torch.testing.assert_close(found, losses(together, programs))


class Bits:
    """Bits outside of plates, each conditioned on the one before, and one cost of all of them.

    Args:
        number: Number of bits.
        mixes: Whether the cost of a particle depends on those that it runs with.
    """

    def __init__(self, number: int, mixes: bool = False) -> None:
        self.number, self.mixes = number, mixes

    def model(self) -> None:
        values = [pyro.sample(f"z{i}", dist.Bernoulli(0.4)) for i in range(self.number)]
        total = torch.stack(values).sum() if self.mixes else sum(values[1:], values[0])
        pyro.sample("x", dist.Normal(total, 1.0), obs=torch.tensor(4.0))

    def guide(self) -> None:
        q, z = pyro.param("q", torch.zeros(self.number)), torch.tensor(0.0)
        for i in range(self.number):
            z = pyro.sample(f"z{i}", dist.Bernoulli(logits=q[i] + z))


@pytest.mark.parametrize("number", [MANY_SITES - 1, MANY_SITES])
@pytest.mark.parametrize("particles", [None, 1])
def test_many_sites_get_the_most_particles_and_keep_critics(number: int, particles: int | None) -> None:
    elbo, bits = TraceBackpropQ_ELBO(particles), Bits(number)
    repeat(4, elbo.loss_and_grads, bits.model, bits.guide)
    assert elbo.num_particles == (particles or MOST_PARTICLES)
    assert elbo.plan is not None and len(elbo.plan.noisy) == number
    # Few sites have critics only if one particle runs.
    has_critic = elbo.plan.layout.specs["z0"].critic is not None
    assert has_critic == (particles == 1 or number >= MANY_SITES) and not elbo.particles.now.is_hidden


def test_evaluation_takes_the_number_of_its_programs_where_it_is_known() -> None:
    """Its programs may be others than those that the number was settled for: they run once."""
    programs, other = Layers(), Layers(mixes="shape")
    elbo = train(programs).eval()
    together = Trace_ELBO(MOST_PARTICLES, vectorize_particles=True, max_plate_nesting=1)
    pyro.set_rng_seed(4)
    found = elbo.loss(other.model, other.guide), elbo.loss(programs.model, programs.guide)
    pyro.set_rng_seed(4)
    expected = Trace_ELBO().loss(other.model, other.guide), together.loss(programs.model, programs.guide)
    torch.testing.assert_close(found, expected)
    assert elbo.num_particles == MOST_PARTICLES


@pytest.mark.parametrize("mixes", ["mean", "first", "shape"])
def test_programs_that_do_not_keep_particles_apart_are_found_out(mixes: str) -> None:
    """Their particles are hidden, and nobody is warned of what never was."""
    with filtered("error", BPQWarning):
        elbo = train(Layers(mixes=mixes))
    assert elbo.particles.now == Particles(MOST_PARTICLES, is_hidden=True)


@pytest.mark.parametrize("mixes", ["mean", "first", "shape"])
def test_programs_that_vmap_refuses_too_draw_what_they_would_have_drawn(mixes: str) -> None:
    class Writing(Layers):
        def mixed(self, z: torch.Tensor) -> torch.Tensor:
            assert z[z > 0.5].sum() is not None
            return super().mixed(z)

    programs = Writing(mixes=mixes)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BPQWarning)
        # The mask in the plate of rows is told, and nothing else.
        warnings.filterwarnings("ignore", "Values of 'z', drawn in the plate")
        elbo = TraceBackpropQ_ELBO()
        found = losses(elbo, programs)
    assert (elbo.num_particles, elbo.vectorize_particles, elbo.max_plate_nesting) == (1, False, float("inf"))
    pyro.clear_param_store()
    torch.testing.assert_close(found, losses(Trace_ELBO(), programs))


@pytest.mark.parametrize("mixes", ["mean", "shape"])
def test_a_program_that_changes_goes_on_with_one(mixes: str) -> None:
    programs = Layers()
    elbo = train(programs)
    assert elbo.num_particles == MOST_PARTICLES
    programs.mixes = mixes
    with filtered("error", BPQWarning):
        repeat(12, elbo.loss_and_grads, programs.model, programs.guide)
    assert elbo.particles.now.is_hidden
    programs.mixed = lambda z: z.numpy() is not None and z  # type: ignore[method-assign, assignment, return-value]
    with pytest.warns(BPQWarning, match="leave torch"):
        repeat(12, elbo.loss_and_grads, programs.model, programs.guide)
    assert elbo.num_particles == 1


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("way", ["warm_up", "bootstrapped_loss"])
def test_who_asks_for_critics_gets_them(way: str, steps: int) -> None:
    programs = Chains()
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

    class Noisy(Layers):
        def mixed(self, z: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(z, 0.5)

    assert train(Noisy()).particles.now == Particles(MOST_PARTICLES, True, nesting=2)


def test_straight_through_differences_take_two() -> None:
    """They need no baseline; two particles measured best."""
    data = torch.rand(ROWS, 200, generator=torch.Generator().manual_seed(2)).round()

    def model() -> None:
        net = pyro.param("net", lambda: 0.1 * torch.randn(1000, 200))
        with pyro.plate("rows", ROWS):
            z = pyro.sample("z", dist.Bernoulli(logits=torch.zeros(1000)).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=z @ net).to_event(1), obs=data)

    def guide() -> None:
        w = pyro.param("w", lambda: torch.zeros(200, 1000))
        with pyro.plate("rows", ROWS):
            pyro.sample("z", dist.Bernoulli(logits=data @ w).to_event(1))

    elbo = stepped(4, TraceBackpropQ_ELBO(), model, guide)
    assert "DebiasedStraightThrough" in str(elbo.info["z"]["estimator"])
    assert elbo.num_particles == 2


# What a run of many must not leave behind.


@pytest.mark.parametrize("restarts", [False, True])
def test_parameters_made_later_have_the_shapes_of_one_particle(restarts: bool) -> None:
    programs, phase = Layers(), [0]

    def model() -> None:
        programs.model()
        with pyro.plate("more", ROWS):
            like = pyro.sample("u", dist.Bernoulli(torch.tensor(0.5)))
            if phase[0]:
                pyro.factor("bias", pyro.param("b", lambda: torch.zeros(like.shape)) * like)

    def guide() -> None:
        programs.guide()
        with pyro.plate("more", ROWS):
            pyro.sample("u", dist.Bernoulli(torch.tensor(0.5)))

    elbo = TraceBackpropQ_ELBO()
    for step in range(24):
        if step == 16:
            assert elbo.num_particles > 1
            phase[0] = 1
            if restarts:
                pyro.clear_param_store()
        elbo.loss_and_grads(model, guide)
    assert pyro.param("b").shape == (ROWS,)
    assert elbo.num_particles > 1


class Centring(torch.nn.Module):
    """Subtracts a running mean over the leftmost dimension, which is of rows or of particles."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * z.detach().mean(0)
        return z - self.mean


def test_a_buffer_keeps_its_shape_when_a_trial_is_rejected() -> None:
    programs, net = Layers(), Centring()
    programs.mixed = net  # type: ignore[method-assign, assignment]
    elbo = TraceBackpropQ_ELBO()
    with pytest.warns(BPQWarning, match="Rows of the plate 'rows' meet"):
        repeat(5, elbo.loss_and_grads, programs.model, programs.guide)
    assert net.mean.shape == (3,) and elbo.particles.now.is_hidden


def test_batch_statistics_follow_accepted_runs() -> None:
    programs, net = Layers(), torch.nn.BatchNorm1d(3).eval()

    def counted(z: torch.Tensor) -> torch.Tensor:
        net.train()
        net(z.detach().reshape(-1, 3))
        net.eval()
        return z

    programs.mixed = counted  # type: ignore[method-assign]
    elbo = TraceBackpropQ_ELBO()
    for step in range(6):
        elbo.loss_and_grads(programs.model, programs.guide)
        assert net.num_batches_tracked == step + 1
    assert elbo.num_particles > 1


def test_errors_of_the_programs_own_are_raised() -> None:
    class Stop(Exception):
        pass

    programs, calls = Layers(), []

    def model() -> None:
        calls.append(1)
        if len(calls) >= 4:
            raise Stop
        programs.model()

    elbo = TraceBackpropQ_ELBO()
    with pytest.raises(Stop):
        repeat(8, elbo.loss_and_grads, model, programs.guide)


@pytest.mark.parametrize("when", [0, 3])
def test_a_number_set_later_counts(when: int) -> None:
    programs, found = Layers(), []
    elbo = TraceBackpropQ_ELBO()
    for step in range(6):
        if step == when:
            elbo.num_particles = 3
        elbo.loss_and_grads(programs.model, programs.guide)
        found.append(elbo.num_particles)
    assert found[when:] == [3] * (6 - when)


def test_larger_batches_get_fewer() -> None:
    programs = Layers()
    elbo = trained(TraceBackpropQ_ELBO(), programs.model, programs.guide, steps=4)
    assert elbo.num_particles == MOST_PARTICLES
    large = Layers(rows=ELEMENTS // 4)
    programs.rows, programs.data = large.rows, large.data
    repeat(2, elbo.loss_and_grads, programs.model, programs.guide)
    assert elbo.num_particles == 2


def wrapped(kind: str, program: Any, scale: float) -> Any:
    """A wrapper made anew."""
    if kind == "handler":
        return pyro.poutine.scale(program, scale=scale)
    if kind == "handlers":
        return pyro.poutine.scale(pyro.poutine.mask(program, mask=True), scale=scale)
    if kind == "partial":
        return functools.partial(lambda rate: program(), scale)
    return lambda: program()


@pytest.mark.parametrize("kind", ["handler", "handlers", "partial", "lambda"])
def test_wrappers_made_anew_at_each_step_are_one_program(kind: str) -> None:
    programs, elbo = Layers(), TraceBackpropQ_ELBO()
    for step in range(6):
        scale = 1.0 + 0.1 * step
        elbo.loss_and_grads(wrapped(kind, programs.model, scale), wrapped(kind, programs.guide, scale))
    assert elbo.num_particles == MOST_PARTICLES


@pytest.mark.parametrize("kind", ["handler", "partial", "lambda"])
def test_another_program_in_the_same_wrapper_is_another_one(kind: str) -> None:
    first, second, elbo = Layers(), Chains(), TraceBackpropQ_ELBO()
    for _ in range(4):
        elbo.loss_and_grads(wrapped(kind, first.model, 1.0), wrapped(kind, first.guide, 1.0))
    assert elbo.num_particles == MOST_PARTICLES
    fresh(4)
    found = elbo.loss_and_grads(wrapped(kind, second.model, 1.0), wrapped(kind, second.guide, 1.0))
    pyro.set_rng_seed(4)
    together = Trace_ELBO(MOST_PARTICLES, vectorize_particles=True, max_plate_nesting=1)
    assert found == pytest.approx(together.loss(second.model, second.guide))


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
