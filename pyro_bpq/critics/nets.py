"""Critics: learned Q-functions with a leading site axis, in dueling form.

    Q(context, x) = V(context) + Σ_d A_d(context)[x_d]

This is for a site with ``D`` finite components of ``K`` values; others have ``V`` only. The expectation over the site's
distribution, and the value after a flip of any component, have closed forms. With ``D = 1`` the form is fully general.

References:
    | Dueling network architectures for deep reinforcement learning (Wang et al., 2016)
    | https://arxiv.org/abs/1511.06581
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from pyro_bpq.errors import Checked, OptionError, check_hidden, positive


@dataclass(frozen=True)
class CriticShape:
    """Sizes of the inputs and outputs of a batch of like-shaped critics."""

    sites: int  # Number of critics `G`
    features: int  # Number of context features `F`
    components: int  # Number of finite components `D` of the site, 0 if it has none
    cardinality: int  # Values `K` of a component
    # Number of joint states of the scope without the site. 0 if there are infinitely many or more than 2^30, or if the
    # critic does not read them (`uses_cells = False`)
    cells: int = 0
    context: int = 0  # Number of features that the user supplies; they are the last features
    # Places of encoded scope members, and the width of each, for each kind; they are the first features. The latest
    # comes first. Empty places are zero; the last one may hold the sum of all members.
    members: tuple[tuple[int, int], ...] = ()

    @property
    def outputs(self) -> int:
        """Number of outputs ``1 + D K``."""
        return 1 + self.components * self.cardinality


@runtime_checkable
class Critic(Protocol):
    """A recipe that builds critics: a value object that is passed, compared and printed.

    ``build`` returns a module whose parameters all have a leading site axis ``G`` and whose
    ``forward(context, cells)`` maps a detached context ``(G, N, F)`` and a long tensor ``(G, N)`` of
    joint states to outputs ``(G, N, 1 + D K)``, in units of the running scale of its targets.

    Attributes:
        uses_cells: Whether it reads ``cells``; they are ``None`` otherwise.
    """

    uses_cells: ClassVar[bool]

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the critics of ``shape.sites`` like-shaped sites."""


@dataclass(frozen=True)
class MLPCritic:
    r"""A multilayer perceptron per site; its last layer starts at zero.

        Q(all, x) = V(all) + Σ_d A_d(all or context)[x_d]

    The difference between the costs of two values often depends only on a few features that the user knows,
    ``infer={"bpq": {"context": ...}}``. Every other input of ``A`` lets it fit more noise of the costs.

    Args:
        hidden: Sizes of the hidden layers.
        context: Sizes of the hidden layers of ``A``, if it is a net of its own that sees the site's ``context`` alone;
            empty for a linear map. ``None`` for one net that sees all inputs.

    Raises:
        OptionError: If a layer size is not a positive integer.
    """

    hidden: tuple[int, ...] = (32,)
    context: tuple[int, ...] | None = None

    uses_cells: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_hidden(self)
        if self.context is not None:
            check_hidden(self, name="context")

    def __repr__(self) -> str:
        context = "" if self.context is None else f", context={self.context}"
        return f"MLPCritic(hidden={self.hidden}{context})"

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the perceptrons; raises an OptionError if ``A`` needs a context that the sites do not offer."""
        if self.context is None:
            return Perceptron(shape, self.hidden, generator)
        if not shape.context or not shape.components:
            raise OptionError(
                f'{self} needs finite sites that offer features, infer={{"bpq": {{"context": tensor}}}}; write '
                "MLPCritic() instead."
            )
        return _Split(shape, self.hidden, self.context, generator)


@dataclass(frozen=True)
class LinearCritic:
    """Linear in the context, starting at zero."""

    uses_cells: ClassVar[bool] = False

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the linear maps."""
        return Perceptron(shape, (), generator)


@dataclass(frozen=True)
class TabularCritic(Checked):
    """A table over the joint states of the scope.

    Args:
        max_cells: Largest number of joint states of the scope without the site itself.
        dueling: Whether a level ``V`` is learned besides the advantages. ``False`` keeps one number for each joint
            state of the scope and each value: the paper's tables.
    """

    max_cells: int = positive(65536)
    dueling: bool = True

    uses_cells: ClassVar[bool] = True

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the tables, all zero; raises an OptionError if the scope has too many joint states."""
        if not 0 < shape.cells <= self.max_cells:
            raise OptionError(
                f"TabularCritic cannot hold a scope with {shape.cells or 'more than 2^30 or infinitely many'} joint "
                f"states (max_cells={self.max_cells}); write critic=MLPCritic() instead."
            )
        return _Table(shape, self.dueling)


class Perceptron(nn.Module):
    """One perceptron per site, from ``(G, N, F)`` to ``(G, N, outputs)``; its last layer starts at zero.

    ``outputs=None`` stands for ``shape.outputs``. Without context features only the last bias remains.
    """

    def __init__(
        self, shape: CriticShape, hidden: Sequence[int], generator: torch.Generator, outputs: int | None = None
    ) -> None:
        super().__init__()
        last = shape.outputs if outputs is None else outputs
        sizes = [shape.features, *(hidden if shape.features else ()), last]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            weight = torch.zeros(shape.sites, fan_in, fan_out, device="cpu")
            if i < len(sizes) - 2:
                weight.uniform_(-1.0, 1.0, generator=generator).mul_(math.sqrt(3.0 / fan_in))
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(shape.sites, 1, fan_out)))

    def forward(self, context: Tensor, cells: Tensor | None) -> Tensor:
        """Evaluates the perceptrons of all sites in one batched call."""
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if context.shape[-1]:
                context = torch.baddbmm(bias, context, weight)
            else:
                context = bias.expand(-1, context.shape[1], -1)
            if i < last:
                context = silu(context)
        return context


class _Table(nn.Module):
    def __init__(self, shape: CriticShape, is_dueling: bool) -> None:
        super().__init__()
        # Without advantages the level is all there is.
        self.has_level = is_dueling or shape.outputs == 1
        self.table = nn.Parameter(torch.zeros(shape.sites, shape.cells, shape.outputs - (not self.has_level)))

    def forward(self, context: Tensor, cells: Tensor) -> Tensor:
        found = self.table.gather(1, cells.unsqueeze(-1).expand(-1, -1, self.table.shape[-1]))
        return found if self.has_level else torch.cat((torch.zeros_like(found[..., :1]), found), -1)


class _Split(nn.Module):
    """``V`` from all inputs, ``A`` from the user's features."""

    def __init__(
        self, shape: CriticShape, hidden: Sequence[int], context: Sequence[int], generator: torch.Generator
    ) -> None:
        super().__init__()
        self.features = shape.context
        own = replace(shape, features=shape.context)
        self.level = Perceptron(shape, hidden, generator, 1)
        self.advantage = Perceptron(own, context, generator, shape.components * shape.cardinality)

    def forward(self, context: Tensor, cells: Tensor | None) -> Tensor:
        # The user's features stand last.
        own = context[..., context.shape[-1] - self.features :]
        return torch.cat((self.level(context, cells), self.advantage(own, cells)), -1)


# Joint critics read the value of a site without finite support as a whole:
#
#     Q(context, x) = V(context) + F(context, x)
#
# Estimators need from `F` a residual `o(x)` with a matching table `T[d, k]` for the all-action term,
#
#     E[o(x) ∇ log q_d(x_d)] = E[Σ_k ∇q_d(k) T[d, k]]    for every component d,
#
# of mean zero: it is the control variate for earlier sites, too. So they are unbiased for any weights of the critic.


class SiteValue(NamedTuple):
    """The site's own inputs of a joint critic, detached."""

    powers: Tensor  # Its centred powers, `(G, N, D, 2)`
    real: Tensor | None = None  # The value in units of its running spread, `(G, N, D)`, if the critic reads it
    centre: Tensor | None = None  # The mean of its distribution in the same units
    step: Tensor | None = None  # The standard deviation of its distribution in the same units

    def map(self, change: Callable[[Tensor], Tensor]) -> SiteValue:
        """Changes every tensor."""
        return SiteValue(change(self.powers), *(None if part is None else change(part) for part in self[1:]))


class JointOutput(NamedTuple):
    """Normalised output of a batch of joint critics, ``(G, N)``; all but the first two are detached."""

    level: Tensor  # `V`, with the critics' gradient
    value: Tensor  # `F(x)`, with the critics' gradient
    mean: Tensor  # `E[F]`, or another number that does not depend on `x`
    own: Tensor  # `o`
    table: Tensor  # `T`, `(G, N, D, K)`

    def packed(self) -> Tensor:
        """Packs all fields into one tensor ``(G, N, 4 + D K)``."""
        return torch.cat((torch.stack(self[:4], -1), self.table.flatten(-2)), -1)

    @classmethod
    def unpacked(cls, packed: Tensor, components: int, cardinality: int) -> JointOutput:
        """Inverse of :meth:`packed`."""
        level, value, *rest = packed[..., :4].unbind(-1)
        table = packed[..., 4:].reshape(*packed.shape[:-1], components, cardinality)
        return cls(level, value, *(part.detach() for part in (*rest, table)))


@runtime_checkable
class JointCritic(Critic, Protocol):
    """A critic whose module maps ``(context, cells, SiteValue)`` to a packed :class:`JointOutput`.

    ``reads_value`` says whether it gets the value itself, in ``SiteValue.real``.
    """

    reads_value: ClassVar[bool]


class _WithLayers:
    """Base of the joint critics, with a field ``hidden`` of at least ``least`` layer sizes."""

    hidden: tuple[int, ...]
    uses_cells: ClassVar[bool] = False
    reads_value: ClassVar[bool] = False
    least: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_hidden(self, self.least)


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

    least: ClassVar[int] = 1
    reads_value: ClassVar[bool] = True

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the critics; their last layer starts at zero."""
        return _FreeForm(shape, self.hidden, generator)


def reads_value(critic: Any) -> bool:
    """Whether a critic of a site without finite support gets the value itself, in ``SiteValue.real``."""
    return bool(getattr(critic, "reads_value", False))


class _Moments(nn.Module):
    def __init__(self, shape: CriticShape, hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.components = shape.components
        self.head = Perceptron(shape, hidden, generator, 1 + 2 * shape.components)

    def forward(self, context: Tensor, cells: Tensor | None, site: SiteValue) -> Tensor:
        output = self.head(context, cells)
        # The table holds the factors of the two powers.
        table = output[..., 1:].reshape(site.powers.shape) / torch.arange(1, 3, device=output.device)
        value = (table * site.powers).sum((-1, -2))
        return JointOutput(output[..., 0], value, torch.zeros_like(value), value, table).packed()


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
        return JointOutput(self.head(context, cells)[..., 0], value, mean, own, table).packed()
