"""What random programs are written with: distributions and modules as users write them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_bpq import cost
from pyro_bpq.testing import TwoPoint

__all__ = [
    "Box",
    "Branching",
    "Buffer",
    "Counted",
    "Memory",
    "Net",
    "SimpleNamespace",
    "Slot",
    "Spin",
    "Tabled",
    "TwoPoint",
    "box",
    "closed",
    "cost",
    "dist",
    "noise",
    "np",
    "partial",
    "poutine",
    "pyro",
    "table",
    "torch",
]


class _Own(dist.TorchDistribution):
    """An observed distribution that keeps a latent and reads it when it is scored."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.real

    def __init__(self, loc: Tensor, z: Tensor) -> None:
        self.loc, self.z = torch.as_tensor(loc), z
        super().__init__(self.loc.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> _Own:
        return type(self)(self.loc.expand(torch.Size(batch_shape)), self.z)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return torch.normal(self.loc.detach().expand(self._extended_shape(sample_shape)), 1.0)

    def _normal(self, value: Tensor, scale: float = 0.8) -> Tensor:
        return dist.Normal(self.loc, scale).log_prob(value)


class Branching(_Own):
    """Takes one branch or the other."""

    def log_prob(self, value: Tensor) -> Tensor:
        if self.z == 1:
            return self._normal(value)
        return self._normal(value, 1.7) - 0.4


class Counted(_Own):
    """Reads a number off the latent."""

    def log_prob(self, value: Tensor) -> Tensor:
        return self._normal(value - 0.6 * float(self.z.reshape(-1)[0]))


class Tabled(_Own):
    """Looks up its scale in a list."""

    def log_prob(self, value: Tensor) -> Tensor:
        return self._normal(value, [0.7, 1.4, 2.3][int(self.z.numpy().reshape(-1)[0])])


class Spin(dist.TorchDistribution):
    """A latent of minus one or one."""

    arg_constraints: ClassVar[dict[str, Any]] = {"logits": constraints.real}
    has_enumerate_support = True

    def __init__(self, logits: Tensor, validate_args: bool | None = None) -> None:
        self.logits = logits
        super().__init__(logits.shape, validate_args=False)

    support = constraints.real

    def expand(self, batch_shape: Any, _instance: Any = None) -> Spin:
        return Spin(self.logits.expand(torch.Size(batch_shape)))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        with torch.no_grad():
            return 2.0 * torch.bernoulli(self.logits.sigmoid().expand(self._extended_shape(sample_shape))) - 1.0

    def log_prob(self, value: Tensor) -> Tensor:
        return nn.functional.logsigmoid(value * self.logits)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        values = torch.tensor([-1.0, 1.0], dtype=self.logits.dtype).reshape(2, *(1,) * len(self.batch_shape))
        return values.expand(2, *self.batch_shape) if expand else values


class Net(nn.Module):
    """A small perceptron and a buffer, of fixed initial weights: ``(..., size)`` to ``(...)``."""

    table: Tensor

    def __init__(self, size: int, start: int) -> None:
        super().__init__()
        numbers = torch.sin(1.7 * torch.arange(3 * size + 3, dtype=torch.float64) + start)
        self.first = nn.Parameter(numbers[: 3 * size].reshape(size, 3))
        self.last = nn.Parameter(numbers[3 * size :])
        self.register_buffer("table", torch.tensor([0.3, -0.2, 0.4], dtype=torch.float64))

    def forward(self, value: Tensor) -> Tensor:
        return (torch.tanh(value.to(self.table.dtype) @ self.first + self.table) * self.last).sum(-1)


class Memory(nn.Module):
    """Writes what it is given into its buffer, and reads it there."""

    kept: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(size, dtype=torch.float64))

    def forward(self, *values: Tensor) -> Tensor:
        for i, value in enumerate(values):
            self.kept[i] = value.detach().reshape(-1)[0]
        return (self.kept * torch.arange(1.0, 1.0 + len(self.kept), dtype=self.kept.dtype)).sum().clone()


class Box:
    """Holds what changes; its class does so, too."""


class Slot:
    """Holds one thing in a slot."""

    __slots__ = ("kept",)

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def read(self) -> Any:
        """The thing."""
        return self.kept


class Buffer(nn.Module):
    """Holds a tensor."""

    kept: Tensor

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", kept)

    def forward(self) -> Tensor:
        return self.kept


def closed(kept: Any) -> tuple[Any, Any]:
    """A function that gives a thing which it closes over, and one that replaces it."""

    def read() -> Any:
        return kept

    def put(new: Any) -> None:
        nonlocal kept
        kept = new

    return read, put


box, table = Box(), dict[str, Any]()
# Bernoulli draws of values are these values.
noise = torch.Generator().manual_seed(0)
