"""Training on one process or several, each with its share of the rows; run as a program by test_distributed."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.distributed as distributed
from pyro.nn import PyroModule
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyro_bpq import (
    CriticLearner,
    MLPCritic,
    Replay,
    RunningBaseline,
    ScoreFunction,
    TraceBackpropQ_ELBO,
    paper_settings,
)
from pyro_bpq.critics.learner import SlowTracking

PROCESSES, LENGTH, EXACT_STEPS, RANDOM_STEPS = 2, 4, 6, 10


class Draws(Messenger):
    """Draws binary sites from given uniform noise, so that a row's value does not depend on who draws it."""

    def __init__(self, noise: dict[str, Tensor]) -> None:
        super().__init__()
        self.noise = noise

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        if msg["name"] in self.noise and msg["value"] is None:
            msg["value"] = (self.noise[msg["name"]] < msg["fn"].probs).to(self.noise[msg["name"]]).detach()
            msg["done"] = True


class Model(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([-0.3, 0.8]))
        self.means = nn.Parameter(torch.tensor([-0.5, 0.5]))

    def forward(self, x: Tensor, noise: Any = None) -> None:
        with pyro.plate("rows", len(x)):
            z = torch.zeros((), dtype=x.dtype)
            for t in range(LENGTH):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=torch.where(z > 0, self.logits[1], self.logits[0])))
                pyro.sample(f"x_{t}", dist.Normal(torch.where(z > 0, self.means[1], self.means[0]), 1.0), obs=x[:, t])


class Guide(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.calls = 0

    def forward(self, x: Tensor, noise: Any = None) -> None:
        if noise is None:
            return self.draw(x)
        self.calls += 1  # particles are not alike
        noise = noise if self.calls % 2 else 1.0 - noise
        with Draws({f"z_{t}": noise[:, t] for t in range(LENGTH)}):
            return self.draw(x)

    def draw(self, x: Tensor) -> None:
        with pyro.plate("rows", len(x)):
            z = torch.zeros(len(x), dtype=x.dtype)
            for t in range(LENGTH):
                logits = self.net(torch.stack(torch.broadcast_tensors(x[:, t], z), -1)).squeeze(-1)
                z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=logits))


# Options, and rows of each process.
CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "default": ({}, (4, 4)),
    "unequal": ({}, (5, 3)),
    "slow": ({"learner": CriticLearner(steps=2, slow=SlowTracking())}, (4, 4)),
    "adam": ({"learner": CriticLearner(lr=0.02, optimizer=torch.optim.Adam)}, (4, 4)),
    "baseline": ({"estimator": ScoreFunction(RunningBaseline()), "critic": None}, (5, 3)),
    "no_learner": ({"learner": None}, (5, 3)),
    "two particles": ({"num_particles": 2}, (5, 3)),
    "sweep": (paper_settings("chain", 0.5), (5, 3)),
    "sweep of nets": (paper_settings("chain", critic=MLPCritic((4,)), rate=0.01), (5, 3)),
}
RANDOM_CASES: dict[str, dict[str, Any]] = {
    **{name: options for name, (options, _) in CASES.items()},
    "vectorised": {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 1},
    "replay": {"learner": CriticLearner(replay=Replay(capacity=5))},
    "stored costs": {"learner": CriticLearner(replay=Replay(capacity=5, costs="stored"))},
    "per_cost": {"reduction": "per_cost"},
}


def make(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return TraceBackpropQ_ELBO(**options)(Model(), Guide())


def optimiser(fit: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    parameters = [p for p in fit.parameters() if p.requires_grad]
    if options.get("learner", True) is None:
        # The critics' loss does not grow with the number of rows, the others' does: no matter for a pure Adam.
        return torch.optim.Adam(parameters, lr=0.02, eps=1e-30)
    return torch.optim.SGD(parameters, lr=0.02)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Data and noise of the joint batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, LENGTH, generator=generator)
    return x, torch.rand(8, LENGTH, generator=generator)


def state_of(fit: nn.Module) -> dict[str, Any]:
    return dict(fit.state_dict())


def take_steps(trained: nn.Module, optimiser_: torch.optim.Optimizer, batches: Iterable[Any], divisor: int = 1) -> None:
    for own in batches:
        optimiser_.zero_grad()
        (trained(*own) / divisor).backward()
        optimiser_.step()


def train(name: str, rank: int | None) -> dict[str, Any]:
    """State after some steps on given draws: of one process with all rows (rank ``None``), or of one of several."""
    options, sizes = CASES[name]
    fit = make({"num_particles": 1, **options})
    share = slice(None) if rank is None else slice(*((0, sizes[0]), (sizes[0], 8))[rank])
    fit(*(part[share] for part in batch(100)))  # what is built on first use exists
    trained = fit if rank is None else DistributedDataParallel(fit)
    batches = ([part[share] for part in batch(step)] for step in range(EXACT_STEPS))
    # The average over processes of a sum over their rows.
    take_steps(trained, optimiser(fit, options), batches, PROCESSES if rank is None else 1)
    fit(*(part[share] for part in batch(101)))  # applies what the last step taught
    return state_of(fit)


def train_randomly(name: str, rank: int, broadcast: bool) -> dict[str, Any]:
    """State after steps in which each process draws its own values."""
    options = RANDOM_CASES[name]
    fit = make(options)
    if options.get("learner", True) is None:
        fit(batch(100)[0][rank::PROCESSES])
    trained = DistributedDataParallel(fit, broadcast_buffers=broadcast)
    torch.manual_seed(rank)
    batches = [batch(step)[0][rank::PROCESSES] for step in range(RANDOM_STEPS)]
    if rank:  # one row less in the end, on one of them
        batches[-2] = batches[-2][:3]
    take_steps(trained, optimiser(fit, options), ([own] for own in batches))
    return state_of(fit)


def train_compiled(rank: int) -> dict[str, Any]:
    """Parameters after eager and after recorded steps, and the number of recorded ones."""
    found = {}
    for name, compiled in (("eager", False), ("compiled", "eager")):
        fit = make({"learner": CriticLearner(ranks=None), "compile": compiled})
        trained = DistributedDataParallel(fit, broadcast_buffers=False)
        torch.manual_seed(rank)
        batches = ([batch(step)[0][rank::PROCESSES]] for step in range(RANDOM_STEPS))
        take_steps(trained, torch.optim.SGD(fit.parameters(), lr=0.02), batches)
        found[name] = {key: parameter.detach().clone() for key, parameter in fit.named_parameters()}
    found["steps"] = sum(entry.steps for entry in fit.elbo.compiled.entries)
    return found


def collide(rank: int) -> str:
    """What is said where processes do not take the same steps."""
    apart, fit = make({"learner": CriticLearner(ranks=None)}), make({})
    for _ in range(1 + rank):
        apart(batch(0)[0])
    fit.load_state_dict(apart.state_dict())
    try:
        fit(batch(0)[0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def skip(rank: int) -> dict[str, Any]:
    """One process's loss is not finite in one step."""
    fit = make({})
    torch.manual_seed(rank)
    for step in range(6):
        x = batch(step)[0].clone()
        if rank == 1 and step == 4:
            x[0, 0] = float("inf")
        with pyro.validation_enabled(False):
            fit(x)
    return state_of(fit)


def main() -> None:
    folder, (exact, random), rank = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    gc.set_threshold(50_000, 20, 20)  # as in all tests
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # as in all tests
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    found = {
        "exact": {name: train(name, rank) for name in exact},
        "random": {name: train_randomly(name, rank, False) for name in random},
        "broadcast": train_randomly("default", rank, True),
        "compiled": train_compiled(rank),
        "collide": collide(rank),
        "skip": skip(rank),
    }
    torch.save(found, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
