"""Values of straight-through distributions carry their relaxed value, which their log-probability reads."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from steps import repeat
from torch import Tensor, tensor

from pyro_bpq import AllAction, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.estimators import Hindsight
from pyro_bpq.reruns.flips import flipped_costs


def relaxed(logits: Tensor, kind: str) -> Any:
    if kind == "bit":
        return dist.RelaxedBernoulliStraightThrough(tensor(0.5), logits=logits)
    one_hot = dist.RelaxedOneHotCategoricalStraightThrough
    return one_hot(tensor(0.5), logits=torch.stack([logits, -logits, 0.3 * logits], -1))


def parameter(name: str, value: float) -> Tensor:
    found: Tensor = pyro.param(name, tensor(value))
    return found


class Program:
    """The law of a relaxed site reads a binary one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def model(self) -> None:
        a = pyro.sample("a", dist.Bernoulli(tensor(0.4)))
        z = pyro.sample("z", relaxed(2.0 * a - 1.0 + parameter("b", 0.3), self.kind))
        z = z if self.kind == "bit" else z[..., 0] - z[..., 1]
        pyro.sample("x", dist.Normal(z + 0.5 * a, 1.0), obs=tensor(1.3))

    def guide(self) -> None:
        pyro.sample("z", relaxed(parameter("m", 0.5), self.kind))
        pyro.sample("a", dist.Bernoulli(logits=parameter("l", 0.2)))


@pytest.mark.parametrize("kind", ["bit", "one-hot"])
def test_programs_of_such_laws_are_not_summed(kind: str) -> None:
    program, elbo = Program(kind), TraceBackpropQ_ELBO()
    repeat(60, elbo.loss_and_grads, program.model, program.guide)
    assert elbo.plan is not None and not elbo.plan.sums and not elbo.particles.now.sums


@pytest.mark.parametrize("kind", ["bit", "one-hot"])
def test_a_law_at_other_values_reads_what_its_value_carries(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[Any, Any]] = []

    def spy(plan: Any, values: Any, rollout: Any) -> Any:
        tables = flipped_costs(plan, values, rollout)
        found.append((tables[0]["a"], values.traced[0].model_trace.nodes))
        return tables

    monkeypatch.setattr("pyro_bpq.objectives.runner.flipped_costs", spy)
    program, elbo = Program(kind), TraceBackpropQ_ELBO(num_particles=1, estimator=AllAction(exact=True))
    elbo.loss_and_grads(program.model, program.guide)
    ((table, nodes),) = found
    z, b = nodes["z"]["value"], pyro.param("b").detach()
    seen = z if kind == "bit" else z[..., 0] - z[..., 1]
    for a in (0.0, 1.0):
        log_p = relaxed(2.0 * tensor(a) - 1.0 + b, kind).log_prob(z) + dist.Normal(seen + 0.5 * a, 1.0).log_prob(
            tensor(1.3)
        )
        torch.testing.assert_close(table[..., int(a)].squeeze(), -log_p)


@pytest.mark.parametrize("kind", ["bit", "one-hot"])
@pytest.mark.parametrize("estimator", [None, ScoreFunction()])
def test_losses_are_those_of_pyro(kind: str, estimator: Any) -> None:
    program, losses = Program(kind), []
    for elbo in (TraceBackpropQ_ELBO(num_particles=1, estimator=estimator), Trace_ELBO()):
        pyro.set_rng_seed(3)
        losses.append([elbo.loss_and_grads(program.model, program.guide) for _ in range(6)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_hindsight_does_not_read_the_law_of_such_a_value() -> None:
    def guide() -> None:
        a = pyro.sample("a", dist.Bernoulli(logits=parameter("l", 0.2)))
        pyro.sample("z", relaxed(a + parameter("m", 0.5), "bit"))

    elbo = TraceBackpropQ_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0, estimator=Hindsight())
    with pytest.warns(BPQWarning, match="the law of 'z', which reads it, is not known"):
        elbo.loss_and_grads(Program("bit").model, guide)
    assert elbo.plan is not None and (elbo.plan.held is None or "a" not in elbo.plan.held.sites)
