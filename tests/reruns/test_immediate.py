"""Immediate costs of every value: what their rows leave behind."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import assert_equal, fresh, told
from torch import nn

from pyro_bpq import AllAction, TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning


@pytest.mark.parametrize("is_training", [True, False])
def test_buffers_of_modules_are_as_after_one_run(is_training: bool) -> None:
    after = []
    for elbo in (TraceBackpropQ_ELBO(estimator=AllAction(exact=True)), pyro.infer.Trace_ELBO()):
        fresh(1)
        layer = nn.BatchNorm1d(2).train(is_training)
        originals = dict(layer.named_buffers())

        def model(layer: nn.Module = layer) -> None:
            with pyro.plate("rows", 3):
                z = pyro.sample("z", dist.Bernoulli(torch.full((3, 2), 0.4)).to_event(1))
                mean = layer(z.reshape(-1, 2)).reshape(z.shape).sum(-1)
                pyro.sample("x", dist.Normal(mean, 1.0), obs=torch.tensor([0.4, 1.2, -0.3]))

        def guide() -> None:
            with pyro.plate("rows", 3):
                logits = pyro.param("q", torch.tensor([[0.3, -0.4], [0.1, 0.6], [0.0, 0.2]]))
                pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))

        with told(BPQWarning) as said:
            elbo.loss_and_grads(model, guide)
        if isinstance(elbo, TraceBackpropQ_ELBO):
            # Batch statistics mix the rows of the data, too. Rows that meet are not flipped.
            assert any("meet in" in text for text in said) == is_training == (not elbo.plan.flips.sites)
        assert all(layer.get_buffer(name) is buffer for name, buffer in originals.items())
        after.append({name: buffer.clone() for name, buffer in originals.items()})
    assert_equal(*after)
