r"""An objective as its steps are recorded and compiled."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

from pyro_bpq.compiled.subject import Place, RecordedResult, untraced
from pyro_bpq.critics.learner import AveragedAdam
from pyro_bpq.rollout.runs import Program
from pyro_bpq.rollout.schedule import RecordedStep
from pyro_bpq.snapshots import restore, snapshot
from pyro_bpq.tracing.sandbox import LentBuffers

if TYPE_CHECKING:
    from pyro_bpq.objectives.objective import Objective


class Recordable:
    """What compiled steps ask of an objective."""

    def __init__(self, objective: Objective) -> None:
        self.objective, self.noise = objective, objective.runner.noise

    def refuses(self) -> str:
        """Why steps are not recorded, as the end of a sentence; empty if they are."""
        trainer = self.objective.trainer
        if trainer.replayer is not None:
            return "critics learn from stored rollouts (replay)"
        if trainer.ranks is not None:
            return "several processes train the critics together"
        if trainer.keeps_staged:
            return "something learns later from what a step worked on (steps > 1, or a controlled SVI)"
        if callable(self.objective.gamma):
            return "gamma is a function of the step"
        if trainer.options.sweep is not None:
            return "critics learn in a backward sweep"
        if not all(isinstance(each, AveragedAdam) for each in trainer.optimizer.optimizers.values()):
            return "an optimiser of your own trains the critics, and counts its steps in Python"
        return self.objective.runner.refuses_recording()

    def is_settled(self, program: Program) -> bool:
        """Whether structure and particles are settled for a program."""
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
        return self.is_settled(program)

    def look_again(self) -> None:
        """Looks in the next eager step whether the programs have another structure."""
        self.objective.runner.recordings.look_again()

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

    def mark(self) -> Any:
        """A mark of the present state."""
        return self.objective.mark(deep=True)

    def go_back(self, mark: Any) -> None:
        """Goes back to a mark."""
        self.objective.go_back(mark)

    def places(self) -> list[Place]:
        """Critics, statistics and the state of the critics' optimiser."""
        bank, own = self.objective.critics, self.objective.trainer.optimizer
        found = [
            Place(tensors, name, tensor)
            for block in bank.blocks.values()
            for module in block.modules()
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        for key, optimizer in own.optimizers.items():
            assert isinstance(optimizer, AveragedAdam)
            optimizer.count_in_tensors()
            found.append(Place(own.optimizers, key, optimizer))
            for state in optimizer.state.values():
                found += [Place(state, name, tensor) for name, tensor in state.items()]
        return found

    def recorded_step(self, program: Program, number: RecordedStep) -> RecordedResult:
        """Takes a step; what it teaches is noted, not applied."""
        mode = replace(self.objective.mode(learning=True), num_steps=number, is_recorded=True)
        result, surrogate = self.objective.taken(program, mode)
        self.objective.trainer.announce()
        return RecordedResult(result.loss.detach(), surrogate, result.info if result.learns else {})

    def learn(self) -> None:
        """Applies what the step taught."""
        self.objective.learn()
