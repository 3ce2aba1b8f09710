"""Rows that meet inside of their plate, which a plate says they do not: charged whole, and said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
from models import coin, observe, real
from steps import WAYS, at_irregular, filtered
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO, cost
from pyro_bpq.errors import BPQWarning
from pyro_bpq.testing import assert_unbiased

Program = Callable[[], None]
DATA = real(0.7, -0.4, 1.3)


def program(function: Callable[[Tensor], Tensor], where: str) -> tuple[Program, Program]:
    """A plate of coins in whose model, guide, prior, weight, cost statement rows are put together."""
    reads = {key: function if key == where else lambda a: a for key in ("model", "guide", "prior")}

    def guide() -> None:
        with pyro.plate("rows", 3):
            a = coin("a", pyro.param("q"))
            if where in ("guide", "prior"):
                coin("b", pyro.param("q2") + reads["guide"](a))

    def model() -> None:
        with pyro.plate("rows", 3):
            a = coin("a", pyro.param("p"))
            mean = reads["model"](a)
            if where in ("guide", "prior"):
                mean = a + coin("b", pyro.param("p2") - reads["prior"](a))
            elif where == "cost":
                cost("c", function(a) * DATA)
            with pyro.poutine.scale(scale=1.5 + function(a).tanh() if where == "scale" else 1.0):
                observe("x", 2.0 * mean, DATA)

    return model, guide


def prepared(model: Program, guide: Program, **options: Any) -> TraceBackpropQ_ELBO:
    return at_irregular("q p q2 p2", 3, model, guide, **options)


OPTIONS = ("default", "score_function", "exact", "dynamic", "dense", "second_run")
CASES = [(where, own) for own in OPTIONS for where in ("model", "guide", "prior", "scale", "cost")]
CASES += [("model", "leave_one_out"), ("model", "pair_in_place")]


@pytest.mark.parametrize(("where", "options"), CASES)
def test_wherever_they_meet(where: str, options: str) -> None:
    programs = program(lambda a: a.roll(1, -1), where)
    # Without a recording each row is charged with the costs of all rows anyway.
    is_told = options != "dense"
    with pytest.warns(BPQWarning, match="Rows of the plate") if is_told else filtered("error"):
        elbo = prepared(*programs, **WAYS[options])
    assert_unbiased(elbo, *programs)


def test_nested_plates() -> None:
    def guide() -> None:
        with pyro.plate("columns", 2, dim=-2):
            a = coin("a", pyro.param("q")[:2].unsqueeze(-1))
            with pyro.plate("rows", 2, dim=-1):
                coin("b", pyro.param("q2")[:2] + a)

    def model(turn: bool) -> None:
        with pyro.plate("columns", 2, dim=-2):
            a = coin("a", pyro.param("p")[:2].unsqueeze(-1))
            with pyro.plate("rows", 2, dim=-1):
                b = coin("b", pyro.param("p2")[:2] - a)
                observe("x", b + (a.flip(-2) if turn else a), DATA[:2])

    assert not prepared(lambda: model(False), guide).runner.recordings.crosses
    with pytest.warns(BPQWarning, match="Rows of the plate 'columns' meet"):
        elbo = prepared(lambda: model(True), guide)
    assert_unbiased(elbo, lambda: model(True), guide)


def test_costs_of_all_rows_reach_a_site_through_one_outside() -> None:
    """A site outside of a plate reads all of its rows: what reads it is charged to no row alone."""

    def program(kind: str) -> None:
        rows = pyro.plate("rows", 2)
        with rows:
            z = pyro.sample("z", dist.Bernoulli(logits=pyro.param(kind)[:2, None] * real(1.0, -0.4)).to_event(1))
        y = coin("y", 1.5 * z[..., 0].sum(-1) - 1.0)
        if kind == "p":
            with rows:
                observe("x", 2.0 * y, DATA[:2])

    programs = (lambda: program("p")), (lambda: program("q"))
    assert_unbiased(prepared(*programs, estimator=ScoreFunction()), *programs)
