r"""Errors and warnings about mistakes in guide and model: they name the site and say what to write."""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_bpq.errors import BPQError, BPQWarning, PlateError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.tracing.cost_statement import cost_options
from pyro_bpq.tracing.plate_errors import (
    nesting_error,
    particle_advice,
    plate_error,
    plate_error_of_traces,
    statements,
    unlike_line,
)
from pyro_bpq.tracing.provenance import DependencyTracker
from pyro_bpq.tracing.watch import HANDED, PARTICLES, Watch, distribution_name, is_enumerated

__all__ = ["explain_runs", "explain_scores", "warn_of_program"]

# What torch, Pyro and Python raise where shapes or names do not fit. Other errors are a program's own, or about memory.
_EXPLAINED = (ValueError, RuntimeError, IndexError, TypeError)
# Parts of the errors that torch raises when Python asks a tensor with several elements for one value.
_ONE_VALUE_ONLY = re.compile("is ambiguous|converted to (a )?(Python )?scalar|converted to an index", re.IGNORECASE)
# Words in torch's and Python's errors about shapes.
_SHAPES = re.compile(r"size|shape|dim|unpack|indices|\dD\b|out of bounds|out of range|expected, got", re.IGNORECASE)
_NOT_SHAPES = re.compile("to satisfy the constraint|within the support")
_AT_SITE = re.compile(r"""^Error while computing \w+ at site '(.*)':""")
_TWICE = re.compile("Multiple sample sites named '(.*)'")
_NOT_SAMPLED = re.compile("site (.*) must be sampled in trace")


@contextlib.contextmanager
def explain_runs(watch: Watch, tracker: DependencyTracker | None) -> Iterator[None]:
    """Raises errors of a run of guide and model again, with the name of the site and what to write.

    Args:
        watch: Watches the run.
        tracker: Its tracker, or ``None``.
    """
    try:
        yield
    except BPQError:
        raise
    except _EXPLAINED as error:
        found = _of_run(error, watch, tracker)
        if found is None:
            raise
        raise found from error


@contextlib.contextmanager
def explain_scores(model_trace: Any, guide_trace: Any) -> Iterator[None]:
    """Raises errors of log-probabilities and shape checks again, with what guide and model have at the site.

    Args:
        model_trace: The model's trace; an empty one if there is no model.
        guide_trace: The guide's trace.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        found: BPQError | None = plate_error_of_traces(error, model_trace, guide_trace)
        found = found or _support_error(error, statements(model_trace), statements(guide_trace))
        if found is None:
            raise
        raise found from error


def _of_run(error: Exception, watch: Watch, tracker: DependencyTracker | None) -> BPQError | None:
    """The error to raise instead of one that came while guide or model ran; ``None`` to leave it."""
    text, plates = _own_text(error), watch.plates.values()
    unlike = watch.unlike()
    if unlike:
        # The program goes on with a value of a shape that it does not expect, and fails somewhere else.
        lines = [unlike_line(name, watch.scored_as[name], watch.drawn_as[name]) for name in unlike]
        return PlateError("\n".join([str(error), *lines]))
    found = nesting_error(error, plates) or _name_error(error, watch.costs) or plate_error(error, watch.plates)
    # Values that carry gradients make torch refuse what it does otherwise: the caller tries again without.
    if found is not None or watch.sloped or type(error) not in _EXPLAINED or not particle_advice(plates):
        return found
    asks_for_one = _ONE_VALUE_ONLY.search(text) is not None
    if asks_for_one and watch.enumerated:
        # Enumerated sites have several values too, and an error of their own.
        return None
    if asks_for_one and tracker is not None:
        return _one_value_error(error, watch.particles, tracker)
    if asks_for_one or (_SHAPES.search(text) and not _NOT_SHAPES.search(text)):
        kind = PlateError if isinstance(error, ValueError) else UnsupportedProgramError
        return kind("\n".join([str(error), *particle_advice(plates)]))
    return None


def _own_text(error: Exception) -> str:
    """The text of an error without the shapes that Pyro appends."""
    return str(error).split("\nTrace Shapes:")[0]


def _one_value_error(error: Exception, number: int, tracker: DependencyTracker) -> BPQError | None:
    """Says that Python asked for one value where each of so many particles has its own."""
    read = _read_tensor(error.__traceback__)
    sites = frozenset[str]() if read is None else tracker.sources_of(read) - {HANDED}
    if read is None or not sites or read.numel() != number:
        # Not a sampled value, or one that has several elements in a run of one particle, too.
        return None
    names = ", ".join(map(repr, sorted(sites)))
    return UnsupportedProgramError(
        f"A sampled value of {names} left torch (as by .item(), int(), if, .numpy()) while {number} particles ran at "
        f"once, and each particle has a value of its own: {_own_text(error)}. Write vectorize_particles=False, so that "
        "they run one after the other; or stay in torch, as by torch.where(z > 0, a, b) or table[z.long()]."
    )


def _read_tensor(traceback: TracebackType | None) -> Tensor | None:
    """The tensor that Python has tried to read: the tracker's own function that sees such reads is on the way."""
    found = None
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "scalar" and frame.f_globals.get("__name__") == DependencyTracker.__module__:
            found = frame.f_locals["args"][0]
        traceback = traceback.tb_next
    return found if isinstance(found, Tensor) else None


def _name_error(error: Exception, costs: set[str]) -> UnsupportedProgramError | None:
    """Says that a cost has the name of a site. Pyro's error is a ``RuntimeError``, too."""
    text = _own_text(error)
    twice, other = _TWICE.search(text), _NOT_SAMPLED.search(text)
    name = twice[1] if twice else other[1] if other else ""
    if name not in costs:
        return None
    both = "The cost {0!r} and another statement {0!r} of the same program have"
    if other:
        both = "The cost {0!r} of the guide and the site {0!r} of the model have"
    return UnsupportedProgramError(
        f"{text}\n{both.format(name)} one name, which costs and sample sites must not share; write "
        f'pyro_bpq.cost("{name}_cost", ...).'
    )


def _support_error(error: Exception, model: Mapping[str, Any], guide: Mapping[str, Any]) -> UnsupportedSiteError | None:
    """Says of a site without a log-probability which data or which distributions are at fault."""
    text, at = _own_text(error), _AT_SITE.match(str(error))
    if at is None:
        # Torch's errors name no site. The first one without a log-probability is where it failed.
        name = next((name for name, site in model.items() if "log_prob" not in site), "")
        if type(error) is not RuntimeError or name not in guide or _SHAPES.search(text):
            return None
        if _support(model[name]["fn"]) == _support(guide[name]["fn"]):
            return None
    else:
        name = at[1]
    if name in model and name in guide and not model[name]["is_observed"]:
        # What the guide has drawn is scored there without an error: the model's support lacks it.
        if at is not None and ("within the support" not in text or "log_prob at" not in text):
            return None
        return _mismatch(text, model[name], guide[name])
    site = model.get(name) or guide.get(name)
    if site is None or not site["is_observed"] or "within the support" not in text:
        return None
    found = _missing(site["value"])
    return None if found is None else UnsupportedSiteError(f"{_nan_line(site, *found)}\n{text}")


def _mismatch(text: str, model: Any, guide: Any) -> UnsupportedSiteError:
    name, ours, theirs = model["name"], _described(guide["fn"]), _described(model["fn"])
    return UnsupportedSiteError(
        f"{text}\nSite {name!r} is drawn from {ours} in the guide, and scored under {theirs} in the model, which "
        f"cannot score that value. Give it the same support in both: write {distribution_name(model['fn'])}, or a "
        "distribution with its support, in the guide."
    )


def _described(fn: Any) -> str:
    return f"{distribution_name(fn)} (support {_support(fn)})"


def _support(fn: Any) -> str:
    """The support of a distribution in words, without the dimensions of events."""
    try:
        found = fn.support
    except (NotImplementedError, AttributeError):
        return "unknown"
    return str(getattr(found, "base_constraint", found))


def _is_discrete(fn: Any) -> bool | None:
    """Whether a support is discrete; ``None`` if it is not known."""
    try:
        found = fn.support.is_discrete
    except (NotImplementedError, AttributeError):
        return None
    return bool(found)


def _missing(value: Any) -> tuple[int, int] | None:
    """Number of NaN and of elements in data; ``None`` if nothing is missing."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return None
    number = int(value.detach().isnan().sum())
    return (number, value.numel()) if number else None


def _nan_line(site: Any, number: int, total: int) -> str:
    name, events = site["name"], site["fn"].event_dim
    base = getattr(site["fn"], "base_dist", None)
    how = f'with pyro.poutine.mask(mask=~data.isnan()): pyro.sample("{name}", fn, obs=data.nan_to_num())'
    if events and base is not None and not base.event_dim:
        # A mask of the elements of an event belongs inside of to_event.
        fn = f"dist.{distribution_name(base)}(...).mask(~data.isnan()).to_event({events})"
        how = f'pyro.sample("{name}", {fn}, obs=data.nan_to_num())'
    return f"The observed data of site {name!r} has NaN in {number} of {total} elements. Leave these out, as by {how}."


def warn_of_program(
    model_sites: Mapping[str, Any], guide_sites: Mapping[str, Any], loss: Tensor, is_first: bool, is_enumerating: bool
) -> None:
    """Warns of what runs, but is hardly meant. Only for tracked runs: it reads values.

    Args:
        model_sites: Sample sites of the model.
        guide_sites: Sample sites of the guide.
        loss: Loss of the run.
        is_first: Whether no step was taken before. What lies in the programs, and not in their data, is told only then.
        is_enumerating: Whether marked sites are summed out.
    """
    everything, texts = [*guide_sites.values(), *model_sites.values()], []
    if is_first:
        texts += [_repeated(site) for site in everything if cost_options(site) is not None]
    if is_first and is_validation_enabled():
        texts += [_repeated_factor(site) for site in everything]
        texts += [_unlike(site, model_sites.get(name)) for name, site in guide_sites.items()]
        texts.append(_other_names(model_sites, guide_sites))
        texts.append("" if is_enumerating else _marked([s["name"] for s in guide_sites.values() if _is_marked(s)]))
    if bool(loss.isnan()):
        data = [(s, _missing(s["value"])) for s in everything if s["is_observed"] and cost_options(s) is None]
        texts += [_nan_line(site, *found) for site, found in data if found is not None]
    for text in texts:
        if text:
            warnings.warn(text, BPQWarning, stacklevel=3)


def _repeated(site: Any) -> str:
    """Of a cost without rows of its own in a plate of rows."""
    options, own = cost_options(site), _rows_around(site)
    if options is None or not options.size or not own:
        return ""
    shape = options.shape
    if any(-frame.dim <= len(shape) and shape[frame.dim] > 1 for frame in own):
        return ""
    return _counted(site["name"], own, "cost", "pyro_bpq.cost")


def _repeated_factor(site: Any) -> str:
    """Of a ``pyro.factor`` without rows of its own in a plate of rows."""
    own, factor = _rows_around(site), getattr(site["fn"], "log_factor", None)
    if cost_options(site) is not None or not own or not isinstance(factor, Tensor):
        return ""
    # Plates expand a single number.
    if any(-frame.dim <= factor.dim() and factor.shape[frame.dim] > 1 and factor.stride(frame.dim) for frame in own):
        return ""
    return _counted(site["name"], own, "factor", "pyro.factor")


def _rows_around(site: Any) -> list[Any]:
    frames = [frame for frame in site["cond_indep_stack"] if frame.vectorized and frame.size > 1]
    return [frame for frame in frames if frame.name != PARTICLES]


def _counted(name: str, own: list[Any], kind: str, function: str) -> str:
    number, names = math.prod(frame.size for frame in own), [frame.name for frame in own]
    rows = [1] * max(-frame.dim for frame in own)
    for frame in own:
        rows[frame.dim] = frame.size
    return (
        f"The {kind} {name!r} is a single number in the plate {', '.join(map(repr, names))}, and is counted once per "
        f"row, {number} times. To count it once, write {function}({name!r}, ...) outside of the plate; if each row "
        f"is meant to cost that much, say so: value + torch.zeros({', '.join(map(str, rows))})."
    )


def _other_names(model: Mapping[str, Any], guide: Mapping[str, Any]) -> str:
    """Of plates that guide and model call by different names: their rows are not known to be the same."""
    known = {frame.name for site in model.values() for frame in site["cond_indep_stack"]}
    for name, site in guide.items():
        if name not in model:
            continue
        there = {frame.dim: frame for frame in _rows_around(model[name])}
        for frame in _rows_around(site):
            other = there.get(frame.dim)
            if other is not None and other.size == frame.size and other.name != frame.name and frame.name not in known:
                return (
                    f"The plate of site {name!r} is {frame.name!r} in the guide, and {other.name!r} in the model. So "
                    f"each row gets the costs of all rows, which is noisy. Write {other.name!r} in the guide."
                )
    return ""


def _unlike(guide: Any, model: Any) -> str:
    """Of a discrete site of the guide that the model has with a density."""
    if model is None or guide["is_observed"] or model["is_observed"] or type(model["fn"]).__name__ == "Delta":
        return ""
    if _is_discrete(guide["fn"]) is not True or _is_discrete(model["fn"]) is not False:
        return ""
    return (
        f"Site {guide['name']!r} is drawn from {_described(guide['fn'])} in the guide, and has a density in the model, "
        f"{_described(model['fn'])}: probabilities and densities cannot be compared, and the ELBO means nothing. Give "
        "it the same support in both."
    )


def _is_marked(site: Any) -> bool:
    return bool(site["infer"].get("enumerate")) and not site["is_observed"] and not is_enumerated(site)


def _marked(names: list[str]) -> str:
    """Of sites that are marked, and sampled nevertheless."""
    if not names:
        return ""
    return (
        f'The sites {names} are marked with infer={{"enumerate": ...}}, and are sampled. To sum them out exactly write '
        'TraceBackpropQ_ELBO(enumeration="exact") (not TraceEnum_ELBO); to sample them, remove the mark.'
    )
