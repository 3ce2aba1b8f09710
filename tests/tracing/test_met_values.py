"""Plain values that are new ask for a look; many of them count as a counter."""

from __future__ import annotations

from pyro_bpq.tracing.plain_values import MetValues


def test_new_values_are_told_until_a_run_was_tracked() -> None:
    met = MetValues().after("flags", (True,), False).after("flags", (False,), False)
    assert met.has_switched and not met.seen().has_switched
    # Another kind that is met for the first time tells of nothing.
    assert not met.seen().after("lengths", (3,), False).has_switched


def test_values_that_differ_in_many_steps_count() -> None:
    met = MetValues()
    for number in range(32):
        met = met.after("numbers", (number,), False)
    assert not met.counts and len(met.known["numbers"]) == 32
    met = met.seen().after("numbers", (32,), False)
    assert met.counts and not met.has_switched and (32,) not in met.known["numbers"]
