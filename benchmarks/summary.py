"""The table of results by kind of model: the default beside the best of Pyro's ELBOs and beside leave-one-out.

Nothing is measured here: the figures follow from the result files of ``race.py``, ``vae.py --long``, ``sbn.py --long``,
``chorales.py --long`` and ``chains.py``. Run it after these.

*Factor*: the time that the other method takes to the loss at which it ends, over the default's time to that loss:
above 1 the default is faster; median over programs, lowest and highest. In the race it is at most 6.67, since losses
are first compared after 0.15 of the time. Of the ELBOs of Pyro, and of the numbers of particles of leave-one-out, that
with the smallest factor counts. One row has squared errors of the gradient at equal time, over ours.
"""

from __future__ import annotations

import re
from collections import defaultdict

from common import RESULTS, Row, arguments, median, publish, read_tables

LENGTH = 50
#: Programs of the race by kind; of the programs that are missing the time was not recorded.
KINDS = {
    "mixture": ("mixture, 1000 rows", "mixture, 10000 rows", "mixture, heavy tails"),
    "chain of few values": ("chain of 20", "chain of 50", "chains of 32 rows"),
    "VAE, one layer of latents": ("linear VAE", "linear VAE, 1 row"),
    "small layers": ("two layers", "three layers", "four layers"),
    "few sites": ("six bits, 20 rows", "alarm", "kinds and levels", "diagnosis"),
    "labels and styles": ("labels and styles",),
    "spike and slab": ("spike and slab",),
    "Python branches on sampled values": (
        *("grammar", "branch", "loop", "number", "search", "machine"),
        *("gates", "sentence", "failures", "table of 20", "models"),
    ),
}
LONG = {
    "VAE 784-200-784, 60 s": "vae_long.md",
    "layers of 200 units, 60 s": "sbn_long.md",
    "Markov model with nets, 60 s": "chorales_long.md",
}
PYRO = ("Trace_ELBO", "TraceGraph_ELBO")
LEAVE_ONE_OUT = ("leave-one-out", "program order, 4", "plain leave-one-out")

Rival = tuple[float, str]


def raced() -> dict[str, dict[str, Rival]]:
    """For each program of the race the smallest factor over Pyro's ELBOs and over leave-one-out, with its method."""
    (rows,) = read_tables(RESULTS / "race.md")
    found: dict[str, dict[str, Rival]] = defaultdict(dict)
    for row in rows:
        for family, names in (("Pyro", PYRO), ("leave-one-out", LEAVE_ONE_OUT)):
            if row["method"].startswith(names) and row["time"]:
                rival = (1.0 / float(row["time"]), row["method"])
                found[row["program"]][family] = min(rival, found[row["program"]].get(family, rival))
    return found


def long_runs(file: str) -> list[dict[str, Rival]]:
    """The same for each task of a long run, from its table of rivals."""
    found = []
    for rows in read_tables(RESULTS / file):
        if "against" in rows[0]:
            one = {}
            for row in rows:
                family = "Pyro" if row["against"].startswith("TraceGraph") else "leave-one-out"
                # Where the default does not reach the rival's bound, the rival's time to the default's is compared.
                took, back = row["default's time / its own"], row["its time to default's best / default's own"]
                factor = _first(back) if took.startswith("not") else 1.0 / _first(took)
                one[family] = (factor, row["which is"])
            found.append(one)
    return found


def long_chain() -> dict[str, Rival]:
    """Squared error of the gradient at equal time, over ours; of Pyro's baselines the better one."""
    (rows,) = read_tables(RESULTS / "chains.md")
    (row,) = [row for row in rows if row["chain"] == "markov" and row["T"] == str(LENGTH)]
    pyros = [_first(value) for name, value in row.items() if name.startswith("gain over TraceGraph")]
    particles = f"leave-one-out, {row['particles of leave-one-out']}"
    return {"Pyro": (min(pyros), ""), "leave-one-out": (_first(row["gain over leave-one-out"]), particles)}


def summary() -> list[Row]:
    """The rows of the table."""
    race = raced()
    groups = {kind: [race[program] for program in programs] for kind, programs in KINDS.items()}
    groups[f"chain of {LENGTH} sites, 1000 particles: squared error of the gradient"] = [long_chain()]
    for kind, file in LONG.items():
        groups[kind] = long_runs(file)
    return [_row(kind, group) for kind, group in groups.items()]


def _row(kind: str, group: list[dict[str, Rival]]) -> Row:
    row: Row = {"kind": kind, "programs": len(group)}
    for family in ("Pyro", "leave-one-out"):
        rivals = [one[family] for one in group if family in one]
        factors = [factor for factor, _ in rivals] or [""]
        row |= {family: median(factors) if rivals else "", f"{family} lowest": min(factors)}
        row[f"{family} highest"] = max(factors)
    counts = {int(re.findall(r"\d+", one["leave-one-out"][1])[0]) for one in group if "leave-one-out" in one}
    return row | {"particles of leave-one-out": " or ".join(map(str, sorted(counts)))}


def _first(text: str) -> float:
    """The median of a cell that has quartiles or a range as well."""
    return float(text.split()[0])


def main() -> None:
    """Writes ``results/summary.csv`` and ``summary.md``."""
    output, rows = arguments(__doc__).output, summary()
    publish(output / "summary", "Summary", __doc__, rows, rows)


if __name__ == "__main__":
    main()
