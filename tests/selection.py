"""Which tests run by default, and with ``--quick``: two lists of tests and whole files."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def within(path: Path) -> str:
    """The path within this folder."""
    return path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else str(path)


def _listed(file: str) -> dict[str, int]:
    """What a list names, with its number; 0 where there is none."""
    lines = (line.split() for line in (HERE / file).read_text().splitlines() if not line.startswith("#"))
    return {name.removeprefix("tests/"): int(number[0]) if number else 0 for *number, name in lines}


THINNED, NOT_QUICK = _listed("thinned.txt"), _listed("not_quick.txt")
