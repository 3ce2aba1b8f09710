"""Options per site: ``infer={"bpq": {...}}`` and ``config_bpq``, those of baselines, and those of cost statements."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from itertools import dropwhile
from typing import Any

import torch
from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_bpq.critics.nets import Critic
from pyro_bpq.errors import OptionError, PlateError
from pyro_bpq.estimators.base import Estimator


@dataclass(frozen=True)
class SiteOptions:
    """Options of one site; ``None`` leaves the choice to the ELBO.

    Args:
        estimator: Gradient estimator of the site.
        critic: Recipe for the critic of the site; ``False`` for no critic.
        share: Name under which sites of a family share one critic.
        context: A tensor of features that the critic sees, of shape ``batch_shape + (C,)``, detached.
        baseline: Pyro's baseline options. They stay in their usual place, ``infer={"baseline": {...}}``.
    """

    estimator: Estimator | None = None
    critic: Critic | bool | None = None
    share: str | None = None
    context: Any = None
    baseline: BaselineOptions | None = None

    @property
    def leaves_estimator(self) -> bool:
        """Whether the ELBO chooses the estimator."""
        return self.estimator is None and self.baseline is None

    @property
    def is_open(self) -> bool:
        """Whether it also chooses if there is a critic."""
        return self.leaves_estimator and not self.critic and self.context is None

    def __post_init__(self) -> None:
        check_estimator(self.estimator)
        check_critic(self.critic, False)
        if self.context is not None and not (isinstance(self.context, Tensor) and self.context.dim()):
            raise OptionError(f"context={self.context!r} is not a tensor of features; write one of shape (*plates, C).")
        if self.share is not None and not isinstance(self.share, str):
            raise OptionError(f'share={self.share!r} is not a name; write a string, e.g. share="z".')


def check_estimator(given: Any) -> None:
    """Raises :class:`OptionError` for what is neither an estimator nor ``None``."""
    if given is not None and (isinstance(given, type) or not isinstance(given, Estimator)):
        raise OptionError(f"estimator={given!r} is not an estimator; write an object such as AllAction().")


def check_critic(given: Any, without: Any) -> None:
    """Raises :class:`OptionError` for what is no critic; ``None`` and ``without``, which asks for none, are allowed."""
    is_critic = isinstance(given, Critic) and not isinstance(given, type)
    if not (is_critic or given is None or given is without):
        raise OptionError(f"critic={given!r} is not a critic; write an object such as MLPCritic(), or {without}.")


def check_context(name: str, context: Tensor, batch: torch.Size) -> None:
    """Raises for a context whose rows are not those of the site's plates, or that would spoil the critics for good."""
    if is_validation_enabled() and not bool(context.isfinite().all()):
        raise OptionError(f"Site {name!r}: the option context is NaN or infinite. Write context.nan_to_num().")
    rows = tuple(dropwhile(lambda size: size == 1, context.shape[:-1]))
    if len(rows) > len(batch) or any(own not in (1, size) for own, size in zip(rows[::-1], batch[::-1], strict=False)):
        raise PlateError(
            f"Site {name!r}: the option context has the shape {tuple(context.shape)}; write (*rows, features), where "
            f"rows are {tuple(batch)}, the batch shape of the site, or ones."
        )


# Pyro's names.
_BASELINE = ("nn_baseline", "nn_baseline_input", "baseline_value", "use_decaying_avg_baseline", "baseline_beta")
# Shared by most sites: options are read at every site of every step.
_UNSET = SiteOptions()


def option_names() -> list[str]:
    """The options of ``infer={"bpq": {...}}``."""
    return [option.name for option in fields(SiteOptions) if option.name != "baseline"]


def site_options(name: str, infer: dict[str, Any]) -> SiteOptions:
    """Reads the options of a site."""
    if infer.get("bpq") is None and not infer.get("baseline"):
        return _UNSET
    try:
        return SiteOptions(**_given(infer, "bpq", option_names()), baseline=baseline_options(infer))
    except OptionError as error:
        raise OptionError(f"Site {name!r}: {error}") from error


def _given(infer: Mapping[str, Any], key: str, known: Collection[str]) -> dict[str, Any]:
    """The options that ``infer`` has under a key, if all of them are known."""
    given = infer.get(key)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise OptionError(f'infer={{"{key}": {given!r}}} must be a dictionary of options.')
    for option in given:
        if option not in known:
            near = difflib.get_close_matches(str(option), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are {sorted(known)}."
            raise OptionError(f'unknown option {option!r} in infer={{"{key}": ...}}; {hint}')
    return given


def config_bpq(guide: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Sets options for all latent sites of a guide that do not set them themselves.

    Args:
        guide: A guide; without it a decorator is returned.
        **options: Fields of :class:`SiteOptions`.

    Returns:
        The guide with the options.

    Raises:
        OptionError: If an option is unknown or of the wrong kind.

    Example:
        >>> from pyro_bpq import ScoreFunction
        >>> @config_bpq(estimator=ScoreFunction())
        ... def guide():
        ...     pass
    """
    site_options("(config_bpq)", {"bpq": options})
    if guide is None:
        return functools.partial(config_bpq, **options)

    def options_of(site: Any) -> Any:
        own = site["infer"].get("bpq")
        # What is no dictionary is refused with the site's other options.
        is_open = site["type"] == "sample" and not site["is_observed"] and (own is None or isinstance(own, dict))
        return {"bpq": {**options, **(own or {})}} if is_open else {}

    return poutine.infer_config(guide, options_of)


class OthersDraw(Messenger):
    """Refuses options at sites of a program whose values another program has drawn.

    Args:
        where: The program, in words.
        drawer: The other program, in words.
        trace: The trace of the other program, whose own options count.
        is_whole: Whether the other program draws all values, those included that its trace lacks.
    """

    def __init__(self, where: str, drawer: str, trace: Any, is_whole: bool) -> None:
        super().__init__()
        self.where, self.drawer, self.trace, self.is_whole = where, drawer, trace, is_whole

    def _pyro_sample(self, msg: Any) -> None:
        name, drawn = msg["name"], self.trace.nodes.get(msg["name"])
        if "bpq" in msg["infer"] and (self.is_whole if drawn is None else "bpq" not in drawn["infer"]):
            raise OptionError(
                f'Site {name!r} has infer={{"bpq": ...}} in the {self.where}, where nothing reads it: options belong '
                f'to the statement that draws the value. Write pyro.sample("{name}", ..., infer={{"bpq": ...}}) in '
                f"the {self.drawer}, or config_bpq({self.drawer}, ...)."
            )


@dataclass(frozen=True, eq=False)
class BaselineOptions:
    """Baseline options of one site.

    A baseline predicts ``log p - log q`` downstream of the site, one number for each plate row of the site. A network
    or a tensor learns by a squared loss, which is part of the surrogate: the user's optimiser trains it. The decaying
    average is one number per site, unlike in ``TraceGraph_ELBO``, so batches may differ in size.
    """

    network: Callable[[Any], Tensor] | None = None  # `nn_baseline`
    input: Any = None  # `nn_baseline_input`
    value: Tensor | None = None  # `baseline_value`
    decay: float | None = None  # `baseline_beta` if `use_decaying_avg_baseline`, else `None`

    @property
    def is_predicted(self) -> bool:
        """Whether a network or a tensor of the user predicts."""
        return self.network is not None or self.value is not None

    def predict(self, name: str, shape: torch.Size) -> Tensor:
        """The predicted cost-to-go of a site of this batch shape, with its gradient."""
        value = self.value
        if self.network is not None:
            value = self.network(tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, self.input))
        value = torch.as_tensor(value)
        # Leading ones do not count.
        own, wanted = (tuple(dropwhile(lambda size: size == 1, sizes)) for sizes in (value.shape, shape))
        if own != wanted:
            raise PlateError(
                f"Site {name!r}: its baseline has the shape {tuple(value.shape)}; it must be {tuple(shape)}, "
                "the batch shape of the site."
            )
        # Pyro's baselines predict a quantity to maximise; a cost has the other sign.
        return -value.reshape(shape)


def baseline_options(infer: Mapping[str, Any]) -> BaselineOptions | None:
    """Reads ``infer["baseline"]`` of a site."""
    given = _given(infer, "baseline", _BASELINE)
    network, own, value = map(given.get, _BASELINE[:3])
    if network is not None and value is not None:
        raise OptionError("give nn_baseline or baseline_value, not both.")
    if network is not None and own is None:
        raise OptionError("nn_baseline needs its argument; add nn_baseline_input=....")
    decay = float(given.get("baseline_beta", 0.9)) if given.get("use_decaying_avg_baseline") else None
    if decay is not None and not 0.0 <= decay < 1.0:
        raise OptionError(f"baseline_beta={decay!r}; write a number in [0, 1).")
    is_set = decay is not None or network is not None or value is not None
    return BaselineOptions(network, own, value, decay) if is_set else None


@dataclass(frozen=True)
class CostOptions:
    """The options of a cost statement, ``infer["bpq_cost"]``."""

    is_function: bool = False  # whether a function was given. It is not called in runs that do not want the cost.
    # Two runs of the same structure may differ in whether the function was called.
    size: int = field(default=0, compare=False)  # number of elements of the value; 0 if the function was not called


def cost_options(site: Any) -> CostOptions | None:
    """Returns the options of a cost statement; ``None`` for any other site."""
    return site["infer"].get("bpq_cost")
