"""What the checks of a diagnosis look at, and what they find."""

from __future__ import annotations

import copy
import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pyro_bpq.diagnostics.critic_fit import CriticFit
from pyro_bpq.diagnostics.sampling import untouched
from pyro_bpq.estimators.base import SiteInfo
from pyro_bpq.objectives.observation import Observation
from pyro_bpq.objectives.planned import PlannedObjective
from pyro_bpq.plan.planner import Planned
from pyro_bpq.rollout.runs import Program
from pyro_bpq.step.signals import Signals
from pyro_bpq.tracing.sandbox import LentBuffers
from pyro_bpq.tracing.traced_run import TracedRun

SEVERITIES = ("error", "warning", "hint")


@dataclass(frozen=True)
class Finding:
    """One finding of a diagnosis.

    Args:
        kind: A short fixed name, for programs that read it.
        severity: ``"error"``: results are wrong; ``"warning"``: learning is slower than it could be; ``"hint"``.
        message: Description of the problem, with the figures behind it.
        advice: Suggested remedy.
        sites: The sites concerned.
    """

    kind: str
    severity: str
    message: str
    advice: str
    sites: tuple[str, ...] = ()

    def __str__(self) -> str:
        body = textwrap.wrap(f"{self.severity}: {self.message}", 110, subsequent_indent="    ")
        advice = textwrap.wrap(f"-> {self.advice}", 110, initial_indent="    ", subsequent_indent="       ")
        return "\n".join([*body, *advice])


@dataclass(frozen=True)
class Diagnosis:
    """All findings, the most severe first.

    Args:
        findings: The findings.
        checked: Description of the examined steps, in words.
    """

    findings: tuple[Finding, ...]
    checked: str = ""

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def kinds(self) -> frozenset[str]:
        """The kinds that were found."""
        return frozenset(finding.kind for finding in self.findings)

    def __str__(self) -> str:
        found = [str(finding) for finding in self.findings] or ["No problem was found."]
        return "\n".join([*found, *([f"({self.checked})"] if self.checked else [])])


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
    def infos(self) -> Mapping[str, SiteInfo]:
        """The facts about each site, by its name."""
        return {name: info for run in self.tracked for name, info in run.infos.items()}

    @cached_property
    def against_one_call(self) -> str:
        """Why several particles cannot run in one vectorised call, or not well; empty where they can."""
        if self.elbo.runner.recordings.escapes or any(run.escaped for run in self.tracked):
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
