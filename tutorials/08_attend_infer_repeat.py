# %% [markdown]
# # Attend, infer, repeat
#
# **What is won beside Pyro.** One ELBO serves discrete and reparameterised sites, and you need not write baselines by
# hand: Pyro's own example of AIR needs a network for them. A figure at the end compares the gradient with that of
# `TraceGraph_ELBO`; the default uses leave-one-out here. The data are scikit-learn's digits, real images.
#
# How many digits are in a picture, where are they, and which digits are they? The model is in the style of AIR (Eslami
# et al., 2016), and small enough for a few minutes: a canvas of 16 x 16 pixels has zero, one or two of scikit-learn's
# digits, each in one of four places.
#
# There are three kinds of latents, in two steps: `present` (Bernoulli), `where` (one of four places, categorical) and
# `what` (Normal, reparameterised). The first two get an estimator for discrete sites, and the third keeps its pathwise
# gradient. One ELBO does both.

# %%
import os

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.optim import Adam
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import trange

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import compare_estimators, plot_comparison

SMOKE = bool(os.environ.get("SMOKE_TEST"))
STEPS, BATCH, WHAT = (3, 10, 8) if SMOKE else (1500, 64, 8)
digits = torch.tensor(load_digits().images / 16.0, dtype=torch.float32)


def compose(pictures: int, seed: int) -> tuple[Tensor, Tensor]:
    """Canvases ``(pictures, 4, 64)``, the four places flattened, and how many digits each holds."""
    noise = torch.Generator().manual_seed(seed)
    count = torch.randint(3, (pictures,), generator=noise)
    order = torch.rand(pictures, 4, generator=noise).argsort(-1)
    chosen = digits[torch.randint(len(digits), (pictures, 2), generator=noise)].reshape(pictures, 2, 64)
    canvas = torch.zeros(pictures, 4, 64)
    for step in range(2):
        there = (count > step).float()[:, None]
        canvas[torch.arange(pictures), order[:, step]] = there * chosen[:, step]
    return canvas, count


train, _ = compose(3000, 0)
test, test_count = compose(300, 1)


# %% [markdown]
# ## The model
#
# A second digit exists only if there is a first one, and only at another place (the digits do not overlap). Latents of
# an absent digit are masked: its `where` and `what` have no cost. In the second step the guide sees what the first step
# left unexplained.


# %%
class AIR(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Sequential(nn.Linear(WHAT, 64), nn.Softplus(), nn.Linear(64, 64), nn.Sigmoid())
        self.presence = nn.Sequential(nn.Linear(256, 64), nn.Softplus(), nn.Linear(64, 1))
        self.place = nn.Sequential(nn.Linear(256, 64), nn.Softplus(), nn.Linear(64, 4))
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 2 * WHAT))

    def model(self, canvas: Tensor) -> None:
        pyro.module("air", self)
        with pyro.plate("pictures", len(canvas)):
            drawn, before = torch.zeros(4, 64), torch.ones(len(canvas))
            taken = torch.zeros(len(canvas), 4)
            for step in range(2):
                prior = (2 / 3, 1 / 2)[step]
                here = pyro.sample(f"present_{step}", dist.Bernoulli(prior * before))
                with poutine.mask(mask=here > 0):
                    where = pyro.sample(f"where_{step}", dist.OneHotCategorical(logits=-9.0 * taken))
                    what = pyro.sample(f"what_{step}", dist.Normal(torch.zeros(WHAT), 1.0).to_event(1))
                digit = self.decoder(what)
                drawn = drawn + (here[..., None] * where)[..., None] * digit[..., None, :]
                before, taken = here, taken + where
            pyro.sample("canvas", dist.Normal(drawn, 0.3).to_event(2), obs=canvas)

    def guide(self, canvas: Tensor) -> None:
        pyro.module("air", self)
        with pyro.plate("pictures", len(canvas)):
            left, before = canvas, torch.ones(len(canvas))
            for step in range(2):
                flat = left.flatten(-2)
                chance = torch.sigmoid(self.presence(flat).squeeze(-1)).clamp(1e-3, 1 - 1e-3)
                here = pyro.sample(f"present_{step}", dist.Bernoulli(chance * before))
                with poutine.mask(mask=here > 0):
                    where = pyro.sample(f"where_{step}", dist.OneHotCategorical(logits=self.place(flat)))
                    seen = (where[..., None] * left).sum(-2)
                    mean, scale = self.encoder(seen).chunk(2, -1)
                    pyro.sample(f"what_{step}", dist.Normal(mean, 0.1 + torch.sigmoid(scale)).to_event(1))
                left = left * (1 - (here[..., None] * where)[..., None])
                before = here


# %%
pyro.clear_param_store()
pyro.set_rng_seed(0)
air = AIR()
elbo = TraceBackpropQ_ELBO()
svi = SVI(air.model, air.guide, Adam({"lr": 1e-3}), loss=elbo)


def accuracy() -> float:
    """How often the guide counts right."""
    with torch.no_grad():
        trace = poutine.trace(air.guide).get_trace(test)
    found = sum(trace.nodes[f"present_{step}"]["value"] for step in range(2))
    return (found == test_count).float().mean().item()


at, losses, right = [], [], []
for step in trange(STEPS, bar_format="{percentage:3.0f}%"):
    loss = svi.step(train[torch.randint(len(train), (BATCH,))]) / BATCH
    if step % 50 == 0 or step == STEPS - 1:
        at.append(step)
        losses.append(loss)
        right.append(accuracy())
print(f"counted right after {STEPS} steps: {100 * right[-1]:.0f} % of 300 held-out pictures (a third by chance)")

# %%
figure, (left, middle) = plt.subplots(1, 2, figsize=(7, 2.8))
left.plot(at, losses)
left.set(xlabel="step", ylabel="loss (nats per picture)")
middle.plot(at, right)
middle.set(xlabel="step", ylabel="share of right counts", ylim=(0, 1.05))
figure.tight_layout()
plt.show()


# %%
def picture(canvas: Tensor) -> Tensor:
    """From four places to 16 x 16 pixels."""
    return canvas.detach().reshape(2, 2, 8, 8).permute(0, 2, 1, 3).reshape(16, 16)


with torch.no_grad():
    guide_trace = poutine.trace(air.guide).get_trace(test)
    model_trace = poutine.trace(poutine.replay(air.model, trace=guide_trace)).get_trace(test)
again = model_trace.nodes["canvas"]["fn"].base_dist.loc
figure, grid = plt.subplots(2, 8, figsize=(7, 2))
for i in range(8):
    for axis, image in zip(grid[:, i], (test[i], again[i])):
        axis.imshow(picture(image), cmap="gray_r", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[])
grid[0, 0].set_ylabel("picture", rotation=0, ha="right", fontsize=8)
grid[1, 0].set_ylabel("again", rotation=0, ha="right", fontsize=8)
plt.show()

# %% [markdown]
# ## What did the work

# %%
print(elbo.plan)

# %% [markdown]
# ## Beside Pyro
#
# We compare the gradients of other estimators on one batch, at the weights at the end of training.

# %%
quick = {"num_warmup": 2, "num_samples": 3, "num_rounds": 1} if SMOKE else {"num_warmup": 50, "num_samples": 50}
comparison = compare_estimators(air.model, air.guide, train[:BATCH], progress=False, **quick)
plot_comparison(comparison)

# %% [markdown]
# With batches of this size the default is leave-one-out over four particles, so it has no bar of its own;
# `print(elbo.plan)` says so.
#
# This is AIR without its hard part: places form a grid, and digits do not overlap. It is one seed. Next:
# `09_your_own_estimator`.
#
# ## Something to try
#
# - Train with `TraceGraph_ELBO()` instead of the default for the same time. How many digits does it find?
# - Let digits overlap: move the four places two pixels towards the middle.
