"""What is printed: a sentence before the first step, few plain lines after it, and each table once."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from steps import repeat, stepped
from torch import Tensor

from pyro_bpq import CompiledSVI, ExpectedCost, LinearCritic, TraceBackpropQ_ELBO, TraceBackpropQ_IWAE, cost
from pyro_bpq.diagnostics import compare_estimators

LENGTH = 12


def drawn(logits: Tensor, scale: float = 1.0) -> list[Tensor]:
    """A chain of coins."""
    z, found = torch.tensor(0.0), []
    for t in range(LENGTH):
        z = pyro.sample(f"z{t}", dist.Bernoulli(logits=scale * z + logits[t]))
        found.append(z)
    return found


def model() -> None:
    total = sum((t + 1.0) * z for t, z in enumerate(drawn(-torch.ones(LENGTH), 2.0)))
    pyro.sample("x", dist.Normal(total, 1.0), obs=torch.tensor(3.0))


def guide() -> None:
    drawn(pyro.param("logits", lambda: torch.zeros(LENGTH)))


def trained(elbo: Any, steps: int = 3, kind: type = SVI) -> Any:
    svi = kind(model, guide, Adam({"lr": 0.01}), loss=elbo)
    repeat(steps, svi.step)
    return elbo


@pytest.mark.parametrize("name", ["plan", "graph", "network"])
def test_before_the_first_step_one_sentence_says_what_to_do(name: str) -> None:
    found = getattr(TraceBackpropQ_ELBO(), name)
    assert str(found) == f"There is no {name} yet: take a step first, e.g. svi.step(...)."
    assert not found and not hasattr(found, "__len__")
    with pytest.raises(Exception, match="take a step first"):
        found.nodes  # noqa: B018
    assert getattr(trained(TraceBackpropQ_ELBO()), name)


@pytest.mark.parametrize("make", [TraceBackpropQ_ELBO, TraceBackpropQ_IWAE, ExpectedCost])
def test_an_objective_without_a_step_prints_its_options_and_what_to_do(make: type) -> None:
    told = str(make(max_plate_nesting=2)).splitlines()
    assert told == [
        f"{make.__name__}(max_plate_nesting=2), after 0 steps",
        "There is no plan yet: take a step first, e.g. svi.step(...).",
    ]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_particles": 4, "vectorize_particles": True}, "4, because of num_particles=4"),
        ({"vectorize_particles": True}, "1, because of vectorize_particles=True"),
        ({}, "128, left open; the gradient of z0 to z11, 12 sites is noisy"),
        ({"critic": LinearCritic(), "num_particles": 2}, "2, because of num_particles=2"),
        ({"lam": lambda step: 0.5, "num_particles": 2}, "2, because of num_particles=2"),
    ],
    ids=lambda given: ", ".join(given) if isinstance(given, dict) else str(given),
)
def test_an_objective_prints_five_plain_lines(options: dict[str, Any], why: str) -> None:
    first, *lines = str(trained(TraceBackpropQ_ELBO(**options))).splitlines()
    assert first.startswith("TraceBackpropQ_ELBO(") and first.endswith("), after 3 steps")
    # The options that were written, and no others.
    assert first.count("=") == len(options) and all(f"{name}=" in first for name in options) and " at 0x" not in first
    assert [line.split(":")[0] for line in lines] == ["runs", "particles", "estimators", "critics"]
    assert lines[1].startswith(f"particles: {why}.")
    assert "z0 to z11, 12 sites: AllAction(), because few values" in lines[2]
    assert ("LinearCritic()" if "critic" in options else "MLPCritic()") in lines[3]
    assert max(map(len, lines)) < 200


def test_a_number_that_is_set_later_is_told() -> None:
    elbo = TraceBackpropQ_ELBO()
    elbo.num_particles = 3
    assert "\nparticles: 3, because of what was set later." in str(trained(elbo))


def test_a_sum_over_all_values_is_told() -> None:
    def chain() -> None:
        for t, z in enumerate(drawn(-torch.ones(LENGTH), 2.0)):
            pyro.sample(f"x{t}", dist.Normal(z, 1.0), obs=torch.tensor(0.3))

    # Tests draw in the first fifty steps.
    lines = str(stepped(55, TraceBackpropQ_ELBO(), chain, guide)).splitlines()
    assert len(lines) == 5 and "guide and model once, in 2 rows that tell all values" in lines[1]
    assert "none, as the loss is summed over all values" in lines[2]


def test_other_objectives_print_five_lines_too() -> None:
    def policy() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("w", torch.tensor(0.0))))
        cost("c", z)

    objective = stepped(1, ExpectedCost(), None, policy)
    for told in (str(objective), str(trained(TraceBackpropQ_IWAE(4, num_outer=2)))):
        assert [line.split(":")[0] for line in told.splitlines()[1:]] == ["runs", "particles", "estimators", "critics"]
    assert "1, left open" in str(objective) and "4 for each bound" in told


def test_recordings_are_told() -> None:
    elbo = trained(TraceBackpropQ_ELBO(num_particles=1, compile="eager"), 25, CompiledSVI)
    assert str(elbo).startswith("TraceBackpropQ_ELBO(num_particles=1, compile='eager'), after 25 steps\n")
    assert "Compiled: 1 recordings." in str(elbo).splitlines()[1]


def test_like_sites_of_a_plan_are_one_line() -> None:
    lines = str(trained(TraceBackpropQ_ELBO()).plan).splitlines()
    line, last = [line for line in lines if line.startswith("z")]
    assert line.startswith("z0 to z10, 11 sites: AllAction(), because few values: a sum over all of them; ")
    assert "known at all values: -log p(the site), log q(the site); " in line
    assert line.endswith("critic: MLPCritic(), reads up to 4 others, the sum of 6 more")
    assert "known at all values: -log p(x), -log p(z11), log q(z11), by 2 rows of an extra run; " in last


def test_a_comparison_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    quick: dict[str, Any] = {"num_warmup": 1, "num_rounds": 1, "num_samples": 4, "progress": False}
    rivals = {"one": TraceBackpropQ_ELBO(1), "two": TraceBackpropQ_ELBO(2)}
    found = compare_estimators(model, guide, estimators=rivals, num_outcomes=1, **quick)
    assert capsys.readouterr().out == ""
    print(found)
    assert capsys.readouterr().out.count("variance*ms") == 1
    assert repr(found) == str(found)
