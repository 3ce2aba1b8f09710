"""The programs of ``gallery/``: each trains, is short, and its loss is Pyro's."""

from __future__ import annotations

import ast
import csv
import runpy
from pathlib import Path
from types import SimpleNamespace

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from steps import fresh, from_seed

from pyro_bpq import TraceBackpropQ_ELBO

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "gallery").glob("*.py"))
each = pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)


def load(path: Path) -> SimpleNamespace:
    pytest.importorskip("sklearn")
    torch.set_default_dtype(torch.float32)
    return SimpleNamespace(**runpy.run_path(str(path)))


@each
def test_program_trains_and_its_loss_is_that_of_pyro(path: Path) -> None:
    program = load(path)
    args = program.data()
    fresh()
    elbo = TraceBackpropQ_ELBO()
    svi = SVI(program.model, program.guide, Adam({"lr": program.LR}), elbo)
    for _ in range(3):
        assert torch.isfinite(torch.tensor(svi.step(*args)))
    assert elbo.plan is not None and elbo.info
    if "steer the program" not in repr(elbo):
        assert set(elbo.info) == set(elbo.plan.layout.specs)
    assert all(bool(p.grad is None or p.grad.isfinite().all()) for _, p in pyro.get_param_store().named_parameters())
    # After training, an evaluation takes as many particles as a step.
    judges = TraceBackpropQ_ELBO(num_particles=1), Trace_ELBO()
    losses = [from_seed(1, judge.loss, program.model, program.guide, *args) for judge in judges]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@each
def test_program_is_short(path: Path) -> None:
    text = path.read_text()
    start = min(node.lineno for node in ast.parse(text).body[1:] if not isinstance(node, (ast.Import, ast.ImportFrom)))
    assert len([line for line in text.splitlines()[start - 1 :] if line.strip()]) <= 32


def test_every_program_has_its_figures() -> None:
    with (ROOT / "benchmarks" / "results" / "gallery.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["program"] for row in rows] == [path.stem.replace("_", " ") for path in PROGRAMS]
    assert len(PROGRAMS) == 10
    for row in rows:
        for elbo in ("TraceBackpropQ_ELBO", "TraceGraph_ELBO", "Trace_ELBO"):
            assert float(row[elbo]) < 0.0 < float(row[f"ms of {elbo}"])
