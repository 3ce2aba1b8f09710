# %% [markdown]
# # Many processes
#
# **What is won beside Pyro.** Pyro's distributed training needs `pyro.optim.HorovodOptimizer`. Here plain torch is
# enough, and baselines and critics learn from the joint batch. The gradient itself has less noise than Pyro's; a figure
# at the end compares them.
#
# `elbo(model, guide)` is a `torch.nn.Module` whose call gives a loss, so `DistributedDataParallel` can wrap it: each
# process takes its share of the data, and gradients are averaged.
#
# Critics, baselines and scales learn together as well: in each step they learn from the joint batch, so they are the
# same in all processes. This happens automatically if `torch.distributed` has more than one process.
# `learner=CriticLearner(ranks=None)` turns it off: then each process trains its own critics on its own data (the mean
# of the gradient is the same).
#
# Processes start from a file, so this tutorial writes one. Under `torchrun`, on one machine or several, the same file
# needs only `distributed.init_process_group("gloo")`. With GPUs write `"nccl"`, and put model, guide and data on the
# GPU of each process.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import TraceGraph_ELBO
from sklearn.datasets import load_iris

from pyro_bpq import LeaveOneOut, RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.diagnostics import compare_estimators, plot_comparison

SMOKE = bool(os.environ.get("SMOKE_TEST"))
PROCESSES, STEPS = 2, 5 if SMOKE else 200

WORKER = """
import os, sys

import pyro
import pyro.distributions as dist
import torch
import torch.distributed as distributed
from pyro.nn import PyroModule
from sklearn.datasets import load_iris
from torch.nn.parallel import DistributedDataParallel

from pyro_bpq import RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO

rank, processes, steps, store = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)

data = torch.tensor(load_iris().data[:, 2]).float()  # lengths of petals, two groups
share = data[rank::processes]


class Model(PyroModule):
    def __init__(self):
        super().__init__()
        self.means = torch.nn.Parameter(torch.tensor([-0.5, 0.5]))

    def forward(self, x):
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("x", dist.Normal(torch.where(z > 0, self.means[1], self.means[0]), 1.0), obs=x)


class Guide(PyroModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, x):
        with pyro.plate("rows", len(x)):
            pyro.sample("z", dist.Bernoulli(logits=self.line(x[:, None]).squeeze(-1)))


torch.manual_seed(0)
loss = TraceBackpropQ_ELBO(estimator=ScoreFunction(RunningBaseline()))(Model(), Guide())
parallel = DistributedDataParallel(loss)
torch.manual_seed(rank)  # from here on every process draws its own latents
optimiser = torch.optim.Adam([p for p in loss.parameters() if p.requires_grad], lr=0.05)
for _ in range(steps):
    optimiser.zero_grad()
    value = parallel(share)
    value.backward()
    optimiser.step()
means = [round(v, 2) for v in loss.model.means.tolist()]
baselines = [round(float(v), 6) for name, v in loss.elbo.critics.state_dict().items() if name.endswith(".baseline")]
print(
    f"process {rank}: {len(share)} rows, loss {value.item() / len(share):.2f} nats per row, "
    f"means {means}, baselines {baselines}"
)
distributed.destroy_process_group()
"""

# %% [markdown]
# The script of the worker is above. Here it is started twice. Both print the same means and baselines: gradients and
# running statistics were averaged at every step.

# %%
with tempfile.TemporaryDirectory() as folder:
    script, store = Path(folder) / "worker.py", Path(folder) / "store"
    script.write_text(WORKER)
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(PROCESSES), str(STEPS), str(store)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    printed = [process.communicate(timeout=600)[0].strip() for process in started]
print("\n".join(printed))
assert all(process.returncode == 0 for process in started)
assert len({line.split("means")[1] for line in printed}) == 1
assert "baselines []" not in printed[0]

# %% [markdown]
# The rows of a plate are independent, so a process with half of the rows sees half of the loss.
# `DistributedDataParallel` averages the gradients. This changes the length of a gradient step and not its direction
# (with Adam it changes almost nothing). With a subsampled plate, `pyro.plate("rows", 1000, subsample_size=len(x))`,
# each process scales its rows to the whole plate. Then the average is the estimate of the joint batch if all processes
# have the same number of rows.
#
# Processes take their training steps together: a process with one batch more than the others would wait forever. What
# critics and statistics learn weighs batches of unequal size by their rows. Evaluate with `loss.eval()`, on any one
# process.
#
# ## Beside `TraceGraph_ELBO` and leave-one-out
#
# We compare gradients of the same program in one process, at the start of training: variance times the time of a step.


# %%
def model(x):
    means = pyro.param("means", torch.tensor([-0.5, 0.5]))
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("x", dist.Normal(torch.where(z > 0, means[1], means[0]), 1.0), obs=x)


def guide(x):
    line = pyro.param("line", torch.zeros(2))
    with pyro.plate("rows", len(x)):
        pyro.sample("z", dist.Bernoulli(logits=line[0] + line[1] * x))


data = torch.tensor(load_iris().data[:, 2]).float()
rivals = {
    "default": TraceBackpropQ_ELBO(),
    "RunningBaseline, as above": TraceBackpropQ_ELBO(1, estimator=ScoreFunction(RunningBaseline())),
    "leave-one-out, 4 particles": TraceBackpropQ_ELBO(4, estimator=ScoreFunction(LeaveOneOut())),
    "TraceGraph_ELBO": TraceGraph_ELBO(),
}
quick = {"num_warmup": 3, "num_samples": 4, "num_rounds": 1} if SMOKE else {"num_warmup": 100, "num_samples": 100}
pyro.set_rng_seed(0)
comparison = compare_estimators(model, guide, data, estimators=rivals, progress=False, **quick)
figure, axes = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
plot_comparison(comparison, axes)
plt.show()

# %% [markdown]
# ## Something to try
#
# - Start four processes. Do the printed means stay the same?
# - Give one process twice the rows of the other.
