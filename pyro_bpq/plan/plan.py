r"""What a step does on a structure, for how many particles, and what the options that a user has written turn off."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from pyro_bpq.critics.nets import Critic
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.estimators.differences import Differences
from pyro_bpq.estimators.q_estimators import CriticBaseline, LambdaReturn, QControlVariate
from pyro_bpq.estimators.relax import RELAXQ
from pyro_bpq.graph.network import QNode
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.plan.flips import Flips
from pyro_bpq.plan.rules import DRAWN_STEPS, MANY_READS, MOST_SUMMED, PARTICLES, ProgramFacts, SiteFacts
from pyro_bpq.plan.structure import STEP, SumPlan, Work, num_reads, work_at, work_of_run
from pyro_bpq.record.components import Pattern
from pyro_bpq.record.recorded import Recorded
from pyro_bpq.record.traced_run import TracedRun, cost_of_site
from pyro_bpq.record.watch import samples
from pyro_bpq.short import alike, listed, short
from pyro_bpq.step.layout import Layout

# Estimators that are the score function without a critic. Others raise an error of their own, or do without.
_PLAIN = CriticBaseline, QControlVariate, LambdaReturn, RELAXQ


@dataclass(frozen=True)
class Plan:
    """What a step does on a structure."""

    graph: StochasticComputationGraph  # the graph
    layout: Layout  # the batching of sites and costs
    flips: Flips  # the extra run of the model
    held: Flips  # what is evaluated at other values of sites while all other sites keep theirs
    # What components of sites read, by site and cost, where costs are charged to components.
    patterns: Mapping[tuple[str, str], Pattern] = field(default_factory=dict)
    # Noisy sites, without a chosen estimator, whose baseline other particles give: in rows of data, or few.
    compared: frozenset[str] = frozenset()
    rules: Mapping[str, str] = field(default_factory=dict)  # for each site the rule by which it got its estimator
    num_particles: int = 1  # number of particles
    is_dynamic: bool = False  # whether sampled values may steer the program, so that another run may have another plan
    noisy: frozenset[str] = frozenset()  # sites of the default's choice whose gradients are noisy
    # Sites that crossed costs serve where there are enough particles, and whether hindsight does
    layers: Mapping[str, bool] = field(default_factory=dict)
    summed: SumPlan | None = None  # the tables that the loss can be summed over, or ``None``
    sums: bool = False  # whether it is summed over them
    notes: tuple[str, ...] = ()  # what options of the user's have turned off, or do not change
    alone: str = ""  # why one particle may run
    unread: str = ""  # tells options of sites that nothing reads
    key: Any = None  # what it was made for: key of the runs, their graph, and what else is known of their structure

    def __str__(self) -> str:
        """What each site got and why, its critic, and what is known exactly; sites that are alike together."""
        lines = [f"{self.num_particles} particle{'s' if self.num_particles > 1 else ''}"]
        if self.sums and self.summed is not None:
            drawn = listed(sorted(self.summed.shared)) or "nothing"
            lines = [f"{drawn} is drawn: the loss is summed over all values, from {self.summed.rows} rows of one run"]
        lines += ["the last run: others may have other sites"] * self.is_dynamic
        lines += [f"no extra run of the model: {self.flips.refused}"] if self.flips.refused else []
        for text, names in alike((name, _unnamed(name, self._about(name))) for name in self.layout.specs).items():
            about = self._about(names[0]) if len(names) == 1 else text
            lines.append(f"{listed(names)}: {about}{self._reads(names)}")
        return "\n".join(lines)

    def _about(self, name: str) -> str:
        spec = self.layout.specs[name]
        parts = [self.estimator(name)]
        if "hindsight" in spec.estimator.needs:
            parts.append(f"known with all other sites held: {self._held(name)}")
        if not (spec.estimator.is_pathwise or self.sums):
            parts += [f"known at all values: {self._known(name)}", f"critic: {self.critic(name)}"]
        return "; ".join(parts)

    def estimator(self, name: str) -> str:
        """The estimator of a site, and why, in words."""
        return f"{short(self.layout.specs[name].estimator)}, because {self.rules.get(name, 'chosen')}"

    def critic(self, name: str) -> str:
        """The critic of a site, in words."""
        critic = self.layout.specs[name].critic
        is_told = set(self.graph.downstream_costs(name)).issubset(self.layout.tabled.get(name, ()))
        if critic is None and not is_told:
            return "none"
        if not self._learned(name):
            return "none, as nothing is left to learn"
        return short(critic)

    def _reads(self, names: Sequence[str]) -> str:
        """What the critics of some sites see of their scopes; of several sites only how many others."""
        nodes = [node for name in names for node in self._learned(name)]
        found = [(own, rest) for own, rest in dict.fromkeys(map(self.layout.members, nodes)) if own]
        shown = [(", ".join(own), rest) for own, rest in found]
        if len(names) > 1 and len(found) > 1:
            shown = [(f"up to {max(len(own) for own, _ in found)} others", max(rest for _, rest in found))]
        texts = [own + (f", the sum of {rest} more" if rest else "") for own, rest in shown]
        return f", reads {'; '.join(texts)}" if texts else ""

    def _learned(self, name: str) -> list[QNode]:
        """The Q-nodes of a site that a critic learns."""
        network = self.layout.network
        nodes = () if network is None or self.layout.specs[name].critic is None else network.q_nodes(name)
        return [node for node in nodes if node.is_learned]

    def _known(self, name: str) -> str:
        costs = self.layout.tabled.get(name, ())
        rows = f", by {self.flips.rows} rows of an extra run" if name in self.flips.sites else ""
        return ", ".join(costs) + rows if costs else "nothing"

    def _held(self, name: str) -> str:
        return f"{', '.join(self.held.sites[name].costs) or 'nothing'}, by {self.held.rows - 1} rows of an extra run"

    @cached_property
    def needs_program(self) -> bool:
        """Whether an estimator compares the costs of other values."""
        return any("program" in cls.spec.estimator.needs for cls in self.layout.classes)


def _unnamed(name: str, text: str) -> str:
    """A text about a site without its name, and without its number in other names: for ``z_3`` that of ``x_3``."""
    text, number = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "the site", text), re.search(r"\d+$", name)
    return re.sub(rf"(?<=[^\W\d]){number[0]}(?!\w)", "t", text) if number else text


def written_options(traced: TracedRun, estimator: Estimator | None, asks: tuple[str, ...]) -> list[str]:
    """The options for which a loss is not summed over all values."""
    sites = [name for name, options in traced.options.items() if not options.is_open]
    chosen = [] if estimator is None else [f"estimator={short(estimator)}"]
    return [*chosen, *asks, *([f'infer={{"bpq": ...}} at {listed(sites)}'] if sites else [])]


def why_one(traced: TracedRun, estimator: Estimator | None, is_noisy: bool) -> str:
    """Why one particle runs, where values do not steer the program."""
    chosen = [name for name, options in traced.options.items() if not options.leaves_estimator]
    if traced.is_dear:
        return "leaving torch may be dear; if not: num_particles=32, vectorize_particles=True, max_plate_nesting=..."
    if estimator is not None:
        return f"you wrote estimator={short(estimator)}"
    if chosen:
        return f"you wrote an estimator or a baseline at {listed(chosen)}"
    if not is_noisy:
        return "no gradient is noisy"
    return "particles cannot be taken apart" if traced.untraced else "each takes long, and differences need no baseline"


NO_CRITICS = (
    "these sites have no critic, as print(elbo.plan) says. Leave them out, or choose critic=MLPCritic() there, and an "
    "estimator that uses it, such as AllAction()."
)


def unread_options(traced: TracedRun, critics: Mapping[str, Critic | None], why: str = NO_CRITICS) -> str:
    """Tells options of sites that are about critics, at sites that have none; empty if there are none.

    ``critics`` has those too that have nothing left to learn.
    """
    bare = {name: own for name, own in traced.options.items() if critics.get(name) is None}
    given = {n: {"critic": o.critic, "context": o.context is not None, "share": o.share} for n, o in bare.items()}
    found = alike((name, option) for name, own in given.items() for option, value in own.items() if value)
    texts = "; ".join(f"{option} at {listed(names)}" for option, names in found.items())
    return f"Nothing reads the options {texts}: {why}" if found else ""


def unread_baselines(sites: Mapping[str, SiteFacts], estimators: Mapping[str, Estimator]) -> str:
    """Tells Pyro's options of baselines at sites whose estimator has none, or its own; empty if there are none."""
    found = [n for n, site in sites.items() if site.options.baseline and estimators[n] != site.score_function]
    if not found:
        return ""
    return f"Nothing reads the option baseline at {listed(found)}: leave it out, or choose ScoreFunction() there. "


def without_critic(estimators: Mapping[str, Estimator], critics: Mapping[str, Critic | None]) -> str:
    """Tells sites that lack a critic, although their estimator is the plain score function then; else empty."""
    found = alike((n, short(own)) for n, own in estimators.items() if type(own) in _PLAIN and critics[n] is None)
    texts = (f"{text} at {listed(names)} has no critic, and is ScoreFunction() then" for text, names in found.items())
    return f'{"; ".join(texts)}: write infer={{"bpq": {{"critic": MLPCritic()}}}} there.' if found else ""


# How many particles a program is good for, where their number is left open.


def num_particles_for(plan: Plan, traced: TracedRun, particles: int = 1, is_hidden: bool = False) -> int:
    r"""Number of particles that a program is good for, from a run with the recording in force.

        M = min(128, max(4, min(8, 1 + a / 2b), 1 + a / 8b), max(2, 524288 / n))

    Several particles run if a site has no chosen estimator and a noisy gradient. A gradient has no noise if the site is
    the only one of the program, has one component, and all later costs are known at its other values. ``a`` is the
    time that all particles of one call share: the calls of operators. ``b`` is the time that each particle adds. Both
    are in counted seconds. ``n`` is the number of elements of a particle's largest value. Several particles help
    because their mean is a baseline for each site and each row, which means of earlier steps are not.

    The estimator of these sites may change ``M``. With :class:`~pyro_bpq.estimators.DebiasedStraightThrough` at all of
    them, ``M`` is 2, because it needs no baseline. So do predicted :class:`~pyro_bpq.estimators.Differences`: ``M`` may
    be 1. With :class:`~pyro_bpq.estimators.Hindsight` it is at most 4. With
    :class:`~pyro_bpq.estimators.CrossedLeaveOneOut` it is 8, or less if the values of all pairs of particles have more
    than ``2^20`` elements. Particles of programs that do not broadcast, ``is_hidden``, are at most 8; those
    that average noise run where four are worth their time. The table is ``PARTICLES`` in ``plan/rules.py``.
    """
    held = frozenset(name for name, may_hold in plan.layers.items() if may_hold)
    stepped = [name for name, spec in plan.layout.specs.items() if isinstance(spec.estimator, Differences)]
    counts = {name: plan.held.sites.get(name) for name in stepped}
    drawn = frozenset(name for name, site in counts.items() if site is not None and site.is_drawn)
    sloped = [name for name, spec in plan.layout.specs.items() if "slope" in spec.estimator.needs]
    facts = ProgramFacts(
        compared=plan.compared,
        noisy=len(plan.noisy),
        sloped=frozenset(name for name in sloped if num_reads(traced, name) >= MANY_READS),
        stepped=drawn,
        held=held | drawn,
        crossed=frozenset(plan.layers) - held,
        is_stepped=bool(plan.noisy) and plan.noisy <= counts.keys() - drawn,
        is_plain=not (traced.is_dear or traced.untraced),
        elements=largest_value(traced),
        particles=particles,
        is_hidden=is_hidden,
        free=math.inf if particles > 1 else _shared_over_added(traced.recorded),
        flipped=math.inf if particles > 1 else _shared_over_added(traced.recorded, plan.flips),
    )
    return next(rule.gives(facts) for rule in PARTICLES if rule.holds(facts))


def _shared_over_added(recorded: Recorded | None, flips: Flips | None = None) -> float:
    """Seconds of a step that its particles share over those that each adds, maybe in rows of other values too."""
    if recorded is None:
        return math.inf
    run, row = work_of_run(recorded), Work()
    if flips is not None and flips.wanted:
        row = work_at(recorded, flips.wanted, flips.start)
    # A backward pass takes about twice as long as the run itself; there is none through the rows.
    added = 3.0 * run.added + row.added * (0 if flips is None else flips.rows)
    return (3.0 * run.shared + STEP + row.shared) / added if added > 0.0 else math.inf


def num_rows_for(plan: Plan | None, traced: TracedRun, particles: int = 1) -> int:
    """Number of rows of a run that tells the costs of all values; 0 where the loss cannot be summed, or is too dear."""
    recorded = traced.recorded
    if plan is None or plan.summed is None or recorded is None or any(map(recorded.draws, recorded.named)):
        return 0
    rows = plan.summed.rows
    return rows if rows * largest_value(traced) <= MOST_SUMMED * particles else 0


def num_drawn_steps(traced: TracedRun) -> int:
    """Number of steps that draw before the loss is summed over all values.

    Ten if the model learns: without noise a mixture may leave components unused from the start. Else a single one, as
    Adam long remembers noisy steps. It leaves a guide's symmetric start.
    """
    costs = (traced.run.costs.get(cost_of_site(site, False)) for site in samples(traced.model_trace).values())
    return DRAWN_STEPS[any(cost is not None and cost.requires_grad for cost in costs)]


def largest_value(traced: TracedRun) -> int:
    """Number of elements of the largest value."""
    values = [site["value"] for trace in (traced.guide_trace, traced.model_trace) for site in samples(trace).values()]
    return max((value.numel() for value in values if isinstance(value, Tensor)), default=0)
