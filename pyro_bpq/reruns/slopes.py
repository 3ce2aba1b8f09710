r"""Slopes and curvatures of costs in the values of sites: autograd of a cut, written down as a flat function.

If ``h = W u`` reads a value ``u`` and a cost is a sum over entries of ``h``, its second derivative in ``u_d`` is

    Σ_j W_jd² ∂²cost/∂h_j².

Otherwise the second derivatives in ``h`` are probed by one random vector of signs, which neglects those in two entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bpq.record.components import Drawn
from pyro_bpq.record.function import Function, flat
from pyro_bpq.record.operators import PASSING, effects_of
from pyro_bpq.record.recorded import Bound
from pyro_bpq.record.values import Tensors, Value, results_of, values_in

# Gives random signs for tensors.
Signs = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Expansion(NamedTuple):
    """Derivatives of a sum of costs in the value of a site; ``None`` where there are none.

    Args:
        own: First derivatives in the value as the site's own log-probabilities score it.
        slope: Those in the value as everything else reads it.
        curvature: Second derivatives in this, as far as linear maps read it: one for each entry or, within one-hot
            blocks, for each pair of entries, ``(..., D, K, K)``. They may lack the size of the particles.
    """

    own: Tensor | None = None
    slope: Tensor | None = None
    curvature: Tensor | None = None


class LinearRead(NamedTuple):
    """A linear map ``W u`` of the values of some sites.

    Args:
        source: ``u``, ``(N, F)`` or ``(F,)``.
        weight: ``W``, ``(J, F)``, or its transpose.
        output: ``W u + b``, ``(N, J)`` or ``(J,)``.
        is_left: Whether the weight is ``W`` itself.
        sites: The values that ``u`` consists of.
        scale: The factor between the entries of a value and those of ``u``, if ``u`` is that value in another shape,
            shifted and scaled. Otherwise ``None``.
    """

    source: Value
    weight: Value
    output: Value
    is_left: bool
    sites: frozenset[Value]
    scale: float | None


# Positions of weight and argument of linear maps, and of what they add.
_MAPS: Mapping[str, tuple[int, int]] = MappingProxyType({"mm": (1, 0), "addmm": (2, 1), "mv": (0, 1)})
# Operators that pass entries on, one by one, shifted or scaled, or in another order.
_SHIFTED = frozenset("add sub rsub neg".split())
_SCALED = frozenset("mul div".split())
_MOVED = frozenset("cat stack permute transpose t select slice split split_with_sizes unbind as_strided".split())


def linear_reads(function: Function, sites: Set[Value]) -> list[LinearRead]:
    """The first linear map on every way from sites: their entries are at most passed on, shifted and scaled before."""
    held: dict[Value, tuple[frozenset[Value], float | None]] = {site: (frozenset((site,)), 1.0) for site in sites}
    reading, found = {*sites}, list[LinearRead]()
    for node in function.reading(sites):
        name, results = effects_of(node.func).name, [*values_in(node.result)]
        read = [value for value in node.reads if value in reading]
        if not read or effects_of(node.func).is_blank:
            continue
        reading.update(results)
        if name in _MAPS:
            weight, source = (node.args[i] for i in _MAPS[name])
            if read == [source] and source in held:
                own, scale = held[source]
                size = math.prod(function.shapes[source])
                is_whole = len(own) == 1 and math.prod(function.shapes[next(iter(own))]) == size
                found.append(LinearRead(source, weight, results[0], name == "mv", own, scale if is_whole else None))
        elif name in PASSING | _SHIFTED | _SCALED | _MOVED and all(value in held for value in read):
            if name in _SCALED and len(read) > 1:
                continue
            own = frozenset[Value]().union(*(held[value][0] for value in read))
            scale = None if len(read) > 1 or name in _MOVED or node.kwargs else held[read[0]][1]
            if scale is not None and name in _SCALED:
                factor = node.args[1]
                is_number = isinstance(factor, (int, float))
                scale = (scale / factor if name == "div" else scale * factor) if is_number else None
            held.update(dict.fromkeys(results, (own, scale)))
    return found


class Wanted(NamedTuple):
    """What is differentiated.

    Args:
        groups: Costs and laws; the sum of each group is differentiated.
        sites: The sites, in whose values.
        blocks: For each site the size of blocks within which second derivatives mix. 1 for none; 0 for none, and none
            where another linear map follows. ``None`` for no second derivatives.
        nesting: Second derivatives are averaged over the leftmost of so many batch dimensions.
    """

    groups: tuple[tuple[str, ...], ...]
    sites: tuple[str, ...]
    blocks: tuple[int, ...] | None = None
    nesting: int = 0


class Slopes:
    """The derivatives of the sum of each group of costs in the values of sites, by group and site.

    Raises:
        Uncut: If something on the way cannot be computed again.
    """

    def __init__(self, bound: Bound, wanted: Wanted) -> None:
        groups, names, blocks, self.nesting = wanted
        recorded, recording = bound.recorded, bound.recorded.recording
        self.names = tuple(name for group in groups for name in group)
        self.groups = [[(recorded.named[name], bound.is_plain(name)) for name in group] for group in groups]
        self.sites = {name: recorded.drawn[name] for name in names}
        self.blocks = dict(zip(names, blocks or (1,) * len(names), strict=True))
        # What is differentiated to, each by the site and the kind of the derivative.
        ends = [((site.scored, (n, "own")), (site.value, (n, "slope"))) for n, site in self.sites.items()]
        self.ends = dict(end for pair in ends for end in pair)
        costs = dict.fromkeys(cost for group in self.groups for cost, _ in group)
        read = {site.value for site in self.sites.values()}
        function = recording.cut(costs, self.ends.keys())
        wished = {self.sites[name].value for name, block in self.blocks.items() if block}
        self.reads = [
            one
            for one in (linear_reads(function, read) if blocks is not None else ())
            if one.sites & wished or not any(effects_of(n.func).name in _MAPS for n in function.reading({one.output}))
        ]
        more = [value for one in self.reads for value in (one.source, one.weight, one.output)]
        self.function = recording.cut([*costs, *more], self.ends.keys())
        # What of each group reads the sites otherwise than by scoring them: equal groups have equal derivatives.
        moved = {value for node in function.reading(read) for value in results_of(node)}
        parts = [frozenset(term for term in group if term[0] in moved) for group in self.groups]
        self._like = [parts.index(part) if all(is_plain for _, is_plain in part) else i for i, part in enumerate(parts)]
        self._run: Any = None
        self._found: list[tuple[int, str, str]] = []

    def __call__(self, bound: Bound, signs: Signs) -> list[dict[str, Expansion]]:
        """The derivatives at the values of a run; ``signs`` gives random signs for tensors."""
        shapes, dtypes = bound.recorded.recording.shapes, bound.recorded.recording.dtypes
        tensors = {**bound.tensors, **{site.scored: bound.tensors[site.value] for site in self.sites.values()}}
        taken, like = [tensors[value].detach() for value in self.function.given], tensors[next(iter(self.ends))]
        taken = [tensor.clone() for tensor in taken] if self.function.spoils else taken
        costs = zip(self.names, (cost for group in self.groups for cost, _ in group), strict=True)
        ones = {name: like.new_ones(shapes[cost], dtype=dtypes[cost]) for name, cost in costs}
        taken += [bound.weighted(name, ones[name]).expand_as(ones[name]) for name in self.names]
        probed = [like.new_empty(shapes[one.output][-1], dtype=dtypes[one.output]) for one in self.reads]
        taken += signs(probed) if probed else []
        if self._run is None:
            try:
                self._run = flat(self._derived, taken)
            except NotImplementedError:
                self._run = self._derived
        found: list[dict[str, Expansion]] = [{name: Expansion() for name in self.sites} for _ in self.groups]
        for (i, name, kind), part in zip(self._found, self._run(*taken), strict=True):
            found[i][name] = found[i][name]._replace(**{kind: part.detach()})
        return [found[like] for like in self._like]

    @torch.enable_grad()
    def _derived(self, *tensors: Tensor) -> list[Tensor]:
        """The same as a list, for which ``_found`` says what each is."""
        number = len(self.function.given)
        given = dict(zip(self.function.given, tensors[:number], strict=True))
        points = {value: given[value].detach().requires_grad_() for value in self.ends if value in given}
        # A program may change a value in place, which autograd forbids for a leaf.
        own = {value: point.clone() if self.function.spoils else point for value, point in points.items()}
        values = dict(zip(self.function.wanted, self.function(*(given | own).values()), strict=True))
        weights, signs = iter(tensors[number:]), tensors[len(tensors) - len(self.reads) :]
        ends = [*points.values(), *(values[one.output] for one in self.reads)]
        found: dict[tuple[int, str, str], Tensor] = {}
        for i, group in enumerate(self.groups):
            terms = [(values[cost], next(weights)) for cost, _ in group]
            costs, counts = [[term[k] for term in terms if term[0].requires_grad] for k in (0, 1)]
            if not costs or self._like[i] != i:
                continue
            first = torch.autograd.grad(
                costs, ends, counts, create_graph=bool(self.reads), allow_unused=True, retain_graph=True
            )
            slopes = zip(points, first, strict=False)
            found.update({(i, *self.ends[v]): slope for v, slope in slopes if slope is not None})
            curved = self._curvatures(values, points, first[len(points) :], signs)
            found.update({(i, name, "curvature"): part for name, part in curved.items()})
        self._found = [*found]
        return [*found.values()]

    def _curvatures(
        self, values: Tensors, points: Tensors, first: Sequence[Tensor | None], signs: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Second derivatives in sites, from first derivatives in the outputs of linear maps."""
        each = zip(self.reads, signs, first, strict=True)
        known = [(read, sign, slope) for read, sign, slope in each if slope is not None and slope.requires_grad]
        if not known:
            return {}
        slopes, outputs = [slope for *_, slope in known], [values[read.output] for read, *_ in known]
        probes = [sign.expand_as(slope) for _, sign, slope in known]
        second = torch.autograd.grad(slopes, outputs, probes, allow_unused=True, retain_graph=True)
        found: dict[str, Tensor] = {}
        for (read, sign, _), bent in zip(known, second, strict=True):
            for name, site in self.sites.items() if bent is not None else ():
                if site.value in read.sites and site.value in points:
                    part = self._in_site(read, sign * bent, values, points[site.value], site, self.blocks[name] or 1)
                    if part is not None:
                        found[name] = found[name] + part if name in found else part
        return found

    def _in_site(
        self, read: LinearRead, bent: Tensor, values: Tensors, point: Tensor, site: Drawn, block: int
    ) -> Tensor | None:
        """From second derivatives in the output of a map to those in the value of a site."""
        source, weight = values[read.source], values[read.weight].detach()
        weight = weight if read.is_left else weight.t()
        bent = bent.detach().reshape(-1, len(weight))
        if read.scale is None:
            if block > 1:
                return None
            # Each entry of the source reads at most one entry of the value, with a slope that enters squared.
            outer = torch.zeros_like(source, requires_grad=True)
            (back,) = torch.autograd.grad(source, point, outer, create_graph=True)
            (slope,) = torch.autograd.grad(back, outer, torch.ones_like(point), retain_graph=True)
            squared = (bent @ weight.square()).reshape(source.shape) * slope
            return torch.autograd.grad(source, point, squared, retain_graph=True)[0]
        number, lead = len(point) if 0 < self.nesting <= len(site.batch) else 1, tuple(point.shape)
        if number > 1 and len(bent) % number == 0:
            # Each particle's own would be hardly better, and takes a product of matrices for each.
            bent, lead = bent.unflatten(0, (number, -1)).mean(0), (1, *point.shape[1:])
        if block == 1:
            return (read.scale**2 * (bent @ weight.square())).reshape(lead)
        blocks = (read.scale * weight).reshape(len(weight), -1, block)
        return (bent @ (blocks.unsqueeze(-1) * blocks.unsqueeze(-2)).flatten(1)).reshape(*lead, block)


def expansions(bound: Bound, wanted: Wanted, signs: Signs = lambda slopes: []) -> list[dict[str, Expansion]]:
    """The derivatives that :class:`Slopes` gives, whose function is made once for each recording."""
    plain = tuple(bound.is_plain(name) for group in wanted.groups for name in group)
    slopes: Slopes = bound.recorded.kept(("slopes", wanted, plain), lambda: Slopes(bound, wanted))
    return slopes(bound, signs)
