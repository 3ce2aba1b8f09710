"""Blocks of critics and running statistics, one row per site, and the writes that change them after a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Smallest size in bytes of a number in a block.
_LEAST_BYTES = 4
# Attribute of the modules of critics.
_MARK = "is_of_critic"

# Rows of a block, or positions in an order; `None` for all of them, in order.
Rows = Tensor | None
# (block, tensor, rows, new value): a change that is applied after the step.
Write = tuple[str, str, Rows, Tensor]


class Block(nn.Module):
    """Rows of like-shaped sites: critics and running statistics, with a leading site axis.

    ``kind`` is the kind and shape of the rows. ``half()`` and ``bfloat16()`` do not convert a block, because running
    squares, counts and step sizes need 32 bits.
    """

    def __init__(
        self,
        kind: str,
        keys: Sequence[str],
        critic: nn.Module | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.keys, self.critic = kind, tuple(keys), critic
        self.slow: nn.Module | None = None
        for part in () if critic is None else critic.modules():
            vars(part)[_MARK] = True
        for name, buffer in (buffers or {}).items():
            self.register_buffer(name, buffer)

    def weights(self) -> dict[str, Tensor]:
        """Trainable tensors of the critics, by name within the critic."""
        tensors = {} if self.critic is None else named_tensors(self.critic)
        return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}

    def hide_weights(self) -> None:
        """Turns the critics' parameters into buffers."""
        for module in self.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                del module._parameters[name]
                module.register_buffer(name, parameter.detach().requires_grad_())

    def keep_slow(self) -> None:
        """Makes a copy of the critics that is not trained; the caller moves it towards the critics."""
        if self.critic is not None:
            self.slow = copy.deepcopy(self.critic)
            for tensor in named_tensors(self.slow).values():
                tensor.requires_grad_(False)

    def slow_weights(self) -> dict[str, Tensor]:
        """Slow copies of :meth:`weights`, by the same names."""
        tensors = {} if self.slow is None else named_tensors(self.slow)
        return {name: tensors[name] for name in self.weights() if name in tensors}

    def _apply(self, fn: Any, recurse: bool = True) -> Block:
        hidden = [(m, n) for m in self.modules() for n, b in m.named_buffers(recurse=False) if b.requires_grad]

        def convert(tensor: Tensor) -> Tensor:
            new: Tensor = fn(tensor)
            return tensor.to(new.device) if new.element_size() < min(tensor.element_size(), _LEAST_BYTES) else new

        super()._apply(convert, recurse)  # type: ignore[no-untyped-call]
        for module, name in hidden:
            # A converted buffer is no longer a leaf of autograd.
            module._buffers[name] = getattr(module, name).detach().requires_grad_()
        return self

    def __repr__(self) -> str:
        keys = list(self.keys) if len(self.keys) < 5 else [*self.keys[:2], "...", self.keys[-1]]
        return f"Block({self.kind}: {', '.join(keys)})"


def is_of_critic(module: nn.Module) -> bool:
    """Whether a module is a part of a critic in a block. Its buffers are weights, which no program writes."""
    return _MARK in vars(module)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@dataclass(frozen=True)
class Selection:
    """Rows of a bank in a given order, possibly from several blocks."""

    # For each block its name, the module, the rows, and the positions of these rows in the order
    parts: tuple[tuple[str, Block, Rows, Rows], ...]
    repeats: bool = False  # Whether a row occurs more than once (a shared critic)
    # Index of each position among the concatenated rows of all blocks; `None` for one block
    order: Tensor | None = None

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The buffer ``name`` of the selected rows, with a leading site axis; ``dtype=None`` keeps its type."""
        # A copy, because a later commit writes in place, and autograd may hold the returned tensor.
        buffers = ((getattr(block, name), rows) for _, block, rows, _ in self.parts)
        parts = [buffer.clone() if rows is None else buffer[rows] for buffer, rows in buffers]
        found = parts[0] if self.order is None else torch.cat(parts)[self.order]
        return found if dtype is None or found.dtype is dtype else found.to(dtype)

    def gather(self, evaluate: Callable[[Block, Rows, Rows], Tensor]) -> Tensor:
        """Concatenates ``evaluate(block, rows, positions)`` over the parts, in the selected order."""
        results = [evaluate(block, rows, at) for _, block, rows, at in self.parts]
        return results[0] if self.order is None else torch.cat(results)[self.order]

    def write(self, name: str, value: Tensor) -> list[Write]:
        """The writes that set the buffer ``name`` of the selected rows to ``value``; repeated rows get the mean."""
        value = value.detach()
        writes = [(key, name, rows, value if at is None else value[at]) for key, _, rows, at in self.parts]
        return average_writes(writes) if self.repeats else writes


def average_writes(writes: Sequence[Write]) -> list[Write]:
    """Merges writes into one write for each buffer; a row gets the mean of the writes to it."""
    found: dict[tuple[str, str], list[tuple[Tensor, Tensor]]] = {}
    for key, name, rows, value in writes:
        at = torch.arange(len(value), device=value.device) if rows is None else rows
        found.setdefault((key, name), []).append((at, value))
    averaged = []
    for (key, name), parts in found.items():
        rows, value = (torch.cat([part[k] for part in parts]) for k in (0, 1))
        unique, place = torch.unique(rows, return_inverse=True)
        counts = torch.bincount(place).to(value.dtype)
        total = value.new_zeros(len(unique), *value.shape[1:]).index_add(0, place, value)
        averaged.append((key, name, unique, total / counts.reshape(-1, *(1,) * (value.dim() - 1))))
    return averaged
