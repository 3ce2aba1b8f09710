"""What computations cost, against counts by hand."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.tracing.work import Work, WorkMode


def counted(function: Callable[[], object]) -> Work:
    with WorkMode() as mode:
        function()
    return mode.total


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
def test_flops(function: Callable[[], object], flops: int, convolved: int) -> None:
    with torch.no_grad():
        found = counted(function)
    assert (found.flops, found.convolved) == (flops, convolved)


def test_views_write_nothing() -> None:
    values = torch.zeros(4, 5)
    assert counted(lambda: values.reshape(5, 4)[1:]).bytes == 0
    assert counted(lambda: values + 1.0) == Work(operators=1, bytes=20 * values.element_size())


def test_tracked_runs_count_guide_and_model_apart() -> None:
    layers = nn.Linear(3, 4), nn.Linear(1, 50)

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=layers[0](torch.zeros(2, 3)).sum()))

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("x", dist.Normal(layers[1](z.reshape(1, 1)).sum(), 1.0), obs=torch.tensor(0.0))

    elbo = TraceBackpropQ_ELBO()
    elbo.loss_and_grads(model, guide)
    ((of_guide, of_model),) = [facts.work for facts in elbo.runner.structure.facts.values()]
    assert (of_guide.flops, of_model.flops) == (2 * 2 * 3 * 4, 2 * 50)
    assert 0 < of_guide.operators < of_model.operators
