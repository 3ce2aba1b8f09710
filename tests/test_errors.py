"""Bad input: an exception of our own tree that names site, plates and shapes and says what to write."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, Case, each_case
from pyro.distributions.transforms import affine_coupling, planar
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import SGD, Adam
from steps import coin_guide, filtered, repeat, seeing, stepped, text_of
from torch import nn

from pyro_bpq import (
    ActorCriticSVI,
    AllAction,
    BackwardSweep,
    Compile,
    CriticLearner,
    ExpectedCost,
    LeaveOneOut,
    MLPCritic,
    ProximalSVI,
    Replay,
    RunningBaseline,
    ScoreFunction,
    SlowTracking,
    TabularCritic,
    TraceBackpropQ_ELBO,
    TraceBackpropQ_IWAE,
    TrustRegionSVI,
    ValueCritic,
    config_bpq,
)
from pyro_bpq.critics.nets import CriticShape
from pyro_bpq.errors import (
    BPQWarning,
    CriticShapeError,
    OptionError,
    PlateError,
    UnsupportedSiteError,
)
from pyro_bpq.estimators import (
    REBAR,
    RELAX,
    Annealed,
    Concrete,
    CrossedLeaveOneOut,
    DebiasedStraightThrough,
    GumbelStraightThrough,
    Hindsight,
    LambdaReturn,
    NetworkVariate,
    OptimalScale,
    ParentAdvantage,
    QControlVariate,
    QProp,
    ReinMax,
    SecondRun,
)

coin_model = seeing(lambda z: z)


def coin() -> Any:
    return dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3)))


@pytest.mark.parametrize("plate", ["none", "rows"])
def test_estimator_that_a_site_cannot_use_names_its_law_and_plates(plate: str) -> None:
    def program(fn: Any) -> None:
        with pyro.plate("rows", 3) if plate == "rows" else contextlib.nullcontext():
            pyro.sample("z", fn)

    programs = (lambda: program(dist.Bernoulli(0.4))), (lambda: program(coin()))
    text = text_of(*programs, UnsupportedSiteError, estimator=ScoreFunction(LeaveOneOut()), num_particles=1)
    assert issubclass(UnsupportedSiteError, ValueError)
    for word in ("'z'", "Bernoulli", "num_particles=2", "RunningBaseline()", f"plates: {plate}", "infer="):
        assert word in text


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
    text = text_of(coin_model, lambda: pyro.sample("z", coin(), infer={"bpq": options}), OptionError)
    assert all(word in text for word in words)
    with pytest.raises(OptionError, match="did you mean 'critic'"):
        config_bpq(coin_model, critc=None)


@dataclass(frozen=True)
class Misshapen:
    shape: tuple[int, ...]
    uses_cells: ClassVar[bool] = False

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        net = nn.Linear(1, shape.sites)
        net.forward = lambda context, cells: net.weight.sum() + torch.zeros(self.shape)  # type: ignore[method-assign]
        return net


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (1, 1, 2), (3, 1)])
def test_critic_of_the_wrong_shape_raises(shape: tuple[int, ...]) -> None:
    text = text_of(*BY_NAME["chain"].params().programs, CriticShapeError, critic=Misshapen(shape))
    assert str(shape) in text and "'a'" in text and "(1, 1, 3)" in text


@pytest.mark.parametrize("is_real", [True, False])
def test_a_table_is_refused_where_a_scope_has_no_cells(is_real: bool) -> None:
    """A scope with real values, or with sites in plates that the site lacks."""

    def model() -> None:
        with contextlib.nullcontext() if is_real else pyro.plate("rows", 3):
            x = pyro.sample("x", dist.Normal(0.0, 1.0) if is_real else dist.Bernoulli(0.4))
        w, v = pyro.sample("w", dist.Bernoulli(0.4)), pyro.sample("v", dist.Bernoulli(0.4))
        pyro.factor("f", x.sum() * w * v)

    def guide() -> None:
        with contextlib.nullcontext() if is_real else pyro.plate("rows", 3):
            x = pyro.sample("x", dist.Normal(0.0, 1.0) if is_real else coin())
        w = pyro.sample("w", dist.Bernoulli(logits=x.sum()))
        pyro.sample("v", dist.Bernoulli(logits=x.sum() + w))

    text = text_of(model, guide, OptionError, critic=TabularCritic())
    assert "'w'" in text and "MLPCritic()" in text and (is_real or "plates" in text)


def bare_model() -> None:
    """It lacks a plate, as does its guide."""
    z = pyro.sample("z", dist.Bernoulli(torch.full((3,), 0.3)))
    pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor([2.0, 4.0, 9.0]))


def bare_guide() -> None:
    pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.zeros(3))))


def test_wrong_plates_raise_what_pyro_raises() -> None:
    with pytest.raises(ValueError) as theirs:
        Trace_ELBO().loss_and_grads(bare_model, bare_guide)
    assert text_of(bare_model, bare_guide, PlateError).startswith(str(theirs.value))
    assert issubclass(PlateError, type(theirs.value))


LOOP = (None, None, Adam({}), ExpectedCost(learner=CriticLearner(replay=Replay())))
LAYERS = ([32], 32.0, (0,), ("a",))
# What takes the options, and values of each that are refused.
BAD: list[tuple[Any, dict[str, tuple[Any, ...]]]] = [
    (CriticLearner, {"lr": (0.0, math.nan), "max_idle": (-1, 0.5), "steps": (0, 1.5)}),
    (CriticLearner, {"replay": (5,), "slow": (0.1,), "sweep": (0.1,), "ranks": (2,)}),
    (Replay, {"capacity": (0,), "batch_size": (0,), "updates_per_step": (-1,), "draws": (0,)}),
    (functools.partial(Replay, costs="stored"), {"coparents": ("old", "stored"), "costs": ("old",)}),
    (SlowTracking, {"rate": (0.0, -0.1, 1.5)}),
    (BackwardSweep, {"rate": (0.0,)}),
    (Compile, {"max_recordings": (0,), "backend": (Compile,)}),
    (AllAction, {"exact": ("always",), "decay": (1.0,), "max_scale": (-1.0,)}),
    (QProp, {"decay": (1.0,), "max_scale": (0.0,)}),
    (ScoreFunction, {"baseline": (0.3, LeaveOneOut, AllAction())}),
    (RunningBaseline, {"decay": (1.5,)}),
    (CrossedLeaveOneOut, {"decay": (1.0,)}),
    (SecondRun, {"decay": (-0.1,)}),
    (DebiasedStraightThrough, {"decay": (1.0,), "mixture": (0.0, 1.5)}),
    (Hindsight, {"draws": (0,)}),
    *((kind, {"lam": (1.1,)}) for kind in (LambdaReturn, ParentAdvantage)),
    *((kind, {"temperature": (0.0,)}) for kind in (REBAR, ReinMax, GumbelStraightThrough, Concrete)),
    (REBAR, {"scale": (True, "optimal")}),
    (RELAX, {"temperature": (Annealed(),), "variate": ("mlp",)}),
    (Annealed, {"start": (0.05,)}),
    (OptimalScale, {"max_scale": (0.0,)}),
    (QControlVariate, {"num_samples": (0,)}),
    (TabularCritic, {"max_cells": (0,)}),
    (MLPCritic, {"hidden": LAYERS, "context": ((0,),)}),
    (NetworkVariate, {"hidden": LAYERS}),
    (ValueCritic, {"hidden": ((),)}),
    (functools.partial(ProximalSVI, *LOOP), {"epochs": (0,), "clip": (1.0,), "target_kl": (0.0,)}),
    (functools.partial(TrustRegionSVI, *LOOP), {"max_kl": (0.0,), "max_site_kl": (-1.0,), "damping": (-1.0,)}),
    (functools.partial(TrustRegionSVI, *LOOP), {"iterations": (0,), "confidence": (-1.0,), "divergence": ("both",)}),
    (functools.partial(ActorCriticSVI, *LOOP), {"rounds": (-1,), "critic_updates": (0.5,), "warm_up": (-1,)}),
    (functools.partial(ActorCriticSVI, *LOOP), {"entropy": (-0.1,)}),
    (TraceBackpropQ_IWAE, {"num_particles": (0, None), "num_outer": (1.5,), "baseline": ("mean",)}),
    (TraceBackpropQ_IWAE, {"max_plate_nesting": ("auto",)}),
    (TraceBackpropQ_ELBO, {"max_plate_nesting": ("auto",), "max_iarange_nesting": ("auto",), "num_particles": (0,)}),
    (TraceBackpropQ_ELBO, {"lam": ("high", 1.5, math.nan), "gamma": (None, 0.0), "window": (2.5, 0), "seed": ("a",)}),
    (TraceBackpropQ_ELBO, {"structure": ("statik",), "reduction": ("tre",), "enumeration": ("parallel",)}),
    (TraceBackpropQ_ELBO, {"learner": (0.1,), "critic": ("mlp", MLPCritic), "estimator": ("allaction", AllAction, 3)}),
    (TraceBackpropQ_ELBO, {"form": ("other",), "immediate": ("none",), "compile": (3, "fast")}),
]
# Words of what to write.
ADVICE = {"lam": "[0, 1]", "gamma": "(0, 1]", "window": "a positive integer"}
ADVICE |= {"structure": "'dynamic'", "reduction": "'tree'", "enumeration": "'sample', 'exact'"}
ADVICE |= {"learner": "CriticLearner(lr=", "critic": "MLPCritic()", "estimator": "AllAction()"}


@pytest.mark.filterwarnings("ignore:max_iarange_nesting is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "name", "value"),
    [(make, name, value) for make, options in BAD for name, values in options.items() for value in values],
)
def test_bad_values_of_options_raise(make: Any, name: str, value: Any) -> None:
    """The error says the option, its value, and what to write."""
    own = name.replace("iarange", "plate")
    with pytest.raises(OptionError, match=rf"\b{own}\b.*[:;] write ") as caught:
        make(**{name: value})
    assert repr(value) in str(caught.value) and ADVICE.get(name, "") in str(caught.value)
    assert isinstance(caught.value, ValueError)


# Warnings


@each_case()
@pytest.mark.parametrize("options", [{}, {"num_particles": 2}], ids=["one", "two"])
def test_clean_models_warn_of_nothing(case: Case, options: dict[str, Any]) -> None:
    case.params()
    with filtered("error"):
        svi = SVI(case.model, case.guide, SGD({"lr": 0.01}), TraceBackpropQ_ELBO(**options))
        repeat(15, svi.step, *case.args)
        svi.evaluate_loss(*case.args)


@pytest.mark.parametrize(("kind", "number"), [(affine_coupling, 1), (planar, 4), (affine_coupling, 4)])
def test_flows_with_and_without_an_inverse_warn_of_nothing(kind: Any, number: int) -> None:
    """A flow remembers what it drew; one without an inverse knows the density of nothing else."""
    flow, prior = kind(2), dist.Normal(torch.zeros(2), 1.0).to_event(1)

    def guide() -> None:
        pyro.module("flow", flow)
        w = pyro.sample("w", dist.TransformedDistribution(prior, [flow]))
        pyro.sample("z", dist.Bernoulli(logits=w.sum(-1)))

    def model() -> None:
        w = pyro.sample("w", prior)
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.sample("x", dist.Normal(w.sum(-1) + z, 1.0), obs=torch.tensor(0.7))

    with filtered("error", BPQWarning):
        stepped(14, TraceBackpropQ_ELBO(number, vectorize_particles=number > 1, max_plate_nesting=0), model, guide)


def test_dimensions_without_a_plate_name_the_site_without_validation_too() -> None:
    def draw_in_turn() -> None:
        for i in pyro.plate("rows", 5, subsample_size=2):
            pyro.sample(f"z_{i}", dist.Bernoulli(logits=pyro.param("p", torch.tensor(0.3)).expand(4)))

    with pyro.validation_enabled(False):
        with pytest.raises(PlateError, match=r"'z' has the batch shape \(3,\), .*: dimension -1 is no plate"):
            TraceBackpropQ_ELBO().loss_and_grads(bare_model, bare_guide)
        with pytest.raises(PlateError, match=r"'z_\d' has the batch shape \(3, 4\), .*: dimension -1 is no plate"):
            elbo = TraceBackpropQ_ELBO(3, vectorize_particles=True, max_plate_nesting=1)
            elbo.loss_and_grads(draw_in_turn, draw_in_turn)
        # Where no shape has to fit, the program runs as it does under Pyro's own ELBOs.
        plain = TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None)
        assert plain.loss_and_grads(bare_model, bare_guide) > 0.0


def test_the_class_in_place_of_an_elbo_is_told() -> None:
    svi: Any = SVI(coin_model, coin_guide, SGD({"lr": 0.1}), loss=TraceBackpropQ_ELBO)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"SVI takes an instance: loss=TraceBackpropQ_ELBO\(\)\."):
        svi.step()
