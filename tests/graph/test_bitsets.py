"""Sets as bits, against Python's own sets, tuples and matrices."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyro_bpq.graph.bitsets import Names, Reads, named, ones, transposed

SETS = st.sets(st.integers(0, 150), max_size=40)


def bits_of(members: set[int]) -> int:
    return sum(1 << i for i in members)


@pytest.mark.parametrize(("height", "width"), [(1100, 3), (3, 1100), (1100, 1030)])
def test_transposed_in_blocks(height: int, width: int) -> None:
    rows = [bits_of({j for j in range(width) if (i * j) % 7 == 3}) for i in range(height)]
    columns = transposed(rows, width)
    assert len(columns) == width
    assert all(list(ones(columns[j])) == [i for i in range(height) if (i * j) % 7 == 3] for j in range(0, width, 97))
    assert transposed(columns, height) == rows


ALL = tuple(f"x{i}" for i in range(151))


@given(SETS, SETS)
def test_names_are_as_the_tuple_of_them(first: set[int], second: set[int]) -> None:
    names, plain = Names(ALL, bits_of(first)), tuple(f"x{i}" for i in sorted(first))
    other = Names(tuple(list(ALL)), bits_of(second))
    assert tuple(names) == plain and names == plain and plain == names and hash(names) == hash(plain)
    assert len(names) == len(plain) and repr(names) == repr(plain) and names[:3] == plain[:3]
    assert (names == other) == (first == second) and names != list(plain)
    assert (names == Names(ALL, bits_of(second))) is (first == second)
    assert pickle.loads(pickle.dumps(names)) == names
    assert named(ALL, names.bits) == plain


@given(st.lists(SETS, min_size=1, max_size=4))
def test_reads_are_as_sets_of_names(sets: list[set[int]]) -> None:
    plain = {f"f{k}": frozenset(f"x{i}" for i in members) for k, members in enumerate(sets)}
    reads = Reads.over(ALL, plain)
    assert dict(reads) == plain and Reads.over(ALL, reads) is reads
    backwards = Reads.over(reversed(ALL), reads)
    assert dict(backwards) == plain and backwards.sites != ALL
    more = Reads.over(ALL, {"f0": frozenset({"x0"}), "g": frozenset({"x1"})})
    assert dict(reads.union(more)) == {"f0": plain["f0"] | {"x0"}, "g": frozenset({"x1"})}


def test_reads_of_a_stranger() -> None:
    with pytest.raises(KeyError):
        Reads.over(("x",), {"f": {"y"}})
