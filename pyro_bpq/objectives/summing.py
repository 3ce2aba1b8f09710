r"""The step of a program whose loss is summed over all values of its sites, and the check of its tables."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.objectives.observation import Mode, Observation, programs_of
from pyro_bpq.plan.sum_plan import SumPlan
from pyro_bpq.record.sandbox import Draws
from pyro_bpq.record.substitute import AllValues
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.reruns.gradients import inputs_of
from pyro_bpq.reruns.tables import exact_sum
from pyro_bpq.reruns.values import Values, is_alike
from pyro_bpq.rollout.runs import Particles, Program
from pyro_bpq.rollout.sums import in_single

if TYPE_CHECKING:
    from pyro_bpq.objectives.runner import StepRunner


def summed(runner: StepRunner, program: Program, particles: Particles, mode: Mode) -> Observation:
    """The run that fills the tables, a particle for each value, and their sum; refuses programs without such a sum."""
    recordings, draws, rows, nesting = runner.recordings, Draws(), particles.number, int(particles.nesting)
    (together,) = programs_of(program, particles)

    def run(record: bool) -> TracedRun:
        # Dependencies are followed row by row, in log-probabilities too.
        put = AllValues(rows, nesting, particles.is_compact, record)
        filled = together._replace(model=put(together.model), guide=put(together.guide))
        return runner.trace(filled, particles, step=mode.num_steps, track=record, warns=False)

    record = not mode.is_recorded and recordings.wants(particles)
    traced = run(record)
    if not (record or mode.is_recorded or recordings.knows(traced, rows)):
        draws.again()
        traced, record = run(True), True
    loss = _sum(runner, traced, particles, mode)
    if record and particles.is_compact:
        # A program may read a shape.
        draws.again()
        if not torch.allclose(loss, _sum(runner, run(False), particles, mode), rtol=1e-4):
            _refuse(runner, "values of size one in plates cost something else")
    if record:
        assert traced.recorded is not None
        alone = runner.alone(program, particles, traced)
        values = Values((traced.recorded,), alone, (traced,), recordings.call, nesting)
        if not all(is_alike(values, row) for row in (0, rows - 1)):
            _refuse(runner, "a row of values costs something else alone")
    return Observation((traced,), summed=loss)


def _refuse(runner: StepRunner, reason: str) -> NoReturn:
    """Refuses to sum. The next run is recorded: what was known of the structure may no longer be so."""
    runner.recordings.look_again()
    raise UnsupportedProgramError(reason)


def _sum(runner: StepRunner, traced: TracedRun, particles: Particles, mode: Mode) -> Tensor:
    """The sum over the tables of a run."""
    plan, is_open = _plan(runner, traced, particles, mode), not mode.is_recorded
    loss, zeros = exact_sum(traced, plan, int(particles.nesting), is_open)
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


def _plan(runner: StepRunner, traced: TracedRun, particles: Particles, mode: Mode) -> SumPlan:
    recordings = runner.recordings
    if traced.escaped_sites or recordings.is_dynamic(traced):
        # Where one value runs at a time, values may well stay in torch.
        _refuse(runner, "sampled values steer it")
    if traced.mixes is not None:
        _refuse(runner, f"{traced.mixes[0]} reads several rows of values")
    graph = recordings.graph(traced, particles.number, mode.learning)
    facts = replace(runner.facts([traced], False, particles, mode), sums=True)
    plan = runner.plans.of(traced, graph, facts).summed
    if plan is None or plan.rows > particles.number:
        _refuse(runner, "a law or a cost reads several sites")
    return plan
