"""A Poisson VAE: how often does each of eight bars occur in a 4 x 4 image of photon counts?

One step of ``TraceBackpropQ_ELBO()`` predicts from slopes what one more of each bar would cost, and evaluates one.
"""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_bpq import TraceBackpropQ_ELBO


def data(number: int = 500) -> Tensor:
    """Images of bars, each drawn 0.5 times on average."""
    eye = torch.eye(4)
    bars = torch.cat((eye.repeat_interleave(4, 1), eye.repeat(1, 4)))
    return torch.poisson(3.0 * torch.poisson(torch.full((number, 8), 0.5)) @ bars + 0.1)


class PoissonVAE(nn.Module):
    """Counts of bars, and images of photons."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        self.bars, self.prior = nn.Parameter(0.5 * torch.randn(8, 16)), nn.Parameter(torch.zeros(8))

    def model(self, images: Tensor) -> None:
        """Counts of bars, then images."""
        pyro.module("vae", self)
        with pyro.plate("images", len(images)):
            z = pyro.sample("z", dist.Poisson(self.prior.exp().expand(len(images), 8)).to_event(1))
            pyro.sample("x", dist.Poisson(z @ nn.functional.softplus(self.bars) + 0.1).to_event(1), obs=images)

    def guide(self, images: Tensor) -> None:
        """Counts of bars given images."""
        with pyro.plate("images", len(images)):
            pyro.sample("z", dist.Poisson(nn.functional.softplus(self.encoder(images.sqrt()))).to_event(1))


if __name__ == "__main__":
    pyro.set_rng_seed(0)
    images, vae = data(), PoissonVAE()
    svi = SVI(vae.model, vae.guide, Adam({"lr": 1e-2}), loss=TraceBackpropQ_ELBO())
    losses = [svi.step(images) / len(images) for _ in range(100)]
    print(f"nats an image: {sum(losses[-20:]) / 20:.2f}")
