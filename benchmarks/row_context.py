r"""What critics win that see the row: their context is what entered the last layer before the site's parameters.

Weights are those that leave-one-out of 8 reaches after 1,000 steps, as in ``gradients.py``; methods learn at these
weights, and then draw gradients in turns. The context is shown by hand, ``infer={"bpq": {"context": ...}}``: on the
chorales the recurrent net's state and the last state, on belief networks the pixels or the layer below. *Exact Q*: the
all-action gradient with the exact Q-function in place of critics, the ceiling of what they can win.

    python benchmarks/row_context.py [--full | --smoke] [--seeds N] [--only TASK [--resume]] [--output DIRECTORY]
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import chorales
import pyro
import pyro.distributions as dist
import torch
import vae
from common import Row, arguments, read_csv, table, write_csv, write_markdown
from gradients import FULL, QUICK, SMOKE, Size, averages, measure
from pyro import poutine
from pyro.infer import ELBO
from race import Method, Task, ours, plain_leave_one_out
from torch import Tensor, nn
from torch.nn.functional import one_hot

from pyro_bpq import AllAction, ContextCritic, MLPCritic, QuadraticCritic, TraceBackpropQ_ELBO
from pyro_bpq.critics.nets import Critic
from pyro_bpq.estimators import Hindsight


class Music(chorales.MarkovModel):
    """The model of the chorales.

    Programs with ``"inputs"`` in their name show what enters the last layer; with ``"shared"`` in it, one critic serves
    all times.
    """

    def guide(self, rolls: Tensor, lengths: Tensor) -> None:
        """States given the future."""
        if not self.program:
            return super().guide(rolls, lengths)
        pyro.module("nets", self)
        read = self.reader(rolls.flip(1))[0].flip(1)
        z, options = torch.zeros(self.states), {"share": "z"} if "shared" in self.program else {}
        with pyro.plate("rows", len(rolls), dim=-1):
            for t in range(rolls.shape[1]):
                with poutine.mask(mask=t < lengths):
                    seen = read[:, t]
                    if "inputs" in self.program:
                        lead = torch.broadcast_shapes(seen.shape[:-1], z.shape[:-1])
                        options["context"] = torch.cat([part.detach().expand(*lead, -1) for part in (seen, z)], -1)
                    states = dist.Categorical(logits=self.state(seen) + self.last(z))
                    value = pyro.sample(f"z_{t}", states, infer={"bpq": {**options}})
                    z = one_hot(value, self.states).float()


class ShownMusic(chorales.Chorales):
    """The same task."""

    def programs(self, program: str) -> Music:
        """Nets with the weights that the global seed gives."""
        rolls, lengths = self.splits["train"]
        return Music(self.states, program, rolls.sum((0, 1)) / lengths.sum())


CRITICS: dict[str, Critic] = {"perceptron": MLPCritic(), "quadratic": QuadraticCritic(8)}


class Layers(vae.BeliefNet):
    """Belief network; a program names a critic, and ends with ``"+"`` if critics see what enters the last layer."""

    def options(self, layer: int, x: Tensor) -> dict[str, object]:
        """Options of a site."""
        name = self.program.rstrip("+")
        return {"bpq": {"critic": CRITICS[name]}} if name in CRITICS else super().options(layer, x)

    def guide(self, x: Tensor) -> None:
        """Latents from the images up."""
        pyro.module("nets", self)
        with pyro.plate("rows", len(x), dim=-1):
            value = x - self.mean
            for i, net in enumerate(self.up):
                units, infer = dist.Bernoulli(logits=net(value)).to_event(1), self.options(i, x)
                if self.program.endswith("+"):
                    infer["bpq"]["context"] = value.detach()
                value = 2.0 * pyro.sample(f"z_{i}", units, infer=infer) - 1.0


class ShownDigits(vae.Digits):
    """The same task."""

    def programs(self, program: str) -> Layers:
        """Nets with the weights that the global seed gives."""
        return Layers(self.kind, self.depth, self.train.mean(0), program)


class ExactQ(ELBO):
    """The all-action gradient of the chorales with the exact Q-function.

    Args:
        particles: Number of samples of the states.
    """

    def _get_trace(self, model, guide, args, kwargs):
        raise NotImplementedError

    def loss_and_grads(self, model, guide, rolls: Tensor, lengths: Tensor) -> float:
        """Adds the gradients of the guide; returns the mean expected cost at the first state."""
        nets, eye = guide.__self__, torch.eye(guide.__self__.states)
        read = nets.reader(rolls.flip(1))[0].flip(1)
        start = torch.zeros(1, nets.states)
        # (rows, frames, last state, state); the first of the last states is the start.
        befores = torch.cat([start, eye])
        log_q = (nets.state(read).unsqueeze(-2) + nets.last(befores)).log_softmax(-1)
        with torch.no_grad():
            keys = nets.emission(eye)
            seen = rolls @ keys.T - nn.functional.softplus(keys).sum(-1)
            cost = log_q - nets.transition(befores).log_softmax(-1) - seen.unsqueeze(-2)
            q, value = torch.zeros_like(cost), torch.zeros(len(rolls), nets.states)
            for t in reversed(range(rolls.shape[1])):
                is_there = (t < lengths)[:, None, None]
                q[:, t] = torch.where(is_there, cost[:, t] + value.unsqueeze(1), 0.0)
                value = (log_q[:, t].exp() * q[:, t]).sum(-1)[:, 1:]
        total, at = torch.zeros(()), torch.zeros(self.num_particles, len(rolls), dtype=torch.long)
        rows = torch.arange(len(rolls))
        for t in range(rolls.shape[1]):
            here = log_q[rows, t, at]
            total = total + (here.exp() * q[rows, t, at]).sum()
            at = 1 + dist.Categorical(logits=here.detach()).sample()
        (total / self.num_particles).backward()
        return float(total.detach()) / self.num_particles


def with_critic(name: str, particles: int, program: str, critic: Critic | None, **options: object) -> Method:
    """All values of each site, with a critic."""
    many = {"vectorize_particles": True, "max_plate_nesting": 1} if particles > 1 else {}
    build = partial(TraceBackpropQ_ELBO, particles, estimator=AllAction(**options), critic=critic, **many)
    return Method(f"{name}, {particles}", build, program, "ours")


def of_music() -> list[Method]:
    """Methods on the chorales."""
    found = [
        plain_leave_one_out(8),
        Method("hindsight, 8", lambda: ours(Hindsight(), 8), group="ours"),
        Method("default: sum over all values", TraceBackpropQ_ELBO, group="ours"),
        Method("exact Q, 8", lambda: ExactQ(num_particles=8), group="ours"),
    ]
    for particles in (1, 8):
        found += [
            with_critic("all values", particles, "", None),
            with_critic("and a critic", particles, "", MLPCritic()),
            with_critic("and a critic that sees the inputs", particles, "inputs", MLPCritic()),
            with_critic("and a critic for all times", particles, "shared", MLPCritic()),
            with_critic("and a critic for all times that sees the inputs", particles, "shared inputs", MLPCritic()),
            with_critic("the same, differences from the inputs alone", particles, "shared inputs", ContextCritic()),
        ]
    return found


def of_layers() -> list[Method]:
    """Methods on belief networks."""
    found = [
        *(plain_leave_one_out(4), plain_leave_one_out(8)),
        Method("default: hindsight", TraceBackpropQ_ELBO, group="ours"),
        with_critic("all values", 4, "", None, exact=False),
    ]
    for name, critic in CRITICS.items():
        for program in (name, name + "+"):
            text = f"and a {name} critic" + (" that sees the inputs" if program.endswith("+") else "")
            found.append(with_critic(text, 4, program, critic, exact=False))
    return found


def tasks(size: Size) -> Iterator[tuple[Task, list[Method]]]:
    """The tasks whose data is there, and their methods."""
    music = chorales.load_chorales(size.frames, 16)
    if music is not None:
        yield ShownMusic(music.name, music.states, music.splits), of_music()
    digits = vae.load_digits({"curve": 1, "valid": 1, "test": 1})
    if digits is not None:
        yield ShownDigits("2 layers", "linear", 2, digits.train, digits.splits), of_layers()


def main() -> None:
    """Measures, prints, writes ``row_context.csv`` and ``row_context.md``."""
    options = arguments(__doc__, resumes=True)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    quick = replace(QUICK, checkpoints=(1000,), learning=300, draws=60)
    full = replace(FULL, checkpoints=(1000,), learning=1000, draws=200, frames=16)
    size = full if options.full else SMOKE if options.smoke else quick
    seeds = options.seeds or size.seeds
    rows: list[Row] = read_csv(options.output / "row_context.csv") if options.resume else []
    rows = [row for row in rows if not row["task"].startswith(options.only)]
    for task, methods in tasks(size):
        if task.name.startswith(options.only):
            rows += [row for seed in range(seeds) for row in measure(task, methods, size, seed)]
    if not rows:
        print("row_context.py: skipped, PYRO_BPQ_DATA names no folder with mnist.npz or jsb.npz")
        return
    parts = [
        f"Gradients of the guide's parameters at weights that leave-one-out of 8 reaches after {size.checkpoints[0]} "
        f"steps; {size.draws} draws of each method after {size.learning} steps in which it learned at these weights; "
        f"medians over {seeds} seed(s). The number behind a method is that of its particles. *Inputs*: what enters the "
        "last layer before the site's parameters, shown to the critic beside these. *z*: squared distance from the "
        "mean of the other methods in units of its expectation, 1 if unbiased. *ms*: CPU time of loss and gradients, "
        "critics at rest."
    ]
    for name in dict.fromkeys(row["task"] for row in rows):
        parts += [f"## {name}", table(averages(rows, name, size.checkpoints[0]))]
    print("\n\n".join(parts))
    write_csv(options.output / "row_context.csv", rows)
    write_markdown(options.output / "row_context.md", "Critics that see the row", parts)


if __name__ == "__main__":
    main()
