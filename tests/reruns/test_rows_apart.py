"""Rows of a plate that meet, in operators of all kinds."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import fresh, repeat, told
from torch import Tensor, nn
from torch.nn.functional import conv1d, one_hot

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQWarning
from pyro_bpq.testing import exact_gradient, expected_gradient

DATA, EDGES = torch.tensor([0.3, -0.7, 1.2]), torch.tensor([0.5, 1.5])
Read = Callable[[Tensor, Tensor], Tensor]


def smoothed(z: Tensor, w: Tensor) -> Tensor:
    weight = torch.tensor([[[0.3, -0.4, 0.8]]], dtype=z.dtype)
    return conv1d(z.reshape(-1, 1, 3), weight, padding=1).reshape(z.shape)


def normalised(z: Tensor, w: Tensor) -> Tensor:
    return nn.BatchNorm1d(1, affine=False).to(z)(z.reshape(-1, 1)).reshape(z.shape)


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
    # At nearly all values nothing shows.
    "all rows at once": lambda z, w: torch.bucketize((z > 0).all().to(z), EDGES).to(z),
}
APART: dict[str, Read] = {
    "bucketize": lambda z, w: torch.bucketize(z, EDGES).to(z),
    "one_hot": lambda z, w: one_hot(z.long(), 2).to(z)[..., 1],
    "convolution": lambda z, w: conv1d(z.reshape(-1, 1, 1), torch.ones(1, 1, 1).to(z)).reshape(z.shape),
    "index of the own row": lambda z, w: w[z.long()],
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

    pyro.clear_param_store()
    options = {"enumeration": "exact"} if summed else {}
    truth = exact_gradient(model, guide)
    fresh()
    elbo = TraceBackpropQ_ELBO(num_particles=1, **options)
    with told(BPQWarning) as said:
        repeat(5, elbo.loss_and_grads, model, guide)
    found = expected_gradient(elbo.eval(), model, guide)
    error = max((found[name] - truth[name]).abs().max().item() for name in truth)
    return elbo, error, said


@pytest.mark.parametrize("name", MEETING)
def test_rows_that_meet_are_found(name: str) -> None:
    elbo, error, said = largest_error(MEETING[name])
    assert elbo.runner.recordings.crosses and error < 1e-10
    assert any("Rows of the plate 'rows' meet in -log p(x)" in text for text in said)


@pytest.mark.parametrize("name", APART)
def test_rows_that_keep_apart_are_left_alone(name: str) -> None:
    elbo, error, said = largest_error(APART[name])
    assert not elbo.runner.recordings.crosses and error < 1e-10 and not said


@pytest.mark.parametrize("summed", ["model", "guide"])
@pytest.mark.parametrize("name", MEETING)
def test_rows_that_meet_are_found_beside_enumerated_sites(name: str, summed: str) -> None:
    elbo, error, said = largest_error(MEETING[name], summed)
    assert elbo.runner.recordings.crosses and error < 1e-10
    assert any("Rows of the plate 'rows' meet in" in text for text in said)


@pytest.mark.parametrize("summed", ["model", "guide"])
@pytest.mark.parametrize("name", APART)
def test_rows_that_keep_apart_are_left_alone_beside_enumerated_sites(name: str, summed: str) -> None:
    elbo, error, said = largest_error(APART[name], summed)
    assert not elbo.runner.recordings.crosses and error < 1e-10 and not said


def test_rows_that_meet_are_not_found_where_nothing_follows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_bpq.record.recorded.rows_that_meet", lambda *args: {})
    _, error, said = largest_error(MEETING["one_hot"])
    assert error > 0.01 and not said
