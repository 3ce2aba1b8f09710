"""What a release says of itself in several files."""

from __future__ import annotations

import re
from pathlib import Path

import pyro_bpq

ROOT = Path(__file__).parents[1]


def test_the_changelog_begins_with_what_is_unreleased_and_this_version() -> None:
    heads = re.findall(r"^## \[?([\w.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heads[:2] == ["Unreleased", pyro_bpq.__version__]


def test_the_oldest_versions_are_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    oldest = re.search(r"name: oldest.*", workflow)
    (needs,) = re.findall(r"^dependencies = (.*)", project, re.MULTILINE)
    found = dict(re.findall(r"([\w-]+)>=([\d.]+)", needs))
    assert oldest is not None and len(found) == 3
    for name, version in found.items():
        assert re.search(rf"\b{name}=={re.escape(version)}[.\d]*[ \"]", oldest[0]), f"{name} {version}"
