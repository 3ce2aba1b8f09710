"""The nodes of a Backprop-Q network, and their update rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Average:
    """One summand of an update rule: the average over equivalent children."""

    children: tuple[str, ...]  # names of Q-nodes, or of costs (the roots)
    levels: tuple[int, ...] = ()  # by how many levels each child is discounted; empty if it is one for all of them


@dataclass(frozen=True, slots=True)
class QNode:
    """A Q-function at a stochastic node: ``Q = immediate (exact) + remote (learned)``."""

    name: str  # unique name in the network: the site's name if the site has one Q-node, else site and sources
    site: str  # name of its stochastic node
    scope: Sequence[str]  # variables that the learned part sees, in program order; empty if nothing is learned
    sources: Sequence[str]  # costs whose expected sum the Q-function predicts
    immediate: Sequence[str]  # the sources that are used exactly and never learned
    rule: tuple[Average, ...]  # the target of its learned part: a sum of averages over children

    @property
    def is_learned(self) -> bool:
        """Whether anything is left to learn besides the immediate costs."""
        return bool(self.rule)

    @property
    def remote(self) -> tuple[str, ...]:
        """The sources that the learned part predicts."""
        immediate = set(self.immediate)
        return tuple(cost for cost in self.sources if cost not in immediate)
