"""Drawn values as functions of the parameters of their distributions, for gradients through the sample."""

from __future__ import annotations

from torch import Tensor

from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators.reparameterise import base_distribution, reparameterise
from pyro_bpq.rollout.runs import SiteRecord
from pyro_bpq.step.asked import RolloutTensors


def of_class(signals: RolloutTensors, c: int) -> Tensor:
    """The values of the sites of a class, ``(G, M, plates, D)``, with the gradient of the parameters.

    Raises:
        UnsupportedSiteError: If a value cannot be reparameterised.
    """
    batch = signals.batches[c]
    try:
        moved = batch.stack(_moved, batch.cls.value_ndim)
    except UnsupportedSiteError as error:
        raise error.at(*batch.cls.names) from error
    return moved.reshape(*moved.shape[: moved.dim() - batch.cls.value_ndim], batch.cls.width)


def _moved(site: SiteRecord) -> Tensor:
    value = site.value.detach()
    return reparameterise(base_distribution(site.fn), value).expand(value.shape)
