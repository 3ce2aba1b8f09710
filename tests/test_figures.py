"""Figures in README and docs come from result files of ``benchmarks/``.

``<!-- from benchmarks/results/x.csv -->`` in front of a paragraph, list item or table says that each number in it
stands in that file, rounded; ``; also 3, 100`` in the comment lists numbers that come from elsewhere.
"""

from __future__ import annotations

import csv
import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MADE = ("benchmarks.md", "gallery.md", "changelog.md")
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in MADE)]

MARK = re.compile(
    r"<!-- from (?P<file>[^;\s]+)(?:; also (?P<also>[^>]*?))? -->\n(?P<block>.*?)(?=\n[ \t]*\n|\Z)", re.DOTALL
)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")


def numbers(text: str) -> list[str]:
    """Numbers without their signs; those that are part of a name do not count."""
    return NUMBER.findall(text.replace("*", " "))


def is_in(figure: str, values: list[float]) -> bool:
    """Whether a figure is one of the values, rounded to as many decimals as it shows."""
    decimals = len(figure.partition(".")[2]) if "e" not in figure else 12
    return any(abs(value - float(figure)) <= 0.5000001 * 10.0**-decimals for value in values)


def wrong_figures(text: str) -> list[str]:
    """Figures of a page that are not in the file they are said to come from."""
    wrong = []
    for mark in MARK.finditer(text):
        path = ROOT / mark["file"]
        if not path.is_file():
            wrong.append(f"{mark['file']} is missing")
            continue
        values = [float(v) for v in numbers(path.read_text() + " " + (mark["also"] or ""))]
        wrong += [f"{figure} is not in {path.name}" for figure in numbers(mark["block"]) if not is_in(figure, values)]
    return wrong


def unmarked_tables(text: str) -> list[str]:
    """First lines of tables with cells that begin with a decimal number, and no mark before them."""
    marked = [mark.span("block") for mark in MARK.finditer(text)]
    found = []
    for table in re.finditer(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        is_marked = any(start <= table.start() < end for start, end in marked)
        if not is_marked and re.search(r"\|[ *-]*\d+\.\d", table[0]):
            found.append(table[0].splitlines()[0])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_come_from_result_files(page: Path) -> None:
    text = page.read_text()
    assert wrong_figures(text) == []
    assert unmarked_tables(text) == []


def test_a_wrong_figure_is_found() -> None:
    text = (ROOT / "README.md").read_text()
    mark = next(MARK.finditer(text))
    figure = next(f for f in numbers(mark["block"]) if "." in f)
    last = str((int(figure[-1]) + 5) % 10)
    planted = text[: mark.start("block")] + mark["block"].replace(figure, figure[:-1] + last, 1) + text[mark.end() :]
    assert wrong_figures(planted)
    assert wrong_figures("<!-- from benchmarks/results/none.csv -->\n1.5\n")
    assert unmarked_tables("| a |\n| --- |\n| 1.5 |\n") == ["| a |"]


def test_the_table_of_the_readme_follows_from_the_other_results() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        summary = importlib.import_module("summary")
    finally:
        sys.path.pop(0)
    with (ROOT / "benchmarks" / "results" / "summary.csv").open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert kept == [{name: str(value) for name, value in row.items()} for row in summary.summary()]
