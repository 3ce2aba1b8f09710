"""A queue: how many came and how many were served in each hour, if only its length is seen, and that with errors?

Who is served is one of those who wait: the support of a site depends on the sites before it.
"""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO

LENGTHS = torch.tensor([3.0, 5.2, 6.9, 9.1, 8.0, 6.2, 4.9, 3.1, 2.2, 2.0, 1.1, 0.9])


def model(lengths: Tensor) -> None:
    rate = pyro.param("rate", torch.tensor(2.0), constraint=dist.constraints.positive)
    share = pyro.param("share", torch.tensor(0.5), constraint=dist.constraints.unit_interval)
    length = torch.tensor(2.0)
    for t, seen in enumerate(lengths):
        length = length + pyro.sample(f"came_{t}", dist.Poisson(rate))
        length = length - pyro.sample(f"served_{t}", dist.Binomial(length, share))
        pyro.sample(f"seen_{t}", dist.Normal(length, 0.5), obs=seen)


def guide(lengths: Tensor) -> None:
    rates = pyro.param("rates", torch.full((len(lengths),), 2.0), constraint=dist.constraints.positive)
    logits = pyro.param("logits", torch.zeros(len(lengths)))
    length = torch.tensor(2.0)
    for t in range(len(lengths)):
        length = length + pyro.sample(f"came_{t}", dist.Poisson(rates[t]))
        length = length - pyro.sample(f"served_{t}", dist.Binomial(length, logits=logits[t]))


if __name__ == "__main__":
    pyro.set_rng_seed(0)
    svi = SVI(model, guide, Adam({"lr": 3e-2}), loss=TraceBackpropQ_ELBO())
    losses = [svi.step(LENGTHS) for _ in range(100)]
    print(f"nats: {sum(losses[-20:]) / 20:.1f}")
