r"""What is wrong with shapes, plates and data of a program, and what to write, in words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from pyro_bpq.errors import PlateError
from pyro_bpq.record.watch import PARTICLES, distribution_name, plates_of

Sites = Mapping[str, Any]

# Words in torch's and Python's errors about shapes.
ABOUT_SHAPES = re.compile(
    r"size|shape|dim|unpack|indices|\dD\b|out of bounds|out of range|expected, got|elements of source", re.IGNORECASE
)
_COLLISION = re.compile(rf'at plates "(.*)" and "{PARTICLES}", collide at dim=(-\d+)')
_OTHER_SIZE = re.compile(r"Shape mismatch inside plate\('(.*)'\) at site (.*) dim (-\d+), (\d+) vs (\d+)")
_OF_PYRO = re.compile(r"invalid log_prob shape|disagree at site|inside plate\(")


def own_text(error: Exception) -> str:
    """The text of an error without the table of shapes that Pyro appends."""
    return str(error).partition("\nTrace Shapes:")[0]


def quoted(names: Iterable[str]) -> str:
    """Names of sites, plates or parameters, as they are told."""
    return ", ".join(map(repr, names))


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


def row_line(text: str, sites: Iterable[Any], where: str, declared: int) -> str:
    """Says which nesting of plates a program needs, or that a site has other rows than its plate; else empty.

    Args:
        text: What Pyro says.
        sites: The statements so far.
        where: The program that ran.
        declared: Number of subsampled plates.
    """
    collision, among = _COLLISION.search(text), _OTHER_SIZE.search(text)
    if among is not None and among[1] != PARTICLES:
        plate, site, at, rows, size = among.groups()
        return (
            f"In the {where} the plate {plate!r} has {rows} rows in dimension {at}, and site {site!r} has {size} "
            f"there. If these {size} belong to each row, write .to_event(1) behind a distribution, or .sum({at}) "
            "behind a cost or factor. If they are rows, make plate and parameters anew, with the same number."
        )
    if collision is not None:
        # The particles stand on the left of as many dimensions as were declared: the plate is right, the number is not.
        what, dim = f"Plate {collision[1]!r}", int(collision[2])
    elif among is not None and declared >= -int(among[3]):
        what, dim = f"Site {among[2]!r}", int(among[3])
    elif "plate stack overflow" in text:
        what, dim = "A plate", -max(map(_depth, sites), default=0)
    else:
        return ""
    return (
        f"{what} reaches dimension {dim}. Write max_plate_nesting={-dim}, or leave it out: then it is found in the "
        "first step. Particles need no dimension of their own there."
    )


def site_lines(error: Exception, model: Sites, guide: Sites) -> Iterator[str]:
    """Says what does not fit at the sites that an error of Pyro's about shapes names."""
    text = str(error)
    if not (isinstance(error, ValueError) and _OF_PYRO.search(text)):
        return
    for name in dict.fromkeys((*guide, *model)):
        if f"'{name}'" not in text and f'"{name}"' not in text:
            continue
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


def _depth(site: Any) -> int:
    """The number of dimensions that the plates of a site reach, without that of the particles."""
    # Pyro counts on beyond the particles, where a plate has no room on their right.
    particles = next((frame.dim for frame in plates_of(site) if frame.name == PARTICLES), -math.inf)
    return max((-frame.dim - (frame.dim < particles) for frame in own_plates(site)), default=0)
