"""Mistakes in guide and model: the message names the site, the plates or the particles, and says what to write."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import filtered, text_of, warnings_of
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO, cost
from pyro_bpq.errors import BPQError, PlateError, UnsupportedProgramError, UnsupportedSiteError

Program = Callable[[], Any]
TOGETHER: dict[str, Any] = {"num_particles": 3, "vectorize_particles": True}


def logits(*shape: int) -> Tensor:
    return pyro.param("q", torch.full(shape, 0.3))


def coin(fn: Any = None, **options: Any) -> Tensor:
    return pyro.sample("z", dist.Bernoulli(0.4) if fn is None else fn, **options)


def guide() -> Tensor:
    return coin(dist.Bernoulli(logits=logits()))


def pair_guide() -> Tensor:
    return coin(dist.Bernoulli(logits=logits(2)).to_event(1))


def see(mean: Any) -> None:
    pyro.sample("x", dist.Normal(mean, 1.0), obs=torch.tensor(0.7))


def model() -> None:
    see(coin())


# Values that leave torch while several particles run at once


def branches() -> None:
    if coin() > 0:
        see(0.3)
    else:
        see(0.1)


READS: dict[str, Program] = {
    "if": branches,
    "item": lambda: see(coin().item()),
    "max": lambda: see(max(coin(), 0.5)),
    "numpy": lambda: see(float(coin().numpy().sum())),
    "list": lambda: see(sum(coin().reshape(-1).tolist())),
}


@pytest.mark.parametrize("program", READS.values(), ids=READS)
def test_read_of_one_value_names_the_site_and_the_particles(program: Program) -> None:
    text = text_of(program, guide, UnsupportedProgramError, **TOGETHER)
    for words in ("A sampled value of 'z' left torch", "3 particles", "vectorize_particles=False", "torch.where"):
        assert words in text
    # What it advises is right.
    TraceBackpropQ_ELBO(num_particles=3, vectorize_particles=False).loss_and_grads(program, guide)


def test_read_in_the_guide_names_only_the_sites_that_were_read() -> None:
    def two() -> None:
        z = guide()
        w = pyro.sample("w", dist.Bernoulli(logits=logits()))
        if z > 0:
            pyro.sample("v", dist.Bernoulli(logits=logits() + w))

    text = text_of(model, two, UnsupportedProgramError, **TOGETHER)
    assert "'z'" in text and "'w'" not in text


@pytest.mark.parametrize("options", [{}, TOGETHER], ids=["one", "together"])
def test_read_of_the_programs_own_tensor_is_left_alone(options: dict[str, Any]) -> None:
    def wrong() -> None:
        coin()
        if torch.zeros(3) > 0:
            see(0.3)

    with pytest.raises(RuntimeError, match="ambiguous") as caught:
        TraceBackpropQ_ELBO(max_plate_nesting=0, **options).loss_and_grads(wrong, guide)
    assert not isinstance(caught.value, BPQError)


# Programs that do not broadcast over particles


def indexes() -> None:
    z = pyro.sample("z", dist.Bernoulli(torch.full((4,), 0.4)).to_event(1))
    see(z[3])


def unpacks() -> None:
    a, b = coin(dist.Bernoulli(torch.tensor([0.4, 0.3])).to_event(1))
    see(a + b)


def takes_the_first() -> None:
    see(coin(dist.Bernoulli(torch.tensor([0.4, 0.3])).to_event(1))[0])


@pytest.mark.parametrize(
    ("program", "theirs", "kind"),
    [
        (indexes, "out of bounds", UnsupportedProgramError),
        (unpacks, "too many values to unpack", PlateError),
        (takes_the_first, "Shape mismatch inside plate", PlateError),
    ],
)
def test_program_that_does_not_broadcast_is_told_of_the_particles(
    program: Program, theirs: str, kind: type[Exception]
) -> None:
    def matching() -> None:
        coin(dist.Bernoulli(logits=logits(4 if program is indexes else 2)).to_event(1))

    text = text_of(program, matching, kind, **TOGETHER)
    for words in (theirs, "3 particles ran at once", "in dimension -1", "vectorize_particles=False", "z[..., 0]"):
        assert words in text
    TraceBackpropQ_ELBO(num_particles=3, vectorize_particles=False).loss_and_grads(program, matching)


def test_particles_that_moved_are_told_of_particles_one_after_the_other() -> None:
    def mixes() -> None:
        with pyro.plate("rows", 3):
            z = coin()
        pyro.sample("x", dist.Normal(z @ torch.ones(3, 1), 1.0).to_event(1), obs=torch.tensor([0.7]))

    text = text_of(mixes, lambda: in_rows(posterior(3)), PlateError, **TOGETHER)
    assert "'-log p(x)'" in text and "write vectorize_particles=False" in text


class OutOfMemory(RuntimeError):
    """As torch's error, which is not about shapes, although it speaks of sizes."""


@pytest.mark.parametrize("error", [RuntimeError("the simulator is down"), OutOfMemory("no block of that size is left")])
@pytest.mark.parametrize("options", [{}, TOGETHER], ids=["one", "together"])
def test_errors_that_are_not_about_shapes_are_left_alone(error: Exception, options: dict[str, Any]) -> None:
    def fails() -> None:
        coin()
        raise error

    with pytest.raises(type(error), match=str(error)) as caught:
        TraceBackpropQ_ELBO(max_plate_nesting=0, **options).loss_and_grads(fails, guide)
    assert not isinstance(caught.value, BPQError) and "vectorize_particles" not in str(caught.value)


# Plates


def in_rows(fn: Any, dim: int = -1) -> None:
    with pyro.plate("rows", 3, dim=dim):
        coin(fn)


def model_rows() -> None:
    in_rows(dist.Bernoulli(0.4))


def posterior(*shape: int) -> Any:
    return dist.Bernoulli(logits=logits(*shape))


LEFT, NONE, UP = "[('rows', -1, 3)]", "[]", "[('rows', -2, 3)]"
ADVICE = 'Put it into the same in both: with pyro.plate("rows", 3, dim=-1).'


@pytest.mark.parametrize(
    ("program", "other", "plates"),
    [
        (model_rows, guide, (LEFT, NONE)),
        (model_rows, lambda: coin(posterior(3)), (LEFT, NONE)),
        (model, lambda: in_rows(posterior()), (NONE, LEFT)),
        (model_rows, lambda: in_rows(posterior(), -2), (LEFT, UP)),
    ],
)
def test_plates_that_differ_are_named_for_both(program: Any, other: Any, plates: tuple[str, str]) -> None:
    text = text_of(program, other, PlateError)
    assert "'z' is in the plates {} in the model, and {} in the guide".format(*plates) in text and ADVICE in text


def nested(fn: Any) -> None:
    with pyro.plate("columns", 2, dim=-2), pyro.plate("rows", 3, dim=-1):
        coin(fn)


@pytest.mark.parametrize("options", [{}, TOGETHER], ids=["one", "together"])
@pytest.mark.parametrize(("program", "given", "needed"), [(in_rows, 0, 1), (nested, 0, 2), (nested, 1, 2)])
def test_nesting_that_is_too_small_names_the_number(
    program: Callable[[Any], None], given: int, needed: int, options: dict[str, Any]
) -> None:
    both = (lambda: program(dist.Bernoulli(0.4))), (lambda: program(posterior()))
    text = text_of(*both, PlateError, max_plate_nesting=given, **options)
    if program is nested and given == 0 and options:
        # Two numbers are too small by turns: each error names a larger one.
        assert "Write max_plate_nesting=" in text
        return
    assert f"Write max_plate_nesting={needed}, or leave it out" in text
    TraceBackpropQ_ELBO(max_plate_nesting=needed, **options).loss_and_grads(*both)


# Distributions and data


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda: dist.Categorical(logits=logits(3) + torch.tensor([0.0, 0.0, 20.0])), "Categorical"),
        (lambda: dist.Categorical(logits=logits(2)), "Categorical"),
        (lambda: dist.Normal(logits(), 1.0), "Normal (support Real())"),
    ],
)
def test_other_support_in_the_guide_names_both_distributions(fn: Callable[[], Any], words: str) -> None:
    text = text_of(model, lambda: coin(fn()), UnsupportedSiteError)
    assert f"Site 'z' is drawn from {words}" in text and "under Bernoulli (support Boolean()) in the model" in text
    assert "Write Bernoulli in the guide" in text


FAMILIES: dict[str, Callable[[], Any]] = {
    "Categorical": lambda: dist.Categorical(logits=logits(3)),
    "OneHotCategorical": lambda: dist.OneHotCategorical(logits=logits(3)),
}


@pytest.mark.parametrize("ours", FAMILIES)
@pytest.mark.parametrize("reads", [False, True], ids=["scores", "fails in the model's own lines"])
def test_one_hot_against_categorical_names_both(ours: str, reads: bool) -> None:
    (theirs,) = FAMILIES.keys() - {ours}

    def model() -> None:
        z = coin(FAMILIES[theirs]())
        if reads:
            see(torch.arange(3.0)[z] if theirs == "Categorical" else z @ torch.arange(3.0))

    text = text_of(model, lambda: coin(FAMILIES[ours]()), PlateError)
    assert f"Site 'z' is drawn from {ours} (" in text and f"scored under {theirs} (" in text
    assert f"Write {theirs} in the guide, or {ours} in the model." in text


def test_to_event_in_the_guide_alone_says_where_it_is_missing() -> None:
    def model() -> None:
        with pyro.plate("rows", 2):
            coin(dist.Bernoulli(0.4))

    for program in (model, lambda: coin(dist.Bernoulli(0.4))):
        text = text_of(program, pair_guide, PlateError)
        assert "drawn from Bernoulli (support Boolean(), shape (2,)) in the guide" in text
        assert "the same .to_event(...), or the same plate in its place" in text


def test_more_values_in_the_guide_are_told() -> None:
    def model() -> None:
        see(torch.arange(3.0)[coin(dist.Categorical(torch.ones(3)))])

    def four() -> None:
        coin(dist.Categorical(torch.tensor([0.0, 0.0, 0.0, 1.0]) + logits(4)))

    text = text_of(model, four, PlateError)
    assert (
        "upper_bound=3)) in the guide" in text
        and "upper_bound=2)) in the model. Give both the same number of values" in text
    )


def test_plates_with_other_names_in_the_guide_warn_once() -> None:
    def program(name: str, fn: Any) -> None:
        with pyro.plate(name, 3):
            coin(fn)

    def model() -> None:
        program("rows", dist.Bernoulli(0.4))

    with filtered("ignore", UserWarning):
        assert warnings_of(model, lambda: program("rows", dist.Bernoulli(logits=logits())), steps=4) == []
        (text,) = warnings_of(model, lambda: program("row", dist.Bernoulli(logits=logits())), steps=4)
    assert "is 'row' in the guide, and 'rows' in the model" in text and "Write 'rows' in the guide" in text


@pytest.mark.parametrize("value", [lambda z: torch.tensor(-1.0), lambda z: -z.sum()], ids=["constant", "sum"])
def test_a_single_factor_in_a_plate_warns_once(value: Callable[[Tensor], Tensor]) -> None:
    def model(rows: bool) -> None:
        with pyro.plate("rows", 3):
            z = coin()
            pyro.factor("f", -z if rows else value(z))

    def guide() -> None:
        in_rows(posterior())

    texts = warnings_of(lambda: model(False), guide, steps=4)
    assert sum("The factor 'f' is a single number in the plate 'rows'" in text for text in texts) == 1
    assert any("3 times" in text and "pyro.factor('f', ...) outside of the plate" in text for text in texts)
    assert not any("factor" in text for text in warnings_of(lambda: model(True), guide, steps=4))


def test_probability_against_a_density_warns_once() -> None:
    def density() -> None:
        see(coin(dist.Normal(0.0, 1.0)))

    (text,) = warnings_of(density, guide, steps=8)
    assert "'z'" in text and "Bernoulli" in text and "Normal (support Real())" in text and "same support" in text


def test_missing_data_name_the_observed_site() -> None:
    def missing() -> None:
        z = coin()
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.Normal(z, 1.0), obs=torch.tensor([0.7, float("nan"), 0.1]))

    text = text_of(missing, guide, UnsupportedSiteError)
    assert "data of site 'y' has 1 of 3 values that are NaN" in text and "pyro.poutine.mask(mask=~data.isnan())" in text
    with pyro.validation_enabled(False):
        (told,) = warnings_of(missing, guide, num_particles=1)
    assert "data of site 'y' has 1 of 3 values that are NaN" in told


def test_missing_data_of_an_event_are_masked_within_it() -> None:
    data = torch.tensor([[3.0, float("nan")], [1.0, 0.0]])

    def missing() -> None:
        z = coin()
        with pyro.plate("rows", 2):
            pyro.sample("y", dist.Poisson(1.0 + z).expand([2, 2]).to_event(1), obs=data)

    def masked() -> None:
        z = coin()
        with pyro.plate("rows", 2):
            fn = dist.Poisson(1.0 + z).expand([2, 2]).mask(~data.isnan()).to_event(1)
            pyro.sample("y", fn, obs=data.nan_to_num())

    text = text_of(missing, guide, UnsupportedSiteError)
    # What to do comes before the data, which may be long.
    assert text.startswith("The data of site 'y' has 1 of 4 values that are NaN.")
    assert 'pyro.sample("y", dist.Poisson(...).mask(~data.isnan()).to_event(1), obs=data.nan_to_num())' in text
    assert TraceBackpropQ_ELBO().loss_and_grads(masked, guide) > 0.0


# Costs


def test_cost_with_rows_outside_of_plates_says_what_to_write() -> None:
    def rows() -> None:
        cost("c", coin() * torch.ones(5))

    text = text_of(rows, guide, PlateError)
    for words in ("Site 'c' has the batch shape (5,)", "dimension -1 is no plate", ".sum(-1)", "plate with dim=-1"):
        assert words in text


def in_plate(value: Callable[[Tensor], Any]) -> Program:
    def program() -> None:
        z = coin()
        with pyro.plate("rows", 20):
            cost("c", value(z))

    return program


@pytest.mark.parametrize("options", [{}, {"num_particles": 1}, TOGETHER], ids=["open", "one", "together"])
@pytest.mark.parametrize("value", [lambda z: 2.0 * z, lambda z: 2.0], ids=["of z", "constant"])
def test_cost_that_counts_once_per_row_warns_once(value: Callable[[Tensor], Any], options: dict[str, Any]) -> None:
    # Under Python's own filter; what is shown in a run of many steps.
    elbo = TraceBackpropQ_ELBO(**options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(15):
            elbo.loss_and_grads(in_plate(value), guide)
    (text,) = [str(warning.message) for warning in found]
    for words in ("cost 'c'", "plate 'rows'", "20 times", "outside of the plate", "value + torch.zeros(20)"):
        assert words in text


def test_cost_with_the_name_of_a_site_is_told() -> None:
    def latent() -> None:
        model()
        pyro.sample("w", dist.Bernoulli(0.4))

    own = (lambda: cost("z", coin())), guide
    for name, pair in (
        ("z", own),
        ("z", (model, lambda: cost("z", guide()))),
        ("w", (latent, lambda: cost("w", guide()))),
    ):
        text = text_of(*pair, RuntimeError)
        assert f"The cost '{name}' has the name of another statement" in text and f'cost("{name}_cost", ...)' in text


# Enumeration


def test_marked_site_that_is_sampled_is_told_of_exact_enumeration() -> None:
    def marked() -> None:
        coin(dist.Bernoulli(logits=logits()), infer={"enumerate": "parallel"})

    # Of all warnings, Pyro's own included.
    (text,) = warnings_of(model, marked, steps=8, category=Warning, num_particles=1)
    assert "['z']" in text and 'TraceBackpropQ_ELBO(enumeration="exact")' in text
    assert warnings_of(model, marked, enumeration="exact") == []
