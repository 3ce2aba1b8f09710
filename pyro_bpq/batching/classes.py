"""Classes of like-shaped sites, costs and Q-nodes, which are stacked and served by one call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bpq.critics.nets import Critic
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.graph.network import QNode
from pyro_bpq.graph.scg import Plate
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.sums import Sums, subset_sums


class Relation(Enum):
    """A relation of a class of sites to a class of costs, sites or Q-nodes."""

    DOWNSTREAM = "downstream"  # costs downstream of a site, row by row of the plates
    CROSSING = "crossing"  # costs downstream of a site that one row of its plates may affect in other rows
    TABLED = "tabled"  # immediate costs that are known at every value of a site
    CROSSED = "crossed"  # costs downstream given another particle's past: under the own law, and at the own value
    LATER = "later"  # later sites whose whole control variate counts for a site
    LATER_OWN = "later own"  # later sites whose control variate counts in the part of their own log-probabilities
    LATER_MODEL = "later model"  # later sites whose control variate counts in the part of the model's costs
    LATER_LEARNED = "later learned"  # Q-nodes of later sites whose part of the control variate counts


class Known(str, Enum):
    """Immediate costs that are known at every value of a site: its own log-probabilities, or others of the model.

    Costs are summed in the order of the enumeration.
    """

    MODEL = "model"
    LOG_P = "p"
    LOG_Q = "q"


@dataclass(frozen=True)
class SiteSpec:
    """Shape and treatment of a site; sites with equal specs are stacked."""

    plates: tuple[Plate, ...]
    components: Components | None  # Its finite components, or `None`
    event_shape: tuple[int, ...]  # Shape of an event of its distribution
    estimator: Estimator
    critic: Critic | None = None  # Builds its critic, or `None`
    tabled: frozenset[Known] = frozenset()  # Kinds of its immediate costs that are known at every value
    has_params: bool = False  # Whether the critic sees the parameters of the site's distribution
    context: int = 0  # Number of context features given by the user
    # Name under which the critic is shared, or `None`. A shared critic sees the index in the site's name.
    share: str | None = None
    # Whether mean and variance replace missing finite components. The critic then reads the two centred powers of each
    # element.
    has_moments: bool = False
    by_component: bool = False  # Whether the estimator gets a cost-to-go for each component

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
    """Numbers that are the same in every step; they are copied to a device once, because each copy blocks."""

    _constants: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def constant(self, name: Any, given: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The given numbers, or the numbers that a given function returns, on a device."""
        key = (name, device, dtype)
        if key not in self._constants:
            self._constants[key] = torch.as_tensor(given() if callable(given) else given, dtype=dtype).to(device)
        return self._constants[key]


@dataclass(frozen=True, eq=False)
class CrossedCosts(Constants):
    """Log-probabilities of like-shaped sites that are known given another particle's past."""

    cls: CostClass
    k: int  # Position of that class
    components: Components  # Finite components of the sites
    at: tuple[int, ...]  # Positions of the costs in the class
    sites: Mapping[str, tuple[str, bool]]  # Site of each cost, and whether the cost is the guide's, by name of the cost

    def pick(self, costs: Sequence[Tensor]) -> Tensor:
        """Picks these costs from the stacked costs of all classes."""
        stacked = costs[self.k]
        return stacked[self.constant("at", self.at, stacked.device, torch.long)]


@dataclass(frozen=True)
class ContextPlan:
    """The critic inputs of a group of Q-nodes from the values of one class of sites."""

    source: int  # Position of the class
    # Positions `(Q, W)`, in the class, of the most recent members of each scope, latest first. Unused entries hold the
    # class's size.
    window: np.ndarray
    columns: tuple[int, ...]  # Positions of the class's sites in program order
    # All members of each scope, as bits. The sum of their values over the square root of their number is a feature.
    # `None` if the window holds all members.
    rest: tuple[int, ...] | None

    @property
    def slots(self) -> int:
        """Number of encoded values in the context."""
        return self.window.shape[1] + (self.rest is not None)


@dataclass(frozen=True, eq=False)
class QGroup(Constants):
    """Q-nodes of one class of sites, with critics of like-shaped inputs; they are evaluated together."""

    c: int  # Position of the class
    nodes: tuple[QNode, ...]  # The Q-nodes, in program order of their sites
    sites: tuple[int, ...]  # Position of each Q-node's site in the class
    contexts: tuple[ContextPlan, ...]  # The parts of the critics' inputs

    def rest(self, k: int, like: Tensor) -> Sums | None:
        """Matrix ``(Q, G)`` of the feature ``rest`` of context ``k``; ``None`` if no scope has members there."""
        key, plan = (("rest", k), like.device, like.dtype), self.contexts[k]
        if key not in self._constants:
            rest = plan.rest or ()
            mask = sum(1 << column for column in plan.columns)
            # The sum includes the members of the window, so that a count is one feature.
            scale = [max((bits & mask).bit_count(), 1) ** -0.5 for bits in rest]
            self._constants[key] = subset_sums(rest, plan.columns, like, scale)
        return self._constants[key]

    def pick(self, tensor: Tensor) -> Tensor:
        """Picks the rows of the Q-nodes' sites from a tensor with a leading axis of the class's sites."""
        if self.sites == tuple(range(len(tensor))):
            return tensor
        return tensor[self.constant("sites", self.sites, tensor.device, torch.long)]

    def take(self, chosen: Sequence[int]) -> QGroup:
        """The group of some of these Q-nodes, by position."""

        def some(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values[i] for i in chosen)

        contexts = tuple(
            replace(plan, window=plan.window[list(chosen)], rest=None if plan.rest is None else some(plan.rest))
            for plan in self.contexts
        )
        return QGroup(self.c, some(self.nodes), some(self.sites), contexts)
