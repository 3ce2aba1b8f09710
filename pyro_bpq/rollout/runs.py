r"""The runs of one step: what is run, the tensors of runs and how they are stacked, and what changes with the step.

Tensors of like-shaped sites are stacked along a leading *site axis*, so that each later step is one batched operation
per kind of site. A plate dimension has size 1 where a site is outside the plate:

    (sites G, particles M, plate dims..., event dims...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError, PlateError
from pyro_bpq.graph.scg import Plate
from pyro_bpq.rollout.features import Neighbours, neighbours


class Program(NamedTuple):
    """A model and a guide, and the arguments of both."""

    model: Any
    guide: Any
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class SiteRecord:
    """One latent site of the guide in one run."""

    fn: Any
    value: Tensor  # value of the site, of shape `batch_shape + event_shape`
    score: Tensor | None  # `log q` if the score function is needed (neither scaled nor masked), else `None`
    scale: float | Tensor = 1.0  # product of the scales that Pyro applies to the site (subsampling, `poutine.scale`)
    mask: Tensor | bool | None = None
    prior: Any = None  # the model's distribution at the same site, or `None`
    prior_scale: float | Tensor = 1.0  # scale of the model's site
    prior_mask: Tensor | bool | None = None  # mask of the model's site
    # The user's features for the critic, `infer={"bpq": {"context": ...}}`, or `None`
    context: Tensor | None = None
    # Returns the user's own prediction of the cost-to-go, with its gradient; or `None`
    baseline: Callable[[], Tensor] | None = None
    # Costs charged to single components, `batch_shape + (D,)`, in nats, detached; or `None`
    charged: Tensor | None = None

    @cached_property
    def near(self) -> Neighbours:
        """The values next to counts."""
        return neighbours(self.fn, self.value)


@dataclass(frozen=True)
class Run:
    """One run of guide and model."""

    sites: Mapping[str, SiteRecord]  # the latent sites of the guide, by name
    costs: Mapping[str, Tensor]  # every cost in nats, scaled and masked, in its batch shape, with its gradient
    differentiable: Tensor  # sum of all costs through which pathwise gradients flow, a scalar
    loss: Tensor  # the loss of the run (minus its ELBO), a scalar without gradient


@dataclass(frozen=True)
class Rollout:
    """The runs of one step that share a graph."""

    runs: tuple[Run, ...]  # one run per sequential particle, or a single vectorised one
    num_particles: int  # number of particles `M` in total
    plate_sizes: Mapping[Plate, int]
    plate_ndim: int
    is_vectorized: bool = False  # whether the one run holds all particles, left of the plate dimensions

    def __post_init__(self) -> None:
        if self.is_vectorized:
            ndim = self.plate_ndim + 1
            for name, cost in self.runs[0].costs.items():
                if any(size > 1 for size in cost.shape[: max(0, cost.dim() - ndim)]):
                    raise PlateError(
                        f"The cost {name!r} has the batch shape {tuple(cost.shape)}. With vectorised particles it may "
                        f"have {ndim} dimensions, the leftmost for the {self.num_particles} particles. A value was "
                        "probably given a dimension on the right that is no plate, as by z.unsqueeze(-1); that moves "
                        "particles to the left; or max_plate_nesting is too small. Try the program with "
                        "vectorize_particles=False."
                    )

    def _check_unplated(self, names: Sequence[str], shape: torch.Size, batch: tuple[int, ...]) -> None:
        """Raises if a non-plate dimension has as many elements as there are particles: a sum would mix them."""
        for i, (size, full) in enumerate(zip(reversed(shape), reversed(batch[1:]), strict=False)):
            if full == 1 and size == self.num_particles:
                raise PlateError(
                    f"{', '.join(map(repr, names))}: with {size} vectorised particles a tensor of batch shape "
                    f"{tuple(shape)} has {size} elements in dimension {-1 - i}, which is no plate there: particles may "
                    f"have moved into it, as by z.sum((-1, -2)). Keep them in dimension {-len(batch)}, as by "
                    "z.sum((-1, -2), keepdim=True), or put that dimension into a pyro.plate; or write "
                    "vectorize_particles=False."
                )

    def batch_shape(self, plates: Sequence[Plate]) -> tuple[int, ...]:
        """Returns the shape ``(M, plate dims...)`` of a site or cost with these plates."""
        shape = [1] * self.plate_ndim
        for plate in plates:
            shape[plate.dim] = self.plate_sizes[plate]
        return (self.num_particles, *shape)

    def run_shape(self, plates: Sequence[Plate]) -> tuple[int, ...]:
        """Returns that shape in one of the runs, which holds one particle if particles run one after the other."""
        shape = self.batch_shape(plates)
        return shape if self.is_vectorized else (1, *shape[1:])

    def stack(
        self, pick: Callable[[Run, str], Tensor], names: Sequence[str], plates: Sequence[Plate], event_ndim: int = 0
    ) -> Tensor:
        """Stacks one tensor of each named site or cost, ``(len(names), M, plate dims..., event...)``.

        ``pick`` maps a run and a name to a tensor ``batch_shape + event``. All have the same plates and event shape.
        """
        batch = self.batch_shape(plates)
        if self.is_vectorized:
            tensors = [pick(self.runs[0], name) for name in names]
            for shape in {tensor.shape[: tensor.dim() - event_ndim] for tensor in tensors}:
                self._check_unplated(names, shape, batch)
            return _stack(tensors, batch, event_ndim)
        stacked = [_stack([pick(run, name) for name in names], (1, *batch[1:]), event_ndim) for run in self.runs]
        return stacked[0] if len(stacked) == 1 else torch.cat(stacked, dim=1)


def _stack(tensors: list[Tensor], batch: tuple[int, ...], event_ndim: int) -> Tensor:
    if len({t.shape for t in tensors}) > 1:
        return torch.cat([align(t.unsqueeze(0), batch, event_ndim) for t in tensors])
    return align(tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors), batch, event_ndim)


def align(stacked: Tensor, batch: tuple[int, ...], event_ndim: int) -> Tensor:
    """Reshapes ``(G, some batch dims, event)`` to ``(G, *batch, event)``; sums dimensions without a plate."""
    split = stacked.dim() - event_ndim
    have, event = stacked.shape[1:split], stacked.shape[split:]
    if have == batch:
        return stacked
    missing = len(batch) - len(have)
    if missing < 0:
        if event_ndim:
            raise PlateError(
                f"A tensor of a site has the shape {tuple(stacked.shape[1:])}: more dimensions than its particles and "
                f"plates, {batch}, and its event. Drop leading dimensions, as of a context that you give "
                "(infer={'bpq': {'context': ...}}), or put them into a pyro.plate."
            )
        stacked, missing = stacked.sum(dim=tuple(range(1, 1 - missing))), 0
        have = stacked.shape[1:]
    stacked = stacked.reshape(stacked.shape[0], *(1,) * missing, *have, *event)
    extra = [i + 1 for i, size in enumerate(batch) if size == 1 and stacked.shape[i + 1] != 1 and not event_ndim]
    stacked = stacked.sum(dim=extra, keepdim=True) if extra else stacked
    return stacked.expand(stacked.shape[0], *batch, *event)


def sum_to_plates(tensor: Tensor, source: Sequence[Plate], target: Sequence[Plate]) -> Tensor:
    """Sums a tensor over its plates ``source`` that are not in ``target``, keeping the dimensions."""
    dims = [plate.dim for plate in source if plate not in target]
    return tensor.sum(dim=dims, keepdim=True) if dims else tensor


@dataclass(frozen=True)
class Particles:
    """Says how particles run: one after the other, in a plate of their own, or in a hidden dimension."""

    number: int = 1  # number of particles `M`
    is_vectorized: bool = False  # whether all particles run in one call, in an outermost plate that the programs see
    is_hidden: bool = False  # whether all particles run in one call, in a dimension that the programs do not see
    nesting: float = float("inf")  # bound on the number of nested plates, including the plate of the particles
    # Whether the particles are not drawn: each holds one joint value of all sites, and the loss is summed over them
    sums: bool = False
    # Whether these values have size one in plates: nets that read nothing else then run once for all rows of data
    is_compact: bool = False

    @property
    def draws(self) -> int:
        """Number of draws whose mean the loss is."""
        return 1 if self.sums else self.number

    @property
    def way(self) -> str:
        """How they run, in words."""
        if self.is_hidden:
            return "in one call, in a dimension that the program does not see"
        return "in one call, in a plate of their own" if self.has_plate else "one after the other"

    @property
    def has_plate(self) -> bool:
        """Whether the particles have a plate of their own."""
        return self.is_vectorized and self.number > 1

    @property
    def in_call(self) -> int:
        """Number of particles in one call of the programs."""
        return self.number if self.has_plate else 1


# What changes from step to step: options that are functions of the number of steps, and generators of noise.


Schedule = float | Callable[[int], float]


class RecordedStep(int):
    """The number that a step gets while it is recorded: how many steps were taken before it.

    Schedules then give tensors, which are inputs of the recording: a number would be frozen in it.
    """

    value: Callable[[Callable[[int], float], int], Tensor]  # makes such an input

    @staticmethod
    def of(number: int, value: Callable[[Callable[[int], float], int], Tensor]) -> RecordedStep:
        """The number of a step that is recorded."""
        step = RecordedStep(number)
        step.value = value
        return step


def scheduled(schedule: Callable[[int], float], number: int) -> Tensor:
    """What a schedule gives at a step, as a scalar tensor."""
    return torch.tensor(_number(schedule, number), dtype=torch.float64)


def _number(schedule: Callable[[int], float], number: int) -> float:
    found = schedule(number)
    try:
        return float(found)
    except TypeError as error:
        raise OptionError(f"A schedule gave {found!r} at step {number}: {schedule!r} must return a number.") from error


def at(schedule: Schedule | Tensor, number: int) -> float | Tensor:
    """The value of an option at a step.

    Returns:
        A number; a scalar tensor while a step is recorded, if the option is a function.
    """
    if isinstance(schedule, Tensor):
        return schedule
    if not callable(schedule):
        return float(schedule)
    return number.value(schedule, int(number)) if isinstance(number, RecordedStep) else _number(schedule, number)


class NoiseSource:
    """Generators for what an objective draws itself; the global generators are left alone.

    Attributes:
        number: How many there have been.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.number = seed, 0

    def __call__(self) -> torch.Generator:
        """The next generator."""
        self.number += 1
        return torch.Generator().manual_seed(self.seed_of(self.number))

    def seed_of(self, number: int) -> int:
        """Seed of a generator, counted from 1."""
        return (self.seed * 7919 + 1) * 1_000_003 + number
