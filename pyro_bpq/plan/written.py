r"""What the options that a user has written turn off, or leave as it is, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyro_bpq.critics.nets import Critic
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.plan.rules import with_baseline
from pyro_bpq.short import listed, short
from pyro_bpq.tracing.traced_run import TracedRun


def written_options(traced: TracedRun, estimator: Estimator | None, asks: tuple[str, ...]) -> list[str]:
    """The options for which a loss is not summed over all values."""
    sites = [name for name, options in traced.options.items() if not options.is_open]
    chosen = [] if estimator is None else [f"estimator={short(estimator)}"]
    return [*chosen, *asks, *([f'infer={{"bpq": ...}} at {listed(sites)}'] if sites else [])]


def why_one(traced: TracedRun, estimator: Estimator | None) -> str:
    """Why one particle runs, where values do not steer the program."""
    chosen = [name for name, options in traced.options.items() if not options.leaves_estimator]
    if traced.user_costs:
        return "the program has cost statements, which may be dear"
    if estimator is not None:
        return f"you wrote estimator={short(estimator)}"
    return f"you wrote an estimator or a baseline at {listed(chosen)}" if chosen else "no gradient is noisy"


def unread_options(traced: TracedRun, estimators: Mapping[str, Estimator], critics: Mapping[str, Critic | None]) -> str:
    """Tells options of sites that nothing reads; empty if there are none.

    ``critics`` has those of the sites, whether anything is left to learn or not.
    """
    found: dict[str, list[str]] = {}
    for name, options in traced.options.items():
        given = dict[str, Any]()
        if critics.get(name) is None:
            given = {"critic": options.critic, "context": options.context is not None, "share": options.share}
        if options.baseline is not None and not estimators[name].is_pathwise:
            given["baseline"] = estimators[name] != with_baseline(options.baseline)
        for option in (option for option, is_unread in given.items() if is_unread):
            found.setdefault(option, []).append(name)
    if not found:
        return ""
    texts = "; ".join(f"{option} at {listed(names)}" for option, names in found.items())
    return (
        f"Nothing reads the options {texts}: print(elbo.plan) says what serves these sites. Leave them out; or choose "
        "an estimator there that uses them, as AllAction() does with critic=MLPCritic()."
    )
