r"""Warnings about programs that run, and hardly do what is meant, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_bpq.errors import warn
from pyro_bpq.graph.scg import cost_of_guide
from pyro_bpq.record.config import cost_options, option_names
from pyro_bpq.record.program_errors import (
    Sites,
    number_missing,
    own_plates,
    pairs,
    quoted,
    size_line,
    support_of,
    unlike_line,
    value_line,
)
from pyro_bpq.record.statements import NO_NUMBER
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.watch import distribution_name, traced_leaves

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
    checks = (_repeated, _misspelt, _observed, _detached, _by_hand) if is_first else ()
    if is_first and is_validation_enabled():
        checks = *checks, _unlike, _other_plates, _marked
    for check in (*checks, _not_finite):
        for text in dict.fromkeys(check(traced, model, guide)):
            warn(text)


def _is_data(site: Any) -> bool:
    return site["is_observed"] and cost_options(site) is None


def _not_finite(traced: TracedRun, model: Sites, guide: Sites) -> Iterator[str]:
    """Warns of a log-probability, a factor or a cost that is no finite number, of all data that are NaN."""
    if bool(traced.run.loss.isfinite().all()):
        return
    sites, kinds = [*guide.values(), *model.values()], (("NaN", Tensor.isnan), ("infinite", Tensor.isinf))
    data = (_term_line(site, *kinds[0]) for site in sites if _is_data(site) and number_missing(site["value"]))
    terms = (_term_line(site, *kind) for kind in kinds for site in sites)
    yield from [*filter(None, data)] or islice(filter(None, terms), 1)


def _term_line(site: Any, word: str, find: Callable[[Tensor], Tensor]) -> str:
    """Says how many elements of a log-probability, a factor or a cost are no finite number; empty if none are."""
    density, fn, is_cost = site.get("log_prob"), site["fn"], cost_options(site) is not None
    at = find(density) if isinstance(density, Tensor) else torch.zeros(())
    if not bool(at.any()):
        return ""
    kind, advice = "cost" if is_cost else "factor of site", NO_NUMBER
    if not is_cost and not hasattr(fn, "log_factor"):
        checked = "" if is_validation_enabled() else "; pyro.enable_validation(True) says which"
        kind = "log-probability of site"
        advice = f"Is a parameter of its {distribution_name(fn)} NaN, or outside of its range{checked}?"
    if word == "infinite":
        advice = "Write a large finite cost in its place, or draw only values that are possible."
    found = f"{int(at.sum())} of {at.numel()} elements"
    return value_line(site) or f"The {kind} {site['name']!r} is {word} at {found}. {advice}"


def _misspelt(_: TracedRun, model: Sites, guide: Sites) -> Iterator[str]:
    """Warns if a key of ``infer`` looks like a misspelt ``"bpq"``, or like an option that belongs into it."""
    for site in (*guide.values(), *model.values()):
        for key in site["infer"]:
            is_misspelt = isinstance(key, str) and key != "bpq" and sorted(key.lower()) == sorted("bpq")
            inner = "..." if is_misspelt else f"{{{key!r}: ...}}"
            if is_misspelt or key in option_names():
                told = f"Site {site['name']!r} has infer={{{key!r}: ...}}, which nothing reads"
                yield f'{told}: write infer={{"bpq": {inner}}}.'


def _repeated(_: TracedRun, model: Sites, guide: Sites) -> Iterator[str]:
    """Warns if a cost or ``pyro.factor`` in a plate is a single number, which counts once per row."""
    for site in (*guide.values(), *model.values()):
        own, options = _rows_around(site), cost_options(site)
        attribute = "log_factor" if options is None else "value"
        value = getattr(site["fn"], attribute, None) if options is None or options.size else None
        # Plates expand a single number: without a stride it is still one.
        if own and isinstance(value, Tensor) and not any(_has_rows(value, frame.dim) for frame in own):
            kind, function = ("factor", "pyro.factor") if options is None else ("cost", "pyro_bpq.cost")
            sizes = {frame.dim: frame.size for frame in own}
            rows = ", ".join(str(sizes.get(dim, 1)) for dim in range(min(sizes), 0))
            yield (
                f"The {kind} {site['name']!r} is a single number in the plate {quoted(f.name for f in own)}: "
                f"it counts once per row, {math.prod(sizes.values())} times. Write {function}({site['name']!r}, ...) "
                f"outside of the plate; or, if each row is meant to cost that much, value + torch.zeros({rows})."
            )


def _has_rows(value: Tensor, dim: int) -> bool:
    return -dim <= value.dim() and value.shape[dim] > 1 and value.stride(dim) > 0


def _rows_around(site: Any) -> list[Any]:
    return [frame for frame in own_plates(site) if frame.size > 1]


def _other_plates(_: TracedRun, model: Sites, guide: Sites) -> Iterator[str]:
    """Warns if a plate has another name, or another size, in the guide than in the model."""
    known = {frame.name for site in model.values() for frame in site["cond_indep_stack"]}
    for site, twin in pairs(model, guide):
        if line := size_line(site, twin):
            yield f"{line} Now the model runs the rows of the guide, whose costs it scales."
            return
        there = {(frame.dim, frame.size): frame.name for frame in _rows_around(site)}
        for frame in _rows_around(twin):
            other = there.get((frame.dim, frame.size), frame.name)
            if other != frame.name and frame.name not in known:
                yield (
                    f"The plate of site {site['name']!r} is {frame.name!r} in the guide, and {other!r} in the model. "
                    f"So each row gets the costs of all rows, which is noisy. Write {other!r} in the guide."
                )
                return


def _unlike(_: TracedRun, model: Sites, guide: Sites) -> Iterator[str]:
    """Warns if a site is discrete in the guide and continuous in the model."""
    for site, twin in pairs(model, guide):
        theirs, ours = support_of(site["fn"]), support_of(twin["fn"])
        is_compared = not (site["is_observed"] or twin["is_observed"] or type(site["fn"]).__name__ == "Delta")
        if is_compared and ours is not None and theirs is not None and ours.is_discrete and not theirs.is_discrete:
            yield f"{unlike_line(site, twin)} Probabilities are no densities: give it the same support in both."


def _marked(traced: TracedRun, _: Sites, guide: Sites) -> Iterator[str]:
    """Warns if sites are marked for enumeration but sampled."""
    marked = [name for name, site in guide.items() if site["infer"].get("enumerate") and not site["is_observed"]]
    if marked and not traced.enumerated:
        yield (
            f'The sites {marked} are sampled, although infer={{"enumerate": ...}} marks them. Write '
            'TraceBackpropQ_ELBO(enumeration="exact"), not TraceEnum_ELBO, to sum them out. To sample them remove the '
            "mark, or take a guide of your own where AutoDiscreteParallel has put it."
        )


def _observed(_: TracedRun, model: Sites, guide: Sites) -> Iterator[str]:
    """Warns if the guide observes data."""
    laws = {site["name"]: distribution_name(site["fn"]) for site in guide.values() if _is_data(site)}
    names = [name for name, law in laws.items() if law not in ("Unit", "Delta")]
    if names and model:
        yield (
            f"The guide observes data at {names}: observations belong into the model. Were model and guide handed over "
            "in the wrong order? It is loss(model, guide, ...) and SVI(model, guide, ...)."
        )


def _detached(traced: TracedRun, _: Sites, guide: Sites) -> Iterator[str]:
    """Warns if nothing that the guide draws or scores carries a gradient to its parameters."""
    read = frozenset() if traced.recorded is None else traced.recorded.read_parameters()
    own = traced_leaves(traced.guide_trace)
    still = [name for name in own if name in read and name not in traced.model_trace.nodes]
    tensors = [tensor for site in guide.values() for tensor in (site["value"], site["log_prob"])]
    tensors += traced.scored.values()
    is_cut = not any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)
    # A batch may give the guide nothing to draw.
    if still and tensors and is_cut and torch.is_grad_enabled():
        yield (
            f"No gradient reaches the parameters of the guide, {quoted(still)}: they never learn. Look for .detach(), "
            ".item(), torch.no_grad() or torch.tensor(...) of a tensor. If only the model is to learn, hand over "
            'pyro.poutine.block(guide, hide_types=["param"]).'
        )


def _by_hand(traced: TracedRun, _: Sites, guide: Sites) -> Iterator[str]:
    """Warns of factors of the guide that state ``log q`` of values that no site has drawn."""
    reads = traced.reads or {}
    for name, site in guide.items():
        states = vars(site["fn"]).get("has_rsample") is False and hasattr(site["fn"], "log_factor")
        if states and site["log_prob"].requires_grad and reads[cost_of_guide(name)].isdisjoint(traced.scored):
            yield (
                f"The factor {name!r} of the guide has has_rsample=False, and reads no value that a site has drawn. "
                "Values drawn by hand (torch.bernoulli, numpy) get no gradient: in place of draw and factor write "
                f'pyro.sample("{name}", fn, infer={{"is_auxiliary": True}}), or the name of the value in the model. If '
                "the factor is a cost, write has_rsample=True."
            )


def crossing(traced: TracedRun) -> str:
    """Says that rows of a plate may meet, although the plate declares them independent; empty for few rows."""
    if traced.recorded is None or not traced.met:
        return _left_a_plate(traced)
    cost, (plate, why) = next(iter(traced.met.items()))
    read = traced.recorded.reads.get(cost, traced.run.sites)  # summed with others, it has another name
    inside = quoted(n for n in sorted(read) if any(own.name == plate for own in traced.plates[n]))
    first = f"it reads {inside} by {why!r}, of which it is not known that rows stay apart"
    return (
        f"Rows of the plate {plate!r} meet in {cost}: {first if why else f'a row of it reads other rows of {inside}'}, "
        "although a plate declares its rows independent. From now on each row is charged with the costs of all rows, "
        "which is unbiased, with more variance; Pyro's own ELBOs would be biased. If that is not meant, look at the "
        f"dimensions in which the program of {cost} reduces, flips or indexes; if it is, write .to_event()."
    )


def _left_a_plate(traced: TracedRun) -> str:
    # Gradients of sites without a score come through their values: no costs are charged to them.
    sites = sorted(name for name in traced.escaped_sites.intersection(traced.scored) if traced.plates[name])
    plates = dict.fromkeys(plate for name in sites for plate in traced.plates[name])
    rows = math.prod(traced.plate_sizes[plate] for plate in plates)
    if rows < _FEW_ROWS:
        return ""
    return (
        f"Values of {quoted(sites)}, drawn in the plate {quoted(p.name for p in plates)}, leave torch (as by .numpy(), "
        f".item(), .tolist(), if), so that a row may read the others. Each row is charged with the costs of all {rows} "
        "rows, which is unbiased, with a variance that grows with their number. Stay in torch, as by torch.where(z > "
        "0, a, b) or table[z.long()]; or wrap a simulator in numpy that keeps rows apart, simulate = "
        "pyro_bpq.external(function), or give its result as a cost, pyro_bpq.cost(name, function, z)."
    )
