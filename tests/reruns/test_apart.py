"""Particles in one vectorised call cost what they cost alone, or they do not run that way."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from pyro_bpq import TraceBackpropQ_ELBO, TraceBackpropQ_IWAE, cost
from pyro_bpq.errors import BPQWarning
from pyro_bpq.reruns import apart as module
from pyro_bpq.testing import assert_unbiased
from pyro_bpq.tracing.component_costs import PlateRows

ROWS = 12


class Programs:
    """A global latent that hardly varies beside rows of data; ``read`` says how the model takes the latent."""

    def __init__(self, read: Any, probability: float = 0.98) -> None:
        self.read, self.probability, self.calls = read, probability, Counter[str]()
        self.data = torch.linspace(-1.0, 1.0, ROWS)

    def model(self) -> None:
        self.calls["model"] += 1
        g = pyro.sample("g", dist.Bernoulli(0.5))
        with pyro.plate("rows", ROWS):
            y = pyro.sample("y", dist.Bernoulli(logits=torch.zeros(ROWS, 2)).to_event(1))
            z = pyro.sample("z", dist.Bernoulli(logits=y - 0.5).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1) + self.read(g), 1.0), obs=self.data)

    def guide(self) -> None:
        pyro.sample("g", dist.Bernoulli(pyro.param("p", torch.tensor(self.probability))))
        with pyro.plate("rows", ROWS):
            logits = pyro.param("w", torch.zeros(2)) * self.data.unsqueeze(-1)
            y = pyro.sample("y", dist.Bernoulli(logits=logits).to_event(1))
            pyro.sample("z", dist.Bernoulli(logits=y - 0.5).to_event(1))


MIXES = {
    "first": lambda g: g.reshape(-1)[0],
    "mean": lambda g: g.mean(),
    "largest": lambda g: g.max(),
    "rolled": lambda g: g.roll(1, 0) if g.dim() else g,
}


@pytest.fixture
def by_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only values tell that particles mix, as after operators that tracked runs do not follow."""
    monkeypatch.setattr(PlateRows, "meeting", lambda self, costs: {})


@pytest.mark.usefixtures("by_values")
@pytest.mark.parametrize("mixes", MIXES)
@pytest.mark.parametrize("probability", [0.5, 0.98, 0.9999])
def test_particles_of_an_open_number_are_hidden_where_they_mix(mixes: str, probability: float) -> None:
    """Sampled values of the latent are nearly always the same in all particles, and do not tell."""
    programs = Programs(MIXES[mixes], probability)
    elbo = TraceBackpropQ_ELBO()
    for _ in range(3):
        elbo.loss_and_grads(programs.model, programs.guide)
        assert elbo.particles.now.is_hidden and elbo.num_particles == 8


# Reductions that have the same result at nearly all values that are drawn evenly.
TRIGGERS = {
    "largest": lambda z: z.max(),
    "product": lambda z: z.prod(),
    "any": lambda z: z.bool().any().double(),
    "all": lambda z: z.bool().all().double(),
    "more than three": lambda z: (z.sum() > 3.0).double(),
}


def alarms(layout: str, trigger: Any, probability: float) -> tuple[Any, Any]:
    """Twelve bits that nearly always have one value, and an observation that reads them all at once."""

    def draw(p: Tensor) -> Tensor:
        if layout == "plate":
            with pyro.plate("rows", 12):
                return pyro.sample("z", dist.Bernoulli(p))
        if layout == "event":
            return pyro.sample("z", dist.Bernoulli(p).to_event(1))
        return torch.stack([pyro.sample(f"z_{i}", dist.Bernoulli(p[i])) for i in range(12)])

    def model() -> None:
        z = draw(torch.full((12,), probability))
        pyro.sample("x", dist.Normal(1.5 * trigger(z), 0.5), obs=torch.tensor(0.9))

    def guide() -> None:
        draw(pyro.param("p", torch.full((12,), probability), constraint=dist.constraints.unit_interval))

    return model, guide


@pytest.mark.usefixtures("by_values")
@pytest.mark.parametrize("probability", [0.05, 0.95])
@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("layout", ["plate", "event", "stack", "long stack"])
def test_rare_events_show_that_particles_mix(
    layout: str, trigger: str, probability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout == "long stack":
        monkeypatch.setattr(module, "LONG", 12)
    elbo = TraceBackpropQ_ELBO()
    elbo.loss_and_grads(*alarms(layout, TRIGGERS[trigger], probability))
    assert elbo.particles.now.is_hidden and elbo.num_particles == 8


@pytest.mark.usefixtures("by_values")
@pytest.mark.parametrize("trigger", ["largest", "any", "more than three"])
@pytest.mark.parametrize("law", [dist.Poisson, lambda rate: dist.Geometric(1.0 / (1.0 + rate))])
def test_rare_counts_show_that_particles_mix(law: Any, trigger: str) -> None:
    def guide() -> None:
        rate = pyro.param("rate", torch.full((12,), 0.05), constraint=dist.constraints.positive)
        with pyro.plate("rows", 12):
            pyro.sample("z", law(rate))

    def model() -> None:
        with pyro.plate("rows", 12):
            z = pyro.sample("z", law(torch.full((12,), 0.05)))
        pyro.sample("x", dist.Normal(1.5 * TRIGGERS[trigger](z), 0.5), obs=torch.tensor(0.9))

    elbo = TraceBackpropQ_ELBO()
    elbo.loss_and_grads(model, guide)
    assert elbo.particles.now.is_hidden and elbo.num_particles == 8


@pytest.mark.usefixtures("by_values")
@pytest.mark.parametrize("trigger", TRIGGERS)
def test_rare_events_show_it_of_given_particles(trigger: str) -> None:
    elbo = TraceBackpropQ_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    with pytest.warns(BPQWarning, match="depend on the others"):
        elbo.loss_and_grads(*alarms("plate", TRIGGERS[trigger], 0.05))


@pytest.mark.usefixtures("by_values")
@pytest.mark.parametrize("is_long", [False, True])
def test_a_weight_of_zero_hides_no_mixing(is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_long:
        monkeypatch.setattr(module, "LONG", 1)

    def guide() -> None:
        with pyro.plate("rows", 4):
            pyro.sample("z", dist.Bernoulli(logits=pyro.param("a", torch.linspace(-1.0, 0.5, 4))))

    def model() -> None:
        with pyro.plate("rows", 4):
            z = pyro.sample("z", dist.Bernoulli(0.3))
        w = pyro.param("w", torch.tensor(0.0))
        pyro.sample("x", dist.Normal((z.sum() - 3.0) ** 2 * w, 0.5), obs=torch.tensor(0.9))

    elbo = TraceBackpropQ_ELBO()
    elbo.loss_and_grads(model, guide)
    assert elbo.particles.now.is_hidden and pyro.param("w") == 0.0
    # It saw what single particles see.
    assert pyro.param("w").grad.abs() < 200.0


PATTERN = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0])
# Costs that differ between particles at one value that is neither likely nor extreme, or not at all yet.
HIDDEN_COSTS = {
    "match": lambda z: 8.0 * (z == PATTERN).all(),
    "match in a row": lambda z: 8.0 * (z == PATTERN).all(-1).any(),
    "eleven": lambda z: 8.0 * (z.sum() == 11.0),
    "weight of zero": lambda z: torch.tensor(0.0) * z.sum(),
    "softmax": lambda z: torch.tensor(0.0) * z.softmax(0).sum(-1),
}


@pytest.mark.parametrize("kind", HIDDEN_COSTS)
@pytest.mark.parametrize("given", [False, True])
def test_tracked_runs_see_particles_meet(kind: str, given: bool) -> None:
    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", 2.0 * PATTERN - 1.0)).to_event(1))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.full((10,), 0.5)).to_event(1))
        pyro.factor("hit", HIDDEN_COSTS[kind](z))

    options: Any = {"num_particles": 4, "vectorize_particles": True, "max_plate_nesting": 0} if given else {}
    elbo = TraceBackpropQ_ELBO(**options)
    with pytest.warns(BPQWarning, match="depend on the others") if given else contextlib.nullcontext():
        elbo.loss_and_grads(model, guide)
    assert elbo.particles.now.is_hidden and elbo.num_particles == (4 if given else 8)


def test_tracked_runs_see_particles_stay_apart() -> None:
    """Each reduces rows of one particle alone."""

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", 2.0 * PATTERN - 1.0)).to_event(1))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.full((10,), 0.5)).to_event(1))
        pyro.factor(
            "hit", 8.0 * (z == PATTERN).all(-1) + z.softmax(-1).max(-1).values + (z @ torch.eye(10).to(z)).sum(-1)
        )

    elbo = TraceBackpropQ_ELBO()
    for _ in range(20):
        elbo.loss_and_grads(model, guide)
    assert elbo.particles.now.has_plate and elbo.num_particles == 8


def chain(read: Any, length: int, probability: float, last: int) -> tuple[Any, Any]:
    """A chain of draws of ``last + 1`` values, one of which the model reads in its own way."""
    start = torch.tensor(probability).log().expand(last + 1).clone()
    start[0] = 0.0

    def guide() -> None:
        z = torch.tensor(0)
        for t in range(length):
            logits = pyro.param(f"q_{t}", start) * (1.0 + 0.01 * z.unsqueeze(-1))
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=logits))

    def model() -> None:
        for t in range(length):
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=torch.zeros(last + 1))).double()
            pyro.factor(f"f_{t}", 0.1 * (read(z) if t == length // 2 else z))

    return model, guide


@pytest.mark.usefixtures("by_values")
@pytest.mark.parametrize("mixes", MIXES)
@pytest.mark.parametrize("last", [1, 4])
def test_long_programs_show_it_in_few_runs(mixes: str, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One site is mixed, and its sampled values are nearly always the same."""
    monkeypatch.setattr(module, "LONG", 12)
    elbo = TraceBackpropQ_ELBO()
    elbo.loss_and_grads(*chain(MIXES[mixes], module.LONG, 1e-4, last))
    assert elbo.particles.now.is_hidden and elbo.num_particles == 8


def test_long_programs_that_keep_apart_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG", 12)
    elbo = TraceBackpropQ_ELBO()
    programs = chain(lambda z: z, module.LONG, 0.5, 2)
    for _ in range(3):
        elbo.loss_and_grads(*programs)
    assert elbo.num_particles == 8 and not elbo.particles.now.is_hidden


def test_an_open_number_falls_to_one_where_particles_cannot_be_hidden() -> None:
    kept = []

    def read(g: Tensor) -> Tensor:
        kept.append(g)
        return g.reshape(-1)[0]

    programs, elbo = Programs(read), TraceBackpropQ_ELBO()
    for _ in range(3):
        elbo.loss_and_grads(programs.model, programs.guide)
        assert elbo.num_particles == 1


@pytest.mark.usefixtures("by_values")
def test_sampled_values_alone_would_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(MIXES["first"], 0.9999)
    monkeypatch.setattr(module, "probe", lambda fn, value, kinds, generator: value)
    elbo = TraceBackpropQ_ELBO()
    for _ in range(3):
        elbo.loss_and_grads(programs.model, programs.guide)
    assert elbo.vectorize_particles


def test_an_open_number_stays_where_particles_keep_apart() -> None:
    programs = Programs(lambda g: g)
    elbo = TraceBackpropQ_ELBO()
    for _ in range(20):
        elbo.loss_and_grads(programs.model, programs.guide)
    assert elbo.num_particles == 8


def guide(read: Any) -> None:
    pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor([0.3, -0.5]))).to_event(1))


def model(read: Any) -> None:
    z = pyro.sample("z", dist.Bernoulli(torch.tensor([0.1, 0.6])).to_event(1))
    pyro.sample("x", dist.Normal(read(z), 1.0), obs=torch.tensor(0.7))


@pytest.mark.parametrize("nesting", [float("inf"), 0, 2])
@pytest.mark.parametrize("read", [lambda z: z.sum(), lambda z: z.mean() * z[..., 0]], ids=["sum", "mean"])
def test_particles_that_the_user_vectorised_are_hidden_where_they_mix(read: Any, nesting: float) -> None:
    options: dict[str, Any] = {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": nesting}
    elbo = TraceBackpropQ_ELBO(**options)
    with pytest.warns(BPQWarning, match="without seeing each other"):
        elbo.loss_and_grads(model, guide, read)
    assert elbo.max_plate_nesting == (0 if nesting == float("inf") else nesting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            elbo.loss_and_grads(model, guide, read)
        elbo.eval()
        assert_unbiased(elbo, model, guide, read)


def test_they_draw_what_they_would_have_drawn() -> None:
    """The draws of the run that is dropped are undone."""

    def read(z: Tensor) -> Tensor:
        return z.sum()

    found = []
    for vectorised in (True, False):
        pyro.clear_param_store()
        pyro.set_rng_seed(2)
        elbo = TraceBackpropQ_ELBO(num_particles=3, vectorize_particles=vectorised, max_plate_nesting=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BPQWarning)
            found.append([elbo.loss_and_grads(model, guide, read) for _ in range(4)])
    # Hidden rows are summed in another order; other draws would differ by far more.
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_samples_of_a_bound_likewise() -> None:
    losses = []
    for vectorised in (True, False):
        pyro.clear_param_store()
        pyro.set_rng_seed(2)
        elbo = TraceBackpropQ_IWAE(num_particles=3, vectorize_particles=vectorised, max_plate_nesting=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses.append([elbo.loss_and_grads(model, guide, torch.sum) for _ in range(4)])
        assert [item.category for item in caught] == [BPQWarning] * vectorised
    # As above.
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("kind", [TraceBackpropQ_ELBO, TraceBackpropQ_IWAE])
def test_noise_besides_the_sites_is_left_alone(kind: Any) -> None:
    """Runs with dropout cannot be compared; particles stay together, as in Pyro."""

    def noisy(read: Any) -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor([0.1, 0.6])).to_event(1))
        mean = nn.functional.dropout(z, 0.5).sum(-1)
        pyro.sample("x", dist.Normal(mean, 1.0), obs=torch.tensor(0.7))

    elbo = kind(num_particles=3, vectorize_particles=True, max_plate_nesting=0)
    for _ in range(3):
        elbo.loss_and_grads(noisy, guide, None)
    assert elbo.vectorize_particles


def test_functions_of_costs_are_not_called_to_compare() -> None:
    calls = []

    def priced(read: Any) -> None:
        model(read)
        cost("price", lambda: calls.append(1) or 1.0)  # type: ignore[func-returns-value]

    elbo = TraceBackpropQ_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=0)
    for _ in range(3):
        elbo.loss_and_grads(priced, guide, lambda z: z.sum(-1))
    assert len(calls) == 3


def test_comparisons_become_rare() -> None:
    programs = Programs(lambda g: g)
    elbo = TraceBackpropQ_ELBO(num_particles=2, vectorize_particles=True)
    found = []
    for _ in range(40):
        before = programs.calls.total()
        elbo.loss_and_grads(programs.model, programs.guide)
        found.append(programs.calls.total() - before)
    # After three tracked and ten untracked steps the program is tracked again.
    rare = [n for n in range(40) if n & (n - 1) == 0 or n == 3 + 10]
    assert all((found[n] > min(found)) is (n in rare) for n in range(3, 40))
