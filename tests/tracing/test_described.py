"""Shapes of data, numbers out of range and broken parameters: the message says what to write, and that is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions.transforms import affine_coupling, planar
from pyro.nn import PyroModule, PyroParam
from steps import filtered, repeat, text_of, told, warnings_of
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import (
    BPQError,
    BPQWarning,
    PlateError,
    SiteNotFoundError,
    UnsupportedSiteError,
)

ROWS = 8
VECTORISED = {"num_particles": 4, "vectorize_particles": True, "max_plate_nesting": 0}


def drawing(start: Any, **options: Any) -> Callable[[], None]:
    """A guide that draws a coin in each row, whose logits are a parameter."""

    def guide() -> None:
        with pyro.plate("rows", ROWS):
            pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", start)), **options)

    return guide


guide = drawing(torch.zeros(ROWS))


def seeing(law: Callable[[Tensor], Any], data: Tensor) -> Callable[[], None]:
    """A model that draws a coin in each row, and sees data."""

    def model() -> None:
        with pyro.plate("rows", ROWS):
            pyro.sample("x", law(pyro.sample("z", dist.Bernoulli(0.5))), obs=data)

    return model


def normal(z: Tensor) -> Any:
    return dist.Normal(z, 1.0)


DATA: dict[str, tuple[Callable[[Tensor], Any], Tensor, str]] = {
    "column": (normal, torch.zeros(ROWS, 1), "as by data.squeeze(-1)"),
    "columns": (lambda z: dist.Normal(z[..., None], 1.0), torch.zeros(ROWS, 1), "as by data.squeeze(-1)"),
    "many": (normal, torch.zeros(ROWS, 3), "give the parameters the shape (8, 3) and write .to_event(...)"),
    "turned": (
        lambda z: dist.Normal(z[..., None], torch.ones(3)).to_event(1),
        torch.zeros(3, ROWS),
        "or data.permute(...)",
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


@pytest.mark.parametrize("is_validated", [True, False])
def test_broken_parameters_are_named(is_validated: bool) -> None:
    pyro.param("whole", torch.zeros(2))
    with pyro.validation_enabled(is_validated):
        broken = drawing(torch.full((ROWS,), float("nan")))
        text = text_of(seeing(normal, torch.zeros(ROWS)), broken, UnsupportedSiteError)
    assert "The parameters 'q' have elements that are not finite" in text and "ClippedAdam" in text


def test_parameter_out_of_range_says_where_and_which_constraint() -> None:
    def negative(z: Tensor) -> Any:
        return dist.Normal(z, pyro.param("s", torch.tensor(-1.0)))

    text = text_of(seeing(negative, torch.zeros(ROWS)), guide, UnsupportedSiteError)
    assert (
        "The scale of a Normal that the model makes after the statement 'z' is out of range: look at it there." in text
    )
    assert "constraint=dist.constraints.positive" in text


def test_a_loss_that_is_nan_names_the_site_where_it_arose() -> None:
    def negative(z: Tensor) -> Any:
        return dist.Normal(z, torch.tensor(-1.0))

    with pyro.validation_enabled(False):
        (text,) = warnings_of(seeing(negative, torch.zeros(ROWS)), guide)
    assert "log-probability of site 'x' is NaN" in text and "Normal" in text


def amortised(x: Tensor) -> None:
    with pyro.plate("rows", len(x)):
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("w", torch.tensor(1.0)) * x))


def seen(x: Any) -> None:
    with pyro.plate("rows", len(x)):
        pyro.sample("x", dist.Normal(pyro.sample("z", dist.Bernoulli(0.5)), 1.0), obs=x)


@pytest.mark.parametrize("names", [False, True], ids=["by position", "by name"])
def test_an_argument_with_nan_is_named_where_the_guide_reads_it(names: bool) -> None:
    x = torch.tensor([1.0, float("nan"), 0.0])
    with pytest.raises(UnsupportedSiteError) as caught:
        TraceBackpropQ_ELBO().loss_and_grads(seen, amortised, *([] if names else [x]), **({"x": x} if names else {}))
    start = f"Argument {'x' if names else 0!r} of the programs has NaN in 1 of 3 elements, and the guide computes with"
    assert str(caught.value).startswith(start.replace("Argument x", "Argument 'x'"))

    def masked(x: Tensor) -> None:
        with pyro.plate("rows", len(x)):
            mean = pyro.sample("z", dist.Bernoulli(0.5))
            with pyro.poutine.mask(mask=~x.isnan()):
                pyro.sample("x", dist.Normal(mean, 1.0), obs=x.nan_to_num())

    # What it advises is right.
    assert TraceBackpropQ_ELBO().loss_and_grads(masked, lambda x: amortised(x.nan_to_num()), x) > 0.0


def test_the_program_that_fails_is_named() -> None:
    def wrong() -> None:
        with pyro.plate("rows", ROWS):
            pyro.sample("z", dist.Bernoulli(pyro.param("q", torch.full((ROWS,), 1.5))))

    text = text_of(seeing(normal, torch.zeros(ROWS)), wrong, UnsupportedSiteError)
    assert text.startswith("The probs of a Bernoulli that the guide makes is out of range")
    assert "constraint=dist.constraints.unit_interval" in text


def test_numpy_arrays_are_told() -> None:
    with pytest.raises(BPQError) as caught:
        TraceBackpropQ_ELBO().loss_and_grads(seen, amortised, torch.ones(3).numpy())
    assert "Argument 0 of the programs is a NumPy array: hand over torch.as_tensor(...) of it." in str(caught.value)


SIZES: dict[str, tuple[Any, Any, str]] = {
    "guide": (seeing(normal, torch.zeros(ROWS)), (ROWS, 3), "In the guide the plate 'rows' has 8 rows in dimension -1"),
    "model": (seeing(lambda z: dist.Normal(torch.zeros(ROWS, 3), 1.0), torch.zeros(ROWS, 3)), (ROWS,), "In the model"),
}


@pytest.mark.parametrize(("model", "shape", "words"), SIZES.values(), ids=SIZES)
def test_a_distribution_that_does_not_fit_its_plate_says_in_which_program(model: Any, shape: Any, words: str) -> None:
    text = text_of(model, drawing(torch.zeros(shape)), PlateError)
    assert words in text and "has 3 there. If these 3 belong to each row, write .to_event(1)" in text


def test_data_outside_of_the_support_are_counted() -> None:
    data = torch.tensor([0, 1, 4, 0, 5, 1, 0, 0])
    text = text_of(seeing(lambda z: dist.Categorical(torch.ones(3)), data), guide, UnsupportedSiteError)
    assert text.startswith("The data of site 'x' has 2 of 8 values outside of the support")


def test_a_misspelt_key_of_infer_is_told() -> None:
    wrong = drawing(torch.zeros(ROWS), infer={"bqp": {"critic": None}, "other": 1})
    (text,) = warnings_of(seeing(normal, torch.zeros(ROWS)), wrong)
    assert "Site 'z' has infer={'bqp': ...}, which nothing reads" in text


def test_model_and_guide_in_the_wrong_order_are_told() -> None:
    with filtered("ignore", UserWarning):
        (text,) = warnings_of(guide, seeing(normal, torch.zeros(ROWS)))
    assert "The guide observes data at ['x']" in text and "SVI(model, guide, ...)" in text


class Weighted(PyroModule):  # type: ignore[misc]
    """A model with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.loc = torch.nn.Parameter(torch.zeros(()))
        self.scale = PyroParam(torch.ones(()), dist.constraints.positive)

    def forward(self) -> None:
        with pyro.plate("rows", ROWS):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("x", dist.Normal(self.loc + z, self.scale), obs=torch.zeros(ROWS))


class Guide(PyroModule):  # type: ignore[misc]
    """A guide with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = PyroParam(torch.zeros(ROWS))

    def forward(self) -> None:
        with pyro.plate("rows", ROWS):
            pyro.sample("z", dist.Bernoulli(logits=self.logits))


@pytest.mark.parametrize("is_module", [False, True])
def test_parameters_that_a_torch_optimiser_would_not_see_are_named_once(is_module: bool) -> None:
    loss = TraceBackpropQ_ELBO()(Weighted(), Guide() if is_module else guide)
    with told(BPQWarning) as texts:
        for _ in range(3):
            loss().backward()
    assert len(texts) == (not is_module)
    assert is_module or texts[0].startswith("The parameters ['q'] belong to no module")


def test_a_missing_site_is_guessed_from_many() -> None:
    def model() -> None:
        for t in range(12):
            pyro.sample(f"z{t}", dist.Bernoulli(0.5))

    def other() -> None:
        for t in range(12):
            pyro.sample(f"z_{t}", dist.Bernoulli(logits=pyro.param("q", torch.zeros(()))))

    with filtered("ignore", UserWarning):
        text = text_of(model, other, SiteNotFoundError)
    assert "Did you mean 'z_0'?" in text and "and 4 more" in text and "'z_11'" not in text


def test_what_a_guide_computes_is_no_observation() -> None:
    def guide() -> None:
        z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))
        pyro.deterministic("twice", 2 * z)

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.deterministic("twice", 2 * z)

    with warnings.catch_warnings():
        # Pyro finds the guide's value missing from the model.
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", BPQWarning)
        TraceBackpropQ_ELBO().loss_and_grads(model, guide)


@pytest.mark.parametrize(
    ("kind", "options"), [(affine_coupling, {}), (planar, VECTORISED), (affine_coupling, VECTORISED)]
)
def test_flows_with_and_without_an_inverse(kind: Any, options: dict[str, Any]) -> None:
    """A flow remembers what it drew; one without an inverse knows the density of nothing else."""
    flow = kind(2)

    def guide() -> None:
        pyro.module("flow", flow)
        w = pyro.sample("w", dist.TransformedDistribution(dist.Normal(torch.zeros(2), 1.0).to_event(1), [flow]))
        pyro.sample("z", dist.Bernoulli(logits=w.sum(-1)))

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.sample("x", dist.Normal(w.sum(-1) + z, 1.0), obs=torch.tensor(0.7))

    pyro.clear_param_store()
    elbo = TraceBackpropQ_ELBO(**options)
    with filtered("error", BPQWarning):
        repeat(14, elbo.loss_and_grads, model, guide)
