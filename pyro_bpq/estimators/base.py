r"""The protocol of a gradient estimator: tensors of like-shaped sites in, a surrogate term out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

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
    "check_decay",
    "initial_statistics",
    "update_mean",
]

# What an estimator needs that reads ``log_probs`` or ``index``.
TABLE = "table"

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

    All but ``score``, ``log_probs`` and the user's own baseline are detached.

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
        signals: What the estimator has asked for besides (:attr:`Estimator.needs`), by name.
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
    signals: Mapping[str, Any] = field(default_factory=dict)
    ranks: Ranks | None = None

    @property
    def program(self) -> SiteProgram:
        """Costs at other values."""
        found: SiteProgram = self.signals["program"]
        return found

    @property
    def baseline(self) -> Tensor:
        """The user's own prediction of ``cost``, with its gradient."""
        found: Tensor = self.signals["baseline"]
        return found

    @property
    def crossed(self) -> Tensor | None:
        """What the other particles' costs-to-go change by beside this particle's past, averaged over them, in nats.

        ``None`` where none is known.
        """
        found: Tensor | None = self.signals.get("crossed")
        return found

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


class Estimator:
    """A gradient estimator is a frozen value object that turns a :class:`SiteContext` into a surrogate.

    What it needs beyond the tensors of every site it declares; what nobody needs is not computed.

    Attributes:
        is_unbiased: Whether its expectation is the exact gradient for any state of the critics.
        is_pathwise: Whether the site's value carries the gradient.
        uses_critic: Whether it reads ``learned``, ``level`` or ``correction``.
        attaches: Whether :meth:`attach` lets the value of a site without ``rsample`` carry a gradient.
        corrects: Whether that gradient is not all of it, and :meth:`correction` gives the rest.
        takes_baseline: Whether Pyro's baseline options of a site may take its place.
        relies_on_slopes: Whether it is poor where costs have no gradient to the values of sites.
    """

    is_unbiased: ClassVar[bool]
    is_pathwise: ClassVar[bool] = False
    uses_critic: ClassVar[bool] = False
    attaches: ClassVar[bool] = False
    corrects: ClassVar[bool] = False
    takes_baseline: ClassVar[bool] = False
    relies_on_slopes: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A subclass may read what its base does not, and sum where its base does not: it says so itself.
        inherited: Any = cls.needs
        if "needs" not in vars(cls) and not isinstance(inherited, property):
            cls.needs = inherited | {TABLE}  # type: ignore[method-assign]
        if "by_component" not in vars(cls):
            cls.by_component = False  # type: ignore[method-assign, assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def needs(self) -> frozenset[str]:
        """What it reads that costs something to have, by name.

        ``"table"``: ``log_probs`` and ``index``. ``"slope"``: ``context.program.slope()``. All others are rows of
        :data:`pyro_bpq.step.signal_table.SIGNALS`, such as ``"program"``, ``"crossed"`` and ``"baseline"``.
        """
        return frozenset({TABLE})

    @property
    def by_component(self) -> bool:
        """Whether each component of a site may be told its own cost-to-go, in a dimension behind those of the plates.

        It then treats further dimensions of a site as it treats plates. Subclasses do not inherit it.
        """
        return False

    @property
    def exact_costs(self) -> bool | str:
        """Whether it wants the model's immediate costs at every value; ``"auto"``: where that pays."""
        return False

    @property
    def trace_decay(self) -> float:
        """The control variate of a later site is weighted by this number to the power of the distance to it."""
        return 1.0

    @property
    def return_weight(self) -> float | None:
        """Weight of the return against the critics, if its cost-to-go is a lambda-return."""
        return None

    @property
    def has_baseline(self) -> bool:
        """Whether it has a baseline of its own choice."""
        return False

    def unsupported(self, site: SiteInfo) -> str | None:
        """Why the site cannot be served and what to write instead, or ``None`` if it can."""
        return None

    def statistics(self, num_particles: int) -> Statistics:
        """Names and initial values of the running statistics that it keeps per site."""
        return {}

    def sized_statistics(self, width: int) -> Statistics:
        """More of them, whose size depends on that of a value, such as a network's weights.

        Args:
            width: Number of numbers that a value is encoded by: one for a real or binary component, ``K`` for one of
                ``K > 2`` values.
        """
        return {}

    def at(self, step: int) -> Any:
        """The estimator as it is after so many steps: options that change over time, such as a temperature."""
        return self

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value that the program sees, from the distribution and the drawn value; then it is never called."""
        raise NotImplementedError

    def correction(self, fn: Any, value: Tensor) -> Tensor:
        """What the score function takes in place of ``log q``, of the batch shape."""
        raise NotImplementedError

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The surrogate term."""
        raise NotImplementedError


def initial_statistics(estimator: Estimator, num_particles: int, width: int) -> Statistics:
    """All running statistics of an estimator, by name, with their initial values per site."""
    return {**estimator.statistics(num_particles), **estimator.sized_statistics(width)}


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
