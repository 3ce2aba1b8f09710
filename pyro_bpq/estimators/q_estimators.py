"""Estimators that use the learned Q as a baseline, as a control variate or in place of the costs, near or far ahead.

``Q`` is the critic plus the immediate costs that are known exactly at every value, up to a constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_bpq.errors import UnsupportedSiteError, positive
from pyro_bpq.estimators.all_action import AllAction
from pyro_bpq.estimators.base import Estimator, SiteContext, SiteTerm, Statistics, share
from pyro_bpq.estimators.relaxation import uniform
from pyro_bpq.estimators.requirements import needs_continuous, needs_finite
from pyro_bpq.estimators.score_function import LeaveOneOut, ScoreFunction
from pyro_bpq.estimators.variates import Scaled


@dataclass(frozen=True)
class CriticBaseline(Scaled):
    r"""Score function with a data-dependent baseline, the critic's expected Q at the site. Unbiased.

        g = (C - a E_q[Q] - b) ∇log q(x)

    The critic sees the site's context and, in a plate, the parameters of its distribution. ``b`` is a mean of
    ``C - a E_q[Q]`` over earlier steps and the other particles.

    Args:
        scale, decay: Scale ``a``, a number or :class:`OptimalScale`; weight of the past in the running means.

    References:
        | Neural variational inference and learning in belief networks (Mnih and Gregor, 2014)
        | Backprop-Q (Xu et al., 2018), Eq. 21
    """

    uses_critic: ClassVar[bool] = True

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The centred cost-to-go times ``log q``."""
        return self.corrected(context, _critic(context)[1])


@dataclass(frozen=True)
class QControlVariate(Scaled):
    r"""The learned Q as control variate, corrected at fresh samples. Unbiased.

        g = (C - a Q(x) - b) ∇log q(x) + a/n Σ_i (Q(x_i) - E_q[Q]) ∇log q(x_i),   x_i ~ q

    :class:`AllAction` sums the last term over all values, which is better. Use this estimator if the support is too
    large to differentiate through.

    Args:
        num_samples: Number ``n`` of fresh samples.
        scale, decay: Scale ``a``, a number or :class:`OptimalScale`; weight of the past in the running means.

    References:
        | Backprop-Q (Xu et al., 2018), Eq. 27
    """

    num_samples: int = positive(4)

    uses_critic: ClassVar[bool] = True
    needs = frozenset({"program", "table"})
    takes_outdated: ClassVar[bool] = True

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Weights the log-probabilities of the sample and of the fresh ones."""
        with torch.no_grad():
            table, mean, own = _critic(context)
            probs, score = context.score_table
            fresh = torch.zeros_like(score)
            for _ in range(self.num_samples):
                noise = uniform(probs, context.program.generator).log().neg()
                drawn = one_hot((probs / noise).argmax(-1), probs.shape[-1]).to(probs.dtype)
                advantage = ((drawn - probs) * table).sum((-1, -2))
                fresh += advantage[..., None, None] * (drawn - probs) / self.num_samples
        return self.corrected(context, mean + own, fresh)


class LocalCost(Estimator):
    """Base of the estimators that use Q in place of the costs. Biased by the errors of the critic."""

    uses_critic: ClassVar[bool] = True
    replaces_costs: ClassVar[bool] = True


@dataclass(frozen=True)
class QAllAction(LocalCost):
    r"""The learned Q as local cost, summed over all values. Biased.

        g = Σ_d Σ_k ∇q_d(k) Q[d,k]

    References:
        | An actor-critic algorithm for sequence prediction (Bahdanau et al., 2017)
        | Backprop-Q (Xu et al., 2018), Appendix, Gradient Estimators with Q-functions
    """

    unsupported = needs_finite

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The expected Q."""
        return SiteTerm(context.table[0].exp() * local_q(context)[0])


@dataclass(frozen=True)
class QScoreFunction(LocalCost):
    r"""The learned Q as local cost, by score function (actor-critic). Biased.

        g = Q(x) ∇log q(x),   Q(x) = V + Σ_d Q[d, x_d]   with finite components

    For any site. If the value is continuous, :class:`QPathwise` has less noise.

    References:
        | Policy gradient methods for reinforcement learning with function approximation (Sutton et al., 2000)
        | Backprop-Q (Xu et al., 2018), Appendix, Gradient Estimators with Q-functions
    """

    needs = frozenset({"q_value", "table"})

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The critic at the sample times ``log q``."""
        return SiteTerm(local_cost(context) * context.score)


@dataclass(frozen=True)
class QAdvantage(LocalCost):
    r"""The learned advantage as local cost, by score function (advantage actor-critic). Biased.

        g = (Q(x) - E_q[Q]) ∇log q(x)

    For any site. If the critic cannot tell ``E_q[Q]``, its value at the mean takes that place.
    :class:`ParentAdvantage` takes the prediction of the parents' critics instead.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, advantages
        | Asynchronous methods for deep reinforcement learning (Mnih et al., 2016)
    """

    needs = frozenset({"q_value", "table"})

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The advantage of the sample times ``log q``."""
        if context.log_probs is None:
            value = local_cost(context)
            return SiteTerm((value if context.level is None else value - context.level) * context.score)
        return SiteTerm(local_q(context)[2] * context.score)


@dataclass(frozen=True)
class QPathwise(LocalCost):
    r"""The learned Q as local cost, by its slope at the sample. Biased by the errors of the critic's slope.

        g = ∂Q(x)/∂x ∇x(ε; θ)

    For continuous values that can be reparameterised. The costs may be unknown functions: the critic is fitted to their
    values. If the costs have a gradient, :class:`Pathwise` is unbiased. The critic is a :class:`ValueCritic` unless
    another is chosen. :class:`LAXQ` corrects the bias with the costs of the run.

    References:
        | Backprop-Q (Xu et al., 2018), Eq. 22 and Appendix, Gradient Estimators with Q-functions
        | Continuous control with deep reinforcement learning (Lillicrap et al., 2016)
    """

    needs = frozenset({"moved_value", "q_slope", "q_value"})
    unsupported = needs_continuous

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The slope of the critic times the value as a function of the parameters."""
        local_cost(context)
        return SiteTerm((context.signals["q_slope"] * context.signals["moved_value"]).sum(-1))


@dataclass(frozen=True)
class LambdaReturn(LocalCost):
    r"""**Biased**: the lambda-return of the critics in place of the cost-to-go.

        g_X = (γ I_X(x) + G_X - b - Q-terms of AllAction) ∇ log q(x) + all-action term
        G_X = γ (roots + avg_Y [ E_Y[Q_Y] + λ (G_Y - q_Y(y)) ])

    ``I_X`` are the immediate costs that are known, ``b`` is a baseline, and ``λ`` is ``lam``. ``roots`` are the costs
    that ``Q_X`` predicts directly. ``Y`` runs over the sites whose critics it backs up from, and ``avg`` averages over
    those that predict the same costs.

    Critics replace the costs that lie far ahead, so their errors bias the gradient. With ``lam=1`` there is no bias:
    ``G_X`` is then the cost-to-go minus the graph-wise control variates. ``γ`` is the ELBO's ``gamma``, with which the
    critics learn; below 1 it is a bias of its own. Finite sites apply :class:`AllAction` to ``G_X``. Other sites apply
    the score function with leave-one-out or a running baseline.

    Args:
        lam: Weight of the return against the critics, in ``[0, 1]``. The critics learn with a lambda of their own.

    References:
        | Backprop-Q (Xu et al., 2018), Sec. 4.1 and Appendix, Cases for λ-return Updates
        | High-dimensional continuous control using generalized advantage estimation (Schulman et al., 2016)
    """

    lam: float = share(0.9)

    return_weight = property(attrgetter("lam"))

    def statistics(self) -> Statistics:
        """Running statistics of :class:`AllAction` and of a running baseline."""
        return {**AllAction().statistics(), **LeaveOneOut().statistics()}

    def __call__(self, context: SiteContext) -> SiteTerm:
        """Applies :class:`AllAction` or the score function to the lambda-return in ``context.cost``."""
        if context.log_probs is not None:
            return AllAction()(context)
        return ScoreFunction(LeaveOneOut())(context)


@dataclass(frozen=True)
class ParentAdvantage(Estimator):
    r"""**Biased**: the advantage over what the parents' critics predicted, in place of the cost-to-go.

        g_Y = A_Y ∇ log q(y)
        A_Y = Q_Y(y) + λ (G_Y - Q_Y(y)) - avg_X [ Q_X(x) - Σ_S E[Q_S] ]

    ``X`` runs over the sites whose critics predict ``Q_Y`` next, and ``S`` over the siblings of ``Y``: the other costs
    and sites that ``Q_X`` predicts. ``G_Y`` is the lambda-return. With ``lam=0`` the critic of ``Y`` replaces its
    costs. The errors of the critics of ``Y`` and of later sites bias the gradient; those of the parents' critics do
    not. With ``lam=1`` there is no bias. A site without parents that have critics has no baseline.
    :class:`LambdaReturn` takes its baseline from the site's own critic, other particles or earlier steps.

    Args:
        lam: Weight of the return against the site's critic, in ``[0, 1]``. Critics learn with a lambda of their own.

    Raises:
        OptionError: If ``lam`` is out of range.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Cases for Advantage Functions
        | High-dimensional continuous control using generalized advantage estimation (Schulman et al., 2016)
    """

    lam: float = share(0.9)

    uses_critic: ClassVar[bool] = True
    takes_discount: ClassVar[bool] = False
    needs = frozenset({"advantage"})

    def __call__(self, context: SiteContext) -> SiteTerm:
        """The advantage times ``log q``."""
        advantage = context.signals.get("advantage")
        if advantage is None:
            sites = ", ".join(map(repr, context.names))
            raise UnsupportedSiteError(
                f"Sites {sites}: no site has a critic, so there are no advantages. Write critic=MLPCritic(), or use "
                "ScoreFunction()."
            )
        return SiteTerm(advantage * context.score)


def q_table(context: SiteContext, reads_value: bool = False) -> Tensor:
    """Table of ``Q``, ``(..., D, K)``, detached.

    If ``reads_value`` is false, the exact costs of one component at the sampled values of the others are left out.
    """
    table = torch.zeros_like(context.table[0], requires_grad=False)
    if context.learned is not None:
        table = table + context.learned
    if context.exact is not None and (reads_value or table.shape[-2] == 1):
        table = table + context.exact
    return table


def _critic(context: SiteContext, reads_value: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The table of ``Q``; its mean and ``Q(x)`` minus the mean, ``(G, M, plates)``; detached."""
    table, (probs, score) = q_table(context, reads_value), context.score_table
    mean = torch.zeros_like(context.cost)
    if context.level is not None:
        mean = mean + context.level
    return table, mean + (probs * table).sum((-1, -2)), (score * table).sum((-1, -2))


def local_cost(context: SiteContext) -> Tensor:
    """``Q(x)``: the critic at the sample and the known immediate costs, ``(G, M, plates)`` in nats, detached.

    Sites without finite components need the signal ``"q_value"`` for it. It raises an UnsupportedSiteError if there is
    no critic and not all costs are known.
    """
    if context.log_probs is None:
        if context.level is None:
            raise _without_critic(context)
        return context.signals["q_value"]
    _, mean, own = local_q(context)
    return mean + own


def local_q(context: SiteContext) -> tuple[Tensor, Tensor, Tensor]:
    """The whole of Q as in :func:`_critic`; raises an error if there is no critic and not all costs are known."""
    if context.learned is None:
        known = context.cost.new_zeros(()) if context.exact_cost is None else context.exact_cost
        if not torch.allclose(context.cost, known.expand_as(context.cost)):
            raise _without_critic(context)
    return _critic(context, True)


def _without_critic(context: SiteContext) -> UnsupportedSiteError:
    sites = ", ".join(map(repr, context.names))
    wanted, other = ("Value", "ScoreFunction") if context.log_probs is None else ("MLP", "AllAction")
    return UnsupportedSiteError(
        f"Sites {sites}: no critic predicts their costs, so there is nothing to take their place. Write "
        f'infer={{"bpq": {{"critic": {wanted}Critic()}}}} there and train first, or use {other}().'
    )
