r"""Immediate costs of finite sites, evaluated exactly by one extra run of the model.

Every component of a site is set to each of its other values in a dimension of its own, to the left of all
plates, while everything else keeps its sampled value. Sites that no evaluated cost reads together are
flipped in the same rows; the others get rows of their own.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_bpq.features import Components
from pyro_bpq.graph import StochasticComputationGraph
from pyro_bpq.rollout import Rollout, sum_to_plates
from pyro_bpq.tracing import TracedRun, cost_of_guide, cost_of_model

__all__ = ["FlipPlan", "flip_plan", "immediate_costs", "immediate_model_costs"]


@dataclass(frozen=True)
class FlipPlan:
    """Which rows of the extra run flip which site.

    Args:
        start: First row of each flipped site; row 0 is the sample.
        rows: Number of rows in all.
        costs: For each flipped site the model's sites whose costs are read off.
    """

    start: Mapping[str, int]
    rows: int
    costs: Mapping[str, tuple[str, ...]]


def immediate_costs(graph: StochasticComputationGraph) -> dict[str, tuple[str, ...]]:
    """For each stochastic node the costs that read nothing sampled later, in history form."""
    found: dict[str, list[str]] = {node.name: [] for node in graph.nodes}
    for cost in graph.costs:
        last = graph.last_variable(cost.name)
        if last is not None:
            found[last].append(cost.name)
    return {name: tuple(costs) for name, costs in found.items()}


def immediate_model_costs(graph: StochasticComputationGraph) -> dict[str, tuple[str, ...]]:
    """For each stochastic node its immediate costs of the model that can be read off row by row.

    They are immediate, belong to another site of the model, and have all plates of the node: flipping
    all its plate rows at once then leaves each row's cost its own.
    """
    found = {}
    for name, costs in immediate_costs(graph).items():
        plates = set(graph.node(name).plates)
        own = (cost_of_guide(name), cost_of_model(name))
        found[name] = tuple(
            cost
            for cost in costs
            if cost not in own and not cost.startswith("log q(") and plates <= set(graph.cost(cost).plates)
        )
    return found


def flip_plan(
    graph: StochasticComputationGraph,
    components: Mapping[str, Components],
    costs: Mapping[str, tuple[str, ...]],
) -> FlipPlan:
    """Assigns rows to sites by greedy colouring.

    Args:
        graph: The graph.
        components: Finite components of the sites to flip.
        costs: For each of them the costs to evaluate.

    Returns:
        The plan.
    """
    reads = {name: {p for cost in costs[name] for p in graph.cost(cost).parents} for name in components}
    colours: list[list[str]] = []
    for name in components:
        for members in colours:
            if all(m not in reads[name] and name not in reads[m] for m in members):
                members.append(name)
                break
        else:
            colours.append([name])
    start, rows = {}, 1
    for members in colours:
        for name in members:
            start[name] = rows
        rows += max(components[m].size * (components[m].cardinality - 1) for m in members)
    return FlipPlan(start, rows, {name: tuple(costs[name]) for name in components})


class _Substitute(Messenger):  # type: ignore[misc]
    """Sets the values of latent sites."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]
            msg["done"] = True


class Sandbox:
    """Undoes what the extra run does to global generators and to buffers of modules (batch statistics).

    Args:
        before: State of the global generator before the sampled run of the model.
        after: Its state after that run.

    Attributes:
        has_drawn: Whether something else was drawn than in the sampled run, as by dropout over more rows: the
            run is then not the sampled one with other values. Drawing the very same, as for initial values of
            parameters that are thrown away, does no harm.
    """

    def __init__(self, before: Tensor, after: Tensor) -> None:
        self.has_drawn = False
        self._before, self._after = before, after
        self._thread = threading.get_ident()
        self._buffers: dict[nn.Module, dict[str, Tensor | None]] = {}

    def __enter__(self) -> Sandbox:
        self._devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        self._states = self._generators()
        torch.set_rng_state(self._before)
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._lend_buffers)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        for module, buffers in self._buffers.items():
            module._buffers.update(buffers)
        cpu, *others = self._states
        now, *devices = self._generators()
        self.has_drawn = not (torch.equal(now, self._before) or torch.equal(now, self._after))
        self.has_drawn |= any(not torch.equal(old, new) for old, new in zip(others, devices, strict=True))
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, others, strict=True):
            torch.cuda.set_rng_state(state, device)

    def _generators(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]

    def _lend_buffers(self, module: nn.Module, _: object) -> None:
        if module._buffers and module not in self._buffers and threading.get_ident() == self._thread:
            self._buffers[module] = dict(module._buffers)
            # The originals are left untouched: autograd may hold them.
            lent = {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
            module._buffers.update(lent)


@torch.no_grad()
def flipped_costs(
    plan: FlipPlan,
    components: Mapping[str, Components],
    traced: Sequence[TracedRun],
    rollout: Rollout,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    graph: StochasticComputationGraph,
) -> dict[str, Tensor] | None:
    """Runs the model with flipped values and reads the immediate costs off.

    Args:
        plan: The rows.
        components: Finite components of the flipped sites.
        traced: The runs of the step.
        rollout: Their tensors.
        model: The model.
        args: Its arguments.
        kwargs: Its keyword arguments.
        graph: The graph.

    Returns:
        For each flipped site its immediate costs in nats, ``(M, plate dims, D, K)``; ``None`` if the
        model cannot be run with a dimension to the left of its plates: then its costs in the row of the
        sample differ from those of the sample, or it raises.
    """
    tables: dict[str, list[Tensor]] = {name: [] for name in components}
    for run in traced:
        rows = _run_flipped(plan, components, run, model, args, kwargs)
        if rows is None:
            return None
        for name, split in components.items():
            shape = rollout.batch_shape(graph.node(name).plates)
            if not rollout.is_vectorized:
                shape = (1, *shape[1:])
            total = rows["zero"].new_zeros(())
            for cost in plan.costs[name]:
                plates = graph.node(name).plates
                total = total + _reduce(rows[cost], graph.cost(cost).plates, plates, len(shape))
            index = split.index(run.run.sites[name].value, run.run.sites[name].fn)
            index = index.reshape(*(1,) * (len(shape) + 1 - index.dim()), *index.shape)
            tables[name].append(_table(total, index.expand(*shape, -1), split, plan.start[name]))
    return {name: torch.cat(parts) for name, parts in tables.items()}


def _run_flipped(
    plan: FlipPlan,
    components: Mapping[str, Components],
    traced: TracedRun,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Tensor] | None:
    """Costs ``(rows, batch)`` of the extra run, by name."""
    values = {
        name: site["value"]
        for name, site in traced.model_trace.nodes.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    values.update(traced.subsamples)
    for name, split in components.items():
        record = traced.run.sites[name]
        lead = traced.batch_ndim - (record.value.dim() - split.value_ndim)
        values[name] = _flip(record.value, record.fn, split, plan, name, lead)
    wanted = {cost for costs in plan.costs.values() for cost in costs}
    sandbox = Sandbox(*traced.rng)
    try:
        # The sampled run has been validated; its row is compared below.
        with sandbox, pyro.validation_enabled(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trace = poutine.trace(_Substitute(values)(model)).get_trace(*args, **kwargs)
            rows: dict[str, Tensor] = {}
            site: Any
            for name, site in trace.nodes.items():
                if site["type"] != "sample" or cost_of_model(name) not in wanted:
                    continue
                cost = site["fn"].log_prob(site["value"])
                rows[cost_of_model(name)] = -scale_and_mask(cost, site["scale"], site["mask"])
    except Exception:
        # Whatever the program raises: it does not broadcast, and the sampled run stands on its own.
        return None
    if sandbox.has_drawn or not wanted <= rows.keys():
        return None
    for name in wanted:
        if rows[name].dim() <= traced.batch_ndim:
            # It does not depend on what was flipped.
            rows[name] = rows[name].expand(plan.rows, *rows[name].shape)
    if not _same([rows[name][0] for name in wanted], [traced.run.costs[name].detach() for name in wanted]):
        return None
    rows["zero"] = next(iter(rows.values()))
    return rows


def _same(found: Sequence[Tensor], sampled: Sequence[Tensor]) -> bool:
    """Whether costs in the row of the sample are those of the sample, up to rounding."""
    if any(a.numel() != b.numel() for a, b in zip(found, sampled, strict=True)):
        return False
    left, right = (torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in (found, sampled))
    tolerance = 1e-3 if right.dtype == torch.float32 else 1e-8
    return bool(torch.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True))


def _flip(value: Tensor, fn: Any, split: Components, plan: FlipPlan, name: str, lead: int) -> Tensor:
    """Values ``(rows, 1.., batch, event)``: one component after the other set to its other values."""
    others = split.cardinality - 1
    steps = torch.arange(split.size * others, device=value.device)
    flipped = torch.zeros(plan.rows, split.size, dtype=torch.bool, device=value.device)
    flipped[plan.start[name] + steps, steps // others] = True
    if split.kind == "bernoulli":
        shape = (plan.rows, *(1,) * (lead + value.dim() - split.value_ndim), *split.event_shape)
        return torch.where(flipped.reshape(shape), 1 - value, value)
    index = split.index(value, fn)
    delta = torch.zeros_like(flipped, dtype=torch.long)
    delta[plan.start[name] + steps, steps // others] = steps % others + 1
    delta = delta.reshape(plan.rows, *(1,) * (lead + index.dim() - 1), split.size)
    return split.value((index + delta) % split.cardinality, fn).to(value.dtype)


def _reduce(cost: Tensor, source: Sequence[Any], target: Sequence[Any], ndim: int) -> Tensor:
    """Brings a cost ``(rows, batch)`` to ``(rows, M, plates)`` with the plates of the site."""
    cost = cost.reshape(cost.shape[0], *(1,) * (ndim + 1 - cost.dim()), *cost.shape[1:])
    return sum_to_plates(cost, source, target)


def _table(cost: Tensor, index: Tensor, split: Components, start: int) -> Tensor:
    """From costs by row to costs by component and value, ``(M, plates, D, K)``."""
    others = split.cardinality - 1
    flipped = cost[start : start + split.size * others]
    flipped = flipped.reshape(split.size, others, *cost.shape[1:])
    sample = cost[:1].unsqueeze(0).expand(split.size, 1, *cost.shape[1:])
    relative = torch.cat((sample, flipped), 1).movedim((0, 1), (-2, -1))
    relative = relative.expand(*index.shape, split.cardinality)
    values = torch.arange(split.cardinality, device=index.device)
    return relative.gather(-1, (values - index.unsqueeze(-1)) % split.cardinality)
