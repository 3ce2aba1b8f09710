"""Moments of gradients and comparisons: exact where they can be; planted biases must be found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pyro
import pytest
import torch
from models import BY_NAME
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from steps import CHAIN, assert_equal, coin_guide, seeing, settled, state_of, trained

from pyro_bpq import AllAction, Pathwise, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import (
    Comparison,
    Row,
    compare_estimators,
    diagnose,
    gradient_moments,
    plot_comparison,
    plot_run,
)
from pyro_bpq.diagnostics.compare import AveragedGraphELBO
from pyro_bpq.diagnostics.comparison import recommend
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators import DisARM
from pyro_bpq.estimators.base import SiteContext, SiteTerm
from pyro_bpq.plan import planner
from pyro_bpq.plan.rules import MOST_PARTICLES
from pyro_bpq.testing import expected_moments


@dataclass(frozen=True)
class Declared(ScoreFunction):
    """A score function with the wrong weight that calls itself unbiased, or not."""

    weight: float = 0.8
    is_unbiased: ClassVar[bool] = True

    def __call__(self, context: SiteContext) -> SiteTerm:
        return SiteTerm(self.weight * context.cost * context.score)


@dataclass(frozen=True)
class Admitted(Declared):
    is_unbiased: ClassVar[bool] = False


# Moments.


@pytest.mark.parametrize("name", ["chain", "plate_subsample", "discrete_above_reparam", "python_branch", "vector"])
def test_moments_are_those_of_the_step(name: str) -> None:
    case = BY_NAME[name]
    elbo = settled(case, 20, num_particles=1)
    found = gradient_moments(elbo, case.model, case.guide, *case.args)
    assert found.is_exact and found.total_variance_error == 0.0 and elbo.training
    truth = expected_moments(elbo.eval(), case.model, case.guide, *case.args)
    torch.testing.assert_close((found.mean, found.variance), (truth.mean, truth.variance), rtol=1e-9, atol=1e-10)


def test_nothing_changes() -> None:
    elbo = trained(TraceBackpropQ_ELBO(num_particles=2), *CHAIN.programs, params=CHAIN.params, steps=30)
    before, leaves = state_of(elbo), dict(pyro.get_param_store().named_parameters())
    kept = {name: (p.detach().clone(), p.grad.clone()) for name, p in leaves.items()}
    rng, info = torch.get_rng_state(), elbo.info
    gradient_moments(elbo, CHAIN.model, CHAIN.guide, num_outcomes=1, num_samples=5)
    diagnose(elbo, CHAIN.model, CHAIN.guide, num_samples=5, num_outcomes=1)
    options = {"num_samples": 4, "num_warmup": 3, "num_rounds": 1, "progress": False, "num_outcomes": 1}
    compare_estimators(*CHAIN.programs, estimators={"own": elbo, "disarm": ScoreFunction()}, **options)
    assert_equal(state_of(elbo), before)
    assert elbo.training and elbo.info is info and elbo.num_steps == 30
    assert torch.equal(rng, torch.get_rng_state())
    assert_equal({name: (p.detach(), p.grad) for name, p in leaves.items()}, kept)


def test_noise_of_an_estimators_own_is_sampled() -> None:
    case = BY_NAME["fork"].params()
    elbo = TraceBackpropQ_ELBO(estimator=DisARM())
    assert not gradient_moments(elbo, case.model, case.guide, num_samples=4).is_exact


def test_bad_options_are_refused() -> None:
    CHAIN.params()
    with pytest.raises(OptionError, match="num_samples=1"):
        gradient_moments(TraceBackpropQ_ELBO(), CHAIN.model, CHAIN.guide, num_samples=1)
    with pytest.raises(OptionError, match="num_rounds=0"):
        compare_estimators(CHAIN.model, CHAIN.guide, num_rounds=0)
    for given in ({"x": 3}, {"x": ScoreFunction}, {}):
        with pytest.raises(OptionError):
            compare_estimators(CHAIN.model, CHAIN.guide, estimators=given)


# Comparison.

QUICK: dict[str, Any] = {"num_warmup": 20, "num_rounds": 2, "progress": False}


def test_comparison_measures_every_estimator(capsys: pytest.CaptureFixture[str]) -> None:
    case = BY_NAME["fork"].params()
    rivals = {"default": TraceBackpropQ_ELBO(1), "score": ScoreFunction(), "graph": TraceGraph_ELBO()}
    rivals |= {"pathwise": Pathwise(), "wrong": Declared(), "admitted": Admitted()}
    found = compare_estimators(*case.programs, estimators=rivals, **{**QUICK, "num_particles": 1, "progress": True})
    text = capsys.readouterr()
    assert "Use '" in str(found) and "compare_estimators" in text.err
    assert [row.name for row in found.rows][-1] == "pathwise" and len(found.rows) == 6
    times = [row.variance_time for row in found.rows[:-1]]
    assert times == sorted(times)
    # The score function of this package is the one of TraceGraph_ELBO.
    assert found["score"].variance == pytest.approx(found["graph"].variance, rel=1e-9)
    assert found["default"].variance < found["score"].variance
    assert not found["pathwise"].ran and "rsample" in found["pathwise"].note
    for name in ("default", "score", "graph"):
        assert found[name].variance_error == 0.0 and found[name].bias < 1e-10 and not found[name].is_biased
        assert found[name].ms > 0 and found[name].variance_time == found[name].variance * found[name].ms
    assert (found["default"].num_warmup, found["graph"].num_warmup) == (20, 0)
    # A biased estimator that calls itself unbiased is told on.
    assert found["wrong"].is_biased and found["wrong"].claims_unbiased and found["wrong"].relative_bias > 0.01
    assert "'wrong' is biased" in found.reason and "although it is declared unbiased" in found.reason
    assert "BIASED" in str(found) and "none" in str(found)
    assert found["admitted"].is_biased and found.recommended in ("default", "score", "graph")


OURS = ["default", "default, one particle", "default, no critic", "leave-one-out", "sums over values"]
ALL = [*OURS, "Trace_ELBO", "Trace_ELBO, 4 particles", "TraceGraph_ELBO", "TraceGraph_ELBO, baselines"]


@pytest.mark.parametrize(("name", "is_few"), [("chain", True), ("vector", True), ("chain", False)])
def test_rivals_are_pyros_own(name: str, is_few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME[name].params()
    if not is_few:
        # As a program of many sites, which keep critics.
        monkeypatch.setattr(planner, "MANY_SITES", 1)
    before = list(pyro.get_param_store().keys())
    found = compare_estimators(case.model, case.guide, *case.args, **{**QUICK, "num_samples": 60})
    assert list(pyro.get_param_store().keys()) == before
    assert {row.name for row in found.rows} == set(ALL) and list(found) == list(found.rows)
    with pytest.raises(OptionError, match="no estimator 'none such'"):
        found["none such"]
    assert all(row.ran and not row.is_biased for row in found.rows), str(found)
    assert found["leave-one-out"].num_particles == 4 and found["default"].num_particles == MOST_PARTICLES
    assert found["Trace_ELBO"].variance > found["TraceGraph_ELBO, baselines"].variance
    # It is Pyro's own.
    theirs = gradient_moments(TraceGraph_ELBO(), case.model, case.guide, *case.args)
    assert found["TraceGraph_ELBO"].variance == pytest.approx(theirs.total_variance, rel=1e-12)
    text = str(found)
    assert found["leave-one-out"].write.startswith("TraceBackpropQ_ELBO(num_particles=4, vectorize_particles=True, est")
    # What it names can be written as it stands.
    assert found.recommended in (None, "default") or f" Write {found[found.recommended].write}." in text
    assert "not detected" in text
    assert ("'default' took AllAction() with MLPCritic() at a, b" in text) == (not is_few)
    assert ("'default' took ScoreFunction(baseline=LeaveOneOut()) at" in text) == is_few


def test_averages_of_pyros_baselines_stand_still_while_they_are_measured() -> None:
    model = seeing(lambda z: z)
    elbo = trained(AveragedGraphELBO(), model, coin_guide, steps=3)
    average = "__baseline_avg_downstream_cost_z"
    before = pyro.param(average).clone()
    elbo.train(False)
    elbo.loss_and_grads(model, coin_guide)
    assert torch.equal(pyro.param(average), before) and before != 0.0
    elbo.train()
    elbo.loss_and_grads(model, coin_guide)
    assert not torch.equal(pyro.param(average), before)


def test_recommendation_weighs_variance_and_time() -> None:
    row = Row("a", variance=2.0, variance_error=0.0, ms=3.0, claims_unbiased=True)
    calm = replace(row, name="b", variance=1.0, ms=30.0)
    wrong = replace(row, name="c", variance=0.1, is_biased=True, relative_bias=0.3)
    straight = replace(row, name="d", variance=0.1, claims_unbiased=False)
    name, reason = recommend((calm, row, wrong, straight))
    assert name == "a" and "5.00 times less than 'b'" in reason and "'b' has less variance" in reason
    assert "'c' is biased by 30.0%" in reason and "'d' is declared biased" in reason
    blind = replace(row, name="e", variance=0.1, claims_unbiased=None, is_blind=True)
    name, reason = recommend((row, blind))
    assert name == "a" and "'e' is left out: Python decides by sampled values" in reason
    tie = replace(row, name="t", ms=3.1, ms_spread=0.5)
    assert "a tie" in recommend((row, tie))[1]
    assert recommend((wrong,))[0] is None


@pytest.mark.parametrize("reads", [True, False])
def test_pyros_graph_elbo_is_not_recommended_where_python_decides(reads: bool) -> None:
    # Too few samples to show its bias.
    model = seeing(lambda z: torch.tensor(1.0 if z.item() > 0 else 0.0) if reads else z)
    rivals = {"pyro": TraceGraph_ELBO(), "ours": ScoreFunction(), "plain": Trace_ELBO()}
    options = {**QUICK, "num_warmup": 1, "num_samples": 2, "num_outcomes": 1}
    found = compare_estimators(model, coin_guide, estimators=rivals, **options)
    assert [row.name for row in found.rows if row.is_blind] == (["pyro"] if reads else [])
    assert not reads or found.recommended != "pyro"


# Plots.

ROWS = (
    Row("best", variance=2.0, ms=3.0),
    Row("wrong", variance=0.0, ms=1.0, is_biased=True),
    Row("blind", variance=9.0, ms=1.0, is_blind=True),
    Row("absent", note="why"),
)


def test_each_estimator_that_ran_has_a_bar() -> None:
    pytest.importorskip("matplotlib")
    figure = plot_comparison(Comparison(ROWS, "best", "", ""))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["best", "wrong", "blind"]
    # The bar of a variance of zero is shorter than all others, for it has no place on a logarithmic axis.
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([6.0, 0.3 * 6.0, 9.0])
    assert [bar.get_facecolor()[-1] for bar in axes.patches] == [1.0, 0.0, 0.0]
    assert [text.get_text().strip() for text in axes.texts] == ["biased", "misses costs"]
    with pytest.raises(OptionError, match=r"print\(comparison\) says why"):
        plot_comparison(Comparison(ROWS[-1:], None, "", ""))


def test_a_run_is_plotted_with_a_line_per_site() -> None:
    pytest.importorskip("matplotlib")
    CHAIN.params()
    elbo, losses, infos = TraceBackpropQ_ELBO(2, estimator=AllAction(exact=False)), [], []
    for _ in range(8):
        losses.append(elbo.loss_and_grads(*CHAIN.programs))
        infos.append(elbo.info)
    figure = plot_run(losses, infos)
    loss, explained, weights = figure.axes
    # Steps are too few to be averaged.
    assert list(loss.lines[0].get_ydata()) == losses
    assert [line.get_label() for line in explained.lines] == [*infos[0]]
    drawn = weights.lines[[*infos[0]].index("b")].get_ydata()
    assert list(drawn) == pytest.approx([float(info["b"]["scales"][1:3].max()) for info in infos])
    figure.canvas.draw()
    with pytest.raises(OptionError, match="8 losses and 7 reports"):
        plot_run(losses, infos[1:])
