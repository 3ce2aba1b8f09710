"""``make fuzz ARGS="--programs 5000 --config default --start 0 --workers 2"``: random programs by the thousand."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import re
import sys
import time
from collections import Counter, defaultdict

import torch

from fuzz.oracle import CONFIGS, CONTROLS, Verdict, check, draw
from fuzz.programs import NotRunnable
from fuzz.shrink import shrunk

Result = tuple[int, Verdict, frozenset[str], int]


def _start() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    gc.disable()
    # Pyro says at that level how it guesses the nesting of plates.
    logging.disable(logging.INFO)


def run(task: tuple[int, str]) -> Result:
    """One program."""
    seed, config = task
    if seed % 20 == 0:
        gc.collect()
    try:
        program = draw(seed, config)
    except NotRunnable as error:
        return seed, Verdict("skipped", f"NotRunnable: {error}"), frozenset(), 0
    return seed, check(program, config), program.features, program.rejected


def report(config: str, results: list[Result], seconds: float, shows_features: bool) -> bool:
    """Prints what was found; returns whether all is well."""
    kinds = Counter(verdict.kind for _, verdict, _, _ in results)
    rejected = sum(count for _, _, _, count in results)
    print(
        f"{config}: {len(results)} programs, served {kinds['served']}, failed {kinds['failed']}, "
        f"crashed {kinds['crash']}, skipped {kinds['skipped']}; {len(results) / seconds:.1f} a second; "
        f"{rejected} texts that stock Pyro does not run were drawn again"
    )
    reasons = (verdict.detail for _, verdict, _, _ in results if verdict.kind == "skipped")
    # Without the names of sites.
    skipped = Counter(re.sub(r"\(.*?\)", "", re.sub(r"'\w+'(, '\w+')*", "'...'", reason)) for reason in reasons)
    for reason, count in skipped.most_common(12):
        print(f"  skipped {count}: {reason}")
    bad = [(seed, verdict) for seed, verdict, _, _ in results if verdict.is_bad]
    for seed, verdict in bad[:40]:
        print(f"  {verdict.kind} seed {seed}: {verdict.error:.2g} {verdict.detail}")
    if len(bad) > 40:
        print(f"  ... and {len(bad) - 40} more: {[seed for seed, _ in bad[40:]]}")
    if shows_features:
        found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for _, verdict, features, _ in results:
            for feature in features:
                found[feature][0] += verdict.is_bad
                found[feature][1] += 1
        for feature, (wrong, count) in sorted(found.items(), key=lambda item: -item[1][0] / item[1][1]):
            print(f"  {wrong / count:6.1%}  {wrong:4d} of {count:4d}  {feature}")
    sys.stdout.flush()
    return not bad


def main() -> int:
    names = [*CONFIGS, *CONTROLS]
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="number of programs of each configuration")
    parser.add_argument("--config", default="one,default", help=f"one or more of {', '.join(names)}, or all")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--features", action="store_true", help="print how often programs with each feature fail")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one program and what is found")
    options = parser.parse_args()
    chosen = list(CONFIGS) if options.config == "all" else options.config.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown configuration {sorted(unknown)}; known are {names}")
    _start()
    if options.show is not None:
        program = draw(options.show, chosen[0])
        print(program)
        print(verdict := check(program, chosen[0]))
        if verdict.is_bad:
            print("\nCut down:\n")
            print(*shrunk(program, chosen[0]), sep="\n")
        return int(verdict.is_bad)
    is_well = True
    with multiprocessing.get_context("fork").Pool(options.workers, _start) as pool:
        for config in chosen:
            start = time.perf_counter()
            tasks = [(seed, config) for seed in range(options.start, options.start + options.programs)]
            results = list(pool.imap_unordered(run, tasks, chunksize=4))
            results.sort(key=lambda result: result[0])
            is_well &= report(config, results, time.perf_counter() - start, options.features)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
