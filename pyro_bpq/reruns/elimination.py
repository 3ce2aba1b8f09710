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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from opt_einsum import shared_intermediates
from pyro.distributions.util import is_identically_zero
from pyro.ops import packed
from torch import Tensor

from pyro_bpq.errors import PlateError, UnsupportedProgramError
from pyro_bpq.graph.scg import cost_of_guide, cost_of_model
from pyro_bpq.reruns.enumeration import Recipe, Term, average, make
from pyro_bpq.rollout.runs import Run
from pyro_bpq.tracing.traced_run import TracedRun, entropy_term


@dataclass(frozen=True)
class Elimination:
    """How enumerated sites were summed out of the costs of a run."""

    recipes: Mapping[str, Recipe]  # recipe of every cost, by name of the cost


class _Eliminator:
    """The elimination of one run."""

    def __init__(self, traced: TracedRun, nesting: int) -> None:
        self.traced, self.nesting = traced, nesting
        guide, model = traced.guide_trace, traced.model_trace
        guide.symbolize_dims()
        symbols = {n: s["infer"]["_enumerate_symbol"] for n, s in _enumerated(guide)}
        self.guide = self._terms(guide, guide.plate_to_symbol, symbols)
        model.symbolize_dims(guide.plate_to_symbol)
        self.summed = {n: s["infer"]["_enumerate_symbol"] for n, s in _enumerated(model) if n not in guide.nodes}
        self.model = self._terms(model, model.plate_to_symbol, {**symbols, **self.summed})
        self.averaged = symbols
        self.plate_names = {symbol: name for name, symbol in model.plate_to_symbol.items()}
        # The plates of each cost.
        self.plates = {cost: entry[1] for entry, cost in zip(traced.entries, traced.run.costs, strict=True)}
        terms = (*self.guide.values(), *self.model.values())
        frames = [frame for term in terms for frame in term.site["cond_indep_stack"] if frame.vectorized]
        self.dims = {model.plate_to_symbol[frame.name]: frame.dim for frame in frames}
        for frame in frames:
            dim = self.dims[model.plate_to_symbol[frame.name]]
            if frame.dim != dim:
                raise PlateError(
                    f"Plate {frame.name!r} has the dimensions {frame.dim} and {dim}. Sums over enumerated sites need "
                    f"one dimension per plate: write dim={min(frame.dim, dim)} in all of them."
                )
        self.log_q = {name: self.guide[name].log_weight() for name in symbols}

    def _terms(self, trace: Any, plates: Mapping[str, str], symbols: Mapping[str, str]) -> dict[str, Term]:
        owners = {symbol: name for name, symbol in symbols.items()}
        sites = [(name, site) for name, site in trace.nodes.items() if site["type"] == "sample"]
        return {name: Term.of(site, site["log_prob"], plates, owners) for name, site in sites}

    # Which sites make which cost.

    def recipes(self) -> list[Recipe]:
        """The recipes of all costs, with the costs of the guide first."""
        plates = self.plates
        recipes = [Recipe((name,), plates=plates[cost_of_guide(name)], is_guide=True) for name in self.guide]
        groups = self._groups()
        alone = [name for name in self.model if not any(name in group for group in groups)]
        recipes += [Recipe((name,), plates=plates[cost_of_model(name)]) for name in alone]
        for group in groups:
            common = frozenset.intersection(*(frozenset(plates[cost_of_model(name)]) for name in group))
            summed = tuple(name for name in group if name in self.summed)
            recipes.append(Recipe(group, summed, plates=tuple(sorted(common))))
        return [replace(recipe, averaged=self._averaged(recipe)) for recipe in recipes]

    def _groups(self) -> list[tuple[str, ...]]:
        """Groups of the model's sites that are linked by enumerated sites that only the model has."""
        groups: list[tuple[set[str], frozenset[str]]] = []
        for name, term in self.model.items():
            reads = (term.reads | {name}) & self.summed.keys()
            if reads:
                members = {name}
                for group in [group for group in groups if group[1] & reads]:
                    groups.remove(group)
                    members, reads = members | group[0], reads | group[1]
                groups.append((members, reads))
        return [tuple(name for name in self.model if name in members) for members, _ in groups]

    def _averaged(self, recipe: Recipe) -> tuple[str, ...]:
        terms = self.guide if recipe.is_guide else self.model
        found: set[str] = set()
        pending = {read for name in recipe.sites for read in terms[name].reads if read in self.averaged}
        while pending:
            name = pending.pop()
            found.add(name)
            pending |= self.guide[name].reads - found
        return tuple(name for name in self.guide if name in found)

    # Programs that cannot be summed.

    def check(self, recipes: Sequence[Recipe]) -> None:
        """Raises if a sum would not run over the values of the sites."""
        for name in sorted(self.traced.leaked):
            raise UnsupportedProgramError(
                f"The values of the enumerated site {name!r} left torch (if, try, int(), .item(), .numpy(), x[mask]), "
                'but all of them are given at once. Use operations on tensors, or remove infer={"enumerate": ...} '
                "there, so that it is sampled."
            )
        for name in sorted(self.traced.enumerated - self.guide.keys() - self.model.keys()):
            raise UnsupportedProgramError(
                f'Site {name!r} has infer={{"_do_not_trace": True}} and is enumerated; remove one of the two.'
            )
        self._check_reads()
        for name, term in self.guide.items():
            if name in self.traced.run.sites and term.reads:
                self._raise_sampled_below(name, min(term.reads))
        for name in self.traced.untraced:
            shape = self.traced.run.costs[cost_of_guide(name)].shape
            if self.averaged and any(size > 1 for size in shape[: max(len(shape) - self.nesting, 0)]):
                self._raise_sampled_below(name, min(self.averaged))
        for terms in (self.guide, self.model):
            for name, term in terms.items():
                for read in term.reads:
                    self._check_plates(name, term.ordinal, read)
        for recipe in recipes:
            if recipe.summed:
                ordinal = frozenset.intersection(*(self.model[name].ordinal for name in recipe.sites))
                for read in {r for name in recipe.sites for r in self.model[name].reads if r in self.averaged}:
                    self._check_plates(recipe.summed[0], ordinal, read)

    def _check_plates(self, name: str, ordinal: frozenset[str], read: str) -> None:
        own = self.guide[read].ordinal if read in self.guide else self.model[read].ordinal
        outside = sorted(self.plate_names[symbol] for symbol in own - ordinal)
        if outside:
            raise UnsupportedProgramError(
                f"Site {name!r} lies outside of the plates {outside}, and what it stands for reads the enumerated site "
                f"{read!r} inside of them: a sum over the values of all rows together. Remove "
                f'infer={{"enumerate": ...}} at {read!r}, so that it is sampled in the guide, or loop over the plate '
                "instead: for i in pyro.plate(...)."
            )

    def _check_reads(self) -> None:
        """Raises if a tracked run shows that a site reads an enumerated site without its dimension of values."""
        traced = self.traced
        if traced.reads is None:
            return
        symbols = {**self.averaged, **self.summed}
        # The enumerated sites of more than one value.
        owners = {**self.model, **self.guide}
        many = {name for name, symbol in symbols.items() if symbol in owners[name].cost._pyro_dims}
        for prefix, terms in ((cost_of_guide, self.guide), (cost_of_model, self.model)):
            for name, term in terms.items():
                lost = (traced.reads[prefix(name)] & many) - term.reads
                if not lost:
                    continue
                if name in traced.run.sites and prefix is cost_of_guide:
                    self._raise_sampled_below(name, min(lost))
                raise UnsupportedProgramError(
                    f"Site {name!r} reads the enumerated site {min(lost)!r}, but the dimension of its values is "
                    "lost on the way, as by z.sum() or z[0]. Leave the dimensions to the left of all plates alone, or "
                    f'remove infer={{"enumerate": ...}} at {min(lost)!r}, so that it is sampled.'
                )
        for name in traced.untraced:
            lost = traced.reads[cost_of_guide(name)] & many
            if lost:
                self._raise_sampled_below(name, min(lost))

    @staticmethod
    def _raise_sampled_below(name: str, read: str) -> None:
        raise UnsupportedProgramError(
            f"Site {name!r} is sampled in the guide and depends on the enumerated site {read!r}: it would have to be "
            f'sampled once for each value. Remove infer={{"enumerate": ...}} at {read!r}, so that it is sampled too, '
            f"or enumerate {name!r} as well."
        )

    # Tensors.

    def cost(self, recipe: Recipe) -> Tensor:
        """The cost that a recipe makes, with its plate dimensions, in nats."""
        made = make(recipe, self.guide if recipe.is_guide else self.model, self.summed)
        return packed.unpack(average(made, recipe, self.log_q, self.averaged), self.dims)

    def rows_meet(self, recipes: Iterable[Recipe]) -> bool:
        """Whether a mean over a site outside of a plate has weights that read the rows of the plate.

        ``q(z)`` outside of the plate may read all rows. Each row of a mean over ``z`` then reads all rows too. Only
        tracked runs can tell; for others the result is ``False``.
        """
        traced = self.traced
        for recipe in recipes if traced.reads is not None else ():
            for name in recipe.averaged:
                outside = set(recipe.plates) - set(self.plates[cost_of_guide(name)])
                read = (traced.reads or {})[cost_of_guide(name)] & traced.run.sites.keys()
                if any(outside & set(traced.plates[site]) for site in read):
                    return True
        return False

    def reads(self, recipe: Recipe) -> frozenset[str]:
        """The sampled sites that a cost reads through its sites and its weights."""
        assert self.traced.reads is not None
        prefix = cost_of_guide if recipe.is_guide else cost_of_model
        names = [prefix(name) for name in recipe.sites] + [cost_of_guide(name) for name in recipe.averaged]
        found: frozenset[str] = frozenset().union(*(self.traced.reads[name] for name in names))
        return found - self.traced.enumerated


def _enumerated(trace: Any) -> list[tuple[str, Any]]:
    return [
        (name, site)
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and site["infer"].get("_enumerate_dim") is not None
    ]


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
        work = _Eliminator(traced, nesting)
        recipes = work.recipes()
        work.check(recipes)
        made = {}
        for recipe in recipes:
            is_as_it_was = not (recipe.summed or recipe.averaged)
            made[recipe.name] = recipe, traced.run.costs[recipe.name] if is_as_it_was else work.cost(recipe)
    for name in traced.untraced:
        cost = cost_of_guide(name)
        made[cost] = Recipe((name,), plates=work.plates[cost], is_guide=True), traced.run.costs[cost]
    entries = dict(zip(traced.run.costs, traced.entries, strict=True))
    order = [*(name for name in entries if name in made), *(name for name in made if name not in entries)]
    kept, costs = {name: made[name][0] for name in order}, {name: made[name][1] for name in order}
    own_entries = [
        (recipe.sites[0], recipe.plates, entries[name]) if name in entries else (name, recipe.plates, recipe)
        for name, recipe in kept.items()
    ]
    # A site whose own -log p became part of a sum has no table of -log p over its values.
    sites = {
        name: record if cost_of_model(name) in made else replace(record, prior=None)
        for name, record in traced.run.sites.items()
    }
    differentiable, loss = _sums(traced, kept, costs)
    return replace(
        traced,
        entries=tuple(own_entries),
        run=Run(sites, costs, differentiable, loss),
        reads=None if traced.reads is None else {name: work.reads(recipe) for name, recipe in kept.items()},
        elimination=Elimination(kept),
        averages_rows=work.rows_meet(recipes),
        of_guide=frozenset(name for name, recipe in kept.items() if recipe.is_guide),
    )


def _sums(traced: TracedRun, recipes: Mapping[str, Recipe], costs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the costs that carry pathwise gradients, and the loss."""
    paths, losses = torch.zeros(()), torch.zeros(())
    for name, recipe in recipes.items():
        cost, site = costs[name], recipe.sites[0]
        losses = losses + cost.detach().sum()
        if recipe.is_guide and site in traced.run.sites:
            # Only the part of log q of a sampled site whose gradient has a nonzero expectation.
            term: Any = 0.0
            if site not in traced.untraced:
                node = traced.guide_trace.nodes[site]
                term = entropy_term(node["score_parts"].entropy_term, node)
            if is_identically_zero(term):
                continue
            cost = term
        paths = paths + cost.sum()
    return paths, losses
