"""What tests share: steps of an objective, errors of its gradient, equality of nested state."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, Case, fill
from pyro.infer import SVI
from pyro.nn import PyroModule, PyroParam
from pyro.optim import SGD, Adam
from torch import Tensor, nn

from pyro_bpq import (
    AllAction,
    CompiledSVI,
    CriticLearner,
    LeaveOneOut,
    RunningBaseline,
    ScoreFunction,
    TraceBackpropQ_ELBO,
    compile_report,
    cost,
)
from pyro_bpq.errors import BPQError, BPQWarning
from pyro_bpq.estimators import CrossedLeaveOneOut, DebiasedStraightThrough, MuProp, SecondRun
from pyro_bpq.step.learning import Learning, values_and_targets
from pyro_bpq.step.signals import Signals
from pyro_bpq.testing import assert_unbiased, exact_gradient, expected_gradient
from pyro_bpq.testing.choices import ChoiceMessenger, walk

CHAIN = BY_NAME["chain"]
Objective = TypeVar("Objective", bound=Any)
# What puts parameters at their first values.
Start = Callable[[], object]
CLEARED: Start = pyro.clear_param_store


def repeat(number: int, call: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """What a call gives, so many times."""
    return [call(*args, **options) for _ in range(number)]


def stepped(number: int, objective: Objective, *args: Any) -> Objective:
    """The objective after so many steps."""
    repeat(number, objective.loss_and_grads, *args)
    return objective


def from_seed(seed: int, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a call gives from a seed on."""
    pyro.set_rng_seed(seed)
    return call(*args, **options)


def limited(max_elements: int, **options: Any) -> TraceBackpropQ_ELBO:
    """An ELBO that, unless told to, evaluates so many costs at most in an extra run of the model."""
    elbo = TraceBackpropQ_ELBO(**options)
    elbo.planner = replace(elbo.planner, max_elements=max_elements)
    return elbo


def hidden(elbo: Objective, is_hidden: bool = True) -> Objective:
    """The objective, whose further particles are computed from the recording of one, or run."""
    elbo.particles.change(is_hidden=is_hidden)
    return elbo


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call in another thread returns or raises."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
    return future.exception() or future.result()


@contextlib.contextmanager
def filtered(action: Any, category: type[Warning] = Warning) -> Iterator[None]:
    """Ignores warnings of a kind, or makes errors of them."""
    with warnings.catch_warnings():
        warnings.simplefilter(action, category)
        yield


@contextlib.contextmanager
def told(category: type[Warning] = Warning) -> Iterator[list[str]]:
    """What is warned of within, as it is known afterwards."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in found if issubclass(warning.category, category)]


def coin_guide(*_: Any) -> None:
    pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))


def pair_model(read: Callable[[Tensor], Any] = lambda z: z) -> None:
    """A coin, a reparameterised site that reads it in some way, and data that read both."""
    z = read(pyro.sample("z", dist.Bernoulli(0.4)))
    y = pyro.sample("y", dist.Normal(z, 1.0))
    pyro.sample("x", dist.Normal(z + y, 1.0), obs=torch.tensor(0.7))


def pair_guide(cut: Callable[[Tensor], Any] = lambda q: q) -> None:
    pyro.sample("z", dist.Bernoulli(logits=cut(pyro.param("q", torch.tensor(0.3)))))
    pyro.sample("y", dist.Normal(pyro.param("m", torch.tensor(0.2)), 1.0))


class CoinModule(PyroModule):
    """A guide of one coin as a module; ``cut`` is between its parameter and the coin."""

    def __init__(self, cut: Callable[[Tensor], Tensor] = lambda q: q) -> None:
        super().__init__()
        self.q, self.cut = PyroParam(torch.tensor(0.3)), cut

    def forward(self) -> None:
        pyro.sample("z", dist.Bernoulli(logits=self.cut(self.q)))


def coins_guide(number: int = 3, *_: Any) -> None:
    """Independent coins, as one site."""
    pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.linspace(0.3, -0.4, number))).to_event(1))


def coins(*names: str, **options: Any) -> Callable[..., None]:
    """A guide of coins at sites of their own, with options."""

    def guide(*_: Any) -> None:
        for name in names:
            law = dist.Bernoulli(logits=pyro.param(f"logits of {name}", torch.tensor(0.1)))
            pyro.sample(name, law, infer={"bpq": dict(options)} if options else {})

    return guide


def seeing(mean: Callable[..., Any], number: int = 0) -> Callable[..., None]:
    """A model of one coin, or of so many as one site, whose observation reads them, and the arguments, in some way."""

    def model(*args: Any) -> None:
        prior = dist.Bernoulli(torch.full((number,), 0.4)).to_event(1) if number else dist.Bernoulli(torch.tensor(0.4))
        z = pyro.sample("z", prior)
        law = dist.Normal(mean(z, *args), 1.0)
        law = law.to_event(len(law.batch_shape) - z.dim() + bool(number))
        pyro.sample("x", law, obs=torch.full(law.event_shape, 0.3))

    return model


def rows(mean: Callable[..., Any], data: Tensor, logits: Callable[..., Tensor] | None = None) -> tuple[Any, Any]:
    """Model and guide of a coin in each row of data, which the row's observation reads in some way."""

    def model(*args: Any) -> None:
        with pyro.plate("rows", len(data)):
            z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
            pyro.sample("x", dist.Normal(mean(z, *args), 1.0), obs=data)

    def guide(*args: Any) -> None:
        own = logits(*args) if logits else pyro.param("q", torch.linspace(0.5, -0.6, len(data)))
        with pyro.plate("rows", len(data)):
            pyro.sample("z", dist.Bernoulli(logits=own))

    return model, guide


def some_quick(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Names of cases, of which all but the quick ones are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def through_file(thing: Any, weights_only: bool = False) -> Any:
    """What is loaded of something that was saved."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


SETTLED: dict[str, TraceBackpropQ_ELBO] = {}


def text_of(model: Any, guide: Any, kind: type[Exception], **options: Any) -> str:
    """What an error of a first step says; the objective is as before."""
    elbo = TraceBackpropQ_ELBO(**options)
    before = set(elbo.state_dict())
    with pytest.raises(BPQError) as caught:
        elbo.loss_and_grads(model, guide)
    assert isinstance(caught.value, kind) and set(elbo.state_dict()) == before
    return str(caught.value)


def warnings_of(
    model: Any, guide: Any, steps: int = 1, category: Any = BPQWarning, kind: Any = TraceBackpropQ_ELBO, **options: Any
) -> list[str]:
    """What some steps warn of."""
    elbo = kind(**options)
    with told(category) as texts:
        repeat(steps, elbo.loss_and_grads, model, guide)
    return texts


def trained(
    objective: Objective, *programs: Any, params: Start = CLEARED, steps: int = 20, lr: float = 0.0, seed: int = 0
) -> Objective:
    """The objective after some steps of model and guide with their arguments.

    Parameters start as ``params`` puts them, and end so.
    """
    params()
    pyro.set_rng_seed(seed)
    if not lr:
        return stepped(steps, objective, *programs)
    model, guide, *args = programs
    svi = SVI(model, guide, Adam({"lr": lr}), objective)
    repeat(steps, svi.step, *args)
    params()
    return objective


def unbiased(elbo: Objective, model: Any, guide: Any, *args: Any, steps: int) -> Objective:
    """The objective after some steps; its expected gradient is exact, by enumeration."""
    assert_unbiased(trained(elbo, model, guide, *args, steps=steps).eval(), model, guide, *args)
    return elbo


def at_irregular(names: str, size: int, model: Any, guide: Any, **options: Any) -> TraceBackpropQ_ELBO:
    """An ELBO of one particle that has seen five steps, at vectors of irregular parameters, which have not moved."""
    elbo = TraceBackpropQ_ELBO(**{"num_particles": 1, **options})
    return trained(elbo, model, guide, params=lambda: fill(tuple(names.split()), size), steps=5).eval()


def fitted(elbo: TraceBackpropQ_ELBO, model: Any, guide: Any, calls: Iterable[tuple[Any, ...]]) -> TraceBackpropQ_ELBO:
    """An ELBO after steps of SVI with these arguments in turn, from new parameters on; nothing warns."""
    fresh()
    svi = SVI(model, guide, Adam({"lr": 0.01}), elbo)
    with filtered("ignore"):
        for args in calls:
            svi.step(*args)
    return elbo


def recorded_and_eager(
    make: Callable[[], tuple[Any, Any, Iterable[tuple[Any, ...]]]], **options: Any
) -> tuple[list[float], list[float], str]:
    """Losses of recorded and of eager steps from one start, and what is said of the recorded ones.

    ``make`` gives model, guide, and the arguments of each step.
    """
    losses = []
    for kind in (SVI, functools.partial(CompiledSVI, compile="eager")):
        fresh()
        model, guide, calls = make()
        svi: Any = kind(model, guide, SGD({"lr": 0.01}), TraceBackpropQ_ELBO(**options))
        losses.append([svi.step(*args) for args in calls])
    return losses[1], losses[0], compile_report(svi)


def assert_recorded(
    make: Callable[[], tuple[Any, Any, Iterable[tuple[Any, ...]]]], number: int = 1, rel: float = 0.0, **options: Any
) -> None:
    """So many recordings serve the steps, which have the losses of eager ones; nothing else is said of them."""
    compiled, eager, said = recorded_and_eager(make, **options)
    assert [line.startswith("Recorded") for line in said.splitlines()] == [True] * number, said
    assert compiled == pytest.approx(eager, rel=rel, abs=1e-10)


def settled(case: Case, steps: int, **options: Any) -> TraceBackpropQ_ELBO:
    """An ELBO after so many steps at fixed parameters, which are put into the store: a copy, trained once."""
    key = f"{case.name} {steps} {options}"
    if key not in SETTLED:
        elbo = trained(TraceBackpropQ_ELBO(**options), *case.programs, params=case.params, steps=steps)
        SETTLED[key] = copy.deepcopy(elbo)
    case.params()
    return copy.deepcopy(SETTLED[key])


def expected_loss(objective: Any, model: Any, guide: Any, *args: Any) -> float:
    """The mean of the loss over all values of all sites."""
    outcomes = walk(ChoiceMessenger(10_000), lambda: objective.loss(model, guide, *args))
    return sum(float(probability) * loss for probability, loss in outcomes)


def largest_error(truth: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """The largest difference of an entry. A truth of zeros would prove nothing."""
    assert max(float(g.abs().max()) for g in truth.values()) > 1e-2
    return max(float((found[name] - g).abs().max()) for name, g in truth.items())


def fresh(seed: int = 0) -> None:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)


def no_gradients() -> None:
    for _, leaf in pyro.get_param_store().named_parameters():
        leaf.grad = None


def scramble(weights: Iterable[Tensor]) -> None:
    """Moves weights to somewhere else, always the same."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in weights:
            weight.add_(torch.randn(weight.shape, generator=generator))


def bias(
    objective: Any, model: Any, guide: Any, *args: Any, params: Start = CLEARED, truth: Any = None, **options: Any
) -> float:
    """The largest difference of an entry of the expected gradient from the exact one, by enumeration."""
    if truth is None:
        params()
        truth = exact_gradient(model, guide, *args)
    params()
    return largest_error(truth, expected_gradient(objective, model, guide, *args, **options))


def run(elbo: TraceBackpropQ_ELBO, case: Case = CHAIN, steps: int = 10, seed: Any = 0) -> list[dict[str, Tensor]]:
    """Gradients of some steps at fixed parameters."""
    case.params()
    if seed is not None:
        pyro.set_rng_seed(seed)
    return [step(elbo, case) for _ in range(steps)]


def step(elbo: TraceBackpropQ_ELBO, case: Case = CHAIN, through_loss: bool = False) -> dict[str, Tensor]:
    no_gradients()
    if through_loss:
        elbo.differentiable_loss(case.model, case.guide, *case.args).backward()
    else:
        elbo.loss_and_grads(case.model, case.guide, *case.args)
    leaves = dict(pyro.get_param_store().named_parameters())
    return {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
        for name, leaf in leaves.items()
        if not name.startswith("bpq_critics")
    }


def critic_targets(signals: Signals, learning: Learning) -> dict[str, tuple[Tensor, Tensor]]:
    """Value and target of each learned Q-node, by name, ``(M, plates)`` each, in nats, detached."""
    pairs = values_and_targets(signals, learning)
    return {
        node.name: (value[i].detach(), target[i])
        for g, (value, target) in pairs.items()
        for i, node in enumerate(signals.critics[g].group.nodes)
    }


# Operators that hand numbers to Python, or make tensors whose size depends on them.
READS = frozenset("_local_scalar_dense allclose equal is_nonzero masked_select nonzero _unique2 unique_dim".split())


def reads_numbers(name: str, args: Any) -> bool:
    """Whether an operator of a name is one of these, or reads a mask."""
    masks = args[1] if name in ("index", "index_put", "index_put_") else ()
    return name in READS or any(isinstance(m, Tensor) and m.dtype in (torch.bool, torch.uint8) for m in masks)


def stored() -> dict[str, Tensor]:
    """What the parameters are now."""
    return {name: value.detach().clone() for name, value in pyro.get_param_store().named_parameters()}


def state_of(elbo: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(dict(elbo.state_dict()))


def assert_equal(left: Any, right: Any, path: str = "", rtol: float = 0.0) -> None:
    """Equality of nested state: tensors bit by bit, or up to so much of their largest entry."""
    assert type(left) is type(right), path
    if isinstance(left, Tensor) and rtol and left.numel():
        assert left.shape == right.shape, path
        error, largest = ((left.double() - right.double()).abs().max(), right.double().abs().max())
        assert not error > rtol * (largest + 1e-3), path
    elif isinstance(left, Tensor):
        assert torch.equal(left, right), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_equal(left[key], right[key], f"{path}/{key}", rtol)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for i, pair in enumerate(zip(left, right, strict=True)):
            assert_equal(*pair, f"{path}/{i}", rtol)
    else:
        assert left == right, path


def is_equal(left: Any, right: Any) -> bool:
    with contextlib.suppress(AssertionError):
        assert_equal(left, right)
        return True
    return False


def dear(programs: Any) -> Any:
    """Programs whose model calls the function of a cost that leaves torch, too."""
    plain = programs.model
    programs.model = lambda: (plain(), cost("price", torch.tensor(1.0).item))[0]
    return programs


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "one_particle": {"num_particles": 1},
    "no_learner": {"learner": None},
    "two_particles": {"num_particles": 2},
    "vectorised": {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 0},
    "running_baseline": {"estimator": ScoreFunction(RunningBaseline())},
    "learner": {"learner": CriticLearner(lr=0.1)},
}

# Laws of a site by one real number.
LAWS: dict[str, Callable[[Any], Any]] = {
    "bits": lambda q: dist.Bernoulli(logits=q),
    "counts": lambda q: dist.Poisson(torch.as_tensor(q).exp()),
    "smooth": lambda q: dist.Normal(q, 1.0),
}

# Ways to serve a program whose gradient is to be exact whatever it reads.
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "two": {"num_particles": 2},
    "vectorised": {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 1},
    "dynamic": {"structure": "dynamic"},
    "dense": {"structure": "dense"},
    "score_function": {"estimator": ScoreFunction()},
    "running_baseline": {"estimator": ScoreFunction(RunningBaseline())},
    "leave_one_out": {"num_particles": 2, "estimator": ScoreFunction(LeaveOneOut())},
    "crossed": {"num_particles": 2, "estimator": CrossedLeaveOneOut()},
    "exact": {"estimator": AllAction(exact=True)},
    "all_action": {"estimator": AllAction(exact=False)},
    "no_critic": {"estimator": AllAction(exact=False), "critic": None},
    "second_run": {"estimator": SecondRun()},
    "MuProp": {"estimator": MuProp()},
    "slopes": {"estimator": DebiasedStraightThrough()},
}
# Particles in a plate whose dimension is found, or given.
WAYS["pair"] = {**WAYS["leave_one_out"], "vectorize_particles": True}
WAYS["pair_in_place"] = {**WAYS["pair"], "max_plate_nesting": 1}


class Model(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(0.4))
        self.table = PyroParam(torch.tensor([[0.3, -0.6], [0.9, 0.2]]))

    def forward(self, data: Tensor) -> None:
        with pyro.plate("rows", len(data)):
            a = pyro.sample("a", dist.Bernoulli(logits=self.shift)).long()
            b = pyro.sample("b", dist.Categorical(logits=self.table[a]))
            pyro.sample("x", dist.Normal(1.3 * a + b, 0.7), obs=data)


class Guide(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1)
        self.second = nn.Linear(2, 2)

    def forward(self, data: Tensor) -> None:
        with pyro.plate("rows", len(data)):
            x = data.unsqueeze(-1)
            a = pyro.sample("a", dist.Bernoulli(logits=self.first(x).squeeze(-1)))
            pyro.sample("b", dist.Categorical(logits=self.second(torch.cat((x, a.unsqueeze(-1)), -1))))


DATA = torch.tensor([0.2, 1.9, -0.4, 2.6, 0.9], dtype=torch.float64)


def module(elbo: TraceBackpropQ_ELBO) -> nn.Module:
    pyro.clear_param_store()
    torch.manual_seed(0)
    return elbo(Model(), Guide())


def called_module(elbo: TraceBackpropQ_ELBO) -> nn.Module:
    """The module after a call, in which the critics appear, ahead of an optimiser."""
    fit = module(elbo)
    fit(DATA)
    return fit
