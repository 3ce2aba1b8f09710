from __future__ import annotations

import pytest
import torch

from pyro_bpq.rollout.precision import common_type, in_single


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_values_have_single_precision_at_least(given: torch.dtype, wanted: torch.dtype) -> None:
    value = torch.tensor([300.0], dtype=given)
    assert in_single(value).dtype == wanted and in_single(value).square().item() == 90_000.0
    assert (in_single(value) is value) == (given == wanted)


def test_the_common_type_holds_all_values() -> None:
    half, brain, double = (torch.ones((), dtype=t) for t in (torch.float16, torch.bfloat16, torch.float64))
    assert common_type(half) == torch.float16 and common_type(half, brain) == torch.float32
    assert common_type(half, double, brain) == torch.float64
