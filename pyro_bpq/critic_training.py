r"""How critics learn beyond the step at hand: more steps on a rollout, replay, warm-up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.bank import CriticBank
from pyro_bpq.cost_statement import SkipCosts
from pyro_bpq.distributed import Ranks
from pyro_bpq.errors import OptionError
from pyro_bpq.imagined import bootstrapped_surrogate
from pyro_bpq.learner import CriticLearner, CriticOptimizer
from pyro_bpq.local_objective import LocalObjective
from pyro_bpq.redraw import isolated
from pyro_bpq.registration import register_critics
from pyro_bpq.replay import ReplayBuffer
from pyro_bpq.replayer import Replayer, Staged, Transient
from pyro_bpq.structure import StructureCache
from pyro_bpq.surrogate import Learning, critic_loss
from pyro_bpq.tracing import TracedRun

__all__ = ["CriticTraining"]


class CriticTraining:
    """The part of an objective that trains its critics; the objective itself evaluates and stages runs."""

    critics: CriticBank
    learner: CriticLearner | None
    lam: float | Callable[[int], float]
    gamma: float | Callable[[int], float]
    num_steps: int
    staged: Transient
    training: bool
    _optimizer: CriticOptimizer | None
    _replayer: Replayer | None
    _structure: StructureCache
    _last_plan: Any
    _trace: Any
    _stage: Any
    _learn: Any
    _mark: Any
    _restore: Any
    _noise: Any
    _arguments: Any
    differentiable_loss: Any
    retain_graph: bool | None
    num_particles: int
    keeps_staged: bool

    def __repr__(self) -> str:
        # That of a module, which every objective is; this class stands before it among the bases.
        return super().__repr__()

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
            if loss.requires_grad:
                loss.backward(retain_graph=self.retain_graph)
        except BaseException:
            self._restore(mark)
            raise
        if self.training and torch.is_grad_enabled():
            self._learn()
        return float(loss.item()), objective

    def warm_up(self, model: Any, guide: Any, *args: Any, steps: int, **kwargs: Any) -> float:
        """Trains critics and running statistics on new rollouts; model and guide stay as they are.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments.
            steps: Number of rollouts.
            **kwargs: Their keyword arguments.

        Returns:
            The mean loss, minus the ELBO, in nats.

        Raises:
            OptionError: If the critics have no optimiser of their own, or nothing learns now.
        """
        if self._optimizer is None:
            raise OptionError("warm_up(...) needs critics with an optimiser of their own: learner=CriticLearner().")
        if not (self.training and torch.is_grad_enabled()):
            raise OptionError("warm_up(...) learns: call elbo.train() first, and not under torch.no_grad().")
        if steps < 1:
            raise OptionError(f"warm_up(steps={steps!r}): write a positive number.")
        losses = []
        for _ in range(steps):
            losses.append(float(self.differentiable_loss(model, guide, *args, **kwargs).item()))
            self._learn()
        return sum(losses) / steps

    def replay(self, sites: Collection[str] | None = None, updates: int = 1) -> int:
        """Updates critics from stored rollouts, at any time and in any order of sites.

        Args:
            sites: The sites whose critics learn, one or several; ``None`` for all.
            updates: Number of updates.

        Returns:
            The number of updates that found something to learn from.

        Raises:
            OptionError: If nothing is stored by choice: ``CriticLearner(replay=None)``.
        """
        if self._replayer is None or self._optimizer is None:
            raise OptionError("replay(...) needs stored rollouts: learner=CriticLearner(replay=Replay(capacity=...)).")
        done = 0
        for _ in range(updates):
            gradients = self._replayer.gradients(self, sites)
            if self._ranks is not None:
                gradients = self._ranks.average_found(gradients, self.critics.weights())
            self._optimizer.step(self.critics, gradients)
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
        last = self._last_plan
        is_dynamic = self._structure.is_dynamic(traced[0])
        patterns = frozenset() if is_dynamic else self._structure.patterns_of(traced)
        kind = (is_dynamic, all(self._structure.cuts_plates(each) for each in traced), patterns)
        graph = self._structure.graph(traced[0], False)
        staged = self._stage(list(traced), graph, list(programs), False, kind, reruns=False)
        self._last_plan = last
        return staged

    def learning(self) -> Learning:
        """How targets are formed in the present step."""
        learner = self.learner
        return Learning(
            _at(self.lam, self.num_steps),
            _at(self.gamma, self.num_steps),
            1.0 if learner is None else learner.level_weight,
            slow=learner is not None and learner.slow is not None,
            num_steps=self.num_steps,
            first_order=0.0 if learner is None else learner.first_order,
            ranks=self._ranks,
        )

    @property
    def _ranks(self) -> Ranks | None:
        """The processes that learn together; ``None`` where there are no others."""
        ranks = Ranks() if self.learner is None else self.learner.ranks
        return None if ranks is None or ranks.size == 1 else ranks

    def _may_learn(self, items: Sequence[Staged], loss: Tensor) -> bool:
        """Whether there is something to learn from: a loss that is finite, on all ranks."""
        is_finite, ranks = torch.isfinite(loss.detach()), self._ranks
        if ranks is None:
            return bool(is_finite)
        structure = [f"step {self.num_steps}"]
        for item in items:
            one = item.signals
            structure += [f"sites {one.layout.classes[c].names}" for c in one.active]
            structure += [f"critics {critic.keys}" for critic in one.critics.values()]
        return ranks.agree(structure, is_finite)

    def _learn_again(self) -> None:
        """More steps on the last rollout, then on stored ones."""
        assert self.learner is not None and self._optimizer is not None
        items, self.staged = self.staged.items, Transient()
        for _ in range(self.learner.steps - 1):
            loss = critic_loss([staged.again(self.critics) for staged in items], self.critics, self.learning())
            if loss is not None:
                self._optimizer.step(self.critics, self._gradients(loss))
        if self._replayer is not None:
            for staged in items:
                self._replayer.store(staged)
            self.replay(updates=self._replayer.replay.updates_per_step)

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        tensors = self.critics.weights()
        found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(tensors, found, strict=True) if g is not None}
        return gradients if self._ranks is None else self._ranks.average(gradients)

    def _register_for_pyro(self) -> None:
        """Shows the critics to SVI where the user's optimiser trains them: those of the first step too."""
        if self.learner is None and torch.is_grad_enabled():
            register_critics(self.critics)


def _at(value: float | Callable[[int], float], at: int) -> float:
    return float(value(at)) if callable(value) else float(value)
