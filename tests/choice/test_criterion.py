"""The comparison of candidates, by numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyro_bpq import AllAction, LeaveOneOut, ScoreFunction
from pyro_bpq.choice.candidates import BY_NAME, FIXED, ProgramFacts, candidates_for
from pyro_bpq.choice.measured import better_than, median_of_means, normalised
from pyro_bpq.estimators import CrossedLeaveOneOut, DebiasedStraightThrough

SCORE = ScoreFunction(LeaveOneOut())


def test_tensors_share_the_scale_of_the_present_choice() -> None:
    found = normalised({"a": [[1.0, 100.0, 0.0], [3.0, 300.0, 0.0]], "b": [[4.0, 200.0, 7.0]]}, "a")
    assert found == {"a": [0.5 + 0.5, 1.5 + 1.5], "b": [2.0 + 1.0]}


def test_an_outlier_does_not_move_the_mean() -> None:
    values = [1.0, 1.0, 1.0, 1e9, 1.0, 1.0, 1.0, 1.0]
    assert median_of_means(values) == 1.0


def test_skewed_rounds_are_not_taken_for_less() -> None:
    # One round in four has almost all of the mean, which shorter blocks would miss.
    assert median_of_means([0.0, 0.0, 0.0, 8.0] * 8) == 2.0


STEADY = [1.0, 1.1, 0.9, 1.0, 1.0, 1.1, 0.9, 1.0]


@pytest.mark.parametrize(
    ("seconds", "scale", "expected"),
    [(0.5, 1.0, "new"), (1.0, 0.5, "new"), (0.95, 1.0, "old"), (2.0, 0.6, "old"), (2.0, 0.4, "new")],
)
def test_time_and_variance_weigh_alike(seconds: float, scale: float, expected: str) -> None:
    moments = {"old": STEADY, "new": [scale * value for value in STEADY]}
    assert better_than({"old": 1.0, "new": seconds}, moments, "old") == expected


def test_a_gain_within_its_error_is_none() -> None:
    moments = {"old": [0.1, 9.0, 0.1, 0.2, 8.0, 9.0, 0.3, 0.1], "new": [0.8] * 8}
    assert median_of_means(moments["old"]) > 0.9
    assert better_than({"old": 1.0, "new": 1.0}, moments, "old") == "old"


def test_candidates_follow_from_the_program() -> None:
    assert candidates_for(ProgramFacts()) == (FIXED,)
    steered = candidates_for(ProgramFacts(is_steered=True, num_sites=3), True)
    assert steered[0] == FIXED and all(candidate.in_order for candidate in steered[1:])
    assert len(steered) == 2
    plain = candidates_for(ProgramFacts(num_sites=3, has_critics=True, many_components=2), True)
    assert not any(candidate.in_order for candidate in plain)
    assert "the rules, 8 particles" in {candidate.name for candidate in plain}
    rows = candidates_for(ProgramFacts(num_sites=1, num_particles=2), True)
    assert rows[0] == FIXED and {candidate.num_particles for candidate in rows[1:]} == {1, 2, 4, 8}
    finite = candidates_for(ProgramFacts(num_sites=1, num_particles=8, is_finite=True), True)
    assert {one.name for one in finite} - {one.name for one in rows} == {"sums over values, 8 particles"}
    sums, slopes = (frozenset({estimator}) for estimator in (AllAction(), DebiasedStraightThrough()))
    single = candidates_for(ProgramFacts(num_sites=1, many_components=1, flips=True, estimators=sums), True)
    assert {"no extra run", "corrected slopes, 2 particles"} <= {one.name for one in single}
    sloped = candidates_for(ProgramFacts(num_sites=1, many_components=1, flips=True, estimators=slopes), True)
    assert not {"no extra run", "corrected slopes, 2 particles"} & {one.name for one in sloped}
    assert {"no critics", "crossed costs, 8 particles", "hindsight, 4 particles"} <= {
        candidate.name for candidate in plain
    }
    assert all(BY_NAME[candidate.name] == candidate for candidate in (*steered, *plain))


CROSSED, SLOPES = CrossedLeaveOneOut(), DebiasedStraightThrough()
FINITE = ProgramFacts(num_sites=2, num_particles=8, is_finite=True, estimators=frozenset({SCORE}))


@pytest.mark.parametrize(
    ("facts", "tried"),
    [
        (FINITE, {"sums over values, 8 particles"}),
        (replace(FINITE, flips=True), set()),
        (replace(FINITE, has_rows=True), set()),
        (replace(FINITE, num_particles=5), {"leave-one-out, 8 particles", "sums over values, 8 particles"}),
        (replace(FINITE, num_particles=5, affordable=5), set()),
        (replace(FINITE, is_finite=False), {"the rules, one particle"}),
        (replace(FINITE, is_steered=True), set()),
        (replace(FINITE, flips=True, estimators=frozenset({AllAction()})), {"leave-one-out, 8 particles"}),
        (replace(FINITE, many_components=2, estimators=frozenset({CROSSED})), set()),
        (replace(FINITE, num_sites=1, many_components=1, estimators=frozenset({SLOPES})), set()),
        (replace(FINITE, num_sites=0), set()),
    ],
)
def test_what_is_tried_is_where_rules_are_in_doubt(facts: ProgramFacts, tried: set[str]) -> None:
    assert {one.name for one in candidates_for(facts)} == tried | {FIXED.name}
    assert set(candidates_for(facts)) <= set(candidates_for(facts, True))


@pytest.mark.parametrize(
    ("facts", "left_out"),
    [
        (
            ProgramFacts(num_sites=2, num_particles=8, estimators=frozenset({SCORE})),
            "leave-one-out, 8 particles",
        ),
        (
            ProgramFacts(num_sites=2, num_particles=4, estimators=frozenset({SCORE})),
            "leave-one-out, 4 particles",
        ),
        (
            ProgramFacts(num_sites=2, many_components=2, num_particles=8, estimators=frozenset({CrossedLeaveOneOut()})),
            "crossed costs, 8 particles",
        ),
        (ProgramFacts(num_sites=2, num_particles=5, estimators=frozenset({SCORE})), ""),
        (ProgramFacts(num_sites=2, num_particles=8, estimators=frozenset({SCORE, AllAction()})), ""),
        (
            ProgramFacts(num_sites=2, num_particles=8, has_critics=True, estimators=frozenset({SCORE})),
            "",
        ),
    ],
)
def test_what_the_default_does_is_not_tried_again(facts: ProgramFacts, left_out: str) -> None:
    tried = {one.name for one in candidates_for(facts, True)}
    other = {one.name for one in candidates_for(replace(facts, estimators=frozenset()), True)}
    assert other - tried == ({left_out} if left_out else set())
