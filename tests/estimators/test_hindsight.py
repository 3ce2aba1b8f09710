"""Hindsight: exact over all values and all draws of components, what it says of other values, and what is won."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import steps
import torch
from models import BY_NAME, CASES, real
from pyro import poutine
from steps import bias, stepped
from torch import Tensor

from pyro_bpq import ExpectedCost, LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO, cost
from pyro_bpq.errors import BPQWarning, OptionError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.estimators import CrossedLeaveOneOut, Hindsight, score_function
from pyro_bpq.estimators import hindsight as estimator_module
from pyro_bpq.estimators.base import SiteContext
from pyro_bpq.graph.scg import cost_of_guide, cost_of_model
from pyro_bpq.plan import flips as plans
from pyro_bpq.reruns import hindsight as module
from pyro_bpq.testing import ChoiceNoise, assert_unbiased, exact_gradient, expected_moments

Program = tuple[Callable[[], None], Callable[[], None]]
VECTORISED = {"vectorize_particles": True, "max_plate_nesting": 0}
# Those that Python control flow steers are refused; values of reparameterised sites are not enumerated.
SERVED = [case for case in CASES if case.is_static and not case.has_reparameterised]
QUICK = ("chain", "diamond", "plate", "onehot", "mask_scale", "component_chain")


def trained(program: Program, particles: int, steps: int = 5, **options: Any) -> TraceBackpropQ_ELBO:
    elbo = stepped(steps, TraceBackpropQ_ELBO(particles, **{"estimator": Hindsight(), **options}), *program)
    return elbo.eval()


class Seen(Hindsight):
    """Keeps what it is given, by the names of its sites."""

    def __call__(self, context: Any) -> Any:
        SEEN.append((context.names, context.signals["hindsight"]))
        return super().__call__(context)


SEEN: list[tuple[tuple[str, ...], Any]] = []


# One component, all values.


def cases() -> Iterator[Any]:
    for case in SERVED:
        for particles in (1, 2):
            if particles == 1 or case.num_states <= 8:
                is_quick = particles == 1 and case.name in QUICK
                marks = () if is_quick else (pytest.mark.slow,)
                yield pytest.param(case, particles, id=f"{case.name}-{particles}", marks=marks)


@pytest.mark.parametrize(("case", "particles"), list(cases()))
def test_expected_gradient_is_exact(case: Any, particles: int) -> None:
    case.params()
    elbo = stepped(5, TraceBackpropQ_ELBO(particles, estimator=Hindsight()), case.model, case.guide, *case.args)
    assert_unbiased(elbo.eval(), case.model, case.guide, *case.args)


def table(name: str, *shape: int) -> Tensor:
    size = math.prod(shape)
    return pyro.param(name, 1.1 * torch.sin(1.3 * torch.arange(size) + 2.3 * len(name)).double().reshape(shape))


def chain(scale: float = 1.0, values: int = 3) -> Program:
    """Three sites; the first is read by all, the second has this number of values, and is scaled and masked."""

    def run(kind: str) -> None:
        a = pyro.sample("a", dist.Bernoulli(logits=table(f"{kind}a"))).long()
        with poutine.scale(scale=0.5), poutine.mask(mask=scale > 0.0):
            b = pyro.sample("b", dist.Categorical(logits=scale * table(f"{kind}bb", 2, values)[a]))
        c = pyro.sample("c", dist.OneHotCategorical(logits=table(f"{kind}ccc", values, 2)[b]))
        if kind == "p":
            pyro.sample("x", dist.Normal(a + c[..., 0] * table("mean", values)[b], 0.7), obs=real(0.4)[0])

    return (lambda: run("p")), (lambda: run("q"))


def chain_error(particles: int = 1, scale: float = 1.0, values: int = 3, **options: Any) -> float:
    pyro.clear_param_store()
    program = chain(scale, values)
    return bias(trained(program, particles, **options), *program)


@pytest.mark.parametrize("scale", [1.3, 0.0], ids=["scaled", "masked"])
def test_scaled_and_masked_chain_is_exact(scale: float) -> None:
    assert chain_error(scale=scale) < 1e-10


def test_chain_of_two_particles_is_exact() -> None:
    assert chain_error(2, values=2, **VECTORISED) < 1e-10


def test_crossed_baseline_is_exact_and_used() -> None:
    def guide() -> None:
        with pyro.plate("rows", 1):
            low = pyro.sample("low", dist.Bernoulli(logits=pyro.param("q_low", real(0.4))))
            pyro.sample("top", dist.Bernoulli(logits=pyro.param("q_top", real(-0.7, 1.6))[low.long()]))

    def model() -> None:
        with pyro.plate("rows", 1):
            top = pyro.sample("top", dist.Bernoulli(logits=real(0.3)))
            low = pyro.sample("low", dist.Bernoulli(logits=2.0 * top - 0.5))
            pyro.sample("x", dist.Normal(low + 0.4 * top, 0.7), obs=real(0.2))

    options = {"vectorize_particles": True, "max_plate_nesting": 1}
    elbo = trained((model, guide), 2, steps=30, estimator=Hindsight(crossed=True), **options)
    moments = [value for key, value in elbo.state_dict().items() if key.endswith("moments")]
    assert any(bool(value.any()) for value in moments)
    assert bias(elbo, model, guide) < 1e-10


def test_a_wrong_weight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    means = estimator_module._means

    def wrong(log_q: Tensor, changes: Any, *kind: bool) -> Any:
        return means(log_q, changes._replace(law=1.01 * changes.law), *kind)

    monkeypatch.setattr(estimator_module, "_means", wrong)
    assert chain_error() > 1e-5


def test_own_particle_in_the_baseline_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_function, "leave_one_out", lambda cost: cost - cost.mean(1, keepdim=True))
    assert chain_error(2, values=2, **VECTORISED) > 1e-5


def test_weights_are_the_law_given_the_children() -> None:
    SEEN.clear()
    trained(chain(), 1, steps=1, estimator=Seen())
    q = pyro.param("qbb").detach().log_softmax(-1)
    values = {name: int(held.value[i]) for names, held in SEEN for i, name in enumerate(names)}
    held = next(held for names, held in SEEN if names == ("a",))
    b = values["b"]
    expected = (pyro.param("qa").detach() * real(0.0, 1.0) + 1.3 * 0.0 + q[:, b]).softmax(-1)
    torch.testing.assert_close((held.log_q.detach() + held.changes.law).softmax(-1).flatten(), expected)


# Many components, some of which are drawn.


def layers(kind: str, is_smooth: bool = True, is_masked: bool = False) -> Program:
    """Two layers above data that reads both, with a factor that reads the lower one alone; in a plate of one row."""
    values = 3 if kind != "bits" else 2

    def draw(name: str, logits: Tensor) -> Tensor:
        if kind == "bits" or name == "top":
            return pyro.sample(name, dist.Bernoulli(logits=logits[..., 0]).to_event(1))
        if kind == "hot":
            return pyro.sample(name, dist.OneHotCategorical(logits=logits).to_event(1)).flatten(-2)
        found = pyro.sample(name, dist.Categorical(logits=logits).to_event(1))
        return torch.nn.functional.one_hot(found, values).to(logits.dtype).flatten(-2)

    width = 2 if kind == "bits" else 2 * values

    def guide() -> None:
        with pyro.plate("rows", 1), poutine.scale(scale=2.0):
            low = draw("low", table("qlow", 2, values).expand(1, 2, values))
            with poutine.mask(mask=not is_masked):
                draw(
                    "top",
                    torch.nn.functional.linear(2.0 * low - 1.0, table("w", 2, width), table("b", 2)).unsqueeze(-1),
                )

    def model() -> None:
        with pyro.plate("rows", 1), poutine.scale(scale=2.0):
            with poutine.mask(mask=not is_masked):
                top = draw("top", table("ptop", 2, 1).expand(1, 2, 1))
            logits = (top @ table("pw", 2, 2 * values)).reshape(1, 2, values)
            low = draw("low", logits)
            both = torch.cat((low, top), -1)
            mean = torch.nn.functional.linear(both if is_smooth else torch.tanh(both), table("v", 3, width + 2))
            pyro.sample("x", dist.Bernoulli(logits=mean).to_event(1), obs=real(1.0, 0.0, 1.0).expand(1, 3))
            pyro.factor("low only", (low - 0.3).square().sum(-1).sin())

    return model, guide


def with_choices(monkeypatch: pytest.MonkeyPatch) -> ChoiceNoise:
    """Lets the drawn components be enumerated; random signs are all one."""
    noise = ChoiceNoise()

    def draw(chance: Tensor, number: int, generator: Any) -> Tensor:
        return torch.stack([noise.draw_choice(chance) for _ in range(number)], -1)

    monkeypatch.setattr(module, "_draw", draw)
    monkeypatch.setattr(module, "_signs", lambda slopes, generator: [torch.ones_like(one) for one in slopes])
    return noise


LAYERS = {
    "bits": layers("bits"),
    "nonlinear": layers("bits", is_smooth=False),
    "masked": layers("bits", is_masked=True),
    "hot": layers("hot"),
    "dice": layers("dice"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_drawn_components_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = LAYERS[name]
    elbo = trained(program, 1, steps=3, estimator=Hindsight(draws=1))
    noise = with_choices(monkeypatch)
    assert bias(elbo, *program, noise=noise) < 1e-10


def pair(is_small: bool = True) -> Program:
    """Two layers of two bits, the lower one scaled, and data that reads both; in a plate of one row.

    Small: another estimator serves the upper layer, which has one bit.
    """
    infer = {"bpq": {"estimator": ScoreFunction(LeaveOneOut())}} if is_small else {}
    width = 1 if is_small else 2

    def guide() -> None:
        with pyro.plate("rows", 1):
            with poutine.scale(scale=1.5):
                low = pyro.sample("low", dist.Bernoulli(logits=pyro.param("q", real(0.4, -0.7))).to_event(1))
            weight = pyro.param("w", real(0.9, -0.6, 0.3, 1.2).reshape(2, 2))
            logits = torch.nn.functional.linear(2.0 * low - 1.0, weight)
            pyro.sample("top", dist.Bernoulli(logits=logits[..., :width]).to_event(1), infer=infer)

    def model() -> None:
        with pyro.plate("rows", 1):
            top = pyro.sample("top", dist.Bernoulli(logits=pyro.param("p", real(0.2, -0.3))[:width]).to_event(1))
            with poutine.scale(scale=1.5):
                logits = top @ real(0.7, 0.2, -1.1, 0.5).reshape(2, 2)[:width]
                low = pyro.sample("low", dist.Bernoulli(logits=logits).to_event(1))
            pyro.sample("x", dist.Normal((low * top.flip(-1)).sum(-1) + low[..., 0], 0.6), obs=real(0.7))

    return model, guide


TOGETHER = {"vectorize_particles": True, "max_plate_nesting": 1}
ONE_OF_TWO = [
    pytest.param(TOGETHER, True, id="together"),
    pytest.param({}, True, id="one by one"),
    pytest.param(TOGETHER, False, id="two layers", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("options", "is_small"), ONE_OF_TWO)
def test_components_of_one_particle_are_exact(
    options: dict[str, Any], is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = pair(is_small)
    pyro.clear_param_store()
    elbo = trained(program, 2, steps=3, estimator=Hindsight(draws=1, crossed=not is_small), **options)
    noise = with_choices(monkeypatch)
    drawn, seen = module._draw, set()

    def draw(chance: Tensor, number: int, generator: Any) -> Tensor:
        seen.add(tuple(chance.shape))
        return drawn(chance, number, generator)

    monkeypatch.setattr(module, "_draw", draw)
    assert bias(elbo, *program, noise=noise) < 1e-10
    # A particle, and components of its rows alone.
    assert seen == {(2,), (1 if is_small else 2, 1, 1, 2)}


@pytest.mark.parametrize("options", [TOGETHER, {}], ids=["together", "one by one"])
def test_a_reparameterised_site_may_come_first(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, guide = pair()

    def with_point(program: Callable[[], None], law: Any) -> Callable[[], None]:
        def run() -> None:
            pyro.sample("point", law())
            program()

        return run

    # A point has a gradient of its own, and a single value, which can be enumerated.
    program = (
        with_point(model, lambda: dist.Normal(real(0.2)[0], 1.0)),
        with_point(guide, lambda: dist.Delta(pyro.param("at", real(0.3))[0])),
    )
    pyro.clear_param_store()
    elbo = trained(program, 2, steps=3, estimator=Hindsight(draws=1), **options)
    assert elbo.plan.layout.specs["point"].estimator.is_pathwise
    assert bias(elbo, *program, noise=with_choices(monkeypatch)) < 1e-10


def test_small_layers_are_drawn_along_with_large_ones() -> None:
    def guide() -> None:
        large = pyro.sample("large", dist.Bernoulli(logits=pyro.param("q", real(*range(5)))).to_event(1))
        small = pyro.sample("small", dist.Bernoulli(logits=large[..., :3] - 0.5).to_event(1))
        pyro.sample("bit", dist.Bernoulli(logits=small.sum(-1) - 1.0))

    plan = trained((guide, guide), 2, steps=1).plan
    found = {name: site.is_drawn for name, site in plan.held.sites.items()}
    assert found == {"large": True, "small": True, "bit": False}


def test_a_particle_that_counts_too_little_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    program = pair()
    pyro.clear_param_store()
    elbo = trained(program, 2, steps=3, estimator=Hindsight(draws=1), **TOGETHER)
    noise = with_choices(monkeypatch)
    corrected = estimator_module._corrected

    def smaller(table: Tensor, log_q: Tensor, level: Tensor, kept: Tensor, held: Any) -> Tensor:
        return corrected(table, log_q, level, kept, held._replace(share=0.5 * held.share))

    monkeypatch.setattr(estimator_module, "_corrected", smaller)
    assert bias(elbo, *program, noise=noise) > 1e-6


FAULTS = {
    "correction": ("_drawn", lambda own: lambda *arguments: (own(*arguments)[0], 0.9 * own(*arguments)[1])),
    "group": ("_of_group", lambda own: lambda *arguments: 0.9 * own(*arguments)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_correction_or_group_that_counts_too_little_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, (name, wrong) = LAYERS["bits"], FAULTS[fault]
    elbo = trained(program, 1, steps=3, estimator=Hindsight(draws=1))
    assert set(elbo.plan.held.group_of.values()) == {0, 1}
    noise = with_choices(monkeypatch)
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    assert bias(elbo, *program, noise=noise) > 1e-6


def test_components_are_drawn_as_often_as_their_shares_say() -> None:
    chance = real(0.45, 0.05, 0.2, 0.3)
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for number in (1, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "uniform", lambda like, generator: grid.unsqueeze(-1))
            index = module._draw(chance.expand(1000, 4), number, torch.Generator())
        found = torch.bincount(index.flatten(), minlength=4) / 1000
        torch.testing.assert_close(found, number * chance, rtol=0.0, atol=2e-3)


# Immediate costs.


def test_immediate_costs_read_no_site_downstream() -> None:
    plan = trained(LAYERS["bits"], 1, steps=1).plan
    found = {name: set(site.immediate) for name, site in plan.held.sites.items()}
    low, top = ({cost_of_guide(name), cost_of_model(name)} for name in ("low", "top"))
    assert found["low"] == {cost_of_guide("low"), cost_of_model("low only")}
    assert found["top"] == {*top, *low - {cost_of_guide("low")}, cost_of_model("x")}


def test_a_backward_pass_tells_immediate_costs_from_others() -> None:
    plan = trained(LAYERS["bits"], 1, steps=1, estimator=Hindsight(draws=1)).plan
    guide, model, factor = (group for group in plan.held.groups)
    # Of the site below, the data's cost reads a site downstream, and the factor does not.
    assert set(guide.costs) == {cost_of_guide("low"), cost_of_guide("top")}
    assert set(model.costs) == {*map(cost_of_model, ("low", "top", "x"))}
    assert factor.costs == (cost_of_model("low only"),)
    assert [group.immediate for group in (guide, model, factor)] == [set(), {"top"}, {"low"}]
    assert [group.own for group in (guide, model, factor)] == [{"low", "top"}, {"top"}, set()]


def test_a_cost_of_a_child_among_immediate_ones_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_is_immediate", lambda graph, name, cost: True)
    assert chain_error() > 1e-5


def test_scales_leave_the_least_square() -> None:
    generator = torch.Generator().manual_seed(3)
    later, immediate, crossed = torch.randn(3, 1, 2, 500, generator=generator, dtype=torch.float64).unbind(0)
    crossed = crossed - crossed.mean()
    later = later - 0.6 * immediate + 0.3 * crossed
    immediate = immediate + 0.4 * crossed
    statistics, count = {"moments": torch.zeros(1, 6).double()}, torch.zeros(1).double()
    context = SiteContext(("z",), later, later, statistics=statistics, count=count)
    kept, scale = estimator_module._scales(estimator_module._moments(later, immediate, crossed, context))
    columns = torch.stack([-immediate.flatten(), crossed.flatten()], -1)
    expected = torch.linalg.lstsq(columns, later.reshape(-1, 1)).solution.flatten()
    torch.testing.assert_close(torch.stack([kept, scale]).flatten(), expected, rtol=1e-6, atol=1e-6)
    assert 0.3 < float(kept) < 0.9 and 0.2 < float(scale) < 0.9


def test_immediate_costs_have_no_noise_from_downstream(monkeypatch: pytest.MonkeyPatch) -> None:
    def guide() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", real(0.4)[0])))
        pyro.sample("y", dist.Bernoulli(logits=2.0 * z - 0.8))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=real(0.0)[0]))
        pyro.sample("y", dist.Bernoulli(logits=real(0.0)[0]))
        pyro.factor("far", -4.0 * z)

    found = []
    for scales in (estimator_module._scales, lambda moments: (torch.ones_like(moments[:, 0]),) * 2):
        monkeypatch.setattr(estimator_module, "_scales", scales)
        pyro.clear_param_store()
        elbo = trained((model, guide), 2, steps=50, **VECTORISED)
        assert bias(elbo, model, guide) < 1e-10
        found.append(expected_moments(elbo, model, guide).total_variance)
    assert found[0] < 0.4 * found[1]


# What slopes and curvatures predict.


def quadratic(read: str) -> Program:
    """Costs of second order in the bits that a linear map reads in some way."""
    weight = real(0.7, -0.4, 1.1, 0.3, -0.9, 0.5).reshape(2, 3)

    def guide() -> None:
        with pyro.plate("rows", 2):
            pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", real(0.3, -0.5, 0.8)).expand(2, 3)).to_event(1))

    def model() -> None:
        with pyro.plate("rows", 2):
            z = pyro.sample("z", dist.Bernoulli(logits=real(-0.2).expand(2, 3)).to_event(1))
            if read == "shifted":
                mean = torch.nn.functional.linear(2.0 * z - 1.0, weight)
            elif read == "joined":
                mean = torch.cat((z, z.new_ones(2, 1)), -1) @ torch.cat((weight, real(0.4, 0.2).unsqueeze(-1)), -1).t()
            else:
                mean = z @ weight.t()
            pyro.sample("x", dist.Normal(mean, 0.6).to_event(1), obs=real(0.4, -0.3).expand(2, 2))

    return model, guide


@pytest.mark.parametrize("read", ["plain", "shifted", "joined"])
def test_costs_of_second_order_are_predicted_exactly(read: str) -> None:
    SEEN.clear()
    for curvature in (True, False):
        # The first step predicts nothing.
        trained(quadratic(read), 1, steps=2, estimator=Seen(draws=2, curvature=curvature))
    errors = []
    for _, held in SEEN[1::2]:
        errors.append(float((held.changes.immediate.gather(-1, held.drawn) - held.exact.immediate).abs().max()))
        assert float(held.exact.immediate.abs().max()) > 0.1
    assert errors[0] < 1e-10 < 1e-2 < errors[1]


def test_one_hot_costs_of_second_order_are_predicted_exactly() -> None:
    weight = torch.sin(1.9 * torch.arange(12, dtype=torch.float64)).reshape(2, 6)

    def guide() -> None:
        pyro.sample("z", dist.OneHotCategorical(logits=pyro.param("q", weight[:, :3].clone())).to_event(1))

    def model() -> None:
        z = pyro.sample("z", dist.OneHotCategorical(logits=torch.zeros(2, 3).double()).to_event(1))
        mean = torch.nn.functional.linear(z.flatten(-2), weight)
        pyro.sample("x", dist.Normal(mean, 0.6).to_event(1), obs=real(0.4, -0.3))

    pyro.clear_param_store()
    SEEN.clear()
    trained((model, guide), 1, steps=2, estimator=Seen(draws=1))
    _, (_, held) = SEEN
    at = held.drawn.unsqueeze(-1).expand(*held.drawn.shape, 3)
    torch.testing.assert_close(held.changes.immediate.gather(-2, at), held.exact.immediate, rtol=0.0, atol=1e-10)


# Children with a density.


def test_reparameterised_child_is_exact() -> None:
    """By quadrature over the child: its law given the parent is a density."""

    def guide() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", real(0.4)[0])))
        pyro.sample("y", dist.Normal(pyro.param("loc", real(-0.3, 0.8))[z.long()], 0.9))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=real(-0.2)[0]))
        y = pyro.sample("y", dist.Normal(0.3 * z, 1.1))
        pyro.sample("x", dist.Normal(y + z, 0.8), obs=real(0.5)[0])

    elbo = trained((model, guide), 1)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    gradients = {}
    for kind in (elbo, TraceBackpropQ_ELBO(1, estimator=ScoreFunction())):
        total = torch.zeros(())
        for z in (0.0, 1.0):
            chance = torch.sigmoid((2 * z - 1) * pyro.param("q").detach())
            for node, weight in zip(nodes, weights / weights.sum(), strict=True):
                pyro.get_param_store()._params["q"].grad = None
                with _Fixed(z, float(node)):
                    kind.eval().loss_and_grads(model, guide)
                total = total + float(weight) * chance * pyro.get_param_store()._params["q"].grad
        gradients[kind is elbo] = float(total)
    assert gradients[True] == pytest.approx(gradients[False], abs=1e-8)
    assert abs(gradients[True]) > 1e-2


class _Fixed(poutine.messenger.Messenger):
    """Sets the parent's value and the child's noise, as draws of the guide."""

    def __init__(self, z: float, noise: float) -> None:
        super().__init__()
        self.z, self.noise = z, noise

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and not msg["done"]:
            fn = msg["fn"]
            msg["value"] = torch.tensor(self.z).double() if msg["name"] == "z" else fn.loc + fn.scale * self.noise
            msg["done"] = True


# Other programs and objectives.


def test_expected_cost_is_exact() -> None:
    def policy() -> None:
        a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("qa", real(0.4)[0])))
        b = pyro.sample("b", dist.Categorical(logits=pyro.param("qb", real(0.1, -0.7, 0.5)) * (1.0 + a)))
        cost("both", (a - 0.3) * (b - 1.2), exact=True)
        cost("first", lambda value: (value - 0.2) ** 2, a)

    objective = steps.trained(ExpectedCost(estimator=Hindsight()), None, policy, steps=3).eval()
    truth = exact_gradient(None, policy, only_costs=True)
    assert steps.bias(objective, None, policy, truth=truth) < 1e-10


def test_variance_is_below_that_of_leave_one_out() -> None:
    """Over all draws. Weak couplings: the values of children say little about their parent's."""

    def guide() -> None:
        z = pyro.sample("z0", dist.Bernoulli(logits=pyro.param("q0", real(0.2)[0])))
        for i in (1, 2):
            z = pyro.sample(f"z{i}", dist.Bernoulli(logits=0.3 * z + pyro.param(f"q{i}", real(-0.4)[0])))

    def model() -> None:
        z = real(0.5)[0]
        for i in range(3):
            z = pyro.sample(f"z{i}", dist.Bernoulli(logits=0.4 * z - 0.3))
        pyro.factor("end", -3.0 * z)

    found = {}
    for estimator in (Hindsight(), ScoreFunction(LeaveOneOut())):
        pyro.clear_param_store()
        elbo = trained((model, guide), 2, estimator=estimator, **VECTORISED)
        found[type(estimator)] = expected_moments(elbo, model, guide).total_variance
    assert found[Hindsight] < 0.3 * found[ScoreFunction]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "estimator",
    [Hindsight(draws=1, crossed=True), Hindsight(draws=9, crossed=True), CrossedLeaveOneOut()],
    ids=["drawn", "all", "leave-one-out"],
)
def test_every_precision_is_served(estimator: Any, dtype: torch.dtype) -> None:
    weight = torch.sin(torch.arange(15.0)).reshape(3, 5).to(dtype)

    def guide() -> None:
        with pyro.plate("rows", 4):
            low = pyro.param("q", torch.zeros(5, dtype=dtype)).expand(4, 5)
            low = pyro.sample("low", dist.Bernoulli(logits=low).to_event(1))
            pyro.sample("top", dist.Bernoulli(logits=low @ pyro.param("w", weight.t().clone())).to_event(1))

    def model() -> None:
        with pyro.plate("rows", 4):
            top = pyro.sample("top", dist.Bernoulli(logits=torch.zeros(4, 3, dtype=dtype)).to_event(1))
            low = pyro.sample("low", dist.Bernoulli(logits=top @ weight).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=low @ weight.t()).to_event(1), obs=torch.ones(4, 3, dtype=dtype))

    pyro.clear_param_store()
    options = {"vectorize_particles": True, "max_plate_nesting": 1}
    trained((model, guide), 4, estimator=estimator, **options)
    for parameter in pyro.get_param_store()._params.values():
        assert parameter.grad.dtype is dtype and bool(parameter.grad.isfinite().all()) and bool(parameter.grad.any())


@pytest.mark.parametrize("name", ["python_branch", "dynamic_sites"])
def test_steered_program_is_refused(name: str) -> None:
    case = BY_NAME[name].params()
    with pytest.raises(UnsupportedProgramError, match=r"steer this program.*AllAction"):
        TraceBackpropQ_ELBO(estimator=Hindsight()).loss_and_grads(case.model, case.guide, *case.args)


def test_bad_options_and_sites_are_refused() -> None:
    with pytest.raises(OptionError, match="positive number"):
        Hindsight(draws=0)

    def guide() -> None:
        pyro.sample("z", dist.Poisson(pyro.param("rate", real(2.0)[0].exp())))

    with pytest.raises(UnsupportedSiteError, match=r"'z'.*finite support"):
        TraceBackpropQ_ELBO(estimator=Hindsight()).loss_and_grads(guide, guide)


@pytest.mark.parametrize("reads_site", [False, True])
def test_program_with_noise_of_its_own_warns(reads_site: bool) -> None:
    """The law of the second site would be a mean over the noise."""

    def guide() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", real(0.2)[0])))
        noise = torch.bernoulli(torch.sigmoid(8.0 * z - 4.0)) if reads_site else torch.rand((), dtype=torch.float64)
        pyro.sample("y", dist.Bernoulli(logits=z * noise))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=real(0.1)[0]))
        pyro.sample("y", dist.Bernoulli(logits=z - 0.4))

    elbo = TraceBackpropQ_ELBO(2, estimator=Hindsight())
    with pytest.warns(BPQWarning, match=r"'z': the law of 'y'.*leave-one-out there\. Write ScoreFunction"):
        elbo.loss_and_grads(model, guide)
    assert elbo.plan is not None and elbo.plan.held is not None and set(elbo.plan.held.sites) == {"y"}


def test_plan_tells_what_is_known_with_other_sites_held() -> None:
    elbo = trained(chain(), 1, steps=1)
    assert re.search(r"a: Hindsight.*known with all other sites held: .*log q\(b\).* rows", str(elbo.plan), re.DOTALL)
