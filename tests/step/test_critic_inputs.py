"""What critics see, by hand."""

from __future__ import annotations

import torch

from pyro_bpq.critics.bank import Block, CriticBank
from pyro_bpq.step.critic_step import standardised


def test_features_are_in_units_of_their_earlier_spread() -> None:
    bank = CriticBank()

    def build(keys: tuple[str, ...]) -> Block:
        # Mean 1 and spread 2; the second feature has never varied.
        buffers = {"context_mean": torch.tensor([[1.0, 5.0]]), "context_square": torch.tensor([[5.0, 25.0]])}
        return Block("k", keys, None, {**buffers, "count": torch.ones(1)}).double()

    selection = bank.select("k", ("a",), build)
    assert selection is not None
    context = torch.tensor([[[3.0, 5.0], [-1.0, 9.0]]])
    found, writes = standardised(context, selection)
    torch.testing.assert_close(found, torch.tensor([[[1.0, 0.0], [-1.0, 6.0]]]))
    bank.commit(writes)
    # This step enters the moments of the next one only.
    mean = selection.read("context_mean")
    assert 1.0 == float(mean[0, 0]) and 5.0 < float(mean[0, 1]) < 7.0
