r"""Model and guide as they run for the particles of a step."""

from __future__ import annotations

import functools
from types import FunctionType, MethodType
from typing import Any

import pyro
from pyro.poutine.messenger import Messenger

from pyro_bpq.reruns.apart import Program
from pyro_bpq.rollout.particles import Particles
from pyro_bpq.tracing.watch import PARTICLES

__all__ = ["Program", "is_same_program", "programs_of"]

# Wrappers around wrappers are followed so deep.
_DEPTH = 20


def programs_of(program: Program, particles: Particles) -> list[Program]:
    """The programs of each run of a step: one for each particle, or one in a plate of all particles.

    Args:
        program: Model and guide for one particle, and their arguments.
        particles: How the particles run.
    """
    if not particles.is_vectorized:
        return [program] * particles.number
    model, guide, args, kwargs = program
    return [(_in_plate(model, particles), _in_plate(guide, particles), args, kwargs)]


def is_same_program(first: Any, second: Any, depth: int = 0) -> bool:
    """Whether two programs run the same code: wrappers that are made anew at each step do not make another program.

    Compared are functions, what they close over, the functions of partials, bound objects, and kinds of handlers. Data
    are not: arguments of partials, settings of handlers, and closed-over values that are no functions.

    Args:
        first: A program.
        second: Another one.
        depth: Number of wrappers that lie around them.
    """
    if first is second:
        return True
    if type(first) is not type(second) or depth > _DEPTH:
        return False
    inner: list[tuple[Any, Any]]
    if isinstance(first, Messenger):
        return True
    if isinstance(first, functools.partial):
        if len(first.args) != len(second.args) or first.keywords.keys() != second.keywords.keys():
            return False
        inner = [(first.func, second.func), *zip(first.args, second.args, strict=True)]
        inner += [(first.keywords[name], second.keywords[name]) for name in first.keywords]
    elif isinstance(first, MethodType):
        return first.__self__ is second.__self__ and is_same_program(first.__func__, second.__func__, depth + 1)
    elif isinstance(first, FunctionType):
        cells = first.__closure__ or (), second.__closure__ or ()
        if first.__code__ is not second.__code__ or len(cells[0]) != len(cells[1]):
            return False
        inner = [(a.cell_contents, b.cell_contents) for a, b in zip(*cells, strict=True)]
    else:
        return not callable(first)
    return all(is_same_program(a, b, depth + 1) for a, b in inner if callable(a) or callable(b))


def _in_plate(part: Any, particles: Particles) -> Any:
    """A program in the plate of the particles, as Pyro's own ELBOs have it."""
    if particles.number == 1:
        return part
    return pyro.plate(PARTICLES, particles.number, dim=-int(particles.nesting))(part)
