# %% [markdown]
# # A discrete deep Markov model
#
# **What is won beside Pyro:** after the same time every other method below has a better bound than `TraceGraph_ELBO`.
# The strongest competitor is leave-one-out with four particles, which is best on a model with short sequences and cheap
# steps.
#
# The data are sequences of binary frames. The model has a hidden state $z_t$ with 8 values. The guide has a recurrent
# net that reads the sequence backwards. Since states are discrete, the exact log-likelihood can be computed (forward
# algorithm). It shows how far the guide is from the true posterior.
#
# **Data.** If the environment variable `PYRO_BPQ_DATA` names a folder with `jsb.npz` (88 keys packed by `np.packbits`),
# the data are Bach chorales. Otherwise they are scikit-learn's digits, read row by row. Both are real. The output below
# says which one was used.

# %%
import os
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import ClippedAdam
from sklearn.datasets import load_digits
from torch import Tensor, nn

from pyro_bpq import LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO

SMOKE = bool(os.environ.get("SMOKE_TEST"))
T, K, SECONDS, BATCH = (4, 8, 0.3, 20) if SMOKE else (8, 8, 12.0, 40)


def written() -> Tensor:
    """Digits as sequences: eight rows of eight pixels."""
    images = torch.tensor(load_digits().images, dtype=torch.float32)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return (images[order[:500]] > 7.5).float()[:, :T]


file = Path(os.environ.get("PYRO_BPQ_DATA", "")) / "jsb.npz"
if file.is_file():
    rolls = np.unpackbits(np.load(file)["rolls"], axis=-1)[..., :88]
    data, source = torch.tensor(rolls[:, :T], dtype=torch.float32), "Bach chorales, first frames"
else:
    data, source = written(), "digits, row by row"
train, test = data[: len(data) * 4 // 5], data[len(data) * 4 // 5 :]
print(source, tuple(train.shape))


# %%
class Network(nn.Module):
    def __init__(self, keys: int) -> None:
        super().__init__()
        self.transition = nn.Sequential(nn.Linear(K, 32), nn.Tanh(), nn.Linear(32, K))
        self.emission = nn.Linear(K, keys)
        # Each state begins as a frame of the data, told from the average frame. From random numbers all sequences soon
        # choose the one state that fits the average best, and stay there.
        frames = train.flatten(0, 1)
        mean = frames.mean(0).clamp(0.01, 0.99)
        self.emission.weight.data = 4 * (frames[torch.randint(len(frames), (K,))] - mean).T
        self.emission.bias.data = mean.logit()
        self.backwards = nn.GRU(keys, 32, batch_first=True)
        self.combine = nn.Sequential(nn.Linear(32 + K, 32), nn.Tanh(), nn.Linear(32, K))

    def model(self, x: Tensor) -> None:
        pyro.module("dmm", self)
        with pyro.plate("sequences", len(x)):
            z = torch.zeros(K)
            for t in range(T):
                z = pyro.sample(f"z_{t}", dist.OneHotCategorical(logits=self.transition(z)))
                pyro.sample(f"x_{t}", dist.Bernoulli(logits=self.emission(z)).to_event(1), obs=x[:, t])

    def guide(self, x: Tensor) -> None:
        pyro.module("dmm", self)
        ahead = self.backwards(x.flip(1))[0].flip(1)
        with pyro.plate("sequences", len(x)):
            z = torch.zeros(len(x), K)
            for t in range(T):
                seen = ahead[:, t].expand(*z.shape[:-1], 32)
                # What each state makes of the frame at hand, and the network for what came before and comes next.
                logits = self.emitted(x[:, t]) + self.combine(torch.cat([seen, z], -1))
                z = pyro.sample(
                    f"z_{t}",
                    dist.OneHotCategorical(logits=logits),
                    infer={"bpq": {"share": "z", "context": seen.detach()}},
                )

    def emitted(self, x: Tensor) -> Tensor:
        """Log-probability of frames in each state."""
        return dist.Bernoulli(logits=self.emission(torch.eye(K))).to_event(1).log_prob(x.unsqueeze(-2))

    def log_likelihood(self, x: Tensor) -> float:
        """Exact, per sequence, by the forward algorithm."""
        with torch.no_grad():
            emitted = self.emitted(x)
            step = self.transition(torch.eye(K)).log_softmax(-1)
            alpha = self.transition(torch.zeros(K)).log_softmax(-1) + emitted[:, 0]
            for t in range(1, T):
                alpha = (alpha.unsqueeze(-1) + step).logsumexp(-2) + emitted[:, t]
            return alpha.logsumexp(-1).mean().item()


# %% [markdown]
# `infer={"bpq": ...}` at the guide's site: with `share` all steps have one critic, which sees the number of the step.
# `context` gives it the state of the recurrent net, which describes later frames. Pyro's own ELBOs ignore these
# options.
#
# ## Train

# %%
vectorized = {"num_particles": 4, "vectorize_particles": True, "max_plate_nesting": 1}
elbos = {
    "TraceGraph_ELBO": TraceGraph_ELBO(),
    "leave-one-out": TraceBackpropQ_ELBO(estimator=ScoreFunction(LeaveOneOut()), **vectorized),
    "default": TraceBackpropQ_ELBO(),
}
judge = Trace_ELBO(**{**vectorized, "num_particles": 20})
figure, axes = plt.subplots(figsize=(5, 3.2))
for name, elbo in elbos.items():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    network = Network(data.shape[-1])
    svi = SVI(network.model, network.guide, ClippedAdam({"lr": 1e-2}), loss=elbo)
    at, curve, spent = [], [], 0.0
    while spent < SECONDS:
        start = time.process_time()
        for _ in range(5):
            svi.step(train[torch.randint(len(train), (BATCH,))])
        spent += time.process_time() - start
        at.append(spent)
        with torch.no_grad():
            curve.append(-judge.loss(network.model, network.guide, test) / len(test))
    exact = network.log_likelihood(test)
    print(f"{name:15s} held-out ELBO {curve[-1]:7.2f}   exact log p(x) {exact:7.2f}   gap {exact - curve[-1]:.2f} nats")
    axes.plot(at, curve, label=name)
axes.set(xlabel="seconds of processor time", ylabel="held-out ELBO (nats per sequence)")
axes.legend(fontsize=8)
figure.tight_layout()
plt.show()
print(elbo)

# %% [markdown]
# The gap is $KL(q \,\|\, p(z \mid x))$. Only an exact likelihood can show it. `print(elbo)` says how many particles
# the default chose. One seed and a few seconds show how such a model is written, and are no benchmark;
# `benchmarks/chorales.py` is one.

# %%
for t in (0, T // 2, T - 1):
    info = elbo.info[f"z_{t}"]
    explained = f"{float(info['explained']):.2f}" if "explained" in info else "no critic"
    print(f"z_{t}: {type(info['estimator']).__name__}, explained {explained}")

# %% [markdown]
# ## Something to try
#
# - Use critics: `TraceBackpropQ_ELBO(4, vectorize_particles=True, critic=MLPCritic((64,)))`. Do they pay?
# - Sum the states out: `enumeration="exact"`, with marks at the guide's sites. Which is better after the same time?
# - Download the chorales, and run this tutorial on music.
