r"""A deep Markov model with 16 discrete states on Bach chorales, against exact enumeration.

``z_t ~ Categorical(net(z_{t-1}))``, every one of 88 keys ``x_t ~ Bernoulli(net(z_t))``; the guide draws ``z_t`` given
``z_{t-1}`` and a recurrent net that reads the chorale backwards. One frame is a quarter note; longer chorales are cut
after the first frames, shorter ones masked. ``TraceEnum_ELBO`` sums the states of the same model out, exactly and with
no guide: a reference, no rival. Besides the bound, the exact log-likelihood of each learned model is reported.

The chorales are those of ``jsb.npz`` in the folder that the environment variable PYRO_BPQ_DATA names, not the
published JSB files, whose figures do not compare.

``--compiled`` races compiled steps, but for ``TraceEnum_ELBO``, the reference; the time that it takes to make them is
told apart.

    python benchmarks/chorales.py [--long | --compiled | --smoke] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
    bounds,
    data_file,
    leave_one_out,
    median,
    net,
    ours,
    plain_leave_one_out,
    report,
    result,
    run_race,
    sized,
)
from pyro import poutine
from pyro.infer import TraceEnum_ELBO
from torch import Tensor, nn
from torch.nn.functional import one_hot

from pyro_bpq.estimators import ReinMax

KEYS, HIDDEN, BATCH = 88, 64, 20
QUICK = Size(rates=(1e-2, 3e-2), seeds=1, seconds=10.0, slices=10)
# All seeds end in optima of their own, further apart than neighbouring rates.
LONG = Size(rates=(3e-3, 1e-2, 3e-2), seeds=5, seconds=60.0, slices=30, tuning=3)
COMPILED = Size(rates=(1e-2, 3e-2), seeds=3, seconds=60.0, slices=30)


class MarkovModel(nn.Module):
    """Model and guide.

    Args:
        states: Number of states.
        program: ``"enumerate"`` for sites that are summed out, ``"onehot"`` for one-hot sites, ``"average"`` for
            Pyro's decaying-average baseline, else ``""``.
        mean: How often each key sounds, ``(88,)``.
    """

    def __init__(self, states: int, program: str, mean: Tensor) -> None:
        super().__init__()
        self.states, self.program = states, program
        self.transition = net(states, HIDDEN, states, between=nn.Tanh)
        self.emission = net(states, HIDDEN, KEYS, between=nn.Tanh)
        self.reader = nn.GRU(KEYS, HIDDEN, batch_first=True)
        self.state, self.last = nn.Linear(HIDDEN, states), nn.Linear(states, states, bias=False)
        with torch.no_grad():
            self.emission[-1].bias.copy_(torch.logit(mean.clamp(0.001, 0.999)))

    def draw(self, t: int, logits: Tensor) -> Tensor:
        """A state, one-hot."""
        if self.program == "onehot":
            return pyro.sample(f"z_{t}", dist.OneHotCategorical(logits=logits))
        infer = {"enumerate": "parallel"} if self.program == "enumerate" else baseline_options(self.program)
        return one_hot(pyro.sample(f"z_{t}", dist.Categorical(logits=logits), infer=infer), self.states).float()

    def model(self, rolls: Tensor, lengths: Tensor) -> None:
        """States and keys."""
        pyro.module("nets", self)
        z = torch.zeros(self.states)
        with pyro.plate("rows", len(rolls), dim=-1):
            for t in pyro.markov(range(rolls.shape[1])):
                with poutine.mask(mask=t < lengths):
                    z = self.draw(t, self.transition(z))
                    keys = dist.Bernoulli(logits=self.emission(z)).to_event(1)
                    pyro.sample(f"x_{t}", keys, obs=rolls[:, t])

    def guide(self, rolls: Tensor, lengths: Tensor) -> None:
        """States given the future; none where they are summed out."""
        pyro.module("nets", self)
        if self.program == "enumerate":
            return
        # Frames after the end are silent.
        read = self.reader(rolls.flip(1))[0].flip(1)
        z = torch.zeros(self.states)
        with pyro.plate("rows", len(rolls), dim=-1):
            for t in range(rolls.shape[1]):
                with poutine.mask(mask=t < lengths):
                    z = self.draw(t, self.state(read[:, t]) + self.last(z))

    def log_likelihood(self, rolls: Tensor, lengths: Tensor) -> Tensor:
        """Exact ``log p(x)`` of each row, by the forward recursion."""
        eye = torch.eye(self.states)
        step, keys = self.transition(eye).log_softmax(-1), self.emission(eye)
        # log p(x_t | z_t), (rows, frames, states)
        seen = rolls @ keys.T - nn.functional.softplus(keys).sum(-1)
        alpha = self.transition(torch.zeros(self.states)).log_softmax(-1) + seen[:, 0]
        for t in range(1, rolls.shape[1]):
            ahead = (alpha.unsqueeze(-1) + step).logsumexp(-2) + seen[:, t]
            alpha = torch.where((t < lengths).unsqueeze(-1), ahead, alpha)
        return alpha.logsumexp(-1)


@dataclass(frozen=True)
class Chorales(Task):
    """The task.

    Args:
        name, splits: As in :class:`Task`; rolls ``(rows, frames, 88)`` and lengths.
        states: Number of states.
    """

    states: int
    unit: ClassVar[str] = "frame"

    def programs(self, program: str) -> MarkovModel:
        """Nets with the weights that the global seed gives."""
        rolls, lengths = self.splits["train"]
        return MarkovModel(self.states, program, rolls.sum((0, 1)) / lengths.sum())

    def batch(self, generator: torch.Generator) -> Data:
        """Some chorales."""
        rows = torch.randperm(len(self.splits["train"][0]), generator=generator)[:BATCH]
        return tuple(part[rows] for part in self.splits["train"])

    def measure(self, programs: nn.Module, data: Data, samples: int) -> tuple[float, float]:
        """Both bounds per frame; where states are summed out, the exact log-likelihood twice."""
        frames = float(data[1].sum())
        if programs.program == "enumerate":
            exact = exact_figure(programs, data)
            return exact, exact
        return tuple(value * len(data[0]) / frames for value in bounds(programs, data, samples))


@torch.no_grad()
def exact_figure(programs: MarkovModel, data: Data) -> float:
    """Exact log-likelihood, nats per frame."""
    return float(programs.log_likelihood(*data).sum() / data[1].sum())


def load_chorales(frames: int, states: int) -> Chorales | None:
    """The data set, cut after so many frames; ``None`` where the file is missing."""
    path = data_file("jsb.npz")
    if path is None:
        return None
    with np.load(path) as file:
        rolls = torch.from_numpy(np.unpackbits(file["rolls"], axis=-1)[:, :frames, :KEYS]).float()
        lengths, split = torch.from_numpy(file["lengths"]).clamp(max=frames), file["split"]
    found = {name: (rolls[split == name], lengths[split == name]) for name in ("train", "valid", "test")}
    return Chorales(f"{frames} frames, {states} states", found | {"curve": found["test"]}, states)


EXACT = Method("TraceEnum", lambda: TraceEnum_ELBO(max_plate_nesting=1), "enumerate", "exact")
# The lean loop is our own leave-one-out in less time.
STRONG = (DEFAULT, plain_leave_one_out(8), EXACT)
REINMAX = Method("ReinMax", lambda: ours(ReinMax()), "onehot", "biased")
METHODS = (DEFAULT, AVERAGE, leave_one_out(8), plain_leave_one_out(8), EXACT, REINMAX)
COMPILE = (DEFAULT_COMPILED, leave_one_out(8, compile=True), leave_one_out(16, compile=True), EXACT)
NEAR = 0.05  # nats of enumeration


def gaps(race: Race) -> list[Row]:
    """Exact log-likelihood of the learned models, distances from enumeration, times to get near; medians over seeds."""
    data, rows = race.task.splits["test"], []
    exact = median(exact_figure(run.programs, data) for run in race.runs["TraceEnum"])
    for name, runs in race.runs.items():
        likelihood = median(exact_figure(run.programs, data) for run in runs)
        bound = median(run.figures("test", race.size.samples)[1] for run in runs)
        # The curve is measured on the test data.
        times = sorted(run.reach(exact - NEAR) for run in runs)
        row = {"method": name, "exact log-likelihood": f"{likelihood:.3f}", "bound": f"{bound:.3f}"}
        row |= {"bound below TraceEnum": f"{exact - bound:.3f}"}
        row |= {f"within {NEAR}": "yes" if exact - bound <= NEAR else "no"}
        rows.append(row | {"seconds to there": f"{median(times):.1f} ({times[0]:.1f} to {times[-1]:.1f})"})
    return rows


def main() -> None:
    """Races, prints, writes ``chorales.csv``, ``chorales.md`` and ``chorales.png``; long and compiled ones apart."""
    options = arguments(__doc__, "smoke compiled seeds")
    size = sized(options, QUICK, LONG, COMPILED)
    methods = COMPILE if options.compiled else STRONG if options.full else METHODS
    task = load_chorales(3 if options.smoke else 16, 16)
    if task is None:
        return
    race = run_race(task, methods, size)
    report(result("chorales", options), "Discrete deep Markov model on chorales", __doc__, [race], *gaps(race))


if __name__ == "__main__":
    main()
