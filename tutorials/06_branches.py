# %% [markdown]
# # Programs with branches
#
# **What is won beside Pyro.** The gradient is unbiased. `TraceGraph_ELBO` is biased on these programs. `Trace_ELBO`
# is unbiased but noisy. Leave-one-out is unbiased too, but runs the program once for each particle.
#
# `if z:`, `while`, `table[int(k)]`: Python looks at a sampled value and decides what happens next. No tensor carries
# this dependence, so a tracker of tensors misses it, and `TraceGraph_ELBO` then leaves costs out. Its gradient is
# biased, without a warning. How much? The programs below are small enough for exact answers.

# %%
import os

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO, TraceGraph_ELBO

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import compare_estimators, plot_comparison
from pyro_bpq.testing import exact_gradient, expected_gradient

torch.set_default_dtype(torch.float64)
SMOKE = bool(os.environ.get("SMOKE_TEST"))

# %% [markdown]
# ## A loop of random length, a branch, a table


# %%
def coin(name: str, logits: torch.Tensor) -> torch.Tensor:
    return pyro.sample(name, dist.Bernoulli(logits=logits))


def loop_model() -> None:
    prior, length, go = pyro.param("prior", torch.tensor([0.4, -0.3, 0.2])), 0, True
    while go and length < 3:
        go = bool(coin(f"go_{length}", prior[length]))
        length += 1
    pyro.sample("x", dist.Normal(1.5 * length, 0.8), obs=torch.tensor(1.3))


def loop_guide() -> None:
    q, length, go = pyro.param("q", torch.tensor([0.6, 0.1, -0.5])), 0, True
    while go and length < 3:
        go = bool(coin(f"go_{length}", q[length]))
        length += 1


def branch_model() -> None:
    if coin("rain", torch.tensor(-1.0)).item():
        coin("umbrella", torch.tensor(1.0))
        pyro.sample("wet", dist.Normal(1.0, 0.5), obs=torch.tensor(0.2))
    else:
        pyro.sample("wet", dist.Normal(0.0, 0.5), obs=torch.tensor(0.2))


def branch_guide() -> None:
    if coin("rain", pyro.param("q", torch.tensor([0.3]))[0]).item():
        coin("umbrella", torch.tensor(0.2))


def table_model() -> None:
    means = [0.0, 1.0, 3.0]
    k = pyro.sample("k", dist.Categorical(torch.ones(3) / 3))
    pyro.sample("x", dist.Normal(means[int(k)], 0.8), obs=torch.tensor(0.9))


def table_guide() -> None:
    pyro.sample("k", dist.Categorical(logits=pyro.param("q", torch.tensor([0.2, -0.4, 0.1]))))


# %% [markdown]
# ## Exact and expected gradients
#
# `exact_gradient` differentiates the expected loss, which it computes by enumeration. `expected_gradient` runs an
# ELBO's own step for every outcome and averages the gradients by probability. So it is the mean of the gradient
# estimate, without sampling. The output shows the gradient of `q`.

# %%
programs = {
    "loop": (loop_model, loop_guide),
    "branch": (branch_model, branch_guide),
    "table": (table_model, table_guide),
}


def shown(gradient: torch.Tensor) -> str:
    return "  ".join(f"{v:+.3f}" for v in gradient.tolist())


for name, (model, guide) in programs.items():
    pyro.clear_param_store()
    print(f"{name:8s} exact               {shown(exact_gradient(model, guide)['q'])}")
    ours = TraceBackpropQ_ELBO()
    for _ in range(3 if SMOKE else 50):
        ours.loss_and_grads(model, guide)
    for elbo in (TraceGraph_ELBO(), Trace_ELBO(), ours.eval()):
        print(f"{'':8s} {type(elbo).__name__:19s} {shown(expected_gradient(elbo, model, guide)['q'])}")

# %% [markdown]
# `TraceGraph_ELBO` misses the costs that the branch leads to. `Trace_ELBO` multiplies every score by the whole loss,
# so it cannot miss any; it is unbiased here, but with more variance. pyro_bpq notices when a value leaves torch
# (`.item()`, `bool()`, `int()`, `.numpy()`), and counts everything after that as dependent on the value.
#
# ## What it costs
#
# Once a step has shown that a value leaves torch, the default goes on in *program order*: nothing is tracked, and each
# score is multiplied by the loss of its run less a baseline. With `structure="dynamic"` every step is tracked, and
# `elbo.graph` differs from run to run. A correction of a site's gradient must not depend on the site's own value, but
# the program after the site depends on it. So there is no extra run of the model for exact costs. Critics form a
# sequence in program order, and each sees only the history.

# %%
pyro.clear_param_store()
elbo = TraceBackpropQ_ELBO(structure="dynamic")
for seed in range(3):
    pyro.set_rng_seed(seed)
    elbo.loss_and_grads(loop_model, loop_guide)
    print([node.name for node in elbo.graph.nodes])
elbo.network

# %% [markdown]
# ## Right, and how noisy?
#
# We compare estimators on the loop, with Pyro's ELBOs and leave-one-out. `TraceGraph_ELBO` has little variance because
# it leaves costs out, and the comparison says that it is biased. So compare only the unbiased estimators with each
# other.

# %%
pyro.clear_param_store()
quick = {"num_warmup": 3, "num_samples": 4, "num_rounds": 1} if SMOKE else {"num_warmup": 100, "num_samples": 100}
comparison = compare_estimators(loop_model, loop_guide, progress=False, **quick)
figure, axes = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
plot_comparison(comparison, axes)
plt.show()

# %% [markdown]
# If the steps of a loop are alike, let them share a critic, which then also sees the number in the site's name:
# `pyro.sample(f"go_{t}", ..., infer={"bpq": {"share": "go"}})`.
#
# If you can write a branch with tensors (`torch.where`, indexing by a tensor), do so: it is faster, and all
# corrections apply. Next: `07_black_box_costs` or `08_attend_infer_repeat`.
#
# ## Something to try
#
# - Let the loop go on with probability 0.9. How does the bias of `TraceGraph_ELBO` change?
# - Write the branch with `torch.where`. Compare `print(elbo.plan)` before and after.
