r"""Joint critics, which read the site's value as a whole.

    Q(context, x) = V(context) + F(context, x)

Estimators need from ``F`` a residual ``o(x)`` with a matching table ``T[d, k]`` for the all-action term,

    E[o(x) ∇ log q_d(x_d)] = E[Σ_k ∇q_d(k) T[d, k]]    for every component d,

and a control variate of mean zero for earlier sites. Estimators are then unbiased for any weights of the critic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from pyro_bpq.critics.nets import Critic, CriticShape, Perceptron, check_hidden, layers
from pyro_bpq.errors import check_option


class SiteValue(NamedTuple):
    """The site's own inputs of a joint critic, detached."""

    chosen: Tensor | None = None  # Index of the sampled value of each finite component, `(G, N, D)`
    probs: Tensor | None = None  # Probabilities of finite components, `(G, N, D, K)`
    powers: Tensor | None = None  # Centred powers `(G, N, D, 2)` of a value without finite components
    real: Tensor | None = None  # Such a value in units of its running spread, `(G, N, D)`, if the critic reads it
    centre: Tensor | None = None  # The mean of its distribution in the same units
    step: Tensor | None = None  # The standard deviation of its distribution in the same units

    def map(self, change: Callable[[Tensor], Tensor]) -> SiteValue:
        """Changes every tensor."""
        return SiteValue(*(None if part is None else change(part) for part in self))


class JointOutput(NamedTuple):
    """Normalised output of a batch of joint critics, ``(G, N)``; all but the first two are detached."""

    level: Tensor  # `V`, with the critics' gradient
    value: Tensor  # `F(x)`, with the critics' gradient
    mean: Tensor  # `E[F]`, or another number that does not depend on `x`
    own: Tensor  # `o`
    variate: Tensor  # Control variate of mean zero for earlier sites
    table: Tensor  # `T`, `(G, N, D, K)`

    def packed(self) -> Tensor:
        """Packs all fields into one tensor ``(G, N, 5 + D K)``."""
        return torch.cat((torch.stack(self[:5], -1), self.table.flatten(-2)), -1)

    @classmethod
    def unpacked(cls, packed: Tensor, components: int, cardinality: int) -> JointOutput:
        """Inverse of :meth:`packed`."""
        level, value, *rest = packed[..., :5].unbind(-1)
        table = packed[..., 5:].reshape(*packed.shape[:-1], components, cardinality)
        return cls(level, value, *(part.detach() for part in (*rest, table)))


@runtime_checkable
class JointCritic(Critic, Protocol):
    """A critic whose module maps ``(context, cells, SiteValue)`` to a packed :class:`JointOutput`.

    ``is_finite`` says whether it serves sites with finite components or sites without them.
    """

    is_finite: ClassVar[bool]


class _WithLayers:
    """Base of the joint critics, with a field ``hidden`` of at least ``least`` layer sizes."""

    hidden: tuple[int, ...]
    uses_cells: ClassVar[bool] = False
    is_finite: ClassVar[bool] = True
    least: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_hidden(self, self.least)


@dataclass(frozen=True)
class QuadraticCritic(_WithLayers):
    r"""A linear critic plus a quadratic form of low rank, with expectations in closed form.

        F(x) = Σ_d A_d[x_d] + ½ Σ_r c_r (Σ_d b_rd[x_d])²,   b_rd[k] = B_rd[k] - Σ_j p_d(j) B_rd[j]

    ``A`` and ``c`` depend on the context, ``B`` is a parameter of the site. With ``v_rd = Var b_rd[x_d]``

        E[F] = Σ_d E[A_d] + ½ Σ_r c_r Σ_d v_rd
        T[d, k] = E[F | x_d = k] - const = A_d[k] + ½ Σ_r c_r (b_rd[k]² - v_rd)

    At the first step ``A = c = 0``.

    Args:
        rank: Number of squares.
        hidden: Sizes of the hidden layers of ``A``, ``c`` and ``V``.
    """

    rank: int = 4
    hidden: tuple[int, ...] = (32,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option(self, "rank", isinstance(self.rank, int) and self.rank > 0, "a positive number")

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the critics."""
        return _Quadratic(shape, self.rank, self.hidden, generator)


@dataclass(frozen=True)
class FirstOrderCritic(_WithLayers):
    r"""A perceptron of context and value, expanded to first order at the mean.

        F(x) = f(onehot x),   T = ∇f(p),   E[F] ≈ f(p),   o = Σ_d (T[d, x_d] - Σ_k p_d(k) T[d, k])

    The residual has mean zero by construction. The regression fits ``f`` itself.

    Args:
        hidden: Sizes of the hidden layers, at least one.

    References:
        | MuProp: Unbiased backpropagation for stochastic neural networks (Gu et al., 2016)
    """

    hidden: tuple[int, ...] = (32,)

    least: ClassVar[int] = 1

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the critics."""
        return _ValuePerceptron(shape, self.hidden, generator, None)


@dataclass(frozen=True)
class FlipCritic(_WithLayers):
    r"""A perceptron of context and value, evaluated at every flip of one component.

        T[d, k] = F(x with x_d = k),   o = F(x) - f(p),   variate = Σ_d (F(x) - Σ_k p_d(k) T[d, k])

    Given the other components, ``E[F(x) ∇ log q_d] = Σ_k ∇q_d(k) T[d, k]``. So estimators are unbiased, although the
    unknown ``E[F]`` is replaced by ``f(p)``. A flip changes the first layer by a difference of two rows of its weights.

    Args:
        hidden: Sizes of the hidden layers, at least one.
        max_elements: Largest number of hidden units held at a time.

    References:
        | Local expectation gradients for black box variational inference (Titsias and Lázaro-Gredilla, 2015)
    """

    hidden: tuple[int, ...] = (32,)
    max_elements: int = 1 << 22

    least: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option(self, "max_elements", self.max_elements > 0, "a positive number")

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the critics."""
        return _ValuePerceptron(shape, self.hidden, generator, self.max_elements)


@dataclass(frozen=True)
class MomentCritic(_WithLayers):
    r"""First and second order in the standardised value, for sites without finite support.

        F(x) = Σ_i g_i e_i + ½ h_i (e_i² - 1),   e_i = (x_i - μ_i) / σ_i,   E[F] = 0

    This holds for any distribution with finite mean and variance. ``g`` and ``h`` depend on the context and start at
    zero.

    Args:
        hidden: Sizes of the hidden layers.

    References:
        | Q-Prop: Sample-efficient policy gradient with an off-policy critic (Gu et al., 2017)
    """

    hidden: tuple[int, ...] = (32,)

    is_finite: ClassVar[bool] = False

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the critics."""
        return _Moments(shape, self.hidden, generator)


@dataclass(frozen=True)
class ValueCritic(_WithLayers):
    r"""A perceptron of context and value, for sites without finite support that have a mean and a variance.

        Q(x) = f(context, x),   E[Q] ≈ f(μ),   Q(x) ≈ f(μ) + f'(μ) (x - μ) for the sites before

    Estimators such as :class:`~pyro_bpq.estimators.QPathwise` take ``Q(x)`` and ``∂Q/∂x``. Others, such as
    :class:`~pyro_bpq.QProp`, and the corrections of earlier sites take the expansion at the mean, whose expectation is
    known. The critic sees the value itself, not its deviation from the mean of its distribution. So it stays right when
    the guide moves. If a site in a plate offers ``context``, this critic does not see the parameters of the site's
    distribution, because their effect could not be distinguished from that of the value.

    Args:
        hidden: Sizes of the hidden layers, at least one.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Gradient Estimators with Q-functions
        | Continuous control with deep reinforcement learning (Lillicrap et al., 2016)
        | https://arxiv.org/abs/1509.02971
    """

    hidden: tuple[int, ...] = (32, 32)

    is_finite: ClassVar[bool] = False
    least: ClassVar[int] = 1
    reads_value: ClassVar[bool] = True

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the critics; their last layer starts at zero."""
        return _FreeForm(shape, self.hidden, generator)


def reads_value(critic: Any) -> bool:
    """Whether a critic of a site without finite support gets the value itself, in ``SiteValue.real``."""
    return bool(getattr(critic, "reads_value", False))


class _Quadratic(nn.Module):
    def __init__(self, shape: CriticShape, rank: int, hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.head = Perceptron(shape, hidden, generator, shape.outputs + rank)
        table = torch.empty(shape.sites, rank, shape.components, shape.cardinality, device="cpu")
        self.factors = nn.Parameter(table.normal_(generator=generator) / math.sqrt(shape.components))

    def forward(self, context: Tensor, cells: Tensor | None, site: SiteValue) -> Tensor:
        assert site.chosen is not None and site.probs is not None
        shape, probs = self.shape, site.probs
        output = self.head(context, cells)
        advantage = output[..., 1 : shape.outputs].reshape(probs.shape)
        curvature = output[..., shape.outputs :]
        factors = self.factors.unsqueeze(1)
        # (G, N, R, D, K), centred under q.
        factors = factors - (probs.unsqueeze(2) * factors).sum(-1, keepdim=True)
        chosen = site.chosen.unsqueeze(-1)
        picked = chosen.unsqueeze(2).expand(*factors.shape[:-1], 1)
        linear = advantage.gather(-1, chosen).sum((-1, -2))
        quadratic = 0.5 * (curvature * factors.gather(-1, picked).sum((-1, -2)).square()).sum(-1)
        with torch.no_grad():
            squares = factors.square()
            variance = (probs.unsqueeze(2) * squares).sum(-1)
            bend = 0.5 * (curvature[..., None, None] * (squares - variance.unsqueeze(-1))).sum(2)
            mean = (probs * advantage).sum((-1, -2)) + 0.5 * (curvature * variance.sum(-1)).sum(-1)
            own = linear + quadratic - mean
            table = advantage + bend
        return JointOutput(output[..., 0], linear + quadratic, mean, own, own, table).packed()


class _ValuePerceptron(nn.Module):
    """``V(context)`` and ``f(context, value)``; a value selects rows of the first layer of ``f``."""

    def __init__(
        self, shape: CriticShape, hidden: Sequence[int], generator: torch.Generator, max_elements: int | None
    ) -> None:
        super().__init__()
        self.shape, self.max_elements = shape, max_elements
        self.head = Perceptron(shape, hidden, generator, 1)
        first = hidden[0]
        bound = math.sqrt(3.0 / (shape.features + shape.components))
        rows = torch.empty(shape.sites, shape.components, shape.cardinality, first, device="cpu")
        self.rows = nn.Parameter(rows.uniform_(-1, 1, generator=generator) * bound)
        columns = torch.empty(shape.sites, shape.features, first, device="cpu")
        self.columns = nn.Parameter(columns.uniform_(-1, 1, generator=generator) * bound)
        self.bias = nn.Parameter(torch.zeros(shape.sites, 1, first))
        self.weights, self.biases = layers(shape.sites, [*hidden, 1], generator)

    def tail(self, hidden: Tensor) -> Tensor:
        """Maps the first layer's sums ``(G, ..., H)`` to ``f``, ``(G, ...)``."""
        lead = hidden.shape[:-1]
        flat = hidden.reshape(lead[0], -1, hidden.shape[-1])
        for weight, bias in zip(self.weights, self.biases, strict=True):
            flat = torch.baddbmm(bias, silu(flat), weight)
        return flat.reshape(lead)

    def forward(self, context: Tensor, cells: Tensor | None, site: SiteValue) -> Tensor:
        assert site.chosen is not None and site.probs is not None
        probs, index = site.probs, site.chosen
        base = self.bias.expand(-1, index.shape[1], -1)
        if context.shape[-1]:
            base = torch.baddbmm(self.bias, context, self.columns)
        sites = torch.arange(len(index), device=index.device)[:, None, None]
        parts = torch.arange(self.shape.components, device=index.device)
        rows = self.rows[sites, parts, index]
        hidden = base + rows.sum(2)
        value = self.tail(hidden)
        weights = self.rows.detach().flatten(1, 2)
        centre = base.detach() + probs.flatten(2) @ weights
        if self.max_elements is None:
            with torch.enable_grad():
                at = centre.requires_grad_()
                middle = self.tail(at)
                (slope,) = torch.autograd.grad(middle.sum(), at)
            mean = middle.detach()
            table = (slope @ weights.transpose(1, 2)).reshape(probs.shape)
            own = variate = (table.gather(-1, index.unsqueeze(-1)).squeeze(-1) - (probs * table).sum(-1)).sum(-1)
        else:
            with torch.no_grad():
                mean, table = self.tail(centre), self.flips(hidden, rows)
                own, variate = value - mean, (value.unsqueeze(-1) - (probs * table).sum(-1)).sum(-1)
        return JointOutput(self.head(context, cells)[..., 0], value, mean, own, variate, table).packed()

    def flips(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """``f`` after setting component ``d`` to value ``k``, ``(G, N, D, K)``."""
        assert self.max_elements is not None
        step = max(1, self.max_elements // max(hidden.numel() * self.shape.cardinality, 1))
        tables = []
        for taken, put in zip(rows.split(step, 2), self.rows.split(step, 1), strict=True):
            rest = (hidden.unsqueeze(2) - taken).unsqueeze(3)
            tables.append(self.tail(rest + put.unsqueeze(1)))
        return torch.cat(tables, 2)


class _Moments(nn.Module):
    def __init__(self, shape: CriticShape, hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.components = shape.components
        self.head = Perceptron(shape, hidden, generator, 1 + 2 * shape.components)

    def forward(self, context: Tensor, cells: Tensor | None, site: SiteValue) -> Tensor:
        assert site.powers is not None
        output = self.head(context, cells)
        # The table holds the factors of the two powers.
        table = output[..., 1:].reshape(site.powers.shape) / torch.arange(1, 3, device=output.device)
        value = (table * site.powers).sum((-1, -2))
        return JointOutput(output[..., 0], value, torch.zeros_like(value), value, value, table).packed()


class _FreeForm(nn.Module):
    def __init__(self, shape: CriticShape, hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        inputs = replace(shape, features=shape.features + shape.components)
        self.head = Perceptron(shape, hidden, generator, 1)
        self.net = Perceptron(inputs, hidden, generator, 1)

    def forward(self, context: Tensor, cells: Tensor | None, site: SiteValue) -> Tensor:
        assert site.real is not None and site.centre is not None and site.step is not None
        value = self.net(torch.cat((context, site.real), -1), None)[..., 0]
        # The expansion at the mean must not depend on the sampled value.
        with torch.enable_grad():
            at = site.centre.detach().requires_grad_()
            middle = self.net(torch.cat((context, at), -1), None)[..., 0]
            (slope,) = torch.autograd.grad(middle.sum(), at)
        mean = middle.detach()
        own = (slope * (site.real.detach() - at.detach())).sum(-1)
        table = torch.stack((slope * site.step, torch.zeros_like(slope)), -1)
        return JointOutput(self.head(context, cells)[..., 0], value, mean, own, own, table).packed()
