r"""Draws graphs and their Backprop-Q networks, side by side as in the paper's figures; plots runs and comparisons.

Stochastic nodes are ellipses, costs are boxes, plates are boxes around their nodes. In a network every
Q-node shows its scope. The signal flows from the roots at the bottom, against the edges of the graph.
Each cost has a colour; an edge has the colours of the costs that it carries. Edges that are averaged
with others are dashed. Edges of immediate costs are dotted.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyro_bpq.diagnostics.comparison import Comparison
from pyro_bpq.errors import BPQError, OptionError
from pyro_bpq.graph.network import BackpropQNetwork, QNode
from pyro_bpq.graph.scg import CostNode, Plate, StochasticComputationGraph, StochasticNode
from pyro_bpq.short import alike

# Okabe and Ito's colours, which remain distinct for the colour-blind.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D00")
_PARALLEL = 4
_HEAD = (
    'graph [fontname="Helvetica", labeljust="l"];',
    'node [fontname="Helvetica", fontsize=11];',
    "edge [arrowsize=0.7];",
)


@dataclass(frozen=True)
class Drawing:
    """A drawing as DOT text; a notebook shows it as a picture if Graphviz is installed.

    Args:
        dot: The text.
    """

    dot: str

    def render(self, format: str = "svg") -> bytes:
        """Lays the drawing out with Graphviz.

        Args:
            format: ``"svg"``, ``"png"``, ``"pdf"`` or another format of Graphviz.

        Returns:
            The picture.

        Raises:
            BPQError: If the program ``dot`` of Graphviz is missing, or does not know the format.
        """
        if (program := shutil.which("dot")) is None:
            raise BPQError(
                "Drawing a picture needs the program dot of Graphviz (https://graphviz.org/download), which is not "
                'installed; drawing.save("name.dot") does without.'
            )
        done = subprocess.run([program, f"-T{format}"], input=self.dot.encode(), capture_output=True, check=False)
        if done.returncode:
            raise BPQError(f"Graphviz could not draw this as {format!r}: {done.stderr.decode().strip()}")
        return done.stdout

    def save(self, path: str | Path) -> Path:
        """Writes the drawing; the ending of ``path`` chooses the format.

        Args:
            path: A file that ends in ``.dot``, which needs nothing, or in ``.svg``, ``.png``, ``.pdf``.

        Returns:
            The path.

        Raises:
            BPQError: If the path has no ending, or Graphviz is needed and missing.
        """
        path = Path(path)
        if not path.suffix:
            raise BPQError(f'{str(path)!r} has no ending; write save("{path}.dot") or save("{path}.svg").')
        content = self.dot.encode() if path.suffix in (".dot", ".gv") else self.render(path.suffix[1:])
        path.write_bytes(content)
        return path

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        bundle = {"text/plain": self.dot}
        with contextlib.suppress(BPQError):  # without Graphviz a notebook shows the text
            bundle["image/svg+xml"] = self.render("svg").decode()
        return bundle

    def __str__(self) -> str:
        return self.dot


def render_scg(graph: StochasticComputationGraph) -> Drawing:
    """Draws a stochastic computation graph.

    Args:
        graph: The graph.

    Returns:
        The drawing; ``.dot`` is its text, ``.save("graph.svg")`` needs Graphviz.
    """
    return Drawing(_digraph(_scg_lines(graph)))


def render_network(network: BackpropQNetwork) -> Drawing:
    """Draws a graph and its Backprop-Q network side by side.

    Args:
        network: The network.

    Returns:
        The drawing; ``.dot`` is its text, ``.save("network.svg")`` needs Graphviz.
    """
    left = _box("cluster scg", "stochastic computation graph", _scg_lines(network.graph))
    right = _box("cluster network", f"Backprop-Q network ({network.reduction})", _network_lines(network))
    return Drawing(_digraph([*left, *right]))


def _scg_lines(graph: StochasticComputationGraph) -> list[str]:
    colours, lines = _cost_colours(graph), list[str]()
    drawn = [(node.plates, _statement(f"scg {node.name}", label=node.name, shape="ellipse")) for node in graph.nodes]
    drawn += [(cost.plates, _cost_box("scg", cost, colours)) for cost in graph.costs]
    children: Sequence[StochasticNode | CostNode] = (*graph.nodes, *graph.costs)
    for child in children:
        colour = {"color": colours[child.name]} if child.name in colours else {}
        lines += [_statement(f"scg {parent}", f"scg {child.name}", **colour) for parent in child.parents]
    return _in_plates("cluster scg", drawn) + lines


def _network_lines(network: BackpropQNetwork) -> list[str]:
    graph, colours = network.graph, _cost_colours(network.graph)
    read = {child for node in network.nodes for child in (*network.children(node.name), *node.immediate)}
    drawn = [(graph.node(node.site).plates, _q_statement(node, colours)) for node in reversed(network.nodes)]
    drawn += [(cost.plates, _cost_box("q", cost, colours)) for cost in graph.costs if cost.name in read]
    lines = _in_plates("cluster network", drawn)
    sources = {node.name: node.sources for node in network.nodes}
    for node in reversed(network.nodes):
        end = f"q {node.name}"
        for average in node.rule:
            style = "solid" if len(average.children) == 1 else "dashed"
            for child in average.children:
                carried = dict.fromkeys(colours[cost] for cost in sources.get(child, (child,)))
                colour = ":".join(carried) if len(sources.get(child, ())) <= _PARALLEL else "black"
                lines.append(_statement(end, f"q {child}", dir="back", style=style, color=colour))
        for cost in node.immediate:
            lines.append(_statement(end, f"q {cost}", dir="back", style="dotted", color=colours[cost]))
    return lines


def _q_statement(node: QNode, colours: dict[str, str]) -> str:
    colour = colours[node.sources[0]] if len(node.sources) == 1 else "black"
    style = "rounded" if node.is_learned else "rounded,dotted"
    label = f"Q_{node.name}({', '.join(node.scope)})" if node.is_learned else f"Q_{node.name}"
    return _statement(f"q {node.name}", label=label, shape="box", style=style, color=colour)


def _cost_box(prefix: str, cost: CostNode, colours: dict[str, str]) -> str:
    return _statement(f"{prefix} {cost.name}", label=cost.name, shape="box", color=colours[cost.name])


def _cost_colours(graph: StochasticComputationGraph) -> dict[str, str]:
    return {cost.name: _COLOURS[i % len(_COLOURS)] for i, cost in enumerate(graph.costs)}


def _in_plates(prefix: str, drawn: Sequence[tuple[tuple[Plate, ...], str]]) -> list[str]:
    """Statements inside the boxes of their plates, the leftmost dimension outermost."""
    lines = [line for plates, line in drawn if not plates]
    framed = [(min(plates, key=lambda plate: plate.dim), plates, line) for plates, line in drawn if plates]
    boxes = alike(((tuple({*plates} - {outer}), line), outer) for outer, plates, line in framed)
    for outer, inside in boxes.items():
        name = f"{prefix} {outer.name}"
        lines += _box(name, outer.name, _in_plates(name, inside))
    return lines


def _digraph(lines: Iterable[str]) -> str:
    return "\n".join(["digraph {", *(f"  {line}" for line in [*_HEAD, *lines]), "}"]) + "\n"


def _box(name: str, label: str, lines: Iterable[str]) -> list[str]:
    head = [f"subgraph {_quoted(name)} {{", f"  label={_quoted(label)}; color=gray;"]
    return [*head, *(f"  {line}" for line in lines), "}"]


def _statement(*names: str, **attributes: str) -> str:
    """A node, or an edge between two."""
    text = ", ".join(f"{key}={_quoted(value)}" for key, value in attributes.items())
    return " -> ".join(map(_quoted, names)) + (f" [{text}];" if text else ";")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


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
