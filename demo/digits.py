"""Fits a discrete VAE on real images, three ways in the same time, and shows critics learn on a chain.

A variational autoencoder with Bernoulli latents is trained on scikit-learn's digits with

- ``TraceBackpropQ_ELBO()``, the default, which chooses its number of particles (several on this program),
- ``TraceGraph_ELBO()`` with its decaying-average baseline,
- leave-one-out: ``TraceBackpropQ_ELBO(estimator=ScoreFunction(baseline=LeaveOneOut()), num_particles=2)``.

The chain (``chain.py``) has 22 hidden states, and each changes all that come after it: there learned critics matter.

The runs take turns in short slices, so that all see the same machine. Figures go to ``demo_output/``.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from chain import learn
from pyro.infer import ELBO, SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import Adam
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

from pyro_bpq import LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.diagnostics.render import render_scg
from pyro_bpq.errors import BPQError

BATCH, LATENTS, LEARNING_RATE, SLICE = 100, 20, 1e-2, 0.25
VECTORIZED = {"vectorize_particles": True, "max_plate_nesting": 1}
# By method: steps so far, variance, milliseconds.
Noise = dict[str, list[tuple[int, float, float]]]
COLOURS = {"TraceBackpropQ_ELBO": "tab:blue", "TraceGraph_ELBO": "tab:orange", "leave-one-out": "tab:green"}


class VAE(nn.Module):
    """Bernoulli latents, linear encoder and decoder.

    Args:
        name: Prefix of its parameters in the param store.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.encoder = nn.Linear(64, LATENTS)
        self.decoder = nn.Linear(LATENTS, 64)
        self.prior = nn.Parameter(torch.zeros(LATENTS))

    def guide(self, images: Tensor, baseline: bool = False) -> None:
        """Draws the latents of a batch."""
        pyro.module(self.name, self)
        options = {"use_decaying_avg_baseline": True, "baseline_beta": 0.9} if baseline else {}
        with pyro.plate("images", len(images)):
            latents = dist.Bernoulli(logits=self.encoder(2 * images - 1)).to_event(1)
            pyro.sample("z", latents, infer={"baseline": options})

    def model(self, images: Tensor, baseline: bool = False) -> None:
        """Scores latents and images."""
        pyro.module(self.name, self)
        with pyro.plate("images", len(images)):
            z = pyro.sample("z", dist.Bernoulli(logits=self.prior).expand([len(images), LATENTS]).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(2 * z - 1)).to_event(1), obs=images)


class Run:
    """One training run.

    Args:
        method: Name of the method.
        elbo: Its ELBO.
        train: Grey training images.
        seed: Seed of initial weights and batches.
        baseline: Whether to switch Pyro's decaying-average baseline on.
    """

    def __init__(self, method: str, elbo: ELBO, train: Tensor, seed: int, baseline: bool = False) -> None:
        self.method, self.elbo, self.train, self.baseline, self.seed = method, elbo, train, baseline, seed
        torch.manual_seed(seed)
        self.vae = VAE(f"{method} {seed}")
        self.svi = SVI(self.vae.model, self.vae.guide, Adam({"lr": LEARNING_RATE}), loss=elbo)
        self.generator = torch.Generator().manual_seed(seed)
        self.batches: Iterator[Tensor] = iter(())
        self.seconds, self.steps = 0.0, 0
        self.curve: list[tuple[float, float]] = []

    def train_for(self, seconds: float) -> None:
        """Trains for one slice of processor time; every visit binarises an image afresh."""
        start = time.process_time()
        while time.process_time() - start < seconds:
            rows = next(self.batches, None)
            if rows is None:
                # TraceGraph_ELBO's baseline needs batches of one size, so the last rows of an epoch wait.
                order = torch.randperm(len(self.train), generator=self.generator)
                self.batches = iter(order[: len(order) // BATCH * BATCH].split(BATCH))
                continue
            self.svi.step(torch.bernoulli(self.train[rows], generator=self.generator), self.baseline)
            self.steps += 1
        self.seconds += time.process_time() - start

    def held_out(self, test: Tensor, particles: int = 10) -> float:
        """ELBO per image of held-out images, in nats."""
        elbo = Trace_ELBO(num_particles=particles, **VECTORIZED)
        with torch.no_grad():
            return -elbo.loss(self.vae.model, self.vae.guide, test) / len(test)


def methods() -> dict[str, Callable[[], tuple[ELBO, bool]]]:
    """The three methods: how to build the ELBO, and whether Pyro's baseline is on."""
    loo = ScoreFunction(baseline=LeaveOneOut())
    return {
        "TraceBackpropQ_ELBO": lambda: (TraceBackpropQ_ELBO(), False),
        "TraceGraph_ELBO": lambda: (TraceGraph_ELBO(), True),
        "leave-one-out": lambda: (TraceBackpropQ_ELBO(num_particles=2, estimator=loo, **VECTORIZED), False),
    }


def gradient_variance(
    make: Callable[[], tuple[ELBO, bool]], vae: VAE, batch: Tensor, repeats: int
) -> tuple[float, float]:
    """Total variance of one gradient of the encoder at fixed weights and images, and ms per gradient.

    Baselines and critics first settle at these weights on this very batch, the best case for all.
    """
    elbo, baseline = make()
    parameters = list(vae.encoder.parameters())
    gradients, seconds = [], []
    for step in range(2 * repeats):
        for parameter in vae.parameters():
            parameter.grad = None
        start = time.perf_counter()
        elbo.loss_and_grads(vae.model, vae.guide, batch, baseline)
        seconds.append(time.perf_counter() - start)
        if step >= repeats:
            gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
    variance = torch.stack(gradients).var(0).sum().item()
    return variance, 1e3 * sorted(seconds[repeats:])[repeats // 2]


def variance_table(vae: VAE, batch: Tensor, repeats: int) -> dict[str, tuple[float, float]]:
    """Gradient variance and ms per gradient of each method with one and two particles."""
    loo, two = ScoreFunction(baseline=LeaveOneOut()), {"num_particles": 2, **VECTORIZED}
    makers: dict[str, Callable[[], tuple[ELBO, bool]]] = {
        "TraceBackpropQ_ELBO, 1 particle": lambda: (TraceBackpropQ_ELBO(num_particles=1), False),
        "TraceGraph_ELBO, 1 particle": lambda: (TraceGraph_ELBO(), True),
        "TraceBackpropQ_ELBO, 2 particles": lambda: (TraceBackpropQ_ELBO(**two), False),
        "TraceGraph_ELBO, 2 particles": lambda: (TraceGraph_ELBO(**two), True),
        "leave-one-out, 2 particles": lambda: (TraceBackpropQ_ELBO(estimator=loo, **two), False),
    }
    table = {}
    for name, make in makers.items():
        # TraceGraph_ELBO keeps its baseline in the param store, by name of the site.
        for key in [key for key in pyro.get_param_store().keys() if key.startswith("__baseline")]:
            del pyro.get_param_store()[key]
        table[name] = gradient_variance(make, vae, batch, repeats)
    return table


def figures(runs: list[Run], noise: Noise, test: Tensor, output: Path) -> None:
    """Writes curves, reconstructions, samples and the stochastic computation graph."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    for run in runs:
        seconds, elbos = zip(*run.curve, strict=True)
        left.plot(seconds, elbos, color=COLOURS[run.method], alpha=0.8, label=run.method if run.seed == 0 else None)
    low = min(elbo for run in runs for _, elbo in run.curve[len(run.curve) // 6 :])
    left.set(title="a VAE with 20 bits, digits", xlabel="seconds of processor time", ylim=(low - 0.5, None))
    left.set_ylabel("held-out ELBO (nats per image)")
    left.legend(title=f"{1 + max(run.seed for run in runs)} seeds each")
    for method, looks in noise.items():
        costs = [variance * ms for _, variance, ms in looks]
        right.plot([at for at, *_ in looks], costs, color=COLOURS[method], marker="o", label=method)
    right.set(
        title="a chain of 22 states, change points", xlabel="steps of learning critics and baselines", yscale="log"
    )
    right.set_ylabel("variance of the gradient x ms of a step")
    right.legend(loc="center right", bbox_to_anchor=(1.0, 0.3))
    figure.tight_layout()
    figure.savefig(output / "curves.png", dpi=150)
    vae = next(run.vae for run in runs if run.method == "TraceBackpropQ_ELBO")
    with torch.no_grad():
        shown = test[:12]
        z = torch.bernoulli(torch.sigmoid(vae.encoder(2 * shown - 1)))
        drawn = torch.bernoulli(torch.sigmoid(vae.prior).expand(12, LATENTS))
        rows = [shown, torch.sigmoid(vae.decoder(2 * z - 1)), torch.sigmoid(vae.decoder(2 * drawn - 1))]
    figure, grid = plt.subplots(3, 12, figsize=(9, 2.6))
    for images, row, title in zip(rows, grid, ("image", "reconstruction", "sample"), strict=True):
        for image, axis in zip(images, row, strict=True):
            axis.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(title, rotation=0, ha="right", va="center")
    figure.tight_layout()
    figure.savefig(output / "images.png", dpi=150)
    plt.close("all")


def save_graph(elbo: TraceBackpropQ_ELBO, output: Path) -> Path:
    """Writes the graph as SVG where Graphviz is installed, else as DOT."""
    drawing = render_scg(elbo.graph)
    try:
        return drawing.save(output / "scg.svg")
    except BPQError:
        return drawing.save(output / "scg.dot")


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    tensor = torch.tensor(values)
    return tensor.mean().item(), (tensor.std() / len(values) ** 0.5).item()


def report(runs: list[Run], noise: Noise, variances: dict[str, tuple[float, float]], output: Path) -> None:
    """Prints the tables and writes them as CSV."""
    final = {m: [run.curve[-1][1] for run in runs if run.method == m] for m in COLOURS}
    rows: list[dict[str, Any]] = []
    print("\nheld-out ELBO at equal time (nats per image, mean ± standard error over seeds)")
    for method, elbos in final.items():
        mean, error = mean_and_error(elbos)
        own = [run for run in runs if run.method == method]
        ms = 1e3 * sum(run.seconds for run in own) / sum(run.steps for run in own)
        print(f"  {method:22s} {mean:8.3f} ± {error:.3f}   {ms:6.2f} ms per step")
        rows.append({"table": "elbo", "method": method, "mean": mean, "error": error, "ms": ms})
    for rival in list(COLOURS)[1:]:
        pairs = zip(final["TraceBackpropQ_ELBO"], final[rival], strict=True)
        mean, error = mean_and_error([ours - theirs for ours, theirs in pairs])
        print(f"  TraceBackpropQ_ELBO - {rival}: {mean:+.3f} ± {error:.3f} (paired by seed)")
        rows.append({"table": "difference", "method": rival, "mean": mean, "error": error, "ms": ""})
    print("\ngradient of the chain's guide after learning, guide and model as they are at the start (nats²)")
    for method, looks in noise.items():
        _, variance, ms = looks[-1]
        print(f"  {method:22s} variance {variance:10.4g}   {ms:6.2f} ms   variance x ms {variance * ms:10.4g}")
        rows.append({"table": "chain", "method": method, "mean": variance, "error": "", "ms": ms})
    print("\ngradient of the encoder at the trained weights, one batch (nats² per image²)")
    for method, (variance, ms) in variances.items():
        variance /= BATCH**2
        print(f"  {method:34s} variance {variance:10.4g}   {ms:6.2f} ms   variance x ms {variance * ms:10.4g}")
        rows.append({"table": "variance", "method": method, "mean": variance, "error": "", "ms": ms})
    with (output / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["table", "method", "mean", "error", "ms"])
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Trains, compares, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="time of each training run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=200, help="gradients per variance")
    parser.add_argument("--output", type=Path, default=Path("demo_output"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    digits = torch.tensor(load_digits().data / 16.0, dtype=torch.get_default_dtype())
    generator = torch.Generator().manual_seed(0)
    digits = digits[torch.randperm(len(digits), generator=generator)]
    train, test = digits[:1437], torch.bernoulli(digits[1437:], generator=generator)
    for name, make in methods().items():
        Run(name, make()[0], train, 99, make()[1]).train_for(0.01)  # what Python and torch do once
    runs: list[Run] = []
    slices = max(1, round(options.seconds / SLICE))
    with tqdm(total=options.seeds * slices, unit="slice") as bar:
        for seed in range(options.seeds):
            group = [Run(name, make()[0], train, seed, make()[1]) for name, make in methods().items()]
            runs += group
            for _ in range(slices):
                for run in group:
                    run.train_for(SLICE)
                    run.curve.append((run.seconds, run.held_out(test)))
                bar.set_postfix({"ELBO": f"{group[0].curve[-1][1]:.2f}", "TraceGraph": f"{group[1].curve[-1][1]:.2f}"})
                bar.update()
            for run in group:
                run.curve.append((run.seconds, run.held_out(test, particles=100)))
    noise = learn(looks=6, steps=max(2, options.repeats // 10))
    batch = torch.bernoulli(train[:BATCH], generator=generator)
    variances = variance_table(runs[0].vae, batch, options.repeats)
    figures(runs, noise, test, options.output)
    graph = save_graph(runs[0].elbo, options.output)
    report(runs, noise, variances, options.output)
    print(f"\n{options.output}/curves.png, images.png, results.csv, {graph.name}")


if __name__ == "__main__":
    main()
