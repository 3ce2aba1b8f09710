r"""Sums over subsets of stacked tensors, and means over processes.

Sums take memory that grows with the differences between the subsets.

The sums of the costs downstream of each of ``G`` sites are a ``G × n`` matrix ``M`` of zeros and ones, times the
stacked costs. In a chain, each site has all the costs of a later site and a few more. The rows then form a run:

    M = P S D.

``D`` holds the few new ones of each row, ``S`` takes cumulative sums along the runs, and ``P`` orders the rows. If
rows have few ones, the positions of the ones of ``M`` are stored instead. Both take memory and time linear in the
number of sites. A small matrix is stored dense.

Costs are summed in single precision at least (:func:`in_single`).

Running statistics and critics' gradients are means over data-parallel processes, too (:class:`Ranks`). Every process
("rank") runs its own rows of data. So the mean of the joint batch is the mean over ranks, weighted by each rank's
number of rows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.graph.bitsets import ones
from pyro_bpq.short import alike

# A matrix with at most DENSE entries, or with more than one entry in FULL to store, is stored dense.
DENSE = 1 << 13
FULL = 4
# Rows with at most FEW ones on average form no runs. A row may join only one of the RUNS latest runs.
FEW = 8
RUNS = 64


@dataclass(frozen=True)
class Sums:
    """A matrix ``(G, n)`` that sums stacked tensors."""

    shape: tuple[int, int]  # `(G, n)`
    dtype: torch.dtype  # type of the stacked tensors
    # The matrix, if it is small or full; else `None`, and the other fields define the matrix
    dense: Tensor | None = None
    columns: Tensor | None = None  # indices of the columns that each row sums, row after row
    starts: Tensor | None = None  # start of each row in `columns`, and the end of the last row
    weights: Tensor | None = None  # weight of each entry of `columns`; `None` for ones
    # Number of runs, and number of rows in each run; `None` if the rows form no runs
    runs: tuple[int, int] | None = None
    places: Tensor | None = None  # position of each row of the matrix in the runs
    scale: Tensor | None = None  # factor of each row of the matrix, or `None`

    def __matmul__(self, stacked: Tensor) -> Tensor:
        """``(G, n) @ (n, ...)``."""
        flat = stacked.reshape(self.shape[1], -1)
        return self._summed(flat).reshape(self.shape[0], *stacked.shape[1:])

    def _summed(self, flat: Tensor) -> Tensor:
        if self.dense is not None:
            return self.dense @ flat
        assert self.columns is not None
        total: Tensor = torch.nn.functional.embedding_bag(
            self.columns, flat, self.starts, mode="sum", per_sample_weights=self.weights, include_last_offset=True
        )
        if self.runs is not None:
            total = total.reshape(*self.runs, -1).cumsum(1).flatten(0, 1)[self.places]
        return total if self.scale is None else total * self.scale

    def to_dense(self) -> Tensor:
        """Returns the dense matrix."""
        if self.dense is not None:
            return self.dense
        assert self.columns is not None
        return self @ torch.eye(self.shape[1], dtype=self.dtype, device=self.columns.device)


def subset_sums(
    rows: Sequence[int], columns: Sequence[int], like: Tensor, scale: Sequence[float] | None = None
) -> Sums | None:
    """The matrix that sums stacked tensors over subsets; ``None`` if no subset contains any of ``columns``.

    ``rows`` are the subsets, as bits, ``columns`` the bit of each stacked tensor, ``scale`` a factor of each sum.
    ``like`` gives dtype and device.
    """
    mask = sum(1 << column for column in columns)
    rows, shape = [row & mask for row in rows], (len(rows), len(columns))
    if not any(rows):
        return None
    factor = None if scale is None else torch.as_tensor(scale, dtype=like.dtype).unsqueeze(1).to(like.device)
    runs, length, new = _shortest(rows) if shape[0] * shape[1] > DENSE else ([], 0, [])
    if not runs or FULL * _size(new) > shape[0] * shape[1]:
        dense = torch.as_tensor(_bit_matrix(rows, columns)).to(like.dtype).to(like.device)
        return Sums(shape, like.dtype, dense if factor is None else dense * factor)
    at = {column: j for j, column in enumerate(columns)}
    found = _sparse(shape, [[at[bit] for bit in ones(bits)] for bits in new], None, like)
    place = {i: r * length + k for r, run in enumerate(runs) for k, i in enumerate(run)}
    order = [place[i] for i in range(len(rows))]
    if order == list(range(len(new))) and length == 1:
        return replace(found, scale=factor)
    places = torch.tensor(order).to(like.device)
    return replace(found, runs=(len(runs), length), places=places, scale=factor)


def weighted_sums(shape: tuple[int, int], entries: Iterable[tuple[int, int, float]], like: Tensor) -> Sums:
    """The matrix with these entries ``(row, column, weight)``; entries at the same position add up."""
    rows: list[list[tuple[int, float]]] = [[] for _ in range(shape[0])]
    for i, j, weight in entries:
        rows[i].append((j, weight))
    found = _sparse(shape, [[j for j, _ in row] for row in rows], [weight for row in rows for _, weight in row], like)
    return found if shape[0] * shape[1] > DENSE else replace(found, dense=found.to_dense())


def _sparse(shape: tuple[int, int], rows: list[list[int]], weights: list[float] | None, like: Tensor) -> Sums:
    starts = np.cumsum([0, *map(len, rows)])
    columns = torch.tensor([j for row in rows for j in row], dtype=torch.long)
    given = None if weights is None else torch.tensor(weights, dtype=like.dtype).to(like.device)
    return Sums(shape, like.dtype, None, columns.to(like.device), torch.as_tensor(starts).to(like.device), given)


def _shortest(rows: Sequence[int]) -> tuple[list[list[int]], int, list[int]]:
    """Returns runs of rows (long ones, or single rows), their length, and the bits that each row adds."""
    alone = [[i] for i in range(len(rows))], 1, list(rows)
    if _size(rows) <= FEW * len(rows):
        return alone
    runs = _runs(rows)
    length = max(map(len, runs))
    new = []
    for run in runs:
        new += [rows[run[0]], *(rows[i] & ~rows[before] for before, i in pairwise(run))]
        new += [0] * (length - len(run))
    # If most runs are short, most of their places are empty padding.
    return (runs, length, new) if len(new) <= 4 * len(rows) and _size(new) < _size(rows) else alone


def _size(rows: Sequence[int]) -> int:
    return sum(row.bit_count() for row in rows)


def _runs(rows: Sequence[int]) -> list[list[int]]:
    """Groups rows into runs of growing sets; a row joins the run to which it adds the fewest bits."""
    runs: list[list[int]] = []
    for i in sorted(range(len(rows)), key=lambda i: rows[i].bit_count()):
        fitting = [run for run in runs[-RUNS:] if not rows[run[-1]] & ~rows[i]]
        if fitting:
            max(fitting, key=lambda run: rows[run[-1]].bit_count()).append(i)
        else:
            runs.append([i])
    return runs


def _bit_matrix(rows: Sequence[int], columns: Sequence[int]) -> np.ndarray:
    """Returns a matrix with the bits ``columns`` of each int in ``rows``."""
    length = max(columns) // 8 + 1
    data = b"".join(bits.to_bytes(length, "little") for bits in rows)
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8).reshape(len(rows), length), axis=1, bitorder="little")
    return bits[:, list(columns)].astype(np.float32)


def total(values: Sequence[Tensor]) -> Tensor:
    """The sum of tensors; zero for none. That of many numbers is one operator."""
    if len(values) > 2 and not any(value.dim() for value in values):
        return torch.stack([*values]).sum()
    return sum(values[1:], values[0]) if values else torch.zeros(())


def in_single(value: Tensor) -> Tensor:
    """A value in single precision at least: in half precision squares overflow, and torch solves no systems."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def common_type(*values: Tensor) -> torch.dtype:
    """The type that numbers of all values can have."""
    return functools.reduce(torch.promote_types, (value.dtype for value in values))


@dataclass(frozen=True)
class Ranks:
    r"""The processes that train one set of critics together, each on its own share of the data.

    If ``torch.distributed`` is initialised with more than one process, critics and running statistics learn from the
    joint batch in each step, on every rank:

    .. math:: \bar x = \sum_r n_r x_r \Big/ \sum_r n_r

    Here ``x_r`` is a running moment over the ``n_r`` samples (particles times plate rows) of rank ``r``. The critics'
    gradients are averaged the same way. So the state of critics and statistics is the same on all ranks. All ranks
    must take their training steps together and reach the same sites. Their shares of the data need not be equal.
    ``DistributedDataParallel`` averages the gradients of model and guide.

    Args:
        group: A process group; ``None`` for all processes. An ELBO that holds a group cannot be pickled or copied.
    """

    group: Any = None

    @property
    def size(self) -> int:
        """Number of processes; 1 if there are no others."""
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        # get_world_size() returns -1 in a process outside the group.
        return max(dist.get_world_size(self.group), 1)

    @torch.no_grad()
    def mean(self, value: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """Returns the mean over the samples of all ranks, and their number, from the mean over those of this rank."""
        sent = torch.cat((value.detach().reshape(-1) * samples, value.new_full((1,), samples)))
        dist.all_reduce(sent, group=self.group)
        return (sent[:-1] / sent[-1]).reshape(value.shape), sent[-1]

    def average(self, tensors: Mapping[Any, Tensor], samples: int = 1) -> dict[Any, Tensor]:
        """Returns the means of several tensors, with one exchange per device and dtype."""
        found: dict[Any, Tensor] = {}
        for names in alike((name, (tensor.device, tensor.dtype)) for name, tensor in tensors.items()).values():
            parts = [tensors[name] for name in names]
            joint, _ = self.mean(torch.cat([part.detach().reshape(-1) for part in parts]), samples)
            split = torch.split(joint, [part.numel() for part in parts])
            found |= {name: new.reshape(part.shape) for name, new, part in zip(names, split, parts, strict=True)}
        return {name: found[name] for name in tensors}

    def average_found(self, found: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the mean of each tensor over the ranks that have it.

        ``known`` has tensors of the same shapes for all names, known to all ranks in the same order.
        """
        if not known:
            return {}
        like = next(iter(known.values()))
        has = like.new_tensor([float(name in found) for name in known])
        total = self.average({"": has, **{n: found.get(n, torch.zeros_like(like)) for n, like in known.items()}})
        shares = dict(zip(known, total[""].tolist(), strict=True))
        return {name: total[name] / share for name, share in shares.items() if share}

    def agree(self, structure: Iterable[str], is_finite: Tensor) -> bool:
        """Whether all ranks have a finite loss; checks that structures match, so that later exchanges match.

        ``structure`` is the step number, sites and critics that this rank is about to learn from, as text.

        Raises:
            UnsupportedProgramError: If the structures differ, on all ranks.
        """
        # The digest has 48 bits, which a float64 holds exactly.
        digest = float(int(hashlib.sha256("\n".join(structure).encode()).hexdigest()[:12], 16))
        sent = torch.tensor([digest, -digest, 1.0], dtype=torch.float64).to(is_finite.device)
        sent[2] = is_finite
        dist.all_reduce(sent, dist.ReduceOp.MIN, group=self.group)
        least, most, finite = sent.tolist()
        if least != -most:
            raise UnsupportedProgramError(
                "The processes of this group are about to learn from different sites, critics or numbers of steps. All "
                "must take the same training steps, from the same state; where sampled values or data decide which "
                "sites there are, write learner=CriticLearner(ranks=None): each process then has critics of its own."
            )
        return bool(finite)


def joint_mean(ranks: Ranks | None, value: Tensor, samples: int) -> tuple[Tensor, Tensor | int]:
    """Returns ``ranks.mean(...)``, or the given value and number if ``ranks`` is ``None``."""
    return (value, samples) if ranks is None else ranks.mean(value, samples)


def writes_of_ranks(ranks: Ranks | None, writes: Sequence[Any], samples: int) -> list[Any]:
    """Returns writes to a bank, with their values replaced by the means over the samples of all ranks."""
    if ranks is None or not writes:
        return list(writes)
    values = ranks.average({i: write[-1] for i, write in enumerate(writes)}, samples)
    return [(*write[:-1], values[i]) for i, write in enumerate(writes)]
