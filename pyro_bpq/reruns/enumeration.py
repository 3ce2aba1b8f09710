r"""Sums enumerated sites out exactly; the remaining costs do not contain them.

A site of the model only is summed inside the logarithm. A site of the guide is summed outside it:

.. math::

    -\log \sum_{z} \prod_i p_i(z, \ldots)
    \qquad\text{and}\qquad
    \sum_{z} q(z \mid \ldots) \, c(z, \ldots)

Both sums are differentiable functions of the parameters and of the sampled sites, so they are costs like any other.
Each enumerated site has a dimension for its values, to the left of all plates, as in Pyro's ``TraceEnum_ELBO``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from opt_einsum import shared_intermediates
from pyro import poutine
from pyro.distributions.util import is_identically_zero
from pyro.ops import packed
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.rings import LogRing
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_bpq.errors import PlateError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.graph.scg import Plate, cost_of_guide, cost_of_model
from pyro_bpq.record.laws import as_drawn
from pyro_bpq.record.traced_run import TracedRun, entropy_term, named
from pyro_bpq.record.watch import is_enumerated, samples
from pyro_bpq.reruns.tables import Laws, Table
from pyro_bpq.rollout.runs import Run

_REMOVE, _SAMPLED = 'Remove infer={"enumerate": ...}', "so that it is sampled"

# A tensor without dimensions of size one. Its attribute ``_pyro_dims`` names the other dimensions.
Packed = Any


class _Enumerate(EnumMessenger):
    """Enumerates all marked sites in parallel; raises for sites that cannot be summed exactly."""

    def _pyro_sample(self, msg: Any) -> None:
        mark, fn = msg["infer"].get("enumerate"), msg["fn"]
        if mark is None or msg["is_observed"] or msg["done"]:
            return super()._pyro_sample(msg)
        if mark not in ("parallel", "sequential"):
            fault = f'infer={{"enumerate": {mark!r}}} is unknown; write "parallel" or leave it out.'
        elif msg["infer"].get("num_samples") is not None:
            fault = 'infer={"num_samples": ...} samples, it does not sum. Remove it, or "enumerate", or both to sample.'
        elif not getattr(fn, "has_enumerate_support", False):
            fault = f"{type(fn).__name__} has no support that can be enumerated. {_REMOVE} there, {_SAMPLED}."
        else:
            # Sequential enumeration has the same expectation as parallel enumeration.
            msg["infer"]["enumerate"] = "parallel"
            try:
                return super()._pyro_sample(msg)
            except NotImplementedError as error:
                fault = f"{error}. {_REMOVE} there, {_SAMPLED}."
        raise UnsupportedSiteError(f"Site {msg['name']!r}: {fault}")


def enumerated_programs(model: Any, guide: Any, nesting: int) -> tuple[Any, Any]:
    """Model and guide with their marked sites enumerated, for one run."""
    if isinstance(poutine.unwrap(guide), Messenger):
        raise UnsupportedProgramError(
            'enumeration="exact" needs the guide to run before the model, and a GuideMessenger runs both as one. '
            'Write the guide as a function, or enumeration="sample".'
        )
    return _Enumerate(None)(model), _Enumerate(-1 - nesting)(guide)


@dataclass(frozen=True)
class _Recipe:
    """How a cost is made from costs of a run."""

    costs: tuple[str, ...]  # a single one, or those whose log-probabilities are added up
    summed: tuple[str, ...] = ()  # enumerated sites of the model that are summed inside the logarithm
    # Enumerated sites of the guide that the cost is averaged over: the ones it reads, and their enumerated ancestors.
    averaged: tuple[str, ...] = ()
    plates: tuple[Plate, ...] = ()  # plates of the cost

    @property
    def name(self) -> str:
        """Name of the cost."""
        more = ", ..." if len(self.summed) > 3 else ""
        name = f"-log sum({', '.join(self.summed[:3])}{more})" if self.summed else self.costs[0]
        return f"E[{name}]" if self.averaged else name


class _Term:
    """The log-probability of a site with named dimensions."""

    def __init__(self, site: Any, cost: Tensor, plates: Mapping[str, str], owners: Mapping[str, str]) -> None:
        self.site, self.name = site, site["name"]
        frames = (frame for frame in site["cond_indep_stack"] if frame.vectorized)
        self.ordinal = frozenset(plates[frame.name] for frame in frames)
        self.cost = self.packed(cost)
        self.reads = frozenset(owners[dim] for dim in self.cost._pyro_dims if dim in owners)

    def packed(self, tensor: Tensor) -> Packed:
        """A tensor of the site, with named dimensions."""
        try:
            return packed.pack(tensor, self.site["infer"]["_dim_to_symbol"])
        except ValueError as error:
            raise PlateError(
                f"Site {self.name!r} has a dimension that belongs to no plate and no enumerated site. Put it into a "
                f"pyro.plate, or into the event with .to_event(). {error}"
            ) from error

    def factor(self, is_summed: bool) -> Packed:
        """The factor of a sum: masked unless the site itself is summed, and not scaled."""
        mask = None if is_summed else self.site["mask"]
        mask = self.packed(mask) if isinstance(mask, Tensor) else mask
        return packed.scale_and_mask(self.packed(self.site["unscaled_log_prob"]), mask=mask)

    def weight(self) -> Packed:
        """The weight in a mean, neither scaled nor masked: a masked site still takes its values."""
        fn, log_prob = as_drawn(self.site["fn"]), self.site["unscaled_log_prob"]
        log_prob = log_prob if fn is self.site["fn"] else fn.log_prob(self.site["value"])
        return self.packed(log_prob.exp())


class _Elimination:
    """The elimination of the enumerated sites of a run."""

    def __init__(self, traced: TracedRun, nesting: int) -> None:
        self.traced, self.nesting = traced, nesting
        guide, model = traced.guide_trace, traced.model_trace
        guide.symbolize_dims()
        model.symbolize_dims(guide.plate_to_symbol)
        symbols = model.plate_to_symbol
        self.averaged = _enumerated(guide)
        self.summed = {name: symbol for name, symbol in _enumerated(model).items() if name not in self.averaged}
        owners = {symbol: name for name, symbol in {**self.averaged, **self.summed}.items()}
        self.sites, self.plates = dict[str, str](), dict[str, tuple[Plate, ...]]()
        for entry, cost in zip(traced.entries, traced.run.costs, strict=True):
            self.sites[cost], self.plates[cost] = entry[:2]
        costs = named(samples(guide), samples(model))
        self.terms = {cost: _Term(site, traced.run.costs[cost], symbols, owners) for cost, site, _ in costs}
        self.dims = {**guide.symbol_to_dim, **model.symbol_to_dim}
        for plate in sorted({plate for plates in self.plates.values() for plate in plates}):
            dim = self.dims[symbols[plate.name]]
            if plate.dim != dim:
                raise PlateError(
                    f"Plate {plate.name!r} has the dimensions {plate.dim} and {dim}. Sums over enumerated sites need "
                    f"one dimension per plate: write dim={min(plate.dim, dim)} in all of them."
                )
        self.laws = Laws({name: self.table(self.terms[cost_of_guide(name)].weight()) for name in self.averaged})
        # Reparameterised sites that are drawn once for each value: functions of their noise, as other tensors are.
        self.scored = traced.untraced.union(traced.scored)
        self.spread = {name for name in traced.run.sites if self.reads(cost_of_guide(name))} - self.scored

    def reads(self, *costs: str) -> frozenset[str]:
        """The enumerated sites whose dimensions some costs have."""
        terms = (self.terms[cost] for cost in costs if cost in self.terms)
        return frozenset().union(*(term.reads for term in terms))

    # Which costs of the run make which cost.

    def recipes(self) -> list[_Recipe]:
        """The recipes of all costs."""
        groups, found = self._groups(), list[_Recipe]()
        alone = [(cost,) for cost in self.sites if not any(cost in group for group in groups)]
        for costs in (*alone, *groups):
            averaged = self.laws.closed(self.reads(*costs) & self.averaged.keys())
            summed = tuple(self.sites[cost] for cost in costs if self.sites[cost] in self.summed)
            common = {*self.plates[costs[0]]}.intersection(*(self.plates[cost] for cost in costs))
            found.append(_Recipe(costs, summed, averaged, tuple(sorted(common))))
        return sorted(found, key=lambda recipe: recipe.name not in self.sites)

    def _groups(self) -> list[tuple[str, ...]]:
        """Groups of costs that are linked by enumerated sites that only the model has."""
        groups: list[tuple[set[str], frozenset[str]]] = []
        for cost, term in self.terms.items():
            reads = (term.reads | {term.name}) & self.summed.keys()
            if reads:
                members = {cost}
                for group in [group for group in groups if group[1] & reads]:
                    groups.remove(group)
                    members, reads = members | group[0], reads | group[1]
                groups.append((members, reads))
        return [tuple(cost for cost in self.terms if cost in members) for members, _ in groups]

    # Programs that cannot be summed.

    def check(self, recipes: Sequence[_Recipe]) -> None:
        """Raises if a sum would not run over the values of the sites."""
        traced = self.traced
        for name in sorted(traced.escaped_sites & traced.enumerated):
            raise UnsupportedProgramError(
                f"The values of the enumerated site {name!r} left torch (if, try, int(), .item(), .numpy(), x[mask]), "
                f"but all of them are given at once. Use operations on tensors. Or: {_REMOVE} there, {_SAMPLED}."
            )
        for name in sorted(traced.enumerated - self.averaged.keys() - self.summed.keys()):
            raise UnsupportedProgramError(
                f'Site {name!r} has infer={{"_do_not_trace": True}} and is enumerated; remove one of the two.'
            )
        # The enumerated sites of more than one value.
        many = {term.name for term in self.terms.values() if term.name in term.reads}
        for cost, name in self.sites.items():
            reads, shape = self.reads(cost), traced.run.costs[cost].shape
            # A recording shows those without a dimension, too; Pyro has no dimensions of untraced sites.
            lost = (many & traced.reads[cost] if traced.reads else frozenset()) - reads
            if name in traced.untraced and math.prod(shape[: max(len(shape) - self.nesting, 0)]) > 1:
                lost |= self.averaged.keys()
            if cost == cost_of_guide(name) and name in self.scored and (reads or lost):
                other = "reparameterise" if traced.infos[name].components is None else "enumerate"
                raise UnsupportedProgramError(
                    f"Site {name!r} is sampled in the guide and depends on the enumerated site {min(reads or lost)!r}: "
                    f"it would have to be sampled once for each value. {_REMOVE} at {min(reads or lost)!r}, so that it "
                    f"is sampled too, or {other} {name!r} as well."
                )
            if lost:
                raise UnsupportedProgramError(
                    f"Site {name!r} reads the enumerated site {min(lost)!r}, but the dimension of its values is lost "
                    "on the way, as by z.sum() or z[0]. Leave the dimensions to the left of all plates alone. Or: "
                    f"{_REMOVE} at {min(lost)!r}, {_SAMPLED}."
                )
        for recipe in recipes:
            averaged = self.reads(*recipe.costs) & self.averaged.keys()
            places = [(self.sites[cost], self.plates[cost], self.reads(cost)) for cost in recipe.costs]
            places += [(name, recipe.plates, averaged) for name in recipe.summed[:1]]
            for name, plates, reads in places:
                for read in sorted(reads):
                    own = self.plates[(cost_of_guide if read in self.averaged else cost_of_model)(read)]
                    if outside := sorted(plate.name for plate in {*own} - {*plates}):
                        raise UnsupportedProgramError(
                            f"Site {name!r} lies outside of the plates {outside}, and what it stands for reads the "
                            f"enumerated site {read!r} inside of them: a sum over the values of all rows together. "
                            f"{_REMOVE} at {read!r}, so that it is sampled in the guide, or loop over the plate "
                            "instead: for i in pyro.plate(...)."
                        )

    # Tensors.

    def table(self, numbers: Packed) -> Table:
        """Numbers with named dimensions as a table of sites of the guide."""
        sites = tuple(name for name, symbol in self.averaged.items() if symbol in numbers._pyro_dims)
        places = {self.averaged[name]: i - self.nesting - len(sites) for i, name in enumerate(sites)}
        return Table(sites, packed.unpack(numbers, {**self.dims, **places}))

    def cost(self, recipe: _Recipe) -> Tensor:
        """The cost that a recipe makes, with its plate dimensions, in nats."""
        if not (recipe.summed or recipe.averaged):
            return self.traced.run.costs[recipe.name]
        sites, numbers = self.table(self._sum(recipe) if recipe.summed else self.terms[recipe.costs[0]].cost)
        if not sites:
            return numbers
        law = self.laws.of(sites)
        # A value of probability zero may have an infinite cost, and 0 * inf is NaN.
        return (torch.where(law > 0.0, numbers, numbers.new_zeros(())) * law).sum([*range(len(sites))])

    def _sum(self, recipe: _Recipe) -> Packed:
        """Minus the logarithm of the sum over sites of the model."""
        tree: OrderedDict[frozenset[str], list[Packed]] = OrderedDict()
        for term in (self.terms[cost] for cost in recipe.costs):
            tree.setdefault(term.ordinal, []).append(term.factor(term.name in self.summed))
        try:
            found = contract_tensor_tree(tree, {self.summed[name] for name in recipe.summed}, ring=LogRing())
        except NotImplementedError as error:
            raise UnsupportedProgramError(
                f"The enumerated sites {list(recipe.summed)} cannot be summed out together: {error}. {_REMOVE} "
                "at one of them and sample it in the guide."
            ) from error
        ((log_sum,),) = found.values()
        return packed.neg(packed.scale_and_mask(log_sum, scale=self._scale(recipe)))

    def _scale(self, recipe: _Recipe) -> Any:
        """The common scale of all sites of a sum, which stands outside the logarithm."""
        scales = {self.sites[cost]: self.terms[cost].site["scale"] for cost in recipe.costs}
        first, common = next(iter(scales.items()))
        for name, scale in scales.items():
            if isinstance(scale, Tensor) and scale.dim():
                raise UnsupportedSiteError(
                    f"Site {name!r} has a scale of shape {tuple(scale.shape)} and belongs to a sum over "
                    f"{list(recipe.summed)}. Write poutine.scale with a single number there."
                )
            if float(scale) != float(common):
                raise UnsupportedSiteError(
                    f"Sites {first!r} (scale {float(common):g}) and {name!r} (scale {float(scale):g}) belong to one "
                    f"sum over {list(recipe.summed)}, and need a common scale. Put both under the same poutine.scale "
                    f"and subsampled plates. Or: {_REMOVE}, and sample the site in the guide."
                )
        return common

    # What the new costs read.

    def tracked(self, recipe: _Recipe) -> frozenset[str]:
        """The sampled sites that a cost reads through its sites and its weights."""
        assert self.traced.reads is not None
        names = [*recipe.costs, *map(cost_of_guide, recipe.averaged)]
        return frozenset().union(*(self.traced.reads[name] for name in names)) - self.traced.enumerated

    def rows_meet(self, recipe: _Recipe) -> bool:
        """Whether a mean over a site outside of a plate has weights that read the rows of the plate.

        ``q(z)`` outside of the plate may read all rows. Each row of a mean over ``z`` then reads all rows too. Only
        tracked runs can tell; for others the result is ``False``.
        """
        reads, plates = self.traced.reads, self.traced.plates
        if reads is None:
            return False
        return any(
            ({*recipe.plates} - {*self.plates[law]}) & {*plates[site]}
            for law in map(cost_of_guide, recipe.averaged)
            for site in reads[law]
            if site in self.traced.run.sites
        )


def _enumerated(trace: Any) -> dict[str, str]:
    """The dimension of each enumerated site, by name."""
    return {name: site["infer"]["_enumerate_symbol"] for name, site in samples(trace).items() if is_enumerated(site)}


def eliminate(traced: TracedRun, nesting: int) -> TracedRun:
    r"""Sums the enumerated sites of a run out of its costs.

    Sites of the model that share an enumerated site become one cost: minus the logarithm of their sum. A cost that
    reads an enumerated site of the guide becomes its expectation over that site. Scales stand outside the logarithm and
    masks inside, as in ``TraceEnum_ELBO``. Weights are neither scaled nor masked. Costs that read no enumerated site
    do not change.
    """
    if not traced.enumerated:
        return traced
    with shared_intermediates():
        work = _Elimination(traced, nesting)
        recipes = {recipe.name: recipe for recipe in work.recipes()}
        work.check([*recipes.values()])
        costs = {name: work.cost(recipe) for name, recipe in recipes.items()}
    entries = dict(zip(traced.run.costs, traced.entries, strict=True))
    # A site whose own -log p became part of a sum has no table of -log p over its values.
    sites = {
        name: record if cost_of_model(name) in costs else replace(record, prior=None)
        for name, record in traced.run.sites.items()
        if name not in work.spread
    }
    return replace(
        traced,
        infos={name: traced.infos[name] for name in sites},
        options={name: traced.options[name] for name in sites},
        entries=tuple(
            (work.sites[name], recipe.plates, entries[name]) if name in entries else (name, recipe.plates, recipe)
            for name, recipe in recipes.items()
        ),
        run=Run(sites, costs, *_sums(traced, sites, costs)),
        reads=None if traced.reads is None else {name: work.tracked(recipe) for name, recipe in recipes.items()},
        averages_rows=any(map(work.rows_meet, recipes.values())),
        of_guide=frozenset(name for name, recipe in recipes.items() if recipe.costs[0] in traced.of_guide),
    )


def _sums(traced: TracedRun, names: Iterable[str], costs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the costs that carry pathwise gradients, and the loss."""
    parts = dict[str, Any](costs)
    for name in names:
        # Only the part of log q of a sampled site whose gradient has a nonzero expectation.
        site = None if name in traced.untraced else traced.guide_trace.nodes[name]
        parts[cost_of_guide(name)] = entropy_term(site["score_parts"].entropy_term, site) if site else 0.0
    paths = [term.sum() for term in parts.values() if not is_identically_zero(term)]
    return sum(paths, torch.zeros(())), sum((cost.detach().sum() for cost in costs.values()), torch.zeros(()))
