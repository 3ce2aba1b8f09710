"""Pictures of a comparison; those of a history are tested with it."""

from __future__ import annotations

import pytest

from pyro_bpq.diagnostics import Comparison, Row, plot_comparison
from pyro_bpq.errors import OptionError

ROWS = (
    Row("best", variance=2.0, ms=3.0),
    Row("next", variance=8.0, ms=1.0),
    Row("wrong", variance=0.0, ms=1.0, is_biased=True),
    Row("blind", variance=9.0, ms=1.0, is_blind=True),
    Row("absent", ran=False, note="why"),
)


def test_each_estimator_that_ran_has_a_bar() -> None:
    pytest.importorskip("matplotlib")
    figure = plot_comparison(Comparison(ROWS, "best", "", ""))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["best", "next", "wrong", "blind"]
    # The bar of a variance of zero is shorter than all others, for it has no place on a logarithmic axis.
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([6.0, 8.0, 0.3 * 6.0, 9.0])
    assert [bar.get_facecolor()[-1] for bar in axes.patches] == [1.0, 1.0, 0.0, 0.0]
    assert [text.get_text().strip() for text in axes.texts] == ["biased", "misses costs"]
    figure.canvas.draw()
    assert plot_comparison(Comparison(ROWS, "best", "", ""), figure.add_subplot()) is figure


def test_nothing_to_plot_is_said() -> None:
    with pytest.raises(OptionError, match=r"print\(comparison\) says why"):
        plot_comparison(Comparison(ROWS[-1:], None, "", ""))
