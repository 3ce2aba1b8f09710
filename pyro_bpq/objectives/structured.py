r"""Objectives that know the structure of their programs, and what of it can be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyro_bpq.batching.reads import described
from pyro_bpq.critics.replay_buffer import ReplayBuffer
from pyro_bpq.errors import BPQError
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.objectives.objective import Objective
from pyro_bpq.objectives.programs import programs_of
from pyro_bpq.objectives.runner import StepRunner
from pyro_bpq.objectives.staged import Observation, Staged
from pyro_bpq.plan.plan import Plan
from pyro_bpq.plan.planner import Planner
from pyro_bpq.reruns.apart import Program
from pyro_bpq.tracing.traced_run import TracedRun


class StructuredObjective(Objective):
    """An objective whose runner plans what is done on the structure of its programs."""

    runner: StepRunner

    @property
    def planner(self) -> Planner:
        """The options that decide what is done on a structure."""
        return self.runner.plans.planner

    @planner.setter
    def planner(self, planner: Planner) -> None:
        self.runner.plans.planner = planner

    @property
    def plan(self) -> Plan | None:
        """What the last step did on the program's structure; ``None`` before the first one."""
        return None if self.runner.plans.last is None else self.runner.plans.last.plan

    @property
    def graph(self) -> StochasticComputationGraph:
        """The stochastic computation graph of the last step."""
        if self.plan is None:
            raise BPQError("There is no graph yet: take a step first, e.g. svi.step(...).")
        return self.plan.graph

    @property
    def network(self) -> BackpropQNetwork:
        """The Backprop-Q network of the last step, and what its critics read; false, with a reason, without any."""
        if self.plan is None:
            return BackpropQNetwork(StochasticComputationGraph.from_parents({}, {}), ())
        return described(self.plan.layout) or BackpropQNetwork(self.plan.graph, ())

    @property
    def num_noises(self) -> int:
        """Number of generators that estimators have drawn from."""
        return self.runner.noise.number

    @num_noises.setter
    def num_noises(self, number: int) -> None:
        self.runner.noise.number = number

    @property
    def replay_buffer(self) -> ReplayBuffer | None:
        """The stored rollouts; ``state_dict()``, copies and pickles leave them out."""
        return None if self.trainer.replayer is None else self.trainer.replayer.buffer

    def run_program(self, program: Program) -> TracedRun:
        """Runs guide and model as a step does, tracked only where sampled values steer them."""
        track = self.runner.structure.always_tracks
        return self.runner.trace(program, self.particles.drawn, self.num_steps, track)

    def stage(self, traced: Sequence[TracedRun], programs: Sequence[Program]) -> Staged:
        """Prepares runs of a known structure as a step does; nothing learns."""
        return self.runner.stage(traced, programs, self.particles.drawn, replace(self._mode(False), shows=True))

    def observe(self, model: Any, guide: Any, args: Any = (), kwargs: Any = None, shows: bool = True) -> Observation:
        """The runs of a step, and what their sites are told; nothing learns. For diagnostics."""
        program = self._program(model, guide, args, kwargs or {})
        return self.particles.observe(self.runner, program, replace(self._mode(False), shows=shows))

    def tracked_runs(self, model: Any, guide: Any, args: Any = (), kwargs: Any = None) -> list[TracedRun]:
        """The same runs, tracked: they show what leaves torch. For diagnostics."""
        particles = self.particles.drawn
        programs = programs_of(self._program(model, guide, args, kwargs or {}), particles)
        return [self.runner.trace(program, particles, self.num_steps, True) for program in programs]

    @property
    def settled(self) -> tuple[str, ...]:
        """What was settled or given up, and why: particles, the extra run, tracking. ``print(elbo)`` shows it."""
        return tuple(filter(None, (self.particles.said, *self.runner.said)))
