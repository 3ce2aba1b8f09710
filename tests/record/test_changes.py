"""What a program may change between two steps: the next gradient is exact."""

from __future__ import annotations

import math
import os
from collections import ChainMap, UserDict
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy
import pyro
import pyro.distributions as dist
import pytest
import torch
from enumerable import enumerable_noise
from steps import bias, filtered, repeat, trained

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.estimators import (
    AllAction,
    CrossedLeaveOneOut,
    DebiasedStraightThrough,
    DisARM,
    Hindsight,
    MuProp,
    SecondRun,
)
from pyro_bpq.testing import ChoiceNoise

OLD, NEW = 1.0, -2.5


class Reader:
    def __call__(self) -> float:
        return NUMBER

    @property
    def number(self) -> float:
        return NUMBER


NUMBER = OLD


def closure() -> Any:
    number = OLD

    def put(new: float) -> None:
        nonlocal number
        number = new

    return (lambda: number), put


def of_a_module(read: Callable[[], float]) -> Any:
    return read, lambda new: globals().update(NUMBER=new)


def of(kept: Any, read: Callable[[Any], Any], put: Callable[[Any, float], Any]) -> Any:
    """How a program reads a number of an object, and how it is changed."""
    return (lambda: read(kept)), lambda new: put(kept, new) and None


def put_attribute(box: Any, new: Any) -> None:
    box.n = new


class Kept:
    def __get__(self, box: Any, kind: type) -> Any:
        return box.__dict__.get("m", OLD)


def kind(**own: Any) -> type:
    return type("Options", (), own)


class Box:
    n, kept = OLD, Kept()

    def read(self) -> float:
        match self:
            case Box(n=number):
                return number


def view() -> Any:
    tensor = torch.tensor([OLD, OLD])
    part = tensor[1:]
    return (lambda: tensor[1]), lambda new: part.fill_(new) and None


# What makes how a program reads a number, and how it is changed; the change may be a new argument.
CHANGES: dict[str, Callable[[], Any]] = {
    "argument": lambda: ((lambda *args: args[0]), lambda new: (new,)),
    "attribute of a function": lambda: of(lambda: None, lambda own: getattr(own, "n", OLD), put_attribute),
    "MappingProxyType": lambda: of(
        MappingProxyType(held := {"n": OLD}), lambda box: box["n"], lambda _, new: held.update(n=new)
    ),
    "table of a class": lambda: of(kind(t={"n": OLD}), lambda own: own.t["n"], lambda own, new: own.t.update(n=new)),
    "inner class": lambda: of(kind(t=kind(n=OLD)), lambda own: own.t.n, lambda own, new: put_attribute(own.t, new)),
    "metaclass": lambda: of(
        type("Meta", (type,), {"n": OLD})("Options", (), {}),
        lambda own: own.n,
        lambda own, new: setattr(type(own), "n", new),
    ),
    "UserDict": lambda: of(UserDict(n=OLD), lambda box: box["n"], lambda box, new: box.update(n=new)),
    "ChainMap": lambda: of(ChainMap({}, {"n": OLD}), lambda box: box["n"], lambda box, new: box.maps[1].update(n=new)),
    "attribute": lambda: of(SimpleNamespace(n=OLD), lambda box: box.n, put_attribute),
    "attribute of an object": lambda: of(Box(), lambda box: box.n, put_attribute),
    "looked up": lambda: of(Box(), lambda box: getattr(box, "n"), put_attribute),  # noqa: B009
    "described": lambda: of(Box(), lambda box: box.kept, lambda box, new: setattr(box, "m", new)),
    "matched": lambda: of(Box(), lambda box: box.read(), put_attribute),
    "closure": closure,
    "name of a module": lambda: of_a_module(lambda: NUMBER),
    "named in a method": lambda: of_a_module(Reader()),
    "named in a property": lambda: of_a_module(of(Reader(), lambda reader: reader.number, lambda *_: None)[0]),
    "flag": lambda: of(
        SimpleNamespace(n=False), lambda box: NEW if box.n else OLD, lambda box, new: put_attribute(box, new == NEW)
    ),
    "entry": lambda: of({"n": OLD}, lambda table: table["n"], lambda table, new: table.update(n=new)),
    "array": lambda: of(numpy.array([0.0, OLD]), lambda own: own[1], lambda own, new: own.put(1, new)),
    "tensor written": lambda: of(torch.tensor(OLD), lambda own: own, lambda own, new: own.fill_(new)),
    "view written": view,
    "tensor replaced": lambda: of(
        SimpleNamespace(n=torch.tensor(OLD)), lambda box: box.n, lambda box, new: put_attribute(box, torch.tensor(new))
    ),
    "data": lambda: of(torch.tensor(OLD), lambda own: own, lambda own, new: setattr(own, "data", torch.tensor(new))),
}


def programs(read: Callable[..., Any]) -> tuple[Any, Any]:
    """A model and a guide; a negative number makes a cost read another site."""

    def model(*args: Any) -> None:
        a = pyro.sample("a", dist.Bernoulli(torch.tensor(0.4)))
        b = pyro.sample("b", dist.Bernoulli(torch.tensor(0.3)))
        number = read(*args)
        pyro.factor("x", number * (1.3 * a if number > 0 else 0.7 * b))
        pyro.factor("y", number * number * a)

    def guide(*args: Any) -> None:
        pyro.sample("a", dist.Bernoulli(logits=pyro.param("p", lambda: torch.tensor(0.3)) * read(*args)))
        pyro.sample("b", dist.Bernoulli(logits=pyro.param("q", lambda: torch.tensor(0.9))))

    return model, guide


@pytest.mark.parametrize("options", [{}, {"num_particles": 1}], ids=["default", "one particle"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_gradient_after_a_change_is_exact(change: str, options: Any) -> None:
    read, put = CHANGES[change]()
    model, guide = programs(read)
    elbo = trained(TraceBackpropQ_ELBO(**options), model, guide, *(put(OLD) or ()), steps=3).eval()
    # No step is recorded because it is time.
    elbo.runner.recordings.now.next = math.inf
    args = put(NEW) or ()
    # Parameters that are made anew would be recorded anew.
    assert bias(elbo, model, guide, *args, params=lambda: None) < 1e-10
    put(OLD)


# Numbers that the key of a call does not see: outdated recordings cost variance, not bias.


def weighted_model() -> None:
    w = float(os.environ["PYRO_BPQ_TEST_WEIGHT"])
    a = pyro.sample("a", dist.Bernoulli(torch.tensor([0.3, 0.6])).to_event(1))
    b = pyro.sample("b", dist.Bernoulli(0.2 + 0.5 * a[..., :1]).to_event(1))
    pyro.factor("now", w * (2.0 * a[..., 0] - a[..., 1] ** 2 + w * a[..., 0] * a[..., 1]))
    pyro.factor("later", w * (a[..., 0] - 0.6) * (b[..., 0] + 0.3) - b[..., 0] * w * w)


def weighted_guide() -> None:
    p = pyro.param("p", lambda: torch.tensor([0.3, -0.4]))
    m = pyro.param("m", lambda: torch.tensor(0.8))
    a = pyro.sample("a", dist.Bernoulli(logits=p).to_event(1))
    pyro.sample("b", dist.Bernoulli(logits=m * (a - 0.4).sum(-1, keepdim=True)).to_event(1))


PLATE: dict[str, Any] = {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 0}
# By default every second one runs: those with a plate or two particles take long.
ESTIMATORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "values": (Hindsight(), {}),
    "drawn, two particles": (Hindsight(draws=1), {"num_particles": 2}),
    "values, plate": (Hindsight(), PLATE),
    "drawn, plate": (Hindsight(draws=1), PLATE),
    "drawn": (Hindsight(draws=1), {}),
    "antithetic, plate": (DisARM(), PLATE),
    "antithetic": (DisARM(), {}),
    "second run": (SecondRun(), {}),
    "crossed": (CrossedLeaveOneOut(), {"num_particles": 2}),
    "mean": (MuProp(), {}),
    "slopes": (DebiasedStraightThrough(), {}),
    "tables": (AllAction(), {}),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_gradients_of_outdated_recordings_stay_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    estimator, options = ESTIMATORS[name]
    monkeypatch.setenv("PYRO_BPQ_TEST_WEIGHT", "1.0")
    elbo = trained(TraceBackpropQ_ELBO(estimator=estimator, **options), weighted_model, weighted_guide, steps=3)
    elbo.eval().runner.recordings.now.next = math.inf
    monkeypatch.setenv("PYRO_BPQ_TEST_WEIGHT", "-2.5")
    noise = ChoiceNoise()
    with enumerable_noise(noise):
        # Parameters that are made anew would be recorded anew.
        assert bias(elbo, weighted_model, weighted_guide, params=lambda: None, noise=noise) < 1e-10


@pytest.mark.parametrize("options", [{}, {"num_particles": 1}], ids=["default", "one particle"])
def test_a_number_that_counts_may_be_the_size_of_a_plate(options: Any) -> None:
    def model(size: int) -> None:
        with pyro.plate("rows", 3, subsample_size=size) as rows:
            pyro.factor("x", rows * pyro.sample("a", dist.Bernoulli(torch.tensor(0.4))))

    def guide(size: int) -> None:
        with pyro.plate("rows", 3, subsample_size=size) as rows:
            pyro.sample("a", dist.Bernoulli(logits=pyro.param("p", lambda: torch.tensor([0.3, -0.4, 0.8]))[rows]))

    elbo = TraceBackpropQ_ELBO(**options)
    for step in range(12):
        elbo.loss_and_grads(model, guide, 1 + step % 3)
    assert bias(elbo.eval(), model, guide, 2, params=lambda: None) < 1e-10


# What is no reason to record, and what runs more than once.


class Trainer:
    """Its programs are methods. They read ``n`` in some way, and nothing of what ``fit`` logs."""

    def __init__(self, read: Callable[[Any], float]) -> None:
        self.read, self.n, self.log, self.rows, self.table, self.best = read, 0, [], [], {}, math.inf
        self.layer = Layer()

    def __call__(self) -> None:
        pyro.factor("x", torch.tensor(float(self.read(self))))
        pyro.sample("a", dist.Bernoulli(torch.tensor(0.4)))

    def guide(self) -> None:
        pyro.sample("a", dist.Bernoulli(0.4 + 0.0 * pyro.param("p", torch.tensor(0.3))))

    def read_n(self) -> int:
        return self.n

    def fit(self, elbo: TraceBackpropQ_ELBO) -> float:
        loss = elbo.loss_and_grads(self, self.guide)
        self.log.append(loss)
        self.rows.append({"loss": torch.tensor(loss), "text": f"step {len(self.rows)}"})
        self.table[len(self.log)], self.best = (loss, self), min(loss, self.best)
        return loss


class Layer(torch.nn.Softplus):
    """A library's code reads ``beta``."""


@pytest.mark.parametrize("compile", [False, "eager"])
def test_what_a_trainer_logs_is_no_reason_to_record(compile: Any) -> None:
    trainer, elbo = Trainer(lambda own: 0.0), TraceBackpropQ_ELBO(num_particles=1, compile=compile)
    trainer.elbo = elbo
    repeat(40, trainer.fit, elbo)
    assert elbo.runner.recordings.num_recorded < 20
    assert not compile or elbo.compiled.entries[0].steps > 20


READS: dict[str, Callable[[Any], Any]] = {
    "named": lambda own: own.n,
    "method": lambda own: own.read_n(),
    "looked up": lambda own: vars(own)["n"],
    "by a name": lambda own: getattr(own, "".join("n")),
    "logged": lambda own: len(own.log),
    "of a row": lambda own: len(own.rows[-1]["text"]) if own.rows else 0,
    "by a library": lambda own: own.layer(torch.zeros(())),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("compile", [False, "eager"])
def test_what_a_trainer_logs_may_be_read(compile: Any, name: str) -> None:
    trainer, elbo = Trainer(READS[name]), TraceBackpropQ_ELBO(num_particles=1, compile=compile)
    for trainer.n in range(14):
        trainer.layer.beta = 1 + trainer.n
        expected = READS[name](trainer)
        assert trainer.fit(elbo) == pytest.approx(-float(expected))


@pytest.mark.parametrize(("law", "ndim"), [(dist.Bernoulli, 1), (dist.OneHotCategorical, 0)])
def test_a_weight_that_is_annealed_is_no_reason_to_record(law: Any, ndim: int) -> None:
    weight, elbo = 0.1, TraceBackpropQ_ELBO(num_particles=1)

    def guide() -> None:
        with pyro.plate("rows", 3), pyro.poutine.scale(scale=weight):
            pyro.sample("z", law(logits=pyro.param("p", torch.zeros(3, 2))).to_event(ndim))

    def model() -> None:
        with pyro.plate("rows", 3):
            with pyro.poutine.scale(scale=weight):
                z = pyro.sample("z", law(logits=torch.ones(3, 2)).to_event(ndim))
            pyro.sample("x", dist.Normal(z.sum(-1) * z[..., 0], 1.0), obs=torch.zeros(3))

    for step in range(80):
        weight = min(1.0, 0.1 + step / 40)
        elbo.loss_and_grads(model, guide)
    assert elbo.runner.recordings.num_recorded < 20


@pytest.mark.parametrize(("law", "steps"), [(dist.Bernoulli, 70), (dist.Normal, 4)], ids=["summed", "jumping"])
def test_what_a_program_counts_is_counted_once_in_each_step(law: Any, steps: int) -> None:
    """Also in steps whose programs run more than once: to be summed, or with scores where a cost jumps."""
    count, norm = torch.zeros(()), torch.nn.BatchNorm1d(1)

    def model() -> None:
        count.add_(1)
        with pyro.plate("rows", 3):
            z = pyro.sample("z", law(0.4) if law is dist.Bernoulli else law(0.0, 1.0))
            norm(torch.arange(3.0)[:, None])
            mean = pyro.param("w", torch.tensor(0.5)) * (z if law is dist.Bernoulli else z > 0.0)
            pyro.sample("x", dist.Normal(mean, 1.0), obs=torch.tensor([1.0, 0.0, 2.0]))

    def guide() -> None:
        q = pyro.param("q", torch.full((3,), 0.3))
        with pyro.plate("rows", 3):
            pyro.sample("z", law(q.sigmoid()) if law is dist.Bernoulli else law(q, 1.0))

    with filtered("ignore", UserWarning):
        elbo = trained(TraceBackpropQ_ELBO(), model, guide, steps=steps)
    assert elbo.plan.sums is (law is dist.Bernoulli)
    assert count == norm.num_batches_tracked == steps


def test_where_steps_are_summed_a_loss_of_more_rows_is_too() -> None:
    def guide(rows: Any) -> None:
        with pyro.plate("rows", len(rows)):
            pyro.sample("z", dist.Categorical(logits=pyro.param("q", torch.zeros(3)) * rows[:, None]))

    def model(rows: Any) -> None:
        with pyro.plate("rows", len(rows)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            pyro.sample("x", dist.Normal(z + 0.0, 1.0), obs=rows)

    rows = torch.arange(5.0)
    elbo = trained(TraceBackpropQ_ELBO(), model, guide, rows[:3], steps=70)
    assert elbo.plan.sums
    losses = [elbo.loss(model, guide, rows), elbo.loss(model, guide, rows), elbo.eval().loss(model, guide, rows)]
    assert len({round(loss, 9) for loss in losses}) == 1
