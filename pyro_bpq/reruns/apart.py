r"""Particles that run in one call, and each of them in a run of its own, which is compared or tracked."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.errors import BPQWarning, ParticlesDifferError
from pyro_bpq.reruns.comparisons import (
    Kind,
    RunsAt,
    Trace,
    agree,
    contrasted,
    drawn_sites,
    is_due,
    kinds_at,
    leaves_of,
    moved,
    probe,
    probe_generator,
)
from pyro_bpq.rollout.features import finite_components
from pyro_bpq.rollout.runs import Program
from pyro_bpq.tracing.sandbox import Sandbox
from pyro_bpq.tracing.substitute import Substitute
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import PARTICLES, samples

# Smallest number of particles that are run alone, in the first comparison and in later ones.
FIRST_LOOK, LATER = 16, 4
# The same from so many sites on: a run takes long, so that each shows more.
LONG, FIRST_OF_LONG, LATER_OF_LONG = 100, 4, 1


@dataclass(frozen=True)
class Comparison:
    """The programs to compare: all particles in one run, and one particle on its own."""

    trace: Trace  # traces ``one`` or ``together``
    one: Program  # model and guide for one particle, and their arguments
    together: Program  # model and guide for all particles, and their arguments
    many: TracedRun  # a run of all particles
    number: int  # number of particles
    nesting: int  # bound on the number of nested plates, the plate of the particles included
    has_buffers: bool  # whether the programs may call modules with buffers
    # Whether values of finite sites have size one in plates where all particles run together
    is_compact: bool = False


def keeps_apart(compared: Comparison, seed: int, is_first: bool) -> bool | None:
    """Compares particles that run together with the same particles on their own.

    If a tracked run has seen particles meet, nothing needs to be run. Else values have to tell. Sampled values may be
    equal in all particles, and equal values do not show that particles are mixed. So most particles get other ones
    (:func:`~pyro_bpq.reruns.comparisons.probe`): drawn evenly, or the first value of every site, or the last one. In
    long programs few particles run alone. There all other particles get other values than that one, which gets the
    first value of every site, the last one, or other values than the one before. If the program fails at some values,
    the comparison draws them evenly; if it fails there too, it uses the sampled ones.

    In the first look every other comparison moves the parameters a little. A weight of zero hides what it multiplies.

    Runs that draw more noise besides their sites for many particles cannot be compared, nor can runs of programs that
    work at no given values (flows without an inverse): the result is ``None``. Initial values do no harm, as
    ``pyro.param("w", torch.randn(5))`` draws them in every run.
    """
    if compared.many.mixes:
        return False
    pairs = _Pairs(compared, seed)
    leaves = leaves_of(compared.many.run.costs.values()) if is_first else []
    found = pairs.look(is_first, leaves)
    if None in found:
        found = pairs.look(is_first, leaves, is_even=True)
    if None in found:
        found = [pairs.at_sampled(is_first)]
        if found == [None] and pairs.never_runs():
            return None
    return all(found) if pairs.runs.draw_alike else None


class _Pairs:
    """Runs all particles together and some of them alone, at the same values."""

    def __init__(self, compared: Comparison, seed: int) -> None:
        self.compared, self.sites = compared, drawn_sites(compared.many)
        self.runs = RunsAt(compared.trace, compared.many.subsamples, compared.has_buffers)
        self.generator = probe_generator(seed)
        self.sampled = {name: site["value"].detach() for name, site in self.sites.items()}
        if compared.is_compact:
            self.sampled = {name: _compact(self.sites[name], value) for name, value in self.sampled.items()}
        self.is_long = len(self.sites) >= LONG

    def look(self, is_first: bool, leaves: Sequence[Tensor], is_even: bool = False) -> list[bool | None]:
        """What comparisons at probed values find, until one fails."""
        found: list[bool | None] = []
        chosen = self._of_long if self.is_long else self._of_short
        for i, (values, picked) in enumerate(chosen(self._wanted(is_first), is_even)):
            with moved(leaves, self.generator) if i % 2 else contextlib.nullcontext():
                found.append(self._compare(values, picked))
            if not found[-1]:
                break
        return found

    def at_sampled(self, is_first: bool) -> bool | None:
        """What a comparison at the sampled values finds."""
        return self._compare(self.sampled, self._order()[: self._wanted(is_first)])

    def never_runs(self) -> bool:
        """Whether the program fails at given values both for all particles and for one."""
        return self.runs.costs(self.compared.together, self.sampled) is None and self._alone(self.sampled, 0) is None

    def _wanted(self, is_first: bool) -> int:
        """Number of particles that run alone."""
        if self.is_long:
            return FIRST_OF_LONG if is_first else LATER_OF_LONG
        return FIRST_LOOK if is_first else LATER

    def _order(self) -> list[int]:
        return torch.randperm(self.compared.number, generator=self.generator).tolist()

    def _alone(self, values: Mapping[str, Tensor], index: int) -> dict[str, Tensor] | None:
        """The costs of a particle in a run of its own."""
        nesting = self.compared.nesting
        own = {n: _whole(site, value_alone(site, values[n], index, nesting)) for n, site in self.sites.items()}
        return self.runs.costs(self.compared.one, own)

    def _compare(self, values: Mapping[str, Tensor], picked: Sequence[int]) -> bool | None:
        """Whether some particles cost alone what they cost together; ``None`` if a run fails."""
        among, are_same = self.runs.costs(self.compared.together, values), True
        for index in picked:
            alone = None if among is None else self._alone(values, index)
            if among is None or alone is None:
                return None
            are_same &= _is_same(among, alone, index, self.compared.nesting)
        return are_same

    def _drawn(self, values: Mapping[str, Tensor], draw: Callable[[Any, Tensor], Tensor]) -> dict[str, Tensor]:
        """New values of all sites; those that all particles share are drawn once."""
        found = {}
        for name, value in values.items():
            fn = self.sites[name]["fn"]
            if value.dim() - len(fn.event_shape) >= self.compared.nesting and len(value) == self.compared.number:
                found[name] = draw(fn, value)
            else:
                found[name] = probe(fn, value.unsqueeze(0), [Kind.EVEN], self.generator)[0]
        return found

    def _of_short(self, wanted: int, is_even: bool) -> Iterator[tuple[Mapping[str, Tensor], Sequence[int]]]:
        """Values, and the particles that run alone at them."""
        number, order = self.compared.number, self._order()
        # The place of each particle in that order.
        places = torch.tensor(order).argsort().tolist()
        # Few particles are more likely to be alike by chance: they are compared more than once.
        for start in range(0, wanted, number):
            kinds = [Kind.EVEN] * number if is_even else kinds_at([start + place for place in places])
            draw = functools.partial(probe, kinds=kinds, generator=self.generator)
            yield self._drawn(self.sampled, draw), order[:wanted]

    def _of_long(self, wanted: int, is_even: bool) -> Iterator[tuple[Mapping[str, Tensor], Sequence[int]]]:
        """The same where few particles run alone: each differs from all others."""
        order, values = self._order(), self.sampled
        turn = int(torch.randint(4, (), generator=self.generator))
        for i, (last, index) in enumerate(itertools.pairwise(itertools.islice(itertools.cycle(order), wanted + 1))):
            kind = Kind.EVEN if is_even else (Kind.FIRST, Kind.LAST, Kind.EVEN, Kind.EVEN)[(turn + i) % 4]
            draw = functools.partial(contrasted, kind=kind, last=last, index=index, generator=self.generator)
            values = self._drawn(values, draw)
            yield values, [index]


class Together:
    """Remembers the structures whose vectorised particles were proved to keep apart.

    The user asked for vectorised particles there. They are checked again after 1, 2, 4, ... steps and then every 128.
    """

    def __init__(self) -> None:
        self._proved: set[Any] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been proved yet."""
        return not self._proved

    def is_wanted(self, learning: bool, num_steps: int) -> bool:
        """Whether the step may compare runs and therefore needs copies of the module buffers."""
        return not self._proved or (learning and is_due(num_steps))

    def knows(self, key: Any, learning: bool, num_steps: int) -> bool:
        """Whether the particles of a structure were proved to keep apart, and need no other look in this step."""
        return key in self._proved and not (learning and is_due(num_steps))

    def mixes(self, compared: Comparison, num_steps: int, is_first: bool) -> bool:
        """Whether the costs of a particle depend on the other particles; warns if so.

        See :func:`keeps_apart`. Runs that cannot be compared count as unmixed, as in Pyro.
        """
        key = compared.many.key
        if keeps_apart(compared, num_steps, is_first or key not in self._proved) is False:
            warnings.warn(
                f"vectorize_particles=True: the costs of one of the {compared.number} particles depend on the others, "
                "so the program mixes particles, as by z[0] or z.sum(). From now on they run without seeing each "
                "other, which takes longer. Index and reduce from the right (z[..., 0], z.sum(-1)), or write "
                "vectorize_particles=False.",
                BPQWarning,
                stacklevel=3,
            )
            return True
        if len(self._proved) >= 256:
            self._proved.clear()
        self._proved.add(key)
        return False


def _frames(site: Any) -> list[Any]:
    """The vectorised plates of a site, but for that of the particles."""
    return [f for f in site["cond_indep_stack"] if f.vectorized and f.name != PARTICLES]


def _plates(site: Any, value: Tensor) -> dict[int, int]:
    """Sizes of the plates of a site by dimension of its value, from the left; those that the value has."""
    ndim = value.dim() - len(site["fn"].event_shape)
    return {ndim + f.dim: f.size for f in _frames(site) if ndim + f.dim >= 0}


def _compact(site: Any, value: Tensor) -> Tensor:
    """The value of a finite site in the first row of each plate."""
    if getattr(site["fn"], "has_rsample", False) or finite_components(site["fn"]) is None:
        return value
    for dim in _plates(site, value):
        value = value.narrow(dim, 0, 1)
    return value


def _whole(site: Any, value: Tensor) -> Tensor:
    """A value in the whole size of the plates of its site, where it has size one."""
    shape = list(value.shape)
    for dim, size in _plates(site, value).items():
        shape[dim] = size if shape[dim] == 1 else shape[dim]
    return value.expand(shape)


def _is_same(among: Mapping[str, Tensor], alone: Mapping[str, Tensor], index: int, nesting: int) -> bool:
    """Whether a particle costs the same in the joint run and in a run of its own."""
    if among.keys() != alone.keys():
        return False
    found = [particle_of(among[name], index, nesting).reshape(-1) for name in alone]
    return agree(found, [cost.reshape(-1) for cost in alone.values()])


def particle_of(tensor: Tensor, index: int | Tensor, nesting: int, event_ndim: int = 0) -> Tensor:
    """The entry of one particle; the whole tensor if it does not depend on the particle.

    Args:
        tensor: Shape ``(M, plates, event)``, or fewer dimensions.
        index: The particle; a tensor ``(1,)`` is not read on the host.
        nesting: Number of batch dimensions, that of the particles included.
        event_ndim: Number of event dimensions.
    """
    if tensor.dim() - event_ndim < nesting or tensor.shape[0] == 1:
        return tensor
    return tensor.index_select(0, index)[0] if isinstance(index, Tensor) else tensor[index]


def value_alone(site: Any, value: Tensor, index: int | Tensor, nesting: int) -> Tensor:
    """The value of a site in one particle, in the shape of a run of that particle alone."""
    event_ndim = len(site["fn"].event_shape)
    value = particle_of(value, index, nesting, event_ndim)
    plates = max((-f.dim for f in _frames(site)), default=0)
    while value.dim() - event_ndim > plates and value.shape[0] == 1:
        value = value[0]
    return value


def tracked_alone(trace: Callable[..., TracedRun], runs: Sequence[TracedRun], has_buffers: bool) -> list[TracedRun]:
    """Tracks each particle in a run of its own, at the values that it has drawn together with the others.

    Generators and buffers stay as the runs of the step have left them.

    Args:
        trace: Traces the program for one particle; takes ``track`` and ``put``, which wraps model and guide.
        runs: The particles as they ran together.
        has_buffers: Whether the programs may call modules with buffers.

    Returns:
        The tracked runs.

    Raises:
        ParticlesDifferError: If a particle costs something else alone. Nobody can tell where programs draw more
            noise, may have changed buffers in the meantime, or cost something else each time.
    """

    def alone(run: TracedRun, track: bool) -> TracedRun:
        sites = {**samples(run.model_trace), **samples(run.guide_trace)}
        values = {name: site["value"] for name, site in sites.items() if not site["is_observed"]}
        return trace(track=track, put=Substitute({**values, **run.subsamples}))

    found, is_comparable = [], True
    for run in runs:
        with Sandbox(torch.get_rng_state(), has_buffers) as sandbox:
            found.append(alone(run, True))
        is_comparable &= not found[-1].has_buffers and all(map(torch.equal, sandbox.before, sandbox.after))
    differing = [pair for pair in zip(runs, found, strict=True) if not costs_alike(*pair)]
    if is_comparable and differing:
        run, own = differing[0]
        with Sandbox(torch.get_rng_state(), has_buffers):
            again = [alone(run, False) for _ in range(2)]
        if all(costs_alike(own, one) for one in again):
            raise ParticlesDifferError("a particle costs something else on its own, at the same values of all sites")
    return found


def costs_alike(one: TracedRun, other: TracedRun) -> bool:
    """Whether two runs at the same values cost the same; true if they have other sites, since values steer these."""
    if one.key != other.key:
        return True
    return agree([*one.run.costs.values()], [other.run.costs[name] for name in one.run.costs])
