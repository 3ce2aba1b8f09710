"""Which element of a source each element of a tensor depends on: against differences, one element at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import glu, group_norm, linear, one_hot, pad, scaled_dot_product_attention

from pyro_bpq.record.elements import MANY, NONE, Reader, Unknown
from pyro_bpq.record.function import flat
from pyro_bpq.record.recording import Recording
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
    "views": lambda z: z.t()[1:].reshape(-1).unsqueeze(0).expand(3, -1),
    "stack": lambda z: torch.stack([z[..., i] * i for i in range(1, 3)], -1),
    "cat": lambda z: torch.cat([torch.zeros(2, 1), z[:, 1:], z[:, :1]], -1),
    "flip": lambda z: z.flip(-1),
    "repeat": lambda z: z.repeat(2, 2),
    "roll": lambda z: z.roll(1, -1),
    "roll_flat": lambda z: z.roll(2),
    "gather_one": lambda z: torch.arange(4.0).expand(2, 3, 4).gather(-1, z.long().unsqueeze(-1)),
    "in_place": _in_place,
    "row_sum_of_one": lambda z: z[:, 1:2].sum(-1),
    "pairs": lambda z: z[:, :1] + z,
    "product": lambda z: (z.unsqueeze(-1) * torch.ones(3, 4)).sum(-1),
    "one_hot_rows": lambda z: torch.stack([z, 1.0 - z], -1) @ torch.tensor([[0.3, -1.0], [0.7, 2.0]]),
    "softmax": lambda z: torch.stack([z, 1.0 - z], -1).log_softmax(-1),
    "bernoulli": lambda z: torch.distributions.Bernoulli(logits=z).log_prob(torch.ones(2, 3)),
    "normal": lambda z: torch.distributions.Normal(z, 1.3).log_prob(torch.zeros(2, 3)),
    "embedding": lambda z: torch.nn.functional.embedding(z.long(), torch.arange(8.0).reshape(4, 2)),
    "vector_in_place_view": lambda z: torch.mul(z[0], 2.0).unsqueeze_(0).squeeze_(0),
    "select_of_one": lambda z: z.unsqueeze(-1).index_select(-1, torch.tensor([0, 0])),
    "pad": lambda z: pad(z, (1, -1, 0, 2)),
    "norm_of_one": lambda z: z[:, 1:2].norm(dim=-1),
    "sort_of_one": lambda z: z.unsqueeze(-1).sort(-1).values,
    "topk_of_one": lambda z: z.unsqueeze(-1).topk(1).indices.squeeze(-1) + z,
    "glu": lambda z: glu(torch.stack([z, 1.0 - z], -1)),
    "scalar_gather": lambda z: torch.arange(4.0).gather(-1, z[0, 1].long()),
    "diagonal_of_rows": lambda z: torch.diag_embed(z, 1)[:, :, 1:],
    "rot90": lambda z: z.rot90(),
    "variance_into": lambda z: torch.var(torch.stack([z, 2.0 * z], -1), -1, out=torch.zeros(2, 3)),
    "variance_kept": lambda z: torch.stack([z, 2.0 * z], -1).var(-1, keepdim=True),
    "scatter_columns": lambda z: torch.ones(2, 3).scatter(1, torch.tensor([[0], [0]]), z[:, :1])[:, 0],
    "table": lambda z: torch.arange(1.0, 9.0).reshape(4, 2)[z.long()],
}
# Their entries read less than what is found, or nothing.
ROUGH: dict[str, Callable[[Tensor], Tensor]] = {
    "triangle": lambda z: z.tril(),
    "distances": lambda z: torch.cdist(z.view(6, 1), torch.tensor([[0.5], [2.0]])),
}
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda z: z.sum(-1),
    "matmul": lambda z: z @ torch.ones(3, 2),
    "softmax": lambda z: z.softmax(-1),
    "cumsum": lambda z: z.cumsum(-1),
    "sort": lambda z: z.sort(-1).values,
    "gather": lambda z: z[:, torch.tensor([2, 0, 1])],
    "one_hot": lambda z: one_hot(z.long(), 2).float(),
    "overwritten": lambda z: _overwritten(z)[:, 0],
    "own_rows": lambda z: z - z.mean(0),
    "max": lambda z: z.max(),
    "max_values": lambda z: (z + torch.arange(3.0)).max(-1).values,
    "min_indices": lambda z: z.min(0).indices,
    "argmax": lambda z: z.argmax(-1),
    "prod": lambda z: (z + 1.0).prod(-1),
    "variance": lambda z: (z * torch.arange(1.0, 4.0)).var(-1),
    "cumprod": lambda z: (z + 1.0).cumprod(0).sum(-1),
    "layer_norm": lambda z: torch.nn.functional.layer_norm(z, (3,)),
    "batch_norm": lambda z: torch.nn.functional.batch_norm(z, None, None, training=True),
    "gather_along": lambda z: z.gather(-1, torch.tensor([[2], [0]])),
    "vector": lambda z: z @ torch.arange(1.0, 4.0),
    "dot": lambda z: z[0].dot(z[1] + 1.0),
    "baddbmm": lambda z: torch.baddbmm(torch.ones(1, 2, 2), z.unsqueeze(0), torch.ones(1, 3, 2)),
    "elementwise_max": lambda z: torch.max(z, z.flip(0)).sum(-1),
    "norm": lambda z: z.norm(dim=-1),
    "median": lambda z: z.median(-1).values,
    "topk": lambda z: z.topk(2, -1).values,
    "topk_rows": lambda z: z.topk(2, 0).values,
    "row_times_matrix": lambda z: z[0] @ torch.arange(1.0, 7.0).reshape(3, 2),
    "linear": lambda z: linear(z[1], torch.arange(1.0, 7.0).reshape(2, 3)),
    "index_select": lambda z: z.index_select(-1, torch.tensor([2, 0, 1])),
    "take": lambda z: z.take(torch.tensor([1, 3])),
    "stable_sort": lambda z: torch.sort(z[:, :1], stable=True, dim=0).values,
    "stable_argsort": lambda z: torch.argsort(z[:, :1], dim=0, stable=True),
    "variance_kept": lambda z: (z * torch.arange(1.0, 4.0)).var(1, keepdim=True),
    "variance_into": lambda z: torch.var(z * torch.arange(1.0, 4.0), 1, keepdim=True, out=torch.zeros(2, 1)),
    "addmv": lambda z: torch.addmv(torch.ones(2), torch.arange(1.0, 7.0).reshape(2, 3), z[0]),
    "index_put": lambda z: torch.zeros(3).index_put((torch.tensor([2, 0, 1]),), z[0])[:2],
    "index_copy": lambda z: torch.zeros(3).index_copy(0, torch.tensor([2, 0, 1]), z[0]),
    "scatter_reduce": lambda z: torch.zeros(2, 1).scatter_reduce(1, torch.zeros(2, 3).long(), z, "sum"),
    "masked_scatter": lambda z: torch.zeros(2, 3).masked_scatter(torch.ones(2, 3).bool(), z),
    "argsort": lambda z: z.argsort(0),
    "kthvalue": lambda z: z.kthvalue(2, dim=-1).values,
    "mode": lambda z: z.mode(-1).values,
    "median_of_all": lambda z: z.median(),
    "cummax": lambda z: z.cummax(-1).values[:, 1:],
    "count_nonzero": lambda z: z.count_nonzero(-1),
    "norm_of_all": lambda z: torch.linalg.vector_norm(z),
    "scatter_add": lambda z: torch.zeros(2, 1).scatter_add(1, torch.zeros(2, 3).long(), z),
    "index_add": lambda z: torch.zeros(1, 3).index_add(0, torch.tensor([0, 0]), z),
    "attention": lambda z: scaled_dot_product_attention(*(z.view(1, 1, 6, 1),) * 3),
    "attention_heads": lambda z: scaled_dot_product_attention(*(z.view(1, 6, 1),) * 3),
    "group_norm": lambda z: group_norm(z.view(1, 6), 2),
    "pairwise": lambda z: torch.cdist(z, z)[:, 1],
    "quantile": lambda z: z.quantile(0.4, dim=-1),
}


def _source() -> Tensor:
    return torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]])


def _positions(function: Callable[[Tensor], Tensor]) -> np.ndarray | None:
    with Tape() as tape:
        z = tape.source("z", _source())
        value = tape.value_of(z)
        found = function(z)
        wanted = tape.value_of(found)
    assert not tape.escaped
    recording = Recording.of(tape, {value: z})
    cut = recording.cut([wanted])
    if cut.writes:
        cut, _ = flat(torch.func.functionalize(lambda *given: cut0(*given)), [recording.leaves[v].clone() for v in cut.given]) if (cut0 := cut) else None
        value, wanted = next((v for v, k in zip(cut.given, cut0.given) if k == value), -1), cut.wanted[0]
    read = Reader(cut, {value: np.arange(6, dtype=np.int32).reshape(SHAPE)})
    try:
        return np.broadcast_to(read(wanted), tuple(found.shape))
    except Unknown as e:
        print("unknown", e)
        return None


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
    assert found is not None
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


@pytest.mark.parametrize("name", [*KEPT, *MIXED, *ROUGH])
def test_nothing_is_missed(name: str) -> None:
    function = {**KEPT, **MIXED, **ROUGH}[name]
    found, truth = _positions(function), _truth(function)
    if found is None:
        return
    for i, index in np.argwhere(truth.reshape(6, -1)):
        assert found.reshape(-1)[index] in (i, MANY)


def test_independent_tensors_read_nothing() -> None:
    found = _positions(lambda z: torch.arange(4.0) + 1.0)
    assert found is not None
    assert (found == NONE).all()


