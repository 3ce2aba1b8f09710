"""An option changes what it names and nothing else; where it must, ``print(elbo)`` tells the option."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bpq import CriticLearner, RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.short import short

pytestmark = pytest.mark.filterwarnings("ignore::pyro_bpq.errors.BPQWarning")

OPTIONS: dict[str, Any] = {
    "num_particles": 3,
    "vectorize_particles": True,
    "max_plate_nesting": 2,
    "retain_graph": True,
    "estimator": ScoreFunction(RunningBaseline()),
    "critic": None,
    "reduction": "merged",
    "lam": 0.5,
    "gamma": 0.9,
    "learner": CriticLearner(lr=0.02),
    "structure": "dynamic",
    "analytic_kl": True,
    "seed": 3,
    "enumeration": "exact",
    "window": 2,
    "immediate": "learned",
    "form": "history",
}


def chain() -> tuple[Callable[[], None], Callable[[], None]]:
    def model() -> None:
        z = torch.tensor(0.0)
        for t in range(3):
            z = pyro.sample(f"z{t}", dist.Bernoulli(0.2 + 0.6 * z))
            pyro.sample(f"x{t}", dist.Normal(z + 0.1 * t, 0.7), obs=torch.tensor(0.3 * t))

    def guide() -> None:
        z, q = torch.tensor(0.0), pyro.param("q", torch.zeros(3, 2))
        for t in range(3):
            z = pyro.sample(f"z{t}", dist.Bernoulli(logits=q[t, 0] + q[t, 1] * z))

    return model, guide


def mixed() -> tuple[Callable[[], None], Callable[[], None]]:
    def model() -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Categorical(torch.ones(3)))
        with pyro.plate("rows", 4):
            n = pyro.sample("n", dist.Poisson(1.0 + z))
            pyro.sample("x", dist.Normal(m + z + 0.1 * n, 0.7), obs=torch.arange(4.0))

    def guide() -> None:
        pyro.sample("m", dist.Normal(pyro.param("a", torch.tensor(0.0)), 1.0))
        pyro.sample("z", dist.Categorical(logits=pyro.param("l", torch.zeros(3))))
        with pyro.plate("rows", 4):
            pyro.sample("n", dist.Poisson(pyro.param("r", torch.ones(4), constraint=dist.constraints.positive)))

    return model, guide


PROGRAMS = {"chain": chain, "mixed": mixed}


def trained(program: str, *names: str) -> TraceBackpropQ_ELBO:
    """An ELBO with some options, after so many steps that a sum over all values has begun."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    elbo = TraceBackpropQ_ELBO(**{name: OPTIONS[name] for name in names})
    for _ in range(3):
        elbo.loss_and_grads(*PROGRAMS[program]())
    return elbo


def told(elbo: TraceBackpropQ_ELBO) -> str:
    """What the ELBO says of its options, without the call that made it."""
    return repr(elbo).split("\n", 1)[1] + str(elbo.plan)


def chosen(elbo: TraceBackpropQ_ELBO) -> dict[str, Any]:
    """What options may change."""
    assert elbo.plan
    specs = elbo.plan.layout.specs
    return {
        "number": elbo.num_particles,
        "way": elbo.num_particles > 1 and elbo.particles.now.way,
        "summed": elbo.plan.sums,
        "estimators": {name: spec.estimator for name, spec in specs.items()},
        "critics": {name: elbo.plan.critic(name) for name in specs},
        "network": str(elbo.network),
    }


# What an option names.
NAMED = {
    "num_particles": {"number", "way"},
    "vectorize_particles": {"way"},
    "estimator": {"estimators"},
    "critic": {"critics", "network"},
    "reduction": {"network"},
    "immediate": {"critics", "network"},
    "form": {"network"},
    "window": {"network"},
}


def is_told(name: str, text: str) -> bool:
    return f"{name}={short(OPTIONS[name])}" in text or f"{name}={OPTIONS[name]!r}".replace("'", '"') in text


def changed(program: str, *names: str) -> list[str]:
    """What some options have changed that none of them names, and without a word."""
    usual, elbo = chosen(trained(program)), trained(program, *names)
    found, text = chosen(elbo), told(elbo)
    named = {part for name in names for part in NAMED.get(name, ())}
    silent = not any(is_told(name, text) for name in names)
    return [part for part in found if found[part] != usual[part] and part not in named and silent]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_what_it_names_or_is_told(program: str, name: str) -> None:
    assert not changed(program, name)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("pair", [*itertools.combinations(OPTIONS, 2)], ids=" ".join)
def test_a_pair_changes_what_it_names_or_is_told(program: str, pair: tuple[str, str]) -> None:
    assert not changed(program, *pair)


# What shows that an option holds.
HOLDS: dict[str, Callable[[TraceBackpropQ_ELBO], bool]] = {
    "num_particles": lambda elbo: elbo.num_particles == 3,
    "vectorize_particles": lambda elbo: elbo.vectorize_particles or elbo.num_particles == 1,
    "estimator": lambda elbo: all(
        spec.estimator == OPTIONS["estimator"] for name, spec in elbo.plan.layout.specs.items() if name != "m"
    ),
    "critic": lambda elbo: all(elbo.plan.critic(name).startswith("none") for name in elbo.plan.layout.specs),
    "structure": lambda elbo: "Every run is recorded" in told(elbo),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", HOLDS)
@pytest.mark.parametrize("other", OPTIONS)
def test_an_option_holds_beside_any_other(program: str, name: str, other: str) -> None:
    assert HOLDS[name](trained(program, *dict.fromkeys((name, other))))
