r"""Applies a choice: gives an objective the options of a candidate, and takes trial steps of candidates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pyro_bpq.choice import MeasuredChoice
from pyro_bpq.choice.candidates import FIXED, Candidate, ProgramFacts
from pyro_bpq.errors import OptionError
from pyro_bpq.objectives.particle_count import ParticleCount
from pyro_bpq.objectives.runner import StepRunner
from pyro_bpq.plan.rules import affordable
from pyro_bpq.rollout.runs import Program
from pyro_bpq.tracing.work import Work

if TYPE_CHECKING:
    from pyro_bpq.objectives.objective import Objective


def checked_choice(choice: Any, is_open: bool, may_try: bool = True) -> Candidate | None:
    """The candidate that is pinned; ``None`` to measure, where options are open and candidates may be tried."""
    if isinstance(choice, Candidate) and (is_open or choice == FIXED):
        return choice
    if isinstance(choice, Candidate):
        raise OptionError(f"choice={choice.name!r} sets estimator, critics, particles and structure: write it alone.")
    if choice not in ("fixed", "auto", "all"):
        raise OptionError(f"choice={choice!r} is unknown; write 'fixed', 'auto', 'all' or a Candidate.")
    # Options that the user wrote stay.
    return None if choice != "fixed" and is_open and may_try else FIXED


class Rules:
    """Gives the runner and the particle count of an objective the options of a candidate."""

    def __init__(self, runner: StepRunner, particles: ParticleCount, are_open: bool) -> None:
        self.runner, self.particles, self.are_open = runner, particles, are_open
        self.planner = runner.plans.planner

    def __repr__(self) -> str:
        return f"Rules({self.planner})"

    @property
    def nesting(self) -> float:
        """Bound on the number of nested plates of the last step, with one for particles; infinite before the first."""
        last = self.runner.plans.last
        if last is None:
            return math.inf
        plates = [node.plates for node in last.graph.nodes] + [cost.plates for cost in last.graph.costs]
        return 1 + max((-plate.dim for own in plates for plate in own), default=0)

    def apply(self, candidate: Candidate, known: Rules | None = None) -> None:
        """Sets the runner and the particle count; critics and statistics stay, by site."""
        nesting = (known or self).nesting if candidate.vectorized else math.inf
        critic = self.planner.critic if candidate.critics else None
        planner = replace(self.planner, estimator=candidate.estimator, critic=critic)
        self.runner.use(planner, candidate.structure, None if known is None else known.runner)
        if candidate.num_particles is None:
            self.particles.reopen()
        else:
            self.particles.fix(candidate.num_particles, candidate.vectorized, nesting)

    def look(
        self,
        trial: StillTrial,
        choice: MeasuredChoice,
        work: Work | None,
        program: Program,
        num_steps: int,
        has_ranks: bool,
    ) -> None:
        """Tries what is due after a step, and applies what measures better."""
        if not choice.candidates:
            choice.begin(self.facts(has_ranks))
        found = choice.look(trial, work, *program, num_steps)
        if found is not None:
            self.apply(found)

    def facts(self, has_ranks: bool) -> ProgramFacts:
        """What is known of the program; nothing is tried where users give costs, or several processes learn."""
        last, now = self.runner.plans.last, self.particles.now
        if last is None or has_ranks or any(cost.name.startswith("cost(") for cost in last.graph.costs):
            return ProgramFacts()
        specs = [spec for spec in last.plan.layout.specs.values() if not spec.estimator.is_pathwise]
        sizes = [1 if spec.components is None else spec.components.size for spec in specs]
        return ProgramFacts(
            is_steered=last.facts.is_dynamic,
            has_critics=any(spec.critic is not None for spec in specs),
            num_sites=len(specs),
            many_components=sum(size > 1 for size in sizes),
            num_particles=now.number,
            # Candidates run in one call, and see all particles.
            affordable=1 if now.is_hidden else affordable(last.plan.elements, last.plan.num_particles),
            flips=last.plan.flips is not None,
            is_finite=all(spec.components is not None for spec in specs),
            has_rows=last.plan.has_rows,
            estimators=frozenset(spec.estimator for spec in specs),
        )


class StillTrial:
    """Takes trial steps of an objective. Unless ``learns``, nothing learns from a step, and its traces are undone."""

    def __init__(self, elbo: Objective, learns: bool = False) -> None:
        self.elbo, self.learns = elbo, learns

    def __repr__(self) -> str:
        return f"StillTrial({self.elbo!r}, learns={self.learns})"

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a step."""
        if self.learns:
            return self.elbo.differentiable_loss(model, guide, *args, **kwargs)
        mark = self.elbo.mark()
        self.elbo.train(False)
        try:
            return self.elbo.differentiable_loss(model, guide, *args, **kwargs)
        finally:
            self.elbo.train(True)
            self.elbo.go_back(mark)
