r"""``external``: a call of a function that leaves torch, such as a step of a simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from pyro.poutine.runtime import effectful
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pyro_bpq.errors import OptionError


@dataclass(frozen=True, eq=False)
class external:
    r"""Wraps a function that leaves torch, so that programs may call it: a step of a simulator, a solver, a game.

    The call is one operator of the recording. Its results read the tensors that it is handed in, now and in earlier
    calls of this run, since a simulator has a state: methods of one object share it. Nothing else steers the program,
    whatever Python the function runs.

    The function gets tensors without gradient, copies, and returns tensors, arrays, numbers or ``None``, also in
    tuples, lists and dictionaries. The caller gets tensors; arrays of floating-point numbers have torch's default type.
    In a step the function is called once for each particle, or once for all vectorised particles, and never at other
    values. It has to read all that is sampled from its arguments.

    Args:
        function: The function.
        rowwise: Whether row :math:`i` of each plate in a result reads only row :math:`i` of what was handed in. The
            plates are those around the call, and those of the sites that it reads. Their dimensions are the first ones
            of arguments and results, ``(plates, ...)``; what has other dimensions belongs to all rows. Otherwise each
            result reads all of what was handed in.

    Raises:
        UnsupportedProgramError: If it is called in a run that is no step's own, if it is handed in a gradient, or if it
            reads sampled values that it was not handed in.
        OptionError: If a result is no number.

    Example:
        >>> import numpy, pyro, pyro.distributions as dist
        >>> from pyro_bpq import cost, external
        >>> distance = external(lambda z: numpy.abs(z.numpy() - 2.0))
        >>> def policy():
        ...     with pyro.plate("episodes", 64):
        ...         z = pyro.sample("z", dist.Categorical(logits=pyro.param("logits", torch.zeros(3))))
        ...         cost("distance", distance(z))
    """

    function: Callable[..., Any]
    rowwise: bool = True

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise OptionError(f"external({self.function!r}): write a function.")

    @property
    def name(self) -> str:
        """How it is called in messages."""
        return f"the external function {getattr(self.function, '__qualname__', repr(self.function))!r}"

    @property
    def owner(self) -> Any:
        """The object that may have a state: that of a method, or this one."""
        return self if (found := owner_of(self.function)) is None else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return _call(self, args, kwargs)

    def answer(self, args: Any, kwargs: Any) -> Any:
        """What the function returns, as tensors with memory of their own."""
        handed = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with torch.no_grad():
            args, kwargs = tree_map(_copy, (args, kwargs))
            return tree_map(lambda leaf: self._tensor(leaf, handed), self.function(*args, **kwargs))

    def _tensor(self, leaf: Any, handed: list[Tensor]) -> Tensor | None:
        if leaf is None or isinstance(leaf, Tensor):
            return _copy(leaf)
        try:
            found = torch.as_tensor(leaf, device=handed[0].device if handed else None)
        except (TypeError, ValueError, RuntimeError) as error:
            raise OptionError(f"{self.name} returned {leaf!r}; return tensors, arrays, numbers or None.") from error
        return _copy(found.to(torch.get_default_dtype()) if found.is_floating_point() else found)


def owner_of(function: Any) -> Any:
    """The object that may keep state between calls, or ``None``."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        return None if isinstance(function, (FunctionType, BuiltinFunctionType, type)) else function
    return owner


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


@effectful(type="bpq_external")
def _call(function: external, args: Any, kwargs: Any) -> Any:
    return function.answer(args, kwargs)


class Answers(list[Any]):
    """What external functions have answered since a mark; a run that is taken once more gets the same answers."""

    position = 0

    def to(self, function: external, args: Any, kwargs: Any) -> Any:
        """The answer to the next call."""
        if self.position == len(self):
            self.append(function.answer(args, kwargs))
        self.position += 1
        return tree_map(_copy, self[self.position - 1])


def link(handed: Iterable[tuple[Tensor, set[int]]], batch: tuple[int, ...]) -> Tensor:
    """A tensor of the shape of plates, each element of which reads what a row of results reads.

    Beside each tensor are the dimensions of the plates of what it reads; in others all rows read it, whatever its
    shape. The numbers mean nothing.
    """
    found = torch.zeros(batch)
    for tensor, dims in handed:
        own = tensor.ne(0).to(found)
        own = own[..., None].flatten(len(batch)).sum(-1) if keeps_rows(own, batch) else own.sum()
        shared = [dim for dim in range(-own.dim(), 0) if dim not in dims]
        found = found + (own.sum(shared, keepdim=True) if shared else own)
    return found


def keeps_rows(tensor: Tensor, batch: tuple[int, ...]) -> bool:
    """Whether the first dimensions of a tensor are plates of this shape."""
    return tensor.dim() >= len(batch) and all(own in (1, size) for own, size in zip(tensor.shape, batch, strict=False))


def linked(result: Tensor, memory: Tensor) -> Tensor:
    """The same in the shape of a result."""
    keeps, lead = keeps_rows(result, tuple(memory.shape)), result.shape[: memory.dim()]
    rows = memory.sum_to_size(lead) if keeps else memory.sum()
    return rows.reshape((*rows.shape, *(1,) * (result.dim() - rows.dim()))).expand(result.shape)
