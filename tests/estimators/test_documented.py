"""The table of estimators in the docs says what the code says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from problems import public

PAGE = Path(__file__).parents[2] / "docs" / "estimators.md"


def rows() -> dict[str, list[str]]:
    """Cells of each row, by name of the estimator."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(cells) == len({row[0] for row in cells}), "an estimator is listed twice"
    return {row[0].strip("`"): row for row in cells}


def test_the_readme_counts_them() -> None:
    assert f"All {len(public())} estimators" in (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")


def test_rows_are_those_of_the_estimators() -> None:
    assert rows().keys() == public().keys()


def test_rows_tell_whether_it_is_unbiased_and_what_it_needs() -> None:
    table = rows()
    for name, kind in public().items():
        assert table[name][2] == ("yes" if kind.is_unbiased else "no"), name
        assert len(table[name]) == 6 and all(table[name][i] for i in (0, 1, 2, 3, 5)), name
        if kind.uses_critic and name != "AllAction":
            assert table[name][4] == "a critic", name


def cited(text: str) -> set[tuple[str, str]]:
    """First author and year of each paper; Backprop-Q by its name."""
    flat = " ".join(text.replace("|", " ").split()).replace("Backprop-Q (Xu et al., 2018)", "Backprop-Q")
    found = set(re.findall(r"(\w[\w-]*)(?: et al\.| and [\w-]+)?,? ((?:19|20)\d\d)\b", flat))
    return found | ({("Backprop-Q", "2018")} if "Backprop-Q" in flat else set())


def equations(text: str) -> set[tuple[str, str]]:
    """Which paper's equations a text numbers, as ``Backprop-Q`` or the year, and the numbers."""
    flat = " ".join(text.replace("|", " ").split()).replace("Backprop-Q (Xu et al., 2018)", "Backprop-Q")
    return set(re.findall(r"(Backprop-Q|(?:19|20)\d\d)\)?, Eq\. (\d+(?: (?:to|and) \d+)?)", flat))


@pytest.mark.parametrize("name", sorted(public()))
def test_row_cites_what_the_docstring_cites(name: str) -> None:
    doc = inspect.getdoc(public()[name]) or ""
    text, _, papers = doc.partition("References:")
    row = rows()[name][1]
    assert cited(row), "no paper"
    assert cited(row) == cited(papers)
    assert equations(row) == equations(papers)
    # An equation, set off by its indent.
    assert re.search(r"\n\n    +\S.*[=∇+]", text.partition("Args:")[0]), "no equation"


def test_citations_are_read() -> None:
    text = "| A (Gu et al., 2016)\n | Backprop-Q (Xu et al., 2018), Eq. 19 to 21\n | B (Yin and Zhou, 2019), Eq. 3"
    assert cited(text) == {("Gu", "2016"), ("Backprop-Q", "2018"), ("Yin", "2019")}
    assert equations(text) == {("Backprop-Q", "19 to 21"), ("2019", "3")}
