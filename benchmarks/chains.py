r"""Chains of discrete sites: gradient error at equal wall-clock time, against the exact gradient.

``markov``: 8 states, ``x_t ~ Categorical(net(x_{t-1}, t))``, cost ``f(x_T)`` at the end. ``count``: binary,
``x_t ~ Bernoulli(net(x_1 + ... + x_{t-1}, t))``, cost ``T (mean x - 0.499)^2``. Both are plain Pyro programs; the
gradient is that of minus the ELBO with uniform priors, so that every site also costs ``log q``.

The guide, a net with 32 hidden units for all steps, and the critics train together with ``TraceBackpropQ_ELBO()`` of
1000 particles in a plate. At ten checkpoints both are frozen, and the error of one step's gradient is measured. A
rival gets the time of our step, critics and their update included: as many particles as fit, and where that leaves a
difference its error is scaled by the ratio of the times. Time is that of the processor: all run in one thread, so that
on a machine of one's own the wall clock shows the same.

*Gain*: mean squared error of the rival's gradient over ours, each averaged over the checkpoints, the slow rivals: over
those where they were measured. Median over seeds, quartiles in brackets. *z of bias* is 1 for an unbiased estimator;
where nothing varies (T = 1, 2) it shows rounding in float32. Exact gradient by dynamic programming in float64.

``--compiled``: compiled against compiled, on chains of 50 sites. ``CompiledSVI`` trains guide and critics for 1,000
steps with some number of particles. *ms*: CPU time of whole compiled steps. The rival is leave-one-out without critics,
compiled in the same way, with the number of particles that has the least error times time. *gain*: its error times
time over ours. *ceiling*: the same with the exact Q in place of our critics, in our time.

    python benchmarks/chains.py [--full | --compiled] [--seeds N] [--resume] [--only CHAIN] [--output DIRECTORY]
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import (
    Error,
    PlainLeaveOneOut,
    Row,
    arguments,
    baseline_options,
    cases,
    flat,
    grouped,
    interleaved,
    mean,
    measured,
    median,
    net,
    only,
    progress,
    publish,
    quartiles,
    sized,
)
from pyro.infer import ELBO, TraceGraph_ELBO
from pyro.optim import Adam
from torch import Tensor, nn
from torch.nn.functional import softplus

from pyro_bpq import CompiledSVI, LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO, compile_report

PARTICLES, LEARNING_RATE, HIDDEN, STEPS = 1000, 3e-2, 32, 1000
VECTORIZED = {"vectorize_particles": True, "max_plate_nesting": 0}
Step = Callable[[], object]


class Chain(nn.Module):
    """A guide with one small net for all steps, its model, and its exact loss by dynamic programming.

    Args:
        steps: Number of sites ``T``.
        inputs: Inputs of the net.
        outputs: Outputs of the net.
        seed: Seed of the initial weights and of the cost.
    """

    def __init__(self, steps: int, inputs: int, outputs: int, seed: int) -> None:
        super().__init__()
        self.steps = steps
        generator = torch.Generator().manual_seed(seed)
        self.net = net(inputs, HIDDEN, outputs, between=nn.Tanh)
        self.baseline = nn.Sequential(*net(inputs, HIDDEN, 1, between=nn.Tanh), nn.Flatten(-2))
        with torch.no_grad():
            for parameter in self.net.parameters():
                bound = parameter.shape[-1] ** -0.5
                parameter.uniform_(-bound, bound, generator=generator)
        self.generator = generator
        self.pyro_baseline = ""

    def options(self, inputs: Tensor) -> dict[str, object]:
        """Options for ``TraceGraph_ELBO``'s baselines."""
        if self.pyro_baseline == "net":
            # The first site reads nothing that particles differ in.
            inputs = inputs.expand(PARTICLES, inputs.shape[-1])
        return baseline_options(self.pyro_baseline, self.baseline, inputs)

    def model(self) -> None:
        """Uniform sites, and the cost of the last state."""
        state, logits = torch.tensor(0), torch.zeros(self.net[-1].out_features)
        for t in range(self.steps):
            state = self.after(state, pyro.sample(f"x_{t}", self.site(logits)))
        pyro.factor("cost", -self.end_cost(state))

    def guide(self) -> None:
        """A chain of sites that see the state."""
        pyro.module("net", self.net)
        state = torch.tensor(0)
        for t in range(self.steps):
            inputs = self.inputs(state, t)
            value = pyro.sample(f"x_{t}", self.site(self.net(inputs)), infer=self.options(inputs))
            state = self.after(state, value)

    def gradient(self) -> Tensor:
        """The exact gradient, in float64."""
        net = self.double_net()
        return flat(torch.autograd.grad(self.exact_loss(net), list(net.parameters())))

    def error(self, exact: Tensor, call: Step, repeats: int) -> Error:
        """The error of the gradient that a call leaves in the net."""
        return Error.of(exact, self.net.parameters(), call, repeats)

    def double_net(self) -> nn.Module:
        """A copy of the net in float64."""
        return copy.deepcopy(self.net).double()

    def site(self, logits: Tensor) -> Any:
        """The distribution of a site."""
        raise NotImplementedError

    def inputs(self, state: Tensor, t: int) -> Tensor:
        """What the net sees: of the state, and the time in [-1, 1]."""
        raise NotImplementedError

    def law(self, net: Any, state: Tensor, t: int) -> Tensor:
        """``log q`` of every value of a site, ``(..., values)``; the first site's state is 0."""
        raise NotImplementedError

    def after(self, state: Tensor, value: Tensor) -> Tensor:
        """The state that follows."""
        raise NotImplementedError

    def end_cost(self, state: Tensor) -> Tensor:
        """The cost of the last state."""
        raise NotImplementedError

    def tables(self, net: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """``log q`` of every value in every state, and the states that follow, by step; both ``(states, values)``."""
        states, found = torch.zeros(1, dtype=torch.long), []
        for t in range(self.steps):
            log_q = self.law(net, states, t)
            found.append((log_q, self.after(states.unsqueeze(-1), torch.arange(log_q.shape[-1])).expand_as(log_q)))
            states = torch.arange(int(found[-1][1].max()) + 1)
        return found

    def exact_loss(self, net: nn.Module) -> Tensor:
        """Minus the ELBO as a differentiable function of the net, in float64: forward over the law of the state."""
        now, loss = torch.ones(1, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for log_q, after in self.tables(net):
            joint = now.unsqueeze(-1) * log_q.exp()
            loss = loss + (joint * log_q).sum()
            now = joint.new_zeros(int(after.max()) + 1).index_add(0, after.flatten(), joint.flatten())
        prior = self.steps * math.log(log_q.shape[-1])
        return loss + now @ self.end_cost(torch.arange(len(now)).double()).double() + prior

    def exact_q(self) -> list[Tensor]:
        """Expected cost after every value in every state, the site's own ``log q`` included, by step."""
        tables, found = self.tables(self.double_net()), list[Tensor]()
        value = self.end_cost(torch.arange(float(tables[-1][1].max()) + 1.0).double()).double()
        for log_q, after in reversed(tables):
            found.append(log_q + value[after])
            value = (log_q.exp() * found[-1]).sum(-1)
        return [q.detach().float() for q in reversed(found)]

    def ideal(self, particles: int) -> Tensor:
        """Loss whose gradient is the all-action gradient with the exact Q: what the best critic would give."""
        total, state = torch.zeros(()), torch.zeros(particles, dtype=torch.long)
        for t, q in enumerate(self.exact_q()):
            log_q = self.law(self.net, state, t)
            total = total + (log_q.exp() * q[state]).sum()
            state = self.after(state, dist.Categorical(logits=log_q.detach()).sample())
        return total / particles


class Markov(Chain):
    """8 states; the net sees the last state and the time; a random cost of the last state."""

    def __init__(self, steps: int, seed: int = 0, states: int = 8) -> None:
        super().__init__(steps, states + 1, states, seed)
        self.cost = torch.randn(states, generator=self.generator)

    def inputs(self, state: Tensor, t: int) -> Tensor:
        """One-hot state (zeros at the start, where it is 0) and time in [-1, 1]."""
        hot = state.unsqueeze(-1) == torch.arange(1, len(self.cost) + 1)
        time = torch.full((*state.shape, 1), 2.0 * t / self.steps - 1.0)
        return torch.cat((hot.to(time.dtype), time), -1)

    def site(self, logits: Tensor) -> Any:
        return dist.Categorical(logits=logits)

    def law(self, net: Any, state: Tensor, t: int) -> Tensor:
        return net(self.inputs(state, t).to(net[0].weight)).log_softmax(-1)

    def after(self, state: Tensor, value: Tensor) -> Tensor:
        return value + 1

    def end_cost(self, state: Tensor) -> Tensor:
        return self.cost[state.long() - 1]


class Count(Chain):
    """Binary; the net sees the running mean and the time; cost ``T (mean - 0.499)^2``."""

    def __init__(self, steps: int, seed: int = 0) -> None:
        super().__init__(steps, 2, 1, seed)

    def inputs(self, count: Tensor, t: int) -> Tensor:
        """Running mean and time in [-1, 1]."""
        mean = (2.0 * count / t - 1.0 if t else 0.0 * count).to(torch.get_default_dtype())
        return torch.stack((mean, torch.full_like(mean, 2.0 * t / self.steps - 1.0)), -1)

    def site(self, logits: Tensor) -> Any:
        return dist.Bernoulli(logits=logits.squeeze(-1))

    def law(self, net: Any, state: Tensor, t: int) -> Tensor:
        logits = net(self.inputs(state, t).to(net[0].weight))
        return -softplus(torch.cat((logits, -logits), -1))

    def after(self, state: Tensor, value: Tensor) -> Tensor:
        return state + value

    def end_cost(self, state: Tensor) -> Tensor:
        return self.steps * (state / self.steps - 0.499).square()


class LeaveOneOutELBO(PlainLeaveOneOut):
    """The same with the cost-to-go of each site: a lean rival."""

    def loss_and_grads(self, model, guide, *args, **kwargs):
        """Adds the gradients; returns the loss."""
        ((model_trace, guide_trace),) = self._get_traces(model, guide, args, kwargs)
        names = [name for name in model_trace.nodes if name.startswith("x_")]
        shape = (self.num_particles,)
        score = torch.stack([guide_trace.nodes[name]["log_prob"].expand(shape) for name in names])
        with torch.no_grad():
            prior = torch.stack([model_trace.nodes[name]["log_prob"].expand(shape) for name in names])
            cost = score.detach() - prior
            cost[-1] -= model_trace.nodes["cost"]["log_prob"]
            cost = cost.flip(0).cumsum(0).flip(0)
            centred = (cost - cost.mean(1, keepdim=True)) * (shape[0] / (shape[0] - 1.0))
        ((centred * score).sum() / shape[0]).backward()
        return cost[0].mean().item()


# Measuring.


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        lengths: Numbers of sites ``T``.
        seeds: Number of seeds.
        repeats: Gradients per checkpoint.
        pyro_every: ``TraceGraph_ELBO`` and ``ScoreFunction`` are measured at every so-many-th checkpoint.
        pyro_repeats: Gradients per such checkpoint.
        nets: Steps that a ``nn_baseline`` is trained for, with the guide frozen, before it is measured.
    """

    lengths: tuple[int, ...]
    seeds: int
    repeats: int
    pyro_every: int
    pyro_repeats: int
    nets: int


KINDS: dict[str, type[Chain]] = {"markov": Markov, "count": Count}
QUICK = Size((5, 50, 100), seeds=1, repeats=16, pyro_every=10, pyro_repeats=4, nets=0)
FULL = Size((1, 2, 5, 10, 20, 50, 100), seeds=5, repeats=50, pyro_every=5, pyro_repeats=16, nets=40)


def fitting(ours: Step, rival: Callable[[int], Step]) -> tuple[int, float, float]:
    """How many particles of a rival fit in the processor time of our step.

    Args:
        ours: Our step.
        rival: A step with so many particles.

    Returns:
        Number of particles, seconds of our step and of the rival's.
    """
    few, many = PARTICLES // 2, 2 * PARTICLES
    seconds = interleaved({"ours": ours, "few": rival(few), "many": rival(many)}, 5)
    slope = max((seconds["many"] - seconds["few"]) / (many - few), 1e-8)
    number = int(few + (seconds["ours"] - seconds["few"]) / slope)
    number = min(max(number, 2), 40 * PARTICLES)
    seconds = interleaved({"ours": ours, "rival": rival(number)}, 7)
    return number, seconds["ours"], seconds["rival"]


def checkpoint(chain: Chain, elbo: TraceBackpropQ_ELBO, size: Size, at: int) -> Row:
    """Freezes guide and critics and measures everybody."""
    exact, programs = chain.gradient(), (chain.model, chain.guide)

    def step_of(rival: ELBO) -> Step:
        return partial(rival.loss_and_grads, *programs)

    def leave_one_out(particles: int) -> Step:
        return step_of(LeaveOneOutELBO(particles, 0))

    learning = copy.deepcopy(elbo)
    number, own_time, rival_time = fitting(step_of(learning), leave_one_out)
    frozen = copy.deepcopy(elbo).eval()
    ours = chain.error(exact, step_of(frozen), size.repeats)
    loo = chain.error(exact, leave_one_out(number), size.repeats)
    best = chain.error(exact, lambda: chain.ideal(PARTICLES).backward(), size.repeats)
    row: Row = {"checkpoint": at, "loss": float(chain.exact_loss(chain.double_net()).detach())}
    row |= {"squared_gradient": float(exact @ exact), "ms": 1e3 * own_time, "variance": ours.variance}
    row |= {"squared_bias": ours.bias, "z": ours.z, "mse": ours.mse, "exact_q_variance": best.variance}
    row |= {"loo_particles": number, "loo_ms": 1e3 * rival_time}
    row |= {"loo_mse": loo.mse * rival_time / own_time, "loo_z": loo.z}
    row |= dict.fromkeys([*RIVALS][1:], math.nan)
    if at % size.pyro_every == 0:
        score = TraceBackpropQ_ELBO(num_particles=number, estimator=ScoreFunction(LeaveOneOut()), **VECTORIZED)
        row["score_mse"] = equal_time(chain, exact, step_of(score), step_of(learning), size)
        row["tracegraph_average_mse"] = tracegraph(chain, exact, "average", 10, step_of(learning), size)
        if size.nets:
            row["tracegraph_net_mse"] = tracegraph(chain, exact, "net", size.nets, step_of(learning), size)
    return row


def equal_time(chain: Chain, exact: Tensor, rival: Step, ours: Step, size: Size) -> float:
    """Squared error of a rival whose steps are averaged until our step's time is spent."""
    seconds = interleaved({"ours": ours, "rival": rival}, 3)
    return chain.error(exact, rival, size.pyro_repeats).mse * seconds["rival"] / seconds["ours"]


def tracegraph(chain: Chain, exact: Tensor, baseline: str, warm_up: int, ours: Step, size: Size) -> float:
    """``TraceGraph_ELBO`` with a baseline that is first trained, uncounted, with the guide frozen."""
    chain.pyro_baseline = baseline
    elbo = TraceGraph_ELBO(num_particles=PARTICLES, **VECTORIZED)
    optimizer = torch.optim.Adam(chain.baseline.parameters(), lr=3e-2)
    for _ in range(warm_up):
        optimizer.zero_grad()
        elbo.loss_and_grads(chain.model, chain.guide)
        optimizer.step()
    found = equal_time(chain, exact, lambda: elbo.loss_and_grads(chain.model, chain.guide), ours, size)
    chain.pyro_baseline = ""
    return found


def train(size: Size, chain: str, T: int, seed: int) -> Iterator[Row]:
    """Trains guide and critics together, with ten checkpoints that are spread evenly over the steps."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    programs = KINDS[chain](T, seed)
    elbo = TraceBackpropQ_ELBO(num_particles=PARTICLES, **VECTORIZED)
    optimizer = torch.optim.Adam(programs.net.parameters(), lr=LEARNING_RATE)
    for step in progress(range(1, STEPS + 1), f"{chain} T={T} seed={seed}"):
        optimizer.zero_grad()
        elbo.loss_and_grads(programs.model, programs.guide)
        optimizer.step()
        if step % (STEPS // 10) == 0:
            yield {"steps": STEPS, **checkpoint(programs, elbo, size, 10 * step // STEPS)}


# Reporting.


def gain(rows: list[Row], name: str, own: str = "mse") -> float:
    """Error of a rival over ours, each averaged over the checkpoints where the rival was measured."""
    rows = [row for row in rows if row[name] == row[name]]
    return mean(row[name] for row in rows) / max(mean(row[own] for row in rows), 1e-30) if rows else math.nan


RIVALS = {
    "loo_mse": "leave-one-out",
    "score_mse": "ScoreFunction(LeaveOneOut())",
    "tracegraph_average_mse": "TraceGraph, decaying average",
    "tracegraph_net_mse": "TraceGraph, nn_baseline",
}


def summary(rows: list[Row]) -> list[Row]:
    """One row per chain and length; median and quartiles over seeds."""
    found = []
    for (chain, steps), mine in grouped(rows, "chain", "T").items():
        runs = grouped(mine, "seed").values()
        entry: Row = {"chain": chain, "T": steps, "seeds": len(runs), "steps": max(row["steps"] for row in mine)}
        for name, text in RIVALS.items():
            gains = [gain(run, name) for run in runs]
            entry[f"gain over {text}"] = quartiles(gains) if all(value == value for value in gains) else "-"
        for name, text in {"squared_gradient": "squared gradient", "exact_q_variance": "that with the exact Q"}.items():
            entry[f"variance / {text}"] = quartiles(gain(run, "variance", name) for run in runs)
        entry["z of bias"] = median(mean(row["z"] for row in run) for run in runs)
        entry["ms"] = median(row["ms"] for row in mine)
        entry["particles of leave-one-out"] = int(median(row["loo_particles"] for row in mine))
        found.append(entry)
    return found


# Compiled against compiled.

SITES, NUMBERS = 50, (64, 512, 4096)
OWN_NUMBERS = (1, 8, 32, 100, 1000)


def milliseconds(step: Step) -> float:
    """CPU time of a step: the median over rounds of ten."""
    return 100.0 * interleaved({"ten": lambda: [step() for _ in range(10)]}, 15)["ten"]


def compiled(chain: Chain, elbo: TraceBackpropQ_ELBO, lr: float, steps: int) -> CompiledSVI:
    """A compiled loop after some steps."""
    svi = CompiledSVI(chain.model, chain.guide, Adam({"lr": lr}), elbo)
    svi.run(steps, progress=False)
    if elbo.compiled is None or not elbo.compiled.entries or elbo.compiled.entries[-1].note:
        raise RuntimeError(compile_report(elbo))
    return svi


@cache
def times_of_rivals(kind: type[Chain]) -> dict[int, float]:
    """Milliseconds of compiled leave-one-out, by its number of particles; they do not depend on the weights."""
    found = {}
    for number in NUMBERS:
        pyro.clear_param_store()
        chain = kind(SITES, seed=0)
        estimator = ScoreFunction(LeaveOneOut())
        elbo = TraceBackpropQ_ELBO(num_particles=number, estimator=estimator, critic=None, **VECTORIZED)
        found[number] = milliseconds(compiled(chain, elbo, LEARNING_RATE, 30).step)
    return found


def compiled_rows(chain: str, particles: int, seed: int) -> Iterator[Row]:
    """One number of particles of ours."""
    rivals = times_of_rivals(KINDS[chain])
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    programs = KINDS[chain](SITES, seed=seed)
    options = VECTORIZED if particles > 1 else {}
    elbo = TraceBackpropQ_ELBO(num_particles=particles, **options)
    svi = compiled(programs, elbo, LEARNING_RATE, STEPS)
    own = milliseconds(svi.step)
    exact, repeats = programs.gradient(), 400 if particles < 100 else 100
    frozen = copy.deepcopy(elbo).eval()
    ours = programs.error(exact, lambda: frozen.loss_and_grads(programs.model, programs.guide), repeats)
    best = programs.error(exact, lambda: programs.ideal(particles).backward(), repeats)
    products = {}
    for number, ms in rivals.items():
        rival = partial(LeaveOneOutELBO(number, 0).loss_and_grads, programs.model, programs.guide)
        products[number] = programs.error(exact, rival, 60).variance * ms
    product, number = min((product, number) for number, product in products.items())
    yield {
        "ms": own,
        "variance over squared gradient": ours.variance / float(exact @ exact),
        "z of bias": ours.z,
        "rival's particles": number,
        "rival's ms": rivals[number],
        "gain": product / (ours.mse * own),
        "ceiling": product / (best.variance * own),
    }


def compiled_main(options: Any) -> None:
    """Measures compiled steps, writes ``chains_compiled.csv`` and ``chains_compiled.md``."""
    path = options.output / "chains_compiled"
    wanted = cases(chain=only(options, KINDS), particles=OWN_NUMBERS, seed=range(options.seeds or 1))
    rows = measured(path.with_suffix(".csv"), wanted, compiled_rows, options.resume)
    publish(path, "Chains, compiled", None, rows, rows)


def main() -> None:
    """Measures, prints, writes ``chains.csv`` and ``chains.md``."""
    options = arguments(__doc__, "compiled seeds resume only")
    if options.compiled:
        return compiled_main(options)
    size, path = sized(options, QUICK, FULL), options.output / "chains"
    pyro.enable_validation(False)
    wanted = cases(chain=only(options, KINDS), T=size.lengths, seed=range(size.seeds))
    rows = measured(path.with_suffix(".csv"), wanted, partial(train, size), options.resume)
    rows.sort(key=lambda row: (row["T"], row["chain"] != "markov", row["seed"]))
    publish(path, "Chains", __doc__, rows, summary(rows))


if __name__ == "__main__":
    main()
