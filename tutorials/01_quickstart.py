# %% [markdown]
# # Quickstart: the one-line change
#
# A time series jumps between two levels, and a hidden binary state says on which it is. States are discrete, so the
# reparameterisation trick does not apply.

# %%
import os
import time

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO

SMOKE = bool(os.environ.get("SMOKE_TEST"))
T, STEPS = 12, 5 if SMOKE else 800
pyro.set_rng_seed(0)
states = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0])
data = 2.0 * states + 0.9 * torch.randn(T)


def model(data: Tensor) -> None:
    level = pyro.param("level", torch.tensor([0.5, 1.0]))
    z = torch.tensor(0.5)
    for t in range(T):
        z = pyro.sample(f"z_{t}", dist.Bernoulli(0.1 + 0.8 * z))
        pyro.sample(f"x_{t}", dist.Normal(level[0] + level[1] * z, 0.9), obs=data[t])


def guide(data: Tensor) -> None:
    logits = pyro.param("logits", torch.zeros(T, 2))
    z = torch.tensor(0.0)
    for t in range(T):
        z = pyro.sample(f"z_{t}", dist.Bernoulli(logits=logits[t, 0] + logits[t, 1] * z))


# %% [markdown]
# ## Train, twice
#
# The guide lets each state depend on the one before. The only difference between the two runs is the `loss` argument.


# %%
def train(elbo) -> list[float]:
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    svi = SVI(model, guide, Adam({"lr": 0.05}), loss=elbo)
    return [svi.step(data) for _ in range(STEPS)]


losses = {}
for elbo in (TraceGraph_ELBO(), TraceBackpropQ_ELBO()):
    start = time.process_time()
    name = type(elbo).__name__
    losses[name] = train(elbo)
    tail = losses[name][-100:]
    seconds = time.process_time() - start
    print(f"{name:20s} loss of the last steps {sum(tail) / len(tail):6.2f}   {seconds:.1f} s of processor time")

# %%
figure, axes = plt.subplots(figsize=(5, 3))
for name, values in losses.items():
    smooth = torch.tensor(values).unfold(0, min(20, STEPS), 1).mean(-1)
    axes.plot(smooth, label=name)
axes.set(xlabel="step", ylabel="loss (nats), mean of 20 steps")
axes.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# The loss is one sample of minus the ELBO. A better posterior shows in a lower curve; what we trained for is the state
# path.

# %%
with torch.no_grad():
    probability = torch.zeros(T)
    p = torch.zeros(())
    logits = pyro.param("logits")
    for t in range(T):
        p = (1 - p) * torch.sigmoid(logits[t, 0]) + p * torch.sigmoid(logits[t, 0] + logits[t, 1])
        probability[t] = p
print("true states     ", states.tolist())
print("q(z_t = 1)      ", [round(v, 2) for v in probability.tolist()])

# %% [markdown]
# ## What happened
#
# `elbo.graph` is what was traced, `elbo.info` what each site's estimator and critic did in the last step. `scales`
# says how far each of four corrections is trusted, 0 being not at all: exact immediate costs, the critic's mean, its
# differences between values, and the luck of later sites. They are learned from earlier steps.

# %%
elbo.graph

# %%
for name in ("z_0", "z_5", "z_11"):
    info = elbo.info[name]
    scales = [round(s, 2) for s in info["scales"].tolist()]
    print(f"{name:5s} scales {scales}", "" if "td_loss" in info else "(no critic: all its costs are immediate)")

# %% [markdown]
# ## Options you may need first
#
# - `TraceBackpropQ_ELBO(num_particles=5, vectorize_particles=True)`: several particles at once, as in Pyro.
# - `infer={"bpq": {"estimator": ..., "critic": ...}}` at a site, `config_bpq(guide, ...)` for all sites of a guide.
# - `elbo(model, guide)` is a `torch.nn.Module` for plain torch optimisers. Call it once before you make the optimiser.
#
# Next: `02_reading_the_graph`.
