r"""A critic whose differences between actions depend on the user's context alone.

    Q(all, x) = V(all) + Σ_d A_d(context)[x_d]

``V`` sees all inputs of a critic: the most recent values of its scope, the site's distribution, the context. The
difference between the costs of two values often depends only on a few features that the user knows,
``infer={"bpq": {"context": ...}}``. Every other input of ``A`` lets it fit more noise of the costs.

References:
    | Dueling network architectures for deep reinforcement learning (Wang et al., 2016)
    | https://arxiv.org/abs/1511.06581
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from pyro_bpq.critics.nets import CriticShape, Perceptron, check_hidden
from pyro_bpq.errors import OptionError


@dataclass(frozen=True)
class ContextCritic:
    """Two perceptrons per site; the last layer of both starts at zero.

    Args:
        hidden: Sizes of the hidden layers of ``V``, which sees all inputs.
        advantage: Sizes of the hidden layers of ``A``, which sees only the site's context; empty for a linear map.

    Raises:
        OptionError: If a layer size is not a positive integer.
    """

    hidden: tuple[int, ...] = (32,)
    advantage: tuple[int, ...] = ()

    uses_cells: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_hidden(self)
        check_hidden(self, name="advantage")

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the perceptrons.

        Raises:
            OptionError: If the sites offer no context, or have no finite components.
        """
        if not shape.context or not shape.components:
            raise OptionError(
                'ContextCritic needs finite sites that offer features, infer={"bpq": {"context": tensor}}; write '
                "critic=MLPCritic() instead."
            )
        return _Split(self, shape, generator)


class _Split(nn.Module):
    def __init__(self, critic: ContextCritic, shape: CriticShape, generator: torch.Generator) -> None:
        super().__init__()
        self.features = shape.context
        own = replace(shape, features=shape.context)
        self.level = Perceptron(shape, critic.hidden, generator, 1)
        self.advantage = Perceptron(own, critic.advantage, generator, shape.components * shape.cardinality)

    def forward(self, context: Tensor, cells: Tensor | None) -> Tensor:
        # The user's features stand last.
        own = context[..., context.shape[-1] - self.features :]
        return torch.cat((self.level(context, cells), self.advantage(own, cells)), -1)
