# %% [markdown]
# # Critics, targets and lambda on a chain
#
# **What is won beside Pyro.** The table below has the exact variance on the same chain for the score function
# (`TraceGraph_ELBO` without baselines), a running baseline (`TraceGraph_ELBO` with one), leave-one-out, and critics.
#
# How good is a gradient estimate? For a small program this has an exact answer without sampling: run the step once
# for every joint outcome, and weigh the results by their probabilities. `pyro_bpq.testing` does so, and returns the
# expectation of the gradient *and* its variance. Use float64 for it.

# %%
import os

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch

from pyro_bpq import (
    LeaveOneOut,
    LinearCritic,
    MLPCritic,
    RunningBaseline,
    ScoreFunction,
    TabularCritic,
    TraceBackpropQ_ELBO,
)
from pyro_bpq.diagnostics import compare_estimators, plot_comparison
from pyro_bpq.testing import exact_gradient, expected_moments

torch.set_default_dtype(torch.float64)
SMOKE = bool(os.environ.get("SMOKE_TEST"))
T = 3 if SMOKE else 5
STEPS = 5 if SMOKE else 300
noise = torch.Generator().manual_seed(3)
start = {"prior": torch.randn(T, 2, generator=noise), "q": torch.randn(T, 2, generator=noise)}


def model() -> None:
    prior = pyro.param("prior", start["prior"].clone())
    ones = z = torch.zeros(())
    for t in range(T):
        z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=prior[t, 0] + prior[t, 1] * z))
        ones = ones + z
    pyro.sample("x", dist.Normal(ones, 0.7), obs=torch.tensor(2.0))


def guide() -> None:
    q, z = pyro.param("q", start["q"].clone()), torch.zeros(())
    for t in range(T):
        z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=q[t, 0] + q[t, 1] * z))


# %% [markdown]
# Prior and guide are chains of binary states. The observation counts how many states are 1. So the last cost reads
# *all* states, and the effect of a state on it is known only at the end.


# %%
def bias_and_variance(elbo: TraceBackpropQ_ELBO, steps: int) -> tuple[float, float]:
    """Trains critics and baselines at fixed parameters, then computes largest bias and total variance."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    for _ in range(steps):
        elbo.loss_and_grads(model, guide)
    elbo.eval()
    moments = expected_moments(elbo, model, guide)
    exact = exact_gradient(model, guide)
    return max(float((moments.mean[n] - exact[n]).abs().max()) for n in exact), float(moments.variance["q"].sum())


def show(name: str, elbo: TraceBackpropQ_ELBO, steps: int = STEPS) -> None:
    bias, variance = bias_and_variance(elbo, steps)
    print(f"{name:34s} bias {bias:7.1e}   variance {variance:9.4f}")


show("score function", TraceBackpropQ_ELBO(estimator=ScoreFunction()))
show("score function, running baseline", TraceBackpropQ_ELBO(estimator=ScoreFunction(RunningBaseline())))
show("untrained critics", TraceBackpropQ_ELBO(num_particles=1), steps=0)
show("critics", TraceBackpropQ_ELBO(num_particles=1))

# %% [markdown]
# (`num_particles=1` asks for one particle, which critics serve. By default this short chain runs many particles in one
# call, and needs none.)
#
# The bias is rounding error in every row, with an untrained critic and with a trained one: a critic changes only the
# variance. (That is what *unbiased* means in this project, and how each estimator is tested.)
#
# ## Which critic
#
# The default critic is a small net per site. A table can represent the exact Q-function if the scope is finite and
# small, as here. A linear critic has fewer weights to learn, but can represent less. With `None` only the exact
# immediate costs and the baseline remain.

# %%
for critic in (MLPCritic(), TabularCritic(), LinearCritic(), None):
    show(str(critic), TraceBackpropQ_ELBO(num_particles=1, critic=critic))

# %% [markdown]
# ## Which target
#
# With `lam=0` the target of each critic is the next critic (TD). It has little noise, but what a critic learns reaches
# earlier critics only one step at a time. With `lam=1` the target is the observed cost after each site, less the
# corrections from later sites. The default, 0.97, is in between.

# %%
lams = (0.9,) if SMOKE else (0.0, 0.5, 0.9, 1.0)
learning = (5,) if SMOKE else (30, 100, 300)
figure, axes = plt.subplots(figsize=(5, 3.2))
for lam in lams:
    curve = [bias_and_variance(TraceBackpropQ_ELBO(num_particles=1, lam=lam), steps)[1] for steps in learning]
    axes.plot(learning, curve, marker="o", ms=3, label=f"lam={lam}")
    print(f"lam={lam}: " + ", ".join(f"{v:.3f}" for v in curve))
axes.set(xscale="log", yscale="log", xlabel="steps of training the critics", ylabel="exact variance of a gradient")
axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
axes.set_xticks(learning, [str(steps) for steps in learning])
axes.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# One chain and one seed say little about which value is best; `docs/results` has the tables. The adaptive scales of
# `AllAction` limit the harm: a critic that predicts nothing is not subtracted.
#
# ## Several particles
#
# From two particles on the other particles serve as a baseline. The variance below is that of the mean of the two.

# %%
two = {"num_particles": 2}
if not SMOKE:
    T = 4
    show("leave-one-out, 2 particles", TraceBackpropQ_ELBO(estimator=ScoreFunction(LeaveOneOut()), **two))
    show("critics, 2 particles", TraceBackpropQ_ELBO(**two))

# %% [markdown]
# (Here $T=4$: two particles have $16^2$ joint outcomes, and each of them takes one run of the step.)
#
# ## Beside Pyro, with time
#
# The time of a step matters as well. `compare_estimators` measures variance and time, also of Pyro's own ELBOs. Its
# moments are exact if there are few outcomes, as here.

# %%
T = 2 if SMOKE else 5
quick = {"num_warmup": 3, "num_samples": 4, "num_rounds": 1} if SMOKE else {"num_warmup": 200, "num_samples": 100}
pyro.clear_param_store()
comparison = compare_estimators(model, guide, progress=False, **quick)
plot_comparison(comparison)

# %% [markdown]
# The mean of many particles in one call, as the default takes it, is best on this chain: the chain is short, and
# particles of such a small program take hardly any time. `TraceGraph_ELBO` is far behind. Next:
# `04_discrete_vae`.
#
# ## Something to try
#
# - Make the chain longer (`T`), as far as you can wait: the number of outcomes doubles with each site.
# - Try `lam=1.0` and `lam=0.5` with the best critic. Which learns faster from 100 steps?
