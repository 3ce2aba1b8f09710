r"""Attend, infer, repeat (Eslami et al., 2016): how many digits are on a canvas?

None to three MNIST digits of 12 x 12 pixels lie on canvases of 28 x 28. Each of three steps decides whether there is
one more digit, where, and which. Its guide is an LSTM that looks at what the digits so far leave unexplained. *right*
is the share of held-out canvases whose count is right, each step at its likelier value. ``TraceGraph_ELBO`` has its
usual baselines: a decaying average, and a net that reads the state of the LSTM.

    python benchmarks/air.py [--full | --smoke] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from common import (
    AVERAGE,
    DEFAULT,
    DEFAULT_COMPILED,
    Data,
    Method,
    Race,
    Row,
    Size,
    Task,
    arguments,
    baseline_options,
    curves,
    data_file,
    net,
    publish,
    run_race,
    sized,
)
from pyro import poutine
from pyro.infer import TraceGraph_ELBO
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample, interpolate, softplus

CANVAS, WINDOW, STEPS, WHAT, HIDDEN, BATCH = 28, 12, 3, 10, 128, 64
PRIOR, NOISE = 0.05, 0.3  # of one more digit; standard deviation of a pixel
# The guide's log-odds stay within this: a step that is off is tried now and then.
MOST = 5.0
QUICK = Size(rates=(1e-3,), seeds=1, seconds=60.0, slices=6)
LONG = Size(rates=(1e-3, 3e-3), seeds=5, seconds=120.0, slices=12)


def sampled(images: Tensor, place: Tensor, side: int, is_put: bool) -> Tensor:
    """Windows ``(rows, side, side)`` cut out of canvases at places ``(size, x, y)``; or windows put on canvases."""
    size, *at = place.unbind(-1)
    scale, (x, y) = (1.0 / size, [-each / size for each in at]) if is_put else (size, at)
    none = torch.zeros_like(x)
    moves = torch.stack([scale, none, x, none, scale, y], -1).reshape(-1, 2, 3)
    grid = affine_grid(moves, [len(moves), 1, side, side], align_corners=False)
    return grid_sample(images.unsqueeze(1), grid, align_corners=False).squeeze(1)


class Air(nn.Module):
    """Canvases with digits.

    Args:
        program: ``"average"`` or ``"net"`` for Pyro's baselines at the decisions, ``""`` for none.
    """

    def __init__(self, program: str = "") -> None:
        super().__init__()
        self.decoder, self.encoder = net(WHAT, 100, WINDOW**2), net(WINDOW**2, 100, 2 * WHAT)
        self.look = nn.Sequential(nn.Flatten(), nn.Linear(CANVAS**2, HIDDEN), nn.ReLU())
        self.cell, self.head = nn.LSTMCell(HIDDEN + WHAT + 4, HIDDEN), net(HIDDEN, 100, 7)
        self.program = program
        self.baseline = nn.Sequential(net(HIDDEN, 100, 1), nn.Flatten(-2)) if program == "net" else None
        with torch.no_grad():
            self.decoder[-1].bias.sub_(2.0)  # windows are dark at first
            self.head[-1].weight.mul_(0.1)
            self.head[-1].bias.copy_(torch.tensor([2.0, 0.0, 0.0, 0.0, -1.0, -1.0, -1.0]))

    def digit(self, is_there: Tensor, where: Tensor, what: Tensor) -> Tensor:
        """What a step adds to a canvas."""
        window = self.decoder(what).sigmoid().unflatten(-1, (WINDOW, WINDOW))
        return is_there[:, None, None] * sampled(window, place(where), CANVAS, True)

    def model(self, x: Tensor) -> None:
        """Up to three digits, then their canvas."""
        with pyro.plate("rows", len(x), dim=-1):
            canvas, is_there = torch.zeros_like(x), x.new_ones(len(x))
            for t in range(STEPS):
                is_there = pyro.sample(f"is_there_{t}", dist.Bernoulli(PRIOR * is_there))
                with poutine.mask(mask=is_there.bool()):
                    spread = x.new_tensor([0.2, 1.0, 1.0]).expand(len(x), 3)
                    where = pyro.sample(f"where_{t}", dist.Normal(0.0, spread).to_event(1))
                    what = pyro.sample(f"what_{t}", dist.Normal(0.0, x.new_ones(len(x), WHAT)).to_event(1))
                canvas = canvas + self.digit(is_there, where, what)
            pyro.sample("x", dist.Normal(canvas, NOISE).to_event(2), obs=x)

    def guide(self, x: Tensor) -> None:
        """Digits one by one, each from what is left of the canvas."""
        pyro.module("air", self)
        with pyro.plate("rows", len(x), dim=-1):
            drawn, state, is_there = x.new_zeros(len(x), WHAT + 3), None, x.new_ones(len(x))
            for t in range(STEPS):
                state = self.cell(torch.cat([self.look(x), drawn, is_there.unsqueeze(-1)], -1), state)
                odds, loc, scale = self.head(state[0]).split([1, 3, 3], -1)
                chance = (MOST * torch.tanh(odds.squeeze(-1) / MOST)).sigmoid()
                baseline = baseline_options(self.program, self.baseline, state[0].detach())
                is_there = pyro.sample(f"is_there_{t}", dist.Bernoulli(chance * is_there), infer=baseline)
                with poutine.mask(mask=is_there.bool()):
                    where = pyro.sample(f"where_{t}", dist.Normal(loc, softplus(scale)).to_event(1))
                    seen = self.encoder(sampled(x, place(where), WINDOW, False).flatten(1))
                    loc, scale = seen.chunk(2, -1)
                    what = pyro.sample(f"what_{t}", dist.Normal(loc, softplus(scale)).to_event(1))
                drawn = torch.cat([where, what], -1)
                x = x - self.digit(is_there, where, what).detach()


def place(where: Tensor) -> Tensor:
    """Size and middle of a window, in halves of a canvas, from three normal numbers."""
    return torch.cat([WINDOW / CANVAS * where[:, :1].exp(), 0.6 * where[:, 1:].tanh()], -1)


class Likelier(poutine.messenger.Messenger):
    """Puts decisions at their likelier values, and other sites at their means."""

    def _pyro_sample(self, msg: Row) -> None:
        if msg["name"] != "rows":
            mean, msg["done"] = msg["fn"].mean, True
            msg["value"] = (mean > 0.5).to(mean) if "is_there" in msg["name"] else mean


def canvases(digits: Tensor, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Canvases and counts; digits hardly touch."""
    random = np.random.default_rng(seed)
    counts, found = random.integers(STEPS + 1, size=number), torch.zeros(number, CANVAS, CANVAS)
    for canvas, count in zip(found, counts, strict=True):
        corners: list[np.ndarray] = []
        while len(corners) < count:
            new = random.integers(CANVAS - WINDOW + 1, size=2)
            if all(abs(new - old).max() >= WINDOW - 3 for old in corners):
                corners.append(new)
            elif random.random() < 0.01:  # there may be no room left
                corners.clear()
        for i, j in corners:
            part = canvas[i : i + WINDOW, j : j + WINDOW]
            part.copy_(torch.maximum(part, digits[random.integers(len(digits))]))
    return found, torch.from_numpy(counts)


def splits_of(images: np.ndarray, sizes: dict[str, int]) -> dict[str, Data]:
    """Canvases of MNIST digits, and their counts, by split."""
    middle = torch.from_numpy(images).float().reshape(-1, 1, 28, 28)[..., 4:24, 4:24]
    digits = interpolate(middle, size=(WINDOW, WINDOW), mode="area").squeeze(1)
    digits = digits / digits.amax((1, 2), keepdim=True)
    parts = digits.chunk(len(sizes))  # no digit is in two splits
    named = zip(sizes, sizes.values(), parts, strict=True)
    return {name: canvases(part, size, seed) for seed, (name, size, part) in enumerate(named)}


class Canvases(Task):
    """The task."""

    unit = "canvas"

    def programs(self, program: str) -> Air:
        """Nets with the weights that the global seed gives."""
        return Air(program)

    def batch(self, generator: torch.Generator) -> Data:
        """Canvases."""
        images, _ = self.splits["train"]
        return (images[torch.randint(len(images), (BATCH,), generator=generator)],)

    @torch.no_grad()
    def measure(self, programs: Air, data: Data, samples: int) -> tuple[float, float]:
        """Mean number of digits found, and the percentage of canvases whose count is right."""
        images, counts = data
        with Likelier():
            trace = poutine.trace(programs.guide).get_trace(images)
        found = sum(trace.nodes[f"is_there_{t}"]["value"] for t in range(STEPS))
        return float(found.mean()), 100.0 * float((found == counts).float().mean())


def rows_of(race: Race) -> list[Row]:
    """A row per method."""
    rows = []
    for name, runs in race.runs.items():
        right = sorted(run.figures("test", 1)[1] for run in runs)
        goals = {f"seconds to {goal} %": median(run.reach(goal) for run in runs) for goal in (90, 95)}
        row: Row = {"method": name, "rate": runs[0].rate, "ms a step": 1e3 * runs[0].seconds / runs[0].steps}
        rows.append({**row, "right, %": median(right), "lowest seed": right[0], **goals})
    return rows


NET = Method("TraceGraph, net", TraceGraph_ELBO, "net", "TraceGraph")
METHODS = (DEFAULT, replace(DEFAULT_COMPILED, name="default, compiled"), AVERAGE, NET)


def main() -> None:
    options, path = arguments(__doc__, "smoke seeds"), data_file("mnist.npz")
    if path is None:
        return
    size = sized(options, QUICK, LONG)
    number = {"train": 20_000, "valid": 1_000, "curve": 500, "test": 2_000}
    number = {split: 10 if options.smoke else count for split, count in number.items()}
    with np.load(path) as data:
        race = run_race(Canvases("AIR", splits_of(data["x_train"][:40_000], number)), METHODS, size)
    how = f"{size.seconds:g} s of CPU time a run, {size.seeds} seed(s)."
    publish(options.output / "air", "Attend, infer, repeat", __doc__, curves(race), how, rows_of(race))


if __name__ == "__main__":
    main()
