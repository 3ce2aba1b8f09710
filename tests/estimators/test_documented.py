"""The table of estimators in the docs says what the code says."""

from __future__ import annotations

from pathlib import Path

import pyro_bpq.estimators as package
from pyro_bpq.estimators import Estimator

PAGE = Path(__file__).parents[2] / "docs" / "estimators.md"


def rows() -> dict[str, list[str]]:
    """Cells of each row, by name of the estimator."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(cells) == len({row[0] for row in cells}), "an estimator is listed twice"
    return {row[0].strip("`"): row for row in cells}


def public() -> dict[str, type]:
    found = {name: getattr(package, name) for name in package.__all__}
    return {
        name: kind
        for name, kind in found.items()
        if isinstance(kind, type) and kind is not Estimator and hasattr(kind, "is_unbiased")
    }


def test_every_estimator_has_a_row() -> None:
    assert not public().keys() - rows().keys()


def test_every_row_is_an_estimator() -> None:
    assert not rows().keys() - public().keys()


def test_rows_tell_whether_it_is_unbiased() -> None:
    table = rows()
    for name, kind in public().items():
        assert table[name][2] == ("yes" if kind.is_unbiased else "no"), name
        assert len(table[name]) == 6 and all(table[name][i] for i in (0, 1, 2, 3, 5)), name


def test_rows_tell_what_it_needs() -> None:
    table = rows()
    for name, kind in public().items():
        if kind.uses_critic and name != "AllAction":
            assert table[name][4] == "a critic", name
