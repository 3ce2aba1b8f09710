"""A critic whose differences between values read the user's features alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_bpq import ExpectedCost, cost
from pyro_bpq.critics import CriticShape, Perceptron
from pyro_bpq.errors import OptionError


@dataclass(frozen=True)
class ContextCritic:
    """Two perceptrons: the level reads all inputs, and the differences between values read the site's ``context``.

        Q(all, x) = V(all) + Σ_d A_d(context)[x_d]

    The difference between the costs of two values often depends only on a few features that the user knows,
    ``infer={"bpq": {"context": ...}}``. Every other input of ``A`` lets it fit more noise of the costs.

    Args:
        hidden: Sizes of the hidden layers of ``V``.
        advantage: Sizes of the hidden layers of ``A``; empty for a linear map.
    """

    hidden: tuple[int, ...] = (32,)
    advantage: tuple[int, ...] = ()

    uses_cells: ClassVar[bool] = False

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the critics; raises an OptionError if the sites offer no features."""
        if not shape.context or not shape.components:
            raise OptionError(
                f'{self} needs finite sites that offer features, infer={{"bpq": {{"context": tensor}}}}; write '
                "MLPCritic() instead."
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
        """Outputs ``(G, N, 1 + D K)`` from a context ``(G, N, F)``, whose last features are the user's."""
        own = context[..., context.shape[-1] - self.features :]
        return torch.cat((self.level(context, cells), self.advantage(own, cells)), -1)


def policy() -> None:
    start = {"x": [0.2, -0.4, 0.1], "y": [[0.5, 0.0], [-0.3, 0.8], [-1.0, 0.3]]}

    def site(name: str, logits: Tensor, *features: float) -> Tensor:
        infer = {"bpq": {"context": torch.tensor(features)}}
        return pyro.sample(name, dist.Categorical(logits=logits), infer=infer)

    x = site("x", pyro.param("qx", lambda: torch.tensor(start["x"])), 1.0, -0.5)
    y = site("y", pyro.param("qy", lambda: torch.tensor(start["y"]))[x], 0.3, 2.0)
    cost("f", lambda a, b: float(a.item() == 2 * b.item()) - 0.7 * float(b.item()), x, y)


if __name__ == "__main__":
    objective = ExpectedCost(critic=ContextCritic())
    svi = SVI(None, policy, Adam({"lr": 0.02}), objective)
    print("mean cost of 200 steps:", sum(svi.step() for _ in range(200)) / 200)
