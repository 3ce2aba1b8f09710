"""Shapes of data, numbers out of range and broken parameters: the message says what to write, and that is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import BPQError, BPQWarning, PlateError, UnsupportedProgramError, UnsupportedSiteError

ROWS = 8


def guide() -> None:
    with pyro.plate("rows", ROWS):
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.zeros(ROWS))))


def seeing(law: Callable[[Tensor], Any], data: Tensor) -> Callable[[], None]:
    """A model that draws a coin in each row, and sees data."""

    def model() -> None:
        with pyro.plate("rows", ROWS):
            pyro.sample("x", law(pyro.sample("z", dist.Bernoulli(0.5))), obs=data)

    return model


def normal(z: Tensor) -> Any:
    return dist.Normal(z, 1.0)


def text_of(model: Any, guide: Any, kind: type[Exception], **options: Any) -> str:
    with pytest.raises(BPQError) as caught:
        TraceBackpropQ_ELBO(**options).loss_and_grads(model, guide)
    assert isinstance(caught.value, kind)
    return str(caught.value)


DATA: dict[str, tuple[Callable[[Tensor], Any], Tensor, str]] = {
    "column": (normal, torch.zeros(ROWS, 1), "Write obs=data.squeeze(-1), and give the parameters the shape (8,) too."),
    "columns": (lambda z: dist.Normal(z[..., None], 1.0), torch.zeros(ROWS, 1), "Write obs=data.squeeze(-1)"),
    "many": (normal, torch.zeros(ROWS, 3), "mean[..., None].expand(8, 3), and write .to_event(1)"),
    "turned": (
        lambda z: dist.Normal(z[..., None], torch.ones(3)).to_event(1),
        torch.zeros(3, ROWS),
        "as by data.permute(...)",
    ),
    "short": (normal, torch.zeros(7), "has the shape (7,); the distribution has the shape (8,)"),
}


@pytest.mark.parametrize(("law", "data", "words"), DATA.values(), ids=DATA)
@pytest.mark.parametrize("particles", [1, 3])
def test_shape_of_data_is_told_with_what_to_write(
    law: Callable[[Tensor], Any], data: Tensor, words: str, particles: int
) -> None:
    model = seeing(law, data)
    text = text_of(model, guide, PlateError, num_particles=particles, vectorize_particles=False)
    assert f"The data of site 'x' has the shape {tuple(data.shape)}" in text and words in text
    # What to write stands before the table of shapes.
    assert "Trace Shapes" not in text or text.index(words) < text.index("Trace Shapes")


def test_the_advice_about_data_is_right() -> None:
    right = {
        "column": seeing(normal, torch.zeros(ROWS, 1).squeeze(-1)),
        "many": seeing(lambda z: dist.Normal(z[..., None].expand(8, 3), 1.0).to_event(1), torch.zeros(ROWS, 3)),
    }
    for model in right.values():
        assert TraceBackpropQ_ELBO().loss_and_grads(model, guide) > 0.0


def test_too_small_nesting_that_shows_at_a_value() -> None:
    options: dict[str, Any] = {"num_particles": 3, "vectorize_particles": True}
    model = seeing(normal, torch.zeros(ROWS))
    text = text_of(model, guide, PlateError, max_plate_nesting=0, **options)
    assert "site 'z' has values of its own there. Write max_plate_nesting=1 or more" in text
    TraceBackpropQ_ELBO(max_plate_nesting=1, **options).loss_and_grads(model, guide)


READS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda z: float(z.numpy().sum()),
    "int of numpy": lambda z: [0.0, 1.0][int(z.numpy())],
    "list": lambda z: sum([z.reshape(-1).tolist()[0]]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_values_that_leave_torch_whole_name_the_site(read: Callable[[Tensor], Any]) -> None:
    def model() -> None:
        mean = read(pyro.sample("z", dist.Bernoulli(0.5)))
        pyro.sample("x", dist.Normal(mean, 1.0), obs=torch.tensor(1.0))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.zeros(()))))

    options: dict[str, Any] = {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 0}
    text = text_of(model, guide, UnsupportedProgramError, **options)
    for words in ("A sampled value of 'z' left torch", "3 particles", "vectorize_particles=False"):
        assert words in text


@pytest.mark.parametrize("is_validated", [True, False])
def test_broken_parameters_are_named(is_validated: bool) -> None:
    def broken() -> None:
        pyro.param("whole", torch.zeros(2))
        with pyro.plate("rows", ROWS):
            pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.full((ROWS,), float("nan")))))

    with pyro.validation_enabled(is_validated):
        text = text_of(seeing(normal, torch.zeros(ROWS)), broken, UnsupportedSiteError)
    assert "The parameters 'q' have elements that are not finite" in text and "ClippedAdam" in text


def test_parameter_out_of_range_says_where_and_which_constraint() -> None:
    def negative(z: Tensor) -> Any:
        return dist.Normal(z, pyro.param("s", torch.tensor(-1.0)))

    text = text_of(seeing(negative, torch.zeros(ROWS)), guide, UnsupportedSiteError)
    assert "The program makes this Normal in the model, after the statement 'z': look at its scale there." in text
    assert "constraint=dist.constraints.positive" in text


def test_other_errors_of_torch_are_left_alone() -> None:
    def wrong(z: Tensor) -> Any:
        return dist.Normal(torch.ones(2) @ torch.ones(3), 1.0)

    with pytest.raises(RuntimeError, match="inconsistent tensor size") as caught:
        TraceBackpropQ_ELBO().loss_and_grads(seeing(wrong, torch.zeros(ROWS)), guide)
    assert not isinstance(caught.value, BPQError)


def test_a_loss_that_is_nan_names_the_site_where_it_arose() -> None:
    def negative(z: Tensor) -> Any:
        return dist.Normal(z, torch.tensor(-1.0))

    with pyro.validation_enabled(False), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        TraceBackpropQ_ELBO().loss_and_grads(seeing(negative, torch.zeros(ROWS)), guide)
    texts = [str(one.message) for one in found if one.category is BPQWarning]
    assert len(texts) == 1 and "log-probability of site 'x' is NaN" in texts[0] and "Normal" in texts[0]
