"""What a traced run says about who reads whom."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import Case, each_case
from steps import trained
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO


def graph_of(case: Case, structure: str = "auto", steps: int = 1) -> Any:
    elbo = trained(TraceBackpropQ_ELBO(structure=structure), *case.programs, params=case.params, steps=steps)
    return elbo.graph


@pytest.mark.parametrize("steps", [1, 3, 6], ids=["tracked", "last_tracked", "cached"])
@each_case(lambda case: "x" in case.name or case.name in ("chain", "plate", "vector", "inplace_buffer", "python_table"))
def test_likelihood_has_the_latents_as_parents(case: Case, steps: int) -> None:
    expected = {
        "chain": {"b", "c"},
        "plate": {"z"},
        "vector": {"z"},
        "inplace_buffer": {"z_0", "z_1", "z_2"},
        "python_table": {"k"},
        "auxiliary": {"z"},
    }[case.name]
    assert set(graph_of(case, steps=steps).cost("-log p(x)").parents) >= expected
    if case.is_static:
        assert set(graph_of(case, steps=steps).cost("-log p(x)").parents) == expected


class Shifted(dist.TorchDistribution):  # type: ignore[misc]
    """Uniform on ``[loc, loc + 1]``; its density says nothing of ``loc``, its draws do."""

    support = dist.constraints.real
    arg_constraints: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, loc: Tensor) -> None:
        self.loc = loc
        super().__init__(loc.shape)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.loc.detach() + torch.rand(torch.Size(sample_shape) + self.loc.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.loc.new_zeros(self.loc.shape)


def test_draw_depends_on_what_it_was_made_from() -> None:
    def model() -> None:
        pyro.sample("a", dist.Bernoulli(0.5))
        b = pyro.sample("b", dist.Normal(0.0, 3.0))
        pyro.sample("x", dist.Normal(b, 1.0), obs=torch.tensor(0.3))

    def guide() -> None:
        a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.1))))
        pyro.sample("b", Shifted(2.0 * a))

    elbo = trained(TraceBackpropQ_ELBO(), model, guide, steps=1)
    assert elbo.graph.node("b").parents == ("a",)
    assert "-log p(x)" in elbo.graph.downstream_costs("a")


def test_untraced_site_is_a_node_without_a_cost() -> None:
    """``_do_not_trace``: the exact gradient counts what depends on the value, and no ``log q`` of the site itself."""

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.sample("x", dist.Normal(z, 0.8), obs=torch.tensor(1.7))

    def guide() -> None:
        hidden = {"is_auxiliary": True, "_do_not_trace": True}
        a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("qa", torch.tensor(0.3))), infer=hidden)
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("qz", torch.tensor(1.3)) * a - 0.2))

    qa, qz = torch.tensor(0.3, requires_grad=True), torch.tensor(1.3, requires_grad=True)
    exact = torch.zeros(())
    for a in (torch.tensor(0.0), torch.tensor(1.0)):
        for z in (torch.tensor(0.0), torch.tensor(1.0)):
            log_a = dist.Bernoulli(logits=qa).log_prob(a)
            log_z = dist.Bernoulli(logits=qz * a - 0.2).log_prob(z)
            log_p = dist.Bernoulli(0.4).log_prob(z) + dist.Normal(z, 0.8).log_prob(torch.tensor(1.7))
            exact = exact + (log_a + log_z).exp() * (log_z - log_p)
    exact.backward()

    elbo = trained(TraceBackpropQ_ELBO(50_000, vectorize_particles=True, max_plate_nesting=0), model, guide, steps=1)
    found = dict(pyro.get_param_store().named_parameters())
    assert elbo.graph.node("z").parents == ("a",)
    for name, expected in (("qa", qa.grad), ("qz", qz.grad)):
        torch.testing.assert_close(found[name].grad, expected, rtol=0.05, atol=0.0)
