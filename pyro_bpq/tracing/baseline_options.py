"""Pyro's baseline options, ``infer={"baseline": {...}}``, for sites that use the score function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_bpq.errors import OptionError, PlateError
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.estimators.baselines import RunningBaseline
from pyro_bpq.estimators.pyro_baseline import PyroBaseline
from pyro_bpq.estimators.score_function import ScoreFunction


@dataclass(frozen=True, eq=False)
class BaselineOptions:
    """Baseline options of one site.

    A baseline predicts ``log p - log q`` downstream of the site, one number for each plate row of the site. A network
    (``nn_baseline``) or a tensor (``baseline_value``) learns by a squared loss. That loss is part of the surrogate, so
    the user's optimiser trains the baseline. The input of the network is detached. The prediction is detached where it
    corrects the score. The decaying average is one number per site, unlike in ``TraceGraph_ELBO``, so batches may
    differ in size.

    Args:
        network: ``nn_baseline``.
        input: ``nn_baseline_input``.
        value: ``baseline_value``.
        decay: ``baseline_beta`` if ``use_decaying_avg_baseline``, else ``None``.
    """

    network: Callable[[Any], Tensor] | None = None
    input: Any = None
    value: Tensor | None = None
    decay: float | None = None

    def estimator(self) -> Estimator:
        """Returns the score-function estimator with this baseline."""
        if self.network is not None or self.value is not None:
            return PyroBaseline(self.decay)
        return ScoreFunction(RunningBaseline(self.decay) if self.decay is not None else None)

    def predict(self, name: str, shape: torch.Size) -> Tensor:
        """Returns the predicted cost-to-go, with its gradient.

        Args:
            name: Name of the site.
            shape: Batch shape of the site.

        Returns:
            A tensor of that shape.
        """
        value = self.value if self.network is None else self.network(tree_map(_detach, self.input))
        value = torch.as_tensor(value)
        if _strip(value.shape) != _strip(shape):
            raise PlateError(
                f"Site {name!r}: its baseline has the shape {tuple(value.shape)}; it must be {tuple(shape)}, "
                "the batch shape of the site."
            )
        # Pyro's baselines predict a quantity to maximise; a cost has the other sign.
        return -value.reshape(shape)


def baseline_options(name: str, given: Any) -> BaselineOptions | None:
    """Reads ``infer["baseline"]`` of a site."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise OptionError(f'Site {name!r}: infer={{"baseline": {given!r}}} must be a dictionary of options.')
    known = {
        "nn_baseline": None,
        "nn_baseline_input": None,
        "use_decaying_avg_baseline": False,
        "baseline_beta": 0.9,
        "baseline_value": None,
    }
    unknown = sorted(map(str, set(given) - set(known)))
    if unknown:
        raise OptionError(f"Site {name!r}: unknown baseline options {unknown}; the options are {sorted(known)}.")
    given = {**known, **given}
    if given["nn_baseline"] is not None and given["baseline_value"] is not None:
        raise OptionError(f"Site {name!r}: give nn_baseline or baseline_value, not both.")
    if given["nn_baseline"] is not None and given["nn_baseline_input"] is None:
        raise OptionError(f"Site {name!r}: nn_baseline needs its argument; add nn_baseline_input=....")
    decay = float(given["baseline_beta"]) if given["use_decaying_avg_baseline"] else None
    if decay is not None and not 0.0 <= decay < 1.0:
        raise OptionError(f"Site {name!r}: baseline_beta={decay!r}; write a number in [0, 1).")
    if decay is None and given["nn_baseline"] is None and given["baseline_value"] is None:
        return None
    return BaselineOptions(given["nn_baseline"], given["nn_baseline_input"], given["baseline_value"], decay)


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _strip(shape: torch.Size) -> tuple[int, ...]:
    """A shape without leading ones."""
    sizes = tuple(shape)
    while sizes and sizes[0] == 1:
        sizes = sizes[1:]
    return sizes
