r"""What all checks of a diagnosis look at."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pyro_bpq.diagnostics.figures import CriticFit
from pyro_bpq.diagnostics.sampling import untouched
from pyro_bpq.objectives.observation import Observation
from pyro_bpq.objectives.planned import PlannedObjective
from pyro_bpq.plan.planner import Planned
from pyro_bpq.rollout.runs import Program
from pyro_bpq.step.signals import Signals
from pyro_bpq.tracing.sandbox import LentBuffers
from pyro_bpq.tracing.traced_run import TracedRun


@dataclass(frozen=True, eq=False)
class Look:
    """The inputs of all checks."""

    elbo: PlannedObjective  # the ELBO
    program: Program  # model, guide and their arguments
    seed: int  # seed of further runs
    tracked: Sequence[TracedRun]  # runs that were tracked: only they show which values leave torch
    seen: Observation  # runs as a step has them, and the signals of their sites
    planned: Planned  # the plan of these runs, and what it was made for
    fit: CriticFit  # quality of the critics, and the moments of the gradient

    @cached_property
    def signals(self) -> list[Signals]:
        """The signals of the sites."""
        return [item.signals for item in self.seen.items]

    @cached_property
    def specs(self) -> dict[str, Any]:
        """What serves each site, by its name."""
        return {name: cls.spec for one in self.signals for cls in one.layout.classes for name in cls.names}

    @cached_property
    def against_one_call(self) -> str:
        """Why several particles cannot run in one vectorised call, or not well; empty where they can."""
        if self.elbo.runner.structure.escapes or any(run.escaped for run in self.tracked):
            return "sampled values decide in Python what this program does next"
        mixes = "in one call a particle of this program would see the others (as by z[0] or z.sum())"
        if self.elbo.particles.now.is_hidden:
            return mixes
        trial = copy.deepcopy(self.elbo)
        now = trial.particles.now
        # Where there is no bound, Pyro would guess one, and say so.
        nesting = 1 + (self.tracked[0].batch_ndim if math.isinf(now.nesting) else now.nesting - now.has_plate)
        trial.particles.change(number=2, is_vectorized=True, nesting=nesting)
        try:
            with untouched(trial, self.seed), warnings.catch_warnings(), torch.enable_grad(), LentBuffers():
                warnings.simplefilter("ignore")
                trial.observe(self.program)
        except Exception as error:
            # A program may raise anything where its shapes do not fit.
            return f"this program fails with several particles in one call ({type(error).__name__})"
        return "" if trial.particles.now.has_plate else mixes


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Names in quotes, the first few of many."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more
