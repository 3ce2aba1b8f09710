"""Bad input: an exception of our own tree that names site, plates and shapes and says what to write."""

from __future__ import annotations

import warnings
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
from steps import filtered, repeat
from torch import Tensor, nn

from pyro_bpq import (
    AllAction,
    CriticLearner,
    LeaveOneOut,
    MLPCritic,
    Pathwise,
    RunningBaseline,
    ScoreFunction,
    TabularCritic,
    TraceBackpropQ_ELBO,
    config_bpq,
)
from pyro_bpq.critics.nets import CriticShape
from pyro_bpq.errors import BPQError, CriticShapeError, OptionError, PlateError, SiteNotFoundError, UnsupportedSiteError


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


@pytest.mark.parametrize(
    ("estimator", "fn", "words"),
    [
        (
            AllAction(),
            lambda: dist.Poisson(pyro.param("q", torch.tensor(0.3)).exp()),
            ["'z'", "Poisson", "ScoreFunction()"],
        ),
        (AllAction(), lambda: dist.Normal(pyro.param("q", torch.tensor(0.3)), 1.0), ["'z'", "Normal", "Pathwise()"]),
        (Pathwise(), coin, ["'z'", "Bernoulli", "AllAction()"]),
        (ScoreFunction(LeaveOneOut()), coin, ["'z'", "Bernoulli", "num_particles=2", "RunningBaseline()"]),
    ],
)
def test_estimator_that_a_site_cannot_use_raises(estimator: Any, fn: Any, words: list[str]) -> None:
    def model() -> None:
        pyro.sample(
            "z", dist.Poisson(1.3) if "Poisson" in words else coin() if "Bernoulli" in words else dist.Normal(0, 1)
        )

    error = raised(TraceBackpropQ_ELBO(), model, guide_with(fn, estimator=estimator))
    assert isinstance(error, UnsupportedSiteError | NotImplementedError) and isinstance(error, ValueError)
    for word in [*words, "plates: none", "infer="]:
        assert word in str(error)


def test_estimator_error_names_the_plates() -> None:
    def model() -> None:
        with pyro.plate("rows", 3):
            pyro.sample("z", dist.Bernoulli(0.4))

    def guide() -> None:
        with pyro.plate("rows", 3):
            pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))

    assert "plates: rows" in str(raised(TraceBackpropQ_ELBO(estimator=Pathwise()), model, guide))


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


def test_table_with_too_many_cells_raises() -> None:
    case = next(case for case in CASES if case.name == "chain")
    case.params()
    elbo = TraceBackpropQ_ELBO(critic=TabularCritic(max_cells=1), estimator=AllAction(exact=False))
    error = raised(elbo, case.model, case.guide)
    assert "max_cells=1" in str(error) and "'c'" in str(error)


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

    pyro.clear_param_store()
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
        lambda: CriticLearner(clip=-1.0),
        lambda: AllAction(exact="always"),
        lambda: AllAction(decay=1.0),
        lambda: AllAction(max_scale=-1.0),
        lambda: RunningBaseline(decay=1.5),
        lambda: ScoreFunction(baseline=0.3),
        lambda: ScoreFunction(baseline=LeaveOneOut),
        lambda: MLPCritic(hidden=(0,)),
        lambda: MLPCritic(hidden=0),
        lambda: TabularCritic(max_cells=0),
    ],
)
def test_bad_values_of_options_raise(make: Callable[[], Any]) -> None:
    with pytest.raises(OptionError, match="write"):
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


def messages(elbo: Any, model: Any, guide: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pyro.set_rng_seed(0)
        elbo.loss_and_grads(model, guide)
    return sorted({str(w.message) for w in caught})


def extra_guide_site() -> tuple[Any, Any]:
    def guide() -> None:
        guide_with(coin)()
        pyro.sample("extra", dist.Bernoulli(0.3))

    return coin_model, guide


def test_a_site_of_the_guide_alone_warns_as_in_pyro() -> None:
    model, guide = extra_guide_site()
    pyro.clear_param_store()
    theirs = messages(TraceGraph_ELBO(), model, guide)
    assert theirs and messages(TraceBackpropQ_ELBO(), model, guide) == theirs


def test_dimensions_without_a_plate_name_the_site_without_validation_too() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.full((3,), 0.3)))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor([2.0, 4.0, 9.0]))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.zeros(3))))

    with pyro.validation_enabled(False):
        with pytest.raises(PlateError, match=r"'z' has the batch shape \(3,\), .*: dimension -1 is no plate"):
            TraceBackpropQ_ELBO().loss_and_grads(model, guide)
        # Where no shape has to fit, the program runs as it does under Pyro's own ELBOs.
        plain = TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None).loss_and_grads(model, guide)
    assert plain > 0.0


def test_the_class_in_place_of_an_elbo_is_told() -> None:
    svi: Any = SVI(coin_model, guide_with(coin), SGD({"lr": 0.1}), loss=TraceBackpropQ_ELBO)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"SVI takes an instance: loss=TraceBackpropQ_ELBO\(\)\."):
        svi.step()
