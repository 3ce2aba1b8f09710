r"""Which costs of a site are known at all of its values, and which ones an extra run of the model is to tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyro_bpq.batching.classes import Known
from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators.all_action import AllAction
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.graph.scg import cost_of_guide, cost_of_model
from pyro_bpq.plan.flips import FlipPlan, flip_plan, immediate_model_costs
from pyro_bpq.plan.structure import Structure, StructureFacts
from pyro_bpq.rollout.features import Components, have_same_values
from pyro_bpq.tracing.config import CostOptions
from pyro_bpq.tracing.traced_run import TracedRun

# Longest time of an extra run, in units of the step without it. In a longer time more particles win more.
DEAR = 1.0
# Smallest share of the noise of unknown costs that an extra run has to remove. The share is only estimated.
SHARE = 0.5


@dataclass(frozen=True)
class ExtraRun:
    """The extra run of the model."""

    flips: FlipPlan | None = None  # which rows flip which sites; ``None`` for no extra run
    components: dict[str, Components] = field(default_factory=dict)  # finite components of the sites that it flips
    refused: str = ""  # why there is none, where its price speaks against it

    def costs(self, name: str) -> tuple[str, ...]:
        """The costs of the model that it evaluates at other values of a site."""
        return () if self.flips is None else self.flips.costs.get(name, ())


def known_costs(structure: Structure, name: str, estimator: Estimator) -> set[Known]:
    """The site's own costs that follow from its distributions alone."""
    traced, graph = structure.traced, structure.graph
    components, record = traced.infos[name].components, traced.run.sites[name]
    if components is None or not estimator.uses_critic:
        return set()
    kinds = set() if name in traced.untraced or traced.only_costs else {Known.LOG_Q}
    cost = cost_of_model(name)
    if record.prior is not None and cost in structure.immediate[name]:
        is_like = have_same_values(record.prior, record.fn) and record.prior.batch_shape == record.fn.batch_shape
        if is_like and graph.cost(cost).plates == graph.node(name).plates:
            kinds.add(Known.LOG_P)
    return kinds


def is_complete(structure: Structure, name: str, evaluated: tuple[str, ...]) -> bool:
    """Whether after an extra run nothing of a site's cost-to-go is unknown at its other values."""
    known = _names(name, known_costs(structure, name, AllAction()))
    return known.union(evaluated).issuperset(structure.graph.downstream_costs(name))


def _names(name: str, kinds: set[Known]) -> set[str]:
    """The names of a site's own costs."""
    return {cost_of_guide(name) if kind is Known.LOG_Q else cost_of_model(name) for kind in kinds}


def plan_extra_run(structure: Structure, estimators: Mapping[str, Estimator], max_elements: int) -> ExtraRun:
    """Plans the extra run of the model; none where it does not pay."""
    traced, graph, costs = structure.traced, structure.graph, _readable(structure)
    # Other values of one of many components pay only where they tell the whole cost-to-go of every such site.
    vectors = [n for n, i in traced.infos.items() if i.components is not None and i.components.size > 1]
    is_flat = all(is_complete(structure, name, costs[name]) for name in vectors)
    components, wanted = {}, None
    for name, info in traced.infos.items():
        exact = estimators[name].exact_costs
        if info.components is None or exact is False:
            continue
        if costs[name] and (exact is True or info.components.size == 1 or is_flat):
            components[name] = info.components
            wanted = name if exact is True else wanted
    if not components:
        return ExtraRun()
    given = [c for c, o in traced.user_costs.items() if _is_rerun(traced, o) and not (o.exact or o.is_function)]
    if given and wanted is not None:
        raise UnsupportedSiteError(
            f"Site {wanted!r} asks for an extra run by AllAction(exact=True), which would compute the values of "
            f"{given} once more. Give those costs as functions, cost(name, function, ...), or with exact=True."
        )
    if given:
        return ExtraRun()
    flips = flip_plan(graph, components, costs)
    names = {cost for chosen in flips.costs.values() for cost in chosen}
    elements = flips.rows * sum(traced.run.costs[cost].numel() * _events(structure, cost) for cost in names)
    refused = ""
    if wanted is None:
        share = told_share(structure, estimators, flips.costs)
        refused = _too_dear(structure.facts, flips.rows, elements, max_elements, share)
    return ExtraRun(refused=refused) if refused else ExtraRun(flips, components)


def told_share(
    structure: Structure, estimators: Mapping[str, Estimator], costs: Mapping[str, tuple[str, ...]]
) -> float:
    """The share of the noise of otherwise unknown costs that an extra run takes off, on average over sites.

    The run gives a cost at all values of the last site that the cost reads. This also removes noise at earlier sites.
    If the cost reads ``k`` sites from a site on, ``1 / k`` of its noise at that site is taken to be removed. All costs
    have the same weight.

    Args:
        structure: The structure.
        estimators: The estimator of each site.
        costs: For each flipped site the model's costs that the run tells.
    """
    graph = structure.graph
    told = graph.cost_bits_of({cost for found in costs.values() for cost in found})
    known = (_names(name, known_costs(structure, name, estimator)) for name, estimator in estimators.items())
    unknown = ~graph.cost_bits_of(set[str]().union(*known))
    shares = []
    # The told costs, as bits, by the number of sites that they read from the present one on.
    by_number: dict[int, int] = {0: told}
    for i in reversed(range(len(graph.nodes))):
        for number in sorted(by_number, reverse=True):
            moved = by_number[number] & graph.cost_child_bits[i]
            by_number[number] ^= moved
            by_number[number + 1] = by_number.get(number + 1, 0) | moved
        left = graph.downstream_bits[i] & unknown
        if estimators[graph.nodes[i].name].uses_critic and left:
            parts = sum((bits & left).bit_count() / number for number, bits in by_number.items() if number)
            shares.append(parts / left.bit_count())
    return sum(shares) / len(shares) if shares else 0.0


def _too_dear(facts: StructureFacts, rows: int, elements: int, max_elements: int, share: float) -> str:
    """Why an extra run of so many rows costs more than it is worth; empty where it does not."""
    if elements > max_elements:
        return f"its {rows} rows evaluate {elements} costs, more than {max_elements}"
    if share < SHARE:
        return f"its {rows} rows tell about {share:.2f} of the noise of unknown costs"
    if facts.work is None:
        return ""
    guide, model = facts.work
    # A backward pass takes about twice as long as the run itself; the extra run has none.
    ratio = model.of_rows(rows).seconds() / (guide + model).times(3).seconds()
    return f"its {rows} rows take about {ratio:.1f} times as long as the rest of the step" if ratio > DEAR else ""


def _readable(structure: Structure) -> dict[str, tuple[str, ...]]:
    """The model's costs that may be read off an extra run, by site."""
    traced, graph, facts = structure.traced, structure.graph, structure.facts
    given = traced.user_costs.items()
    fixed = {cost for cost, options in given if not (options.exact and _is_rerun(traced, options))}
    repeatable = graph.cost_index.keys() - fixed - facts.handed
    costs = {n: tuple(c for c in found if c in repeatable) for n, found in immediate_model_costs(graph).items()}
    if not facts.cuts_plates:
        # All rows of a plate are flipped at once.
        costs = {name: () if graph.node(name).plates else found for name, found in costs.items()}
    if traced.elimination is not None:
        can_flip = traced.elimination.can_flip
        costs = {name: tuple(cost for cost in found if can_flip(cost, name)) for name, found in costs.items()}
    return costs


def _is_rerun(traced: TracedRun, cost: CostOptions) -> bool:
    """Whether the extra run passes a cost statement."""
    return traced.only_costs or not cost.in_guide


def _events(structure: Structure, cost: str) -> int:
    """Number of elements of the sites that a cost belongs to, per element of the cost."""
    traced = structure.traced
    if cost in traced.user_costs:
        return 1
    if traced.elimination is not None:
        return int(traced.elimination.num_elements(cost)) // max(traced.run.costs[cost].numel(), 1) + 1
    return traced.model_trace.nodes[structure.graph.cost(cost).site]["fn"].event_shape.numel()
