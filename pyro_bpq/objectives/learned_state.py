r"""What an objective has learned, and when it learns: critics, their optimiser, what waits to be applied."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from pyro.util import warn_if_nan
from torch import Tensor, nn

from pyro_bpq.critics.bank import MAX_IDLE, CriticBank, Write
from pyro_bpq.critics.learner import CriticLearner, CriticOptimizer
from pyro_bpq.errors import OptionError
from pyro_bpq.objectives.options import check_not_traced
from pyro_bpq.objectives.registration import register_critics
from pyro_bpq.objectives.replayer import Staged, Transient
from pyro_bpq.objectives.turn import Turn
from pyro_bpq.reruns.shared_backward import inputs_of
from pyro_bpq.rollout.distributed import Ranks
from pyro_bpq.step.surrogate import Learning, StepResult, critic_loss

__all__ = ["LearnedState"]

# Attributes of any module.
_OF_MODULES = frozenset(vars(nn.Module()))

# Parts of an objective that find things out in a step, and go back to a mark by themselves.
_PARTS = ("_structure", "_plans", "_row_runs", "_together")


class LearnedState:
    """The part of an objective that learns from its steps; the objective itself evaluates them.

    Nothing changes between forward and backward: what a step teaches waits in ``_waiting``.
    """

    critics: CriticBank
    learner: CriticLearner | None
    lam: float | Callable[[int], float]
    gamma: float | Callable[[int], float]
    num_steps: int
    num_noises: int
    info: dict[str, dict[str, Any]]
    ms: dict[str, float]
    staged: Transient
    training: bool
    retain_graph: bool | None
    num_particles: int
    _optimizer: CriticOptimizer | None
    _waiting: tuple[list[Write], dict[str, Tensor]] | None
    _late: tuple[list[Write], dict[str, Tensor]]
    _evaluate: Callable[..., tuple[Tensor, Tensor, StepResult]]
    _turn: Turn
    _replayer: Any = None
    # Whether the gradients of the loss are asked for once, by the objective itself.
    _goes_back: bool = False
    # What was settled of an open number of particles.
    _open_state: Any = None
    # Blocks that have changed since the last point to go back to, as they were then; ``None`` where there is none.
    _changed: dict[str, Any] | None = None

    def __repr__(self) -> str:
        # That of a module, which every objective is; this class stands before it among the bases.
        return super().__repr__()

    def _start(self, learner: CriticLearner | None, seed: int) -> None:
        """Sets up what is learned; called by the objective when it is a module already."""
        self.learner = learner
        own, kept = learner is not None, MAX_IDLE if learner is None else learner.max_idle
        self.critics = CriticBank(seed, own, learner is not None and learner.slow is not None, kept)
        self.staged, self._turn = Transient(), Turn()
        self.num_steps = self.num_noises = 0
        self.info, self.ms = {}, {}
        self._optimizer = None if learner is None else CriticOptimizer(learner)
        # What the last step taught, and of what was loaded the part for blocks that are yet to be built.
        self._waiting, self._late = None, ([], {})
        self.critics.on_build = self._catch_up

    @property
    def _num_draws(self) -> int:
        """Number of draws whose mean the loss is."""
        return self.num_particles

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Adds the gradients of the loss to ``.grad``, then lets the critics learn.

        A step that fails or is interrupted while a program runs, that of a stored rollout included, leaves what is
        learned, and ``.grad``, as before; what the programs drew from global generators stays drawn.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments.
            **kwargs: Their keyword arguments.

        Returns:
            The loss, in nats: minus the bound.

        Raises:
            BusyError: If another thread takes a step or replays.
        """
        with self._turn:
            if self.training and torch.is_grad_enabled():
                self._learn()
            mark = self._mark()
            self._goes_back = True
            try:
                loss = self.differentiable_loss(model, guide, *args, **kwargs)
            finally:
                self._goes_back = False
            self._register_for_pyro()
            self._backward(loss, mark)
            return float(loss.item())

    def _backward(self, loss: Tensor, mark: tuple[Any, ...]) -> None:
        """Adds the gradients of a loss to ``.grad``, then lets the critics learn; undoes the step where that fails."""
        learning = self.training and torch.is_grad_enabled()
        # Only replay runs programs when gradients are there already.
        leaves = inputs_of(loss) if learning and self._replays else []
        before = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
        try:
            if loss.requires_grad:
                loss.backward(retain_graph=self.retain_graph)
            if learning:
                self._learn()
        except BaseException:
            for leaf, gradient in zip(leaves, before, strict=True):
                if leaf.grad is None or gradient is None:
                    leaf.grad = gradient
                else:
                    leaf.grad.copy_(gradient)
            self._restore(mark)
            raise

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss, whose ``backward`` gives the gradient estimate.

        In training mode what was learned from the previous call is applied first; what is learned from this
        one waits for the next, so that nothing changes between forward and backward.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments.
            **kwargs: Their keyword arguments.

        Returns:
            A scalar: minus the bound, in nats.

        Raises:
            BusyError: If another thread takes a step or replays.
        """
        check_not_traced()
        with self._turn:
            learning = self.training and torch.is_grad_enabled()
            if learning:
                self._learn()
            mark = self._mark()
            try:
                loss, differentiable, result = self._evaluate(model, guide, args, kwargs, learning)
            except BaseException:
                self._restore(mark)
                raise
            value = loss.detach()
            if not result.learns:  # what is learned from is finite
                warn_if_nan(value, "loss")
            surrogate = (differentiable + result.surrogate) / self._num_draws
            if result.learns:
                surrogate = self._prepare(surrogate, result)
            return value + (surrogate - surrogate.detach())

    def warm_up(self, model: Any, guide: Any, *args: Any, steps: int, **kwargs: Any) -> float:
        """Trains critics and running statistics on new rollouts; model and guide stay as they are.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments.
            steps: Number of rollouts.
            **kwargs: Their keyword arguments.

        Returns:
            The mean loss, in nats: minus the bound.

        Raises:
            OptionError: If the critics have no optimiser of their own, or nothing learns now.
        """
        if self._optimizer is None:
            raise OptionError("warm_up(...) needs critics with an optimiser of their own: learner=CriticLearner().")
        if not (self.training and torch.is_grad_enabled()):
            raise OptionError("warm_up(...) learns: call elbo.train() first, and not under torch.no_grad().")
        if steps < 1:
            raise OptionError(f"warm_up(steps={steps!r}): write a positive number.")
        self._ask_for_critics()
        losses = []
        for _ in range(steps):
            losses.append(float(self.differentiable_loss(model, guide, *args, **kwargs).item()))
            self._learn()
        return sum(losses) / steps

    def _ask_for_critics(self) -> None:
        """Notes that critics are wanted wherever they can be had."""

    # Learning.

    def _prepare(self, surrogate: Tensor, result: StepResult) -> Tensor:
        """Notes what the step teaches; adds the critics' loss to the surrogate where the user trains them."""
        self.info = result.info
        gradients = {}
        if result.critic_loss is not None and self._optimizer is None:
            surrogate = surrogate + result.critic_loss
        elif result.critic_loss is not None:
            gradients = self._gradients(result.critic_loss)
        self._waiting = (result.writes, gradients)
        return surrogate

    def _learn(self) -> None:
        """Applies what the last step taught; forgets what no step has used for long."""
        if self._waiting is not None:
            with self._all_or_nothing() if self._replays else contextlib.nullcontext():
                self._apply_waiting()
        gone = self.critics.tidy()
        if gone and self._optimizer is not None:
            self._optimizer.forget(gone, is_final=True)

    def _apply_waiting(self) -> None:
        assert self._waiting is not None
        (writes, gradients), self._waiting = self._waiting, None
        self.num_steps += 1
        self._keep_changed(write[0] for write in writes)
        self.critics.commit(writes)
        if self._optimizer is not None:
            self._advance(gradients)
            self._learn_again()
        built, late = self.critics.blocks, self._late
        self._late = (
            [*late[0], *(write for write in writes if write[0] not in built)],
            {**late[1], **{name: g for name, g in gradients.items() if name.split(".")[0] not in built}},
        )

    def _catch_up(self, key: str) -> None:
        """Applies to a block what is known for it; a block that is not there yet catches up when it is built."""
        writes, gradients = self._late
        own = {name: gradient for name, gradient in gradients.items() if name.startswith(f"{key}.")}
        self.critics.commit([write for write in writes if write[0] == key])
        if own and self._optimizer is not None:
            self._optimizer.step(self.critics, own)
        self._late = [write for write in writes if write[0] != key], _without(gradients, own)

    def _advance(self, gradients: dict[str, Tensor]) -> None:
        """One step of the critics' optimiser."""
        assert self._optimizer is not None
        self._keep_changed(name.split(".")[0] for name in gradients)
        self._optimizer.step(self.critics, gradients)

    # Going back.

    @property
    def _replays(self) -> bool:
        """Whether critics learn from stored rollouts in every step: programs then run while they learn."""
        return self._replayer is not None and self._replayer.replay.updates_per_step > 0

    def _mark(self) -> tuple[Any, ...]:
        own = {name: _copied(value) for name, value in vars(self).items() if name not in _OF_MODULES}
        parts = {name: own[name].snapshot() for name in _PARTS if name in own}
        return self.critics.snapshot(), own, parts

    def _restore(self, mark: tuple[Any, ...]) -> None:
        """Undoes what a step has built and found out."""
        bank, own, parts = mark
        built = self.critics.restore(bank)
        for name in [name for name in vars(self) if name not in own and name not in _OF_MODULES]:
            del vars(self)[name]
        vars(self).update(own)
        for name, part in parts.items():
            own[name].restore(part)
        if self._optimizer is not None:
            self._optimizer.forget(built)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Undoes what critics learn within, and what replay draws and drops, if it is interrupted."""
        mark, outer = self._mark(), self._changed
        replay = None if self._replayer is None else self._replayer.snapshot()
        changed: dict[str, Any] = {}
        self._changed = changed
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for key, (tensors, optimizer) in changed.items():
                    for tensor, value in tensors:
                        tensor.copy_(value)
                    if self._optimizer is not None:
                        self._optimizer.restore(key, optimizer)
            if self._replayer is not None:
                self._replayer.restore(replay)
            self._restore(mark)
            raise
        finally:
            self._changed = outer
        if outer is not None:
            # What was kept first is the older.
            outer.update({key: kept for key, kept in changed.items() if key not in outer})

    def _keep_changed(self, keys: Iterable[str]) -> None:
        """Keeps blocks as they are, before they change for the first time."""
        if self._changed is None:
            return
        for key in keys:
            if key in self.critics.blocks and key not in self._changed:
                state = self.critics.blocks[key].state_dict(keep_vars=True)
                tensors = [(t, t.detach().clone()) for t in state.values() if isinstance(t, Tensor)]
                self._changed[key] = tensors, None if self._optimizer is None else self._optimizer.snapshot(key)

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
        """More steps on the last rollout."""
        assert self.learner is not None and self._optimizer is not None
        items, self.staged = self.staged.items, Transient()
        for _ in range(self.learner.steps - 1):
            loss = critic_loss([staged.again(self.critics) for staged in items], self.critics, self.learning())
            if loss is not None:
                self._advance(self._gradients(loss))
        self._keep(items)

    def _keep(self, items: Sequence[Staged]) -> None:
        """What becomes of a rollout that has been learned from."""

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        tensors = self.critics.touched_weights
        found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(tensors, found, strict=True) if g is not None}
        return gradients if self._ranks is None else self._ranks.average(gradients)

    def _register_for_pyro(self) -> None:
        """Shows the critics to SVI where the user's optimiser trains them: those of the first step too."""
        if self.learner is None and torch.is_grad_enabled():
            register_critics(self.critics)

    # State.

    def get_extra_state(self) -> dict[str, Any]:
        """What tensors and buffers do not hold: optimiser, number of steps, what waits to be learned."""
        return {
            "num_steps": self.num_steps,
            "num_noises": self.num_noises,
            "optimizer": {} if self._optimizer is None else self._optimizer.state_dict(),
            "waiting": self._waiting,
            "late": self._late,
            "replay": None if self._replayer is None else self._replayer.state_dict(),
            "particles": self._open_state,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`get_extra_state`."""
        self.num_steps, self.num_noises = state["num_steps"], state["num_noises"]
        self._waiting, self._late = copy.deepcopy((state["waiting"], state["late"]))
        self._open_state = state.get("particles")
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        if self._replayer is not None and state.get("replay") is not None:
            self._replayer.load_state_dict(state["replay"])


def _copied(value: Any) -> Any:
    """What a step may change in place."""
    return value.copy() if isinstance(value, (dict, set)) else value


def _without(gradients: dict[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    return {name: gradient for name, gradient in gradients.items() if name not in names}


def _at(value: float | Callable[[int], float], at: int) -> float:
    return float(value(at)) if callable(value) else float(value)
