r"""Runs programs at all values of marked sites at once, and makes costs of the log-probabilities.

The values of each such site are in a dimension left of all plates. Log-probabilities have named dimensions here;
``elimination.py`` says which of them make which cost.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.ops import packed
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.rings import LogRing
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_bpq.errors import PlateError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.graph.scg import Plate, cost_of_guide, cost_of_model
from pyro_bpq.reruns.held_costs import unmasked
from pyro_bpq.tracing.plate_errors import asks_for_one_value

# A tensor without dimensions of size one. Its attribute ``_pyro_dims`` names the other dimensions.
Packed = Any


class _Enumerate(EnumMessenger):
    """Enumerates all marked sites in parallel; raises for sites that cannot be summed exactly."""

    def __init__(self, first_available_dim: int | None, seen: list[str]) -> None:
        super().__init__(first_available_dim)
        self.seen = seen

    def _pyro_sample(self, msg: Any) -> None:
        mark, name = msg["infer"].get("enumerate"), msg["name"]
        if mark is None or msg["is_observed"] or msg["done"]:
            return super()._pyro_sample(msg)
        if mark not in ("parallel", "sequential"):
            raise UnsupportedSiteError(
                f'Site {name!r}: infer={{"enumerate": {mark!r}}} is unknown; write "parallel" or leave it out.'
            )
        if msg["infer"].get("num_samples") is not None:
            raise UnsupportedSiteError(
                f'Site {name!r}: infer={{"num_samples": ...}} samples, it does not sum. Remove "enumerate" and '
                '"num_samples", so that the site is sampled, or only "num_samples", so that it is summed.'
            )
        if not getattr(msg["fn"], "has_enumerate_support", False):
            raise UnsupportedSiteError(
                f"Site {name!r} ({type(msg['fn']).__name__}) has no support that can be enumerated. Remove "
                'infer={"enumerate": ...} there, so that it is sampled.'
            )
        # Sequential enumeration has the same expectation as parallel enumeration.
        msg["infer"]["enumerate"] = "parallel"
        self.seen.append(name)
        try:
            return super()._pyro_sample(msg)
        except NotImplementedError as error:
            raise UnsupportedSiteError(
                f'Site {name!r}: {error}. Remove infer={{"enumerate": ...}} there, so that it is sampled.'
            ) from error


@contextlib.contextmanager
def enumerated_programs(
    model: Callable[..., Any], guide: Callable[..., Any], nesting: int
) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Gives model and guide with their marked sites enumerated, to run within the context."""
    if isinstance(poutine.unwrap(guide), Messenger):
        raise UnsupportedProgramError(
            'enumeration="exact" needs the guide to run before the model, and a GuideMessenger runs both as one. '
            'Write the guide as a function, or enumeration="sample".'
        )
    seen: list[str] = []
    try:
        yield _Enumerate(None, seen)(model), _Enumerate(-1 - nesting, seen)(guide)
    except (RuntimeError, TypeError, ValueError) as error:
        if not seen or not asks_for_one_value(error):
            raise
        raise UnsupportedProgramError(
            f"The program asks for one value ({error}) where all values of the enumerated sites {sorted(set(seen))} "
            'are given at once. Use operations on tensors (torch.where, table[z]), or remove infer={"enumerate": ...}, '
            "so that the site is sampled."
        ) from error


@dataclass(frozen=True)
class Recipe:
    """How a cost is made from log-probabilities."""

    sites: tuple[str, ...]  # sites whose log-probabilities are added up
    summed: tuple[str, ...] = ()  # enumerated sites of the model that are summed inside the logarithm
    # Enumerated sites of the guide that the cost is averaged over: the ones it reads, and their enumerated ancestors.
    averaged: tuple[str, ...] = ()
    plates: tuple[Plate, ...] = ()  # plates of the cost
    is_guide: bool = False  # whether it is a cost of the guide

    @property
    def name(self) -> str:
        """Name of the cost."""
        name = cost_of_guide(self.sites[0]) if self.is_guide else cost_of_model(self.sites[0])
        if self.summed:
            more = ", ..." if len(self.summed) > 3 else ""
            name = f"-log sum({', '.join(self.summed[:3])}{more})"
        return f"E[{name}]" if self.averaged else name


@dataclass(frozen=True)
class Term:
    """The log-probability of a site with named dimensions."""

    site: Any  # its record in the trace
    symbols: Mapping[int, str]  # names of dimensions
    ordinal: frozenset[str]  # names of the dimensions of its plates
    cost: Packed  # the log-probability, scaled and masked
    reads: frozenset[str]  # enumerated sites that the log-probability depends on

    @classmethod
    def of(cls, site: Any, log_prob: Tensor, plates: Mapping[str, str], owners: Mapping[str, str]) -> Term:
        """Makes the term of a traced site, with named dimensions."""
        symbols = dict(site["infer"]["_dim_to_symbol"])
        ordinal = frozenset(plates[frame.name] for frame in site["cond_indep_stack"] if frame.vectorized)
        cost = pack(site["name"], log_prob, symbols)
        reads = frozenset(owners[dim] for dim in cost._pyro_dims if dim in owners)
        return cls(site, symbols, ordinal, cost, reads)

    def factor(self, is_enumerated: bool) -> Packed:
        """The factor of the sum: masked unless the site itself is summed, and not scaled."""
        site, mask = self.site, None if is_enumerated else self.site["mask"]
        if isinstance(mask, Tensor):
            mask = pack(site["name"], mask, self.symbols)
        factor = pack(site["name"], site["unscaled_log_prob"], self.symbols)
        return packed.scale_and_mask(factor, mask=mask)

    def log_weight(self) -> Packed:
        """The logarithm of the weight in a mean, neither scaled nor masked.

        A masked site still takes its values.
        """
        site, fn = self.site, unmasked(self.site["fn"])
        log_prob = site["unscaled_log_prob"] if fn is site["fn"] else fn.log_prob(site["value"])
        return pack(site["name"], log_prob, self.symbols)


def pack(name: str, tensor: Tensor, symbols: Mapping[int, str]) -> Packed:
    """Names the dimensions of a tensor of the site ``name``."""
    try:
        return packed.pack(tensor, symbols)
    except ValueError as error:
        raise PlateError(
            f"Site {name!r} has a dimension that belongs to no plate and no enumerated site. Put it into a pyro.plate, "
            f"or into the event with .to_event(). {error}"
        ) from error


def average(cost: Packed, recipe: Recipe, log_q: Mapping[str, Packed], averaged: Mapping[str, str]) -> Packed:
    """Computes ``sum_z q(z) cost(z)`` over the recipe's averaged sites."""
    if not recipe.averaged:
        return cost
    symbols = {averaged[name] for name in recipe.averaged}
    others = symbols - set(cost._pyro_dims)
    weight = packed.exp(LogRing().sumproduct([log_q[name] for name in recipe.averaged], others))
    cost, weight = packed.broadcast_all(cost, weight)
    dims = cost._pyro_dims
    # A value of probability zero may have an infinite cost, and 0 * inf is NaN.
    total = torch.where(weight > 0, cost, cost.new_zeros(())) * weight
    total = total.sum([i for i, dim in enumerate(dims) if dim in symbols])
    total._pyro_dims = "".join(dim for dim in dims if dim not in symbols)
    return total


def make(recipe: Recipe, terms: Mapping[str, Term], summed: Mapping[str, str]) -> Packed:
    """The cost that a recipe makes before the average, in nats."""
    if not recipe.summed:
        cost = terms[recipe.sites[0]].cost
        return cost if recipe.is_guide else packed.neg(cost)
    tree: OrderedDict[frozenset[str], list[Packed]] = OrderedDict()
    for name in recipe.sites:
        tree.setdefault(terms[name].ordinal, []).append(terms[name].factor(name in summed))
    try:
        contracted = contract_tensor_tree(tree, {summed[name] for name in recipe.summed}, ring=LogRing())
    except NotImplementedError as error:
        raise UnsupportedProgramError(
            f"The enumerated sites {list(recipe.summed)} cannot be summed out together: {error}. Remove "
            'infer={"enumerate": ...} at one of them and sample it in the guide.'
        ) from error
    ((term,),) = contracted.values()
    return packed.neg(packed.scale_and_mask(term, scale=_common_scale(recipe, terms)))


def _common_scale(recipe: Recipe, terms: Mapping[str, Term]) -> Any:
    """The common scale of all sites of a sum, which stands outside the logarithm."""
    scales, first = {name: terms[name].site["scale"] for name in recipe.sites}, recipe.sites[0]
    for name, scale in scales.items():
        if isinstance(scale, Tensor) and scale.dim():
            raise UnsupportedSiteError(
                f"Site {name!r} has a scale of shape {tuple(scale.shape)} and belongs to a sum over "
                f"{list(recipe.summed)}. Write poutine.scale with a single number there."
            )
    for name, scale in scales.items():
        if float(scale) != float(scales[first]):
            raise UnsupportedSiteError(
                f"Sites {first!r} (scale {float(scales[first]):g}) and {name!r} (scale {float(scale):g}) belong to one "
                f"sum over {list(recipe.summed)}, and need a common scale. Put both under the same poutine.scale and "
                'subsampled plates, or remove infer={"enumerate": ...} and sample the site in the guide.'
            )
    return scales[first]
