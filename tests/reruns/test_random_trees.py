"""Losses of random trees of finite sites in plates, summed over all values, against enumeration."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import repeat
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.testing import assert_unbiased

DIMS = {"rows": -1, "columns": -2}
# Largest number of joint states.
MOST = 600


class Site(NamedTuple):
    name: str
    values: int
    parent: str | None
    plates: frozenset[str]


def random_site(rng: random.Random, name: str, known: list[Site]) -> Site:
    parent = rng.choice([None, *known])
    plates = set() if parent is None else {*parent.plates}
    plates |= {plate for plate in DIMS if rng.random() < 0.3}
    return Site(name, rng.choice([2, 2, 3]), parent and parent.name, frozenset(plates))


def random_tree(seed: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Model and guide; each law, and each cost, reads one site at most."""
    rng, sites, states = random.Random(seed), list[Site](), 1
    numbers = torch.Generator().manual_seed(seed)
    for i in range(rng.randint(1, 4)):
        site = random_site(rng, f"z{i}", sites)
        states *= site.values**2 ** len(site.plates)
        if states < MOST:
            sites.append(site)
    priors = {site.name: torch.randn(3, site.values, generator=numbers) for site in sites}
    starts = {site.name: torch.randn(3, site.values, generator=numbers) for site in sites}
    data = [random_site(rng, f"x{i}", sites) for i in range(rng.randint(1, 4))]

    def drawn(make: Callable[[Site], Tensor], scored: list[Site]) -> None:
        found: dict[str | None, Tensor] = {None: torch.tensor(0)}
        plates = {name: pyro.plate(name, 2, dim=dim) for name, dim in DIMS.items()}
        for i, own in enumerate((*sites, *scored)):
            with contextlib.ExitStack() as stack:
                for plate in sorted(own.plates):
                    stack.enter_context(plates[plate])
                if own in sites:
                    fn = dist.Categorical(logits=make(own)[found[own.parent]])
                    found[own.name] = pyro.sample(own.name, fn)
                else:
                    pyro.sample(own.name, dist.Normal(1.0 * found[own.parent], 1.0 + i), obs=torch.tensor(0.3 + i))

    def guide() -> None:
        drawn(lambda site: pyro.param(f"q {site.name}", starts[site.name].clone()), [])

    return lambda: drawn(lambda site: priors[site.name], data), guide


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 400))])
def test_sums_are_exact(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_bpq.plan.particles.DRAWN_STEPS", (1, 1))
    programs, elbo = random_tree(seed), TraceBackpropQ_ELBO()
    repeat(4, elbo.loss_and_grads, *programs)
    assert elbo.plan and elbo.plan.sums
    assert_unbiased(elbo, *programs)
