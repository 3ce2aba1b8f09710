"""Options and mistakes that were passed over without a word, or stopped a step with an error that names nothing."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import real
from pyro import poutine
from pyro.infer import SVI
from pyro.optim import Adam
from steps import coin_guide as guide
from steps import coins_guide, fresh, seeing, stepped, text_of, told, trained, unbiased, warnings_of

from pyro_bpq import AllAction, ExpectedCost, KSubset, TraceBackpropQ_ELBO, cost
from pyro_bpq.diagnostics import compare_estimators
from pyro_bpq.errors import BPQWarning, OptionError, UnsupportedProgramError
from pyro_bpq.estimators import RELAX, CriticBaseline, ParentAdvantage
from pyro_bpq.record.key import reach
from pyro_bpq.testing import assert_unbiased

model = seeing(lambda z: z)


def test_mistakes_in_options_are_told() -> None:
    assert "None at step 0" in text_of(model, guide, OptionError, num_particles=1, lam=lambda step: None)
    given: Any = [AllAction()]
    for call in (lambda: KSubset(torch.zeros(4), 2.5), lambda: compare_estimators(model, guide, estimators=given)):
        with pytest.raises(OptionError, match=r"k is whole|write \{"):
            call()


def test_critics_that_are_missing_are_told() -> None:
    (text,) = warnings_of(model, guide, estimator=CriticBaseline(), critic=None)
    assert text.startswith("CriticBaseline() at z has no critic")


def test_particles_that_are_tried_warn_of_nothing() -> None:
    def squares() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.full((3,), 0.4)).to_event(1))
        pyro.factor("f", -torch.nn.functional.mse_loss(z, torch.ones(3)))

    assert not warnings_of(squares, coins_guide, category=UserWarning)


def test_counts_of_a_number_that_is_drawn_are_enumerated() -> None:
    def program(logits: Any) -> torch.Tensor:
        with pyro.plate("d", 2):
            z = pyro.sample("z", dist.Bernoulli(logits=logits[0]))
            return pyro.sample("y", dist.Binomial(2.0 * z, logits=logits[1] + z))

    def counts() -> None:
        program(pyro.param("q", real(0.3, -0.2)))

    def data() -> None:
        y = program(real(0.1, 0.6))
        with pyro.plate("data", 2):
            pyro.sample("x", dist.Normal(y, 1.0), obs=torch.tensor([0.2, 0.9]))

    unbiased(TraceBackpropQ_ELBO(num_particles=1), data, counts, steps=3)


def test_float32_is_told() -> None:
    def singles() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3, dtype=torch.float32))))

    elbo = trained(TraceBackpropQ_ELBO(num_particles=1), model, singles, steps=1).eval()
    with pytest.raises(AssertionError, match="Not all parameters are float64"):
        assert_unbiased(elbo, model, singles, atol=1e-30)


def test_parameters_of_particles_that_mix_have_the_shape_of_one() -> None:
    def bits() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.zeros(3))).to_event(1))
        pyro.sample("y", dist.Bernoulli(logits=pyro.param("w", z + 0.1) + z).to_event(1))

    def mixed() -> None:
        laws = (dist.Bernoulli(torch.full((3,), 0.4)).to_event(1) for _ in range(2))
        total = sum(pyro.sample(name, law).sum() for name, law in zip("zy", laws, strict=True))
        pyro.sample("x", dist.Normal(total, 1.0), obs=torch.tensor(0.9))

    pyro.clear_param_store()
    with pytest.warns(BPQWarning, match="Particles run in one call"):
        TraceBackpropQ_ELBO(4, max_plate_nesting=1, vectorize_particles=True).loss_and_grads(mixed, bits)
    assert pyro.param("w").shape == (3,)


def test_particles_that_mix_do_so_in_later_steps_too() -> None:
    """The law reads its number of draws on the host: then runs in a plate, and of one, are checked by other numbers."""

    def program(odds: torch.Tensor) -> None:
        z = pyro.sample("z", dist.Binomial(2, logits=odds[:2]).to_event(1))
        pyro.sample("y", dist.Bernoulli(logits=odds[2] + z.reshape(-1)[0]))

    programs = lambda: program(real(0.1, 0.6, 0.2)), lambda: program(pyro.param("q", real(0.3, -0.2, 0.5)))
    elbo = TraceBackpropQ_ELBO(2, max_plate_nesting=1, vectorize_particles=True)
    pyro.clear_param_store()
    for step in range(3):
        with told(BPQWarning) as texts:
            elbo.loss_and_grads(*programs)
        assert elbo.particles.now.is_hidden
        assert len(texts) == (step == 0)


def test_critics_that_a_step_has_no_use_of_stay() -> None:
    def chain(odds: Any) -> None:
        z, t = torch.tensor(1.0), 0
        while t < 4 and z.item():
            z, t = pyro.sample(f"z{t}", dist.Bernoulli(logits=odds[t])), t + 1

    def chain_guide() -> None:
        chain(pyro.param("q", torch.tensor([0.3, 0.2, 0.1, 0.0])))

    fresh(3)
    elbo = TraceBackpropQ_ELBO(1, learner=None, structure="dynamic")
    svi = SVI(lambda: chain(torch.zeros(4)), chain_guide, Adam({"lr": 0.05}), elbo)
    for wanted in (4, 1):
        while len(elbo.info) != wanted:
            before = {name: weight.detach().clone() for name, weight in elbo.critics.named_parameters()}
            svi.step()
    after = dict(elbo.critics.named_parameters())
    still = [name for name, weight in after.items() if weight.grad is None]
    assert still and all(torch.equal(after[name], before[name]) for name in still)


def test_estimators_that_differentiate_are_left_out_in_inference_mode() -> None:
    def program() -> None:
        probs = torch.softmax(pyro.param("q", torch.zeros(3)), -1)
        pyro.sample("z", dist.OneHotCategorical(probs), infer={"bpq": {"estimator": RELAX()}})

    elbo = stepped(1, TraceBackpropQ_ELBO(1), program, program)
    with torch.inference_mode():
        assert elbo.differentiable_loss(program, program) == 0.0


def test_advantages_over_parents_need_rows_that_stay_apart() -> None:
    def policy() -> None:
        with pyro.plate("d", 2):
            z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.zeros(2))))
            cost("c", z.roll(1, -1))

    objective = ExpectedCost(1, estimator=ParentAdvantage())
    with told() as found, pytest.raises(UnsupportedProgramError, match="the costs of their own row alone"):
        objective.loss_and_grads(None, policy)
    assert len(found) == 1


def test_values_that_are_replayed_are_inputs_of_a_recording() -> None:
    handler = poutine.replay(trace=poutine.trace(guide).get_trace())
    for _ in range(2):
        handler.trace = poutine.trace(guide).get_trace()
        value = handler.trace.nodes["z"]["value"]
        assert any(own is value for own in reach({"handler": handler}).tensors)
