"""A critic that attends to the members of its scope, however many these are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor, nn
from torch.nn.functional import silu

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.critics import CriticShape, Perceptron

# Wavelengths in ``r_j``, in members; each gives two features.
WAVES = (3.0, 6.0, 12.0, 24.0, 48.0)


@dataclass(frozen=True)
class AttentionCritic:
    """Attention over all members of the scope, and a perceptron whose last layer starts at zero.

        h_j = silu(W v_j + R r_j + b),   r_j = (log(1 + j), 1 / (1 + j), cos and sin of 2π j / 3, ..., 2π j / 48)
        o_i = Σ_j softmax_j(q_i · K_i h_j / √d) U_i h_j                                  for every head i
        Q   = perceptron(context, o, Σ_j h_j / √n)

    ``v_j`` is the encoded value of the ``j``-th latest member of its kind, a class of like-shaped sites. ``r_j``
    encodes ``j``, and ``n`` is the number of members. ``W``, ``R`` and ``b`` belong to a kind, ``K_i`` and ``U_i`` to a
    head. The query ``q_i``, of size ``d``, is linear in the context.

    Give the ELBO a ``window`` that is larger than any scope: else a critic sees the latest members, and the sum of all.

    Args:
        width: Number of features ``h_j`` of a member.
        heads: Number of heads ``i``; each returns ``width`` features.
        hidden: Sizes of the hidden layers of the perceptron.

    References:
        | Attention is all you need (Vaswani et al., 2017), Sec. 3.2
        | Deep sets (Zaheer et al., 2017), Eq. 4
        | Backprop-Q (Xu et al., 2018), Sec. 3.1: a Q-function reads its scope
    """

    width: int = 16
    heads: int = 2
    hidden: tuple[int, ...] = (32,)

    uses_cells: ClassVar[bool] = False

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the critics."""
        return _Attention(self, shape, generator)


class _Attention(nn.Module):
    def __init__(self, critic: AttentionCritic, shape: CriticShape, generator: torch.Generator) -> None:
        super().__init__()
        self.width, self.heads, self.members = critic.width, critic.heads, shape.members
        wide = critic.heads * critic.width
        features = shape.features - sum(places * width for places, width in shape.members)

        def weight(rows: int, columns: int) -> nn.Parameter:
            tensor = torch.empty(shape.sites, rows, columns, device="cpu")
            return nn.Parameter(tensor.uniform_(-1.0, 1.0, generator=generator).mul_(math.sqrt(3.0 / max(rows, 1))))

        place = 2 + 2 * len(WAVES)
        self.embeddings = nn.ParameterList(weight(width + place, critic.width) for _, width in shape.members)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(shape.sites, 1, critic.width)) for _ in shape.members)
        if shape.members:
            self.query, self.query_bias = weight(features, wide), weight(1, wide)
            self.keys, self.values = weight(critic.width, wide), weight(critic.width, wide)
            features += wide + critic.width
        self.head = Perceptron(replace(shape, features=features), critic.hidden, generator)

    def forward(self, context: Tensor, cells: Tensor | None) -> Tensor:
        """Outputs ``(G, N, 1 + D K)`` from a context ``(G, N, F)``, whose first features are the members."""
        if not self.members:
            return self.head(context, cells)
        sizes = [places * width for places, width in self.members]
        *flat, context = context.split([*sizes, context.shape[-1] - sum(sizes)], -1)
        kinds = [part.unflatten(-1, kind) for part, kind in zip(flat, self.members, strict=True)]
        # (G, N, W, width) and (G, N, W)
        hidden = torch.cat([self._embedded(k, values) for k, values in enumerate(kinds)], 2)
        present = torch.cat([(values != 0).any(-1) for values in kinds], -1)
        # (G, N, W, heads, width)
        keys, values = (
            torch.einsum("gnwh,gho->gnwo", hidden, part).unflatten(-1, (self.heads, self.width))
            for part in (self.keys, self.values)
        )
        query = (context @ self.query + self.query_bias).unflatten(-1, (1, self.heads, self.width))
        score = (query * keys).sum(-1) / math.sqrt(self.width)
        # Without the second mask the weights of a scope without members would be uniform.
        weights = torch.where(present[..., None], score, score.new_tensor(-1e9)).softmax(2) * present[..., None]
        found = (weights[..., None] * values).sum(2).flatten(-2)
        number = present.sum(-1, keepdim=True).clamp(min=1)
        total = (hidden * present[..., None]).sum(2) / number.to(hidden.dtype).sqrt()
        return self.head(torch.cat((context, found, total), -1), cells)

    def _embedded(self, k: int, values: Tensor) -> Tensor:
        """The features ``h_j`` of the members of a kind, ``(G, N, W, width)``."""
        at = torch.arange(values.shape[2], device=values.device, dtype=values.dtype)
        angles = [2.0 * math.pi * at / wave for wave in WAVES]
        waves = [wave for angle in angles for wave in (angle.cos(), angle.sin())]
        place = torch.stack([torch.log1p(at), 1.0 / (1.0 + at), *waves], -1).expand(*values.shape[:3], -1)
        joined = torch.cat((values, place), -1).flatten(1, 2)
        return silu(torch.baddbmm(self.biases[k], joined, self.embeddings[k])).unflatten(1, values.shape[1:3])


def model() -> None:
    total = torch.zeros(())
    for t in range(4):
        z = pyro.sample(f"z{t}", dist.Bernoulli(torch.tensor(0.4)))
        total = total + (t + 1) * z
    pyro.sample("x", dist.Normal(total.sin() + total, 1.0), obs=torch.tensor(4.0))


def guide() -> None:
    total = torch.zeros(())
    for t in range(4):
        logits = (
            pyro.param("logits", torch.tensor([0.4, -0.3, 0.1, 0.2]))[t] + pyro.param("w", torch.tensor(0.1)) * total
        )
        total = total + pyro.sample(f"z{t}", dist.Bernoulli(logits=logits))


if __name__ == "__main__":
    elbo = TraceBackpropQ_ELBO(1, critic=AttentionCritic(), window=1000)
    svi = SVI(model, guide, Adam({"lr": 0.05}), elbo)
    print("mean loss of 200 steps:", sum(svi.step() for _ in range(200)) / 200)
