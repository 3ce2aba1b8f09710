"""``docs/paper.md``: every row has an object, a test and a sentence; all exist, and nothing is missing."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "paper.md"
EQUATIONS, FIGURES, THEOREMS = 27, 17, 3


class Row(NamedTuple):
    """A row of a table that leads from the paper to the code."""

    paper: str
    objects: tuple[str, ...]
    tests: tuple[str, ...]
    sentence: str


def rows(text: str) -> list[Row]:
    """The rows of all tables that begin with ``| paper | object | test |``."""
    found = []
    for table in re.findall(r"(?m)^\| paper \| object \| test \|.*\n\| ---.*\n((?:\|.*\n)+)", text):
        for line in table.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            objects = tuple(re.findall(r"`([\w.]+)`", cells[1]))
            found.append(Row(cells[0].strip(), objects, tuple(re.findall(r"`([\w/.:]+)`", cells[2])), cells[3]))
    return found


ROWS = rows(PAGE.read_text(encoding="utf-8"))


def look_up(path: str) -> Any:
    """The object of a dotted path; raises if there is none."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise AttributeError(path)


def is_test(path: str) -> bool:
    """Whether ``file::function`` is a test."""
    file, _, name = path.partition("::")
    return (ROOT / file).is_file() and f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")


def numbered(word: str, text: str) -> set[int]:
    """The numbers that stand after a word: ``Eq. 1, 5, and 7 to 9`` has 1, 5, 7, 8, 9."""
    found: set[int] = set()
    for part in re.findall(rf"{word} ((?:\d+|,|and|to| )+)", text):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", part):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def test_rows_are_read() -> None:
    text = "| paper | object | test | x |\n| --- | --- | --- | --- |\n| Eq. 1 | `a.b` | `t.py::c` | It is so. |\n\n"
    assert rows(text) == [Row("Eq. 1", ("a.b",), ("t.py::c",), "It is so.")]
    assert numbered("Eq.", "Eq. 1, 5, and 7 to 9; Fig. 3") == {1, 5, 7, 8, 9}
    assert not is_test("tests/test_paper_page.py::test_none") and not is_test("tests/none.py::test_rows_are_read")
    with pytest.raises(AttributeError):
        look_up("pyro_bpq.estimators.Nothing")


@pytest.mark.parametrize("row", ROWS, ids=[row.paper for row in ROWS])
def test_row_has_an_object_a_test_and_a_sentence(row: Row) -> None:
    assert row.objects and row.tests
    assert len(row.sentence.split()) >= 4 or row.sentence.startswith("`")
    assert row.sentence.endswith(".")
    for path in row.objects:
        look_up(path)
    missing = [path for path in row.tests if not is_test(path)]
    assert not missing


def test_everything_that_is_numbered_in_the_paper_has_a_row() -> None:
    text = "\n".join(row.paper for row in ROWS)
    assert numbered("Eq.", text) == set(range(1, EQUATIONS + 1))
    assert numbered("Fig.", text) == set(range(1, FIGURES + 1))
    assert numbered("Theorem", text) == set(range(1, THEOREMS + 1))
    assert "Algorithm 1" in text
    for section in (*(f"Sec. {name}" for name in ("2", "3.1", "3.2", "4.1", "5", "6")), *"BC"):
        assert section in text if section.startswith("Sec.") else f"Appendix {section}" in text
    for section in (*(f"D.{i}" for i in range(1, 6)), *(f"E.{i}" for i in range(1, 9))):
        assert f"Appendix {section}" in text
