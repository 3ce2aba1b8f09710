r"""Drop-ins for ``pyro.infer.SVI``.

``CompiledSVI`` compiles a whole step, with the optimiser's update. ``ActorCriticSVI`` is for costs that are expensive,
and biased by its critics.
"""

from __future__ import annotations

import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from pyro.infer import SVI
from pyro.infer.util import zero_grads
from pyro.optim import PyroOptim
from torch import Tensor
from tqdm.auto import tqdm

from pyro_bpq.compiled.subject import Updates
from pyro_bpq.errors import OptionError, check_option, check_whole, is_real
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.objectives.entry import warn_of_overrides
from pyro_bpq.objectives.objective import Objective
from pyro_bpq.rollout.runs import Program
from pyro_bpq.svi.controlled import captured, descend, shown

# Seconds between two losses that the progress bar shows.
_SHOWS_EVERY = 0.5


class CompiledSVI(SVI):
    r"""SVI whose steps are compiled as wholes: guide, model, estimators, critics, gradients and the update.

    The first steps run eagerly, as in ``SVI``. When structure, particles and critics are settled, a step is recorded
    and compiled, see :class:`~pyro_bpq.Compile`. From then on a step runs no Python of the programs, and no Python of
    the optimiser. Parameters and the optimiser's state are written in place, so ``optim.get_state()``, schedulers and
    the parameter store show them at any moment. Step sizes are read before each step.

    Recorded updates: Adam, AdamW, SGD and ClippedAdam of ``pyro.optim``, with or without ``clip_args``, alone or in a
    ``PyroLRScheduler``. Other optimisers update the parameters after a compiled step of the loss;
    :func:`~pyro_bpq.compile_report` says so. Gradients of parameters that a recorded update moves are not in ``.grad``.

    Args:
        model: The model.
        guide: The guide.
        optim: One of Pyro's optimisers.
        loss: A :class:`~pyro_bpq.TraceBackpropQ_ELBO`, :class:`~pyro_bpq.ExpectedCost` or
            :class:`~pyro_bpq.TraceBackpropQ_IWAE`. It needs no ``compile=True``.
        compile: As the option of the loss; ``None`` for that of the loss, or ``True`` where it has none.

    Raises:
        OptionError: If the loss or the optimiser is of another kind.
    """

    def __init__(
        self,
        model: Callable[..., Any] | None,
        guide: Callable[..., Any],
        optim: PyroOptim,
        loss: Objective,
        *,
        compile: Any = None,
    ) -> None:
        if not isinstance(loss, Objective):
            raise OptionError(
                f"CompiledSVI(loss={loss!r}): write loss=TraceBackpropQ_ELBO(), or another objective of pyro_bpq; "
                "TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None) is the estimator of TraceGraph_ELBO."
            )
        if not isinstance(optim, PyroOptim):
            raise OptionError(
                f"CompiledSVI(optim={type(optim).__name__}): write an optimiser of pyro.optim, such as "
                'pyro.optim.Adam({"lr": 1e-3}).'
            )
        if compile is not None or loss.compiled is None:
            loss.compile_steps(True if compile is None else compile)
        super().__init__(model, guide, optim, loss)  # type: ignore[no-untyped-call]
        warn_of_overrides(loss, ["loss_and_grads"], "is not called by CompiledSVI, whose steps are compiled: write SVI")
        self.objective = loss
        self._updates = Updates(optim)

    def __repr__(self) -> str:
        return f"CompiledSVI({type(self.optim).__name__}, {type(self.objective).__name__})"

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes a step: the gradient of the loss, the critics' learning, the update of the parameters.

        Args:
            *args: Arguments of model and guide.
            **kwargs: Their keyword arguments.

        Returns:
            The loss, in nats: minus the bound.
        """
        return float(self._step(args, kwargs))

    def run(self, steps: int | Iterable[Any], *args: Any, progress: bool = True, **kwargs: Any) -> Tensor:
        """Takes many steps with a progress bar, which reads the loss twice a second.

        Args:
            steps: Number of steps, each with the same arguments; or batches, one per step. A batch that is a tuple or a
                list gives the first arguments, anything else gives the first one.
            *args: Further arguments of model and guide.
            progress: Whether to show the bar.
            **kwargs: Their keyword arguments.

        Returns:
            The losses, ``(steps,)``, in nats, detached.
        """
        losses: list[Tensor] = []
        shown = time.perf_counter()
        batches: Iterable[Any] = itertools.repeat((), steps) if isinstance(steps, int) else steps
        with tqdm(batches, total=operator.length_hint(batches) or None, disable=not progress, desc="loss") as bar:
            for batch in bar:
                first = batch if isinstance(batch, (tuple, list)) else (batch,)
                losses.append(torch.as_tensor(self._step((*first, *args), kwargs)))
                if progress and time.perf_counter() - shown > _SHOWS_EVERY:
                    bar.set_description(f"loss {losses[-1].item():.4g}", refresh=False)
                    shown = time.perf_counter()
        return torch.stack(losses) if losses else torch.zeros(0)

    def _step(self, args: Any, kwargs: Any) -> Tensor | float:
        if self._updates.optim is not self.optim:
            self._updates = Updates(self.optim)
        loss = self.objective.compiled_update(Program(self.model, self.guide, args, kwargs), self._updates)
        if loss is not None:
            return loss
        # Where the optimiser stays outside, the loss alone may be compiled.
        runs_alone = bool(self._updates.refuses())
        self.loss_and_grads = self.objective.loss_and_grads if runs_alone else self.objective.eager_loss_and_grads
        return float(super().step(*args, **kwargs))  # type: ignore[no-untyped-call]


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
