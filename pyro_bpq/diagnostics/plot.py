"""Plots of a run and of a comparison of estimators."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pyro_bpq.diagnostics.comparison import Comparison
from pyro_bpq.errors import BPQError, OptionError


def plot_run(losses: Sequence[float], infos: Sequence[Mapping[str, Mapping[str, Any]]]) -> Any:
    """Plots the loss of a run, and what its critics did for it.

    Args:
        losses: The losses of some steps, in nats, as ``svi.step`` returns them.
        infos: ``elbo.info`` after each of these steps.

    Returns:
        A figure of matplotlib: the loss; the share of the targets' variance that each critic explains; the larger
        weight of its corrections, by site. Curves are running means over a twentieth of the steps.

    Raises:
        OptionError: If there are no steps, or not as many losses as reports.
        BPQError: If matplotlib is missing.

    Example:
        >>> for _ in range(1000):  # doctest: +SKIP
        ...     losses.append(svi.step(x))
        ...     infos.append(elbo.info)
        >>> plot_run(losses, infos).savefig("run.png")  # doctest: +SKIP
    """
    if not losses or len(losses) != len(infos):
        raise OptionError(f"plot_run() got {len(losses)} losses and {len(infos)} reports: append both after each step.")
    figure = _figure("plot_run", (11.0, 3.5))
    loss, explained, weights = figure.subplots(1, 3)
    loss.plot(_smooth(losses))
    loss.set(title="loss, nats", xlabel="step")
    for site in dict.fromkeys(site for info in infos for site in info):
        own = [info.get(site, {}) for info in infos]
        explained.plot(_smooth([float(entry.get("explained", math.nan)) for entry in own]), label=site)
        # The second and the third scale are those of the critic.
        weights.plot(_smooth([max(map(float, entry.get("scales", ())[1:3]), default=math.nan) for entry in own]))
    explained.set(title="share that critics explain", xlabel="step", ylim=(-1.05, 1.05))
    explained.legend(fontsize=8, frameon=False)
    weights.set(title="weight of critics", xlabel="step")
    return figure


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
        axes = _figure("plot_comparison", (6.5, 0.8 + 0.35 * len(rows))).subplots()
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


def _figure(owner: str, size: tuple[float, float]) -> Any:
    """An empty figure."""
    try:
        figure_module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise BPQError(f"{owner}() needs matplotlib (pip install matplotlib).") from error
    return figure_module.Figure(figsize=size, layout="constrained")


def _smooth(values: Sequence[float]) -> list[float]:
    """Running mean of the finite values among the last twentieth."""
    window = max(1, len(values) // 20)
    parts = [list(filter(math.isfinite, values[max(0, i - window) : i])) for i in range(1, len(values) + 1)]
    return [sum(part) / len(part) if part else math.nan for part in parts]
