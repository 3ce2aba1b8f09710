r"""Errors about mistakes in guide and model: they name the site and say what to write."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType
from typing import Any

import pyro
import torch
from pyro.distributions import constraints
from torch import Tensor

from pyro_bpq.errors import BPQError, PlateError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.record.calls import Calls
from pyro_bpq.record.config import cost_options
from pyro_bpq.record.plate_errors import (
    ABOUT_SHAPES,
    data_line,
    described,
    left_torch,
    own_text,
    pairs,
    particle_line,
    quoted,
    row_line,
    site_lines,
    size_lines,
    support_of,
    unlike_line,
)
from pyro_bpq.record.tape import Tape
from pyro_bpq.record.watch import PARTICLES, Watch, distribution_name, samples
from pyro_bpq.rollout.features import finite_components

# What torch, Pyro and Python raise where shapes or names do not fit. Other errors are a program's own, or about memory.
EXPLAINED = (ValueError, RuntimeError, IndexError, TypeError)
_NOT_SHAPES = re.compile("to satisfy the constraint|within the support")
# Words in torch's errors about numbers: a parameter out of its range, or draws from such a distribution.
_NUMBERS = re.compile("to satisfy the constraint|to be true, but got false|probability tensor contains")
_OUT_OF_RANGE = re.compile(
    r"Expected parameter (\w+) .*of distribution (\w+).*to satisfy the constraint (\w+)", re.DOTALL
)
_CONSTRAINTS = MappingProxyType({"GreaterThan": "positive", "Interval": "unit_interval", "Simplex": "simplex"})
# What to do about drawn values that are NaN, on the edge of the support, or outside of it.
_DRAWN = (
    "A parameter of its distribution is NaN: pyro.enable_validation(True) says which.",
    "They were rounded: bound the parameters, take a higher temperature or double precision.",
    "Bound the parameters.",
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
    lines = [unlike_line(*pair) for pair in drawn if _form(pair[0]["fn"]) != _form(pair[1]["fn"])]
    lines = lines or size_lines(text, model, guide)
    lines = lines or [row_line(text, sites, watch.where, len(watch.subsamples.keys() - {PARTICLES}))]
    if found := told(PlateError, error, *lines):
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
        line = _one_value_line(error, watch.options.num_particles, watch.tape)
        return told(UnsupportedProgramError, error, line)
    if asks or (ABOUT_SHAPES.search(text) and not _NOT_SHAPES.search(text)):
        return told(PlateError if isinstance(error, ValueError) else UnsupportedProgramError, error, advice)
    return None


def _form(fn: Any) -> tuple[int, int | None]:
    """The number of event dimensions of a distribution, which those of users may not know, and of categories."""
    split = finite_components(fn)
    number = split.cardinality if split is not None and split.kind in ("categorical", "one_hot") else None
    return getattr(fn, "event_dim", 0), number


def _one_value_line(error: Exception, number: int, tape: Tape) -> str:
    """Says that Python asked for one value where each of so many particles has its own."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is Calls.scalar.__code__]
    found = frames[-1].f_locals["args"][0] if frames else None
    # NumPy or a list may complain after the value has left torch.
    sites = tape.sources_of(found) if isinstance(found, Tensor) else tape.escaped
    # Else it is no sampled value, or one that has several elements in a run of one particle, too.
    is_of_particles = not isinstance(found, Tensor) or found.numel() == number
    return left_torch(sites, number) if sites and is_of_particles else ""


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
        return f'Make a plate once, {name} = pyro.plate("{name}", ...), and write "with {name}:" wherever it is used.'
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
    if site is None:
        return None
    if at and "not broadcastable" in text and (line := data_line(site)):
        return told(PlateError, error, line)
    if not ("within the support" in text if at else type(error) is RuntimeError and not ABOUT_SHAPES.search(text)):
        return None
    is_unlike = twin and not site["is_observed"] and str(support_of(site["fn"])) != str(support_of(twin["fn"]))
    line = unlike_line(site, twin) if is_unlike else value_line(site) if at else ""
    return told(UnsupportedSiteError, error, line)


def number_missing(value: Any) -> int:
    """Number of NaN in data."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0
    return int(value.detach().isnan().sum())


def value_line(site: Any) -> str:
    """Says how many values of a site are NaN, on the edge of the support or outside of it; empty if none are."""
    value, fn = site["value"], site["fn"]
    if not isinstance(value, Tensor) or not hasattr(fn, "event_dim"):
        return ""
    what, advice = "drawn value", _DRAWN
    if site["is_observed"]:
        what = "data"
        advice = (_masked(site), "Give data inside of it, as by clamp().", "Give other data, or another distribution.")
    law = f"the support of its distribution, {described(fn)}"
    places = "that are NaN", f"without a finite log-probability on the edge of {law}", f"outside of {law}"
    for at, place, how in zip((value.isnan(), _on_edge(site), _outside(site)), places, advice, strict=True):
        if number := int(at.sum()):
            return f"The {what} of site {site['name']!r} has {number} of {at.numel()} values {place}. {how}"
    return ""


def _masked(site: Any) -> str:
    """How to leave out data that are NaN."""
    name, fn, base = site["name"], "fn", getattr(site["fn"], "base_dist", None)
    where = "with pyro.poutine.mask(mask=~data.isnan()): "
    if site["fn"].event_dim and base is not None and not base.event_dim:
        # A mask of the elements of an event belongs inside of to_event.
        where, fn = "", f"dist.{distribution_name(base)}(...).mask(~data.isnan()).to_event({site['fn'].event_dim})"
    return f'Leave these out, as by {where}pyro.sample("{name}", {fn}, obs=data.nan_to_num()).'


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
