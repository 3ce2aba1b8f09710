# %% [markdown]
# # Backprop-Q from scratch
#
# **What is won.** At the end the variance of the gradient is a small part of the variance with a perfect baseline, the
# best that Pyro's `TraceGraph_ELBO` can have. The library does the same for any graph.
#
# This tutorial shows the core of pyro_bpq in plain torch, for the simplest graph: a chain. It uses neither Pyro nor the
# library.
#
# A chain $x_1 \to x_2 \to \ldots \to x_T$ of discrete variables is drawn from $q(x_t \mid x_{t-1})$, with logits
# `theta[t, x_prev]`. Each step costs $c_t(x_{t-1}, x_t)$. We want the gradient of the expected total cost with respect
# to `theta`, from samples.

# %%
import os

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn.functional import one_hot

SMOKE = bool(os.environ.get("SMOKE_TEST"))
T, K = 15, 4
torch.manual_seed(0)
costs = torch.randn(T, K, K)
theta = 0.5 * torch.randn(T, K, K)


def sample(theta: Tensor, rollouts: int) -> Tensor:
    """Draws chains ``(rollouts, T)``; the state before the first step is 0."""
    x, states = torch.zeros(rollouts, dtype=torch.long), []
    for t in range(T):
        x = torch.distributions.Categorical(logits=theta[t, x]).sample()
        states.append(x)
    return torch.stack(states, 1)


# %% [markdown]
# ## The exact answer
#
# On a chain the expected cost-to-go can be computed backwards. It serves as a reference. `future[t, x]` is the expected
# cost of all steps after $t$ given $x_t = x$.


# %%
def exact(theta: Tensor) -> tuple[Tensor, Tensor]:
    """The expected cost, and the expected costs-to-go ``(T, K)``."""
    probs, future = theta.softmax(-1), [torch.zeros(K)]
    for t in reversed(range(T)):
        future.insert(0, (probs[t] * (costs[t] + future[0])).sum(-1))
    return future[0][0], torch.stack(future[1:])


# %% [markdown]
# ## A critic and its update rule
#
# The Q-function $Q_t$ of $x_t$ is the expected sum of the costs that depend on $x_t$, given $x_{t-1}$ and $x_t$. One of
# these costs is *immediate*: $c_t(x_{t-1}, x_t)$ is known exactly and need not be learned. The rest is predicted by the
# critic, a table `critic[t, x]`. The target $G_t$ of the critic is the Q-function of the next step, averaged over the
# values of the next variable (an *expected backup*), plus $\lambda$ times the error of the next critic in this rollout:
#
# $$ G_t = E[Q_{t+1} \mid x_t] + \lambda \, (G_{t+1} - \mathrm{critic}_{t+1}(x_{t+1})) $$


# %%
def look(theta: Tensor, critic: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities and Q at every value ``(N, T, K)``, and the sampled values as one-hot."""
    previous = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    steps = torch.arange(T)
    return theta.softmax(-1)[steps, previous], costs[steps, previous] + critic, one_hot(x, K).float()


def targets(theta: Tensor, critic: Tensor, x: Tensor, lam: float = 0.9) -> Tensor:
    """Targets ``(N, T)`` of the critic at the sampled states."""
    probs, q, _ = look(theta, critic, x)
    expected, goal = (probs * q).sum(-1), torch.zeros_like(x, dtype=torch.float32)
    for t in reversed(range(T - 1)):
        goal[:, t] = expected[:, t + 1] + lam * (goal[:, t + 1] - critic[t + 1, x[:, t + 1]])
    return goal


def learn(critic: Tensor, x: Tensor, goal: Tensor, rate: float = 0.1) -> Tensor:
    """Moves the table towards the targets."""
    picked = one_hot(x, K).float()
    seen = picked.sum(0)
    mean = (picked * goal.unsqueeze(-1)).sum(0) / seen.clamp(min=1.0)
    return torch.where(seen > 0, critic + rate * (mean - critic), critic)


# %% [markdown]
# ## Four gradient estimators
#
# With $C_t$ the cost-to-go of this rollout and $s_t = \nabla \log q(x_t)$:
#
# 1. **score function**: $C_t\, s_t$.
# 2. **baseline**: $(C_t - E[Q_t])\, s_t$. The baseline does not depend on $x_t$.
# 3. **critic**: $(C_t - Q_t(x_t))\, s_t + \sum_k \nabla q(k)\, Q_t(k)$. The second term adds back the expectation of
#    what the first one subtracts, so a wrong critic causes no bias.
# 4. **graph-wise**: as 3, minus $\sum_{u > t} A_u$ in the bracket, where $A_u = Q_u(x_u) - E[Q_u]$ is the effect of the
#    chance of later draws. Given everything before $x_u$ its mean is zero, so it may be subtracted. With an exact
#    critic the bracket is then zero. Only the noise of which states a rollout visits remains.


# %%
def gradients(kind: str, theta: Tensor, critic: Tensor, x: Tensor) -> Tensor:
    """One gradient ``(T, K, K)`` per rollout; the gradient of a softmax is written out."""
    probs, q, picked = look(theta, critic, x)
    cost_to_go = (picked * (q - critic)).sum(-1).flip(1).cumsum(1).flip(1)
    expected = (probs * q).sum(-1)
    luck = (picked * q).sum(-1) - expected
    later = luck.flip(1).cumsum(1).flip(1) - luck
    bracket = {
        "score function": cost_to_go,
        "baseline": cost_to_go - expected,
        "critic": cost_to_go - expected - luck,
        "graph-wise": cost_to_go - expected - luck - later,
    }[kind]
    logits = bracket.unsqueeze(-1) * (picked - probs)
    if kind in ("critic", "graph-wise"):
        logits = logits + probs * (q - expected.unsqueeze(-1))
    previous = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return one_hot(previous, K).float().unsqueeze(-1) * logits.unsqueeze(-2)


KINDS = ("score function", "baseline", "critic", "graph-wise")

# %% [markdown]
# ## Bias and variance while the critic learns
#
# The critic starts at zero and learns from 20 rollouts per step. At a few points we stop and draw many gradients at
# once. The column *z* is the largest deviation of their mean from the exact gradient, in standard errors, over 240
# components. For an unbiased estimator it is about 3.

# %%
leaf = theta.clone().requires_grad_()
(truth,) = torch.autograd.grad(exact(leaf)[0], leaf)
critic, curves = torch.zeros(T, K), {kind: [] for kind in KINDS}
steps = [0, 10, 30, 100] if SMOKE else [0, 3, 10, 30, 100, 300, 1000]
for step in range(steps[-1] + 1):
    x = sample(theta, 20)
    if step in steps:
        many = sample(theta, 5000)
        for kind in KINDS:
            drawn = gradients(kind, theta, critic, many)
            curves[kind].append(drawn.var(0).sum().item())
            if step == steps[-1]:
                z = (drawn.mean(0) - truth) / (drawn.std(0) / len(many) ** 0.5 + 1e-6)
                print(f"{kind:15s} variance {curves[kind][-1]:8.3f}   z {z.abs().max():.1f}")
    critic = learn(critic, x, targets(theta, critic, x))
print(f"squared norm of the exact gradient: {truth.square().sum():.3f}")
print(f"largest error of the critic: {(critic - exact(theta)[1]).abs().max():.3f}")

# %%
figure, axes = plt.subplots(figsize=(5, 3.2))
for kind in KINDS:
    axes.plot([max(s, 1) for s in steps], curves[kind], marker="o", ms=3, label=kind)
axes.set(xscale="log", yscale="log", xlabel="updates of the critic", ylabel="variance of a gradient")
axes.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Does it train?
#
# There is one rollout per step, with plain gradient descent. Critic and parameters learn at the same time. The curves
# show the exact expected cost, averaged over some seeds. The dashed curve follows the exact gradient.

# %%
figure, axes = plt.subplots(figsize=(5, 3.2))
train_steps, seeds = (20, 1) if SMOKE else (500, 6)
for kind in (*KINDS, "exact gradient"):
    curve = torch.zeros(train_steps)
    for seed in range(seeds):
        torch.manual_seed(seed)
        weights, critic = theta.clone(), torch.zeros(T, K)
        for step in range(train_steps):
            leaf = weights.clone().requires_grad_()
            value = exact(leaf)[0]
            curve[step] += value.item() / seeds
            if kind == "exact gradient":
                weights -= 0.05 * torch.autograd.grad(value, leaf)[0]
                continue
            x = sample(weights, 1)
            weights -= 0.05 * gradients(kind, weights, critic, x)[0]
            critic = learn(critic, x, targets(weights, critic, x), rate=0.2)
    axes.plot(curve, "k--" if kind == "exact gradient" else "", label=f"{kind}: {curve[-1]:.1f}")
axes.set(xlabel="step", ylabel="exact expected cost")
axes.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# With low variance, training comes close to training with the exact gradient. It does not promise a lower cost: the
# problem is not convex, and noise can lead to a better optimum as well as to a worse one.
#
# pyro_bpq does more than this tutorial. It finds graph, costs and scopes of a Pyro program by itself. Critics are nets
# if tables would be too large. Scales at each site, learned from earlier steps, turn a bad critic off. It handles
# plates, masks, subsampling, sites with many components, and programs with branches. Next: `01_quickstart`.
#
# ## Something to try
#
# - Set `T` to 5 and to 30. For which length does the critic win most, and why?
# - Call `learn` with a rate of 0.02 or 1.0. The gradient stays unbiased. What happens to its variance?
