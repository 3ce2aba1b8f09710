"""The noise of a gradient on a chain, three ways: there a site's costs lie many steps away, and critics matter.

In each of 22 steps of five years the rate of British coal mining disasters has one of two levels. The states form a
chain, so a state changes all that comes after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import ELBO, TraceGraph_ELBO
from torch import Tensor

from pyro_bpq import LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO

# Disasters by year, 1851 to 1960.
YEARS = "45401434063340263354531441553425223421322111130010110031032201110101000210001102331121111242001400010000010010"
CHANGES = torch.tensor([0.1, 0.9])
MANY = {"num_particles": 20, "vectorize_particles": True, "max_plate_nesting": 0}
METHODS: dict[str, Callable[[], ELBO]] = {
    "TraceBackpropQ_ELBO": lambda: TraceBackpropQ_ELBO(**MANY),
    "TraceGraph_ELBO": lambda: TraceGraph_ELBO(**MANY),
    "leave-one-out": lambda: TraceBackpropQ_ELBO(estimator=ScoreFunction(LeaveOneOut()), **MANY),
}


def series() -> Tensor:
    """Disasters in steps of five years."""
    return torch.tensor([float(count) for count in YEARS]).reshape(-1, 5).sum(-1)


def model(counts: Tensor, baseline: bool) -> None:
    """Scores states and counts."""
    rates = pyro.param("rates", torch.tensor([15.0, 5.0]), constraint=dist.constraints.positive)
    chance = torch.tensor(0.5)
    for t, count in enumerate(counts):
        state = pyro.sample(f"state_{t}", dist.Bernoulli(chance)).long()
        pyro.sample(f"count_{t}", dist.Poisson(rates[state]), obs=count)
        chance = CHANGES[state]


def guide(counts: Tensor, baseline: bool) -> None:
    """Draws the states, each after the one before."""
    logits = pyro.param("logits", torch.zeros(len(counts)))
    follows = pyro.param("follows", torch.tensor([-1.0, 1.0]))
    came, infer = torch.zeros(()), {"baseline": {"use_decaying_avg_baseline": True}} if baseline else {}
    for t in range(len(counts)):
        state = pyro.sample(f"state_{t}", dist.Bernoulli(logits=logits[t] + came), infer=infer)
        came = follows[state.long()]


def gradients(elbo: ELBO, steps: int, baseline: bool) -> tuple[Tensor, float]:
    """Gradients of the guide's logits at fixed parameters, a row each, and the milliseconds of a step."""
    counts, found, start = series(), [], time.process_time()
    for _ in range(steps):
        for _, parameter in pyro.get_param_store().named_parameters():
            parameter.grad = None
        elbo.loss_and_grads(model, guide, counts, baseline)
        found.append(pyro.param("logits").unconstrained().grad.clone())
    return torch.stack(found), 1e3 * (time.process_time() - start) / steps


def learn(looks: int, steps: int) -> dict[str, list[tuple[int, float, float]]]:
    """How the gradient's noise falls while critics and baselines learn, and guide and model stay as they are.

    Args:
        looks: Number of looks.
        steps: Number of steps from one to the next; the gradients of these steps are what is looked at.

    Returns:
        By method the number of steps so far, the total variance of a gradient, and the milliseconds of a step.
    """
    outside, found = pyro.get_param_store().get_state(), {}
    for method, make in METHODS.items():
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        elbo, found[method] = make(), []
        for look in range(looks):
            rows, ms = gradients(elbo, steps, method == "TraceGraph_ELBO")
            found[method].append(((look + 1) * steps, rows.var(0).sum().item(), ms))
    pyro.clear_param_store()
    pyro.get_param_store().set_state(outside)
    return found
