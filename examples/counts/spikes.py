"""A neural population: bursts that excite further bursts, seen through the spike counts of twelve neurons."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor
from torch.nn.functional import softplus

from pyro_bpq import TraceBackpropQ_ELBO

STEPS, NEURONS = 20, 12


def data() -> Tensor:
    """Spike counts, a row for each of the time steps."""
    bursts, rows = torch.ones(()), []
    for _ in range(STEPS):
        bursts = torch.poisson(0.4 + 0.6 * bursts)
        rows.append(torch.poisson(0.2 + bursts * torch.linspace(0.1, 0.8, NEURONS)))
    return torch.stack(rows)


def model(spikes: Tensor) -> None:
    start, more = softplus(pyro.param("start", torch.zeros(()))), softplus(pyro.param("more", torch.zeros(())))
    gain = softplus(pyro.param("gain", torch.zeros(NEURONS)))
    bursts = torch.ones(())
    for t, row in enumerate(spikes):
        bursts = pyro.sample(f"bursts_{t}", dist.Poisson(start + more * bursts))
        pyro.sample(f"spikes_{t}", dist.Poisson(0.2 + bursts.unsqueeze(-1) * gain).to_event(1), obs=row)


def guide(spikes: Tensor) -> None:
    own, last = pyro.param("own", torch.tensor([0.1, 0.1, 0.1])), torch.ones(())
    for t, row in enumerate(spikes):
        last = pyro.sample(f"bursts_{t}", dist.Poisson(softplus(own[0] + own[1] * row.sum() + own[2] * last)))


if __name__ == "__main__":
    pyro.set_rng_seed(0)
    spikes = data()
    svi = SVI(model, guide, Adam({"lr": 3e-2}), loss=TraceBackpropQ_ELBO())
    losses = [svi.step(spikes) for _ in range(60)]
    print(f"nats: {sum(losses[-10:]) / 10:.1f}")
