"""The rule that says which estimators can serve a multi-sample bound."""

from __future__ import annotations

from pyro_bpq.estimators.all_action import AllAction
from pyro_bpq.estimators.base import Estimator
from pyro_bpq.estimators.pathwise import Pathwise
from pyro_bpq.estimators.q_prop import QProp
from pyro_bpq.estimators.score_function import ScoreFunction


def unsupported_in_bound(estimator: Estimator, has_critic: bool, chose_critic: bool) -> str | None:
    """Reason why an estimator cannot serve a site of a multi-sample bound, or ``None`` if it can.

    ``chose_critic`` says whether the site's own options name a critic.
    """
    if not isinstance(estimator, (Pathwise, ScoreFunction, AllAction, QProp)):
        return (
            f"{estimator} is for one-sample objectives; write ScoreFunction() or Pathwise(), with critics AllAction() "
            "or QProp(), or leave it out"
        )
    if isinstance(estimator, (AllAction, QProp)) and not has_critic:
        return (
            f"without a critic {estimator} is for one-sample objectives; write "
            "TraceBackpropQ_IWAE(critic=MLPCritic()), or ScoreFunction()"
        )
    if isinstance(estimator, AllAction) and estimator.exact is True:
        return "no costs are known that one more run of the model could tell; write AllAction()"
    if isinstance(estimator, AllAction) and estimator.second_run:
        return "the samples of a bound are no runs to compare with another one; write AllAction()"
    if isinstance(estimator, ScoreFunction) and chose_critic:
        return "ScoreFunction() reads no critic; leave out the estimator or the critic"
    return None
