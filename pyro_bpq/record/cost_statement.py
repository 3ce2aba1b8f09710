r"""``cost``: a statement inside a program that adds a term to the objective to minimise.

A cost is an observed sample statement. So plates, scales and masks apply as they do to ``pyro.factor``, and
Pyro's own ELBOs count the cost too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.score_parts import ScoreParts
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import am_i_wrapped, effectful
from torch import Tensor
from torch.distributions import constraints

from pyro_bpq.errors import OptionError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.record.config import CostOptions, cost_options

# What to look for where a cost or a factor is NaN.
NO_NUMBER = "Look at how it is computed: 0 / 0, a logarithm of a negative number, or infinity minus infinity."


def cost(name: str, value: Any, *args: Any, exact: bool = False) -> Tensor:
    r"""Adds a cost to the objective to minimise, in user units; positive is bad.

    .. math:: J = E[\sum_c c] \quad\text{or}\quad J = -\mathrm{ELBO} + E[\sum_c c]

    The statement may stand in a model or a guide. Inside plates the cost has their batch shape, and their scales
    apply. If the cost is a tensor with a gradient, gradients flow through it. Gradients through the sampled sites that
    it depends on come from the estimators of these sites.

    A *value* is tracked soundly, whatever the program did to compute it. If the program read a sampled value in Python
    (``.item()``, ``.tolist()``, numpy), everything that follows depends on that value, and critics see a sequence. A
    *function* is called once with ``args``, at its place in every run of the program. It may read values in Python,
    and critics still work. But it must affect the program only through its result.

    Args:
        name: Name of the cost, unique among the sites.
        value: The cost: a number, an array or a tensor of the plates' batch shape; or a function that returns one.
        *args: Arguments of the function.
        exact: Whether the cost may be evaluated at values that were not sampled, in a dimension left of all plates
            (``AllAction(exact=...)``). By default it may not: the extra run skips a function, and a cost given as a
            value rules out the extra run.

    Returns:
        The cost as a tensor.

    Raises:
        OptionError: If the value is not a number, or if arguments are given without a function.
        UnsupportedSiteError: If the value is NaN, and Pyro's validation is on.

    Example:
        >>> import pyro.distributions as dist
        >>> def policy():
        ...     z = pyro.sample("z", dist.Categorical(logits=pyro.param("logits", torch.zeros(3))))
        ...     cost("loss", lambda z: 0.0 if z.item() == 2 else 1.0, z)
    """
    is_function = callable(value)
    if not isinstance(name, str):
        raise OptionError(f'cost({name!r}, ...): the name comes first. Write cost("loss", function, z).')
    if args and not is_function:
        raise OptionError(f"Cost {name!r}: arguments {args!r} without a function; write cost({name!r}, function, ...).")
    if is_function:
        found = _call(name, exact, value, *args, name=name, infer={"exact": exact})
    else:
        found = _tensor(name, exact, value, ())
    # What is no tensor is of a handler that skipped the function, or gave the result of an earlier call.
    tensor = torch.zeros(()) if found is None else found if isinstance(found, Tensor) else found.value
    if am_i_wrapped():
        size = tensor.numel() if isinstance(found, Tensor) else 0
        infer = {"is_auxiliary": True, "bpq_cost": CostOptions(exact, is_function, size)}
        try:
            fn = _Cost(tensor)
        except ValueError as error:
            count = f"{int(tensor.isnan().sum())} of {tensor.numel()}"
            raise UnsupportedSiteError(f"The cost {name!r} is NaN at {count} elements. {NO_NUMBER}") from error
        pyro.sample(name, fn, obs=tensor.detach().new_empty((*tensor.shape, 0)), infer=infer)  # type: ignore[arg-type]
    return tensor


@dataclass(frozen=True, eq=False)
class Given:
    """Wraps an earlier result, in place of a call that was not made."""

    value: Tensor


@effectful(type="bpq_cost")
def _call(site: str, exact: bool, function: Callable[..., Any], *args: Any) -> Any:
    # The clone has its own memory: notes about the result must not apply to a tensor or an array of the program.
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
        try:
            value = torch.as_tensor(value, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise OptionError(
                f"Cost {name!r}: {value!r} is no number; give a number, an array, a tensor, or a function."
            ) from error
    if value.is_complex():
        raise OptionError(f"Cost {name!r} is complex; give a real number.")
    return value if value.is_floating_point() else value.to(torch.get_default_dtype())


def check_particles(name: str, args: Iterable[Any], value: Tensor, number: int, dim: int) -> None:
    """Checks that a function of all particles' values has not given one number for all of them.

    Args:
        name: Name of the cost.
        args: Arguments of the function.
        value: Its result.
        number: Number of particles.
        dim: Dimension of their plate, from the right.

    Raises:
        OptionError: If it has.
    """
    takes = any(isinstance(arg, Tensor) and arg.dim() >= -dim and arg.shape[dim] == number for arg in args)
    if takes and value.dim() < -dim:
        raise OptionError(
            f"Cost {name!r}: its function got the values of {number} particles at once and gave a result of shape "
            f"{tuple(value.shape)}, which has no dimension for them. Keep dimension {dim}: write "
            "z.sum(-1, keepdim=True), not z.sum() or float(...). Or write vectorize_particles=False."
        )


class _Cost(TorchDistribution):
    """An event without data whose log-density is minus the cost.

    Pyro adds the log-density of a model site to the ELBO. It subtracts the score parts of a guide site. So the score
    parts have the opposite sign here, and a cost counts as a cost in both programs.
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


class _Further(Messenger):
    """Around runs that are no step's own."""

    def _pyro_bpq_external(self, msg: Any) -> None:
        raise UnsupportedProgramError(
            f"The programs run once more, but {msg['args'][0].name} is called in a step's own run alone. Vectorised "
            "particles need max_plate_nesting; replay and proximal steps need pyro_bpq.cost(name, function, z) instead."
        )


class SkipCosts(_Further):
    """Skips the functions of costs."""

    def _pyro_bpq_cost(self, msg: Any) -> None:
        msg["done"] = True


class GiveCosts(_Further):
    """Gives costs the values that their functions returned earlier, instead of calling the functions."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def _pyro_bpq_cost(self, msg: Any) -> None:
        if msg["name"] in self.values:
            msg["value"], msg["done"] = Given(self.values[msg["name"]].clone()), True


def given_costs(trace: Any) -> dict[str, Tensor]:
    """Returns the values that functions of costs returned in a trace, by statement name, detached."""
    sites = {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}
    costs = {name: options for name, site in sites.items() if (options := cost_options(site)) is not None}
    return {n: sites[n]["fn"].value.detach() for n, options in costs.items() if options.is_function and options.size}


class CostCounter(Messenger):
    """Counts evaluations of cost statements in every run inside the context, extra runs included.

    Attributes:
        calls: Number of evaluations of each cost.
        elements: Number of values that these evaluations gave: a cost of 64 data points counts 64.

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
        """Total number of values of all costs."""
        return sum(self.elements.values())

    def _pyro_post_sample(self, msg: Any) -> None:
        options = cost_options(msg)
        if options is not None and options.size:
            self.calls[msg["name"]] = self.calls.get(msg["name"], 0) + 1
            self.elements[msg["name"]] = self.elements.get(msg["name"], 0) + options.size
