r"""Simulators in NumPy, 64 episodes in a plate: ours beside fifteen lines of score function, at equal calls.

The fifteen lines weigh ``log q`` of each action by the costs that follow, less their mean over the other episodes. The
programs are those of ``examples/simulators/``. *Variance* is that of one step's gradient at weights that the fifteen
lines lead to. *Exact Q* stands for the critic of the default without its errors: a net that is fitted to many episodes
at these weights, with the same correction of later actions. *Race*: the mean cost of an episode in
the fifth tenth of 200 steps and in the last one, over three seeds, each method at its best learning rate of three.

    python benchmarks/simulators.py [--full] [--only inventory] [--output DIRECTORY]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import Row, arguments, gradients, net, only, others, publish, write_csv
from pyro import poutine
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pyro_bpq import ExpectedCost, LambdaReturn, external

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "simulators"))
import inventory
import queue_speed
import reactions

PROGRAMS = {"inventory": inventory, "queue": queue_speed, "reactions": reactions}
RATES = (0.003, 0.01, 0.03)


def rollout(policy: Any) -> tuple[list[Any], Tensor]:
    """The actions of a run, as Pyro's sites, and the costs from each of them on, ``(actions, episodes)``."""
    actions, costs, trace = [], [], poutine.trace(policy).get_trace()
    trace.compute_log_prob()
    for site in trace.nodes.values():
        if "bpq_cost" in site.get("infer", {}):
            costs[-1] = costs[-1] + site["fn"].value
        elif site["type"] == "sample" and not site["is_observed"] and site["name"][-1].isdigit():
            actions.append(site)
            costs.append(torch.zeros(site["log_prob"].shape))
    return actions, torch.stack(costs).flip(0).cumsum(0).flip(0)


class FifteenLines:
    """The score function with leave-one-out over the episodes."""

    def loss_and_grads(self, _: Any, policy: Any) -> float:
        """A step's loss; adds its gradient."""
        actions, costs = rollout(policy)
        advantage = (costs - costs.mean(1, keepdim=True)) * 64 / 63
        (torch.stack([site["log_prob"] for site in actions]) * advantage).sum().backward()
        return float(costs[0].sum())


METHODS: dict[str, Callable[[], Any]] = {
    "fifteen lines": FifteenLines,
    "default": ExpectedCost,
    "lambda-return": lambda: ExpectedCost(estimator=LambdaReturn(lam=0.8), window=1),
}


def bare(function: Any) -> Any:
    """What a user writes without ``external``."""
    return lambda *args: tree_map(lambda own: torch.as_tensor(own).float(), function(*args))


def made(module: Any, wrap: Any = external, seed: int = 0) -> Any:
    """A policy; ``wrap`` is what its simulator is called by."""
    module.external = wrap
    return module.Policy(seed)


def trained(method: str, policy: Any, rate: float, steps: int) -> list[float]:
    """Trains a policy; the mean cost of an episode in each step."""
    pyro.clear_param_store()
    loss, costs, optimizer = METHODS[method](), list[float](), torch.optim.Adam(policy.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        costs.append(loss.loss_and_grads(None, policy) / 64)
        optimizer.step()
    return costs


def table_of(site: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``(episodes, components, values)`` of an action, and its values as zeros and ones."""
    logits, value = getattr(site["fn"], "base_dist", site["fn"]).logits, site["value"].long()
    logits = torch.stack([torch.zeros_like(logits), logits], -1) if isinstance(site["fn"], dist.Bernoulli) else logits
    logits = logits.reshape(len(value), -1, logits.shape[-1])
    return logits.log_softmax(-1), nn.functional.one_hot(value.reshape(logits.shape[:2]), logits.shape[-1]).float()


def with_exact_q(policy: Any, batches: int, rounds: int) -> Tensor:
    """Gradients of sums over all actions, corrected by the costs of the run, with a fitted net in place of Q."""
    states, runs = list[Tensor](), list[tuple[Tensor, ...]]()
    hook = policy.net.register_forward_hook(lambda _, args, __: states.append(args[0].detach()))
    for _ in range(batches):
        actions, costs = rollout(policy)
        laws, hot = (torch.stack(parts) for parts in zip(*map(table_of, actions), strict=True))
        runs.append((torch.stack(states[-len(actions) :]), hot, laws, costs))
    hook.remove()
    state, hot, probs, costs = (torch.cat(parts, 1).detach() for parts in zip(*runs, strict=True))
    probs, centre, spread = probs.exp(), costs.mean(1, keepdim=True), costs.std(1, keepdim=True) + 1e-6
    critic = net(state.shape[-1], 96, 96, 1 + hot[0, 0].numel(), between=nn.Tanh)
    optimizer = torch.optim.Adam(critic.parameters(), 2e-3)

    def values(state: Tensor, probs: Tensor, hot: Tensor) -> tuple[Tensor, ...]:
        level, own = critic(state).tensor_split([1], -1)
        own = own.reshape(probs.shape) - (probs * own.reshape(probs.shape)).sum(-1, keepdim=True)
        return level.squeeze(-1), own, (own * hot).sum((-1, -2))

    for i in range(rounds):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1.0 - i / rounds)
        at = torch.randint(len(costs), (2048,)), torch.randint(costs.shape[1], (2048,))
        level, _, own = values(state[at], probs[at], hot[at])
        optimizer.zero_grad()
        (level + own - ((costs - centre) / spread)[at]).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        level, own, drawn = values(state, probs, hot)
        rest = costs - centre - spread * (level + drawn.flip(0).cumsum(0).flip(0))
        weights = rest[..., None, None] * hot + spread[..., None, None] * own * probs
    parts = iter(zip(runs, weights.split(64, 1), strict=True))

    def step() -> None:
        (_, _, laws, _), weight = next(parts)
        (laws * weight).sum().backward()

    return gradients(policy.parameters(), step, batches)


def variances(name: str, full: bool) -> list[Row]:
    """The variance of each method's gradient."""
    torch.manual_seed(0)
    policy, plain, number = made(PROGRAMS[name]), made(PROGRAMS[name], bare), 300 if full else 20
    trained("fifteen lines", policy, 0.01, 50)
    plain.load_state_dict(policy.state_dict())
    found = {"exact Q": with_exact_q(policy, number, 4000 if full else 200)}
    for method, make in {**METHODS, "default without external": ExpectedCost}.items():
        pyro.clear_param_store()
        own = plain if "without" in method else policy
        step = partial(make().loss_and_grads, None, own)
        gradients(own.parameters(), step, number if method != "fifteen lines" else 1)
        found[method] = gradients(own.parameters(), step, number)
    rows, first = list[Row](), float(found["fifteen lines"].var(0).sum())
    for method, own in found.items():
        variance = float(own.var(0).sum())
        length = max(float(own.mean(0).square().sum()) - variance / len(own), 0.0) ** 0.5
        row = {"program": name, "method": method, "variance": variance}
        rows.append({**row, "times below the fifteen lines": first / variance, "length of the mean": length})
    return rows


def race(name: str, full: bool) -> list[Row]:
    """Costs of an episode after half of the steps and at the end, at the rate that ends best with the first seed."""
    steps, seeds, rows = *((200, 3) if full else (20, 1)), list[Row]()

    def run(method: str, rate: float, seed: int) -> tuple[float, ...]:
        torch.manual_seed(seed)
        start, tenth = time.process_time(), steps // 10
        costs = trained(method, made(PROGRAMS[name], seed=seed), rate, steps)
        return mean(costs[-tenth:]), mean(costs[4 * tenth : 5 * tenth]), 1e3 * (time.process_time() - start) / steps

    for method in METHODS:
        tried = {rate: run(method, rate, 0) for rate in RATES}
        best = min(tried, key=lambda rate: tried[rate])
        ends, halves, ms = zip(tried[best], *(run(method, best, seed) for seed in range(1, seeds)), strict=True)
        row = {"program": name, "method": method, "rate": best, "ms": mean(ms), "halfway": mean(halves)}
        rows.append({**row, "at the end": mean(ends), "by seed": " ".join(f"{end:.4g}" for end in ends)})
    return rows


def main() -> None:
    options, found = arguments(__doc__, "only"), list[list[Row]]()
    names = only(options, PROGRAMS)
    for stem, measure in {"simulators": variances, "simulators_race": race}.items():
        path = options.output / f"{stem}.csv"
        found.append(others(options, path, names) + [row for name in names for row in measure(name, options.full)])
        write_csv(path, found[-1])
    publish(options.output / "simulators", "Simulators outside of torch", __doc__, found[0], *found)


if __name__ == "__main__":
    main()
