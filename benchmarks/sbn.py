r"""Sigmoid belief networks of 2, 4, 8 and 16 layers: who reaches which held-out bound in which CPU time.

Layers of 200 Bernoulli latents above binary images of 784 pixels, one affine layer between each, and a guide of the
same shape; otherwise as in ``vae.py``. DisARM and its like take one more run of the programs for every layer.
References that are biased (ReinMax, straight-through) are shown and no rivals.

``--compiled`` races compiled steps; the time that it takes to make them is told apart.

    python benchmarks/sbn.py [--full | --all | --long | --compiled | --smoke] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

from dataclasses import replace

from common import arguments
from race import Method, Size, leave_one_out, ours, plain_leave_one_out, report, run_race
from vae import AVERAGE, DEFAULT, DEFAULT_ONE, DISARM, LATENTS, NET, REINMAX, STRAIGHT, begin

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import CrossedLeaveOneOut, Hindsight, LeaveOneOut, ScoreFunction

QUICK = Size(rates=(3e-3, 1e-2), seeds=1, seconds=8.0, slices=16)
FULL = Size(rates=(1e-3, 3e-3, 1e-2), seeds=3, seconds=120.0, slices=40)
LONG = Size(rates=(1e-3, 2e-3, 3e-3, 4e-3), seeds=5, seconds=60.0, slices=20)
COMPILED = Size(rates=(1e-3, 3e-3), seeds=3, seconds=40.0, slices=20)
SMOKE = Size(rates=(1e-3, 3e-3), seeds=2, seconds=0.01, slices=2, samples=3)


def crossed(particles: int) -> Method:
    """Leave-one-out beside each particle's own past."""
    return Method(f"crossed leave-one-out, {particles}", lambda: ours(CrossedLeaveOneOut(), particles), group="ours")


def hindsight(particles: int) -> Method:
    """Components averaged over their law given the layer above."""
    return Method(f"hindsight, {particles}", lambda: ours(Hindsight(crossed=True), particles), group="ours")


METHODS = (
    *(DEFAULT, DEFAULT_ONE, AVERAGE, NET, DISARM, REINMAX, STRAIGHT),
    *(leave_one_out(2), leave_one_out(4), leave_one_out(8)),
    *(crossed(2), crossed(4), crossed(8)),
    *(hindsight(2), hindsight(4), hindsight(8)),
    *(plain_leave_one_out(particles) for particles in (2, 4, 8)),
)
FEW = (DEFAULT, DEFAULT_ONE, AVERAGE, leave_one_out(2), plain_leave_one_out(4), DISARM, REINMAX)
# The default is hindsight with 4 particles.
STRONG = (DEFAULT, plain_leave_one_out(8), crossed(8))
COMPILE = (
    Method("default", lambda: TraceBackpropQ_ELBO(compile=True), group="ours"),
    Method("leave-one-out, 8", lambda: ours(ScoreFunction(LeaveOneOut()), 8, compile=True), group="leave-one-out"),
    Method("crossed leave-one-out, 8", lambda: ours(CrossedLeaveOneOut(), 8, compile=True), group="ours"),
)


def main() -> None:
    """Races, prints, writes ``sbn.csv``, ``sbn.md`` and ``sbn.png``, or ``sbn_long``, or ``sbn_compiled``."""
    options = arguments(__doc__)
    size, digits, number = begin(options, (QUICK, FULL, SMOKE, LONG), "sbn.py")
    if digits is None:
        return
    methods, part = (METHODS, "") if options.full or options.smoke else (FEW, "Some of the methods.")
    if options.long:
        methods, part = STRONG, "Long run: the rivals that came closest in short ones."
    if options.compiled:
        size, methods = replace(COMPILED, seeds=options.seeds or COMPILED.seeds), COMPILE
        part = (
            "Compiled steps; what it takes to make them, by the clock, is not among the seconds of training. Most runs "
            "found Inductor's cache warm."
        )
    depths = (2, 4, 8, 16) if options.full or options.all else (2, 4) if options.smoke else (4,)
    depths = (4, 2) if options.long or options.compiled else depths
    about = (
        f"Sigmoid belief networks with {LATENTS} Bernoulli latents a layer, affine nets between layers, a fair prior, "
        f"on MNIST binarised afresh at every visit; held-out images binarised once ({number} test images). " + part
    )
    name, races = "sbn_long" if options.long else "sbn_compiled" if options.compiled else "sbn", []
    for depth in depths:
        races.append(run_race(replace(digits, name=f"{depth} layers", depth=depth), methods, size))
        # After each race, since all of them take long.
        report(options.output, name, "Sigmoid belief networks on MNIST", about.strip(), races)


if __name__ == "__main__":
    main()
