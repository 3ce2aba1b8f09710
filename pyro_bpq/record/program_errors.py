r"""Errors about mistakes in guide and model: they name the site and say what to write."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pyro
import torch
from pyro.distributions import constraints
from torch import Tensor

from pyro_bpq.errors import BPQError, PlateError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.record.calls import Calls
from pyro_bpq.record.plate_errors import (
    ABOUT_SHAPES,
    asks_for_one_value,
    data_line,
    described,
    left_torch,
    own_text,
    particle_advice,
    plate_lines,
    site_lines,
    statements,
    support_of,
    told,
    unlike_line,
)
from pyro_bpq.record.tape import Tape
from pyro_bpq.record.watch import PARTICLES, Watch, distribution_name, number_of_values

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


def of_run(error: Exception, watch: Watch, inputs: Mapping[int | str, Any]) -> BPQError | None:
    """The error to raise instead of one that came while guide or model ran; ``None`` to leave it."""
    text, model, guide = own_text(error), watch.met["model"], watch.met["guide"]
    declared = len(watch.subsamples.keys() - {PARTICLES})
    # The program goes on with a value of a form that it does not expect, and fails somewhere else.
    pairs = [(site, guide[name]) for name, site in model.items() if name in guide]
    drawn = [
        (own["name"], own["fn"], its["fn"]) for own, its in pairs if not (own["is_observed"] or its["is_observed"])
    ]
    unlike = [unlike_line(name, *laws) for name, *laws in drawn if _form(laws[0]) != _form(laws[1])]
    if lines := unlike or plate_lines(error, model, guide, watch.where, declared):
        return PlateError(told(error, *lines))
    if watch.enumerated and re.search(r"up to \d+ dims|too many \(>", text):
        line = "Each of {} enumerated sites has a dimension of its own: loop with pyro.markov(...)."
        return UnsupportedProgramError(told(error, line.format(len(watch.enumerated))))
    if named := _ONE_NAME.search(text):
        return _name_error(text, named[1] or named[2], watch.costs)
    if type(error) not in EXPLAINED:
        return None
    asks = asks_for_one_value(error)
    if asks and watch.enumerated:
        line = "All values of {} are given at once. Use operations on tensors (torch.where, table[z]), or remove "
        line += 'infer={{"enumerate": ...}}, so that the site is sampled.'
        return UnsupportedProgramError(told(error, line.format(", ".join(map(repr, sorted(watch.enumerated))))))
    if _NUMBERS.search(text):
        line = next(_number_lines(text, watch, inputs), "")
        return UnsupportedSiteError(f"{line}\n{text}") if line else None
    arrays = [key for key, value in inputs.items() if type(value).__module__ == "numpy"]
    if arrays and "numpy" in text.lower():
        line = f"Argument {arrays[0]!r} of the programs is a NumPy array: hand over torch.as_tensor(...) of it."
        return UnsupportedProgramError(told(error, line))
    advice = particle_advice((*model.values(), *guide.values()))
    if not advice:
        return None
    if asks and watch.tape is not None:
        return _one_value_error(error, watch.options.num_particles, watch.tape)
    if asks or (ABOUT_SHAPES.search(text) and not _NOT_SHAPES.search(text)):
        return (PlateError if isinstance(error, ValueError) else UnsupportedProgramError)(told(error, *advice))
    return None


def _form(fn: Any) -> tuple[int, int | None]:
    """The number of event dimensions of a distribution, which those of users may not know, and of categories."""
    return getattr(fn, "event_dim", 0), number_of_values(fn)


def _one_value_error(error: Exception, number: int, tape: Tape) -> BPQError | None:
    """Says that Python asked for one value where each of so many particles has its own."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code is Calls.scalar.__code__:
            found = frame.f_locals["args"][0]
        traceback = traceback.tb_next
    # NumPy or a list may complain after the value has left torch.
    sites = tape.sources_of(found) if isinstance(found, Tensor) else tape.escaped
    # Else it is no sampled value, or one that has several elements in a run of one particle, too.
    is_of_particles = not isinstance(found, Tensor) or found.numel() == number
    return UnsupportedProgramError(told(error, left_torch(sites, number))) if sites and is_of_particles else None


def _number_lines(text: str, watch: Watch, inputs: Mapping[int | str, Any]) -> Iterator[str]:
    """Says which parameters are broken, or where the distribution was made whose parameter is out of range."""
    store = pyro.get_param_store()
    if broken := [name for name in store.keys() if not bool(store[name].isfinite().all())]:
        yield (
            f"The parameters {', '.join(map(repr, broken))} have elements that are not finite. Look for the first "
            "loss that is not finite; take a smaller learning rate, or clip gradients, as by pyro.optim.ClippedAdam."
        )
    for key, value in inputs.items():
        if missing := number_missing(value):
            yield (
                f"Argument {key!r} of the programs has NaN in {missing} of {value.numel()} elements, and the "
                f"{watch.where} computes with them. Leave these out: let the guide read x.nan_to_num(), and observe "
                "under pyro.poutine.mask(mask=~x.isnan())."
            )
    if found := _OUT_OF_RANGE.search(text):
        seen = [*watch.met[watch.where]]
        after = f" after the statement {seen[-1]!r}" if seen else ""
        kind = _CONSTRAINTS.get(found[3])
        known = kind and f" If it is a parameter, write pyro.param(name, value, constraint=dist.constraints.{kind})."
        yield (
            f"The {found[1]} of a {found[2]} that the {watch.where} makes{after} is out of range: look at it there."
            f"{known or ''}"
        )


def _name_error(text: str, name: str, costs: set[str]) -> UnsupportedProgramError | None:
    """Says that two statements have one name. Pyro's error is a ``RuntimeError``, too."""
    if name in costs:
        line = f'The cost {name!r} has the name of another statement: write pyro_bpq.cost("{name}_cost", ...).'
    elif text.startswith("Multiple"):
        line = f'Give each statement a name of its own, in a loop as by pyro.sample(f"{name}_{{t}}", ...).'
    else:
        return None
    return UnsupportedProgramError(f"{text}\n{line}")


def of_scores(error: Exception, model_trace: Any, guide_trace: Any) -> BPQError | None:
    """The same for an error that came while log-probabilities were computed, or shapes were checked."""
    model, guide = statements(model_trace), statements(guide_trace)
    if lines := plate_lines(error, model, guide) or [*site_lines(error, model, guide)]:
        return PlateError(told(error, *lines))
    text, at = own_text(error), _AT_SITE.match(str(error))
    # Torch's errors name no site. The first one without a log-probability is where it failed.
    name = at[1] if at else next((name for name, site in model.items() if "log_prob" not in site), "")
    site, twin = model.get(name) or guide.get(name), guide.get(name)
    if site is None:
        return None
    line = data_line(site) if at and "not broadcastable" in text else ""
    if line:
        return PlateError(told(error, line))
    is_about = "within the support" in text if at else type(error) is RuntimeError and not ABOUT_SHAPES.search(text)
    if is_about and twin and not site["is_observed"] and str(support_of(site["fn"])) != str(support_of(twin["fn"])):
        line = unlike_line(name, site["fn"], twin["fn"])
    elif is_about and at:
        line = value_line(site)
    return UnsupportedSiteError(f"{line}\n{text}") if line else None


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
