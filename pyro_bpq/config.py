"""Options per site: ``infer={"bpq": {...}}`` and ``config_bpq``."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from pyro.poutine.messenger import Messenger

from pyro_bpq.critics import Critic
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.estimators.baselines import RunningBaseline
from pyro_bpq.estimators.score_function import ScoreFunction

__all__ = ["SiteOptions", "config_bpq", "site_options"]

_BASELINE_KEYS = frozenset(
    ("nn_baseline", "nn_baseline_input", "use_decaying_avg_baseline", "baseline_beta", "baseline_value")
)


@dataclass(frozen=True)
class SiteOptions:
    """Options of one site; ``None`` leaves the choice to the ELBO.

    Args:
        estimator: Its gradient estimator.
        critic: How to build its critic; ``False`` for none.
        share: Name under which sites of a family share one critic.
        context: A tensor of features that its critic sees, of shape ``batch_shape + (C,)``, detached.
    """

    estimator: Estimator | None = None
    critic: Critic | bool | None = None
    share: str | None = None
    context: Any = None

    def __post_init__(self) -> None:
        if self.estimator is not None and not isinstance(self.estimator, Estimator):
            raise OptionError(
                f"estimator={self.estimator!r} is not an estimator; write an object such as AllAction() "
                "or ScoreFunction(baseline=LeaveOneOut())."
            )
        if self.critic not in (None, False) and not isinstance(self.critic, Critic):
            raise OptionError(
                f"critic={self.critic!r} is not a critic; write an object such as MLPCritic(), or False."
            )


def site_options(name: str, infer: dict[str, Any]) -> SiteOptions:
    """Reads the options of a site.

    Args:
        name: Name of the site.
        infer: Its ``infer`` dictionary.

    Returns:
        Its options.

    Raises:
        OptionError: If an option is unknown or of the wrong kind; the text names the site.
    """
    given = infer.get("bpq")
    if given is None:
        return SiteOptions(estimator=_pyro_baseline(name, infer.get("baseline")))
    if not isinstance(given, dict):
        raise OptionError(f'Site {name!r}: infer={{"bpq": {given!r}}} must be a dictionary of options.')
    known = [field.name for field in fields(SiteOptions)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are {known}."
            raise OptionError(f"Site {name!r}: unknown option {key!r} in infer={{'bpq': ...}}; {hint}")
    try:
        options = SiteOptions(**given)
    except OptionError as error:
        raise OptionError(f"Site {name!r}: {error}") from error
    if options.estimator is None:
        options = replace(options, estimator=_pyro_baseline(name, infer.get("baseline")))
    return options


def _pyro_baseline(name: str, given: dict[str, Any] | None) -> Estimator | None:
    """The estimator that Pyro's ``infer={"baseline": {...}}`` stands for."""
    if not given:
        return None
    unknown = set(given) - _BASELINE_KEYS
    if unknown:
        raise OptionError(
            f"Site {name!r}: unknown baseline options {sorted(unknown)}; the options are {sorted(_BASELINE_KEYS)}."
        )
    if given.get("use_decaying_avg_baseline"):
        return ScoreFunction(baseline=RunningBaseline(decay=given.get("baseline_beta", 0.9)))
    return None


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
    return _ConfigMessenger(options)(guide)  # type: ignore[no-any-return]


class _ConfigMessenger(Messenger):  # type: ignore[misc]
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"]:
            msg["infer"]["bpq"] = {**self.options, **msg["infer"].get("bpq", {})}
