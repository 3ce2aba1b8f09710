"""A grammar: which expression turns a planet's distance into its year? Kepler's answer is a * sqrt(a).

The tree of the expression is sampled, so each run is another program. In the time measured none finds it: the plain
distance is a local optimum.
"""

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

# Distances from the sun in those of the earth, and years in its own: Mercury to Neptune.
DISTANCES = [0.387, 0.723, 1.0, 1.524, 5.203, 9.537, 19.19, 30.07]
YEARS = [0.241, 0.615, 1.0, 1.881, 11.86, 29.46, 84.01, 164.8]
DEPTH, LR = 3, 0.05
# What a node can be: the distance, one, the product of two expressions, the root of one.
RULES = torch.tensor([0.3, 0.2, 0.3, 0.2])


def data() -> tuple[Tensor, ...]:
    return torch.tensor(DISTANCES), torch.tensor(YEARS)


def tree(name: str, depth: int, a: Tensor, probs: dict[int, Tensor] | None) -> Tensor:
    own = RULES if probs is None else probs[depth]
    rule = int(pyro.sample(name, dist.Categorical(own if depth else own[:2])))
    if rule == 0:
        return a
    if rule == 1:
        return torch.ones_like(a)
    left = tree(f"{name}l", depth - 1, a, probs)
    return left * tree(f"{name}r", depth - 1, a, probs) if rule == 2 else left.sqrt()


def model(a: Tensor, years: Tensor) -> None:
    found = tree("t", DEPTH, a, None)
    with pyro.plate("planets", len(a)):
        pyro.sample("year", dist.Normal(found.log(), 0.3), obs=years.log())


def guide(a: Tensor, years: Tensor) -> None:
    logits = pyro.param("logits", torch.zeros(DEPTH + 1, 4))
    tree("t", DEPTH, a, dict(enumerate(logits.softmax(-1))))
