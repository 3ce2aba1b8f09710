r"""Watches the operators of a step: what they are, whether numbers leave torch, and what the step draws itself.

The *fingerprint* of a step is the sequence of its operators: their names, their numbers, and which results they read.
Two runs with equal fingerprints would be recorded as the same graph.

Some functions of torch read numbers on the way, which a recording would freeze: ``x[a]`` with an integer tensor ``a``
without dimensions takes the row whose number ``a`` holds, and ``one_hot`` looks whether an index is in range. While a
step is recorded, operators give the same results without reading.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, NoneType
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from pyro_bpq.errors import Unrecordable
from pyro_bpq.record.frames import catcher
from pyro_bpq.record.values import memory_of

# Operators that hand numbers to Python, or make tensors whose size depends on them.
_READS = frozenset(
    f"aten.{name}" for name in "_local_scalar_dense equal is_nonzero masked_select nonzero _unique2 unique_dim".split()
)
_FRESH = frozenset({"aten.lift_fresh", "aten.lift_fresh_copy", "aten.lift"})
_TOLD = (bool, int, float, complex, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format)
# What hands out the memory of a tensor; no operator shows it.
_LEAVES_TORCH = frozenset((Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage))
# Folders of code that is not the user's.
_FOREIGN = ("/torch/", "/pyro/", "/pyro_bpq/", "/contextlib.py", "/functools.py")
# Where distributions read numbers of their parameters.
_READERS = ("torch.distributions.", "pyro.", "pyro_bpq.")


class NotYet(Unrecordable):
    """A step cannot be recorded yet: an eager step has to make its parameters or its critics first."""


@dataclass(frozen=True)
class Noise:
    """A tensor that the step draws from a generator of the objective's own."""

    source: int  # which of the generators that the step asks for, counted from 0
    kind: str  # name of the operator
    shape: tuple[int, ...]  # shape of the tensor
    dtype: torch.dtype  # its type

    def draw(self, generator: torch.Generator) -> Tensor:
        """Draws the tensor."""
        make = {"aten.rand": torch.rand, "aten.randn": torch.randn}[self.kind]
        return make(self.shape, generator=generator, dtype=self.dtype, device="cpu")


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """What tells two runs of a step apart."""

    digest: str  # of the sequence of operators
    number: int  # number of operators
    # Tensors that the step reads and did not make, inputs left out. They are compared by identity.
    constants: Sequence[Tensor]

    def is_like(self, other: Fingerprint) -> bool:
        """Whether another run would be recorded as the same graph."""
        alike = self.digest == other.digest and len(self.constants) == len(other.constants)
        return alike and all(a is b for a, b in zip(self.constants, other.constants, strict=True))


class StepWatch(TorchDispatchMode):
    """Watches the operators of one run of a step.

    Attributes:
        noise: The step's own noise.
        drawn: The tensors that it drew itself.
        refused: Why it cannot be recorded; ``None`` if it can.
    """

    def __init__(self, inputs: Sequence[Tensor], first_seed: int, given: Sequence[Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noise: list[Noise] = []
        self.drawn: list[Tensor] = []
        self.refused: Unrecordable | None = None
        self._first_seed, self._given = first_seed, given
        self._known = WeakIdKeyDictionary()
        # Memory that holds nothing but what Python's numbers say, as that of `torch.tensor(5)`. It may be read.
        self._fixed: WeakSet[torch.UntypedStorage] = WeakSet()
        self._hash = hashlib.sha256()
        self._constants: list[Tensor] = []
        self._number = 0
        self._outer: FrameType | None = None
        for tensor in inputs:
            self._note(tensor)

    def __enter__(self) -> StepWatch:
        self._outer = sys._getframe(1)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._outer = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.refused is not None:  # the program, or a library, may have caught it
            raise self.refused

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the run so far."""
        return Fingerprint(self._hash.hexdigest(), self._number, tuple(self._constants))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket._qualified_op_name.replace("::", ".")
        is_fixed = name in _FRESH or self.is_fixed((args, kwargs))
        if name in _READS or _is_masked(name, args):
            if is_fixed and name == "aten._local_scalar_dense":
                return _number(args[0])
            self.refuse_read()
        if not is_fixed and (frame := catcher(self._outer)) is not None:
            self._refuse(
                f"{frame.f_code.co_name} catches errors ({frame.f_code.co_filename}:{frame.f_lineno}), and a recording "
                "would freeze whether one comes: look at the values before, as by torch.linalg.cholesky_ex"
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            found = self._drawn(func, name, args, kwargs)
            if found is not None:
                return found
        if name.startswith("profiler."):
            return func(*args, **kwargs)
        self._number += 1
        told = [str(func)]
        for leaf in tree_leaves((args, kwargs)):
            told.append(self._told(leaf, name in _FRESH))
        self._hash.update("|".join(told).encode())
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        made = _memory(result)
        if is_fixed and torch.Tag.nondeterministic_seeded not in func.tags:
            self._fixed.update(made)
        else:
            self._fixed.difference_update([*made, *(_memory((args, kwargs)) if func._schema.is_mutable else ())])
        return result

    def is_fixed(self, value: object) -> bool:
        """Whether all tensors within hold nothing but what Python's numbers say."""
        return all(storage in self._fixed for storage in _memory(value))

    def refuse_read(self) -> NoReturn:
        """Refuses to record a step in which Python reads a number of a tensor."""
        frame: Any = sys._getframe(2)
        read = ""
        while frame is not None and frame.f_globals.get("__name__") != "pyro_bpq.compiled.recorder":
            file, module = frame.f_code.co_filename.replace("\\", "/"), frame.f_globals.get("__name__", "")
            if not any(part in file for part in _FOREIGN) and not file.startswith("<"):
                self._refuse(
                    f"Python reads a number of a tensor, in {frame.f_code.co_name}: {_line_of(frame)!r} "
                    f"({frame.f_code.co_filename}:{frame.f_lineno}), which a recording would freeze: write "
                    "torch.where, tensor indexing or a mask instead"
                )
            if not read and module.startswith(_READERS) and not module.startswith("pyro_bpq.compiled."):
                read = f", in {frame.f_code.co_name} of {module}: {_line_of(frame)!r}"
            frame = frame.f_back
        self._refuse(f"Python reads a number of a tensor{read}, which a recording would freeze")

    def _refuse(self, why: str) -> NoReturn:
        # The first reason counts.
        self.refused = self.refused or Unrecordable(why)
        raise self.refused

    def _note(self, tensor: Tensor) -> None:
        if tensor not in self._known:
            self._known[tensor] = len(self._known)

    def _told(self, leaf: Any, is_fresh: bool) -> str:
        if not isinstance(leaf, Tensor):
            return repr(leaf) if isinstance(leaf, _TOLD) else type(leaf).__name__
        if is_fresh:
            # Numbers of Python become tensors here: their values are part of the recording.
            return f"{leaf.dtype} {tuple(leaf.shape)} {_number(leaf)}"
        if leaf not in self._known:
            self._note(leaf)
            self._constants.append(leaf)
        return f"t{self._known[leaf]}"

    def _drawn(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """The step's own noise, or ``None`` where the program draws."""
        generator = kwargs.get("generator")
        if generator is None:
            if _is_in("independent", function=True):
                self._refuse(
                    "the baseline of a site is a second run that draws all sites anew (SecondRun). Several particles "
                    "need no second run: write num_particles=2 or more, and leave SecondRun out"
                )
            if _is_in("pyro_bpq.reruns."):
                self._refuse(
                    "it draws values that are no sites, and costs that read them are computed again at other values"
                )
            return None
        source = generator.initial_seed() - self._first_seed
        if name not in ("aten.rand", "aten.randn") or not 0 <= source < 1 << 20:
            self._refuse(
                f"it draws by {name} from a generator of its own, which a recording cannot use: leave generator=... out"
            )
        self.noise.append(Noise(source, name, tuple(args[0]), kwargs["dtype"]))
        if self._given is not None:
            return self._given[len(self.noise) - 1]
        drawn: Tensor = func(*args, **kwargs)
        self.drawn.append(drawn)
        self._note(drawn)
        return drawn


def _number(tensor: Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        return tensor.tolist()


def _memory(value: object) -> list[torch.UntypedStorage]:
    with torch._C.DisableTorchFunction():
        return [storage for leaf in tree_leaves(value) if isinstance(leaf, Tensor) for storage in memory_of(leaf)]


def _line_of(frame: Any) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def _is_masked(name: str, args: Any) -> bool:
    """Whether an index is a mask: the size of the result then depends on values."""
    if name not in ("aten.index", "aten.index_put", "aten.index_put_"):
        return False
    return any(isinstance(mask, Tensor) and mask.dtype in (torch.bool, torch.uint8) for mask in args[1])


def _is_in(part: str, function: bool = False) -> bool:
    """Whether a module, or a function of this package, is on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("pyro_bpq.") and (frame.f_code.co_name == part if function else module.startswith(part)):
            return True
        frame = frame.f_back
    return False


class RecordedIndexing(TorchFunctionMode):
    """Lets programs use these functions while they are recorded."""

    def __init__(self, watch: StepWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[0], Tensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(_is_scalar(part) for part in index):
                return selected(args[0], index)
        if func in _LEAVES_TORCH and not (func is Tensor.tolist and self._watch.is_fixed(args)):
            self._watch.refuse_read()
        if func is torch.randint and _is_in("_seed", function=True):
            # Of a further run that draws nothing, or else the step is not recorded: any seed will do.
            return 0
        if func is torch.nn.functional.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def selected(value: Tensor, index: tuple[Any, ...]) -> Tensor:
    """``value[index]``, where some parts of the index are integer tensors without dimensions."""
    taken = sum(_dims(part) for part in index)
    dim, parts = 0, list[Any]()
    for part in index:
        if part is Ellipsis:
            dim += value.dim() - taken
        elif _is_scalar(part):
            size = value.shape[dim]
            row = torch.where(part < 0, part + size, part).long()
            value = value.index_select(dim, row.reshape(1))
            part = 0
        parts.append(part)
        dim += _dims(part)
    return value[tuple(parts)]


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        return torch.nn.functional.one_hot(tensor)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def _is_scalar(part: Any) -> bool:
    if not isinstance(part, Tensor) or part.dim() > 0:
        return False
    return not (part.is_floating_point() or part.is_complex() or part.dtype in (torch.bool, torch.uint8))


def _dims(part: Any) -> int:
    """Number of dimensions that a part of an index takes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1
