r"""Errors and warnings about mistakes in guide and model: they name the site and say what to write."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any

import pyro
from pyro.distributions import constraints
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_bpq.errors import BPQError, BPQWarning, PlateError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.record.calls import Calls
from pyro_bpq.record.tape import Tape
from pyro_bpq.tracing.config import cost_options, option_names
from pyro_bpq.tracing.guide_warnings import guide_warnings
from pyro_bpq.tracing.plate_errors import (
    asks_for_one_value,
    data_line,
    left_torch,
    nesting_error,
    own_plates,
    own_text,
    particle_advice,
    plate_error,
    plate_error_of_traces,
    plates_of,
    rows_of,
    sizes_line,
    statements,
    told,
    unlike_line,
)
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import (
    PARTICLES,
    Watch,
    distribution_name,
    is_enumerated,
    number_of_values,
)

# What torch, Pyro and Python raise where shapes or names do not fit. Other errors are a program's own, or about memory.
EXPLAINED = (ValueError, RuntimeError, IndexError, TypeError)
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
    sizes = [sizes_line(name, law[1], watch.drawn_as.get(name, law)[1]) for name, law in watch.scored_as.items()]
    if any(sizes) and _SHAPES.search(text):
        return PlateError(told(error, *dict.fromkeys(filter(None, sizes))))
    if watch.enumerated and re.search(r"up to \d+ dims|too many \(>", text):
        line = (
            f"Each of {len(watch.enumerated)} enumerated sites has a dimension of its own: loop with pyro.markov(...)."
        )
        return UnsupportedProgramError(told(error, line))
    declared = len(watch.subsamples.keys() - {PARTICLES})
    found = (
        nesting_error(error, plates, declared)
        or _name_error(error, watch.costs)
        or plate_error(error, watch.plates, watch.where)
    )
    if found is not None or type(error) not in EXPLAINED:
        return found
    if watch.enumerated and asks_for_one_value(error):
        line = "All values of {} are given at once. Use operations on tensors (torch.where, table[z]), or remove "
        line += 'infer={{"enumerate": ...}}, so that the site is sampled.'
        return UnsupportedProgramError(told(error, line.format(", ".join(map(repr, sorted(watch.enumerated))))))
    if _NUMBERS.search(text):
        return _number_error(text, watch, inputs)
    arrays = [key for key, value in inputs.items() if type(value).__module__ == "numpy"]
    if arrays and "numpy" in text.lower():
        line = f"Argument {arrays[0]!r} of the programs is a NumPy array: hand over torch.as_tensor(...) of it."
        return UnsupportedProgramError(told(error, line))
    if not particle_advice(plates):
        return None
    asks_for_one = asks_for_one_value(error)
    if asks_for_one and watch.tape is not None:
        return _one_value_error(error, watch.options.num_particles, watch.tape)
    if asks_for_one or (_SHAPES.search(text) and not _NOT_SHAPES.search(text)):
        kind = PlateError if isinstance(error, ValueError) else UnsupportedProgramError
        return kind(told(error, *particle_advice(plates)))
    return None


def _differ(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether the values of two distributions, each given with its plates, have different forms."""
    # Distributions of users may not say how many event dimensions they have.
    forms = [(getattr(fn, "event_dim", 0), number_of_values(fn)) for fn, _ in (one, other)]
    return forms[0] != forms[1]


def _one_value_error(error: Exception, number: int, tape: Tape) -> BPQError | None:
    """Says that Python asked for one value where each of so many particles has its own."""
    read, text = _read_tensor(error.__traceback__), own_text(error)
    if read is None:
        # NumPy or a list may complain later, after the value has left torch.
        gone = tape.escaped
        return UnsupportedProgramError(left_torch(gone, number, text)) if gone else None
    sites = tape.sources_of(read)
    # Else it is no sampled value, or one that has several elements in a run of one particle, too.
    return UnsupportedProgramError(left_torch(sites, number, text)) if sites and read.numel() == number else None


def _number_error(text: str, watch: Watch, inputs: Mapping[int | str, Any]) -> UnsupportedSiteError | None:
    """Says which parameters are broken, or where the distribution was made whose parameter is out of range."""
    store = pyro.get_param_store()
    broken = [name for name in store.keys() if not bool(store[name].isfinite().all())]
    missing = next((key for key, value in inputs.items() if number_missing(value)), None)
    found = _OUT_OF_RANGE.search(text)
    if broken:
        line = (
            f"The parameters {', '.join(map(repr, broken))} have elements that are not finite: an earlier step has "
            "broken them, or they were made so. Look for the first loss that is not finite; take a smaller learning "
            "rate, or clip gradients, as by pyro.optim.ClippedAdam."
        )
    elif missing is not None:
        value = inputs[missing]
        line = (
            f"Argument {missing!r} of the programs has NaN in {number_missing(value)} of {value.numel()} elements, and "
            f"the {watch.where} computes with them. Leave these out: let the guide read x.nan_to_num(), and "
            "observe under pyro.poutine.mask(mask=~x.isnan())."
        )
    elif found is not None:
        seen = [*(watch.scored_as if watch.where == "model" else watch.plates)]
        after = f" after the statement {seen[-1]!r}" if seen else ""
        line = f"The {found[1]} of a {found[2]} that the {watch.where} makes{after} is out of range: look at it there."
        if found[3] in _CONSTRAINTS:
            constraint = f"dist.constraints.{_CONSTRAINTS[found[3]]}"
            line += f" If it is a parameter, write pyro.param(name, value, constraint={constraint})."
    else:
        return None
    return UnsupportedSiteError(f"{line}\n{text}")


def _read_tensor(traceback: TracebackType | None) -> Tensor | None:
    """The tensor that Python has tried to read, taken from the tracker's frame in the traceback."""
    found = None
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "scalar" and frame.f_globals.get("__name__") == Calls.__module__:
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
    if site is None or "within the support" not in text:
        return None
    line = edge_line(site)
    if not line and site["is_observed"]:
        line = nan_line(site) if number_missing(site["value"]) else support_line(site)
    return UnsupportedSiteError(f"{line}\n{text}") if line else None


def _mismatch(text: str, model: Any, guide: Any) -> UnsupportedSiteError:
    name, ours, theirs = model["name"], described(guide["fn"]), described(model["fn"])
    if support(model["fn"]) == support(guide["fn"]):
        outside = f"The drawn value of site {name!r} is outside of its support, {theirs}: bound the parameters."
        return UnsupportedSiteError(f"{edge_line(model) or outside}\n{text}")
    return UnsupportedSiteError(
        f"{text}\nSite {name!r} is drawn from {ours} in the guide, and scored under {theirs} in the model, which "
        f"cannot score that value. Give it the same support in both: write {distribution_name(model['fn'])}, or a "
        "distribution with its support, in the guide."
    )


def warn_of_program(
    traced: TracedRun, model_sites: Mapping[str, Any], guide_sites: Mapping[str, Any], is_first: bool
) -> None:
    """Warns of probable mistakes in programs that run. It reads values, so call it for recorded runs only."""
    # Replay gives sites of the model what the guide says of them.
    for text in dict.fromkeys(_warnings(traced, model_sites, guide_sites, is_first)):
        warnings.warn(text, BPQWarning, stacklevel=3)


def _warnings(
    traced: TracedRun, model_sites: Mapping[str, Any], guide_sites: Mapping[str, Any], is_first: bool
) -> Iterator[str]:
    everything = [*guide_sites.values(), *model_sites.values()]
    if is_first:
        for warn in (_repeated, _misspelt):
            for site in everything:
                yield from warn(site)
        yield from guide_warnings(traced, model_sites, guide_sites)
    if is_first and is_validation_enabled():
        for name, site in guide_sites.items():
            yield from _unlike(site, model_sites.get(name, site))
        yield from _other_plates(model_sites, guide_sites)
        if not traced.enumerated:
            yield from _marked(guide_sites.values())
    if not bool(traced.run.loss.isfinite().all()):
        yield from [*_of_nan(everything)] or _of_infinity(everything)


def _of_nan(sites: list[Any]) -> Iterator[str]:
    """Explains a loss that is NaN: by data that are NaN, else by the first log-probability that is."""
    data = [site for site in sites if site["is_observed"] and cost_options(site) is None]
    missing = [site for site in data if number_missing(site["value"])]
    yield from map(nan_line, missing)
    site = next((site for site in sites if number_missing(site.get("log_prob"))), None)
    if site is None or missing:
        return
    density, fn = site["log_prob"], site["fn"]
    count = f"is NaN at {number_missing(density)} of {density.numel()} elements"
    if cost_options(site) is not None or hasattr(fn, "log_factor"):
        yield (
            f"The {_scored(site)} {count}. Look at how it is computed: 0 / 0, a logarithm of a negative number, or "
            "infinity minus infinity."
        )
        return
    checked = "" if is_validation_enabled() else " pyro.enable_validation(True) says which."
    if number_missing(site["value"]):
        yield (
            f"The drawn value of site {site['name']!r} is NaN, and so is its log-probability. Look for a parameter of "
            f"its distribution, {distribution_name(fn)}, that is NaN.{checked}"
        )
    else:
        yield edge_line(site) or (
            f"The {_scored(site)} {count}: a parameter of its distribution, {distribution_name(fn)}, is NaN or outside "
            f"of its range.{checked}"
        )


def _of_infinity(sites: list[Any]) -> Iterator[str]:
    """Explains an infinite loss by the first log-probability, factor or cost that is infinite."""
    for site in sites:
        density = site.get("log_prob")
        if isinstance(density, Tensor) and bool(density.isinf().any()):
            yield edge_line(site) or (
                f"The {_scored(site)} is infinite at {int(density.isinf().sum())} of {density.numel()} "
                "elements, so that this step has no finite gradient. Write a large finite cost in place of an infinite "
                "one, or draw only values that are possible."
            )
            return


def _scored(site: Any) -> str:
    """What a site adds to the loss, in words."""
    if cost_options(site) is not None:
        return f"cost {site['name']!r}"
    return f"{'factor' if hasattr(site['fn'], 'log_factor') else 'log-probability'} of site {site['name']!r}"


def _misspelt(site: Any) -> Iterator[str]:
    """Warns if a key of ``infer`` looks like a misspelt ``"bpq"``, or like an option that belongs into it."""
    for key in site["infer"]:
        if isinstance(key, str) and key != "bpq" and sorted(key.lower()) == sorted("bpq"):
            yield f'Site {site["name"]!r} has infer={{{key!r}: ...}}, which nothing reads: write infer={{"bpq": ...}}.'
        elif key in option_names():
            yield (
                f"Site {site['name']!r} has infer={{{key!r}: ...}}, which nothing reads: write "
                f'infer={{"bpq": {{{key!r}: ...}}}}.'
            )


def _repeated(site: Any) -> Iterator[str]:
    """Warns if a cost or ``pyro.factor`` in a plate is a single number, which counts once per row."""
    options, own = cost_options(site), _rows_around(site)
    factor = getattr(site["fn"], "log_factor", None)
    if options is not None and own:
        shape = options.shape
        if options.size and not any(-f.dim <= len(shape) and shape[f.dim] > 1 for f in own):
            yield _counted(site["name"], own, "cost", "pyro_bpq.cost")
    elif own and isinstance(factor, Tensor):
        # Plates expand a single number: without a stride it is still one.
        if not any(-f.dim <= factor.dim() and factor.shape[f.dim] > 1 and factor.stride(f.dim) for f in own):
            yield _counted(site["name"], own, "factor", "pyro.factor")


def _rows_around(site: Any) -> list[Any]:
    return [frame for frame in own_plates(plates_of(site)) if frame.size > 1]


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


def _other_plates(model: Mapping[str, Any], guide: Mapping[str, Any]) -> Iterator[str]:
    """Warns if a plate has another name, or another size, in the guide than in the model."""
    known = {frame.name for site in model.values() for frame in site["cond_indep_stack"]}
    for name in (name for name in guide if name in model):
        if line := sizes_line(name, plates_of(model[name]), plates_of(guide[name])):
            yield f"{line} Now the model runs the rows of the guide, whose costs it scales."
            return
        there = {frame.dim: frame for frame in _rows_around(model[name])}
        for frame in _rows_around(guide[name]):
            other = there.get(frame.dim)
            if other is not None and other.size == frame.size and other.name != frame.name and frame.name not in known:
                yield (
                    f"The plate of site {name!r} is {frame.name!r} in the guide, and {other.name!r} in the model. So "
                    f"each row gets the costs of all rows, which is noisy. Write {other.name!r} in the guide."
                )
                return


def _unlike(guide: Any, model: Any) -> Iterator[str]:
    """Warns if a site is discrete in the guide and continuous in the model."""
    is_compared = not (guide["is_observed"] or model["is_observed"] or type(model["fn"]).__name__ == "Delta")
    if is_compared and is_discrete(guide["fn"]) is True and is_discrete(model["fn"]) is False:
        yield (
            f"Site {guide['name']!r} is drawn from {described(guide['fn'])} in the guide, and has a density in the "
            f"model, {described(model['fn'])}: probabilities and densities cannot be compared, and the ELBO means "
            "nothing. Give it the same support in both."
        )


def _marked(sites: Iterable[Any]) -> Iterator[str]:
    """Warns if sites are marked for enumeration but sampled."""
    marked = [site for site in sites if site["infer"].get("enumerate") and not site["is_observed"]]
    names = [site["name"] for site in marked if not is_enumerated(site)]
    if names:
        yield (
            f'The sites {names} are marked with infer={{"enumerate": ...}}, which counts with enumeration="exact" '
            'only. Write TraceBackpropQ_ELBO(enumeration="exact") (not TraceEnum_ELBO) to sum them out, or remove the '
            "mark."
        )


def described(fn: Any) -> str:
    """Name and support of a distribution."""
    return f"{distribution_name(fn)} (support {support(fn)})"


def support(fn: Any) -> str:
    """The support of a distribution in words, without the dimensions of events."""
    found = _support_of(fn)
    return "unknown" if found is None else str(found)


def _support_of(fn: Any) -> Any:
    """The support of an element of the values of a distribution; ``None`` if it is not known."""
    try:
        found = fn.support
    except (NotImplementedError, AttributeError):
        return None
    return getattr(found, "base_constraint", found)


def is_discrete(fn: Any) -> bool | None:
    """Whether a support is discrete; ``None`` if it is not known."""
    found = _support_of(fn)
    return None if found is None else bool(found.is_discrete)


def number_missing(value: Any) -> int:
    """Number of NaN in data."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0
    return int(value.detach().isnan().sum())


def nan_line(site: Any) -> str:
    """Says how many elements of a site's data are NaN, and how to leave them out."""
    name, value, events = site["name"], site["value"], site["fn"].event_dim
    base = getattr(site["fn"], "base_dist", None)
    how = f'with pyro.poutine.mask(mask=~data.isnan()): pyro.sample("{name}", fn, obs=data.nan_to_num())'
    if events and base is not None and not base.event_dim:
        # A mask of the elements of an event belongs inside of to_event.
        fn = f"dist.{distribution_name(base)}(...).mask(~data.isnan()).to_event({events})"
        how = f'pyro.sample("{name}", {fn}, obs=data.nan_to_num())'
    count = f"{number_missing(value)} of {value.numel()}"
    return f"The observed data of site {name!r} has NaN in {count} elements. Leave these out, as by {how}."


def edge_line(site: Any) -> str:
    """Says that values without a finite log-probability lie on the edge of the support; empty if none do."""
    value, density, space = site["value"], site.get("log_prob"), _support_of(site["fn"])
    if space is None or space.is_discrete or not isinstance(value, Tensor):
        return ""
    is_simplex, at = isinstance(space, type(constraints.simplex)), value.isinf()
    for limit in (0.0, 1.0) if is_simplex else (getattr(space, f"{end}_bound", None) for end in ("lower", "upper")):
        if limit is not None:
            at = at | (value == limit)
    if density is not None:
        at = at & ~density.isfinite()[(..., *(None,) * site["fn"].event_dim)]
    if not bool(at.any()):
        return ""
    kind, advice = "drawn", "It was rounded: bound the parameters, take a higher temperature or double precision."
    if site["is_observed"]:
        kind, advice = "observed", "Give data inside of it, as by clamp()."
    return (
        f"The {kind} value of site {site['name']!r} is on the edge of its support at {int(at.sum())} of {at.numel()} "
        f"elements: its distribution, {described(site['fn'])}, has no finite log-probability there. {advice}"
    )


def support_line(site: Any) -> str:
    """Says how many values of a site's data lie outside of the support; empty if that is not known."""
    value, fn = site["value"], site["fn"]
    try:
        inside = fn.support.check(value)
    except (NotImplementedError, AttributeError, RuntimeError):
        return ""
    number, first = int((~inside).sum()), value[~inside].flatten()[:1].tolist() if inside.dim() == value.dim() else []
    shown = f", {first[0]} among them" if first else ""
    return (
        f"The data of site {site['name']!r} has {number} of {inside.numel()} values outside of the support of its "
        f"distribution, {described(fn)}{shown}. Give other data, or a distribution with their support."
    )
