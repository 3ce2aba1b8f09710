"""Training by Lightning gives the numbers of a plain loop. Skipped where Lightning is not installed."""

from __future__ import annotations

from typing import Any

import pyro
import pytest
import torch
from steps import DATA, assert_equal, called_module, filtered
from torch import Tensor
from torch.utils.data import DataLoader

from pyro_bpq import TraceBackpropQ_ELBO

with filtered("ignore"):
    lightning = pytest.importorskip("lightning", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "no_learner": {"learner": None}, "compiled": {"compile": "eager"}}
BATCHES = torch.cat((DATA, DATA.flip(0) - 0.3, DATA + 0.2, DATA * 0.5))


class Training(lightning.LightningModule):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.fit = called_module(TraceBackpropQ_ELBO(**options))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.fit(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.fit.parameters(), lr=0.02)


def loader() -> DataLoader[Any]:
    return DataLoader(BATCHES, batch_size=5, generator=torch.Generator())


@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
@pytest.mark.parametrize("accumulate", [1, 2])
@pyro.settings.context(module_local_params=True)
def test_lightning_gives_the_numbers_of_a_plain_loop(options: dict[str, Any], accumulate: int) -> None:
    training = Training(options)
    torch.manual_seed(1)
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", accumulate_grad_batches=accumulate, **dict.fromkeys(quiet, False)
    )
    trainer.fit(training, loader())
    fit, losses = called_module(TraceBackpropQ_ELBO(**options)), []
    optimiser = torch.optim.Adam(fit.parameters(), lr=0.02)
    torch.manual_seed(1)
    for _ in range(2):
        for i, batch in enumerate(loader()):
            loss = fit(batch)
            (loss / accumulate).backward()
            losses.append(loss.item())
            if (i + 1) % accumulate == 0:
                optimiser.step()
                optimiser.zero_grad()
    assert training.losses == losses
    assert_equal(dict(training.fit.state_dict()), dict(fit.state_dict()))
    if "compile" in options:
        assert sum(entry.steps for entry in training.fit.elbo.compiled.entries) > 2
