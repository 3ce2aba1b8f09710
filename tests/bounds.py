"""The importance-weighted bound of small programs, by enumeration of all joint states of its samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from models import Case, irregular, real
from pyro import poutine
from pyro.poutine.util import prune_subsample_sites
from steps import bias
from torch import Tensor

from pyro_bpq import TraceBackpropQ_IWAE, cost
from pyro_bpq.testing.choices import ChoiceMessenger, walk

ATOL = 1e-10
Program = Callable[..., Any]


def states(model: Program, guide: Program, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Probability of every state of one sample, differentiable, and its log-weight, both ``(states,)``."""
    choices = ChoiceMessenger(1000, keep_score=True)

    def run() -> tuple[Tensor, Tensor]:
        q = poutine.trace(guide).get_trace(*args)
        p = poutine.trace(poutine.replay(model, trace=q)).get_trace(*args)
        log_w = prune_subsample_sites(p).log_prob_sum() - prune_subsample_sites(q).log_prob_sum()
        return log_w, torch.stack(choices.score).sum()

    found = [(chance * (score - score.detach()).exp(), log_w) for chance, (log_w, score) in walk(choices, run)]
    return torch.stack([q for q, _ in found]), torch.stack([w for _, w in found])


def exact_bound(model: Program, guide: Program, args: tuple[Any, ...], k: int) -> Tensor:
    """Minus the bound, differentiable."""
    q, log_w = states(model, guide, args)
    picked = torch.tensor(list(itertools.product(range(len(q)), repeat=k)))
    return -(q[picked].prod(1) * (log_w[picked].logsumexp(1) - math.log(k))).sum()


def gradients(loss: Tensor) -> dict[str, Tensor]:
    named = dict(pyro.get_param_store().named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def error(iwae: TraceBackpropQ_IWAE, case: Case, k: int) -> float:
    case.params()
    truth = gradients(exact_bound(case.model, case.guide, case.args, k))
    return bias(iwae, *case.programs, params=case.params, truth=truth)


def coin_model() -> None:
    a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("pa", lambda: irregular(start=1))))
    pyro.sample("x", dist.Normal(a * pyro.param("mean", lambda: irregular(start=2)), 0.5), obs=real(0.7)[0])


def coin_guide() -> None:
    pyro.sample("a", dist.Bernoulli(logits=pyro.param("qa", lambda: irregular(start=3))))


COIN = Case("coin", coin_model, coin_guide, {"pa": (), "mean": (), "qa": ()}, 2)


DATA = real(0.3, -0.8, 1.4)


def rows_model(data: Tensor = DATA, size: int | None = None) -> None:
    with pyro.plate("rows", len(data), subsample_size=size, dim=-1) as rows:
        a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("pa", lambda: irregular(start=1))))
        pyro.sample("x", dist.Normal(1.5 * a, 0.6), obs=data[rows])
        cost("user", 0.4 * a * data[rows])


def rows_guide(data: Tensor = DATA, size: int | None = None) -> None:
    with pyro.plate("rows", len(data), subsample_size=size, dim=-1) as rows:
        pyro.sample("a", dist.Bernoulli(logits=pyro.param("qa", lambda: irregular(3, start=2))[rows]))


def one_row(i: int) -> tuple[Program, Program]:
    def model() -> None:
        a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("pa")))
        pyro.sample("x", dist.Normal(1.5 * a, 0.6), obs=DATA[i])
        pyro.factor("user", -0.4 * a * DATA[i])

    def guide() -> None:
        pyro.sample("a", dist.Bernoulli(logits=pyro.param("qa")[i]))

    return model, guide
