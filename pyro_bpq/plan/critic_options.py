"""Whether a critic that was chosen for a site can serve it."""

from __future__ import annotations

from typing import Any

from pyro_bpq.critics.joint import JointCritic, MomentCritic, ValueCritic
from pyro_bpq.critics.nets import Critic, MLPCritic, TabularCritic
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.rollout.features import Components, has_moments


def default_critic(critic: Critic, fn: Any, components: Components | None, estimator: Estimator) -> Critic | None:
    """The critic of a site for which only the ELBO's is given.

    A site of many components has none where that is a perceptron or a table: critics that read such a value as a whole
    lower the variance, but as measured not the time to a given ELBO.
    """
    is_for_other = isinstance(critic, JointCritic) and critic.is_finite == (components is None)
    if components is None:
        fitting = ValueCritic() if "q_slope" in estimator.needs else MomentCritic()
        own = critic if isinstance(critic, JointCritic) and not is_for_other else fitting
        return own if has_moments(fn) else None
    if is_for_other:
        return None
    if components.size == 1:
        return critic
    return None if isinstance(critic, MLPCritic | TabularCritic) else critic


def checked_critic(critic: Any, name: str, fn: Any, components: Components | None, estimator: Estimator) -> Critic:
    """Returns the critic if the site has what it reads."""
    kind = type(fn).__name__
    if not isinstance(critic, JointCritic):
        if estimator.is_pathwise:
            raise OptionError(
                f"Site {name!r} ({kind}) is reparameterised: a critic corrects the sites before it, and "
                f"{critic} knows no expectation there. Write critic=MomentCritic() or critic=False."
            )
        return critic
    if critic.is_finite and (components is None or estimator.is_pathwise):
        raise OptionError(
            f"Site {name!r} ({kind}) has no finite components, which {critic} sums over. Write critic=MomentCritic()."
        )
    if not critic.is_finite and components is not None and not estimator.is_pathwise:
        raise OptionError(
            f"Site {name!r} ({kind}) has finite components: write critic=MLPCritic() or critic=QuadraticCritic() "
            f"instead of {critic}."
        )
    if not critic.is_finite and not has_moments(fn):
        raise OptionError(
            f"Site {name!r}: {kind} tells no finite mean and variance, which {critic} is centred by. "
            "Write critic=False."
        )
    return critic
