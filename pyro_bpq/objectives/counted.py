r"""Pyro's ELBO, whose particles and bound on nested plates a step may settle."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from pyro.infer import ELBO

from pyro_bpq.objectives.loss_module import LossModule
from pyro_bpq.objectives.particle_count import ParticleCount
from pyro_bpq.reruns.apart import Program
from pyro_bpq.tracing.cost_statement import SkipCosts
from pyro_bpq.tracing.traced_run import TracedRun


class CountedELBO(ELBO):
    """An ELBO with a particle count.

    Attributes:
        particles: How many particles run, and in which way.
    """

    def __init__(self, **options: Any) -> None:
        self.particles = ParticleCount()
        super().__init__(**options)  # type: ignore[no-untyped-call]

    def __call__(self, model: Any, guide: Any) -> LossModule:
        """The loss of a model and a guide as a module, for torch's own optimisers."""
        return LossModule(model, guide, self)

    @abstractmethod
    def run_program(self, program: Program) -> TracedRun:
        """Runs guide and model as a step does."""

    @property
    def num_particles(self) -> int:
        """Number of particles; 1 where the loss is summed over all values."""
        return self.particles.now.draws

    @num_particles.setter
    def num_particles(self, number: int) -> None:
        self.particles.change(number=number)

    @property
    def vectorize_particles(self) -> bool:
        """Whether particles run in one call, in a plate of their own."""
        return self.particles.drawn.is_vectorized

    @vectorize_particles.setter
    def vectorize_particles(self, is_vectorized: bool) -> None:
        self.particles.change(is_vectorized=is_vectorized)

    @property
    def max_plate_nesting(self) -> float:
        """Bound on the number of nested plates, that of vectorised particles included."""
        return self.particles.now.nesting

    @max_plate_nesting.setter
    def max_plate_nesting(self, nesting: float) -> None:
        self.particles.change(nesting=nesting)

    def _guess_max_plate_nesting(self, model: Any, guide: Any, args: Any, kwargs: Any) -> None:
        super()._guess_max_plate_nesting(SkipCosts()(model), SkipCosts()(guide), args, kwargs)  # type: ignore[no-untyped-call]

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        return self.run_program((model, guide, args, kwargs))

    @property
    def _needs_nesting(self) -> bool:
        """Whether dimensions to the left of all plates are used."""
        return self.vectorize_particles
