# %% [markdown]
# # Reading the graph
#
# **What is won beside Pyro.** `TraceGraph_ELBO` finds such a graph, too, and keeps it to itself. Here you can read
# it, and see which costs a site is charged with. What it is worth stands in a figure, beside `TraceGraph_ELBO`, which
# is far behind, and leave-one-out, which on so small a program is as good.
#
# pyro_bpq turns a program into a *stochastic computation graph*: who depends on whom, and which costs lie downstream of
# which site. This page shows how to look at it, first for a program, then for graphs written by hand.

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


elbo = TraceBackpropQ_ELBO()
elbo.loss_and_grads(model, guide, torch.tensor([0.3, 2.1, 2.6]))
elbo.graph

# %% [markdown]
# Each line is a stochastic node or, in brackets, a cost: `log q` of a guide site, `-log p` of a model site. *Parents*
# are the nodes that it reads directly, `rows:-1` is a plate with its dimension.
#
# As a picture: ellipses are stochastic nodes, boxes are costs, frames are plates. It is laid out where Graphviz and
# its Python package are installed (`pip install pyro-bpq[viz]`); otherwise its DOT text appears. `.save("graph.svg")`
# writes a file, `.save("graph.dot")` needs nothing.

# %%
render_scg(elbo.graph)

# %% [markdown]
# ## The Backprop-Q network
#
# For each stochastic node, what its Q-function conditions on (*scope*), which costs are used as they are (*immediate*),
# the rule that gives its target, and what its critic really reads.

# %%
elbo.network

# %% [markdown]
# All costs of `topic` read only what is known when it is drawn: they are immediate, and nothing is left to learn there.
# (By default such costs are summed over the values of the site exactly.) `style` has to learn what the rows will cost
# later.
#
# ## What it is worth
#
# The same program with other estimators, at the same parameters. `compare_estimators` measures the variance of a
# gradient and the time of a step. Variance times time is what counts: twice the time is two steps of the other, whose
# mean has half the variance.

# %%
rows = torch.tensor([0.3, 2.1, 2.6])
quick = {"num_warmup": 3, "num_samples": 4, "num_rounds": 1} if SMOKE else {"num_warmup": 100, "num_samples": 100}
comparison = compare_estimators(model, guide, rows, progress=False, verbose=False, **quick)
figure, axes = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
plot_comparison(comparison, axes)
plt.show()

# %% [markdown]
# The rows of the plate have costs of their own, and `style` those of all rows. *Default* sums the immediate costs over
# all values of a site, so little is left to chance, with one particle. *Leave-one-out* takes the mean of four particles
# in one call, which costs little where a program is so small.
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
# another variable of the set. Knowing the frontier, the rest of the set tells nothing more. The *scope* of a
# Q-function is the frontier of its node and the ancestors.

# %%
print("frontier of {x, y} for f1:", sorted(graph.frontier(["x", "y"], ["f1"])))
print("frontier of {x, y} for f2:", sorted(graph.frontier(["x", "y"], ["f2"])), "- x also reaches f2 through z")
print("scope of Q_y for f2:      ", sorted(graph.scope("y", ["f2"])))

# %% [markdown]
# ## Reductions
#
# `per_cost` learns one Q-function per node and cost, as the paper starts. `merged` sums those whose networks agree
# upstream. `chain`, the default, keeps for each cost the child that comes first in program order. Here they are with
# all costs learned, the paper's form:

# %%
for reduction in ("per_cost", "merged", "chain"):
    print(reduction)
    print(BackpropQNetwork.build(graph, reduction, immediate="learned"), "\n")

# %%
render_network(BackpropQNetwork.build(graph, "merged", immediate="learned"))

# %% [markdown]
# Right: a rounded box is a Q-function with its scope, arrows carry what its target is made of, dashed arrows are
# averaged over, colours tell the costs apart. Next: `03_critics_and_targets`.
#
# ## Something to try
#
# - Write `z.item()` into the model and print the graph again. What depends on what now?
# - Take the edge from `x` to `z` out of the second graph. Which scope gets smaller?
