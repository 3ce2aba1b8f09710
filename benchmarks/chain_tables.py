r"""Chains as tables over time, states and values, with exact values and gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from common import flat
from torch import Tensor, nn


class Tables(NamedTuple):
    """A chain as tables over the time ``T``, states ``S`` and values ``K``.

    Args:
        log_q: Log-probabilities of the values, ``(T, S, K)``, with gradient.
        cost: Immediate costs in nats, ``(T, S, K)``, detached.
        following: The next state, ``(S, K)``.
        end: Cost of the last state, ``(S,)``.
        features: What nets see of the states, ``(T, S, F)``.
    """

    log_q: Tensor
    cost: Tensor
    following: Tensor
    end: Tensor
    features: Tensor


class Problem:
    """A chain.

    Args:
        chain: Its model and guide.
        trains: Whether the guide is trained.
    """

    # Whether the next state is the value alone.
    forgets = False

    def __init__(self, chain: nn.Module, trains: bool = True) -> None:
        self.chain, self.trains = chain, trains
        self.parameters = [p for name, p in chain.named_parameters() if not name.startswith("baseline")]

    def tables(self) -> Tables:
        """The tables at the present parameters."""
        raise NotImplementedError


class MarkovProblem(Problem):
    """``markov`` of ``chains.py``."""

    forgets = True

    def tables(self) -> Tables:
        """The tables at the present parameters."""
        chain = self.chain
        states = torch.arange(-1, chain.states)
        features = torch.stack([chain.inputs(states, t) for t in range(chain.steps)])
        log_q = chain.net(features).log_softmax(-1)
        following = torch.arange(1, chain.states + 1).expand(chain.states + 1, -1)
        return Tables(log_q, log_q.detach(), following, torch.cat((torch.zeros(1), chain.cost)), features)


class CountProblem(Problem):
    """``count`` of ``chains.py``."""

    def tables(self) -> Tables:
        """The tables at the present parameters."""
        chain, counts = self.chain, torch.arange(self.chain.steps + 1)
        features = torch.stack([chain.inputs(counts.clamp(max=t), t) for t in range(chain.steps)])
        log_odds = chain.net(features)
        log_q = -nn.functional.softplus(torch.cat((log_odds, -log_odds), -1))
        following = torch.stack((counts, (counts + 1).clamp(max=chain.steps)), -1)
        return Tables(log_q, log_q.detach(), following, chain.end_cost(counts.float()), features)


class CoupledProblem(Problem):
    """A chain of random transitions of ``hindsight.py``, whose logits are the parameters; it is not trained."""

    forgets = True

    def tables(self) -> Tables:
        """The tables; the chain starts in the first state."""
        steps, states, _ = self.chain.q.shape
        log_q = self.chain.q.log_softmax(-1)
        cost = log_q.detach() - self.chain.p.log_softmax(-1) + self.chain.cost.unsqueeze(1)
        following = torch.arange(states).expand(states, -1)
        features = torch.zeros(steps, states, 0)
        return Tables(log_q, cost, following, torch.zeros(states), features)


class Runs(NamedTuple):
    """Samples of a chain, time first.

    Args:
        state: States ahead of each site, ``(T + 1, n)``; the last one is the end.
        value: Values, ``(T, n)``.
    """

    state: Tensor
    value: Tensor


def sampled(of: Tables, particles: int) -> Runs:
    """Draws values."""
    states, values, q = [torch.zeros(particles, dtype=torch.long)], [], of.log_q.detach().exp()
    for now in q:
        values.append(torch.multinomial(now[states[-1]], 1)[:, 0])
        states.append(of.following[states[-1], values[-1]])
    return Runs(torch.stack(states), torch.stack(values))


def exact_values(of: Tables) -> Tensor:
    """Expected costs from each state on, ``(T + 1, S)``."""
    found, q = [of.end], of.log_q.detach().exp()
    for now, cost in zip(reversed(q), reversed(of.cost), strict=True):
        found.append((now * (cost + found[-1][of.following])).sum(-1))
    return torch.stack(found[::-1])


def exact_gradient(problem: Problem) -> Tensor:
    """The gradient, from the law of the states."""
    of = problem.tables()
    q, ahead = of.log_q.detach().exp(), exact_values(of)
    law, coefficients = torch.zeros(len(of.end)), []
    law[0] = 1.0
    for now, cost, value in zip(q, of.cost, ahead[1:], strict=True):
        joint = law.unsqueeze(-1) * now
        coefficients.append(joint * (cost + value[of.following]))
        law = torch.zeros_like(law).index_add(0, of.following.reshape(-1), joint.reshape(-1))
    return gradient_of(problem, of, torch.stack(coefficients))


def gradient_of(problem: Problem, of: Tables, coefficients: Tensor) -> Tensor:
    """The gradient of the sum of log-probabilities times coefficients."""
    found = torch.autograd.grad(of.log_q, problem.parameters, coefficients, retain_graph=True)
    return flat(found)
