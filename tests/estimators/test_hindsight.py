"""Hindsight: exact over all values and all draws of components, what it says of other values, and what is won."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import steps
import torch
from models import BY_NAME, CASES, Case, real
from problems import WEIGHT, error_of_draws, table, two_rows
from pyro import poutine
from quadrature import NodeNormal, expected_gradient
from steps import bias, stepped
from torch import Tensor

from pyro_bpq import ExpectedCost, LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO, cost
from pyro_bpq.errors import BPQWarning, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.estimators import CrossedLeaveOneOut, Hindsight
from pyro_bpq.estimators import hindsight as estimator_module
from pyro_bpq.estimators.base import SiteContext
from pyro_bpq.graph.scg import cost_of_guide, cost_of_model
from pyro_bpq.plan import flips as plans
from pyro_bpq.reruns import hindsight as module
from pyro_bpq.testing import exact_gradient

Program = tuple[Callable[[], None], Callable[[], None]]
VECTORISED = {"vectorize_particles": True, "max_plate_nesting": 0}
# Those that Python control flow steers are refused; values of reparameterised sites are not enumerated.
SERVED = [case for case in CASES if case.is_static and not case.has_reparameterised]
SERVED_PARTICLES = [(case, n) for n in (1, 2) for case in SERVED if n == 1 or case.num_states <= 8]


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


@pytest.mark.parametrize(("case", "particles"), [pytest.param(*x, id=f"{x[0].name}-{x[1]}") for x in SERVED_PARTICLES])
def test_expected_gradient_is_exact(case: Case, particles: int) -> None:
    case.params()
    elbo = trained(case.programs, particles)
    assert bias(elbo, *case.programs, params=case.params, truth=case.exact()) < 1e-10


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


CHAINS = {"scaled": ({}, 1.3, 3), "masked": ({}, 0.0, 3), "two particles": ({"particles": 2, **VECTORISED}, 1.0, 2)}


@pytest.mark.parametrize("name", CHAINS)
def test_chain_is_exact(name: str) -> None:
    options, scale, values = CHAINS[name]
    program = chain(scale, values)
    assert bias(trained(program, **{"particles": 1, **options}), *program) < 1e-10


def test_crossed_baseline_is_exact_and_used() -> None:
    case = BY_NAME["reordered_guide"].params()
    elbo = trained(case.programs, 2, steps=30, estimator=Hindsight(crossed=True), **VECTORISED)
    moments = [value for key, value in elbo.state_dict().items() if key.endswith("moments")]
    assert any(bool(value[:, 3].any()) for value in moments)
    assert bias(elbo, *case.programs, params=case.params, truth=case.exact()) < 1e-10


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
            logits = torch.nn.functional.linear(2.0 * low - 1.0, table("w", 2, width), table("b", 2))
            with poutine.mask(mask=not is_masked):
                draw("top", logits.unsqueeze(-1))

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


LAYERS = {kind: layers(kind) for kind in ("bits", "hot", "dice")}
LAYERS |= {"nonlinear": layers("bits", is_smooth=False), "masked": layers("bits", is_masked=True)}


@pytest.mark.parametrize("name", LAYERS)
def test_drawn_components_are_exact(name: str) -> None:
    elbo = trained(LAYERS[name], 1, steps=3, estimator=Hindsight(draws=1))
    assert error_of_draws(elbo, *LAYERS[name]) < 1e-10


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
def test_components_of_one_particle_are_exact(options: dict[str, Any], is_small: bool) -> None:
    elbo = trained(pair(is_small), 2, steps=3, estimator=Hindsight(draws=1, crossed=not is_small), **options)
    assert error_of_draws(elbo, *pair(is_small)) < 1e-10


@pytest.mark.parametrize("options", [TOGETHER, {}], ids=["together", "one by one"])
def test_a_reparameterised_site_may_come_first(options: dict[str, Any]) -> None:
    plain_model, plain_guide = pair()

    def model() -> None:
        pyro.sample("point", dist.Normal(real(0.2)[0], 1.0))
        plain_model()

    def guide() -> None:
        # A point has a gradient of its own, and a single value, which can be enumerated.
        pyro.sample("point", dist.Delta(pyro.param("at", real(0.3))[0]))
        plain_guide()

    elbo = trained((model, guide), 2, steps=3, estimator=Hindsight(draws=1), **options)
    assert elbo.plan.layout.specs["point"].estimator.is_pathwise
    assert error_of_draws(elbo, model, guide) < 1e-10


def test_small_layers_are_drawn_along_with_large_ones() -> None:
    def guide() -> None:
        large = pyro.sample("large", dist.Bernoulli(logits=pyro.param("q", real(*range(5)))).to_event(1))
        small = pyro.sample("small", dist.Bernoulli(logits=large[..., :3] - 0.5).to_event(1))
        pyro.sample("bit", dist.Bernoulli(logits=small.sum(-1) - 1.0))

    plan = trained((guide, guide), 2, steps=1).plan
    found = {name: site.is_drawn for name, site in plan.held.sites.items()}
    assert found == {"large": True, "small": True, "bit": False}


def weighted(own: Any, weight: float) -> Any:
    return lambda log_q, changes, *kind: own(log_q, changes._replace(law=weight * changes.law), *kind)


def shared(own: Any, share: float) -> Any:
    return lambda *given: own(*given[:-1], given[-1]._replace(share=share * given[-1].share))


def corrected(own: Any, share: float) -> Any:
    return lambda *given: (own(*given)[0], share * own(*given)[1])


# Program, number of particles, what is replaced, and by what.
FAULTS: dict[str, tuple[Program, int, Any, str, Callable[[Any], Any]]] = {
    "weights": (chain(), 1, estimator_module, "_means", lambda own: weighted(own, 1.01)),
    "correction": (layers("bits"), 1, module, "_drawn", lambda own: corrected(own, 0.9)),
    "costs of children": (chain(), 1, plans, "_is_immediate", lambda own: lambda *given: True),
    "particle": (pair(), 2, estimator_module, "_corrected", lambda own: shared(own, 0.5)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, particles, owner, function, wrong = FAULTS[name]
    monkeypatch.setattr(owner, function, wrong(getattr(owner, function)))
    elbo = trained(program, particles, steps=3, estimator=Hindsight(draws=1))
    assert error_of_draws(elbo, *program) > 1e-6


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


def test_a_backward_pass_tells_immediate_costs_from_others() -> None:
    plan = trained(LAYERS["bits"], 1, steps=1, estimator=Hindsight(draws=1)).plan
    guide, model, factor = (group for group in plan.held.groups)
    # Of the site below, the data's cost reads a site downstream, and the factor does not.
    assert set(guide.costs) == {cost_of_guide("low"), cost_of_guide("top")}
    assert set(model.costs) == {*map(cost_of_model, ("low", "top", "x"))}
    assert factor.costs == (cost_of_model("low only"),)
    assert [group.immediate for group in (guide, model, factor)] == [set(), {"top"}, {"low"}]
    assert [group.own for group in (guide, model, factor)] == [{"low", "top"}, {"top"}, set()]


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


# What slopes and curvatures predict.


def joined(z: Tensor) -> Tensor:
    return torch.cat((z, z.new_ones(2, 1)), -1) @ torch.cat((WEIGHT, real(0.4, 0.2).unsqueeze(-1)), -1).t()


# Linear maps of bits.
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda z: z @ WEIGHT.t(),
    "shifted": lambda z: torch.nn.functional.linear(2.0 * z - 1.0, WEIGHT),
    "joined": joined,
}


@pytest.mark.parametrize("read", READS)
def test_costs_of_second_order_are_predicted_exactly(read: str) -> None:
    SEEN.clear()
    program = two_rows(lambda numbers: dist.Bernoulli(logits=numbers - 0.7), READS[read])
    for curvature in (True, False):
        # The first step predicts nothing.
        trained(program, 1, steps=2, estimator=Seen(draws=2, curvature=curvature))
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

    SEEN.clear()
    trained((model, guide), 1, steps=2, estimator=Seen(draws=1))
    _, (_, held) = SEEN
    at = held.drawn.unsqueeze(-1).expand(*held.drawn.shape, 3)
    torch.testing.assert_close(held.changes.immediate.gather(-2, at), held.exact.immediate, rtol=0.0, atol=1e-10)


# Children with a density.


def test_reparameterised_child_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """By quadrature over the child: its law given the parent is a density."""

    def guide() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", real(0.4)[0])))
        pyro.sample("y", NodeNormal(pyro.param("loc", real(-0.3, 0.8))[z.long()], 0.9))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=real(-0.2)[0]))
        y = pyro.sample("y", dist.Normal(0.3 * z, 1.1))
        pyro.sample("x", dist.Normal(y + z, 0.8), obs=real(0.5)[0])

    def gradient(elbo: TraceBackpropQ_ELBO) -> float:
        total = 0.0
        for z in (0.0, 1.0):
            monkeypatch.setattr(dist.Bernoulli, "sample", lambda *_, z=z: torch.tensor(z))
            chance = torch.sigmoid((2.0 * z - 1.0) * pyro.param("q").detach())
            total += float(chance * expected_gradient(elbo, model, guide, (40,))["q"])
        return total

    NodeNormal.nodes = itertools.cycle([0.3, -0.8])
    found = gradient(trained((model, guide), 1))
    assert found == pytest.approx(gradient(TraceBackpropQ_ELBO(1, estimator=ScoreFunction()).eval()), abs=1e-8)
    assert abs(found) > 1e-2


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

    options = {"vectorize_particles": True, "max_plate_nesting": 1}
    trained((model, guide), 4, estimator=estimator, **options)
    for parameter in pyro.get_param_store()._params.values():
        assert parameter.grad.dtype is dtype and bool(parameter.grad.isfinite().all()) and bool(parameter.grad.any())


@pytest.mark.parametrize("name", ["python_branch", "dynamic_sites"])
def test_steered_program_is_refused(name: str) -> None:
    case = BY_NAME[name].params()
    with pytest.raises(UnsupportedProgramError, match=r"steer this program.*AllAction"):
        TraceBackpropQ_ELBO(estimator=Hindsight()).loss_and_grads(case.model, case.guide, *case.args)


def test_sites_without_finite_support_are_refused() -> None:
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


def test_sites_that_one_cost_reads_move_apart_also_where_it_is_known_for_one_of_them_only() -> None:
    """The cost of all rows is known for ``a``, and not for a row of ``b``."""

    def guide() -> None:
        pyro.sample("a", dist.Bernoulli(logits=pyro.param("qa", torch.tensor(0.3))))
        with pyro.plate("rows", 2):
            pyro.sample("b", dist.Bernoulli(logits=pyro.param("qb", torch.tensor([-0.4, 0.9]))))

    def model() -> None:
        a = pyro.sample("a", dist.Bernoulli(torch.tensor(0.4)))
        with pyro.plate("rows", 2):
            b = pyro.sample("b", dist.Bernoulli(torch.tensor([0.7, 0.2])))
        pyro.factor("f", 2.0 * a * b.sum() - a + 0.3 * b[0] * b[1])

    assert bias(trained((model, guide), 1).eval(), model, guide) < 1e-6
