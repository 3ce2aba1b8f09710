"""Mistakes in guide and model: the message names the site, the plates or the particles, and says what to write."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import DATA, Guide, Model, filtered, repeat, text_of, told, warnings_of
from torch import Tensor

from pyro_bpq import ExpectedCost, MLPCritic, TraceBackpropQ_ELBO, cost
from pyro_bpq.errors import BPQError, BPQWarning, PlateError, UnsupportedProgramError, UnsupportedSiteError

Program = Callable[[], Any]
TOGETHER: dict[str, Any] = {"num_particles": 3, "vectorize_particles": True}
NAN = float("nan")


def logits(*shape: int) -> Tensor:
    return pyro.param("q", torch.full(shape, 0.3))


def posterior(*shape: int) -> Any:
    return dist.Bernoulli(logits=logits(*shape))


def coin(fn: Any = None, **options: Any) -> Tensor:
    return pyro.sample("z", dist.Bernoulli(0.4) if fn is None else fn, **options)


def see(mean: Any, data: Any = 0.7) -> None:
    pyro.sample("x", mean if isinstance(mean, dist.Distribution) else dist.Normal(mean, 1.0), obs=torch.as_tensor(data))


def guide() -> Tensor:
    return coin(posterior())


def marked(**infer: Any) -> Program:
    """A guide whose site has options."""
    return lambda: coin(posterior(), infer=infer)


def in_rows(program: Program, size: int = 3, dim: int = -1, name: str = "rows") -> Program:
    def inside() -> None:
        with pyro.plate(name, size, dim=dim):
            program()

    return inside


def rows_guide(size: int = 3, **options: Any) -> None:
    in_rows(lambda: coin(posterior(size), **options), size)()


def rows_model(size: int) -> None:
    """Its data are taken by row, so that the rows of the guide fit."""
    with pyro.plate("rows", size) as rows:
        see(dist.Normal(coin(), 1.0), torch.linspace(-1.0, 1.0, size)[rows])


def with_context(*shape: int) -> Program:
    return lambda: rows_guide(4, infer={"bpq": {"context": torch.ones(shape), "critic": MLPCritic()}})


def model_of(law: Callable[[Tensor], Any], data: Any) -> Program:
    """Coins in rows, and data."""
    return in_rows(lambda: see(law(coin()), data))


def plain() -> None:
    see(coin())


def many(form: str) -> Program:
    return lambda: [pyro.sample(form.format(t), posterior()) for t in range(12)] and None


def latent() -> None:
    plain()
    pyro.sample("w", dist.Bernoulli(0.4))


def twice_in_rows() -> None:
    for name in "zx":
        with pyro.plate("d", 3):
            pyro.sample(name, dist.Bernoulli(0.5))


def of_three(kind: Any, learns: bool = False) -> Callable[[], Tensor]:
    """One of three values."""
    return lambda: coin(kind(logits=logits(3) if learns else torch.zeros(3)))


def event_guide(size: int = 3) -> None:
    coin(posterior(size).to_event(1))


category, one_hot = of_three(dist.Categorical), of_three(dist.OneHotCategorical)
category_guide, one_hot_guide = of_three(dist.Categorical, True), of_three(dist.OneHotCategorical, True)
TWO_SIZES = "The plate 'rows' around site 'z' has 20 rows in the guide, and 40 in the model."
NONE, LEFT, UP = "[]", "[('rows', -1, 3)]", "[('rows', -2, 3)]"
MISSING = [[3.0, NAN], [1.0, 0.0], [2.0, 2.0]]


def apart(model: str, guide: str) -> str:
    in_both = f"'z' is in the plates {model} in the model, and {guide} in the guide"
    return in_both + ' | Put it into the same in both: with pyro.plate("rows", 3, dim=-1).'


ONE_HOT = "drawn from OneHotCategorical ( | scored under Categorical ( | Write Categorical in the guide"
CATEGORY = "drawn from Categorical ( | scored under OneHotCategorical ( | or Categorical in the model."
EVENT = "drawn from Bernoulli (support Boolean(), shape (3,)) in the guide | the same .to_event(...), or the same plate"
OTHER = "under Bernoulli (support Boolean()) in the model | Write Bernoulli in the guide"
# The model, the guide, and what is said, in parts.
Mistakes = dict[str, tuple[Program, Program, str]]
# Coins in three rows: the law of what is seen given them, the data, and what is said.
MISSHAPEN: dict[str, tuple[Callable[[Tensor], Any], Any, str]] = {
    "law": (lambda z: torch.zeros(3, 4), [[0.0] * 4] * 3, "In the model | has 4 there. If these 4 belong to each row"),
    "column": (lambda z: z, [[0.0]] * 3, "has the shape (3, 1) | as by data.squeeze(-1)"),
    "columns": (lambda z: z[..., None], [[0.0]] * 3, "has the shape (3, 1) | as by data.squeeze(-1)"),
    "many": (lambda z: z, [[0.0] * 4] * 3, "give the parameters the shape (3, 4) and write .to_event(...)"),
    "turned": (
        lambda z: dist.Normal(z[..., None], torch.ones(4)).to_event(1),
        [[0.0] * 3] * 4,
        "The data of site 'x' has the shape (4, 3) | or data.permute(...)",
    ),
    "short": (lambda z: z, [0.0] * 2, "data of site 'x' has the shape (2,); the distribution has the shape (3,)"),
}
WRONG: dict[str, tuple[Callable[[Tensor], Any], Any, str]] = {
    "outside": (lambda z: dist.Categorical(torch.ones(3)), [1, 4, 5], "x dist | 2 of 3 values outside of the support"),
    "missing": (lambda z: z, [0.7, NAN, 0.1], "has 1 of 3 values that are NaN | pyro.poutine.mask(mask=~data.isnan())"),
    "missing in an event": (
        lambda z: dist.Poisson(torch.ones(3, 2)).to_event(1),
        MISSING,
        "The data of site 'x' has 1 of 6 values that are NaN. | by fn.mask(~data.isnan()) within .to_event(...)",
    ),
}
PLATES: Mistakes = {
    **{name: (model_of(law, data), rows_guide, words) for name, (law, data, words) in MISSHAPEN.items()},
    "plate in the model": (in_rows(coin), guide, apart(LEFT, NONE)),
    "plate in the guide": (plain, in_rows(guide), apart(NONE, LEFT)),
    "another dimension": (in_rows(coin), in_rows(guide, dim=-2), apart(LEFT, UP)),
    "guide that does not fit": (
        model_of(lambda z: z, [0.0] * 3),
        in_rows(lambda: coin(posterior(3, 4))),
        "In the guide the plate 'rows' has 3 rows in dimension -1 | If these 4 belong to each row, write .to_event(1)",
    ),
    "rows of a cost": (
        lambda: cost("c", coin() * torch.ones(5)),
        guide,
        "Site 'c' has the batch shape (5,) | dimension -1 is no plate | .sum(-1) | plate with dim=-1",
    ),
    "rows of a factor": (
        in_rows(lambda: pyro.factor("f", torch.ones(5) * coin().sum())),
        in_rows(guide),
        "site 'f' has 5 there | .sum(-1) behind a cost or factor",
    ),
    **{
        f"context of shape {shape}": (
            in_rows(coin, 4),
            with_context(*shape),
            f"Site 'z': the option context has the shape {shape} | rows are (4,)",
        )
        for shape in ((5, 2), (4, 1, 2))
    },
    "one hot, scored": (category, one_hot_guide, ONE_HOT),
    "one hot, read": (lambda: see(torch.arange(3.0)[category()]), one_hot_guide, ONE_HOT),
    "category, read": (lambda: see(one_hot() @ torch.arange(3.0)), category_guide, CATEGORY),
    "event in the guide alone": (coin, event_guide, EVENT),
    "more values": (
        lambda: see(torch.arange(3.0)[category()]),
        lambda: coin(dist.Categorical(torch.tensor([0.0, 0.0, 0.0, 1.0]) + logits(4))),
        "upper_bound=3)) in the guide | upper_bound=2)) in the model. Give both the same number of values",
    ),
}
SITES: Mistakes = {
    **{name: (model_of(law, data), rows_guide, words) for name, (law, data, words) in WRONG.items()},
    "categorical": (plain, category_guide, f"Site 'z' is drawn from Categorical | {OTHER}"),
    "broken": (
        plain,
        lambda: coin(dist.Bernoulli(logits=pyro.param("q", torch.tensor(NAN)))),
        "The parameters 'q' have elements that are not finite | ClippedAdam",
    ),
    "scale of the model": (
        lambda: see(dist.Normal(coin(), pyro.param("s", torch.tensor(-1.0)))),
        guide,
        "The scale of a Normal that the model makes after the statement 'z' is out of range: look at it there."
        " | constraint=dist.constraints.positive",
    ),
    "probs of the guide": (
        plain,
        lambda: coin(dist.Bernoulli(pyro.param("q", torch.tensor(1.5)))),
        "The probs of a Bernoulli that the guide makes is out of range | constraint=dist.constraints.unit_interval",
    ),
}
NAMES: Mistakes = {
    "missing site": (many("z{}"), many("z_{}"), "Did you mean 'z_0'? | and 4 more"),
    "cost of site": (lambda: cost("z", coin()), guide, "The cost 'z' has the name of another | cost(\"z_cost\", ...)"),
    "cost of a latent": (latent, lambda: cost("w", guide()), "The cost 'w' has the name of another statement"),
}
PROGRAMS: Mistakes = {
    "float as index": (
        lambda: see(torch.zeros(2)[coin()]),
        guide,
        "values of 'z' are floating-point numbers: write table[z.long()]",
    ),
    "plate made twice": (
        twice_in_rows,
        twice_in_rows,
        'd = pyro.plate("d", ...) | guide.plates["d"], and write "with d:"',
    ),
}
ERRORS = {PlateError: PLATES, UnsupportedSiteError: SITES, UnsupportedProgramError: PROGRAMS, BPQError: NAMES}


def assert_says(text: str, words: str) -> None:
    for part in words.split(" | "):
        assert part in text


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in ERRORS.items() for name in table])
def test_error_says_what_is_wrong_and_what_to_write(kind: type[Exception], name: str) -> None:
    model, guide, words = ERRORS[kind][name]
    with filtered("ignore", UserWarning):
        text = text_of(model, guide, kind)
    assert_says(text, words)
    # What to do comes before shapes and data, which may be long; names that are not alike are left out.
    assert "Trace Shapes" not in text or text.index(words.split(" | ")[-1]) < text.index("Trace Shapes")
    assert "'z_11'" not in text


# What is warned of without validation.
UNVALIDATED: Mistakes = {
    "missing": (*SITES["missing"][:2], "data of site 'x' has 1 of 3 values that are NaN"),
    "cost": (lambda: cost("fee", (coin() - 5.0).log()), guide, "The cost 'fee' is NaN at 1 of 1 elements."),
    "factor": (lambda: pyro.factor("f", (coin() - 5.0).log()), guide, "factor of site 'f' is NaN at 1 of 1 elements."),
    "law": (lambda: see(dist.Normal(coin(), torch.tensor(-1.0))), guide, "log-probability of site 'x' is NaN | Normal"),
}


@pytest.mark.parametrize("name", UNVALIDATED)
def test_numbers_that_are_missing_are_told_without_validation_too(name: str) -> None:
    model, guide, words = UNVALIDATED[name]
    with pyro.validation_enabled(False):
        (text,) = warnings_of(model, guide, num_particles=1)
    assert_says(text, words)


def test_broken_parameters_are_told_without_validation_too() -> None:
    model, guide, words = SITES["broken"]
    with pyro.validation_enabled(False):
        assert_says(text_of(model, guide, UnsupportedSiteError), words)


NAN_COSTS: dict[str, Callable[[Tensor], Any]] = {
    "value": lambda z: cost("fee", (z - 5.0).log()),
    "number": lambda z: cost("fee", NAN),
    "function": lambda z: cost("fee", lambda value: (value - 5.0).log(), z),
}


@pytest.mark.parametrize("fee", NAN_COSTS.values(), ids=NAN_COSTS)
def test_a_cost_that_is_nan_is_named(fee: Callable[[Tensor], Any]) -> None:
    words = "The cost 'fee' is NaN at 1 of 1 elements."
    assert text_of(lambda: fee(coin()), guide, UnsupportedSiteError).startswith(words)
    with pytest.raises(UnsupportedSiteError, match=f"^{words}"):
        ExpectedCost().loss_and_grads(None, lambda: fee(guide()))


def test_an_infinite_cost_is_named() -> None:
    texts = warnings_of(lambda: cost("fee", coin().new_tensor(float("inf"))), guide)
    assert any("The cost 'fee' is infinite at 1 of 1 elements" in text for text in texts)


@pytest.mark.parametrize("options", [{}, TOGETHER], ids=["one", "together"])
@pytest.mark.parametrize("validates", [True, False])
def test_shapes_are_told_with_their_plates(options: dict[str, Any], validates: bool) -> None:
    model = in_rows(lambda: cost("fee", torch.ones(5) + coin().sum(-1, keepdim=True)), 4)
    with pyro.validation_enabled(validates):
        text = text_of(model, in_rows(guide, 4), PlateError, **options)
    assert_says(text, "the plate 'rows' has 4 rows | site 'fee' has 5 there | .sum(-1) behind a cost")


@pytest.mark.parametrize("validates", [True, False])
def test_a_plate_of_two_sizes_is_named_with_both(validates: bool) -> None:
    with pyro.validation_enabled(validates):
        text = text_of(in_rows(lambda: see(coin(), [0.0] * 40), 40), lambda: rows_guide(20), PlateError)
    assert TWO_SIZES in text and "The data of site" not in text


@pytest.mark.parametrize("shape", [(4, 2), (1, 2), (2,)])
def test_a_context_that_broadcasts_to_the_rows_is_taken(shape: tuple[int, ...]) -> None:
    TraceBackpropQ_ELBO().loss_and_grads(in_rows(coin, 4), with_context(*shape))


def test_an_expected_cost_without_a_cost_says_so() -> None:
    with pytest.raises(UnsupportedProgramError, match=r"has no cost.*pyro_bpq\.cost\(name, value\)"):
        ExpectedCost().loss_and_grads(None, guide)
    # It may lack costs in some runs.
    elbo = ExpectedCost()
    seen = {elbo.loss_and_grads(None, lambda: cost("fee", 1.0) if guide() else None) for _ in range(12)}
    assert seen == {0.0, 1.0}


def amortised(x: Tensor) -> None:
    with pyro.plate("rows", len(x)):
        coin(dist.Bernoulli(logits=pyro.param("w", torch.tensor(1.0)) * x))


def seen(x: Any) -> None:
    with pyro.plate("rows", len(x)), pyro.poutine.mask(mask=torch.as_tensor(x).isfinite()):
        pyro.sample("x", dist.Normal(coin(), 1.0), obs=x.nan_to_num())


def test_an_argument_is_named_by_position_or_by_name() -> None:
    x, elbo = torch.tensor([1.0, NAN, 0.0]), TraceBackpropQ_ELBO()
    for name, args, options in (("0", (x,), {}), ("'x'", (), {"x": x})):
        says = rf"^Argument {name} of the programs has NaN in 1 of 3 elements, and the guide computes with"
        with pytest.raises(UnsupportedSiteError, match=says):
            elbo.loss_and_grads(seen, amortised, *args, **options)
    with pytest.raises(BPQError, match=r"Argument 0 .* is a NumPy array: hand over torch.as_tensor\(...\) of it."):
        elbo.loss_and_grads(lambda x: see(coin(), x), amortised, x.nan_to_num().numpy())
    # What it advises is right.
    assert elbo.loss_and_grads(seen, lambda x: amortised(x.nan_to_num()), x) > 0.0


def test_missing_data_of_an_event_are_masked_within_it() -> None:
    data = torch.tensor(MISSING)
    fn = dist.Poisson(torch.ones(3, 2)).mask(~data.isnan()).to_event(1)
    model = in_rows(lambda: [coin(), pyro.sample("x", fn, obs=data.nan_to_num())])
    assert TraceBackpropQ_ELBO().loss_and_grads(model, rows_guide) > 0.0


# Particles that run together.


def branches() -> None:
    if coin() > 0:
        see(0.3)
    else:
        see(0.1)


def unpacks() -> None:
    a, b = coin(PAIR)
    see(a + b)


def mixes() -> None:
    with pyro.plate("rows", 3):
        z = coin()
    see(dist.Normal(z @ torch.ones(3, 1), 1.0).to_event(1), [0.7])


def looks_up() -> None:
    z = coin(PAIR)
    in_rows(lambda: see(z[torch.tensor([0, 1, 1])], [0.0] * 3))()


PAIR, FOUR = (dist.Bernoulli(torch.full((number,), 0.4)).to_event(1) for number in (2, 4))
LEAVES = "A sampled value of 'z' left torch | 3 particles | vectorize_particles=False | torch.where"
MIXES = "3 particles ran at once | in dimension -1 | vectorize_particles=False | z[..., 0]"
LEAVING: Mistakes = {
    "if": (branches, guide, LEAVES),
    "item": (lambda: see(coin().item()), guide, LEAVES),
    "index": (lambda: see(coin(FOUR)[3]), lambda: event_guide(4), f"out of bounds | {MIXES}"),
}
MIXING: Mistakes = {
    "unpacked": (unpacks, lambda: event_guide(2), f"too many values to unpack | {MIXES}"),
    "first": (lambda: see(coin(PAIR)[0]), lambda: event_guide(2), f"Shape mismatch inside plate | {MIXES}"),
    "in a plate": (looks_up, lambda: event_guide(2), f"site 'x' has 2 there | {MIXES.replace('-1', '-2')}"),
    "moved": (mixes, rows_guide, "'-log p(x)' | write vectorize_particles=False"),
}
TOLD = {UnsupportedProgramError: LEAVING, PlateError: MIXING}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in TOLD.items() for name in table])
def test_programs_that_do_not_run_together_are_told_of_the_particles(kind: type[Exception], name: str) -> None:
    model, guide, words = TOLD[kind][name]
    assert_says(text_of(model, guide, kind, **TOGETHER), words)
    # What it advises is right.
    TraceBackpropQ_ELBO(num_particles=3, vectorize_particles=False).loss_and_grads(model, guide)


def test_only_the_sites_that_were_read_are_named() -> None:
    def two() -> None:
        z, w = guide(), pyro.sample("w", posterior())
        if z > 0:
            pyro.sample("v", dist.Bernoulli(logits=logits() + w))

    text = text_of(plain, two, UnsupportedProgramError, **TOGETHER)
    assert "'z'" in text and "'w'" not in text


class OutOfMemory(RuntimeError):
    """As torch's error, which is not about shapes, although it speaks of sizes."""


OWN: dict[str, Exception | None] = {
    "another": RuntimeError("the simulator is down"),
    "of sizes": OutOfMemory("no block of that size is left"),
    "a tensor of the program's own is read": None,
}


@pytest.mark.parametrize("error", OWN.values(), ids=OWN)
@pytest.mark.parametrize("options", [{}, TOGETHER], ids=["one", "together"])
def test_errors_that_are_not_about_particles_are_left_alone(error: Any, options: dict[str, Any]) -> None:
    def fails() -> None:
        coin()
        if error or torch.zeros(3) > 0:
            raise error

    kind = type(error) if error else RuntimeError
    with pytest.raises(kind, match=str(error) if error else "ambiguous") as caught:
        TraceBackpropQ_ELBO(max_plate_nesting=0, **options).loss_and_grads(fails, guide)
    assert not isinstance(caught.value, BPQError) and "vectorize_particles" not in str(caught.value)


@pytest.mark.parametrize("options", [{}, TOGETHER], ids=["one", "together"])
@pytest.mark.parametrize(("given", "needed"), [(0, 1), (0, 2), (1, 2)])
def test_nesting_that_is_too_small_names_the_number(given: int, needed: int, options: dict[str, Any]) -> None:
    both = [in_rows(program) for program in (coin, guide)]
    if needed == 2:
        both = [in_rows(program, 2, -2, "columns") for program in both]
    text = text_of(*both, PlateError, max_plate_nesting=given, **options)
    # Where two numbers are too small by turns, each error names a larger one.
    least = "" if needed - given == 2 and options else f"{needed}, or leave it out"
    assert f"more deeply than max_plate_nesting says. Write max_plate_nesting={least}" in text
    TraceBackpropQ_ELBO(max_plate_nesting=needed, **options).loss_and_grads(*both)


# Warnings.


WARNINGS: Mistakes = {
    "plates with other names": (
        in_rows(coin),
        in_rows(guide, name="row"),
        "is 'row' in the guide, and 'rows' in the model | Write 'rows' in the guide",
    ),
    "real": (lambda: see(coin(dist.Normal(0, 1))), guide, "'z' | Bernoulli | Normal (support Real()) | same support"),
    "misspelt": (plain, marked(bqp={"critic": None}, other=1), "Site 'z' has infer={'bqp': ...}, which nothing reads"),
    "turned round": (guide, plain, "The guide observes data at ['x'] | SVI(model, guide, ...)"),
    "two sizes": (lambda: rows_model(40), lambda: rows_guide(20), TWO_SIZES),
    "enumerated": (plain, marked(enumerate="parallel"), "['z'] | TraceBackpropQ_ELBO(enumeration=\"exact\")"),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_warning_says_once_what_to_write(name: str) -> None:
    model, guide, words = WARNINGS[name]
    with filtered("ignore", UserWarning):
        (text,) = warnings_of(model, guide, steps=8, num_particles=1)
    assert_says(text, words)


def test_programs_without_these_mistakes_are_told_nothing() -> None:
    assert warnings_of(in_rows(coin), in_rows(guide), steps=4, category=Warning) == []
    assert warnings_of(plain, marked(enumerate="parallel"), enumeration="exact", category=Warning) == []
    assert warnings_of(lambda: rows_model(20), lambda: rows_guide(20), category=Warning) == []


@pytest.mark.parametrize("value", [lambda z: torch.tensor(-1.0), lambda z: -z.sum()], ids=["constant", "sum"])
def test_a_single_factor_in_a_plate_warns_once(value: Callable[[Tensor], Tensor]) -> None:
    texts = warnings_of(in_rows(lambda: pyro.factor("f", value(coin()))), in_rows(guide), steps=4)
    assert sum("The factor 'f' is a single number in the plate 'rows'" in text for text in texts) == 1
    assert any("3 times" in text and "pyro.factor('f', ...) outside of the plate" in text for text in texts)
    texts = warnings_of(in_rows(lambda: pyro.factor("f", -coin())), in_rows(guide), steps=4)
    assert not any("factor" in text for text in texts)


@pytest.mark.parametrize("options", [{}, {"num_particles": 1}, TOGETHER], ids=["open", "one", "together"])
@pytest.mark.parametrize("value", [lambda z: 2.0 * z, lambda z: 2.0], ids=["of z", "constant"])
def test_cost_that_counts_once_per_row_warns_once(value: Callable[[Tensor], Any], options: dict[str, Any]) -> None:
    def model() -> None:
        z = coin()
        with pyro.plate("rows", 20):
            cost("c", value(z))

    # Under Python's own filter; what is shown in a run of many steps.
    elbo = TraceBackpropQ_ELBO(**options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        repeat(15, elbo.loss_and_grads, model, guide)
    (text,) = [str(warning.message) for warning in found]
    assert_says(text, "cost 'c' | plate 'rows' | 20 times | outside of the plate | value + torch.zeros(20)")


@pytest.mark.parametrize("is_module", [False, True])
def test_parameters_that_a_torch_optimiser_would_not_see_are_named_once(is_module: bool) -> None:
    def loose(data: Tensor) -> None:
        with pyro.plate("rows", len(data)):
            pyro.sample("a", posterior())
            pyro.sample("b", dist.Categorical(torch.ones(2)))

    loss = TraceBackpropQ_ELBO()(Model(), Guide() if is_module else loose)
    with told(BPQWarning) as texts:
        for _ in range(3):
            loss(DATA).backward()
    assert len(texts) == (not is_module)
    assert is_module or texts[0].startswith("The parameters ['q'] belong to no module")
