"""A plot of a comparison of estimators."""

from __future__ import annotations

import importlib
from typing import Any

from pyro_bpq.diagnostics.comparison import Comparison
from pyro_bpq.errors import BPQError, OptionError


def plot_comparison(comparison: Comparison, axes: Any = None) -> Any:
    """Plots variance times time of each estimator, a bar each, on a logarithmic axis; the smallest is on top.

    Bars of estimators that were found to be biased, or that miss costs which they cannot see, are hollow and labelled
    as such. Estimators that did not run have no bar.

    Args:
        comparison: What :func:`~pyro_bpq.diagnostics.compare_estimators` returned.
        axes: Axes of matplotlib to draw in; ``None`` for a new figure.

    Returns:
        The figure.

    Raises:
        OptionError: If no estimator ran.
        BPQError: If matplotlib is missing.
    """
    rows = [row for row in comparison.rows if row.ran]
    if not rows:
        raise OptionError("No estimator ran, so there is nothing to plot: print(comparison) says why.")
    if axes is None:
        try:
            figure: Any = importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise BPQError("plot_comparison() needs matplotlib (pip install matplotlib).") from error
        axes = figure.Figure(figsize=(6.5, 0.8 + 0.35 * len(rows)), layout="constrained").subplots()
    # A variance of zero, which an exact sum may have, gets a short bar.
    seen = [row.variance_time for row in rows if row.variance_time > 0.0]
    least = 0.3 * min(seen, default=1.0)
    for place, row in enumerate(rows):
        word = " biased" if row.is_biased else " misses costs" if row.is_blind else ""
        filled = {"color": "none", "edgecolor": "C3"} if word else {"color": "C0"}
        axes.barh(place, max(row.variance_time, least), **filled)
        if word:
            axes.annotate(word, (max(row.variance_time, least), place), va="center", fontsize=8, color="C3")
    axes.set(xscale="log", xlabel="variance × milliseconds per step (less is better)")
    axes.set_xlim(0.7 * least, 4.0 * max(seen, default=1.0))
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.invert_yaxis()
    return axes.figure
