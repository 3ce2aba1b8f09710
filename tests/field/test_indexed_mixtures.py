"""Mixtures whose means are read by index, ``locs[z]``, as Pyro's tutorial writes them.

Each row's costs read one site of three values. So their sum over these values is exact, and nothing is left of the
noise of the draw, whether the means are parameters, latents at one point, or latents.
"""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta
from steps import no_gradients
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO

ROWS, PARTS, SETTLING, STEPS = 20, 3, 60, 10
DATA = torch.linspace(-4.0, 4.0, ROWS, dtype=torch.float64)
STARTS = torch.tensor([-1.0, 0.3, 2.0], dtype=torch.float64)

Program = Callable[[], None]


def rows(locs: Tensor) -> None:
    with pyro.plate("rows", ROWS):
        z = pyro.sample("z", dist.Categorical(torch.ones(PARTS) / PARTS))
        pyro.sample("x", dist.Normal(locs[z], 1.0), obs=DATA)


def with_latents() -> None:
    with pyro.plate("parts", PARTS):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    rows(locs)


def with_parameters() -> None:
    rows(pyro.param("locs", lambda: STARTS.clone()))


def assigned() -> None:
    logits = pyro.param("logits", lambda: 0.3 * torch.arange(ROWS * PARTS).reshape(ROWS, PARTS).sin())
    with pyro.plate("rows", ROWS):
        pyro.sample("z", dist.Categorical(logits=logits))


def at_a_point() -> Program:
    shown = poutine.block(with_latents, expose=["locs"])
    auto = AutoDelta(shown, init_loc_fn=lambda site: STARTS.clone())
    return lambda: (auto(), assigned())[1]


def near_a_point() -> Program:
    def guide() -> None:
        means = pyro.param("means", lambda: STARTS.clone())
        with pyro.plate("parts", PARTS):
            pyro.sample("locs", dist.Normal(means, 1e-6))
        assigned()

    return guide


PROGRAMS = {
    "parameters": (with_parameters, lambda: assigned),
    "latents at one point": (with_latents, at_a_point),
    "latents": (with_latents, near_a_point),
}


def gradients(elbo: TraceBackpropQ_ELBO | TraceEnum_ELBO, model: Program, guide: Program, steps: int) -> Tensor:
    """The gradients of some steps at the present parameters, one per row."""
    found = []
    for _ in range(steps):
        no_gradients()
        elbo.loss_and_grads(model, guide)
        found.append(torch.cat([leaf.grad.flatten() for _, leaf in pyro.get_param_store().named_parameters()]))
    return torch.stack(found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_has_no_noise_of_the_draw(name: str) -> None:
    model, make = PROGRAMS[name]
    guide, elbo = make(), TraceBackpropQ_ELBO()
    found = gradients(elbo, model, guide, SETTLING + STEPS)[SETTLING:]
    (exact,) = gradients(TraceEnum_ELBO(max_plate_nesting=1), model, config_enumerate(guide), 1)
    # At 1e-6 from their means, latents have noise of their own.
    assert float((found - exact).norm(dim=1).max()) < 1e-3 * float(exact.norm())
