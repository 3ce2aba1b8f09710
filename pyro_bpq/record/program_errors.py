r"""Errors about mistakes in guide and model, shapes, plates and data: they name the site and say what to write."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pyro
import torch
from pyro.distributions import constraints
from torch import Tensor

from pyro_bpq.errors import BPQError, PlateError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.record.config import cost_options
from pyro_bpq.record.watch import PARTICLES, Watch, distribution_name, plates_of, samples
from pyro_bpq.rollout.features import finite_components

# What torch, Pyro and Python raise where shapes or names do not fit. Other errors are a program's own, or about memory.
EXPLAINED = (ValueError, RuntimeError, IndexError, TypeError)
# Words in torch's errors about numbers: a parameter out of its range, or draws from such a distribution.
_NUMBERS = re.compile("to satisfy the constraint|to be true, but got false|probability tensor contains")
_OUT_OF_RANGE = re.compile(
    r"Expected parameter (\w+) .*of distribution (\w+).*to satisfy the constraint (\w+)", re.DOTALL
)
_CONSTRAINTS = MappingProxyType({"GreaterThan": "positive", "Interval": "unit_interval", "Simplex": "simplex"})
# What to do about values that are NaN, on the edge of the support, or outside of it: about drawn ones, and about data.
_DRAWN = (
    "A parameter of its distribution is NaN: pyro.enable_validation(True) says which.",
    "They were rounded: bound the parameters, take a higher temperature or double precision.",
    "Bound the parameters.",
)
_GIVEN = (
    "Leave these out: observe data.nan_to_num() under pyro.poutine.mask(mask=~data.isnan()); elements of an event by "
    "fn.mask(~data.isnan()) within .to_event(...).",
    "Give data inside of it, as by clamp().",
    "Give other data, or another distribution.",
)
# Parts of the errors that torch raises when Python asks a tensor with several elements for one value.
_ONE_VALUE_ONLY = re.compile("is ambiguous|converted to (a )?(Python )?scalar|converted to an index", re.IGNORECASE)
_AT_SITE = re.compile(r"""^Error while computing \w+ at site '(.*)':""")
_ONE_NAME = re.compile("Multiple sample sites named '(.*)'|site (.*) must be sampled in trace")


@contextlib.contextmanager
def explained(find: Callable[..., BPQError | None], *seen: Any) -> Iterator[None]:
    """Raises, for an error of guide and model, one that names the site and says what to write, if it can."""
    try:
        yield
    except EXPLAINED as error:
        found = None if isinstance(error, BPQError) else find(error, *seen)
        if found is None:
            raise
        raise found from error


def told(kind: type[BPQError], error: Exception, *lines: str) -> BPQError | None:
    """An error that says what to write, before the table of shapes that Pyro appends; ``None`` without a line."""
    said, (text, mark, shapes) = [*dict.fromkeys(filter(None, lines))], str(error).partition("\nTrace Shapes:")
    # Errors about values show them, which may be long; else what Pyro says comes first, as in Pyro.
    parts = [*said, text] if kind is UnsupportedSiteError else [text.rstrip(), *said]
    return kind("\n".join(parts) + mark + shapes) if said else None


def of_run(error: Exception, watch: Watch) -> BPQError | None:
    """The error to raise instead of one that came while guide or model ran; ``None`` to leave it."""
    text, model, guide = own_text(error), watch.met["model"], watch.met["guide"]
    sites, enumerated = (*model.values(), *guide.values()), quoted(sorted(watch.enumerated))
    # The program goes on with a value of a form that it does not expect, and fails somewhere else.
    drawn = [pair for pair in pairs(model, guide) if not any(site["is_observed"] for site in pair)]
    unlike = [unlike_line(*pair) for pair in drawn if _form(pair[0]["fn"]) != _form(pair[1]["fn"])]
    if found := told(PlateError, error, *(unlike or size_lines(text, model, guide) or row_lines(text, watch, sites))):
        return found
    if enumerated and re.search(r"up to \d+ dims|too many \(>", text):
        line = f"The enumerated sites {enumerated} have a dimension of their own each: loop with pyro.markov(...)."
        return told(UnsupportedProgramError, error, line)
    if named := _ONE_NAME.search(text):
        return told(UnsupportedProgramError, error, _name_line(text, named[1] or named[2], sites, watch))
    if "used as indices must be" in text:
        floats = [site["name"] for site in sites if finite_components(site["fn"]) and site["value"].is_floating_point()]
        line = f"The values of {quoted(dict.fromkeys(floats))} are floating-point numbers: write table[z.long()]."
        return told(UnsupportedProgramError, error, line if floats else "")
    if type(error) not in EXPLAINED:
        return None
    asks = _ONE_VALUE_ONLY.search(text) is not None
    if asks and enumerated:
        line = f"All values of {enumerated} are given at once. Use operations on tensors (torch.where, table[z]), or "
        line += 'remove infer={"enumerate": ...}, so that the site is sampled.'
        return told(UnsupportedProgramError, error, line)
    if _NUMBERS.search(text):
        return told(UnsupportedSiteError, error, _number_line(text, watch))
    arrays = [key for key, value in watch.inputs.items() if type(value).__module__ == "numpy"]
    if arrays and "numpy" in text.lower():
        line = f"Argument {arrays[0]!r} of the programs is a NumPy array: hand over torch.as_tensor(...) of it."
        return told(UnsupportedProgramError, error, line)
    advice = particle_line(sites)
    if advice and asks and watch.tape is not None:
        read = watch.tape.escaped  # else the program reads a tensor of its own
        return told(UnsupportedProgramError, error, left_torch(read, watch.options.num_particles) if read else "")
    if asks or (ABOUT_SHAPES.search(text) and "within the support" not in text):
        return told(PlateError if isinstance(error, ValueError) else UnsupportedProgramError, error, advice)
    return None


def _form(fn: Any) -> tuple[int, int | None]:
    """The number of event dimensions of a distribution, which those of users may not know, and of categories."""
    split = finite_components(fn)
    number = split.cardinality if split is not None and split.kind in ("categorical", "one_hot") else None
    return getattr(fn, "event_dim", 0), number


def _number_line(text: str, watch: Watch) -> str:
    """Says which parameters are broken, or where the distribution was made whose parameter is out of range."""
    store = pyro.get_param_store()
    if broken := [name for name in store.keys() if not bool(store[name].isfinite().all())]:
        return (
            f"The parameters {quoted(broken)} have elements that are not finite. Look for the first loss that is not "
            "finite; take a smaller learning rate, or clip gradients, as by pyro.optim.ClippedAdam."
        )
    for key, value in watch.inputs.items():
        if missing := number_missing(value):
            return (
                f"Argument {key!r} of the programs has NaN in {missing} of {value.numel()} elements, and the "
                f"{watch.where} computes with them. Leave these out: let the guide read x.nan_to_num(), and observe "
                "under pyro.poutine.mask(mask=~x.isnan())."
            )
    found, seen = _OUT_OF_RANGE.search(text), [*watch.met[watch.where]]
    if found is None:
        return ""
    parameter, law, constraint = found.groups()
    after = f" after the statement {seen[-1]!r}" if seen else ""
    line = f"The {parameter} of a {law} that the {watch.where} makes{after} is out of range: look at it there."
    kind = _CONSTRAINTS.get(constraint)
    advice = f" If it is a parameter, write pyro.param(name, value, constraint=dist.constraints.{kind})."
    return line + advice if kind else line


def _name_line(text: str, name: str, sites: Iterable[Any], watch: Watch) -> str:
    """Says that two statements have one name. Pyro's error is a ``RuntimeError``, too."""
    if any(site["name"] == name and cost_options(site) is not None for site in sites):
        return f'The cost {name!r} has the name of another statement: write pyro_bpq.cost("{name}_cost", ...).'
    if name in watch.subsamples:
        return f'Make it once, {name} = pyro.plate("{name}", ...) or guide.plates["{name}"], and write "with {name}:".'
    line = f'Give each statement a name of its own, in a loop as by pyro.sample(f"{name}_{{t}}", ...).'
    return line if text.startswith("Multiple") else ""


def of_scores(error: Exception, model_trace: Any, guide_trace: Any) -> BPQError | None:
    """The same for an error that came while log-probabilities were computed, or shapes were checked."""
    model, guide, text, at = samples(model_trace), samples(guide_trace), own_text(error), _AT_SITE.match(str(error))
    if found := told(PlateError, error, *(size_lines(text, model, guide) or site_lines(error, model, guide))):
        return found
    # Torch's errors name no site. The first one without a log-probability is where it failed.
    name = at[1] if at else next((name for name, site in model.items() if "log_prob" not in site), "")
    site, twin = model.get(name) or guide.get(name), guide.get(name)
    is_value = "within the support" in text if at else type(error) is RuntimeError and not ABOUT_SHAPES.search(text)
    if site is None or not is_value:
        return None
    is_unlike = twin and not site["is_observed"] and str(support_of(site["fn"])) != str(support_of(twin["fn"]))
    line = unlike_line(site, twin) if is_unlike else value_line(site) if at else ""
    return told(UnsupportedSiteError, error, line)


def number_missing(value: Any) -> int:
    """Number of NaN in data."""
    return int(value.detach().isnan().sum()) if isinstance(value, Tensor) else 0


def value_line(site: Any) -> str:
    """Says how many values of a site are NaN, on the edge of the support or outside of it; empty if none are."""
    value, fn = site["value"], site["fn"]
    if not isinstance(value, Tensor) or not hasattr(fn, "event_dim"):
        return ""
    what, advice = ("data", _GIVEN) if site["is_observed"] else ("drawn value", _DRAWN)
    law = f"the support of its distribution, {described(fn)}"
    places = "that are NaN", f"without a finite log-probability on the edge of {law}", f"outside of {law}"
    for at, place, how in zip((value.isnan(), _on_edge(site), _outside(site)), places, advice, strict=True):
        if number := int(at.sum()):
            return f"The {what} of site {site['name']!r} has {number} of {at.numel()} values {place}. {how}"
    return ""


def _on_edge(site: Any) -> Tensor:
    """Whether values lie on the edge of the support, and have no finite log-probability."""
    value, density, space = site["value"], site.get("log_prob"), support_of(site["fn"])
    if space is None or space.is_discrete:
        return torch.zeros(())
    is_simplex, at = isinstance(space, type(constraints.simplex)), value.isinf()
    for limit in (0.0, 1.0) if is_simplex else (getattr(space, f"{end}_bound", None) for end in ("lower", "upper")):
        if limit is not None:
            at = at | (value == limit)
    return at if density is None else at & ~density.isfinite()[(..., *(None,) * site["fn"].event_dim)]


def _outside(site: Any) -> Tensor:
    """Whether values lie outside of the support, if that is known."""
    try:
        return ~site["fn"].support.check(site["value"])
    except (NotImplementedError, AttributeError, RuntimeError):
        return torch.zeros(())


Sites = Mapping[str, Any]

# Words in torch's and Python's errors about shapes.
ABOUT_SHAPES = re.compile(
    r"size|shape|dim|unpack|indices|\dD\b|out of bounds|out of range|expected, got|elements of source", re.IGNORECASE
)
_TOO_DEEP = re.compile(rf'(?s:and "{PARTICLES}", collide at dim=-|plate stack overflow.*at least )(\d+)')
_OTHER_SIZE = re.compile(r"Shape mismatch inside plate\('(.*)'\) at site (.*) dim (-\d+), (\d+) vs (\d+)")
_OF_PYRO = re.compile(r"invalid log_prob shape|disagree at site|inside plate\(|not broadcastable")


def own_text(error: Exception) -> str:
    """The text of an error without the table of shapes that Pyro appends."""
    return str(error).partition("\nTrace Shapes:")[0]


def quoted(names: Iterable[str]) -> str:
    """Names of sites, plates or parameters, as they are told: of many the first ones."""
    texts = [*map(repr, names)]
    more = f" and {len(texts) - 8} more" if len(texts) > 8 else ""
    return ", ".join(texts[:8]) + more


def pairs(model: Sites, guide: Sites) -> list[tuple[Any, Any]]:
    """The statements of the sites that model and guide both have."""
    return [(model[name], site) for name, site in guide.items() if name in model]


def size_lines(text: str, model: Sites, guide: Sites) -> list[str]:
    """Says which plates have two sizes, for the text of an error about shapes."""
    both = pairs(model, guide) if ABOUT_SHAPES.search(text) else []
    return [line for pair in both if (line := size_line(*pair))]


def size_line(model: Any, guide: Any) -> str:
    """Says that a plate around a site has another size in the guide than in the model; empty if none has.

    The model's plate replays the rows of the guide's, so that the number of these tells nothing.
    """
    sizes = {frame.name: frame.full_size for frame in plates_of(guide)}
    for frame in plates_of(model):
        ours, theirs = sizes.get(frame.name, -1), frame.full_size
        # A plate without a size has -1.
        if ours != theirs and min(ours, theirs) >= 0:
            return (
                f"The plate {frame.name!r} around site {model['name']!r} has {ours} rows in the guide, and {theirs} in "
                f"the model. Give it the same size in both: {_written(frame.name, frame.dim, theirs)}."
            )
    return ""


def row_lines(text: str, watch: Watch, sites: Iterable[Any]) -> Iterator[str]:
    """Says that plates are nested too deeply, or that a site has other rows than one of the declared plates."""
    among, declared = _OTHER_SIZE.search(text), len(watch.subsamples.keys() - {PARTICLES})
    if among is not None and among[1] != PARTICLES:
        plate, site, at, rows, size = among.groups()
        yield (
            f"In the {watch.where} the plate {plate!r} has {rows} rows in dimension {at}, and site {site!r} has {size} "
            f"there. If these {size} belong to each row, write .to_event(1) behind a distribution, or .sum({at}) "
            "behind a cost or factor. If they are rows, make plate and parameters anew, with the same number."
        )
        yield particle_line(sites)
        return
    deep = _TOO_DEEP.search(text)
    if least := deep[1] if deep else among[3].strip("-") if among and declared >= -int(among[3]) else "":
        yield (
            f"Plates are nested more deeply than max_plate_nesting says. Write max_plate_nesting={least}, or leave it "
            "out: then it is found in the first step. Particles need no dimension of their own there."
        )


def site_lines(error: Exception, model: Sites, guide: Sites) -> Iterator[str]:
    """Says what does not fit at the sites that an error of Pyro's about shapes names."""
    text = str(error)
    if not (isinstance(error, ValueError) and _OF_PYRO.search(text)):
        return
    for name in (name for name in dict.fromkeys((*guide, *model)) if f"'{name}'" in text or f'"{name}"' in text):
        site, twin = model.get(name) or guide[name], guide.get(name) or model[name]
        theirs, ours = _listed(site), _listed(twin)
        if site["fn"].event_dim != twin["fn"].event_dim:
            yield unlike_line(site, twin)
        elif line := data_line(site):
            yield line
        elif theirs != ours:
            lacking = [plate for plate in theirs if plate not in ours] or ours
            yield (
                f"Site {name!r} is in the plates {theirs} in the model, and {ours} in the guide (name, dim, size). Put "
                f"it into the same in both: with {' and with '.join(_written(*plate) for plate in lacking)}."
            )
        if theirs == ours:
            yield from filter(None, (loose_line(each, each["fn"].batch_shape) for each in (twin, site)))
    yield particle_line((*model.values(), *guide.values()))


def unlike_line(model: Any, guide: Any) -> str:
    """Says how the values of a site differ between guide and model, and what to write."""
    known, given = distribution_name(model["fn"]), distribution_name(guide["fn"])
    advice = f"Write {known} in the guide, or {given} in the model."
    if known == given:
        advice = "Give both the same number of values and the same .to_event(...), or the same plate in its place."
    return (
        f"Site {model['name']!r} is drawn from {described(guide['fn'])} in the guide, and scored under "
        f"{described(model['fn'])} in the model. {advice}"
    )


def described(fn: Any) -> str:
    """Name and support of a distribution, and the shape of its events."""
    events = f", shape {tuple(fn.event_shape)}" if fn.event_shape else ""
    return f"{distribution_name(fn)} (support {support_of(fn) or 'unknown'}{events})"


def support_of(fn: Any) -> Any:
    """The support of an element of the values of a distribution; ``None`` if it is not known."""
    try:
        found = fn.support
    except (NotImplementedError, AttributeError):
        return None
    return getattr(found, "base_constraint", found)


def loose_line(site: Any, shape: Iterable[int]) -> str:
    """Says which dimension of the batch shape of a site is no plate, and what to write; empty if there is none."""
    shape, declared = tuple(shape), {frame.dim for frame in plates_of(site)}
    loose = [dim for dim in range(-1, -len(shape) - 1, -1) if shape[dim] > 1 and dim not in declared]
    if not loose:
        return ""
    return (
        f"Site {site['name']!r} has the batch shape {shape}, and is in the plates {_listed(site)} (name, dim, size): "
        f"dimension {loose[0]} is no plate. Where its elements belong together, write .to_event(...), or "
        f".sum({loose[0]}) behind a cost or factor; where they are rows, put it into a plate with dim={loose[0]}. "
        "Shapes (n,) and (n, 1) side by side make such a shape too: write squeeze(-1)."
    )


def check_declared(sites: Iterable[Any]) -> None:
    """Raises if a batch dimension of a site is not a plate. Pyro checks this only with validation on."""
    for line in filter(None, (loose_line(site, site["log_prob"].shape) for site in sites)):
        raise PlateError(line)


def data_line(site: Any) -> str:
    """Says how the shape of a site's data differs from that of its distribution, and what to write; else empty."""
    value, fn = site["value"], site["fn"]
    if not site["is_observed"] or not isinstance(value, Tensor) or not hasattr(fn, "event_shape"):
        return ""
    given, drawn = tuple(value.shape), (*fn.batch_shape, *fn.event_shape)
    if given == drawn[len(drawn) - len(given) :]:
        return ""
    return (
        f"The data of site {site['name']!r} has the shape {given}; the distribution has the shape {drawn}. Shapes are "
        "matched from the right. Make both the same, as by data.squeeze(-1) or data.permute(...); where a row has "
        f"several values, give the parameters the shape {given} and write .to_event(...)."
    )


def particle_line(sites: Iterable[Any]) -> str:
    """What to write where shapes do not fit with several particles at once; empty where these have no plate."""
    frame = next((frame for site in sites for frame in plates_of(site) if frame.name == PARTICLES), None)
    if frame is None:
        return ""
    return (
        f"{frame.size} particles ran at once, in dimension {frame.dim} of each site, on the left of all plates. Count "
        "dimensions from the right, as in z[..., 0] and z.sum(-1); or write vectorize_particles=False."
    )


def left_torch(sites: Iterable[str], number: int) -> str:
    """Says that Python asked for one value where each of so many particles has its own, and what to write."""
    return (
        f"A sampled value of {quoted(sorted(sites))} left torch (as by .item(), int(), if, .numpy(), or try), and each "
        f"of {number} particles that ran at once has its own. Write vectorize_particles=False, so that they run one "
        "after the other; or stay in torch, as by torch.where(z > 0, a, b) or table[z.long()]."
    )


def own_plates(site: Any) -> list[Any]:
    """The plates that the program itself declares around a site, from left to right."""
    return sorted((frame for frame in plates_of(site) if frame.name != PARTICLES), key=lambda frame: frame.dim)


def _listed(site: Any) -> list[tuple[str, int, int]]:
    return [(frame.name, frame.dim, frame.size) for frame in own_plates(site)]


def _written(name: str, dim: int, size: int) -> str:
    return f'pyro.plate("{name}", {size}, dim={dim})'
