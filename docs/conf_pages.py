"""Pages that are made when the docs are built: benchmark results, the gallery, and the notebooks of ``tutorials/``."""

from __future__ import annotations

import ast
import csv
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _below(text: str) -> str:
    """The page with every heading one level lower."""
    return "\n".join("#" + line if line.startswith("#") else line for line in text.splitlines())


def write_benchmarks() -> None:
    """``benchmarks.md``: how to read the figures, then every result file; its plots in ``benchmark_plots``."""
    plots = ROOT / "docs" / "benchmark_plots"
    shutil.rmtree(plots, ignore_errors=True)
    plots.mkdir()
    for path in (ROOT / "benchmarks" / "results").glob("*.png"):
        shutil.copy(path, plots)
    results = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    parts = [readme, "# Results", *(_below(path.read_text()) for path in results)]
    first, *rest = parts
    text = "\n\n".join([first, *(_below(part) for part in rest)])
    text = re.sub(r"(?<=\]\()(?=\w+\.png\))", "benchmark_plots/", text)
    (ROOT / "docs" / "benchmarks.md").write_text(text + "\n")


# What runs beside the default, as the columns of the result file are called.
ELBOS = ("TraceBackpropQ_ELBO", "TraceGraph_ELBO", "Trace_ELBO")


def write_gallery() -> None:
    """``gallery.md``: each program of ``gallery/`` with its bound beside Pyro's, from the result file."""
    with (ROOT / "benchmarks" / "results" / "gallery.csv").open(newline="") as file:
        results = {row["program"]: row for row in csv.DictReader(file)}
    told = (ROOT / "benchmarks" / "results" / "gallery.md").read_text().split("\n\n")[1]
    programs = sorted((ROOT / "gallery").glob("*.py"))
    titles = {path: path.stem.replace("_", " ") for path in programs}
    head = ["program", *(f"`{elbo}`" for elbo in ELBOS)]
    rows = [[f"[{title}](#{title.replace(' ', '-')})", *_bounds(results[title])] for title in titles.values()]
    parts = [
        "# Gallery",
        "Ten programs of some thirty lines, each with real data that come with Python or scikit-learn, and the bound "
        "that it reaches. Copy one like yours. `gallery/` holds the files, `benchmarks/gallery.py` measures them.",
        told,
        "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows]),
        "Bold is the best bound. Where Pyro's `Trace_ELBO` wins, its steps are so cheap that many noisy ones beat few "
        "good ones: the programs are small. `compare_estimators` of `pyro_bpq.diagnostics` says which it is for you.",
    ]
    for path, title in titles.items():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        steps = ", ".join(f"{float(results[title][f'ms of {elbo}']):.1f} (`{elbo}`)" for elbo in ELBOS)
        parts += [f"## {title.capitalize()}", text, f"Milliseconds of a step: {steps}."]
        parts.append(f'```{{literalinclude}} ../gallery/{path.name}\n:language: python\n:start-after: \'"""\'\n```')
    (ROOT / "docs" / "gallery.md").write_text("\n\n".join(parts) + "\n")


def _bounds(row: dict[str, str]) -> list[str]:
    best = max(float(row[elbo]) for elbo in ELBOS)
    return [f"**{float(row[e]):.2f}**" if float(row[e]) == best else f"{float(row[e]):.2f}" for e in ELBOS]


def copy_tutorials() -> None:
    """``tutorials/*.ipynb`` and an index that lists them."""
    target = ROOT / "docs" / "tutorials"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in sorted((ROOT / "tutorials").glob("*.ipynb")):
        shutil.copy(path, target)
        json.loads(path.read_text())  # a broken notebook fails here, by name
    lines = ["# Tutorials", "", "Each is a notebook and a script of the same name in `tutorials/`.", ""]
    lines += ["```{toctree}", ":maxdepth: 1", *(path.stem for path in sorted(target.glob("*.ipynb"))), "```"]
    (target / "index.md").write_text("\n".join(lines) + "\n")
