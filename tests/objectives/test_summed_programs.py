"""Programs that are summed over all values: which ones, what is told of them, and what they fall back on."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.optim import Adam
from steps import dear, fitted, fresh, repeat, through_file, told
from torch import Tensor

from pyro_bpq import AllAction, ExpectedCost, LinearCritic, TraceBackpropQ_ELBO, cost
from pyro_bpq.diagnostics import diagnose, gradient_moments
from pyro_bpq.plan import plan as rule
from pyro_bpq.plan.rules import DRAWN_STEPS
from pyro_bpq.testing import assert_unbiased, exact_gradient, exact_loss

ROWS = 2


pytestmark = pytest.mark.usefixtures("early")


class Chain:
    """Binary states in rows of data.

    Args:
        length: Number of states.
        read: What the observation of a state makes of it and of the state before.
        after: What becomes of a state before the next one reads it.
        infer: Options of the guide's sites.
    """

    def __init__(self, length=2, read=lambda z, _: z, after=lambda z: z, infer=None):
        self.length, self.read, self.after, self.infer = length, read, after, infer or {}

    def model(self) -> None:
        z = torch.zeros((), dtype=torch.float64)
        with pyro.plate("rows", ROWS):
            for t in range(self.length):
                last = z
                z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=0.4 * self.after(z) - 0.1))
                x = torch.tensor([0.3, -0.2], dtype=torch.float64)
                pyro.sample(f"x_{t}", dist.Normal(self.read(z, last), 0.8), obs=x)

    def guide(self) -> None:
        w = pyro.param("w", torch.tensor([0.2, -0.3], dtype=torch.float64))
        z = torch.zeros((), dtype=torch.float64)
        with pyro.plate("rows", ROWS):
            for t in range(self.length):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=w[0] + w[1] * self.after(z)), infer=self.infer)


def trained(programs: Chain, steps: int = 4, **options: Any) -> TraceBackpropQ_ELBO:
    return fitted(TraceBackpropQ_ELBO(**options), programs.model, programs.guide, [()] * steps)


def loss_of(elbo: TraceBackpropQ_ELBO, programs: Chain) -> float:
    return elbo.loss_and_grads(programs.model, programs.guide)


def test_what_is_told() -> None:
    elbo = trained(Chain())
    assert elbo.particles.now.sums and (elbo.num_particles, elbo.vectorize_particles) == (1, False)
    assert str(elbo.plan).startswith("nothing is drawn: the loss is summed over all values, from 2 rows of one run\n")
    assert "critic" not in str(elbo.plan)
    assert {name: known["estimator"] for name, known in elbo.info.items()} == dict.fromkeys(("z_0", "z_1"), AllAction())
    assert elbo.num_steps == 4


@pytest.mark.parametrize("learns", [False, True], ids=["guide alone", "model, too"])
def test_a_model_that_learns_draws_ten_steps(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "DRAWN_STEPS", DRAWN_STEPS)

    def read(z: Tensor, last: Tensor) -> Tensor:
        return z * pyro.param("scale", torch.ones((), dtype=torch.float64)) if learns else z

    drawn, programs = 10 if learns else 1, Chain(read=read)
    elbo = trained(programs, drawn)
    assert not elbo.particles.now.sums
    loss_of(elbo, programs)
    assert elbo.particles.now.sums


AWAY: list[dict[str, Any]] = [
    *({"num_particles": 1}, {"num_particles": 2, "vectorize_particles": True}, {"vectorize_particles": True}),
    *({"estimator": AllAction()}, {"critic": LinearCritic()}, {"structure": "dynamic"}, {"analytic_kl": True}),
]


@pytest.mark.parametrize("options", AWAY, ids=lambda options: ", ".join(options))
def test_options_keep_it_away(options: dict[str, Any]) -> None:
    assert not trained(Chain(), **options).particles.now.sums


DRAWN = {
    "two sites": Chain(read=lambda z, last: z + last),
    "rows": Chain(read=lambda z, _: z.mean(-1, keepdim=True) + 0.0 * z),
    "mixes": Chain(read=lambda z, _: z - z.mean(0) if z.dim() > 1 else z),
    "does not broadcast": Chain(read=lambda z, _: z.expand(ROWS)),
    "counts entries": Chain(read=lambda z, _: z * z.numel()),
    "noise": Chain(read=lambda z, _: z + 0.1 * torch.rand(())),
    "steered": Chain(after=lambda z: z if bool((z >= 0.0).all()) else -z),
    "cost": dear(Chain()),
    "critic": Chain(infer={"bpq": {"critic": LinearCritic()}}),
}


@pytest.mark.parametrize("name", DRAWN)
def test_programs_that_draw(name: str) -> None:
    elbo = trained(DRAWN[name])
    assert not elbo.particles.now.sums and elbo.num_steps == 4


READS: dict[str, tuple[Any, bool]] = {
    "plain": (lambda z, _: z, True),
    "reads its size": (lambda z, _: 0.5 * z * z.shape[-1], False),
    "needs its size": (lambda z, _: z.narrow(-1, 0, ROWS) if z.dim() else z, False),
}


@pytest.mark.parametrize(("read", "is_compact"), READS.values(), ids=READS)
def test_values_that_are_alike_in_all_rows_of_data_run_once(read: Any, is_compact: bool) -> None:
    programs = Chain(read=read)
    elbo = trained(programs)
    assert elbo.particles.now.sums and elbo.particles.now.is_compact is is_compact
    expected = float(exact_loss(programs.model, programs.guide))
    assert loss_of(elbo, programs) == pytest.approx(expected, abs=1e-12)
    losses = [elbo.loss(programs.model, programs.guide) for _ in range(3)]
    assert losses == pytest.approx([expected] * 3, abs=1e-12)


@pytest.mark.parametrize(("most", "sums"), [(2 * ROWS - 1, False), (2 * ROWS, True)])
def test_large_programs_draw(most: int, sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "MOST_SUMMED", most)
    elbo = trained(Chain())
    assert elbo.particles.now.sums is sums
    assert [way.number for way in elbo.runner.recordings.now.sums or ()] == [ROWS, ROWS] * sums


@pytest.mark.filterwarnings("ignore")
def test_an_infinite_loss_ends_it() -> None:
    never = torch.tensor(0.0)

    def forbid(z: Tensor) -> Tensor:
        # Not infinite at first: the states that are possible change while it learns.
        return torch.where((z > 0.5) & (never > 0.0), -torch.inf, z)

    programs = Chain(after=forbid)
    elbo = trained(programs)
    assert elbo.particles.now.sums
    never += 1.0
    loss_of(elbo, programs)
    assert not elbo.particles.now.sums and "not finite" in elbo.particles.said


def test_a_program_that_grows_goes_on() -> None:
    elbo = trained(programs := Chain())
    for length in (3, 1):
        programs.length = length
        loss_of(elbo, programs)
        assert elbo.particles.now.sums and len(elbo.info) == length
        assert_unbiased(elbo, programs.model, programs.guide)


def test_copies_and_states_go_on() -> None:
    elbo = trained(programs := Chain())
    loaded = trained(programs, 1)
    loaded.load_state_dict(through_file(elbo.state_dict(), weights_only=True))
    expected = loss_of(elbo, programs)
    for other in (copy.deepcopy(elbo), loaded):
        assert loss_of(other, programs) == pytest.approx(expected, abs=1e-12)
        assert other.particles.now.sums


def test_diagnosis_knows_that_nothing_is_drawn() -> None:
    elbo = trained(programs := Chain())
    found = diagnose(elbo, programs.model, programs.guide, num_samples=5)
    assert not [finding for finding in found.findings if "particle" in str(finding) or "critic" in str(finding)]
    moments = gradient_moments(elbo, programs.model, programs.guide)
    assert moments.is_exact and moments.total_variance == pytest.approx(0.0, abs=1e-20)


@pytest.mark.parametrize("is_beside", [False, True], ids=["alone", "beside a pathwise site"])
def test_recorded_steps_are_those_of_eager_ones(is_beside: bool) -> None:
    programs, zero, losses = Chain(), torch.zeros((), dtype=torch.float64), []

    def model() -> None:
        if is_beside:
            pyro.sample("mu", dist.Normal(zero, 1.0))
        programs.model()

    def guide() -> None:
        if is_beside:
            pyro.sample("mu", dist.Normal(pyro.param("m", zero + 0.3), 1.0))
        programs.guide()

    for options in ({}, {"compile": "eager"}):
        fresh()
        elbo = TraceBackpropQ_ELBO(**options)  # type: ignore[arg-type]
        losses.append(repeat(20, SVI(model, guide, Adam({"lr": 0.05}), elbo).step))
        assert elbo.particles.now.sums
    assert elbo.compiled is not None and len(elbo.compiled.entries) == 1
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)


def test_what_the_program_warns_of_is_told_in_each_step() -> None:
    programs, elbo = Chain(), TraceBackpropQ_ELBO()

    def model() -> None:
        warnings.warn("by the program", UserWarning, stacklevel=1)
        programs.model()

    for _ in range(4):
        with told() as texts:
            elbo.loss_and_grads(model, programs.guide)
        assert "by the program" in texts
    assert elbo.particles.now.sums


def policy() -> None:
    w, z = pyro.param("w", torch.tensor([0.2, -0.3], dtype=torch.float64)), torch.zeros((), dtype=torch.float64)
    with pyro.plate("rows", ROWS), poutine.scale(scale=0.7):
        for t in range(2):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=w[0] + w[1] * z))
            cost(f"c_{t}", (z - 0.3) ** 2 * w[1].exp() + t)


@pytest.mark.parametrize(("objective", "model"), [(ExpectedCost, None), (TraceBackpropQ_ELBO, Chain().model)])
def test_costs_that_are_values_are_summed(objective: Any, model: Any) -> None:
    elbo, only_costs = objective(), model is None
    repeat(4, elbo.loss_and_grads, model, policy)
    assert elbo.particles.now.sums
    pyro.clear_param_store()
    expected = float(exact_loss(model, policy, only_costs=only_costs))
    assert elbo.loss_and_grads(model, policy) == pytest.approx(expected, abs=1e-12)
    exact = exact_gradient(model, policy, only_costs=only_costs)["w"]
    torch.testing.assert_close(pyro.param("w").grad, exact)
