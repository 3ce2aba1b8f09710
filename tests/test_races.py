"""The races of ``benchmarks/``: their arithmetic by hand, programs against exact figures, scripts briefly."""

from __future__ import annotations

import csv
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
from torch import nn

FOLDER = str(Path(__file__).parents[1] / "benchmarks")
NAMES = ("common", "vae", "sbn", "chorales", "race", "first_steps", "steered")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
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
    np.savez(
        tmp_path / "mnist.npz", **{f"x_{s}": random.integers(0, 256, (60, 28, 28), np.uint8) for s in ("train", "test")}
    )
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


def test_bounds_of_a_coin(scripts: dict[str, ModuleType]) -> None:
    pyro.set_rng_seed(0)
    x, coin = torch.tensor([0.0, 1.0] * 1000), Coin()
    elbo, bound = scripts["common"].bounds(coin, (x,), 500)
    q = coin.logit.sigmoid().item()
    log_p, expected = [], []
    for value in (0.0, 1.0):
        joint = [p * (one if value else 1.0 - one) for p, one in ((0.6, 0.2), (0.4, 0.7))]
        log_p.append(math.log(sum(joint)))
        expected.append(sum(w * math.log(j / w) for w, j in zip((1.0 - q, q), joint, strict=True)))
    assert bound == pytest.approx(sum(log_p) / 2, abs=3e-3)
    assert elbo == pytest.approx(sum(expected) / 2, abs=0.06)
    assert abs(sum(expected) - sum(log_p)) / 2 > 0.1


def test_plain_leave_one_out_is_unbiased(scripts: dict[str, ModuleType]) -> None:
    pyro.set_rng_seed(0)
    coin, elbo, x = Coin(), scripts["common"].PlainLeaveOneOut(3), torch.zeros(250)
    p = coin.logit.sigmoid()
    q, joint = torch.stack((1.0 - p, p)), torch.tensor([0.6 * 0.8, 0.4 * 0.3])
    (exact,) = torch.autograd.grad((q * (q / joint).log()).sum(), coin.logit)
    found = []
    for _ in range(40):
        coin.logit.grad = None
        elbo.loss_and_grads(coin.model, coin.guide, x)
        found.append(coin.logit.grad / 250)
    mean, error = torch.stack(found).mean(), torch.stack(found).std() / 40**0.5
    assert abs(mean - exact) < 4.0 * error
    # Without the correction for the sample's own share it would be a third smaller.
    assert abs(mean * 2.0 / 3.0 - exact) > 8.0 * error
    pyro.clear_param_store()


class Line:
    """A task that only has a name."""

    name, unit = "line", "row"

    def programs(self, program: str) -> nn.Module:
        return Coin()


def runner(scripts: dict[str, ModuleType], values: list[float], name: str = "a", group: str = "unbiased") -> Any:
    race = scripts["common"]
    found = race.Runner(Line(), race.Method(name, Trace_ELBO, group=group), 0.1, 0)
    found.curve = [{"seconds": float(t), "steps": t, "elbo": v, "bound": v} for t, v in enumerate(values)]
    return found


def test_times_to_a_bound_by_hand(scripts: dict[str, ModuleType]) -> None:
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


def test_headlines_take_the_best_of_each_group(scripts: dict[str, ModuleType]) -> None:
    race = scripts["common"]
    runs = {
        "default": [runner(scripts, [-9.0, -3.0, -3.0], "default", "ours")],
        "two": [runner(scripts, [-9.0, -7.0, -7.0], "two", "leave-one-out")],
        "four": [runner(scripts, [-9.0, -6.0, -6.0], "four", "leave-one-out")],
        "st": [runner(scripts, [-9.0, -1.0, -1.0], "st", "biased")],
    }
    finished = race.Race(Line(), race.Size((0.1,), 1, 2.0, 2), runs, [run for (run,) in runs.values()])
    found = race.headlines(finished)
    assert [row["which is"] for row in found] == ["four", "four"]
    assert found[0]["default's time / its own"] == "0.50"
    assert found[0]["its time to default's best / default's own"] == "not reached, > 1.50"


def test_runs_get_the_same_time_and_the_best_rate(scripts: dict[str, ModuleType], data: Path) -> None:
    race, vae = scripts["common"], scripts["vae"]
    digits = vae.load_digits({"curve": 3, "valid": 3, "test": 3})
    methods = (vae.DEFAULT, vae.AVERAGE)
    finished = race.run_race(digits, methods, race.Size((1e-3, 1e-7), 2, 0.05, 2, 3))
    assert [(run.method.name, run.rate, run.seed) for run in finished.tried] == [
        *((m.name, rate, 0) for m in methods for rate in (1e-3, 1e-7)),
        *((m.name, finished.runs[m.name][0].rate, 1) for m in methods),
    ]
    for run in finished.tried:
        assert run.seconds >= 0.05 and [row["seconds"] >= 0.025 * i for i, row in enumerate(run.curve)] == [True] * 3
        # No more than one step over.
        assert run.seconds - 0.05 <= 20 * run.seconds / run.steps
    # Baselines of TraceGraph stay in stores of their own.
    first, second = (run.state["params"] for run in finished.runs[vae.AVERAGE.name])
    names = [name for name in first if name.startswith("__baseline")]
    assert names and not torch.equal(first[names[0]], second[names[0]])
    assert not list(pyro.get_param_store().keys())


def test_belief_nets_are_the_same_program_for_all(scripts: dict[str, ModuleType], data: Path) -> None:
    vae = scripts["vae"]
    digits = vae.load_digits({"curve": 3, "valid": 3, "test": 3})
    x = digits.held_out("test")
    assert set(x[0].unique().tolist()) == {0.0, 1.0}
    figures = []
    for program in ("", "average", "net"):
        pyro.set_rng_seed(0)
        nets = vae.BeliefNet("linear", 2, digits.train.mean(0), program)
        pyro.set_rng_seed(1)
        figures.append(digits.measure(nets, x, 4))
    assert figures[0] == figures[1] == figures[2]


@pytest.fixture
def chorales(scripts: dict[str, ModuleType], data: Path) -> Any:
    return scripts["chorales"].load_chorales(4, 3)


def test_exact_likelihood_is_that_of_enumeration(scripts: dict[str, ModuleType], chorales: Any) -> None:
    rolls, lengths = chorales.held_out("test")
    assert int(lengths.min()) < rolls.shape[1]
    pyro.set_rng_seed(0)
    nets = chorales.programs("enumerate")
    loss = TraceEnum_ELBO(max_plate_nesting=1).loss(nets.model, nets.guide, rolls, lengths)
    exact = nets.log_likelihood(rolls, lengths).detach()
    assert float(exact.sum()) == pytest.approx(-loss, rel=1e-5)
    assert scripts["chorales"].exact_figure(nets, (rolls, lengths)) == pytest.approx(
        -loss / float(lengths.sum()), rel=1e-5
    )
    # What comes after the end counts for nothing.
    noise = torch.where((torch.arange(4) >= lengths[:, None])[..., None], 1.0 - rolls, rolls)
    torch.testing.assert_close(nets.log_likelihood(noise, lengths).detach(), exact)
    pyro.clear_param_store()


@pytest.mark.parametrize("program", ["", "onehot", "average"])
def test_bounds_of_chorales_get_close_to_the_exact_likelihood(
    scripts: dict[str, ModuleType], chorales: Any, program: str
) -> None:
    data = chorales.held_out("test")
    pyro.set_rng_seed(0)
    nets = chorales.programs(program)
    _, bound = chorales.measure(nets, data, 3000)
    exact = scripts["chorales"].exact_figure(nets, data)
    assert bound == pytest.approx(exact, abs=5e-3)
    assert chorales.measure(nets, data, 1)[0] < exact
    pyro.clear_param_store()


@pytest.mark.parametrize("name", ["vae", "sbn", "chorales"])
@pytest.mark.slow
def test_scripts_run(
    scripts: dict[str, ModuleType], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--smoke", "--output", str(tmp_path / "results")])
    scripts[name].main()
    with (tmp_path / "results" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == {method.name for method in scripts[name].METHODS}
    page = (tmp_path / "results" / f"{name}.md").read_text()
    assert page.startswith("# ") and "Machine: " in page
    assert (tmp_path / "results" / f"{name}.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["vae", "sbn", "chorales", "race"])
def test_scripts_say_so_where_data_is_missing(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--smoke"])
    monkeypatch.delenv("PYRO_BPQ_DATA", raising=False)
    scripts[name].main()
    assert "skipped, PYRO_BPQ_DATA names no folder" in capsys.readouterr().out


def test_times_to_a_loss_are_read_off_the_curve(scripts: dict[str, ModuleType]) -> None:
    race = scripts["race"]
    curve = " ".join(str(10.0 - i) for i in range(len(race.MARKS)))
    assert race.time_to(curve, 8.0) == pytest.approx(0.45) and race.time_to(curve, 7.5) == pytest.approx(0.525)
    assert race.time_to(curve, 10.0) == 0.15 and race.time_to(curve, 0.5) == math.inf
    own = {"program": "p", "two standard errors": 0.6, "does": "a", "curve": curve, "ms a step": 2.0}
    rows = [
        {**own, "method": "default", "loss": 4.0},
        {**own, "method": "twin", "loss": 4.0, "ms a step": 1.0},
        {**own, "method": "other", "loss": 8.0, "does": "b", "two standard errors": 0.8},
    ]
    _, twin, other = race.compared(rows)
    assert (twin["time"], twin["same"]) == (2.0, "yes")
    # The noise is one: nine is reached at the second mark.
    assert (other["time"], other["within noise"], other["same"]) == (pytest.approx(0.45), pytest.approx(0.3), "")


@pytest.mark.parametrize("name", ["HMM", "deep", "grid", "chain", "belief network of", "AutoNormal"])
def test_programs_of_the_first_steps_run_with_several_particles(scripts: dict[str, ModuleType], name: str) -> None:
    script = scripts["first_steps"]
    (whole,) = [program for program in script.PROGRAMS if program.startswith(name)]
    (model, guide, args), elbos = script.made(whole, 0)
    losses = {way: make().loss(model, guide, *args) for way, make in elbos.items()}
    assert all(map(math.isfinite, losses.values())), losses
    particles = Trace_ELBO(3, max_plate_nesting=1, vectorize_particles=True)
    assert math.isfinite(particles.loss(model, guide, *args))
    pyro.clear_param_store()
