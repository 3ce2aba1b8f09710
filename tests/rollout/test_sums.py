"""Sums over subsets of stacked tensors against the matrices that they stand for."""

from __future__ import annotations

import random

import pytest
import torch

from pyro_bpq.rollout import sums
from pyro_bpq.rollout.sums import common_type, in_single, subset_sums, weighted_sums

LIKE = torch.zeros((), dtype=torch.float64)
SIZE = 120


def interleaved(chains: int) -> list[int]:
    """Of several chains in turns, what lies downstream of each site: those of its chain that are not before it."""
    return [sum(1 << j for j in range(i, SIZE, chains)) for i in range(SIZE)]


def scattered(ones: int) -> list[int]:
    generator = random.Random(0)
    return [sum(1 << j for j in set(generator.choices(range(SIZE), k=ones))) for _ in range(SIZE)]


SUBSETS = {
    "chain": interleaved(1),
    "history": [(1 << i) - 1 for i in range(SIZE)],
    "five chains": interleaved(5),
    "one each": [1 << i for i in range(SIZE)],
    "everything": [(1 << SIZE) - 1] * SIZE,
    "few": scattered(3),
    "half": scattered(80),
    "a chain and others": [*interleaved(1)[:-20], *scattered(30)[-20:]],
    "one row": [*[0] * (SIZE - 1), 7],
}


@pytest.mark.parametrize("name", SUBSETS)
@pytest.mark.parametrize("limit", [0, sums.DENSE, 1 << 30])
def test_subset_sums(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "DENSE", limit)
    # Some of the bits only, and not in their order.
    columns = [*range(SIZE - 1, 40, -1), *range(0, 40, 2)]
    rows = SUBSETS[name]
    expected = torch.tensor([[float(row >> j & 1) for j in columns] for row in rows], dtype=torch.float64)
    found, scaled = subset_sums(rows, columns, LIKE), subset_sums(rows, columns, LIKE, [1.0 + i for i in range(SIZE)])
    assert found is not None and scaled is not None and (found.dense is not None or limit < 1 << 30)
    torch.testing.assert_close(found.to_dense(), expected)
    for shape in [(len(columns),), (len(columns), 2), (len(columns), 2, 3)]:
        stacked = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(found @ stacked, torch.tensordot(expected, stacked, 1))
        weight = 1.0 + torch.arange(SIZE).reshape(-1, *(1,) * (len(shape) - 1))
        torch.testing.assert_close(scaled @ stacked, weight * torch.tensordot(expected, stacked, 1))


def test_nothing_to_sum() -> None:
    assert subset_sums([1, 2], [5], LIKE) is None and subset_sums([0, 0], [0, 1], LIKE) is None


@pytest.mark.parametrize("name", ["chain", "history", "five chains", "one each", "everything", "few"])
def test_what_is_regular_takes_little(name: str) -> None:
    found = subset_sums(SUBSETS[name], range(SIZE), LIKE)
    stored = sum(part.numel() for part in vars(found).values() if isinstance(part, torch.Tensor))
    assert 0 < stored <= 6 * SIZE < SIZE * SIZE


def test_sums_in_single_precision_are_as_good_as_a_matrix() -> None:
    rows = [(1 << i) - 1 << 1000 - i for i in range(1, 1001)]
    stacked = torch.randn(1000, 3, dtype=torch.float32) + 2.0
    found = subset_sums(rows, range(1000), stacked)
    assert found is not None and found.dense is None
    whole = found.to_dense()
    exact = whole.double() @ stacked.double()
    by_matrix = (whole @ stacked - exact).abs().max()
    assert 0.0 < by_matrix and (found @ stacked - exact).abs().max() <= 4.0 * by_matrix


@pytest.mark.parametrize("limit", [0, sums.DENSE])
def test_weighted_sums(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "DENSE", limit)
    entries = [(0, 2, 0.5), (2, 1, 1.0), (0, 2, 0.25), (2, 0, 1.0 / 3.0)]
    expected = torch.zeros(3, 4, dtype=torch.float64)
    for i, j, weight in entries:
        expected[i, j] += weight
    found = weighted_sums((3, 4), entries, LIKE)
    torch.testing.assert_close(found.to_dense(), expected)
    stacked = torch.randn(4, 2, dtype=torch.float64)
    torch.testing.assert_close(found @ stacked, expected @ stacked)


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_values_have_single_precision_at_least(given: torch.dtype) -> None:
    value, is_half = torch.tensor([300.0], dtype=given), given.itemsize < 4
    assert in_single(value).dtype == (torch.float32 if is_half else given)
    assert in_single(value).square().item() == 90_000.0 and (in_single(value) is value) is not is_half


def test_the_common_type_holds_all_values() -> None:
    half, brain, double = (torch.ones((), dtype=t) for t in (torch.float16, torch.bfloat16, torch.float64))
    assert common_type(half) == torch.float16 and common_type(half, brain) == torch.float32
    assert common_type(half, double, brain) == torch.float64
