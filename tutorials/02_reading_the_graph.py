# %% [markdown]
# # Reading the graph
#
# **What is won beside Pyro.** `TraceGraph_ELBO` also finds such a graph, but does not show it. Here you can read it,
# and see which costs a site is charged with. A figure below compares the resulting gradients: `TraceGraph_ELBO` is far
# behind, and leave-one-out is as good on such a small program.
#
# pyro_bpq turns a program into a *stochastic computation graph*. It shows which sites and costs depend on which sites,
# and which costs lie downstream of a site. This tutorial shows how to look at it, first for a program, then for graphs
# written by hand.

# %%
import os

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_bpq import BackpropQNetwork, StochasticComputationGraph, TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import compare_estimators, plot_comparison
from pyro_bpq.diagnostics.render import render_network, render_scg

SMOKE = bool(os.environ.get("SMOKE_TEST"))
pyro.set_rng_seed(0)


def model(data: Tensor) -> None:
    style = pyro.sample("style", dist.Categorical(torch.tensor([0.5, 0.3, 0.2])))
    with pyro.plate("rows", len(data)):
        topic = pyro.sample("topic", dist.Bernoulli(torch.tensor([0.2, 0.5, 0.8])[style]))
        pyro.sample("x", dist.Normal(2.0 * topic + 0.5 * style, 1.0), obs=data)


def guide(data: Tensor) -> None:
    style = pyro.sample("style", dist.Categorical(logits=pyro.param("style_logits", torch.zeros(3))))
    with pyro.plate("rows", len(data)):
        slope = pyro.param("slope", torch.zeros(3))
        pyro.sample("topic", dist.Bernoulli(logits=slope[style] + data))


elbo = TraceBackpropQ_ELBO(num_particles=1)
elbo.loss_and_grads(model, guide, torch.tensor([0.3, 2.1, 2.6]))
elbo.graph

# %% [markdown]
# Each line is a stochastic node or, in brackets, a cost: `log q` of a guide site, `-log p` of a model site. *Parents*
# are the nodes that it reads directly. `rows:-1` is a plate with its dimension.
#
# The next cell draws the graph: ellipses are stochastic nodes, boxes are costs, frames are plates. It is a picture if
# the program `dot` of Graphviz is installed; otherwise its DOT text appears. `.save("graph.svg")` writes a picture to a
# file, and `.save("graph.dot")` writes the text, which needs no Graphviz.

# %%
render_scg(elbo.graph)

# %% [markdown]
# ## The Backprop-Q network
#
# The network has one line for each Q-function. It shows what the Q-function conditions on (*scope*), which costs are
# used as they are (*immediate*), the rule that gives its target, and what its critic really reads.

# %%
elbo.network

# %% [markdown]
# All costs of `topic` read only what is known when it is drawn: they are immediate, and nothing is left to learn there.
# (With one particle such costs are summed exactly over the values of the site.) The critic of `style` must learn the
# later costs of the rows. By default so small a program runs many particles in one call, which need no critics.
#
# ## What it is worth
#
# We compare estimators on the same program at the same parameters. `compare_estimators` measures the variance of the
# gradient and the time of a step. Their product counts: in twice the time the other estimator takes two steps, and the
# mean of these has half the variance.

# %%
rows = torch.tensor([0.3, 2.1, 2.6])
quick = {"num_warmup": 3, "num_samples": 4, "num_rounds": 1} if SMOKE else {"num_warmup": 100, "num_samples": 100}
comparison = compare_estimators(model, guide, rows, progress=False, **quick)
figure, axes = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
plot_comparison(comparison, axes)
plt.show()

# %% [markdown]
# Each row of the plate is charged with its own costs, and `style` with those of all rows. *Default* and *leave-one-out*
# take the mean of several particles in one call, eight and four. That takes little more time than one particle on such
# a small program.
#
# ## Questions to a graph
#
# Graphs are values: they can be written by hand, compared and hashed.

# %%
graph = StochasticComputationGraph.from_parents({"x": [], "y": ["x"], "z": ["x"]}, {"f1": ["y"], "f2": ["y", "z"]})
print("downstream of y:", graph.downstream_costs("y"))
print("ancestors of z: ", sorted(graph.ancestors("z")))

# %% [markdown]
# The *frontier* of a set of variables for some costs is the part from which a path leads to the costs without meeting
# another variable of the set. Given the frontier, the costs do not depend on the rest of the set. The *scope* of a
# Q-function is the frontier of its node and the ancestors of this node.

# %%
print("frontier of {x, y} for f1:", sorted(graph.frontier(["x", "y"], ["f1"])))
print("frontier of {x, y} for f2:", sorted(graph.frontier(["x", "y"], ["f2"])), "- x also reaches f2 through z")
print("scope of Q_y for f2:      ", sorted(graph.scope("y", ["f2"])))

# %% [markdown]
# ## Reductions
#
# `per_cost` learns one Q-function per node and cost, as at the beginning of the paper. `merged` sums Q-functions whose
# networks agree upstream. `chain`, the default, keeps for each cost the child that comes first in program order. Here
# they are with all costs learned, the paper's form:

# %%
for reduction in ("per_cost", "merged", "chain"):
    print(reduction)
    print(BackpropQNetwork.build(graph, reduction, immediate="learned"), "\n")

# %%
render_network(BackpropQNetwork.build(graph, "merged", immediate="learned"))

# %% [markdown]
# In the picture a rounded box is a Q-function with its scope. Arrows come from the parts of its target. Dashed arrows
# are averaged. Colours show the costs. Next: `03_critics_and_targets`.
#
# ## Something to try
#
# - Write `z.item()` into the model and print the graph again. What depends on what now?
# - Remove the edge from `x` to `z` in the second graph. Which scope gets smaller?
