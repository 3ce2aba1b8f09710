"""Training by Lightning gives the numbers of a plain loop. Skipped where Lightning is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from steps import DATA, Guide, Model, assert_equal, filtered, is_equal
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyro_bpq import TraceBackpropQ_ELBO

with filtered("ignore"):
    lightning = pytest.importorskip("lightning", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "two": {"num_particles": 2}, "no_learner": {"learner": None}}
OPTIONS["compiled"] = {"compile": "eager"}
each_options = pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
BATCHES = torch.cat((DATA, DATA.flip(0) - 0.3, DATA + 0.2, DATA * 0.5))


@pytest.fixture(autouse=True)
def _local_parameters() -> Any:
    with pyro.settings.context(module_local_params=True):
        yield


def make(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    fit = TraceBackpropQ_ELBO(**options)(Model(), Guide())
    fit(DATA)  # the critics appear, ahead of the optimiser
    return fit


class Training(lightning.LightningModule):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.fit = make(options)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.fit(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.fit.parameters(), lr=0.02)


def loader() -> DataLoader[Any]:
    return DataLoader(BATCHES, batch_size=5, generator=torch.Generator())


def trainer(epochs: int, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(max_epochs=epochs, accelerator="cpu", enable_checkpointing=False, **quiet, **options)


@each_options
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_gives_the_numbers_of_a_plain_loop(options: dict[str, Any], accumulate: int) -> None:
    module = Training(options)
    torch.manual_seed(1)
    trainer(2, accumulate_grad_batches=accumulate).fit(module, loader())
    fit, losses = make(options), []
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
    assert module.losses == losses
    assert_equal(dict(module.fit.state_dict()), dict(fit.state_dict()))
    if "compile" in options:
        assert sum(entry.steps for entry in module.fit.elbo.compiled.entries) > 2


@each_options
def test_a_checkpoint_resumes_with_the_same_numbers(options: dict[str, Any], tmp_path: Path) -> None:
    module = Training(options)
    torch.manual_seed(1)
    trainer(4).fit(module, loader())
    interrupted, first = Training(options), trainer(2)
    torch.manual_seed(1)
    first.fit(interrupted, loader())
    rng = torch.get_rng_state()
    first.save_checkpoint(tmp_path / "saved.ckpt")
    resumed = Training(options)
    assert not is_equal(dict(resumed.fit.state_dict()), dict(interrupted.fit.state_dict()))
    torch.set_rng_state(rng)
    trainer(4).fit(resumed, loader(), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    assert interrupted.losses + resumed.losses == module.losses
    assert_equal(dict(resumed.fit.state_dict()), dict(module.fit.state_dict()))
