"""Classes of like-shaped sites and Q-nodes, which are stacked and served by one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pyro_bpq.critics.nets import Critic, CriticShape
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.graph.network import QNode
from pyro_bpq.graph.scg import CostNode, Plate
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.sums import Sums, subset_sums

T = TypeVar("T")


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
    def shows_value(self) -> bool:
        """Whether a critic reads the site's value."""
        return self.components is not None or self.has_moments

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
    positions: tuple[int, ...] = ()  # Their positions among all sites of the graph

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


@dataclass(frozen=True, eq=False)
class Constants:
    """Numbers that are the same in every step; they are made and copied to a device once, because each copy blocks."""

    _constants: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def made(self, name: Any, like: Tensor, make: Callable[[], T]) -> T:
        """What a function makes, once for the device and the type of a tensor."""
        key = (name, like.device, like.dtype)
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]

    def indices(self, name: Any, like: Tensor, given: Callable[[], Any]) -> Tensor:
        """The positions that a function gives, on the device of a tensor."""
        return self.made(name, like, lambda: torch.as_tensor(given(), dtype=torch.long).to(like.device))


@dataclass(frozen=True, eq=False)
class CrossedCosts(Constants):
    """Log-probabilities of like-shaped sites that are known given another particle's past."""

    k: int  # Position of the class of costs
    plates: tuple[Plate, ...]  # Its plates
    components: Components  # Finite components of the sites
    costs: Mapping[str, CostNode]  # The costs by name
    at: tuple[int, ...]  # Their positions in the class


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
    size: int  # Number of sites of the class
    contexts: tuple[ContextPlan, ...]  # The parts of the critics' inputs
    critic: Critic
    shape: CriticShape
    share: str | None = None  # Name under which the critic is shared, or `None`

    @cached_property
    def kind(self) -> str:
        """Kind of the critics' rows in the bank."""
        sizes = (self.shape.features, self.shape.components, self.shape.cardinality, self.shape.cells)
        # torch.compile does not find a formatted string in a dict.
        return " ".join(("critic", repr(self.critic), *map(str, sizes)))

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Key of each critic's row in the bank."""
        share = self.share
        return tuple(node.name if share is None else share + node.name[len(node.site) :] for node in self.nodes)

    @cached_property
    def is_whole(self) -> bool:
        """Whether each site of the class has one Q-node."""
        return self.sites == tuple(range(self.size))

    def pick(self, tensor: Tensor) -> Tensor:
        """Picks the rows of the Q-nodes' sites from a tensor with a leading axis of the class's sites."""
        return tensor if self.is_whole else tensor[self.indices("sites", tensor, lambda: self.sites)]

    def places(self, order: Mapping[str, int], like: Tensor) -> Tensor:
        """Positions of the Q-nodes in an order of names."""
        return self.indices("places", like, lambda: [order[node.name] for node in self.nodes])

    def window(self, k: int, values: Tensor) -> list[Tensor]:
        """The rows of values that each place in the window of context ``k`` shows the Q-nodes; zeros where none."""
        padded = torch.cat((values, torch.zeros_like(values[:1])))
        window = self.indices(("window", k), values, lambda: self.contexts[k].window)
        return [padded[window[:, w]] for w in range(window.shape[1])]

    def sum_to_sites(self, tensor: Tensor) -> Tensor:
        """Sums ``(Q, ...)`` over the Q-nodes of each site to ``(G, ...)``."""

        def members() -> Sums | None:
            own = [sum(1 << k for k, i in enumerate(self.sites) if i == site) for site in range(self.size)]
            return subset_sums(own, range(len(self.sites)), tensor)

        member = None if self.is_whole else self.made("members", tensor, members)
        return tensor if member is None else member @ tensor

    def rest(self, k: int, like: Tensor) -> Sums | None:
        """Matrix ``(Q, G)`` of the feature ``rest`` of context ``k``; ``None`` if no scope has members there."""

        def sums() -> Sums | None:
            rest, columns = self.contexts[k].rest or (), self.contexts[k].columns
            mask = sum(1 << column for column in columns)
            # The sum includes the members of the window, so that a count is one feature.
            scale = [max((bits & mask).bit_count(), 1) ** -0.5 for bits in rest]
            return subset_sums(rest, columns, like, scale)

        return self.made(("rest", k), like, sums)

    def take(self, chosen: Sequence[int]) -> QGroup:
        """The group of some of these Q-nodes, by position."""

        def some(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values[i] for i in chosen)

        rows = [*chosen]
        contexts = tuple(replace(p, window=p.window[rows], rest=p.rest and some(p.rest)) for p in self.contexts)
        return replace(self, nodes=some(self.nodes), sites=some(self.sites), contexts=contexts)
