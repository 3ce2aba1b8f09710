r"""What is recorded: a step of an objective, the update of an optimiser, and the places where it found what it reads.

Torch's Adam, AdamW and SGD run by their own code, with the step size as a scalar input; Pyro's ClippedAdam reads
numbers, so its equations stand here. State and step size stay those of the optimiser: the recording writes its
tensors, and numbers that are no tensors are counted after each step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any, NamedTuple

import numpy
import pyro
import torch
from pyro.optim import PyroLRScheduler, PyroOptim
from pyro.optim.clipped_adam import ClippedAdam
from pyro.optim.optim import is_scheduler
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor

from pyro_bpq.compiled.watch import NotYet
from pyro_bpq.critics.learner import AveragedAdam
from pyro_bpq.errors import Unrecordable
from pyro_bpq.record.further import Draws, LentBuffers
from pyro_bpq.rollout.runs import Program, RecordedStep
from pyro_bpq.short import restore, snapshot
from pyro_bpq.step.surrogate import Step

# Those of torch whose own code takes the step size as a tensor.
_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
# How a recorded update differs from an eager one: no number is read, no kernel is fused by hand.
_RECORDED = (("differentiable", True), ("foreach", False), ("fused", False))


class Place(NamedTuple):
    """Where a recording found something that has to be there still."""

    container: MutableMapping[Any, Any]  # what holds it
    key: Any  # under which key
    value: Any  # what it is


def all_hold(places: Iterable[Place]) -> bool:
    """Whether everything is still at its place."""
    for place in places:
        # Called in every step: neither a generator nor another call.
        if place.container.get(place.key) is not place.value:
            return False
    return True


def tensors_of(places: Iterable[Place]) -> tuple[Tensor, ...]:
    """The tensors at some places."""
    return tuple(place.value for place in places if isinstance(place.value, Tensor))


def distinct(*groups: Iterable[Tensor]) -> list[Tensor]:
    """The tensors of some groups in their order, each once."""
    return list({id(tensor): tensor for group in groups for tensor in group}.values())


class Subject:
    """What compiled steps ask of an objective.

    Args:
        objective: The objective.

    Attributes:
        noise: Source of what it draws itself.
        mark: Gives a mark of the present state.
        go_back: Goes back to a mark.
        learn: Applies what a recorded step taught.
        look_again: Looks in the next eager step whether the programs have another structure.
    """

    def __init__(self, objective: Any) -> None:
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

    def agree(self, program: Program, other: Program) -> bool:
        """Whether steps of two programs, both undone, have one loss and one surrogate."""
        mode, found = self.objective.mode(learning=True), []
        try:
            for each in (program, other):
                self.objective.runner.meet(each, mode)
                with untraced(self), LentBuffers():
                    self.look_again()  # recordings of one age
                    step, surrogate = self.objective.taken(each, mode)
                    found.append(torch.stack((step.loss, surrogate)).detach().double())
        except Unrecordable:
            raise
        except Exception:  # of the program: a tensor has no is_integer()
            return False
        return torch.allclose(found[0], found[1], 1e-3, 1e-3, equal_nan=True)

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


@contextlib.contextmanager
def untraced(subject: Subject) -> Iterator[None]:
    """Undoes what a step does to an objective, to the parameter store and to torch's generators.

    It runs without Pyro's validation, which reads numbers, and without warnings, which eager steps have given.
    """
    draws, mark, known = Draws(), subject.mark(), set(pyro.get_param_store().keys())
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    before = get_rng_state()
    try:
        with torch.random.fork_rng(devices), pyro.validation_enabled(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        draws.again()
        subject.go_back(mark)
        created = set(pyro.get_param_store().keys()) - known
        for name in created:
            del pyro.get_param_store()[name]
        after = get_rng_state()
        set_rng_state(before)
    pairs = zip(before["numpy"], after["numpy"], strict=True)
    if before["random"] != after["random"] or not all(numpy.array_equal(a, b) for a, b in pairs):
        raise Unrecordable(
            "it draws from random or numpy.random, whose numbers a recording would freeze: draw with torch, as by "
            "torch.rand(()), or hand the numbers over as arguments of step()"
        )
    if created:
        raise NotYet(f"it makes parameters: {', '.join(sorted(created))}")


class OptimizerUpdate:
    """The update of one parameter by its optimiser.

    Attributes:
        clip: Clips its gradient in place; ``None`` if nothing is clipped.
        settings: The optimiser's settings but for the step size.
        places: Where parameter, optimiser and state were found.
    """

    def __init__(self, parameter: Tensor, optim: PyroOptim) -> None:
        owner = optim.optim_objs[parameter]
        self.parameter, self.optimizer = parameter, (own := _without_schedule(owner))
        self.clip: Callable[[Tensor], None] | None = optim.grad_clip[parameter]
        self.settings = {**self.group}
        self.places = [Place(optim.optim_objs, parameter, owner), Place(vars(own), "state", own.state)]
        if (state := own.state.get(parameter)) is not None:
            self.places.append(Place(own.state, parameter, state))
            self.places += [Place(state, name, value) for name, value in state.items() if isinstance(value, Tensor)]

    @property
    def group(self) -> dict[str, Any]:
        """The optimiser's settings."""
        return self.optimizer.param_groups[0]

    @property
    def holds(self) -> bool:
        """Whether settings and state are where they were."""
        group, settings = self.group, self.settings
        settings["lr"] = group["lr"]
        return group == settings and all_hold(self.places)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The step size of the next update; for ClippedAdam also its number."""
        group = self.group
        if isinstance(self.optimizer, ClippedAdam):
            return group["lr"] * group["lrd"], self.optimizer.state[self.parameter]["step"] + 1
        return (float(group["lr"]),)

    def count(self) -> None:
        """Counts an update where the optimiser counts in numbers."""
        if isinstance(self.optimizer, ClippedAdam):
            self.group["lr"] *= self.group["lrd"]
            self.optimizer.state[self.parameter]["step"] += 1

    def apply(self, gradient: Tensor, numbers: Sequence[Tensor]) -> None:
        """Updates the parameter."""
        kept = self.parameter.grad
        try:
            # Clipping writes into the gradient.
            self.parameter.grad = gradient if self.clip is None else gradient.clone()
            if self.clip is not None:
                self.clip(self.parameter)
            assert self.parameter.grad is not None
            if isinstance(self.optimizer, ClippedAdam):
                self._step_of_pyro(self.parameter.grad, *numbers)
            else:
                self._step_of_torch(*numbers)
        finally:
            self.parameter.grad = kept

    def _step_of_pyro(self, gradient: Tensor, step_size: Tensor, number: Tensor) -> None:
        """Pyro's ClippedAdam; the step size has decayed already.

        m ← β₁ m + (1 - β₁) g        v ← β₂ v + (1 - β₂) (g - c m)²        c: 1 if the variance is centred, else 0
        x ← x - lr √(1 - β₂ⁿ) / (1 - β₁ⁿ) · m / (√v + ε)
        """
        parameter, group, state = self.parameter, self.group, self.optimizer.state[self.parameter]
        first, second = group["betas"]
        gradient = gradient.clamp(-group["clip_norm"], group["clip_norm"])
        if group["weight_decay"] != 0:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(first).add_(gradient, alpha=1 - first)
        spread = gradient - mean if group.get("centered_variance") else gradient
        square.mul_(second).addcmul_(spread, spread, value=1 - second)
        scale = step_size * (1 - second**number).sqrt() / (1 - first**number)
        parameter.sub_(scale.to(parameter.dtype) * mean / square.sqrt().add_(group["eps"]))

    def _step_of_torch(self, step_size: Tensor) -> None:
        group = self.group
        kept = {name: group[name] for name in ("lr", *dict(_RECORDED)) if name in group}
        try:
            # Torch multiplies by a step size that asks for a gradient, where it would read another one.
            size = step_size.to(self.parameter.dtype).detach().requires_grad_()
            group.update({name: value for name, value in _RECORDED if name in group}, lr=size)
            self.optimizer.step()
        finally:
            group.update(kept)


class Updates:
    """The updates of one of Pyro's optimisers."""

    def __init__(self, optim: PyroOptim) -> None:
        self.optim = optim
        # The optimisers that were looked at last, and what was found.
        self._seen: list[Any] = []
        self._refusal = ""

    def refuses(self) -> str:
        """Why no update is recorded, as the end of a sentence; empty if they are.

        It looks at the optimisers that are there already.
        """
        if type(self.optim) not in (PyroOptim, PyroLRScheduler):
            return f"{type(self.optim).__name__} updates parameters by code of its own"
        owners = list(self.optim.optim_objs.values())
        if owners != self._seen:
            self._seen, self._refusal = owners, _refusal(list(map(_without_schedule, owners)))
        return self._refusal

    def of(self, parameters: Iterable[Tensor], leaves: Iterable[Tensor]) -> tuple[OptimizerUpdate, ...]:
        """The updates of the parameters that get a gradient: they are among the leaves, or had one before.

        Raises:
            NotYet: If the optimiser has not met one of them. An eager step shows it.
        """
        graded = set(map(id, leaves))
        wanted = [each for each in parameters if id(each) in graded or each.grad is not None]
        if any(each not in self.optim.optim_objs for each in wanted):
            raise NotYet("the optimiser has not met all parameters yet")
        found = tuple(OptimizerUpdate(each, self.optim) for each in wanted)
        bare = [each for each in found if each.parameter not in each.optimizer.state]
        if not all(isinstance(each.optimizer, torch.optim.SGD) for each in bare):
            raise NotYet("the optimiser has no state for some parameters yet")
        return found

    def decay(self, idle: Iterable[Tensor]) -> None:
        """Counts a step of parameters that have no gradient: ClippedAdam makes their step sizes smaller, too."""
        for parameter in idle:
            owner = _without_schedule(self.optim.optim_objs[parameter])
            if isinstance(owner, ClippedAdam):
                owner.param_groups[0]["lr"] *= owner.param_groups[0]["lrd"]


def numbers_of(updates: Iterable[OptimizerUpdate]) -> Tensor:
    """The numbers of some updates, one after the other."""
    return torch.tensor([number for update in updates for number in update.numbers], dtype=torch.float64)


def apply_all(updates: Iterable[OptimizerUpdate], gradients: Mapping[Tensor, Tensor], numbers: Tensor) -> None:
    """Updates parameters, from gradients and from the numbers of all updates, one after the other."""
    own = iter(numbers)
    with torch.no_grad():
        for update in updates:
            gradient = gradients.get(update.parameter, torch.zeros_like(update.parameter))
            update.apply(gradient, [next(own) for _ in update.numbers])


def _without_schedule(owner: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = owner.optimizer if is_scheduler(owner) else owner
    return optimizer


def _refusal(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    strange = {type(each).__name__ for each in optimizers if type(each) not in (*_OF_TORCH, ClippedAdam)}
    if strange:
        names = ", ".join(sorted(strange))
        return f"no update of {names} is recorded; write Adam, AdamW, SGD or ClippedAdam of pyro.optim"
    groups = [each.param_groups[0] for each in optimizers]
    if any(group.get("capturable") or group.get("differentiable") for group in groups):
        return "an optimiser has the option capturable=True or differentiable=True; leave that option out"
    return ""
