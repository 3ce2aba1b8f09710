"""The result of :func:`~pyro_bpq.diagnostics.compare_estimators`, as data and as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from pyro_bpq.errors import OptionError
from pyro_bpq.short import alike, listed, number, table

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
        claims_unbiased: Whether all estimators in use are declared unbiased; ``None`` for other libraries' ELBOs.
        num_warmup: Number of earlier steps in which critics and running statistics learned, with fixed parameters.
        variance: Total variance of one step's gradient.
        variance_error: Standard error of ``variance``; 0 if moments are exact, over all outcomes.
        bias: Norm of the difference between the mean gradient and the reference.
        bias_error: Standard error of that norm, reference included; 0 if both are exact.
        relative_bias: ``bias`` over the norm of the reference.
        is_biased: Whether the bias is beyond rounding and more than four of its standard errors.
        is_blind: Whether it does not see which costs depend on values that Python looked at, and there are such values.
            It is never recommended then: what few samples do not show is biased all the same.
        ms: Median milliseconds of a whole step, learning included; estimators took turns.
        ms_spread: Median absolute deviation of these times.
        note: Why the estimator did not run; then there are no figures. Else empty.
        write: What to write to get it; empty if the user has named it.
    """

    name: str
    num_particles: int = 1
    took: dict[str, str] = field(default_factory=dict)
    claims_unbiased: bool | None = None
    num_warmup: int = 0
    variance: float = math.nan
    variance_error: float = 0.0
    bias: float = math.nan
    bias_error: float = 0.0
    relative_bias: float = math.nan
    is_biased: bool = False
    is_blind: bool = False
    ms: float = math.nan
    ms_spread: float = 0.0
    note: str = ""
    write: str = ""

    @property
    def ran(self) -> bool:
        """Whether there are figures."""
        return not self.note

    @property
    def is_sound(self) -> bool:
        """Whether it ran, and is neither found nor declared nor bound to be biased."""
        return self.ran and not (self.is_biased or self.is_blind) and self.claims_unbiased is not False

    @property
    def variance_time(self) -> float:
        """Variance times milliseconds: the variance of a mean over one millisecond of steps. Less is better."""
        return self.variance * self.ms

    @property
    def relative_error(self) -> float:
        """Relative standard error of that."""
        return math.hypot(self.variance_error / (self.variance or math.inf), self.ms_spread / (self.ms or math.inf))


@dataclass(frozen=True)
class Comparison:
    """Estimators side by side; ``str`` is the table, and ``dataclasses.asdict`` the data.

    Args:
        rows: One row for each estimator, the least variance times time first; last those that did not run.
        recommended: Name of the recommended estimator, or ``None``.
        reason: Reason for the recommendation, in words.
        reference: Reference that biases are measured against, in words.
    """

    rows: tuple[Row, ...]
    recommended: str | None
    reason: str
    reference: str

    def __getitem__(self, name: str) -> Row:
        """The row of that name."""
        found = {row.name: row for row in self.rows}
        if name not in found:
            raise OptionError(f"There is no estimator {name!r} in this comparison; it has {[*found]}.")
        return found[name]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        head = ["estimator", "particles", "variance*ms", "variance", "ms/step", "bias", "warm-up"]
        lines = [*table(head, [_cells(row) for row in self.rows]), ""]
        lines.append(f"Bias, in standard errors (se), is measured against {self.reference}.")
        took = alike(pair for row in self.rows if row.name == DEFAULT for pair in row.took.items())
        lines += [f"{DEFAULT!r} took {text} at {listed(sites)}." for text, sites in took.items()]
        lines += [f"{row.name}: {row.note}" for row in self.rows if row.note]
        return "\n".join([*lines, "", self.reason])


def _cells(row: Row) -> list[str]:
    if not row.ran:
        return [row.name, *["-"] * 6]
    spread = f" ± {number(row.variance_error)}" if row.variance_error else ""
    times = f"{number(row.ms)} ± {number(row.ms_spread)}"
    variances = (number(row.variance_time), number(row.variance) + spread)
    return [row.name, str(row.num_particles), *variances, times, _bias(row), str(row.num_warmup)]


def _bias(row: Row) -> str:
    """The bias in standard errors, and as a share of the gradient, where it is detected."""
    if not row.is_biased:
        return "not detected" if row.bias_error else "none"
    errors = f"{number(row.bias / row.bias_error)} se" if row.bias_error else "exactly"
    return f"{'' if row.claims_unbiased is False else 'BIASED: '}{errors}, {row.relative_bias:.2%} of the gradient"


def recommend(rows: tuple[Row, ...]) -> tuple[str | None, str]:
    """The unbiased estimator with the smallest variance times time, and why."""
    sound = sorted((row for row in rows if row.is_sound), key=lambda row: row.variance_time)
    if not sound:
        return None, "Nothing to recommend: no estimator that ran is unbiased here."
    best, rest = sound[0], sound[1:]
    text = f"Use {best.name!r}: of the estimators without a bias here it has the least variance times time"
    if best.variance == 0:
        text += "; its gradient does not vary at all"
    elif rest:
        ratio = rest[0].variance_time / best.variance_time
        text += f", {number(ratio)} times less than {rest[0].name!r}"
        if ratio - 1 < 2 * math.hypot(best.relative_error, rest[0].relative_error):
            text += ", which is within the error of measurement: a tie, so take the simpler one"
    text += f" (variance {number(best.variance)}, {number(best.ms)} ms a step)."
    text += f" Write {best.write}." if best.write and best.name != DEFAULT else ""
    calm = min(sound, key=lambda row: row.variance)
    if calm.variance < best.variance:
        text += f" {calm.name!r} has less variance, {number(calm.variance)}, but needs {number(calm.ms)} ms a step."
    return best.name, " ".join([text, *filter(None, (_left_out(row) for row in rows if row.ran))])


def _left_out(row: Row) -> str:
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
