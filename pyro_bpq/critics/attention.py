"""A critic that reads a set or a sequence of any length: attention over the members of a scope."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from pyro_bpq.critics.nets import Critic, CriticShape, Perceptron, check_hidden
from pyro_bpq.errors import check_option

# Wavelengths in ``r_j``, in members; each gives two features.
_WAVES = (3.0, 6.0, 12.0, 24.0, 48.0)


class Members(NamedTuple):
    """The members of the scopes of a batch of critics, by kind, latest first; detached."""

    values: tuple[Tensor, ...] = ()  # Encoded values `(G, N, W, width)` of each kind
    present: tuple[Tensor, ...] = ()  # Whether each of the `W` places of a site holds a member, `(G, W)`, for each kind

    def map(self, change: Callable[[Tensor], Tensor]) -> Members:
        """Changes every tensor."""
        return Members(tuple(map(change, self.values)), tuple(map(change, self.present)))


@runtime_checkable
class MemberCritic(Critic, Protocol):
    """A critic whose module maps ``(context, cells, Members)`` to outputs, for any number of members.

    Its ``context`` holds the other features: parameters of the site's distribution, the user's features, the index of a
    shared site. ``shape.features`` counts only these; ``shape.members`` holds the width of each kind.
    """

    reads_members: ClassVar[bool]


@dataclass(frozen=True)
class AttentionCritic:
    """Attention over all members of the scope, and a perceptron whose last layer starts at zero.

        h_j = silu(W v_j + R r_j + b),   r_j = (log(1 + j), 1 / (1 + j), cos and sin of 2π j / 3, ..., 2π j / 48)
        o_i = Σ_j softmax_j(q_i · K_i h_j / √d) U_i h_j                                  for every head i
        Q   = perceptron(context, o, Σ_j h_j / √n)

    ``v_j`` is the encoded value of the ``j``-th latest member of its kind, a class of like-shaped sites. ``r_j``
    encodes ``j``, and ``n`` is the number of members. ``W``, ``R`` and ``b`` belong to a kind, ``K_i`` and ``U_i`` to a
    head. The query ``q_i``, of size ``d``, is linear in the context. A shared critic serves scopes of any length.

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
    reads_members: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("width", "heads"):
            value = getattr(self, name)
            is_valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            check_option(self, name, is_valid, "a whole number of at least 1")
        check_hidden(self)

    def build(self, shape: CriticShape, generator: torch.Generator) -> nn.Module:
        """Builds the critics."""
        return _Attention(self, shape, generator)


class _Attention(nn.Module):
    def __init__(self, critic: AttentionCritic, shape: CriticShape, generator: torch.Generator) -> None:
        super().__init__()
        self.width, self.heads = critic.width, critic.heads
        wide = critic.heads * critic.width

        def weight(rows: int, columns: int) -> nn.Parameter:
            tensor = torch.empty(shape.sites, rows, columns, device="cpu")
            return nn.Parameter(tensor.uniform_(-1.0, 1.0, generator=generator).mul_(math.sqrt(3.0 / max(rows, 1))))

        place = 2 + 2 * len(_WAVES)
        self.embeddings = nn.ParameterList(weight(width + place, critic.width) for width in shape.members)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(shape.sites, 1, critic.width)) for _ in shape.members)
        pooled = 0
        if shape.members:
            self.query, self.query_bias = weight(shape.features, wide), weight(1, wide)
            self.keys, self.values = weight(critic.width, wide), weight(critic.width, wide)
            pooled = wide + critic.width
        self.head = Perceptron(replace(shape, features=shape.features + pooled), critic.hidden, generator)

    def forward(self, context: Tensor, cells: Tensor | None, members: Members) -> Tensor:
        return self.head(torch.cat((context, self.pooled(context, members)), -1) if members.values else context, cells)

    def pooled(self, context: Tensor, members: Members) -> Tensor:
        """Results of attention and of the sum over all members, ``(G, N, heads * width + width)``."""
        sites, rows = context.shape[:2]
        hidden = torch.cat([self._embedded(k, part) for k, part in enumerate(members.values)], 2)
        present = torch.cat(members.present, 1)[:, None]
        # (G, N, W, heads, width)
        keys, values = (
            torch.einsum("gnwh,gho->gnwo", hidden, part).unflatten(-1, (self.heads, self.width))
            for part in (self.keys, self.values)
        )
        query = (context @ self.query + self.query_bias).reshape(sites, rows, 1, self.heads, self.width)
        score = (query * keys).sum(-1) / math.sqrt(self.width)
        # Without the second mask the weights of a scope without members would be uniform.
        weights = torch.where(present[..., None], score, score.new_tensor(-1e9)).softmax(2) * present[..., None]
        found = (weights[..., None] * values).sum(2).flatten(-2)
        number = present.sum(-1, keepdim=True).clamp(min=1)
        total = (hidden * present[..., None]).sum(2) / number.to(hidden.dtype).sqrt()
        return torch.cat((found, total), -1)

    def _embedded(self, k: int, values: Tensor) -> Tensor:
        """The features ``h_j`` of the members of a kind, ``(G, N, W, width)``."""
        at = torch.arange(values.shape[2], device=values.device, dtype=values.dtype)
        angles = [2.0 * math.pi * at / wave for wave in _WAVES]
        waves = [wave for angle in angles for wave in (angle.cos(), angle.sin())]
        place = torch.stack([torch.log1p(at), 1.0 / (1.0 + at), *waves], -1).expand(*values.shape[:3], -1)
        joined = torch.cat((values, place), -1).flatten(1, 2)
        return silu(torch.baddbmm(self.biases[k], joined, self.embeddings[k])).unflatten(1, values.shape[1:3])
