r"""The extra run at other values of sites while all other sites, their children too, keep their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from pyro_bpq.plan.flips import FlipPlan
from pyro_bpq.rollout.features import Components


@dataclass(frozen=True)
class HeldSite:
    """A site whose other values are compared while all other sites keep their values.

    Args:
        components: Its finite components.
        number: Number of components whose costs are evaluated; all of them, or some that are drawn.
        is_drawn: Whether the components that are evaluated are drawn.
        costs: The costs that read it and are evaluated.
        immediate: Those of ``costs`` that read no site downstream. Their mean over the site's own law is known.
        rest: The costs that read it and are not known at other values.
        children: The sites of the guide that read it.
        is_own_known: Whether its own log-probabilities of guide and model are among ``costs``, as sums over components.
        curvature: Whether curvatures predict the costs of components that are not evaluated.
    """

    components: Components
    number: int
    costs: tuple[str, ...]
    immediate: tuple[str, ...]
    rest: tuple[str, ...]
    children: tuple[str, ...]
    is_own_known: tuple[bool, bool] = (False, False)
    curvature: bool = True
    is_drawn: bool = False


@dataclass(frozen=True)
class SlopedCosts:
    """Costs of the model whose slopes are found in one backward pass.

    Args:
        costs: The costs.
        immediate: The sites that they are immediate costs of. To other sites none of them is one.
    """

    costs: tuple[str, ...]
    immediate: frozenset[str]


@dataclass(frozen=True)
class HeldPlan:
    """The extra run of guide and model at other values.

    Args:
        flips: Which rows flip which sites.
        sites: The sites that are flipped. A site whose children have unknown laws is not among them.
        asked: Those of them for which the user has chosen the estimator.
        groups: The model's costs that slopes predict.
    """

    flips: FlipPlan
    sites: Mapping[str, HeldSite]
    asked: frozenset[str] = frozenset()
    groups: tuple[SlopedCosts, ...] = ()

    @cached_property
    def group_of(self) -> Mapping[str, int]:
        """Numbers of the groups of sites that take other values in the same rows, from 0 on."""
        starts = sorted(set(self.flips.start.values()))
        return {name: starts.index(start) for name, start in self.flips.start.items()}

    @cached_property
    def rows_of_group(self) -> int:
        """The number of rows of the largest group."""
        return max(site.number * (site.components.cardinality - 1) for site in self.sites.values())

    @property
    def all_drawn(self) -> bool:
        """Whether components of all sites are drawn. A step then evaluates one random group of sites."""
        return all(site.is_drawn for site in self.sites.values())

    @property
    def rows(self) -> int:
        """The number of rows of the extra run, beside the sample."""
        return self.rows_of_group if self.all_drawn else self.flips.rows - 1

    @property
    def sloped(self) -> frozenset[str]:
        """Sites whose changes are predicted from slopes."""
        return frozenset(name for name, site in self.sites.items() if site.is_drawn and has_slopes(site.components))

    @property
    def curved(self) -> bool:
        """Whether curvatures are asked for, too."""
        return any(self.sites[name].curvature for name in self.sloped)


def has_slopes(components: Components) -> bool:
    """Whether costs may have slopes in values with these components: those of bits and of one-hot values."""
    return components.kind in ("bernoulli", "one_hot")
