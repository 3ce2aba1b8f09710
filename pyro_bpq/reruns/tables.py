r"""Tables over all values of sites, joint laws of sites, and the sum of a loss over all values of all its sites.

The loss of a program whose laws and costs read at most one site of finite support besides their own is a sum over
tables from one run, in whose row ``u`` every site has its value ``u``. Nothing is drawn:

.. math::

    \sum_X \sum_{u,x} q(u) \, q(x \mid u) \log q(x \mid u) - \sum_X \sum_{w,x} q(w, x) \log p(x \mid w)
    + \sum_C \sum_u q(u) \, c_C(u)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.plan.structure import SumPlan
from pyro_bpq.record.laws import draw
from pyro_bpq.record.traced_run import TracedRun, full_mask
from pyro_bpq.rollout.features import Components, finite_components
from pyro_bpq.rollout.sums import common_type, total
from pyro_bpq.short import alike

# Tables of up to so many elements are stacked, because a call takes longer than its computation.
SMALL = 4096


class AllValues(Messenger):
    """Sets every latent site of finite support to its value ``k`` in row ``k``; reparameterised sites are drawn once.

    A site of fewer values than rows begins again with its first one. All other sites are drawn as usual. An object
    serves one run of guide and model.

    Args:
        rows: Number of rows.
        nesting: Number of batch dimensions, that of the rows included.
        is_compact: Whether values have size one in plates where they are not scored, and those that are drawn once have
            no dimension for the rows: ``locs[z]`` then means what it means in a run of its own.
        is_scored: Whether the log-probabilities of these values are computed. Else zeros stand for them: the
            distributions tell them for all values.
    """

    def __init__(self, rows: int, nesting: int, is_compact: bool = False, is_scored: bool = True) -> None:
        super().__init__()
        self.rows, self.nesting, self.is_compact, self.is_scored = rows, nesting, is_compact, is_scored
        self._values = dict[str, Tensor]()

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if msg["is_observed"] or isinstance(fn, _Subsample):
            return
        split = None if fn.has_rsample else finite_components(fn)
        if split is None and not fn.has_rsample:
            return
        if len(fn.batch_shape) != self.nesting:
            raise UnsupportedProgramError(f"Site {name!r} has no dimension for the rows of its values.")
        if name not in self._values:
            # The guide comes first; the model has its value.
            made = draw(name, fn)[:1] if split is None else self._all(fn, split)
            self._values[name] = made if split else made[0] if self.is_compact else made.expand(fn.shape())
        msg["value"], msg["done"] = self._values[name], True
        if split is not None and not self.is_scored:
            # Pyro computes what a site of a trace lacks.
            zero = msg["value"].new_zeros((), dtype=torch.get_default_dtype())
            zeros = msg["log_prob"] = msg["unscaled_log_prob"] = zero.expand(fn.batch_shape)
            msg["log_prob_sum"], msg["score_parts"] = zero, ScoreParts(zeros, zeros, 0)  # type: ignore[arg-type]

    def _all(self, fn: Any, split: Components) -> Tensor:
        parameters = split.parameters(fn)
        is_small = self.is_compact and not self.is_scored
        batch = torch.Size([self.rows, *(1,) * (self.nesting - 1)]) if is_small else fn.batch_shape
        index = torch.arange(self.rows, device=parameters.device) % split.cardinality
        value = split.value(index.reshape(-1, *(1,) * self.nesting).expand(*batch, split.size), fn)
        return value.to(parameters.dtype) if split.kind in ("bernoulli", "one_hot") else value


class Table(NamedTuple):
    """Numbers for all values of some sites, ``(values of each site, plates)``; the sites are in the order of draws."""

    sites: tuple[str, ...]
    values: Tensor


class Laws:
    r"""Joint laws of sites of the guide, by elimination of the sites that they were drawn from.

        q(x, ...) = Σ_u q(u, ...) q(x | u)

    Args:
        laws: The law of each site given others, in the order of draws; it has the dimension of its own site, too.
    """

    def __init__(self, laws: dict[str, Table]) -> None:
        self.laws, self._found = laws, dict[tuple[str, ...], Tensor]()

    def ordered(self, names: Set[str]) -> tuple[str, ...]:
        """Sites in the order of draws."""
        return tuple(name for name in self.laws if name in names)

    def closed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Sites, those that their laws read, those that the laws of these read, and so on, in the order of draws."""
        found = {*names}
        for name in reversed(self.laws):
            found.update(self.laws[name].sites if name in found else ())
        return self.ordered(found)

    def of(self, sites: tuple[str, ...]) -> Tensor:
        """The joint law of sites ``(values of each, plates)``."""
        if sites not in self._found:
            self._found[sites] = self._made(sites)
        return self._found[sites]

    def _made(self, sites: tuple[str, ...]) -> Tensor:
        first, own = sites[:-1], self.laws[sites[-1]]
        if own.sites == sites and not first:
            return own.values
        if {*own.sites} <= {*sites}:
            return _spread(Table(first, self.of(first)), sites) * _spread(own, sites)
        if not first:
            return self.of(own.sites).sum([*range(len(own.sites) - 1)])
        above = self.ordered({*first, *own.sites[:-1]})
        letters = {name: chr(ord("a") + i) for i, name in enumerate((*above, sites[-1]))}
        parts = ["".join(letters[name] for name in names) + "..." for names in (above, own.sites, sites)]
        law, dtype = self.of(above), common_type(self.of(above), own.values)
        return torch.einsum(f"{parts[0]},{parts[1]}->{parts[2]}", law.to(dtype), own.values.to(dtype))


def _spread(table: Table, sites: tuple[str, ...]) -> Tensor:
    """The numbers of a table, with dimensions of size one for the sites that it lacks."""
    if table.sites == sites:
        return table.values
    return table.values[tuple(slice(None) if name in table.sites else None for name in sites)]


def exact_sum(traced: TracedRun, plan: SumPlan, nesting: int, counts: bool) -> tuple[Tensor, Tensor]:
    """Sums the loss of a run that has one row for each value.

    Args:
        traced: The run.
        plan: What its laws and costs read.
        nesting: Number of batch dimensions; the leftmost of them holds the rows.
        counts: Whether zeros are counted.

    Returns:
        The loss, a scalar in nats with gradient; and the number of entries of tables whose probability is zero.
    """
    rows = _Rows(traced, plan, nesting)
    guide, model = traced.guide_trace.nodes, traced.model_trace.nodes
    q, p = rows.log_probs(guide, plan.parents), rows.log_probs(model, plan.priors)
    laws = Laws({name: rows.table(law.exp(), name, plan.parents[name]) for name, law in q.items()})
    # What is averaged, its law, and its sign.
    found, pairs = list[Tensor](), list[tuple[Tensor, Tensor, int]]()
    own = () if traced.only_costs else ((1, q, guide, plan.parents), (-1, p, model, plan.priors))
    for sign, log_probs, sites, others in own:
        for name, log_prob in log_probs.items():
            site, other = sites[name], others[name]
            table = rows.table(rows.weighted(log_prob, site, other), name, other)
            pairs.append((*_contracted(laws.of(table.sites), table.values, site["fn"].batch_shape[1:]), sign))
    for cost, other in plan.others.items():
        numbers = rows.differing(traced.run.costs[cost], other)
        if other is None:
            found.append(numbers.sum())
        else:
            pairs.append((*_contracted(laws.of((other,)), numbers, numbers.shape[1:]), 1))
    return _averages(pairs, found, counts)


class _Rows(NamedTuple):
    """Reads tables from a run of a row for each value."""

    traced: TracedRun
    plan: SumPlan
    nesting: int

    def log_probs(self, sites: Mapping[str, Any], others: Mapping[str, str | None]) -> dict[str, Tensor]:
        """Log-probabilities of sites, each given another or none: ``(values of the other or 1, values, plates)``."""
        names, found = [*others], dict[str, Tensor]()
        splits = [self.plan.components[name] for name in names]
        pairs = zip(names, splits, strict=True)
        parameters = [self._parameters(split, sites[name], others[name]) for name, split in pairs]
        for ids in _alike(parameters, splits):
            law = splits[ids[0]].log_probs(_stack([parameters[i] for i in ids])).squeeze(-2)
            missing = self.nesting + 2 - law.dim()
            law = law.reshape(len(ids), *(1,) * missing, *law.shape[1:]) if missing else law
            found.update({names[i]: own for i, own in zip(ids, law.movedim(-1, 2).unbind(0), strict=True)})
        return {name: self.differing(found[name], other, 1) for name, other in others.items()}

    def _parameters(self, split: Components, site: Any, other: str | None) -> Tensor:
        """Parameters ``(rows, plates, event)`` of a law without the rows and plates that only repeat others."""
        found = split.parameters(site["fn"])
        if found.dim() - split.event_ndim < self.nesting:
            return found
        found = self.differing(found, other, split.event_ndim)
        for dim in range(self.nesting):
            if found.stride(dim) == 0 and found.shape[dim] > 1:
                found = found.narrow(dim, 0, 1)
        return found

    def weighted(self, log_prob: Tensor, site: Any, other: str | None) -> Tensor:
        """Log-probabilities, scaled and masked as their site."""
        parts = site["scale"], full_mask(site)
        weights = [self.differing(p, other).unsqueeze(1) if isinstance(p, Tensor) else p for p in parts]
        return scale_and_mask(log_prob, *weights)

    def table(self, numbers: Tensor, name: str, other: str | None) -> Table:
        """The table of numbers ``(values of the other or 1, values, plates)``."""
        if other is None:
            return Table((name,), numbers[0])
        names = [*self.plan.components]
        is_later = names.index(other) > names.index(name)
        return Table((name, other), numbers.transpose(0, 1)) if is_later else Table((other, name), numbers)

    def differing(self, numbers: Tensor, other: str | None, more: int = 0) -> Tensor:
        """The rows that differ, with all batch dimensions; there are ``more`` dimensions besides."""
        rows = 1 if other is None else self.plan.components[other].cardinality
        missing = self.nesting + more - numbers.dim()
        numbers = numbers.reshape(*(1,) * missing, *numbers.shape) if missing else numbers
        return numbers if numbers.shape[0] <= rows else numbers.narrow(0, 0, rows)


def _contracted(law: Tensor, numbers: Tensor, plates: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A law, summed over those rows of plates in which a table does not vary, and the table; of one type."""
    dtype, whole = common_type(law, numbers), torch.broadcast_shapes(law.shape, numbers.shape, plates)
    law = law if whole == law.shape else law.expand(whole)
    law = law if whole == numbers.shape else law.sum_to_size(numbers.shape)
    return law.to(dtype), numbers.to(dtype)


def _averages(pairs: Sequence[tuple[Tensor, Tensor, int]], found: list[Tensor], counts: bool) -> tuple[Tensor, Tensor]:
    """The sum of what was found and of the expectations of tables under their laws; and the number of zeros."""
    zeros = list[Tensor]()
    for ids in _alike([law for law, *_ in pairs], [(law.dtype, sign) for law, _, sign in pairs]):
        law, numbers, sign = _stack([pairs[i][0] for i in ids]), _stack([pairs[i][1] for i in ids]), pairs[ids[0]][2]
        zeros += [(law.detach() <= 0.0).sum()] if counts else []
        # A table may be infinite where the law is zero.
        numbers = torch.where(law > 0.0, numbers, numbers.new_zeros(()))
        found.append(sign * torch.dot(law.reshape(-1), numbers.reshape(-1)))
    return total(found), sum(zeros, torch.zeros((), dtype=torch.int64))


def _alike(tensors: Sequence[Tensor], kinds: Sequence[Any]) -> list[list[int]]:
    """Positions of the tensors that share a call: small ones of a shape and a kind."""
    pairs = enumerate(zip(tensors, kinds, strict=True))
    return [*alike((i, (own.shape, kind) if own.numel() <= SMALL else i) for i, (own, kind) in pairs).values()]


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(tensors)) if len(tensors) > 1 else tensors[0].unsqueeze(0)
