r"""Checks the options of an objective, and makes its planner from them."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pyro_bpq.critics.learner import CriticLearner
from pyro_bpq.critics.nets import Critic, MLPCritic
from pyro_bpq.errors import OptionError, check_choice, is_real, is_whole
from pyro_bpq.estimators import Estimator
from pyro_bpq.graph.network import Reduction, check_discounted
from pyro_bpq.graph.scg import Form
from pyro_bpq.plan.planner import Planner
from pyro_bpq.rollout.schedule import Schedule
from pyro_bpq.short import short
from pyro_bpq.tracing.config import check_critic, check_estimator


def check_counts(num_particles: Any, window: Any) -> None:
    """Raises :class:`OptionError` for a number of particles or a window that is no positive integer."""
    if num_particles is not None and not is_whole(num_particles, 1):
        hint = " SVI takes an instance: loss=TraceBackpropQ_ELBO()." if callable(num_particles) else ""
        raise OptionError(f"num_particles={num_particles!r}: write a positive integer, or None to leave it open.{hint}")
    if not is_whole(window, 1):
        raise OptionError(f"window={window!r}: write a positive integer.")


def check_options(estimator: Any, critic: Any, reduction: Any, lam: Any, gamma: Any, learner: Any) -> None:
    """Raises :class:`OptionError` for an option that is out of range or of the wrong kind."""
    check_estimator(estimator)
    check_critic(critic, None)
    check_choice("reduction", reduction, get_args(Reduction))
    if not callable(lam) and not (is_real(lam) and 0.0 <= lam <= 1.0):
        raise OptionError(f"lam={lam!r}: write a number in [0, 1] or a function of the step.")
    if not callable(gamma) and not (is_real(gamma) and 0.0 < gamma <= 1.0):
        raise OptionError(f"gamma={gamma!r}: write a number in (0, 1] or a function of the step.")
    check_discounted(reduction, callable(gamma) or gamma != 1.0)
    if learner is not None and not isinstance(learner, CriticLearner):
        raise OptionError(f"learner={learner!r} is not a learner; write CriticLearner(lr=...) or None.")


def planner_of(
    estimator: Estimator | None,
    critic: Critic | None,
    reduction: Reduction,
    lam: Schedule,
    gamma: Schedule,
    learner: CriticLearner | None,
    window: int,
    *,
    immediate: Literal["exact", "learned"],
    form: Form,
    enumeration: str,
    only_costs: bool,
) -> Planner:
    """The planner of a :class:`~pyro_bpq.TraceBackpropQ_ELBO` with these options, which are checked."""
    check_options(estimator, critic, reduction, lam, gamma, learner)
    check_choice("immediate", immediate, ("exact", "learned"))
    check_choice("form", form, get_args(Form))
    check_choice("enumeration", enumeration, ("sample", "exact"))
    usual = (MLPCritic(), "chain", 0.97, 1.0, CriticLearner(), 4, "exact", "ancestor")
    names = ("critic", "reduction", "lam", "gamma", "learner", "window", "immediate", "form")
    given = dict(zip(names, (critic, reduction, lam, gamma, learner, window, immediate, form), strict=True))
    asks = tuple(f"{n}={short(given[n])}" for n, own in zip(names, usual, strict=True) if given[n] != own)
    return Planner(
        *(estimator, critic, reduction),
        # Without critics nothing about them matters; but costs that are left to critics are not known either.
        asks=asks if critic is not None or immediate == "learned" else (),
        window=window,
        immediate=immediate,
        form=form,
        discounted=callable(gamma) or gamma != 1.0,
        is_elbo=not only_costs and enumeration == "sample",
    )
