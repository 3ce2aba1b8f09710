"""Programs that hold objects which do not like to be looked at: scripted modules, proxies, slots, odd ``__dict__``."""

from __future__ import annotations

import argparse
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from steps import assert_recorded, fresh, rows, stepped, trained
from torch import nn

from pyro_bpq import CriticLearner, Replay, SlowTracking, TraceBackpropQ_ELBO
from pyro_bpq.record.key import reach
from pyro_bpq.testing import assert_unbiased

pytestmark = [
    # torch.jit is deprecated, and still in use.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]


def refuse(*_: Any) -> Any:
    """Nobody looks in here."""
    raise RuntimeError("not here")


class Raises:
    """Each attribute that it does not have raises, and so do its properties."""

    size = property(refuse)
    __getattr__ = refuse


class Hidden:
    __dict__ = property(refuse)  # type: ignore[assignment]


class Listed:
    __dict__ = ["no", "mapping"]  # type: ignore[assignment]


class Closed:
    """Nothing at all is known of it."""

    __getattribute__ = refuse  # type: ignore[assignment]


class Unbound:
    """A proxy of what is not there, as a request outside of a request."""

    __class__ = property(refuse)  # type: ignore[assignment]


class Slots:
    __slots__ = ("__weakref__", "size", "unset")

    def __init__(self) -> None:
        self.size = 2


class Meta(type):
    __getattribute__ = refuse  # type: ignore[assignment]


class OfMeta(metaclass=Meta):
    pass


class OddModuleName:
    __module__ = 3  # type: ignore[assignment]


class OddKeys(dict):
    values = items = __iter__ = refuse  # type: ignore[assignment]


class OddList(list):
    __iter__ = refuse  # type: ignore[assignment]


class Undecided:
    """Compares as an array does: the answer has no truth value."""

    def __eq__(self, other: object) -> Any:
        return torch.ones(2) == 1.0

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ValueError("neither")


class NotYet(nn.Module):
    """A module whose own ``__init__`` never called that of its base."""

    def __init__(self) -> None:
        self.__dict__["scale"] = 1.0


def lazy_module() -> types.ModuleType:
    found = types.ModuleType("lazy")
    found.__getattr__ = refuse  # type: ignore[method-assign]
    return found


ODD: dict[str, Callable[[], Any]] = {
    "traced": lambda: torch.jit.trace(nn.Linear(1, 1), torch.ones(1)),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(1, 1), nn.Tanh())),
    "frozen": lambda: torch.jit.freeze(torch.jit.script(nn.Linear(1, 1).eval())),
    "scripted_function": lambda: torch.jit.trace(lambda x: 2.0 * x, torch.ones(1)),
    "normed": lambda: torch.jit.script(nn.BatchNorm1d(1).eval()),
    "fx": lambda: torch.fx.symbolic_trace(nn.Linear(1, 1)),
    "lazy_linear": lambda: nn.LazyLinear(1),
    "module_not_yet": NotYet,
    "raises": Raises,
    "hidden": Hidden,
    "listed": Listed,
    "closed": Closed,
    "unbound": Unbound,
    "slots": Slots,
    "of_meta": OfMeta,
    "meta": lambda: OfMeta,
    "odd_module_name": OddModuleName,
    "odd_keys": lambda: OddKeys(a=1),
    "odd_list": lambda: OddList([1]),
    "undecided": Undecided,
    "mock": mock.MagicMock,
    "proxy": lambda: weakref.proxy(ALIVE),
    "lazy_module": lazy_module,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "generator": lambda: (i for i in range(2)),
    "frame": lambda: sys._getframe(),
}
ALIVE = nn.Linear(1, 1)
CALLED = ("traced", "scripted", "frozen", "scripted_function", "normed", "fx")


def programs(items: Any, called: Any = None, config: Any = None) -> tuple[Any, Any]:
    """Programs that reach objects by a closure and by an attribute, and may call one of them."""
    holder = types.SimpleNamespace(items=items, config=config)

    def model(*_: Any) -> None:
        a = pyro.sample("a", dist.Bernoulli(0.4))
        b = pyro.sample("b", dist.Bernoulli(0.3)) if config is not None else a
        assert holder.items is items
        value = a if called is None else called(a.reshape(1, 1)).sum()
        linked = b if config is not None and config.linked else 0.0
        pyro.sample("x", dist.Normal(value + 2.0 * a * linked, 1.0), obs=torch.tensor(0.7))

    def guide(*_: Any) -> None:
        q = pyro.param("q", torch.tensor([0.3, -0.2]))
        pyro.sample("a", dist.Bernoulli(logits=q[0]))
        if config is not None:
            pyro.sample("b", dist.Bernoulli(logits=q[1]))

    return model, guide


def train(steps: int, model: Any, guide: Any, *args: Any, number: int | None = 2) -> TraceBackpropQ_ELBO:
    return trained(TraceBackpropQ_ELBO(num_particles=number), model, guide, *args, steps=steps)


@pytest.mark.parametrize("name", CALLED)
def test_modules_that_are_called(name: str) -> None:
    model, guide = programs(None, ODD[name]())
    train(3, model, guide, number=None)
    assert_unbiased(train(3, model, guide).eval(), model, guide)
    assert_recorded(lambda: (model, guide, [()] * 8), num_particles=2)


@pytest.mark.parametrize("name", [name for name in ODD if name not in CALLED])
def test_objects_within_reach_and_among_the_arguments(name: str) -> None:
    item = ODD[name]()
    model, guide = programs(item)
    assert_unbiased(train(2, model, guide, item).eval(), model, guide, item)


def test_steps_are_recorded_with_them_in_reach() -> None:
    items = {name: make() for name, make in ODD.items()}
    assert_recorded(lambda: (*programs(items), [tuple(items.values())] * 8), num_particles=2)


def test_a_flag_beside_them_is_noticed() -> None:
    """Each call hands them over in a new tuple."""
    items = [make() for make in ODD.values()]
    first, second, third = (reach({"args": (*items, flag)}) for flag in (False, False, True))
    assert first.difference(second) == "" and "was False and is True" in first.difference(third)


@dataclass(slots=True)
class Config:
    """Options in slots, as ``dataclass(slots=True)`` makes them."""

    linked: bool = False


@pytest.mark.parametrize("name", ["slots", "closed", "scripted"])
def test_a_flag_in_a_slot_is_noticed(name: str) -> None:
    """Beside an object that hides everything, too: the flag is behind it."""
    config = Config()
    model, guide = programs(ODD[name](), config=config)
    elbo = train(6, model, guide)
    config.linked = True
    assert_unbiased(elbo.eval(), model, guide)


def test_the_mode_of_a_scripted_module_is_noticed() -> None:
    """In training it adds a reader of ``a`` that is not there in evaluation."""

    class Gate(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a * b if self.training else b

    gate = torch.jit.script(Gate()).eval()

    def model() -> None:
        a, b = pyro.sample("a", dist.Bernoulli(0.4)), pyro.sample("b", dist.Bernoulli(0.3))
        pyro.sample("x", dist.Normal(gate(a, b), 0.5), obs=torch.tensor(0.7))

    guide = programs(None, config=Config())[1]
    elbo = train(6, model, guide)
    gate.train()
    assert_unbiased(elbo.eval(), model, guide)


@pytest.mark.filterwarnings("ignore:Rows of the plate")
@pytest.mark.parametrize("number", [1, 2])
def test_a_net_keeps_its_own_statistics(number: int) -> None:
    """Further runs of the model leave no trace in them, whether it is scripted or not."""
    seen = []
    for kind, is_scripted in ((Trace_ELBO, False), (TraceBackpropQ_ELBO, False), (TraceBackpropQ_ELBO, True)):
        fresh()
        net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
        run, buffers = torch.jit.script(net) if is_scripted else net, dict(net.named_buffers())
        programs = rows(lambda z: run(z.reshape(-1, 1)).reshape(*z.shape, 2).sum(-1), torch.ones(3))  # noqa: B023
        trained(kind(num_particles=number), *programs, steps=6)
        assert is_scripted or all(net.get_buffer(name) is buffer for name, buffer in buffers.items())
        seen.append(dict(run.state_dict()))
    assert seen[0]["1.num_batches_tracked"] == 6 * number
    for own in seen[1:]:
        torch.testing.assert_close(own, seen[0])


def test_a_guide_may_keep_its_arguments() -> None:
    """As scripts do: ``self.args = parser.parse_args()``."""

    class Guide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.args = nn.Parameter(torch.tensor([0.3, -0.2])), argparse.Namespace(linked=True)

        def forward(self) -> None:
            for name, logits in zip("ab", self.q, strict=True):
                pyro.sample(name, dist.Bernoulli(logits=logits))

    model, guide = programs(None, config=Config(linked=True))[0], Guide()
    learner = CriticLearner(slow=SlowTracking(0.1, guide=True), replay=Replay(batch_size=2))
    stepped(4, TraceBackpropQ_ELBO(learner=learner, num_particles=1), model, guide)
    assert guide.q.grad is not None
