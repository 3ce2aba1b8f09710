r"""The rules by which sites get estimators and critics, and programs particles.

Tables are read from top to bottom; the first line that holds counts. The first one gives each site its estimator. While
a program runs, it is read by the site's options and its distribution alone: what the structure tells is not known yet.
The second says how many particles a program is good for. Critics follow at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyro_bpq.critics.nets import Critic, JointCritic, MLPCritic, MomentCritic, TabularCritic, ValueCritic
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.all_action import AllAction
from pyro_bpq.estimators.base import Estimator, SiteInfo
from pyro_bpq.estimators.differences import Differences
from pyro_bpq.estimators.hindsight import Hindsight
from pyro_bpq.estimators.reparameterise import Pathwise
from pyro_bpq.estimators.score_function import (
    CrossedLeaveOneOut,
    LeaveOneOut,
    PyroBaseline,
    RunningBaseline,
    ScoreFunction,
    SecondRun,
    TrimmedBaseline,
)
from pyro_bpq.estimators.slopes import DebiasedStraightThrough, DisARM
from pyro_bpq.record.config import SiteOptions
from pyro_bpq.rollout.features import has_moments

# So many particles run if they add at most half of the time that they share.
SOME_PARTICLES = 8
# More, up to so many, if they add at most an eighth of it.
MOST_PARTICLES = 128
# The same where differences serve all sites: they take the most of a step, and half of the time is worth it.
MOST_STEPPED = 1024
# Sites that read a count up to which what they show of it is worth its time.
MOST_CHILDREN = 3
# Counts of a site that are all evaluated one step on where costs have no slopes.
MOST_EVALUATED = 32
# Sites from which on sums over values and critics serve those that are not in rows of data.
MANY_SITES = 10
# Components of an only site from which on sums over the values of each are worth an extra run of all particles.
MANY_COMPONENTS = 10
# Elements that the largest values of all particles may have: as many particles are worth their time and memory.
ELEMENTS = 1 << 19
# Fewer particles than these tell little of a site with many components.
FEW_PARTICLES = 4
# Values of all components of a site times observed elements of a row: from here on slopes tell more than particles.
MANY_READS = 10_000
# The same where there are several such sites: a step is longer then.
MANY_READS_OF_LAYERS = 100_000
# With fewer layers, and fewer reads, crossed costs gain less than their time.
FEW_LAYERS = 3
# Elements that the largest values in all rows of a sum over all values may have.
MOST_SUMMED = 1 << 19
# Steps that draw before such a sum, where the model learns nothing and where it learns.
DRAWN_STEPS = (1, 10)


@functools.cache
def plain_score(num_particles: int) -> Estimator:
    """The score function with leave-one-out or, with one particle, a baseline of earlier costs."""
    return ScoreFunction(LeaveOneOut() if num_particles > 1 else TrimmedBaseline())


@dataclass(frozen=True)
class SiteFacts:
    """What rules look at: the site and its options, and what the structure of the program tells, as far as it is known.

    Args:
        info: The site.
        options: What is chosen at it.
        chosen: The estimator that is chosen for all sites, or ``None``.
        max_support: Largest number of values of a component that are summed over.
        is_summed: Whether the loss is summed over its values.
        is_partly_scored: Whether it is reparameterised in part only, by rejection sampling.
        is_ordered: Whether sampled values steer the program, and nobody chose anything that needs its graph.
        is_served: Whether other particles serve it better than sums over its values.
        is_untold: Whether nobody chose for it, it has many components and no critic, and no extra run of the model
            gives its costs at its other values.
        can_compare: Whether other runs of the program may serve it.
        can_step: Whether its costs may be known where a count is one step on, and few sites read it.
        has_slopes: Looks whether costs have gradients to its values, and to those of other layers.
        is_alone: Whether it is the last and the only site of its kind, with plates whose rows stay apart.
        layers: Number of such sites; 0 if rows of plates do not stay apart.
        reads: The values of its components times the observed elements of a row.
    """

    info: SiteInfo
    options: SiteOptions
    chosen: Estimator | None = None
    max_support: int = 64
    is_summed: bool = False
    is_partly_scored: bool = False
    is_ordered: bool = False
    is_served: bool = False
    is_untold: bool = False
    can_compare: bool = False
    can_step: bool = False
    has_slopes: Callable[[], bool] = lambda: False
    is_alone: bool = False
    layers: int = 0
    reads: float = math.inf

    @property
    def score_function(self) -> Estimator:
        """The score function with the site's own baseline, else leave-one-out or, with one particle, earlier costs."""
        own = self.options.baseline
        if own is None:
            return plain_score(self.info.num_particles)
        mean = None if own.decay is None else RunningBaseline(own.decay)
        return PyroBaseline(mean) if own.is_predicted else ScoreFunction(mean)

    @property
    def has_few_values(self) -> bool:
        """Whether a sum over the values of a component is short."""
        return self.info.components is not None and self.info.components.cardinality <= self.max_support

    @property
    def is_baselined(self) -> bool:
        """Whether it gets the score function, and its options for Pyro's baselines say with which baseline."""
        own = self.options.estimator
        if self.options.baseline is None or (own is None and self.info.has_rsample):
            return False
        chosen = own or self.chosen or ScoreFunction()
        return isinstance(chosen, ScoreFunction) and (own is None or chosen.baseline is None)

    @property
    def is_stepped(self) -> bool:
        """Whether it is a count whose costs may be known one step on, and sums over its values would be long."""
        return self.can_step and self.info.counts is not None and not self.has_few_values

    @property
    def is_whole(self) -> bool:
        """Whether all counts of it are evaluated."""
        return self.info.counts is not None and self.info.counts.size <= Differences.whole

    @property
    def has_many_particles(self) -> bool:
        """Whether there are enough particles for costs of a site of many components."""
        return self.info.num_particles >= FEW_PARTICLES

    @property
    def is_sloped(self) -> bool:
        """Whether slopes of the costs, corrected exactly, may serve it."""
        may = self.is_untold and self.is_alone and DebiasedStraightThrough().unsupported(self.info) is None
        return may and self.has_slopes()

    @property
    def is_large(self) -> bool:
        """Whether it is one of several layers that much is read of."""
        return self.layers > 1 and self.reads >= MANY_READS_OF_LAYERS

    @property
    def can_cross(self) -> bool:
        """Whether it is one of several layers, and may be charged with the costs of other particles' later layers."""
        return self.is_untold and (self.is_large or self.layers >= FEW_LAYERS)

    @property
    def may_hold(self) -> bool:
        """Whether it is one of several layers, and slopes and curvatures may tell what its components cost."""
        predicts = self.info.components is not None and self.info.components.has_slopes
        return self.is_large and self.can_compare and predicts and self.has_slopes()


@dataclass(frozen=True)
class Rule:
    """A line of a table.

    Args:
        says: Why, as it is printed.
        holds: Whether it applies to the facts of a site or a program.
        gives: The estimator of the site, or the number of particles.
    """

    says: str
    holds: Callable[[Any], bool]
    gives: Callable[[Any], Any]


SITES = (
    Rule(
        "every law and every cost reads at most one other site: summed over all values, exactly",
        lambda s: s.is_summed,
        lambda s: AllAction(),
    ),
    Rule(
        "partly reparameterised: score function for the rest", lambda s: s.is_partly_scored, lambda s: s.score_function
    ),
    # The user's choice.
    Rule("Pyro's baseline options of the site", lambda s: s.is_baselined, lambda s: s.score_function),
    Rule("chosen at the site", lambda s: s.options.estimator is not None, lambda s: s.options.estimator),
    Rule("reparameterised", lambda s: s.info.has_rsample, lambda s: Pathwise()),
    Rule("chosen for all sites", lambda s: s.chosen is not None, lambda s: s.chosen),
    Rule(
        "sampled values steer the program: every cost counts, and nothing is tracked",
        lambda s: s.is_ordered and s.options.is_open,
        lambda s: plain_score(s.info.num_particles),
    ),
    Rule(
        "counts: differences of one step, which slopes predict where there are many",
        lambda s: s.is_stepped and (s.info.counts.size <= MOST_EVALUATED or s.has_slopes()),
        lambda s: Differences() if s.is_whole or s.has_slopes() else Differences(draws=MOST_EVALUATED),
    ),
    # Many components, whose costs are not known at other values.
    Rule(
        "many components, in a program that is not run again at other values",
        lambda s: s.is_untold and not s.can_compare,
        lambda s: s.score_function,
    ),
    Rule(
        "the only site of many components: slopes of the costs, corrected by a true difference",
        lambda s: (s.reads >= MANY_READS or not s.has_many_particles) and s.is_sloped,
        lambda s: DebiasedStraightThrough(),
    ),
    Rule(
        "the only site of many binary components, and no slopes: an antithetic sample",
        lambda s: s.is_untold and s.is_alone and s.info.num_particles == 1 and DisARM().unsupported(s.info) is None,
        lambda s: DisARM(),
    ),
    Rule(
        "many components, one particle: a second run on the same data",
        lambda s: s.is_untold and s.info.num_particles == 1,
        lambda s: SecondRun(),
    ),
    Rule(
        "several large layers: the law of each value given the sites that were drawn after it",
        lambda s: s.can_cross and s.has_many_particles and s.may_hold,
        lambda s: Hindsight(draws=1, crossed=True),
    ),
    Rule(
        "several layers of many components: costs of other particles' values given this particle's past",
        lambda s: s.can_cross and s.has_many_particles,
        lambda s: CrossedLeaveOneOut(),
    ),
    Rule("many components: other particles are the baseline", lambda s: s.is_untold, lambda s: s.score_function),
    # Few components, or costs that are known at other values.
    Rule(
        "rows of data, or few sites: other particles are the baseline",
        lambda s: s.is_served,
        lambda s: s.score_function,
    ),
    Rule("few values: a sum over all of them", lambda s: s.has_few_values, lambda s: AllAction()),
    Rule("many or infinitely many values", lambda s: True, lambda s: plain_score(s.info.num_particles)),
)


@dataclass(frozen=True)
class ProgramFacts:
    """What the rules for the number of particles look at.

    Args:
        compared: Sites of the default's choice that other particles serve: they are in rows of data, or few.
        sloped: Sites that are served by slopes of the costs.
        is_plain: Whether no cost leaves torch, and all sites are in the traces.
        elements: Number of elements of the largest value.
        particles: Number of particles in it.
        is_hidden: Whether they do not run in a plate.
        noisy: Number of sites of the default's choice whose gradients are noisy.
        stepped: Sites that are served by predicted differences.
        held: Layers that are served by their law given what was drawn after them, if there are enough particles.
        crossed: Layers that are served by costs of other particles' values, if there are enough particles.
        is_stepped: Whether differences without predictions serve all noisy sites.
        free: Seconds of a particle that the particles of one call share, over those that each of them adds.
        flipped: The same with the rows in which sites take other values.
    """

    compared: frozenset[str]
    sloped: frozenset[str]
    is_plain: bool
    elements: int
    particles: int = 1
    is_hidden: bool = False
    noisy: int = 0
    stepped: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    crossed: frozenset[str] = frozenset()
    is_stepped: bool = False
    free: float = math.inf
    flipped: float = math.inf

    @property
    def affordable(self) -> int:
        """Number of particles whose values are small enough for one call, which knows each of the hidden ones."""
        number = max(2, ELEMENTS * self.particles // max(self.elements, 1))
        return min(number, SOME_PARTICLES) if self.is_hidden else number


def _worthwhile(program: ProgramFacts, least: int = FEW_PARTICLES) -> int:
    """As many as add little to the time that they share, but not too few."""
    most, number = min(MOST_PARTICLES, program.affordable), min(1.0 + program.free / 2, SOME_PARTICLES)
    if program.is_hidden:  # they are computed beside the program's own run
        return int(min(number, most)) if number >= least else 1
    if not (program.crossed or program.held):  # these take time by pairs and by rows
        number = max(number, 2 ** int(math.log2(min(1.0 + program.flipped / 8, MOST_PARTICLES))))
    return int(min(max(number, least), most))


def _paired(program: ProgramFacts) -> int:
    """As many as their pairs allow: each particle is scored beside the past of every other one."""
    pairs = math.isqrt(2 * ELEMENTS * program.particles // max(program.elements, 1))
    return min(max(FEW_PARTICLES, min(pairs, SOME_PARTICLES)), MOST_PARTICLES, program.affordable)


PARTICLES = (
    Rule("no noise that particles average", lambda p: not (p.compared or p.noisy), lambda p: 1),
    Rule("particles cannot be taken apart", lambda p: not p.is_plain, lambda p: 1),
    # Slopes and differences need no baseline.
    Rule("slopes serve all sites", lambda p: bool(p.compared) and p.compared <= p.sloped, lambda p: 2),
    Rule(
        "predicted differences serve all sites",
        lambda p: bool(p.compared) and p.compared <= p.stepped,
        lambda p: _worthwhile(p, 1),
    ),
    Rule(
        "hindsight serves all sites",
        lambda p: bool(p.compared) and p.compared <= p.held,
        lambda p: min(FEW_PARTICLES, p.affordable),
    ),
    # Log-probabilities of layers take little time beside the model's run.
    Rule("crossed costs serve all sites", lambda p: bool(p.compared) and p.compared <= p.crossed | p.held, _paired),
    Rule(
        "differences serve all sites",
        lambda p: p.is_stepped,
        lambda p: int(min(max(1.0 + p.free / 2, FEW_PARTICLES), MOST_STEPPED, p.affordable)),
    ),
    # A step is mostly Python, which particles of one call share.
    Rule("particles average their noise, as many as are nearly free", lambda p: True, _worthwhile),
)


def site_critic(given: Critic | None, site: SiteFacts, fn: Any, estimator: Estimator) -> Critic | None:
    """The site's own choice of a critic; else what follows from the ELBO's, which is given, for a site of its kind.

    A site of many components has none where that is a perceptron or a table: critics that read such a value as a whole
    lower the variance, but as measured not the time to a given ELBO.
    """
    chosen, components, is_pathwise = site.options.critic, site.info.components, estimator.is_pathwise
    if chosen is False or not (estimator.uses_critic or is_pathwise):
        return None
    critic: Any = given if chosen is None else chosen
    is_joint, where = isinstance(critic, JointCritic), f"Site {site.info.name!r} ({type(fn).__name__})"
    if chosen is None and components is None and critic is not None and not is_pathwise:
        fitting = ValueCritic() if "q_slope" in estimator.needs else MomentCritic()
        return (critic if is_joint else fitting) if has_moments(fn) else None
    if chosen is None:
        is_plain = components is not None and components.size > 1 and isinstance(critic, MLPCritic | TabularCritic)
        return None if is_pathwise or is_joint or is_plain else critic
    if is_pathwise and not is_joint:
        raise OptionError(
            f"{where} is reparameterised: a critic corrects the sites before it, and {critic} knows no expectation "
            "there. Write critic=MomentCritic() or critic=False."
        )
    if is_joint and components is not None and not is_pathwise:
        raise OptionError(f"{where} has finite components: write critic=MLPCritic() instead of {critic}.")
    if is_joint and not has_moments(fn):
        raise OptionError(
            f"{where} tells no finite mean and variance, which {critic} is centred by. Write critic=False."
        )
    return critic
