"""The skeletons of ``docs/extending.md`` run, and an estimator that breaks its promise is caught."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pyro_bpq.estimators.base import SiteContext, SiteTerm
from pyro_bpq.rollout.features import Components, finite_components

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"


def run_blocks() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "extending"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    for block in blocks:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    return names


def test_skeletons_run_and_are_unbiased() -> None:
    names = run_blocks()
    assert finite_components(names["Switches"](torch.zeros(3))) == Components("bernoulli", (3,), 2)


def test_a_skeleton_with_a_fault_is_caught() -> None:
    names = run_blocks()

    class Faulty(names["Shrunk"]):  # type: ignore[name-defined, misc]
        def __call__(self, context: SiteContext) -> SiteTerm:
            term = super().__call__(context)
            return term._replace(surrogate=term.surrogate - 0.1 * context.cost * context.score)

    with pytest.raises(AssertionError, match="is biased"):
        names["assert_unbiased"](names["trained"](estimator=Faulty()), names["model"], names["guide"])
