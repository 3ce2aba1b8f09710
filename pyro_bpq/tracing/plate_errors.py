r"""What is wrong with shapes, plates and data of a program, and what to write, in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from pyro_bpq.errors import PlateError
from pyro_bpq.tracing.config import cost_options
from pyro_bpq.tracing.watch import PARTICLES, Frames, distribution_name, number_of_values, samples

# Parts of the errors that torch raises when Python asks a tensor with several elements for one value.
_ONE_VALUE_ONLY = re.compile("is ambiguous|converted to (a )?(Python )?scalar|converted to an index", re.IGNORECASE)
_COLLISION = re.compile(rf'at plates "(.*)" and "{PARTICLES}", collide at dim=-(\d+)')
_OTHER_SIZE = re.compile(r"Shape mismatch inside plate\('(.*)'\) at site (.*) dim (-\d+), (\d+) vs (\d+)")
_AMONG_PARTICLES = re.compile(rf"Shape mismatch inside plate\('{PARTICLES}'\) at site (.*) dim -(\d+)")


def asks_for_one_value(error: Exception) -> bool:
    """Whether torch complains that Python asks a tensor with several elements for one value."""
    return _ONE_VALUE_ONLY.search(own_text(error)) is not None


def plate_error(error: Exception, plates: Mapping[str, Frames], where: str) -> PlateError | None:
    """Adds the plates of the named sites to Pyro's error about shapes; ``None`` if it is about something else."""
    text = str(error)
    if not (isinstance(error, ValueError) and _is_about_shapes(text)):
        return None
    named = {site: frames for site, frames in plates.items() if _names(text, site)}
    lines = [f"Site {site!r} is in the plates {_listed(frames)} (name, dim, size)." for site, frames in named.items()]
    unlike, advice = _OTHER_SIZE.search(text), particle_advice(plates.values())
    if unlike is not None and unlike[1] != PARTICLES:
        plate, site, dim, rows, size = unlike.groups()
        lines = [
            f"In the {where} the plate {plate!r} has {rows} rows in dimension {dim}, and the distribution, or the "
            f"factor, of site {site!r} has {size} there. If these {size} belong to each row, write .to_event(1) behind "
            "the distribution, or .sum(-1) behind the factor. If they are rows, give plate and parameters the same "
            "number; a parameter keeps the size that it was made with."
        ]
    return PlateError(told(error, *lines, *advice))


def plate_error_of_traces(error: Exception, model_trace: Any, guide_trace: Any) -> PlateError | None:
    """Says which of guide and model has the named site in which plates; ``None`` for other errors than of plates."""
    text, model, guide = str(error), statements(model_trace), statements(guide_trace)
    frames = [plates_of(site) for site in (*model.values(), *guide.values())]
    if "plate stack overflow" in text:
        return nesting_error(error, frames)
    both = [name for name in guide if name in model]
    unlike = [sizes_line(name, plates_of(model[name]), plates_of(guide[name])) for name in both]
    if any(unlike) and re.search("size|shape", text):
        return PlateError(told(error, *dict.fromkeys(filter(None, unlike))))
    if not (isinstance(error, ValueError) and _is_about_shapes(text)):
        return None
    lines = []
    for name in dict.fromkeys((*guide, *model)):
        if not _names(text, name):
            continue
        sites = [site for site in (model.get(name), guide.get(name)) if site is not None]
        if cost_options(sites[0]) is not None and (loose := _loose(sites[0])) is not None:
            lines.append(_cost_line(name, sites[0], loose))
        elif len(sites) == 2 and sites[0]["fn"].event_dim != sites[1]["fn"].event_dim:
            lines.append(unlike_line(name, *((site["fn"], plates_of(site)) for site in sites)))
        elif line := data_line(sites[0], rows_of(sites[0])):
            lines.append(line)
        else:
            lines.append(_both_line(name, plates_of(sites[0]), plates_of(sites[-1])))
        if len({tuple(_listed(plates_of(site))) for site in sites}) == 1:
            lines += list(filter(None, map(_loose_line, reversed(sites))))[:1]
    return PlateError(told(error, *lines, *particle_advice(frames)))


def sizes_line(name: str, model: Frames, guide: Frames) -> str:
    """Says that a plate around a site has another size in the guide than in the model; empty if none has.

    The model's plate replays the rows of the guide's, so that the number of these tells nothing.
    """
    sizes = {frame.name: frame.full_size for frame in guide}
    for frame in model:
        ours, theirs = sizes.get(frame.name, -1), frame.full_size
        # A plate without a size has -1.
        if ours != theirs and min(ours, theirs) >= 0:
            return (
                f"The plate {frame.name!r} around site {name!r} has {ours} rows in the guide, and {theirs} in the "
                f'model. Give it the same size in both: pyro.plate("{frame.name}", {theirs}, dim={frame.dim}).'
            )
    return ""


def unlike_line(name: str, model: tuple[Any, Frames], guide: tuple[Any, Frames]) -> str:
    """Says how the values of a site differ between guide and model, and what to write."""
    (theirs, their_frames), (ours, our_frames) = model, guide
    known, given = distribution_name(theirs), distribution_name(ours)
    more = ours.event_dim - theirs.event_dim
    if not more:
        numbers = number_of_values(ours), number_of_values(theirs)
        if None in numbers:
            return (
                f"Site {name!r} is drawn from {given} in the guide, and scored under {known} in the model, whose "
                "values are of another kind (the numbers 0 and 1, or whole numbers as indices). Write "
                f"{known} in the guide, or {given} in the model."
            )
        return (
            f"Site {name!r} has {numbers[0]} values in the guide, {given}, and {numbers[1]} in the model, {known}. "
            "Give it the same number in both."
        )
    own = {frame.name for frame in own_plates(our_frames)}
    lacking = [frame for frame in own_plates(their_frames) if frame.name not in own]
    if known == given and more > 0 and lacking:
        plates = " and ".join(f'with pyro.plate("{f.name}", {f.size}, dim={f.dim})' for f in lacking)
        advice = f"In the guide write {plates} in place of .to_event({ours.event_dim})."
    elif known == given:
        advice = f"Write .to_event({abs(more)}) in the {'model' if more > 0 else 'guide'} too."
    else:
        advice = f"Write {known} in the guide, or {given} in the model."
    return (
        f"Site {name!r} is drawn from {given} in the guide, whose values have {ours.event_dim} event dimension(s), and "
        f"scored under {known} in the model, whose values have {theirs.event_dim}. {advice}"
    )


def nesting_error(error: Exception, plates: Iterable[Frames], declared: int = 0) -> PlateError | None:
    """Says which ``max_plate_nesting`` a program needs, if Pyro's error is that it is too small."""
    text, plates = str(error), list(plates)
    collision, among = _COLLISION.search(text), _AMONG_PARTICLES.search(text)
    if among is not None and declared >= int(among[2]):
        needed = int(among[2])
        line = (
            f"The particles lie in dimension {-needed}, on the left of max_plate_nesting={needed - 1} dimensions, and "
            f"site {among[1]!r} has values of its own there. Write max_plate_nesting={needed} or more, as many as "
            "plates are nested, or leave it out: then it is found in the first step."
        )
        return PlateError(told(error, line))
    if collision is not None:
        # The particles stand on the left of as many dimensions as were declared: the plate is right, the number is not.
        needed, where = int(collision[2]), f"The plate {collision[1]!r} lies"
    elif "plate stack overflow" in text:
        needed, where = max((_depth(frames) for frames in plates), default=0), "The plates of the program lie"
    else:
        return None
    line = (
        f"{where} in dimensions down to {-needed}. Write max_plate_nesting={needed}, or leave it out: then it is "
        "found in the first step. Particles need no dimension of their own there."
    )
    return PlateError(told(error, line))


def particle_advice(plates: Iterable[Frames]) -> list[str]:
    """What to write where shapes do not fit with several particles at once; empty where these have no plate."""
    frame = next((frame for frames in plates for frame in frames if frame.name == PARTICLES), None)
    if frame is None:
        return []
    return [
        f"{frame.size} particles ran at once, in dimension {frame.dim} of each site, on the left of all plates. A "
        "program that indexes, unpacks or reduces dimensions from the left meets the particles there. If it runs with "
        "vectorize_particles=False, write that, so that particles run one after the other; or count dimensions from "
        "the right, as in z[..., 0] and z.sum(-1)."
    ]


def check_declared(sites: Iterable[Any]) -> None:
    """Raises if a batch dimension of a site is not a plate. Pyro checks this only with validation on."""
    for site in sites:
        shape, dims = site["log_prob"].shape, {f.dim for f in site["cond_indep_stack"] if f.vectorized}
        for dim in range(-len(shape), 0):
            if shape[dim] > 1 and dim not in dims:
                raise PlateError(
                    f"Site {site['name']!r} has the batch shape {tuple(shape)}, and in dimension {dim} no plate. "
                    "Put it into a pyro.plate, or write .to_event(...) where its elements belong together."
                )


def statements(trace: Any) -> dict[str, Any]:
    """The sample sites of a trace, without those that draw the rows of a plate."""
    return {name: site for name, site in samples(trace).items() if not isinstance(site["fn"], _Subsample)}


def _is_about_shapes(text: str) -> bool:
    return any(words in text for words in ("invalid log_prob shape", "disagree at site", "inside plate("))


def _names(text: str, site: str) -> bool:
    return f"'{site}'" in text or f'"{site}"' in text


def plates_of(site: Any) -> Frames:
    """The vectorised plates around a site of a trace."""
    return tuple(frame for frame in site["cond_indep_stack"] if frame.vectorized)


def rows_of(site: Any) -> tuple[int, ...]:
    """Sizes of the dimensions that the program's own plates around a site of a trace reach."""
    sizes = {frame.dim: frame.size for frame in own_plates(plates_of(site))}
    return tuple(sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0))


def own_plates(frames: Frames) -> list[Any]:
    """The plates that the program itself declares, from left to right."""
    return sorted((frame for frame in frames if frame.name != PARTICLES), key=lambda frame: frame.dim)


def _listed(frames: Frames) -> list[tuple[str, int, int]]:
    return [(frame.name, frame.dim, frame.size) for frame in own_plates(frames)]


def _depth(frames: Frames) -> int:
    """The number of dimensions that the plates of a site reach, without that of the particles."""
    particles = next((frame.dim for frame in frames if frame.name == PARTICLES), None)
    # Pyro counts on beyond the particles, where a plate has no room on their right.
    found = [-f.dim - (particles is not None and f.dim < particles) for f in own_plates(frames)]
    return max(found, default=0)


def _both_line(name: str, model: Frames, guide: Frames) -> str:
    """Says which of guide and model has which plates."""
    of_model, of_guide = _listed(model), _listed(guide)
    if of_model == of_guide:
        return f"Site {name!r} is in the plates {of_model} (name, dim, size)."
    line = f"Site {name!r} is in the plates {of_model} in the model, and {of_guide} in the guide (name, dim, size)."
    for plates, others, missing in ((of_model, of_guide, "guide"), (of_guide, of_model, "model")):
        # A plate under another name serves as well.
        lacks = [plate for plate in plates if plate[1:] not in [other[1:] for other in others]]
        # A plate of the same name, but of another size or in another dimension, is not added: it is changed.
        known = {plate[0] for plate in others}
        for plate, dim, size in lacks:
            if plate not in known:
                line += f' Put it into "{plate}" in the {missing} too: with pyro.plate("{plate}", {size}, dim={dim}).'
            elif missing == "guide":
                line += f' Give "{plate}" the same size and dim in both: pyro.plate("{plate}", {size}, dim={dim}).'
    return line


def _loose_line(site: Any) -> str:
    """Says which dimension of a site is no plate, and what to write; empty if there is none."""
    dim, shape = _loose(site), tuple(site["fn"].batch_shape)
    if dim is None or cost_options(site) is not None:
        return ""
    return (
        f"A distribution of {site['name']!r} has the batch shape {shape}, and its dimension {dim} is no plate. "
        "Where its elements belong together, write .to_event(...); where they are rows, put it into a plate with "
        f"dim={dim}. Tensors of the shapes (n,) and (n, 1) side by side make such a shape too: write squeeze(-1)."
    )


def _loose(site: Any) -> int | None:
    """The rightmost dimension of a site that is no plate; ``None`` if there is none."""
    shape, dims = site["fn"].batch_shape, {frame.dim for frame in plates_of(site)}
    return next((dim for dim in range(-1, -len(shape) - 1, -1) if shape[dim] > 1 and dim not in dims), None)


def _cost_line(name: str, site: Any, dim: int) -> str:
    shape = tuple(site["fn"].batch_shape)
    return (
        f"The cost {name!r} has the shape {shape}, and is in the plates {_listed(plates_of(site))} (name, dim, size): "
        f'dimension {dim} is no plate. Sum it, as in pyro_bpq.cost("{name}", value.sum({dim})), or put it into a plate '
        f'of its rows, as in: with pyro.plate("rows_of_{name}", {shape[dim]}, dim={dim}).'
    )


_SHAPES = "\nTrace Shapes:"


def own_text(error: Exception) -> str:
    """The text of an error without the table of shapes that Pyro appends."""
    return str(error).partition(_SHAPES)[0]


def told(error: Exception, *lines: str) -> str:
    """The text of an error, what to write, and the table of shapes that Pyro appends."""
    text, mark, shapes = str(error).partition(_SHAPES)
    return "\n".join([text.rstrip(), *lines]) + mark + shapes


def left_torch(sites: Iterable[str], number: int, text: str = "") -> str:
    """Says that Python asked for one value where each of so many particles has its own, and what to write."""
    return (
        f"A sampled value of {', '.join(map(repr, sorted(sites)))} left torch (as by .item(), int(), if, .numpy(), or "
        f"try) while {number} particles ran at once, and each particle has a value of its own{text and f': {text}'}. "
        "Write vectorize_particles=False, so that they run one after the other; or stay in torch, as by "
        "torch.where(z > 0, a, b) or table[z.long()]."
    )


def data_line(site: Any, rows: tuple[int, ...]) -> str:
    """Says how the shape of a site's data differs from that of its distribution, and what to write; else empty."""
    value, fn = site["value"], site["fn"]
    if not site["is_observed"] or not isinstance(value, Tensor) or not hasattr(fn, "event_shape"):
        return ""
    given, drawn = tuple(value.shape), (*fn.batch_shape, *fn.event_shape)
    if given == drawn[len(drawn) - len(given) :]:
        return ""
    line = f"The data of site {site['name']!r} has the shape {given}; the distribution has the shape {drawn}."
    more = given[len(rows) :]
    if not fn.event_dim and more == (1,):
        return f"{line} Write obs=data.squeeze(-1), and give the parameters the shape {rows} too."
    if not fn.event_dim and more and given[: len(rows)] == rows:
        return (
            f"{line} The data has values of shape {more} in each row: give the parameters the shape {given} too, as by "
            f"mean[..., {', '.join(['None'] * len(more))}].expand{given}, and write .to_event({len(more)})."
        )
    if len(given) == len(drawn) and sorted(given) == sorted(drawn):
        return f"{line} Bring the dimensions of the data into the order of the distribution, as by data.permute(...)."
    return f"{line} Shapes are matched from the right; make both the same."
