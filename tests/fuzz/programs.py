"""Random small programs: their text, what they may do, and the exact gradient of each.

A program is a text that defines ``model`` and ``guide``, so that one that fails can be read, kept and cut down. It is
drawn so that stock Pyro runs it, in float64, with few joint states.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pyro
from torch import Tensor

from fuzz.blocks import Block, Branch, Handed, Loop, Marginal, ObservedMask, Rows, Single, Sized, Wide, observe
from fuzz.knobs import Knobs
from fuzz.writer import Allowed, Latent, Plate, Writer
from pyro_bpq.testing import exact_gradient, iter_outcomes

__all__ = ["Allowed", "NotRunnable", "Program", "from_source", "random_program"]

PRELUDE = "from fuzz.prelude import *"
ATTEMPTS = 40
# Programs are small by construction; rows of one state are counted as if they had two.
UNLIMITED = 1 << 200
_KINDS = ("coin", "coin", "coin", "bits", "bits", "bits", "pick", "onehot", "onehot", "count", "spin", "real", "faces")
_KINDS += ("digits", "point")
MANY = frozenset(("bits", "faces", "digits"))
FLOAT_KINDS = frozenset(("coin", "bits", "onehot", "faces"))
# Those whose log-probability is that of the law that they are drawn from.
LAWFUL_KINDS = frozenset(_KINDS) - {"real"}
COUNT_KINDS = frozenset(("count", "counts", "coin", "pick", "bits"))


class NotRunnable(Exception):
    """Stock Pyro does not run a program."""


@dataclass(frozen=True, eq=False)
class Program:
    """A model and a guide.

    Args:
        seed: Where it comes from.
        source: Its text.
        features: What it contains.
        model: The model.
        guide: The guide.
        turn: Puts what it reads as it is before a change, or with 1 as after it; returns the arguments.
        rejected: How many texts were drawn before that stock Pyro does not run.
    """

    seed: int
    source: str
    features: frozenset[str]
    model: Callable[..., Any]
    guide: Callable[..., Any]
    turn: Callable[[int], tuple[Any, ...]] | None = None
    rejected: int = 0
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def num_states(self) -> int:
        """Number of joint states."""
        pyro.clear_param_store()
        return sum(1 for _ in iter_outcomes(self.guide, num_outcomes=UNLIMITED))

    @cached_property
    def exact(self) -> Mapping[str, Tensor]:
        """The exact gradient, by enumeration of all states under Pyro's own handlers."""
        pyro.clear_param_store()
        return exact_gradient(self.model, self.guide, num_outcomes=UNLIMITED)

    @cached_property
    def changed(self) -> Mapping[str, Tensor]:
        """The exact gradient after the change."""
        assert self.turn is not None
        pyro.clear_param_store()
        try:
            return exact_gradient(self.model, self.guide, *self.turn(1), num_outcomes=UNLIMITED)
        finally:
            self.turn(0)

    def __str__(self) -> str:
        return f"# seed {self.seed}: {', '.join(sorted(self.features))}\n{self.source}"


def from_source(source: str, seed: int = 0, features: frozenset[str] = frozenset(), rejected: int = 0) -> Program:
    """The program of a text.

    Args:
        source: The text.
        seed: Where it comes from.
        features: What it contains.
        rejected: How many were drawn before it.
    """
    file = f"<program {seed}>"
    # A traceback then shows its lines.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {}
    exec(compile(source, file, "exec"), space)
    return Program(seed, source, features, space["model"], space["guide"], space.get("turn"), rejected)


def random_program(
    seed: int,
    *,
    allowed: Allowed | None = None,
    max_states: int = 64,
    kinds: frozenset[str] | None = None,
    mixing_rows: bool = False,
) -> Program:
    """Draws a program.

    Args:
        seed: Same seed and options, same program.
        allowed: What it may do.
        max_states: Largest number of joint states of one particle.
        kinds: Kinds of latents; all by default.
        mixing_rows: Whether rows of a plate may mix inside of it.

    Returns:
        A program that stock Pyro runs in every joint state.
    """
    allowed = replace(allowed or Allowed(), mixing_rows=mixing_rows)
    for attempt in range(ATTEMPTS):
        source, features = _Draw(random.Random(f"{seed}/{attempt}"), allowed, max_states, kinds).text()
        if allowed.marks and '"enumerate"' not in source:
            continue
        program = from_source(source, seed, features, attempt)
        if allowed.changes and program.turn is None:
            continue
        try:
            gradients = [*program.exact.values(), *(program.changed.values() if allowed.changes else ())]
            finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        except Exception as error:
            if isinstance(error, (SyntaxError, NameError)):
                raise
            continue
        if finite and program.exact:
            return program
    raise NotRunnable(f"Seed {seed}: none of {ATTEMPTS} programs runs.")


class _Draw:
    """One drawing of a text."""

    def __init__(self, rng: random.Random, allowed: Allowed, max_states: int, kinds: frozenset[str] | None) -> None:
        # Where values steer a program all that follows depends on them, and much else is not put to the test.
        self.rng, self.allowed = rng, replace(allowed, escapes=allowed.escapes and rng.random() < 0.45)
        self.budget = min(max_states, rng.choices([4, 8, 16, 32, 64], [50, 36, 10, 3, 1])[0])
        # Sites of many components may be served by a second run, which squares the number of outcomes.
        dear = MANY if self.budget > 16 else frozenset[str]()
        every = (*_KINDS, *("count", "counts", "counts") * 2) if kinds == COUNT_KINDS else _KINDS
        self.kinds = [kind for kind in every if kind not in dear and (kinds is None or kind in kinds)]
        self.count = 0
        self.knobs = Knobs(rng) if allowed.changes else None

    def text(self) -> tuple[str, frozenset[str]]:
        rng = self.rng
        blocks = self._blocks()
        # Where values steer a program, one particle runs: then there is nothing to see in many rows.
        is_wide = any(isinstance(block, Wide) for block in blocks)
        w = Writer(rng, replace(self.allowed, escapes=False, costs=False) if is_wide else self.allowed)
        w.knobs = self.knobs
        w.function("guide")
        guided = self._ordered(w, blocks, 0.2)
        for block in guided:
            block.write(w)
        if not w.known:
            w.line("pass")
        if self.allowed.costs and w.known and rng.random() < 0.06:
            w.use("factor of the guide")
            text = w.sum_of_reads(least=1, most=1)
            w.line(f'pyro.factor("g", torch.as_tensor({text}) * {w.weights()}, has_rsample=False)')
        w.lines.append("")
        w.function("model")
        for block in self._ordered(w, blocks, 0.15):
            block.write(w)
        for _ in range(rng.choice([1, 1, 2, 3])):
            observe(w)
        lines = [*w.header, "", *w.lines, ""]
        if self.knobs is not None and self.knobs.count:
            w.features |= self.knobs.features
            lines = [self.knobs.signed(line) for line in [*self.knobs.header, *lines, *self.knobs.text(), ""]]
        return "\n".join([PRELUDE, "shared = SimpleNamespace()", *lines]), frozenset(w.features)

    def _ordered(self, w: Writer, blocks: list[Block], chance: float) -> list[Block]:
        found = list(blocks)
        if self.rng.random() < chance:
            w.use("other order")
            self.rng.shuffle(found)
        # What reads certain latents comes last.
        return sorted(found, key=lambda block: isinstance(block, (Branch, Handed)))

    def _blocks(self) -> list[Block]:
        rng, allowed = self.rng, self.allowed
        draw = rng.random()
        if draw < 0.04 and allowed.left and self.budget >= 8:
            return [Wide("w")]
        blocks: list[Block] = []
        count = rng.choice([0, 1, 1, 2, 2, 3, 4])
        if draw < 0.4 or not count:
            blocks += [Single(self._latent()) for _ in range(count)]
            blocks.append(self._rows())
            count = 0
        elif draw < 0.5 and self.budget >= 4:
            steps = 3 if self.budget >= 8 else 2
            self.budget //= 2**steps
            is_plate = rng.random() < 0.5
            chosen = ", 1" if is_plate and rng.random() < 0.4 else ""
            header = f'pyro.plate("l_steps", {steps}{chosen})' if is_plate else f"pyro.markov(range({steps}))"
            blocks.append(Loop("l", steps, header, is_plate, self._mark("coin")))
        elif draw < 0.65 and allowed.escapes and allowed.left and self.budget >= 4:
            self.budget //= 2
            blocks += [Single(self._latent(kinds=("coin", "pick", "count"))), Branch("m", counts=rng.random() < 0.5)]
        elif draw < 0.68 and self.budget >= 4:
            self.budget //= 2
            blocks.append(ObservedMask(Plate("o_rows", 2, -1), Latent("o", "coin"), (rng.random() < 0.5, False)))
        more: list[Block] = [Single(self._latent()) for _ in range(count)]
        blocks = more + blocks if rng.random() < 0.6 else blocks + more
        if allowed.left and allowed.dropped and rng.random() < 0.08:
            blocks.append(Handed("h"))
        if self.knobs is not None and self.budget >= 4 and rng.random() < 0.4:
            blocks.append(self._changing(self.knobs))
        if allowed.marks and rng.random() < 0.4:
            kind = rng.choice(["coin", "pick"])
            blocks.append(Marginal(Latent("n", kind, infer='{"enumerate": "parallel"}')))
        blocks = [block for block in blocks if not (isinstance(block, Single) and block.latent.states == 0)]
        return (
            blocks
            if any(not isinstance(block, (Handed, Marginal)) for block in blocks)
            else [Single(Latent("z0", "coin"))]
        )

    def _changing(self, knobs: Knobs) -> Block:
        """Sites that are there before or after the change only, or of which there are more."""
        self.budget //= 4
        way = self.rng.randrange(3)
        if way == 0:
            return Sized(Plate("sized", 2, -1), knobs.size(1, 3))
        return (
            Branch("g", gate=f"if {knobs.flag()}")
            if way == 1
            else Branch("g", True, f"for i in range({knobs.size(0, 3)})")
        )

    def _mark(self, kind: str) -> str:
        if self.allowed.marks and kind in ("coin", "pick") and self.rng.random() < 0.5:
            return '{"enumerate": "parallel"}'
        return ""

    def _latent(self, plates: tuple[Plate, ...] = (), kinds: tuple[str, ...] | None = None) -> Latent:
        """A latent that the budget allows; one without states if there is none."""
        rng, name = self.rng, f"z{self.count}"
        for _ in range(6):
            kind = rng.choice(kinds or self.kinds)
            values = rng.choice([2, 3]) if kind in ("pick", "onehot", "counts") else 3 if kind == "count" else 2
            count = rng.choice([2, 2, 3]) if kind == "bits" else 2 if kind in ("faces", "digits", "counts") else 0
            if kind == "point" and rng.random() < 0.8:
                continue
            latent = Latent(name, kind, values, count, plates, self._mark(kind))
            if latent.states <= self.budget:
                self.count += 1
                self.budget //= latent.states
                if self.allowed.dropped and not plates and kind in ("coin", "pick") and rng.random() < 0.04:
                    return replace(latent, infer='{"is_auxiliary": True}')
                return latent
        return Latent(name, "pick", 0, 1, plates)

    def _rows(self) -> Rows:
        rng, plates = self.rng, tuple[Plate, ...]()
        draw = rng.random()
        if draw < 0.25:
            size = rng.choice([2, 3])
            inner = Plate("inner", 2, -1)
            plates = (Plate("outer", size, -2), inner)
            if rng.random() < 0.3:
                plates = (Plate("outer", 2, -1), Plate("inner", 2, -2))
        elif draw < 0.55 and self.budget >= 4:
            size = rng.choice([2, 3])
            plates = (Plate("rows", size, -1, size - 1),)
            self.budget //= size
        else:
            plates = (Plate("rows", rng.choice([1, 2, 2, 2, 3, 3]), rng.choice([-1, -1, -1, -2])),)
        latents = []
        for depth in range(len(plates)):
            count = rng.choice([0, 1, 1, 2])
            found = [self._latent(plates[: depth + 1]) for _ in range(count)]
            latents.append(tuple(z for z in found if z.states))
        return Rows(plates, tuple(latents))
