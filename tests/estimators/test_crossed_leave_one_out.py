"""Leave-one-out beside the own past: which costs cross, their values, exactness, and what is won."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import coin as coins
from models import real
from pyro import poutine
from steps import bias, trained
from torch import Tensor

from pyro_bpq import LeaveOneOut, ScoreFunction, StochasticComputationGraph, TraceBackpropQ_ELBO
from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators import CrossedLeaveOneOut, Estimator
from pyro_bpq.graph.relations import Crossings, crossings
from pyro_bpq.rollout.runs import Program
from pyro_bpq.step.signal_table import crossed
from pyro_bpq.testing import expected_moments

Programs = tuple[Callable[[], None], Callable[[], None]]
DATA = torch.tensor([0.3, -1.2], dtype=torch.float64)
VECTORISED = {"vectorize_particles": True, "max_plate_nesting": 1}
WAYS = pytest.mark.parametrize("way", [{}, VECTORISED], ids=["sequential", "vectorised"])


def three(logits: Tensor) -> Tensor:
    return torch.stack((logits, -logits, 0.5 * logits), -1)


def dice(name: str, logits: Tensor) -> Tensor:
    return pyro.sample(name, dist.Categorical(logits=three(logits))).to(logits.dtype)


def hot(name: str, logits: Tensor) -> Tensor:
    return pyro.sample(name, dist.OneHotCategorical(logits=three(logits))) @ real(0.0, 1.0, 2.0)


def pairs(name: str, logits: Tensor) -> Tensor:
    both = torch.stack((logits, -0.5 * logits), -1)
    return pyro.sample(name, dist.Bernoulli(logits=both).to_event(1)) @ real(1.0, -0.7)


def limited(name: str, logits: Tensor) -> Tensor:
    """Two of three values, which two depends on the site's past."""
    lost = torch.stack((logits > 1.0, logits <= 1.0, logits > 9.0), -1)
    return pyro.sample(name, dist.Categorical(logits=three(logits).masked_fill(lost, -1e9))).to(logits.dtype)


def layers(draw: Any = coins, depth: int = 3, top: Any = coins, model_draw: Any = None, rows: int = 1) -> Programs:
    """Layers of latents; the second is scaled, and masked in all rows but the first. The topmost may be of its kind."""
    kinds = [draw] * (depth - 1) + [top]

    def weighted(kind: Any, i: int, logits: Tensor) -> Tensor:
        if i != 1:
            return kind(f"z{i}", logits)
        with poutine.scale(scale=0.5), poutine.mask(mask=torch.arange(rows) < 1):
            return kind("z1", logits)

    def guide() -> None:
        q = pyro.param("q", real(0.4, 2.0, -0.7))
        with pyro.plate("rows", rows):
            z = kinds[0]("z0", q[0] + DATA[:rows])
            for i in range(1, depth):
                z = weighted(kinds[i], i, q[1] * z + q[2])

    def model() -> None:
        p = pyro.param("p", real(0.3, 3.0, -1.5))
        with pyro.plate("rows", rows):
            z = p[0].expand(rows)
            for i in reversed(range(depth)):
                z = weighted(model_draw or kinds[i], i, p[1] * z + p[2] if i < depth - 1 else z)
            pyro.sample("x", dist.Normal(z, 1.0), obs=DATA[:rows])

    return model, guide


def fork() -> Programs:
    """A global coin, and two in rows that depend on it, on their row, and in the model on each other."""

    def guide() -> None:
        q = pyro.param("q", real(0.4, 1.0, -0.7, 0.9))
        a = coins("a", q[0])
        with pyro.plate("rows", 2):
            b = coins("b", q[1] * a + DATA)
            coins("c", q[2] * a + q[3] * b)

    def model() -> None:
        p = pyro.param("p", real(0.3, 1.2, -0.8))
        a = coins("a", p[0])
        with pyro.plate("rows", 2):
            c = coins("c", p[1] * a)
            b = coins("b", p[2] * c + a)
            pyro.sample("x", dist.Normal(b + c, 1.0), obs=DATA)

    return model, guide


def handed() -> Programs:
    """The model's law of a coin reads the guide's own draw of it."""
    seen: dict[str, Tensor] = {}

    def guide() -> None:
        q = pyro.param("q", real(0.4, 1.0))
        seen["z"] = coins("z", q[0])
        coins("y", q[1] * seen["z"])

    def model() -> None:
        y = coins("y", pyro.param("p", real(0.3))[0])
        coins("z", 2.0 * y - 1.5 * seen["z"])

    return model, guide


def train(program: Programs, estimator: Estimator, way: dict[str, Any], particles: int = 2) -> TraceBackpropQ_ELBO:
    elbo = TraceBackpropQ_ELBO(particles, estimator=estimator, critic=None, **way)
    return trained(elbo, *program, steps=20).eval()


# Which costs cross.


def names(graph: StochasticComputationGraph, bits: int) -> list[str]:
    return sorted(graph.cost_names(bits))


def test_costs_that_cross_in_layers_in_a_fork_and_where_a_law_reads_both() -> None:
    q = {"log q(a)": "a", "log q(b)": "ba", "log q(c)": "cab"}
    p = {"-log p(a)": "ab", "-log p(b)": "bcd", "-log p(d)": "db"}
    graph = StochasticComputationGraph.from_parents({"a": "", "b": "a", "c": "ab", "d": "a"}, {**q, **p, "x": "ab"})
    owned = {name: name[-2] for name in (*q, *p)}
    graph = replace(graph, costs=tuple(replace(cost, site=owned.get(cost.name)) for cost in graph.costs))
    found = crossings(graph, owned)
    by_site = {
        node.name: (names(graph, law), names(graph, value))
        for node, law, value in zip(graph.nodes, found.own_law, found.own_value, strict=True)
    }
    assert by_site == {
        "a": ([], []),
        # log q(c) reads b, which changes, and a, which does not; -log p(b) reads d, too, which is not below b.
        "b": (["log q(b)"], ["-log p(a)", "-log p(d)"]),
        "c": (["log q(c)"], []),
        "d": (["-log p(d)"], []),
    }
    assert crossings(graph, {}) == Crossings((0,) * 4, (0,) * 4)


# What they are.


def bit(logit: Tensor, value: Tensor) -> Tensor:
    return value * logit - torch.nn.functional.softplus(logit)


@WAYS
def test_changes_are_those_of_log_probabilities_at_other_values(way: dict[str, Any]) -> None:
    elbo = train(layers(rows=2), CrossedLeaveOneOut(), way, 2)
    seen = elbo.observe(Program(*layers(rows=2), (), {}))
    crossed(seen.items[0].signals, 0)
    (group,), found = seen.items[0].signals.layout.crossed_costs, seen.items[0].signals.shared["crossed"][0]
    assert set(group.costs) == {"log q(z1)", "log q(z2)", "-log p(z0)", "-log p(z1)"}
    traces = [run.guide_trace.nodes for run in seen.runs]
    z0, z1, z2 = (torch.cat([trace[f"z{i}"]["value"].reshape(-1, 2) for trace in traces]) for i in range(3))
    # The second layer is scaled, and masked in the second row.
    half, (q, p) = real(0.5, 0.0), (pyro.param(name).detach() for name in "qp")
    laws = {
        "log q(z1)": (half, q[1] * z0 + q[2], z1),
        "log q(z2)": (real(1.0, 1.0), q[1] * z1 + q[2], z2),
        "-log p(z0)": (real(-1.0, -1.0), p[1] * z1 + p[2], z0),
        "-log p(z1)": (-half, p[1] * z2 + p[2], z1),
    }
    for k, cost in enumerate(group.costs):
        weight, logit, value = laws[cost]
        # The other particle's value under the own law, and its law at the own value, beside what it has.
        own = bit(logit.flip(0), value.flip(0))
        torch.testing.assert_close(found[k], weight * (bit(logit, value.flip(0)) - own))
        torch.testing.assert_close(found[k + len(laws)], weight * (bit(logit.flip(0), value) - own))


def test_a_value_that_cannot_occur_is_only_very_unlikely() -> None:
    program = layers(limited, 2, limited, dice)
    elbo = train(program, CrossedLeaveOneOut(), {})
    (found,) = (value for key, value in elbo.state_dict().items() if key.endswith("moments"))
    # Without minus a billion among them.
    assert 0.0 < float(found[1, 2]) < 1e4


# That they do no harm, and what they are good for.


PROGRAMS = {"coins": layers(), "rows": layers(depth=2, rows=2), "dice": layers(dice, 2, hot)}
PROGRAMS |= {"pairs": layers(pairs, 2, coins), "limited": layers(limited, 2, limited, dice)}
PROGRAMS |= {"fork": fork(), "handed": handed()}


@WAYS
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_gradient_is_exact(name: str, way: dict[str, Any]) -> None:
    elbo = train(PROGRAMS[name], CrossedLeaveOneOut(), way)
    assert bias(elbo, *PROGRAMS[name]) < 1e-10


def test_what_the_guide_hands_over_does_not_cross() -> None:
    elbo = train(handed(), CrossedLeaveOneOut(), {})
    assert [name for group in elbo.runner.plans.last.layout.crossed_costs for name in group.costs] == ["log q(y)"]


def test_without_a_past_it_is_leave_one_out() -> None:
    program = layers(depth=1)
    crossed, plain = (
        expected_moments(train(program, estimator, VECTORISED), *program).total_variance
        for estimator in (CrossedLeaveOneOut(), ScoreFunction(LeaveOneOut()))
    )
    assert crossed == plain


@WAYS
def test_rows_that_are_masked_may_be_anything(way: dict[str, Any]) -> None:
    lost = real(0.3, torch.nan)

    def guide() -> None:
        q = pyro.param("q", real(0.4, 1.0))
        with pyro.plate("rows", 2), poutine.mask(mask=torch.tensor([True, False])):
            a = coins("a", q[0].expand(2))
            coins("b", q[1] * a)

    def model() -> None:
        p = pyro.param("p", real(0.3, -0.8))
        with pyro.plate("rows", 2), poutine.mask(mask=torch.tensor([True, False])):
            b = coins("b", p[0].expand(2))
            pyro.sample("a", dist.Bernoulli(logits=p[1] * b + lost, validate_args=False))

    program = model, guide
    assert bias(train(program, CrossedLeaveOneOut(), way), *program) < 1e-10


def test_batch_dimensions_without_a_plate_do_not_cross() -> None:
    def guide() -> None:
        a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("q", real(0.4, 1.0))))
        coins("b", a.sum())

    def model() -> None:
        b = coins("b", pyro.param("p", real(0.3, -0.8))[0])
        pyro.sample("a", dist.Bernoulli(logits=b + DATA))

    program = model, guide
    with pyro.validation_enabled(False):
        elbo = train(program, CrossedLeaveOneOut(), {})
        assert bias(elbo, *program) < 1e-10
    assert [name for group in elbo.runner.plans.last.layout.crossed_costs for name in group.costs] == ["log q(b)"]


def test_it_needs_two_particles() -> None:
    with pytest.raises(UnsupportedSiteError, match=r"'z0'.*CrossedLeaveOneOut\(\) needs at least two particles"):
        TraceBackpropQ_ELBO(estimator=CrossedLeaveOneOut()).loss_and_grads(*layers())
