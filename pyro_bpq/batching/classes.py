r"""What sites, costs and Q-nodes are stacked by: their shapes, and how one call serves many of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bpq.batching.kinds import Known
from pyro_bpq.critics.nets import Critic
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.graph.network import QNode
from pyro_bpq.graph.scg import Plate
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.sums import Sums, subset_sums


@dataclass(frozen=True)
class SiteSpec:
    """The shape of a site and the treatment of the site; sites with equal specs are stacked.

    Args:
        plates: Its plates.
        components: Its finite components, or ``None``.
        event_shape: Shape of an event of its distribution.
        estimator: Its gradient estimator.
        critic: How to build its critic, or ``None`` for none.
        tabled: Kinds of its immediate costs that are known at every value.
        has_params: Whether the critic sees the parameters of the site's distribution.
        context: Number of context features given by the user.
        share: Name under which the critic is shared, or ``None``. A shared critic sees the index in the site's name.
        by_component: Whether the estimator gets a cost-to-go for each component.
        has_moments: Whether mean and variance replace the finite components that the site lacks. The critic's values
            are then functions of the two centred powers of each element.
    """

    plates: tuple[Plate, ...]
    components: Components | None
    event_shape: tuple[int, ...]
    estimator: Estimator
    critic: Critic | None = None
    tabled: frozenset[Known] = frozenset()
    has_params: bool = False
    context: int = 0
    share: str | None = None
    has_moments: bool = False
    by_component: bool = False

    @property
    def parts(self) -> tuple[int, int]:
        """Number of components, and number of entries per component in a critic's table."""
        if self.components is not None:
            return self.components.size, self.components.cardinality
        return (math.prod(self.event_shape), 2) if self.has_moments else (0, 0)


@dataclass(frozen=True)
class SiteClass:
    """Sites with equal specs, in program order."""

    spec: SiteSpec
    names: tuple[str, ...]

    @property
    def value_ndim(self) -> int:
        """Number of event dimensions of a value."""
        return len(self.spec.event_shape)

    @property
    def width(self) -> int:
        """Number of features of an encoded value."""
        components = self.spec.components
        if components is None:
            return math.prod(self.spec.event_shape)
        return components.size * (components.cardinality if components.cardinality > 2 else 1)


@dataclass(frozen=True)
class CostClass:
    """Costs with the same plates."""

    plates: tuple[Plate, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Constants:
    """Holds numbers that are the same in every step; copies them to a device once, as each copy blocks."""

    _constants: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def constant(self, name: Any, given: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The given numbers, or the result of a given function, on a device."""
        key = (name, device, dtype)
        if key not in self._constants:
            self._constants[key] = torch.as_tensor(given() if callable(given) else given, dtype=dtype).to(device)
        return self._constants[key]


@dataclass(frozen=True, eq=False)
class CrossedCosts(Constants):
    """Log-probabilities of like-shaped sites that are known given another particle's past.

    Args:
        cls: The class of these costs.
        k: Position of that class.
        components: Finite components of the sites.
        at: Positions of the costs in the class.
        sites: For each cost, by name, its site and whether the cost is the guide's.
    """

    cls: CostClass
    k: int
    components: Components
    at: tuple[int, ...]
    sites: Mapping[str, tuple[str, bool]]

    def pick(self, costs: Sequence[Tensor]) -> Tensor:
        """Picks these costs from the stacked costs of all classes."""
        stacked = costs[self.k]
        return stacked[self.constant("at", self.at, stacked.device, torch.long)]


@dataclass(frozen=True)
class ContextPlan:
    """How the context of a batch of Q-nodes is made from the values of one class of sites.

    Args:
        source: Position of the class.
        window: Positions ``(Q, W)``, in the class, of the most recent members of each scope, latest first. Unused
            entries hold the class's size.
        columns: Positions of the members of the class in program order.
        rest: All members of each scope, as bits. Their sum over the square root of their number is a feature. ``None``
            if the window holds all members.
    """

    source: int
    window: np.ndarray
    columns: tuple[int, ...]
    rest: tuple[int, ...] | None

    @property
    def slots(self) -> int:
        """Number of encoded values in the context."""
        return self.window.shape[1] + (self.rest is not None)


@dataclass(frozen=True, eq=False)
class QGroup(Constants):
    """Q-nodes of one class of sites that critics predict from like-shaped contexts, evaluated together.

    Args:
        c: Position of the class.
        nodes: The Q-nodes, in program order of their sites.
        sites: Position of each Q-node's site in the class.
        contexts: How the contexts of the Q-nodes are made.
    """

    c: int
    nodes: tuple[QNode, ...]
    sites: tuple[int, ...]
    contexts: tuple[ContextPlan, ...]

    def rest(self, k: int, like: Tensor) -> Sums | None:
        """Matrix ``(Q, G)`` that sums the members of each scope over the square root of their number.

        ``None`` if no scope has members in context ``k``.
        """
        key, plan = (("rest", k), like.device, like.dtype), self.contexts[k]
        if key not in self._constants:
            rest = plan.rest or ()
            mask = sum(1 << column for column in plan.columns)
            # The sum runs over all members, so a count is one feature, and not five: the window and the older members.
            scale = [max((bits & mask).bit_count(), 1) ** -0.5 for bits in rest]
            self._constants[key] = subset_sums(rest, plan.columns, like, scale)
        return self._constants[key]

    def pick(self, tensor: Tensor) -> Tensor:
        """Picks the entries of the Q-nodes' sites from a tensor with a leading axis of the class's sites."""
        if self.sites == tuple(range(len(tensor))):
            return tensor
        return tensor[self.constant("sites", self.sites, tensor.device, torch.long)]

    def take(self, chosen: Sequence[int]) -> QGroup:
        """The group of some of these Q-nodes, by position."""
        contexts = [
            replace(
                plan,
                window=plan.window[list(chosen)],
                rest=None if plan.rest is None else tuple(plan.rest[i] for i in chosen),
            )
            for plan in self.contexts
        ]
        nodes, sites = tuple(self.nodes[i] for i in chosen), tuple(self.sites[i] for i in chosen)
        return QGroup(self.c, nodes, sites, tuple(contexts))
