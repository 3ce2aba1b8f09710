"""The bank holds all learned state: critics and running statistics, one row per site.

Rows of like-shaped sites are stored in a block, whose tensors have a leading axis of sites. A block is made when a site
is first seen, and never resized, so that an optimiser of its parameters stays valid. Loaded rows wait in the bank until
their block exists. A step collects writes, which change blocks after it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bpq.errors import warn
from pyro_bpq.short import alike

# Number of kept rows of sites that the last step did not use; number of largest steps that always have room.
MAX_IDLE, _STEPS = 2048, 8
# Key under which a loaded row stores the name of its block.
_HOME = ""
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

    def __init__(self, kind: str, keys: Sequence[str], critic: nn.Module | None, buffers: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.kind, self.keys, self.critic = kind, tuple(keys), critic
        self.slow: nn.Module | None = None
        for part in () if critic is None else critic.modules():
            vars(part)[_MARK] = True
        for name, buffer in buffers.items():
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
        return average_writes(writes, {key: block for key, block, *_ in self.parts}) if self.repeats else writes


def average_writes(writes: Sequence[Write], blocks: Mapping[str, Block]) -> list[Write]:
    """Merges writes into one write for each buffer; a row gets the mean of the writes to it, each time."""
    averaged: list[Write] = []
    for (key, name), parts in alike(((rows, value), (key, name)) for key, name, rows, value in writes).items():
        whole = [torch.arange(len(own), device=own.device) if rows is None else rows for rows, own in parts]
        rows, value = torch.cat(whole), torch.cat([own for _, own in parts])
        # No row is read on the host, so that steps may be compiled.
        total = value.new_zeros(len(getattr(blocks[key], name)), *value.shape[1:])
        number = total.index_add(0, rows, torch.ones_like(value)).clamp(min=1.0)
        averaged.append((key, name, rows, (total.index_add(0, rows, value) / number)[rows]))
    return averaged


class CriticBank(nn.Module):
    """Critics and running statistics of sites.

    The bank keeps the rows of the last learning step, and the ``max_idle`` most recently used rows of other sites, or
    as many rows as eight of the largest steps have if that is more. It forgets older rows, block by block. A forgotten
    site that comes again starts anew. A site has one row of running statistics, and one row for each of its critics.

    Args:
        seed: Seed of the generator that initialises the critics; the global generator is left alone.
        is_own: Whether critics are trained by an optimiser of their own. They are then buffers, not parameters.
        keeps_slow: Whether every block keeps a slow copy of its critics.
        max_idle: Number of kept rows of sites that the last step did not use.
        on_build: Called with the name of a new block after its rows are loaded.
    """

    blocks: dict[str, Block]  # A ModuleDict

    def __init__(
        self,
        seed: int = 0,
        is_own: bool = True,
        keeps_slow: bool = False,
        max_idle: int = MAX_IDLE,
        on_build: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        self.seed, self.is_own, self.keeps_slow, self.max_idle = seed, is_own, keeps_slow, max_idle
        self._on_build = on_build
        self.blocks = nn.ModuleDict()  # type: ignore[assignment]
        self._index: dict[tuple[str, str], tuple[str, int]] = {}
        self._selections: dict[Hashable, Selection] = {}
        self._waiting: dict[tuple[str, str], Any] = {}
        # Names of blocks with their numbers of rows, the most recently used block last.
        self._order: dict[str, int] = {}
        # Blocks that were selected since the last call of tidy, and whether steps that learn did so.
        self._touched: dict[str, bool] = {}
        self._most_rows = 0

    def generator(self, kind: str, keys: Sequence[str]) -> torch.Generator:
        """A generator for a new block; it depends on the seed and on the block's kind and keys."""
        return torch.Generator().manual_seed(self.seed * 7919 + int(_block_name(kind, keys)[1:], 16))

    def select(
        self, kind: str, keys: tuple[str, ...], make: Callable[[tuple[str, ...]], Block] | None
    ) -> Selection | None:
        """Selects the rows for ``keys``, which may repeat; ``make`` builds a block of missing rows.

        Without ``make`` the result is ``None`` if rows are missing.
        """
        found = self._selections.get((kind, keys))
        if found is not None:
            return self._noted(found, make is not None)
        missing = tuple(dict.fromkeys(k for k in keys if (kind, k) not in self._index))
        if missing and make is None:
            return None
        # New rows begin as in the run that was saved, apart from the rows that were loaded.
        for rows in alike((key, self._waiting.get((kind, key), {}).get(_HOME)) for key in missing).values():
            assert make is not None
            self._add(make(tuple(rows)))
        selection = self._find(kind, keys)
        # Programs of changing structure select ever new combinations of keys.
        if len(self._selections) >= 256:
            self._selections.clear()
        self._selections[kind, keys] = selection
        return self._noted(selection, make is not None)

    def _noted(self, selection: Selection, is_used: bool) -> Selection:
        """Returns the selection and notes its blocks, as used only if the step learns (``is_used``)."""
        for key, *_ in selection.parts:
            self._touched[key] = is_used or self._touched.get(key, False)
        return selection

    @property
    def _used(self) -> dict[str, int]:
        """The blocks that steps that learn have used since the last call of tidy, and their numbers of rows."""
        return {key: len(self.blocks[key].keys) for key, is_used in self._touched.items() if is_used}

    def weights(self, blocks: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The critics' trainable tensors, by ``block.name``; of all blocks, or of the given ones that still exist."""
        names = self.blocks if blocks is None else [key for key in blocks if key in self.blocks]
        tensors = ((f"{key}.{name}", t) for key in names for name, t in named_tensors(self.blocks[key]).items())
        return {name: tensor for name, tensor in tensors if tensor.requires_grad}

    def gradients(
        self, loss: Tensor, blocks: Iterable[str] | None = None, retain_graph: bool = False
    ) -> dict[str, Tensor]:
        """Gradients of a loss, by name of the weight; ``None`` stands for the blocks selected since :meth:`tidy`."""
        # Sorted, because all processes that learn together need the same order.
        weights = self.weights(sorted(self._touched) if blocks is None else blocks)
        found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, retain_graph=retain_graph)
        return {name: g for name, g in zip(weights, found, strict=True) if g is not None}

    @property
    def names(self) -> set[str]:
        """Names of the blocks, and of those that loaded rows come from."""
        return {*self.blocks, *(rows[_HOME] for rows in self._waiting.values() if _HOME in rows)}

    def tidy(self) -> bool:
        """Forgets old rows, between steps; says whether there were any."""
        is_full = False
        if used := self._used:
            for key, size in used.items():
                self._order.pop(key, None)
                self._order[key] = size
            number, rows = sum(used.values()), sum(self._order.values())
            self._most_rows = max(self._most_rows, number)
            limit = max(self.max_idle + number, _STEPS * self._most_rows)
            is_full = rows + len(self._waiting) > limit
            if is_full:
                self._forget(rows, limit, used)
        self._touched.clear()
        return is_full

    def _forget(self, rows: int, limit: int, used: Container[str]) -> None:
        """Forgets the oldest rows; loaded rows that no step has selected go first."""
        self._take(list(self._waiting)[: rows + len(self._waiting) - limit])
        for key, size in list(self._order.items()):
            if rows <= limit or key in used:
                break
            rows -= size
            block = self.blocks[key]
            for name in block.keys:
                del self._index[block.kind, name]
            del self.blocks[key], self._order[key]
            self._selections.clear()

    def _take(self, names: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        """Removes and returns waiting rows."""
        return {name: self._waiting.pop(name) for name in names if name in self._waiting}

    @torch.no_grad()
    def commit(self, writes: Sequence[Write]) -> None:
        """Applies the writes that were collected during a step; skips blocks that no longer exist."""
        for key, name, rows, value in writes:
            if key not in self.blocks:
                continue
            buffer = getattr(self.blocks[key], name)
            if rows is None:
                buffer.copy_(value)
            else:
                buffer[rows] = value.to(buffer)

    def _add(self, block: Block) -> None:
        if self.is_own:
            block.hide_weights()
        if self.keeps_slow:
            block.keep_slow()
        key = _block_name(block.kind, block.keys)
        self.blocks[key] = block
        for row, name in enumerate(block.keys):
            self._index[block.kind, name] = (key, row)
        self._load_waiting(block)
        if self._on_build is not None:
            self._on_build(key)

    def _find(self, kind: str, keys: tuple[str, ...]) -> Selection:
        homes = [(position, *self._index[kind, name]) for position, name in enumerate(keys)]
        places = alike(((row, position), key) for position, key, row in homes)
        parts = []
        for key, found in places.items():
            block, (rows, positions) = self.blocks[key], map(list, zip(*found, strict=True))
            device = next((t.device for t in block.state_dict().values()), None)
            chosen = None if rows == list(range(len(block.keys))) else torch.tensor(rows, device=device)
            at = None if len(places) == 1 else torch.tensor(positions, device=device)
            parts.append((key, block, chosen, at))
        order = torch.argsort(torch.cat([at for *_, at in parts if at is not None])) if len(places) > 1 else None
        return Selection(tuple(parts), len(set(keys)) < len(keys), order)

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle and copy, without the weak references that Pyro's param store puts on parameters."""
        for parameter in self.parameters():
            # The store makes them again when it returns a parameter.
            parameter.__dict__.pop("unconstrained", None)
        return super().__getstate__()  # type: ignore[no-untyped-call]

    # A saved row finds its place by its kind and key, not by the block that it came from.

    def get_extra_state(self) -> dict[str, Any]:
        """Kind and keys of every block, the most recently used block last."""
        order = {**self._order, **self._used, **dict.fromkeys(self.blocks)}
        blocks = {key: {"kind": self.blocks[key].kind, "keys": [*self.blocks[key].keys]} for key in order}
        return {"blocks": blocks, "waiting": {**self._waiting}, "most_rows": self._most_rows}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Does nothing: :meth:`_load_from_state_dict` handles the extra state."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        extra = state_dict.get(prefix + "_extra_state", {"blocks": {}, "waiting": {}})
        waiting = {key: dict(rows) for key, rows in extra["waiting"].items()}
        for key, described in extra["blocks"].items():
            start = f"{prefix}blocks.{key}."
            tensors = {name[len(start) :]: state_dict.pop(name) for name in list(state_dict) if name.startswith(start)}
            for row, name in enumerate(described["keys"]):
                rows: dict[str, Any] = {tensor: value[row].clone() for tensor, value in tensors.items()}
                waiting[described["kind"], name] = rows | {_HOME: key}
        self._waiting, self._most_rows = waiting, max(self._most_rows, extra.get("most_rows", 0))
        for key, block in self.blocks.items():
            self._load_waiting(block)
            # The rows are already in place, so the ordinary loader gets the block's own tensors.
            own = block.state_dict(prefix=f"{prefix}blocks.{key}.")
            state_dict.update({name: value.clone() for name, value in own.items()})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @torch.no_grad()
    def _load_waiting(self, block: Block) -> None:
        if not self._waiting:
            return
        own = block.state_dict(keep_vars=True)
        names = [(block.kind, name) for name in block.keys]
        self._warn_of_others(block.kind, block.keys)
        found = self._take(names)
        for row, name in enumerate(names):
            for tensor, value in found.get(name, {}).items():
                if tensor in own and own[tensor].shape[1:] == value.shape:
                    own[tensor][row] = value.to(own[tensor])

    def _warn_of_others(self, kind: str, names: Sequence[str]) -> None:
        """Warns if critics start anew because the loaded ones are of another kind."""
        own = _critic_of(kind)
        loaded = {name: critic for other, name in self._waiting if (critic := _critic_of(other)) not in ("", own)}
        anew = [name for name in names if name in loaded and (kind, name) not in self._waiting]
        if own and anew:
            warn(
                f"The critics of {anew} start anew as {own}: the state that was loaded has "
                f"{loaded[anew[0]]} there. Write the same critic= as in the run that was saved to go on with its "
                "critics."
            )


def _critic_of(kind: str) -> str:
    """The critic in words, without the sizes of its input; empty for other rows."""
    return kind.removeprefix("critic ").rsplit(" ", 4)[0] if kind.startswith("critic ") else ""


def _block_name(kind: str, keys: Sequence[str]) -> str:
    """Name of a block, equal in every process, so that saved states match."""
    return "b" + hashlib.sha256("\n".join((kind, *keys)).encode()).hexdigest()[:12]
