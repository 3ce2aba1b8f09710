"""The files of ``examples/``: what a third party would write, checked as it would check it."""

from __future__ import annotations

import functools
import importlib
import math
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import trained
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.critics import CriticShape
from pyro_bpq.estimators import Estimator
from pyro_bpq.testing import assert_unbiased, check_estimator, exact_gradient, sample_gradients, z_scores
from pyro_bpq.testing.contract import Problem, default_problems

ROOT = Path(__file__).parent.parent / "examples"
FILES = sorted(ROOT.glob("*/*.py"))
# By file: estimators, by what makes them; with a number of particles where their gradient on its program is without
# noise of their own, so that it can be enumerated.
ESTIMATORS: dict[str, list[tuple[str, int | None]]] = {
    "arm": [("ARM()", None)],
    "arms": [("ARMS()", None), ("ARMS(samples=3, copula=RotationCopula())", None)],
    "disarm_tree": [("DisARMTree()", None)],
    "double_cv": [("DoubleCV()", 2), ("DoubleCV(scale=0.5)", 2)],
    "generalised_reparameterisation": [],
    "measure_valued": [("MeasureValued()", 1)],
    "rodeo": [("RODEO()", 2)],
    "sum_and_sample": [("SumAndSample(heaviest=5)", 1), ("SumAndSample(heaviest=1)", None)],
    "unordered_set": [("UnorderedSet(samples=5)", 1), ("UnorderedSet(samples=2)", None)],
}
CASES = [(file, text, particles) for file, found in ESTIMATORS.items() for text, particles in found]


@functools.cache
def load(name: str) -> ModuleType:
    (path,) = (path for path in FILES if path.stem == name)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        return importlib.import_module(name)


def make(file: str, text: str) -> Any:
    return eval(text, vars(load(file)))


def trained_on(file: str, estimator: Any, particles: int, **more: Any) -> tuple[TraceBackpropQ_ELBO, Any, Any]:
    program = load(file)
    elbo = trained(TraceBackpropQ_ELBO(particles, estimator=estimator, **more), program.model, program.guide, steps=15)
    return elbo.eval(), program.model, program.guide


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_runs_and_imports_public_names_only(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in path.read_text().splitlines() if "pyro_bpq" in line and "import" in line]
    assert all(line.split()[1].count(".") <= 1 for line in lines), lines
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        runpy.run_path(str(path), run_name="__main__")
    assert math.isfinite(float(capsys.readouterr().out.split(":")[1]))


def test_every_estimator_is_checked() -> None:
    for path in FILES:
        if path.parent.name == "estimators":
            program = load(path.stem)
            own = {k for k, v in vars(program).items() if isinstance(v, type) and v.__module__ == path.stem}
            kinds = {k for k in own if issubclass(getattr(program, k), Estimator)} - {"OnSlopes"}
            # One without finite sites has a test of its own below.
            tested = {text.split("(")[0] for text, _ in ESTIMATORS[path.stem]} or {"GeneralisedReparameterisation"}
            assert kinds == tested


def contracts() -> list[Any]:
    """Estimators and problems, every second problem by default; all with ``make test-all``."""
    found = []
    for n, (file, text, _) in enumerate(CASES):
        for i, problem in enumerate(default_problems()):
            marks = [pytest.mark.slow] if (i + n) % 3 else []
            found.append(pytest.param(file, text, problem, id=f"{text}-{problem.kind}-{problem.size}", marks=marks))
    return found


@pytest.mark.parametrize(("file", "text", "problem"), contracts())
def test_estimator_keeps_the_contract(file: str, text: str, problem: Problem) -> None:
    check_estimator(make(file, text), problems=[problem])


@pytest.mark.parametrize(("file", "text", "particles"), CASES)
def test_gradient_on_the_program_is_unbiased(file: str, text: str, particles: int | None) -> None:
    estimator = make(file, text)
    if particles is not None:
        assert_unbiased(*trained_on(file, estimator, particles))
        return
    elbo, model, guide = trained_on(file, estimator, 3000, vectorize_particles=True, max_plate_nesting=1)
    samples, truth = sample_gradients(elbo, model, guide, num_samples=40), exact_gradient(model, guide)
    z = z_scores(samples, truth, max_relative_error=0.02)["logits"]
    assert float(z.abs().max()) < 4.0


def test_orders_of_three_by_hand() -> None:
    def order(a: float, b: float, c: float) -> float:
        return a * b / (1 - a) * c / (1 - a - b)

    first, second = load("unordered_set").orders(torch.tensor([0.5, 0.3, 0.1]))
    weights = [order(0.5, 0.3, 0.1) + order(0.5, 0.1, 0.3), order(0.3, 0.5, 0.1) + order(0.3, 0.1, 0.5)]
    weights.append(order(0.1, 0.5, 0.3) + order(0.1, 0.3, 0.5))
    torch.testing.assert_close(first, torch.tensor(weights) / sum(weights))
    torch.testing.assert_close(second[0, 1], torch.tensor(order(0.5, 0.3, 0.1) / weights[0]))


# Values without finite support, against sums and quadrature: distribution, parameters, prior, estimator.
DENSITIES: dict[str, tuple[Any, tuple[float, ...], Any, str]] = {
    "normal": (dist.Normal, (0.8, 0.6), dist.Normal(0.0, 1.0), "measure_valued"),
    "poisson": (dist.Poisson, (1.7,), dist.Poisson(3.0), "measure_valued"),
    "exponential": (dist.Exponential, (2.5,), dist.Exponential(1.0), "measure_valued"),
    "gamma": (dist.Gamma, (0.8, 1.3), dist.Gamma(1.5, 1.0), "generalised_reparameterisation"),
    "beta": (dist.Beta, (0.9, 1.7), dist.Beta(2.0, 1.5), "generalised_reparameterisation"),
    "log_normal": (dist.LogNormal, (-0.3, 0.35), dist.LogNormal(0.2, 0.5), "generalised_reparameterisation"),
}


def nodes(kind: str) -> tuple[Tensor, Any]:
    """Values and their widths: all counts, or midpoints of a grid that is fine at the left end."""
    if kind == "poisson":
        return torch.arange(80.0), 1.0
    low, high = {"normal": (-6.0, 8.0), "beta": (1e-12, 1.0 - 1e-12)}.get(kind, (1e-12, 30.0))
    edges = low + (high - low) * torch.linspace(0.0, 1.0, 400_001) ** 4
    return (edges[1:] + edges[:-1]) / 2, edges.diff()


@pytest.mark.parametrize("kind", DENSITIES)
def test_density_has_the_gradient_of_quadrature(kind: str) -> None:
    law, start, prior, file = DENSITIES[kind]
    estimator = make(file, "MeasureValued()" if file == "measure_valued" else "GeneralisedReparameterisation()")

    def model() -> None:
        z = pyro.sample("z", prior)
        pyro.sample("x", dist.Normal(z, 0.7), obs=torch.tensor(1.4))

    def guide() -> None:
        params = [pyro.param(f"p{i}", torch.tensor(number)) for i, number in enumerate(start)]
        pyro.sample("z", law(*params), infer={"bpq": {"estimator": estimator}})

    exact, (z, width) = [torch.tensor(number, requires_grad=True) for number in start], nodes(kind)
    log_q = law(*exact).log_prob(z)
    cost = log_q - prior.log_prob(z) - dist.Normal(z, 0.7).log_prob(torch.tensor(1.4))
    gradients = torch.autograd.grad((log_q.exp() * cost * width).sum(), exact)
    truth = {f"p{i}": gradient for i, gradient in enumerate(gradients)}
    elbo = TraceBackpropQ_ELBO(num_particles=20_000, vectorize_particles=True, max_plate_nesting=1)
    samples = sample_gradients(trained(elbo, model, guide, steps=3).eval(), model, guide, num_samples=60)
    scores = [z_scores(each, truth, max_relative_error=0.03) for each in (samples, {n: -s for n, s in samples.items()})]
    good, wrong = (max(float(z.abs().max()) for z in score.values()) for score in scores)
    assert good < 4.0 < wrong


def test_attention_serves_programs_and_keeps_estimators_unbiased() -> None:
    program = load("attention")
    critic = program.AttentionCritic(width=4, hidden=(8,))
    elbo = trained(TraceBackpropQ_ELBO(1, critic=critic, window=1000), program.model, program.guide, steps=20)
    assert elbo.plan.layout.members(elbo.network.q_nodes("z3")[0])[1] == 0
    weights = elbo.critics.weights()
    moved = [name for name, weight in weights.items() if "head" in name and bool(weight.any())]
    assert moved and any("embeddings" in name for name in weights)
    assert_unbiased(elbo.eval(), program.model, program.guide)


def test_attention_does_not_see_empty_places() -> None:
    shape = CriticShape(2, 3 + 5, 1, 2, members=((5, 1),))
    module = load("attention").AttentionCritic().build(shape, torch.Generator().manual_seed(0)).double()
    for i, weight in enumerate(module.parameters()):
        weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
    context = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    few = torch.cat([context[..., :2], torch.zeros(2, 4, 3), context[..., 5:]], -1)
    module(context, None).square().sum().backward()
    assert all(bool(weight.grad.flatten(1).any(1).all()) for weight in module.parameters())
    shape = CriticShape(2, 3 + 2, 1, 2, members=((2, 1),))
    fewer = load("attention").AttentionCritic().build(shape, torch.Generator()).double()
    fewer.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(few, None), fewer(torch.cat([few[..., :2], few[..., 5:]], -1), None))


def test_correction_of_a_log_normal_vanishes() -> None:
    loc, scale = torch.tensor(-0.3, requires_grad=True), torch.tensor(0.6, requires_grad=True)
    estimator = make("generalised_reparameterisation", "GeneralisedReparameterisation()")
    check_estimator(estimator)
    log_q = estimator.correction(dist.LogNormal(loc, scale), torch.tensor(1.7))
    for gradient in torch.autograd.grad(log_q, (loc, scale)):
        assert abs(float(gradient)) < 1e-12
