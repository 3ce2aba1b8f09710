r"""Records linear maps of sampled values: the first one on each path of autograd's graph from the leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Operators that pass values on, one by one, as they are or shifted and scaled.
_PASSED_ON = frozenset(
    f"{name}Backward{i}"
    for name in (
        "Add Alias AsStrided Cat Clone Div Expand Mul Permute Reshape ReshapeAlias Rsub Select Slice Split "
        "SplitWithSizes Squeeze Stack Sub T ToCopy Transpose Unbind UnsafeView Unsqueeze View"
    ).split()
    for i in range(3)
)
# Those that give the same entries in the same order, and those of them that multiply by a number.
_SHIFTED = frozenset(
    f"{name}Backward{i}"
    for name in "Add Clone Neg ReshapeAlias Rsub Squeeze Sub UnsafeView Unsqueeze View".split()
    for i in range(3)
)
_SCALED = MappingProxyType({"MulBackward0": False, "DivBackward0": True})
# Functions that are linear in one argument, and those of them that are products of two.
_PRODUCTS = frozenset((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm))
_LINEAR = frozenset((*_PRODUCTS, torch.nn.functional.linear, torch.addmm))


@dataclass(frozen=True, eq=False)
class LinearRead:
    """A linear map that was applied to values.

    Args:
        source: Its argument ``u``, ``(..., F)``.
        weight: ``W``, ``(J, F)``, detached.
        output: ``W u + b``, ``(..., J)``.
        leaves: Names of the values that ``u`` consists of.
        scale: The factor ``(1,)`` between the entries of a value and those of ``u``, up to its sign, if ``u`` is that
            value in another shape, shifted and scaled. Otherwise ``None``.
    """

    source: Tensor
    weight: Tensor
    output: Tensor
    leaves: tuple[str, ...]
    scale: Tensor | None


class LinearReads(TorchFunctionMode):
    """Notes the first linear map on every way from some leaves.

    Args:
        leaves: The leaves by name.

    Attributes:
        found: The linear maps.
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.leaves = leaves
        self.found: list[LinearRead] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carries the operator out."""
        output = func(*args, **kwargs) if kwargs else func(*args)
        if func in _LINEAR and isinstance(output, Tensor) and output.requires_grad:
            pair = _linear(func, args, kwargs or {})
            if pair is not None:
                self._note(*pair, output)
        return output

    def _note(self, source: Tensor, weight: Tensor, output: Tensor) -> None:
        if not source.requires_grad or weight.dim() != 2:
            return
        names = self._sources(source)
        if names:
            shaped = output if output.shape[-1:] == weight.shape[:1] else output.unsqueeze(-1)
            if shaped.shape[:-1] == source.shape[:-1]:
                # Not `shaped`: the costs read the output itself.
                self.found.append(LinearRead(source, weight.detach(), output, names, self._scale(source)))

    def _scale(self, source: Tensor) -> Tensor | None:
        """The factor by which ``source`` scales a leaf; ``None`` unless it is one whole leaf, shifted and scaled."""
        node: Any = source.grad_fn
        scale = torch.ones(1, dtype=source.dtype, device=source.device)
        while node is not None and getattr(node, "variable", None) is None:
            if node.name() in _SCALED:
                found = [getattr(node, key) for key in ("_saved_self", "_saved_other")]
                given = [factor for factor in found if factor is not None]
                if len(given) != 1 or given[0].dim() > 0:
                    return None
                # Autograd keeps a number of Python as a tensor. A recorder of operators sees this tensor here only.
                factor = given[0].detach() if given[0].requires_grad else given[0]
                scale = scale / factor if _SCALED[node.name()] else scale * factor
            elif node.name() not in _SHIFTED or getattr(node, "_saved_alpha", 1) != 1:
                return None
            before = [following for following, _ in node.next_functions if following is not None]
            if len(before) != 1:
                return None
            node = before[0]
        sizes = [leaf.numel() for leaf in self.leaves.values() if node is not None and leaf is node.variable]
        return scale if sizes == [source.numel()] else None

    def _sources(self, source: Tensor) -> tuple[str, ...]:
        """The leaves that a tensor consists of; none if anything but a shift or a scale was done to them."""
        names: dict[str, None] = {}
        for node in nodes_behind(source):
            variable = getattr(node, "variable", None)
            if variable is not None:
                names.update({name: None for name, leaf in self.leaves.items() if leaf is variable})
            elif node.name() not in _PASSED_ON:
                return ()
        return tuple(names)


def _linear(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The argument and the weight ``(J, F)`` of an operator, if it is a linear map."""
    if func is torch.nn.functional.linear:
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        return (args[0] if args else kwargs["input"]), weight
    if func in _PRODUCTS:
        if len(args) != 2 or not all(isinstance(arg, Tensor) for arg in args):
            return None
        left, right = args
        if right.dim() == 2 and left.requires_grad:
            return left, right.t()
        if right.dim() == 1:
            is_matrix = left.dim() == 2 and right.requires_grad and right.numel() > 0
            return (right, left) if is_matrix else (left, right.unsqueeze(0))
    if func is torch.addmm and len(args) == 3 and not kwargs:
        return args[1], args[2].t()
    return None


def nodes_behind(*tensors: Tensor) -> Iterator[Any]:
    """The nodes of autograd's graph that tensors were computed by, each once.

    Nodes of leaves have an attribute ``variable``, the leaf.
    """
    seen, nodes = set[Any](), [tensor.grad_fn for tensor in tensors]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [following for following, _ in node.next_functions]
