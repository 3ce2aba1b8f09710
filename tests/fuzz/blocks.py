"""Parts of programs: latents in the guide and in the model, plates, loops and branches, and what is observed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fuzz.writer import Latent, Plate, Writer, literal

__all__ = [
    "Block",
    "Branch",
    "Handed",
    "Loop",
    "Marginal",
    "ObservedMask",
    "Rows",
    "Single",
    "Sized",
    "Wide",
    "observe",
]


@contextlib.contextmanager
def wrapped(w: Writer, inside: tuple[Plate, ...], chance: float) -> Iterator[None]:
    """Perhaps a mask or a scale around statements, constant or of what has been sampled."""
    handlers = []
    if w.chance(chance):
        readable = [z for z in w.known if not z.has_gradient]
        reads = bool(readable) and w.chance(0.6)
        if w.chance(0.5):
            if reads:
                w.use("mask of latents")
                handlers.append(f"poutine.mask(mask={_mask(w, inside, readable)})")
            else:
                w.use("mask")
                rows = inside[-1].rows if inside and inside[-1].dim == -1 else None
                some = [w.chance(0.6) for _ in range(rows or 1)]
                text = f"torch.tensor({some if rows else some[0]!r})"
                knobs = w.knob()
                handlers.append(f"poutine.mask(mask={knobs.flag() if knobs else text})")
        else:
            if reads:
                w.use("scale of latents")
                read = w.read(w.rng.choice(readable), inside)
                handlers.append(f"poutine.scale(scale=0.3 + 0.5 * ({read}) ** 2)")
            else:
                w.use("scale")
                handlers.append(f"poutine.scale(scale={w.number(0.4, 2.5)})")
    if not handlers:
        yield
        return
    with w.inside("with " + ", ".join(handlers)):
        yield


def _mask(w: Writer, inside: tuple[Plate, ...], readable: list[Latent]) -> str:
    z = w.rng.choice(readable)
    text = w.condition(z, inside)
    if not inside and not z.plates and w.allowed.escapes and w.allowed.left and w.chance(0.2):
        w.use("escape")
        return f"bool({text})"
    # Numbers that have left torch compare to a bool of Python, which is a mask too.
    return text


def logits(w: Writer, z: Latent, rows: str = "") -> str:
    """Parameters of a latent's distribution, with its components, given what was sampled before."""
    shape = {
        "pick": (z.values,),
        "onehot": (z.values,),
        "bits": (z.count,),
        "counts": (z.count,),
        "faces": (z.count, z.values),
        "digits": (z.count, z.values),
    }.get(z.kind, ())
    if w.role == "guide" and z.plates and not shape and (rows or z.plates[-1].subsample is None) and w.chance(0.5):
        tail = (1,) * (-z.plates[-1].dim - 1)
        own = f"{w.param(z.plates[-1].size, *tail)}{rows}"
    else:
        own = w.param(*shape)
    reads = w.sum_of_reads(z.plates, most=2)
    if not reads:
        return own
    if not shape:
        return f"{own} + {reads}"
    inner = ", ".join(["None"] * len(shape))
    name = w.unique("r")
    w.line(f"{name} = torch.as_tensor({reads})[..., {inner}]")
    return f"{own} + {name} * {w.constant(*shape)}"


def distribution(w: Writer, z: Latent, rows: str = "") -> str:
    """A distribution, as text."""
    if z.kind == "real":
        loc = logits(w, z, rows)
        if w.role == "model":
            return f"dist.Normal({loc}, {w.number(0.7, 1.5)})"
        scale = w.positive() if w.chance(0.6) else f"torch.tensor({w.number(0.4, 1.2)})"
        return f"TwoPoint({loc}, {scale})"
    if z.kind == "point":
        loc = logits(w, z, rows)
        return f"dist.Delta({loc})" if w.role == "guide" else f"dist.Normal({loc}, 1.1)"
    text = logits(w, z, rows)
    made = {
        "coin": f"dist.Bernoulli(logits={text})",
        "spin": f"Spin({text})",
        "pick": f"dist.Categorical(logits={text})",
        "count": f"dist.Binomial({z.values - 1}, logits={text})",
        "counts": f"dist.Binomial({z.values - 1}, logits={text}).to_event(1)",
        "onehot": f"dist.OneHotCategorical(logits={text})",
        "bits": f"dist.Bernoulli(logits={text}).to_event(1)",
        "faces": f"dist.OneHotCategorical(logits={text}).to_event(1)",
        "digits": f"dist.Categorical(logits={text}).to_event(1)",
    }[z.kind]
    if z.plates and z.plates[-1].dim == -1 and w.chance(0.07):
        w.use("masked distribution")
        made += f".mask(torch.tensor({[w.chance(0.6) for _ in range(z.plates[-1].rows)]}))"
    return made


def sample(w: Writer, z: Latent, rows: str = "", name: str | None = None) -> None:
    """The statement of a latent."""
    with wrapped(w, z.plates, 0.1):
        fn = distribution(w, z, rows)
        quoted = f'"{z.name}"' if name is None else name
        infer = f", infer={z.infer}" if z.infer and w.role == "guide" else ""
        w.line(f"{z.name} = pyro.sample({quoted}, {fn}{infer})")
    w.use(z.kind)
    w.known.append(z)


@dataclass
class Block:
    """A part of a program that stands in guide and model."""

    def write(self, w: Writer) -> None:
        """Writes the part of the function that is being written."""
        raise NotImplementedError


@dataclass
class Single(Block):
    """A latent outside of plates."""

    latent: Latent

    def write(self, w: Writer) -> None:
        if w.role == "model" and "auxiliary" in self.latent.infer:
            return
        sample(w, self.latent)


@dataclass
class Marginal(Block):
    """A latent of the model alone, to be summed out."""

    latent: Latent

    def write(self, w: Writer) -> None:
        if w.role == "model":
            w.use("summed out of the model")
            z = self.latent
            w.line(f'{z.name} = pyro.sample("{z.name}", {distribution(w, z)}, infer={z.infer})')
            w.known.append(z)


@dataclass
class Handed(Block):
    """The guide hands a value over to the model on an object."""

    name: str

    def write(self, w: Writer) -> None:
        if w.role == "guide":
            reads = w.sum_of_reads(least=1, most=1)
            if reads and not w.handed:
                w.line(f"shared.{self.name} = {reads}")
                w.handed.append(self.name)
        elif self.name in w.handed:
            w.use("handed over")
            w.line(f"{self.name} = torch.as_tensor(shared.{self.name})")
            w.known.append(Latent(self.name, "derived"))


@dataclass
class Rows(Block):
    """Plates, one in the other, with latents in each, and what is observed in them."""

    plates: tuple[Plate, ...]
    latents: tuple[tuple[Latent, ...], ...]
    is_observed: bool = True

    def write(self, w: Writer) -> None:
        w.use("plates" if len(self.plates) == 1 else "nested plates")
        with contextlib.ExitStack() as stack:
            for depth, plate in enumerate(self.plates):
                index = ""
                if depth == 0:
                    stack.enter_context(wrapped(w, (), 0.08))
                header = f"with {plate.header}"
                if plate.subsample is not None:
                    w.use("subsampled plate")
                    header += f" as {plate.name}_ids"
                    index = f"[{plate.name}_ids]"
                stack.enter_context(w.inside(header))
                for z in self.latents[depth]:
                    sample(w, z, index)
                if w.role == "model" and self.is_observed and (depth or w.chance(0.9)):
                    for _ in range(w.rng.choice([1, 1, 2])):
                        observe(w, self.plates[: depth + 1], index)


@dataclass
class Loop(Block):
    """Latents in a row, each reading the one before; perhaps in a sequential plate, all rows or some."""

    name: str
    steps: int
    header: str
    is_plate: bool
    infer: str = ""

    def write(self, w: Writer) -> None:
        w.use("sequential plate" if self.is_plate else "steps")
        before, base = self.name + "_old", list(w.known)
        if not self.is_plate:
            w.line(f"{before} = torch.tensor(0.0)")
        w.line(f"{self.name}_all = []")
        with w.inside(f"for i in {self.header}"):
            z = Latent(self.name, "coin", infer=self.infer)
            if not self.is_plate:
                w.known.append(Latent(before, "coin"))
            sample(w, z, name=f'f"{self.name}_{{i}}"')
            if w.role == "model" and w.chance(0.6):
                text = w.sum_of_reads(least=1, most=2)
                data = w.constant(self.steps)
                w.line(f'pyro.sample(f"{self.name}_x_{{i}}", dist.Normal({text}, 0.9), obs={data}[i])')
            if not self.is_plate:
                w.line(f"{before} = {self.name}")
            w.line(f"{self.name}_all.append({self.name})")
        stacked = self.name + "_s"
        total = f"sum({self.name}_all)" if w.chance(0.5) else f"torch.stack({self.name}_all, -1).sum(-1)"
        w.line(f"{stacked} = {total}")
        w.known[:] = [*base, Latent(stacked, "derived")]


@dataclass
class Branch(Block):
    """A site that exists for some values only, or so many of them as a value says."""

    name: str
    counts: bool = False
    gate: str = ""

    def write(self, w: Writer) -> None:
        w.use("control flow")
        if self.gate:
            self._gated(w)
            return
        gates = [z for z in w.known if z.kind in ("coin", "pick", "count") and not (z.plates or z.infer)]
        if not gates:
            return
        gate = min(gates, key=lambda z: z.name)
        w.line(f"{self.name} = torch.tensor(0.0)")
        base = list(w.known)
        if self.counts:
            w.use("number of sites")
            with w.inside(f"for i in range(int({gate.name}))"):
                self._sample(w, f'f"{self.name}_{{i}}"')
        else:
            test = [f"{gate.name} > 0", f"{gate.name}.item()", f"int({gate.name}) == 1"]
            with w.inside(
                "if " + (test[0] if w.role == "guide" else w.rng.choice(test[1:]))
                if gate.values == 2
                else f"if {test[0]}"
            ):
                self._sample(w, f'"{self.name}"')
                if w.role == "model" and w.chance(0.5):
                    observe(w, ())
        w.known[:] = [*base, Latent(self.name, "coin")]

    def _gated(self, w: Writer) -> None:
        w.line(f"{self.name} = torch.tensor(0.0)")
        base = list(w.known)
        with w.inside(self.gate):
            self._sample(w, f'f"{self.name}_{{i}}"' if self.counts else f'"{self.name}"')
            if w.role == "model" and not self.counts and w.chance(0.5):
                observe(w, ())
        w.known[:] = [*base, Latent(self.name, "coin")]

    def _sample(self, w: Writer, name: str) -> None:
        w.line(f"{self.name} = pyro.sample({name}, dist.Bernoulli(logits={logits(w, Latent(self.name, 'coin'))}))")
        if Latent(self.name, "coin") not in w.known:
            w.known.append(Latent(self.name, "coin"))


@dataclass
class Sized(Block):
    """A plate whose size changes between two steps."""

    plate: Plate
    number: str

    def write(self, w: Writer) -> None:
        w.use("plate of another size")
        z = Latent(f"{self.plate.name}_z", "coin", plates=(self.plate,))
        with w.inside(f'with pyro.plate("{self.plate.name}", {self.number}, dim=-1)'):
            sample(w, z)
            if w.role == "model":
                mean = w.sum_of_reads(z.plates, least=1)
                data = f"{w.constant(self.plate.size)}[:{self.number}]"
                w.line(f'pyro.sample("{self.plate.name}_x", dist.Normal({mean}, 0.8), obs={data})')


@dataclass
class ObservedMask(Block):
    """A site that is observed in some rows, whose others are a site of the guide."""

    plate: Plate
    latent: Latent
    rows: tuple[bool, ...] = field(default=())

    def write(self, w: Writer) -> None:
        w.use("observed mask")
        mask = f"torch.tensor({list(self.rows)})"
        z = replace(self.latent, plates=(self.plate,))
        if w.role == "guide":
            with w.inside(f"with {self.plate.header}, poutine.mask(mask=~{mask})"):
                w.line(
                    f'{z.name} = pyro.sample("{z.name}_unobserved", dist.Bernoulli(logits={w.param(len(self.rows))}))'
                )
            return
        with w.inside(f"with {self.plate.header}"):
            data = [float(w.chance(0.5)) for _ in self.rows]
            fn = f"dist.Bernoulli(logits={logits(w, z)})"
            w.line(f'{z.name} = pyro.sample("{z.name}", {fn}, obs=torch.tensor({data}), obs_mask={mask})')
            w.known.append(z)
            observe(w, (self.plate,))


@dataclass
class Wide(Block):
    """A latent that hardly varies, and twelve rows of two latents, of which but one row is random.

    In so many rows the default lets several particles run.
    """

    name: str
    size: int = 12

    def write(self, w: Writer) -> None:
        w.use("many rows")
        plate = Plate(f"{self.name}_rows", self.size, -1)
        rare = f"{w.rng.choice([-1, 1]) * w.rng.uniform(1.0, 3.5):.2f}"
        fn = f"dist.Bernoulli(logits={w.param()} + {rare if w.role == 'guide' else w.number()})"
        w.line(f'{self.name} = pyro.sample("{self.name}", {fn})')
        w.known.append(Latent(self.name, "coin"))
        first, second = (Latent(self.name + end, "coin", plates=(plate,)) for end in "ab")
        with w.inside(f"with {plate.header}"):
            for z in (first, second):
                terms = [w.param(), *filter(None, [w.sum_of_reads((plate,), most=2)])]
                if z is second:
                    terms.append(f"{w.number(0.4, 1.6)} * {first.name}")
                chance = f"torch.sigmoid({' + '.join(terms)})"
                if w.role == "guide":
                    # A chance of zero or one leaves one state.
                    fixed = f"torch.tensor({[float(w.chance(0.5)) for _ in range(self.size)]})"
                    free = f"torch.arange({self.size}) == {4 if z is first else self.size}"
                    chance = f"torch.where({free}, {chance}, {fixed})"
                w.line(f'{z.name} = pyro.sample("{z.name}", dist.Bernoulli({chance}))')
                w.known.append(z)
            if w.role == "model":
                observe(w, (plate,))
        if w.role == "model":
            # The largest value of a program bounds the particles: two of them.
            w.line(f'pyro.deterministic("{self.name}_pad", torch.zeros(22000))')


def observe(w: Writer, inside: tuple[Plate, ...] = (), rows: str = "") -> None:
    """Something that reads what was sampled: a likelihood, a factor, a cost."""
    name = w.unique("x")
    shape = tuple(plate.size for plate in inside if plate.dim == -1) if rows == "" or inside else ()
    if len(inside) == 2:
        shape = tuple(plate.size for plate in sorted(inside, key=lambda plate: plate.dim))
    elif inside and inside[-1].dim == -2:
        shape = (inside[-1].size, 1)
    sub = rows if inside and inside[-1].subsample is not None else ""
    ways = ["normal"] * 5 + ["coin", "poisson", "vector", "vector", "factor", "deterministic", "numpy"]
    if w.allowed.costs:
        ways += ["cost"]
    owners = [z for z in w.known if z.kind in ("coin", "pick", "count") and not z.plates]
    if owners and w.allowed.escapes:
        ways += ["own", "own"]
    way = w.rng.choice(ways)
    with wrapped(w, inside, 0.35):
        mean = w.sum_of_reads(inside, least=1) or w.param()
        data = w.constant(*shape) + sub
        if way == "coin":
            data = f"torch.tensor({_rounded(w, shape)}){sub}"
            w.line(f'pyro.sample("{name}", dist.Bernoulli(logits={mean}), obs={data})')
        elif way == "poisson":
            data = f"torch.tensor({_rounded(w, shape)}){sub}"
            w.line(f'pyro.sample("{name}", dist.Poisson(torch.exp(torch.as_tensor({mean}).clamp(-2, 2))), obs={data})')
        elif way == "vector":
            _observe_vector(w, name, inside)
        elif way == "factor":
            w.use("factor")
            w.line(f'pyro.factor("{name}", torch.as_tensor({mean}) * {w.weights()})')
        elif way == "cost":
            w.use("cost")
            w.line(f'cost("{name}", torch.as_tensor({mean}))')
        elif way == "deterministic":
            w.use("deterministic")
            derived = w.unique("d")
            w.line(f'{derived} = pyro.deterministic("{derived}", torch.as_tensor({mean}), event_dim=0)')
            w.line(f'pyro.sample("{name}", dist.Normal({derived}, {w.number(0.6, 1.3)}), obs={data})')
        elif way == "own":
            w.use("own distribution")
            kind = w.rng.choice(["Branching", "Branching", "Counted", "Tabled"])
            w.line(f'pyro.sample("{name}", {kind}({mean}, {w.rng.choice(owners).name}), obs={data})')
        elif way == "numpy" and not inside:
            w.line(f'pyro.sample("{name}", dist.Normal({mean}, 0.9), obs=torch.as_tensor(np.array([0.4, -0.7]))[1])')
        else:
            scale = w.positive() if w.chance(0.3) else w.number(0.6, 1.3)
            w.line(f'pyro.sample("{name}", dist.Normal({mean}, {scale}), obs={data})')


def _rounded(w: Writer, shape: tuple[int, ...]) -> str:
    return literal([float(w.chance(0.5)) for _ in range(math.prod(shape))], shape)


def _observe_vector(w: Writer, name: str, inside: tuple[Plate, ...]) -> None:
    """An elementwise likelihood of a vector, or a layer."""
    vectors = [z for z in w.known if z.is_vector and set(z.plates) <= set(inside)]
    if not vectors:
        count = 2
        mean = f"torch.as_tensor({w.sum_of_reads(inside, least=1) or w.param()})[..., None] * {w.weights(count)}"
    else:
        z = w.rng.choice(vectors)
        count = z.width
        mean = w.rng.choice(
            [f"{z.name} * {w.weights(count)}", f"{w.weights(count, 2)}[torch.arange({count}), {z.name}.long()]"]
        )
        if w.chance(0.3):
            mean, count = f"{z.name} @ {w.weights(count, 2)}", 2
        other = w.sum_of_reads(inside, most=1)
        if other and w.chance(0.5):
            mean += f" + torch.as_tensor({other})[..., None]"
    w.use("vector likelihood")
    mask = ""
    if w.chance(0.15):
        w.use("masked distribution")
        mask = f".mask(torch.tensor({[w.chance(0.6) for _ in range(count)]}))"
    w.line(f'pyro.sample("{name}", dist.Normal({mean}, 0.8){mask}.to_event(1), obs={w.constant(count)})')
