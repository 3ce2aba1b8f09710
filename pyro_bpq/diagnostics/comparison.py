"""The result of :func:`~pyro_bpq.diagnostics.compare_estimators`, as data and as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pyro_bpq.errors import OptionError
from pyro_bpq.short import listed, number, table

# Name of the default among the estimators.
DEFAULT = "default"
# Limit on the bias in standard errors. By chance it is exceeded with probability 6e-5 at the worst covariance.
LIMIT = 4.0


@dataclass(frozen=True)
class Row:
    r"""Measurements of one estimator.

    Args:
        name: Name of the estimator in the comparison.
        num_particles: Number of particles.
        took: Estimator of each site, by name; empty for other libraries' ELBOs.
        ran: Whether it could be run; if not, ``note`` says why and there are no figures.
        claims_unbiased: Whether all estimators in use are declared unbiased; ``None`` for other libraries' ELBOs.
        is_exact: Whether moments are over all outcomes.
        num_samples: Number of steps that the moments come from.
        num_warmup: Number of earlier steps in which critics and running statistics learned, with fixed parameters.
        warmup_s: Duration of the warm-up in seconds.
        variance: Total variance of one step's gradient.
        variance_error: Standard error of ``variance``; 0 if exact.
        bias: Norm of the difference between the mean gradient and the reference.
        bias_error: Standard error of that norm, reference included; 0 if both are exact.
        relative_bias: ``bias`` over the norm of the reference.
        is_biased: Whether the bias is beyond rounding and more than four of its standard errors.
        ms: Median milliseconds of a whole step, learning included; estimators took turns.
        ms_spread: Half the distance between the quartiles of these times.
        parameters: Variance by parameter.
        sites: Variance of each site's summand, if there are summands.
        note: Further remark, or the reason why the estimator did not run.
        write: What to write to get it; empty if the user has named it.
        is_blind: Whether it does not see which costs depend on values that Python looked at, and there are such values.
            It is never recommended then: what few samples do not show is biased all the same.
    """

    name: str
    num_particles: int = 1
    took: dict[str, str] = field(default_factory=dict)
    ran: bool = True
    claims_unbiased: bool | None = None
    is_exact: bool = False
    num_samples: int = 0
    num_warmup: int = 0
    warmup_s: float = 0.0
    variance: float = float("nan")
    variance_error: float = 0.0
    bias: float = float("nan")
    bias_error: float = 0.0
    relative_bias: float = float("nan")
    is_biased: bool = False
    ms: float = float("nan")
    ms_spread: float = 0.0
    parameters: dict[str, float] = field(default_factory=dict)
    sites: dict[str, float] = field(default_factory=dict)
    note: str = ""
    write: str = ""
    is_blind: bool = False

    @property
    def variance_time(self) -> float:
        """Variance times milliseconds: the variance of a mean over one millisecond of steps. Less is better."""
        return self.variance * self.ms

    @property
    def bias_z(self) -> float:
        """Bias in standard errors; infinite if an exact comparison finds a bias."""
        return self.bias / self.bias_error if self.bias_error > 0 else (float("inf") if self.is_biased else 0.0)


@dataclass(frozen=True)
class Comparison:
    """Estimators side by side.

    Args:
        rows: One row for each estimator, the least variance times time first; last those that did not run.
        recommended: Name of the recommended estimator, or ``None``.
        reason: Reason for the recommendation, in words.
        reference: Reference that biases are measured against, in words.
        same: Estimators that are left out, each with the one that is the same on this program.
    """

    rows: tuple[Row, ...]
    recommended: str | None
    reason: str
    reference: str
    same: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return str(self)

    def __getitem__(self, name: str) -> Row:
        """The row of that name; for an estimator that is left out, the row of the one that is the same."""
        found = {row.name: row for row in self.rows}
        if self.same.get(name, name) not in found:
            raise OptionError(f"There is no estimator {name!r} in this comparison; it has {[*found, *self.same]}.")
        return found[self.same.get(name, name)]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain numbers, strings and dictionaries."""
        rows = [{**asdict(row), "variance_time": row.variance_time, "bias_z": row.bias_z} for row in self.rows]
        return {**asdict(self), "rows": rows}

    def to_csv(self, path: str | Path | None = None) -> str:
        """One line per estimator; variances of parameters and sites are columns of their own.

        Args:
            path: A file to write, or ``None``.

        Returns:
            The text.
        """
        flat = []
        for row in self.to_dict()["rows"]:
            parts = {f"variance of {k} {name}": v for k in ("parameters", "sites") for name, v in row.pop(k).items()}
            row["took"] = "; ".join(f"{site}: {text}" for site, text in row["took"].items())
            flat.append({**row, **parts})
        names = list(dict.fromkeys(name for row in flat for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        if path is not None:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        return text.getvalue()

    def __str__(self) -> str:
        head = ["estimator", "particles", "variance*ms", "variance", "ms/step", "bias", "warm-up"]
        rows = [_cells(row) for row in self.rows]
        lines = [*table(head, rows), "", f"Bias, in standard errors (se), is measured against {self.reference}."]
        lines += [
            f"{name!r} is the same as {twin!r} on this program, and left out." for name, twin in self.same.items()
        ]
        lines += [f"{row.name!r} took {text}." for row in self.rows if row.name == DEFAULT for text in _took(row)]
        lines += _breakdown("parameter", {row.name: row.parameters for row in self.rows})
        lines += _breakdown("site", {row.name: row.sites for row in self.rows})
        lines += [f"{row.name}: {row.note}" for row in self.rows if row.note]
        return "\n".join([*lines, "", self.reason])


def _breakdown(what: str, variances: dict[str, dict[str, float]]) -> list[str]:
    """Table of the variances of the twenty largest parts, one column per estimator that has any."""
    found = {name: own for name, own in variances.items() if own}
    largest: dict[str, float] = {}
    for own in found.values():
        for part, variance in own.items():
            largest[part] = max(largest.get(part, 0.0), variance)
    shown = sorted(largest, key=lambda part: -largest[part])[:20]
    if not shown:
        return []
    cells = [[part, *(number(own.get(part)) for own in found.values())] for part in shown]
    left = [f"... and {len(largest) - len(shown)} more"] if len(largest) > len(shown) else []
    return ["", *table([f"variance by {what}", *found], cells), *left]


def _cells(row: Row) -> list[str]:
    if not row.ran:
        return [row.name, *["-"] * 6]
    spread = "" if row.is_exact else f" ± {number(row.variance_error)}"
    return [
        row.name,
        str(row.num_particles),
        number(row.variance_time),
        number(row.variance) + spread,
        f"{number(row.ms)} ± {number(row.ms_spread)}",
        _bias(row),
        str(row.num_warmup),
    ]


def _bias(row: Row) -> str:
    """The bias in standard errors, and as a share of the gradient, where it is detected."""
    if not row.is_biased:
        return "none" if row.is_exact and row.bias_error == 0 else "not detected"
    size = f"{row.relative_bias:.2%} of the gradient"
    found = f"{size}, exactly" if row.bias_error == 0 else f"{number(row.bias_z)} se, {size}"
    return found if row.claims_unbiased is False else f"BIASED: {found}"


def _took(row: Row) -> list[str]:
    """What serves the sites, those together that the same serves."""
    sites: dict[str, list[str]] = {}
    for site, text in row.took.items():
        sites.setdefault(text, []).append(site)
    return [f"{text} at {listed(names)}" for text, names in sites.items()]


def recommend(rows: tuple[Row, ...]) -> tuple[str | None, str]:
    """The unbiased estimator with the smallest variance times time, and why."""
    ran = [row for row in rows if row.ran]
    sound = [row for row in ran if not (row.is_biased or row.is_blind) and row.claims_unbiased is not False]
    if not sound:
        return None, "Nothing to recommend: no estimator that ran is unbiased here."
    sound.sort(key=lambda row: row.variance_time)
    best, rest = sound[0], sound[1:]
    text = f"Use {best.name!r}: of the estimators without a bias here it has the least variance times time"
    if best.variance == 0:
        text += "; its gradient does not vary at all"
    elif rest:
        ratio = rest[0].variance_time / best.variance_time
        text += f", {number(ratio)} times less than {rest[0].name!r}"
        noise = 2 * (_relative_error(best) ** 2 + _relative_error(rest[0]) ** 2) ** 0.5
        if ratio - 1 < noise:
            text += ", which is within the error of measurement: a tie, so take the simpler one"
    text += f" (variance {number(best.variance)}, {number(best.ms)} ms a step)."
    text += f" Write {best.write}." if best.write and best.name != DEFAULT else ""
    calm = min(sound, key=lambda row: row.variance)
    if calm is not best and calm.variance < best.variance:
        text += f" {calm.name!r} has less variance, {number(calm.variance)}, but needs {number(calm.ms)} ms a step."
    return best.name, " ".join([text, *filter(None, map(_about_bias, ran))])


def _about_bias(row: Row) -> str:
    if row.is_biased:
        claim = "although it is declared unbiased" if row.claims_unbiased else "so it is left out"
        return f"{row.name!r} is biased by {row.relative_bias:.1%} of the gradient, {claim}."
    if row.is_blind:
        return (
            f"{row.name!r} is left out: Python decides by sampled values what this program does next, and it does not "
            "see which costs depend on these; the bias found is within its error."
        )
    if row.claims_unbiased is False:
        return f"{row.name!r} is declared biased and left out; the bias found is within its error."
    return ""


def _relative_error(row: Row) -> float:
    variance = row.variance_error / row.variance if row.variance else 0.0
    time = row.ms_spread / row.ms if row.ms else 0.0
    return float((variance**2 + time**2) ** 0.5)
