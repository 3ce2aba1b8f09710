"""Objects go back to what they were."""

from __future__ import annotations

from pyro_bpq.snapshots import restore, snapshot


class Part:
    """Something that finds things out."""

    def __init__(self) -> None:
        self.known, self.names, self.seen, self.count = {"a": 1}, {"x"}, [1], 0


def test_a_part_goes_back_to_its_mark() -> None:
    part = Part()
    mark = snapshot(part)
    part.known["b"] = 2
    part.names.add("y")
    part.seen.append(2)
    part.count += 1
    part.found = True  # type: ignore[attr-defined]
    restore(part, mark)
    assert vars(part) == {"known": {"a": 1}, "names": {"x"}, "seen": [1], "count": 0}


def test_a_mark_may_be_used_twice() -> None:
    part = Part()
    for _ in range(2):
        mark = snapshot(part)
        part.known["b"] = 2
        restore(part, mark)
        assert part.known == {"a": 1}
