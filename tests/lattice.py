"""A distribution over few real numbers that hides its finite support from estimators, but not from enumeration."""

from __future__ import annotations

from typing import Any

import torch
from models import Die
from torch import Tensor
from torch.distributions import constraints

from pyro_bpq.rollout.features import Components, finite_components

POINTS = (-0.7, 0.3, 1.9)


class Lattice(Die):
    """Values ``POINTS`` with probabilities ``softmax(logits)``."""

    support = constraints.real

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits, torch.tensor(POINTS, dtype=logits.dtype))

    @property
    def mean(self) -> Tensor:
        return (self.law.probs * self.faces).sum(-1)

    @property
    def variance(self) -> Tensor:
        return (self.law.probs * self.faces**2).sum(-1) - self.mean**2

    def expand(self, batch_shape: Any, _instance: Any = None) -> Lattice:
        return Lattice(self.law.logits.expand(*batch_shape, len(POINTS)))

    def enumerate_support(self, expand: bool = True) -> Tensor:
        points = self.faces.reshape(-1, *(1,) * len(self.batch_shape))
        return points.expand(-1, *self.batch_shape) if expand else points


@finite_components.register(Lattice)
def _hidden(fn: Lattice) -> Components | None:
    return None
