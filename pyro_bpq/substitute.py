r"""Sets the values of latent sites of a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyro.poutine.messenger import Messenger

__all__ = ["Substitute"]


class Substitute(Messenger):  # type: ignore[misc]
    """Sets the values of latent sites; whatever is not named is drawn as usual.

    Args:
        values: Value of each site, by name; also the indices of subsampled plates.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]
            msg["done"] = True
