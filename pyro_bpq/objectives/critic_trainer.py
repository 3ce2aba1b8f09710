r"""What an objective learns, and when: critics, their optimiser, what waits to be applied, stored rollouts."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Any

import pyro
import torch
from pyro.params.param_store import ParamStoreDict
from torch import Tensor, nn

from pyro_bpq.critics.bank import CriticBank, Write, named_tensors
from pyro_bpq.critics.learner import CriticLearner, CriticOptimizer
from pyro_bpq.objectives.observation import Transient
from pyro_bpq.objectives.replayer import Replayer
from pyro_bpq.rollout.distributed import Ranks
from pyro_bpq.step.learning import critic_loss
from pyro_bpq.step.program_order import RecentCosts
from pyro_bpq.step.surrogate import Seen, Step


class CriticTrainer:
    """Trains the critics of an objective.

    Nothing changes between forward and backward: what a step teaches waits until it is applied.

    Attributes:
        critics: Critics and running statistics.
        options: How critics learn; ``learner``, or its defaults where the user's optimiser trains them.
        optimizer: The critics' own; it does nothing where the user's trains them.
        replayer: Stored rollouts; ``None`` for none.
        num_steps: Number of steps that were learned from.
        keeps_staged: Whether something learns later from what a step worked on.
        staged: What the last step worked on, where it is kept.
        recent: Recent costs of the sites of steered programs.
        waiting: What the last step taught.
        late: Writes and gradients for blocks that do not exist yet, as after loading. A new block gets its own.
    """

    def __init__(self, learner: CriticLearner | None, seed: int) -> None:
        # The level counts fully where the user's optimiser trains the critics.
        self.learner, self.options = learner, learner or CriticLearner(level_weight=1.0)
        kept, replay = self.options.max_idle, self.options.replay
        self.critics = CriticBank(seed, learner is not None, self.options.slow is not None, kept, self._catch_up)
        self.optimizer = CriticOptimizer(self.options)
        self.replayer = None if replay is None else Replayer(replay, self.options.slow, seed)
        self.num_steps, self.staged, self.recent = 0, Transient(), RecentCosts(kept)
        self.keeps_staged = self.replayer is not None or self.options.steps > 1
        self.waiting: tuple[list[Write], dict[str, Tensor], Seen] | None = None
        self.late: tuple[list[Write], dict[str, Tensor]] = ([], {})

    @property
    def replays(self) -> bool:
        """Whether critics learn from stored rollouts in every step: programs then run while they learn."""
        return self.replayer is not None and self.replayer.replay.updates_per_step > 0

    @property
    def ranks(self) -> Ranks | None:
        """The processes that learn together; ``None`` where there are no others."""
        ranks = self.options.ranks
        return None if ranks is None or ranks.size == 1 else ranks

    def prepare(self, surrogate: Tensor, result: Step) -> Tensor:
        """Notes what the step teaches; adds the critics' loss to the surrogate where the user trains them."""
        gradients = {}
        if result.critic_loss is not None and self.learner is None:
            surrogate = surrogate + result.critic_loss
        elif result.critic_loss is not None:
            gradients = self._gradients(result.critic_loss)
        self.waiting = (result.writes, gradients, result.seen)
        return surrogate

    def learn(self, owner: Any) -> None:
        """Applies what the last step taught; forgets what no step has used for long."""
        if self.waiting is not None:
            (writes, gradients, seen), self.waiting = self.waiting, None
            self.num_steps += 1
            self.recent.add(seen)
            self._commit(writes, gradients)
            if self.keeps_staged and self.learner is not None:
                self._learn_again(owner)
        if self.critics.tidy():
            self.optimizer.keep(self.critics.names)

    def _commit(self, writes: Sequence[Write], gradients: Mapping[str, Tensor]) -> None:
        """Applies writes and gradients to the blocks that exist; the others get theirs when they are built."""
        self.critics.commit(writes)
        if gradients and self.learner is not None:
            self.optimizer.step(self.critics, gradients)
        built, (others, slopes) = self.critics.blocks.keys(), self.late
        self.late = (
            [*others, *(write for write in writes if write[0] not in built)],
            {**slopes, **{name: slope for name, slope in gradients.items() if name.split(".")[0] not in built}},
        )

    def _catch_up(self, key: str) -> None:
        """Applies what a block that has just been built has missed."""
        late, self.late = self.late, ([], {})
        self._commit(*late)

    def _learn_again(self, owner: Any) -> None:
        """More steps on the last rollout, which is then stored, and steps on stored ones."""
        items, self.staged = self.staged.items, Transient()
        for _ in range(self.options.steps - 1):
            # The tensors of the step with the critics as they are now; nothing is built.
            again = [staged.signals.again() for staged in items]
            loss = critic_loss(again, owner.learning())
            if loss is not None:
                self._commit((), self._gradients(loss))
        if self.replayer is not None:
            for staged in items:
                self.replayer.store(staged)
            for _ in range(self.replayer.replay.updates_per_step):
                self.replay(owner, None)

    def replay(self, owner: Any, sites: Collection[str] | None) -> bool:
        """Updates critics from stored rollouts, and says whether there was something to learn from."""
        assert self.replayer is not None
        gradients = self.replayer.gradients(owner, sites)
        if self.ranks is not None:
            gradients = self.ranks.average_found(gradients, self.critics.weights())
        self._commit((), gradients)
        return bool(gradients)

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        gradients = self.critics.gradients(loss)
        return gradients if self.ranks is None else self.ranks.average(gradients)

    def register(self) -> None:
        """Shows the critics to SVI where the user's optimiser trains them: those of the first step too."""
        if self.learner is None and torch.is_grad_enabled():
            register_critics(self.critics)

    def announce(self) -> None:
        """Shows critics to SVI that it knows already."""
        known = {id(value) for _, value in pyro.get_param_store().named_parameters()}
        if self.learner is None and known.issuperset(map(id, self.critics.parameters())):
            register_critics(self.critics)

    # Going back.

    def parts(self, deep: bool) -> tuple[list[Any], list[Tensor]]:
        """The objects and dictionaries that a step changes; with ``deep`` also those of learning, and its tensors."""
        found: list[Any] = [self, self.critics, self.critics.blocks, self.optimizer.optimizers]
        found += [] if self.replayer is None else [self.replayer, self.replayer.buffer]
        # A sweep changes critics while the step is still going on.
        if not (deep or self.options.sweep is not None):
            return found, []
        tables: list[dict[Any, Any]] = []
        for each in self.optimizer.optimizers.values():
            tables += [each.state, *each.state.values(), *each.param_groups]
        held = [value for table in tables for value in table.values() if isinstance(value, Tensor)]
        return found + tables, [*held, *named_tensors(self.critics).values()]

    # State.

    def state_dict(self) -> dict[str, Any]:
        """What tensors and buffers of the critics do not hold."""
        return {
            "num_steps": self.num_steps,
            "optimizer": self.optimizer.state_dict(),
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


def _is_ours(module: str, named: Mapping[str, Tensor], store: ParamStoreDict) -> bool:
    """Whether the store has no entries under this name, or only entries that equal these weights by name."""
    start = f"{module}$$$"
    stored = {key.removeprefix(start): value for key, value in store.named_parameters() if key.startswith(start)}
    pairs = [(named[name], stored[name]) for name in stored.keys() & named.keys()]
    is_same = (a is b or (a.dtype == b.dtype and torch.equal(a, b.to(a.device))) for a, b in pairs)
    return not stored or (bool(pairs) and all(is_same))
