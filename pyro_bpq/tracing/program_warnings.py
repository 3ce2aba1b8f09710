r"""Warnings about guides and models that run without an error, but are probably mistaken."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_bpq.errors import BPQWarning
from pyro_bpq.tracing.config import cost_options
from pyro_bpq.tracing.plate_errors import described, is_discrete, nan_line, number_missing, own_plates, plates_of
from pyro_bpq.tracing.watch import distribution_name, is_enumerated


def warn_of_program(
    model_sites: Mapping[str, Any], guide_sites: Mapping[str, Any], loss: Tensor, is_first: bool, is_enumerating: bool
) -> None:
    """Warns of probable mistakes in programs that run. It reads values, so call it for tracked runs only."""
    everything, texts = [*guide_sites.values(), *model_sites.values()], []
    if is_first:
        texts += [_repeated(site) for site in everything]
        texts += [_misspelt(site) for site in everything]
        texts.append(_observed([*guide_sites.values()], bool(model_sites)))
    if is_first and is_validation_enabled():
        texts += [_unlike(site, model_sites.get(name)) for name, site in guide_sites.items()]
        texts.append(_other_names(model_sites, guide_sites))
        texts.append("" if is_enumerating else _marked(guide_sites.values()))
    if not bool(loss.isfinite().all()):
        texts += _of_nan(everything) or _of_infinity(everything)
    for text in texts:
        if text:
            warnings.warn(text, BPQWarning, stacklevel=3)


def _of_nan(sites: list[Any]) -> list[str]:
    """Explains a loss that is NaN: by data that are NaN, else by the first log-probability that is."""
    data = [site for site in sites if site["is_observed"] and cost_options(site) is None]
    texts = [nan_line(site) for site in data if number_missing(site["value"])]
    if texts:
        return texts
    for site in sites:
        if number_missing(site.get("log_prob")):
            what = distribution_name(site["fn"])
            return [
                f"The log-probability of site {site['name']!r} is NaN: its factor is, or a parameter of its "
                f"distribution, {what}, is NaN or outside of its range. pyro.enable_validation(True) says which."
            ]
    return []


def _of_infinity(sites: list[Any]) -> list[str]:
    """Explains an infinite loss by the first log-probability or factor that is infinite."""
    for site in sites:
        density = site.get("log_prob")
        if isinstance(density, Tensor) and bool(density.isinf().any()):
            kind = "factor" if hasattr(site["fn"], "log_factor") else "log-probability"
            return [
                f"The {kind} of site {site['name']!r} is infinite at {int(density.isinf().sum())} of {density.numel()} "
                "elements, so that this step has no finite gradient. Write a large finite cost in place of an infinite "
                "one, or draw only values that are possible."
            ]
    return []


def _misspelt(site: Any) -> str:
    """Warns if a key of ``infer`` looks like a misspelt ``"bpq"``; empty if none does."""
    for key in site["infer"]:
        if isinstance(key, str) and key != "bpq" and sorted(key.lower()) == sorted("bpq"):
            return f'Site {site["name"]!r} has infer={{{key!r}: ...}}, which nothing reads: write infer={{"bpq": ...}}.'
    return ""


def _observed(guide: list[Any], has_model: bool) -> str:
    """Warns if the guide observes data; empty if it does not."""
    names = [
        site["name"]
        for site in guide
        if site["is_observed"]
        and not site["infer"].get("_deterministic")
        and cost_options(site) is None
        and type(site["fn"]).__name__ not in ("Unit", "Delta")
    ]
    if not names or not has_model:
        return ""
    return (
        f"The guide observes data at {names}: observations belong into the model. Were model and guide handed over in "
        "the wrong order? It is loss(model, guide, ...) and SVI(model, guide, ...)."
    )


def _repeated(site: Any) -> str:
    """Warns if a cost or ``pyro.factor`` in a plate is a single number, which counts once per row; else empty."""
    options, own = cost_options(site), _rows_around(site)
    factor = getattr(site["fn"], "log_factor", None)
    if not own:
        return ""
    if options is not None:
        shape = options.shape
        is_single = bool(options.size) and not any(-f.dim <= len(shape) and shape[f.dim] > 1 for f in own)
        return _counted(site["name"], own, "cost", "pyro_bpq.cost") if is_single else ""
    if not isinstance(factor, Tensor):
        return ""
    # Plates expand a single number: without a stride it is still one.
    has_rows = any(-f.dim <= factor.dim() and factor.shape[f.dim] > 1 and factor.stride(f.dim) for f in own)
    return "" if has_rows else _counted(site["name"], own, "factor", "pyro.factor")


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


def _other_names(model: Mapping[str, Any], guide: Mapping[str, Any]) -> str:
    """Warns if guide and model name a plate differently: nothing then shows that its rows are the same."""
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
    """Warns if a site is discrete in the guide and continuous in the model; else empty."""
    if model is None or guide["is_observed"] or model["is_observed"] or type(model["fn"]).__name__ == "Delta":
        return ""
    if is_discrete(guide["fn"]) is not True or is_discrete(model["fn"]) is not False:
        return ""
    return (
        f"Site {guide['name']!r} is drawn from {described(guide['fn'])} in the guide, and has a density in the model, "
        f"{described(model['fn'])}: probabilities and densities cannot be compared, and the ELBO means nothing. Give "
        "it the same support in both."
    )


def _marked(sites: Iterable[Any]) -> str:
    """Warns if sites are marked for enumeration but sampled; empty if there are none."""
    marked = [site for site in sites if site["infer"].get("enumerate") and not site["is_observed"]]
    names = [site["name"] for site in marked if not is_enumerated(site)]
    if not names:
        return ""
    return (
        f'The sites {names} are marked with infer={{"enumerate": ...}}, which counts with enumeration="exact" only. '
        'Write TraceBackpropQ_ELBO(enumeration="exact") (not TraceEnum_ELBO) to sum them out, or remove the mark.'
    )
