r"""Model and guide as they run for the particles of a step."""

from __future__ import annotations

from typing import Any

import pyro

from pyro_bpq.rollout.runs import Particles, Program
from pyro_bpq.tracing.watch import PARTICLES


def programs_of(program: Program, particles: Particles) -> list[Program]:
    """The programs of each run of a step: one for each particle, or one in a plate of all particles."""
    if not particles.is_vectorized:
        return [program] * particles.number
    model, guide = (_in_plate(part, particles) for part in program[:2])
    return [program._replace(model=model, guide=guide)]


def _in_plate(part: Any, particles: Particles) -> Any:
    """A program in the plate of the particles, as Pyro's own ELBOs have it."""
    if particles.number == 1:
        return part
    return pyro.plate(PARTICLES, particles.number, dim=-int(particles.nesting))(part)
