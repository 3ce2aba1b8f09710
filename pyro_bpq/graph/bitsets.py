"""Sets of small numbers as the bits of an int, and sets of names on top of them.

A union over 1,000 nodes costs nanoseconds. A set takes one bit per possible member. A Python set or a tuple of names
takes eight bytes or more per member. In a program whose sites all read everything before them, such sets would be most
of the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_WORD_LENGTH = 60
_WORD = (1 << _WORD_LENGTH) - 1

# Up to this number of names a tuple is smaller.
_FEW = 16


def ones(bits: int) -> Iterator[int]:
    """Positions of the ones of ``bits``, lowest first."""
    at = 0
    while bits:
        # Word by word, because each operation on a long int costs time linear in its length.
        skip = (bits & -bits).bit_length() - 1
        at, bits = at + skip, bits >> skip
        word, bits = bits & _WORD, bits >> _WORD_LENGTH
        while word:
            low = word & -word
            yield at + low.bit_length() - 1
            word ^= low
        at += _WORD_LENGTH


def highest(bits: int, number: int) -> list[int]:
    """Positions of at most ``number`` ones of ``bits``, highest first."""
    found: list[int] = []
    while bits and len(found) < number:
        found.append(bits.bit_length() - 1)
        bits ^= 1 << found[-1]
    return found


def union(sets: Sequence[int], members: int) -> int:
    """Union of those ``sets`` whose positions are the ones of ``members``."""
    bits = 0
    for i in ones(members):
        bits |= sets[i]
    return bits


def closure(closures: Sequence[int], members: int) -> int:
    """The union of ``members`` and their closures; the closure of a number holds lower numbers only.

    A member in the closure of a higher member is skipped. In a fully connected chain only one member is looked at.
    """
    found = 0
    while members:
        i = members.bit_length() - 1
        found |= 1 << i | closures[i]
        members &= ~found
    return found


def transposed(rows: Sequence[int], width: int) -> list[int]:
    """Transposes a bit matrix: for each of ``width`` positions, the rows that have it, as bits."""
    digits = [f"{row:0{width}b}" for row in reversed(rows)]
    columns = [int("".join(column), 2) for column in zip(*digits, strict=True)]
    # Digits begin with the highest bit; no digits stand for no rows.
    return columns[::-1][:width] if digits else [0] * width


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Names(Sequence[str]):
    """A subset of many names, in their order; compares, hashes and prints like the tuple of these names."""

    of: tuple[str, ...]  # all names
    bits: int  # the positions of the names in the subset

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __iter__(self) -> Iterator[str]:
        return (self.of[i] for i in ones(self.bits))

    def __getitem__(self, at: int | slice) -> str | tuple[str, ...]:  # type: ignore[override]
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Names) and self.of is other.of:
            return self.bits == other.bits
        return tuple(self) == tuple(other) if isinstance(other, (tuple, Names)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def named(of: tuple[str, ...], bits: int) -> Sequence[str]:
    """The names at the ones of ``bits``: a tuple if they are few, else :class:`Names`."""
    few = bits.bit_count() <= _FEW
    return tuple([of[i] for i in ones(bits)]) if few else Names(of, bits)


@dataclass(frozen=True, eq=False)
class Reads(Mapping[str, frozenset[str]]):
    """The set of sites that each cost reads, by name of the cost."""

    sites: tuple[str, ...]  # names of the sites that may be read
    bits: Mapping[str, int]  # for each cost, the positions of the sites that it reads

    def __getitem__(self, cost: str) -> frozenset[str]:
        return frozenset(self.sites[i] for i in ones(self.bits[cost]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.bits)

    def __len__(self) -> int:
        return len(self.bits)

    @staticmethod
    def over(sites: Iterable[str], reads: Mapping[str, Iterable[str]]) -> Reads:
        """Makes ``Reads`` of the same sets, with positions in ``sites``."""
        order = tuple(sites)
        if isinstance(reads, Reads) and reads.sites == order:
            return reads
        position = {name: i for i, name in enumerate(order)}
        return Reads(order, {cost: sum(1 << position[name] for name in set(read)) for cost, read in reads.items()})

    def union(self, other: Reads) -> Reads:
        """For each cost of ``other``, the union of the two sets of sites, over the same sites."""
        return Reads(self.sites, {cost: self.bits.get(cost, 0) | bits for cost, bits in other.bits.items()})
