"""A distribution over few real numbers that hides its finite support from estimators, but not from enumeration."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_bpq.rollout.features import Components, finite_components

POINTS = (-0.7, 0.3, 1.9)


class Lattice(TorchDistribution):
    """Values ``POINTS`` with probabilities ``softmax(logits)``."""

    arg_constraints = {"logits": constraints.real_vector}  # noqa: RUF012
    support = constraints.real
    has_enumerate_support = True

    def __init__(self, logits: Tensor, validate_args: bool | None = None) -> None:
        self.logits = logits
        super().__init__(logits.shape[:-1], validate_args=validate_args)

    @property
    def probs(self) -> Tensor:
        return self.logits.softmax(-1)

    @property
    def points(self) -> Tensor:
        return torch.tensor(POINTS, dtype=self.logits.dtype)

    @property
    def mean(self) -> Tensor:
        return (self.probs * self.points).sum(-1)

    @property
    def variance(self) -> Tensor:
        return (self.probs * self.points**2).sum(-1) - self.mean**2

    def expand(self, batch_shape: Any, _instance: Any = None) -> Lattice:
        return Lattice(self.logits.expand(*batch_shape, len(POINTS)), validate_args=False)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        index = torch.distributions.Categorical(logits=self.logits).sample(sample_shape)
        return self.points[index]

    def log_prob(self, value: Tensor) -> Tensor:
        index = (value.unsqueeze(-1) - self.points).abs().argmin(-1)
        shape = torch.broadcast_shapes(index.shape, self.batch_shape)
        table, index = self.logits.log_softmax(-1).expand(*shape, len(POINTS)), index.expand(shape)
        return table.gather(-1, index.unsqueeze(-1)).squeeze(-1)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        points = self.points.reshape(-1, *(1,) * len(self.batch_shape))
        return points.expand(-1, *self.batch_shape) if expand else points


@finite_components.register(Lattice)
def _hidden(fn: Lattice) -> Components | None:
    return None
