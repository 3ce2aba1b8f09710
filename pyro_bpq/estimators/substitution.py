"""Costs at other values, row by row; and values of sites as tables ``(G, M, plates, D, K)``."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_bpq.estimators.base import SiteContext, SiteProgram


def cost_per_row(program: SiteProgram, value: Tensor, batch_ndim: int) -> Tensor:
    """Costs-to-go ``(G, M, plates)`` of every plate row if only that row takes the other ``value``.

    If a cost reads several rows, each row takes a run of its own. ``batch_ndim`` counts the dimensions of the result.
    """
    plates = value.shape[2:batch_ndim]
    if not program.rows_meet or plates.numel() == 1:
        return program.cost(value)
    rows = torch.eye(plates.numel(), dtype=torch.bool, device=value.device).reshape(-1, *plates)
    total = value.new_zeros(())
    for row in rows:
        chosen = row.reshape(1, 1, *plates, *(1,) * (value.dim() - batch_ndim))
        cost = program.cost(torch.where(chosen, value, program.value))
        total = torch.where(row, cost, total.to(cost))
    return total


def event_sum(tensor: Tensor, batch_ndim: int) -> Tensor:
    """Sum over event dimensions: from ``(G, M, plates, event)`` to ``(G, M, plates)``."""
    return tensor.sum(tuple(range(batch_ndim, tensor.dim()))) if tensor.dim() > batch_ndim else tensor


def mean_value(context: SiteContext) -> Tensor:
    """Mean of a Bernoulli or OneHotCategorical site, with gradient, in the shape of its value."""
    return to_value(context.table[0].exp(), context.program.value)


def to_value(table: Tensor, like: Tensor) -> Tensor:
    """Reshapes a table ``(G, M, plates, D, K)`` to a value's shape; takes the last column for a Bernoulli."""
    table = table.expand(*like.shape[: table.dim() - 2], *table.shape[-2:])
    return (table if table.numel() == like.numel() else table[..., 1]).reshape(like.shape)


def to_table(value: Tensor, like: Tensor) -> Tensor:
    """Inverse of :func:`to_value`; the first column is zero for a Bernoulli."""
    if value.numel() == like.numel():
        return value.reshape(like.shape)
    flat = value.reshape(like.shape[:-1])
    return torch.stack((torch.zeros_like(flat), flat), -1)
