r"""``cost``: a statement inside a program that adds a term to what is minimised.

It is an observed sample statement, so that plates, scales and masks apply as they do to ``pyro.factor``, and
Pyro's own ELBOs count it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.score_parts import ScoreParts
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import am_i_wrapped, effectful
from torch import Tensor
from torch.distributions import constraints

from pyro_bpq.errors import OptionError

__all__ = [
    "CALL",
    "CostCounter",
    "CostOptions",
    "GiveCosts",
    "Given",
    "SkipCosts",
    "cost",
    "cost_options",
    "given_costs",
]

# Type of the message that calls a cost's function.
CALL = "bpq_cost"


@dataclass(frozen=True)
class CostOptions:
    """What a cost statement says of itself, ``infer["bpq_cost"]``.

    Args:
        exact: Whether it may be evaluated at other values than those sampled.
        is_function: Whether a function was given, which is not called where the cost is not wanted.
        size: Number of elements of its value; 0 if the function was left out.
        in_guide: Whether it stands in the guide.
    """

    exact: bool = False
    is_function: bool = False
    # It is no part of what the cost is: two runs of a structure may differ in whether the function was called.
    size: int = field(default=0, compare=False)
    in_guide: bool = False


def cost(name: str, value: Any, *args: Any, exact: bool = False) -> Tensor:
    r"""Adds a cost to what is minimised: user units, positive is bad.

    .. math:: J = E[\textstyle\sum_c c] \quad\text{or}\quad J = -\mathrm{ELBO} + E[\textstyle\sum_c c]

    In a model or a guide; in plates it has their batch shape, and their scales apply. Gradients flow through a
    tensor that has them; whatever else was sampled before it and reaches it gets its gradient from an estimator.

    A *value* is tracked soundly, whatever the program did to get it; if that looked at a sampled value in Python
    (``.item()``, ``.tolist()``, numpy), all that follows depends on it, and critics see a sequence. A *function* is
    called once with ``args`` at its place in every run of the program. Its looks at values stay inside: it must
    give the program nothing but its result. Critics then work, whatever it does in Python.

    Args:
        name: Name of the cost, unique among the sites.
        value: The cost: a number, an array or a tensor of the plates' batch shape; or a function that returns one.
        *args: Arguments of the function.
        exact: Whether the cost may be evaluated at values that were not sampled, in a dimension left of all plates
            (``AllAction(exact=...)``). By default it never is: a function is left out of the extra run, and a
            given value rules the extra run out.

    Returns:
        The cost as a tensor.

    Raises:
        OptionError: If the value is no number, or arguments are given without a function.

    Example:
        >>> import pyro.distributions as dist
        >>> def policy():
        ...     z = pyro.sample("z", dist.Categorical(logits=pyro.param("logits", torch.zeros(3))))
        ...     cost("loss", lambda z: 0.0 if z.item() == 2 else 1.0, z)
    """
    is_function = callable(value)
    if args and not is_function:
        raise OptionError(f"Cost {name!r}: arguments {args!r} without a function; write cost({name!r}, function, ...).")
    if is_function:
        found = _call(name, exact, value, *args, name=name, infer={"exact": exact})
    else:
        found = _tensor(name, exact, value, ())
    # A handler has left the function out, or knows what it once returned.
    is_called = isinstance(found, Tensor)
    tensor = torch.zeros(()) if found is None else found if isinstance(found, Tensor) else found.value
    if am_i_wrapped():
        size = tensor.numel() if is_called else 0
        pyro.sample(
            name,
            _Cost(tensor),
            obs=tensor.detach().new_empty((*tensor.shape, 0)),
            infer={"is_auxiliary": True, "bpq_cost": CostOptions(exact, is_function, size)},  # type: ignore[arg-type]
        )
    return tensor


@dataclass(frozen=True, eq=False)
class Given:
    """What stands for a call that was not made."""

    value: Tensor


@effectful(type=CALL)
def _call(site: str, exact: bool, function: Callable[..., Any], *args: Any) -> Any:
    # Its own memory: what is noted about the result must not be noted about a tensor or an array of the program.
    return _tensor(site, exact, function(*args), args).clone()


def _tensor(name: str, exact: bool, value: Any, args: tuple[Any, ...]) -> Tensor:
    if exact and not isinstance(value, Tensor):
        raise OptionError(
            f"Cost {name!r}: exact=True needs a tensor that keeps all dimensions on the left of the plates, not "
            f"{type(value).__name__}; leave exact out."
        )
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        value = torch.stack([torch.as_tensor(item) for item in value])
    if not isinstance(value, Tensor):
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
        is_number = isinstance(value, (bool, int, float))
        try:
            value = torch.as_tensor(value, device=device, dtype=torch.get_default_dtype() if is_number else None)
        except (TypeError, ValueError, RuntimeError) as error:
            raise OptionError(
                f"Cost {name!r}: {value!r} is no number; give a number, an array, a tensor, or a function."
            ) from error
    if value.is_complex():
        raise OptionError(f"Cost {name!r} is complex; give a real number.")
    return value if value.is_floating_point() else value.to(torch.get_default_dtype())


def cost_options(site: Any) -> CostOptions | None:
    """The options of a cost statement; ``None`` for any other site."""
    return site["infer"].get("bpq_cost")


class _Cost(TorchDistribution):
    """An event without data whose log-density is minus the cost.

    Pyro adds a model's log-density to the ELBO and subtracts a guide's, of which it asks for the score parts:
    these have the other sign, so that a cost is a cost in both.
    """

    arg_constraints = {"value": constraints.real}  # noqa: RUF012
    support = constraints.real

    def __init__(self, value: Tensor, validate_args: bool | None = None) -> None:
        self.value = value
        super().__init__(value.shape, torch.Size((0,)), validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> _Cost:
        return _Cost(self.value.expand(torch.Size(batch_shape)), validate_args=False)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.value.detach().new_empty(torch.Size(sample_shape) + self.shape())  # type: ignore[no-untyped-call]

    def log_prob(self, value: Tensor) -> Tensor:
        return -self.value

    def score_parts(self, x: Tensor, *args: Any, **kwargs: Any) -> ScoreParts:
        return ScoreParts(self.value, 0, self.value)  # type: ignore[arg-type]


class SkipCosts(Messenger):
    """Leaves out the functions of costs; those that may be evaluated anywhere are called if ``exact``.

    Args:
        exact: Whether functions of costs with ``exact=True`` are called.
    """

    def __init__(self, exact: bool = False) -> None:
        super().__init__()
        self.exact = exact

    def __repr__(self) -> str:
        return f"SkipCosts(exact={self.exact})"

    def _pyro_bpq_cost(self, msg: Any) -> None:
        if not (self.exact and msg["infer"]["exact"]):
            msg["done"] = True


class GiveCosts(Messenger):
    """Gives the functions of costs values that they once returned instead of calling them.

    Args:
        values: Value of each cost, by name; a function that is not named is called.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def __repr__(self) -> str:
        return f"GiveCosts({', '.join(self.values)})"

    def _pyro_bpq_cost(self, msg: Any) -> None:
        if msg["name"] in self.values:
            msg["value"], msg["done"] = Given(self.values[msg["name"]].clone()), True


def given_costs(trace: Any) -> dict[str, Tensor]:
    """What the functions of costs returned in a trace, by name of the statement, detached."""
    found = {}
    for name, site in trace.nodes.items():
        options = cost_options(site) if site["type"] == "sample" else None
        if options is not None and options.is_function and options.size:
            found[name] = site["fn"].value.detach()
    return found


class CostCounter(Messenger):
    """Counts cost statements, in every run that happens inside of it, extra runs too.

    Attributes:
        calls: Number of times that each cost was evaluated.
        elements: Number of values that this yielded: a cost of 64 data points counts 64.

    Example:
        >>> with CostCounter() as counter:
        ...     _ = pyro.poutine.trace(lambda: cost("a", 2.0)).get_trace()
        >>> counter.calls, counter.elements
        ({'a': 1}, {'a': 1})
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.elements: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"CostCounter(calls={self.calls}, elements={self.elements})"

    @property
    def total(self) -> int:
        """Number of values of all costs."""
        return sum(self.elements.values())

    def _pyro_post_sample(self, msg: Any) -> None:
        options = cost_options(msg)
        if options is not None and options.size:
            self.calls[msg["name"]] = self.calls.get(msg["name"], 0) + 1
            self.elements[msg["name"]] = self.elements.get(msg["name"], 0) + options.size
