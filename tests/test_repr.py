"""Every public name: a docstring, and a repr that a person can read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pyro
import pytest
import torch
from steps import CHAIN, trained

import pyro_bpq
from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import compare_estimators, diagnose, gradient_moments
from pyro_bpq.diagnostics.render import render_network, render_scg
from pyro_bpq.record.tape import Tape
from pyro_bpq.rollout.runs import Program
from pyro_bpq.step.signals import Signals
from pyro_bpq.testing import ChoiceNoise


def imported() -> Iterator[Any]:
    """The classes that a user makes."""
    for package in (pyro_bpq, pyro_bpq.diagnostics, pyro_bpq.estimators, pyro_bpq.testing):
        things = (getattr(package, name) for name in package.__all__)
        yield from (thing for thing in things if inspect.isclass(thing) and not getattr(thing, "_is_protocol", False))


@pytest.mark.parametrize("thing", list(imported()))
def test_what_a_user_makes_has_a_repr(thing: type) -> None:
    assert thing.__repr__ is not object.__repr__, "repr() would show an address"


def is_readable(text: str) -> bool:
    return not re.search(r" at 0x[0-9a-f]+", text) and len(text) > 3


def objects() -> Iterator[Any]:
    elbo = trained(TraceBackpropQ_ELBO(num_particles=2), *CHAIN.programs, params=CHAIN.params, steps=3)
    items = elbo.observe(Program(CHAIN.model, CHAIN.guide, (), {})).items
    signals = [item.signals for item in items]
    quick = {"num_warmup": 1, "num_rounds": 1, "num_samples": 4, "progress": False, "num_outcomes": 1}
    with Tape() as tape:
        tape.source("z", torch.tensor(1.0))
    yield from (
        elbo,
        elbo.critics,
        elbo.graph,
        elbo.network,
        elbo.planner,
        elbo.trainer.optimizer,
        elbo.runner.recordings,
    )
    yield from (signals[0], signals[0].layout, signals[0].batches[0], tape)
    yield from (render_scg(elbo.graph), render_network(elbo.network), ChoiceNoise())
    yield gradient_moments(elbo, CHAIN.model, CHAIN.guide, num_outcomes=1, num_samples=4)
    yield diagnose(elbo, CHAIN.model, CHAIN.guide, num_samples=4)
    yield compare_estimators(CHAIN.model, CHAIN.guide, **quick)


def test_objects_are_readable() -> None:
    for thing in objects():
        assert is_readable(repr(thing)), repr(thing)
        assert is_readable(str(thing)), str(thing)
        pyro.get_param_store()


def test_an_address_is_not_readable() -> None:
    assert not is_readable(object.__repr__(Signals))
    assert is_readable("Signals(3)")
