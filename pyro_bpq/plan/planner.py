r"""Decides per site what is done: its estimator, its critic, and which of its costs are known exactly.

The estimator and the critic follow from the rules of :mod:`pyro_bpq.plan.rules`, exact costs from
:mod:`pyro_bpq.plan.extra_run`. Plans are kept by structure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pyro_bpq.batching.classes import Known, SiteSpec
from pyro_bpq.batching.layout import Layout
from pyro_bpq.critics.joint import JointCritic, reads_value
from pyro_bpq.critics.nets import Critic
from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators.all_action import AllAction
from pyro_bpq.estimators.base import Estimator, SiteInfo
from pyro_bpq.estimators.score_function import ScoreFunction, SecondRun
from pyro_bpq.graph.network import BackpropQNetwork, Reduction, sequence_network
from pyro_bpq.graph.relations import crossings
from pyro_bpq.graph.scg import Form, StochasticComputationGraph, cost_of_guide, cost_of_model
from pyro_bpq.plan.extra_run import ExtraRun, is_complete, known_costs, plan_extra_run
from pyro_bpq.plan.held import held_plan
from pyro_bpq.plan.plan import Plan
from pyro_bpq.plan.revisions import Compared, charged_costs, compare, crossable, revise, untold
from pyro_bpq.plan.rules import (
    BY_OPTIONS,
    SUMMED,
    Choice,
    SiteFacts,
    checked_critic,
    decide,
    default_critic,
    has_many_components,
    with_baseline,
)
from pyro_bpq.plan.structure import Structure, StructureFacts
from pyro_bpq.plan.sum_plan import SumPlan, sum_plan
from pyro_bpq.plan.written import unread_options, why_one, written_options
from pyro_bpq.tracing.config import SiteOptions
from pyro_bpq.tracing.traced_run import PlainRun, TracedRun
from pyro_bpq.tracing.watch import site_info

# What a plan may ask for: gradients of costs to the values of sites.
Asked = Literal["slopes"]

# Largest numbers of plans and of findings that are kept.
_PLANS, _FINDINGS = 64, 768


def check_gradients(traced: TracedRun) -> None:
    """Checks that costs carry gradients to the reparameterised sites that they read; tracked runs only."""
    for cost in traced.user_costs:
        if traced.reads is None or traced.run.costs[cost].requires_grad:
            continue
        for name in sorted(traced.reads[cost]):
            if traced.run.sites[name].value.requires_grad:
                raise UnsupportedSiteError(
                    f"Site {name!r} is reparameterised, but {cost} depends on its value without a gradient. Write "
                    f'infer={{"bpq": {{"estimator": ScoreFunction()}}}} at the site or config_bpq(guide, '
                    "estimator=ScoreFunction()), LAXQ() in its place for a learned Q of the value, or make the cost "
                    "differentiable."
                )


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
        return self.choice(SiteFacts(site, options, self.estimator, self.max_support)).estimator

    def choice(self, facts: SiteFacts) -> Choice:
        """The same with the rule that gave it.

        Where that is the score function, Pyro's baseline options of the site take the place of a baseline that
        the site does not choose itself.
        """
        found, site, options = decide(BY_OPTIONS, facts), facts.info, facts.options
        assert found is not None
        chosen = found.estimator
        if options.baseline is not None and isinstance(chosen, ScoreFunction):
            if options.estimator is None or chosen.baseline is None:
                return Choice(with_baseline(options.baseline), "Pyro's baseline options of the site")
        reason = chosen.unsupported(site)
        if reason is not None:
            plates = ", ".join(site.plates) or "none"
            raise UnsupportedSiteError(
                f"Site {site.name!r} ({site.distribution}, plates: {plates}): {reason}. Set it with "
                f'infer={{"bpq": {{"estimator": ...}}}} at the site, config_bpq(guide, estimator=...), or the '
                "ELBO's argument estimator=..."
            )
        return found

    @property
    def serves_order(self) -> bool:
        """Whether an estimator was chosen for all sites, and needs their costs-to-go alone."""
        return self.is_elbo and self.estimator is not None and self.estimator.needs_costs_alone

    def order_estimators(self, traced: TracedRun | PlainRun, num_particles: int) -> dict[str, Estimator] | None:
        """The estimators of the sites of a run that have a score, where all of them need their costs-to-go alone."""
        if isinstance(traced, PlainRun):
            sites = {n: site_info(site, (), num_particles) for n, site in traced.sites.items()}
            facts = {n: SiteFacts(i, SiteOptions(), self.estimator, self.max_support) for n, i in sites.items()}
        elif any(options.critic for options in traced.options.values()):
            return None
        else:
            facts = {n: self._facts(traced, n) for n, r in traced.run.sites.items() if r.score is not None}
        chosen = {name: self.choice(site).estimator for name, site in facts.items()}
        found = {n: facts[n].score_function if own.is_pathwise else own for n, own in chosen.items()}
        return found if all(own.needs_costs_alone for own in found.values()) else None

    def fits_order(self, traced: TracedRun) -> bool:
        """Whether program order serves a run well: rows of plates, choices at sites and dear costs need the graph."""
        scored = [name for name, record in traced.run.sites.items() if record.score is not None]
        return not traced.user_costs and all(traced.options[n].is_open and not traced.plates[n] for n in scored)

    def attach(self, infer: Mapping[str, Any]) -> Any:
        """The estimator of a site with this ``infer``, if it attaches a gradient to the site's value."""
        options = infer.get("bpq")
        # What is no dictionary is refused with the site's other options.
        chosen = (options.get("estimator") if isinstance(options, Mapping) else None) or self.estimator
        return chosen if isinstance(chosen, Estimator) and chosen.attaches else None

    def plan(
        self,
        traced: TracedRun,
        graph: StochasticComputationGraph,
        facts: StructureFacts,
        has_slopes: bool = True,
    ) -> Plan:
        """Plans the steps on a structure.

        What corrects a site's gradient must not depend on its value. Where sampled values may steer the
        program, the structure after a site does: then there is no extra run of the model, only those costs are
        tabled that follow from what was known before the site, and critics form a sequence
        (:func:`~pyro_bpq.graph.network.sequence_network`), whatever the reduction.

        ``has_slopes`` is false once it was seen that costs have no gradients to the values of sites.
        """
        structure = Structure(traced, graph, facts, self.immediate == "exact")
        summed, written = None, written_options(traced, self.estimator, self.asks)
        if self.is_elbo and facts.cuts_plates and not facts.is_dynamic:
            summed = sum_plan(structure, self.max_support)
        drawn = f"It is not summed over all values, because you wrote {', '.join(written)}."
        notes = [drawn] if written and summed is not None else []
        summed = None if written else summed
        if facts.sums and summed is not None:
            return self._sum(structure, summed)
        sites = {
            name: replace(
                self._facts(traced, name),
                has_slopes=has_slopes,
                can_hold=facts.recorded is not None,
                is_ordered=facts.is_ordered,
            )
            for name in traced.run.sites
        }
        choices = {name: self.choice(site) for name, site in sites.items()}
        for name, record in traced.run.sites.items():
            is_partly_scored = choices[name].estimator.is_pathwise and record.score is not None
            revise(choices, replace(sites[name], is_partly_scored=is_partly_scored))
        can_flip = structure.is_exact and not facts.is_dynamic
        extra = self._extra_run(structure, choices) if can_flip else ExtraRun()
        # Costs of a user's own may be dear: critics save calls.
        is_chosen = self.estimator is not None or bool(traced.user_costs)
        compared = Compared()
        if not (is_chosen or facts.is_dynamic):
            compared = compare(structure, extra)
            served = frozenset(name for name in compared.served if traced.options[name].is_open)
            if self.asks and served:
                served, asks = frozenset(), f"because you wrote {', '.join(self.asks)}"
                notes.append(f"Critics take the place of other particles as baselines, {asks}.")
            compared = replace(compared, served=served)
        for name in compared.served:
            revise(choices, replace(sites[name], is_of_few=compared.is_few, is_by_row=not compared.is_few))
        if compared.served and can_flip:
            extra = self._extra_run(structure, choices)
        critics = self._critics(structure, choices, extra)
        kinds = {name: set[Known]() for name in choices}
        if structure.is_exact:
            kinds = {name: known_costs(structure, name, choice.estimator) for name, choice in choices.items()}
        for name in extra.components:
            kinds[name].add(Known.MODEL)
        layers = self._revise_vectors(structure, sites, choices, critics, kinds, extra)
        estimators = {name: choice.estimator for name, choice in choices.items()}
        layout = self._layout(structure, estimators, critics, kinds, extra)
        held = held_plan(structure, estimators, self.estimator is not None)
        if self.asks and layout.network is None:
            notes.append(f"No site has a critic, so that {', '.join(self.asks)} changes nothing.")
        unread = unread_options(traced, self._given_critics(traced, estimators))
        if self.estimator is not None and unread:
            # Estimators are compared on programs whose sites have options: print tells, and no warning.
            notes.append(unread)
            unread = ""
        return Plan(
            graph,
            layout,
            extra.flips,
            extra.components,
            {pair: p for pair, p in structure.patterns.items() if pair[1] in layout.charged.get(pair[0], ())},
            compared.sites,
            rules={name: choice.rule for name, choice in choices.items()},
            num_particles=facts.num_particles,
            held=held,
            refused=extra.refused,
            is_dynamic=facts.is_dynamic,
            noisy=compared.noisy,
            layers=layers,
            summed=summed,
            notes=tuple(notes),
            alone=why_one(traced, self.estimator),
            unread=unread,
        )

    def _facts(self, traced: TracedRun, name: str) -> SiteFacts:
        """What rules look at, as far as a site and its options tell."""
        return SiteFacts(traced.infos[name], traced.options[name], self.estimator, self.max_support)

    def _sum(self, structure: Structure, summed: SumPlan) -> Plan:
        """The plan of a loss that is summed over all values: no costs are estimated, and no critic learns."""
        traced, graph = structure.traced, structure.graph
        choices = {name: Choice(AllAction(), SUMMED) for name in summed.components}
        for name in summed.shared:
            choices[name] = self.choice(SiteFacts(traced.infos[name], traced.options[name]))
        estimators = {name: choices[name].estimator for name in traced.infos}
        # Nothing is charged to components either.
        plain = replace(structure, facts=replace(structure.facts, patterns=frozenset()), is_exact=False)
        kinds = {name: set[Known]() for name in estimators}
        layout = self._layout(plain, estimators, dict.fromkeys(estimators), kinds, ExtraRun())
        rules = {name: choice.rule for name, choice in choices.items()}
        unread = unread_options(traced, {})
        return Plan(graph, layout, None, {}, rules=rules, summed=summed, sums=True, unread=unread)

    def _extra_run(self, structure: Structure, choices: Mapping[str, Choice]) -> ExtraRun:
        estimators = {name: choice.estimator for name, choice in choices.items()}
        return plan_extra_run(structure, estimators, self.max_elements)

    def _critics(
        self, structure: Structure, choices: Mapping[str, Choice], extra: ExtraRun
    ) -> dict[str, Critic | None]:
        """The critics of all sites; one that nobody chose is left out if an extra run gives what it would learn."""
        traced, graph = structure.traced, structure.graph
        critics = self._given_critics(traced, {name: choice.estimator for name, choice in choices.items()})
        for name in extra.components:
            # A critic would learn costs that read more than the site and its ancestors.
            seen = {name, *graph.ancestors(name)}
            learns = any(not seen.issuperset(graph.cost(cost).parents) for cost in graph.downstream_costs(name))
            asks = self.asks or traced.options[name].critic is not None
            if learns and not asks and is_complete(structure, name, extra.costs(name)):
                critics[name] = None
        return critics

    def _revise_vectors(
        self,
        structure: Structure,
        sites: Mapping[str, SiteFacts],
        choices: dict[str, Choice],
        critics: Mapping[str, Critic | None],
        kinds: dict[str, set[Known]],
        extra: ExtraRun,
    ) -> dict[str, bool]:
        """Revises the choices of sites of many components that have neither an extra run nor a critic.

        Returns:
            Those of them that crossed costs may serve, and whether hindsight may.
        """
        many = [n for n in choices if n not in extra.components and has_many_components(sites[n])]
        layers = {}
        for name in many:
            if critics[name] is None:
                kinds[name] = set()
                is_alone = len(many) == 1 and not charged_costs(structure, name, SecondRun(), ())
                found = untold(sites[name], structure, is_alone, len(many))
                revise(choices, found)
                if found.can_cross:
                    layers[name] = found.may_hold
        return layers

    def _layout(
        self,
        structure: Structure,
        estimators: Mapping[str, Estimator],
        critics: Mapping[str, Critic | None],
        kinds: Mapping[str, set[Known]],
        extra: ExtraRun,
    ) -> Layout:
        """The batching of the sites."""
        traced, graph, facts = structure.traced, structure.graph, structure.facts
        charged: dict[str, frozenset[str]] = {}
        specs, tabled, known = {}, {}, set[str]()
        for name, critic in critics.items():
            info = traced.infos[name]
            costs = {
                Known.LOG_Q: (cost_of_guide(name),),
                Known.LOG_P: (cost_of_model(name),),
                Known.MODEL: extra.costs(name),
            }
            tabled[name] = tuple(cost for kind in sorted(kinds[name]) for cost in costs[kind])
            known.update(tabled[name])
            # Many components at once: only an extra run knows their immediate costs.
            if critic is None or (
                info.components is not None and info.components.size > 1 and name in extra.components
            ):
                known.update(structure.immediate[name])
            if critic is None:
                charged[name] = charged_costs(structure, name, estimators[name], extra.costs(name))
            plates, options = traced.plates[name], traced.options[name]
            context = 0 if options.context is None else options.context.shape[-1]
            specs[name] = SiteSpec(
                plates,
                None if estimators[name].is_pathwise else info.components,
                tuple(traced.run.sites[name].fn.event_shape),
                estimators[name],
                critic,
                frozenset(kinds[name]),
                # The parameters move with the value: a critic that reads the value could not tell the two apart.
                has_params=(facts.is_dynamic or bool(plates)) and not (reads_value(critic) and context > 0),
                context=context,
                share=options.share,
                has_moments=isinstance(critic, JointCritic),
                by_component=bool(charged.get(name)),
            )
        network = None
        if any(spec.critic is not None for spec in specs.values()):
            if facts.is_dynamic:
                network = sequence_network(graph, tabled)
            else:
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
            crossings=crossings(graph, crossable(structure)) if crosses else None,
        )

    def _given_critics(self, traced: TracedRun, estimators: Mapping[str, Estimator]) -> dict[str, Critic | None]:
        """The critics of all sites, those included that have nothing left to learn."""
        return {name: self._critic(traced, name, estimator) for name, estimator in estimators.items()}

    def _critic(self, traced: TracedRun, name: str, estimator: Estimator) -> Critic | None:
        """The site's own choice; else what follows from the ELBO's for a site of its kind."""
        chosen, components, fn = traced.options[name].critic, traced.infos[name].components, traced.run.sites[name].fn
        if chosen is False or not (estimator.uses_critic or estimator.is_pathwise):
            return None
        if chosen is not None:
            return checked_critic(chosen, name, fn, components, estimator)
        if self.critic is None or estimator.is_pathwise:
            return None
        return default_critic(self.critic, fn, components, estimator)


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made for."""

    key: Any  # key of the runs
    graph: StochasticComputationGraph  # their graph
    facts: StructureFacts  # what else is known of their structure
    plan: Plan  # the plan


class PlanCache:
    """Plans by structure, and what was found out of the structures.

    Attributes:
        last: The plan of the last step; ``None`` before the first one.
        plans: All plans, by what they were made for.
        found: Whether something that a plan may ask for works, by what it is and the key of the structure. It has an
            entry only where that was looked at.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.last: Planned | None = None
        self.plans: dict[Any, Plan] = {}
        self.found: dict[tuple[Asked, Any], bool] = {}

    def plan(self, traced: TracedRun, graph: StochasticComputationGraph, facts: StructureFacts) -> Plan:
        """The plan of a structure, a new one where there is none."""
        last = self.last
        # Comparing with the last step is much cheaper than hashing a structure of hundreds of sites.
        if last is not None and last.graph is graph and last.facts == facts and last.key == traced.key:
            return last.plan
        # Recordings belong to the process, and keep tensors.
        kept = replace(facts, recorded=None)
        key = (traced.key, graph, kept)
        if key not in self.plans:
            if len(self.plans) >= _PLANS:
                self.plans.clear()
            self.plans[key] = self.planner.plan(traced, graph, facts, self.works("slopes", traced.key))
        self.last = Planned(traced.key, graph, kept, self.plans[key])
        return self.last.plan

    def works(self, asked: Asked, key: Any) -> bool:
        """Whether something that a plan may ask for works on a structure, as far as is known."""
        return self.found.get((asked, key), True)

    def know(self, asked: Asked, key: Any, works: bool) -> None:
        """Notes whether something that a plan may ask for works; plans are made anew where it does not."""
        if len(self.found) >= _FINDINGS:
            self.found.clear()
        self.found[asked, key] = works
        if not works:
            self.forget()

    def use(self, planner: Planner) -> None:
        """Plans with other options from now on."""
        self.planner = planner
        self.forget()

    @contextlib.contextmanager
    def keeping_last(self) -> Iterator[None]:
        """The plan of the last step stays the same, whatever is planned within."""
        last = self.last
        try:
            yield
        finally:
            self.last = last

    def forget(self) -> None:
        """Forgets all plans."""
        self.plans.clear()
        self.forget_last()

    def forget_last(self) -> None:
        """Forgets the last step: the next one is planned anew."""
        self.last = None
