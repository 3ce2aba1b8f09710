"""What estimators may ask for beyond the tensors of every site: a row for each signal.

A new signal is a function in a file of its own, and a row here. An estimator that names it in its ``needs`` finds what
the function returns in ``context.signals``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pyro_bpq.step import (
    critic_at_value,
    crossed_signal,
    hindsight_signal,
    moved_value,
    parent_advantage,
    site_program,
    user_baseline,
)
from pyro_bpq.step.asked import RolloutTensors

# Needs that are met by something else than a signal.
OTHER_NEEDS = frozenset({"table", "slope"})

# From the tensors of a rollout and the position of a class of sites.
Signal = Callable[[RolloutTensors, int], Any]

SIGNALS: Mapping[str, Signal] = MappingProxyType(
    {
        "program": site_program.of_class,
        "crossed": crossed_signal.of_class,
        "hindsight": hindsight_signal.of_class,
        "baseline": user_baseline.of_class,
        "q_value": critic_at_value.value_of_class,
        "q_slope": critic_at_value.slope_of_class,
        "moved_value": moved_value.of_class,
        "advantage": parent_advantage.of_class,
    }
)
