"""What computations cost, against counts by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pyro_bpq.plan import structure as work
from pyro_bpq.record.tape import Tape


def counted(function: Callable[[], object]) -> work.Work:
    with torch.no_grad(), Tape() as tape:
        function()
    return work.work_of(tape.nodes, tape.shapes, tape.dtypes)


def attention(query: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query, query, query)


@pytest.mark.parametrize(
    ("function", "flops", "convolved"),
    [
        (lambda: nn.Linear(7, 5)(torch.zeros(3, 7)), 2 * 3 * 7 * 5, 0),
        (lambda: torch.zeros(2, 3, 4) @ torch.zeros(2, 4, 5), 2 * 2 * 3 * 4 * 5, 0),
        # Two images of 6 by 6, channels in full blocks of 16.
        (lambda: nn.Conv2d(16, 32, 3, padding=1)(torch.zeros(2, 16, 6, 6)), 0, 2 * 2 * 36 * 9 * 16 * 32),
        (lambda: nn.Conv2d(3, 20, 3, padding=1)(torch.zeros(2, 3, 6, 6)), 0, 2 * 2 * 36 * 9 * 16 * 32),
        (lambda: nn.ConvTranspose2d(16, 16, 4, 2, 1)(torch.zeros(2, 16, 3, 3)), 0, 2 * 2 * 9 * 16 * 16 * 16),
        (lambda: attention(torch.zeros(2, 4, 6, 8)), 4 * 2 * 4 * 6 * 6 * 8, 0),
        (lambda: torch.zeros(3) + 1.0, 0, 0),
    ],
    ids=["linear", "batched", "convolution", "few channels", "transposed", "attention", "elementwise"],
)
def test_flops(function: Callable[[], object], flops: int, convolved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Drawing the parameters of the layers takes no matrix products.
    monkeypatch.setattr(work, "BYTE", 0.0)
    assert counted(function).added == pytest.approx(work.FLOP * flops + work.CONVOLVED * convolved)


def test_views_write_nothing() -> None:
    values = torch.zeros(4, 5)
    assert counted(lambda: values.reshape(5, 4)[1:]).added == 0.0
    size = 20 * values.element_size()
    assert counted(lambda: values + 1.0) == pytest.approx((work.OPERATOR, size * work.BYTE))
