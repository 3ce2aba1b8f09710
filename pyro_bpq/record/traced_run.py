r"""The record of a run of guide and model: structure (a key, reads), its graph, and tensors (a run)."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from pyro.distributions import MaskedDistribution
from pyro.distributions.util import is_identically_zero, scale_and_mask
from torch import Tensor

from pyro_bpq.errors import OptionError, SiteNotFoundError
from pyro_bpq.estimators.base import SiteInfo
from pyro_bpq.graph.bitsets import Reads
from pyro_bpq.graph.bitsets import named as names_in
from pyro_bpq.graph.scg import CostNode, Plate, StochasticComputationGraph, StochasticNode, cost_of_guide, cost_of_model
from pyro_bpq.record.config import CostOptions, SiteOptions, check_context, cost_options, site_options
from pyro_bpq.record.key import Call
from pyro_bpq.record.laws import is_scored_by_pyro, score_of
from pyro_bpq.record.recorded import Bound, Recorded
from pyro_bpq.record.watch import PARTICLES, is_enumerated, is_untraced, samples, site_info
from pyro_bpq.rollout.features import family_of
from pyro_bpq.rollout.runs import Run, SiteRecord
from pyro_bpq.rollout.sums import total


def cost_of_site(site: Any, is_guide: bool) -> str:
    """Name of the cost of a traced site: ``log q(...)``, ``-log p(...)`` or ``cost(...)``."""
    if cost_options(site) is not None:
        return f"cost({site['name']})"
    return cost_of_guide(site["name"]) if is_guide else cost_of_model(site["name"])


def named(guide_sites: Mapping[str, Any], model_sites: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """The costs of sites by name, the sites, and whether each is of the guide."""
    for sites, is_guide in ((guide_sites, True), (model_sites, False)):
        for site in sites.values():
            yield cost_of_site(site, is_guide), site, is_guide


@dataclass(frozen=True)
class TracedRun:
    """The record of one run of guide and model."""

    # The part of the structure that is visible without tracking, an entry for each cost: the name of its site, the
    # plates, kinds of distributions and options.
    entries: tuple[Any, ...]
    run: Run
    plate_sizes: Mapping[Plate, int]
    infos: Mapping[str, SiteInfo]
    options: Mapping[str, SiteOptions]
    model_trace: Any
    guide_trace: Any
    subsamples: Mapping[str, Any]  # indices that subsampled plates drew, by name of the plate
    # Names of the latent sites that each cost reads, by name of the cost; `None` if not tracked
    reads: Mapping[str, frozenset[str]] | None = None
    # Latent sites of the guide that Pyro leaves out of its traces. Their `log q` is not a cost.
    untraced: frozenset[str] = frozenset()
    escaped_sites: frozenset[str] = frozenset()  # the sites whose values left torch
    enumerated: frozenset[str] = frozenset()  # sites that hold all their values at once
    # External functions that were called, one of each object by its id, and the attributes of it that they changed.
    externals: Mapping[int, tuple[Any, set[str]]] = field(default_factory=dict)
    only_costs: bool = False  # whether only cost statements count
    of_guide: frozenset[str] = frozenset()  # costs that are log-probabilities of the guide
    averages_rows: bool = False  # whether weights of a mean over enumerated values read several rows
    recorded: Recorded | None = None  # the recording of the run, if there is one
    flags: tuple[Any, ...] = ()  # the flags among the arguments of the programs

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal keys mean the same sites, plates and options in the same order, and the same flags."""
        return self.entries, self.flags

    @property
    def traces(self) -> tuple[Any, Any]:
        """Pyro's traces of model and guide."""
        return self.model_trace, self.guide_trace

    @cached_property
    def met(self) -> dict[str, tuple[str, str]]:
        """Costs in which a row of a plate reads other rows: the plate, and an operator without a rule, or ``""``."""
        found = {} if self.recorded is None else self.recorded.met
        return {cost: pair for cost, pair in found.items() if pair[0] != PARTICLES}

    @cached_property
    def crosses(self) -> bool:
        """Whether rows of a plate may meet: in a cost, or where a value that is sampled in a plate leaves torch."""
        in_plates = {name for name, info in self.infos.items() if info.plates}
        return self.averages_rows or bool(in_plates & self.escaped_sites or self.met)

    @property
    def _sites(self) -> Iterator[tuple[str, Any, bool]]:
        return named(samples(self.guide_trace), samples(self.model_trace))

    @cached_property
    def user_costs(self) -> dict[str, CostOptions]:
        """Options of each cost statement, by name of the cost."""
        return {cost: given for cost, site, _ in self._sites if (given := cost_options(site)) is not None}

    @cached_property
    def scored(self) -> dict[str, Tensor]:
        """The scores of the sites that have one, in the order of draws."""
        return {name: record.score for name, record in self.run.sites.items() if record.score is not None}

    @property
    def is_dear(self) -> bool:
        """Whether it calls external functions, or functions of costs that leave torch: they may be dear."""
        found = [cost for cost, own in self.user_costs.items() if own.is_function]
        # What is summed out has another name.
        asked = self.recorded.costs if found and self.enumerated and self.recorded else found
        return bool(self.externals) or not all(self.recorded and self.recorded.can_compute(cost) for cost in asked)

    @property
    def is_plain(self) -> bool:
        """Whether its traces tell all of it, so that Pyro alone can run it."""
        return not (self.externals or self.untraced or plain_run(*self.traces, samples(self.guide_trace)) is None)

    @cached_property
    def mixes(self) -> tuple[str, str] | None:
        """A cost in which a particle reads others, and an operator without a rule, or ``""``; ``None`` if none does."""
        found = {} if self.recorded is None else self.recorded.met
        return next(((cost, why) for cost, (plate, why) in found.items() if plate == PARTICLES), None)

    @property
    def weights(self) -> dict[str, tuple[Any, Any]]:
        """Scale and mask of each cost."""
        return {cost: (site["scale"], site["mask"]) for cost, site, _ in self._sites}

    def bound(self, recorded: Recorded, call: Call) -> Bound:
        """The tensors of the run, whose call it was, with the operators of a recording."""
        values = {name: record.value for name, record in self.run.sites.items()}
        return recorded.bound(values, self.subsamples, call, self.weights)

    @cached_property
    def plates(self) -> dict[str, tuple[Plate, ...]]:
        """Plates of each site. If guide and model both have the site, they are its plates in the guide."""
        return {entry[0]: entry[1] for entry in reversed(self.entries)}

    @property
    def plate_ndim(self) -> int:
        """Number of plate dimensions."""
        return max((-plate.dim for plate in self.plate_sizes), default=0)


def record_run(
    model_trace: Any, guide_trace: Any, guide_sites: Mapping[str, Any], particles: int, subsamples: Mapping[str, Any]
) -> TracedRun:
    """Records what the traces of an untracked run show.

    ``guide_sites`` are the sites of the guide, those included that its trace leaves out. For the rest see
    :class:`TracedRun`.
    """
    sizes: dict[Plate, int] = {}
    options, infos, sites, costs, entries = {}, {}, {}, {}, list[Any]()
    model_sites = samples(model_trace)
    for cost, site, is_guide in named(guide_sites, model_sites):
        name, is_observed = site["name"], site["is_observed"]
        if cost in costs:
            raise OptionError(f"Guide and model both have a cost {name!r}; give them names of their own.")
        costs[cost] = site["log_prob"] if is_guide else -site["log_prob"]
        plates, is_latent = _plates(site, sizes), not (is_observed or is_enumerated(site))
        chosen: Any = site_options(name, site["infer"]) if is_guide and not is_observed else None
        if is_guide and is_latent:
            infos[name], options[name] = site_info(site, plates, particles), chosen
            sites[name] = _site(site, model_sites.get(name), chosen, infos[name])
        elif is_latent and name not in sites:
            raise SiteNotFoundError(_no_counterpart(name, [*sites]))
        # The law of a latent site of the model may have other values than the guide's.
        kind = (type(site["fn"]), family_of(site["fn"])) if is_guide or not is_observed else None
        split = infos[name].components if name in infos else None
        # The event of a deterministic statement is the whole value, rows and particles included.
        event = () if site["infer"].get("_deterministic") else tuple(site["fn"].event_shape)
        told = cost_options(site), _fingerprint(chosen), is_untraced(site)
        entries.append((name, plates, event, kind, split, told))
    return TracedRun(
        entries=tuple(entries),
        run=Run(sites, costs, *_sums(guide_sites, model_sites)),
        plate_sizes=sizes,
        infos=infos,
        options=options,
        model_trace=model_trace,
        guide_trace=guide_trace,
        subsamples=subsamples,
        untraced=frozenset(name for name in sites if is_untraced(guide_sites[name])),
        of_guide=frozenset(cost_of_guide(name) for name, site in guide_sites.items() if cost_options(site) is None),
    )


def _no_counterpart(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    listed = f"{known[:8]} and {len(known) - 8} more" if len(known) > 8 else str(known)
    return (
        f"The model's latent site {name!r} has no counterpart in the guide, whose latent sites are {listed}.{meant} "
        f'Write pyro.sample("{name}", ...) in the guide, observe it in the model, or sum it out (enumeration="exact").'
    )


class PlainRun(NamedTuple):
    """What program order needs of a run without choices at sites, scored sites in plates and cost statements."""

    scored: Mapping[str, Tensor]  # as in a traced run
    run: Run  # its loss, and the sum of all costs through which pathwise gradients flow
    traces: tuple[Any, Any]  # Pyro's traces of model and guide


# What a site's infer may ask for that a plain run has no place for.
_OPTIONS = frozenset(("bpq", "baseline", "bpq_cost", "_do_not_trace", "_enumerate_dim"))


def plain_run(model_trace: Any, guide_trace: Any, guide_sites: Mapping[str, Any]) -> PlainRun | None:
    """A run as program order sees it, from its traces with log-probabilities; ``None`` where it is not plain."""
    model_sites, scored = samples(model_trace), dict[str, Tensor]()
    for name, site in guide_sites.items():
        fn = site["fn"]
        if site["is_observed"] or not is_scored_by_pyro(fn) or not _OPTIONS.isdisjoint(site["infer"]):
            return None
        score = site["score_parts"].score_function
        if not _is_zero(score):
            if site["cond_indep_stack"] and any(frame.vectorized for frame in site["cond_indep_stack"]):
                return None
            scored[name] = score
    for name, site in model_sites.items():
        if not (site["is_observed"] or name in guide_sites) or not _OPTIONS.isdisjoint(site["infer"]):
            return None
    return PlainRun(scored, Run({}, {}, *_sums(guide_sites, model_sites)), (model_trace, guide_trace))


def _sums(guide_sites: Mapping[str, Any], model_sites: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns the sum of the costs through which pathwise gradients flow, and the loss."""
    guide_sum = total([site["log_prob_sum"] for site in guide_sites.values()]).detach()
    model_sum = total([site["log_prob_sum"] for site in model_sites.values()])
    # A factor of the guide counts whole. Other sites of the guide count only the part with a gradient in expectation.
    terms = [
        site["log_prob"] if site["is_observed"] else entropy_term(site["score_parts"].entropy_term, site)
        for site in guide_sites.values()
    ]
    found = [term.sum() for term in terms if not _is_zero(term)]
    return total(found) - model_sum if found else -model_sum, guide_sum - model_sum.detach()


def _is_zero(term: Any) -> bool:
    """The same as Pyro's ``is_identically_zero``, whose look at tensors takes longer."""
    return (not isinstance(term, Tensor) or term.dtype == torch.int64) and bool(is_identically_zero(term))


def entropy_term(term: Any, site: Any) -> Any:
    """The part of a guide site's cost with an expected gradient, also through its scale (unlike in Pyro)."""
    scale = site["scale"]
    if isinstance(scale, Tensor) and scale.requires_grad and _is_zero(term):
        return scale_and_mask(site["unscaled_log_prob"].detach(), scale, site["mask"])
    return term


def _plates(site: Any, sizes: dict[Plate, int]) -> tuple[Plate, ...]:
    """Returns the vectorised plates of a site, without the plate of the particles."""
    plates = []
    for frame in site["cond_indep_stack"]:
        if frame.vectorized and frame.name != PARTICLES:
            plate, size = Plate(frame.name, frame.dim), frame.size
            if size < 0:
                # pyro.plate("rows") without a size broadcasts nothing. The shape of a site shows whether it is inside.
                shape = site["log_prob"].shape
                size = shape[frame.dim] if -frame.dim <= len(shape) else 1
                if size == 1:
                    continue
            sizes[plate] = size
            plates.append(plate)
    return tuple(sorted(plates)) if len(plates) > 1 else tuple(plates)


def _site(site: Any, prior: Any, options: SiteOptions, info: SiteInfo) -> SiteRecord:
    score, fn = site["score_parts"].score_function, site["fn"]
    # A value to which an estimator has attached a gradient has the score that the estimator gives.
    if not (is_scored_by_pyro(fn) or site.get("is_attached")):
        score = score_of(fn, site["value"])
    if options.context is not None:
        check_context(info.name, options.context, site["log_prob"].shape)
    own = options.baseline
    baseline = None if own is None else functools.partial(own.predict, info.name, site["log_prob"].shape)
    return SiteRecord(
        fn=fn,
        value=site["value"],
        score=None if _is_zero(score) else score,
        scale=site["scale"],
        mask=full_mask(site),
        prior=None if prior is None else prior["fn"],
        prior_scale=1.0 if prior is None else prior["scale"],
        prior_mask=None if prior is None else full_mask(prior),
        context=options.context,
        baseline=baseline,
    )


def full_mask(site: Any) -> Tensor | bool | None:
    """Returns the mask of a site, combined with the mask of its distribution."""
    fn, mask = site["fn"], site["mask"]
    while isinstance(fn, MaskedDistribution):
        mask, fn = fn._mask if mask is None else torch.as_tensor(mask) & torch.as_tensor(fn._mask), fn.base_dist
    return mask


def _fingerprint(options: SiteOptions | None) -> tuple[Any, ...] | None:
    if options is None:
        return None
    width = None if options.context is None else options.context.shape[-1]
    baseline = None if options.baseline is None else (options.baseline.is_predicted, options.baseline.decay)
    return (options.estimator, options.critic, options.share, width, baseline)


def dense_graph(traced: TracedRun) -> StochasticComputationGraph:
    """The dense graph: every site reads all earlier sites, and every cost of the model reads all sites.

    It is a superset of any graph that the program can have. So it is right whatever the program does, at the price of
    more variance.
    """
    names, bits, earlier = tuple(traced.run.sites), dict[str, int](), 0
    position = {name: i for i, name in enumerate(names)}
    for (name, *_), cost in zip(traced.entries, traced.run.costs, strict=True):
        if cost == cost_of_guide(name):
            # The log-probability of a latent site's own draw. Data of the guide have no position.
            earlier |= 1 << position[name] if name in position else 0
        bits[cost] = earlier
    return build_graph(traced, Reads(names, bits))


def build_graph(traced: TracedRun, reads: Mapping[str, frozenset[str]]) -> StochasticComputationGraph:
    """The graph of a run whose sites and costs read what ``reads`` says."""
    sites = tuple(traced.run.sites)
    bits, nodes = Reads.over(sites, reads).bits, []
    until: dict[str, int] = {}
    for i, name in enumerate(sites):
        # A draw and its log q read no later site. The mask drops sites that only chose later views of the same table.
        before = bits[cost_of_guide(name)] & (1 << i) - 1
        until[name] = before | 1 << i
        nodes.append(StochasticNode(name, names_in(sites, before), traced.plates[name]))
    costs = []
    for (name, where, *_), cost in zip(traced.entries, traced.run.costs, strict=True):
        if traced.only_costs and cost not in traced.user_costs:
            continue
        members = until.get(name, bits[cost]) if cost == cost_of_guide(name) else bits[cost]
        costs.append(CostNode(cost, names_in(sites, members), where, name, cost in traced.of_guide))
    return StochasticComputationGraph(tuple(nodes), tuple(costs))


def merged_graph(traced: TracedRun, graphs: Sequence[StochasticComputationGraph]) -> StochasticComputationGraph:
    """Returns the union of the graphs of runs that have the key of ``traced``."""
    bits = dict[str, int]()
    for graph in graphs:
        read = {cost_of_guide(node.name): node.parents for node in graph.nodes}
        for name, parents in (*read.items(), *((cost.name, cost.parents) for cost in graph.costs)):
            bits[name] = bits.get(name, 0) | graph.bits_of(parents)
    return build_graph(traced, Reads(tuple(traced.run.sites), bits))
