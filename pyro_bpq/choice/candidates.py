"""What may be tried in place of the default, and on which programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pyro_bpq.estimators.all_action import AllAction
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.estimators.debiased_straight_through import DebiasedStraightThrough
from pyro_bpq.estimators.hindsight import Hindsight
from pyro_bpq.estimators.score_function import CrossedLeaveOneOut, LeaveOneOut, ScoreFunction
from pyro_bpq.plan.rules import MOST_PARTICLES


@dataclass(frozen=True)
class Candidate:
    """A way to estimate the gradients of a program; all are unbiased and have the same expectation.

    Args:
        name: How it is called where choices are printed.
        estimator: Estimator of all sites without ``rsample``; ``None`` for the default of each.
        num_particles: Number of particles; ``None`` leaves it open.
        vectorized: Whether these run in one call.
        critics: Whether sites may have critics.
        in_order: Whether every cost counts, without tracking.
    """

    name: str
    estimator: Estimator | None = None
    num_particles: int | None = None
    vectorized: bool = False
    critics: bool = True
    in_order: bool = False

    @property
    def structure(self) -> str:
        """When dependencies are tracked, as the option of that name."""
        return "dense" if self.in_order else "auto"


# Estimators for which others were close.
_PLAIN = frozenset({ScoreFunction(LeaveOneOut()), AllAction()})

FIXED = Candidate("the rules")
"""What the rules give, without any measurement."""


@dataclass(frozen=True)
class ProgramFacts:
    """What the table of candidates looks at."""

    is_steered: bool = False  # whether sampled values steer the program
    has_critics: bool = False  # whether sites have critics
    num_sites: int = 0  # number of sites with a score
    many_components: int = 0  # number of those with many components
    num_particles: int = 1  # number of particles that the default runs
    affordable: int = MOST_PARTICLES  # number of particles whose values are small enough for one call
    flips: bool = False  # whether the default runs the model at other values
    is_finite: bool = False  # whether all sites have finitely many values
    has_rows: bool = False  # whether sites are in rows of data
    estimators: frozenset[Estimator] = frozenset()  # the default's estimators

    @property
    def has_several(self) -> bool:
        """Whether the default runs several particles."""
        return self.num_particles > 1 and not self.is_steered

    @property
    def is_plain(self) -> bool:
        """Whether the default compares particles or sums over values, and eight particles are small enough."""
        return self.estimators <= _PLAIN and self.affordable >= MOST_PARTICLES and not self.is_steered

    @property
    def is_layered(self) -> bool:
        """Whether other particles' costs serve layers."""
        return self.num_sites > 1 and self.many_components > 1

    def is_default(self, candidate: Candidate) -> bool:
        """Whether the default does what a candidate stands for."""
        is_chosen = candidate.estimator is not None and self.estimators == {candidate.estimator}
        return is_chosen and candidate.num_particles == self.num_particles and candidate.critics == self.has_critics


@dataclass(frozen=True)
class Line:
    """A line of the table of candidates.

    Args:
        candidate: What is tried.
        may_try: On which programs it may be tried.
        is_close: On which of them rules alone do not tell: there it was the best on some programs.
    """

    candidate: Candidate
    may_try: Callable[[ProgramFacts], bool]
    is_close: Callable[[ProgramFacts], bool] = lambda p: False


def lines() -> tuple[Line, ...]:
    """The table: on which programs what is tried besides the default."""

    def several(text: str, number: int, **options: bool) -> Candidate:
        return Candidate(f"{text}, {number} particles", ScoreFunction(LeaveOneOut()), number, critics=False, **options)

    def has_slopes(p: ProgramFacts) -> bool:
        return DebiasedStraightThrough() in p.estimators

    two, four, eight = (several("leave-one-out", number, vectorized=True) for number in (2, 4, 8))
    # In one call they take little longer than one particle, where values are small.
    more = Candidate("the rules, 8 particles", None, 8, vectorized=True)
    crossed = Candidate("crossed costs, 8 particles", CrossedLeaveOneOut(), 8, vectorized=True, critics=False)
    # A step takes twice as long, so that it pays late, when noise is most of what is left.
    hindsight = Candidate("hindsight, 4 particles", Hindsight(crossed=True, draws=1), 4, vectorized=True, critics=False)
    # With one particle sites have critics, and an extra run that pays.
    one = Candidate("the rules, one particle", None, 1)
    # In place of leave-one-out over as many particles.
    sums = Candidate("sums over values, 8 particles", AllAction(), 8, vectorized=True, critics=False)
    # Its extra run takes as long as more particles do.
    no_run = Candidate("no extra run", AllAction(exact=False))
    slopes = Candidate("corrected slopes, 2 particles", DebiasedStraightThrough(), 2, vectorized=True, critics=False)
    return (
        Line(several("program order", 4, in_order=True), lambda p: p.is_steered),
        Line(eight, lambda p: not p.is_steered, lambda p: p.is_plain),
        Line(sums, lambda p: p.has_several and p.is_finite and not p.flips, lambda p: p.is_plain and not p.has_rows),
        Line(one, lambda p: p.has_several, lambda p: not p.is_finite),
        Line(two, lambda p: p.has_several),
        Line(four, lambda p: p.has_several),
        Line(more, lambda p: not p.is_steered and not p.has_several),
        Line(Candidate("no critics", critics=False), lambda p: p.has_critics),
        Line(no_run, lambda p: not p.is_steered and p.flips and p.estimators == {AllAction()}),
        Line(slopes, lambda p: not p.is_steered and p.num_sites == p.many_components == 1 and not has_slopes(p)),
        Line(crossed, lambda p: not p.is_steered and p.is_layered),
        Line(hindsight, lambda p: not p.is_steered and p.is_layered),
    )


BY_NAME: Mapping[str, Candidate] = MappingProxyType(
    {candidate.name: candidate for candidate in (FIXED, *(line.candidate for line in lines()))}
)
"""All candidates by name."""


def candidates_for(facts: ProgramFacts, tries_all: bool = False) -> tuple[Candidate, ...]:
    """The candidates that are tried on a program, the default first.

    Args:
        facts: What is known of the program.
        tries_all: Whether to try all that the table has for the program, or only what was the best on some programs
            of its kind.
    """
    if not facts.num_sites:
        return (FIXED,)
    tried = (line for line in lines() if line.may_try(facts) and (tries_all or line.is_close(facts)))
    return (FIXED, *(line.candidate for line in tried if not facts.is_default(line.candidate)))
