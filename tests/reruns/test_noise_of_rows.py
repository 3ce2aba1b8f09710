"""Costs at other values have the same noise in all rows, so that rows differ by their values alone."""

from collections.abc import Callable

import pytest
import torch
from steps import coins_guide, seeing, stepped
from torch import Tensor
from torch.nn.functional import dropout

from pyro_bpq import TraceBackpropQ_ELBO


@pytest.mark.parametrize(
    "noisy",
    [dropout, lambda z: z * torch.bernoulli(torch.sigmoid(z))],
    ids=["dropout", "noise that torch does not draw alike for many rows at once"],
)
def test_rows_of_equal_values_cost_the_same(noisy: Callable[[Tensor], Tensor]) -> None:
    elbo = stepped(1, TraceBackpropQ_ELBO(1), seeing(lambda z: noisy(z + 1.0), 20), lambda: coins_guide(20))
    (recorded,) = elbo.runner.recordings.now.recorded.values()
    values = torch.tensor([0.0, 1.0]).repeat(10)
    bound = recorded.bound({"z": values}, {}, elbo.runner.recordings.call, {})
    costs = bound.at_rows(["-log p(x)"], {"z": torch.stack([values, values, 1.0 - values])})["-log p(x)"]
    assert costs[0] == costs[1] != costs[2]
