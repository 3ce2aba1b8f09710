"""Trials of candidates and of many rows: what a program raises or makes in them stays in them."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_bpq import TraceBackpropQ_ELBO


def test_parameters_of_a_trial_do_not_reach_the_optimiser() -> None:
    def model() -> None:
        pyro.sample("k", dist.Categorical(torch.ones(300) / 300))
        y = pyro.sample("y", dist.Bernoulli(0.3))
        pyro.sample("x", dist.Normal(y * pyro.param("mu", torch.tensor(0.4)), 1.0), obs=torch.tensor(0.3))

    def guide() -> None:
        k = pyro.sample("k", dist.Categorical(logits=pyro.param("q", torch.zeros(300))))
        pyro.sample("y", dist.Bernoulli(logits=pyro.param(f"logit_{int(k)}", torch.tensor(0.1))))

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    optimiser = Adam(lambda name: {"lr": 0.001 if name.startswith("logit") else 0.01})
    svi = SVI(model, guide, optimiser, TraceBackpropQ_ELBO(choice="auto"))
    for _ in range(30):
        svi.step()
    assert len(optimiser.optim_objs) == len(list(pyro.get_param_store().keys()))


def test_a_program_may_fail_in_its_own_way_at_other_shapes() -> None:
    x, tables = torch.randn(3), {(3,): torch.tensor([0.1, 0.5, -0.4])}

    def model() -> None:
        with pyro.plate("d", 3):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            pyro.sample("x", dist.Normal(tables[tuple(z.shape)][z], 1.0), obs=x)

    def guide() -> None:
        with pyro.plate("d", 3):
            pyro.sample("z", dist.Categorical(logits=pyro.param("q", torch.zeros(3))))

    pyro.clear_param_store()
    svi = SVI(model, guide, Adam({"lr": 0.01}), TraceBackpropQ_ELBO())
    for _ in range(20):
        svi.step()
