# %% [markdown]
# # Black-box costs
#
# **What is won beside Pyro.** Pyro has no loss for costs that are no log-probabilities. `TraceGraph_ELBO` can minimise
# such a cost by a trick: the model scores what the guide has drawn under the guide's own, frozen distributions. Here
# the cost is a statement of the program. Critics learn from the same number of calls as the two other methods in the
# figure.
#
# A recurrent net writes a sentence, letter by letter, and a metric says how good it was. The metric is Python code on
# strings: it has no gradient, it is known only at the end, and a call may be expensive. `ExpectedCost` minimises its
# expectation, without a model and an ELBO.

# %%
import os

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from torch import Tensor, nn
from tqdm import tqdm

from pyro_bpq import CostCounter, ExpectedCost, LeaveOneOut, ScoreFunction, cost

SMOKE = bool(os.environ.get("SMOKE_TEST"))
STEPS, WORD, LETTERS = (3 if SMOKE else 300), "banana", "abn"

# %% [markdown]
# ## The metric: edit distance to a word that the net does not know


# %%
def edit_distance(left: str, right: str) -> int:
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        above, row[0] = row[:], i
        for j, b in enumerate(right, 1):
            row[j] = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (a != b))
    return row[-1]


def metric(tokens: Tensor) -> float:
    return float(edit_distance("".join(LETTERS[i] for i in tokens.tolist()), WORD))


# %% [markdown]
# ## The program
#
# The program is a stochastic recurrent net: each letter is a categorical site whose logits depend on all letters
# before. `cost(name, function, *args)` calls the function once per run. The function reads values in Python, but these
# do not count as escaped. So the program around it stays fully tracked, and critics work.


# %%
class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(len(LETTERS), 16), nn.Linear(16, len(LETTERS))

    def write(self, **infer: object) -> Tensor:
        pyro.module("writer", self)
        state, letter, written = torch.zeros(1, 16), torch.zeros(1, len(LETTERS)), []
        for t in range(len(WORD)):
            state = self.cell(letter, state)
            token = pyro.sample(f"token_{t}", dist.Categorical(logits=self.out(state)[0]), infer=infer)
            letter = nn.functional.one_hot(token, len(LETTERS)).float().unsqueeze(0)
            written.append(token)
        return torch.stack(written)

    def policy(self) -> None:
        cost("edits", metric, self.write())


# %% [markdown]
# ## The same for Pyro
#
# Guide and model draw the same letters, and the model's parameters are frozen: `log q - log p` is 0, and so is its
# expected gradient. What is left of the ELBO is minus the expected cost. `TraceGraph_ELBO` follows values only through
# torch: without `0.0 * tokens.sum()` it would take the metric for a constant, and the gradient would be 0 without a
# warning.


# %%
class ForPyro(Writer):
    def guide(self) -> None:
        self.write(baseline={"use_decaying_avg_baseline": True})

    def model(self) -> None:
        with torch.no_grad():
            tokens = self.write()
            pyro.factor("edits", 0.0 * tokens.sum() - metric(tokens))


# %% [markdown]
# ## Train
#
# There are four rollouts per step. We compare with `TraceGraph_ELBO` with its baseline, and with the score function
# with leave-one-out, the usual choice for such tasks.

# %%
figure, axes = plt.subplots(figsize=(5, 3.2))
makers = {
    "TraceGraph_ELBO": lambda: TraceGraph_ELBO(num_particles=4),
    "leave-one-out": lambda: ExpectedCost(num_particles=4, estimator=ScoreFunction(LeaveOneOut())),
    "default": lambda: ExpectedCost(num_particles=4),
}
seeds = 1 if SMOKE else 3
for name, make in makers.items():
    curve = torch.zeros(STEPS)
    with CostCounter() as counter, tqdm(total=seeds * STEPS, desc=name) as bar:
        for seed in range(seeds):
            pyro.clear_param_store()
            pyro.set_rng_seed(seed)
            writer, elbo = ForPyro(), make()
            is_pyros = isinstance(elbo, TraceGraph_ELBO)
            model, guide = (writer.model, writer.guide) if is_pyros else (None, writer.policy)
            svi = SVI(model, guide, Adam({"lr": 0.01}), loss=elbo)
            for step in range(STEPS):
                curve[step] += svi.step() / seeds
                bar.update()
    last = curve[-50:].mean().item()
    calls = counter.total or 4 * seeds * STEPS
    print(f"{name:15s} edits, mean of the last steps {last:.2f}   calls of the metric {calls}")
    axes.plot(curve.unfold(0, min(20, STEPS), 1).mean(-1), label=name)
axes.set(xlabel="step", ylabel="edits, mean of 20 steps")
axes.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# These are three seeds. All methods call the metric exactly once per rollout. Critics learn from the same calls, and
# there are no hidden evaluations.
#
# ## What the critics know

# %%
elbo.network

# %%
for name in ("token_0", "token_2", "token_4"):
    info = elbo.info[name]
    explained = f"{float(info['explained']):.2f}" if "explained" in info else "no critic"
    print(name, "explained", explained, "scales", [round(s, 2) for s in info["scales"].tolist()])

# %% [markdown]
# `explained` is the share of the differences between rollouts that a critic predicts. By now the net nearly
# always writes the word, and rollouts hardly differ. So there is nothing left to predict; look at it early in training.
# `docs/expected_costs` has more. Next: `08_attend_infer_repeat`.
#
# ## Something to try
#
# - Take a longer word. From which length on does leave-one-out stop learning?
# - Let the metric say only right or wrong. What do the critics explain then?
# - Store rollouts: `learner=CriticLearner(replay=Replay(capacity=200))`.
