# %% [markdown]
# # Layers: a sigmoid belief network with one Q per node
#
# **What is won beside Pyro.** There is one learned Q-function for each unit, instead of one for each unit and cost. The
# gradient has far less noise than that of `TraceGraph_ELBO`. The strongest competitor on layers with rows of data is
# leave-one-out.
#
# An appendix of the Backprop-Q paper treats fully connected stochastic layers with a cost on every node. Each node
# would need a Q-function for every cost above it. After merging there is only one. Here is this network as a Pyro
# program: the guide of a sigmoid belief network, with one site per unit.

# %%
import os

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

from pyro_bpq import AllAction, BackpropQNetwork, LeaveOneOut, MLPCritic, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import compare_estimators, plot_comparison

SMOKE = bool(os.environ.get("SMOKE_TEST"))
LAYERS, UNITS, BATCH, STEPS = 3, 3, 50, (3 if SMOKE else 200)
images = (torch.tensor(load_digits().data, dtype=torch.float32) > 7.0).float()[:1000]

# %% [markdown]
# ## The program
#
# The guide goes up from the image, layer by layer; every unit reads the whole layer below. The model goes down. Unit
# `i` of layer `l` has two costs: its `log q`, and its `-log p` given the layer above.


# %%
class Belief(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        below = [64] + [UNITS] * (LAYERS - 1)
        self.up = nn.ModuleList(nn.Linear(size, UNITS) for size in below)
        self.down = nn.ModuleList(nn.Linear(UNITS, size) for size in below)
        self.prior = nn.Parameter(torch.zeros(UNITS))

    def units(self, layer: int, logits: Tensor, context: Tensor | None = None) -> Tensor:
        infer = {} if context is None else {"bpq": {"context": context}}
        drawn = [pyro.sample(f"h{layer}_{i}", dist.Bernoulli(logits=logits[..., i]), infer=infer) for i in range(UNITS)]
        return 2.0 * torch.stack(drawn, -1) - 1.0

    def guide(self, x: Tensor) -> None:
        pyro.module("belief", self)
        with pyro.plate("images", len(x)):
            state = 2.0 * x - 1.0
            seen = self.up[0](state).detach()
            for layer, up in enumerate(self.up):
                state = self.units(layer, up(state), seen)

    def model(self, x: Tensor) -> None:
        pyro.module("belief", self)
        with pyro.plate("images", len(x)):
            logits = self.prior.expand(len(x), UNITS)
            for layer in reversed(range(LAYERS)):
                logits = self.down[layer](self.units(layer, logits))
            pyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=x)


# %% [markdown]
# ## One Q per node
#
# A run gives the graph. How many Q-functions does a unit of each layer have? `"per_cost"` with every Q learned is the
# network before merging. `"merged"` sums Q-functions that have the same edges at all ancestors. `"chain"` first keeps
# one edge per unit and cost, and then merges; this leaves the fewest. The last line is the default: costs that read
# only what is known when a unit is drawn are evaluated.

# %%
pyro.set_rng_seed(0)
belief = Belief()
look = TraceBackpropQ_ELBO(estimator=AllAction(), num_particles=1)
look.loss_and_grads(belief.model, belief.guide, images[:BATCH])
networks = {
    "per_cost, all learned": BackpropQNetwork.build(look.graph, "per_cost", immediate="learned"),
    "merged, all learned": BackpropQNetwork.build(look.graph, "merged", immediate="learned"),
    "chain, all learned": BackpropQNetwork.build(look.graph, "chain", immediate="learned"),
    "chain, exact immediate costs": BackpropQNetwork.build(look.graph, "chain"),
}
for name, network in networks.items():
    numbers = [sum(node.is_learned for node in network.q_nodes(f"h{layer}_0")) for layer in range(LAYERS)]
    print(f"{name:30s} Q-functions of a unit, from the first layer to the last: {numbers}")

# %% [markdown]
# The output shows the Q-functions that are left, with their scopes. A unit of layer `l` reads itself and the layer
# below, as in the paper's $Q_{X_l}(x_{l-1}, y_{l-1}, x_l)$. A unit of the last layer still has a learned Q-function
# here: the costs `-log p` of the layer below read all units of the last layer, and those drawn later are not known yet.
# In the paper's example each cost reads only one node.

# %%
for node in networks["chain, exact immediate costs"].learned:
    print(f"Q_{node.name} reads {', '.join(node.scope)}")

# %% [markdown]
# ## Is it worth it?
#
# We measure the variance of the gradient and the time of a step, at the weights after a short training, on one batch.
# Critics see the image by `context`. By itself the default would choose leave-one-out here, with several particles:
# these rows are data, and another particle of the same row predicts its cost better than a critic.

# %%
options = {
    "merged Q": {"estimator": AllAction(), "critic": MLPCritic()},
    "leave-one-out": {"estimator": ScoreFunction(LeaveOneOut())},
}


def make(name: str) -> TraceBackpropQ_ELBO:
    return TraceBackpropQ_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1, **options[name])


def batch(generator: torch.Generator) -> Tensor:
    return images[torch.randint(len(images), (BATCH,), generator=generator)]


draws = torch.Generator().manual_seed(0)
svi = SVI(belief.model, belief.guide, Adam({"lr": 3e-3}), loss=make("leave-one-out"))
for _ in tqdm(range(STEPS)):
    svi.step(batch(draws))
comparison = compare_estimators(
    belief.model,
    belief.guide,
    batch(draws),
    estimators={name: make(name) for name in options} | {"TraceGraph_ELBO": TraceGraph_ELBO()},
    num_samples=5 if SMOKE else 100,
    num_warmup=5 if SMOKE else 200,
    num_rounds=3 if SMOKE else 20,
    progress=False,
)
figure, axes = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
plot_comparison(comparison, axes)
plt.show()

# %% [markdown]
# ## Train with the merged Q

# %%
for name in options:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    belief, draws, losses = Belief(), torch.Generator().manual_seed(1), []
    svi = SVI(belief.model, belief.guide, Adam({"lr": 3e-3}), loss=make(name))
    for _ in tqdm(range(2 * STEPS), desc=name):
        losses.append(svi.step(batch(draws)) / BATCH)
    last = losses[-len(losses) // 4 :]
    print(f"{name:14s} {2 * STEPS} steps, mean loss of the last quarter {sum(last) / len(last):.2f} nats per image")

# %% [markdown]
# This is one seed, with three units per layer so that the network can be read. The merged Q reduces the noise, but its
# steps take longer. With models as cheap as this one, leave-one-out takes more steps in the same time. For layers of
# real size make each layer one site, `Bernoulli(...).to_event(1)`: `benchmarks/sbn.py` compares a dozen estimators on
# two to sixteen layers of 200 units. `docs/paper` says where each part of the paper is in the code.
#
# ## Something to try
#
# - Use ten units per layer. How does the time of a step change, with the merged Q and without?
# - Give the merged Q four particles. From which number of particles on is leave-one-out better?
# - Remove the `context` of the sites. How much of the merged Q's gain came from the image?
