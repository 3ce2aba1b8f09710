r"""``ActorCriticSVI``: a drop-in for ``pyro.infer.SVI`` if costs are expensive; biased by its critics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pyro.infer import SVI
from pyro.infer.util import zero_grads

from pyro_bpq.errors import OptionError, check_option, check_whole, is_real
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.svi.controlled import captured, descend, shown


class ActorCriticSVI(SVI):
    r"""SVI that also learns between rollouts: critics from stored rollouts, the guide from the critics.

    A step is one rollout and then ``rounds`` rounds. A round updates the critics by replay and takes a step of the
    guide along the gradient of

        Σ_X Σ_x q_X(x) (I_X(x) + Q_X(x) + α log q_X(x)),   all sites newly drawn, the arguments those of stored rollouts

    Continuous sites with ``QPathwise()`` or ``LAXQ()`` follow the slope of their critic through the sample.
    With ``Replay(costs="stored")`` no round calls the function of a cost statement. The errors of the critics **bias**
    the rounds. The entropy keeps the guide from exploiting these errors at values that are never drawn. The step along
    the rollout itself, ``unbiased_step=True``, is unbiased. Parameters that only the model reads move in that step
    alone.

    Args:
        model: The model.
        guide: The guide; its sites have critics.
        optim: Pyro's optimiser.
        loss: A :class:`TraceBackpropQ_ELBO`, or an ``ExpectedCost``, with ``CriticLearner(replay=Replay(...))``.
        rounds: Number of rounds after each rollout.
        critic_updates: Number of updates of the critics in each round.
        warm_up: Number of first rollouts during which the guide does not move.
        entropy: Weight ``α`` of the sites' negative entropies in the rounds.
        unbiased_step: Whether the guide also takes the plain step of the rollout.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backprop-Q (Xu et al., 2018), Algorithm 1 and Sec. 4.1
        | Mean actor critic (Allen et al., 2017), Eq. 7
    """

    def __init__(
        self,
        model: Callable[..., Any] | None,
        guide: Callable[..., Any],
        optim: Any,
        loss: TraceBackpropQ_ELBO,
        *,
        rounds: int = 4,
        critic_updates: int = 1,
        warm_up: int = 10,
        entropy: float = 0.0,
        unbiased_step: bool = True,
    ) -> None:
        if not isinstance(loss, TraceBackpropQ_ELBO) or loss.replay_buffer is None:
            raise OptionError(
                f"ActorCriticSVI(loss={type(loss).__name__}(...)) needs critics that learn from stored rollouts: "
                "write loss=TraceBackpropQ_ELBO(learner=CriticLearner("
                'replay=Replay(costs="stored"))).'
            )
        super().__init__(model, guide, optim, loss)  # type: ignore[no-untyped-call]
        self.elbo = loss
        self.rounds, self.critic_updates, self.warm_up, self.entropy = rounds, critic_updates, warm_up, entropy
        self.unbiased_step = unbiased_step
        for name in ("rounds", "critic_updates", "warm_up"):
            check_whole(self, name, 0)
        check_option(self, "entropy", is_real(entropy) and entropy >= 0.0, "a number of at least 0")

    def __repr__(self) -> str:
        return shown(self)

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes a rollout and its rounds.

        Args:
            *args: Arguments of model and guide.
            **kwargs: Their keyword arguments.

        Returns:
            The loss of the rollout, minus the ELBO or the cost, in the units of the costs.
        """
        loss, parameters = captured(lambda: self.elbo.loss_and_grads(self.model, self.guide, *args, **kwargs))
        if self.unbiased_step and self.elbo.num_steps > self.warm_up:
            self.optim(set(parameters))
        zero_grads(parameters)
        for _ in range(self.rounds):
            self.elbo.replay(updates=self.critic_updates)
            if self.elbo.num_steps > self.warm_up:
                self._follow_critics()
        return loss

    def _follow_critics(self) -> None:
        assert self.elbo.replay_buffer is not None
        for stored in self.elbo.replay_buffer.draw(1, self.elbo.runner.noise()):
            *_, args, kwargs = stored.programs[0]
            loss = self.elbo.bootstrapped_loss
            call = functools.partial(loss, self.model, self.guide, *args, entropy=self.entropy, **kwargs)
            descend(self.optim, *captured(call))
