"""The table that says how many particles a program is good for."""

from __future__ import annotations

from typing import Any

import pytest

from pyro_bpq.plan.rules import ELEMENTS, FEW_PARTICLES, MANY_SITES, MOST_PARTICLES, PARTICLES, ProgramFacts

ROWS, NONE = frozenset(("y", "z")), frozenset[str]()


def facts_of(
    by_row: frozenset[str], sloped: frozenset[str], is_plain: bool, elements: int, particles: int = 1, **options: Any
) -> ProgramFacts:
    return ProgramFacts(by_row, sloped, options.pop("held", NONE), is_plain, elements, particles, **options)


def number(facts: ProgramFacts) -> tuple[int, str]:
    rule = next(rule for rule in PARTICLES if rule.holds(facts))
    return rule.number(facts), rule.says


@pytest.mark.parametrize(
    ("facts", "expected", "why"),
    [
        (facts_of(frozenset(), frozenset(), True, 10), 1, "few sites"),
        (facts_of(frozenset(), frozenset(), True, 10, untold=MANY_SITES - 1), 1, "few sites"),
        (facts_of(frozenset(), frozenset(), True, 10, untold=MANY_SITES), MOST_PARTICLES, "many sites"),
        (facts_of(frozenset(), frozenset(), True, ELEMENTS // 3, untold=MANY_SITES), 3, "many sites"),
        (facts_of(frozenset(), frozenset(), False, 10, untold=MANY_SITES), 1, "taken apart"),
        (facts_of(ROWS, frozenset(), False, 10), 1, "taken apart"),
        (facts_of(ROWS, ROWS | {"x"}, True, 10), 2, "slopes"),
        (facts_of(ROWS, NONE, True, 10, held=ROWS), FEW_PARTICLES, "hindsight"),
        (facts_of(ROWS, NONE, True, ELEMENTS // 3, held=ROWS), 3, "hindsight"),
        (facts_of(ROWS, NONE, True, 10, held=frozenset("y")), MOST_PARTICLES, "rows of data"),
        (facts_of(ROWS, frozenset("y"), True, 10), MOST_PARTICLES, "rows of data"),
        (facts_of(ROWS, frozenset(), True, ELEMENTS // 3), 3, "rows of data"),
        (facts_of(ROWS, frozenset(), True, 100 * ELEMENTS), 2, "rows of data"),
        (facts_of(ROWS, frozenset(), True, ELEMENTS, particles=4), 4, "rows of data"),
        (facts_of(ROWS, frozenset(), True, 0), MOST_PARTICLES, "rows of data"),
    ],
)
def test_the_first_rule_that_holds_counts(facts: ProgramFacts, expected: int, why: str) -> None:
    found, says = number(facts)
    assert found == expected and why in says


def test_the_last_rule_always_holds() -> None:
    assert PARTICLES[-1].holds(facts_of(frozenset(), frozenset(), False, 0))
