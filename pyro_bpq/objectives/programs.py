r"""Model and guide as they run for the particles of a step."""

from __future__ import annotations

from typing import Any

import pyro

from pyro_bpq.reruns.apart import Program
from pyro_bpq.rollout.particles import Particles
from pyro_bpq.tracing.watch import PARTICLES

__all__ = ["Program", "programs_of"]


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


def _in_plate(part: Any, particles: Particles) -> Any:
    """A program in the plate of the particles, as Pyro's own ELBOs have it."""
    if particles.number == 1:
        return part
    return pyro.plate(PARTICLES, particles.number, dim=-int(particles.nesting))(part)
