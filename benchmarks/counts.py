r"""Counts: the gradient of differences beside leave-one-out, and a Poisson VAE beside published relaxations.

``gradients``: variance of one step's gradient times CPU time, at fixed weights, on a Poisson VAE (784-200-784, linear),
chains of 30 Poisson sites, whose guide draws each by itself or from the last one, and births and deaths in 50 steps.
Leave-one-out has the number of particles that is best for it. With ``--compiled`` the VAE alone.

``race``: the Poisson VAE of the Fini paper, two hidden layers of 200 LeakyReLU units either way, 200 latents, MNIST
binarised afresh at every visit. The relaxations are biased: straight-through, ``dz/dλ = 1``, and Fini-2,
``dz/d log λ = (z + λ) / 2``, both with the exact KL divergence. All steps are compiled.

    python benchmarks/counts.py [--full | --smoke] [--only gradients] [--compiled] [--output DIRECTORY]
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import (
    DEFAULT_COMPILED,
    Method,
    PlainLeaveOneOut,
    Row,
    Size,
    data_file,
    flat,
    grouped,
    leave_one_out,
    parser_of,
    report,
    run_race,
    table,
    write_csv,
    write_markdown,
)
from programs import Parts
from torch import Tensor, nn
from torch.nn.functional import softplus
from vae import Digits, layers, load_digits

from pyro_bpq import ScoreFunction, TraceBackpropQ_ELBO

LATENTS = 200
PARTICLES = (2, 8, 32, 64, 128, 256, 1024)
WARM = 60  # steps before the gradient is measured
LONG = Size(rates=(1e-3, 3e-3), seeds=1, seconds=120.0, slices=12)
QUICK = Size(rates=(1e-3,), seeds=1, seconds=30.0, slices=6)
SMOKE = Size(rates=(1e-3,), seeds=1, seconds=0.01, slices=2, samples=3)


class Relaxed(dist.Poisson):
    """Counts with a made-up slope: ``dz = weight · dlog λ``."""

    has_rsample = True

    def weight(self, value: Tensor) -> Tensor:
        """Of straight-through."""
        return self.rate

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        return super().expand(batch_shape, self._get_checked_instance(type(self), _instance))

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        with torch.no_grad():
            value = torch.poisson(self.rate.expand(self._extended_shape(sample_shape)))
            weight = self.weight(value)
        moved = weight * self.rate.log()
        return value + (moved - moved.detach())


class Fini2(Relaxed):
    def weight(self, value: Tensor) -> Tensor:
        """The mean of the value and its rate."""
        return 0.5 * (value + self.rate)


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


class Chain(Parts):
    """Poisson sites, each with a rate that is linear in the last one, and a noisy reading of each.

    Args:
        length: Number of sites.
        reads: Whether the guide draws each from the last one.
    """

    def __init__(self, length: int, reads: bool) -> None:
        super().__init__()
        self.seen, self.reads = torch.poisson(torch.full((length,), 1.5)), reads
        self.own, self.last = nn.Parameter(0.2 * torch.randn(length) + 0.5), nn.Parameter(torch.full((length,), 0.3))

    def model(self) -> None:
        z = torch.ones(())
        for t, seen in enumerate(self.seen):
            z = pyro.sample(f"z_{t}", dist.Poisson(0.5 + 0.5 * z))
            pyro.sample(f"x_{t}", dist.Normal(z, 1.0), obs=seen)

    def guide(self) -> None:
        z = torch.ones(())
        for t in range(len(self.seen)):
            z = pyro.sample(f"z_{t}", dist.Poisson(softplus(self.own[t] + (self.last[t] * z if self.reads else 0.0))))


class Births(Parts):
    """A population that has children and dies, and to which others come; every fifth step it is seen, with errors."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.own = length, nn.Parameter(torch.zeros(length, 2))

    def walk(self, is_guide: bool) -> None:
        size = torch.full((), 5.0)
        for t in range(self.length):
            share, rate = (self.own[t, 0].sigmoid(), softplus(self.own[t, 1])) if is_guide else (0.8, 1.0)
            size = pyro.sample(f"size_{t}", dist.Poisson(share * size + rate))
            if t % 5 == 4 and not is_guide:
                pyro.sample(f"x_{t}", dist.Normal(size, 1.0), obs=torch.full((), 5.0 + math.sin(t)))

    def model(self) -> None:
        self.walk(False)

    def guide(self) -> None:
        self.walk(True)


def elbos(compiled: bool, largest: int) -> dict[str, Callable[[], Any]]:
    """Ours and theirs, by name."""
    options = {"compile": True} if compiled else {}
    found: dict[str, Callable[[], Any]] = {
        "default": lambda: TraceBackpropQ_ELBO(**options),
        "score function": lambda: TraceBackpropQ_ELBO(1, estimator=ScoreFunction(), **options),
    }
    for number in (n for n in PARTICLES if n <= largest):
        found[f"leave-one-out, {number}"] = leave_one_out(number, compiled).elbo
        if not compiled:
            found[f"plain leave-one-out, {number}"] = lambda number=number: PlainLeaveOneOut(number, 1)
    return found


def gradients(name: str, make: Callable[[], Any], draw: Callable[[], tuple[Tensor, ...]], options: Any) -> list[Row]:
    """Variance and CPU time of every method's gradient at the weights that some steps of the default lead to."""
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    trained = make()
    optimizer, elbo = torch.optim.Adam(trained.parameters(), 3e-3), TraceBackpropQ_ELBO()
    for _ in range(20 if options.smoke else 1500 if draw() and options.full else 300):
        optimizer.zero_grad()
        elbo.loss_and_grads(trained.model, trained.guide, *draw())
        optimizer.step()
    lanes, batch = [], draw()
    for text, build in elbos(options.compiled, 32 if batch else 1024).items():
        pyro.clear_param_store()
        module, own = copy.deepcopy(trained), build()
        with pyro.get_param_store().scope() as state:
            for _ in range(2 if options.smoke else WARM):
                own.loss_and_grads(module.model, module.guide, *batch)
        lanes.append((text, module, own, state, [], []))
    for _ in range(2 if options.smoke else 100 if options.full else 40):
        for _, module, own, state, found, seconds in lanes:
            module.zero_grad()
            with pyro.get_param_store().scope(state):
                start = time.process_time()
                own.loss_and_grads(module.model, module.guide, *batch)
                seconds.append(time.process_time() - start)
            named = [p for p in module.parameters() if p.grad is not None]
            # Of a VAE the encoder: the decoder's gradient is pathwise.
            found.append(flat(p.grad for p in (module.up.parameters() if batch else named)))
    rows = []
    for text, _, own, _, found, seconds in lanes:
        stacked = torch.stack(found)
        ms, variance = 1e3 * float(torch.tensor(seconds).median()), float(stacked.var(0).sum())
        count = own.num_particles
        rows.append({"program": name, "method": text, "particles": count, "ms": ms, "variance": variance})
    best = next(row["ms"] * row["variance"] for row in rows if row["method"] == "default")
    return [{**row, "variance x ms / default's": row["ms"] * row["variance"] / best} for row in rows]


RACERS = (
    DEFAULT_COMPILED,
    Method("default, 1 particle", lambda: TraceBackpropQ_ELBO(1, compile=True), group="ours"),
    leave_one_out(32, True),
    *(
        Method(name, lambda: TraceBackpropQ_ELBO(1, analytic_kl=True, compile=True), law, "biased")
        for name, law in (("Fini-2", "fini"), ("straight-through", "straight-through"))
    ),
)


def main() -> None:
    parser = parser_of(__doc__, "smoke compiled only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    digits = load_digits({"curve": 100, "valid": 500, "test": 500}) if data_file("mnist.npz") else None
    stem = "counts_compiled" if options.compiled else "counts"
    if not options.only or options.only == "gradients":
        rows: list[Row] = []
        programs: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Tensor, ...]]]] = {
            "chain of 30, each drawn by itself": (lambda: Chain(30, False), tuple),
            "chain of 30, each from the last": (lambda: Chain(30, True), tuple),
            "births and deaths, 50 steps": (lambda: Births(50), tuple),
        }
        if digits is not None:
            images = Images("", "linear", 1, digits.train, digits.splits)
            generator = torch.Generator().manual_seed(0)
            vae = {"Poisson VAE, linear": (lambda: images.programs(""), lambda: images.batch(generator))}
            programs = vae if options.compiled else {**vae, **programs}
        for name, (make, draw) in programs.items():
            rows += gradients(name, make, draw, options)
            print(table([row for row in rows if row["program"] == name]), flush=True)
        write_csv(options.output / f"{stem}.csv", rows)
        heads = []
        for (name,), mine in grouped(rows, "program").items():
            rivals = [row for row in mine if "leave-one-out" in row["method"]]
            best = min(rivals, key=lambda row: row["variance x ms / default's"])
            factor = best["variance x ms / default's"]
            heads.append({"program": name, "best leave-one-out": best["method"], "over the default": factor})
        about = "Variance of one step's gradient times CPU milliseconds, methods in turn, at the same weights."
        write_markdown(options.output / f"{stem}.md", "Counts", [about, table(heads), table(rows)])
    if digits is not None and (not options.only or options.only == "race"):
        size = SMOKE if options.smoke else LONG if options.full else QUICK
        images = Images("Poisson VAE, nonlinear", "nonlinear", 1, digits.train, digits.splits)
        about = (
            "784-200-784 VAE of Poisson latents with a learned prior, two hidden layers of 200 LeakyReLU(0.3) units, "
            "on MNIST, binarised afresh at every visit. All figures are held-out bounds of the discrete model, with "
            "Poisson draws for all, also where the training bound of a relaxation is another one."
        )
        race = run_race(images, RACERS, replace(size, seeds=1))
        report(options.output, "counts_race", "Poisson VAE on MNIST", about, [race])


if __name__ == "__main__":
    main()
