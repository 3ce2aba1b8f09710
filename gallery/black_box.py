"""A black box: a simulator in numpy of the flu in a boarding school, 1978. Which rates fit the boys in bed by day?"""

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

IN_BED = [3.0, 8.0, 26.0, 76.0, 225.0, 298.0, 258.0, 233.0, 189.0, 128.0, 68.0, 29.0, 14.0, 4.0]
SPREAD, HEAL, LR = np.linspace(0.5, 3.0, 26), np.linspace(0.1, 1.0, 19), 0.05


def data() -> tuple[Tensor, ...]:
    return (torch.tensor(IN_BED),)


def simulate(spread: float, heal: float) -> np.ndarray:
    """Boys in bed at noon of each day, of 763."""
    healthy, sick, found = 760.0, 3.0, []
    for _ in IN_BED:
        found.append(sick)
        for _ in range(24):
            new, well = spread * healthy * sick / 763 / 24, heal * sick / 24
            healthy, sick = healthy - new, sick + new - well
    return np.array(found)


def model(in_bed: Tensor) -> None:
    spread = pyro.sample("spread", dist.Categorical(torch.ones(len(SPREAD))))
    heal = pyro.sample("heal", dist.Categorical(torch.ones(len(HEAL))))
    found = torch.tensor(simulate(SPREAD[int(spread)], HEAL[int(heal)]), dtype=torch.float32)
    with pyro.plate("days", len(in_bed)):
        pyro.sample("bed", dist.NegativeBinomial(10.0, found / (found + 10.0)), obs=in_bed)


def guide(in_bed: Tensor) -> None:
    spread = pyro.sample("spread", dist.Categorical(logits=pyro.param("s", torch.zeros(len(SPREAD)))))
    pyro.sample("heal", dist.Categorical(logits=pyro.param("h", torch.zeros(len(SPREAD), len(HEAL)))[spread]))
