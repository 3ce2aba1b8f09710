"""Findings of a diagnosis: each on a program that has the fault, and none on one that has not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME
from pyro.infer import Trace_ELBO
from steps import CHAIN, filtered, fresh, pair_guide, pair_model, trained
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import Diagnosis, Finding, diagnose
from pyro_bpq.errors import OptionError


def look(*programs: Any, steps: int = 4, samples: int = 8, params: Any = fresh, **options: Any) -> Diagnosis:
    with filtered("ignore"):
        elbo = trained(TraceBackpropQ_ELBO(**options), *programs, params=params, steps=steps)
        return diagnose(elbo, *programs, num_samples=samples, num_outcomes=1)


def of_kind(found: Diagnosis, kind: str) -> Finding | None:
    chosen = [finding for finding in found if finding.kind == kind]
    assert len(chosen) <= 1
    return chosen[0] if chosen else None


def guide_of(cut: Callable[[Tensor], Any]) -> Callable[[], None]:
    return functools.partial(pair_guide, cut)


def without_gradient(value: Tensor) -> Tensor:
    with torch.no_grad():
        return 2.0 * value


# Parameters without a gradient.


CUTS = [lambda q: q.detach(), lambda q: q.data, without_gradient, lambda q: torch.tensor(q.item()), lambda q: 0.1]


@pytest.mark.parametrize("cut", CUTS, ids=["detach", "data", "no_grad", "item", "unread"])
def test_parameter_without_a_gradient_is_named(cut: Any) -> None:
    found = of_kind(look(pair_model, guide_of(lambda q: torch.as_tensor(cut(q)))), "no gradient")
    assert found is not None and found.severity == "warning" and found.sites == ("z",)
    assert "'q'" in found.message and "'m'" not in found.message
    assert all(text in found.advice for text in (".detach()", ".data", "torch.no_grad()", "no site reads"))


def test_zero_gradient_of_a_parameter_that_is_read_is_told_apart() -> None:
    found = look(pair_model, guide_of(lambda q: 0.3 + torch.relu(q - 5.0)))
    hint = of_kind(found, "zero gradient")
    assert hint is not None and "'q'" in hint.message and "'m'" not in hint.message and hint.severity == "hint"
    assert "relu" in hint.advice and "no gradient" not in found.kinds()
    few = look(pair_model, guide_of(lambda q: 0.3 + torch.relu(q - 5.0)), samples=4)
    assert "zero gradient" not in few.kinds()


def test_parameters_with_a_gradient_and_those_of_the_model_are_left_alone() -> None:
    def model() -> None:
        pyro.param("idle", torch.tensor(1.0))
        pair_model()

    assert not look(model, guide_of(lambda q: q)).kinds() & {"no gradient", "zero gradient"}


# One particle.


@pytest.mark.parametrize(("name", "number"), [("noisy", 1), ("known", 1), ("noisy", 2), ("noisy", None)])
def test_one_particle_that_was_asked_for_is_told_where_others_would_help(name: str, number: int | None) -> None:
    """The costs of rows of one binary site are known at both values."""
    case = BY_NAME["plate" if name == "known" else "global_local"]
    found = of_kind(look(*case.programs, params=case.params, num_particles=number), "one particle")
    if (name, number) == ("noisy", 1):
        assert "z" in found.sites and found.severity == "hint" and "num_particles" in found.advice
    else:
        assert found is None


# Others.


def test_a_loss_that_is_no_number_is_an_error_and_comes_first() -> None:
    def model() -> None:
        pyro.sample("z", dist.Bernoulli(0.5))
        pyro.factor("f", torch.tensor(float("nan")))

    with pyro.validation_enabled(False):
        found = next(iter(look(model, guide_of(lambda q: q), steps=0)))
    assert found.kind == "not finite" and found.severity == "error" and "'q'" in found.message


def test_an_elbo_that_has_learned_nothing_is_told() -> None:
    assert "untrained" in look(pair_model, guide_of(lambda q: q), steps=0).kinds()


def test_value_that_leaves_torch_is_named() -> None:
    case = BY_NAME["python_branch"]
    found = of_kind(look(*case.programs, *case.args, params=case.params), "values leave torch")
    assert found is not None and found.sites == ("z",) and "torch.where" in found.advice


def test_sound_training_has_no_findings() -> None:
    found = look(*CHAIN.programs, steps=20, samples=60, params=CHAIN.params)
    assert not found.findings and "No problem was found." in str(found) and "after 20 steps" in str(found)


def test_a_diagnosis_refuses_other_elbos() -> None:
    with pytest.raises(OptionError, match="Trace_ELBO"):
        diagnose(Trace_ELBO(), pair_model, guide_of(lambda q: q))
