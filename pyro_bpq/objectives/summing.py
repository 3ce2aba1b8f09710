r"""The step of a program whose loss is summed over all values of its sites, and the check of its tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.objectives.observation import Mode, Observation
from pyro_bpq.objectives.programs import programs_of
from pyro_bpq.plan.sum_plan import SumPlan
from pyro_bpq.reruns.gradients import inputs_of
from pyro_bpq.reruns.tables import exact_sum
from pyro_bpq.rollout.runs import Particles, Program
from pyro_bpq.rollout.sums import in_single
from pyro_bpq.tracing.sandbox import Draws
from pyro_bpq.tracing.substitute import AllValues
from pyro_bpq.tracing.traced_run import TracedRun

if TYPE_CHECKING:
    from pyro_bpq.objectives.runner import StepRunner


@dataclass(frozen=True)
class Summing:
    """A step that may be summed."""

    runner: StepRunner
    program: Program  # model and guide as for one particle, and their arguments
    particles: Particles  # a particle for each value
    mode: Mode  # what the step is for

    def observation(self) -> Observation:
        """The run that fills the tables, and their sum; refuses programs that cannot be summed."""
        recordings, draws = self.runner.recordings, Draws()
        record = not self.mode.is_recorded and recordings.wants(self.particles)
        traced = self._run(record)
        if not (record or self.mode.is_recorded or recordings.knows(traced, self.particles.number)):
            draws.again()
            traced, record = self._run(True), True
        loss = self._sum(traced)
        if record and self.particles.is_compact:
            # A program may read a shape.
            draws.again()
            if not torch.allclose(loss, self._sum(self._run(False)), rtol=1e-4):
                self._refuse("values of size one in plates cost something else")
        return Observation((traced,), summed=loss)

    def _sum(self, traced: TracedRun) -> Tensor:
        """The sum over the tables of a run."""
        runner, is_open = self.runner, not self.mode.is_recorded
        loss, zeros = exact_sum(traced, self._plan(traced), int(self.particles.nesting), is_open)
        if is_open:
            # One read on the host.
            known, (number, num_zeros) = runner.num_zeros, torch.stack([in_single(loss.detach()), zeros]).tolist()
            if not math.isfinite(number):
                raise UnsupportedProgramError("the loss is not finite at some values")
            if num_zeros > known or (num_zeros and traced.recorded is not None):
                # Where the probability is zero, an infinite slope of the cost makes the gradient NaN.
                leaves = inputs_of(loss) if loss.requires_grad else []
                found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True) if leaves else ()
                if not all(bool(torch.isfinite(own).all()) for own in found if own is not None):
                    raise UnsupportedProgramError("the gradient is not finite at impossible values")
                runner.num_zeros = max(known, int(num_zeros))
        return loss

    def _run(self, record: bool) -> TracedRun:
        (together,) = programs_of(self.program, self.particles)
        # Dependencies are followed row by row, in log-probabilities too.
        particles = self.particles
        put = AllValues(particles.number, int(particles.nesting), particles.is_compact, record)
        return self.runner.trace(together, particles, self.mode.num_steps, record, warns=False, put=put)

    def _plan(self, traced: TracedRun) -> SumPlan:
        runner, mode, particles = self.runner, self.mode, self.particles
        if traced.escaped or runner.recordings.is_dynamic(traced):
            # Where one value runs at a time, values may well stay in torch.
            self._refuse("sampled values steer it")
        if traced.mixes is not None:
            self._refuse(f"{traced.mixes[0]} reads several rows of values")
        graph = runner.recordings.graph(traced, particles.number, mode.learning)
        facts = replace(runner.facts([traced], False, particles, mode), sums=True)
        plan = runner.plans.plan(traced, graph, facts).summed
        if plan is None or plan.rows > particles.number:
            self._refuse("a law or a cost reads several sites")
        return plan

    def _refuse(self, reason: str) -> NoReturn:
        """Refuses to sum. The next run is recorded: what was known of the structure may no longer be so."""
        self.runner.look_again()
        raise UnsupportedProgramError(reason)
