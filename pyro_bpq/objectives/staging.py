"""From the programs of a step to its runs, their plans, and what their sites are told."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pyro_bpq.critics.bank import CriticBank
from pyro_bpq.critics.learner import CriticLearner
from pyro_bpq.errors import BPQError, BPQWarning, UnsupportedProgramError
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.objectives.replayer import Staged
from pyro_bpq.plan.plan_cache import PlanCache
from pyro_bpq.plan.planner import Plan, Planner, StructureFacts
from pyro_bpq.reruns.at_values import Reruns, charged
from pyro_bpq.reruns.flipped_costs import flipped_costs
from pyro_bpq.reruns.row_runs import RowRuns
from pyro_bpq.rollout.runs import Rollout
from pyro_bpq.step.signals import Signals
from pyro_bpq.tracing.draws import Draws
from pyro_bpq.tracing.plate_errors import check_declared
from pyro_bpq.tracing.sandbox import UngraphedBuffers
from pyro_bpq.tracing.structure_cache import StructureCache
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import samples

__all__ = ["Staging"]


class Staging:
    """The part of an objective that runs the programs of a step and plans what is done on their structure."""

    critics: CriticBank
    learner: CriticLearner | None
    planner: Planner
    max_plate_nesting: float
    num_particles: int
    num_noises: int
    vectorize_particles: bool
    keeps_staged: bool
    _structure: StructureCache
    _plans: PlanCache
    _row_runs: RowRuns
    _only_costs: bool
    _arguments: Any
    _trace: Any
    # Weight of each run in the loss, if slopes may be found in one backward pass with its gradients.
    _share: float | None = None

    def __repr__(self) -> str:
        # That of a module, which every objective is; this class stands before it among the bases.
        return super().__repr__()

    def _observe(
        self, model: Any, guide: Any, args: Any, kwargs: Any, learning: bool
    ) -> tuple[list[TracedRun], list[Staged]]:
        """The runs of a step, and what their sites are told."""
        track = self._structure.wants_tracking()
        programs, draws = self._arguments(model, guide, args, kwargs), Draws()
        runs = self._runs(programs, track)
        if not track and not all(self._structure.knows(run) for run in runs):
            # Of a structure that was never tracked it is not known whether values steer it or rows meet.
            draws.again()
            runs = self._runs(programs, True)
        graphs = [self._structure.graph(traced, learning) for traced in runs]
        is_dynamic = any(self._structure.is_dynamic(traced) for traced in runs)
        scored = any(site.score is not None for traced in runs for site in traced.run.sites.values())
        if is_dynamic and scored and self.vectorize_particles and self.num_particles > 1:
            raise UnsupportedProgramError(
                "A sampled value left torch (as by .item(), int(), if, .numpy()) while several particles ran at once, "
                "so that particles may steer each other; write vectorize_particles=False."
            )
        is_alike = all(run.key == runs[0].key for run in runs)
        facts = self._facts(runs, is_dynamic)
        if not is_dynamic and is_alike and any(graph != graphs[0] for graph in graphs[1:]):
            graphs = [self._structure.merge(runs[0], graphs)] * len(runs)
        # A baseline from those particles that happen to have the same structure would depend on the value of the
        # site that it is for: either all particles are stacked or each is on its own.
        members = [list(range(len(runs)))] if is_alike and not is_dynamic else [[i] for i in range(len(runs))]
        try:
            items = [
                self._stage([runs[i] for i in ids], graphs[ids[0]], [programs[i] for i in ids], learning, facts)
                for ids in members
            ]
        except BPQError:
            raise
        except RuntimeError:
            # Shapes that do not fit are told by the site that they come from.
            traces = (runs[0].guide_trace, runs[0].model_trace)
            check_declared(site for trace in traces for site in samples(trace).values())
            raise
        return runs, items

    def _runs(self, programs: Sequence[Any], track: bool) -> list[TracedRun]:
        """Traces the programs of a step, with slopes where the last step's plan asked for them."""
        last = None if track or not torch.is_grad_enabled() else self._plans.last
        if last is None or not last.plan.led_back:
            return [self._trace(*program, track=track) for program in programs]
        draws = Draws()
        try:
            with UngraphedBuffers() if last.plan.has_buffers else contextlib.nullcontext():
                return [self._trace(*program, track=track, sloped=last.plan.led_back) for program in programs]
        except BPQError:
            raise
        except RuntimeError as error:
            draws.again()
            runs = [self._trace(*program, track=track) for program in programs]
            # It runs with plain values: torch refuses something that the program does with values that carry gradients.
            self._plans.know_slopes(last.key, False)
            warnings.warn(
                f"The program failed while the values of the sites {sorted(last.plan.led_back)} carried gradients, for "
                f"slopes of costs: {error} It does without from now on. Where a value leaves torch write z.detach().",
                BPQWarning,
                stacklevel=2,
            )
            return runs

    def _facts(self, runs: Sequence[TracedRun], is_dynamic: bool) -> StructureFacts:
        """What is known of the structure of runs besides their graph."""
        patterns = frozenset() if is_dynamic else self._structure.patterns_of(runs)
        cuts_plates = all(self._structure.cuts_plates(traced) for traced in runs)
        structure = self._structure
        known = structure.handed_of(runs), structure.has_buffers(runs)
        return StructureFacts(is_dynamic, cuts_plates, patterns, *known, self.num_particles)

    def _stage(
        self,
        traced: list[TracedRun],
        graph: Any,
        programs: list[Any],
        learning: bool,
        facts: StructureFacts,
        reruns: bool = True,
    ) -> Staged:
        model, guide, args, kwargs = programs[0]
        plan = self._plans.plan(traced[0], graph, facts)
        is_vectorized = self.vectorize_particles and self.num_particles > 1
        rollout = Rollout(
            tuple(t.run for t in traced),
            self.num_particles if is_vectorized else len(traced),
            traced[0].plate_sizes,
            # Particles lie to the left of as many dimensions as plates may have, whether there are plates or not.
            int(self.max_plate_nesting) - 1 if is_vectorized else traced[0].plate_ndim,
            is_vectorized,
        )
        tables = {}
        if plan.flips is not None:
            again = guide if self._only_costs else model
            found = flipped_costs(
                *(plan.flips, plan.components, traced, rollout, again, args, kwargs, graph, self._row_runs),
                has_buffers=plan.has_buffers,
                learning=learning,
            )
            if found is None:
                self._plans.do_without_flips(traced[0].key)
                plan = self._plans.plan(traced[0], graph, facts)
            tables = found or {}
        rerun = generator = None
        is_first_order = learning and self.learner is not None and self.learner.first_order > 0.0
        if reruns and (plan.needs_program or is_first_order) and not facts.is_dynamic:
            generator = self._noise()
            rerun = Reruns(self._trace, programs, traced, plan, generator, self._share)
            if plan.sloped and not self._has_slopes(rerun, traced[0].key, plan, rollout):
                plan = self._plans.plan(traced[0], graph, facts)
            rerun.plan = plan
        if plan.patterns:
            # Only now it is certain which plan is carried out.
            runs = tuple(charged(t.run, plan.patterns, t.guide_trace, t.model_trace) for t in traced)
            rollout = replace(rollout, runs=runs)
        signals = Signals(plan.layout, rollout, tables, self.critics, learning, rerun, generator, self.keeps_staged)
        return Staged(tuple(traced), tuple(programs), signals)

    def _has_slopes(self, rerun: Reruns, key: Any, plan: Plan, rollout: Rollout) -> bool:
        """Looks, once for each structure, whether costs have gradients to the values of the sites that need some."""
        if key in self._plans.slopes:
            return True
        plates = {name: plan.graph.node(name).plates for name in plan.sloped}
        try:
            found = all(rerun.has_slope(name, rollout, own) for name, own in plates.items())
        except BPQError:
            raise
        except RuntimeError:
            # Torch refuses something that the program does with values that carry gradients.
            found = False
        self._plans.know_slopes(key, found)
        return found

    def _noise(self) -> torch.Generator:
        """Noise for what estimators draw themselves; the global generator is left alone."""
        self.num_noises += 1
        return torch.Generator().manual_seed((self.critics.seed * 7919 + 1) * 1_000_003 + self.num_noises)

    @property
    def _planned(self) -> Plan:
        """The plan of the last step."""
        assert self._plans.last is not None
        return self._plans.last.plan

    @property
    def graph(self) -> StochasticComputationGraph:
        """The stochastic computation graph of the last step.

        Raises:
            BPQError: If no step has been taken.
        """
        if self._plans.last is None:
            raise BPQError("There is no graph yet: take a step first, e.g. svi.step(...).")
        return self._plans.last.plan.graph

    @property
    def network(self) -> BackpropQNetwork | None:
        """The Backprop-Q network of the last step; ``None`` if no site has a critic."""
        return None if self._plans.last is None else self._plans.last.plan.layout.network
