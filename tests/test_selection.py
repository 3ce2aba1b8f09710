"""The lists of tests that are thinned or left out."""

from __future__ import annotations

import re
from pathlib import Path

from selection import HERE, NOT_QUICK, THINNED, within


def functions(path: Path) -> list[str]:
    return [f"{within(path)}::{function}" for function in re.findall(r"^def (test_\w+)", path.read_text(), re.M)]


def test_lists_name_tests_that_exist() -> None:
    files = {within(path): functions(path) for path in HERE.rglob("test_*.py")}
    known = {*files, *(name for names in files.values() for name in names)}
    assert {*NOT_QUICK, *THINNED} <= known


def test_quick_tests_touch_every_folder() -> None:
    for folder in {path.parent for path in HERE.rglob("test_*.py")}:
        kept = [path for path in folder.glob("test_*.py") if within(path) not in NOT_QUICK]
        names = {name for path in kept for name in functions(path)}
        assert names - NOT_QUICK.keys(), folder
