"""The table that says how many particles a program is good for."""

from __future__ import annotations

import pytest

from pyro_bpq.plan.rules import ELEMENTS, FEW_PARTICLES, MANY_SITES, MOST_PARTICLES, PARTICLES, ProgramFacts

ROWS = frozenset(("y", "z"))


def number(facts: ProgramFacts) -> tuple[int, str]:
    rule = next(rule for rule in PARTICLES if rule.holds(facts))
    return rule.number(facts), rule.says


@pytest.mark.parametrize(
    ("facts", "expected", "why"),
    [
        (ProgramFacts(frozenset(), frozenset(), True, 10), 1, "few sites"),
        (ProgramFacts(frozenset(), frozenset(), True, 10, untold=MANY_SITES - 1), 1, "few sites"),
        (ProgramFacts(frozenset(), frozenset(), True, 10, untold=MANY_SITES), MOST_PARTICLES, "many sites"),
        (ProgramFacts(frozenset(), frozenset(), True, ELEMENTS // 3, untold=MANY_SITES), 3, "many sites"),
        (ProgramFacts(frozenset(), frozenset(), False, 10, untold=MANY_SITES), 1, "taken apart"),
        (ProgramFacts(ROWS, frozenset(), False, 10), 1, "taken apart"),
        (ProgramFacts(ROWS, ROWS | {"x"}, True, 10), 2, "slopes"),
        (ProgramFacts(ROWS, frozenset(), True, 10, held=ROWS), FEW_PARTICLES, "hindsight"),
        (ProgramFacts(ROWS, frozenset(), True, ELEMENTS // 3, held=ROWS), 3, "hindsight"),
        (ProgramFacts(ROWS, frozenset(), True, 10, held=frozenset("y")), MOST_PARTICLES, "rows of data"),
        (ProgramFacts(ROWS, frozenset("y"), True, 10), MOST_PARTICLES, "rows of data"),
        (ProgramFacts(ROWS, frozenset(), True, ELEMENTS // 3), 3, "rows of data"),
        (ProgramFacts(ROWS, frozenset(), True, 100 * ELEMENTS), 2, "rows of data"),
        (ProgramFacts(ROWS, frozenset(), True, ELEMENTS, particles=4), 4, "rows of data"),
        (ProgramFacts(ROWS, frozenset(), True, 0), MOST_PARTICLES, "rows of data"),
        (ProgramFacts(ROWS, frozenset(), True, 10, free=0.3), FEW_PARTICLES, "rows of data"),
        (ProgramFacts(ROWS, frozenset(), True, 10, free=4.6), 6, "rows of data"),
        (ProgramFacts(frozenset(), frozenset(), True, 10, untold=MANY_SITES, free=0.3), FEW_PARTICLES, "many sites"),
        (ProgramFacts(ROWS, frozenset(), True, ELEMENTS // 3, free=0.3), 3, "rows of data"),
        (ProgramFacts(ROWS, frozenset(), True, 10, held=ROWS, free=7.0), FEW_PARTICLES, "hindsight"),
    ],
)
def test_the_first_rule_that_holds_counts(facts: ProgramFacts, expected: int, why: str) -> None:
    found, says = number(facts)
    assert found == expected and why in says


def test_the_last_rule_always_holds() -> None:
    assert PARTICLES[-1].holds(ProgramFacts(frozenset(), frozenset(), False, 0))
