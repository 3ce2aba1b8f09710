"""Plots a history of training, and a comparison of estimators."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from pyro_bpq.diagnostics.comparison import Comparison
from pyro_bpq.diagnostics.history import SCALES, History
from pyro_bpq.errors import BPQError, OptionError
from pyro_bpq.estimators.scales import START

_MOST = 8
_STYLES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))


def plot_diagnostics(history: History, sites: Sequence[str] | None = None, window: int | None = None) -> Any:
    """Plots critic fit, scales, gradients and TD errors over time, by site.

    Args:
        history: The recorded history.
        sites: The sites to draw; default: the sites whose cost-to-go varies most, at most eight.
        window: Number of kept steps that curves are averaged over; default: a twentieth of all.

    Returns:
        A figure of matplotlib with four axes.

    Raises:
        OptionError: If nothing was recorded, a site is unknown, or ``window`` is not positive.
        BPQError: If matplotlib is missing.
    """
    if not len(history):
        raise OptionError("The history is empty: call history.record(elbo) after each step.")
    chosen = _chosen(history) if sites is None else tuple(sites)
    unknown = [site for site in chosen if site not in history.sites]
    if unknown:
        raise OptionError(f"The history has no sites {unknown}; it has {list(history.sites)}.")
    window = max(1, len(history) // 20) if window is None else window
    if not isinstance(window, int) or window < 1:
        raise OptionError(f"plot_diagnostics(window={window!r}): write a whole number of at least 1.")
    figure = _figure("plot_diagnostics", (11.0, 7.0))
    axes = figure.subplots(2, 2)
    fit, scales, signal, errors = axes.flat
    colours = {site: f"C{i % 10}" for i, site in enumerate(chosen)}
    _curves(fit, history, colours, "explained", window, lambda values: np.clip(values, -1.0, 1.0))
    fit.axhline(0.0, color="gray", linewidth=0.8)
    fit.set(title="critic fit", ylabel="explained variance", ylim=(-1.05, 1.05), xlabel="step")
    _scales(scales, history, colours, window)
    _signal(signal, history, colours)
    _curves(errors, history, colours, "td_loss", window, lambda values: np.where(values > 0, values, np.nan))
    errors.set(title="TD error", ylabel="squared error / spread of targets", xlabel="step")
    if errors.lines:
        errors.set_yscale("log")
    handles = [fit.plot([], [], color=colour)[0] for colour in colours.values()]
    figure.legend(handles, list(colours), loc="outside right upper", title="site", frameon=False)
    left_out = len(history.sites) - len(chosen)
    if left_out and sites is None:
        figure.text(0.995, 0.02, f"and {left_out} more", ha="right", fontsize=9, color="gray")
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


def _chosen(history: History) -> tuple[str, ...]:
    """The sites whose costs-to-go vary most, in program order."""
    spreads = {}
    for site in history.sites:
        series = history.series(site, "cost_to_go")
        if np.isfinite(series).any():
            spreads[site] = float(np.nanstd(series))
    most = sorted(spreads, key=lambda site: -spreads[site])[:_MOST]
    return tuple(site for site in history.sites if site in most)


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Running mean of the finite values among the last ``window`` values."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    start = np.maximum(np.arange(1, len(values) + 1) - window, 0)
    count = counts[1:] - counts[start]
    return np.where(count > 0, (sums[1:] - sums[start]) / np.maximum(count, 1), np.nan)


def _curves(ax: Any, history: History, colours: dict[str, str], key: str, window: int, clean: Any) -> None:
    """A curve for each site whose critic reports such a number."""
    drawn = [site for site in colours if key in history.keys(site)]
    for site in drawn:
        values = clean(history.series(site, key))
        ax.plot(history.steps, _smooth(values, window), color=colours[site], linewidth=1.2)
    _note(ax, bool(drawn), "no critics")


def _scales(ax: Any, history: History, colours: dict[str, str], window: int) -> None:
    used = []
    for label, style, start in zip(SCALES, _STYLES, START, strict=True):
        key, before = f"scale_{label}", len(ax.lines)
        for site, colour in colours.items():
            if key in history.keys(site):
                values = history.series(site, key)
                # A scale that never left its start belongs to a control variate that is absent.
                if np.nanmax(np.abs(values - start)) > 0:
                    ax.plot(history.steps, _smooth(values, window), linestyle=style, color=colour, linewidth=1.2)
        if len(ax.lines) > before:
            used.append((label, style))
    for label, style in used:
        ax.plot([], [], linestyle=style, color="black", label=label)
    if used:
        ax.legend(fontsize=8, frameon=False, ncols=4, loc="upper center")
    ax.set(title="adaptive scales", ylabel="scale", ylim=(-0.05, 1.4), xlabel="step")
    _note(ax, bool(used), "no adaptive scales")


def _signal(ax: Any, history: History, colours: dict[str, str]) -> None:
    steps = [step for step, _, _ in history.measured]
    if steps:
        total = np.array([value for _, value, _ in history.measured])
        _known(ax, steps, total, color="black", markersize=4, label="whole gradient")
        for site, colour in colours.items():
            values = np.array([found.get(site, np.nan) for _, _, found in history.measured])
            _known(ax, steps, values, color=colour, markersize=3, linewidth=1.0)
        ax.set_yscale("log")
        ax.legend(fontsize=8, frameon=False)
    ax.set(title="gradient", ylabel="signal to noise, |mean|² / variance", xlabel="step")
    _note(ax, bool(steps), "call history.measure(elbo, model, guide, ...)")


def _known(ax: Any, steps: Sequence[int], values: np.ndarray, **style: Any) -> None:
    """Plots positive values only; a value that sampling noise hides is zero and gets no point."""
    keep = np.isfinite(values) & (values > 0)
    ax.plot(np.array(steps)[keep], values[keep], "o-", **style)


def _note(ax: Any, drawn: bool, text: str) -> None:
    if not drawn:
        ax.text(0.5, 0.6, text, transform=ax.transAxes, ha="center", va="center", color="gray")
