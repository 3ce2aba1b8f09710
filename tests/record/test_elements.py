"""Which element of a source each element of a tensor depends on: against differences, one element at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import (
    adaptive_max_pool3d,
    bilinear,
    channel_shuffle,
    grid_sample,
    group_norm,
    interpolate,
    one_hot,
    pad,
    pixel_unshuffle,
    scaled_dot_product_attention,
)

from pyro_bpq.record.components import labels_of
from pyro_bpq.record.elements import _ALONG, _ELEMENTWISE, _MOVING, MANY, NONE, Unknown
from pyro_bpq.record.function import Recording
from pyro_bpq.record.operators import effects_of
from pyro_bpq.record.tape import Tape

SHAPE = (2, 3)


def _in_place(z: Tensor) -> Tensor:
    buffer = torch.zeros(2, 4)
    buffer[:, 0] = z[:, 2]
    buffer[:, 1:3] = z[:, :2]
    buffer[:, 1].mul_(3.0)
    return buffer


def _overwritten(z: Tensor) -> Tensor:
    buffer = torch.zeros(2, 3)
    buffer.copy_(z)
    view = buffer[:, 0]
    view.copy_(z.sum(-1))
    return buffer


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": lambda z: (2.0 * z - 1.0).exp().sigmoid() + torch.arange(3.0),
    "where": lambda z: torch.where(z > 0.5, z * z, torch.zeros(())),
    "stack": lambda z: torch.stack([z[..., i] * i for i in range(1, 3)], -1),
    "cat": lambda z: torch.cat([torch.zeros(2, 1), z[:, 1:], z[:, :1]], -1),
    "index_select": lambda z: z.index_select(-1, torch.tensor([2, 0, 1])),
    "looked up": lambda z: torch.nn.functional.embedding(torch.tensor([2, 0, 1]), z[0].unsqueeze(-1)),
    "gather_one": lambda z: torch.arange(4.0).expand(2, 3, 4).gather(-1, z.long().unsqueeze(-1)),
    "in_place": _in_place,
    "row_sum_of_one": lambda z: z[:, 1:2].sum(-1),
    "product": lambda z: (z.unsqueeze(-1) * torch.ones(3, 4)).sum(-1),
    "softmax": lambda z: torch.stack([z, 1.0 - z], -1).log_softmax(-1),
    "embedding": lambda z: torch.nn.functional.embedding(z.long(), torch.arange(8.0).reshape(4, 2)),
    "gather": lambda z: z[:, torch.tensor([2, 0, 1])],
    "known_rows_of_a_table": lambda z: z[:, :1].expand(2, 3)[torch.arange(2), z[:, 0].long()],
    "known_rows_on_both_sides": lambda z: z[:, :1, None].expand(2, 3, 4)[torch.arange(2), :, z[:, 0].long()],
    "solved_by_rows": lambda z: solve_triangular(torch.ones(1, 1), z.view(1, 6), upper=False),
    "one_hot": lambda z: one_hot(z.long(), 2).float(),
}
# Their entries read less than what is found, or nothing.
ROUGH: dict[str, Callable[[Tensor], Tensor]] = {
    "distances": lambda z: torch.cdist(z.view(6, 1), torch.tensor([[0.5], [2.0]])),
    "range": lambda z: z.amax(-1, True) - z.amin(-1, True) + z,
    "norm": lambda z: z / (1.0 + z.norm(dim=-1, keepdim=True)),
    "shifted": lambda z: pad(z, (1, 0))[..., :3] - 0.5 * z,
    "diagonal": lambda z: (torch.diag_embed(z) @ torch.arange(9.0).reshape(3, 3)).sum(-2),
}
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda z: z.sum(-1),
    "a view that no operator shows": lambda z: torch.nn.Parameter(z, requires_grad=False).sum(-1),
    "matmul": lambda z: z @ torch.ones(3, 2),
    "softmax of a row": lambda z: z.softmax(-1),
    "overwritten": lambda z: _overwritten(z)[:, 0],
    "own_rows": lambda z: z - z.mean(0),
    "max": lambda z: z.max(),
    "an operator without a rule": lambda z: z.renorm(2, 0, 1.0),
    "row_times_matrix": lambda z: z[0] @ torch.arange(1.0, 7.0).reshape(3, 2),
    "count_nonzero": lambda z: z.count_nonzero(-1),
    "attention": lambda z: scaled_dot_product_attention(*(z.view(1, 1, 6, 1),) * 3),
    "solved": lambda z: solve_triangular(torch.eye(2) + torch.ones(2, 2).tril(), z, upper=False)[1],
    "solved_from_the_right": lambda z: solve_triangular(torch.ones(3, 3).triu(), z, upper=True, left=False),
    "group_norm": lambda z: group_norm(z.view(1, 6), 2),
    "attention_mask": lambda z: scaled_dot_product_attention(
        *torch.arange(9.0).sin().view(3, 1, 1, 3, 1), attn_mask=z[:1].view(1, 1, 1, 3)
    ),
    "grid": lambda z: grid_sample(torch.arange(9.0).view(1, 1, 3, 3), z.view(1, 1, 3, 2) - 0.3, align_corners=False),
}
# In layers of decoders rows stay apart.
LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "upsampled, 1d": lambda z: interpolate(z.view(2, 1, 3), scale_factor=2, mode="linear"),
    "upsampled, 2d": lambda z: interpolate(z.view(2, 1, 1, 3), scale_factor=2, mode="bilinear", antialias=True),
    "upsampled, 3d": lambda z: interpolate(z.view(2, 1, 1, 1, 3), scale_factor=2, mode="nearest-exact"),
    "pooled, 3d": lambda z: adaptive_max_pool3d(z.view(2, 1, 1, 1, 3), 1),
    "bilinear": lambda z: bilinear(z, 1.5 - z, torch.arange(18.0).view(2, 3, 3)),
    "shuffled": lambda z: pixel_unshuffle(channel_shuffle(z.view(2, 3, 1, 1).expand(2, 3, 2, 2), 3), 2),
}


def _source() -> Tensor:
    return torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]])


def _positions(function: Callable[[Tensor], Tensor], of_rows: bool = False) -> np.ndarray | None:
    with Tape() as tape:
        z = tape.source("z", _source())
        result = function(z)
        source, wanted = tape.value_of(z), tape.value_of(result)
    each = np.arange(6, dtype=np.int32).reshape(SHAPE)
    starts = {source: each[:, :1] // 3 if of_rows else each}
    (found,), _ = labels_of(Recording.of(tape, {source: z}, [wanted]), [wanted], starts)
    assert not tape.escaped
    return None if isinstance(found, Unknown) else np.broadcast_to(found, result.shape)


def _truth(function: Callable[[Tensor], Tensor]) -> np.ndarray:
    """``[i, ...]``: whether element ``i`` of the source makes a difference, at any of a few values."""
    moves = []
    for i in range(6):
        moved = []
        for start in (_source(), torch.zeros(SHAPE), torch.ones(SHAPE)):
            other = start.clone()
            other.view(-1)[i] = 1.0 - other.view(-1)[i]
            moved.append((function(other) != function(start)).numpy())
        moves.append(np.any(moved, 0))
    return np.stack(moves)


@pytest.mark.parametrize("name", KEPT)
def test_elements_are_kept_apart(name: str) -> None:
    found, truth = _positions(KEPT[name]), _truth(KEPT[name])
    for index in np.ndindex(found.shape):
        readers = np.flatnonzero(truth[(slice(None), *index)])
        if len(readers) > 1:
            assert found[index] == MANY
        elif len(readers) == 1:
            assert found[index] == readers[0]
        else:
            assert found[index] == NONE


@pytest.mark.parametrize("name", MIXED)
def test_elements_that_may_mix_are_not_told_apart(name: str) -> None:
    found = _positions(MIXED[name])
    assert found is None or (found == MANY).all()


@pytest.mark.parametrize("name", LAYERS)
def test_rows_stay_apart_in_layers(name: str) -> None:
    found = _positions(LAYERS[name], of_rows=True)
    assert all((found[row] == row).all() for row in range(2))


def _is_missed(function: Callable[[Tensor], Tensor]) -> bool:
    """Whether a result reads an element that its labels do not name."""
    found, truth = _positions(function), _truth(function)
    return found is not None and any(found.flat[at] not in (i, MANY) for i, at in np.argwhere(truth.reshape(6, -1)))


EVERY = {**KEPT, **MIXED, **ROUGH, **LAYERS}


@pytest.mark.parametrize("name", EVERY)
def test_nothing_is_missed(name: str) -> None:
    assert not _is_missed(EVERY[name])


def _called(op: Any, z: Tensor) -> Tensor:
    """Calls an operator with all that its schema asks for; each of its tensors is made of ``z``."""
    torch.default_generator.manual_seed(0)
    one, other, name = 0.2 + 0.5 * z, 0.9 - 0.3 * z, op.name()
    one = torch.complex(one, other) if "_fft_c" in name or "_conj" in name else one
    one = one.view(*(1,) * (int(name[-2]) - 1), *SHAPE) if name[-5:-2] == "pad" else one
    named = dict(self=one, condition=z > 0.5, size=[6], last_dim_size=4, dtype=torch.float32)
    typed = {"Tensor": other, "List[Tensor]": [one, other], "number": 0.5, "float": 0.5, "bool": False}
    given = {}
    for own in op._schema.arguments:
        if not own.has_default_value():
            numbers = [1, 1, 1, 1, 0, 0][: own.N or 2] if own.name.startswith("pad") else [1]
            given[own.name] = named.get(own.name, typed.get(kind := str(own.type), numbers if "List" in kind else 1))
    found = op(**given)
    parts = found if isinstance(found, (tuple, list)) else [found]
    return torch.cat([(torch.view_as_real(part) if part.is_complex() else part).flatten() for part in parts])


# They move elements, and no schema says how they are called; torch moves their labels by the operators themselves.
UNCALLED = (
    "_conj channel_shuffle diagonal_scatter native_channel_shuffle pixel_shuffle pixel_unshuffle repeat same "
    "select_scatter unsafe_split_with_sizes".split()
)


def _ways(name: str) -> list[Callable[[Tensor], Tensor]]:
    """The overloads of an operator that run so."""
    packet, found = getattr(torch.ops.aten, name, None), []
    for op in (getattr(packet, own) for own in packet.overloads()) if packet else ():
        with contextlib.suppress(RuntimeError, TypeError, AttributeError):
            if not (effects_of(op).is_sized or any(own.is_out for own in op._schema.arguments)):
                _called(op, _source())
                found.append(partial(_called, op))
    return found


def test_rules_name_all_that_operators_read() -> None:
    # The draws of poisson for one element move those of others.
    ways = {name: _ways(name) for name in _ELEMENTWISE | _ALONG | _MOVING if name != "poisson"}
    assert not [name for name, own in ways.items() if any(map(_is_missed, own))]
    assert {name for name, own in ways.items() if not own} <= {*UNCALLED}
