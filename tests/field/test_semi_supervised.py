"""Labelled and unlabelled batches in turn, with one objective, and with two ``SVI`` that share it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import real
from pyro import poutine
from pyro.infer import SVI
from pyro.optim import Adam
from steps import bias, largest_error, text_of, unbiased
from torch import Tensor

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning, UnsupportedProgramError
from pyro_bpq.testing import TwoPoint, assert_unbiased, exact_gradient, expected_gradient

X = real(0.4, -1.3)
LABELS = torch.tensor([1, 0])
p = pyro.param


class Styles:
    """A label, a style given the label, and data; the guide of the style reads the label.

    Args:
        style: The style's distribution in the guide, given location and scale.
        infer: Options of the label in the guide.
        coin: Whether a coin that is sampled comes first, which guide and model read.
    """

    def __init__(self, style: Any = TwoPoint, coin: bool = False, infer: Any = None) -> None:
        self.style, self.coin, self.infer = style, coin, infer or {}

    def begin(self, logit: Tensor) -> Tensor:
        return pyro.sample("a", dist.Bernoulli(logits=logit)) if self.coin else torch.zeros(())

    def model(self, x: Tensor, label: Tensor | None = None) -> None:
        means, a = p("means", real(0.6, -1.0)), self.begin(torch.tensor(0.3))
        with pyro.plate("rows", len(x)):
            y = pyro.sample("y", dist.Categorical(torch.ones(2)), obs=label)
            z = pyro.sample("z", dist.Normal(0.3 * means[y], 1.0))
            pyro.sample("x", dist.Normal(means[y] + z * z - a, 0.9), obs=x)

    def guide(self, x: Tensor, label: Tensor | None = None) -> None:
        logits, locs = p("logits", real(0.3, -0.4)), p("locs", real(0.5, -0.2))
        a = self.begin(logits[0])
        with pyro.plate("rows", len(x)):
            if label is None:
                own = x.unsqueeze(-1) * logits + a
                label = pyro.sample("y", dist.Categorical(logits=own), infer=dict(self.infer))
            pyro.sample("z", self.style(locs[label] * x + 2.0 * a, 0.7))

    def classify(self, x: Tensor, label: Tensor) -> None:
        """The classifier of the guide, trained on labels."""
        own = x.unsqueeze(-1) * p("logits", real(0.3, -0.4))
        with pyro.plate("rows", len(x)), poutine.scale(scale=2.0):
            pyro.sample("label", dist.Categorical(logits=own), obs=label)


def nothing(*_: Any) -> None:
    pass


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The recordings that are made."""
    from pyro_bpq.record import tracer

    made, tape = [], tracer.Tape
    monkeypatch.setattr(tracer, "Tape", lambda: made.append(1) or tape())
    return made


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"num_particles": 1},
    "score": {"num_particles": 1, "estimator": ScoreFunction()},
    "exact": {"enumeration": "exact"},
}


@pytest.mark.filterwarnings("ignore:.*found no site to sum out")  # where all batches are labelled
@pytest.mark.parametrize("options", OPTIONS)
def test_batches_in_turn_have_exact_gradients_and_are_recorded_as_seldom_as_alone(
    options: str, tapes: list[int]
) -> None:
    programs = Styles(infer={"enumerate": "parallel"} if options == "exact" else None)
    calls: dict[str, Any] = {"unlabelled": (X,), "labelled": (X, LABELS)}
    recorded = {}
    for name, kinds in {"turns": [*calls.values()], **{name: [args] for name, args in calls.items()}}.items():
        pyro.clear_param_store()
        elbo = TraceBackpropQ_ELBO(**OPTIONS[options])
        svi, before = SVI(programs.model, programs.guide, Adam({"lr": 0.01}), elbo), len(tapes)
        for args in kinds * 20:
            svi.step(*args)
        recorded[name] = len(tapes) - before
        for args in kinds:
            assert_unbiased(elbo.eval(), programs.model, programs.guide, *args)
    assert recorded["turns"] == recorded["unlabelled"] + recorded["labelled"] < 20


def test_two_svi_share_an_objective(tapes: list[int]) -> None:
    programs, elbo, optim = Styles(), TraceBackpropQ_ELBO(1), Adam({"lr": 0.01})
    whole = SVI(programs.model, programs.guide, optim, elbo)
    classifier = SVI(programs.classify, nothing, optim, elbo)
    before = len(tapes)
    for _ in range(20):
        losses = whole.step(X), whole.step(X, LABELS), classifier.step(X, LABELS)
    assert all(torch.tensor(losses).isfinite()) and len(tapes) - before < 30
    assert_unbiased(elbo.eval(), programs.model, programs.guide, X)
    assert_unbiased(elbo, programs.model, programs.guide, X, LABELS)
    truth = exact_gradient(programs.classify, nothing, X, LABELS)
    assert largest_error(truth, expected_gradient(elbo, programs.classify, nothing, X, LABELS)) < 1e-10


# Labels that are summed out, where the guide reads them.

EXACT: dict[str, Any] = {"infer": {"enumerate": "parallel"}}


@pytest.mark.parametrize("coin", [False, True])
def test_a_style_is_drawn_for_each_label(coin: bool) -> None:
    programs = Styles(coin=coin, **EXACT)
    fresh = TraceBackpropQ_ELBO(1, enumeration="exact", structure="dynamic").eval()  # each run is recorded
    assert bias(fresh, programs.model, programs.guide, X) < 1e-10
    elbo = unbiased(TraceBackpropQ_ELBO(enumeration="exact"), programs.model, programs.guide, X, steps=4)
    assert [node.name for node in elbo.graph.nodes] == ["a"] * coin


def test_a_batch_without_labels_to_sum_out_is_no_mistake() -> None:
    programs, elbo = Styles(**EXACT), TraceBackpropQ_ELBO(enumeration="exact")
    for args in ((X,), (X, LABELS), (X,), (X, LABELS)):
        elbo.loss_and_grads(programs.model, programs.guide, *args)  # warnings are errors
    with pytest.warns(BPQWarning, match="found no site to sum out"):
        TraceBackpropQ_ELBO(enumeration="exact").loss_and_grads(programs.model, programs.guide, X, LABELS)


@pytest.mark.parametrize("style", ["coin", "scored"])
def test_a_style_that_is_scored_is_refused(style: str) -> None:
    def law(loc: Tensor, scale: float) -> Any:
        return dist.Bernoulli(logits=loc) if style == "coin" else dist.Normal(loc, scale).has_rsample_(False)

    programs = Styles(law, **EXACT)
    text = text_of(partial(programs.model, X), partial(programs.guide, X), UnsupportedProgramError, enumeration="exact")
    assert "'z' is sampled in the guide and depends on the enumerated site 'y'" in text and "Remove" in text
    assert f"or {'enumerate' if style == 'coin' else 'reparameterise'} 'z' as well" in text
