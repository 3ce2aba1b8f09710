"""Expectations over normal sites by Gauss-Hermite nodes: exact for polynomials, to rounding for smooth functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from steps import no_gradients
from torch import Tensor


class NodeNormal(dist.Normal):
    """A normal distribution whose draws are the next of the given nodes, in units of its standard deviation."""

    nodes: Iterator[float] = iter(())

    def expand(self, batch_shape: Any, _instance: Any = None) -> NodeNormal:
        return super().expand(batch_shape, self._get_checked_instance(NodeNormal, _instance))

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return (self.loc + self.scale * next(NodeNormal.nodes)).expand(self._extended_shape(sample_shape))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape)


def grid(numbers: Sequence[int]) -> list[tuple[tuple[float, ...], float]]:
    """Nodes of several draws of a standard normal variable, so many for each, and their joint weights."""
    rules = [np.polynomial.hermite_e.hermegauss(number) for number in numbers]
    pairs = [zip(nodes.tolist(), (weights / weights.sum()).tolist(), strict=True) for nodes, weights in rules]
    joint = itertools.product(*pairs)
    return [(tuple(x for x, _ in one), float(np.prod([w for _, w in one]))) for one in joint]


def expected_gradient(elbo: Any, model: Any, guide: Any, numbers: Sequence[int]) -> dict[str, Tensor]:
    """The expectation of a step's gradient over all draws of its ``NodeNormal`` sites, by name of the parameter.

    ``n`` nodes of a draw are exact for polynomials of it of degree ``2n - 1``.
    """
    total: dict[str, Tensor] = {}
    for nodes, weight in grid(numbers):
        no_gradients()
        NodeNormal.nodes = iter(nodes)
        elbo.loss_and_grads(model, guide)
        for name, leaf in pyro.get_param_store()._params.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            total[name] = total.get(name, torch.zeros_like(leaf)) + weight * gradient
    return {name: gradient.detach() for name, gradient in total.items()}
