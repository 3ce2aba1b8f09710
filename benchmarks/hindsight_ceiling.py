r"""Hindsight on layers with all components evaluated at their other values: what no prediction of them could do better.

The variance of the guide's gradient over its squared norm at the weights of ``gradients.py``, after 1,000 steps: of the
lean leave-one-out with 8 samples, of the default, which predicts changes and corrects one component of a row, and of
the same with true changes of all components, whose step takes a hundred times as long. All methods take turns.

    python benchmarks/hindsight_ceiling.py [--smoke] [--output DIRECTORY]
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
import vae
from common import Row, arguments, table, write_csv, write_markdown
from gradients import QUICK, measure
from hindsight import drawn
from race import Method, ours, plain_leave_one_out

from pyro_bpq.estimators import Hindsight

PARTICLES, UNITS = 4, 200


def whole() -> Method:
    """All components are evaluated at their other values."""
    kind = Hindsight(draws=UNITS, crossed=True)
    return Method("hindsight, all components evaluated", lambda: ours(kind, PARTICLES), group="ours")


def main() -> None:
    """Measures, prints, writes ``hindsight_ceiling.csv`` and ``hindsight_ceiling.md``."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="pyro")
    digits = vae.load_digits({"curve": 1, "valid": 1, "test": 1})
    if digits is None:
        print("hindsight_ceiling.py: skipped, PYRO_BPQ_DATA names no folder with mnist.npz")
        return
    rows: list[Row] = []
    for depth, draws in ((2, 2),) if options.smoke else ((2, 20), (4, 16)):
        size = replace(QUICK, checkpoints=(1 if options.smoke else 1000,), learning=6, draws=draws, depths=(depth,))
        methods = (plain_leave_one_out(8), drawn(PARTICLES), whole())
        rows += measure(replace(digits, name=f"{depth} layers", depth=depth), methods, size, 0)
    text = "Gradients at fixed weights after 1,000 steps, one seed; 20 draws of each method with 2 layers, 16 with 4."
    print(table(rows))
    write_csv(options.output / "hindsight_ceiling.csv", rows)
    write_markdown(options.output / "hindsight_ceiling.md", "Hindsight with true changes", [text, table(rows)])


if __name__ == "__main__":
    main()
