r"""Joint critics, which read the value of a site without finite support as a whole.

    Q(context, x) = V(context) + F(context, x)

Estimators need from ``F`` a residual ``o(x)`` with a matching table ``T[d, k]`` for the all-action term,

    E[o(x) ∇ log q_d(x_d)] = E[Σ_k ∇q_d(k) T[d, k]]    for every component d,

of mean zero: it is the control variate for earlier sites, too. Estimators are then unbiased for any weights of the
critic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pyro_bpq.critics.nets import Critic, CriticShape, Perceptron, check_hidden


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
