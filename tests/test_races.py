"""The races of ``benchmarks/``: their arithmetic by hand, programs against exact figures, scripts briefly."""

from __future__ import annotations

import csv
import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from torch import nn

FOLDER = str(Path(__file__).parents[1] / "benchmarks")
NAMES = ("race", "vae", "sbn", "chorales", "toy", "profile_step", "gradients", "hindsight_critics")


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
    elbo, bound = scripts["race"].bounds(coin, (x,), 500)
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
    coin, elbo, x = Coin(), scripts["race"].PlainLeaveOneOut(3), torch.zeros(250)
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
    race = scripts["race"]
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
    race = scripts["race"]
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
    race = scripts["race"]
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
    race, vae = scripts["race"], scripts["vae"]
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


@pytest.mark.parametrize("program", ["", "onehot", "context", "average"])
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


def test_expected_toy_costs_and_gradients(scripts: dict[str, ModuleType]) -> None:
    problem = scripts["toy"].Quadratic(
        "three", torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 3.0]]), 0.49
    )
    logits = torch.tensor([0.3, -1.0, 0.5])
    values = torch.tensor([[i & 1, i >> 1 & 1, i >> 2] for i in range(8)]).float()
    p = logits.sigmoid()
    weights = torch.where(values == 1, p, 1 - p).prod(-1)
    torch.testing.assert_close(problem.expected(logits), (weights * problem.cost(values)).sum())
    # One more step of exact gradients than none does not raise the cost.
    path = problem.path(20, 0.05)
    assert problem.expected(path[-1]) < problem.expected(path[0])


def test_toy_errors_find_a_bias(scripts: dict[str, ModuleType]) -> None:
    toy = scripts["toy"]
    size = toy.Size(rows=400, calls=3, warm_up=3, steps=1, rates=(0.1,), seeds=1)
    problem, logits = toy.quadratics()[0], torch.tensor([1.0])
    pyro.set_rng_seed(0)
    by_name = {method.name: method for method in toy.METHODS}
    assert toy.error(problem, by_name["default"], logits, size)[0] < 1e-8
    few, many = (toy.error(problem, by_name[f"leave-one-out, {n}"], logits, size) for n in (2, 8))
    assert few[0] > 3.0 * many[0] and few[1] < 15.0 and many[1] < 15.0
    biased = toy.Method("half", lambda: Half())
    assert toy.error(problem, biased, logits, size)[1] > 15.0


class Half(TraceEnum_ELBO):
    """A biased estimator: twice leave-one-out's gradient."""

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        from pyro_bpq import LeaveOneOut, ScoreFunction, TraceBackpropQ_ELBO

        elbo = TraceBackpropQ_ELBO(
            2, max_plate_nesting=1, vectorize_particles=True, estimator=ScoreFunction(LeaveOneOut()), critic=None
        )
        loss = elbo.loss_and_grads(model, guide, *args, **kwargs)
        args[0].grad *= 2.0
        return loss


@pytest.mark.parametrize("name", ["vae", "sbn", "chorales", "toy"])
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
    assert name == "toy" or (tmp_path / "results" / f"{name}.png").stat().st_size > 1000


@pytest.mark.slow
def test_gradients_are_compared_for_every_method(
    scripts: dict[str, ModuleType], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gradients", "--smoke", "--output", str(tmp_path / "results")])
    scripts["gradients"].main()
    with (tmp_path / "results" / "gradients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["task"] for row in rows} == {"linear VAE", "nonlinear VAE", "2 layers", "3 frames, 16 states"}
    assert all(float(row["variance / squared gradient"]) > 0.0 for row in rows)
    assert {"default", "ReinMax (biased)"} <= {row["method"] for row in rows if row["task"] == "linear VAE"}


def test_hindsight_with_critics_by_hand_is_unbiased(scripts: dict[str, ModuleType]) -> None:
    largest, planted = scripts["hindsight_critics"].largest_bias()
    assert largest < 1e-12 and planted > 1e-4


def known_gradients(module: ModuleType) -> dict[str, dict[str, float]]:
    """Rows of three methods, two unbiased and one off by half of the mean, which is known; so are the variances."""
    random = torch.Generator().manual_seed(0)
    true = torch.full((400,), 0.5, dtype=torch.float64)

    def drawer(name: str, group: str, factor: float, scale: float) -> SimpleNamespace:
        noise = torch.randn(200, 400, generator=random, dtype=torch.float64)
        drawn = list(factor * true + scale * noise)
        found = SimpleNamespace(
            method=SimpleNamespace(name=name, group=group), gradients=drawn, seconds=[0.001, 0.002, 0.004]
        )
        found.moments = lambda: module.Drawer.moments(found)
        return found

    drawers = [drawer("a", "ours", 1.0, 1.0), drawer("b", "unbiased", 1.0, 0.1), drawer("c", "biased", 1.5, 1.0)]
    return {row["method"]: row for row in module.compare(drawers)}


def check_known_gradients(rows: dict[str, dict[str, float]]) -> None:
    # Four standard errors of variances from 200 draws of 400 components (2 %), and of squared means (5 %).
    assert rows["a"]["variance / squared gradient"] == pytest.approx(4.0, rel=0.02)
    assert rows["b"]["variance / squared gradient"] == pytest.approx(0.04, rel=0.05)
    assert rows["a"]["variance x ms"] == pytest.approx(8.0, rel=0.02)
    assert rows["c (biased)"]["squared bias / squared gradient"] == pytest.approx(0.25, rel=0.05)
    # The standard deviation of z is the square root of 2 / 400.
    assert abs(rows["a"]["z"] - 1.0) < 0.3 and abs(rows["b"]["z"] - 1.0) < 0.3 and rows["c (biased)"]["z"] > 10.0


def test_variance_and_bias_at_fixed_weights(scripts: dict[str, ModuleType]) -> None:
    check_known_gradients(known_gradients(scripts["gradients"]))


@pytest.mark.parametrize("fault", ["variance", "squared mean"])
def test_wrong_variances_and_means_are_caught(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    moments = scripts["gradients"].Drawer.moments

    def wrong(drawer: Any) -> tuple[torch.Tensor, float]:
        mean, variance = moments(drawer)
        return (mean, 1.05 * variance) if fault == "variance" else (1.05 * mean, variance)

    monkeypatch.setattr(scripts["gradients"].Drawer, "moments", wrong)
    with pytest.raises(AssertionError):
        check_known_gradients(known_gradients(scripts["gradients"]))


def test_weights_stand_still_where_gradients_are_compared(scripts: dict[str, ModuleType], data: Path) -> None:
    module, task = scripts["gradients"], scripts["chorales"].load_chorales(3, 3)
    weights = {k: v.clone() for k, v in task.programs("").state_dict().items()}
    drawer = module.Drawer(task, scripts["race"].leave_one_out(2), weights, 0)
    drawer.learn(2)
    batch = task.batch(torch.Generator().manual_seed(0))
    names = module.guide_parameters(drawer.programs, batch)
    drawer.draw(batch, names)
    assert {name.split(".")[0] for name in names} == {"reader", "state", "last"}
    assert all(torch.equal(value, weights[name]) for name, value in drawer.programs.state_dict().items())
    assert len(drawer.gradients) == 1 and drawer.gradients[0].norm() > 0.0


@pytest.mark.parametrize("name", ["vae", "sbn", "chorales", "gradients"])
def test_scripts_say_so_where_data_is_missing(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--smoke"])
    monkeypatch.delenv("PYRO_BPQ_DATA", raising=False)
    scripts[name].main()
    assert "skipped, PYRO_BPQ_DATA names no folder" in capsys.readouterr().out


def test_profiled_functions_exist(scripts: dict[str, ModuleType]) -> None:
    """A function that has moved would be profiled as nothing."""
    files = {path.name: path.read_text() for path in (Path(FOLDER).parent / "pyro_bpq").rglob("*.py")}
    for file, name in scripts["profile_step"].PARTS:
        if file not in ("_tensor.py", "optim.py"):
            assert f"def {name}(" in files[file], (file, name)
