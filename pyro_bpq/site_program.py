r"""What estimators may ask of the program: costs-to-go of sites at other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.cost_to_go import cost_to_go, stack_costs
from pyro_bpq.layout import Layout
from pyro_bpq.rollout import Rollout, Run
from pyro_bpq.site_batch import SiteBatch

__all__ = ["Rerun", "SiteProgramRuns"]

# Runs the program again with a site at another value ``(M, plates, event)``: what is sampled downstream of it
# is drawn afresh, everything else keeps its value.
Rerun = Callable[[str, Tensor], tuple[Run, ...]]


class SiteProgramRuns:
    """A :class:`~pyro_bpq.estimators.base.SiteProgram` that runs the program again, site after site.

    Args:
        layout: The layout.
        c: Position of the class of sites.
        batch: Its stacked tensors.
        rerun: Runs the program again.
        generator: Noise of the estimators.
    """

    def __init__(self, layout: Layout, c: int, batch: SiteBatch, rerun: Rerun, generator: torch.Generator) -> None:
        self.layout, self.c, self.batch = layout, c, batch
        self.rerun, self.generator = rerun, generator
        self.names = layout.classes[c].names
        self.value = batch.value
        self.rows_meet = any(layout.rows_meet(name) for name in self.names)

    def cost(self, value: Tensor) -> Tensor:
        """Costs-to-go at other values, detached."""
        value = value.detach()
        return torch.stack([self._costs(i, self.rerun(name, value[i])) for i, name in enumerate(self.names)])

    def gradient(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Costs-to-go at other values, and the gradient of all costs downstream; zero where there is none."""
        costs, gradients = [], []
        for i, name in enumerate(self.names):
            leaf = value[i].detach().requires_grad_()
            runs = self.rerun(name, leaf)
            wanted = self.layout.graph.downstream_costs(name)
            with torch.enable_grad():
                total = sum((run.costs[cost].sum() for run in runs for cost in wanted), leaf.new_zeros(()))
            gradient = None
            if total.requires_grad:
                (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
            gradients.append(torch.zeros_like(leaf) if gradient is None else gradient)
            costs.append(self._costs(i, runs))
        return torch.stack(costs), torch.stack(gradients)

    def from_index(self, index: Tensor) -> Tensor:
        """Values from indices of finite components."""
        split = self.batch.components
        if split.kind != "support":
            return split.value(index).to(self.value.dtype)
        fn = self.batch.rollout.runs[0].sites[self.names[0]].fn
        return split.value(index, fn).to(self.value.dtype).squeeze(-1)

    def stack(self, pick: Callable[[Any], Tensor], event_ndim: int) -> Tensor:
        """Stacks a tensor of the sites' distributions."""
        return self.batch.stack(lambda site: pick(site.fn), event_ndim)

    def _costs(self, i: int, runs: tuple[Run, ...]) -> Tensor:
        old = self.batch.rollout
        rollout = Rollout(runs, old.num_particles, old.plate_sizes, old.plate_ndim, old.is_vectorized)
        costs = stack_costs(self.layout, rollout)
        like = costs[0].new_zeros(len(self.names), *self.batch.batch_shape)
        return cost_to_go(self.layout, costs, self.c, like)[i]
