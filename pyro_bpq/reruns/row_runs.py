r"""Runs a program at many rows of values of its sites, and gives the costs of every row.

There are four ways. Each gives the costs of single runs:

- *hidden*: :func:`torch.func.vmap` runs the program over the rows. The program sees the values of one row, so
  ``z[0]`` or ``z.sum()`` mean what they mean in a single run. A value that would leave torch raises an error.
- *broadcast*: the rows lie in a dimension to the left of all plates. This is faster, but a program that indexes or
  reduces from the left mixes the rows. So it is used only for programs that were proved to keep the rows apart.
- *broadcast, all sites*: as before, and values that are the same in all rows are repeated, for programs that do not
  broadcast themselves (``torch.stack([z_0, z_1])``).
- *single*: one run after the other.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_bpq.errors import Unrecordable
from pyro_bpq.reruns.comparisons import Kind, agree, is_due, kinds_at, probe, probe_generator
from pyro_bpq.tracing.sandbox import Sandbox, Wrapped

LOG = logging.getLogger("pyro_bpq")


# Largest number of rows that run one after the other. With more rows, exact costs are not worth the time.
MOST_SINGLES = 16
# Largest number of cost elements in hidden rows that run at once.
MOST_ELEMENTS = 1 << 21
# Number of rows at which ways are compared, and number of these rows that single runs check.
PROBES, REFEREES = 8, 2
_CAPACITY = 256


class Way(Enum):
    """The way in which the rows of an extra run are run."""

    BROADCAST = "broadcast"
    REPEATED = "broadcast, all sites"
    HIDDEN = "hidden"
    SINGLE = "single"
    NONE = "none"


@dataclass(frozen=True)
class Rows:
    """The values at which a program runs."""

    fixed: Mapping[str, Any]  # values that are the same in all rows, by name of the site
    varied: Mapping[str, Tensor]  # values ``(rows, batch, event)``, by name of the site

    @property
    def number(self) -> int:
        """Number of rows."""
        return len(next(iter(self.varied.values())))


@dataclass(frozen=True)
class RowProgram:
    """A program to run at many values of its sites, for its costs."""

    # Computes the costs of a run, by name, from the values of all sites. The second argument is the number of rows in
    # a dimension to the left of all plates, or ``None`` for a single run.
    costs: Callable[[Mapping[str, Any], int | None], dict[str, Tensor]]
    sites: Mapping[str, tuple[Any, Tensor]]  # distribution and value of each latent site, by name
    shapes: Mapping[str, torch.Size]  # the batch shape of each wanted cost in a single run
    batch_ndim: int  # number of dimensions to the right of the rows
    rng: tuple[Tensor, Tensor]  # state of the global generator before and after a single run
    has_buffers: bool = True  # whether the program may call modules with buffers
    # Whether every cost of a broadcast run must have the dimension of the rows, because the values of all sites differ
    # between rows.
    is_strict: bool = False
    seen: list[weakref.ref[Tensor]] | None = None  # Collects the tensors of hidden runs. ``None`` collects nothing.

    def keeps_hidden_rows(self, rows: Rows) -> bool:
        """Whether the program keeps tensors of a hidden run (``self.z = z``), which are unusable after it."""
        wrapped = Wrapped()
        with wrapped:
            replace(self, seen=wrapped.seen).run(Way.HIDDEN, rows)
        return wrapped.any_alive()

    def run(self, way: Way, rows: Rows) -> dict[str, Tensor] | None:
        """Runs the program at every row.

        Returns:
            Each cost ``(rows, batch)``. ``None`` if the program fails in that way, or if it draws other noise than in a
            single run.
        """
        sandbox = Sandbox(self.rng[0], self.has_buffers)
        run = {
            Way.BROADCAST: self._broadcast,
            Way.REPEATED: lambda rows: self._broadcast(self._repeated(rows)),
            Way.HIDDEN: self._hidden,
            Way.SINGLE: self._singles,
        }[way]
        try:
            with sandbox, pyro.validation_enabled(False), warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                found = run(rows)
        except Unrecordable:
            raise
        except Exception:
            # The program may raise anything. It then cannot run in that way, and the sampled run stays valid.
            return None
        return None if found is None or self._has_drawn(sandbox) else found

    def _single(self, values: Mapping[str, Any]) -> tuple[Tensor, ...]:
        found = self.costs(values, None)
        return tuple(found[name].reshape(shape) for name, shape in self.shapes.items())

    def _hidden(self, rows: Rows) -> dict[str, Tensor]:
        def one(*values: Tensor) -> tuple[Tensor, ...]:
            if self.seen is not None:
                self.seen.extend(map(weakref.ref, values))
            return self._single({**rows.fixed, **dict(zip(rows.varied, values, strict=True))})

        # Many large rows run in chunks, which bounds memory.
        size = max(1, sum(shape.numel() for shape in self.shapes.values()))
        run = torch.func.vmap(one, randomness="same", chunk_size=max(1, MOST_ELEMENTS // size))
        return dict(zip(self.shapes, run(*rows.varied.values()), strict=True))

    def _singles(self, rows: Rows) -> dict[str, Tensor]:
        found = []
        for values in zip(*rows.varied.values(), strict=True):
            torch.set_rng_state(self.rng[0])
            found.append(self._single({**rows.fixed, **dict(zip(rows.varied, values, strict=True))}))
        return {name: torch.stack(costs) for name, costs in zip(self.shapes, zip(*found, strict=True), strict=True)}

    def _repeated(self, rows: Rows) -> Rows:
        """The same values, with those of all sites given in every row."""
        given = {name: rows.fixed[name] for name in self.sites if isinstance(rows.fixed.get(name), Tensor)}
        repeated = {name: value.expand(rows.number, *value.shape) for name, value in given.items()}
        return Rows(rows.fixed, {**repeated, **rows.varied})

    def _broadcast(self, rows: Rows) -> dict[str, Tensor] | None:
        padded = {}
        for name, value in rows.varied.items():
            lead = self.batch_ndim - (value.dim() - 1 - len(self.sites[name][0].event_shape))
            padded[name] = value.reshape(rows.number, *(1,) * lead, *value.shape[1:])
        found = self.costs({**rows.fixed, **padded}, rows.number)
        costs = {}
        for name, shape in self.shapes.items():
            cost = found[name]
            if cost.shape == shape and not self.is_strict:
                # The cost does not depend on the values that differ between rows.
                cost = cost.expand(rows.number, *shape)
            elif tuple(cost.shape) != (rows.number, *(1,) * (self.batch_ndim - len(shape)), *shape):
                # A cost without the dimension of the rows, or with another size there, mixes several rows.
                return None
            costs[name] = cost.reshape(rows.number, *shape)
        return costs

    def _has_drawn(self, sandbox: Sandbox) -> bool:
        """Whether the run drew other noise than a single run, as dropout over more rows does.

        Such a run is not the sampled run at other values. Drawing the same noise is harmless, as for initial values of
        parameters that are thrown away.
        """
        before, after = self.rng
        now, *devices = sandbox.after
        if not (torch.equal(now, before) or torch.equal(now, after)):
            return True
        return any(not torch.equal(old, new) for old, new in zip(sandbox.before[1:], devices, strict=True))


class RowRuns:
    """Chooses the way in which the rows of a program run, for each structure of the program.

    Rows are broadcast if the program was proved to keep them apart. The proof draws the values of all sites evenly. All
    rows must cost the same as in hidden runs, and some rows the same as in single runs. The proof is repeated after 1,
    2, 4, ... uses and then every 128. There all values differ between rows; a program that fails where some do not gets
    these repeated. Otherwise rows are hidden. If the program cannot run hidden rows, a few rows run singly.

    Attributes:
        said: What was found last; empty before.
    """

    def __init__(self) -> None:
        self._ways: dict[Any, tuple[Way, int]] = {}
        self.said = ""

    def say(self, text: str) -> None:
        """Keeps a finding, for those who print the objective, and logs it."""
        self.said = text
        LOG.info("%s", text)

    def way(self, key: Any) -> Way | None:
        """The way chosen for a structure; ``None`` before its first run."""
        return self._ways[key][0] if key in self._ways else None

    def unchecked(
        self,
        key: Any,
        program: RowProgram,
        rows: Rows,
        learning: bool,
        is_checked: bool = True,
    ) -> dict[str, Tensor] | None:
        """Runs a program at rows of values, none of which holds the sampled values.

        The arguments are those of :meth:`run`. ``None`` if the way is not known, or is to be checked again now; without
        ``is_checked`` it never is.
        """
        way, uses = self._ways.get(key, (Way.NONE, 0))
        if way is Way.NONE or (is_checked and is_due(uses)):
            return None
        self._ways[key] = way, uses + (learning and is_checked)
        return program.run(way, rows)

    def run(
        self,
        key: Any,
        program: RowProgram,
        rows: Rows,
        sampled: Mapping[str, Tensor],
        learning: bool,
        is_checked: bool = True,
    ) -> dict[str, Tensor] | None:
        """Runs a program at rows of values; row 0 holds the sampled values.

        Args:
            key: The structure of the program.
            program: The program.
            rows: The values.
            sampled: The costs of the sampled run. The costs of row 0 have to match them.
            learning: Whether this run counts as a use.
            is_checked: Whether the costs of row 0 are compared with ``sampled``; the way has to be known otherwise.

        Returns:
            Each cost ``(rows, batch)``. ``None`` if the program runs in no way.
        """
        if not is_checked:
            return self.unchecked(key, program, rows, learning, is_checked)
        way, uses = self._ways.get(key, (None, 0))
        is_proved = way is None or (way in (Way.BROADCAST, Way.REPEATED) and learning and is_due(uses))
        if way is None or is_proved:
            way = _prove(program, rows, uses)
        found = _as_sampled(way, program, rows, sampled)
        if found is None and not is_proved:
            # The program has changed since the way was chosen.
            way = _prove(program, rows, uses)
            found = _as_sampled(way, program, rows, sampled)
        if found is None and way is Way.BROADCAST:
            # Where all values differ between rows, it was proved to keep the rows apart.
            way = Way.REPEATED
            found = _as_sampled(way, program, rows, sampled)
        if len(self._ways) >= _CAPACITY and key not in self._ways:
            self._ways.clear()
        if found is not None and self.way(key) is not way:
            self.say(f"The extra run of the model has {rows.number} rows: {way.value}.")
        self._ways[key] = Way.NONE if found is None else way, uses + learning
        return found


def _as_sampled(way: Way, program: RowProgram, rows: Rows, sampled: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The costs of every row, or ``None`` if the costs of row 0 differ from the sampled costs."""
    if way is Way.NONE or (way is Way.SINGLE and rows.number > MOST_SINGLES):
        return None
    found = program.run(way, rows)
    if found is None or not agree([cost[0] for cost in found.values()], [sampled[name] for name in found]):
        return None
    return found


def _prove(program: RowProgram, rows: Rows, seed: int) -> Way:
    """Finds the fastest way that gives the costs of single runs."""
    generator, sites = probe_generator(seed), program.sites
    rest = {name: value for name, value in rows.fixed.items() if name not in sites}

    def probed(kinds: Sequence[Kind]) -> Rows:
        drawn = {n: probe(fn, value.expand(PROBES, *value.shape), kinds, generator) for n, (fn, value) in sites.items()}
        return Rows(rest, drawn)

    # The program may fail at some values. The rows themselves then serve for the comparison.
    mixed = kinds_at(torch.randperm(PROBES, generator=generator).tolist())
    tried = (probed(mixed), probed([Kind.EVEN] * PROBES), rows)
    for compared in tried:
        program = replace(program, is_strict=compared is not rows)
        picked = torch.randperm(compared.number, generator=generator)[:REFEREES]
        some = {name: value[picked.to(value.device)] for name, value in compared.varied.items()}
        truth = program.run(Way.SINGLE, Rows(compared.fixed, some))
        if truth is not None:
            return _fastest(program, compared, picked, list(truth.values()))
    return Way.NONE


def _fastest(program: RowProgram, rows: Rows, picked: Tensor, truth: Sequence[Tensor]) -> Way:
    """Finds the fastest way whose costs match single runs.

    Single runs check the picked rows. Hidden rows, or else single runs, check all rows of a broadcast.
    """
    hidden = program.run(Way.HIDDEN, rows)
    if hidden is not None and not agree([cost[picked.to(cost.device)] for cost in hidden.values()], truth):
        hidden = None
    spread = program.run(Way.BROADCAST, rows)
    if spread is not None and agree([cost[picked.to(cost.device)] for cost in spread.values()], truth):
        expected = program.run(Way.SINGLE, rows) if hidden is None else hidden
        if expected is not None and agree(list(spread.values()), list(expected.values())):
            return Way.BROADCAST
    if hidden is None or program.keeps_hidden_rows(rows):
        return Way.SINGLE
    return Way.HIDDEN
