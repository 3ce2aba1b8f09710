r"""What an objective learns, and when: critics, their optimiser, what waits to be applied, stored rollouts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pyro
import torch
from pyro.params.param_store import ParamStoreDict
from torch import Tensor, nn

from pyro_bpq.critics.bank import MAX_IDLE, CriticBank
from pyro_bpq.critics.blocks import Write
from pyro_bpq.critics.learner import CriticLearner, CriticOptimizer
from pyro_bpq.objectives.observation import Staged, Transient
from pyro_bpq.objectives.replayer import Replayer, gradients_of
from pyro_bpq.rollout.distributed import Ranks
from pyro_bpq.snapshots import restore, snapshot
from pyro_bpq.step.critic_loss import critic_loss
from pyro_bpq.step.program_order import RecentCosts
from pyro_bpq.step.values import Seen, Step

if TYPE_CHECKING:
    from pyro_bpq.objectives.objective import Objective


class CriticTrainer:
    """Trains the critics of an objective.

    Nothing changes between forward and backward: what a step teaches waits until it is applied.

    Attributes:
        critics: Critics and running statistics.
        optimizer: The critics' own; ``None`` where the user's trains them.
        replayer: Stored rollouts; ``None`` for none.
        num_steps: Number of steps that were learned from.
        keeps_staged: Whether something learns later from what a step worked on.
        staged: What the last step worked on, where it is kept.
        recent: Recent costs of the sites of steered programs.
        waiting: What the last step taught.
        late: Writes and gradients for blocks that do not exist yet, as after loading. A new block gets its own.
    """

    def __init__(self, learner: CriticLearner | None, seed: int) -> None:
        self.learner = learner
        own, kept = learner is not None, MAX_IDLE if learner is None else learner.max_idle
        self.critics = CriticBank(seed, own, learner is not None and learner.slow is not None, kept, self._catch_up)
        self.optimizer = None if learner is None else CriticOptimizer(learner)
        replay = None if learner is None else learner.replay
        self.replayer = None if learner is None or replay is None else Replayer(learner, replay, seed)
        self.num_steps, self.staged = 0, Transient()
        self.keeps_staged = self.replayer is not None or (learner is not None and learner.steps > 1)
        self.recent = RecentCosts(kept)
        self.waiting: tuple[list[Write], dict[str, Tensor], Seen] | None = None
        self.late: tuple[list[Write], dict[str, Tensor]] = ([], {})
        # Blocks that have changed since the last point to go back to, as they were then; ``None`` where there is none.
        self._changed: dict[str, Any] | None = None

    @property
    def replays(self) -> bool:
        """Whether critics learn from stored rollouts in every step: programs then run while they learn."""
        return self.replayer is not None and self.replayer.replay.updates_per_step > 0

    @property
    def ranks(self) -> Ranks | None:
        """The processes that learn together; ``None`` where there are no others."""
        ranks = Ranks() if self.learner is None else self.learner.ranks
        return None if ranks is None or ranks.size == 1 else ranks

    def keep(self, items: Sequence[Staged], result: Step) -> None:
        """Keeps what a step worked on."""
        self.staged = Transient([replace(item, result=result) for item in items])

    def prepare(self, surrogate: Tensor, result: Step) -> Tensor:
        """Notes what the step teaches; adds the critics' loss to the surrogate where the user trains them."""
        gradients = {}
        if result.critic_loss is not None and self.optimizer is None:
            surrogate = surrogate + result.critic_loss
        elif result.critic_loss is not None:
            gradients = self._gradients(result.critic_loss)
        self.waiting = (result.writes, gradients, result.seen)
        return surrogate

    def learn(self, owner: Objective) -> None:
        """Applies what the last step taught; forgets what no step has used for long."""
        if self.waiting is not None:
            with self._all_or_nothing(owner) if self.replays else contextlib.nullcontext():
                self._apply_waiting(owner)
        gone = self.critics.tidy()
        if gone and self.optimizer is not None:
            self.optimizer.forget(gone, is_final=True)

    def _apply_waiting(self, owner: Objective) -> None:
        assert self.waiting is not None
        (writes, gradients, seen), self.waiting = self.waiting, None
        self.num_steps += 1
        if seen is not None:
            self.recent.add(*seen)
        if not writes and not gradients and self.replayer is None and not self.staged.items:
            # Short steps of steered programs teach no critic.
            return
        self._keep_changed(write[0] for write in writes)
        self.critics.commit(writes)
        if self.optimizer is not None:
            if gradients:
                self._advance(gradients)
            if self.keeps_staged:
                self._learn_again(owner)
        built, late = self.critics.blocks.keys(), self.late
        self.late = (
            [*late[0], *(write for write in writes if write[0] not in built)],
            {**late[1], **{name: g for name, g in gradients.items() if name.split(".")[0] not in built}},
        )

    def _learn_again(self, owner: Objective) -> None:
        """More steps on the last rollout, which is then stored, and steps on stored ones."""
        assert self.learner is not None
        items, self.staged = self.staged.items, Transient()
        for _ in range(self.learner.steps - 1):
            # The tensors of the step with the critics as they are now; nothing is built.
            again = [staged.signals.again() for staged in items]
            loss = critic_loss(again, self.critics, owner.learning())
            if loss is not None:
                self._advance(self._gradients(loss))
        if self.replayer is not None:
            for staged in items:
                self.replayer.store(staged)
            self.replay(owner, None, self.replayer.replay.updates_per_step)

    def replay(self, owner: Objective, sites: Collection[str] | None, updates: int) -> int:
        """Updates critics from stored rollouts; the number of updates that found something to learn from."""
        assert self.replayer is not None
        done = 0
        for _ in range(updates):
            with self._all_or_nothing(owner):
                gradients = self.replayer.gradients(owner, sites)
                if self.ranks is not None:
                    gradients = self.ranks.average_found(gradients, self.critics.weights())
                self._advance(gradients)
            done += bool(gradients)
        return done

    def _catch_up(self, key: str) -> None:
        """Applies to a block what is known for it; a block that is not there yet catches up when it is built."""
        writes, gradients = self.late
        own = {name: gradient for name, gradient in gradients.items() if name.startswith(f"{key}.")}
        self.critics.commit([write for write in writes if write[0] == key])
        if own and self.optimizer is not None:
            self.optimizer.step(self.critics, own)
        others = {name: gradient for name, gradient in gradients.items() if name not in own}
        self.late = [write for write in writes if write[0] != key], others

    def _advance(self, gradients: dict[str, Tensor]) -> None:
        """One step of the critics' optimiser."""
        assert self.optimizer is not None
        self._keep_changed(name.split(".")[0] for name in gradients)
        self.optimizer.step(self.critics, gradients)

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        gradients = gradients_of(loss, self.critics)
        return gradients if self.ranks is None else self.ranks.average(gradients)

    def register(self) -> None:
        """Shows the critics to SVI where the user's optimiser trains them: those of the first step too."""
        if self.learner is None and torch.is_grad_enabled():
            register_critics(self.critics)

    def announce(self) -> None:
        """Shows critics to SVI that it knows already."""
        if self.learner is None and are_registered(self.critics):
            register_critics(self.critics)

    # Going back.

    def mark(self) -> Any:
        """A mark to which :meth:`go_back` takes what a step builds and notes."""
        # A sweep changes critics while the step is still going on.
        sweeps = self.learner is not None and self.learner.sweep is not None
        swept = {name: w.detach().clone() for name, w in self.critics.weights().items()} if sweeps else {}
        return self.critics.snapshot(), snapshot(self), swept

    def go_back(self, mark: Any) -> None:
        """Undoes what was built and noted after a mark."""
        bank, own, swept = mark
        built = self.critics.restore(bank)
        present = self.critics.weights(dict.fromkeys(name.split(".")[0] for name in swept))
        with torch.no_grad():
            for name, weight in present.items():
                weight.copy_(swept[name])
        restore(self, own)
        if self.optimizer is not None:
            self.optimizer.forget(built)

    @contextlib.contextmanager
    def _all_or_nothing(self, owner: Objective) -> Iterator[None]:
        """Undoes what critics learn within, and what replay draws and drops, if it is interrupted."""
        mark, outer = owner.mark(), self._changed
        replay = None if self.replayer is None else self.replayer.snapshot()
        changed: dict[str, Any] = {}
        self._changed = changed
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for key, (tensors, optimizer) in changed.items():
                    for tensor, value in tensors:
                        tensor.copy_(value)
                    if self.optimizer is not None:
                        self.optimizer.restore(key, optimizer)
            if self.replayer is not None and replay is not None:
                self.replayer.restore(replay)
            owner.go_back(mark)
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
                self._changed[key] = tensors, None if self.optimizer is None else self.optimizer.snapshot(key)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """What tensors and buffers of the critics do not hold."""
        return {
            "num_steps": self.num_steps,
            "optimizer": {} if self.optimizer is None else self.optimizer.state_dict(),
            "waiting": self.waiting,
            "late": self.late,
            "recent": self.recent.state_dict(),
            "replay": None if self.replayer is None else self.replayer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.num_steps = state["num_steps"]
        self.waiting, self.late = copy.deepcopy((state["waiting"], state["late"]))
        self.recent.load_state_dict(state["recent"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        if self.replayer is not None and state["replay"] is not None:
            self.replayer.load_state_dict(state["replay"])


def register_critics(critics: nn.Module) -> None:
    """Puts the parameters of some critics into Pyro's param store, as :func:`pyro.module` does.

    The name of the module is the first of ``bpq_critics``, ``bpq_critics_1``, ... under which the store holds no
    entries of another module. It is the same in every step, and again when a program is run anew. Entries that were
    loaded into the store (``ParamStoreDict.load``) together with the critics' ``state_dict`` have equal values. The
    critics replace them, so that an optimiser finds its saved state by name.
    """
    named = dict(critics.named_parameters())
    if not named:
        return
    store = pyro.get_param_store()
    names = (f"bpq_critics_{number}" if number else "bpq_critics" for number in count())
    module = next(name for name in names if _is_ours(name, named, store))
    stored = dict(store.named_parameters())
    for name, weight in named.items():
        key = f"{module}$$${name}"
        if stored.get(key, weight) is not weight:
            del store[key]
    pyro.module(module, critics)


def are_registered(critics: nn.Module) -> bool:
    """Whether Pyro's param store holds the parameters of some critics."""
    stored = {id(value) for _, value in pyro.get_param_store().named_parameters()}
    weights = list(critics.parameters())
    return bool(weights) and all(id(weight) in stored for weight in weights)


def _is_ours(module: str, named: Mapping[str, Tensor], store: ParamStoreDict) -> bool:
    """Whether the store has no entries under this name, or only entries that equal these weights by name."""
    start = f"{module}$$$"
    stored = {key.removeprefix(start): value for key, value in store.named_parameters() if key.startswith(start)}
    known = stored.keys() & named.keys()
    return not stored or (bool(known) and all(_is_same(named[name], stored[name]) for name in known))


def _is_same(weight: Tensor, stored: Tensor) -> bool:
    if weight is stored:
        return True
    is_alike = weight.shape == stored.shape and weight.dtype == stored.dtype
    return is_alike and torch.equal(weight, stored.to(weight.device))
