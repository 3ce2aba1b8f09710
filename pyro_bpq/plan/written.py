r"""What the options that a user has written turn off, or leave as it is, in words."""

from __future__ import annotations

from collections.abc import Mapping

from pyro_bpq.critics.nets import Critic
from pyro_bpq.estimators.base import Estimator
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


NO_CRITICS = (
    "these sites have no critic, as print(elbo.plan) says. Leave them out, or choose critic=MLPCritic() there, and an "
    "estimator that uses it, such as AllAction()."
)


def unread_options(traced: TracedRun, critics: Mapping[str, Critic | None], why: str = NO_CRITICS) -> str:
    """Tells options of sites that are about critics, at sites that have none; empty if there are none.

    ``critics`` has those too that have nothing left to learn.
    """
    found: dict[str, list[str]] = {}
    for name, options in traced.options.items():
        given = {"critic": options.critic, "context": options.context is not None, "share": options.share}
        for option in (option for option, value in given.items() if value and critics.get(name) is None):
            found.setdefault(option, []).append(name)
    if not found:
        return ""
    texts = "; ".join(f"{option} at {listed(names)}" for option, names in found.items())
    return f"Nothing reads the options {texts}: {why}"
