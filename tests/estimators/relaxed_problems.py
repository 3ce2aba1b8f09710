"""Analytic programs, behind the protocol that estimators ask for costs: many independent rows in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.estimators.base import SiteContext, initial_statistics
from pyro_bpq.rollout.features import Components


@dataclass
class FakeProgram:
    """One site whose cost-to-go is a function of its value, row by row."""

    function: Callable[[Tensor], Tensor]
    value: Tensor
    components: Components | None = None
    fns: tuple[Any, ...] = ()
    seed: int = 0
    event_ndim: int = 1
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def cost(self, value: Tensor) -> Tensor:
        self.calls.append("cost")
        return self.function(value.detach()).detach()

    def gradient(self, value: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append("gradient")
        with torch.enable_grad():
            leaf = value.detach().requires_grad_()
            cost = self.function(leaf)
            (slope,) = torch.autograd.grad(cost.sum(), leaf)
        return cost.detach(), slope

    def held(self, value: Tensor) -> FakeProgram:
        return self

    def from_index(self, index: Tensor) -> Tensor:
        assert self.components is not None
        return self.components.value(index).to(self.value.dtype)

    def stack(self, pick: Callable[[Any], Tensor], event_ndim: int) -> Tensor:
        return torch.stack([pick(fn) for fn in self.fns])


@dataclass(frozen=True)
class Problem:
    """Finite components with fixed logits ``(D, K)`` and a smooth cost of the value ``(..., event)``."""

    components: Components
    logits: Tensor
    function: Callable[[Tensor], Tensor]

    def log_probs(self, logits: Tensor) -> Tensor:
        if self.components.kind != "bernoulli":
            return logits.log_softmax(-1)
        return torch.nn.functional.logsigmoid(torch.stack((-logits, logits), -1))

    def exact(self) -> Tensor:
        """Gradient of the expected cost with respect to the logits, over all states."""
        logits = self.logits.clone().requires_grad_()
        log_probs = self.log_probs(logits)
        size, cardinality = log_probs.shape
        states = torch.cartesian_prod(*[torch.arange(cardinality)] * size).reshape(-1, size)
        weight = log_probs.gather(-1, states.T).sum(0).exp()
        cost = self.function(self.components.value(states).to(logits.dtype))
        return torch.autograd.grad((weight * cost).sum(), logits)[0]

    def context(self, rows: int, seed: int, particles: int = 1) -> tuple[SiteContext, Tensor]:
        """A step of ``rows`` independent rows of a plate, and the logits of each."""
        generator = torch.Generator().manual_seed(seed)
        lead = (1, particles, rows)
        logits = self.logits.expand(*lead, *self.logits.shape).clone().requires_grad_()
        log_probs = self.log_probs(logits)
        probs = log_probs.detach().exp()
        noise = torch.rand(probs.shape, generator=generator, dtype=probs.dtype)
        index = (probs / -noise.log()).argmax(-1)
        value = self.components.value(index).to(logits.dtype)
        made = SiteContext(
            names=("z",),
            score=log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1).sum(-1),
            cost=self.function(value),
            num_particles=particles,
            log_probs=log_probs,
            index=index,
            signals={"program": FakeProgram(self.function, value, self.components, seed=seed + 1)},
        )
        return made, logits


def width_of(components: Components) -> int:
    return components.size * (components.cardinality if components.cardinality > 2 else 1)


def with_initial(estimator: Any, made: SiteContext, width: int) -> SiteContext:
    """The context with the estimator's initial statistics."""
    sites = len(made.names)
    statistics = {
        name: torch.stack([torch.as_tensor(value).to(made.cost)] * sites)
        for name, value in initial_statistics(estimator, width).items()
    }
    return replace(made, statistics=statistics, count=made.cost.new_zeros(sites))


def next_step(made: SiteContext, state: Mapping[str, Tensor], count: int) -> SiteContext:
    """A context with the statistics of earlier steps."""
    return replace(made, statistics=dict(state), count=made.cost.new_full((len(made.names),), float(count)))


def learned_statistics(
    estimator: Any, contexts: Callable[[int], SiteContext], width: int, steps: int
) -> dict[str, Tensor]:
    """The estimator's statistics after some steps; ``contexts(n)`` is step ``n``."""
    state = dict(with_initial(estimator, contexts(0), width).statistics)
    for n in range(steps):
        state |= estimator(next_step(contexts(n + 1), state, n)).statistics
    return state
