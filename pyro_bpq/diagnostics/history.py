r"""Records the report of an ELBO after each step, for plots and loggers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bpq.diagnostics.moments import COSTS, gradient_moments
from pyro_bpq.errors import BPQError, OptionError, check_whole

# Names of the scales of AllAction, in its order.
SCALES = ("exact", "level", "advantage", "later", "later_exact")


def scalars(elbo: Any) -> dict[str, dict[str, float]]:
    """Numbers from ``elbo.info``, by site; all sites together take one copy from the device.

    Args:
        elbo: An ELBO that has taken a training step.

    Returns:
        The mean of each entry of ``elbo.info`` over particles and plates, by site. Scales are named after ``SCALES``:
        ``scale_exact`` and so on. ``cost_to_go_std`` is the spread over particles and plates.
    """
    parts: dict[tuple[str, str], Tensor] = {}
    found: dict[str, dict[str, float]] = {}
    for site in _in_program_order(elbo):
        for key, entry in elbo.info[site].items():
            if isinstance(entry, float):
                found.setdefault(site, {})[key] = entry
            if not isinstance(entry, Tensor):
                continue
            if key == "scales":
                labels = SCALES if len(entry) == len(SCALES) else tuple(map(str, range(len(entry))))
                parts |= {(site, f"scale_{label}"): entry[i] for i, label in enumerate(labels)}
                continue
            parts[site, key] = entry.mean()
            if key == "cost_to_go":
                parts[site, "cost_to_go_std"] = entry.std(correction=0)
    numbers = torch.stack([part.detach().to(torch.float64) for part in parts.values()]).tolist() if parts else []
    for (site, label), number in zip(parts, numbers, strict=True):
        found.setdefault(site, {})[label] = number
    return found


def _in_program_order(elbo: Any) -> list[str]:
    try:
        order = {node.name: i for i, node in enumerate(elbo.graph.nodes)}
    except (AttributeError, BPQError):
        order = {}
    return sorted(elbo.info, key=lambda site: order.get(site, len(order)))


class History:
    """Records ``elbo.info`` over time.

    Call :meth:`record` after each step, and :meth:`measure` now and then for the signal-to-noise ratio.

    Args:
        every: Only one in ``every`` calls of :meth:`record` is kept; a kept call waits for the device.

    Raises:
        OptionError: If ``every`` is not positive.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = every
        check_whole(self, "every", 1)
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.measured: list[tuple[int, float, dict[str, float]]] = []
        self._records: list[dict[str, dict[str, float]]] = []
        self._calls = 0

    def record(self, elbo: Any, loss: float | None = None) -> None:
        """Records the report of the last step.

        Args:
            elbo: The ELBO.
            loss: The loss of the step, in nats, if it is to be recorded too.
        """
        self._calls += 1
        if (self._calls - 1) % self.every:
            return
        self.steps.append(self._calls - 1)
        self.losses.append(math.nan if loss is None else float(loss))
        self._records.append(scalars(elbo))

    def measure(
        self, elbo: Any, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **options: Any
    ) -> None:
        """Measures the gradient's signal-to-noise ratio at the present parameters, in total and by site."""
        moments = gradient_moments(elbo, model, guide, *args, **{"num_samples": 20, **options})
        sites = {site: ratio for site, ratio in moments.site_ratios().items() if site != COSTS}
        self.measured.append((self._calls, moments.signal_to_noise, sites))

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites seen, in the order of their first appearance."""
        return tuple(dict.fromkeys(site for record in self._records for site in record))

    def keys(self, site: str) -> tuple[str, ...]:
        """Names of the recorded series of a site."""
        return tuple(dict.fromkeys(key for record in self._records for key in record.get(site, {})))

    def series(self, site: str, key: str) -> np.ndarray:
        """One number per kept step, NaN for steps in which the site had none.

        Args:
            site: The site.
            key: One of :meth:`keys`.
        """
        return np.array([record.get(site, {}).get(key, math.nan) for record in self._records])

    def to_numpy(self) -> dict[str, Any]:
        """A dictionary of ``steps``, ``loss`` and, under ``sites``, the series of each key by site."""
        sites = {site: {key: self.series(site, key) for key in self.keys(site)} for site in self.sites}
        return {"steps": np.array(self.steps), "loss": np.array(self.losses), "sites": sites}

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"History({len(self)} steps of {len(self.sites)} sites, every={self.every})"


class LogCallback:
    """Passes the report of an ELBO to a logger.

    >>> log = LogCallback(lambda tag, value, step: None)

    Args:
        logger: An object with ``add_scalar(tag, value, step)``, as TensorBoard's ``SummaryWriter``, or a function of
            these three.
        prefix: Prefix of each tag ``site/key``.
        every: Only one in ``every`` calls logs.

    Raises:
        OptionError: If the logger is neither of these, or ``every`` is not positive.
    """

    def __init__(self, logger: Any, prefix: str = "bpq/", every: int = 1) -> None:
        write = getattr(logger, "add_scalar", logger)
        if not callable(write):
            raise OptionError(f"LogCallback({logger!r}): give a SummaryWriter or a function of (tag, value, step).")
        self.logger, self.prefix, self.every = logger, prefix, every
        check_whole(self, "every", 1)
        self._write: Callable[[str, float, int], Any] = write
        self._calls = 0

    def __call__(self, elbo: Any, loss: float | None = None) -> None:
        """Logs the last step.

        Args:
            elbo: The ELBO.
            loss: The loss of the step, in nats, if it is to be logged too.
        """
        step, self._calls = self._calls, self._calls + 1
        if step % self.every:
            return
        if loss is not None:
            self._write(f"{self.prefix}loss", float(loss), step)
        found: Mapping[str, Mapping[str, float]] = scalars(elbo)
        for site, entries in found.items():
            for key, value in entries.items():
                self._write(f"{self.prefix}{site}/{key}", value, step)

    def __repr__(self) -> str:
        return f"LogCallback({type(self.logger).__name__}, prefix={self.prefix!r}, every={self.every})"
