"""The table of the README: three programs, each beside leave-one-out and ``TraceGraph_ELBO``.

Nothing is measured here: the figures follow from the result files of ``chains.py``, ``vae.py --long`` and ``bias.py``.
Run it after these.
"""

from __future__ import annotations

from pathlib import Path

from common import Row, arguments, read_csv, read_tables, table, write_csv, write_markdown

RESULTS = Path(__file__).parent / "results"
LENGTH = 50
PROGRAM = "dynamic_sites"


def chain() -> Row:
    """Squared error of the gradient at equal time, as multiples of ours. Of Pyro's baselines the better one."""
    (rows,) = read_tables(RESULTS / "chains.md")
    (row,) = [row for row in rows if row["chain"] == "markov" and row["T"] == str(LENGTH)]
    pyros = [_first(value) for name, value in row.items() if name.startswith("gain over TraceGraph")]
    return {
        "what": f"chain of {LENGTH} sites: squared error of the gradient at equal time",
        "ours": 1.0,
        "leave-one-out": _first(row["gain over leave-one-out"]),
        "TraceGraph_ELBO": min(pyros),
    }


def vae() -> Row:
    """Time to the rival's best bound, as multiples of ours. Of each kind the rival that ended best."""
    headlines = {row["against"]: row for row in read_tables(RESULTS / "vae_long.md")[0]}
    took = {name: _first(row["default's time / its own"]) for name, row in headlines.items()}
    return {
        "what": "linear VAE: time to the rival's best bound of 60 s",
        "ours": 1.0,
        "leave-one-out": 1.0 / took["leave-one-out at its best"],
        "TraceGraph_ELBO": 1.0 / took["TraceGraph_ELBO"],
    }


def branches() -> Row:
    """Error of the expected gradient, over the exact one."""
    (row,) = [row for row in read_csv(RESULTS / "bias.csv") if row["program"] == PROGRAM]
    names = {"ours": "TraceBackpropQ_ELBO", "leave-one-out": "leave-one-out", "TraceGraph_ELBO": "TraceGraph_ELBO"}
    errors = {short: row[f"error of {name}"] / abs(row["exact"]) for short, name in names.items()}
    return {"what": "loop of sampled length: bias of the gradient, over the gradient"} | errors


def summary() -> list[Row]:
    """The rows of the table."""
    return [chain(), vae(), branches()]


def _first(text: str) -> float:
    """The median of a cell that has quartiles or a range as well."""
    return float(text.split()[0])


def main() -> None:
    """Writes ``results/summary.csv`` and ``summary.md``."""
    output, rows = arguments(__doc__).output, summary()
    write_csv(output / "summary.csv", rows)
    text = (
        "Multiples of ours, from the pages of chains, the VAE and bias; in the last row 0 is no bias. Lower is better."
    )
    write_markdown(output / "summary.md", "Summary", [text, table(rows)])


if __name__ == "__main__":
    main()
