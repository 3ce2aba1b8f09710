"""What is recorded, logged and drawn during training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyro
import pytest
from models import BY_NAME
from pyro.infer import SVI
from pyro.optim import Adam
from steps import CHAIN

from pyro_bpq import AllAction, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import History, LogCallback, plot_diagnostics
from pyro_bpq.diagnostics.plot import _smooth
from pyro_bpq.errors import OptionError


def trained(steps: int = 12, every: int = 1, **options: Any) -> tuple[History, TraceBackpropQ_ELBO]:
    CHAIN.params()
    elbo, history = TraceBackpropQ_ELBO(**options), History(every)
    svi = SVI(CHAIN.model, CHAIN.guide, Adam({"lr": 0.01}), elbo)
    for _ in range(steps):
        history.record(elbo, svi.step())
    return history, elbo


def test_history_keeps_what_each_step_reports() -> None:
    history, elbo = trained(num_particles=2)
    assert len(history) == 12 and set(history.sites) == {"a", "b", "c"}
    assert [node.name for node in elbo.graph.nodes] == list(history.sites)
    info = elbo.info["b"]
    assert history.series("b", "td_loss")[-1] == pytest.approx(float(info["td_loss"]))
    assert history.series("b", "explained")[-1] == pytest.approx(float(info["explained"]))
    assert history.series("b", "scale_advantage")[-1] == pytest.approx(float(info["scales"][2]))
    assert history.series("b", "cost_to_go")[-1] == pytest.approx(float(info["cost_to_go"].mean()))
    arrays = history.to_numpy()
    assert arrays["loss"].shape == (12,) and np.isfinite(arrays["loss"]).all()
    assert arrays["sites"]["b"]["cost_to_go_std"].shape == (12,)


def test_history_may_skip_steps_and_sites_may_come_and_go() -> None:
    history, elbo = trained(steps=7, every=3, num_particles=1)
    assert history.steps == [0, 3, 6]
    elbo.info = {"new": {"estimator": "Pathwise()"}, "a": elbo.info["a"]}
    history.record(elbo)
    history.record(elbo)
    history.record(elbo)
    assert math.isnan(history.series("b", "td_loss")[-1]) and math.isfinite(history.series("a", "td_loss")[-1])
    assert math.isnan(history.losses[-1])


def test_signal_to_noise_is_measured_by_site() -> None:
    history, elbo = trained(num_particles=2, estimator=AllAction(exact=False))
    history.measure(elbo, CHAIN.model, CHAIN.guide)
    history.measure(elbo, CHAIN.model, CHAIN.guide, exact=False)
    (step, exact, sites), (_, sampled, _) = history.measured
    assert step == 12 and exact > 0 and sampled >= 0 and set(sites) <= {"a", "b", "c"} and min(sites.values()) > 0


class Writer:
    """Stands in for a SummaryWriter."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written.append((tag, value, step))


def test_callback_writes_to_a_writer_or_a_function() -> None:
    # With one particle and one row nothing varies within a step: what is explained of it is no number.
    _, elbo = trained(num_particles=2)
    writer, seen = Writer(), []
    for logger in (LogCallback(writer, every=2), LogCallback(lambda *found: seen.append(found), every=2)):
        for _ in range(4):
            logger(elbo, 1.5)
    assert writer.written == seen and {step for *_, step in seen} == {0, 2}
    tags = {tag for tag, *_ in seen}
    assert {"bpq/loss", "bpq/a/td_loss", "bpq/c/scale_exact", "bpq/b/explained"} <= tags
    assert all(isinstance(value, float) for _, value, _ in seen)


def test_picture_has_a_line_per_site() -> None:
    pytest.importorskip("matplotlib")
    history, elbo = trained(num_particles=2, estimator=AllAction(exact=False))
    history.measure(elbo, CHAIN.model, CHAIN.guide)
    figure = plot_diagnostics(history)
    fit, scales, gradient, errors = figure.axes
    assert [ax.get_title() for ax in figure.axes] == ["critic fit", "adaptive scales", "gradient", "TD error"]
    assert sum(len(line.get_xdata()) == 12 for line in errors.lines) == 3
    assert sum(len(line.get_xdata()) == 12 for line in fit.lines) == 3
    assert len(scales.lines) > 3 and len(gradient.lines) == 4
    figure.canvas.draw()


def test_picture_says_what_is_missing() -> None:
    pytest.importorskip("matplotlib")
    history, _ = trained(steps=2, estimator=ScoreFunction(), critic=None)
    texts = {text.get_text() for ax in plot_diagnostics(history).axes for text in ax.texts}
    assert {"no critics", "no adaptive scales"} <= texts
    with pytest.raises(OptionError, match="empty"):
        plot_diagnostics(History())
    with pytest.raises(OptionError, match="no sites"):
        plot_diagnostics(history, sites=["zz"])


def test_sites_without_figures_do_not_hinder_the_picture() -> None:
    pytest.importorskip("matplotlib")
    case = BY_NAME["discrete_above_reparam"]
    case.params()
    elbo, history = TraceBackpropQ_ELBO(), History()
    for _ in range(3):
        elbo.loss_and_grads(case.model, case.guide, *case.args)
        history.record(elbo)
    plot_diagnostics(history)
    pyro.clear_param_store()


def test_running_mean_skips_gaps() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0])
    np.testing.assert_allclose(_smooth(values, 2), [1.0, 1.0, 3.0, 4.0])
    np.testing.assert_allclose(_smooth(values, 1), [1.0, np.nan, 3.0, 5.0])


@pytest.mark.parametrize("make", [lambda: History(0), lambda: LogCallback(3), lambda: LogCallback(print, every=0)])
def test_bad_options_are_refused(make: Any) -> None:
    with pytest.raises(OptionError):
        make()
