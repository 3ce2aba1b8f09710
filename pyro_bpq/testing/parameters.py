"""Finds the parameters of a model and guide, and reads their gradients without changing ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_bpq.record.watch import leaf_of
from pyro_bpq.reruns.gradients import gradients_of


class GradientReader(Messenger):
    """Collects the leaves behind every ``pyro.param`` statement that runs under it, and reads their gradients.

    Names are those of the param store; parameters of an ``nn.Module`` model or guide that no statement
    reaches are called ``model.<name>`` and ``guide.<name>``. ``.grad`` of every parameter is cleared for use, and the
    old one is restored on exit. Gradients are stored by the identity of their leaf, because its name is certain only
    after the last run.
    """

    def __init__(
        self, model: Callable[..., Any] | None, guide: Callable[..., Any], parameters: Mapping[str, Tensor] | None
    ) -> None:
        super().__init__()
        self.leaves: dict[str, Tensor] = {}
        self._lent: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._known: set[int] = set()
        self._is_fixed = parameters is not None
        self._programs = {"model": model, "guide": guide}
        for _, leaf in self._module_leaves():
            self._lend(leaf)
        for name, leaf in (parameters or {}).items():
            self._add(name, leaf)

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters known so far."""
        return [leaf for leaf, _ in self._lent.values()]

    def clear(self) -> None:
        """Clears the gradients of all parameters known so far."""
        for leaf in self.tensors:
            leaf.grad = None

    def read(self) -> dict[int, Tensor]:
        """Returns a copy of the existing gradients, by ``id`` of the leaf."""
        return {id(leaf): leaf.grad.detach().clone() for leaf in self.tensors if leaf.grad is not None}

    def gradient(self, value: Tensor) -> dict[str, Tensor]:
        """Returns the gradient of a scalar by name."""
        return self.named({id(leaf): gradient for leaf, gradient in gradients_of(value, self.tensors).items()})

    def named(self, values: Mapping[int, Tensor], lead: tuple[int, ...] = ()) -> dict[str, Tensor]:
        """Returns ``values`` by name; zeros of shape ``lead + leaf.shape`` for a parameter without a value."""
        # When all runs are over, statements have reached what they reach.
        for name, leaf in self._module_leaves():
            self._add(name, leaf)
        return {
            name: values[id(leaf)] if id(leaf) in values else leaf.new_zeros((*lead, *leaf.shape))
            for name, leaf in self.leaves.items()
        }

    def _module_leaves(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, program in self._programs.items():
            if not self._is_fixed and isinstance(program, torch.nn.Module):
                yield from ((f"{prefix}.{name}", leaf) for name, leaf in program.named_parameters())

    def _lend(self, leaf: Tensor) -> None:
        # A parameter that is first met in the middle of a step must not contribute an older gradient.
        if leaf.requires_grad and id(leaf) not in self._lent:
            self._lent[id(leaf)] = leaf, leaf.grad
            leaf.grad = None

    def _add(self, name: str, leaf: Tensor) -> None:
        self._lend(leaf)
        if leaf.requires_grad and id(leaf) not in self._known:
            self._known.add(id(leaf))
            self.leaves[name] = leaf

    def _pyro_post_param(self, msg: Any) -> None:
        if not self._is_fixed and msg["value"] is not None:
            self._add(msg["name"], leaf_of(msg["value"]))

    def __exit__(self, *args: Any) -> Any:
        for leaf, grad in self._lent.values():
            leaf.grad = grad
        return super().__exit__(*args)
