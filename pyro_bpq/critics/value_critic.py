r"""A free-form critic ``Q(context, x)`` of a site without finite support: what its slope ``∂Q/∂x`` is taken from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pyro_bpq.critics.joint import JointOutput, SiteValue
from pyro_bpq.critics.nets import CriticShape, Perceptron
from pyro_bpq.errors import OptionError


@dataclass(frozen=True)
class ValueCritic:
    r"""A perceptron of context and value, for sites without finite support that have a mean and a variance.

        Q(x) = f(context, x),   E[Q] ≈ f(μ),   Q(x) ≈ f(μ) + f'(μ) (x - μ) for the sites before

    Estimators that follow the critic take ``Q(x)`` and ``∂Q/∂x``. Others, such as :class:`~pyro_bpq.QProp`, and the
    corrections of earlier sites take the expansion at the mean, whose expectation is known. The value enters as it is,
    not as a deviation from the mean of its distribution. So what was learned of a value stays true when the guide
    moves. A site in a plate that offers ``context`` does not show the parameters of its distribution to this critic:
    they move with the value, and ``∂Q/∂x`` could not be told apart from them.

    Args:
        hidden: Sizes of the hidden layers, at least one.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Gradient Estimators with Q-functions
        | Continuous control with deep reinforcement learning (Lillicrap et al., 2016)
        | https://arxiv.org/abs/1509.02971
    """

    hidden: tuple[int, ...] = (32, 32)

    uses_cells: ClassVar[bool] = False
    is_finite: ClassVar[bool] = False
    reads_value: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.hidden, int):
            object.__setattr__(self, "hidden", (self.hidden,))
        if not self.hidden or not all(isinstance(h, int) and h > 0 for h in self.hidden):
            raise OptionError(f"ValueCritic(hidden={self.hidden!r}): write positive layer sizes, e.g. (32, 32).")

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the critics; their last layer starts at zero."""
        return _FreeForm(shape, self.hidden, generator)


def reads_value(critic: Any) -> bool:
    """Whether a critic of a site without finite support gets the value itself, in ``SiteValue.real``."""
    return bool(getattr(critic, "reads_value", False))


class _FreeForm(nn.Module):
    def __init__(self, shape: CriticShape, hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        inputs = replace(shape, features=shape.features + shape.components)
        self.head = Perceptron(shape, hidden if shape.features else (), generator, 1)
        self.net = Perceptron(inputs, hidden, generator, 1)

    def forward(self, context: Tensor, cells: Tensor | None, site: SiteValue) -> Tensor:
        assert site.real is not None and site.centre is not None and site.step is not None
        value = self.net(torch.cat((context, site.real), -1), None)[..., 0]
        # Another evaluation for what must not depend on the sampled value.
        with torch.enable_grad():
            at = site.centre.detach().requires_grad_()
            middle = self.net(torch.cat((context, at), -1), None)[..., 0]
            (slope,) = torch.autograd.grad(middle.sum(), at)
        mean = middle.detach()
        own = (slope * (site.real.detach() - at.detach())).sum(-1)
        table = torch.stack((slope * site.step, torch.zeros_like(slope)), -1)
        return JointOutput(self.head(context, cells)[..., 0], value, mean, own, own, table).packed()
