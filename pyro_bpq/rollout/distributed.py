r"""Averages running statistics and critics' gradients over data-parallel processes.

Every process ("rank") runs its own rows of data. Statistics and gradients are means over rows. So the mean of the
joint batch is the mean over ranks, weighted by each rank's number of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError


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
        alike: dict[Any, list[Any]] = {}
        for name, tensor in tensors.items():
            alike.setdefault((tensor.device, tensor.dtype), []).append(name)
        found: dict[Any, Tensor] = {}
        for names in alike.values():
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
