r"""A 784-200-784 VAE of Bernoulli latents: who reaches which held-out bound in which CPU time.

``linear``: one affine layer either way; ``nonlinear``: with two hidden layers of 200 LeakyReLU(0.3) units. Fair prior,
MNIST binarised afresh at every visit, batches of 100; test and validation images are binarised once. 50,000 images
train; of 10,000 others 500 choose the learning rate, of as many again 500 test, of which the first give the curve.

The images are those of ``mnist.npz`` in the folder that the environment variable PYRO_BPQ_DATA names.

    python benchmarks/vae.py [--long | --smoke] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from common import (
    AVERAGE,
    DEFAULT,
    Data,
    Method,
    Size,
    Task,
    arguments,
    baseline_options,
    data_file,
    leave_one_out,
    net,
    ours,
    plain_leave_one_out,
    report,
    result,
    run_race,
    sized,
)
from pyro.infer import TraceGraph_ELBO
from torch import Tensor, nn

from pyro_bpq.estimators import DisARM, ReinMax

PIXELS, LATENTS, HIDDEN, BATCH = 784, 200, 200, 100
QUICK = Size(rates=(3e-3, 1e-2), seeds=1, seconds=11.0, slices=22)
LONG = Size(rates=(1e-3, 3e-3, 1e-2), seeds=3, seconds=60.0, slices=30)


def layers(inputs: int, outputs: int, kind: str) -> nn.Sequential:
    """One affine layer, or two hidden layers before it."""
    hidden = [HIDDEN, HIDDEN] if kind == "nonlinear" else []
    return net(inputs, *hidden, outputs, between=lambda: nn.LeakyReLU(0.3))


class BeliefNet(nn.Module):
    """Layers of Bernoulli latents above binary images, and a guide of the same shape.

    Args:
        kind: ``"linear"`` or ``"nonlinear"``: the nets between layers.
        depth: Number of layers of latents.
        mean: Mean image, ``(784,)``.
        program: ``"average"`` or ``"net"`` for Pyro's baselines at the sites, ``""`` for none.
    """

    def __init__(self, kind: str, depth: int, mean: Tensor, program: str) -> None:
        super().__init__()
        sizes = [PIXELS, *[LATENTS] * depth]
        self.up = nn.ModuleList(layers(a, b, kind) for a, b in itertools.pairwise(sizes))
        self.down = nn.ModuleList(layers(b, a, kind) for a, b in itertools.pairwise(sizes))
        self.register_buffer("mean", mean)
        with torch.no_grad():
            self.down[0][-1].bias.copy_(torch.logit(mean.clamp(0.001, 0.999)))
        self.program, number = program, depth if program == "net" else 0
        self.baseline = nn.ModuleList(
            nn.Sequential(*net(PIXELS, 100, 1, between=nn.Tanh), nn.Flatten(-2)) for _ in range(number)
        )

    def guide(self, x: Tensor) -> None:
        """Latents from the images up."""
        pyro.module("nets", self)
        with pyro.plate("rows", len(x), dim=-1):
            value = x - self.mean
            for i, (net, own) in enumerate(zip(self.up, self.baseline or [None] * len(self.up), strict=True)):
                units, options = dist.Bernoulli(logits=net(value)), baseline_options(self.program, own, x - self.mean)
                value = 2.0 * pyro.sample(f"z_{i}", units.to_event(1), infer=options) - 1.0

    def model(self, x: Tensor) -> None:
        """Fair latents at the top, down to the images."""
        with pyro.plate("rows", len(x), dim=-1):
            logits = torch.zeros(LATENTS)
            for i in reversed(range(len(self.down))):
                value = 2.0 * pyro.sample(f"z_{i}", dist.Bernoulli(logits=logits).to_event(1)) - 1.0
                logits = self.down[i](value)
            pyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=x)


@dataclass(frozen=True)
class Digits(Task):
    """Belief nets on MNIST.

    Args:
        name, splits: As in :class:`Task`; binary images.
        kind: ``"linear"`` or ``"nonlinear"``.
        depth: Number of layers of latents.
        train: Grey training images.
    """

    kind: str
    depth: int
    train: Tensor
    unit: ClassVar[str] = "image"

    def programs(self, program: str) -> BeliefNet:
        """Nets with the weights that the global seed gives."""
        return BeliefNet(self.kind, self.depth, self.train.mean(0), program)

    def batch(self, generator: torch.Generator) -> Data:
        """Images, binarised afresh."""
        rows = torch.randint(len(self.train), (BATCH,), generator=generator)
        return (torch.bernoulli(self.train[rows], generator=generator),)


def load_digits(images: dict[str, int]) -> Digits | None:
    """MNIST, with so many images of each held-out split; ``None`` where the file is missing."""
    path = data_file("mnist.npz")
    if path is None:
        return None
    with np.load(path) as file:
        grey, test = (torch.from_numpy(file[f"x_{name}"]).float().flatten(1) / 255.0 for name in ("train", "test"))
    # The last sixth of the training images is for validation.
    train, valid = grey.split([5 * len(grey) // 6, len(grey) - 5 * len(grey) // 6])
    generator = torch.Generator().manual_seed(0)
    test, valid = (torch.bernoulli(part, generator=generator) for part in (test, valid))
    splits = {split: ((valid if split == "valid" else test)[:number],) for split, number in images.items()}
    return Digits("", splits, "linear", 1, train)


NET = Method("TraceGraph, nn_baseline", TraceGraph_ELBO, "net", "TraceGraph")
DISARM = Method("DisARM", lambda: ours(DisARM()))
REINMAX = Method("ReinMax", lambda: ours(ReinMax()), group="biased")
METHODS = (DEFAULT, AVERAGE, leave_one_out(2), plain_leave_one_out(4), DISARM, REINMAX)
STRONG = (DEFAULT, AVERAGE, NET, plain_leave_one_out(4), plain_leave_one_out(8))


def begin(options: Namespace, *sizes: Size) -> tuple[Size, Digits | None]:
    """The size of a race that the command line asks for, and its images if there are any."""
    return sized(options, *sizes), load_digits({"curve": 100, "valid": 500, "test": 500})


def main() -> None:
    """Races, prints, writes ``vae.csv``, ``vae.md`` and ``vae.png``, or ``vae_long``."""
    options = arguments(__doc__, "smoke seeds")
    size, digits = begin(options, QUICK, LONG)
    if digits is None:
        return
    kinds = ("linear", "nonlinear") if options.smoke or options.full else ("linear",)
    methods = STRONG if options.full else METHODS
    races = [run_race(replace(digits, name=f"{kind} VAE", kind=kind), methods, size) for kind in kinds]
    report(result("vae", options), "Discrete VAE on MNIST", __doc__, races)


if __name__ == "__main__":
    main()
