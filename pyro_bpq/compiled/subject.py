r"""What is recorded: a step of an objective, and the places where it found what it reads."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import pyro
import torch
from torch import Tensor

from pyro_bpq.compiled.watch import NotYet
from pyro_bpq.errors import Unrecordable
from pyro_bpq.rollout.schedule import RecordedStep
from pyro_bpq.tracing.sandbox import Draws


@dataclass(frozen=True, eq=False)
class Place:
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


@dataclass(frozen=True)
class RecordedResult:
    """What a step yields while it is recorded."""

    loss: Tensor  # the loss in nats, detached
    surrogate: Tensor  # has the gradient of the loss
    info: dict[str, dict[str, Any]]  # what is known of each site


class Subject(Protocol):
    """An objective whose steps may be recorded and compiled."""

    def refuses(self) -> str:
        """Why its steps are not recorded at present, as the end of a sentence; empty if they are."""

    def is_settled(self, program: Any) -> bool:
        """Whether structure, particles and choice are settled for a program."""

    def look_again(self) -> None:
        """Looks in the next eager step whether the programs have another structure."""

    def options(self) -> dict[str, Any]:
        """The options that a recording depends on, by name."""

    def mark(self) -> Any:
        """A mark of the present state."""

    def go_back(self, mark: Any) -> None:
        """Goes back to a mark."""

    def places(self) -> list[Place]:
        """Critics, statistics and the state of the critics' optimiser."""

    def first_seed(self) -> int:
        """Seed of the next generator that the objective makes for itself."""

    def num_generators(self) -> int:
        """Number of generators that the objective has made for itself."""

    def generators(self, number: int) -> list[torch.Generator]:
        """The next generators that the objective makes for itself."""

    def recorded_step(self, program: Any, number: RecordedStep) -> RecordedResult:
        """Takes a step; what it teaches is noted, not applied."""

    def learn(self) -> None:
        """Applies what the step taught."""


@contextlib.contextmanager
def untraced(subject: Subject, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Undoes what a step does to an objective, to tensors, to the parameter store and to torch's generators."""
    draws, mark, known = Draws(), subject.mark(), set(pyro.get_param_store().keys())
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        draws.again()
        if of_devices:
            torch.cuda.set_rng_state_all(of_devices)
        subject.go_back(mark)
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        created = set(pyro.get_param_store().keys()) - known
        for name in created:
            del pyro.get_param_store()[name]
        moved = random.getstate() != of_python
        random.setstate(of_python)
        now: Any = numpy.random.get_state()
        moved = moved or not all(numpy.array_equal(a, b) for a, b in zip(now, of_numpy, strict=True))
        numpy.random.set_state(of_numpy)
    if moved:
        raise Unrecordable(
            "it draws from random or numpy.random, whose numbers a recording would freeze: draw with torch, as by "
            "torch.rand(()), or hand the numbers over as arguments of step()"
        )
    if created:
        raise NotYet(f"it makes parameters: {', '.join(sorted(created))}")
