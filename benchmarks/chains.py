r"""Chains of discrete sites: gradient error at equal wall-clock time, against the exact gradient.

``markov``: 8 states, ``x_t ~ Categorical(net(x_{t-1}, t))``, cost ``f(x_T)`` at the end. ``count``: binary,
``x_t ~ Bernoulli(net(x_1 + ... + x_{t-1}, t))``, cost ``T (mean x - 0.499)^2``. Both are plain Pyro programs; the
gradient is that of minus the ELBO with uniform priors, so that every site also costs ``log q``.
"""

from __future__ import annotations

import torch
import pyro
import pyro.distributions as dist
from pyro import poutine
from torch import Tensor, nn


class Chain(nn.Module):
    """A guide with one small net for all steps, its model, and its exact loss by dynamic programming.

    Args:
        steps: Number of sites ``T``.
        seed: Seed of the initial weights and of the cost.
        hidden: Hidden units.
    """

    def __init__(self, steps: int, inputs: int, outputs: int, seed: int, hidden: int = 16) -> None:
        super().__init__()
        self.steps = steps
        self.generator = torch.Generator().manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
        with torch.no_grad():
            for parameter in self.net.parameters():
                bound = parameter.shape[-1] ** -0.5
                parameter.uniform_(-bound, bound, generator=self.generator)

    def __deepcopy__(self, memo):
        raise NotImplementedError

    def gradient(self) -> Tensor:
        """The exact gradient, in float64."""
        weights = {k: p.detach().double().requires_grad_() for k, p in self.net.named_parameters()}

        def net(x):
            return torch.func.functional_call(self.net, weights, (x,))

        return flat(torch.autograd.grad(self.exact_loss(net), list(weights.values())))


class Markov(Chain):
    """8 states; the net sees the last state and the time; a random cost of the last state."""

    def __init__(self, steps: int, seed: int = 0, states: int = 8) -> None:
        super().__init__(steps, states + 1, states, seed)
        self.states = states
        self.cost = torch.randn(states, generator=self.generator)

    def inputs(self, state: Tensor, t: int) -> Tensor:
        """One-hot state (a zero vector at the start, -1) and time in [-1, 1]."""
        hot = state.unsqueeze(-1) == torch.arange(self.states)
        time = torch.full((*state.shape, 1), 2.0 * t / self.steps - 1.0)
        return torch.cat((hot.to(time.dtype), time), -1)

    def model(self) -> None:
        logits = torch.zeros(self.states)
        for t in range(self.steps):
            x = pyro.sample(f"x_{t}", dist.Categorical(logits=logits))
        pyro.factor("cost", -self.cost[x])

    def guide(self) -> None:
        pyro.module("net", self.net)
        x = torch.tensor(-1)
        for t in range(self.steps):
            x = pyro.sample(f"x_{t}", dist.Categorical(logits=self.net(self.inputs(x, t))))

    def tables(self, net) -> list[Tensor]:
        """``log q`` of every value in every state (the first row is the start), by step."""
        states = torch.arange(-1, self.states)
        return [net(self.inputs(states, t).double()).log_softmax(-1) for t in range(self.steps)]

    def exact_loss(self, net) -> Tensor:
        now = torch.zeros(self.states + 1, dtype=torch.float64)
        now[0] = 1.0
        loss = torch.zeros((), dtype=torch.float64)
        for log_q in self.tables(net):
            joint = now.unsqueeze(-1) * log_q.exp()
            loss = loss + (joint * log_q).sum()
            now = torch.cat((torch.zeros(1, dtype=torch.float64), joint.sum(0)))
        return loss + now[1:] @ self.cost.double() + self.steps * torch.tensor(float(self.states)).log()

    def exact_q(self) -> list[Tensor]:
        """Immediate plus remote cost at every (state, value), by step; detached."""
        with torch.no_grad():
            value, found = self.cost.double(), []
            for log_q in reversed(self.tables(self.net.double())):
                q = log_q + value
                value = (log_q.exp() * q).sum(-1)[1:]
                found.append(q)
            self.net.float()
            return found[::-1]

    def ideal(self, particles: int) -> Tensor:
        """Surrogate with the exact Q: what no critic can beat."""
        total, state = torch.zeros(()), torch.full((particles,), -1)
        for t, q in enumerate(self.exact_q()):
            log_q = self.net(self.inputs(state, t)).log_softmax(-1)
            total = total + (log_q.exp() * q.float()[state + 1]).sum()
            state = dist.Categorical(logits=log_q.detach()).sample()
        return total / particles


class Count(Chain):
    """Binary; the net sees the running mean and the time; cost ``T (mean - 0.499)^2``."""

    def __init__(self, steps: int, seed: int = 0) -> None:
        super().__init__(steps, 2, 1, seed)

    def inputs(self, count: Tensor, t: int) -> Tensor:
        mean = (2.0 * count / t - 1.0 if t else 0.0 * count).to(torch.get_default_dtype())
        return torch.stack((mean, torch.full_like(mean, 2.0 * t / self.steps - 1.0)), -1)

    def end_cost(self, count: Tensor) -> Tensor:
        return self.steps * (count / self.steps - 0.499).square()

    def model(self) -> None:
        count = 0.0
        for t in range(self.steps):
            count = count + pyro.sample(f"x_{t}", dist.Bernoulli(logits=torch.zeros(())))
        pyro.factor("cost", -self.end_cost(count))

    def guide(self) -> None:
        pyro.module("net", self.net)
        count = torch.zeros(())
        for t in range(self.steps):
            logits = self.net(self.inputs(count, t)).squeeze(-1)
            count = count + pyro.sample(f"x_{t}", dist.Bernoulli(logits=logits))

    def tables(self, net) -> list[Tensor]:
        found = []
        for t in range(self.steps):
            logits = net(self.inputs(torch.arange(t + 1), t).double())
            found.append(-torch.nn.functional.softplus(torch.cat((logits, -logits), -1)))
        return found

    def exact_loss(self, net) -> Tensor:
        now, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        loss = torch.zeros((), dtype=torch.float64)
        for log_q in self.tables(net):
            joint = now.unsqueeze(-1) * log_q.exp()
            loss = loss + (joint * log_q).sum()
            now = torch.cat((joint[:, 0], zero)) + torch.cat((zero, joint[:, 1]))
        ends = torch.arange(self.steps + 1, dtype=torch.float64)
        return loss + now @ self.end_cost(ends) + self.steps * torch.tensor(2.0).log()

    def exact_q(self) -> list[Tensor]:
        with torch.no_grad():
            value, found = self.end_cost(torch.arange(self.steps + 1, dtype=torch.float64)), []
            for log_q in reversed(self.tables(self.net.double())):
                q = log_q + torch.stack((value[:-1], value[1:]), -1)
                value = (log_q.exp() * q).sum(-1)
                found.append(q)
            self.net.float()
            return found[::-1]

    def ideal(self, particles: int) -> Tensor:
        total, count = torch.zeros(()), torch.zeros(particles)
        for t, q in enumerate(self.exact_q()):
            logits = self.net(self.inputs(count, t))
            log_q = -torch.nn.functional.softplus(torch.cat((logits, -logits), -1))
            total = total + (log_q.exp() * q.float()[count.long()]).sum()
            count = count + torch.bernoulli(log_q[:, 1].detach().exp())
        return total / particles


class LeaveOneOutELBO(pyro.infer.ELBO):
    """Score function, cost-to-go minus its mean over the other particles, on Pyro's own traces."""

    def _get_trace(self, model, guide, args, kwargs):
        return pyro.infer.enum.get_importance_trace("flat", self.max_plate_nesting, model, guide, args, kwargs)

    def loss_and_grads(self, model, guide, *args, **kwargs):
        (model_trace, guide_trace), = self._get_traces(model, guide, args, kwargs)
        latents = [s for s in guide_trace.nodes.values() if s["type"] == "sample" and not s["is_observed"] and not s["infer"].get("_do_not_trace")]
        latents = [s for s in latents if type(s["fn"]).__name__ != "_Subsample"]
        shape = (self.num_particles,)
        score = torch.stack([s["log_prob"].expand(shape) for s in latents])
        with torch.no_grad():
            later = score.detach().clone()
            for i, site in enumerate(latents):
                later[i] -= model_trace.nodes[site["name"]]["log_prob"].expand(shape)
            later[-1] -= model_trace.nodes["cost"]["log_prob"].expand(shape)
            cost = later.flip(0).cumsum(0).flip(0)
            centred = (cost - cost.mean(1, keepdim=True)) * (shape[0] / (shape[0] - 1.0))
            loss = cost[0].mean().item()
        ((centred * score).sum() / shape[0]).backward()
        return loss


def flat(gradients) -> Tensor:
    return torch.cat([g.detach().double().reshape(-1) for g in gradients])
