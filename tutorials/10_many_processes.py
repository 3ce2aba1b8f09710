# %% [markdown]
# # Many processes
#
# `elbo(model, guide)` is a `torch.nn.Module` whose call gives a loss, so `DistributedDataParallel` can wrap it: each
# process takes its share of the data, gradients are averaged.
#
# Critics are not part of that. Each process trains its own, on its own data; a critic changes the variance of the
# gradient and not its mean, so nothing goes wrong if they differ. (They cost no communication.)
#
# Processes need a file to start from, so this tutorial writes one. On several machines: the same file under `torchrun`.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SMOKE = bool(os.environ.get("SMOKE_TEST"))
PROCESSES, STEPS = 2, 5 if SMOKE else 200

WORKER = """
import os, sys

import pyro
import pyro.distributions as dist
import torch
import torch.distributed as distributed
from pyro.nn import PyroModule
from torch.nn.parallel import DistributedDataParallel

from pyro_bpq import TraceBackpropQ_ELBO

rank, processes, steps, store = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)

noise = torch.Generator().manual_seed(0)
switch = torch.rand(200, generator=noise) < 0.4
data = torch.where(switch, 3.0, 0.0) + torch.randn(200, generator=noise)
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
loss = TraceBackpropQ_ELBO()(Model(), Guide())
loss(share)  # so that all that is built on first use exists
parallel = DistributedDataParallel(loss, broadcast_buffers=False)
torch.manual_seed(rank)  # from here on every process draws its own latents
optimiser = torch.optim.Adam([p for p in loss.parameters() if p.requires_grad], lr=0.05)
for _ in range(steps):
    optimiser.zero_grad()
    value = parallel(share)
    value.backward()
    optimiser.step()
means = [round(v, 2) for v in loss.model.means.tolist()]
print(f"process {rank}: {len(share)} rows, loss {value.item() / len(share):.2f} nats per row, means {means}")
distributed.destroy_process_group()
"""

# %% [markdown]
# The worker's script is above; here it is started twice. Both print the same means: their gradients were averaged at
# every step.

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

# %% [markdown]
# The rows of a plate are independent, so a process with half the rows sees half of the loss; `DistributedDataParallel`
# averages, which changes the length of a gradient step and not its direction (with Adam it changes next to nothing).
