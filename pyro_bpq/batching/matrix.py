r"""Matrices of zeros and ones that sum stacked tensors, class by class, for the sites of a class.

Three of them say what is left of a site's cost-to-go (:class:`~pyro_bpq.batching.layout.Layout`):

    R_X = Σ_f counted[X, f] f - Σ_f known[X, f] f - Σ_A predicted[X, A] A
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_bpq.batching.classes import Constants, SiteClass
from pyro_bpq.graph.scg import Plate
from pyro_bpq.rollout.runs import Rollout, Run, sum_to_plates
from pyro_bpq.rollout.sums import Sums, in_single, subset_sums

if TYPE_CHECKING:
    from pyro_bpq.batching.layout import Layout


class Columns(NamedTuple):
    """Tensors with the same plates, which are stacked."""

    plates: tuple[Plate, ...]
    bits: Sequence[int]  # the bit of each tensor in a set of tensors
    over_rows: bool = False  # whether a site gets the sum over all rows of its plates


@dataclass(frozen=True, eq=False)
class Matrix(Constants):
    """For each site a set of tensors; the matrices from classes of tensors to classes of sites are made once."""

    classes: Sequence[SiteClass]
    positions: Sequence[Sequence[int]]  # the positions of the sites of each class in program order
    sets: Sequence[int]  # the tensors that are summed for each site, in program order, as bits
    columns: Sequence[Columns]
    # Factors of the entries for a class of sites and columns, where they are not one
    factors: Mapping[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def block(self, c: int, k: int, like: Tensor) -> Sums | None:
        """The matrix from the ``k``-th columns to the sites of class ``c``; ``None`` if it is zero."""

        def made() -> Sums | None:
            found = subset_sums([self.sets[i] for i in self.positions[c]], self.columns[k].bits, like)
            if found is None or (c, k) not in self.factors:
                return found
            return found.times(torch.as_tensor(self.factors[c, k], dtype=like.dtype).to(like.device))

        return self.made((c, k), made, like.device, like.dtype)

    def sums(self, c: int, stacked: Sequence[Tensor | None]) -> Tensor | None:
        """The sum for each site of class ``c``, broadcastable to ``(G, M, plates)``; ``None`` if it is empty.

        There is one tensor ``(columns, M, plates)`` for each of the columns, or ``None`` for zeros.
        """
        total = None
        for k, tensor in enumerate(stacked):
            block = None if tensor is None else self.block(c, k, tensor)
            if tensor is not None and block is not None:
                kept = () if self.columns[k].over_rows else self.classes[c].spec.plates
                term = block @ sum_to_plates(tensor, self.columns[k].plates, kept)
                total = term if total is None else total + term
        return total


def stack_costs(layout: Layout, rollout: Rollout) -> list[Tensor]:
    """Stacks the costs of a rollout per class of costs, ``(costs, M, plates)`` each, detached.

    They are in nats, and in single precision at least: their squares overflow in half precision.
    """
    return [
        rollout.stack(lambda run, name: in_single(run.costs[name].detach()), cls.names, cls.plates)
        for cls in layout.cost_classes
    ]


def cost_to_go(layout: Layout, costs: Sequence[Tensor], c: int, like: Tensor) -> Tensor:
    """The cost-to-go ``C_X`` of every site of a class, shaped like ``like``, ``(G, M, plates)``, in nats."""
    total, none = layout.counted.sums(c, (*costs, *costs)), torch.zeros_like(like)
    return none if total is None else none + total


def component_cost_to_go(layout: Layout, rollout: Rollout, c: int, joint: Tensor) -> Tensor:
    """The cost-to-go of each component, ``(G, M, plates, D)``, in nats.

    It is the part ``joint``, ``(G, M, plates)``, that all components of a site share, and the costs that the sites of
    the rollout charge to single components.
    """
    cls = layout.classes[c]

    def charged(run: Run, name: str) -> Any:
        return run.sites[name].charged

    return joint.unsqueeze(-1) + rollout.stack(charged, cls.names, cls.spec.plates, 1)
