r"""Estimators under enumeration: at which sites they serve, and their noise in few values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from pyro import poutine
from torch import Tensor

from pyro_bpq.estimators import Estimator, slopes
from pyro_bpq.plan import rules
from pyro_bpq.record.watch import site_info
from pyro_bpq.reruns import hindsight
from pyro_bpq.testing.choices import ChoiceNoise


def where_it_serves(guide: Callable[..., Any], estimator: Estimator, particles: int = 1) -> Any:
    """The guide with this estimator at each site that is scored and that it serves."""

    def choose(site: Any) -> Any:
        info = site_info(site, (), particles)
        is_served = not info.has_rsample and estimator.unsupported(info) is None
        return {"bpq": {"estimator": estimator}} if is_served else {}

    return poutine.infer_config(guide, choose)


@contextmanager
def enumerable_noise(noise: ChoiceNoise) -> Iterator[None]:
    """Within it, estimators that draw noise draw one of few values, with the chances of what it decides.

    The default then runs ``plan.rules.FEW_PARTICLES`` particles at most. Signs that enter squared are 1.

    Example:
        >>> noise = ChoiceNoise()
        >>> with enumerable_noise(noise):
        ...     expected_gradient(elbo, model, guide, noise=noise)
    """

    def entry(chance: Tensor, generator: torch.Generator) -> Tensor:
        flat = chance.flatten(-2)
        index = noise.draw_choice(flat / flat.sum(-1, keepdim=True))
        return torch.zeros_like(flat).scatter_(-1, index.unsqueeze(-1), 1.0).reshape(chance.shape)

    def partner(p: Tensor, value: Tensor, generator: torch.Generator) -> Tensor:
        # The antithetic value is one with this chance, given the value.
        one = torch.where(value == 1, (2 * p - 1).clamp(min=0.0) / p, torch.minimum(p, 1 - p) / (1 - p))
        return noise.draw_choice(torch.stack((1 - one, one), -1)).to(p)

    def component(chance: Tensor, number: int, generator: torch.Generator) -> Tensor:
        return torch.stack([noise.draw_choice(chance) for _ in range(number)], -1)

    def signs(slopes: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
        return [torch.ones_like(slope) for slope in slopes]

    places = (
        (hindsight, "_draw", component),
        (hindsight, "_signs", signs),
        (slopes, "_draw", entry),
        (slopes, "uniform_given", partner),
        (rules, "MOST_PARTICLES", rules.FEW_PARTICLES),
        (rules, "MOST_STEPPED", rules.FEW_PARTICLES),
    )
    with ExitStack() as stack:
        for module, name, drawn in places:
            stack.enter_context(mock.patch.object(module, name, drawn))
        yield
