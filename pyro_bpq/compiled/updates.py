r"""The update of an optimiser as a part of a recorded step.

Torch's Adam, AdamW and SGD run by their own code, with the step size as a scalar input; Pyro's ClippedAdam reads
numbers, so its equations stand here. State and step size stay those of the optimiser: the recording writes its
tensors, and numbers that are no tensors are counted after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.optim import PyroLRScheduler, PyroOptim
from pyro.optim.clipped_adam import ClippedAdam
from pyro.optim.optim import is_scheduler
from torch import Tensor

from pyro_bpq.compiled.subject import Place, all_hold
from pyro_bpq.compiled.watch import NotYet

# Those of torch whose own code takes the step size as a tensor.
_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
# How a recorded update differs from an eager one: no number is read, no kernel is fused by hand.
_RECORDED = (("differentiable", True), ("foreach", False), ("fused", False))


@dataclass(frozen=True, eq=False)
class OptimizerUpdate:
    """The update of one parameter."""

    parameter: Tensor  # the parameter
    optimizer: torch.optim.Optimizer  # its optimiser
    clip: Callable[[Tensor], None] | None  # clips its gradient in place; ``None`` if nothing is clipped
    settings: dict[str, Any]  # the optimiser's settings but for the step size
    places: tuple[Place, ...]  # where parameter, optimiser and state were found

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

    @property
    def state(self) -> dict[str, Any] | None:
        """The optimiser's state; ``None`` before its first update."""
        return self.optimizer.state.get(self.parameter)

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
                _clipped_adam(self.parameter, self.parameter.grad, self.optimizer, *numbers)
            else:
                self._step_of_torch(numbers[0])
        finally:
            self.parameter.grad = kept

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


def _clipped_adam(
    parameter: Tensor, gradient: Tensor, optimizer: torch.optim.Optimizer, step_size: Tensor, number: Tensor
) -> None:
    """Pyro's ClippedAdam; the step size has decayed already.

    m ← β₁ m + (1 - β₁) g        v ← β₂ v + (1 - β₂) (g - c m)²        c: 1 if the variance is centred, else 0
    x ← x - lr √(1 - β₂ⁿ) / (1 - β₁ⁿ) · m / (√v + ε)
    """
    (group,), state = optimizer.param_groups, optimizer.state[parameter]
    first, second = group["betas"]
    gradient = gradient.clamp(-group["clip_norm"], group["clip_norm"])
    if group["weight_decay"] != 0:
        gradient = gradient.add(parameter, alpha=group["weight_decay"])
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.mul_(first).add_(gradient, alpha=1 - first)
    spread = gradient - mean if group["centered_variance"] else gradient
    square.mul_(second).addcmul_(spread, spread, value=1 - second)
    scale = step_size * (1 - second**number).sqrt() / (1 - first**number)
    parameter.sub_(scale.to(parameter.dtype) * mean / square.sqrt().add_(group["eps"]))


class Updates:
    """The updates of one of Pyro's optimisers."""

    def __init__(self, optim: PyroOptim) -> None:
        self.optim = optim
        # The optimisers that were looked at last, and what was found.
        self._seen: list[Any] = []
        self._refusal = ""

    def __repr__(self) -> str:
        return f"Updates({type(self.optim).__name__})"

    def refuses(self) -> str:
        """Why no update is recorded, as the end of a sentence; empty if they are.

        It looks at the optimisers that are there already.
        """
        if type(self.optim) not in (PyroOptim, PyroLRScheduler):
            return f"{type(self.optim).__name__} updates parameters by code of its own"
        owners = list(self.optim.optim_objs.values())
        if owners != self._seen:
            self._seen, self._refusal = owners, self._look(owners)
        return self._refusal

    def _look(self, owners: Sequence[Any]) -> str:
        kinds = {type(_without_schedule(each)) for each in owners}
        strange = sorted(kind.__name__ for kind in kinds if kind not in (*_OF_TORCH, ClippedAdam))
        if strange:
            return f"no update of {', '.join(strange)} is recorded; write Adam, AdamW, SGD or ClippedAdam of pyro.optim"
        if any(map(_is_capturable, owners)):
            return "an optimiser has the option capturable=True or differentiable=True; leave that option out"
        return ""

    def of(self, parameters: Iterable[Tensor], leaves: Iterable[Tensor]) -> tuple[OptimizerUpdate, ...]:
        """The updates of the parameters that get a gradient: they are among the leaves, or had one before.

        Raises:
            NotYet: If the optimiser has not met one of them. An eager step shows it.
        """
        graded = set(map(id, leaves))
        wanted = [each for each in parameters if id(each) in graded or each.grad is not None]
        if any(each not in self.optim.optim_objs for each in wanted):
            raise NotYet("the optimiser has not met all parameters yet")
        found = tuple(map(self._of, wanted))
        if any(not isinstance(each.optimizer, torch.optim.SGD) and each.state is None for each in found):
            raise NotYet("the optimiser has no state for some parameters yet")
        return found

    def _of(self, parameter: Tensor) -> OptimizerUpdate:
        owner = self.optim.optim_objs[parameter]
        optimizer = _without_schedule(owner)
        state = optimizer.state.get(parameter)
        places = [Place(self.optim.optim_objs, parameter, owner), Place(vars(optimizer), "state", optimizer.state)]
        if state is not None:
            places.append(Place(optimizer.state, parameter, state))
            places += [Place(state, name, value) for name, value in state.items() if isinstance(value, Tensor)]
        settings = {**optimizer.param_groups[0]}
        clip = self.optim.grad_clip[parameter]
        return OptimizerUpdate(parameter, optimizer, clip, settings, tuple(places))


def numbers_of(updates: Iterable[OptimizerUpdate]) -> list[float]:
    """The numbers of some updates, one after the other."""
    return [number for update in updates for number in update.numbers]


def apply_all(updates: Sequence[OptimizerUpdate], gradients: Mapping[int, Tensor], numbers: Iterator[Tensor]) -> None:
    """Updates parameters."""
    of_all = iter(next(numbers)) if updates else iter(())
    with torch.no_grad():
        for update in updates:
            gradient = gradients.get(id(update.parameter))
            if gradient is None:
                gradient = torch.zeros_like(update.parameter)
            update.apply(gradient, [next(of_all) for _ in update.numbers])


def _without_schedule(owner: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = owner.optimizer if is_scheduler(owner) else owner
    return optimizer


def _is_capturable(owner: Any) -> bool:
    group = _without_schedule(owner).param_groups[0]
    return bool(group.get("capturable") or group.get("differentiable"))
