r"""Sigmoid belief networks of 2 and 4 layers: who reaches which held-out bound in which CPU time.

Layers of 200 Bernoulli latents above binary images of 784 pixels, one affine layer between each, and a guide of the
same shape; otherwise as in ``vae.py``. DisARM takes one more run of the programs for every layer.

``--compiled`` races compiled steps; what it takes to make them, by the clock, is not among the seconds of training.

    python benchmarks/sbn.py [--long | --compiled | --smoke] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

from dataclasses import replace

from common import (
    DEFAULT,
    DEFAULT_COMPILED,
    Method,
    Size,
    arguments,
    leave_one_out,
    ours,
    plain_leave_one_out,
    report,
    result,
    run_race,
)
from vae import METHODS, begin

from pyro_bpq.estimators import CrossedLeaveOneOut

QUICK = Size(rates=(3e-3, 1e-2), seeds=1, seconds=8.0, slices=16)
LONG = Size(rates=(1e-3, 2e-3, 3e-3, 4e-3), seeds=5, seconds=60.0, slices=20)
COMPILED = Size(rates=(1e-3, 3e-3), seeds=3, seconds=40.0, slices=20)

CROSSED = "crossed leave-one-out, 8"
# The default is hindsight with 4 particles.
STRONG = (DEFAULT, plain_leave_one_out(8), Method(CROSSED, lambda: ours(CrossedLeaveOneOut(), 8), group="ours"))
COMPILE = (
    *(DEFAULT_COMPILED, leave_one_out(8, compile=True)),
    Method(CROSSED, lambda: ours(CrossedLeaveOneOut(), 8, compile=True), group="ours"),
)


def main() -> None:
    """Races, prints, writes ``sbn.csv``, ``sbn.md`` and ``sbn.png``, or ``sbn_long``, or ``sbn_compiled``."""
    options = arguments(__doc__, "smoke compiled seeds")
    size, digits = begin(options, QUICK, LONG, COMPILED)
    if digits is None:
        return
    methods, races = COMPILE if options.compiled else STRONG if options.full else METHODS, []
    for depth in (4, 2) if options.full or options.compiled or options.smoke else (4,):
        races.append(run_race(replace(digits, name=f"{depth} layers", depth=depth), methods, size))
        # After each race, since all of them take long.
        report(result("sbn", options), "Sigmoid belief networks on MNIST", __doc__, races)


if __name__ == "__main__":
    main()
