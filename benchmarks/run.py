"""Runs the benchmarks one after the other: quick by default, ``--full`` for the published figures."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

# NumPyro's steps, which need another environment, are measured by ``compiled.py --numpyro PYTHON``.
NAMES = "variances chains race vae sbn chorales blackbox simulators bias paper gallery compiled counts air summary"


def main() -> int:
    """Runs every script; the exit status is the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all lengths and seeds; takes more than a day")
    arguments = ["--full"] if parser.parse_args().full else []
    scripts = [str(Path(__file__).with_name(f"{name}.py")) for name in NAMES.split()]
    return sum(subprocess.call([sys.executable, script, *arguments]) != 0 for script in scripts)


if __name__ == "__main__":
    raise SystemExit(main())
