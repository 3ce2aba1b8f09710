r"""How critics of an ELBO learn beyond the step at hand: replay, local objectives, imagined returns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.critics.replay_buffer import ReplayBuffer
from pyro_bpq.errors import OptionError
from pyro_bpq.objectives.imagined import bootstrapped_surrogate
from pyro_bpq.objectives.learned_state import LearnedState
from pyro_bpq.objectives.local_objective import LocalObjective
from pyro_bpq.objectives.replayer import Replayer, Staged
from pyro_bpq.plan.plan_cache import PlanCache
from pyro_bpq.reruns.redraw import isolated
from pyro_bpq.tracing.cost_statement import SkipCosts
from pyro_bpq.tracing.structure_cache import StructureCache
from pyro_bpq.tracing.traced_run import TracedRun

__all__ = ["CriticTraining"]


class CriticTraining(LearnedState):
    """The part of an objective that trains its critics; the objective itself evaluates and stages runs."""

    _replayer: Replayer | None
    _structure: StructureCache
    _plans: PlanCache
    _trace: Any
    _stage: Any
    _facts: Any
    _noise: Any
    _arguments: Any
    keeps_staged: bool

    def loss_and_signals(self, model: Any, guide: Any, args: Any, kwargs: Any) -> tuple[float, LocalObjective]:
        """Like ``loss_and_grads``, and keeps what the gradient is made of.

        Args:
            model: The model.
            guide: The guide.
            args: Their arguments.
            kwargs: Their keyword arguments.

        Returns:
            The loss in nats, and the local objective of the rollout.
        """
        mark = self._mark()
        self.keeps_staged = True
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        self._register_for_pyro()
        try:
            objective = LocalObjective(self.staged.items, self.num_particles)
        except BaseException:
            self._restore(mark)
            raise
        self._backward(loss, mark)
        return float(loss.item()), objective

    def replay(self, sites: Collection[str] | None = None, updates: int = 1) -> int:
        """Updates critics from stored rollouts, at any time and in any order of sites.

        An update that is interrupted leaves everything as it was before it.

        Args:
            sites: The sites whose critics learn, one or several; ``None`` for all.
            updates: Number of updates.

        Returns:
            The number of updates that found something to learn from.

        Raises:
            OptionError: If nothing is stored by choice: ``CriticLearner(replay=None)``.
            BusyError: If another thread takes a step or replays.
        """
        if self._replayer is None or self._optimizer is None:
            raise OptionError("replay(...) needs stored rollouts: learner=CriticLearner(replay=Replay(capacity=...)).")
        done = 0
        with self._turn:
            for _ in range(updates):
                with self._all_or_nothing():
                    gradients = self._replayer.gradients(self, sites)
                    if self._ranks is not None:
                        gradients = self._ranks.average_found(gradients, self.critics.weights())
                    self._advance(gradients)
                done += bool(gradients)
        return done

    def bootstrapped_loss(self, model: Any, guide: Any, *args: Any, entropy: float = 0.0, **kwargs: Any) -> Tensor:
        r"""A loss that takes critics for costs: it calls the function of no cost statement, and nothing learns from it.

            S = Σ_X Σ_x q_X(x) (I_X(x) + Q_X(x) + α log q_X(x)),   new values of all sites from the present guide

        Its gradient is **biased** by the errors of the critics; with exact ones it is that of the loss, as
        far as that comes through the guide's probabilities. Values are drawn from a generator of the ELBO's own.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments, not necessarily those of a rollout.
            entropy: Weight ``α`` of the sites' negative entropies, in nats of cost per nat. A guide that is nearly
                deterministic tells critics nothing more of other values.
            **kwargs: Their keyword arguments.

        Returns:
            A scalar, the mean over particles; only its gradient has meaning.

        Raises:
            UnsupportedSiteError: If a site has no finite values, or no critic by choice.
        """
        self._ask_for_critics()
        seed = int(torch.randint(1 << 31, (), generator=self._noise()))
        with isolated(seed, hides_params=False), SkipCosts():
            programs = self._arguments(model, guide, args, kwargs)
            runs = [self.run_program(program) for program in programs]
            alike = all(run.key == runs[0].key for run in runs) and not self._structure.is_dynamic(runs[0])
            members = [list(range(len(runs)))] if alike else [[i] for i in range(len(runs))]
            items = [self.stage([runs[i] for i in ids], [programs[i] for i in ids]) for ids in members]
        return bootstrapped_surrogate([item.signals for item in items], entropy) / self.num_particles

    @property
    def replay_buffer(self) -> ReplayBuffer | None:
        """The stored rollouts; ``state_dict()``, copies and pickles leave them out."""
        return None if self._replayer is None else self._replayer.buffer

    def run_program(self, program: Any) -> TracedRun:
        """Runs guide and model as a step does, tracked only where sampled values steer them."""
        return self._trace(*program, track=self._structure.always_tracks)

    def stage(self, traced: Sequence[TracedRun], programs: Sequence[Any]) -> Staged:
        """Prepares runs of a known structure as a step does; nothing learns."""
        last = self._plans.last
        facts = self._facts(traced, self._structure.is_dynamic(traced[0]))
        graph = self._structure.graph(traced[0], False)
        staged = self._stage(list(traced), graph, list(programs), False, facts, reruns=False)
        self._plans.last = last
        return staged

    def _keep(self, items: Sequence[Staged]) -> None:
        """Stores a rollout, and learns from stored ones."""
        if self._replayer is not None:
            for staged in items:
                self._replayer.store(staged)
            self.replay(updates=self._replayer.replay.updates_per_step)
