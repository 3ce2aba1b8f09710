"""Runs the benchmarks one after the other: quick by default, ``--full`` for the published figures."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

SCRIPTS = (
    "toy.py",
    "chains.py",
    "dags.py",
    "convergence.py",
    "theorem2.py",
    "networks.py",
    "scaling.py",
    "overhead.py",
    "profile_step.py",
    "blackbox.py",
    "blackbox_normal.py",
    "advantages.py",
    "vae_variance.py",
    "gradients.py",
    "hindsight.py",
    "hindsight_ceiling.py",
    "hindsight_critics.py",
    "end_costs.py",
    "layer_critics.py",
    "row_context.py",
    "vae.py",
    "sbn.py",
    "chorales.py",
    "schedules.py",
    "background.py",
    "multi_sample.py",
    "bias.py",
    "paper.py",
    "gallery.py",
    "summary.py",
)


def main() -> int:
    """Runs every script; the exit status is the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all lengths and seeds; takes more than a day")
    options = parser.parse_args()
    arguments = ["--full"] if options.full else []
    folder = Path(__file__).parent
    return sum(subprocess.call([sys.executable, str(folder / name), *arguments]) != 0 for name in SCRIPTS)


if __name__ == "__main__":
    raise SystemExit(main())
