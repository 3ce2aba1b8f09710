r"""Hindsight with critics for what remains, and hindsight that holds a state some steps further on: by hand, on chains.

All estimators work on the same samples. A site ``t`` has the state ``s`` of its past, its value ``x``, its immediate
cost ``c(s, x)``, and a critic ``V`` of the state that follows. With ``δ_u(s) = E[c(s, x) + V(s')] - V(s)``, what is
left of the costs-to-go once the critics' graph-wise control variates are taken off is ``R_t = Σ_{u > t} δ_u(s_u)``:

- *critics*: ``Σ_v ∇q(v) (c + V)(v) + (R_t - b) ∇ log q(x)``, all-action with graph-wise corrections;
- *futures*: the same with critics from the futures of the other particles of the step, nothing learned;
- *hindsight*: values weighted by their law ``w`` given all other values, their costs re-evaluated;
- *both*: ``Σ_v ∇q(v) (c + V)(v) + Σ_v w(v) (R_t(v) - b) ∇ log q(v)``, the expectation of the first given all other
  values. It asks for the mean of a child's critic at all values of the site.

*Held k steps on*: ``w(v)`` is the law given the state ``k`` steps later, and what lies between is summed out by
messages. Guide, along the exact gradient, and critics, on so many samples a step, are trained at the same time; guides
of given transitions stay as they are. Each estimator is mixed with those that it is made of, site by site, by the
shares that leave the least in other samples. Of the library are all-action with its critics, and hindsight.

    python benchmarks/hindsight_critics.py [--full | --smoke] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

import copy
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyro
import torch
from chain_tables import (
    CountProblem,
    CoupledProblem,
    MarkovProblem,
    Problem,
    Runs,
    Tables,
    exact_gradient,
    exact_values,
    gradient_of,
    sampled,
)
from chains import HIDDEN, LEARNING_RATE, Count, Markov
from common import Row, arguments, flat, median, progress, table, write_csv, write_markdown
from hindsight import Chain as Coupled
from torch import Tensor, nn

from pyro_bpq import AllAction, TraceBackpropQ_ELBO
from pyro_bpq.critics.learner import AveragedAdam
from pyro_bpq.estimators import Hindsight

# Lambda of the critics' targets, and steps in which the library's hindsight learns its scales.
TRACE, LEARNING = 0.97, 10


class Parts(NamedTuple):
    """What estimators multiply log-probabilities by, ``(T, n, K)`` each, costs in nats.

    ``table`` is known at all values and multiplies their probabilities ``q``. ``law`` is the law of the value given
    others; ``rest`` are costs at all values that it weights. They are centred by the other particles, unless those
    know of this one.
    """

    table: Tensor
    law: Tensor
    rest: Tensor
    is_centred: bool = True

    def coefficients(self, q: Tensor) -> Tensor:
        """``q table + law (rest - b)``."""
        if not self.is_centred:
            return q * self.table + self.law * self.rest
        mean = (self.law * self.rest).sum(-1)
        baseline = (mean.sum(1, keepdim=True) - mean) / (mean.shape[1] - 1)
        return q * self.table + self.law * (self.rest - baseline.unsqueeze(-1))


def at_states(tensor: Tensor, runs: Runs) -> Tensor:
    """Rows ``(T, n, K)`` of a table ``(T, S, K)`` at the sampled states."""
    return tensor[torch.arange(len(tensor)).unsqueeze(-1), runs.state[:-1]]


def later_sums(tensor: Tensor) -> Tensor:
    """Sums over all later times, the own one left out."""
    return tensor.flip(0).cumsum(0).flip(0) - tensor


def drawn_law(runs: Runs, like: Tensor) -> Tensor:
    """The law that knows the drawn value."""
    return torch.zeros_like(like).scatter_(-1, runs.value.unsqueeze(-1), 1.0)


def critics(of: Tables, runs: Runs, value: Tensor) -> Parts:
    """All-action with graph-wise corrections.

    Args:
        of: The chain.
        runs: The samples.
        value: Critics of states, ``(T + 1, S)``, those of the last state exact.
    """
    ahead, error = errors(of, value)
    table = at_states(ahead, runs)
    left = later_sums(error.gather(1, runs.state[:-1]))
    return Parts(table, drawn_law(runs, table), left.unsqueeze(-1).expand_as(table))


def errors(of: Tables, value: Tensor) -> tuple[Tensor, Tensor]:
    """``c + V`` at all values, ``(T, S, K)``, and ``δ``, ``(T, S)``."""
    ahead = of.cost + value[1:][:, of.following]
    return ahead, (of.log_q.detach().exp() * ahead).sum(-1) - value[:-1]


def futures(of: Tables, runs: Runs) -> Tensor:
    r"""A critic for each particle from the others' futures, ``(T + 1, n, S)``, where the next state is the value.

        V_u(s) = Σ_k w_k(s) (c(s, x_k) + V_{u+1}(x_k)),   w_k(s) ∝ q(x_k | s) / Σ_l q(x_k | s_l)

    over the other particles ``k`` and ``l``: a stochastic mesh (Broadie and Glasserman, 2004). It reads the costs and
    laws of the others' values at all states, and nothing of the particle itself.
    """
    particles, found = runs.value.shape[1], [of.end.expand(runs.value.shape[1], -1)]
    others = ~torch.eye(particles, dtype=torch.bool)
    steps = zip(of.log_q.detach().exp(), of.cost, runs.state[:-1], runs.value, strict=True)
    for q, cost, state, drawn in reversed(list(steps)):
        chance = q[:, drawn]
        at_all = chance[state].sum(0) - chance[state]
        weights = chance / at_all.clamp(min=1e-30).unsqueeze(1) * others.unsqueeze(1)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        ahead = cost[:, drawn] + found[-1][:, of.following[0, drawn]].unsqueeze(1)
        found.append((weights * ahead).sum(-1))
    return torch.stack(found[::-1])


def critics_inside(of: Tables, runs: Runs, value: Tensor) -> Parts:
    """The same as :func:`critics` with critics of each particle's own, ``(T + 1, n, S)``."""
    q, times = of.log_q.detach().exp(), torch.arange(len(runs.value)).unsqueeze(-1)
    table = at_states(of.cost, runs) + value[1:][..., of.following[0]]
    here = value[:-1].gather(-1, runs.state[:-1].unsqueeze(-1))[..., 0]
    left = later_sums((q[times, runs.state[:-1]] * table).sum(-1) - here)
    return Parts(table, drawn_law(runs, table), left.unsqueeze(-1).expand_as(table), False)


def leave_one_out(of: Tables, runs: Runs) -> Parts:
    """The score function with the other particles' costs."""
    cost = at_states(of.cost, runs)
    drawn = cost.gather(-1, runs.value.unsqueeze(-1))[..., 0]
    left = drawn + later_sums(drawn) + of.end[runs.state[-1]]
    return Parts(torch.zeros_like(cost), drawn_law(runs, cost), left.unsqueeze(-1).expand_as(cost))


def following_states(of: Tables, runs: Runs) -> Tensor:
    """States ``(T, T + 1, n, K)`` at each time that follow from each value of each site, all other values held."""
    steps, particles = runs.value.shape
    values = of.log_q.shape[-1]
    found = torch.zeros(steps, steps + 1, particles, values, dtype=torch.long)
    every = torch.arange(values).expand(particles, -1)
    now = torch.zeros(steps, particles, values, dtype=torch.long)
    for u in range(steps + 1):
        now[u:] = runs.state[u].unsqueeze(-1)
        found[:, u] = now
        if u < steps:
            moved = of.following[now, runs.value[u].unsqueeze(-1)]
            moved[u] = of.following[runs.state[u].unsqueeze(-1), every]
            now = moved
    return found


def held(of: Tables, runs: Runs, value: Tensor | None, part: float = 0.0) -> Parts:
    """Hindsight, all other values held.

    Args:
        of: The chain.
        runs: The samples.
        value: Critics of states, or ``None`` for none, nor control variates of immediate costs.
        part: Share of immediate costs that stays beside the later ones, where there are no critics.
    """
    steps = len(runs.value)
    states = following_states(of, runs)
    times, log_q, here = torch.arange(steps), of.log_q.detach(), states[:, :-1]
    is_later = (times.unsqueeze(0) > times.unsqueeze(1))[..., None, None]
    at = times[None, :, None, None], here, runs.value[None, :, :, None]
    law = (at_states(log_q, runs) + (log_q[at] * is_later).sum(1)).softmax(-1)
    if value is None:
        own, later = at_states(of.cost, runs), (of.cost[at] * is_later).sum(1) + of.end[states[:, -1]]
        return Parts((1.0 - part) * own, law, later + part * own)
    ahead, error = errors(of, value)
    return Parts(at_states(ahead, runs), law, (error[at[:2]] * is_later).sum(1))


def held_later(of: Tables, runs: Runs, value: Tensor | None, ahead: int, part: float = 0.0) -> Parts:
    """Hindsight on a chain whose next state is the value, with the state so many steps on held.

    What lies between is summed out by messages. Arguments as in :func:`held`.
    """
    steps, particles = runs.value.shape
    size, log_q = len(of.end), of.log_q.detach()
    # From a state to the next; behind the end all states are one.
    moves = torch.zeros(steps + ahead, size, size)
    moves[:steps, :, of.following[0]] = log_q.exp()
    moves[steps:, :, 0] = 1.0
    if value is None:
        table, costs = at_states(of.cost, runs), torch.zeros(steps + ahead, size, size)
        costs[:steps, :, of.following[0]] = of.cost
        costs[steps] = of.end.unsqueeze(-1)
    else:
        known, error = errors(of, value)
        table, costs = at_states(known, runs), torch.zeros(steps + ahead, size, size)
        costs[:steps] = error.unsqueeze(-1)
    state = torch.cat((runs.state, torch.zeros(ahead, particles, dtype=torch.long)))
    paid = costs[torch.arange(steps + ahead).unsqueeze(-1), state[:-1], state[1:]]
    joint, between = torch.eye(size).expand(steps, -1, -1), torch.zeros(steps, size, size)
    for k in range(1, ahead + 1):
        move = moves[k : k + steps]
        between = between @ move + joint @ (move * costs[k : k + steps])
        joint = joint @ move
    # (T, n, K): from each value to the state that is held.
    at = torch.arange(steps)[:, None, None], of.following[0], state[1 + ahead : 1 + ahead + steps].unsqueeze(-1)
    chance = joint[at]
    law = (at_states(log_q, runs) + chance.log()).softmax(-1)
    rest = between[at] / chance.clamp(min=1e-30)
    total = paid.flip(0).cumsum(0).flip(0)
    rest = rest + torch.cat((total, torch.zeros(1, particles)))[1 + ahead : 1 + ahead + steps].unsqueeze(-1)
    if value is None:
        own = at_states(of.cost, runs)
        return Parts((1.0 - part) * own, law, rest + part * own)
    return Parts(table, law, rest)


class Critic:
    """Expected costs from each state on, trained by lambda-returns: a table, or a net where states add up.

    Args:
        problem: The chain.
    """

    def __init__(self, problem: Problem) -> None:
        of = problem.tables()
        steps, states, features = of.features.shape
        if problem.forgets:
            self.parameters = [nn.Parameter(torch.zeros(steps, states))]
            self.told = lambda of: self.parameters[0]
        else:
            net = nn.Sequential(nn.Linear(features, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 1))
            nn.init.zeros_(net[-1].weight)
            self.parameters = list(net.parameters())
            self.told = lambda of: net(of.features)[..., 0]
        self.optimizer = AveragedAdam(self.parameters, lr=0.1 if problem.forgets else 0.03)
        # Mean and spread of targets at each time.
        self.mean, self.spread, self.count = torch.zeros(steps, 1), torch.ones(steps, 1), 0

    def values(self, of: Tables) -> Tensor:
        """Expected costs, ``(T + 1, S)``; the last state's are known."""
        return torch.cat((self.mean + self.spread * self.told(of), of.end.unsqueeze(0)))

    def learn(self, of: Tables, runs: Runs) -> None:
        """A step of the optimiser on some samples."""
        with torch.no_grad():
            value = self.values(of)
            _, error = errors(of, value)
            target, targets = torch.zeros(runs.value.shape[1]), []
            for now in reversed(error.gather(1, runs.state[:-1])):
                target = now + TRACE * target
                targets.append(target)
            targets = value[:-1].gather(1, runs.state[:-1]) + torch.stack(targets[::-1])
        self.count += 1
        weight = max(1.0 / self.count, 0.05)
        self.mean = torch.lerp(self.mean, targets.mean(1, keepdim=True), weight)
        self.spread = torch.lerp(self.spread, targets.std(1, keepdim=True) + 1e-3, weight)
        found = self.values(of)[:-1].gather(1, runs.state[:-1])
        self.optimizer.zero_grad()
        ((found - targets) / self.spread).square().mean(1).sum().backward()
        self.optimizer.step()


# The parts of an estimator that are mixed, from a chain, samples, the critics.
Candidates = Callable[[Tables, Runs, Tensor], list[Parts]]


def methods(problem: Problem, steps_on: Sequence[int]) -> dict[str, Candidates]:
    """The estimators of a chain by name."""

    def immediate(of: Tables, runs: Runs) -> Parts:
        none = torch.zeros_like(of.end).expand(len(of.log_q) + 1, -1)
        return critics(of, runs, torch.cat((none[:-1], of.end.unsqueeze(0))))

    def hindsight(of: Tables, runs: Runs, ahead: int) -> list[Parts]:
        if problem.forgets:
            return [held_later(of, runs, None, ahead, part) for part in (0.0, 1.0)]
        return [held(of, runs, None, part) for part in (0.0, 1.0)]

    def both(of: Tables, runs: Runs, value: Tensor, ahead: int) -> Parts:
        return held_later(of, runs, value, ahead) if problem.forgets else held(of, runs, value)

    found: dict[str, Candidates] = {
        "leave-one-out": lambda of, runs, value: [leave_one_out(of, runs)],
        "critics": lambda of, runs, value: [leave_one_out(of, runs), immediate(of, runs), critics(of, runs, value)],
        "exact Q": lambda of, runs, value: [critics(of, runs, exact_values(of))],
    }
    if problem.forgets:
        found["futures"] = lambda of, runs, value: [
            *(leave_one_out(of, runs), immediate(of, runs)),
            critics_inside(of, runs, futures(of, runs)),
        ]
        found["critics and futures"] = lambda of, runs, value: [
            *found["critics"](of, runs, value),
            critics_inside(of, runs, futures(of, runs)),
        ]
    for k in steps_on if problem.forgets else (1,):
        text = f"held {k} steps on" if k > 1 else "hindsight"
        found[text] = lambda of, runs, value, k=k: hindsight(of, runs, k)
        found[f"{text}, both"] = lambda of, runs, value, k=k: [*hindsight(of, runs, k), both(of, runs, value, k)]
    return found


def in_logits(coefficients: Tensor, q: Tensor) -> Tensor:
    """Coefficients of logits from those of log-probabilities."""
    return coefficients - q * coefficients.sum(-1, keepdim=True)


def shares(found: Sequence[list[Parts]], qs: Sequence[Tensor]) -> Tensor:
    """Weights ``(T, C)`` of candidates that add up to one and leave the least second moment in these samples."""
    tables = [[in_logits(part.coefficients(q), q) for part in parts] for parts, q in zip(found, qs, strict=True)]
    stacked = torch.stack([torch.stack(each).flatten(2) for each in tables])
    vectors = stacked.permute(2, 1, 0, 3).flatten(2)
    first, more = vectors[:, :1], vectors[:, 1:] - vectors[:, :1]
    gram = more @ more.mT
    # Where candidates agree, as at the last sites, their weights say nothing.
    ridge = 1e-2 * first.square().sum((-1, -2)) + 1e-3 * gram.diagonal(dim1=-2, dim2=-1).mean(-1) + 1e-12
    solved = torch.linalg.solve(gram + ridge[:, None, None] * torch.eye(gram.shape[-1]), -more @ first.mT)[..., 0]
    return torch.cat((1.0 - solved.sum(-1, keepdim=True), solved), -1)


def mixed(parts: Sequence[Parts], q: Tensor, weights: Tensor) -> Tensor:
    """Coefficients of log-probabilities ``(T, n, K)``."""
    found = torch.stack([part.coefficients(q) for part in parts], -1)
    return (found * weights[:, None, None]).sum(-1)


def gradient(problem: Problem, of: Tables, runs: Runs, coefficients: Tensor) -> Tensor:
    """The gradient that coefficients at sampled states give."""
    steps, particles = runs.value.shape
    at = torch.arange(steps).unsqueeze(-1).expand(-1, particles)
    table = torch.zeros_like(of.log_q).index_put((at, runs.state[:-1]), coefficients / particles, accumulate=True)
    return gradient_of(problem, of, table)


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        checkpoints: Steps of training ahead of each measurement.
        particles: Numbers of samples.
        fits: Samples of all particles that fit the shares.
        draws: Gradients of each estimator.
        seeds: Number of seeds.
        sites: Length of the chains.
        steps_on: How many steps on a state is held.
    """

    checkpoints: tuple[int, ...]
    particles: tuple[int, ...]
    fits: int
    draws: int
    seeds: int
    sites: int = 50
    steps_on: tuple[int, ...] = (1, 2, 4, 8)


QUICK = Size((30, 300), (8, 32), fits=50, draws=200, seeds=1)
FULL = Size((30, 300, 1000), (8, 32), fits=200, draws=1000, seeds=5)
SMOKE = Size((2,), (3,), fits=2, draws=4, seeds=1, sites=4, steps_on=(1, 2))


def measure(name: str, problem: Problem, particles: int, size: Size, seed: int) -> Iterator[Row]:
    """Rows of a chain."""
    torch.manual_seed(seed)
    pyro.clear_param_store()
    optimizer = torch.optim.Adam(problem.parameters, lr=LEARNING_RATE)
    critic, taken, packaged = Critic(problem), 0, Packaged(problem, particles)
    for checkpoint in size.checkpoints:
        for _ in progress(range(taken, checkpoint), f"{name}, {particles}, {checkpoint}"):
            of = problem.tables()
            critic.learn(of, sampled(of, particles))
            packaged.learn("critics")
            if problem.trains:
                along, at = exact_gradient(problem).float(), 0
                for parameter in problem.parameters:
                    parameter.grad = along[at : at + parameter.numel()].reshape(parameter.shape)
                    at += parameter.numel()
                optimizer.step()
        taken = checkpoint
        exact, about = exact_gradient(problem), {"chain": name, "steps": checkpoint, "particles": particles}
        value = critic.values(problem.tables()).detach()
        for text, candidates in methods(problem, size.steps_on).items():
            call, weights = by_hand(problem, candidates, value, particles, size.fits)
            share = float(weights[:, -1].mean()) if weights.shape[-1] > 1 else math.nan
            found = figures(call, exact, size.draws)
            yield {**about, "seed": seed, "method": text, **found, "share of the last part": share}
        for _ in range(LEARNING):
            packaged.learn("hindsight")
        for text in packaged.elbos:
            found = figures(packaged.still(text), exact, size.draws // 2)
            yield {**about, "seed": seed, "method": f"library: {text}", **found, "share of the last part": math.nan}


class Packaged:
    """The library's own estimators.

    Args:
        problem: The chain.
        particles: Number of particles.
    """

    def __init__(self, problem: Problem, particles: int) -> None:
        many = {"vectorize_particles": True, "max_plate_nesting": 0}
        self.problem = problem
        self.elbos = {
            "critics": TraceBackpropQ_ELBO(particles, estimator=AllAction(), **many),
            "hindsight": TraceBackpropQ_ELBO(particles, estimator=Hindsight(), critic=None, **many),
        }

    def learn(self, name: str) -> None:
        """A step that moves no parameter of the guide."""
        self.elbos[name].loss_and_grads(self.problem.chain.model, self.problem.chain.guide)

    def still(self, name: str) -> Callable[[], Tensor]:
        """Gives gradients of an estimator whose critics and statistics stand still."""
        elbo, parameters = copy.deepcopy(self.elbos[name]).eval(), self.problem.parameters

        def call() -> Tensor:
            for parameter in parameters:
                parameter.grad = None
            elbo.loss_and_grads(self.problem.chain.model, self.problem.chain.guide)
            return flat(parameter.grad for parameter in parameters)

        return call


def by_hand(
    problem: Problem, candidates: Candidates, value: Tensor, particles: int, fits: int
) -> tuple[Callable[[], Tensor], Tensor]:
    """Gives gradients of an estimator, and the shares of its parts."""
    of = problem.tables()
    found, qs = [], []
    for _ in range(fits):
        runs = sampled(of, particles)
        found.append(candidates(of, runs, value))
        qs.append(at_states(of.log_q.detach().exp(), runs))
    weights = shares(found, qs) if len(found[0]) > 1 else torch.ones(len(of.log_q), 1)

    def call() -> Tensor:
        of = problem.tables()
        runs = sampled(of, particles)
        q = at_states(of.log_q.detach().exp(), runs)
        return gradient(problem, of, runs, mixed(candidates(of, runs, value), q, weights))

    return call, weights


def figures(call: Callable[[], Tensor], exact: Tensor, draws: int) -> Row:
    """Variance, bias and time of an estimator."""
    gradients, seconds = [], []
    for _ in range(draws):
        start = time.process_time()
        gradients.append(call())
        seconds.append(time.process_time() - start)
    drawn = torch.stack(gradients)
    variance, squared = float(drawn.var(0).sum()), float(exact.square().sum())
    milliseconds = 1e3 * median(seconds)
    return {
        "variance / squared gradient": variance / squared,
        "z": float((drawn.mean(0) - exact).square().sum()) * draws / max(variance, 1e-30),
        "ms": milliseconds,
        "variance x ms": milliseconds * variance / squared,
    }


def expected(problem: Problem, parts: Callable[[Tables, Runs], Parts]) -> Tensor:
    """The expectation of an estimator's gradient, over all pairs of samples."""
    of = problem.tables()
    steps, _, values = of.log_q.shape
    paths = []
    for value in itertools.product(range(values), repeat=steps):
        state, chance = [0], 0.0
        for t, x in enumerate(value):
            chance += float(of.log_q.detach()[t, state[-1], x])
            state.append(int(of.following[state[-1], x]))
        paths.append((state, value, chance))
    total = torch.zeros(())
    for one, other in itertools.product(paths, repeat=2):
        runs = Runs(torch.tensor([one[0], other[0]]).T, torch.tensor([one[1], other[1]]).T)
        coefficients = parts(of, runs).coefficients(at_states(of.log_q.detach().exp(), runs))
        total = total + math.exp(one[2] + other[2]) * gradient(problem, of, runs, coefficients)
    return total


def largest_bias(size: int = 3) -> tuple[float, float]:
    """Largest error of expected gradients on chains of so many sites, and that of a law with a planted fault."""
    found, planted, before = [], [], torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    for problem in (MarkovProblem(Markov(size, states=2)), CountProblem(Count(size))):
        problem.chain.net.double()
        of, generator = problem.tables(), torch.Generator().manual_seed(0)
        shape = of.log_q.shape[:2]
        value = torch.cat((torch.randn(shape, generator=generator, dtype=torch.float64), of.end.unsqueeze(0)))

        def wrong(of: Tables, runs: Runs, value: Tensor = value) -> Parts:
            right = held(of, runs, value)
            return right._replace(law=(1.1 * right.law.log()).softmax(-1))

        estimates = [
            lambda of, runs, c=candidates, n=n, value=value: c(of, runs, value)[n]
            for candidates in methods(problem, (1, 2)).values()
            for n in range(len(candidates(of, sampled(of, 2), value)))
        ]
        exact = exact_gradient(problem)
        found += [float((expected(problem, estimate) - exact).abs().max()) for estimate in estimates]
        planted.append(float((expected(problem, wrong) - exact).abs().max()))
    torch.set_default_dtype(before)
    return max(found), min(planted)


def tasks(size: Size, seed: int) -> Iterator[tuple[str, Problem]]:
    """The chains."""
    yield "markov", MarkovProblem(Markov(size.sites, seed))
    yield "count", CountProblem(Count(size.sites, seed))
    for name, coupling in (("weakly", 0.3), ("medium", 1.0), ("strongly", 3.0)):
        chain = Coupled(f"{name} coupled", coupling, size.sites)
        yield chain.name, CoupledProblem(chain.programs(""), False)


def main() -> None:
    """Measures, prints, writes ``hindsight_critics.csv`` and ``hindsight_critics.md``."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="pyro")
    size = FULL if options.full else SMOKE if options.smoke else QUICK
    rows: list[Row] = []
    bias = largest_bias()
    assert bias[0] < 1e-10 < bias[1], bias
    for seed in range(options.seeds or size.seeds):
        for particles in size.particles:
            for name, problem in tasks(size, seed):
                rows += measure(name, problem, particles, size, seed)
    write(options.output, rows, size, bias)


def write(output: Path, rows: Sequence[Row], size: Size, bias: tuple[float, float]) -> None:
    """Writes CSV and Markdown, prints the tables."""
    columns = [name for name in rows[0] if name not in ("chain", "steps", "particles", "seed", "method")]
    parts = [
        f"Chains of {size.sites} sites. Estimators by hand on the same samples, and those of the library; {size.draws} "
        f"gradients (the library's: {size.draws // 2}), medians over {max(row['seed'] for row in rows) + 1} seed(s). "
        "*steps*: how long guide (by the exact gradient) and critics, with so many particles, trained. *z*: squared "
        "distance of the mean from the exact gradient in units of its expectation, 1 if unbiased. *ms*: CPU time of a "
        "gradient, critics at rest. *exact Q*: the exact Q-function in the first estimator. Mixed site by site are: "
        "for *critics* leave-one-out and the same without learned parts; for *hindsight* both laws of immediate costs; "
        "for *both* these as well. *Share of the last part*: mean weight of what stands in the name. Summed over all "
        f"values of chains of three sites, expectations are exact to {bias[0]:.0e}; with a law that is too sharp by a "
        f"tenth *both* is off by {bias[1]:.2g}."
    ]
    for name in dict.fromkeys(row["chain"] for row in rows):
        found = []
        mine = [row for row in rows if row["chain"] == name]
        for key in dict.fromkeys((row["particles"], row["steps"], row["method"]) for row in mine):
            own = [row for row in mine if (row["particles"], row["steps"], row["method"]) == key]
            about = dict(zip(("particles", "steps", "method"), key, strict=True))
            told = {column: median(row[column] for row in own) for column in columns}
            found.append({**about, **{column: value if value == value else "-" for column, value in told.items()}})
        parts += [f"## {name}", table(found)]
    print("\n\n".join(parts))
    write_csv(output / "hindsight_critics.csv", rows)
    write_markdown(output / "hindsight_critics.md", "Hindsight and critics together", parts)


if __name__ == "__main__":
    main()
