"""The same draws again."""

from __future__ import annotations

import torch

from pyro_bpq.tracing.draws import Draws


def test_draws_since_the_mark_are_repeated() -> None:
    torch.rand(3)
    draws = Draws()
    first = torch.rand(4)
    draws.again()
    assert torch.equal(torch.rand(4), first)
    after = torch.rand(1)
    draws.again()
    assert not torch.equal(torch.rand(1), after)
