"""Whether a critic that was chosen for a site can serve it."""

from __future__ import annotations

from typing import Any

from pyro_bpq.critics import Critic
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.features import Components
from pyro_bpq.joint_critics import JointCritic
from pyro_bpq.moments import has_moments

__all__ = ["checked_critic"]


def checked_critic(critic: Any, name: str, fn: Any, components: Components | None, estimator: Estimator) -> Critic:
    """Returns the critic if the site has what it reads.

    Args:
        critic: The choice of the site.
        name: Name of the site.
        fn: Its distribution.
        components: Its finite components, or ``None``.
        estimator: Its estimator.

    Returns:
        The critic.

    Raises:
        OptionError: If it has not.
    """
    chosen: Critic = critic
    kind = type(fn).__name__
    if not isinstance(critic, JointCritic):
        if estimator.is_pathwise:
            raise OptionError(
                f"Site {name!r} ({kind}) is reparameterised: a critic corrects the sites before it, and "
                f"{critic} knows no expectation there. Write critic=MomentCritic() or critic=False."
            )
        return chosen
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
            f"Site {name!r}: {kind} tells no finite mean and variance, which {critic} is centred by. Write critic=False."
        )
    return chosen
