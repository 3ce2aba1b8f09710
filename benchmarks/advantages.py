"""Bias and variance of the paper's advantages beside the lambda-return, both exact by enumeration.

Programs of ``tests/models.py``, whose guide does not move. The tables were fitted to 100 rollouts, 2000 with
``--full``, by one-step TD. *Bias* is the distance of the expected gradient of the guide from the exact one over the
latter's norm, *variance* the total variance over that norm squared.

    python benchmarks/advantages.py [--full] [--output DIRECTORY]
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pyro
import torch
from common import Row, arguments, progress, table, write_csv, write_markdown

from pyro_bpq import AllAction, LambdaReturn, ScoreFunction, TabularCritic, TraceBackpropQ_ELBO
from pyro_bpq.estimators import ParentAdvantage
from pyro_bpq.testing import exact_gradient, expected_moments

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from models import BY_NAME, Case

PROGRAMS = ("chain", "diamond")
ESTIMATORS = (
    ScoreFunction(),
    AllAction(),
    *(kind(lam) for kind in (LambdaReturn, ParentAdvantage) for lam in (0.0, 0.9, 1.0)),
)


def measure(case: Case, estimator: Any, steps: int) -> Row:
    """Bias and variance after some rollouts."""
    case.params()
    exact = {name: g for name, g in exact_gradient(case.model, case.guide).items() if name.startswith("q")}
    pyro.set_rng_seed(0)
    elbo = TraceBackpropQ_ELBO(estimator=estimator, critic=TabularCritic(), lam=0.0)
    for _ in range(steps):
        elbo.loss_and_grads(case.model, case.guide)
    case.params()
    moments = expected_moments(elbo.eval(), case.model, case.guide)
    norm = sum(float(g.square().sum()) for g in exact.values())
    bias = sum(float((moments.mean[name] - g).square().sum()) for name, g in exact.items())
    variance = sum(float(moments.variance[name].sum()) for name in exact)
    bias = (bias / norm) ** 0.5
    return {
        "program": case.name,
        "estimator": type(estimator).__name__,
        "lambda": getattr(estimator, "lam", "-"),
        "bias": 0.0 if bias < 1e-10 else bias,
        "variance": variance / norm,
    }


def main() -> None:
    """Measures and writes ``advantages.csv`` and ``advantages.md``."""
    options = arguments(__doc__)
    warnings.filterwarnings("ignore", module="pyro")
    torch.set_default_dtype(torch.float64)
    steps = 2000 if options.full else 5 if options.smoke else 100
    pairs = [(BY_NAME[name], estimator) for name in PROGRAMS for estimator in ESTIMATORS]
    rows = [measure(*pair, steps) for pair in progress(pairs, "estimators")]
    write_csv(options.output / "advantages.csv", rows)
    text = (
        "Gradient of the guide, by enumeration of all joint values. Bias: distance of the expected gradient from the "
        f"exact one, over its norm; 0 is below 1e-10. Variance: total, over the squared norm. Tables after {steps} "
        "rollouts of a guide that does not move, learned by one-step TD. `LambdaReturn` sums over the values of a site "
        "with the site's own critic; `ParentAdvantage` subtracts what the parents' critics predicted, and sums over no "
        "values."
    )
    write_markdown(options.output / "advantages.md", "Advantages and lambda-returns", [text, table(rows)])
    print(table(rows))


if __name__ == "__main__":
    main()
