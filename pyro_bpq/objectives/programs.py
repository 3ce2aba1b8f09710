r"""Model and guide as they run for the particles of a step."""

from __future__ import annotations

import functools
from types import FunctionType, MethodType
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger

from pyro_bpq.objectives.observation import Runner
from pyro_bpq.reruns.apart import Comparison
from pyro_bpq.reruns.comparisons import Trace
from pyro_bpq.rollout.runs import Particles, Program
from pyro_bpq.tracing.sandbox import Draws, Sandbox
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import PARTICLES


def programs_of(program: Program, particles: Particles) -> list[Program]:
    """The programs of each run of a step: one for each particle, or one in a plate of all particles."""
    if not particles.is_vectorized:
        return [program] * particles.number
    model, guide = (_in_plate(part, particles) for part in program[:2])
    return [program._replace(model=model, guide=guide)]


def is_same_program(first: Any, second: Any) -> bool:
    """Whether two programs run the same code: wrappers that are made anew at each step do not make another program.

    Compared are functions, what they close over, the functions of partials, bound objects, and kinds of handlers. Data
    are not: arguments of partials, settings of handlers, and closed-over values that are no functions.
    """
    if isinstance(first, MethodType) and first == second:
        return True
    # Functions may close over themselves.
    pending, seen = [(first, second)], set[tuple[int, int]]()
    while pending:
        one, other = pending.pop()
        if one is other or (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        inner = _inner(one, other)
        if inner is None:
            return False
        pending += [pair for pair in inner if callable(pair[0]) or callable(pair[1])]
    return True


def _inner(one: Any, other: Any) -> list[tuple[Any, Any]] | None:
    """What two wrappers wrap, in pairs; ``None`` if they differ themselves."""
    if type(one) is not type(other):
        return None
    if isinstance(one, Messenger):
        return []
    if isinstance(one, functools.partial):
        if len(one.args) != len(other.args) or one.keywords.keys() != other.keywords.keys():
            return None
        named = [(one.keywords[name], other.keywords[name]) for name in one.keywords]
        return [(one.func, other.func), *zip(one.args, other.args, strict=True), *named]
    if isinstance(one, MethodType):
        return [(one.__func__, other.__func__)] if one.__self__ is other.__self__ else None
    if isinstance(one, FunctionType) and one.__code__ is other.__code__:
        # The same code has as many cells.
        return list(zip(_closed_over(one), _closed_over(other), strict=True))
    return None


def _closed_over(function: FunctionType) -> list[Any]:
    """What a function closes over; ``None`` for a variable that has no value yet."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    return found


def _in_plate(part: Any, particles: Particles) -> Any:
    """A program in the plate of the particles, as Pyro's own ELBOs have it."""
    if particles.number == 1:
        return part
    return pyro.plate(PARTICLES, particles.number, dim=-int(particles.nesting))(part)


def make_parameters(runner: Runner, program: Program, one: Particles, num_steps: int) -> None:
    """Runs one particle for the parameters that it makes, in its shape. Its draws come again in the next run."""
    draws = Draws()
    with Sandbox(torch.get_rng_state(), runner.has_buffers), torch.no_grad():
        runner.trace(program, one, num_steps)
    draws.again()


def traced_with(runner: Runner, particles: Particles, num_steps: int) -> Trace:
    """How comparisons run programs: with model and guide wrapped by a function, and without warnings."""
    return lambda part, put: runner.trace(part, particles, num_steps, warns=False, put=put)


def compared_alone(
    runner: Runner, program: Program, particles: Particles, many: TracedRun, num_steps: int
) -> Comparison:
    """What a comparison of vectorised particles, which ran as ``many``, with particles on their own needs."""
    (together,) = programs_of(program, particles)
    return Comparison(
        traced_with(runner, particles, num_steps),
        *(program, together, many, particles.number, int(particles.nesting)),
        *(runner.has_buffers, particles.is_compact),
    )
