r"""The protocol of a gradient estimator: tensors of like-shaped sites in, a surrogate term out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from pyro_bpq.errors import Checked, option
from pyro_bpq.rollout.features import Components, Standardised
from pyro_bpq.rollout.sums import Ranks, joint_mean

# Name of a running statistic and its initial value per site: a float for a scalar, a tuple or tensor for a vector.
Statistics = Mapping[str, float | tuple[float, ...] | Tensor]
# Rows of a plate from which on they are taken for data.
MANY_ROWS = 10


@dataclass(frozen=True)
class SiteInfo:
    """Facts about a site that decide whether an estimator can serve it.

    Args:
        name: Name of the site.
        distribution: Name of its distribution's class.
        has_rsample: Whether the distribution is reparameterised.
        components: Its finite components, or ``None``.
        num_particles: Number of particles.
        plates: Names of its plates.
        counts: Its counts, each beside the value next to it, or ``None``.
    """

    name: str
    distribution: str
    has_rsample: bool
    components: Components | None
    num_particles: int
    plates: tuple[str, ...] = ()
    counts: Components | None = None


class SiteProgram(Protocol):
    """Further runs of the program, which give costs at other values. All results but :meth:`stack` are detached.

    Every call of :meth:`cost` or :meth:`gradient` runs guide and model again for each site of the class. If particles
    run one after the other, it does so for each particle. The site takes the given value at all components and plate
    rows at once. The sites downstream are drawn afresh and independently. All other sites keep their values.

    Attributes:
        generator: Generator for the noise that the estimator itself draws; on the CPU.
        value: The sampled values, ``(G, M, plates, event)``.
        rows_meet: Whether a cost of one plate row reads the value of another row.
    """

    generator: torch.Generator
    value: Tensor
    rows_meet: bool

    def cost(self, value: Tensor) -> Tensor:
        """Costs-to-go ``(G, M, plates)`` in nats at other values ``(G, M, plates, event)``."""

    def gradient(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Costs-to-go as in :meth:`cost`, and the gradient ``(G, M, plates, event)`` of all costs downstream."""

    def slope(self) -> Tensor:
        """Gradient of all costs downstream at the sampled values; needs no extra run if no site is downstream."""

    def sampled_cost(self) -> Tensor:
        """Costs-to-go at the sampled values of all sites, computed as those at other values are."""

    def independent(self) -> Tensor:
        """Costs-to-go in nats of one run that draws every site afresh, in the shape of ``SiteContext.cost``."""

    def from_index(self, index: Tensor) -> Tensor:
        """Values ``(G, M, plates, event)`` from the indices ``(G, M, plates, D)`` of finite components."""

    def mean_field(self) -> SiteProgram:
        """The program in which sites downstream take their means (Bernoulli, one-hot and reparameterised sites)."""

    def held(self, value: Tensor) -> SiteProgram:
        """The program in which sites downstream keep the values that they take in a run at ``value``.

        The costs are then functions of the site's value alone. If nothing is sampled downstream there is no extra run.
        """

    def stack(self, pick: Callable[[Any], Tensor], event_ndim: int) -> Tensor:
        """Stacks ``pick(fn)``, ``batch_shape + event``, of the sites' distributions, with its gradient."""


@dataclass(frozen=True)
class SiteContext:
    """Tensors of ``G`` like-shaped sites: batch shape ``(G, M, plate dims...)``, costs in nats.

    All tensors are detached but ``score``, ``log_probs``, ``moments.expected``, and of the signals ``"baseline"``,
    ``"moved_value"`` and ``log_q`` in ``"hindsight"``.

    Args:
        names: Names of the sites.
        score: ``log q`` of the sample, neither scaled nor masked, with its gradient.
        cost: Cost-to-go ``C_X``, the sum of the costs downstream in this run. Where costs at other values are asked
            for, that of the recording which gives them.
        num_particles: Number of particles ``M``.
        log_probs: Log-probabilities ``(..., D, K)`` of the finite components, with gradient, or ``None``.
        index: Index ``(..., D)`` of the sampled value, or ``None``.
        exact: Immediate costs after setting component ``d`` to value ``k``, ``(..., D, K)``; the entry at
            the sampled index is the cost of the sample. ``None`` if no such costs are known.
        exact_cost: The sum of those immediate costs in this run.
        learned: Critic's advantages ``(..., D, K)`` for the remaining costs, or ``None``.
        level: Critic's ``V`` for the remaining costs, or ``None``.
        own: Residual of mean zero of a critic of a value without finite components, or ``None``.
        moments: Centred powers of a value without finite components, if a critic reads them; ``learned`` then
            holds their factors ``(..., D, 2)``.
        correction: Sum over later sites ``Y`` of ``A_Y = Q_Y(y) - E_Y[Q_Y]``, of what critics predict, or ``None``.
        exact_correction: The same of costs known exactly at every value of ``Y``, or ``None``.
        statistics: Running statistics from earlier steps, by name, with a leading site axis.
        count: Number of steps behind the statistics, a tensor ``(G,)``; ``None`` where none are kept.
        signals: Further signals that the estimator asks for (:attr:`Estimator.needs`), by name.
        ranks: The processes that learn together, or ``None``.
        excess: How much more the cost-to-go of the run is than the recording's, or ``None``; added with the score.
        num_rows_apart: Number of plate dimensions, if no row's costs depend on other rows; else 0.
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
    exact_correction: Tensor | None = None
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    count: Any = None
    signals: Mapping[str, Any] = field(default_factory=dict)
    ranks: Ranks | None = None
    excess: Tensor | None = None
    num_rows_apart: int = 0

    @property
    def others(self) -> tuple[int, ...]:
        """Dimensions of the other samples of this step, whose costs do not depend on the value of this one."""
        rows = self.cost.shape[2 : 2 + self.num_rows_apart]
        if self.num_particles > 1:
            return (1,)
        return tuple(range(2, 2 + len(rows))) if math.prod(rows) >= MANY_ROWS else ()

    @property
    def program(self) -> SiteProgram:
        """Further runs of the program, which give costs at other values."""
        return self.signals["program"]

    @property
    def crossed(self) -> Tensor | None:
        """Mean change of the other particles' costs-to-go, in nats, given this particle's past; ``None`` if unknown."""
        return self.signals.get("crossed")

    @property
    def table(self) -> tuple[Tensor, Tensor]:
        """``log_probs`` and ``index`` of sites with finite components."""
        assert self.log_probs is not None and self.index is not None
        return self.log_probs, self.index

    @property
    def score_table(self) -> tuple[Tensor, Tensor]:
        """Probabilities of all values, and the derivative of ``log q`` to logits, ``(..., D, K)``, detached."""
        log_probs, index = self.table
        probs = log_probs.detach().exp()
        return probs, torch.zeros_like(probs).scatter_(-1, index.unsqueeze(-1), 1.0) - probs

    def per_site(self, number: Tensor) -> Tensor:
        """Numbers of the sites, ``(G,)``, broadcastable to ``cost``."""
        return number.reshape(-1, *(1,) * (self.cost.dim() - 1))

    def running_mean(self, name: str, new: Tensor, decay: float | Tensor) -> Tensor:
        """The new value of a running statistic, from the mean ``new`` of this step."""
        return update_mean(self.statistics[name], new, self.count, decay)

    def joint(self, mean: Tensor) -> tuple[Tensor, Tensor | int]:
        """Joint mean over the samples of all processes, from the mean of this process, and the number of samples.

        Running statistics are averaged over processes in any case. A statistic that is not linear in such means, such
        as a ratio of two means, must be computed from joint means.
        """
        return joint_mean(self.ranks, mean, self.cost[0].numel())


class SiteTerm(NamedTuple):
    """The return value of an estimator.

    Args:
        surrogate: Tensor of any shape; the gradient of its sum is the gradient estimate, summed over particles.
        statistics: New values of running statistics; they take effect after the step.
    """

    surrogate: Tensor
    statistics: Mapping[str, Tensor] = {}


class Estimator(Checked):
    """A gradient estimator: a frozen value object that turns a :class:`SiteContext` into a surrogate.

    An option that is out of range raises :class:`~pyro_bpq.errors.OptionError`.

    Attributes:
        is_unbiased: Whether its expectation is the exact gradient for any state of the critics.
        is_pathwise: Whether the site's value carries the gradient.
        uses_critic: Whether it reads ``learned``, ``level`` or ``correction``.
        attaches: Whether :meth:`attach` lets the value of a site without ``rsample`` carry a gradient.
        corrects: Whether that gradient is only a part of the whole, and :meth:`correction` gives the rest.
        replaces_costs: Whether Q-functions replace costs in it. They are then discounted as targets are.
        takes_discount: Whether it serves with a discount below 1.
        takes_outdated: Whether costs at other values that are outdated add variance and no bias. Else, if it needs
            ``"program"``, the recording gives the cost of the drawn value too, and what the run has cost beyond it is
            added with the score.
        needs: Names of the inputs that it reads and that take extra work; inputs that no estimator needs are not
            computed. ``"table"``: ``log_probs`` and ``index``. ``"slope"``: ``context.program.slope()``. All others are
            rows of :data:`pyro_bpq.step.signal_table.SIGNALS`, such as ``"program"``, ``"crossed"`` and ``"baseline"``.
        by_component: Whether each component of a site may get its own cost-to-go, in a dimension behind the plates. The
            estimator then treats further dimensions of a site like plates. Subclasses do not inherit it.
        exact_costs: Whether it asks for the model's immediate costs at every value; ``"auto"``: only if that pays.
        return_weight: Weight of the return against the critics if the cost-to-go is a lambda-return, else ``None``.
    """

    is_unbiased: ClassVar[bool] = False
    is_pathwise: ClassVar[bool] = False
    uses_critic: ClassVar[bool] = False
    attaches: ClassVar[bool] = False
    corrects: ClassVar[bool] = False
    replaces_costs: ClassVar[bool] = False
    takes_discount: ClassVar[bool] = True
    takes_outdated: ClassVar[bool] = False
    # Options, where estimators have them; else the same for all of a class.
    needs: Any = frozenset({"table"})
    by_component: Any = False
    exact_costs: Any = False
    return_weight: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Not inherited, because a subclass may read inputs, or sum over components, where its base does not.
        if "needs" not in vars(cls) and not isinstance(cls.needs, property):
            cls.needs = cls.needs | {"table"}
        if "by_component" not in vars(cls):
            cls.by_component = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def needs_costs_alone(self) -> bool:
        """Whether the score and the cost-to-go are all that it reads."""
        reads_more = self.needs or self.uses_critic or self.return_weight is not None
        return not (reads_more or self.is_pathwise or self.attaches)

    def unsupported(self, site: SiteInfo) -> str | None:
        """Reason why the site cannot be served, and what to write instead; ``None`` if it can be served."""
        return None

    def statistics(self) -> Statistics:
        """Names and initial values of the running statistics that it keeps per site."""
        return {}

    def sized_statistics(self, width: int) -> Statistics:
        """Further running statistics, whose size depends on that of a value, such as a network's weights.

        Args:
            width: Number of entries of an encoded value: one for a real or binary component, else ``K``.
        """
        return {}

    def at(self, step: int) -> Any:
        """The estimator after ``step`` steps, for options that change over time, e.g. a temperature."""
        return self

    def attach(self, fn: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value that the program sees, from the distribution and the drawn value."""
        raise NotImplementedError

    def correction(self, fn: Any, value: Tensor) -> Tensor:
        """The tensor of the batch shape that the score function uses in place of ``log q``."""
        raise NotImplementedError

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The surrogate term. It is zero if the value carries the gradient."""
        if not self.is_pathwise:
            raise NotImplementedError
        return SiteTerm(context.score.new_zeros(()))


def initial_statistics(estimator: Estimator, width: int) -> Statistics:
    """All running statistics of an estimator, by name, with their initial values per site."""
    return {**estimator.statistics(), **estimator.sized_statistics(width)}


def past(default: float) -> Any:
    """An option: the weight of the past in running means."""
    return option(default, lambda decay: 0.0 <= decay < 1.0, "a number in [0, 1)")


def share(default: float) -> Any:
    """An option: a number from 0 to 1."""
    return option(default, lambda number: 0.0 <= number <= 1.0, "a number in [0, 1]")


def update_mean(old: Tensor, new: Tensor, count: Tensor, decay: float | Tensor) -> Tensor:
    """Running mean: the plain mean of the first steps, exponential with ``decay`` afterwards."""
    weight = (1.0 / (count + 1.0)).clamp(min=1.0 - decay)
    return old + weight.reshape(-1, *(1,) * (new.dim() - 1)) * (new - old)


def unit_scale(product: Tensor, square: Tensor) -> Tensor:
    """``product / square`` within [0, 1], zero if both are: the scale of a control variate, from moments of it."""
    # Half precision has no number as small as the bound.
    wide = torch.promote_types(square.dtype, torch.float32)
    return (product.to(wide) / square.to(wide).clamp(min=1e-12)).clamp(0.0, 1.0).to(square)


def site_mean(value: Tensor) -> Tensor:
    """Mean over everything but the site axis.

    Args:
        value: ``(G, ...)``.

    Returns:
        ``(G,)``.
    """
    # A single number is its own mean.
    return value.flatten() if value.numel() == len(value) else value.flatten(1).mean(1)


def event_sum(tensor: Tensor, batch_ndim: int) -> Tensor:
    """Sum over event dimensions.

    Args:
        tensor: ``(G, M, plates, event)``.
        batch_ndim: Number of dimensions that stay.

    Returns:
        ``(G, M, plates)``.
    """
    return tensor.sum(tuple(range(batch_ndim, tensor.dim()))) if tensor.dim() > batch_ndim else tensor


def cost_per_row(program: SiteProgram, value: Tensor, batch_ndim: int) -> Tensor:
    """Costs-to-go of every plate row if only that row takes another value, in nats.

    If a cost reads several rows, each row takes a run of its own.

    Args:
        program: Further runs of the program, ``context.program``.
        value: The other values, ``(G, M, plates, event)``.
        batch_ndim: Number of dimensions of the result.

    Returns:
        Costs ``(G, M, plates)``, detached.
    """
    plates = value.shape[2:batch_ndim]
    if not program.rows_meet or plates.numel() == 1:
        return program.cost(value)
    rows = torch.eye(plates.numel(), dtype=torch.bool, device=value.device).reshape(-1, *plates)
    total = value.new_zeros(())
    for row in rows:
        chosen = row.reshape(1, 1, *plates, *(1,) * (value.dim() - batch_ndim))
        cost = program.cost(torch.where(chosen, value, program.value))
        total = torch.where(row, cost, total.to(cost))
    return total
