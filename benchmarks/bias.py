"""How biased gradients are: exact expectations of Pyro's ELBOs and ours on the enumerable programs of the tests.

Nothing is sampled: a step is run for every joint outcome (``pyro_bpq.testing``). Expected gradients of the component
with the largest error, and the largest error over all components; 0 is below 1e-10. Programs: ``tests/models.py``;
``--full`` takes all, the quick run those where one of Pyro's estimators is biased. One particle, leave-one-out two;
critics had 30 steps of training.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyro
import torch
from common import Row, arguments, flat, progress, publish
from pyro.infer import Trace_ELBO, TraceGraph_ELBO

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import LeaveOneOut, ScoreFunction
from pyro_bpq.testing import exact_gradient, expected_gradient

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from models import CASES, Case

ROUNDING = 1e-10


def measure(case: Case) -> Row:
    """Exact and expected gradients of the component in which ``TraceGraph_ELBO`` errs most; largest errors."""
    case.params()
    exact = exact_gradient(case.model, case.guide, *case.args)
    pyro.set_rng_seed(0)
    ours = TraceBackpropQ_ELBO(1)
    for _ in range(30):
        ours.loss_and_grads(case.model, case.guide, *case.args)
    elbos = {
        "TraceGraph_ELBO": TraceGraph_ELBO(),
        "Trace_ELBO": Trace_ELBO(),
        "leave-one-out": TraceBackpropQ_ELBO(2, estimator=ScoreFunction(LeaveOneOut())).eval(),
        "TraceBackpropQ_ELBO": ours.eval(),
    }
    case.params()
    found = {name: expected_gradient(elbo, case.model, case.guide, *case.args) for name, elbo in elbos.items()}
    whole = {m: flat(own.get(name, torch.zeros_like(g)) for name, g in exact.items()) for m, own in found.items()}
    errors = {method: (gradient - flat(exact.values())).abs() for method, gradient in whole.items()}
    worst = int(sum(errors.values()).argmax())
    names = [name for name, g in exact.items() for _ in range(g.numel())]
    row: Row = {"program": case.name, "component of": names[worst], "exact": float(flat(exact.values())[worst])}
    row |= {method: float(gradient[worst]) for method, gradient in whole.items()}
    largest = {f"error of {method}": float(error.max()) for method, error in errors.items()}
    return row | {name: error if error > ROUNDING else 0.0 for name, error in largest.items()}


def main() -> None:
    """Measures and writes ``results/bias.csv`` and ``bias.md``."""
    options = arguments(__doc__)
    torch.set_default_dtype(torch.float64)
    chosen = [c for c in CASES if options.full or not (c.trace_is_unbiased and c.tracegraph_is_unbiased)]
    rows = [measure(case) for case in progress(chosen, "programs")]
    publish(options.output / "bias", "Bias", __doc__, rows, rows)


if __name__ == "__main__":
    main()
