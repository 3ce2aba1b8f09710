r"""Checks the options of an objective, and how it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pyro_bpq.critics.learner import CriticLearner
from pyro_bpq.critics.nets import Critic
from pyro_bpq.errors import OptionError, UnsupportedProgramError
from pyro_bpq.estimators import Estimator
from pyro_bpq.estimators.baselines import Baseline
from pyro_bpq.graph.network import check_discounted

_REDUCTIONS = ("per_cost", "merged", "tree", "chain", "single")


def check_options(estimator: Any, critic: Any, reduction: Any, lam: Any, gamma: Any, learner: Any) -> None:
    """Raises :class:`OptionError` for an option that is out of range or of the wrong kind."""
    if estimator is not None and (isinstance(estimator, type) or not isinstance(estimator, Estimator)):
        raise OptionError(f"estimator={estimator!r} is not an estimator; {_instead_of(estimator)}")
    if critic is not None and (isinstance(critic, type) or not isinstance(critic, Critic)):
        raise OptionError(f"critic={critic!r} is not a critic; write an object such as MLPCritic(), or None.")
    check_choice("reduction", reduction, _REDUCTIONS)
    if not callable(lam) and not 0.0 <= lam <= 1.0:
        raise OptionError(f"lam={lam!r}: write a number in [0, 1] or a function of the step.")
    if not callable(gamma) and not 0.0 < gamma <= 1.0:
        raise OptionError(f"gamma={gamma!r}: write a number in (0, 1] or a function of the step.")
    check_discounted(reduction, callable(gamma) or gamma != 1.0)
    if learner is not None and not isinstance(learner, CriticLearner):
        raise OptionError(f"learner={learner!r} is not a learner; write CriticLearner(lr=...) or None.")


def _instead_of(given: Any) -> str:
    """What to write in place of what is no estimator."""
    if isinstance(given, type) and issubclass(given, Estimator):
        return f"write an object: {given.__name__}()."
    if isinstance(given, Baseline):
        return f"it is a baseline: write ScoreFunction({type(given).__name__}())."
    return "write an object such as AllAction()."


def check_choice(option: str, value: Any, allowed: Sequence[str]) -> None:
    """Raises :class:`OptionError` for an option that has none of its values."""
    if value not in allowed:
        raise OptionError(f"{option}={value!r} is unknown; write one of {', '.join(map(repr, allowed))}.")


def check_not_traced() -> None:
    """Raises :class:`UnsupportedProgramError` inside ``torch.jit.trace``.

    A trace would keep critics, scales and baselines of one step as constants; and sizes are tensors in it, so that
    no cached structure fits.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise UnsupportedProgramError(
            "torch.jit.trace would turn what Python sees, the structure of the program, and all that is learned "
            "(critics, scales, baselines) into constants. "
            "Call the loss untraced; vectorize_particles=True, pyro.plate instead of Python loops and "
            "pyro.enable_validation(False) make a step cheaper. Networks of the model may be traced on their own."
        )
