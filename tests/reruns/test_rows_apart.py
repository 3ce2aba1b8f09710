"""Rows of a plate that meet, in operators of all kinds."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import bias, told, trained
from torch import Tensor, nn
from torch.nn.functional import (
    affine_grid,
    avg_pool1d,
    conv1d,
    cross_entropy,
    huber_loss,
    one_hot,
    scaled_dot_product_attention,
)

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning

EVALUATED = nn.BatchNorm1d(1, affine=False).eval()
DATA, EDGES = torch.tensor([0.3, -0.7, 1.2]), torch.tensor([0.5, 1.5])
Read = Callable[[Tensor, Tensor], Tensor]


def spread(z: Tensor) -> Tensor:
    """Three numbers in each row."""
    return torch.stack([z, 1.0 - z, 0.5 * z], -1)


def matrices(z: Tensor) -> Tensor:
    return 2.0 * torch.eye(3) + torch.diag_embed(spread(z))


def smoothed(z: Tensor, w: Tensor) -> Tensor:
    weight = torch.tensor([[[0.3, -0.4, 0.8]]], dtype=z.dtype)
    return conv1d(z.reshape(-1, 1, 3), weight, padding=1).reshape(z.shape)


def normalised(z: Tensor, w: Tensor) -> Tensor:
    return nn.BatchNorm1d(1, affine=False).to(z)(z.reshape(-1, 1)).reshape(z.shape)


def written(z: Tensor, w: Tensor) -> Tensor:
    memory = torch.zeros(z.shape)
    memory[...] = z
    return memory


def written_row_by_row(z: Tensor, w: Tensor) -> Tensor:
    memory = torch.zeros(3)
    for i in range(3):
        memory[i] = z[i]
    return memory


MEETING: dict[str, Read] = {
    "one_hot": lambda z, w: one_hot(z.long(), 2).to(z).mean(-2, keepdim=True)[..., 1] * z,
    "index of one row": lambda z, w: w[z[0].long()],
    "index of all rows": lambda z, w: torch.cat([w, w])[z.sum().long()],
    "bucketize": lambda z, w: torch.bucketize(z.sum(-1, keepdim=True), EDGES).to(z),
    "aminmax": lambda z, w: torch.aminmax(z, dim=-1, keepdim=True)[1],
    "dist": lambda z, w: torch.dist(z, torch.ones(3).to(z)),
    "convolution": smoothed,
    "batch norm": normalised,
    "Fourier transform": lambda z, w: torch.fft.fft(z).real,
    "matrix": lambda z, w: torch.mv(torch.diag(torch.tensor([1.0, 0.3, 0.7])).to(z), z),
    "sum over the first dimension": lambda z, w: z.sum(0),
    "an operator that is not known": lambda z, w: avg_pool1d(z.reshape(1, 1, 3), 3, 1, 1).reshape(z.shape),
    # Runs with any number of rows in front, but takes the first one for the rows of the plate.
    "number of dimensions": lambda z, w: z - 0.0 * z.mean(0) + 0.1 * z.dim(),
    # At nearly all values nothing shows.
    "all rows at once": lambda z, w: torch.bucketize((z > 0).all().to(z), EDGES).to(z),
}
APART: dict[str, Read] = {
    "bucketize": lambda z, w: torch.bucketize(z, EDGES).to(z),
    "one_hot": lambda z, w: one_hot(z.long(), 2).to(z)[..., 1],
    "convolution": lambda z, w: conv1d(z.reshape(-1, 1, 1), torch.ones(1, 1, 1).to(z)).reshape(z.shape),
    "index of the own row": lambda z, w: w[z.long()],
    "reshape": lambda z, w: torch.stack((z, 0.3 * z), -1).reshape(3, 2).sum(-1),
    "attention within": lambda z, w: scaled_dot_product_attention(
        *(torch.stack([z, 1.0 - z], -1).unsqueeze(-1),) * 3
    ).sum((-1, -2)),
    "solve": lambda z, w: torch.linalg.solve(matrices(z), torch.ones(3, 3)).sum(-1),
    "eigvalsh": lambda z, w: torch.linalg.eigvalsh(matrices(z)).sum(-1),
    "svdvals": lambda z, w: torch.linalg.svdvals(matrices(z)).sum(-1),
    "slogdet": lambda z, w: torch.linalg.slogdet(matrices(z))[1],
    "count_nonzero": lambda z, w: torch.count_nonzero(spread(z), dim=-1).to(z),
    "cross_entropy": lambda z, w: cross_entropy(spread(z), torch.zeros(3).long(), reduction="none"),
    "huber": lambda z, w: huber_loss(spread(z), torch.zeros(3, 3), reduction="none").sum(-1),
    "grid": lambda z, w: affine_grid(spread(z).repeat(1, 2).reshape(3, 2, 3), (3, 1, 2, 2), False).sum((1, 2, 3)),
    "batch norm in evaluation": lambda z, w: EVALUATED.to(z)(z.reshape(-1, 1)).reshape(z.shape),
    "written": written,
    "written row by row": written_row_by_row,
}


def largest_error(read: Read, summed: str = "") -> tuple[TraceBackpropQ_ELBO, float, list[str]]:
    """An ELBO after a few steps, the largest error of its expected gradient, and what it has warned of.

    ``summed`` says who has an enumerated site in each row: the model, the guide as well, or nobody.
    """
    mark = {"enumerate": "parallel"}

    def model() -> None:
        w = pyro.param("w", torch.tensor([0.5, -0.8]))
        with pyro.plate("rows", 3):
            z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.35)))
            shift = w[pyro.sample("k", dist.Bernoulli(0.3), infer=mark).long()] if summed else 0.0
            pyro.sample("x", dist.Normal(w[0] * z + 1.1 * read(z, w) + shift, 0.8), obs=DATA)

    def guide() -> None:
        q = pyro.param("q", torch.tensor([0.3, -0.4, 0.7]))
        with pyro.plate("rows", 3):
            pyro.sample("z", dist.Bernoulli(logits=q))
            if summed == "guide":
                pyro.sample("k", dist.Bernoulli(logits=q - 0.5), infer=mark)

    elbo = TraceBackpropQ_ELBO(num_particles=1, **({"enumeration": "exact"} if summed else {}))
    with told(BPQWarning) as said:
        trained(elbo, model, guide, steps=5)
    return elbo, bias(elbo.eval(), model, guide), said


SUMMED = pytest.mark.parametrize("summed", ["", "model", "guide"], ids=["alone", "model", "guide"])


@pytest.mark.parametrize("name", MEETING)
@SUMMED
def test_rows_that_meet_are_found(summed: str, name: str) -> None:
    elbo, error, said = largest_error(MEETING[name], summed)
    assert elbo.runner.recordings.crosses and error < 1e-10
    assert any("Rows of the plate 'rows' meet in" in text for text in said)


@pytest.mark.parametrize("name", APART)
@SUMMED
def test_rows_that_keep_apart_are_left_alone(summed: str, name: str) -> None:
    elbo, error, said = largest_error(APART[name], summed)
    assert not elbo.runner.recordings.crosses and error < 1e-10 and not said
