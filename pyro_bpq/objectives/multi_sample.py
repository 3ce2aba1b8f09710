r"""The samples of a multi-sample bound as a rollout with one cost each, which their sites share.

All samples of a bound have a say in each cost, so none of them may be another's baseline: a rollout has one
particle for each independent bound, and its samples lie in a dimension between particles and plates. The one cost
comes after the last site, and what a critic sees follows from what was sampled before its site, whatever the program
does later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.batching.layout import Layout
from pyro_bpq.errors import UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.estimators import AllAction, Estimator, Pathwise, QProp, ScoreFunction
from pyro_bpq.estimators.base import SiteInfo
from pyro_bpq.graph.network import Average, BackpropQNetwork, QNode
from pyro_bpq.graph.scg import CostNode, Plate, StochasticComputationGraph, StochasticNode
from pyro_bpq.plan.planner import Planner
from pyro_bpq.rollout.runs import Rollout, Run, SiteRecord
from pyro_bpq.tracing.config import SiteOptions
from pyro_bpq.tracing.traced_run import TracedRun

_COST = "bound"


@dataclass(frozen=True)
class BoundRollout(Rollout):
    """The runs of several bounds of several samples each; tensors are stacked to ``(G, bounds, samples, plates)``."""

    num_samples: int = 1  # number of samples of one bound; ``num_particles`` is the number of bounds

    def batch_shape(self, plates: Sequence[Plate]) -> tuple[int, ...]:
        """Shape ``(bounds, samples, plate dims...)`` of a site or cost with these plates."""
        bounds, *sizes = super().batch_shape(plates)
        return (bounds, self.num_samples, *sizes)

    def stack(
        self,
        pick: Callable[[Run, str], Tensor],
        names: Sequence[str],
        plates: Sequence[Plate],
        event_ndim: int = 0,
    ) -> Tensor:
        """Stacks one tensor of each named site or cost, ``(len(names), bounds, samples, plate dims..., event...)``."""
        total = self.num_particles * self.num_samples
        flat = Rollout(self.runs, total, self.plate_sizes, self.plate_ndim, self.is_vectorized)
        return flat.stack(pick, names, plates, event_ndim).unflatten(1, (self.num_particles, self.num_samples))


def bound_rollout(
    traced: Sequence[TracedRun],
    costs: Tensor,
    others: Tensor,
    rows: Plate | None,
    plate_ndim: int,
    is_vectorized: bool,
) -> BoundRollout:
    """The runs of some bounds, with one cost each.

    Args:
        traced: One run per sample, or a single vectorised one.
        costs: Cost-to-go of the sites of each sample, ``(bounds, samples, rows)`` in nats, detached.
        others: What critics see of the other samples of the bound, ``(bounds, samples, rows, features)``, detached.
        rows: Plate of the rows, or ``None`` where there is one.
        plate_ndim: Number of plate dimensions.
        is_vectorized: Whether the one run holds all samples.
    """
    if any(run.key != traced[0].key for run in traced[1:]):
        raise UnsupportedProgramError(
            "The samples of a bound have different sites, so that critics cannot tell them apart from their values; "
            "write TraceBackpropQ_IWAE(critic=None) and leave infer={'bpq': {'critic': ...}} out."
        )
    shape = [1] * plate_ndim
    if rows is not None:
        shape[rows.dim] = costs.shape[-1]
    total = costs.shape[0] * costs.shape[1]
    cost, seen = costs.reshape(total, *shape), others.reshape(total, *shape, others.shape[-1])
    parts = [(cost, seen)] if is_vectorized else list(zip(cost.unbind(0), seen.unbind(0), strict=True))
    runs = tuple(_run(one.run, *part) for one, part in zip(traced, parts, strict=True))
    sizes: Mapping[Plate, int] = traced[0].plate_sizes
    return BoundRollout(runs, costs.shape[0], sizes, plate_ndim, is_vectorized, costs.shape[1])


def _run(run: Run, cost: Tensor, others: Tensor) -> Run:
    """A run with one cost, whose sites tell critics of the other samples."""

    def context(record: SiteRecord) -> Tensor:
        if record.context is None:
            return others
        lead = torch.broadcast_shapes(record.context.shape[:-1], others.shape[:-1])
        return torch.cat([part.expand(*lead, -1) for part in (record.context.to(others.dtype), others)], -1)

    sites = {name: replace(record, context=context(record)) for name, record in run.sites.items()}
    return replace(run, sites=sites, costs={_COST: cost})


@dataclass(frozen=True)
class BoundPlanner(Planner):
    """Options of a multi-sample bound that decide what is done at a site."""

    num_bounds: int = 1  # number of independent bounds
    num_features: int = 0  # number of features of the other samples that critics see

    def choose(self, site: SiteInfo, options: SiteOptions) -> Estimator:
        """The estimator of a site: its own option, else by whether it is reparameterised and has a critic."""
        has_critic = options.critic is not False and (options.critic or self.critic) is not None
        chosen = options.estimator or self._default(site, options, has_critic)
        reason = chosen.unsupported(replace(site, num_particles=self.num_bounds))
        reason = reason or _unsupported(chosen, has_critic, bool(options.critic))
        if reason is None and options.baseline is not None:
            reason = "TraceBackpropQ_IWAE has none of Pyro's baselines; leave them out"
        if reason is not None:
            raise UnsupportedSiteError(f"Site {site.name!r} ({site.distribution}): {reason}.")
        return chosen

    def _default(self, site: SiteInfo, options: SiteOptions, has_critic: bool) -> Estimator:
        if site.has_rsample:
            return Pathwise()
        if not has_critic:
            return ScoreFunction()
        if site.components is None:
            return QProp()
        is_small = site.components.cardinality <= self.max_support or options.critic is not None
        return AllAction() if is_small else ScoreFunction()

    def layout(self, traced: TracedRun, rows: Plate | None) -> Layout:
        """The batching of the sites of a bound."""
        names = tuple(traced.run.sites)
        plates = traced.plates
        nodes = tuple(StochasticNode(n, (), plates[n]) for n in names)
        cost = CostNode(_COST, names, () if rows is None else (rows,))
        graph = StochasticComputationGraph(nodes, (cost,))
        specs = {}
        for name in names:
            estimator = self.choose(traced.infos[name], traced.options[name])
            if estimator.is_pathwise and traced.run.sites[name].score is not None:
                # Partly reparameterised (rejection sampling): the rest of its gradient is a score-function term.
                estimator = ScoreFunction()
            critic = self._critic(traced, name, estimator)
            spec = self._spec(traced, name, estimator, critic, frozenset())
            specs[name] = replace(spec, has_params=True, context=spec.context + self.num_features)
        has_critics = any(spec.critic is not None for spec in specs.values())
        return Layout(graph, _network(graph) if has_critics else None, specs, {}, is_steered=True)


def _unsupported(estimator: Estimator, has_critic: bool, chose_critic: bool) -> str | None:
    """Reason why an estimator cannot serve a site of a multi-sample bound, or ``None`` if it can.

    ``chose_critic`` says whether the site's own options name a critic.
    """
    if not isinstance(estimator, (Pathwise, ScoreFunction, AllAction, QProp)):
        return (
            f"{estimator} is for one-sample objectives; write ScoreFunction() or Pathwise(), with critics AllAction() "
            "or QProp(), or leave it out"
        )
    if isinstance(estimator, (AllAction, QProp)) and not has_critic:
        return (
            f"without a critic {estimator} is for one-sample objectives; write "
            "TraceBackpropQ_IWAE(critic=MLPCritic()), or ScoreFunction()"
        )
    if isinstance(estimator, AllAction) and estimator.exact is True:
        return "exact=True needs costs that a run at other values gives, and a bound has none; write AllAction()"
    if isinstance(estimator, AllAction) and estimator.second_run:
        return "second_run=True needs a cost for each run, and the samples of a bound share one; write AllAction()"
    if isinstance(estimator, ScoreFunction) and chose_critic:
        return "ScoreFunction() reads no critic; leave out the estimator or the critic"
    return None


def is_plain(layout: Any) -> bool:
    """Whether no site has a critic, and each is pathwise or has the plain score function."""
    specs = layout.specs.values()
    return all(s.critic is None and (s.estimator.is_pathwise or s.estimator == ScoreFunction()) for s in specs)


def _network(graph: StochasticComputationGraph) -> BackpropQNetwork:
    """A Q-node per site, which backs up from the next one unless that has rows which would add up."""
    nodes: list[QNode] = []
    later, scope = None, tuple(node.name for node in graph.nodes)
    for t in reversed(range(len(scope))):
        node = graph.nodes[t]
        child = later.name if later is not None and set(later.plates) <= set(node.plates) else _COST
        nodes.append(QNode(node.name, node.name, scope[: t + 1], (_COST,), (), (Average((child,)),)))
        later = node
    return BackpropQNetwork(graph, tuple(nodes), "single", "history")
