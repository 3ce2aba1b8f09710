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
    plates = frozenset(plate for plate in DIMS if rng.random() < 0.3 or (parent and plate in parent.plates))
    return Site(name, rng.choice([2, 2, 3]), parent and parent.name, plates)


def random_tree(seed: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Model and guide, in an order of their own; each law, and each cost, reads one site at most."""
    rng, of_guide, states = random.Random(seed), list[Site](), 1
    for i in range(rng.randint(1, 4)):
        site = random_site(rng, f"z{i}", of_guide)
        states *= site.values**2 ** len(site.plates)
        of_guide += [site] if states < MOST else []
    of_model, data = list[Site](), [random_site(rng, f"x{i}", of_guide) for i in range(rng.randint(1, 4))]
    for site in rng.sample(of_guide, len(of_guide)):
        fits = [own.name for own in of_model if own.plates <= site.plates]
        of_model.append(site._replace(parent=rng.choice([None, *fits])))
    numbers = torch.Generator().manual_seed(seed)
    tables = [{own.name: torch.randn(3, own.values, generator=numbers) for own in of_guide} for _ in range(2)]

    def drawn(sites: list[Site], make: Callable[[str], Tensor], scored: list[Site]) -> None:
        found: dict[str | None, Tensor] = {None: torch.tensor(0)}
        plates = {name: pyro.plate(name, 2, dim=dim) for name, dim in DIMS.items()}
        for i, own in enumerate((*sites, *scored)):
            with contextlib.ExitStack() as stack:
                for plate in sorted(own.plates):
                    stack.enter_context(plates[plate])
                if own in sites:
                    fn = dist.Categorical(logits=make(own.name)[found[own.parent]])
                    found[own.name] = pyro.sample(own.name, fn)
                else:
                    pyro.sample(own.name, dist.Normal(1.0 * found[own.parent], 1.0 + i), obs=torch.tensor(0.3 + i))

    def guide() -> None:
        drawn(of_guide, lambda name: pyro.param(f"q {name}", tables[0][name].clone()), [])

    return lambda: drawn(of_model, tables[1].__getitem__, data), guide


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 400))])
def test_sums_are_exact(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_bpq.plan.plan.DRAWN_STEPS", (1, 1))
    programs, elbo = random_tree(seed), TraceBackpropQ_ELBO()
    repeat(4, elbo.loss_and_grads, *programs)
    assert elbo.plan and elbo.plan.sums
    assert_unbiased(elbo, *programs)
