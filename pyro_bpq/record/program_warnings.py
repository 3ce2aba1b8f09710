r"""Warnings about programs that run, and hardly do what is meant, in words."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_bpq.errors import BPQWarning
from pyro_bpq.graph.scg import cost_of_guide
from pyro_bpq.record.config import cost_options, option_names
from pyro_bpq.record.cost_statement import NO_NUMBER
from pyro_bpq.record.plate_errors import own_plates, size_line, support_of, unlike_line
from pyro_bpq.record.program_errors import number_missing, value_line
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.watch import distribution_name, is_enumerated, leaf_of

Sites = Mapping[str, Any]

# Fewer rows of a plate than these need no word.
_FEW_ROWS = 3


def warn_of_program(traced: TracedRun, model: Sites, guide: Sites, is_first: bool) -> None:
    """Warns of probable mistakes in programs that run. It reads values, so call it for recorded runs only.

    Args:
        traced: The run.
        model: Sites of the model. Replay gives them what the guide says of them.
        guide: Sites of the guide.
        is_first: Whether to warn of the programs too, and not only of numbers.
    """
    for text in dict.fromkeys(_warnings(traced, model, guide, is_first)):
        warnings.warn(text, BPQWarning, stacklevel=3)


def _warnings(traced: TracedRun, model: Sites, guide: Sites, is_first: bool) -> Iterator[str]:
    everything = [*guide.values(), *model.values()]
    if is_first:
        for warn in (_repeated, _misspelt):
            for site in everything:
                yield from warn(site)
        if model:
            yield from _observed(guide)
        if torch.is_grad_enabled():
            yield from _detached(traced, guide)
            yield from _by_hand(traced, guide)
    if is_first and is_validation_enabled():
        yield from _unlike(model, guide)
        yield from _other_plates(model, guide)
        if not traced.enumerated:
            yield from _marked(guide)
    if not bool(traced.run.loss.isfinite().all()):
        missing = [site for site in everything if _is_data(site) and number_missing(site["value"])]
        terms = [*_terms(everything, "NaN", Tensor.isnan), *_terms(everything, "infinite", Tensor.isinf)]
        yield from map(value_line, missing) if missing else terms[:1]


def _is_data(site: Any) -> bool:
    return site["is_observed"] and cost_options(site) is None


def _terms(sites: list[Any], word: str, find: Callable[[Tensor], Tensor]) -> Iterator[str]:
    """Describes log-probabilities, factors and costs that are no finite number."""
    for site in sites:
        density, fn, kind = site.get("log_prob"), site["fn"], "log-probability of site"
        at = find(density) if isinstance(density, Tensor) else torch.zeros(())
        if not bool(at.any()):
            continue
        if cost_options(site) is not None or hasattr(fn, "log_factor"):
            kind, advice = "cost" if cost_options(site) is not None else "factor of site", NO_NUMBER
        else:
            checked = "" if is_validation_enabled() else "; pyro.enable_validation(True) says which"
            advice = f"Is a parameter of its {distribution_name(fn)} NaN, or outside of its range{checked}?"
        if word == "infinite":
            advice = "Write a large finite cost in its place, or draw only values that are possible."
        found = f"{int(at.sum())} of {at.numel()} elements"
        yield value_line(site) or f"The {kind} {site['name']!r} is {word} at {found}. {advice}"


def _misspelt(site: Any) -> Iterator[str]:
    """Warns if a key of ``infer`` looks like a misspelt ``"bpq"``, or like an option that belongs into it."""
    for key in site["infer"]:
        is_misspelt = isinstance(key, str) and key != "bpq" and sorted(key.lower()) == sorted("bpq")
        if is_misspelt or key in option_names():
            inner = "..." if is_misspelt else f"{{{key!r}: ...}}"
            told = f"Site {site['name']!r} has infer={{{key!r}: ...}}, which nothing reads"
            yield f'{told}: write infer={{"bpq": {inner}}}.'


def _repeated(site: Any) -> Iterator[str]:
    """Warns if a cost or ``pyro.factor`` in a plate is a single number, which counts once per row."""
    own, options = _rows_around(site), cost_options(site)
    value = getattr(site["fn"], "log_factor", None) if options is None else site["fn"].value if options.size else None
    # Plates expand a single number: without a stride it is still one.
    is_one = isinstance(value, Tensor) and not any(
        -f.dim <= value.dim() and value.shape[f.dim] > 1 and value.stride(f.dim) for f in own
    )
    if own and is_one:
        kind, function = ("factor", "pyro.factor") if options is None else ("cost", "pyro_bpq.cost")
        sizes = {frame.dim: frame.size for frame in own}
        rows = ", ".join(str(sizes.get(dim, 1)) for dim in range(min(sizes), 0))
        yield (
            f"The {kind} {site['name']!r} is a single number in the plate {', '.join(repr(f.name) for f in own)}: it "
            f"counts once per row, {math.prod(sizes.values())} times. Write {function}({site['name']!r}, ...) outside "
            f"of the plate; or, if each row is meant to cost that much, value + torch.zeros({rows})."
        )


def _rows_around(site: Any) -> list[Any]:
    return [frame for frame in own_plates(site) if frame.size > 1]


def _other_plates(model: Sites, guide: Sites) -> Iterator[str]:
    """Warns if a plate has another name, or another size, in the guide than in the model."""
    known = {frame.name for site in model.values() for frame in site["cond_indep_stack"]}
    for name in (name for name in guide if name in model):
        if line := size_line(model[name], guide[name]):
            yield f"{line} Now the model runs the rows of the guide, whose costs it scales."
            return
        there = {(frame.dim, frame.size): frame.name for frame in _rows_around(model[name])}
        for frame in _rows_around(guide[name]):
            other = there.get((frame.dim, frame.size), frame.name)
            if other != frame.name and frame.name not in known:
                yield (
                    f"The plate of site {name!r} is {frame.name!r} in the guide, and {other!r} in the model. So each "
                    f"row gets the costs of all rows, which is noisy. Write {other!r} in the guide."
                )
                return


def _unlike(model: Sites, guide: Sites) -> Iterator[str]:
    """Warns if a site is discrete in the guide and continuous in the model."""
    for name, site in guide.items():
        twin = model.get(name, site)
        ours, theirs = support_of(site["fn"]), support_of(twin["fn"])
        is_compared = not (site["is_observed"] or twin["is_observed"] or type(twin["fn"]).__name__ == "Delta")
        if is_compared and ours is not None and theirs is not None and ours.is_discrete and not theirs.is_discrete:
            yield (
                f"{unlike_line(twin, site)} Probabilities and densities cannot be compared, and "
                "the ELBO means nothing: give it the same support in both."
            )


def _marked(guide: Sites) -> Iterator[str]:
    """Warns if sites are marked for enumeration but sampled."""
    marked = [name for name, site in guide.items() if site["infer"].get("enumerate") and not site["is_observed"]]
    if names := [name for name in marked if not is_enumerated(guide[name])]:
        yield (
            f'The sites {names} are sampled, although infer={{"enumerate": ...}} marks them. Write '
            'TraceBackpropQ_ELBO(enumeration="exact"), not TraceEnum_ELBO, to sum them out; or remove the mark.'
        )


def _observed(guide: Sites) -> Iterator[str]:
    """Warns if the guide observes data."""
    data = [name for name, site in guide.items() if _is_data(site) and not site["infer"].get("_deterministic")]
    if names := [name for name in data if type(guide[name]["fn"]).__name__ not in ("Unit", "Delta")]:
        yield (
            f"The guide observes data at {names}: observations belong into the model. Were model and guide handed over "
            "in the wrong order? It is loss(model, guide, ...) and SVI(model, guide, ...)."
        )


def _detached(traced: TracedRun, guide: Sites) -> Iterator[str]:
    """Warns if nothing that the guide draws or scores carries a gradient to its parameters."""
    own, shared = traced.guide_trace.nodes, traced.model_trace.nodes
    read = frozenset() if traced.recorded is None else traced.recorded.read_parameters()
    found = [name for name in own if own[name]["type"] == "param" and name in read and name not in shared]
    still = [name for name in found if leaf_of(own[name]["value"]).requires_grad]
    tensors = [tensor for site in guide.values() for tensor in (site["value"], site["log_prob"])]
    # A batch may give the guide nothing to draw.
    if still and tensors and not any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        yield (
            f"No gradient reaches the parameters of the guide, {', '.join(map(repr, still))}: they never learn. Look "
            "for .detach(), .data, .item(), torch.no_grad() or torch.tensor(...) of a tensor. If only the model is to "
            'learn, hand over pyro.poutine.block(guide, hide_types=["param"]).'
        )


def _by_hand(traced: TracedRun, guide: Sites) -> Iterator[str]:
    """Warns of factors of the guide that state ``log q`` of values that no site has drawn."""
    drawn = {name for name, record in traced.run.sites.items() if record.score is not None}
    for name, site in guide.items():
        states = vars(site["fn"]).get("has_rsample") is False and hasattr(site["fn"], "log_factor")
        if states and site["log_prob"].requires_grad and drawn.isdisjoint((traced.reads or {})[cost_of_guide(name)]):
            yield (
                f"The factor {name!r} of the guide has has_rsample=False, and reads no value that a site has drawn. "
                "Values that a guide draws by hand (torch.bernoulli, numpy) get no gradient: in place of draw and "
                f'factor write pyro.sample("{name}", fn, infer={{"is_auxiliary": True}}), or the name of the value in '
                "the model. If the factor is a cost, write has_rsample=True."
            )


def crossing(traced: TracedRun) -> str:
    """Says that rows of a plate may meet, although the plate declares them independent; empty for few rows."""
    if not traced.met:
        return _left_a_plate(traced)
    assert traced.recorded is not None
    cost, (plate, why) = next(iter(traced.met.items()))
    read = traced.recorded.reads.get(cost, traced.run.sites)  # summed with others, it has another name
    inside = [n for n in sorted(read) if any(own.name == plate for own in traced.plates[n])]
    first = f"a row of it reads other rows of {', '.join(map(repr, inside))}"
    if why:
        first = f"it reads {', '.join(map(repr, inside))} by {why!r}, of which it is not known that rows stay apart"
    return (
        f"Rows of the plate {plate!r} meet in {cost}: {first}, although a plate declares its rows independent. From "
        "now on each row is charged with the costs of all rows, which is unbiased, with more variance; Pyro's own "
        f"ELBOs would be biased. If that is not meant, look at the dimensions in which the program of {cost} reduces, "
        "flips or indexes; if it is, take the dimension into the event with .to_event()."
    )


def _left_a_plate(traced: TracedRun) -> str:
    # Gradients of sites without a score come through their values: no costs are charged to them.
    scored = {name for name, record in traced.run.sites.items() if record.score is not None}
    sites = [name for name in sorted(scored & traced.escaped_sites) if traced.plates[name]]
    plates = dict.fromkeys(plate for name in sites for plate in traced.plates[name])
    rows = math.prod(traced.plate_sizes[plate] for plate in plates)
    if rows < _FEW_ROWS:
        return ""
    return (
        f"Values of {', '.join(map(repr, sites))}, drawn in the plate {', '.join(repr(p.name) for p in plates)}, leave "
        "torch (as by .numpy(), .item(), .tolist(), if), so that a row may read the others. Each row is charged with "
        f"the costs of all {rows} rows, which is unbiased, with a variance that grows with their number. Stay "
        "in torch, as by torch.where(z > 0, a, b) or table[z.long()]; or wrap a simulator in numpy that keeps rows "
        "apart, simulate = pyro_bpq.external(function), or give its result as a cost, pyro_bpq.cost(name, function, z)."
    )
