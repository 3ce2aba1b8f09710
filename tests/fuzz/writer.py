"""Writes the text of a program, and expressions that read the latents it has so far."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fuzz.knobs import Knobs

__all__ = ["Allowed", "Latent", "Plate", "Writer", "literal"]


@dataclass(frozen=True)
class Allowed:
    """What programs may do.

    Args:
        left: Whether they may index and reduce from the left outside of plates: then they do not broadcast.
        escapes: Whether values may leave torch, or steer Python.
        mixing_rows: Whether rows of a plate may mix inside of it, which is wrong in Pyro too.
        marks: Whether sites are marked to be enumerated.
        costs: Whether there are cost statements and other terms that a bound of several samples does not have.
        dropped: Whether the guide may hold sites that the model lacks.
        changes: Whether what they read changes between two steps.
    """

    left: bool = True
    escapes: bool = True
    mixing_rows: bool = False
    marks: bool = False
    costs: bool = True
    dropped: bool = True
    changes: bool = False


@dataclass(frozen=True)
class Plate:
    """A plate, the variable of its rows, and the number of rows in a run."""

    name: str
    size: int
    dim: int
    subsample: int | None = None

    @property
    def rows(self) -> int:
        return self.subsample or self.size

    @property
    def header(self) -> str:
        chosen = "" if self.subsample is None else f", subsample_size={self.subsample}"
        return f'pyro.plate("{self.name}", {self.size}{chosen}, dim={self.dim})'


@dataclass(frozen=True)
class Latent:
    """A value that a program has: ``count`` components of ``values`` values each, none for a number."""

    name: str
    kind: str
    values: int = 2
    count: int = 0
    plates: tuple[Plate, ...] = ()
    infer: str = ""

    @property
    def states(self) -> int:
        own = {"point": 1, "derived": 1, "onehot": self.values}.get(self.kind, self.values ** max(self.count, 1))
        return int(own ** math.prod(plate.rows for plate in self.plates))

    @property
    def has_gradient(self) -> bool:
        return self.kind in ("real", "point", "derived")

    @property
    def is_vector(self) -> bool:
        return self.kind in ("bits", "counts", "onehot")

    @property
    def width(self) -> int:
        return self.values if self.kind == "onehot" else self.count


def literal(numbers: Sequence[float], shape: tuple[int, ...]) -> str:
    """Nested lists of numbers."""
    if not shape:
        return repr(numbers[0])
    step = len(numbers) // shape[0]
    return "[" + ", ".join(literal(numbers[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])) + "]"


@dataclass
class Writer:
    """Lines of one function, and what they may read."""

    rng: random.Random
    allowed: Allowed
    role: str = "guide"
    lines: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    known: list[Latent] = field(default_factory=list)
    features: set[str] = field(default_factory=set)
    indent: int = 1
    serial: int = 0
    shared: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    handed: list[str] = field(default_factory=list)
    knobs: Knobs | None = None

    def function(self, role: str) -> None:
        """Begins another function."""
        self.role, self.known, self.indent = role, [], 1
        self.lines.append(f"def {role}():")

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    @contextlib.contextmanager
    def inside(self, header: str) -> Iterator[None]:
        self.line(header + ":")
        self.indent += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.line("pass")
        self.indent -= 1

    def unique(self, prefix: str) -> str:
        self.serial += 1
        return f"{prefix}{self.serial}"

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def use(self, feature: str) -> None:
        self.features.add(feature)

    def knob(self, chance: float = 0.05) -> Knobs | None:
        """The knobs, if the next thing changes between two steps."""
        return self.knobs if self.knobs is not None and self.knobs.is_turn(chance) else None

    def numbers(self, *shape: int, low: float = -1.2, high: float = 1.2) -> str:
        count = math.prod(shape)
        # No zeros, which hide what depends on what.
        return literal([round(self.rng.uniform(low, high), 2) or 0.05 for _ in range(count)], shape)

    def constant(self, *shape: int) -> str:
        knobs = self.knob()
        return knobs.tensor(self.numbers(*shape), self.numbers(*shape)) if knobs else self.fixed(*shape)

    def fixed(self, *shape: int) -> str:
        """A constant that does not change."""
        return f"torch.tensor({self.numbers(*shape)})"

    def number(self, low: float = -1.2, high: float = 1.2) -> str:
        knobs = self.knob()
        return knobs.number(low, high) if knobs else f"{self.rng.uniform(low, high):.2f}"

    def index(self, start: int, stop: int) -> str:
        """A position."""
        knobs = self.knob()
        return knobs.size(start, stop) if knobs else str(self.rng.randrange(start, stop))

    def param(self, *shape: int) -> str:
        """A parameter; now and then one that is used elsewhere too."""
        again = [text for text, other in self.shared if other == shape]
        if again and self.chance(0.1):
            self.use("shared parameter")
            # With its initial value: the other statement may stand in a branch that was not taken.
            return self.rng.choice(again)
        name = self.unique("q" if self.role == "guide" else "p")
        text = f'pyro.param("{name}", {self.fixed(*shape)})'
        if self.indent == 1:
            self.shared.append((text, shape))
        return text

    def positive(self) -> str:
        """A positive scalar parameter."""
        name, value = self.unique("s"), f"{self.rng.uniform(0.5, 1.5):.2f}"
        return f'pyro.param("{name}", torch.tensor({value}), constraint=dist.constraints.positive)'

    def weights(self, *shape: int) -> str:
        return self.param(*shape) if self.chance(0.4) else self.constant(*shape)

    # Reads.

    def sum_of_reads(self, inside: tuple[Plate, ...] = (), most: int = 3, least: int = 0) -> str:
        """A sum over some of the latents, each read in some way; empty where none is read."""
        count = min(self.rng.randint(least, most), len(self.known))
        # What was sampled last is read most often.
        chosen = sorted(self.known, key=lambda z: self.rng.random() ** (1 + self.known.index(z)))[-count:]
        parts = [f"{self.number(0.4, 1.6)} * {self._switched(z, inside)}" for z in chosen if count]
        if len(parts) > 1 and self.chance(0.3):
            parts[:2] = [f"{parts[0]} * {self._atom(self.read(chosen[1], inside))}"]
        return " + ".join(parts)

    def _switched(self, z: Latent, inside: tuple[Plate, ...]) -> str:
        """A read, perhaps one that a flag changes into another one."""
        text, knobs = self._atom(self.read(z, inside)), self.knob(0.3)
        if knobs is None:
            return text
        others = [other for other in self.known if other is not z] or [z]
        other, way = self._atom(self.read(self.rng.choice(others), inside)), self.rng.randrange(4)
        if way == 0:
            return f"({text} + ({other} if {knobs.flag()} else 0.3))"
        if way == 1:
            return f"({text} if {knobs.flag()} else {other})"
        if way == 2:
            return f"({text} if {knobs.flag()} else {text} + 3 * (1 - {text}))"
        self.use("caught error")
        name = self.unique("c")
        self.line(f"try: {name} = (torch.linalg.cholesky({knobs.sign()} * torch.eye(2)), {text})[1]")
        self.line(f"except RuntimeError: {name} = {other}")
        return name

    def _atom(self, text: str) -> str:
        return text if text.replace("_", "").isalnum() else f"({text})"

    def condition(self, z: Latent, inside: tuple[Plate, ...] = ()) -> str:
        """Whether a latent is large, as a tensor of booleans."""
        return f"{self._atom(self.read(z, inside))} > {self.number(0.1, 0.6)}"

    def read(self, z: Latent, inside: tuple[Plate, ...] = ()) -> str:
        """An expression with the batch shape of ``inside``, or one that broadcasts with it."""
        foreign = [plate for plate in z.plates if plate not in inside]
        is_free = self.allowed.left and not z.plates
        text = self._from_left(z, inside) if is_free and self.chance(0.55) else self._from_right(z)
        if foreign:
            return self._reduced(text, z, foreign, inside)
        if z.plates and self.allowed.mixing_rows and self.chance(0.5):
            self.use("mixing rows")
            text = f"({text})"
            ways = [f"{text}.roll(1, -1)", f"{text}.max()", f"{text}[..., :1]", f"{text}.flip(-1)", f"{text}.mean()"]
            return self.rng.choice(ways)
        return text

    def _reduced(self, text: str, z: Latent, foreign: list[Plate], inside: tuple[Plate, ...]) -> str:
        self.use("plate read outside")
        whole = len(foreign) == len(z.plates) and not inside
        if whole and self.allowed.left and self.chance(0.5):
            self.use("left reduction of rows")
            ways = ["({}).sum()", "({}).mean()", "({}).reshape(-1)[0]", "({}).max()", "({}).prod()"]
            return self.rng.choice(ways).format(text)
        dims = ", ".join(str(plate.dim) for plate in foreign)
        ways = ["({}).sum({}, keepdim=True)", "({}).mean({}, keepdim=True)"]
        return self.rng.choice(ways).format(text, dims if len(foreign) == 1 else f"({dims})")

    def _from_right(self, z: Latent) -> str:
        v, w = z.name, self.weights
        if z.kind in ("coin", "spin"):
            index = f"{v}.long()" if z.kind == "coin" else f"({v} > 0).long()"
            ways = [
                lambda: v,
                lambda: f"{self.number()} * {v}",
                lambda: f"{w(2)}[{index}]",
                lambda: f"torch.where({v} > 0.5, {w()}, {w()})",
                lambda: f"(0.4 - {v}).exp()",
                lambda: f"torch.stack([{v}, 1 - {v}], -1) @ {w(2)}",
                lambda: f"{self.net(1)}({v}.unsqueeze(-1))",
            ]
            if self.knobs and z.kind == "coin":
                ways.append(
                    lambda: self._used("hidden noise", f"torch.bernoulli({v}, generator=noise) * {self.number()}")
                )
        elif z.kind in ("pick", "count"):
            index = v if z.kind == "pick" else f"{v}.long()"
            ways = [
                lambda: f"{w(z.values)}[{index}]",
                lambda: f"{self.number()} * {v}",
                lambda: f"({v} == 1).to(torch.float64)",
                lambda: f"torch.nn.functional.one_hot({index}, {z.values}).to(torch.float64) @ {w(z.values)}",
                lambda: f"torch.where({v} > 0, {w()}, {w()})",
            ]
        elif z.kind in ("real", "point", "derived"):
            ways = [lambda: v, lambda: f"{v} ** 2", lambda: f"torch.sin({v})", lambda: f"{w()} * {v}"]
        elif z.kind == "faces":
            ways = [
                lambda: f"({v} * {w(z.count, z.values)}).sum((-1, -2))",
                lambda: f"{v}[..., 0, :] @ {w(z.values)}",
                lambda: f"{v}[..., {self.rng.randrange(z.count)}, 0]",
                lambda: f"{w(z.values)}[{v}.argmax(-1)].sum(-1)",
            ]
        elif z.kind == "digits":
            ways = [
                lambda: f"{w(z.values)}[{v}].sum(-1)",
                lambda: f"{self.number()} * {v}.sum(-1)",
                lambda: f"{w(z.values)}[{v}[..., {self.rng.randrange(z.count)}]]",
                lambda: f"{w(*(z.values,) * z.count)}[{', '.join(f'{v}[..., {i}]' for i in range(z.count))}]",
            ]
        else:
            ways = self._vector_ways(z)
        return self.rng.choice(ways)()

    def _vector_ways(self, z: Latent) -> list:
        v, w, n = z.name, self.weights, z.width
        ways = [
            lambda: f"{v}[..., {self.index(-n, n)}]",
            lambda: f"{v}.sum(-1)",
            lambda: f"({v} * {w(n)}).sum(-1)",
            lambda: f"{v} @ {w(n)}",
            lambda: f"({v} @ {w(n)}) ** 2",
            lambda: f"{v}.cumprod(-1).sum(-1)",
            lambda: f"{self.net(n)}({v})",
            lambda: f"torch.einsum('...i,i->...', {v}, {w(n)})",
        ]
        if self.allowed.left:  # vmap takes the leftmost dimension
            ways.append(lambda: self._used("vmap", f"torch.func.vmap(lambda u: u * u + 0.3)({v}).sum(-1)"))
        if z.kind == "onehot":
            ways.append(lambda: f"{w(n)}[{v}.argmax(-1)]")
        return ways

    def _used(self, feature: str, text: str) -> str:
        self.use(feature)
        return text

    def net(self, size: int) -> str:
        """A module with a buffer, registered where it is first called."""
        self.use("module")
        name = self.unique("net")
        self.header.append(f"{name} = Net({size}, {self.rng.randrange(9)})")
        return f'pyro.module("{name}", {name})' if self.chance(0.8) else name

    # From the left: these mean something else once there is a dimension of particles or rows.

    def _from_left(self, z: Latent, inside: tuple[Plate, ...]) -> str:
        self.use("left")
        ways = self._left_ways(z)
        if self.allowed.escapes and not z.has_gradient and self.chance(0.25):
            ways = self._escapes(z)
        rows = inside[-1] if len(inside) == 1 else None
        if z.kind == "bits" and rows is not None and rows.dim == -1 and rows.rows == z.count and self.chance(0.6):
            self.use("components as rows")
            ways = [
                lambda: z.name,
                lambda: f"{self.weights(2)}[{z.name}.long()]",
                lambda: f"{z.name}.flip(0)",
                lambda: f"{z.name}.cumprod(-1)",
            ]
        return self.rng.choice(ways)()

    def _left_ways(self, z: Latent) -> list:
        v, w, n = z.name, self.weights, z.width
        first = f"{v}.reshape(-1)[0]"
        if z.kind == "faces":
            return [
                lambda: f"{v}[0, 1]",
                lambda: f"{v}[1] @ {w(z.values)}",
                lambda: f"({v} * {w(z.count, z.values)}).sum()",
                lambda: first,
                lambda: f"{v}.flatten() @ {w(z.count * z.values)}",
            ]
        if z.kind == "digits":
            return [
                lambda: f"{w(z.values)}[{v}[0]]",
                lambda: f"{w(z.values)}[{v}].sum()",
                lambda: f"{v}.to(torch.float64).mean()",
                lambda: f"{w(z.values)}[{v}][-1]",
                lambda: f"{w(*(z.values,) * z.count)}[tuple({v})]",
            ]
        if z.is_vector:
            return self._left_of_vector(z, v, n)
        ways = [
            lambda: first,
            lambda: f"torch.hstack([{v}, {v} * {v}])[0]",
            lambda: f"torch.stack([{v}, {v} * {v}])[1]",
            lambda: f"torch.atleast_1d({v})[0]",
            lambda: f"({w(2)} * {v})[1]",
            lambda: self._used("vmap", f"torch.func.vmap(lambda u: u * {v})({w(3)}).sum()"),
            lambda: self._used("buffer", self._buffer(z)),
        ]
        others = [o for o in self.known if o.kind in ("coin", "count") and not o.plates and o is not z]
        if others and z.kind in ("coin", "count"):
            o = self.rng.choice(others).name
            ways += [
                lambda: f"torch.stack([{v}, {o}]).sum()",
                lambda: f"(torch.stack([{v}, {o}]) @ {w(2)}) ** 2",
                lambda: f"torch.hstack([{v}, {o}])[0]",
            ]
        return ways

    def _left_of_vector(self, z: Latent, v: str, n: int) -> list:
        w = self.weights
        return [
            lambda: f"{v}[{self.index(-n, n)}]",
            lambda: f"{v}.sum()",
            lambda: f"{v}.mean()",
            lambda: f"{v}.max()",
            lambda: f"{v}.reshape(-1)[0]",
            lambda: f"torch.hstack([{v}, {v}])[{self.rng.randrange(n)}]",
            lambda: f"torch.cat([{w(2)}, {v}])[{self.rng.randrange(2, 2 + n)}]",
            lambda: f"torch.cat([{v}, {w(1)}]).prod()",
            lambda: f"torch.dot({v}, {w(n)})",
            lambda: f"({w(2, n)} @ {v}).sum()",
            lambda: f"torch.outer({v}, {w(2)}).sum()",
            lambda: f"{v}.flip(0)[0]",
            lambda: f"{v}.cumsum(0)[-1]",
            lambda: f"sum({v})",
            lambda: f"{v}.unbind()[{self.rng.randrange(n)}]",
            lambda: f"list({v})[0]",
            lambda: f"{v}.norm()",
            lambda: self._used("unpacked", self._unpacked(z)),
            lambda: self._used("loop", self._looped(z)),
            lambda: self._used("noisy or", self._noisy_or(z)),
            lambda: self._used("vmap", f"torch.func.vmap(lambda u, c: u * c)({v}, {w(n)}).sum()"),
            lambda: self._used("buffer", self._buffer(z)),
        ]

    def _unpacked(self, z: Latent) -> str:
        names = [self.unique("u") for _ in range(z.width)]
        self.line(", ".join(names) + ("," if len(names) == 1 else "") + f" = {z.name}")
        return " + ".join(f"{self.number()} * {name}" for name in names)

    def _looped(self, z: Latent) -> str:
        total = self.unique("t")
        self.line(f"{total} = 0.0")
        with self.inside(f"for i in range({z.width})"):
            self.line(f"{total} = {total} + {self.weights(z.width)}[i] * {z.name}[i]")
        return total

    def _noisy_or(self, z: Latent) -> str:
        total = self.unique("t")
        self.line(f"{total} = 1.0")
        for i in range(z.width):
            self.line(f"{total} = {total} * (1 - {self.number(0.2, 0.8)} * {z.name}[{i}])")
        return f"(1 - {total})"

    def _buffer(self, z: Latent) -> str:
        if z.has_gradient:
            return z.name
        name = self.unique("b")
        if self.chance(0.3):
            self.use("module")
            self.header.append(f"{name} = Memory(2)")
            return f"{name}({z.name}, 1 - {z.name})"
        self.line(f"{name} = torch.zeros(3)")
        if z.is_vector:
            self.line(f"{name}[:{min(z.width, 3)}] = {z.name}[:3]")
        else:
            self.line(f"{name}[{self.index(1, 3) if self.knobs else 1}] = {z.name}")
        return f"{name} @ {self.weights(3)}"

    # Out of torch.

    def _escapes(self, z: Latent) -> list:
        self.use("escape")
        v, w = z.name, self.weights
        if z.is_vector or z.kind in ("faces", "digits"):
            first = f"{v}.reshape(-1)[0]"
            return [
                lambda: f"float({first})",
                lambda: f"{v}.tolist()[0]" if z.kind != "faces" else f"{v}.tolist()[0][0]",
                lambda: f"torch.as_tensor(0.7 * {v}.numpy().sum())",
                lambda: f"({w()} if {first} == 1 else {w()})",
                lambda: f"float({v}.nonzero().shape[0])",
                lambda: f"({w()} if {v}.any() else {w()})",
            ]
        if z.kind == "spin":
            return [lambda: f"{v}.item()", lambda: f"({w()} if {v} > 0 else {w()})"]
        return [
            lambda: f"float({v})",
            lambda: f"{v}.item()",
            lambda: f"({w()} if {v}.item() else {w()})",
            lambda: f"({w()} if {v} == 1 else {w()})",
            lambda: f"[{', '.join(w() for _ in range(z.values))}][int({v})]",
            lambda: f"torch.as_tensor(np.tanh({v}.numpy()))",
            lambda: f"torch.tensor({v}.tolist(), dtype=torch.float64)",
            lambda: f"{w(z.values)}[int({v})]",
        ]
