r"""Processor time of ``import pyro_bpq`` over that of ``import torch, pyro``, in new processes.

python benchmarks/import_time.py [--full] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from common import Row, arguments, table, write_csv, write_markdown

STOPWATCH = r"""
import json, time
start = time.process_time()
import torch, pyro
middle = time.process_time()
import pyro_bpq
print(json.dumps([middle - start, time.process_time() - middle]))
"""


def seconds() -> tuple[float, float]:
    """Processor time of both imports in one new process."""
    done = subprocess.run([sys.executable, "-c", STOPWATCH], capture_output=True, text=True, check=True)
    theirs, ours = json.loads(done.stdout)
    return theirs, ours


def main() -> None:
    """Measures, prints, writes ``import_time.csv`` and ``import_time.md``."""
    options = arguments(__doc__)
    repeats = options.seeds or (15 if options.full else 5)
    seconds()  # Fills the caches of files.
    found = [seconds() for _ in range(repeats)]
    row: Row = {
        "import torch, pyro: s": statistics.median(theirs for theirs, _ in found),
        "import pyro_bpq: s": statistics.median(ours for _, ours in found),
        "ratio": statistics.median(ours / theirs for theirs, ours in found),
        "processes": repeats,
    }
    write_csv(options.output / "import_time.csv", [row])
    page = table([row])
    print(page)
    write_markdown(options.output / "import_time.md", "Time of an import", ["Medians, processor time.", page])


if __name__ == "__main__":
    main()
