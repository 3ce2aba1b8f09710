"""Which graph a run has: who reads whom, and when it is recorded, kept, joined, or dense."""

from __future__ import annotations

from collections import deque
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME
from pyro.distributions.testing.fakes import NonreparameterizedNormal
from pyro.distributions.testing.rejection_gamma import RejectionStandardGamma
from steps import coins, filtered, fresh, from_seed, repeat, seeing, settled, trained
from torch import Tensor

from pyro_bpq import AllAction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.record.recordings import Recordings
from pyro_bpq.testing import expected_gradient

# When it is recorded.


def recorded(name: str, count: int, **options: Any) -> tuple[list[int], Recordings]:
    """Which of some steps were recorded, and the recordings."""
    elbo, case, found = TraceBackpropQ_ELBO(num_particles=1, **options), BY_NAME[name].params(), list[int]()
    for seed in range(count):
        before = elbo.runner.recordings.num_recorded
        from_seed(seed, elbo.loss_and_grads, *case.programs)
        found += [seed] * (elbo.runner.recordings.num_recorded > before)
    return found, elbo.runner.recordings


def test_static_programs_are_recorded_after_4_16_and_64_steps() -> None:
    assert recorded("chain", 160)[0] == [0, 5, 22, 87, 152]


def test_programs_that_values_steer_are_recorded_at_every_step_where_graphs_are_needed() -> None:
    steps, recordings = recorded("python_table", 20, estimator=AllAction())
    assert steps == [*range(20)] and recordings.escapes


def test_dynamic_is_always_recorded() -> None:
    steps, recordings = recorded("chain", 20, structure="dynamic")
    assert steps == [*range(20)] and not recordings.escapes and not recordings.known
    assert recorded("python_branch", 1, structure="dynamic")[1].escapes


def test_auto_joins_what_it_sees_and_warns() -> None:
    switch = deque([False])  # an object of a library, into which nobody looks

    def model() -> None:
        z, w = pyro.sample("z", dist.Bernoulli(0.4)), pyro.sample("w", dist.Bernoulli(0.3))
        pyro.sample("x", dist.Normal(w + (z if switch[0] else 0.0), 1.0), obs=torch.tensor(0.7))

    guide = coins("z", "w")
    elbo = trained(TraceBackpropQ_ELBO(num_particles=1), model, guide, steps=5)
    switch[0] = True
    with pytest.warns(BPQWarning, match=r"-log p\(x\) also reads \['z'\].*dynamic"):
        repeat(20, elbo.loss_and_grads, model, guide)
    switch[0] = False
    with filtered("error"):
        repeat(200, elbo.loss_and_grads, model, guide)
    (known,) = elbo.runner.recordings.known.values()
    assert set(known.graph.parents("-log p(x)")) == {"z", "w"}  # a superset is always right


# Who reads whom.


EDGES = {
    "chain": {"b": {"a"}, "c": {"b"}, "-log p(x)": {"b", "c"}, "-log p(c)": {"b", "c"}, "log q(b)": {"a", "b"}},
    "fork": {"b": {"a"}, "c": {"a"}, "-log p(x)": {"b"}, "-log p(y)": {"c"}},
    "diamond": {"d": {"a", "b", "c"}, "-log p(x)": {"a", "b", "c", "d"}},
    "global_local": {"z": {"g"}, "-log p(x)": {"g", "z"}},
    "plate": {"z": set(), "-log p(x)": {"z"}},
    "auxiliary": {"z": {"a"}, "-log p(x)": {"z"}},
    "reordered_guide": {"c": set(), "b": {"c"}, "a": {"b", "c"}, "-log p(b)": {"a", "b"}},
    "inplace_buffer": {"-log p(x)": {"z_0", "z_1", "z_2"}},
    "python_table": {"-log p(x)": {"k"}},
    "python_branch": {"-log p(x)": {"z"}},  # where z is zero
}


@pytest.mark.parametrize("steps", [1, 6], ids=["recorded", "kept"])
@pytest.mark.parametrize("name", EDGES)
def test_graph_has_the_edges_of_the_program(name: str, steps: int) -> None:
    elbo = settled(BY_NAME[name], steps, num_particles=1)
    assert {key: set(elbo.graph.parents(key)) for key in EDGES[name]} == EDGES[name]


def test_log_q_reads_nothing_that_was_drawn_later() -> None:
    # All views are of one table: each depends on what chose it, and on nothing that chose another one.
    def chain() -> None:
        table, z = pyro.param("table", torch.zeros(3, 2)), torch.tensor(0)
        for t in range(3):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=table[t, z.long()]))

    elbo = trained(TraceBackpropQ_ELBO(), chain, chain, steps=1)
    assert [elbo.graph.cost(f"log q(z_{t})").parents for t in range(3)] == [("z_0",), ("z_0", "z_1"), ("z_1", "z_2")]


class Shifted(NonreparameterizedNormal):  # type: ignore[misc]
    """Its density says nothing of its mean, its draws do."""

    def log_prob(self, value: Tensor) -> Tensor:
        return torch.zeros_like(value)


def test_draw_depends_on_what_it_was_made_from() -> None:
    def model() -> None:
        pyro.sample("a", dist.Bernoulli(0.5))
        b = pyro.sample("b", dist.Normal(0.0, 3.0))
        pyro.sample("x", dist.Normal(b, 1.0), obs=torch.tensor(0.3))

    def guide() -> None:
        a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.1))))
        pyro.sample("b", Shifted(2.0 * a, 1.0))

    elbo = trained(TraceBackpropQ_ELBO(), model, guide, steps=1)
    assert elbo.graph.node("b").parents == ("a",)
    assert "-log p(x)" in elbo.graph.downstream_costs("a")


def test_untraced_site_is_a_node_without_a_cost() -> None:
    """``_do_not_trace``: the exact gradient counts what depends on the value, and no ``log q`` of the site itself."""

    model = seeing(lambda z: 1.5 * z)

    def guide() -> None:
        hidden = {"is_auxiliary": True, "_do_not_trace": True}
        a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("qa", torch.tensor(0.3))), infer=hidden)
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("qz", torch.tensor(1.3)) * a - 0.2))

    qa, qz = torch.tensor(0.3, requires_grad=True), torch.tensor(1.3, requires_grad=True)
    a, z = torch.cartesian_prod(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])).unbind(-1)
    log_a, log_z = dist.Bernoulli(logits=qa).log_prob(a), dist.Bernoulli(logits=qz * a - 0.2).log_prob(z)
    log_p = dist.Bernoulli(0.4).log_prob(z) + dist.Normal(1.5 * z, 1.0).log_prob(torch.tensor(0.3))
    ((log_a + log_z).exp() * (log_z - log_p)).sum().backward()
    elbo = trained(TraceBackpropQ_ELBO(1), model, guide, steps=1).eval()
    assert elbo.graph.node("z").parents == ("a",)
    found = expected_gradient(elbo, model, guide)
    torch.testing.assert_close(found, {"qa": qa.grad, "qz": qz.grad}, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("factor", [None, 2.0], ids=["plain", "transformed"])
def test_score_term_of_a_rejection_sampler_counts(factor: float | None) -> None:
    """Such a site is reparameterised in part; the mean gradient is that of a sum over a grid of its values."""
    seen, shape = torch.tensor(1.5), torch.tensor(1.7, requires_grad=True)

    def model() -> None:
        z = pyro.sample("z", dist.Gamma(torch.tensor(2.0), 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=seen)

    def guide() -> None:
        law = RejectionStandardGamma(pyro.param("shape", torch.tensor(1.7)))
        transforms = [dist.transforms.AffineTransform(0.0, factor)]
        pyro.sample("z", law if factor is None else dist.TransformedDistribution(law, transforms))

    def gradient(seed: int) -> Tensor:
        fresh(seed)
        TraceBackpropQ_ELBO(20_000, vectorize_particles=True, max_plate_nesting=0).loss_and_grads(model, guide)
        return pyro.param("shape").grad

    z = torch.linspace(1e-6, 40.0, 400_000)
    log_q = dist.Gamma(shape, 1.0 / (factor or 1.0)).log_prob(z)
    log_p = dist.Gamma(2.0, 1.0).log_prob(z) + dist.Normal(z, 1.0).log_prob(seen)
    torch.trapezoid(log_q.exp() * (log_q - log_p), z).backward()
    found = torch.stack([gradient(seed) for seed in range(20)])
    assert abs(found.mean() - shape.grad) < 4.0 * found.std() / 20**0.5
