# %% [markdown]
# # An hour with a model of your own
#
# This tutorial leads from a first run to a diagnosis and to a better bound. **What is won beside Pyro:** the ELBO is
# the same and only one line changes, but the gradient has less noise, tools say what is wrong with *this* program, and
# in the end a step is compiled. The way is the same for every model. Here it is a hidden Markov model that reads real
# handwritten digits row by row, with two planted mistakes.
#
# The data are scikit-learn's digits, 8 rows of 8 pixels. Each row is explained by one of six hidden states.

# %%
import os
import time

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, config_enumerate
from pyro.optim import Adam
from sklearn.datasets import load_digits
from torch import Tensor

from pyro_bpq import LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO, compile_report
from pyro_bpq.diagnostics import compare_estimators, diagnose

SMOKE = bool(os.environ.get("SMOKE_TEST"))
SECONDS, STATES, ROWS = (0.3 if SMOKE else 8.0), 6, 8
images = (torch.tensor(load_digits().images[:200], dtype=torch.float32) > 7.5).float()


def model(x: Tensor) -> None:
    start = pyro.param("start", torch.zeros(STATES))
    moves = pyro.param("moves", lambda: torch.randn(STATES, STATES))
    pixels = pyro.param("pixels", lambda: torch.randn(STATES, 8))
    with pyro.plate("digits", len(x)):
        logits = start
        for t in range(ROWS):
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=logits))
            pyro.sample(f"x_{t}", dist.Bernoulli(logits=pixels[z]).to_event(1), obs=x[:, t])
            logits = moves[z]


# %% [markdown]
# ## Minutes 0 to 10: a first guide, a first run
#
# The guide chooses the state of a row from its pixels. It looks right. Is it?


# %%
def first_guide(x: Tensor) -> None:
    reads = pyro.param("reads", lambda: 0.1 * torch.randn(ROWS, 8, STATES))
    with pyro.plate("digits", len(x)):
        for t in range(ROWS):
            pyro.sample(f"z_{t}", dist.Categorical(logits=(x[:, t] @ reads[t]).detach()))


def steps(guide, elbo, number: int) -> None:
    svi = SVI(model, guide, Adam({"lr": 0.03}), loss=elbo)
    for _ in range(number):
        svi.step(images)


pyro.clear_param_store()
pyro.set_rng_seed(0)
elbo = TraceBackpropQ_ELBO()
steps(first_guide, elbo, 3 if SMOKE else 30)
print(elbo)

# %% [markdown]
# `print(elbo)` says what runs, how many particles and why, and which estimators and critics were chosen.
# `print(elbo.plan)` has the details of each site.

# %%
print(elbo.plan)

# %% [markdown]
# ## Minutes 10 to 20: diagnosis

# %%
found = diagnose(elbo, model, first_guide, images, num_samples=5 if SMOKE else 20)
print(found)

# %% [markdown]
# The first finding is the important one: the guide's parameters get no gradient, because of `.detach()`. This was the
# first planted mistake. We remove it:


# %%
def independent(x: Tensor) -> None:
    reads = pyro.param("reads", lambda: 0.1 * torch.randn(ROWS, 8, STATES))
    with pyro.plate("digits", len(x)):
        for t in range(ROWS):
            pyro.sample(f"z_{t}", dist.Categorical(logits=x[:, t] @ reads[t]))


# %% [markdown]
# ## Minutes 20 to 35: is it the guide, or the model?
#
# Given the picture, the states of two rows are not independent. A guide that reads the previous state, and sees the
# next row, can follow the true posterior. Does this limit the bound? The gap between $\log p(x)$ and the bound shows
# it: a wide gap means that the guide is poor, and a narrow one that the model is. There are few states, so $\log p(x)$
# is known exactly: enumeration sums all states out, and needs no guide.


# %%
def chained(x: Tensor) -> None:
    reads = pyro.param("reads", lambda: 0.1 * torch.randn(ROWS, 16, STATES))
    follows = pyro.param("follows", torch.zeros(STATES, STATES))
    with pyro.plate("digits", len(x)):
        came = torch.zeros(STATES)
        for t in range(ROWS):
            seen = torch.cat([x[:, t], x[:, min(t + 1, ROWS - 1)]], -1)
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=seen @ reads[t] + came))
            came = follows[z]


def bound(guide, particles: int = 10) -> float:
    """Nats per image."""
    with torch.no_grad():
        return -Trace_ELBO(num_particles=particles).loss(model, guide, images) / len(images)


def exact() -> float:
    """The log-likelihood, nats per image."""
    with torch.no_grad():
        enumerated = TraceEnum_ELBO(max_plate_nesting=1)
        return -enumerated.loss(config_enumerate(model), lambda x: None, images) / len(images)


def fit(name: str, guide, elbo) -> tuple[list[float], list[float]]:
    """The bound over seconds of processor time."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    svi = SVI(model, guide, Adam({"lr": 0.03}), loss=elbo)
    at, curve, spent, number = [], [], 0.0, 0
    while spent < SECONDS:
        start = time.process_time()
        for _ in range(5):
            svi.step(images)
        spent, number = spent + time.process_time() - start, number + 5
        at.append(spent)
        curve.append(bound(guide))
    last, best = bound(guide, 50), exact()
    print(
        f"{name:28s} {number:4d} steps, bound {last:7.2f}, log p(x) {best:7.2f}, gap {best - last:5.2f} nats per image"
    )
    return at, curve


for name, guide in (("independent", independent), ("chained", chained)):
    fit(name, guide, TraceBackpropQ_ELBO())

# %% [markdown]
# Both gaps are narrow compared with what is left to win: six states are too few for the rows of ten digits. So the
# model must grow, and the chained guide with it.

# %%
STATES = 16
curves = {"default": fit("chained, 16 states", chained, TraceBackpropQ_ELBO())}

# %% [markdown]
# ## Minutes 35 to 50: is the default right for this program?
#
# `compare_estimators` measures variance, bias and time at the present parameters, beside Pyro's own ELBOs. The first
# row is the one with the least variance times time.

# %%
quick = (
    {"num_warmup": 3, "num_samples": 4, "num_rounds": 1}
    if SMOKE
    else {"num_warmup": 60, "num_samples": 40, "num_rounds": 5}
)
comparison = compare_estimators(model, chained, images, progress=False, **quick)
print("\n".join(str(comparison).split("\n\n")[0].splitlines()))
print(comparison.reason)

# %% [markdown]
# In the end the bound after equal time counts.

# %%
rivals = {
    "TraceGraph_ELBO": TraceGraph_ELBO(),
    "leave-one-out, 4 particles": TraceBackpropQ_ELBO(
        4, vectorize_particles=True, max_plate_nesting=1, estimator=ScoreFunction(LeaveOneOut())
    ),
}
curves |= {name: fit(name, chained, elbo) for name, elbo in rivals.items()}
figure, axes = plt.subplots(figsize=(5.5, 3.4))
for name, (at, curve) in curves.items():
    axes.plot(at, curve, label=name)
axes.set(xlabel="seconds of processor time", ylabel="ELBO (nats per image)", ylim=(-35.0, -15.0))
axes.legend(fontsize=7)
figure.tight_layout()
plt.show()

# %% [markdown]
# One seed and a few seconds show the way, and are no benchmark. `TraceGraph_ELBO` is far behind. The default took ten
# steps of leave-one-out with several particles, and then summed over all states: no cost of an observation reads two of
# them. Since then its gradient has no noise. With four particles a step is cheaper and noisier. In the first seconds
# the number of steps counts more than noise. If you have no more time than that, write `TraceBackpropQ_ELBO(4,
# vectorize_particles=True)`.
#
# ## Minutes 50 to 55: the same step, compiled
#
# In a program as small as this one, nearly all of a step is Python: handlers, traces, and distributions that are built
# in each step. With `compile=True` the library records a whole step, learning included, as soon as nothing more changes
# in the way the program runs, and compiles it. The rest stays the same. `compile_report` says what was recorded, and
# what runs eagerly and why.


# %%
def milliseconds(elbo, warm: int, number: int) -> float:
    """Of a step, once it is settled."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    svi = SVI(model, chained, Adam({"lr": 0.03}), loss=elbo)
    for _ in range(warm):
        svi.step(images)
    start = time.perf_counter()
    for _ in range(number):
        svi.step(images)
    print(f"{bound(chained):7.2f} nats per image after {warm + number} steps")
    return 1e3 * (time.perf_counter() - start) / number


several = {"vectorize_particles": True, "max_plate_nesting": 1}
compiled = TraceBackpropQ_ELBO(4, **several, compile="eager" if SMOKE else True)
eager = TraceBackpropQ_ELBO(4, **several)
number = 3 if SMOKE else 100
for name, elbo in (("eager", eager), ("compiled", compiled)):
    print(f"{name}: {milliseconds(elbo, 40, number):.1f} ms per step")
print(compile_report(compiled))

# %% [markdown]
# The bounds agree: a compiled step computes the same as an eager step, but draws other values. Compiling took
# sixteen seconds, the time of a thousand eager steps. For shorter runs `compile="eager"` runs the recorded operators
# as they are.
#
# ## Minutes 55 to 60: something to try
#
# - Use more states, or let the guide see all rows. Which helps more?
# - Write `z.item()` somewhere in the model, for one image, and print the ELBO again. What was given up?
# - Sum the states out: mark the guide's sites, `infer={"enumerate": "parallel"}`, and write
#   `TraceBackpropQ_ELBO(enumeration="exact")`. Is the bound better, and the step slower?
