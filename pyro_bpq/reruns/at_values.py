r"""Costs with sites at other values, from the recording, for estimators that compare values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.errors import BPQError, UnsupportedProgramError, warn
from pyro_bpq.estimators.hindsight import HeldCosts
from pyro_bpq.graph.scg import StochasticComputationGraph, cost_of_guide, cost_of_model
from pyro_bpq.plan.plan import Plan
from pyro_bpq.record.components import Pattern, charge_sites, elements_of
from pyro_bpq.record.function import Uncut
from pyro_bpq.record.jumps import STEPS
from pyro_bpq.record.recorded import Bound
from pyro_bpq.record.traced_run import TracedRun, named
from pyro_bpq.record.watch import gradients_of, inputs_of, samples
from pyro_bpq.reruns.hindsight import HeldRuns
from pyro_bpq.reruns.slopes import Wanted, expansions
from pyro_bpq.reruns.values import Values
from pyro_bpq.rollout.runs import Run
from pyro_bpq.step.signals import Signals


class Reruns:
    """Costs of guide and model with one site at another value.

    The sites downstream of it are drawn afresh, from a generator that belongs to the ELBO. All other sites keep
    their values. Nothing of the user's Python runs again.
    """

    def __init__(self, values: Values, plan: Plan, generator: torch.Generator) -> None:
        self.values, self.traced, self.is_outdated = values, values.traced, values.is_outdated
        self.plan, self.generator = plan, generator

    def __call__(
        self, name: str, value: Tensor, held: tuple[Run, ...] | None = None, means: bool = False
    ) -> tuple[Run, ...]:
        """Evaluates the costs downstream once more for each run of the step.

        Args:
            name: The site.
            value: Its value ``(M, plate dims, event)``. If it requires a gradient, the costs have one to it.
            held: Runs that give the sites downstream their values. ``None`` draws these sites afresh.
            means: Whether sites downstream that are not held take their means instead, where they have one.
        """
        graph, runs = self.plan.graph, list[Run]()
        below, costs = frozenset(graph.descendants(name)), tuple(graph.downstream_costs(name))
        # Estimators call this under no_grad(). A view that is made there has no gradient to the value.
        with torch.set_grad_enabled(value.requires_grad), _refusing(name):
            values = value.split(1) if len(self.traced) > 1 else (value,)
            others = held or [None] * len(values)
            for own, other, bound, traced in zip(values, others, self.values.bound, self.traced, strict=True):
                run, record = traced.run, traced.run.sites[name]
                own = own.reshape(record.value.shape)
                given = {name: own if own.requires_grad else own.to(record.value.dtype)}
                given |= {} if other is None else {site: other.sites[site].value.detach() for site in below}
                rest = below.difference(given)
                found = bound.again(costs, given, rest, means, self._seed())
                sites = {n: replace(run.sites[n], value=v) for n, v in (found | given).items() if n in run.sites}
                changed = {cost: found[cost] for cost in costs}
                runs.append(replace(run, sites={**run.sites, **sites}, costs={**run.costs, **changed}))
        return tuple(runs)

    @cached_property
    def slopes(self) -> tuple[Mapping[str, Tensor], ...]:
        """The gradient of all costs of each run to the values of sites that no other site reads, by name.

        These are the sites whose estimator asks for slopes.
        """
        graph = self.plan.graph
        classes = [cls for cls in self.plan.layout.classes if "slope" in cls.spec.estimator.needs]
        last = tuple(name for cls in classes for name in cls.names if not graph.descendants(name))
        costs = tuple(dict.fromkeys(cost for name in last for cost in graph.downstream_costs(name)))
        slopes = []
        for traced, bound in zip(self.traced, self.values.bound, strict=True):
            (found,) = expansions(bound, Wanted((costs,), last))
            none = {name: torch.zeros_like(traced.run.sites[name].value) for name in last}
            known = {name: [part for part in found[name][:2] if part is not None] for name in last}
            slopes.append({name: sum(parts, none[name]) for name, parts in known.items()})
        return tuple(slopes)

    @cached_property
    def fresh(self) -> tuple[Run, ...]:
        """The costs with all sites drawn afresh, for each run of the step; the same runs whenever it is asked for."""
        with torch.no_grad(), _refusing(next(iter(self.traced[0].run.sites))):
            return tuple(self._fresh_run(*pair) for pair in zip(self.traced, self.values.bound, strict=True))

    def _fresh_run(self, traced: TracedRun, bound: Bound) -> Run:
        run, patterns = traced.run, self.plan.patterns
        names = {cost: f"elements of {cost}" for _, cost in patterns}
        wanted = *run.costs, *names.values()
        found = bound.again(wanted, redrawn=frozenset(run.sites), seed=self._seed())
        signs = {cost: 1.0 if self.plan.graph.cost(cost).is_of_guide else -1.0 for cost in names}
        sites = charge_sites(run.sites, patterns, {cost: (signs[cost], found[name]) for cost, name in names.items()})
        return replace(run, sites=sites, costs={cost: found[cost] for cost in run.costs})

    def of_class(self, signals: Signals, c: int) -> SiteProgramRuns:
        """The costs of a class of sites at other values."""
        return SiteProgramRuns(signals, c)

    def hindsight(self, signals: Signals, c: int) -> HeldCosts:
        """What other values of the sites of a class change while all other sites keep theirs."""
        return signals.once("hindsight", lambda: HeldRuns(self, signals)).of_class(c)

    def _seed(self) -> int:
        return int(torch.randint(1 << 62, (), generator=self._seeds, device="cpu"))

    @cached_property
    def _seeds(self) -> torch.Generator:
        """Seeds of further draws: some are for checks, after which estimators are to draw what they would draw else."""
        return torch.Generator().manual_seed(0xBF58476D1CE4E5B9 * (self.generator.initial_seed() + 1) % (1 << 63))


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
        return not self.signals.rows_apart(self.c)

    def cost(self, value: Tensor) -> Tensor:
        """Costs-to-go at other values, detached."""
        return torch.stack([self._cost_to_go(self._run(i, own))[i] for i, own in enumerate(value.detach())])

    @torch.no_grad()
    def sampled_cost(self) -> Tensor:
        """Costs-to-go at the sampled values of all sites, by the same way as at other values."""
        own = replace(self, downstream=[self.batch.rollout.runs] * len(self.names))
        # With seeds of its own, so that estimators draw the same whether a recording is outdated or not.
        own.rerun = Reruns(self.rerun.values, self.rerun.plan, self.generator)
        return own.cost(self.value)

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
            leaf, wanted = value[i].detach().requires_grad_(), self.layout.graph.downstream_costs(name)
            runs = self._run(i, leaf)
            with torch.enable_grad():
                total = sum((run.costs[cost].sum() for run in runs for cost in wanted), leaf.new_zeros(()))
            gradients.append(gradients_of(total, [leaf]).get(leaf, torch.zeros_like(leaf)))
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
            warn(
                f"Sites {', '.join(map(repr, self.names))}: the program failed while their values carried gradients; "
                f"slopes of its costs are taken for zero: {error} Write z.detach() where a value leaves torch, or use "
                "an estimator without slopes there, e.g. ScoreFunction()."
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


@contextlib.contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Refuses a program that cannot be evaluated again as the estimator of a site asks for."""
    try:
        yield
    except Uncut as error:
        raise UnsupportedProgramError(
            f"Site {name!r}: its estimator compares costs at other values, and {error} is on the way. Use "
            "AllAction() or ScoreFunction(RunningBaseline()) at this site."
        ) from error


def has_slope(values: Values, graph: StochasticComputationGraph, name: str) -> bool:
    """Whether a cost besides the site's own log-probabilities has a gradient to the value of the site.

    What the gradient is at the drawn values plays no part: a choice that depends on them would bias the step.
    """
    own, below = (cost_of_guide(name), cost_of_model(name)), frozenset(graph.descendants(name))
    costs = tuple(cost for cost in graph.downstream_costs(name) if cost not in own)
    try:
        for traced, bound in zip(values.traced, values.bound, strict=True):
            leaf = traced.run.sites[name].value.detach().clone().requires_grad_()
            with torch.enable_grad():
                found = bound.again(costs, {name: leaf}, below)
            # Torch may refuse to go backward.
            expansions(bound, Wanted((tuple(graph.downstream_costs(name)),), (name,)))
            # Some operators have a derivative, which is zero.
            if any(known is leaf for known in inputs_of(*(found[cost] for cost in costs), blocked=STEPS)):
                return True
    except BPQError:
        raise
    except (RuntimeError, Uncut):
        # Torch refuses something that the program does with values that carry gradients.
        pass
    return False


def charged(run: Run, patterns: Mapping[tuple[str, str], Pattern], guide_trace: Any, model_trace: Any) -> Run:
    """A run whose components are charged with the costs that have patterns."""
    wanted, sites = {cost for _, cost in patterns}, named(samples(guide_trace), samples(model_trace))
    elements = {cost: (1.0 if own else -1.0, elements_of(site)[0]) for cost, site, own in sites if cost in wanted}
    return replace(run, sites=charge_sites(run.sites, patterns, elements))
