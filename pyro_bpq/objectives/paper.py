r"""``paper_settings``: the arguments with which an ELBO is the paper's algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyro_bpq.critics.learner import BackwardSweep, CriticLearner
from pyro_bpq.critics.nets import Critic, TabularCritic
from pyro_bpq.estimators import Estimator, QScoreFunction
from pyro_bpq.graph.network import Reduction


def paper_settings(
    reduction: Reduction = "merged",
    lam: float | Callable[[int], float] = 0.0,
    gamma: float | Callable[[int], float] = 1.0,
    *,
    estimator: Estimator = QScoreFunction(),
    critic: Critic = TabularCritic(dueling=False),
    rate: float | Callable[[int], float] = 0.1,
) -> dict[str, Any]:
    r"""The arguments with which ``TraceBackpropQ_ELBO`` and ``ExpectedCost`` run the paper's Algorithm 1 as written.

    Each step takes a rollout, then a step of every critic in a backward sweep, then the gradient with the critics in
    the place of the costs:

        w_X ← w_X + α (G_X - Q_w(Sc_X)) ∇Q_w(Sc_X),   surrogate = Σ_X Q_w(Sc_X) log q(x | Pa_X)

    Every Q-function is learned, immediate costs too, from the sampled values of its children. It sees the scope of the
    site and its ancestors. The gradient is **biased** by the critics' errors, so this is for comparison and for study;
    ``TraceBackpropQ_ELBO()`` is not this algorithm, and is unbiased. Reparameterised sites keep their pathwise
    gradient.

    Args:
        reduction: Reduction of the Backprop-Q network.
        lam: Weight of the lambda-return against the critic in targets; 0 is the one-step target of Algorithm 1.
        gamma: Discount of targets per edge of the longest way.
        estimator: How the Q-function becomes a gradient: any estimator that uses critics.
            :class:`~pyro_bpq.estimators.QScoreFunction`, for any site, and other estimators with ``replaces_costs`` put
            it in place of the costs. :class:`~pyro_bpq.AllAction` and
            :class:`~pyro_bpq.estimators.QControlVariate`, for finite values, use it as a control variate.
        critic: The approximators. Tables serve small finite scopes; else ``MLPCritic()`` with a small ``rate``.
        rate: Step size ``α`` of the critics, or a function of the step.

    Returns:
        Keyword arguments.

    Raises:
        OptionError: If the rate is not positive.

    Example:
        >>> from pyro_bpq import TraceBackpropQ_ELBO
        >>> elbo = TraceBackpropQ_ELBO(**paper_settings("per_cost", lam=0.5))

    References:
        | Backprop-Q (Xu et al., 2018), Algorithm 1
    """
    given = {"estimator": estimator, "critic": critic, "reduction": reduction, "lam": lam, "gamma": gamma}
    return {**given, "learner": CriticLearner(sweep=BackwardSweep(rate)), "immediate": "learned", "form": "ancestor"}
