r"""``ExpectedCost``: what a stochastic program costs in expectation."""

from __future__ import annotations

import functools
from typing import Any

from pyro import poutine

from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.objectives.entry import LossModule
from pyro_bpq.record.config import OthersDraw
from pyro_bpq.rollout.runs import Program


class ExpectedCost(TraceBackpropQ_ELBO):
    r"""Expected sum of the costs of a stochastic program, with the gradients of Backprop-Q.

    .. math:: J = E_{q}\Big[\sum_c c\Big],\qquad \nabla J = E_q\Big[\sum_X \nabla\log q_X\, C_X + \sum_c \nabla c\Big]

    Only :func:`~pyro_bpq.cost` statements count: neither ``log q`` nor ``log p`` does. The options are those of
    :class:`~pyro_bpq.TraceBackpropQ_ELBO`, with the same estimators, critics and structures. The program is

    - a policy, ``SVI(None, policy, optim, loss=ExpectedCost())`` or ``ExpectedCost()(policy)``, a module whose
      call gives the differentiable loss;
    - a policy and an environment, ``SVI(environment, policy, optim, loss=ExpectedCost())``: the environment runs
      after the policy and takes over the values of its sites by name; its other sites are sampled in it, and
      gradients reach their parameters.

    A step calls the function of a cost once per particle, or once for all vectorised particles; with ``exact=True``
    at the cost it may call it more often. Every run of ``evaluate_loss`` calls it too, and so does every replayed
    rollout, unless ``Replay(costs="stored")`` is chosen. Further epochs of :class:`~pyro_bpq.ProximalSVI` do not.

    Raises:
        OptionError: If an option is out of range.
        UnsupportedProgramError: If a site is observed or a factor: conditioning has no place in this objective.

    References:
        | Gradient Estimation Using Stochastic Computation Graphs (Schulman et al., 2015)
        | Backprop-Q: Generalized Backpropagation for Stochastic Computation Graphs (Xu et al., 2018)
    """

    _only_costs = True

    def __call__(self, *programs: Any) -> LossModule:
        """The loss of a policy, or of an environment and a policy, as a module.

        Args:
            *programs: ``policy``, or ``environment, policy``.

        Returns:
            A module that is called with the programs' arguments.
        """
        environment, policy = programs if len(programs) == 2 else (None, *programs)
        return LossModule(environment, policy, self)

    def _prepared(self, program: Program) -> Program:
        environment, policy, *_ = program
        one = policy if environment is None else functools.partial(_in_turn, policy, environment)
        return super()._prepared(program._replace(model=_nothing, guide=one))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The model of a program that is all guide."""


def _in_turn(policy: Any, environment: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs both as one program."""
    trace = poutine.trace(policy).get_trace(*args, **kwargs)
    latent = [name for name, site in trace.nodes.items() if site["type"] == "sample" and not site["is_observed"]]
    with poutine.block(hide=latent), poutine.replay(trace=trace), OthersDraw("environment", "policy", trace, False):
        return environment(*args, **kwargs)
