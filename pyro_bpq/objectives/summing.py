r"""The step of a program whose loss is summed over all values of its sites, and the check of its tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.objectives.observation import Mode, Observation
from pyro_bpq.objectives.programs import programs_of, traced_with
from pyro_bpq.plan.particles import largest_value
from pyro_bpq.plan.sum_plan import SumPlan
from pyro_bpq.reruns.apart import Comparison
from pyro_bpq.reruns.comparisons import RunsAt, agree, probe_generator
from pyro_bpq.reruns.shared_backward import inputs_of
from pyro_bpq.rollout.runs import Particles, Program
from pyro_bpq.step.exact_sum import costs_at, exact_sum
from pyro_bpq.tracing.sandbox import Draws
from pyro_bpq.tracing.substitute import AllValues
from pyro_bpq.tracing.traced_run import TracedRun

if TYPE_CHECKING:
    from pyro_bpq.objectives.runner import StepRunner

# Steps whose number is a multiple of it are checked, those of the first comparisons besides.
EVERY = 32
# Number of joint values that are compared. Large programs have fewer, but no fewer than rows of their tables: their
# values hold at most so many elements together.
JOINT_VALUES, MOST_ELEMENTS = 16, 1 << 16


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
            traced_with(self.runner, particles, step),
            *(self.program, together, traced, particles.number, self._nesting, self.runner.has_buffers),
        )
        return tables_hold(compared, plan, step)

    def _refuse(self, reason: str) -> NoReturn:
        """Refuses to sum. The next run is tracked: what was known of the structure may no longer be so."""
        self.runner.look_again()
        raise UnsupportedProgramError(reason)


def num_joint_values(rows: int, elements: int) -> int:
    """Number of joint values at which a program runs; ``elements`` are those of its largest value in all rows."""
    return max(rows, min(JOINT_VALUES, MOST_ELEMENTS // max(1, elements // rows)))


def tables_hold(compared: Comparison, plan: SumPlan, seed: int) -> bool:
    """Whether runs at values that are drawn for each site on its own cost what the tables say.

    In a row of the tables all sites have the same value. A cost that has begun to read one more site, because of a flag
    or of a list of parents, still has a table, but a wrong one. ``compared.many`` is the run that fills the tables.
    ``compared.together`` runs ``compared.number`` joint values at once. They do not hold where that run fails, or where
    its costs depend on noise besides its sites.
    """
    sites, generator, number = compared.many.guide_trace.nodes, probe_generator(seed), compared.number
    index, values = {}, {}
    for name in plan.shared:
        value = sites[name]["value"].detach()
        values[name] = value[:1].expand(number, *value.shape[1:])
    for name, split in plan.components.items():
        fn, value = sites[name]["fn"], sites[name]["value"]
        drawn = torch.randint(split.cardinality, (number, *fn.batch_shape[1:]), generator=generator)
        index[name] = drawn.to(value.device)
        values[name] = split.value(index[name].unsqueeze(-1), fn).to(value.dtype)
    costs = RunsAt(compared.trace, compared.many.subsamples, compared.has_buffers).costs(compared.together, values)
    if costs is None:
        return False
    with torch.no_grad():
        expected = costs_at(compared.many, plan, compared.nesting, index)
    pairs = [torch.broadcast_tensors(costs[name], table) for name, table in expected.items()]
    return agree([pair[0] for pair in pairs], [pair[1] for pair in pairs])
