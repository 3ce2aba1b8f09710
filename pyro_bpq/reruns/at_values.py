r"""Runs a program again with one site at another value, for estimators that compare values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.estimators.hindsight import Changes
from pyro_bpq.graph.scg import Plate, cost_of_guide, cost_of_model
from pyro_bpq.plan.held import HeldPlan
from pyro_bpq.plan.plan import Plan
from pyro_bpq.reruns.held_costs import HeldRun, held_costs, sums_of_costs
from pyro_bpq.reruns.predicted_costs import predicted_costs
from pyro_bpq.reruns.shared_backward import SharedBackward, shared_backward
from pyro_bpq.rollout.runs import Program, Rollout, Run
from pyro_bpq.step.site_program import gradient_to, slope_of
from pyro_bpq.record.components import Pattern, charge_sites
from pyro_bpq.tracing.sandbox import Sandbox
from pyro_bpq.tracing.substitute import Substitute, relaxed_log_prob
from pyro_bpq.tracing.traced_run import TracedRun, cost_of_site
from pyro_bpq.tracing.watch import detached, samples

# Traces a program (model, guide, args, kwargs) without tracking; ``put`` wraps model and guide.
Trace = Callable[..., TracedRun]


class Reruns:
    """Runs guide and model again with one site at another value.

    The sites downstream of it are drawn afresh, from a generator that belongs to the ELBO. All other sites keep
    their values. The runs change neither global generators nor module buffers.
    """

    def __init__(
        self,
        trace: Trace,
        programs: Sequence[Program],
        traced: Sequence[TracedRun],
        plan: Plan,
        generator: torch.Generator,
        share: float | None,
        held: HeldRun | None,
    ) -> None:
        self.trace, self.programs, self.traced = trace, programs, traced
        self.plan, self.generator, self.share = plan, generator, share
        self.held = held
        # The backward pass through the costs of each run, which all sites share; empty before it is asked for.
        self._led: list[SharedBackward] = []

    def with_plan(self, plan: Plan) -> Reruns:
        """The same runs, by another plan of the same graph."""
        other = copy.copy(self)
        other.plan = plan
        return other

    def __call__(
        self, name: str, value: Tensor, held: tuple[Run, ...] | None = None, means: bool = False
    ) -> tuple[Run, ...]:
        """Runs the program once more per run of the step.

        Args:
            name: The site.
            value: Its value ``(M, plate dims, event)``. If it requires a gradient, the costs have one to it.
            held: Runs that give the sites downstream their values. ``None`` draws these sites afresh.
            means: Whether sites downstream that are not held take their means instead, where they have one.
        """
        fresh = {name, *self.plan.graph.descendants(name)}
        # Estimators call this under no_grad(). A view that is made there has no gradient to the value.
        with torch.set_grad_enabled(value.requires_grad):
            values = value.split(1) if len(self.traced) > 1 else (value,)
            each = zip(values, held or [None] * len(values), self.programs, self.traced, strict=True)
            return tuple(self._run(name, fresh, means, *one) for one in each)

    def _run(
        self, name: str, fresh: set[str], means: bool, value: Tensor, held: Run | None, program: Any, traced: TracedRun
    ) -> Run:
        """One of these runs; gradients are enabled where the value requires one."""
        model, _, args, kwargs = program
        sites = traced.run.sites
        values: dict[str, Any] = {site: detached(record.value) for site, record in sites.items() if site not in fresh}
        if held is not None:
            values.update({site: detached(record.value) for site, record in held.sites.items() if site in fresh})
        values.update(traced.subsamples)
        own, relaxed = sites[name].value, frozenset[str]()
        values[name] = value.reshape(own.shape)
        if value.requires_grad:
            # A program may change the value in place, which autograd forbids for a leaf.
            values[name], relaxed = values[name].clone(), frozenset({name})
        else:
            values[name] = values[name].to(own.dtype)
        put = Substitute(values, relaxed, frozenset(fresh - {name}) if means else frozenset())
        with Sandbox(self._seed(), self.plan.has_buffers), pyro.validation_enabled(False):
            if len(fresh) == 1 and self._is_last(name, traced):
                again = _model_run(name, values[name], poutine.trace(put(model)).get_trace(*args, **kwargs), traced)
            else:
                again = self.trace(program, put=put).run
        return _with_all_costs(again, traced, name)

    def has_slope(self, name: str, rollout: Rollout, plates: Sequence[Plate]) -> bool:
        """Whether a cost besides the site's own log-probabilities has a gradient to the value of the site."""
        ndim = len(self.traced[0].run.sites[name].fn.event_shape)
        value = rollout.stack(lambda run, site: run.sites[site].value.detach(), [name], plates, ndim)[0]
        leaf = value.clone().requires_grad_()
        own = (cost_of_guide(name), cost_of_model(name))
        others = [cost for cost in self.plan.graph.downstream_costs(name) if cost not in own]
        return bool((slope_of(self(name, leaf), others, leaf) != 0).any())

    def slopes(self, name: str) -> tuple[Tensor, ...] | None:
        """The gradient of all downstream costs to the value of a site, for each run of the step.

        Returns:
            A detached tensor of the shape of the value for each run. ``None`` if a run has no leaf for the site.
        """
        if any(traced.run.sites[name].leaf is None for traced in self.traced):
            return None
        if not self._led:
            self._led = [shared_backward(traced.run, self.share) for traced in self.traced]
        pairs = zip(self._led, self.traced, strict=True)
        return tuple(led.slopes[name] + _own_slope(traced.run, name) for led, traced in pairs)

    def differentiable(self) -> list[Tensor]:
        """The differentiable costs of each run, for the surrogate; call it after all sites are done."""
        if self._led:
            return [led.differentiable for led in self._led]
        return [traced.run.differentiable for traced in self.traced]

    def fresh(self) -> tuple[Run, ...]:
        """Runs the program again for each run of the step, with all sites drawn afresh.

        Later calls return the same runs.
        """
        return self._fresh

    @cached_property
    def _fresh(self) -> tuple[Run, ...]:
        return tuple(self._fresh_run(*pair) for pair in zip(self.programs, self.traced, strict=True))

    def _fresh_run(self, program: Any, traced: TracedRun) -> Run:
        (model, guide, args, kwargs), put = program, Substitute(traced.subsamples)
        with Sandbox(self._seed(), self.plan.has_buffers), pyro.validation_enabled(False), torch.no_grad():
            if traced.only_costs or traced.elimination is not None:
                again = self.trace(program, put=put).run
            else:
                first = poutine.trace(put(guide)).get_trace(*args, **kwargs)
                second = poutine.trace(poutine.replay(put(model), trace=first)).get_trace(*args, **kwargs)
                again = replace(traced.run, costs={**_costs(first, True), **_costs(second, False)})
                again = charged(again, self.plan.patterns, first, second)
        return _with_all_costs(again, traced, next(iter(traced.run.sites)))

    def held_plan(self) -> HeldPlan | None:
        """Which sites take other values while all other sites keep their values."""
        return None if self.held is None else self.held.plan

    @property
    def runs_apart(self) -> bool:
        """Whether one particle of several can be run at other values."""
        return self.held is not None and all(traced.elimination is None for traced in self.traced)

    def at_other_values(
        self, drawn: Mapping[str, Tensor], rollout: Rollout, particle: Tensor | None, group: Tensor | None
    ) -> dict[str, Changes] | None:
        """Changes of laws and costs at these values, see :func:`~pyro_bpq.reruns.held_costs.held_costs`.

        Args:
            drawn: The components that are evaluated, for the sites where not all of them are.
            rollout: The tensors of the step's runs.
            particle: Index ``(1,)`` of the particle that is evaluated; ``None`` for all.
            group: Number of the only group of sites that takes other values; ``None`` for all.
        """
        assert self.held is not None
        return held_costs(self.held, self.traced, self.programs, rollout, drawn, particle, group)

    def predicted(self, rollout: Rollout, generator: torch.Generator | None) -> dict[str, Changes]:
        """Predicted changes, see :func:`~pyro_bpq.reruns.predicted_costs.predicted_costs`."""
        assert self.held is not None
        return predicted_costs(self.held, self.traced, self.programs, rollout, generator)

    def sums(self, name: str, costs: Sequence[str], rollout: Rollout) -> Tensor:
        """The sum ``(M, plates)``, in nats, of costs that read a site."""
        return sums_of_costs(self.plan.graph, self.traced, rollout, name, costs)

    def _seed(self) -> int:
        return int(torch.randint(1 << 62, (), generator=self._seeds, device="cpu"))

    @cached_property
    def _seeds(self) -> torch.Generator:
        """Seeds of further runs: some are for checks, after which estimators are to draw what they would draw else."""
        return torch.Generator().manual_seed(0xBF58476D1CE4E5B9 * (self.generator.initial_seed() + 1) % (1 << 63))

    def _is_last(self, name: str, traced: TracedRun) -> bool:
        """Whether a run of the model alone gives all costs at another value of a site without descendants."""
        if traced.only_costs or traced.elimination is not None:
            return False
        others = {cost_of_guide(other) for other in traced.run.sites if other != name}
        others |= {cost_of_site(site, True) for site in samples(traced.guide_trace).values() if site["is_observed"]}
        # Some costs of the model read values that the guide made. These need a new run of the guide too.
        return (others | self.plan.handed).isdisjoint(self.plan.graph.downstream_costs(name))


def _with_all_costs(again: Run, traced: TracedRun, name: str) -> Run:
    """The run with the first run's untraced costs added; raises if the two runs have different costs."""
    costs = dict(again.costs)
    for site in traced.untraced:
        costs.setdefault(cost_of_guide(site), traced.run.costs[cost_of_guide(site)])
    if costs.keys() != traced.run.costs.keys():
        changed = sorted(costs.keys() ^ traced.run.costs.keys())
        raise UnsupportedProgramError(
            f"Site {name!r}: at another value of it the program has other costs ({', '.join(changed)}), so its "
            "estimator cannot compare them; use AllAction() or ScoreFunction(RunningBaseline()) at this site."
        )
    return replace(again, costs=costs)


def _model_run(name: str, value: Tensor, trace: Any, traced: TracedRun) -> Run:
    """The run with a site at another value, made from a run of the model only."""
    record, costs = traced.run.sites[name], dict(traced.run.costs)
    if name not in traced.untraced:
        site = traced.guide_trace.nodes[name]
        log_q = relaxed_log_prob(record.fn, value) if value.requires_grad else record.fn.log_prob(value)
        costs[cost_of_guide(name)] = scale_and_mask(log_q, site["scale"], site["mask"])
    costs.update(_costs(trace, False))
    return replace(traced.run, sites={**traced.run.sites, name: replace(record, value=value)}, costs=costs)


def _own_slope(run: Run, name: str) -> Tensor:
    """The gradient of ``log q - log p`` of a site to its value."""
    record = run.sites[name]
    sides = {
        cost_of_guide(name): (1.0, record.fn, record.scale, record.mask),
        cost_of_model(name): (-1.0, record.prior, record.prior_scale, record.prior_mask),
    }
    leaf = record.value.clone().requires_grad_()
    with torch.enable_grad():
        total = leaf.new_zeros(())
        for cost, (sign, fn, scale, mask) in sides.items():
            if cost in run.costs and fn is not None:
                total = total + sign * scale_and_mask(relaxed_log_prob(fn, leaf), scale, mask).sum()
    return gradient_to(total, leaf)


def charged(run: Run, patterns: Mapping[tuple[str, str], Pattern], guide_trace: Any, model_trace: Any) -> Run:
    """A run whose components are charged with the costs that have patterns."""
    if not patterns:
        return run
    signed = ((guide_trace, True, 1.0), (model_trace, False, -1.0))
    sites = {cost_of_site(s, g): (sign, s) for trace, g, sign in signed for s in samples(trace).values()}
    return replace(run, sites=charge_sites(run.sites, patterns, sites))


def _costs(trace: Any, is_guide: bool) -> dict[str, Tensor]:
    trace = prune_subsample_sites(trace)
    trace.compute_log_prob()
    sign = 1.0 if is_guide else -1.0
    return {cost_of_site(site, is_guide): sign * site["log_prob"] for site in samples(trace).values()}
