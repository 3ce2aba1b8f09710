r"""Black-box costs: how many calls of the cost a policy needs to reach the best rival's final level.

``transduction``: a recurrent policy rewrites a sequence of ``T`` tokens, the cost is the edit distance to the right
answer. ``attention``: it looks at four patches of a digit, one after the other, then names it, 0/1 loss.
``simulator``: it assigns jobs to machines, a simulator with breakdowns returns makespan and lateness; a call counts
50 ms.

Everyone trains the same Pyro program with the same batches and the same optimiser, whose learning rate is tuned per
method, as are the samples per row of leave-one-out and the entropy of PPO. Baselines and critics see the same inputs.
Ours is not the default: stored costs, critics of the context, a policy that follows the critics on new inputs (biased),
options per task as in the script; it is stopped after a quarter of the rivals' calls.

*calls*: of the cost, each for one row and one sample, until the level (mean cost on held-out rows, three measurements
averaged) is that at which the best rival ended. Every call in training counts, warm-up too; measuring the level does
not, for anyone. *seconds* are those of the training steps; 50 ms per call of the simulator are added.

    python benchmarks/blackbox.py [--full] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from common import Row, arguments, cases, grouped, mean, measured, median, only, progress, publish, sized
from pyro import poutine
from torch import Tensor, nn
from torch.nn.functional import one_hot

from pyro_bpq import CostCounter, CriticLearner, ExpectedCost, MLPCritic, Replay, cost
from pyro_bpq.record.statements import SkipCosts

BATCH, HIDDEN, CALL_SECONDS = 32, 48, 0.05


# Costs: numpy in, numpy out.


def edit_distance(tokens: Tensor, wanted: Tensor) -> np.ndarray:
    """Levenshtein distance; token 0 writes nothing."""
    found = tokens.movedim(0, -1).numpy()
    target = np.broadcast_to(wanted.numpy(), found.shape)
    flat = found.reshape(-1, found.shape[-1])
    goal = target.reshape(-1, found.shape[-1])
    # Skipped tokens of either side cost nothing.
    keep, need = (flat > 0).astype(np.int64), (goal > 0).astype(np.int64)
    row = np.concatenate((np.zeros((len(flat), 1), np.int64), need.cumsum(1)), 1)
    for i in range(flat.shape[1]):
        new = np.empty_like(row)
        new[:, 0] = row[:, 0] + keep[:, i]
        for j in range(goal.shape[1]):
            change = row[:, j] + np.where((keep[:, i] & need[:, j]) == 1, flat[:, i] != goal[:, j], 2)
            change = np.where((keep[:, i] | need[:, j]) == 0, row[:, j], change)
            new[:, j + 1] = np.minimum(change, np.minimum(row[:, j + 1] + keep[:, i], new[:, j] + need[:, j]))
        row = new
    return row[:, -1].reshape(found.shape[:-1]).astype(np.float32)


def zero_one(guess: Tensor, label: Tensor) -> np.ndarray:
    """1 for a wrong answer."""
    return (guess.numpy() != label.numpy()).astype(np.float32)


class Simulator:
    """Jobs on machines of different speed that break down now and then.

    Args:
        seed: Seed of the breakdowns.
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.speeds = np.array([1.0, 0.8, 0.6, 0.5])

    def __call__(self, machines: Tensor, durations: Tensor) -> np.ndarray:
        """Makespan plus mean completion time, ``(samples, rows)``."""
        chosen = machines.movedim(0, -1).numpy()
        length = np.broadcast_to(durations.numpy(), chosen.shape)
        free = np.zeros((*chosen.shape[:-1], len(self.speeds)))
        finished = np.zeros(chosen.shape)
        for job in range(chosen.shape[-1]):
            hot = np.eye(len(self.speeds))[chosen[..., job]]
            repair = self.random.exponential(1.0, chosen.shape[:-1]) * (self.random.random(chosen.shape[:-1]) < 0.1)
            free = free + hot * (length[..., job] / (hot @ self.speeds) + repair)[..., None]
            finished[..., job] = (free * hot).sum(-1)
        return (free.max(-1) + finished.mean(-1)).astype(np.float32)


# Policies: Pyro programs of the rows of a batch.


class Policy(nn.Module):
    """A recurrent policy whose every site offers context to critics and baselines.

    Attributes:
        entropy: Weight of the entropy in our objective, in units of the cost.
        decay: Factor of that weight from rollout to rollout.
        warm_up: Number of rollouts from which only our critics learn.
        critic_lr: Learning rate of our critics.
        advantage: Hidden layers of our critics' advantages.
        replayed: Number of rollouts in an update of our critics.
        capacity: Number of rollouts that our replay keeps.
        rounds: Number of our updates of critics and policy after each rollout.
    """

    entropy: float = 0.0
    decay: float = 0.97
    warm_up: int = 10
    critic_lr: float = 3e-3
    advantage: tuple[int, ...] = (64,)
    replayed: int = 4
    capacity: int = 10_000
    rounds: int = 4

    def act(self, name: str, logits: Tensor, context: Tensor) -> Tensor:
        """Samples a site."""
        options = {"context": context, "share": name.split("_")[0]}
        return pyro.sample(name, dist.Categorical(logits=logits), infer={"bpq": options})

    def batch(self, generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
        """Inputs of ``size`` rows."""
        raise NotImplementedError


class Transduction(Policy):
    """Reverses pairs, shifts every symbol by one and drops the highest."""

    # What a token is worth is linear in the indicators of the symbols that are wanted nearby.
    advantage, capacity = (), 24
    # Answers shifted by one token cost little more than right ones: a policy that commits early stays there. The
    # entropy stays, as the critics' differences shrink with the costs that they see.
    rounds, replayed, critic_lr, entropy, decay = 8, 2, 1e-2, 0.1, 1.0

    def __init__(self, steps: int, symbols: int = 6) -> None:
        super().__init__()
        self.steps, self.symbols = steps, symbols
        self.cell = nn.GRUCell(3 * (symbols + 1) + symbols + 1, HIDDEN)
        self.head = nn.Linear(HIDDEN, symbols + 1)

    def batch(self, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(1, self.symbols + 1, (size, self.steps), generator=generator)
        swapped = x.reshape(size, -1, 2).flip(-1).reshape(size, -1)
        return x, (swapped + 1) % (self.symbols + 1)

    def forward(self, x: Tensor, wanted: Tensor) -> None:
        hot = one_hot(torch.cat((0 * x[:, :1], x, 0 * x[:, :1]), 1), self.symbols + 1).float()
        goal = one_hot(torch.cat((0 * x[:, :1], wanted, 0 * x[:, :1]), 1), self.symbols + 1).float()
        state, last = torch.zeros(len(x), HIDDEN), torch.zeros(len(x), self.symbols + 1)
        drawn = []
        with pyro.plate("rows", len(x), dim=-1):
            for t in range(self.steps):
                inputs = hot[:, t : t + 3].flatten(1)
                state = step(self.cell, torch.cat((inputs.expand(*last.shape[:-1], -1), last), -1), state)
                position = torch.full((*state.shape[:-1], 1), 2.0 * t / self.steps - 1.0)
                near = goal[:, t : t + 3].flatten(1).expand(*state.shape[:-1], -1)
                token = self.act(f"token_{t}", self.head(state), torch.cat((near, position), -1))
                last = one_hot(token, self.symbols + 1).float()
                drawn.append(token)
            cost("edit", edit_distance, torch.stack(drawn), wanted)


class Attention(Policy):
    """Four glimpses of 2 x 2 pixels, then a class."""

    rounds, replayed, entropy, decay = 8, 2, 0.05, 0.985

    def __init__(self, glimpses: int = 4) -> None:
        super().__init__()
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.images, self.labels = torch.tensor(digits.images).float() / 8.0 - 1.0, torch.tensor(digits.target)
        self.patches = self.images.reshape(-1, 4, 2, 4, 2).movedim(2, 3).reshape(-1, 16, 4)
        self.glimpses = glimpses
        self.cell = nn.GRUCell(20, HIDDEN)
        self.look, self.name = nn.Linear(HIDDEN, 16), nn.Linear(HIDDEN, 10)

    def batch(self, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        held = size > BATCH
        rows = torch.randint(1400, len(self.labels), (size,), generator=generator)
        rows = rows if held else torch.randint(0, 1400, (size,), generator=generator)
        return self.patches[rows], self.labels[rows]

    def forward(self, patches: Tensor, label: Tensor) -> None:
        hot = one_hot(label, 10).float()
        state = torch.zeros(len(label), HIDDEN)
        seen = torch.zeros(len(label), 20)
        with pyro.plate("rows", len(label), dim=-1):
            for t in range(self.glimpses + 1):
                state = step(self.cell, seen, state)
                context = torch.cat((hot.expand(*state.shape[:-1], -1), state.detach()), -1)
                if t == self.glimpses:
                    break
                where = self.act(f"look_{t}", self.look(state), context)
                index = where[..., None, None].expand(*where.shape, 1, 4)
                pixels = patches.expand(*where.shape, 16, 4).gather(-2, index).squeeze(-2)
                seen = torch.cat((pixels, one_hot(where, 16).float()), -1)
            cost("wrong", zero_one, self.act("class", self.name(state), context), label)


class Scheduling(Policy):
    """Assigns jobs to four machines, knowing their loads."""

    rounds, replayed, warm_up, entropy, decay = 16, 4, 6, 0.2, 0.95

    def __init__(self, jobs: int, seed: int) -> None:
        super().__init__()
        self.jobs, self.simulator = jobs, Simulator(seed)
        self.cell = nn.GRUCell(7, HIDDEN)
        self.head = nn.Linear(HIDDEN, 4)

    def batch(self, generator: torch.Generator, size: int) -> tuple[Tensor]:
        return (torch.rand(size, self.jobs, generator=generator) * 2.0 + 0.2,)

    def forward(self, durations: Tensor) -> None:
        state, loads = torch.zeros(len(durations), HIDDEN), torch.zeros(len(durations), 4)
        drawn = []
        with pyro.plate("rows", len(durations), dim=-1):
            for t in range(self.jobs):
                now = durations[:, t : t + 1].expand(*loads.shape[:-1], 1)
                rest = durations[:, t:].sum(-1, keepdim=True).expand_as(now)
                done = torch.full_like(now, 2.0 * t / self.jobs - 1.0)
                inputs = torch.cat((loads / 4.0, now, rest / 8.0, done), -1)
                state = step(self.cell, inputs, state)
                machine = self.act(f"machine_{t}", self.head(state), inputs)
                loads = loads + one_hot(machine, 4).float() * now
                drawn.append(machine)
            cost("schedule", self.simulator, torch.stack(drawn), durations)


def step(cell: nn.GRUCell, inputs: Tensor, state: Tensor) -> Tensor:
    """A recurrent cell over any batch shape."""
    lead = torch.broadcast_shapes(inputs.shape[:-1], state.shape[:-1])
    inputs, state = (part.expand(*lead, -1).reshape(-1, part.shape[-1]) for part in (inputs, state))
    return cell(inputs, state).reshape(*lead, -1)


# Methods: each takes a policy and a batch, and leaves gradients; its number of samples per row is fixed.


@dataclass(frozen=True)
class Sampled:
    """The tensors of one rollout: ``(sites, samples, rows)``, contexts ``(..., width)``, cost ``(samples, rows)``."""

    trace: Any
    score: Tensor
    entropy: Tensor
    contexts: Tensor
    cost: Tensor


def sample(policy: Policy, batch: tuple[Tensor, ...], samples: int, replay: Any = None) -> Sampled:
    """Runs the policy, or evaluates it at the actions of an earlier run without calling the cost."""
    program: Any = pyro.plate("samples", samples, dim=-2)(policy)
    if replay is not None:
        program = SkipCosts()(poutine.replay(program, trace=replay))
    trace = poutine.trace(program).get_trace(*batch)
    sites = [s for s in trace.nodes.values() if s["type"] == "sample" and "bpq" in s["infer"]]
    shape = (samples, len(batch[0]))
    score = torch.stack([s["fn"].log_prob(s["value"].detach()).expand(shape) for s in sites])
    entropy = torch.stack([s["fn"].entropy().expand(shape) for s in sites])
    contexts = torch.stack([s["infer"]["bpq"]["context"].detach().expand(*shape, -1) for s in sites])
    (paid,) = (s["fn"].value for s in trace.nodes.values() if s["type"] == "sample" and "bpq_cost" in s["infer"])
    return Sampled(trace, score, entropy, contexts, paid.detach().expand(shape))


class Method:
    """Trains a policy.

    Args:
        policy: The policy.
        lr: Learning rate of its optimiser.
        samples: Number of samples per row.
    """

    def __init__(self, policy: Policy, lr: float, samples: int) -> None:
        self.policy, self.samples = policy, samples
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=lr)

    def step(self, batch: tuple[Tensor, ...]) -> None:
        """One rollout and what is learned from it."""
        raise NotImplementedError


class Ours(Method):
    """``ExpectedCost`` with stored costs: critics learn from all rollouts, the policy from the critics.

    After each rollout of ``BATCH`` rows: ``rounds`` times an update of the critics by replay, which calls no cost, and
    a step of the policy along the critics on new inputs, which calls none either.
    """

    inputs = 4

    def __init__(self, policy: Policy, lr: float) -> None:
        super().__init__(policy, lr, 1)
        replay = Replay(capacity=policy.capacity, batch_size=policy.replayed, updates_per_step=0, costs="stored")
        learner = CriticLearner(lr=policy.critic_lr, optimizer=torch.optim.Adam, replay=replay)
        self.loss = ExpectedCost(critic=MLPCritic((64,), context=policy.advantage), learner=learner)
        self.generator = torch.Generator().manual_seed(1)

    def step(self, batch: tuple[Tensor, ...]) -> None:
        self.loss.loss_and_grads(None, self.policy, *batch)
        entropy = self.policy.entropy * self.policy.decay**self.loss.num_steps
        for _ in range(self.policy.rounds):
            self.loss.replay()
            self.optimizer.zero_grad()
            if self.loss.num_steps > self.policy.warm_up:
                inputs = self.draw()
                loss = self.loss.bootstrapped_loss(None, self.policy, *inputs, entropy=entropy)
                (loss / len(inputs[0])).backward()
                self.optimizer.step()

    def draw(self) -> list[Tensor]:
        """New inputs."""
        parts = [self.policy.batch(self.generator, BATCH) for _ in range(self.inputs)]
        return [torch.cat(part) for part in zip(*parts, strict=True)]


class LeaveOneOut(Method):
    """Score function with the mean of the other samples of a row as baseline."""

    def step(self, batch: tuple[Tensor, ...]) -> None:
        run = sample(self.policy, batch, self.samples)
        centred = (run.cost - run.cost.mean(0)) * (self.samples / (self.samples - 1.0))
        self.optimizer.zero_grad()
        (centred * run.score).sum(0).mean().backward()
        self.optimizer.step()


class PPO(Method):
    """Clipped ratios per site, normalised advantages over a value net, several epochs per rollout."""

    clip = 0.2

    def __init__(self, policy: Policy, lr: float, epochs: int, entropy: float) -> None:
        super().__init__(policy, lr, 1)
        self.epochs, self.entropy, self.fit = epochs, entropy, None
        hidden = (nn.LazyLinear(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.net = nn.Sequential(*hidden, nn.Linear(HIDDEN, 1))

    def values(self, run: Sampled) -> Tensor:
        """Values of the contexts, ``(sites, samples, rows)``."""
        return self.net(run.contexts).squeeze(-1)

    def step(self, batch: tuple[Tensor, ...]) -> None:
        old = sample(self.policy, batch, self.samples)
        with torch.no_grad():
            # At lambda = 1, the usual choice where the reward comes at the end.
            advantage = old.cost - self.values(old)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
            before = old.score.detach()
        self.fit = self.fit or torch.optim.Adam(self.net.parameters(), lr=3e-3)
        for _ in range(self.epochs):
            now = sample(self.policy, batch, self.samples, old.trace)
            ratio = (now.score - before).exp()
            clipped = ratio.clamp(1.0 - self.clip, 1.0 + self.clip)
            loss = torch.maximum(ratio * advantage, clipped * advantage).sum(0).mean()
            loss = loss - self.entropy * now.entropy.sum(0).mean()
            for optimizer, goal in ((self.optimizer, loss), (self.fit, (self.values(old) - old.cost).square().mean())):
                optimizer.zero_grad()
                goal.backward()
                optimizer.step()


# Measuring.


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        seeds: Number of seeds.
        budgets: Calls of the cost by task.
        rates: Learning rates that are tried.
        samples: Numbers of samples that leave-one-out tries.
        entropies: Weights of the entropy that PPO tries.
    """

    seeds: int
    budgets: dict[str, int]
    rates: tuple[float, ...]
    samples: tuple[int, ...]
    entropies: tuple[float, ...]


TASKS: dict[str, Callable[[int], Policy]] = {
    "transduction T=10": lambda seed: Transduction(10),
    "attention": lambda seed: Attention(),
    "simulator": lambda seed: Scheduling(10, seed),
}
CALLS = {"transduction T=10": 16_000, "attention": 24_000, "simulator": 6_400}
FULL = Size(3, CALLS, (1e-2, 3e-3), (2, 4), (0.0, 0.01, 0.03, 0.1))
QUICK = Size(1, {name: calls // 8 for name, calls in CALLS.items()}, (1e-2,), (2,), (0.03,))
EPOCHS = 4

# Ours is stopped after this share of the rivals' calls.
SHARE = 0.25


def methods(size: Size) -> dict[str, dict[str, Callable[[Policy], Method]]]:
    """Configurations to tune over, by method and in words."""
    ours = {f"lr={lr}": partial(Ours, lr=lr) for lr in size.rates}
    loo = {f"lr={lr}, M={m}": partial(LeaveOneOut, lr=lr, samples=m) for lr, m in product(size.rates, size.samples)}
    ppo = {
        f"lr={lr}, {EPOCHS} epochs, entropy {entropy}": partial(PPO, lr=lr, epochs=EPOCHS, entropy=entropy)
        for lr, entropy in product(size.rates, size.entropies)
    }
    return {"ours": ours, "leave-one-out": loo, "PPO": ppo}


@torch.no_grad()
def level(policy: Policy, seed: int) -> float:
    """Mean cost of one sample for each of 512 held-out rows; calls do not count."""
    # The counter outside does not see these calls.
    with poutine.block():
        run = sample(policy, policy.batch(torch.Generator().manual_seed(10_000 + seed), 512), 1)
    return float(run.cost.mean())


def train(size: Size, task: str, seed: int, method: str, options: str) -> list[Row]:
    """Trains until the budget of calls is spent; the level at forty points."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    policy = TASKS[task](seed)
    learner = methods(size)[method][options](policy)
    generator, seconds = torch.Generator().manual_seed(seed), 0.0
    budget = int(size.budgets[task] * (SHARE if method == "ours" else 1.0))
    steps = budget // (BATCH * learner.samples)
    rows: list[Row] = [{"calls": 0, "seconds": 0.0, "level": level(policy, seed)}]
    with CostCounter() as counter:
        for at in progress(range(1, steps + 1), f"{task}: {method} {options} seed={seed}"):
            batch = policy.batch(generator, BATCH)
            start = time.perf_counter()
            learner.step(batch)
            seconds += time.perf_counter() - start
            if at % max(steps // 40, 1) == 0 or at == steps:
                rows.append({"calls": counter.total, "seconds": seconds, "level": level(policy, seed)})
    return rows


def smooth(rows: list[Row]) -> list[float]:
    """Mean level of each point and the two before it."""
    levels = [row["level"] for row in rows]
    return [mean(levels[max(i - 2, 0) : i + 1]) for i in range(len(levels))]


def reach(rows: list[Row], goal: float, name: str) -> float:
    """Calls or seconds until the smoothed level is at the goal; infinite if it never is."""
    return next((row[name] for row, now in zip(rows, smooth(rows), strict=True) if now <= goal), float("inf"))


def main() -> None:
    """Measures, prints, writes ``blackbox.csv`` and ``blackbox.md``."""
    options = arguments(__doc__, "seeds resume only")
    size, path = sized(options, QUICK, FULL), options.output / "blackbox"
    pyro.enable_validation(False)
    tried = [{"method": method, "options": text} for method, found in methods(size).items() for text in found]
    runs = [case | own for case in cases(task=only(options, TASKS), seed=range(size.seeds)) for own in tried]
    curves = measured(path.with_suffix(".csv"), runs, partial(train, size), options.resume)
    results = []
    for (task, seed), rows in grouped(curves, "task", "seed").items():
        results += compare(task, seed, chosen(rows), CALL_SECONDS if task == "simulator" else 0.0)
    publish(path, "Black-box costs", __doc__, curves, gains(results), results)


def chosen(curves: list[Row]) -> dict[str, tuple[str, list[Row]]]:
    """The settings with the lowest final level, and their points, by method."""
    found = {}
    for (method,), rows in grouped(curves, "method").items():
        runs = grouped(rows, "options")
        (text,) = min(runs, key=lambda key: smooth(runs[key])[-1])
        found[method] = text, runs[text,]
    return found


def compare(task: str, seed: int, best: dict[str, tuple[str, list[Row]]], seconds_per_call: float) -> list[Row]:
    """Calls and seconds to the final level of the best rival, by method."""
    goal = min(smooth(rows)[-1] for method, (_, rows) in best.items() if method != "ours")
    found = []
    for method, (text, rows) in best.items():
        timed = [{**row, "seconds": row["seconds"] + seconds_per_call * row["calls"]} for row in rows]
        row = {"task": task, "seed": seed, "method": method, "best of": text, "final level": smooth(rows)[-1]}
        row |= {"goal": goal, "calls to goal": reach(rows, goal, "calls")}
        found.append(row | {"seconds to goal": reach(timed, goal, "seconds")})
    return found


def gains(results: list[Row]) -> list[Row]:
    """Gains per task, median over seeds."""
    found = []
    for (task,), own in grouped(results, "task").items():
        # Ours comes first.
        seeds = list(grouped(own, "seed").values())
        entry: Row = {"task": task, "seeds": len(seeds)}
        for name in ("calls to goal", "seconds to goal"):
            ratios = [min(row[name] for row in rivals) / ours[name] for ours, *rivals in seeds]
            entry[f"{name.split()[0]}: best rival over ours"] = median(ratios)
        found.append(entry)
    return found


if __name__ == "__main__":
    main()
