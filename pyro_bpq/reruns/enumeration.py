"""Runs programs at all values of marked sites at once, each in a dimension left of all plates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from pyro import poutine
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.messenger import Messenger

from pyro_bpq.errors import UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.tracing.plate_errors import asks_for_one_value


class _Enumerate(EnumMessenger):
    """Enumerates all marked sites in parallel; raises for sites that cannot be summed exactly."""

    def __init__(self, first_available_dim: int | None, seen: list[str]) -> None:
        super().__init__(first_available_dim)
        self.seen = seen

    def _pyro_sample(self, msg: Any) -> None:
        mark, name = msg["infer"].get("enumerate"), msg["name"]
        if mark is None or msg["is_observed"] or msg["done"]:
            return super()._pyro_sample(msg)
        if mark not in ("parallel", "sequential"):
            raise UnsupportedSiteError(
                f'Site {name!r}: infer={{"enumerate": {mark!r}}} is unknown; write "parallel" or leave it out.'
            )
        if msg["infer"].get("num_samples") is not None:
            raise UnsupportedSiteError(
                f'Site {name!r}: infer={{"num_samples": ...}} samples, it does not sum. Remove "enumerate" and '
                '"num_samples", so that the site is sampled, or only "num_samples", so that it is summed.'
            )
        if not getattr(msg["fn"], "has_enumerate_support", False):
            raise UnsupportedSiteError(
                f"Site {name!r} ({type(msg['fn']).__name__}) has no support that can be enumerated. Remove "
                'infer={"enumerate": ...} there, so that it is sampled.'
            )
        # Sequential enumeration has the same expectation as parallel enumeration.
        msg["infer"]["enumerate"] = "parallel"
        self.seen.append(name)
        try:
            return super()._pyro_sample(msg)
        except NotImplementedError as error:
            raise UnsupportedSiteError(
                f'Site {name!r}: {error}. Remove infer={{"enumerate": ...}} there, so that it is sampled.'
            ) from error


@contextlib.contextmanager
def enumerated_programs(
    model: Callable[..., Any], guide: Callable[..., Any], nesting: int
) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Gives model and guide with their marked sites enumerated, to run within the context."""
    if isinstance(poutine.unwrap(guide), Messenger):
        raise UnsupportedProgramError(
            'enumeration="exact" needs the guide to run before the model, and a GuideMessenger runs both as one. '
            'Write the guide as a function, or enumeration="sample".'
        )
    seen: list[str] = []
    try:
        yield _Enumerate(None, seen)(model), _Enumerate(-1 - nesting, seen)(guide)
    except (RuntimeError, TypeError, ValueError) as error:
        if not seen or not asks_for_one_value(error):
            raise
        raise UnsupportedProgramError(
            f"The program asks for one value ({error}) where all values of the enumerated sites {sorted(set(seen))} "
            'are given at once. Use operations on tensors (torch.where, table[z]), or remove infer={"enumerate": ...}, '
            "so that the site is sampled."
        ) from error
