"""Which estimator serves a site that nobody chose one for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import limited, stepped, trained
from torch import Tensor

from pyro_bpq import LeaveOneOut, RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO, cost
from pyro_bpq.estimators import (
    AllAction,
    CrossedLeaveOneOut,
    DebiasedStraightThrough,
    DisARM,
    Estimator,
    Hindsight,
    SecondRun,
    TrimmedBaseline,
)
from pyro_bpq.plan import rules

DATA = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
MEAN = ScoreFunction(TrimmedBaseline())
AVERAGE = {"baseline": {"use_decaying_avg_baseline": True}}


def bits(name: str, logits: Tensor, **options: Any) -> Tensor:
    return pyro.sample(name, dist.Bernoulli(logits=logits).to_event(1), **options)


def faces(name: str, logits: Tensor) -> Tensor:
    table = torch.stack((logits, -logits, 0.5 * logits), -1)
    return pyro.sample(name, dist.Categorical(logits=table).to_event(1)).to(logits.dtype)


def flat(draw: Callable[..., Tensor] = bits, **options: Any) -> tuple[Any, Any]:
    def guide() -> None:
        with pyro.plate("rows", 2):
            draw("z", pyro.param("q", torch.tensor([0.5, -0.3, 0.2])).expand(2, 3), **options)

    def model() -> None:
        with pyro.plate("rows", 2):
            z = draw("z", torch.zeros(2, 3))
            logits = (z - 0.5) @ pyro.param("w", torch.tensor([[1.0, -1.0], [0.5, 2.0], [-2.0, 0.3]]))
            pyro.sample("x", dist.Bernoulli(logits=logits * logits.sum(-1, keepdim=True)).to_event(1), obs=DATA)

    return model, guide


def without_slope(name: str, logits: Tensor) -> Tensor:
    return (bits(name, logits) > 0.5).to(logits.dtype)


def stack(up: Any = lambda y: y @ torch.ones(2, 3), down: Any = lambda z: z) -> tuple[Any, Any]:
    """Two layers: what the model's lower one reads of the upper one, and what data read of that."""

    def guide() -> None:
        with pyro.plate("rows", 2):
            bits("y", bits("z", pyro.param("q", torch.zeros(3)).expand(2, 3))[..., :2])

    def model() -> None:
        with pyro.plate("rows", 2):
            z = bits("z", up(bits("y", torch.zeros(2, 2))))
            bits("x", down(z)[..., :2], obs=DATA)

    return model, guide


def tall() -> tuple[Any, Any]:
    """Three layers."""
    model, guide = stack()

    def top() -> None:
        with pyro.plate("more rows", 2):
            bits("top", torch.zeros(2, 2))

    return lambda: (top(), model())[1], lambda: (guide(), top())[1]


def charged() -> tuple[Any, Any]:
    model, guide = flat()
    return lambda: (model(), cost("dear", torch.tensor(0.3).item))[0], guide


def chosen(program: Any, site: str, max_elements: int, **options: Any) -> Estimator:
    return trained(limited(max_elements, **options), *program, steps=1).info[site]["estimator"]


@pytest.mark.parametrize(
    ("program", "site", "options", "expected"),
    [
        (flat(), "z", {}, ScoreFunction(LeaveOneOut())),
        (flat(), "z", {"num_particles": 1}, DebiasedStraightThrough()),
        (flat(), "z", {"num_particles": 2}, DebiasedStraightThrough()),
        (flat(), "z", {"num_particles": 4}, ScoreFunction(LeaveOneOut())),
        (flat(without_slope), "z", {"num_particles": 1}, DisARM()),
        (flat(without_slope), "z", {"num_particles": 2}, ScoreFunction(LeaveOneOut())),
        (flat(faces), "z", {"num_particles": 1}, SecondRun()),
        (stack(), "z", {"num_particles": 1}, SecondRun()),
        (stack(), "y", {"num_particles": 1}, SecondRun()),
        (stack(), "y", {}, ScoreFunction(LeaveOneOut())),
        (stack(), "y", {"num_particles": 2}, ScoreFunction(LeaveOneOut())),
        (stack(), "y", {"num_particles": 4}, ScoreFunction(LeaveOneOut())),
        (tall(), "y", {"num_particles": 4}, CrossedLeaveOneOut()),
        # A function that leaves torch may be dear: it is called once.
        (charged(), "z", {}, MEAN),
        (flat(), "z", {"estimator": AllAction()}, AllAction()),
        (flat(infer=AVERAGE), "z", {}, ScoreFunction(RunningBaseline(decay=0.9))),
    ],
)
def test_many_components_without_the_extra_run(program: Any, site: str, options: Any, expected: Estimator) -> None:
    assert chosen(program, site, 0, **options) == expected


# Data read one layer through dropout: other runs have other noise. Or the upper layer is read as an index.
NOISY = stack(down=lambda z: torch.nn.functional.dropout(z, training=True))
COARSE = stack(up=lambda y: torch.eye(3)[y.sum(-1).long()])


@pytest.mark.parametrize(
    ("program", "is_wide", "expected"),
    [
        (stack(), True, Hindsight(draws=1, crossed=True)),
        (stack(), False, ScoreFunction(LeaveOneOut())),
        (COARSE, True, CrossedLeaveOneOut()),
        (NOISY, True, Hindsight(draws=1, crossed=True)),
    ],
    ids=["many reads", "few reads", "no slopes", "noise"],
)
def test_layers_get_hindsight_where_it_may_serve(program: Any, is_wide: bool, expected: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(rules, "MANY_READS_OF_LAYERS", 1 if is_wide else 1_000)
    # Nobody chose it, so that nothing is to be said where it does not run.
    elbo = stepped(3, limited(0, num_particles=4, vectorize_particles=True, max_plate_nesting=1), *program)
    assert [elbo.info[name]["estimator"] for name in ("y", "z")] == [expected, expected]


def test_layers_without_slopes_get_the_particles_of_crossed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MANY_READS_OF_LAYERS", 1)
    assert chosen(COARSE, "y", 0, num_particles=1) == SecondRun()
    elbo = stepped(3, TraceBackpropQ_ELBO(), *COARSE)
    assert elbo.num_particles == rules.SOME_PARTICLES and elbo.info["y"]["estimator"] == CrossedLeaveOneOut()


@pytest.mark.parametrize(
    ("read", "expected"), [(torch.norm, DebiasedStraightThrough()), (lambda z: z.sum().round(), DisARM())]
)
def test_no_choice_depends_on_what_is_drawn(read: Any, expected: Estimator) -> None:
    """The slope of a norm at zero is zero; that of a rounded number is zero everywhere."""

    def guide() -> None:
        bits("z", pyro.param("q", torch.tensor([-0.6, -1.1])))

    def model() -> None:
        z = bits("z", torch.zeros(2))
        pyro.sample("x", dist.Normal(read(z), 0.9), obs=torch.tensor(-0.7))

    drawn = set()
    for seed in range(6):
        elbo = trained(limited(0, num_particles=1), model, guide, steps=1, seed=seed)
        drawn.add(tuple(elbo.traces[1].nodes["z"]["value"].tolist()))
        assert elbo.info["z"]["estimator"] == expected
    assert (0.0, 0.0) in drawn and len(drawn) > 1


def test_the_extra_run_tells_all_of_a_flat_site_and_too_little_of_a_stack() -> None:
    for number in (1, 2):
        assert chosen(flat(), "z", 1 << 21, num_particles=number) == AllAction()
        assert chosen(flat(faces), "z", 1 << 21, num_particles=number) == AllAction()
    assert chosen(stack(), "z", 1 << 21, num_particles=1) == SecondRun()
    # From four particles on it takes the time of more particles.
    for several in (None, 4):
        assert chosen(flat(), "z", 1 << 21, num_particles=several) == ScoreFunction(LeaveOneOut())


@pytest.mark.parametrize("is_forced", [False, True])
def test_an_extra_run_that_is_too_dear_is_refused_and_the_plan_says_so(is_forced: bool) -> None:
    def guide() -> None:
        with pyro.plate("rows", 64):
            bits("z", pyro.param("q", torch.zeros(64, 12)))

    def model() -> None:
        with pyro.plate("rows", 64):
            hidden = bits("z", torch.zeros(12)) @ torch.zeros(12, 700)
            pyro.sample("x", dist.Normal((hidden @ torch.zeros(700, 700)).sum(-1), 1.0), obs=torch.zeros(64))

    estimator = AllAction(exact=True) if is_forced else None
    found = trained(TraceBackpropQ_ELBO(num_particles=1, estimator=estimator), model, guide, steps=1).plan
    assert bool(found.flips.sites) is is_forced
    assert ("no extra run of the model: its 13 rows take about" in str(found)) is not is_forced
