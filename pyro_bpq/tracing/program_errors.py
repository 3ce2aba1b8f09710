r"""Errors about mistakes in guide and model: they name the site and say what to write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any

import pyro
from torch import Tensor

from pyro_bpq.errors import BPQError, PlateError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.tracing.plate_errors import (
    asks_for_one_value,
    data_line,
    described,
    left_torch,
    nan_line,
    nesting_error,
    number_missing,
    own_text,
    particle_advice,
    plate_error,
    plate_error_of_traces,
    rows_of,
    statements,
    support,
    support_line,
    told,
    unlike_line,
)
from pyro_bpq.tracing.provenance import DependencyTracker
from pyro_bpq.tracing.watch import HANDED, PARTICLES, Watch, distribution_name, number_of_values

# What torch, Pyro and Python raise where shapes or names do not fit. Other errors are a program's own, or about memory.
_EXPLAINED = (ValueError, RuntimeError, IndexError, TypeError)
# Words in torch's and Python's errors about shapes.
_SHAPES = re.compile(r"size|shape|dim|unpack|indices|\dD\b|out of bounds|out of range|expected, got", re.IGNORECASE)
_NOT_SHAPES = re.compile("to satisfy the constraint|within the support")
# Words in torch's errors about numbers: a parameter out of its range, or draws from such a distribution.
_NUMBERS = re.compile("to satisfy the constraint|to be true, but got false|probability tensor contains")
_OUT_OF_RANGE = re.compile(
    r"Expected parameter (\w+) .*of distribution (\w+).*to satisfy the constraint (\w+)", re.DOTALL
)
_CONSTRAINTS = MappingProxyType({"GreaterThan": "positive", "Interval": "unit_interval", "Simplex": "simplex"})
_AT_SITE = re.compile(r"""^Error while computing \w+ at site '(.*)':""")
_TWICE = re.compile("Multiple sample sites named '(.*)'")
_NOT_SAMPLED = re.compile("site (.*) must be sampled in trace")


def explain_run(error: Exception, watch: Watch, inputs: Mapping[int | str, Any]) -> None:
    """Raises, for an error of a run of guide and model, one that names the site and says what to write, if it can."""
    found = None if isinstance(error, BPQError) else _of_run(error, watch, inputs)
    if found is not None:
        raise found from error


def explain_scores(error: Exception, model_trace: Any, guide_trace: Any) -> None:
    """The same for an error of log-probabilities and shape checks."""
    if isinstance(error, BPQError):
        return
    found = plate_error_of_traces(error, model_trace, guide_trace) or _support_error(
        error, statements(model_trace), statements(guide_trace)
    )
    if found is not None:
        raise found from error


def _of_run(error: Exception, watch: Watch, inputs: Mapping[int | str, Any]) -> BPQError | None:
    """The error to raise instead of one that came while guide or model ran; ``None`` to leave it."""
    text, plates = own_text(error), watch.plates.values()
    unlike = [name for name, law in watch.scored_as.items() if _differ(law, watch.drawn_as.get(name, law))]
    if unlike:
        # The program goes on with a value of a shape that it does not expect, and fails somewhere else.
        lines = [unlike_line(name, watch.scored_as[name], watch.drawn_as[name]) for name in unlike]
        return PlateError(told(error, *lines))
    declared = len(watch.subsamples.keys() - {PARTICLES})
    found = (
        nesting_error(error, plates, declared)
        or _name_error(error, watch.costs)
        or plate_error(error, watch.plates, watch.where)
    )
    # Values that carry gradients make torch refuse what it does otherwise: the caller tries again without.
    if found is not None or watch.options.sloped or type(error) not in _EXPLAINED:
        return found
    if _NUMBERS.search(text):
        return _number_error(text, watch, inputs)
    arrays = [key for key, value in inputs.items() if type(value).__module__ == "numpy"]
    if arrays and "numpy" in text.lower():
        line = f"Argument {arrays[0]!r} of the programs is a NumPy array: hand over torch.as_tensor(...) of it."
        return UnsupportedProgramError(told(error, line))
    if not particle_advice(plates):
        return None
    asks_for_one = asks_for_one_value(error)
    if asks_for_one and watch.enumerated:
        # Enumerated sites have several values too, and an error of their own.
        return None
    if asks_for_one and watch.tracker is not None:
        return _one_value_error(error, watch.options.num_particles, watch.tracker)
    if asks_for_one or (_SHAPES.search(text) and not _NOT_SHAPES.search(text)):
        kind = PlateError if isinstance(error, ValueError) else UnsupportedProgramError
        return kind(told(error, *particle_advice(plates)))
    return None


def _differ(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether the values of two distributions, each given with its plates, have different forms."""
    # Distributions of users may not say how many event dimensions they have.
    forms = [(getattr(fn, "event_dim", 0), number_of_values(fn)) for fn, _ in (one, other)]
    return forms[0] != forms[1]


def _one_value_error(error: Exception, number: int, tracker: DependencyTracker) -> BPQError | None:
    """Says that Python asked for one value where each of so many particles has its own."""
    read, text = _read_tensor(error.__traceback__), own_text(error)
    if read is None:
        # NumPy or a list may complain later, after the value has left torch.
        gone = tracker.escaped - {HANDED}
        return UnsupportedProgramError(left_torch(gone, number, text)) if gone else None
    sites = tracker.sources_of(read) - {HANDED}
    # Else it is no sampled value, or one that has several elements in a run of one particle, too.
    return UnsupportedProgramError(left_torch(sites, number, text)) if sites and read.numel() == number else None


def _number_error(text: str, watch: Watch, inputs: Mapping[int | str, Any]) -> UnsupportedSiteError | None:
    """Says which parameters are broken, or where the distribution was made whose parameter is out of range."""
    store = pyro.get_param_store()
    broken = [name for name in store.keys() if not bool(store[name].isfinite().all())]
    if broken:
        names = ", ".join(map(repr, broken))
        line = (
            f"The parameters {names} have elements that are not finite: an earlier step has broken them, or they were "
            "made so. Look for the first loss that is not finite; take a smaller learning rate, or "
            "clip gradients, as by pyro.optim.ClippedAdam."
        )
        return UnsupportedSiteError(f"{line}\n{text}")
    for key, value in inputs.items():
        if number_missing(value):
            line = (
                f"Argument {key!r} of the programs has NaN in {number_missing(value)} of {value.numel()} elements, and "
                f"the {watch.where} computes with them. Leave these out: let the guide read x.nan_to_num(), and "
                "observe under pyro.poutine.mask(mask=~x.isnan())."
            )
            return UnsupportedSiteError(f"{line}\n{text}")
    found = _OUT_OF_RANGE.search(text)
    if found is None:
        return None
    seen = [*(watch.scored_as if watch.is_past_guide else watch.plates)]
    after = f" after the statement {seen[-1]!r}" if seen else ""
    constraint = _CONSTRAINTS.get(found[3], "")
    advice = (
        f" If it is a parameter, write pyro.param(name, value, constraint=dist.constraints.{constraint})."
        if constraint
        else ""
    )
    line = (
        f"The {found[1]} of a {found[2]} that the {watch.where} makes{after} is out of range: look at it there.{advice}"
    )
    return UnsupportedSiteError(f"{line}\n{text}")


def _read_tensor(traceback: TracebackType | None) -> Tensor | None:
    """The tensor that Python has tried to read, taken from the tracker's frame in the traceback."""
    found = None
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "scalar" and frame.f_globals.get("__name__") == DependencyTracker.__module__:
            found = frame.f_locals["args"][0]
        traceback = traceback.tb_next
    return found if isinstance(found, Tensor) else None


def _name_error(error: Exception, costs: set[str]) -> UnsupportedProgramError | None:
    """Says that a cost has the name of a site. Pyro's error is a ``RuntimeError``, too."""
    text = own_text(error)
    twice, other = _TWICE.search(text), _NOT_SAMPLED.search(text)
    name = twice[1] if twice else other[1] if other else ""
    if twice and name not in costs:
        return UnsupportedProgramError(
            f'{text}\nGive each statement a name of its own, in a loop as by pyro.sample(f"{name}_{{t}}", ...).'
        )
    if name not in costs:
        return None
    both = "The cost {0!r} and another statement {0!r} of the same program have"
    if other:
        both = "The cost {0!r} of the guide and the site {0!r} of the model have"
    return UnsupportedProgramError(
        f"{text}\n{both.format(name)} one name, which costs and sample sites must not share; write "
        f'pyro_bpq.cost("{name}_cost", ...).'
    )


def _support_error(error: Exception, model: Mapping[str, Any], guide: Mapping[str, Any]) -> BPQError | None:
    """Says of a site without a log-probability which data or which distributions are at fault."""
    text, at = own_text(error), _AT_SITE.match(str(error))
    if at is None:
        # Torch's errors name no site. The first one without a log-probability is where it failed.
        name = next((name for name, site in model.items() if "log_prob" not in site), "")
        if type(error) is not RuntimeError or name not in guide or _SHAPES.search(text):
            return None
        if support(model[name]["fn"]) == support(guide[name]["fn"]):
            return None
    else:
        name = at[1]
    if name in model and name in guide and not model[name]["is_observed"]:
        # What the guide has drawn is scored there without an error: the model's support lacks it.
        if at is not None and ("within the support" not in text or "log_prob at" not in text):
            return None
        return _mismatch(text, model[name], guide[name])
    site = model.get(name) or guide.get(name)
    if site is not None and "not broadcastable" in text and (line := data_line(site, rows_of(site))):
        return PlateError(told(error, line))
    if site is None or not site["is_observed"] or "within the support" not in text:
        return None
    line = nan_line(site) if number_missing(site["value"]) else support_line(site)
    return UnsupportedSiteError(f"{line}\n{text}") if line else None


def _mismatch(text: str, model: Any, guide: Any) -> UnsupportedSiteError:
    name, ours, theirs = model["name"], described(guide["fn"]), described(model["fn"])
    return UnsupportedSiteError(
        f"{text}\nSite {name!r} is drawn from {ours} in the guide, and scored under {theirs} in the model, which "
        f"cannot score that value. Give it the same support in both: write {distribution_name(model['fn'])}, or a "
        "distribution with its support, in the guide."
    )
