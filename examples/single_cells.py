"""Gene programs that are on or off in each cell, as a Pyro module of scvi-tools that its training plans train.

    pip install scvi-tools
    python examples/single_cells.py [--epochs 100] [--output benchmarks/results/single_cells.csv]

Counts are made up: each of sixteen programs raises or lowers a tenth of the genes. ``PyroTrainingPlan`` has an ``SVI``
of its own. ``LowLevelPyroTrainingPlan`` wraps model and guide anew in each step, reads the ELBO's
``differentiable_loss``, and trains ``module.parameters()`` by torch's Adam.
"""

from __future__ import annotations

import argparse
import csv
import logging
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import pyro
import pyro.distributions as dist
import scvi
import torch
from anndata import AnnData
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO
from scvi import REGISTRY_KEYS
from scvi.data import AnnDataManager
from scvi.data.fields import LayerField
from scvi.model.base import BaseModelClass, PyroSviTrainMixin
from scvi.module.base import PyroBaseModuleClass
from scvi.train import LowLevelPyroTrainingPlan, PyroTrainingPlan
from torch import Tensor, nn
from torch._inductor import config as inductor

from pyro_bpq import TraceBackpropQ_ELBO

PROGRAMS = 16
PLANS = {plan.__name__: plan for plan in (PyroTrainingPlan, LowLevelPyroTrainingPlan)}


def counts(cells: int = 2000, genes: int = 300) -> AnnData:
    """A matrix of counts, with a row for each cell."""
    generator = torch.Generator().manual_seed(0)

    def coins(share: float, *shape: int) -> Tensor:
        return torch.bernoulli(torch.full(shape, share), generator=generator)

    on = coins(0.3, cells, PROGRAMS)
    effects = 2.0 * coins(0.1, PROGRAMS, genes) * torch.randn(PROGRAMS, genes, generator=generator)
    library = 500.0 + 1500.0 * torch.rand(cells, 1, generator=generator)
    rate = library * torch.softmax(torch.randn(genes, generator=generator) + on @ effects, -1)
    return AnnData(torch.poisson(rate, generator=generator).numpy())


class GenePrograms(PyroBaseModuleClass):
    """Programs of a cell, and its counts given them.

    Args:
        x: All counts. Their means keep the programs free for what differs between cells: without them a good
            gradient switches the same programs on in all cells in a few steps, and the encoder is stuck there.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        genes = x.shape[-1]
        self.register_buffer("mean", x.log1p().mean(0))
        self.encoder = nn.Sequential(nn.Linear(genes, 64), nn.ReLU(), nn.Linear(64, PROGRAMS))
        self.base = nn.Parameter((x.mean(0) + 1e-3).log())
        self.effects = nn.Parameter(0.1 * torch.randn(PROGRAMS, genes))
        self.prior = nn.Parameter(torch.zeros(PROGRAMS))

    @staticmethod
    def _get_fn_args_from_batch(batch: dict[str, Tensor]) -> tuple[tuple[Tensor], dict[str, Any]]:
        return (batch[REGISTRY_KEYS.X_KEY],), {}

    def model(self, x: Tensor, kl_weight: float = 1.0) -> None:
        """Programs, then counts."""
        pyro.module("gene programs", self)
        with pyro.plate("cells", len(x)):
            with poutine.scale(scale=kl_weight):
                on = pyro.sample("on", dist.Bernoulli(logits=self.prior.expand(len(x), -1)).to_event(1))
            rate = x.sum(-1, keepdim=True) * torch.softmax(self.base + on @ self.effects, -1)
            pyro.sample("x", dist.Poisson(rate).to_event(1), obs=x)

    def guide(self, x: Tensor, kl_weight: float = 1.0) -> None:
        """Programs of a cell, by its counts."""
        pyro.module("gene programs", self)
        with pyro.plate("cells", len(x)), poutine.scale(scale=kl_weight):
            pyro.sample("on", dist.Bernoulli(logits=self.encoder(x.log1p() - self.mean)).to_event(1))


class Cells(PyroSviTrainMixin, BaseModelClass):
    """The model that a user of scvi-tools calls.

    Args:
        adata: Counts that were set up.
        plan: The training plan.
    """

    def __init__(self, adata: AnnData, plan: type[Any] = PyroTrainingPlan) -> None:
        pyro.clear_param_store()
        super().__init__(adata)
        self.module, self._training_plan_cls = GenePrograms(torch.as_tensor(adata.X)), plan
        self.init_params_ = self._get_init_params(locals())

    @classmethod
    def setup_anndata(cls, adata: AnnData, **options: Any) -> None:
        """Says that the matrix holds counts."""
        arguments = cls._get_setup_method_args(**locals())
        fields = [LayerField(REGISTRY_KEYS.X_KEY, None, is_count_data=True)]
        manager = AnnDataManager(fields=fields, setup_method_args=arguments)
        manager.register_fields(adata, **options)
        cls.register_manager(manager)


class Clock(pl.Callback):
    """Seconds of CPU time of each step, compiler included."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def now(self) -> float:
        """CPU time so far, of this process and of those that it waited for."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    def on_train_batch_start(self, *args: Any) -> None:
        """Begins a step."""
        self.start = self.now()

    def on_train_batch_end(self, *args: Any) -> None:
        """Ends a step."""
        self.steps.append(self.now() - self.start)


def trained(elbo: ELBO, plan: str, epochs: int, adata: AnnData, **options: Any) -> tuple[Cells, Clock]:
    """A model after some epochs, with the weight of the KL divergence growing in the first half; and its clock."""
    scvi.settings.seed = 0
    Cells.setup_anndata(adata)
    model, clock = Cells(adata, PLANS[plan]), Clock()
    model.train(
        epochs,
        accelerator="cpu",
        train_size=1.0,
        plan_kwargs={"loss_fn": elbo, "optim_kwargs": {"lr": 3e-3}, "n_epochs_kl_warmup": epochs // 2, **options},
        datasplitter_kwargs={"drop_last": True},  # a smaller batch is another recording to compile
        enable_progress_bar=False,
        callbacks=[clock],
    )
    return model, clock


ELBOS: dict[str, Callable[[], ELBO]] = {
    "Trace_ELBO": Trace_ELBO,
    "default, eager": TraceBackpropQ_ELBO,
    "default, compiled": lambda: TraceBackpropQ_ELBO(compile=True),
}


def main() -> None:
    """Trains by both plans with three ELBOs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    # Compile in this process, and anew each time.
    inductor.compile_threads, inductor.force_disable_caches = 1, True
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows, adata = [], counts()
    x = torch.as_tensor(adata.X)
    for plan in PLANS:
        for name, make in ELBOS.items():
            model, clock = trained(make(), plan, options.epochs, adata)
            nats = Trace_ELBO(10, vectorize_particles=True).loss(model.module.model, model.module.guide, x) / len(x)
            ms = 1e3 * median(clock.steps[len(clock.steps) // 2 :])
            made = sum(each for each in clock.steps if each > 1.0)  # the steps that wait for the compiler
            rows.append({"plan": plan, "elbo": name, "ms": ms, "seconds to compile": made, "nats": nats})
            print(", ".join(str(f"{value:.4g}" if isinstance(value, float) else value) for value in rows[-1].values()))
    if options.output:
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
