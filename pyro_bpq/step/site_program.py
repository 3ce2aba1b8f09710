"""Costs-to-go of sites at other values, from further runs of the program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_bpq.errors import BPQError, BPQWarning, UnsupportedProgramError
from pyro_bpq.rollout.runs import Run

if TYPE_CHECKING:
    from pyro_bpq.step.signals import Signals


def slope_of(runs: Sequence[Run], costs: Sequence[str], leaf: Tensor) -> Tensor:
    """The gradient of a sum of costs to a value of a site; zero if there is none."""
    with torch.enable_grad():
        total = sum((run.costs[cost].sum() for run in runs for cost in costs), leaf.new_zeros(()))
    if not total.requires_grad:
        return torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(total, leaf, materialize_grads=True)
    return gradient


@dataclass(eq=False)
class SiteProgramRuns:
    """A :class:`~pyro_bpq.estimators.base.SiteProgram` for a class of sites, which takes a run for each site.

    Args:
        signals: The tensors of the rollout, and what runs the program at other values.
        c: Position of the class.
        downstream: For each site, the runs in which sites downstream of it keep their values. ``None`` draws these
            sites afresh.
        means: Whether sites downstream that are not held take their means.
    """

    signals: Signals
    c: int
    downstream: Sequence[tuple[Run, ...] | None] | None = None
    means: bool = False

    def __post_init__(self) -> None:
        self.layout, self.batch, self.rerun = self.signals.layout, self.signals.batches[self.c], self.signals.rerun
        self.names, self.generator = self.batch.cls.names, self.rerun.generator

    @property
    def value(self) -> Tensor:
        """The sampled values, detached."""
        return self.batch.value

    @property
    def rows_meet(self) -> bool:
        """Whether a cost of one plate row reads another row."""
        return any(self.layout.rows_meet(name) for name in self.names)

    def cost(self, value: Tensor) -> Tensor:
        """Costs-to-go at other values, detached."""
        return torch.stack([self._cost_to_go(self._run(i, own))[i] for i, own in enumerate(value.detach())])

    @torch.no_grad()
    def sampled_cost(self) -> Tensor:
        """Costs-to-go at the sampled values of all sites, by the same way as at other values."""
        return replace(self, downstream=[self.batch.rollout.runs] * len(self.names)).cost(self.value)

    def independent(self) -> Tensor:
        """Costs-to-go of a run that draws every site afresh, detached; by component if the estimator wants that."""
        runs = self.rerun.fresh
        total = self._cost_to_go(runs)
        if not self.batch.cls.spec.by_component:
            return total
        return self.layout.component_cost_to_go(replace(self.batch.rollout, runs=runs), self.c, total)

    def gradient(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Costs-to-go at other values, and the gradient of all costs downstream."""
        costs, gradients = [], []
        for i, name in enumerate(self.names):
            leaf = value[i].detach().requires_grad_()
            runs = self._run(i, leaf)
            wanted = self.layout.graph.downstream_costs(name)
            gradients.append(slope_of(runs, wanted, leaf))
            costs.append(self._cost_to_go(runs)[i])
        return torch.stack(costs), torch.stack(gradients)

    def slope(self) -> Tensor:
        """The gradient of all costs downstream at the sampled values."""
        rollout, cls = self.batch.rollout, self.batch.cls
        try:
            if any(self.layout.graph.descendants(name) for name in self.names):
                return self.gradient(self.value)[1]
            slopes = {id(run): own for run, own in zip(rollout.runs, self.rerun.slopes, strict=True)}
            return rollout.stack(lambda run, name: slopes[id(run)][name], self.names, cls.spec.plates, cls.value_ndim)
        except BPQError:
            raise
        except RuntimeError as error:
            # Estimates stay unbiased with any slopes.
            warnings.warn(
                f"Sites {', '.join(map(repr, self.names))}: the program failed while their values carried gradients; "
                f"slopes of its costs are taken for zero: {error} Write z.detach() where a value leaves torch, or use "
                "an estimator without slopes there, e.g. ScoreFunction().",
                BPQWarning,
                stacklevel=2,
            )
            return torch.zeros_like(self.value)

    def held(self, value: Tensor) -> SiteProgramRuns:
        """The program in which sites downstream keep the values that they take in a run at ``value``."""
        descendants, pairs = self.layout.graph.descendants, zip(self.names, value.detach(), strict=True)
        held = [self.rerun(name, own) if descendants(name) else None for name, own in pairs]
        return replace(self, downstream=held, means=False)

    def mean_field(self) -> SiteProgramRuns:
        """The program in which sites downstream take their means."""
        return replace(self, downstream=None, means=True)

    def from_index(self, index: Tensor) -> Tensor:
        """Values from indices of finite components."""
        split, fn = self.batch.components, self.batch.rollout.runs[0].sites[self.names[0]].fn
        value = split.value(index, fn).to(self.value.dtype)
        return value.squeeze(-1) if split.kind == "support" else value

    def stack(self, pick: Callable[[Any], Tensor], event_ndim: int) -> Tensor:
        """Stacks a tensor of the sites' distributions."""
        return self.batch.stack(lambda site: pick(site.fn), event_ndim)

    def _run(self, i: int, value: Tensor) -> tuple[Run, ...]:
        """The runs with the ``i``-th site at a value."""
        held = None if self.downstream is None else self.downstream[i]
        return self.rerun(self.names[i], value, held, self.means)

    def _cost_to_go(self, runs: tuple[Run, ...]) -> Tensor:
        """Costs-to-go ``(G, M, plates)`` of other runs."""
        costs = self.layout.stack_costs(replace(self.batch.rollout, runs=runs))
        return self.layout.cost_to_go(costs, self.c, costs[0].new_zeros(self.signals.shape(self.c)))


def of_class(signals: Signals, c: int) -> SiteProgramRuns:
    """The program of a class of sites, for costs at other values."""
    cls = signals.layout.classes[c]
    if signals.rerun is None:
        raise UnsupportedProgramError(
            f"Sites {', '.join(map(repr, cls.names))}: sampled values steer this program, so {cls.spec.estimator} "
            "cannot compare its costs at other values; use AllAction() or ScoreFunction(RunningBaseline()) there."
        )
    return SiteProgramRuns(signals, c)
