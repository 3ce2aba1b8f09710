r"""An objective as its steps are recorded and compiled."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pyro_bpq.compiled.subject import Place, untraced
from pyro_bpq.critics.learner import AveragedAdam
from pyro_bpq.record.further import LentBuffers
from pyro_bpq.rollout.runs import Program
from pyro_bpq.rollout.schedule import RecordedStep
from pyro_bpq.snapshots import restore, snapshot
from pyro_bpq.step.surrogate import Step

if TYPE_CHECKING:
    from pyro_bpq.objectives.objective import Objective


class Recordable:
    """What compiled steps ask of an objective."""

    def __init__(self, objective: Objective) -> None:
        self.objective, self.noise = objective, objective.runner.noise
        self.mark, self.go_back = partial(objective.mark, deep=True), objective.go_back
        self.learn, self.look_again = objective.learn, objective.runner.recordings.look_again

    def refuses(self) -> str:
        """Why steps are not recorded, as the end of a sentence; empty if they are."""
        trainer, optimizers = self.objective.trainer, self.objective.trainer.optimizer.optimizers.values()
        called = self.objective.runner.recordings.externals
        several = "something learns later from what a step worked on (steps > 1, or a controlled SVI)"
        own = "an optimiser of your own trains the critics, and counts its steps in Python"
        reasons = {
            "critics learn from stored rollouts (replay)": trainer.replayer is not None,
            "several processes train the critics together": trainer.ranks is not None,
            several: trainer.keeps_staged,
            "gamma is a function of the step": callable(self.objective.gamma),
            "critics learn in a backward sweep": trainer.options.sweep is not None,
            f"the results of {next(iter(called.values()))[0].name if called else ''} would be frozen": bool(called),
            own: not all(isinstance(each, AveragedAdam) for each in optimizers),
        }
        return next((why for why, holds in reasons.items() if holds), self.objective.runner.refuses_recording())

    def is_settled(self) -> bool:
        """Whether structure and particles are settled for the call that was looked at last."""
        objective = self.objective
        is_waiting = objective.trainer.waiting is not None or bool(objective.trainer.late[0])
        return not is_waiting and objective.particles.is_settled(objective.runner) and objective.runner.is_settled

    def meet(self, program: Program) -> bool:
        """Looks at a call whose step is recorded, and says whether all is settled for it.

        A new call takes a step that is undone, as where a tensor stands in place of a number.
        """
        objective, recordings = self.objective, self.objective.runner.recordings
        mode = objective.mode(learning=True)
        objective.runner.meet(program, mode)
        if not (recordings.now.recorded or recordings.is_dense):
            with untraced(self), LentBuffers():
                objective.taken(program, mode)
                found = snapshot(recordings)
            restore(recordings, found)
        return self.is_settled()

    def options(self) -> dict[str, Any]:
        """The options that a recording depends on, by name."""
        objective = self.objective
        return {
            "training": objective.training,
            "particles": astuple(objective.particles.now),
            "lam": objective.lam,
            "gamma": objective.gamma,
            "learner": objective.learner,
            "critics": sorted(objective.critics.blocks),
            **objective.recorded_options(),
        }

    def places(self) -> list[Place]:
        """Critics, statistics and the state of the critics' optimiser."""
        optimizers = self.objective.trainer.optimizer.optimizers
        modules = self.objective.critics.modules()
        tables: list[Any] = [table for module in modules for table in (module._parameters, module._buffers)]
        tables += [state for optimizer in optimizers.values() for state in optimizer.state.values()]
        found = [Place(table, name, held) for table in tables for name, held in table.items() if held is not None]
        counts = [Place(group, "n", group["n"]) for each in optimizers.values() for group in each.param_groups]
        return [*found, *counts, *(Place(optimizers, key, optimizer) for key, optimizer in optimizers.items())]

    def recorded_step(self, program: Program, number: RecordedStep) -> tuple[Step, Tensor]:
        """Takes a step, and gives a scalar that has its gradient; what the step teaches is noted, not applied."""
        mode = replace(self.objective.mode(learning=True), num_steps=number, is_recorded=True)
        found = self.objective.taken(program, mode)
        self.objective.trainer.announce()
        return found
