r"""The protocol of a gradient estimator: tensors of like-shaped sites in, a surrogate term out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError
from pyro_bpq.rollout.distributed import Ranks, joint_mean
from pyro_bpq.rollout.features import Components
from pyro_bpq.rollout.moments import Standardised

__all__ = [
    "Estimator",
    "SiteContext",
    "SiteInfo",
    "SiteProgram",
    "SiteTerm",
    "Statistics",
    "at_step",
    "check_decay",
    "initial_statistics",
    "needs_crossed",
    "needs_program",
    "needs_slope",
    "needs_table",
    "update_mean",
]

# Name of a running statistic and its initial value per site: a float for a scalar, a tuple or tensor for a vector.
Statistics = Mapping[str, float | tuple[float, ...] | Tensor]


@dataclass(frozen=True)
class SiteInfo:
    """What is known of a site before any tensor: an estimator decides on it whether it can serve.

    Args:
        name: Name of the site.
        distribution: Name of its distribution's class.
        has_rsample: Whether the distribution is reparameterised.
        components: Its finite components, or ``None``.
        num_particles: Number of particles.
        plates: Names of its plates.
    """

    name: str
    distribution: str
    has_rsample: bool
    components: Components | None
    num_particles: int
    plates: tuple[str, ...] = ()


class SiteProgram(Protocol):
    """What an estimator may ask of the program beyond the tensors of one run: costs at other values.

    Every call of :meth:`cost` or :meth:`gradient` runs guide and model again, once per site of the class and
    sequential particle: the site takes the given value at all components and plate rows at once, what is sampled
    downstream of it is drawn afresh and independently, everything else keeps its value.

    Attributes:
        generator: Noise for what the estimator draws itself; on the CPU.
    """

    generator: torch.Generator

    @property
    def value(self) -> Tensor:
        """The sampled values, ``(G, M, plates, event)``, detached."""
        ...

    @property
    def rows_meet(self) -> bool:
        """Whether a cost of one plate row reads another.

        Then all rows at another value cost something else than one of them.
        """
        ...

    def cost(self, value: Tensor) -> Tensor:
        """Costs-to-go ``(G, M, plates)`` in nats at other values ``(G, M, plates, event)``, detached."""
        ...

    def gradient(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and the gradient ``(G, M, plates, event)`` of all costs downstream; detached."""
        ...

    def slope(self) -> Tensor:
        """That gradient at the sampled values; without another run where no site is sampled downstream."""
        ...

    def independent(self) -> Tensor:
        """Costs-to-go ``(G, M, plates)`` in nats, detached, of one run that draws every site afresh."""
        ...

    def remaining(self) -> Tensor:
        """Of the same run what is not known at every value of a site, ``(G, M, plates)`` in nats, detached."""
        ...

    def from_index(self, index: Tensor) -> Tensor:
        """Values ``(G, M, plates, event)`` from the indices ``(G, M, plates, D)`` of finite components."""
        ...

    def held(self, value: Tensor) -> SiteProgram:
        """The same program in which sites downstream keep the values that they take in a run at ``value``.

        Costs are then functions of the site's value alone, and as smooth as the program: a draw downstream would
        follow the value in jumps. Where nothing is sampled downstream there is no extra run.
        """
        ...

    def stack(self, pick: Callable[[Any], Tensor], event_ndim: int) -> Tensor:
        """Stacks ``pick(fn)`` of the sites' distributions to ``(G, M, plates, event)``, with its gradient.

        Args:
            pick: From a distribution to a tensor of shape ``batch_shape + event``.
            event_ndim: Number of its rightmost dimensions that are no batch dimensions.
        """
        ...


@dataclass(frozen=True)
class SiteContext:
    """Tensors of ``G`` like-shaped sites: batch shape ``(G, M, plate dims...)``, costs in nats.

    All but ``score``, ``log_probs`` and ``baseline`` are detached.

    Args:
        names: Names of the sites.
        score: ``log q`` of the sample, neither scaled nor masked, with its gradient.
        cost: Cost-to-go ``C_X``, the sum of the costs downstream in this run.
        num_particles: Number of particles ``M``.
        log_probs: Log-probabilities ``(..., D, K)`` of the finite components, with gradient, or ``None``.
        index: Index ``(..., D)`` of the sampled value, or ``None``.
        exact: Immediate costs after setting component ``d`` to value ``k``, ``(..., D, K)``; the entry at
            the sampled index is the cost of the sample. ``None`` where none are known.
        exact_cost: The sum of those immediate costs in this run.
        learned: Critic's advantages ``(..., D, K)`` for the remaining costs, or ``None``.
        level: Critic's ``V`` for the remaining costs, or ``None``.
        own: With a critic that reads the value as a whole, the residual whose ``E[own ∇ log q_d]`` is
            ``E[Σ_k ∇q_d(k) learned[d, k]]``; ``level`` then is ``E[Q]``. ``None`` for a dueling critic.
        moments: Centred powers of a value without finite components, where a critic reads them; ``learned`` then
            holds their factors ``(..., D, 2)``.
        correction: Sum over later sites ``Y`` of ``A_Y = Q_Y(y) - E_Y[Q_Y]``, or ``None``.
        statistics: Running statistics from earlier steps, by name, with a leading site axis.
        count: Number of steps behind the statistics, ``(G,)``.
        baseline: The user's own prediction of ``cost``, with its gradient, or ``None``.
        program: Costs at other values, for an estimator with ``needs_program = True``; else ``None``.
        crossed: What the other particles' costs-to-go change by beside this particle's past, averaged over them, in
            nats, for an estimator with ``needs_crossed = True``; ``None`` where none is known.
        ranks: The processes that learn together, or ``None``.
    """

    names: tuple[str, ...]
    score: Tensor
    cost: Tensor
    num_particles: int = 1
    log_probs: Tensor | None = None
    index: Tensor | None = None
    exact: Tensor | None = None
    exact_cost: Tensor | None = None
    learned: Tensor | None = None
    level: Tensor | None = None
    own: Tensor | None = None
    moments: Standardised | None = None
    correction: Tensor | None = None
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    count: Tensor | None = None
    baseline: Tensor | None = None
    program: SiteProgram | None = None
    crossed: Tensor | None = None
    ranks: Ranks | None = None

    def joint(self, mean: Tensor) -> tuple[Tensor, Tensor | int]:
        """A mean over the samples of this step, and their number, with those of other processes.

        Running statistics are averaged over processes in any case. Those that are not linear in such means, such as a
        ratio of two, are right only if they are made from joint ones.

        Args:
            mean: Mean over particles and plate rows of this process.
        """
        return joint_mean(self.ranks, mean, self.cost[0].numel())


class SiteTerm(NamedTuple):
    """What an estimator returns.

    Args:
        surrogate: Any shape; the gradient of its sum is the gradient estimate, summed over particles.
        statistics: New values of running statistics; they take effect after the step.
    """

    surrogate: Tensor
    statistics: Mapping[str, Tensor] = {}


@runtime_checkable
class Estimator(Protocol):
    """A gradient estimator is a frozen value object that turns a :class:`SiteContext` into a surrogate.

    Attributes:
        is_unbiased: Whether its expectation is the exact gradient for any state of the critics.
        is_pathwise: Whether the site's value carries the gradient.
        uses_critic: Whether it reads ``learned``, ``level`` or ``correction``.

    An estimator whose running statistics depend on the size of a value, such as a network's weights, gives them in
    a method ``sized_statistics(width)``, where ``width`` counts the numbers that a value is encoded by: one for a real
    or binary component, ``K`` for one of ``K > 2`` values.

    An estimator with ``needs_crossed = True`` reads ``context.crossed``.
    An estimator that compares values has the attribute ``needs_program = True`` and reads ``context.program``. One with
    ``needs_table = False`` reads neither ``context.log_probs`` nor ``context.index``, which are then ``None`` unless
    something else needs them. One with ``by_component = True`` treats further dimensions of a site as it treats plates.
    An estimator that lets the value of a site without ``rsample`` carry a gradient, as straight-through does, has
    ``is_pathwise = True`` and a method ``attach(fn, value, generator)`` from the distribution and the drawn value to
    the value that the program sees; it is then never called. Where that gradient is not all of it, a method
    ``correction(fn, value)`` gives, of the batch shape, what the score function takes in place of ``log q``.
    An estimator whose options change over time, such as a temperature, has a method ``at(step)`` that gives it as it
    is after so many steps. One that keeps statistics whose size depends on the site's has a method
    ``sized_statistics(width)``, with the number of features of an encoded value.
    """

    is_unbiased: ClassVar[bool]
    is_pathwise: ClassVar[bool]
    uses_critic: ClassVar[bool]

    def unsupported(self, site: SiteInfo) -> str | None:
        """Why the site cannot be served and what to write instead, or ``None`` if it can."""
        ...

    def statistics(self, num_particles: int) -> Statistics:
        """Names and initial values of the running statistics that it keeps per site."""
        ...

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The surrogate term."""
        ...


def needs_program(estimator: Estimator) -> bool:
    """Whether an estimator reads ``context.program``."""
    return bool(getattr(estimator, "needs_program", False))


def needs_crossed(estimator: Estimator) -> bool:
    """Whether an estimator reads ``context.crossed``."""
    return bool(getattr(estimator, "needs_crossed", False))


def needs_slope(estimator: Estimator) -> bool:
    """Whether an estimator reads ``context.program.slope()``."""
    return bool(getattr(estimator, "needs_slope", False))


def needs_table(estimator: Estimator) -> bool:
    """Whether an estimator may read ``context.log_probs`` and ``context.index``."""
    # Not inherited: a subclass may read what its base does not.
    return bool(vars(type(estimator)).get("needs_table", True))


def tells_components(estimator: Estimator) -> bool:
    """Whether each component of a site may be told its own cost-to-go, in a dimension behind those of the plates."""
    # Not inherited: a subclass may sum where its base does not.
    told = vars(type(estimator)).get("by_component", False)
    return bool(told.__get__(estimator) if isinstance(told, property) else told)


def at_step(estimator: Any, step: int) -> Any:
    """An estimator as it is after so many steps of the ELBO: its schedules become numbers."""
    return estimator.at(step) if hasattr(estimator, "at") else estimator


def initial_statistics(estimator: Estimator, num_particles: int, width: int) -> Statistics:
    """All running statistics of an estimator, by name, with their initial values per site."""
    sized = getattr(estimator, "sized_statistics", None)
    return {**estimator.statistics(num_particles), **({} if sized is None else sized(width))}


def check_decay(owner: str, decay: float) -> None:
    """Raises where the weight of the past in a running mean is out of range."""
    if not 0.0 <= decay < 1.0:
        raise OptionError(f"{owner}(decay={decay!r}): write a number in [0, 1).")


def update_mean(old: Tensor, new: Tensor, count: Tensor, decay: float | Tensor) -> Tensor:
    """Running mean: the plain mean of the first steps, exponential with ``decay`` afterwards."""
    weight = (1.0 / (count + 1.0)).clamp(min=1.0 - decay)
    return old + weight.reshape(-1, *(1,) * (new.dim() - 1)) * (new - old)


def site_mean(value: Tensor) -> Tensor:
    """Mean over everything but the site axis."""
    return value.flatten(1).mean(1)
