r"""Counts: a Poisson VAE beside published relaxations.

The Poisson VAE of the Fini paper: a learned prior, two hidden layers of 200 LeakyReLU(0.3) units either way, 200
latents, on MNIST, binarised afresh at every visit. The relaxations are biased: straight-through, ``dz/dλ = 1``, and
Fini-2, ``dz/d log λ = (z + λ) / 2``, both with the exact KL divergence. All steps are compiled. All figures are
held-out bounds of the discrete model, with Poisson draws for all, also where the training bound of a relaxation is
another one.

With ``--full`` the learning rate falls, by a factor of 50 until the end: at a constant one the noise of the gradients
holds all of them back.

    python benchmarks/counts.py [--full | --smoke] [--seeds N] [--only METHODS] [--output DIRECTORY]
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import DEFAULT_COMPILED, Method, Size, arguments, leave_one_out, only, report, result, run_race
from torch import Tensor, nn
from torch.nn.functional import softplus
from vae import Digits, begin, layers

from pyro_bpq import TraceBackpropQ_ELBO

LATENTS = 200
QUICK = Size(rates=(1e-3,), seeds=1, seconds=30.0, slices=6)
LONG = Size(rates=(1e-3,), seeds=3, seconds=1400.0, slices=28, decay=0.02)


class Relaxed(dist.Poisson):
    """Counts with a made-up slope: ``dz = weight · dlog λ``."""

    has_rsample = True
    share = 0.0  # of the value in the weight, beside its rate

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        return super().expand(batch_shape, self._get_checked_instance(type(self), _instance))

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        with torch.no_grad():
            value = torch.poisson(self.rate.expand(self._extended_shape(sample_shape)))
            weight = torch.lerp(self.rate.expand(value.shape), value, self.share)
        moved = weight * self.rate.log()
        return value + (moved - moved.detach())


class Fini2(Relaxed):
    share = 0.5


LAWS: dict[str, Any] = {"": dist.Poisson, "straight-through": Relaxed, "fini": Fini2}


class PoissonVAE(nn.Module):
    """Poisson latents above binary images, with a prior that is learned.

    Args:
        kind: ``"linear"`` or ``"nonlinear"``: the nets.
        mean: Mean image, ``(784,)``.
        program: Whose latents, by name in :data:`LAWS`.
    """

    def __init__(self, kind: str, mean: Tensor, program: str = "") -> None:
        super().__init__()
        self.up, self.down = layers(len(mean), LATENTS, kind), layers(LATENTS, len(mean), kind)
        self.prior, self.law = nn.Parameter(torch.zeros(LATENTS)), LAWS[program]
        self.register_buffer("mean", mean)
        with torch.no_grad():
            self.down[-1].bias.copy_(torch.logit(mean.clamp(0.001, 0.999)))

    def guide(self, x: Tensor) -> None:
        """Counts of an image."""
        pyro.module("nets", self)
        with pyro.plate("rows", len(x), dim=-1):
            rate = softplus(self.up(x - self.mean)) + 1e-6
            pyro.sample("z", self.law(rate, validate_args=False).to_event(1))

    def model(self, x: Tensor) -> None:
        """Counts, then an image."""
        with pyro.plate("rows", len(x), dim=-1):
            rate = softplus(self.prior) + 1e-6
            z = pyro.sample("z", self.law(rate.expand(len(x), -1), validate_args=False).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=self.down(z), validate_args=False).to_event(1), obs=x)


@dataclass(frozen=True)
class Images(Digits):
    """Poisson VAEs on MNIST."""

    def programs(self, program: str) -> Any:
        return PoissonVAE(self.kind, self.train.mean(0), program)


RACERS = (
    DEFAULT_COMPILED,
    leave_one_out(32, True),
    *(
        Method(name, lambda: TraceBackpropQ_ELBO(1, analytic_kl=True, compile=True), law, "biased")
        for name, law in (("Fini-2", "fini"), ("straight-through", "straight-through"))
    ),
)


def main() -> None:
    options = arguments(__doc__, "smoke seeds only")
    size, digits = begin(options, QUICK, LONG)
    if digits is None:
        return
    seen = {"train": (torch.bernoulli(digits.train[:1000], generator=torch.Generator().manual_seed(0)),)}
    images = Images("Poisson VAE", digits.splits | seen, "nonlinear", 1, digits.train)
    race = run_race(images, [racer for racer in RACERS if only(options, [racer.name])], size)
    names, rows = ("method", "seed", "ELBO of 1,000 training images", "importance bound of them"), []
    for run in itertools.chain(*race.runs.values()):
        figures = (f"{figure:.2f}" for figure in run.figures("train", 100))
        rows.append(dict(zip(names, (run.method.name, run.seed, *figures), strict=True)))
    report(result("counts_race", options), "Poisson VAE on MNIST", __doc__, [race], *rows)


if __name__ == "__main__":
    main()
