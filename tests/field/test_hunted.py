"""Programs and calls on which gradients were biased, or steps failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import real
from pyro.distributions.testing.rejection_gamma import RejectionStandardGamma
from pyro.infer import SVI
from pyro.optim import SGD, Adam
from steps import coin_guide, coins_guide, filtered, fresh, from_seed, hidden, rows, seeing, stepped, trained, unbiased
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pyro_bpq import (
    ExpectedCost,
    LeaveOneOut,
    ProximalSVI,
    ScoreFunction,
    TraceBackpropQ_ELBO,
    TraceBackpropQ_IWAE,
    cost,
)
from pyro_bpq.errors import BPQWarning, OptionError, PlateError
from pyro_bpq.estimators import CrossedLeaveOneOut, Differences, Hindsight, Pathwise, SecondRun, StraightThrough
from pyro_bpq.plan import plan as particles
from pyro_bpq.rollout.runs import Program
from pyro_bpq.testing import assert_unbiased, expected_moments

DATA, WEIGHTS, PRIOR = real(0.5, 1.7, -0.4), real(0.9, -0.6, 1.4), real(0.4, 0.2, 0.6)
KEPT = torch.tensor([True, False])
PAIRED: dict[str, Any] = {"num_particles": 2, "estimator": ScoreFunction(LeaveOneOut())}


def logits() -> Tensor:
    return pyro.param("q", real(0.3, -0.7, 0.8))


def traced(program: Callable[[], Any]) -> Any:
    """A run of one particle, of an ELBO that has taken a step."""
    elbo = trained(TraceBackpropQ_ELBO(1), program, program, steps=1)
    return elbo.runner.trace(Program(program, program, (), {}), elbo.particles.one, step=1)


def in_event(
    law: Callable[[Tensor], Any], between: Callable[[str, Tensor, bool], Tensor] = lambda name, z, own: z
) -> Any:
    """Guide and model of three bits, whose data are normal around a function of them."""

    def guide() -> None:
        between("y", pyro.sample("z", dist.Bernoulli(logits=logits()).to_event(1)), True)

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(PRIOR).to_event(1))
        mean = law(between("y", z, False))
        pyro.sample("x", dist.Normal(mean, 0.8).to_event(1), obs=DATA[: len(mean)])

    return model, guide


def in_rows(law: Callable[[Tensor], Any], number: int = 1) -> Any:
    """The same with a plate of three rows, or counts up to a number in them."""

    def guide() -> None:
        with pyro.plate("d", 3):
            pyro.sample("z", dist.Binomial(number, logits=logits()))

    def model() -> None:
        with pyro.plate("d", 3):
            pyro.sample("x", dist.Normal(law(pyro.sample("z", dist.Binomial(number, PRIOR))), 0.8), obs=DATA)

    return model, guide


def above(law: Callable[[Tensor], Any], number: int, estimator: Any) -> Any:
    """The same of one count, which another site of the guide reads."""

    def guide() -> None:
        z = pyro.sample("z", dist.Binomial(number, logits=logits()[0]), infer={"bpq": {"estimator": estimator}})
        pyro.sample("y", law(z))

    def model() -> None:
        z = pyro.sample("z", dist.Binomial(number, PRIOR[0]))
        y = pyro.sample("y", dist.Bernoulli(PRIOR[:2]).to_event(1))
        pyro.sample("x", dist.Normal(z + y.sum(-1), 0.8), obs=DATA[0])

    return model, guide


def dense(z: Tensor) -> Any:
    return dist.Delta(torch.ones(2), log_density=0.7 * z, event_dim=1)


def half_hidden(z: Tensor) -> Any:
    return dist.Bernoulli(logits=logits()[1:] + 2.0 * z).mask(KEPT).to_event(1)


def through_a_masked_site(name: str, z: Tensor, own: bool) -> Tensor:
    fn = dist.Delta((z * WEIGHTS).sum(-1)) if own else dist.Normal(torch.tensor(0.0), 1.0)
    return z + pyro.sample(name, fn.mask(False)).unsqueeze(-1)


def bounds(z: Tensor) -> Tensor:
    at = real(2.1, 0.1, 1.1)
    return 1.5 * torch.bucketize(at, torch.arange(3.0) + 0.3 * z)


def put_by_mask(z: Tensor) -> Tensor:
    return torch.zeros(3, 2, dtype=z.dtype).index_put((torch.tensor([True, False, True]),), z[0])[:, 0]


def packed(z: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.RNN(1, 1, batch_first=True).double()
    whole = z.reshape(-1, 3, 1)
    found, _ = pad_packed_sequence(layer(pack_padded_sequence(whole, torch.full((len(whole),), 3), True))[0], True)
    return 2.0 * found.reshape(z.shape)


ONE: dict[str, Any] = {"num_particles": 1}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "a bit above a density": (above(dense, 1, Hindsight()), ONE),
    "a count above a density": (above(dense, 2, Differences()), ONE),
    "a bit above a mask within": (above(half_hidden, 1, Hindsight()), ONE),
    "counts whose rows meet": (in_rows(lambda z: z - z.mean(-1, keepdim=True), 2), {"estimator": Differences()}),
    "bits whose rows meet": (in_rows(lambda z: z.roll(1, -1)), {"estimator": Hindsight()}),
    "a masked site": (in_event(lambda z: z, through_a_masked_site), PAIRED),
    "masked_scatter": (in_event(lambda z: torch.zeros_like(z).masked_scatter(z.bool(), WEIGHTS)), PAIRED),
    "masked_scatter in rows": (in_rows(lambda z: torch.zeros_like(z).masked_scatter(z.bool(), WEIGHTS)), PAIRED),
    "bounds": (in_event(bounds), PAIRED),
    "strides": (in_event(lambda z: z[1:].as_strided((2,), (1,), 0)), PAIRED),
    "numbers of another type": (in_event(lambda z: z[:2].view(torch.int64).double() * 1e-18), PAIRED),
    "a mask that is known": (in_event(put_by_mask), PAIRED),
    "a packed sequence": (in_rows(packed), {"num_particles": 2, "vectorize_particles": True}),
}


@pytest.mark.filterwarnings("ignore:Rows of the plate:pyro_bpq.errors.BPQWarning")
@pytest.mark.filterwarnings("ignore:Particles run one after the other:pyro_bpq.errors.BPQWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_rows_and_components_read(name: str) -> None:
    programs, options = CASES[name]
    unbiased(TraceBackpropQ_ELBO(**options), *programs, steps=4)


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_site_of_the_guide_that_the_model_observes(is_hidden: bool) -> None:
    def guide() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=logits()[0]))
        pyro.sample("x", dist.Bernoulli(logits=logits()[1] + z), infer={"is_auxiliary": True})

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(PRIOR[0]))
        pyro.sample("x", dist.Bernoulli(logits=2.0 * z), obs=torch.tensor(1.0))

    unbiased(hidden(TraceBackpropQ_ELBO(2 if is_hidden else 1), is_hidden), model, guide, steps=2)


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize("mask", [False, KEPT])
def test_what_a_mask_within_an_event_hides_is_drawn(mask: Any, is_hidden: bool) -> None:
    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=logits()[:2]).mask(mask).to_event(1))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(PRIOR[:2]).mask(False).to_event(1))
        pyro.sample("x", dist.Normal(z[0] + 0.5 * z[1], 0.8), obs=DATA[0])

    with filtered("error"):
        unbiased(hidden(TraceBackpropQ_ELBO(2), is_hidden), model, guide, steps=2)


@pytest.mark.parametrize("is_scored", [False, True])
def test_rejections_have_a_score(is_scored: bool) -> None:
    shape = real(1.2, 2.0)

    def program() -> None:
        law = RejectionStandardGamma(pyro.param("shape", shape))
        if is_scored:
            with pyro.plate("d", 2):
                pyro.sample("x", law, infer={"bpq": {"estimator": ScoreFunction()}})
        else:
            pyro.sample("x", law.to_event(1))

    run = traced(program)
    law, value = RejectionStandardGamma(shape), run.run.sites["x"].value
    score = law.log_prob(value) if is_scored else law.score_parts(value).score_function
    torch.testing.assert_close(run.scored["x"].sum(), score.sum())


def test_a_flow_that_scores_what_it_remembers_hides_no_row() -> None:
    def guide() -> None:
        with pyro.plate("d", 3):
            z = pyro.sample("z", dist.Bernoulli(logits=logits()))
            flow = dist.transforms.AffineTransform(z.roll(1, -1), 1.0, cache_size=1)
            pyro.sample("y", dist.TransformedDistribution(dist.Normal(torch.zeros(3), 1.0), [flow]))

    def model() -> None:
        with pyro.plate("d", 3):
            z = pyro.sample("z", dist.Bernoulli(PRIOR))
            pyro.sample("y", dist.Normal(z, 1.0))

    with pytest.warns(BPQWarning, match=r"log q\(y\): it reads .* by 'a law that its log-probability does not show'"):
        stepped(1, TraceBackpropQ_ELBO(1), model, guide)


@pytest.mark.parametrize("estimator", [Hindsight(), SecondRun()])
def test_particles_of_other_structure_have_signals_of_their_own(estimator: Any) -> None:
    calls = 0

    def guide() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=logits()[0]))
        pyro.sample("y", dist.Bernoulli(logits=logits()[1] + z))

    def model() -> None:
        nonlocal calls
        calls += 1
        y = pyro.sample("z", dist.Bernoulli(PRIOR[0])) + pyro.sample("y", dist.Bernoulli(PRIOR[1]))
        pyro.sample("x", dist.Normal(3.0 * y, 1.0), obs=DATA[1])
        if calls % 2:
            pyro.factor("nothing", torch.tensor(0.0))

    unbiased(TraceBackpropQ_ELBO(num_particles=2, estimator=estimator), model, guide, steps=8)


def test_crossed_baselines_are_leave_one_out_across_structures() -> None:
    def program(*odds: Tensor) -> None:
        if pyro.sample("z", dist.Bernoulli(logits=odds[0])).item():
            pyro.sample("y", dist.Bernoulli(logits=odds[1]))

    programs = lambda: program(*PRIOR), lambda: program(*logits())
    found, wanted = (
        expected_moments(TraceBackpropQ_ELBO(2, estimator=estimator).eval(), *programs).variance["q"]
        for estimator in (CrossedLeaveOneOut(), ScoreFunction(LeaveOneOut()))
    )
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-12)


def test_a_number_of_values_that_was_drawn_steers() -> None:
    def guide() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=logits()[0]))
        pyro.sample("y", dist.Binomial(1 + z, logits=logits()[1] + z))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(PRIOR[0]))
        y = pyro.sample("y", dist.Binomial(1 + z, PRIOR[1]))
        pyro.sample("x", dist.Normal(y * z + y, 1.0), obs=DATA[0])

    assert stepped(2, TraceBackpropQ_ELBO(2), model, guide).runner.recordings.escaping == ("z",)


def test_a_site_of_one_value_is_served() -> None:
    def program() -> None:
        pyro.sample("z", dist.Categorical(logits=pyro.param("w", torch.zeros(1))))

    assert TraceBackpropQ_ELBO(estimator=Hindsight()).loss_and_grads(program, program) == 0.0


def test_counts_that_do_not_broadcast_run_few_hidden_particles() -> None:
    def program(rate: float) -> Tensor:
        with pyro.plate("d", 4):
            return pyro.sample("k", dist.Poisson(torch.full((4,), rate)))

    def model() -> None:
        features = torch.cat([program(4.0)[:, None], torch.ones(4, 2)], -1)
        with pyro.plate("data", 4):
            pyro.sample("y", dist.Normal(features.sum(-1), 0.5), obs=torch.full((4,), 5.0))

    elbo = stepped(2, TraceBackpropQ_ELBO(), model, lambda: program(2.0))
    assert elbo.particles.now.is_hidden and elbo.num_particles == 8


def test_buffers_of_a_guide_that_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(particles, "DRAWN_STEPS", (1, 1))
    net = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))

    def model(x: Tensor) -> None:
        with pyro.plate("d", len(x)):
            z = pyro.sample("z", dist.Bernoulli(0.3))
            pyro.sample("x", dist.Normal(z.unsqueeze(-1), 1.0).to_event(1), obs=x)

    def guide(x: Tensor) -> None:
        pyro.module("net", net)
        with pyro.plate("d", len(x)):
            pyro.sample("z", dist.Bernoulli(logits=net(x).squeeze(-1)))

    svi = SVI(model, guide, Adam({"lr": 0.01}), elbo := TraceBackpropQ_ELBO())
    for _ in range(3):
        svi.step(torch.randn(5, 2))
    assert elbo.particles.now.sums and net[1].num_batches_tracked == 3


def test_jumps_are_found_without_learning_too() -> None:
    def smooth() -> Tensor:
        return pyro.sample("x", dist.Normal(pyro.param("m", torch.tensor(0.2)), 1.0))

    def model() -> None:
        pyro.factor("f", torch.where(smooth() > 0.3, 2.0, -1.0))

    with pytest.warns(BPQWarning, match="'x' is reparameterised, but a pathwise gradient misses jumps"):
        TraceBackpropQ_ELBO(1).eval().loss_and_grads(model, smooth)


def test_arguments_with_gradients_are_not_compiled() -> None:
    weights = torch.zeros(4, requires_grad=True)
    programs = rows(lambda z, _: z, torch.tensor([1.0, 2.0]), lambda own: own)
    elbo = TraceBackpropQ_ELBO(1, compile="eager")
    with pytest.warns(BPQWarning, match="an argument carries a gradient"):
        for first in (*[0] * 8, 2, 0):
            weights.grad = None
            elbo.loss_and_grads(*programs, weights[first : first + 2])
            assert weights.grad is not None and weights.grad.nonzero().flatten().tolist() == [first, first + 1]


def test_a_number_of_particles_that_is_set_later_is_that_of_the_bound() -> None:
    later = TraceBackpropQ_IWAE(2)
    later.num_particles = 6
    elbos, model = (later, TraceBackpropQ_IWAE(6)), seeing(lambda z: z)
    found, wanted = (from_seed(0, elbo.loss, model, coin_guide) for elbo in elbos)
    assert found == wanted


def test_later_epochs_leave_reparameterised_sites_alone() -> None:
    def guide() -> None:
        pyro.sample("w", dist.Normal(pyro.param("m", torch.tensor(0.0)), 1.0))

    def model() -> None:
        pyro.sample("w", dist.Normal(3.0, 1.0))

    found = []
    for epochs in (1, 5):
        fresh()
        ProximalSVI(model, guide, SGD({"lr": 0.1}), TraceBackpropQ_ELBO(2), epochs=epochs).step()
        found.append(pyro.param("m").item())
    assert found[0] == found[1] > 0.0


def test_a_run_that_was_warmed_up_is_resumed_with_one_particle() -> None:
    model, guide = in_rows(lambda z: z)
    elbo, twin = TraceBackpropQ_ELBO(), TraceBackpropQ_ELBO()
    elbo.warm_up(model, guide, steps=2)
    twin.load_state_dict(elbo.state_dict())
    assert twin.num_particles == 1 and not twin.particles.is_open


@pytest.mark.filterwarnings("ignore:Found vars in model")
def test_errors_in_the_run_that_looks_for_plates_are_told() -> None:
    def model() -> None:
        with pyro.plate("d", 10):
            z = pyro.sample("z", dist.Categorical(torch.ones(2)), infer={"enumerate": "parallel"})
            pyro.sample("x", dist.Normal(torch.zeros(2)[z], 1.0), obs=torch.zeros(9))

    with pytest.raises(PlateError, match=r"data of site 'x' has the shape \(9,\)"):
        TraceBackpropQ_ELBO(enumeration="exact").loss_and_grads(model, lambda: None)


def test_deterministic_statements_have_a_place_in_expected_costs() -> None:
    def guide() -> None:
        z = pyro.deterministic("y", 2.0 * pyro.sample("z", dist.Bernoulli(logits=logits()[0])))
        cost("c", z)

    unbiased(ExpectedCost(num_particles=1), None, guide, steps=1)


def test_a_cost_without_a_name_is_refused() -> None:
    with pytest.raises(OptionError, match="the name comes first"):
        ExpectedCost().loss_and_grads(None, lambda: cost(lambda z: z, torch.ones(())))  # type: ignore[arg-type]


def test_a_context_that_is_not_finite_is_refused() -> None:
    def guide() -> None:
        context = torch.tensor([1.0, torch.nan])
        pyro.sample("z", dist.Bernoulli(logits=logits()[0]), infer={"bpq": {"context": context}})

    with pytest.raises(OptionError, match="'z': the option context is NaN or infinite"):
        TraceBackpropQ_ELBO().loss_and_grads(lambda: pyro.sample("z", dist.Bernoulli(0.3)), guide)


@pytest.mark.filterwarnings("ignore:Particles run in one call:pyro_bpq.errors.BPQWarning")
def test_scales_of_further_particles_are_those_of_the_run() -> None:
    """A number that grows from step to step is left out of what calls are told apart by."""

    def bits(*_: float) -> Tensor:
        return pyro.sample("z", dist.Bernoulli(logits=logits()).to_event(1))

    def model(scale: float) -> None:
        z = bits()
        with pyro.poutine.scale(scale=scale):
            pyro.factor("f", -1.0 - 0.0 * z.sum())

    pyro.clear_param_store()
    elbo = TraceBackpropQ_ELBO(2, vectorize_particles=True)
    losses = [elbo.loss_and_grads(model, bits, 1.0 - 0.1 * step) for step in range(9)]
    assert elbo.particles.now.is_hidden
    assert losses == pytest.approx([1.0 - 0.1 * step for step in range(9)])


@pytest.mark.filterwarnings("ignore:Particles run in one call:pyro_bpq.errors.BPQWarning")
@pytest.mark.parametrize(("held", "steps"), [(float, 6), (torch.tensor, 7)])
def test_numbers_that_the_first_particle_does_not_show(held: Callable[[float], Any], steps: int) -> None:
    """Where its values are zero it costs the same with another factor; further particles do not.

    Operators are the same where a number has become a tensor.
    """

    def guide(factor: float) -> None:
        pyro.sample("z", dist.Bernoulli(logits=logits() - 2.0).to_event(1))

    def model(factor: float) -> None:
        z = pyro.sample("z", dist.Bernoulli(PRIOR).to_event(1))
        pyro.factor("f", -held(factor) * z.sum())

    for seed in range(12):
        fresh(seed)
        elbo = TraceBackpropQ_ELBO(4, vectorize_particles=True)
        for step in range(steps):
            elbo.loss_and_grads(model, guide, 0.1 * step)
        for run in elbo.observe(Program(model, guide, (0.7,), {}), shows=False).runs:
            assert float(run.run.costs["-log p(f)"]) == pytest.approx(0.7 * float(run.run.sites["z"].value.sum()))


@pytest.mark.filterwarnings("ignore:Particles run in one call:pyro_bpq.errors.BPQWarning")
def test_numbers_that_only_costs_of_few_digits_show() -> None:
    kept = deque([1.0])

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(PRIOR).to_event(1))
        pyro.factor("f", -kept[0] * (1.0 + z.sum()).bfloat16())

    elbo = stepped(7, TraceBackpropQ_ELBO(4, vectorize_particles=True), model, coins_guide)
    kept[0] = 0.5
    for run in elbo.observe(Program(model, coins_guide, (), {}), shows=False).runs:
        assert float(run.run.costs["-log p(f)"]) == 0.5 * (1.0 + float(run.run.sites["z"].value.sum()))


def another_row(odds: Tensor) -> None:
    """In a plate of particles ``z[:, None]`` is one; where all bits of a particle agree, it costs the same."""
    with pyro.plate("d", 3):
        z = pyro.sample("z", dist.Bernoulli(logits=odds))
        pyro.sample("y", dist.Categorical(logits=odds[:, None] * DATA + z[:, None]))


def another_number(odds: Tensor) -> None:
    """In a plate of particles ``z.shape[0]`` is; unless all bits are one, it costs the same."""
    z = pyro.sample("z", dist.Bernoulli(logits=odds).to_event(1))
    pyro.factor("f", z.prod(-1) / z.shape[0], has_rsample=False)


@pytest.mark.parametrize("program", [another_row, another_number])
def test_a_plate_of_particles_is_refused_whatever_the_first_values(program: Callable[[Tensor], None]) -> None:
    for seed in range(16):
        programs = lambda: program(PRIOR), lambda: program(logits())
        elbo = trained(TraceBackpropQ_ELBO(), *programs, steps=1, seed=seed)
        assert not elbo.particles.now.has_plate


class Corrected(Pathwise):
    """Attaches a part of the gradient, and gives the rest."""

    attaches: ClassVar[bool] = True
    corrects: ClassVar[bool] = True

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        return value.detach() + 0.0 * logits().sum()

    def correction(self, fn: Any, value: Tensor) -> Tensor:
        return 2.0 * logits().sum()


@pytest.mark.parametrize("mask", [True, False, KEPT])
def test_what_an_estimator_corrects_stays_under_a_mask(mask: Any) -> None:
    def program() -> None:
        law = dist.Normal(logits()[:2], 1.0).mask(mask).to_event(1)
        pyro.sample("z", law, infer={"bpq": {"estimator": Corrected()}})

    torch.testing.assert_close(traced(program).scored["z"], 2.0 * logits().sum())


def test_particles_whose_values_are_given_a_gradient_have_it_in_each_of_them() -> None:
    """From the recording of one they would be drawn without it; in a plate this program fails."""

    def program(odds: Tensor) -> None:
        infer = {"bpq": {"estimator": StraightThrough()}}
        z = pyro.sample("z", dist.Bernoulli(logits=odds[:2]).to_event(1), infer=infer)
        pyro.sample("y", dist.Bernoulli(logits=odds[2] + 0.0 * z[0]))

    programs = lambda: program(PRIOR), lambda: program(logits())
    elbo = stepped(2, TraceBackpropQ_ELBO(), *programs)
    runs = elbo.observe(Program(*programs, (), {}), shows=False).runs
    assert all(run.run.sites["z"].value.requires_grad for run in runs)


def test_what_python_reads_later_is_no_part_of_a_coin() -> None:
    """Else a coin read others in some runs only, by values that the others have led to."""

    def guide() -> None:
        y = pyro.sample("y", dist.Bernoulli(logits=pyro.param("q", torch.tensor(-0.7))))
        pyro.sample("other", dist.Bernoulli(torch.tensor(0.4)))
        number = pyro.sample("number", dist.Bernoulli(logits=1.5 * y - 0.3))
        if number > 0:
            pyro.sample("last", dist.Bernoulli(torch.tensor(0.5)))

    def model() -> None:
        y = pyro.sample("y", dist.Bernoulli(torch.tensor(0.3)))
        pyro.sample("other", dist.Bernoulli(torch.tensor(0.9)))
        if pyro.sample("number", dist.Bernoulli(torch.tensor(0.6))) > 0:
            pyro.sample("last", dist.Bernoulli(torch.tensor(0.2 + 0.5 * y.item())))

    assert_unbiased(TraceBackpropQ_ELBO(1, estimator=ScoreFunction()).eval(), model, guide)


def test_a_layer_that_gets_its_shape_in_the_first_step_is_recorded() -> None:
    layer = torch.nn.LazyLinear(1)

    model, guide = rows(lambda z: z, torch.zeros(4), lambda: layer(torch.ones(4, 3)).squeeze(-1))
    assert stepped(3, TraceBackpropQ_ELBO(), model, guide).runner.recordings.num_recorded


def test_attention_without_dropout_draws_nothing() -> None:
    def read(z: Tensor) -> Tensor:
        queries = torch.stack([z, 1.0 - z], -1)[..., None, None, :]
        return scaled_dot_product_attention(queries, queries, queries).sum((-1, -2, -3))

    # Tests draw in the first fifty steps.
    assert stepped(55, TraceBackpropQ_ELBO(), *rows(read, torch.zeros(2))).particles.now.sums
