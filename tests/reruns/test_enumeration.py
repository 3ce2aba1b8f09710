"""Exact enumeration: against Pyro's ``TraceEnum_ELBO``, and against sums over all joint states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import Case, coin, observe, real
from pyro import poutine
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDiscreteParallel, AutoNormal
from pyro.optim import Adam
from steps import WAYS, bias, fresh, from_seed, largest_error, repeat, trained, unbiased
from torch import Tensor

from pyro_bpq import AllAction, TraceBackpropQ_ELBO, cost
from pyro_bpq.errors import BPQWarning, PlateError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.testing import exact_loss

pytestmark = pytest.mark.usefixtures("two_particles")

ATOL = 1e-10
DATA = real(0.3, -1.2, 2.0, 0.8)
PARALLEL: dict[str, Any] = {"enumerate": "parallel"}
p = pyro.param
Program = Callable[[], Any]


def pick(name: str, logits: Tensor, **kwargs: Any) -> Tensor:
    return pyro.sample(name, dist.Categorical(logits=logits), **kwargs)


def empty(*_: Any) -> None:
    pass


# Programs without sampled sites.


def mixture(subsample: int | None = None, scale: float = 1.0) -> None:
    with pyro.plate("rows", 4, subsample_size=subsample) as i, poutine.scale(scale=scale):
        z = pick("z", p("w"), infer=PARALLEL)
        observe("x", p("mu")[z], DATA[i])


MIXTURE = {"w": (3,), "mu": (3,)}


def hmm(**infer: Any) -> None:
    z: Any = 0
    for t in pyro.markov(range(4)):
        z = pick(f"z_{t}", p("a")[z], infer=infer)
        observe(f"x_{t}", p("mu")[z], DATA[t])


def hmm_in_plate() -> None:
    lengths = torch.tensor([4, 2, 3])
    with pyro.plate("sequences", 3):
        z: Any = torch.tensor(0)
        for t in pyro.markov(range(4)):
            with poutine.mask(mask=t < lengths):
                z = pick(f"z_{t}", p("a")[z], infer=PARALLEL)
                observe(f"x_{t}", p("mu")[z], DATA[t] + 0.1 * torch.arange(3))


def two_orders() -> None:
    """Each value reads the two before it."""
    y, z = torch.tensor(0), torch.tensor(0)
    for t in pyro.markov(range(4), history=2):
        y, z = z, pick(f"z_{t}", p("a")[y] + p("b")[z], infer=PARALLEL)
        observe(f"x_{t}", p("mu")[z], DATA[t])


def nested_sums() -> None:
    g = pick("g", p("w"), infer=PARALLEL)
    with pyro.plate("columns", 2, dim=-1):
        y = coin("y", p("py")[g], infer=PARALLEL).long()
        with pyro.plate("rows", 3, dim=-2):
            z = pick("z", p("pz")[y], infer=PARALLEL)
            observe("x", p("mu")[z] + g, DATA[:3].unsqueeze(-1) + torch.arange(2))


def two_sums() -> None:
    """Two sums that share nothing, of different scales."""
    with poutine.scale(scale=2.5):
        observe("x", p("mu")[pick("z", p("w"), infer=PARALLEL)], DATA[0])
    observe("v", p("mu")[pick("y", 0.3 - p("w"), infer=PARALLEL)], DATA[1])


def masked_rows(**infer: Any) -> None:
    with pyro.plate("rows", 3), poutine.mask(mask=torch.tensor([True, False, True])):
        observe("x", p("mu")[pick("z", p("w"), infer=infer)], DATA[:3])


def local_model() -> None:
    z = pick("z", p("w"))
    with pyro.plate("rows", 3):
        y = coin("y", p("py")[z])
        observe("x", p("mu")[z] + y, DATA[:3])


def local_guide() -> None:
    z = pick("z", p("q"))
    with pyro.plate("rows", 3):
        coin("y", p("qy")[z])


def apart_guide() -> None:
    pick("z", p("q"))
    with pyro.plate("rows", 3):
        coin("y", p("qy"))


LOCAL = {"w": (3,), "py": (3,), "mu": (3,), "q": (3,), "qy": (3,)}


def rows_model(size: int | None = None) -> None:
    with pyro.plate("rows", 4, subsample_size=size) as i:
        a = coin("a", p("pa")).long()
        b = pick("b", p("pb")[a])
        observe("x", p("mu")[b] + a, DATA[i])


def rows_guide(size: int | None = None) -> None:
    with pyro.plate("rows", 4, subsample_size=size) as i:
        a = coin("a", p("qa")[i], infer=PARALLEL).long()
        pick("b", p("qb")[a], infer=PARALLEL)


ROWS = {"pa": (), "pb": (2, 3), "mu": (3,), "qa": (4,), "qb": (2, 3)}


def markov_guide() -> None:
    z: Any = 0
    for t in pyro.markov(range(4)):
        z = pick(f"z_{t}", p("q")[z] + t, infer=PARALLEL)


def masked_guide() -> None:
    with pyro.plate("rows", 3), poutine.mask(mask=torch.tensor([False, True, True])), poutine.scale(scale=0.7):
        pick("z", p("q"), infer=PARALLEL)
        # A number for each row, since one for all would be counted once per row.
        pyro.factor("f", p("pf") ** 2 + torch.zeros(3), has_rsample=True)


def both_model() -> None:
    g = pick("g", p("w"))
    with pyro.plate("rows", 3):
        z = pick("z", p("pz")[g], infer=PARALLEL)
        observe("x", p("mu")[z] + g, DATA[:3])


def both_guide() -> None:
    pick("g", p("q"), infer=PARALLEL)


BOTH = {"w": (2,), "pz": (2, 3), "mu": (3,), "q": (2,)}


def normal_model() -> None:
    m = pyro.sample("m", dist.Normal(p("pm"), 1.0))
    g = pick("g", p("w"))
    with pyro.plate("rows", 3):
        z = coin("z", p("pz")[g] * m, infer=PARALLEL)
        observe("x", p("mu")[z.long()] + m, DATA[:3])


def normal_guide() -> None:
    m = pyro.sample("m", dist.Normal(p("loc"), p("scale").exp()))
    pick("g", p("q") * m.unsqueeze(-1), infer=PARALLEL)


NORMAL = {"pm": (), "w": (3,), "pz": (3,), "mu": (2,), "loc": (), "scale": (), "q": (3,)}
ENUMERATED = [
    Case("mixture", mixture, empty, MIXTURE),
    Case("mixture_subsampled", mixture, empty, MIXTURE, args=(2,)),
    Case("mixture_scaled", mixture, empty, MIXTURE, args=(2, 0.3)),
    Case("hmm", partial(hmm, **PARALLEL), empty, {"a": (3, 3), "mu": (3,)}),
    Case("hmm_in_plate", hmm_in_plate, empty, {"a": (3, 3), "mu": (3,)}),
    Case("two_orders", two_orders, empty, {"a": (2, 2), "b": (2, 2), "mu": (2,)}),
    Case("nested_sums", nested_sums, empty, {"w": (2,), "py": (2,), "pz": (2, 3), "mu": (3,)}),
    Case("guide_parallel", local_model, config_enumerate(local_guide), LOCAL),
    Case("guide_sequential", local_model, config_enumerate(apart_guide, "sequential"), LOCAL),
    Case("guide_expanded", local_model, config_enumerate(apart_guide, expand=True), LOCAL),
    Case("guide_rows", rows_model, rows_guide, ROWS),
    Case("guide_subsampled", rows_model, rows_guide, ROWS, args=(2,)),
    Case("guide_markov", hmm, markov_guide, {"a": (3, 3), "mu": (3,), "q": (3, 3)}),
    Case("guide_masked", masked_rows, masked_guide, {"w": (3,), "mu": (3,), "q": (3,), "pf": ()}),
    Case("both", both_model, both_guide, BOTH),
    Case("pathwise", normal_model, normal_guide, NORMAL),
]


def gradients(elbo: Any, program: Case, through_loss: bool = False) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step from one seed, and its gradients."""
    program.params(seed=3)
    if through_loss:
        loss = elbo.differentiable_loss(*program.programs)
        loss.backward()
    else:
        loss = torch.tensor(elbo.loss_and_grads(*program.programs))
    leaves = pyro.get_param_store().named_parameters()
    return float(loss.detach()), {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves}


def assert_same(elbo: Any, program: Case, through_loss: bool = False, **options: Any) -> None:
    loss, theirs = gradients(TraceEnum_ELBO(**options), program)
    found, ours = gradients(elbo, program, through_loss)
    assert abs(found - loss) < ATOL and largest_error(theirs, ours) < ATOL


def assert_same_loss(program: Case, **options: Any) -> None:
    """For the same draws."""
    losses = []
    for call in (TraceEnum_ELBO(**options).loss, exactly(**options).loss, exactly(**options).loss_and_grads):
        program.params(seed=1)
        losses.append(call(*program.programs))
    assert losses == pytest.approx(losses[:1] * 3, rel=0.0, abs=ATOL)


def exactly(**options: Any) -> TraceBackpropQ_ELBO:
    return TraceBackpropQ_ELBO(enumeration="exact", **options)


@pytest.mark.parametrize("program", ENUMERATED, ids=lambda program: program.name)
def test_what_is_enumerated_is_that_of_pyro(program: Case) -> None:
    assert_same(exactly(), program)
    assert_same(exactly(), program, through_loss=True)
    assert_same(exactly(structure="dense"), program)
    assert_same_loss(program)


@pytest.mark.parametrize("name", ["mixture_subsampled", "hmm", "guide_markov", "guide_rows", "both"])
def test_later_steps_are_the_same(name: str) -> None:
    program, elbo = next(x for x in ENUMERATED if x.name == name), exactly(max_plate_nesting=3)
    repeat(6, assert_same, elbo, program, max_plate_nesting=3)


def test_sums_with_scales_of_their_own() -> None:
    # Pyro wants one scale for all; sums that share nothing need none.
    Case("two_sums", two_sums, empty, MIXTURE).params()
    with torch.no_grad():
        expected = torch.zeros(())
        for scale, logits, data in ((2.5, p("w"), DATA[0]), (1.0, 0.3 - p("w"), DATA[1])):
            joint = logits.log_softmax(-1) + dist.Normal(p("mu"), 0.8).log_prob(data)
            expected = expected - scale * joint.logsumexp(-1)
    assert abs(exactly().loss(two_sums, empty) - float(expected)) < ATOL
    with pytest.raises(UnsupportedProgramError, match="scales"):
        exact_loss(two_sums, empty)


def test_vectorised_particles_without_sampled_sites() -> None:
    for is_vectorised in (False, True):
        options = {"num_particles": 3, "vectorize_particles": is_vectorised}
        assert_same(exactly(**options), ENUMERATED[0], **options)


# Programs with sampled sites, against the sum over all joint states.


def chain_model() -> None:
    s, z = torch.tensor(0), torch.tensor(0)
    for t in pyro.markov(range(3)):
        s = coin(f"s_{t}", p("ps")[s]).long()
        z = pick(f"z_{t}", p("a")[z] * (1 + s.unsqueeze(-1)), infer=PARALLEL)
        observe(f"x_{t}", p("mu")[z] + 1.2 * s, DATA[t])


def chain_guide() -> None:
    s = torch.tensor(0)
    for t in range(3):
        s = coin(f"s_{t}", p("q")[t, s]).long()


def plate_model() -> None:
    g = coin("g", p("pg"))
    with pyro.plate("rows", 3, subsample_size=2) as i:
        b = coin("b", p("pb") * g)
        z = pick("z", p("w") + g.unsqueeze(-1) * real(0.0, 0.9), infer=PARALLEL)
        observe("x", p("mu")[z] + b + 0.3 * g, DATA[i])


def plate_guide() -> None:
    g = coin("g", p("qg"))
    with pyro.plate("rows", 3, subsample_size=2) as i:
        coin("b", p("qb")[i] + g)


def global_model() -> None:
    """The sampled site's own prior goes into the sum, and all rows meet in it."""
    z = pick("z", p("w"), infer=PARALLEL)
    with pyro.plate("rows", 2):
        b = coin("b", p("pb")[z])
        observe("x", p("mu")[z] + b, DATA[:2])


def global_guide() -> None:
    with pyro.plate("rows", 2):
        coin("b", p("qb"))


def mean_model() -> None:
    s = coin("s", p("ps"))
    z = pick("z", p("w") * s.unsqueeze(-1))
    with pyro.plate("rows", 2):
        b = coin("b", p("pb")[z])
        observe("x", p("mu")[z] + b + s, DATA[:2])


def mean_guide() -> None:
    s = coin("s", p("qs"))
    pick("z", p("q") * (s + 0.4).unsqueeze(-1), infer=PARALLEL)
    with pyro.plate("rows", 2):
        coin("b", p("qb") + s)


def early_guide() -> None:
    """The enumerated site comes last: a sampled one before it enters the weights."""
    with pyro.plate("rows", 2):
        b = coin("b", p("qb"))
        pick("z", p("q") * (b + 0.4).unsqueeze(-1), infer=PARALLEL)


def early_model() -> None:
    with pyro.plate("rows", 2):
        b = coin("b", p("pb"))
        z = pick("z", p("w") * (0.2 + b).unsqueeze(-1))
        observe("x", p("mu")[z] + b, DATA[:2])
        observe("v", p("mu")[z], DATA[2:])


def mixed_model() -> None:
    s = coin("s", p("ps"))
    z = pick("z", p("w") * s.unsqueeze(-1))
    y = torch.tensor(0)
    for t in pyro.markov(range(2)):
        y = coin(f"y_{t}", p("py")[z] * (1 + y) + s, infer=PARALLEL).long()
        with pyro.plate(f"rows_{t}", 2):
            b = coin(f"b_{t}", p("pb")[y])
            observe(f"x_{t}", p("mu")[z] + b + s * y, DATA[:2] + t)


def mixed_guide() -> None:
    s = coin("s", p("qs"))
    pick("z", p("q") * (s + 0.4).unsqueeze(-1), infer=PARALLEL)
    with pyro.plate("rows_0", 2):
        b = coin("b_0", p("qb") + s)
    with pyro.plate("rows_1", 2):
        coin("b_1", p("qb") * b.sum(-1, keepdim=True))


MEAN = {"ps": (), "w": (3,), "pb": (3,), "mu": (3,), "qs": (), "q": (3,), "qb": (2,)}
SAMPLED = [
    Case("chain", chain_model, chain_guide, {"ps": (2,), "a": (3, 3), "mu": (3,), "q": (3, 2)}),
    Case("plate", plate_model, plate_guide, {"pg": (), "pb": (), "w": (2,), "mu": (2,), "qg": (), "qb": (3,)}),
    Case("global", global_model, global_guide, {"w": (3,), "pb": (3,), "mu": (3,), "qb": (2,)}),
    Case("mean", mean_model, mean_guide, MEAN),
    Case("early", early_model, early_guide, {"pb": (), "w": (3,), "mu": (3,), "q": (3,), "qb": (2,)}),
    Case("mixed", mixed_model, mixed_guide, {**MEAN, "pb": (2,), "py": (3,)}),
]
BY_NAME = {program.name: program for program in SAMPLED}
OPTIONS = {name: WAYS[name] for name in ("default", "dense", "score_function", "exact", "all_action", "two")}
OPTIONS["exact"] = {**WAYS["exact"], "max_plate_nesting": 3}
OPTIONS["vectorised"] = {"num_particles": 2, "vectorize_particles": True}


def train(program: Case, steps: int = 20, **options: Any) -> TraceBackpropQ_ELBO:
    """Critics trained with a moving guide, then frozen; parameters as before."""
    elbo = trained(exactly(**options), program.model, program.guide, params=program.params, steps=steps, lr=0.02)
    assert elbo.num_steps == steps
    return elbo.eval()


def error(elbo: Any, program: Case) -> float:
    return bias(elbo, program.model, program.guide, params=program.params, truth=program.exact())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("program", SAMPLED, ids=lambda program: program.name)
def test_steps_with_sampled_sites_are_unbiased(program: Case, options: dict[str, Any]) -> None:
    assert error(train(program, **options), program) < ATOL


@pytest.mark.parametrize("name", ["mixture_subsampled", "mixture_scaled", "hmm", "masked_rows"])
def test_exact_loss_sums_marked_sites(name: str) -> None:
    masked = Case("masked_rows", partial(masked_rows, **PARALLEL), empty, MIXTURE)
    program = next(x for x in [*ENUMERATED, masked] if x.name == name)
    program.params()
    losses = {}
    for seed in range(100 if "mixture" in name else 1):
        loss = from_seed(seed, TraceEnum_ELBO(max_plate_nesting=2).loss, *program.programs)
        losses[round(loss, 9)] = loss
    # All subsets of two of four rows.
    assert len(losses) in (1, 6)
    mean = sum(losses.values()) / len(losses)
    assert abs(float(exact_loss(*program.programs)) - mean) < ATOL


@pytest.mark.parametrize("program", SAMPLED, ids=lambda program: program.name)
@pytest.mark.parametrize("is_vectorised", [False, True])
def test_loss_is_that_of_pyro_for_the_same_draws(program: Case, is_vectorised: bool) -> None:
    assert_same_loss(program, num_particles=2, vectorize_particles=is_vectorised)


def normal_locs() -> None:
    locs = pyro.sample("locs", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with pyro.plate("rows", 4):
        observe("x", locs[..., pick("z", torch.zeros(2), infer=PARALLEL)], DATA)


def point_locs() -> None:
    with pyro.plate("rows", 4):
        observe("x", p("mu", real(0.3, -0.8))[pick("z", real(0.4, 0.6).log())], DATA)


@pytest.mark.parametrize(
    ("model", "make"),
    [(normal_locs, lambda model: AutoNormal(poutine.block(model, hide=["z"]))), (point_locs, AutoDiscreteParallel)],
    ids=["leaves the marked site to the model", "AutoDiscreteParallel"],
)
def test_autoguides_train_as_with_pyro(model: Program, make: Any) -> None:
    losses = []
    for elbo in (TraceEnum_ELBO(), exactly()):
        fresh()
        losses.append(repeat(20, SVI(model, make(model), Adam({"lr": 0.05}), elbo).step))
    assert losses[0] == pytest.approx(losses[1], abs=1e-8) and losses[0][-1] < losses[0][0]


def test_sites_of_the_guide_follow_the_marks_of_the_guide() -> None:
    # All sites of the model are marked; the guide samples one of them, and the model sums the rest.
    def guide() -> None:
        pick("z", p("q"))

    program = Case("marked_model", config_enumerate(local_model), guide, LOCAL)
    elbo = train(program)
    assert [cost.name for cost in elbo.graph.costs] == ["log q(z)", "-log p(z)", "-log sum(y)"]
    assert error(elbo, program) < ATOL


# What the graph says.


def graph_of(program: Case, **options: Any) -> Any:
    return trained(exactly(**options), program.model, program.guide, params=program.params, steps=5)


def test_extra_run_of_the_model_reaches_sums_and_means() -> None:
    flips = {name: graph_of(BY_NAME[name], num_particles=1).runner.plans.last.flips for name in ("plate", "mean")}
    assert flips["plate"].costs == {"b": ("-log sum(z)",)}
    assert set(flips["mean"].costs["b"]) == {"E[-log p(b)]", "E[-log p(x)]"}
    # There, the weights of the mean read the site, too.
    early = graph_of(BY_NAME["early"], estimator=AllAction(exact=True))
    assert "E[-log p(x)]" in early.runner.plans.last.flips.costs["b"]
    assert error(early.eval(), BY_NAME["early"]) < ATOL


# Options, warnings, errors.


@pytest.mark.parametrize("leaves", [False, True])
def test_costs_of_enumerated_sites_are_dear_if_they_leave_torch(leaves: bool) -> None:
    def model() -> None:
        y = pick("y", torch.zeros(2), infer=PARALLEL)
        z = pyro.sample("z", dist.Bernoulli(0.4))
        cost("c", lambda y, z: torch.as_tensor(y.numpy() * z.numpy()) if leaves else y * z, y.double(), z)

    elbo = exactly()
    repeat(2, elbo.loss_and_grads, model, lambda: coin("z", pyro.param("w", torch.zeros(()))))
    assert ("dear" in elbo.particles.said) is leaves


def test_nothing_to_enumerate_warns() -> None:
    program = Case("plain", local_model, local_guide, LOCAL)
    program.params()
    with pytest.warns(BPQWarning, match="found no site"):
        exactly().loss_and_grads(program.model, program.guide)
    exactly(strict_enumeration_warning=False).loss_and_grads(program.model, program.guide)


def half(name: str, shift: Any = 0.0, **infer: Any) -> Tensor:
    return coin(name, torch.as_tensor(0.3) + shift, infer=infer)


def marked(**infer: Any) -> Tensor:
    return half("z", **PARALLEL, **infer)


def normal(mean: Tensor) -> None:
    pyro.sample("b", dist.Normal(mean, 1.0))


def in_rows(**infer: Any) -> Tensor:
    with pyro.plate("rows", 3):
        return half("z", torch.zeros(3), **infer)


def read_outside(**infer: Any) -> None:
    observe("x", in_rows(**infer).sum(-1, keepdim=True), DATA[:1])


def above_a_sum() -> None:
    g = half("g", **PARALLEL)
    with pyro.plate("rows", 3):
        observe("x", half("z", torch.zeros(3)) + g, DATA[:3])


def two_plates() -> None:
    left, right = pyro.plate("left", 2, dim=-1), pyro.plate("right", 3, dim=-2)
    with left:
        a = half("a", torch.zeros(2), **PARALLEL)
    with right:
        b = half("b", torch.zeros(3, 1), **PARALLEL)
    with left, right:
        observe("x", a + b, torch.zeros(3, 2))


def two_scales() -> None:
    z = marked()
    with poutine.scale(scale=2.0):
        observe("x", z, DATA[0])


def scaled_rows() -> None:
    with poutine.scale(scale=torch.tensor([1.0, 2.0, 3.0])):
        in_rows(**PARALLEL)


def ragged() -> None:
    with pyro.plate("rows", 2):
        pyro.sample("z", dist.Binomial(torch.tensor([2.0, 3.0]), torch.tensor(0.3)), infer=PARALLEL)


def other_dimension() -> None:
    with pyro.plate("rows", 3, dim=-2):
        half("b", torch.zeros(3, 1), is_auxiliary=True)


HIDDEN: dict[str, Any] = {"_do_not_trace": True, "is_auxiliary": True}
LOST, PLATE = ("'z'", "lost on the way"), ("'x'", "'z'", "['rows']")
# Model, guide, and what the error says.
PROGRAMS_REFUSED: dict[str, tuple[Program, Program, tuple[str, ...]]] = {
    "sampled below": (lambda: half("b", half("z")), lambda: half("b", marked()), ("'z'", "enumerate 'b' as well")),
    "lost in the guide": (lambda: normal(half("z")), lambda: normal(marked().sum()), ("'b'", *LOST)),
    "summed": (lambda: observe("x", marked().sum(), DATA[0]), empty, ("'x'", *LOST)),
    "first": (lambda: observe("x", marked().reshape(-1)[0], DATA[0]), empty, ("'x'", *LOST)),
    "first in the guide": (lambda: half("b", half("z")), lambda: half("b", marked().reshape(-1)[0]), ("'b'", "'z'")),
    "hidden below": (lambda: half("z"), lambda: half("b", marked(), **HIDDEN), ("'b'", "'z'")),
    "hidden": (empty, lambda: marked(**HIDDEN), ("'z'", "_do_not_trace")),
    "outside of the plate": (lambda: read_outside(**PARALLEL), empty, PLATE),
    "outside of the plate of the guide": (read_outside, lambda: in_rows(**PARALLEL), PLATE),
    "around a sum of the guide": (above_a_sum, lambda: in_rows(**PARALLEL), ("'g'", "'z'", "['rows']")),
    "plates that cross": (two_plates, empty, ("'a'", "'b'", "cannot be summed out together")),
}
SITES_REFUSED: dict[str, tuple[Program, Program, tuple[str, ...]]] = {
    "two scales": (two_scales, empty, ("'z' (scale 1)", "'x' (scale 2)")),
    "a scale for each row": (scaled_rows, empty, ("'z'", "scale of shape (3,)")),
    "samples": (lambda: marked(num_samples=10), empty, ("'z'", "num_samples")),
    "no support": (lambda: pyro.sample("z", dist.Normal(0.0, 1.0), infer=PARALLEL), empty, ("'z'", "Normal")),
    "ragged support": (ragged, empty, ("'z'", "Inhomogeneous")),
    "unknown mark": (lambda: half("z", enumerate="flat"), empty, ("'z'", "'flat'")),
}
PLATES_REFUSED = {"two dimensions": (lambda: in_rows(**PARALLEL), other_dimension, ("'rows'", "-2 and -1"))}
REFUSED = {UnsupportedProgramError: PROGRAMS_REFUSED, UnsupportedSiteError: SITES_REFUSED, PlateError: PLATES_REFUSED}


def refused(model: Program, guide: Program, error: type[Exception], *texts: str) -> None:
    for structure in ("auto", "dynamic"):
        with pytest.raises(error) as caught:
            exactly(structure=structure).loss_and_grads(model, guide)
        assert all(text in str(caught.value) for text in texts)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in REFUSED.items() for name in table])
def test_what_cannot_be_summed_is_refused(kind: type[Exception], name: str) -> None:
    model, guide, texts = REFUSED[kind][name]
    refused(model, guide, kind, *texts)


ONE_VALUE = [lambda z: z.item(), bool, int, float, lambda z: [0.1, 0.2][z.long()]]
MANY_VALUES = [lambda z: z.sum() > 1, lambda z: len(z[z > 0]), lambda z: str(z.tolist()) > "1"]
LOOKS = [(look, partial(half, "z", enumerate=mark)) for look in ONE_VALUE for mark in ("parallel", "sequential")]


@pytest.mark.parametrize(("look", "guide"), [*LOOKS, *((look, empty) for look in MANY_VALUES)])
def test_python_looks_at_values(look: Any, guide: Program) -> None:
    def model() -> None:
        observe("x", torch.as_tensor(float(look(marked() if guide is empty else half("z")))), DATA[0])

    refused(model, guide, UnsupportedProgramError, "'z'", "left torch" if guide is empty else "sampled")


def test_dimension_without_plate() -> None:
    def model() -> None:
        z = marked()
        with pyro.plate("rows", 2):
            pyro.sample("x", dist.Normal(z + torch.zeros(3, 2), 1.0), obs=DATA[:2])

    with pyro.validation_enabled(False), pytest.raises(PlateError, match="'x' has a dimension"):
        exactly(max_plate_nesting=2).loss_and_grads(model, empty)


def test_guide_messengers() -> None:
    class Messenger(pyro.poutine.guide.GuideMessenger):
        def get_posterior(self, name: str, prior: Any) -> Any:
            return prior

    with pytest.raises(UnsupportedProgramError, match="GuideMessenger"):
        exactly(max_plate_nesting=1).loss_and_grads(in_rows, Messenger(in_rows))


def test_a_mean_whose_weights_read_all_rows_is_charged_to_each() -> None:
    """The guide's enumerated site lies outside of the plate and reads all of its rows."""

    def guide() -> None:
        with pyro.plate("rows", 2):
            z = coin("z", p("q", torch.tensor(-0.74)))
        coin("y", z.mean(-1, keepdim=True), infer=PARALLEL)

    def model() -> None:
        y = coin("y", torch.tensor(0.38))
        with pyro.plate("rows", 2):
            coin("z", y.exp())

    unbiased(exactly(), model, guide, steps=5)


def test_a_scale_of_the_guide_keeps_its_gradient_beside_sums() -> None:
    def guide() -> None:
        z = coin("z", torch.tensor(0.4))
        with poutine.scale(scale=(0.5 + z * p("s", torch.tensor(0.7))) ** 2):
            coin("y", torch.tensor(-0.3))

    def model() -> None:
        for name, infer in (("z", {}), ("y", {}), ("n", PARALLEL)):
            coin(name, torch.tensor(0.1), infer=infer)

    unbiased(exactly(), model, guide, steps=5)
