r"""Decides per site what is done: its estimator, its critic, and which of its costs are known exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pyro_bpq.batching.kinds import Known
from pyro_bpq.batching.layout import Layout, SiteSpec
from pyro_bpq.critics.joint import JointCritic
from pyro_bpq.critics.nets import Critic
from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators import AllAction, Estimator, Pathwise, SecondRun
from pyro_bpq.estimators.base import SiteInfo
from pyro_bpq.graph.crossings import Crossings, crossings
from pyro_bpq.graph.network import BackpropQNetwork, Reduction
from pyro_bpq.graph.scg import StochasticComputationGraph
from pyro_bpq.graph.sequence import sequence_network
from pyro_bpq.plan.critic_options import checked_critic, default_critic
from pyro_bpq.plan.crossable import crossable
from pyro_bpq.plan.defaults import compared, default_estimator, in_rows, is_comparable, pays_to_compare, score_function
from pyro_bpq.plan.flips import FlipPlan, flip_plan, immediate_costs, immediate_model_costs
from pyro_bpq.rollout.features import Components, finite_components
from pyro_bpq.tracing.component_costs import Pattern, Patterns
from pyro_bpq.tracing.config import SiteOptions
from pyro_bpq.tracing.cost_statement import CostOptions
from pyro_bpq.tracing.traced_run import TracedRun, cost_of_guide, cost_of_model

__all__ = ["Plan", "Planner", "StructureFacts", "check_gradients"]


def check_gradients(traced: TracedRun) -> None:
    """Checks that costs carry gradients to the reparameterised sites that they read; tracked runs only.

    Raises:
        UnsupportedSiteError: If a cost statement reads such a site without a gradient.
    """
    for cost in traced.user_costs if traced.reads is not None else ():
        assert traced.reads is not None
        if traced.run.costs[cost].requires_grad:
            continue
        for name in sorted(traced.reads[cost]):
            if traced.run.sites[name].value.requires_grad:
                raise UnsupportedSiteError(
                    f"Site {name!r} is reparameterised, but {cost} depends on its value without a gradient. Write "
                    f'infer={{"bpq": {{"estimator": ScoreFunction()}}}} at the site or config_bpq(guide, '
                    "estimator=ScoreFunction()), or make the cost differentiable."
                )


@dataclass(frozen=True)
class Plan:
    """What a step does on a structure.

    Args:
        graph: The graph.
        layout: The batching of sites and costs.
        flips: The extra run of the model, or ``None``.
        components: Finite components of the sites that it flips.
        patterns: What components of sites read, by site and cost, where costs are charged to components.
        by_row: Sites of the default's choice in many rows, whose cost-to-go is not known at other values.
        led_back: Sites whose estimators ask for slopes that the costs of a run have itself.
        handed: Costs of the model that read values of the guide itself.
        has_buffers: Whether the programs may call modules with buffers.
    """

    graph: StochasticComputationGraph
    layout: Layout
    flips: FlipPlan | None
    components: dict[str, Components]
    patterns: Mapping[tuple[str, str], Pattern] = field(default_factory=dict)
    by_row: frozenset[str] = frozenset()
    led_back: frozenset[str] = frozenset()
    handed: frozenset[str] = frozenset()
    has_buffers: bool = True

    @cached_property
    def needs_program(self) -> bool:
        """Whether an estimator compares the costs of other values."""
        return any("program" in cls.spec.estimator.needs for cls in self.layout.classes)

    @cached_property
    def sloped(self) -> tuple[str, ...]:
        """Sites whose estimator is poor where costs have no gradient to their values."""
        kinds = {name: cls.spec.estimator for cls in self.layout.classes for name in cls.names}
        return tuple(name for name, kind in kinds.items() if kind.relies_on_slopes)


@dataclass(frozen=True)
class StructureFacts:
    """What is known of a structure besides its graph.

    Args:
        is_dynamic: Whether sampled values may steer the program.
        cuts_plates: Whether rows of a plate stay apart.
        patterns: Which component of a site each element of a cost reads, by site and cost.
        handed: Costs of the model that read values of the guide itself: what the model alone costs at other values does
            not show them.
        has_buffers: Whether the programs may call modules with buffers.
        num_particles: Number of particles.
    """

    is_dynamic: bool = False
    cuts_plates: bool = True
    patterns: Patterns = frozenset()
    handed: frozenset[str] = frozenset()
    has_buffers: bool = True
    num_particles: int = 1


@dataclass(frozen=True)
class Planner:
    """Options of an ELBO that decide what is done on a structure.

    Args:
        estimator: Estimator of all sites without ``rsample``, or ``None`` for the default of each.
        critic: How to build critics, see :class:`TraceBackpropQ_ELBO`; ``None`` for none.
        reduction: Reduction of the Backprop-Q network.
        max_support: Largest number of values of a component that are summed over by default.
        max_elements: Largest number of costs that the extra run of the model may evaluate by default.
        asks_for_critics: Whether the user has chosen something about critics: then sites have them wherever they can.
    """

    estimator: Estimator | None
    critic: Critic | None
    reduction: Reduction
    max_support: int = 64
    max_elements: int = 1 << 21
    asks_for_critics: bool = False

    def choose(self, site: SiteInfo, options: SiteOptions) -> Estimator:
        """The estimator of a site: its own option, the ELBO's, or the default.

        Where that is the score function, Pyro's baseline options of the site take the place of a baseline that
        the site does not choose itself.

        Raises:
            UnsupportedSiteError: If the chosen estimator cannot serve the site.
        """
        chosen = options.estimator
        if chosen is None and self.estimator is not None:
            chosen = Pathwise() if site.has_rsample else self.estimator
        if chosen is None:
            chosen = default_estimator(site, self.max_support)
        if options.baseline is not None and chosen.takes_baseline:
            if options.estimator is None or not chosen.has_baseline:
                return options.baseline.estimator()
        reason = chosen.unsupported(site)
        if reason is not None:
            plates = ", ".join(site.plates) or "none"
            raise UnsupportedSiteError(
                f"Site {site.name!r} ({site.distribution}, plates: {plates}): {reason}. Set it with "
                f'infer={{"bpq": {{"estimator": ...}}}} at the site, config_bpq(guide, estimator=...), or the '
                "ELBO's argument estimator=..."
            )
        return chosen

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
        can_flip: bool = True,
        has_slopes: bool = True,
    ) -> Plan:
        """Plans the steps on a structure.

        What corrects a site's gradient must not depend on its value. Where sampled values may steer the
        program, the structure after a site does: then there is no extra run of the model, only those costs are
        tabled that follow from what was known before the site, and critics form a sequence
        (:func:`~pyro_bpq.graph.sequence.sequence_network`), whatever the reduction.

        Args:
            traced: A run of that structure.
            graph: Its graph.
            facts: What else is known of it.
            can_flip: Whether the model has not failed to run at other values.
            has_slopes: Whether costs are not known to be without gradients to the values of sites.

        Returns:
            The plan.
        """
        is_dynamic, cuts_plates, handed = facts.is_dynamic, facts.cuts_plates, facts.handed
        estimators = {name: self._estimator(traced, name) for name in traced.run.sites}
        # What a cost reads at other values of a site is known where the model alone gets these.
        immediate = {
            name: tuple(cost for cost in costs if not (is_dynamic or cost in handed))
            for name, costs in immediate_costs(graph).items()
        }
        flips, components = (
            self._flips(traced, graph, estimators, immediate, handed, cuts_plates)
            if can_flip and not is_dynamic
            else (None, {})
        )
        # Costs of a user's own may be dear: critics save calls.
        is_chosen = self.estimator is not None or self.asks_for_critics or bool(traced.user_costs)
        rows = frozenset() if is_chosen or is_dynamic else in_rows(traced, graph)
        told = {name: () if flips is None else flips.costs.get(name, ()) for name in rows}
        by_row = frozenset(
            name for name in rows if not self._is_complete(traced, graph, name, immediate[name], told[name])
        )
        if any(pays_to_compare(traced.infos[name]) for name in by_row):
            # The extra run goes on only where it tells most sites everything.
            others = by_row if 2 * len(by_row) < len(rows) else rows
            estimators |= {n: score_function(traced, n) for n in others if pays_to_compare(traced.infos[n])}
            flips, components = (
                self._flips(traced, graph, estimators, immediate, handed, cuts_plates) if can_flip else (None, {})
            )
        plain = [name for name in estimators if name not in components and self._is_plain(traced, name)]
        # Sums in the same order in every process.
        known_patterns, charged = dict(sorted(facts.patterns, key=lambda pair: pair[0])), {}
        specs, tabled, known = {}, {}, set()
        for name in traced.run.sites:
            kinds = self._tabled_kinds(traced, name, graph, estimators[name], immediate[name])
            if name in components:
                kinds |= {Known.MODEL}
            evaluated = flips.costs.get(name, ()) if flips is not None else ()
            costs = {
                Known.LOG_Q: (cost_of_guide(name),),
                Known.LOG_P: (cost_of_model(name),),
                Known.MODEL: evaluated,
            }
            tabled[name] = tuple(cost for kind in sorted(kinds) for cost in costs[kind])
            critic = self._critic(traced, name, estimators[name])
            info = traced.infos[name]
            if critic is None and name in plain:
                tabled[name], kinds = (), set()
                estimators[name] = score_function(traced, name)
                if not is_dynamic and is_comparable(traced, name):
                    is_told = bool(_charged(graph, name, SecondRun(), (), known_patterns))
                    is_alone = len(plain) == 1 and not is_told and (cuts_plates or not graph.node(name).plates)
                    estimators[name] = compared(traced, graph, name, is_alone, has_slopes)
            # Many components at once: what they cost right away is for the extra run, where there is one.
            if critic is None or (info.components is not None and info.components.size > 1 and name in components):
                known |= set(immediate[name])
            known |= set(tabled[name])
            spec = self._spec(traced, name, estimators[name], critic, frozenset(kinds))
            if critic is None:
                charged[name] = _charged(graph, name, estimators[name], evaluated, known_patterns)
                spec = replace(spec, by_component=bool(charged[name]))
            specs[name] = replace(spec, has_params=True) if is_dynamic else spec
        network = None
        if any(spec.critic is not None for spec in specs.values()):
            if is_dynamic:
                network = sequence_network(graph, tabled)
            else:
                network = BackpropQNetwork.build(graph, self.reduction, immediate=frozenset(known))
        layout = Layout(
            graph,
            network,
            specs,
            tabled,
            cuts_plates=cuts_plates,
            is_steered=is_dynamic,
            charged=charged,
            crossings=None if is_dynamic else self._crossings(traced, graph, estimators, handed),
        )
        used = {pair: pattern for pair, pattern in known_patterns.items() if pair[1] in charged.get(pair[0], ())}
        # Where sites are sampled downstream slopes belong to runs of their own; costs of a user's own get plain values.
        has_own = has_slopes and not (
            is_dynamic or traced.user_costs or traced.untraced or traced.elimination is not None
        )
        led_back = {
            n for n, kind in estimators.items() if has_own and "slope" in kind.needs and not graph.descendants(n)
        }
        return Plan(graph, layout, flips, components, used, by_row, frozenset(led_back), handed)

    def _crossings(
        self,
        traced: TracedRun,
        graph: StochasticComputationGraph,
        estimators: Mapping[str, Estimator],
        handed: frozenset[str],
    ) -> Crossings | None:
        is_wanted = any("crossed" in estimator.needs for estimator in estimators.values())
        return crossings(graph, crossable(traced, graph, handed)) if is_wanted else None

    def _estimator(self, traced: TracedRun, name: str) -> Estimator:
        estimator = self.choose(traced.infos[name], traced.options[name])
        if estimator.is_pathwise and traced.run.sites[name].score is not None:
            # Partly reparameterised (rejection sampling): the rest of its gradient is a score-function term.
            return score_function(traced, name)
        return estimator

    def _is_plain(self, traced: TracedRun, name: str) -> bool:
        """Whether a site that nobody chose an estimator for has many components.

        Of its costs then only its own log-probabilities would be known at other values: too little to gain by.
        """
        components, chosen = traced.infos[name].components, traced.options[name].estimator or self.estimator
        return chosen is None and components is not None and 1 < components.size

    def _critic(self, traced: TracedRun, name: str, estimator: Estimator) -> Critic | None:
        """The site's own choice; else what follows from the ELBO's for a site of its kind."""
        options, components = traced.options[name], traced.infos[name].components
        if options.critic is False or not (estimator.uses_critic or estimator.is_pathwise):
            return None
        if options.critic is not None:
            return checked_critic(options.critic, name, traced.run.sites[name].fn, components, estimator)
        if self.critic is None or estimator.is_pathwise:
            return None
        return default_critic(self.critic, traced.run.sites[name].fn, components)

    def _tabled_kinds(
        self,
        traced: TracedRun,
        name: str,
        graph: StochasticComputationGraph,
        estimator: Estimator,
        immediate: tuple[str, ...],
    ) -> set[Known]:
        """The site's own costs that follow from its distributions alone."""
        components = traced.infos[name].components
        if components is None or not estimator.uses_critic:
            return set()
        kinds = set() if name in traced.untraced or traced.only_costs else {Known.LOG_Q}
        prior, cost = traced.run.sites[name].prior, cost_of_model(name)
        if prior is not None and cost in immediate and graph.cost(cost).plates == graph.node(name).plates:
            if finite_components(prior) == components and prior.batch_shape == traced.run.sites[name].fn.batch_shape:
                kinds.add(Known.LOG_P)
        return kinds

    def _flips(
        self,
        traced: TracedRun,
        graph: StochasticComputationGraph,
        estimators: dict[str, Estimator],
        immediate: Mapping[str, tuple[str, ...]],
        handed: frozenset[str],
        cuts_plates: bool,
    ) -> tuple[FlipPlan | None, dict[str, Components]]:
        repeatable = {cost for cost in graph.cost_index if _is_repeatable(traced, cost)} - handed
        costs = {n: tuple(c for c in found if c in repeatable) for n, found in immediate_model_costs(graph).items()}
        if not cuts_plates:
            # All rows of a plate are flipped at once.
            costs = {name: () if graph.node(name).plates else found for name, found in costs.items()}
        if traced.elimination is not None:
            can_flip = traced.elimination.can_flip
            costs = {name: tuple(cost for cost in found if can_flip(cost, name)) for name, found in costs.items()}
        # Other values of one of many components pay only where they tell the whole cost-to-go of every such site.
        vectors = [n for n, i in traced.infos.items() if i.components is not None and i.components.size > 1]
        is_flat = all(self._is_complete(traced, graph, name, immediate[name], costs[name]) for name in vectors)
        components, wanted = {}, None
        finite = 0
        for name, info in traced.infos.items():
            exact = estimators[name].exact_costs
            if info.components is None or exact is False:
                continue
            finite += 1
            if costs[name] and (exact is True or info.components.size == 1 or is_flat):
                components[name] = info.components
                wanted = name if exact is True else wanted
        # One extra run of the whole model pays where many sites gain by it.
        if not components or (wanted is None and 2 * len(components) < finite):
            return None, {}
        given = [c for c, o in traced.user_costs.items() if _is_rerun(traced, o) and not (o.exact or o.is_function)]
        if given and wanted is not None:
            raise UnsupportedSiteError(
                f"Site {wanted!r} asks for an extra run by AllAction(exact=True), which would compute the values of "
                f"{given} once more. Give those costs as functions, cost(name, function, ...), or with exact=True."
            )
        if given:
            return None, {}
        flips = flip_plan(graph, components, costs)
        names = {cost for chosen in flips.costs.values() for cost in chosen}
        elements = flips.rows * sum(traced.run.costs[cost].numel() * _events(traced, graph, cost) for cost in names)
        if elements > self.max_elements and wanted is None:
            return None, {}
        return flips, components

    def _is_complete(
        self,
        traced: TracedRun,
        graph: StochasticComputationGraph,
        name: str,
        immediate: tuple[str, ...],
        evaluated: tuple[str, ...],
    ) -> bool:
        """Whether after an extra run nothing of a site's cost-to-go is unknown at its other values."""
        own = {Known.LOG_Q: cost_of_guide(name), Known.LOG_P: cost_of_model(name)}
        kinds = self._tabled_kinds(traced, name, graph, AllAction(), immediate)
        return {*evaluated, *(own[kind] for kind in kinds)}.issuperset(graph.downstream_costs(name))

    def _spec(
        self, traced: TracedRun, name: str, estimator: Estimator, critic: Critic | None, kinds: frozenset[Known]
    ) -> SiteSpec:
        info, options, record = traced.infos[name], traced.options[name], traced.run.sites[name]
        plates = traced.plates[name]
        event = tuple(record.fn.event_shape)
        return SiteSpec(
            plates=plates,
            components=None if estimator.is_pathwise else info.components,
            event_shape=event,
            estimator=estimator,
            critic=critic,
            has_moments=isinstance(critic, JointCritic) and not critic.is_finite,
            tabled=kinds,
            has_params=bool(plates),
            context=0 if options.context is None else options.context.shape[-1],
            share=options.share,
        )


def _charged(
    graph: StochasticComputationGraph,
    name: str,
    estimator: Estimator,
    evaluated: tuple[str, ...],
    patterns: Mapping[tuple[str, str], Pattern],
) -> frozenset[str]:
    """The costs that are charged to single components of a site, if there are any but its own log-probabilities."""
    if not estimator.by_component:
        return frozenset()
    found = {cost for cost in graph.downstream_costs(name) if (name, cost) in patterns and cost not in evaluated}
    return frozenset(found) if found - {cost_of_guide(name), cost_of_model(name)} else frozenset()


def _is_rerun(traced: TracedRun, cost: CostOptions) -> bool:
    """Whether the extra run passes a cost statement."""
    return traced.only_costs or not cost.in_guide


def _is_repeatable(traced: TracedRun, cost: str) -> bool:
    """Whether a cost may be read off an extra run."""
    options = traced.user_costs.get(cost)
    return options is None or (options.exact and _is_rerun(traced, options))


def _events(traced: TracedRun, graph: StochasticComputationGraph, cost: str) -> int:
    """Number of elements of the sites that a cost belongs to, per element of the cost."""
    if cost in traced.user_costs:
        return 1
    if traced.elimination is not None:
        return int(traced.elimination.num_elements(cost)) // max(traced.run.costs[cost].numel(), 1) + 1
    event: int = traced.model_trace.nodes[graph.cost(cost).site]["fn"].event_shape.numel()
    return event
