"""Bad input: an exception of our own tree that names site, plates and shapes and says what to write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import CASES, Case, each_case
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import SGD
from steps import filtered, repeat, told
from torch import Tensor, nn

from pyro_bpq import (
    AllAction,
    CriticLearner,
    LeaveOneOut,
    MLPCritic,
    RunningBaseline,
    ScoreFunction,
    TabularCritic,
    TraceBackpropQ_ELBO,
    config_bpq,
)
from pyro_bpq.critics.nets import CriticShape
from pyro_bpq.errors import BPQError, CriticShapeError, OptionError, PlateError, SiteNotFoundError, UnsupportedSiteError
from pyro_bpq.estimators import (
    REBAR,
    RELAX,
    Annealed,
    CrossedLeaveOneOut,
    DebiasedStraightThrough,
    LambdaReturn,
    NetworkVariate,
    OptimalScale,
    QControlVariate,
    SecondRun,
)


def coin_model() -> None:
    z = pyro.sample("z", dist.Bernoulli(0.4))
    pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.7))


def guide_with(fn: Callable[[], Any], **options: Any) -> Callable[[], None]:
    def guide() -> None:
        pyro.sample("z", fn(), infer={"bpq": options})

    return guide


def coin() -> Any:
    return dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3)))


def raised(elbo: TraceBackpropQ_ELBO, model: Any, guide: Any, *args: Any) -> Exception:
    """The exception of a first step; the object is as before."""
    before = set(elbo.state_dict())
    with pytest.raises(BPQError) as caught:
        elbo.loss_and_grads(model, guide, *args)
    assert set(elbo.state_dict()) == before
    return caught.value


@pytest.mark.parametrize("plate", ["none", "rows"])
def test_estimator_that_a_site_cannot_use_names_its_law_and_plates(plate: str) -> None:
    def program(fn: Any) -> None:
        with pyro.plate("rows", 3) if plate == "rows" else contextlib.nullcontext():
            pyro.sample("z", fn)

    elbo = TraceBackpropQ_ELBO(estimator=ScoreFunction(LeaveOneOut()), num_particles=1)
    error = raised(elbo, lambda: program(dist.Bernoulli(0.4)), lambda: program(coin()))
    assert isinstance(error, UnsupportedSiteError) and isinstance(error, ValueError)
    for word in ("'z'", "Bernoulli", "num_particles=2", "RunningBaseline()", f"plates: {plate}", "infer="):
        assert word in str(error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"estimatr": AllAction()}, ["'z'", "'estimatr'", "did you mean 'estimator'"]),
        ({"zzz": 1}, ["'z'", "'zzz'", "'critic'"]),
        ({"estimator": "all"}, ["'z'", "AllAction()"]),
        ({"critic": "mlp"}, ["'z'", "MLPCritic()"]),
        ({"critic": MLPCritic}, ["'z'", "MLPCritic()"]),
    ],
)
def test_unknown_site_option_raises(options: dict[str, Any], words: list[str]) -> None:
    error = raised(TraceBackpropQ_ELBO(), coin_model, guide_with(coin, **options))
    assert isinstance(error, OptionError) and isinstance(error, ValueError)
    for word in words:
        assert word in str(error)


def test_config_bpq_raises_at_once() -> None:
    with pytest.raises(OptionError, match="did you mean 'critic'"):
        config_bpq(coin_model, critc=None)


def test_latent_of_the_model_that_the_guide_lacks_raises() -> None:
    def model() -> None:
        coin_model()
        pyro.sample("w", dist.Bernoulli(0.4))

    elbo = TraceBackpropQ_ELBO()
    with (
        pytest.warns(UserWarning, match="Found vars in model but not guide"),
        pytest.raises(SiteNotFoundError) as caught,
    ):
        elbo.loss_and_grads(model, guide_with(coin))
    assert isinstance(caught.value, KeyError)
    for word in ("'w'", "['z']", 'pyro.sample("w"'):
        assert word in str(caught.value)


@dataclass(frozen=True)
class Misshapen:
    shape: tuple[int, ...]
    uses_cells: ClassVar[bool] = False

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        return _Misshapen(self.shape, shape.sites)


class _Misshapen(nn.Module):
    def __init__(self, shape: tuple[int, ...], sites: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(sites, 1))
        self.shape = shape

    def forward(self, context: Tensor, cells: Tensor | None) -> Tensor:
        return self.weight.sum() + torch.zeros(self.shape)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (1, 1, 2), (3, 1)])
def test_critic_of_the_wrong_shape_raises(shape: tuple[int, ...]) -> None:
    case = next(case for case in CASES if case.name == "chain")
    case.params()
    error = raised(TraceBackpropQ_ELBO(critic=Misshapen(shape)), case.model, case.guide)
    assert isinstance(error, CriticShapeError) and isinstance(error, ValueError)
    assert str(shape) in str(error) and "'a'" in str(error) and "(1, 1, 3)" in str(error)


def test_table_for_an_infinite_scope_raises() -> None:
    case = next(case for case in CASES if case.name == "reparam_above_discrete")

    def model() -> None:
        case.model()
        x, z = pyro.sample("x2", dist.Normal(0.0, 1.0)), pyro.sample("z2", dist.Bernoulli(0.3))
        w = pyro.sample("w2", dist.Bernoulli(0.3))
        pyro.factor("f2", x * z * w)

    def guide() -> None:
        case.guide()
        x = pyro.sample("x2", dist.Normal(0.0, 1.0))
        z = pyro.sample("z2", dist.Bernoulli(logits=x))
        pyro.sample("w2", dist.Bernoulli(logits=x + z))

    case.params()
    error = raised(TraceBackpropQ_ELBO(critic=TabularCritic()), model, guide)
    assert isinstance(error, OptionError) and "'z2'" in str(error) and "MLPCritic()" in str(error)


def test_table_for_sites_in_other_plates_raises() -> None:
    def model() -> None:
        with pyro.plate("rows", 3):
            z = pyro.sample("z", dist.Bernoulli(0.4))
        w, v = pyro.sample("w", dist.Bernoulli(0.4)), pyro.sample("v", dist.Bernoulli(0.4))
        pyro.sample("x", dist.Normal(z.sum() * w * v, 1.0), obs=torch.tensor(0.7))

    def guide() -> None:
        with pyro.plate("rows", 3):
            z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))
        w = pyro.sample("w", dist.Bernoulli(logits=z.sum() - 1))
        pyro.sample("v", dist.Bernoulli(logits=w))

    error = raised(TraceBackpropQ_ELBO(critic=TabularCritic()), model, guide)
    assert "'w'" in str(error) and "plates" in str(error) and "MLPCritic()" in str(error)


def test_wrong_plates_raise() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor([0.4, 0.3])))
        pyro.sample("x", dist.Normal(z.sum(), 1.0), obs=torch.tensor(0.7))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor([0.3, 0.1]))))

    with pytest.raises(ValueError) as theirs:
        Trace_ELBO().loss_and_grads(model, guide)
    with pytest.raises(ValueError) as ours:
        TraceBackpropQ_ELBO().loss_and_grads(model, guide)
    assert str(ours.value).startswith(str(theirs.value)) and isinstance(ours.value, type(theirs.value))
    assert isinstance(ours.value, PlateError) and "is in the plates []" in str(ours.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CriticLearner(lr=0.0),
        lambda: CriticLearner(lr=float("nan")),
        lambda: AllAction(exact="always"),
        lambda: AllAction(decay=1.0),
        lambda: AllAction(max_scale=-1.0),
        lambda: RunningBaseline(decay=1.5),
        lambda: ScoreFunction(baseline=0.3),
        lambda: ScoreFunction(baseline=LeaveOneOut),
        lambda: TabularCritic(max_cells=0),
        lambda: CrossedLeaveOneOut(decay=1.0),
        lambda: SecondRun(decay=-0.1),
        lambda: DebiasedStraightThrough(decay=1.0),
        lambda: DebiasedStraightThrough(mixture=0.0),
        lambda: DebiasedStraightThrough(mixture=1.5),
        lambda: LambdaReturn(1.1),
        lambda: REBAR(temperature=0.0),
        lambda: REBAR(scale="optimal"),
        lambda: RELAX(temperature=Annealed()),
        lambda: RELAX(variate="mlp"),
        lambda: Annealed(0.1, 1.0),
        lambda: NetworkVariate(hidden=(0,)),
        lambda: OptimalScale(max_scale=0.0),
        lambda: QControlVariate(num_samples=0),
    ],
)
def test_bad_values_of_options_raise(make: Callable[[], Any]) -> None:
    with pytest.raises(OptionError, match=r"^\w+\(.*\): write"):
        make()


# Warnings


@each_case()
@pytest.mark.parametrize("options", [{}, {"num_particles": 2}], ids=["one", "two"])
def test_clean_models_warn_of_nothing(case: Case, options: dict[str, Any]) -> None:
    case.params()
    with filtered("error"):
        svi = SVI(case.model, case.guide, SGD({"lr": 0.01}), TraceBackpropQ_ELBO(**options))
        repeat(15, svi.step, *case.args)
        svi.evaluate_loss(*case.args)


def test_a_site_of_the_guide_alone_warns_as_in_pyro() -> None:
    def guide() -> None:
        guide_with(coin)()
        pyro.sample("extra", dist.Bernoulli(0.3))

    found = []
    for elbo in (TraceGraph_ELBO(), TraceBackpropQ_ELBO()):
        pyro.set_rng_seed(0)
        with told() as texts:
            elbo.loss_and_grads(coin_model, guide)
        found.append(set(texts))
    assert found[0] == found[1] != set()


def test_dimensions_without_a_plate_name_the_site_without_validation_too() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.full((3,), 0.3)))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor([2.0, 4.0, 9.0]))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.zeros(3))))

    def draw_in_turn() -> None:
        for i in pyro.plate("rows", 5, subsample_size=2):
            pyro.sample(f"z_{i}", dist.Bernoulli(logits=pyro.param("p", torch.tensor(0.3)).expand(4)))

    with pyro.validation_enabled(False):
        with pytest.raises(PlateError, match=r"'z' has the batch shape \(3,\), .*: dimension -1 is no plate"):
            TraceBackpropQ_ELBO().loss_and_grads(model, guide)
        with pytest.raises(PlateError, match=r"'z_\d' has the batch shape \(3, 4\), .*: dimension -1 is no plate"):
            elbo = TraceBackpropQ_ELBO(3, vectorize_particles=True, max_plate_nesting=1)
            elbo.loss_and_grads(draw_in_turn, draw_in_turn)
        # Where no shape has to fit, the program runs as it does under Pyro's own ELBOs.
        plain = TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None).loss_and_grads(model, guide)
    assert plain > 0.0


def test_the_class_in_place_of_an_elbo_is_told() -> None:
    svi: Any = SVI(coin_model, guide_with(coin), SGD({"lr": 0.1}), loss=TraceBackpropQ_ELBO)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"SVI takes an instance: loss=TraceBackpropQ_ELBO\(\)\."):
        svi.step()
