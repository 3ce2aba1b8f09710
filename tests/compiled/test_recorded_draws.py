"""Draws that stand in for others in a compiled graph have the same distribution, or the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_bpq.compiled.backends import called_draws, eager_draws, fused_draws
from pyro_bpq.compiled.graphs import Editor

WEIGHTS = torch.tensor([[0.1, 0.2, 0.0, 0.7], [0.5, 0.1, 0.4, 0.0], [3.0, 1.0, 0.0, 0.0]])
NUMBER = 40_000


def edited(draw: Callable[[Tensor], Tensor], weights: Tensor, *edits: Callable[[Editor], None]) -> fx.GraphModule:
    """The graph of a draw, with other draws in its place."""
    editor = Editor(make_fx(draw)(weights))
    for edit in edits:
        edit(editor)
    editor.module.recompile()
    return editor.module


def test_the_race_has_the_probabilities_of_multinomial() -> None:
    graph = edited(lambda weights: torch.multinomial(weights, 1, True), WEIGHTS.repeat(NUMBER, 1), fused_draws)
    assert not any("multinomial" in str(node.target) for node in graph.graph.nodes)
    torch.manual_seed(0)
    drawn = graph(WEIGHTS.repeat(NUMBER, 1)).view(NUMBER, len(WEIGHTS))
    expected = WEIGHTS / WEIGHTS.sum(-1, keepdim=True)
    found = torch.stack([(drawn == v).float().mean(0) for v in range(WEIGHTS.shape[-1])], -1)
    error = (expected * (1.0 - expected) / NUMBER).sqrt()
    # Values of weight zero do not occur, and have no error.
    assert bool(((found - expected).abs() <= 4.0 * error).all())


def test_several_draws_at_once_stay_as_they_are() -> None:
    graph = edited(lambda weights: torch.multinomial(weights, 3, True), WEIGHTS, fused_draws)
    assert any("multinomial" in str(node.target) for node in graph.graph.nodes)


def test_coins_are_those_of_eager_steps() -> None:
    probabilities = torch.linspace(0.0, 1.0, 50)
    graph = edited(torch.bernoulli, probabilities, eager_draws)
    torch.manual_seed(3)
    expected = torch.bernoulli(probabilities)
    torch.manual_seed(3)
    assert torch.equal(graph(probabilities), expected)


@pytest.mark.parametrize(("number", "is_called"), [(5000, True), (50, False)])
def test_many_uniform_numbers_are_those_of_torch_s_kernel(number: int, is_called: bool) -> None:
    probabilities = torch.full((number,), 0.3)

    graph = edited(torch.bernoulli, probabilities, fused_draws, called_draws)
    names = [str(node.target) for node in graph.graph.nodes]
    assert ("aten.uniform.default" in names, "aten.rand.default" in names) == (is_called, not is_called)
    torch.manual_seed(0)
    expected = (torch.rand(number, dtype=torch.float32) < 0.3).to(probabilities.dtype)
    torch.manual_seed(0)
    assert torch.equal(graph(probabilities), expected)
