r"""Errors about shapes and plates that name the site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pyro_bpq.errors import PlateError

__all__ = ["check_declared", "plate_error"]


def plate_error(error: ValueError, plates: Mapping[str, tuple[Any, ...]]) -> PlateError | None:
    """Adds the plates of the named sites to Pyro's error about shapes that do not fit.

    Args:
        error: Pyro's error.
        plates: Plate frames of each site, by name of the site.

    Returns:
        The error to raise instead; ``None`` if Pyro's error is not about shapes.
    """
    text = str(error)
    if not any(words in text for words in ("invalid log_prob shape", "disagree at site", "inside plate(")):
        return None
    named = {site: frames for site, frames in plates.items() if f"'{site}'" in text or f'"{site}"' in text}
    lines = [
        f"Site {site!r} is in the plates {[(f.name, f.dim, f.size) for f in frames]} (name, dim, size)."
        for site, frames in named.items()
    ]
    return PlateError("\n".join([text, *lines]))


def check_declared(sites: Iterable[Any]) -> None:
    """Raises if a batch dimension of a site is not a plate. Pyro checks this only with validation on.

    Args:
        sites: Traced sites with log-probabilities.

    Raises:
        PlateError: The text names the site and says what to write.
    """
    for site in sites:
        shape, dims = site["log_prob"].shape, {f.dim for f in site["cond_indep_stack"] if f.vectorized}
        for dim in range(-len(shape), 0):
            if shape[dim] > 1 and dim not in dims:
                raise PlateError(
                    f"Site {site['name']!r} has the batch shape {tuple(shape)}, and in dimension {dim} no plate. "
                    "Put it into a pyro.plate, or write .to_event(...) where its elements belong together."
                )
