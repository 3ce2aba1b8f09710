r"""Whether particles that run in one vectorised call keep apart: each costs what it costs in a run of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_bpq.errors import BPQWarning
from pyro_bpq.reruns.row_runs import agree, is_due, probe, probe_generator
from pyro_bpq.tracing.cost_statement import SkipCosts
from pyro_bpq.tracing.sandbox import Sandbox
from pyro_bpq.tracing.substitute import Substitute
from pyro_bpq.tracing.traced_run import PARTICLES, TracedRun
from pyro_bpq.tracing.watch import is_enumerated, samples

__all__ = ["Comparison", "Program", "Together", "keeps_apart"]

# Particles that are run alone at the least: in the first comparison, and in later ones.
FIRST, LATER = 16, 4

# Model, guide, and their arguments.
Program = tuple[Any, Any, Any, Any]


@dataclass(frozen=True)
class Comparison:
    """What is compared: particles that run together, and the same particles on their own.

    Args:
        trace: Traces a program of one particle or of all, after a function has wrapped model and guide.
        one: Model and guide for one particle, and their arguments.
        together: The same for all particles.
        many: A run of all particles.
        number: Number of particles.
        nesting: Bound on the number of nested plates, the plate of the particles included.
        has_buffers: Whether the programs may call modules with buffers.
    """

    trace: Callable[[Program, Callable[[Any], Any]], TracedRun]
    one: Program
    together: Program
    many: TracedRun
    number: int
    nesting: int
    has_buffers: bool


def keeps_apart(compared: Comparison, seed: int, is_first: bool) -> bool | None:
    """Compares particles that run together with the same particles on their own.

    They are compared at values that are drawn evenly for every site (:func:`~pyro_bpq.reruns.row_runs.probe`): sampled
    values may be the same in all particles, and then mixed particles do not show. Where the program does not run at all
    values, they are compared at the sampled ones.

    Args:
        compared: What is compared.
        seed: Draws the values, and the particles that are run alone.
        is_first: Whether this is the first comparison of these programs: then more particles are run alone.

    Returns:
        Whether they cost the same; ``None`` if the programs draw noise besides their sites, so that runs cannot be
        compared.
    """
    many, number, nesting = compared.many, compared.number, compared.nesting
    sites = {
        name: site
        for trace in (many.model_trace, many.guide_trace)
        for name, site in samples(trace).items()
        if not site["is_observed"] and not is_enumerated(site) and isinstance(site["value"], Tensor)
    }
    runs, generator = _Runs(compared), probe_generator(seed)
    sampled = {name: site["value"].detach() for name, site in sites.items()}

    def is_same(values: Mapping[str, Tensor], index: int, among: Mapping[str, Tensor]) -> bool | None:
        own = {name: _alone(sites[name], values[name], index, nesting) for name in sites}
        alone = runs.costs(compared.one, own)
        return None if alone is None else _is_same(among, alone, index, nesting)

    def compare(values: Mapping[str, Tensor]) -> bool | None:
        among = runs.costs(compared.together, values)
        picked = torch.randperm(number, generator=generator)[:wanted].tolist()
        found = [False if among is None else is_same(values, i, among) for i in picked]
        return None if among is None or None in found else all(found)

    # The fewer particles, the likelier they are alike by chance.
    wanted = FIRST if is_first else LATER
    found: list[bool | None] = []
    for _ in range(-(-wanted // number)):
        found.append(compare({name: probe(site["fn"], sampled[name], 1, generator)[0] for name, site in sites.items()}))
        if not found[-1]:
            break
    if None in found:
        found = [compare(sampled)]
    return None if runs.has_drawn else found == [True] * len(found)


class Together:
    """Remembers for which structures the vectorised particles that a user asked for were proved to keep apart.

    They are looked at again after 1, 2, 4, ... steps and then every 128.
    """

    def __init__(self) -> None:
        self._proved: set[Any] = set()

    def __repr__(self) -> str:
        return f"Together({len(self._proved)} structures)"

    def is_wanted(self, learning: bool, num_steps: int) -> bool:
        """Whether the step may have to compare runs: its buffers are then lent."""
        return not self._proved or (learning and is_due(num_steps))

    def mixes(self, compared: Comparison, learning: bool, num_steps: int) -> bool:
        """Whether particles that ran together do not keep apart; warns if so. See :func:`keeps_apart`.

        Noise besides the sites differs from run to run: then nothing can be compared, and nothing is said.

        Args:
            compared: What is compared.
            learning: Whether the step learns.
            num_steps: Number of steps taken.
        """
        key = compared.many.key
        is_known = key in self._proved
        if is_known and not (learning and is_due(num_steps)):
            return False
        if keeps_apart(compared, num_steps, not is_known) is False:
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


class _Runs:
    """Runs of programs at given values, without a trace in generators and buffers."""

    def __init__(self, compared: Comparison) -> None:
        self.trace, self.subsamples = compared.trace, compared.many.subsamples
        self.has_buffers, self.has_drawn = compared.has_buffers, False

    def costs(self, program: Program, values: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The costs of a run; ``None`` if it fails."""
        put, sandbox = Substitute({**values, **self.subsamples}), Sandbox(0, self.has_buffers)
        try:
            with sandbox, pyro.validation_enabled(False), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Functions of costs may be dear: they are called once a step.
                run = self.trace(program, lambda part: SkipCosts()(put(part))).run
        except Exception:
            return None
        self.has_drawn |= any(not torch.equal(*pair) for pair in zip(sandbox.before, sandbox.after, strict=True))
        return {name: cost.detach() for name, cost in run.costs.items()}


def _is_same(among: Mapping[str, Tensor], alone: Mapping[str, Tensor], index: int, nesting: int) -> bool:
    """Whether a particle has the same costs among others and on its own."""
    if among.keys() != alone.keys():
        return False
    found = [_particle(among[name], index, nesting) for name in alone]
    if any(a.numel() != b.numel() for a, b in zip(found, alone.values(), strict=True)):
        return False
    return agree([cost.reshape(-1) for cost in found], [cost.reshape(-1) for cost in alone.values()])


def _particle(tensor: Tensor, index: int, nesting: int, event_ndim: int = 0) -> Tensor:
    """What a tensor holds of one particle; all of it where it does not depend on particles."""
    return tensor[index] if tensor.dim() - event_ndim >= nesting and tensor.shape[0] > 1 else tensor


def _alone(site: Any, value: Tensor, index: int, nesting: int) -> Tensor:
    """The value of a site in one particle, of the shape that it has in a run without others."""
    event_ndim = len(site["fn"].event_shape)
    value = _particle(value, index, nesting, event_ndim)
    plates = max((-f.dim for f in site["cond_indep_stack"] if f.vectorized and f.name != PARTICLES), default=0)
    while value.dim() - event_ndim > plates and value.shape[0] == 1:
        value = value[0]
    return value
