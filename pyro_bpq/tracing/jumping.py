r"""Sites whose pathwise gradient misses a jump of a cost: they get the score function."""

from __future__ import annotations

from collections.abc import Iterator

from pyro.distributions import Delta

from pyro_bpq.record.jumps import Path, jump_of, path_of
from pyro_bpq.record.key import Call
from pyro_bpq.record.recording import Uncut
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.watch import carried
from pyro_bpq.rollout.features import base_distribution
from pyro_bpq.short import number

# Recorded runs whose operators are compared with those of the run before.
_COMPARED = 16


def open_sites(run: TracedRun) -> frozenset[str]:
    """The sites of a recorded run whose gradient is pathwise, and that nobody chose an estimator for."""
    assert run.recorded is not None
    return frozenset(
        name
        for name, site in run.run.sites.items()
        if name in run.recorded.drawn and run.infos[name].has_rsample and run.options[name].estimator is None
        if site.value.requires_grad and not carried(site.value) and not isinstance(base_distribution(site.fn), Delta)
    )


def is_undecided(run: TracedRun, looks: int) -> bool:
    """Whether it is not yet known if reads of such sites steer the program."""
    return run.recorded is not None and looks < _COMPARED and not open_sites(run).isdisjoint(run.escaped_sites)


def jumps_of(
    run: TracedRun, call: Call, looks: int, paths: list[Path], has_counters: bool
) -> Iterator[tuple[str, str]]:
    """Such sites whose costs jump, and what was seen.

    Args:
        run: A recorded run.
        call: Its call.
        looks: Number of recorded runs of such calls before it.
        paths: The paths that they have taken; that of the run is added.
        has_counters: Whether numbers change from step to step.
    """
    recorded, sites = run.recorded, open_sites(run)
    if recorded is None or not sites:
        return
    steering = sites & run.escaped_sites
    if steering and looks < _COMPARED:
        path = path_of(recorded, steering, has_counters)
        steers = any(map(path.turns_off, paths))
        paths.append(path)
        for name in sorted(steering) if steers else ():
            bit = recorded.recording.bits[name]
            line = next((line for mask, line in recorded.recording.lines.items() if mask & bit), "the program")
            costs = sorted(cost for cost in recorded.reads if name in recorded.reads[cost])
            yield name, f"other operators or numbers follow in {', '.join(costs[:4])} where {line} reads other values"
    # Looked at are the first recorded run, the fourth, the sixteenth, and so on.
    if (looks + 1).bit_count() > 1 or (looks + 1).bit_length() % 2 == 0:
        return
    passing = frozenset(n for n in recorded.drawn if isinstance(base_distribution(run.run.sites[n].fn), Delta))
    bound = run.bound(recorded, call)
    for name in sorted(sites):
        try:
            jump = jump_of(recorded, bound, name, passing, 1 + looks)
        except (Uncut, RuntimeError, ValueError, IndexError, TypeError, ArithmeticError):
            continue  # a program may fail in any way at other values
        if jump is not None:
            yield name, f"{jump.cost} jumps by {number(jump.size)} nats where {jump.operator!r} switches"


def told(name: str, seen: str) -> str:
    """The warning that a site gets the score function."""
    return (
        f"Site {name!r} is reparameterised, but a pathwise gradient misses jumps: {seen}. From now on it gets the "
        "score function, with leave-one-out where several particles run. To keep the pathwise gradient, write "
        'infer={"bpq": {"estimator": Pathwise()}} at the site.'
    )
