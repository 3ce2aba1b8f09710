r"""Decides per site what is done: its estimator, its critic, and which of its costs are known exactly.

One pass: what options say of each site, what other values of sites tell (:mod:`pyro_bpq.plan.flips`), which sites other
particles serve, and then, by the rules of :mod:`pyro_bpq.plan.rules`, estimators and critics. Plans are kept by
structure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

from pyro_bpq.critics.nets import Critic, JointCritic, reads_value
from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators.base import MANY_ROWS, Estimator, SiteInfo
from pyro_bpq.estimators.differences import Differences
from pyro_bpq.graph.network import BackpropQNetwork, Reduction, sequence_network
from pyro_bpq.graph.relations import crossings
from pyro_bpq.graph.scg import Form, StochasticComputationGraph
from pyro_bpq.plan.flips import Flips, held_plan, plan_extra_run
from pyro_bpq.plan.plan import Plan, unread_baselines, unread_options, why_one, without_critic, written_options
from pyro_bpq.plan.rules import (
    FEW_PARTICLES,
    MANY_COMPONENTS,
    MANY_SITES,
    MOST_CHILDREN,
    SITES,
    SiteFacts,
    plain_score,
    site_critic,
)
from pyro_bpq.plan.structure import Structure, StructureFacts, num_reads, sum_plan
from pyro_bpq.record.config import SiteOptions
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.step.classes import Known, SiteSpec
from pyro_bpq.step.layout import Layout

# Largest number of plans that are kept.
_PLANS = 64
# By site: what rules look at, and what was chosen.
Facts = Mapping[str, SiteFacts]
Estimators = Mapping[str, Estimator]
Critics = Mapping[str, Critic | None]


@dataclass(frozen=True)
class Planner:
    """Options of an ELBO that decide what is done on a structure."""

    estimator: Estimator | None  # estimator of all sites without ``rsample``, or ``None`` for the default of each
    critic: Critic | None  # how to build critics, see :class:`TraceBackpropQ_ELBO`; ``None`` for none
    reduction: Reduction  # reduction of the Backprop-Q network
    max_support: int = 64  # largest number of values of a component that are summed over by default
    max_elements: int = 1 << 21  # largest number of costs that the extra run of the model may evaluate by default
    # What the user has written about critics, in words: then sites have them wherever they can.
    asks: tuple[str, ...] = ()
    window: int = 4  # number of most recent scope members per class of sites that a critic sees as separate features
    # ``"exact"``, or ``"learned"`` for no cost that is known at other values than the sampled one.
    immediate: Literal["exact", "learned"] = "exact"
    form: Form = "ancestor"  # what a Q-function conditions on, see :meth:`BackpropQNetwork.build`
    discounted: bool = False  # whether targets may have a discount below 1
    # Whether the objective is an ELBO of sampled sites: what else it needs is known in program order.
    is_elbo: bool = False

    @property
    def orders(self) -> bool:
        """Whether steps of programs that values steer go in program order without being asked to."""
        return self.is_elbo and self.estimator is None and not self.asks

    def choose(self, site: SiteInfo, options: SiteOptions) -> Estimator:
        """The estimator of a site, as its options and its distribution have it."""
        return self.choice(self._facts(site, options))[0]

    def choice(self, facts: SiteFacts) -> tuple[Estimator, str]:
        """The estimator of a site by the first rule that holds, as far as facts are known, and the rule."""
        rule, site = next(rule for rule in SITES if rule.holds(facts)), facts.info
        estimator = rule.gives(facts)
        reason = estimator.unsupported(site)
        if reason is not None:
            plates = ", ".join(site.plates) or "none"
            raise UnsupportedSiteError(
                f"Site {site.name!r} ({site.distribution}, plates: {plates}): {reason}. Set it with "
                f'infer={{"bpq": {{"estimator": ...}}}} at the site, config_bpq(guide, estimator=...), or the '
                "ELBO's argument estimator=..."
            )
        return estimator, rule.says

    @property
    def serves_order(self) -> bool:
        """Whether an estimator was chosen for all sites, and needs their costs-to-go alone."""
        return self.estimator is not None and self.estimator.needs_costs_alone

    def order_estimators(self, traced: TracedRun) -> dict[str, Estimator] | None:
        """The estimators of the sites of a run that have a score, where all of them need their costs-to-go alone."""
        if any(options.critic for options in traced.options.values()):
            return None
        facts = {name: self._facts(traced.infos[name], traced.options[name]) for name in traced.scored}
        chosen = {name: self.choice(site)[0] for name, site in facts.items()}
        found = {n: facts[n].score_function if own.is_pathwise else own for n, own in chosen.items()}
        return found if all(own.needs_costs_alone for own in found.values()) else None

    def fits_order(self, traced: TracedRun) -> bool:
        """Whether program order serves a run well: rows of plates, choices at sites and dear costs need the graph."""
        has_costs = traced.user_costs or traced.externals
        return not has_costs and all(traced.options[n].is_open and not traced.plates[n] for n in traced.scored)

    def plan(self, traced: TracedRun, graph: StochasticComputationGraph, facts: StructureFacts) -> Plan:
        """Plans the steps on a structure.

        What corrects a site's gradient must not depend on its value. Where sampled values may steer the
        program, the structure after a site does: then there is no extra run of the model, only those costs are
        tabled that follow from what was known before the site, and critics form a sequence
        (:func:`~pyro_bpq.graph.network.sequence_network`), whatever the reduction.
        """
        structure = Structure(traced, graph, facts, self.immediate == "exact")
        may_sum, notes = facts.cuts_plates and not facts.is_dynamic, list[str]()
        summed = sum_plan(structure, self.max_support) if may_sum else None
        written, asks = written_options(traced, self.estimator, self.asks), ", ".join(self.asks)
        if written and summed is not None:
            notes, summed = [f"It is not summed over all values, because you wrote {', '.join(written)}."], None
        sums = facts.sums and summed is not None
        if sums:
            # No cost is estimated, or charged to components.
            structure = replace(structure, facts=replace(facts, patterns=frozenset()), is_exact=False)
        infos, options = traced.infos, traced.options
        asked = {n: self._facts(infos[n], options[n], sums and not infos[n].has_rsample) for n in traced.run.sites}
        wanted = {name: self.choice(site)[0] for name, site in asked.items()}
        flips = plan_extra_run(structure, wanted, self.max_elements)
        noisy, compared, served = self._noisy(structure, flips)
        if served and self.asks:
            # Who asks for critics has them, in as many particles.
            notes.append(f"Critics take the place of other particles as baselines, because you wrote {asks}.")
            served = frozenset()
        elif served:
            flips = plan_extra_run(structure, wanted, self.max_elements, served)
        sites = self._told(structure, asked, wanted, flips, served)
        choices = {name: self.choice(site) for name, site in sites.items()}
        held = held_plan(structure, {name: own for name, (own, _) in choices.items()}, self.estimator is not None)
        for name, (estimator, _) in choices.items():
            if "hindsight" in estimator.needs and name not in held.sites and not facts.is_dynamic:
                choices[name] = plain_score(facts.num_particles), "a child's law is unknown at its other values"
        estimators = {name: estimator for name, (estimator, _) in choices.items()}
        fns = {name: record.fn for name, record in traced.run.sites.items()}
        given = {n: None if sums else site_critic(self.critic, sites[n], fns[n], e) for n, e in estimators.items()}
        critics = {n: None if self._is_told(structure, n, flips) else critic for n, critic in given.items()}
        layout = self._layout(structure, estimators, critics, flips)
        if self.asks and layout.network is None:
            notes.append(f"No site has a critic, so that {asks} changes nothing.")
        unread = unread_options(traced, given) + unread_baselines(sites, estimators)
        if self.estimator is not None and unread:
            # Estimators are compared on programs whose sites have options: print tells, and no warning.
            notes, unread = [*notes, unread], ""
        unread += without_critic(estimators, given)
        return Plan(
            graph,
            layout,
            flips,
            held,
            {pair: p for pair, p in structure.patterns.items() if pair[1] in layout.charged.get(pair[0], ())},
            compared,
            rules={name: rule for name, (_, rule) in choices.items()},
            num_particles=facts.num_particles,
            is_dynamic=facts.is_dynamic,
            noisy=noisy,
            layers={name: site.may_hold for name, site in sites.items() if site.can_cross},
            summed=summed,
            sums=sums,
            notes=tuple(notes),
            alone=why_one(traced, self.estimator, bool(compared)),
            unread=unread,
        )

    def _facts(self, info: SiteInfo, options: SiteOptions, is_summed: bool = False) -> SiteFacts:
        """What rules look at, as far as a site and its options tell."""
        return SiteFacts(info, options, self.estimator, self.max_support, is_summed)

    def _noisy(self, structure: Structure, flips: Flips) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """The noisy sites for which no estimator is chosen, and what other particles do for them.

        In few sites, sums over values take the time of many particles and leave the noise of all other sites. Critics
        of many sites know more than the mean of other particles. Of data they only know what ``context`` shows them.

        Args:
            structure: The structure.
            flips: The extra run of the model.

        Returns:
            The sites whose gradients are noisy; those that other particles serve, if there are any; and those that get
            leave-one-out over the particles that run now, in place of the extra run. A program without noise draws
            one site, each of whose costs reads one component and is known at all of its values.
        """
        traced, facts = structure.traced, structure.facts
        # Costs of a user's own may be dear: critics save calls.
        if self.estimator is not None or traced.is_dear or facts.is_dynamic or facts.sums:
            return frozenset(), frozenset(), frozenset()
        options, size = traced.options, structure.size
        sites = frozenset(n for n, own in options.items() if own.leaves_estimator and not traced.infos[n].has_rsample)
        rows = frozenset(name for name in sites if structure.num_rows(name) >= MANY_ROWS)
        told = {name for name in sites if structure.is_complete(name, flips.costs.get(name, ()))}
        untold = rows - told
        # The extra run goes on only where it tells most sites everything.
        others = untold if 2 * len(untold) < len(rows) else rows
        served = {name for name in others if facts.num_particles > 1 and size(name) == 1}
        served, compared = served if served & untold else set(), sites
        # A net that predicts a baseline serves one particle.
        is_predicted = any(own.baseline is not None and own.baseline.is_predicted for own in options.values())
        is_only = len(traced.infos) == 1
        if is_predicted or (is_only and any(structure.is_separate(name) for name in told)):
            sites = compared = frozenset()
        elif len(sites) >= MANY_SITES:
            compared = untold
        elif facts.num_particles >= FEW_PARTICLES:
            # Sums over the values of the many components of the only site take off most of the noise.
            summed = told - rows if is_only else set()
            served = {n for n in sites if size(n) and not (n in summed and size(n) >= MANY_COMPONENTS)}
        # Costs of a user's own tend to be alike in all rows: critics, and sums over values, tell more of them.
        return sites, compared, frozenset(n for n in served if options[n].is_open and not traced.user_costs)

    def _told(self, structure: Structure, asked: Facts, wanted: Estimators, flips: Flips, served: Set[str]) -> Facts:
        """All that rules look at."""
        traced, graph, facts = structure.traced, structure.graph, structure.facts
        told, found, has_slope = flips.sites, {}, facts.has_slope or (lambda name: True)
        # Sites of many components. Of their costs only their own log-probabilities would be known at other values.
        open_ = [name for name, site in asked.items() if not (site.options.estimator or site.chosen or name in told)]
        many = [name for name in open_ if structure.size(name) > 1]
        splits = {name: traced.infos[name].components for name in many}
        has_slopes = cache(lambda: all(has_slope(name) for name, own in splits.items() if own and own.has_slopes))
        for name, site in asked.items():
            is_served, fn = name in served, traced.run.sites[name].fn
            is_untold = name in many and (is_served or site_critic(self.critic, site, fn, wanted[name]) is None)
            is_plain = site.options.baseline is None and name not in traced.untraced and not traced.is_dear
            can_step = is_plain and not (facts.is_dynamic or facts.is_reused or traced.enumerated)
            can_step = can_step and facts.recorded is not None
            keeps_rows = facts.cuts_plates or not graph.node(name).plates
            is_last = not graph.descendants(name) and not graph.leaves_plates(name) and not traced.enumerated
            found[name] = replace(
                site,
                is_partly_scored=wanted[name].is_pathwise and name in traced.scored,
                is_ordered=facts.is_ordered,
                is_served=is_served,
                is_untold=is_untold,
                can_compare=is_plain and not facts.is_dynamic,
                can_step=can_step and len(graph.children(name)) <= MOST_CHILDREN,
                has_slopes=has_slopes if is_untold else partial(has_slope, name),
                is_alone=many == [name] and keeps_rows and is_last and not structure.charged(name),
                layers=len(many) if keeps_rows and is_plain else 0,
                reads=num_reads(traced, name) if is_untold else math.inf,
            )
        return found

    def _is_told(self, structure: Structure, name: str, flips: Flips) -> bool:
        """Whether an extra run gives what a critic that nobody asked for would learn."""
        graph = structure.graph
        if name not in flips.sites or self.asks or structure.traced.options[name].critic is not None:
            return False
        # A critic would learn costs that read more than the site and its ancestors.
        seen = {name, *graph.ancestors(name)}
        learns = any(not seen.issuperset(graph.cost(cost).parents) for cost in graph.downstream_costs(name))
        return learns and structure.is_complete(name, flips.costs.get(name, ()))

    def _layout(self, structure: Structure, estimators: Estimators, critics: Critics, flips: Flips) -> Layout:
        """The batching of the sites."""
        traced, graph, facts = structure.traced, structure.graph, structure.facts
        charged: dict[str, frozenset[str]] = {}
        specs, tabled, known = {}, {}, set[str]()
        for name, critic in critics.items():
            info, estimator = traced.infos[name], estimators[name]
            flipped = flips.costs.get(name, ())
            own = structure.own_costs(name) if structure.is_exact and estimator.uses_critic else {}
            kinds = {*own, Known.MODEL} if flipped else {*own}
            tabled[name] = (*flipped, *(own[kind] for kind in sorted(own)))
            known.update(tabled[name])
            # Many components at once: only an extra run knows their immediate costs.
            if critic is None or (structure.size(name) > 1 and flipped):
                known.update(structure.immediate[name])
            if critic is None and estimator.by_component:
                charged[name] = structure.charged(name, flipped)
            plates, options = traced.plates[name], traced.options[name]
            context = 0 if options.context is None else options.context.shape[-1]
            specs[name] = SiteSpec(
                plates,
                None if estimator.is_pathwise or isinstance(estimator, Differences) else info.components,
                tuple(traced.run.sites[name].fn.event_shape),
                estimator,
                critic,
                frozenset(kinds),
                # The parameters move with the value: a critic that reads the value could not tell the two apart.
                has_params=(facts.is_dynamic or bool(plates)) and not (reads_value(critic) and context > 0),
                context=context,
                share=options.share,
                has_moments=isinstance(critic, JointCritic),
                by_component=bool(charged.get(name)),
            )
        network, learns = None, any(critic is not None for critic in critics.values())
        if learns and facts.is_dynamic:
            network = sequence_network(graph, tabled)
        elif learns:
            network = BackpropQNetwork.build(
                graph, self.reduction, immediate=frozenset(known), form=self.form, discounted=self.discounted
            )
        crosses = not facts.is_dynamic and any("crossed" in estimator.needs for estimator in estimators.values())
        return Layout(
            graph,
            network,
            specs,
            tabled,
            window=self.window,
            cuts_plates=facts.cuts_plates,
            is_steered=facts.is_dynamic,
            charged=charged,
            crossings=crossings(graph, structure.crossable()) if crosses else None,
        )


class PlanCache:
    """Plans by structure.

    Attributes:
        last: The plan of the last step; ``None`` before the first one.
        plans: All plans, by what they were made for.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.last: Plan | None = None
        self.plans: dict[Any, Plan] = {}

    def of(self, traced: TracedRun, graph: StochasticComputationGraph, facts: StructureFacts) -> Plan:
        """The plan of a structure; what :meth:`Planner.plan` says of a new one is kept."""
        # Recordings belong to the process, and keep tensors.
        key = traced.key, graph, replace(facts, recorded=None, has_slope=None)
        # Comparing with the last step is much cheaper than hashing a structure of hundreds of sites.
        if self.last is None or self.last.key != key:
            if key not in self.plans and len(self.plans) >= _PLANS:
                self.plans.clear()
            if key not in self.plans:
                shown = replace(traced, recorded=facts.recorded)
                self.plans[key] = replace(self.planner.plan(shown, graph, facts), key=key)
            self.last = self.plans[key]
        return self.last

    def forget(self) -> None:
        """Forgets all plans: the next step is planned anew."""
        self.plans.clear()
        self.last = None
