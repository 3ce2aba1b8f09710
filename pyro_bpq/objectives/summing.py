r"""The step of a program whose loss is summed over all values of its sites."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.objectives.observation import Observation
from pyro_bpq.objectives.programs import programs_of
from pyro_bpq.objectives.staged import Mode
from pyro_bpq.plan.particles import largest_value
from pyro_bpq.plan.plan import SumPlan
from pyro_bpq.reruns.apart import Comparison
from pyro_bpq.reruns.joint_check import EVERY, num_joint_values, tables_hold
from pyro_bpq.reruns.shared_backward import inputs_of
from pyro_bpq.rollout.runs import Particles, Program
from pyro_bpq.step.exact_sum import exact_sum
from pyro_bpq.tracing.sandbox import Draws
from pyro_bpq.tracing.substitute import AllValues
from pyro_bpq.tracing.traced_run import TracedRun

if TYPE_CHECKING:
    from pyro_bpq.objectives.runner import StepRunner


def has_finite_gradient(loss: Tensor) -> bool:
    """Whether all gradients of a scalar are finite; its graph stays."""
    leaves = inputs_of(loss) if loss.requires_grad else []
    if not leaves:
        return True
    found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    return all(bool(torch.isfinite(gradient).all()) for gradient in found if gradient is not None)


@dataclass(frozen=True)
class Summing:
    """A step that may be summed."""

    runner: StepRunner
    program: Program  # model and guide as for one particle, and their arguments
    particles: Particles  # a particle for each value
    mode: Mode  # what the step is for

    @property
    def _nesting(self) -> int:
        return int(self.particles.nesting)

    def _is_checked(self, traced: TracedRun) -> bool:
        """Whether the tables are compared with runs: now and then, for new structures, and in every evaluation."""
        mode = self.mode
        if mode.is_recorded:
            return False
        return traced.reads is not None or mode.is_checked or not mode.learning or mode.num_steps % EVERY == 0

    def observation(self) -> Observation:
        """The run that fills the tables, and their sum; refuses programs that cannot be summed."""
        structure, draws = self.runner.structure, Draws()
        traced = self._run(structure.wants_tracking())
        if not structure.knows(traced):
            draws.again()
            traced = self._run(True)
        found, holds = self._summed(traced)
        if not holds:
            # What the program does has changed since its structure was looked at.
            draws.again()
            found, holds = self._summed(self._run(True))
        if not holds:
            self._refuse("costs at values that differ between sites are not those of the tables")
        return found

    def _summed(self, traced: TracedRun) -> tuple[Observation, bool]:
        """The sum over the tables of a run, and whether these hold."""
        plan = self._plan(traced)
        summed = exact_sum(traced, plan, self._nesting, self.mode.is_recorded)
        if not summed.is_finite:
            raise UnsupportedProgramError("the loss is not finite at some values")
        if summed.num_zeros > self.runner.num_zeros or (summed.num_zeros and self._is_checked(traced)):
            # Where the probability is zero, an infinite slope of the cost makes the gradient NaN.
            if not has_finite_gradient(summed.loss):
                raise UnsupportedProgramError("the gradient is not finite at impossible values")
        return Observation((traced,), summed=summed), not self._is_checked(traced) or self._holds(traced, plan)

    def _run(self, track: bool) -> TracedRun:
        (together,) = programs_of(self.program, self.particles)
        # Dependencies are followed row by row, in log-probabilities too.
        put = AllValues(self.particles.number, self._nesting, self.particles.is_compact and not track, track)
        return self.runner.trace(together, self.particles, self.mode.num_steps, track, warns=False, put=put)

    def _plan(self, traced: TracedRun) -> SumPlan:
        runner, mode = self.runner, self.mode
        if traced.escaped or runner.structure.is_dynamic(traced):
            # Where one value runs at a time, values may well stay in torch.
            self._refuse("sampled values steer it")
        graph = runner.structure.graph(traced, mode.learning)
        facts = replace(runner.facts([traced], False, self.particles, mode), sums=True)
        plan = runner.plans.plan(traced, graph, facts).summed
        if plan is None or plan.rows > self.particles.number:
            self._refuse("a law or a cost reads several sites")
        return plan

    def _holds(self, traced: TracedRun, plan: SumPlan) -> bool:
        rows, step = self.particles.number, self.mode.num_steps
        particles = replace(self.particles, number=num_joint_values(rows, largest_value(traced)))
        (together,) = programs_of(self.program, particles)
        compared = Comparison(
            lambda part, put: self.runner.trace(part, particles, step, warns=False, put=put),
            *(self.program, together, traced, particles.number, self._nesting, self.runner.has_buffers),
        )
        return tables_hold(compared, plan, step)

    def _refuse(self, reason: str) -> NoReturn:
        """Refuses to sum. The next run is tracked: what was known of the structure may no longer be so."""
        self.runner.look_again()
        raise UnsupportedProgramError(reason)
