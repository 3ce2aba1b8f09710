"""Rows that meet inside of their plate, which a plate says they do not: charged whole, and said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import CASES, Case, fill, real
from steps import filtered, repeat, trained
from torch import Tensor

from pyro_bpq import AllAction, LinearCritic, ScoreFunction, TraceBackpropQ_ELBO, cost
from pyro_bpq.errors import BPQWarning
from pyro_bpq.estimators import LeaveOneOut, SecondRun
from pyro_bpq.plan import planner
from pyro_bpq.plan.structure import Structure
from pyro_bpq.testing import assert_unbiased

Program = Callable[[], None]
ROWS = 3
DATA = real(0.7, -0.4, 1.3)

MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda a: a.max() + 0.3 * a,
    "roll": lambda a: a.roll(1, -1),
    "first": lambda a: a[..., 0] - 0.5 * a,
    "where": lambda a: torch.where(a.flip(-1) > 0, a, 2.0 - a),
    "mean": lambda a: a - a.mean(-1, keepdim=True),
    "softmax": lambda a: a.softmax(-1),
    "cumsum": lambda a: a.cumsum(-1),
    "product": lambda a: torch.arange(9.0).double().reshape(3, 3) @ a,
    "neighbours": lambda a: a[..., torch.tensor([2, 0, 0])],
    "cat": lambda a: torch.cat([a[..., 1:], a[..., :1]], -1),
    "range": lambda a: a.amax(-1) - a.amin(-1) + a,
    "sort": lambda a: a.sort(-1).values - 0.5 * a,
    "vector times matrix": lambda a: a @ torch.arange(9.0).double().reshape(3, 3),
    "select": lambda a: a.index_select(-1, torch.tensor([2, 0, 1])),
    "shifted": lambda a: torch.nn.functional.pad(a, (1, 0))[..., :3] - 0.5 * a,
    "stable sort": lambda a: torch.sort(a, dim=-1, stable=True).values - 0.5 * a,
    "diagonal": lambda a: (torch.diag_embed(a) @ torch.arange(9.0).double().reshape(3, 3)).sum(-2),
    "rotated": lambda a: torch.rot90(a.unsqueeze(-1), 2).squeeze(-1),
    "written": lambda a: torch.zeros_like(a).index_put((torch.tensor([2, 0, 1]),), a) if a.dim() == 1 else a.flip(-1),
    "looked up": lambda a: (
        torch.nn.functional.embedding(torch.tensor([2, 0, 1]), a.unsqueeze(-1)).squeeze(-1)
        if a.dim() == 1
        else a.flip(-1)
    ),
    "norm": lambda a: a / (1.0 + a.norm(dim=-1, keepdim=True)),
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "own": lambda a: 2.0 * a - 0.3,
    "twice": lambda a: a.flip(-1).flip(-1),
    "table": lambda a: real(0.4, -1.0)[a.long()],
    "layers": lambda a: (a.unsqueeze(-1) @ torch.ones(1, 4).double()).relu().sum(-1),
    "selected": lambda a: a.index_select(-1, torch.tensor([0, 1, 2])),
    "attention within": lambda a: torch.nn.functional.scaled_dot_product_attention(
        *(torch.stack([a, 1.0 - a], -1).unsqueeze(-1),) * 3
    ).sum((-1, -2)),
    "written apart": lambda a: (
        torch.zeros(3, 2, dtype=a.dtype).index_put((torch.arange(3), a.long()), torch.tensor(1.0, dtype=a.dtype))[
            ..., 1
        ]
        if a.dim() == 1
        else a
    ),
    "picked": lambda a: a[..., torch.tensor([0, 1, 2])],
}


def program(function: Callable[[Tensor], Tensor], where: str) -> tuple[Program, Program]:
    """A plate of coins in whose model, guide, prior, weight, cost statement rows are put together."""

    def guide() -> None:
        with pyro.plate("rows", ROWS):
            a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("q")))
            if where in ("guide", "prior"):
                logits = function(a) if where == "guide" else a
                pyro.sample("b", dist.Bernoulli(logits=pyro.param("q2") + logits))

    def model() -> None:
        with pyro.plate("rows", ROWS):
            a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("p")))
            mean = a
            if where in ("guide", "prior"):
                logits = function(a) if where == "prior" else a
                mean = a + pyro.sample("b", dist.Bernoulli(logits=pyro.param("p2") - logits))
            elif where == "cost":
                cost("c", function(a) * DATA)
            elif where == "model":
                mean = function(a)
            with pyro.poutine.scale(scale=1.5 + function(a).tanh() if where == "scale" else 1.0):
                pyro.sample("x", dist.Normal(2.0 * mean, 0.8), obs=DATA)

    return model, guide


def train(model: Program, guide: Program, **options: Any) -> TraceBackpropQ_ELBO:
    """An ELBO that has seen a few steps, at parameters that have not moved."""
    elbo = TraceBackpropQ_ELBO(**{"num_particles": 1, **options})
    return trained(elbo, model, guide, params=partial(fill, ("q", "p", "q2", "p2"), ROWS), steps=5).eval()


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no_critic": {"critic": None},
    "linear": {"critic": LinearCritic()},
    "score_function": {"estimator": ScoreFunction()},
    "second_run": {"estimator": SecondRun()},
    "exact": {"estimator": AllAction(exact=True)},
    "dynamic": {"structure": "dynamic"},
    "dense": {"structure": "dense"},
}
# The default suite tries these; `make test-all` tries all.
QUICK = ("default", "score_function", "exact", "dynamic")


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_meet_are_charged_whole(name: str) -> None:
    model, guide = program(MIXING[name], "model")
    with pytest.warns(BPQWarning, match=r"Rows of the plate 'rows' meet in -log p\(x\).* of 'a'"):
        elbo = train(model, guide)
    assert_unbiased(elbo, model, guide)


@pytest.mark.parametrize(
    "options", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in OPTIONS]
)
@pytest.mark.parametrize("where", ["model", "guide", "prior", "scale", "cost"])
def test_wherever_they_meet(where: str, options: str) -> None:
    model, guide = program(MIXING["roll"], where)
    # Without a recording each row is charged with the costs of all rows anyway.
    is_told = options != "dense"
    with pytest.warns(BPQWarning, match="Rows of the plate") if is_told else filtered("error"):
        elbo = train(model, guide, **OPTIONS[options])
    assert_unbiased(elbo, model, guide)


@pytest.mark.parametrize("vectorised", [False, True])
def test_leave_one_out(vectorised: bool) -> None:
    model, guide = program(MIXING["roll"], "model")
    options = {"vectorize_particles": True, "max_plate_nesting": 1} if vectorised else {}
    with pytest.warns(BPQWarning, match="Rows of the plate"):
        elbo = train(model, guide, num_particles=2, estimator=ScoreFunction(LeaveOneOut()), **options)
    assert_unbiased(elbo, model, guide)


def test_unseen_it_is_a_bias_that_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_bpq.record.recorded.rows_that_meet", lambda *_: {})
    model, guide = program(MIXING["roll"], "model")
    with pytest.raises(AssertionError, match="is biased"):
        assert_unbiased(train(model, guide, estimator=ScoreFunction()), model, guide)


def test_flipping_all_rows_at_once_would_be_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = planner.plan_extra_run

    def all_rows(structure: Structure, *more: Any) -> Any:
        return plain(replace(structure, facts=replace(structure.facts, cuts_plates=True)), *more)

    monkeypatch.setattr(planner, "plan_extra_run", all_rows)
    model, guide = program(MIXING["roll"], "model")
    with pytest.warns(BPQWarning), pytest.raises(AssertionError, match="is biased"):
        assert_unbiased(train(model, guide), model, guide)


@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_are_cut(name: str) -> None:
    model, guide = program(APART[name], "model")
    elbo = train(model, guide)
    assert_unbiased(elbo, model, guide)
    assert not elbo.runner.recordings.crosses


def test_operators_that_are_not_known_leave_it_to_values() -> None:
    model, guide = program(lambda a: torch.nn.functional.avg_pool1d(a[None], 3, 1, 1)[0], "model")
    with pytest.warns(BPQWarning, match="meet in"):
        elbo = train(model, guide)
    assert elbo.runner.recordings.crosses
    assert_unbiased(elbo, model, guide)


def test_nested_plates() -> None:
    def guide() -> None:
        with pyro.plate("columns", 2, dim=-2):
            a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("q")[:2].unsqueeze(-1)))
            with pyro.plate("rows", 2, dim=-1):
                pyro.sample("b", dist.Bernoulli(logits=pyro.param("q2")[:2] + a))

    def model(turn: bool) -> None:
        with pyro.plate("columns", 2, dim=-2):
            a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("p")[:2].unsqueeze(-1)))
            with pyro.plate("rows", 2, dim=-1):
                b = pyro.sample("b", dist.Bernoulli(logits=pyro.param("p2")[:2] - a))
                pyro.sample("x", dist.Normal(b + (a.flip(-2) if turn else a), 0.8), obs=DATA[:2])

    apart = train(lambda: model(False), guide)
    assert not apart.runner.recordings.crosses
    with pytest.warns(BPQWarning, match="Rows of the plate 'columns' meet"):
        elbo = train(lambda: model(True), guide)
    assert_unbiased(elbo, lambda: model(True), guide)


@pytest.mark.parametrize("case", [case for case in CASES if case.is_static], ids=lambda case: case.name)
def test_no_false_alarm(case: Case) -> None:
    case.params()
    elbo = TraceBackpropQ_ELBO()
    with filtered("error"):
        repeat(2, elbo.loss_and_grads, case.model, case.guide, *case.args)
    assert not elbo.runner.recordings.crosses
