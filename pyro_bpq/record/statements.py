r"""What programs may write besides Pyro's statements: costs, and calls of functions that leave torch.

``cost`` adds a term to the objective to minimise. It is an observed sample statement. So plates, scales and masks apply
as they do to ``pyro.factor``, and Pyro's own ELBOs count the cost too. ``external`` calls a step of a simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import pyro
import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.score_parts import ScoreParts
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import am_i_wrapped, effectful
from torch import Tensor
from torch.distributions import constraints
from torch.utils._pytree import tree_leaves, tree_map

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
    and critics still work. But it must affect the program only through its result. One that is no method, reads
    none, and computes with all of its arguments in torch counts as a value: several particles may run, and its cost is
    known at values that were not sampled.

    Args:
        name: Name of the cost, unique among the sites.
        value: The cost: a number, an array or a tensor of the plates' batch shape; or a function that returns one.
        *args: Arguments of the function.
        exact: Whether the function is known to read no values in Python: those that it reads steer the program.

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
    # A handler may skip the function, or give the result of an earlier call.
    asked = {"exact": exact, "is_called": True}
    found = _call(name, exact, value, *args, name=name, infer=asked) if is_function else _tensor(name, exact, value, ())
    tensor = torch.zeros(()) if found is None else found
    if am_i_wrapped():
        size = tensor.numel() if asked["is_called"] else 0
        infer = {"is_auxiliary": True, "bpq_cost": CostOptions(is_function, size)}
        try:
            fn = _Cost(tensor)
        except ValueError as error:
            count = f"{int(tensor.isnan().sum())} of {tensor.numel()}"
            raise UnsupportedSiteError(f"The cost {name!r} is NaN at {count} elements. {NO_NUMBER}") from error
        pyro.sample(name, fn, obs=tensor.detach().new_empty((*tensor.shape, 0)), infer=infer)  # type: ignore[arg-type]
    return tensor


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


class SkipCosts(Messenger):
    """Around runs that are no step's own: skips the functions of costs.

    Args:
        values: What functions have returned earlier; these costs have these values.
        calls: Whether the functions of other costs are called all the same.
    """

    def __init__(self, values: Mapping[str, Tensor] = MappingProxyType({}), calls: bool = False) -> None:
        super().__init__()
        self.values, self.calls = values, calls

    def _pyro_bpq_cost(self, msg: Any) -> None:
        known = self.values.get(msg["name"])
        if known is not None or not self.calls:
            msg["value"], msg["done"] = None if known is None else known.clone(), True
            msg["infer"]["is_called"] = False

    def _pyro_bpq_external(self, msg: Any) -> None:
        raise UnsupportedProgramError(
            f"The programs run once more, but {msg['args'][0].name} is called in a step's own run alone. Vectorised "
            "particles need max_plate_nesting; replay and proximal steps need pyro_bpq.cost(name, function, z) instead."
        )


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


@dataclass(frozen=True, eq=False)
class external:
    r"""Wraps a function that leaves torch, so that programs may call it: a step of a simulator, a solver, a game.

    The call is one operator of the recording. Its results read the tensors that it is handed in, now and in earlier
    calls of this run, since a simulator has a state: methods of one object share it. Nothing else steers the program,
    whatever Python the function runs.

    The function gets tensors without gradient, copies, and returns tensors, arrays, numbers or ``None``, also in
    tuples, lists and dictionaries. The caller gets tensors; arrays of floating-point numbers have torch's default type.
    In a step the function is called once for each particle, or once for all vectorised particles, and never at other
    values. It has to read all that is sampled from its arguments.

    Args:
        function: The function.
        rowwise: Whether row :math:`i` of each plate in a result reads only row :math:`i` of what was handed in. The
            plates are those around the call, and those of the sites that it reads. Their dimensions are the first ones
            of arguments and results, ``(plates, ...)``; what has other dimensions belongs to all rows. Otherwise each
            result reads all of what was handed in.

    Raises:
        UnsupportedProgramError: If it is called in a run that is no step's own, if it is handed in a gradient, or if it
            reads sampled values that it was not handed in.
        OptionError: If a result is no number.

    Example:
        >>> import numpy, pyro, pyro.distributions as dist
        >>> from pyro_bpq import cost, external
        >>> distance = external(lambda z: numpy.abs(z.numpy() - 2.0))
        >>> def policy():
        ...     with pyro.plate("episodes", 64):
        ...         z = pyro.sample("z", dist.Categorical(logits=pyro.param("logits", torch.zeros(3))))
        ...         cost("distance", distance(z))
    """

    function: Callable[..., Any]
    rowwise: bool = True

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise OptionError(f"external({self.function!r}): write a function.")

    @property
    def name(self) -> str:
        """How it is called in messages."""
        return f"the external function {getattr(self.function, '__qualname__', repr(self.function))!r}"

    @property
    def owner(self) -> Any:
        """The object that may have a state: that of a method, or this one."""
        return self if (found := owner_of(self.function)) is None else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return _ask(self, args, kwargs)

    def answer(self, args: Any, kwargs: Any) -> Any:
        """What the function returns, as tensors with memory of their own."""
        handed = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with torch.no_grad():
            args, kwargs = tree_map(_copy, (args, kwargs))
            return tree_map(lambda leaf: self._tensor(leaf, handed), self.function(*args, **kwargs))

    def _tensor(self, leaf: Any, handed: list[Tensor]) -> Tensor | None:
        if leaf is None or isinstance(leaf, Tensor):
            return _copy(leaf)
        try:
            found = torch.as_tensor(leaf, device=handed[0].device if handed else None)
        except (TypeError, ValueError, RuntimeError) as error:
            raise OptionError(f"{self.name} returned {leaf!r}; return tensors, arrays, numbers or None.") from error
        return _copy(found.to(torch.get_default_dtype()) if found.is_floating_point() else found)


def owner_of(function: Any) -> Any:
    """The object that may keep state between calls, or ``None``."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        return None if isinstance(function, (FunctionType, BuiltinFunctionType, type)) else function
    return owner


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


_ask = effectful(lambda function, args, kwargs: function.answer(args, kwargs), type="bpq_external")


class Answers(list[Any]):
    """What external functions have answered since a mark; a run that is taken once more gets the same answers."""

    position = 0

    def to(self, function: external, args: Any, kwargs: Any) -> Any:
        """The answer to the next call."""
        if self.position == len(self):
            self.append(function.answer(args, kwargs))
        self.position += 1
        return tree_map(_copy, self[self.position - 1])


def link(handed: Iterable[tuple[Tensor, set[int]]], batch: tuple[int, ...]) -> Tensor:
    """A tensor of the shape of plates, each element of which reads what a row of results reads.

    Beside each tensor are the dimensions of the plates of what it reads; in others all rows read it, whatever its
    shape. The numbers mean nothing.
    """
    found = torch.zeros(batch)
    for tensor, dims in handed:
        own = tensor.ne(0).to(found)
        own = own[..., None].flatten(len(batch)).sum(-1) if keeps_rows(own, batch) else own.sum()
        shared = [dim for dim in range(-own.dim(), 0) if dim not in dims]
        found = found + (own.sum(shared, keepdim=True) if shared else own)
    return found


def keeps_rows(tensor: Tensor, batch: tuple[int, ...]) -> bool:
    """Whether the first dimensions of a tensor are plates of this shape."""
    return tensor.dim() >= len(batch) and all(own in (1, size) for own, size in zip(tensor.shape, batch, strict=False))


def linked(result: Tensor, memory: Tensor) -> Tensor:
    """The same in the shape of a result."""
    keeps, lead = keeps_rows(result, tuple(memory.shape)), result.shape[: memory.dim()]
    rows = memory.sum_to_size(lead) if keeps else memory.sum()
    return rows.reshape((*rows.shape, *(1,) * (result.dim() - rows.dim()))).expand(result.shape)
