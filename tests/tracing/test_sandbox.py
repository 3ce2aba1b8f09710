"""Runs that leave nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyro_bpq.tracing.sandbox import BufferedModules, Draws, LentBuffers, Sandbox


def batch_norm() -> nn.BatchNorm1d:
    return nn.BatchNorm1d(2).train()


def test_generator_and_buffers_are_as_before() -> None:
    net = batch_norm()
    before, buffers = torch.get_rng_state(), {name: b.clone() for name, b in net.named_buffers()}
    drawn = []
    for _ in range(2):
        with Sandbox(7) as sandbox:
            drawn.append(torch.rand(3))
            net(torch.randn(5, 2))
        assert not torch.equal(sandbox.before[0], sandbox.after[0])
    assert torch.equal(*drawn) and torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers())


def test_a_run_that_fails_leaves_nothing_either() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="out of coffee"), Sandbox(torch.get_rng_state()):
        torch.rand(3)
        raise ValueError("out of coffee")
    assert torch.equal(torch.get_rng_state(), before)


def test_lent_buffers_are_kept_if_wanted() -> None:
    net = batch_norm()
    own = net.running_mean
    with LentBuffers() as lent:
        net(torch.ones(5, 2))
        assert lent.fit and net.running_mean is not own
        lent.keep()
    assert net.running_mean is own and own is not None
    torch.testing.assert_close(own, torch.full((2,), 0.1))


def test_modules_with_buffers_are_noted_once_called() -> None:
    with BufferedModules() as seen:
        assert not seen
        nn.Linear(2, 2)(torch.ones(1, 2))
        assert not seen
        batch_norm()(torch.ones(5, 2))
        assert seen


def test_draws_since_the_mark_are_repeated() -> None:
    torch.rand(3)
    draws = Draws()
    first = torch.rand(4)
    draws.again()
    assert torch.equal(torch.rand(4), first)
    after = torch.rand(1)
    draws.again()
    assert not torch.equal(torch.rand(1), after)
