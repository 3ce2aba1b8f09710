"""The table that says how many particles a program is good for."""

from __future__ import annotations

import pytest

from pyro_bpq.plan.rules import (
    ELEMENTS,
    FEW_PARTICLES,
    MOST_PARTICLES,
    MOST_STEPPED,
    PARTICLES,
    SOME_PARTICLES,
    ProgramFacts,
)

SITES = frozenset(("y", "z"))


@pytest.mark.parametrize(
    ("facts", "expected", "why"),
    [
        (ProgramFacts(frozenset(), frozenset(), True, 10), 1, "no noise"),
        (ProgramFacts(frozenset(), frozenset(), True, 10, noisy=1), MOST_PARTICLES, "average"),
        (ProgramFacts(frozenset(), frozenset(), False, 10), 1, "no noise"),
        (ProgramFacts(SITES, SITES, False, 10, noisy=2), 1, "taken apart"),
        (ProgramFacts(SITES, SITES | {"x"}, True, 10), 2, "slopes"),
        (ProgramFacts(frozenset(), SITES, True, 10, noisy=2), MOST_PARTICLES, "average"),
        (ProgramFacts(SITES, SITES, True, 10, held=SITES), 2, "slopes"),
        (ProgramFacts(SITES, frozenset(), True, 10, held=SITES), FEW_PARTICLES, "hindsight"),
        (ProgramFacts(SITES, frozenset(), True, 10, held=frozenset("y")), SOME_PARTICLES, "average"),
        (ProgramFacts(SITES, frozenset("y"), True, 10), MOST_PARTICLES, "average"),
        (ProgramFacts(SITES, frozenset(), True, ELEMENTS // 3), 3, "average"),
        (ProgramFacts(SITES, frozenset(), True, 100 * ELEMENTS), 2, "average"),
        (ProgramFacts(SITES, frozenset(), True, ELEMENTS, particles=4), 4, "average"),
        (ProgramFacts(SITES, frozenset(), True, 10, free=0.3, flipped=0.3), FEW_PARTICLES, "average"),
        (ProgramFacts(SITES, frozenset(), True, 10, free=10.2, flipped=10.2), 6, "average"),
        (ProgramFacts(SITES, frozenset(), True, 10, free=40.0, flipped=40.0), SOME_PARTICLES, "average"),
        (ProgramFacts(SITES, frozenset(), True, 10, flipped=130.0), 16, "average"),
        (ProgramFacts(SITES, frozenset(), True, 10, held=frozenset("y"), crossed=frozenset("x")), 8, "average"),
        (ProgramFacts(SITES, frozenset(), True, 10, is_hidden=True), SOME_PARTICLES, "average"),
        (ProgramFacts(SITES, frozenset(), True, 10, is_hidden=True, free=6.5), FEW_PARTICLES, "average"),
        (ProgramFacts(SITES, frozenset(), True, 10, is_hidden=True, free=5.5), 1, "average"),
        (ProgramFacts(frozenset(), frozenset(), True, 10, noisy=1, is_stepped=True), MOST_STEPPED, "differences"),
        (ProgramFacts(frozenset(), frozenset(), True, 10, noisy=1, is_stepped=True, free=80.0), 41, "differences"),
        (ProgramFacts(SITES, frozenset(), True, 10, crossed=SITES, free=0.3), SOME_PARTICLES, "crossed"),
        (ProgramFacts(SITES, frozenset(), True, ELEMENTS // 18, crossed=SITES), 6, "crossed"),
        (ProgramFacts(SITES, frozenset(), True, ELEMENTS // 7, crossed=SITES), FEW_PARTICLES, "crossed"),
        (ProgramFacts(SITES, frozenset(), True, 10, crossed=frozenset("y"), held=frozenset("z")), 8, "crossed"),
        (ProgramFacts(frozenset(), frozenset(), True, 10, noisy=2, crossed=SITES, free=0.3), 4, "average"),
        (ProgramFacts(SITES, frozenset(), True, 10, held=SITES, free=7.0), FEW_PARTICLES, "hindsight"),
    ],
)
def test_the_first_rule_that_holds_counts(facts: ProgramFacts, expected: int, why: str) -> None:
    rule = next(rule for rule in PARTICLES if rule.holds(facts))
    assert rule.gives(facts) == expected and why in rule.says


def test_the_last_rule_always_holds() -> None:
    assert PARTICLES[-1].holds(ProgramFacts(frozenset(), frozenset(), False, 0))
