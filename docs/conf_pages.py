"""Pages that are made when the docs are built: benchmark results, and the notebooks of ``tutorials/``."""

from __future__ import annotations

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
