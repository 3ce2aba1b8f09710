"""The races of ``benchmarks/``: their arithmetic by hand, programs against exact figures, scripts briefly."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from steps import bias
from torch import nn

Scripts = dict[str, ModuleType]
FOLDER = str(Path(__file__).parents[1] / "benchmarks")
# NumPyro has an environment of its own.
NAMES = tuple(path.stem for path in Path(FOLDER).glob("*.py") if path.stem != "numpyro_steps")


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    threads = torch.get_num_threads()
    sys.path.insert(0, FOLDER)
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(FOLDER)
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def single_precision() -> Iterator[None]:
    """The scripts run in torch's default precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small files in the places of the data sets."""
    random = np.random.default_rng(0)
    digits = {f"x_{split}": random.integers(0, 256, (60, 28, 28), np.uint8) for split in ("train", "test")}
    np.savez(tmp_path / "mnist.npz", **digits)
    keys = random.random((24, 5, 88)) < 0.1
    split = np.array(["train", "valid", "test"] * 8)
    np.savez(tmp_path / "jsb.npz", rolls=np.packbits(keys, axis=-1), lengths=random.integers(2, 6, 24), split=split)
    monkeypatch.setenv("PYRO_BPQ_DATA", str(tmp_path))
    return tmp_path


class Coin(nn.Module):
    """One binary latent, one observation per row."""

    def __init__(self) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.tensor(0.7))

    def guide(self, x: torch.Tensor) -> None:
        pyro.module("coin", self)
        with pyro.plate("rows", len(x)):
            pyro.sample("z", dist.Bernoulli(logits=self.logit.expand(len(x))))

    def model(self, x: torch.Tensor) -> None:
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Bernoulli(0.4))
            pyro.sample("x", dist.Bernoulli(0.2 + 0.5 * z), obs=x)


def test_plain_leave_one_out_is_unbiased(scripts: Scripts) -> None:
    coin, rival, x = Coin(), scripts["common"].PlainLeaveOneOut(3), torch.zeros(2)
    assert bias(rival, coin.model, coin.guide, x, params=lambda: None) < 1e-5


class Line:
    """A task that only has a name."""

    name, unit = "line", "row"

    def programs(self, program: str) -> nn.Module:
        return Coin()


def runner(scripts: Scripts, values: list[float], name: str = "a", group: str = "unbiased") -> Any:
    race = scripts["common"]
    found = race.Runner(Line(), race.Method(name, Trace_ELBO, group=group), 0.1, 0)
    found.curve = [{"seconds": float(t), "steps": t, "elbo": v, "bound": v} for t, v in enumerate(values)]
    return found


def test_times_to_a_bound_by_hand(scripts: Scripts) -> None:
    slow, fast = runner(scripts, [-9.0, -8.0, -6.0, -4.0, -2.0]), runner(scripts, [-9.0, -4.0, -2.0, -2.0, -2.0])
    assert slow.smooth() == [-9.0, -8.0, -7.0, -6.0, -4.0]
    # The last mean is that of the points at 2, 3 and 4 seconds, and the first that of the one at 1 second.
    assert slow.smooth("seconds") == [0.0, 1.0, 1.5, 2.0, 3.0]
    assert slow.best() == (-4.0, 3.0)
    assert slow.reach(-6.5) == 1.75
    assert fast.reach(-4.0) == 1.0
    race = scripts["common"]
    assert race.ratio(fast, slow) == pytest.approx(1.0 / 3.0)
    assert race.ratio(slow, fast) == math.inf
    size = race.Size((0.1,), 1, 4.0, 4)
    finished = race.Race(Line(), size, {"default": [slow], "b": [fast]}, [slow, fast])
    assert race.ratios(finished, "b", "default") == "0.33"
    # Best at 3 s, the mean of its last three points; so late we were not there.
    assert race.ratios(finished, "default", "b") == "not reached, > 1.00"
    assert runner(scripts, [-1.0, -2.0]).best() == (-1.0, 0.0)
    assert math.isnan(race.ratio(fast, runner(scripts, [-1.0, -2.0])))


@pytest.fixture
def chorales(scripts: Scripts, data: Path) -> Any:
    return scripts["chorales"].load_chorales(4, 3)


def test_exact_likelihood_is_that_of_enumeration(scripts: Scripts, chorales: Any) -> None:
    rolls, lengths = chorales.splits["test"]
    assert int(lengths.min()) < rolls.shape[1]
    pyro.set_rng_seed(0)
    nets = chorales.programs("enumerate")
    loss = TraceEnum_ELBO(max_plate_nesting=1).loss(nets.model, nets.guide, rolls, lengths)
    exact = nets.log_likelihood(rolls, lengths).detach()
    assert float(exact.sum()) == pytest.approx(-loss, rel=1e-5)
    figure = scripts["chorales"].exact_figure(nets, (rolls, lengths))
    assert figure == pytest.approx(-loss / float(lengths.sum()), rel=1e-5)
    # What comes after the end counts for nothing.
    noise = torch.where((torch.arange(4) >= lengths[:, None])[..., None], 1.0 - rolls, rolls)
    torch.testing.assert_close(nets.log_likelihood(noise, lengths).detach(), exact)


@pytest.mark.parametrize("program", ["", "onehot", "average"])
def test_bounds_of_chorales_get_close_to_the_exact_likelihood(scripts: Scripts, chorales: Any, program: str) -> None:
    data = chorales.splits["test"]
    pyro.set_rng_seed(0)
    nets = chorales.programs(program)
    _, bound = chorales.measure(nets, data, 3000)
    exact = scripts["chorales"].exact_figure(nets, data)
    assert bound == pytest.approx(exact, abs=5e-3)
    assert chorales.measure(nets, data, 1)[0] < exact


@pytest.mark.parametrize("name", ["vae", "sbn", "chorales", "variances"])
@pytest.mark.slow
def test_scripts_run(scripts: Scripts, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--smoke", "--output", str(tmp_path / "results")])
    scripts[name].main()
    rows = scripts["common"].read_csv(tmp_path / "results" / f"{name}.csv")
    page = (tmp_path / "results" / f"{name}.md").read_text()
    assert page.startswith("# ") and "Machine: " in page
    if name != "variances":
        assert {row["method"] for row in rows} == {method.name for method in scripts[name].METHODS}
        assert (tmp_path / "results" / f"{name}.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["vae", "sbn", "chorales", "race"])
def test_scripts_say_so_where_data_is_missing(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--smoke"])
    monkeypatch.delenv("PYRO_BPQ_DATA", raising=False)
    scripts[name].main()
    assert "skipped, PYRO_BPQ_DATA names no folder" in capsys.readouterr().out
