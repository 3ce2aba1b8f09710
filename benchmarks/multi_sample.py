"""Variance of the gradient of the importance-weighted bound, with leave-one-out signals (VIMCO) and with critics.

Two layers of four binary sites above a row of eight pixels; parameters are held at their initial values. Critics learn
first; then the total variance of the gradient over draws, and CPU time per training step.
"""

from __future__ import annotations

import time
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import arguments, progress, table, write_csv, write_markdown

from pyro_bpq import MLPCritic, TraceBackpropQ_IWAE

UNITS, PIXELS, SAMPLES = 4, 8, (2, 5, 20)


class Layers:
    """A model with random weights, and a guide that starts uniform."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden = 1.5 * torch.randn(UNITS, UNITS, generator=generator)
        self.visible = 1.5 * torch.randn(UNITS, PIXELS, generator=generator)
        self.row = (torch.rand(PIXELS, generator=generator) < 0.5).to(self.visible.dtype)

    def model(self) -> None:
        above = self.units("a", torch.zeros(UNITS))
        below = self.units("b", (above - 0.5) @ self.hidden)
        pyro.sample("x", dist.Bernoulli(logits=(below - 0.5) @ self.visible).to_event(1), obs=self.row)

    def guide(self) -> None:
        above = self.units("a", pyro.param("a", torch.zeros(UNITS)))
        shift, weight = pyro.param("b", torch.zeros(UNITS)), pyro.param("w", torch.zeros(UNITS, UNITS))
        self.units("b", shift + (above - 0.5) @ weight)

    def units(self, name: str, logits: torch.Tensor) -> torch.Tensor:
        return torch.stack([pyro.sample(f"{name}{i}", dist.Bernoulli(logits=logits[i])) for i in range(UNITS)])


def total_variance(bound: TraceBackpropQ_IWAE, layers: Layers, draws: int) -> float:
    bound.eval()
    leaves, found = list(dict(pyro.get_param_store().named_parameters()).values()), []
    for _ in range(draws):
        for leaf in leaves:
            leaf.grad = None
        bound.loss_and_grads(layers.model, layers.guide)
        found.append(torch.cat([leaf.grad.reshape(-1) for leaf in leaves]))
    bound.train()
    return float(torch.stack(found).var(0).sum())


def measure(samples: int, critic: Any, seed: int, learn: int, draws: int) -> dict[str, Any]:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    layers, bound = Layers(seed), TraceBackpropQ_IWAE(samples, critic=critic, seed=seed)
    bound.loss(layers.model, layers.guide)
    if critic is not None:
        bound.warm_up(layers.model, layers.guide, steps=learn)
    variance, start = total_variance(bound, layers, draws), time.process_time()
    for _ in range(20):
        bound.loss_and_grads(layers.model, layers.guide)
    ms = 1e3 * (time.process_time() - start) / 20
    return {"samples": samples, "critic": critic is not None, "seed": seed, "variance": variance, "ms": ms}


def main() -> None:
    chosen = arguments(__doc__)
    learn, draws, seeds = (10, 10, 1) if chosen.smoke else (500, 1000, 3) if chosen.full else (300, 300, 1)
    torch.set_num_threads(1)
    tasks = [(k, critic, s) for k in SAMPLES for critic in (None, MLPCritic()) for s in range(chosen.seeds or seeds)]
    runs = [measure(*task, learn, draws) for task in progress(tasks, "bounds")]
    rows = []
    for k in SAMPLES:
        plain, taught = ([run for run in runs if run["samples"] == k and run["critic"] is c] for c in (False, True))
        ratios = torch.tensor([b["variance"] / a["variance"] for a, b in zip(plain, taught, strict=True)])
        rows.append(
            {
                "samples": k,
                "VIMCO": _mean(plain, "variance"),
                "with critics": _mean(taught, "variance"),
                "ratio, least": float(ratios.min()),
                "ratio, largest": float(ratios.max()),
                "ms": _mean(plain, "ms"),
                "ms with critics": _mean(taught, "ms"),
            }
        )
    write_csv(chosen.output / "multi_sample.csv", rows)
    text = f"Mean of {chosen.seeds or seeds} seeds; {learn} steps of learning, {draws} draws. CPU time of a step."
    write_markdown(chosen.output / "multi_sample.md", "Critics of a multi-sample bound", [text, table(rows)])
    print(table(rows))


def _mean(runs: list[dict[str, Any]], name: str) -> float:
    return sum(run[name] for run in runs) / len(runs)


if __name__ == "__main__":
    main()
