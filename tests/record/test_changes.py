"""What a program may change between two steps: the next gradient is exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import bias, filtered, repeat, trained
from torch import Tensor

from pyro_bpq import TraceBackpropQ_ELBO

OLD, NEW = 1.0, -2.5


def argument() -> Any:
    return (lambda *args: args[0]), lambda new: (new,)


def attribute() -> Any:
    box = SimpleNamespace(n=OLD)
    return (lambda: box.n), lambda new: setattr(box, "n", new)


def closure() -> Any:
    number = OLD

    def put(new: float) -> None:
        nonlocal number
        number = new

    return (lambda: number), put


def name_of_a_module() -> Any:
    return (lambda: NUMBER), lambda new: globals().update(NUMBER=new)


def named_in_a_method() -> Any:
    return Reader(), lambda new: globals().update(NUMBER=new)


def named_in_a_property() -> Any:
    reader = Reader()
    return (lambda: reader.number), lambda new: globals().update(NUMBER=new)


def flag() -> Any:
    box = SimpleNamespace(is_new=False)
    return (lambda: NEW if box.is_new else OLD), lambda new: setattr(box, "is_new", new == NEW)


def entry() -> Any:
    table = {"n": OLD}
    return (lambda: table["n"]), lambda new: table.update(n=new)


def array() -> Any:
    numbers = numpy.array([0.0, OLD])
    return (lambda: numbers[1]), lambda new: numbers.put(1, new)


def tensor_written() -> Any:
    tensor = torch.tensor(OLD)
    return (lambda: tensor), lambda new: tensor.fill_(new) and None


def view_written() -> Any:
    tensor = torch.tensor([OLD, OLD])
    view = tensor[1:]
    return (lambda: tensor[1]), lambda new: view.fill_(new) and None


def tensor_replaced() -> Any:
    box = SimpleNamespace(n=torch.tensor(OLD))
    return (lambda: box.n), lambda new: setattr(box, "n", torch.tensor(new))


def data() -> Any:
    tensor = torch.tensor(OLD)
    return (lambda: tensor), lambda new: setattr(tensor, "data", torch.tensor(new))


class Reader:
    def __call__(self) -> float:
        return NUMBER

    @property
    def number(self) -> float:
        return NUMBER


NUMBER = OLD
CHANGES = (
    *(argument, attribute, closure, name_of_a_module, named_in_a_method, named_in_a_property, flag, entry, array),
    *(tensor_written, view_written, tensor_replaced, data),
)


def programs(read: Callable[..., Any], reads_tensors: bool = True) -> tuple[Any, Any]:
    """A model and a guide; a negative number makes a cost read another site, that of a tensor if asked."""

    def model(*args: Any) -> None:
        a = pyro.sample("a", dist.Bernoulli(torch.tensor(0.4)))
        b = pyro.sample("b", dist.Bernoulli(torch.tensor(0.3)))
        number = read(*args)
        is_first = (reads_tensors or not isinstance(number, Tensor)) and number > 0
        pyro.factor("x", number * (1.3 * a if is_first else 0.7 * b))
        pyro.factor("y", number * number * a)

    def guide(*args: Any) -> None:
        pyro.sample("a", dist.Bernoulli(logits=pyro.param("p", lambda: torch.tensor(0.3)) * read(*args)))
        pyro.sample("b", dist.Bernoulli(logits=pyro.param("q", lambda: torch.tensor(0.9))))

    return model, guide


@pytest.mark.parametrize("options", [{}, {"num_particles": 1}], ids=["default", "one particle"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_gradient_after_a_change_is_exact(change: Any, options: Any) -> None:
    read, put = change()
    model, guide = programs(read)
    elbo = trained(TraceBackpropQ_ELBO(**options), model, guide, *(put(OLD) or ()), steps=3).eval()
    # No step is recorded because it is time.
    elbo.runner.recordings.now.next = math.inf
    args = put(NEW) or ()
    # Parameters that are made anew would be recorded anew.
    assert bias(elbo, model, guide, *args, params=lambda: None) < 1e-10
    put(OLD)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
def test_compiled_steps_after_a_change_are_those_of_eager_steps(change: Any) -> None:
    found = []
    for options in ({}, {"compile": "eager"}):
        read, put = change()
        model, guide = programs(read, reads_tensors=False)
        elbo = trained(TraceBackpropQ_ELBO(1, **options), model, guide, *(put(OLD) or ()), steps=12)
        args = put(NEW) or ()
        found.append(gradients(elbo, model, guide, *args))
        put(OLD)
    assert elbo.compiled is not None and elbo.compiled.entries
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def gradients(elbo: Any, model: Any, guide: Any, *args: Any) -> list[Any]:
    """What some steps add to the gradients of the parameters."""
    repeat(6, elbo.loss_and_grads, model, guide, *args)
    return [own.grad for _, own in pyro.get_param_store().named_parameters()]


def test_a_list_of_losses_is_no_reason_to_record() -> None:
    """A method of the programs' class that they never call appends to it."""

    class Fit:
        def __init__(self) -> None:
            self.own = list[float]()

        def __call__(self) -> None:
            pyro.factor("x", pyro.sample("a", dist.Bernoulli(torch.tensor(0.4))))

        def guide(self) -> None:
            pyro.sample("a", dist.Bernoulli(logits=pyro.param("p", lambda: torch.tensor(0.3))))

        def fit(self, elbo: TraceBackpropQ_ELBO) -> None:
            LOSSES.append(elbo.loss_and_grads(self, self.guide))
            self.own.append(LOSSES[-1])

    fit, elbo = Fit(), TraceBackpropQ_ELBO(num_particles=1)
    repeat(40, fit.fit, elbo)
    assert elbo.runner.recordings.num_recorded < 20


LOSSES: list[float] = []


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

    elbo = TraceBackpropQ_ELBO()
    pyro.clear_param_store()
    with filtered("ignore", UserWarning):
        repeat(steps, lambda: elbo.loss_and_grads(model, guide))
    assert elbo.plan.sums is (law is dist.Bernoulli)
    assert count == norm.num_batches_tracked == steps
