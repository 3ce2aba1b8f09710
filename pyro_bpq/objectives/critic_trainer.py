r"""What an objective learns, and when: critics, their optimiser, what waits to be applied, rollouts of the past."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pyro
import torch
from pyro.params.param_store import ParamStoreDict
from torch import Tensor, nn

from pyro_bpq.critics.bank import CriticBank, Write, named_tensors
from pyro_bpq.critics.learner import CriticLearner, CriticOptimizer, SlowTracking
from pyro_bpq.critics.replay_buffer import (
    Replay,
    ReplayBuffer,
    StoredRollout,
    held_sites,
    known_sites,
    off_policy_plan,
    trainable,
)
from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.objectives.observation import Staged, Transient, guide_leaves, swapped
from pyro_bpq.record.further import Hold, StaleError, isolated
from pyro_bpq.record.statements import SkipCosts, given_costs
from pyro_bpq.rollout.sums import Ranks
from pyro_bpq.step.layout import Layout
from pyro_bpq.step.learning import critic_loss
from pyro_bpq.step.program_order import RecentCosts
from pyro_bpq.step.surrogate import Seen, Step

if TYPE_CHECKING:
    from pyro_bpq.objectives.planned import PlannedObjective


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
        is_reused: Whether the guide moves further on a step's runs.
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
        self.keeps_staged, self.is_reused = self.replayer is not None or self.options.steps > 1, False
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
            for weight in self.critics.parameters():
                # SVI leaves zeros, with which optimisers go on by momentum where a step has no use of a critic. A run
                # that is resumed has none.
                if weight.grad is not None and not weight.grad.any():
                    weight.grad = None

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


class Replayer:
    """Holds stored rollouts and forms critics' gradients from them."""

    def __init__(self, replay: Replay, slow: SlowTracking | None, seed: int) -> None:
        self.replay, self.slow = replay, slow
        self.buffer = ReplayBuffer(replay.capacity)
        self.slow_guide: dict[str, Tensor] = {}
        # The guide's parameters by name.
        self._leaves = Transient()
        self._state = torch.Generator().manual_seed(seed * 7919 + 1).get_state()

    def store(self, staged: Staged) -> None:
        """Stores a step's rollout; tracks the guide's parameters."""
        layout = staged.signals.layout
        network = layout.network
        if network is None or not network.learned:
            return
        drawn = [{n: site.value for n, site in own.run.sites.items()} | {**own.subsamples} for own in staged.traced]
        values = tuple({name: value.detach().clone() for name, value in own.items()} for own in drawn)
        key, programs = staged.traced[0].key, staged.programs
        stored = StoredRollout(key, network, values, programs, staged.particles, layout.is_steered)
        if self.replay.costs == "stored":
            stored = replace(stored, **_with_costs(staged, layout))
        self.buffer.add(stored)
        if self.slow is not None and self.slow.guide:
            leaves = guide_leaves(staged.traced[0], staged.programs[0][1])
            self._leaves = Transient(leaves.items())
            now = {name: leaf.detach() for name, leaf in leaves.items()}
            # One that is new, or has another shape, begins where the guide is.
            known = now | {n: own for n, own in self.slow_guide.items() if n in now and own.shape == now[n].shape}
            moved = {name: torch.lerp(own, now[name], self.slow.rate) for name, own in known.items()}
            self.slow_guide = {**self.slow_guide, **moved}

    def gradients(self, owner: PlannedObjective, sites: Collection[str] | None = None) -> dict[str, Tensor]:
        """Gradients of one update, by name of the weight; empty where there is nothing to learn from.

        Only the critics of the given sites learn; ``None`` stands for all.
        """
        generator = torch.Generator()
        generator.set_state(self._state)
        losses = []
        for stored in self.buffer.draw(self.replay.batch_size, generator):
            candidates = [site for site in stored.learned if sites is None or site in sites]
            first, *seeds = torch.randint(1 << 31, (1 + self.replay.draws,), generator=generator, device="cpu").tolist()
            if not candidates:
                continue
            site = candidates[first % len(candidates)]
            # Without a redraw all draws would be alike.
            seeds = seeds if self._redraws(stored, site) else seeds[:1]
            try:
                draws = [self._loss(owner, stored, site, sites, seed) for seed in seeds]
            except StaleError:
                self.buffer.drop(stored)
                continue
            found = [loss for loss in draws if loss is not None]
            losses += [torch.stack(found).mean()] if found else []
        self._state = generator.get_state()
        return owner.critics.gradients(torch.stack(losses).mean()) if losses else {}

    def state_dict(self) -> dict[str, Any]:
        """What is saved: the generator and the slow guide, not the rollouts."""
        return {"generator": self._state, "slow_guide": self.slow_guide}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; starts with an empty buffer."""
        self.buffer = ReplayBuffer(self.replay.capacity)
        self._state = state["generator"].clone()
        self.slow_guide = {name: value.clone() for name, value in state["slow_guide"].items()}

    def _redraws(self, stored: StoredRollout, site: str) -> bool:
        """Whether an update of a site's critics draws anything."""
        if stored.plan is None:
            held = held_sites(stored.network, site, self.replay.coparents)
            return stored.is_steered or not held.issuperset(stored.network.graph.index)
        return bool({node.name for node in stored.network.q_nodes(site)} & stored.plan.redrawn)

    def _loss(
        self, owner: PlannedObjective, stored: StoredRollout, site: str, sites: Collection[str] | None, seed: int
    ) -> Tensor | None:
        """The loss of one draw; ``None`` where nothing learns. Refuses a rollout that cannot be replayed any more.

        Where the costs are stored and nothing is redrawn, all Q-nodes that learn by holding do so at once.
        """
        plan, form = stored.plan, self._form(stored.is_steered)
        is_whole = plan is not None and not self._redraws(stored, site)
        held = held_sites(stored.network, site, form if plan is None else "redrawn")
        redrawn = frozenset() if is_whole else stored.network.graph.index.keys() - held
        values = [{name: value for name, value in each.items() if name not in redrawn} for each in stored.values]
        staged = self._rerun(owner, stored, values, seed)
        network = staged.signals.layout.network
        if network is None or not (network == stored.network if is_whole else _reaches(staged, site, held)):
            raise StaleError("The program has another structure.")
        # Other processes have stored other rollouts; the gradients are averaged.
        learning = replace(owner.learning(), ranks=None)
        chosen = own = {node.name for node in network.q_nodes(site)}
        if is_whole or (plan is None and form == "redrawn"):
            learners = trainable(network, held) if plan is None else plan.held
            chosen = {name for name in learners if sites is None or network.q_node(name).site in sites}
        elif plan is not None:
            chosen, learning = own & plan.redrawn, replace(learning, lam=0.0)
        loss = critic_loss([staged.signals], learning, chosen) if chosen else None
        if loss is not None and not bool(torch.isfinite(loss)):
            raise StaleError("A stored value that has become impossible has infinite cost.")
        return loss

    def _form(self, is_steered: bool) -> str:
        """How co-parents are treated. Steered programs redraw them: what follows a site depends on its value."""
        return "redrawn" if is_steered else self.replay.coparents

    def _rerun(
        self, owner: PlannedObjective, stored: StoredRollout, values: Sequence[Mapping[str, Tensor]], seed: int
    ) -> Staged:
        """Runs the programs again, unless they have another structure now."""
        costs: Sequence[Mapping[str, Tensor]] = stored.costs or [{}] * len(values)
        with isolated(seed), torch.enable_grad():
            traced = []
            for program, held, paid in zip(stored.programs, values, costs, strict=True):
                # Where nothing may be called, neither may be a function that was not reached before.
                given = SkipCosts(paid, calls=stored.plan is None)
                try:
                    with swapped(dict(self._leaves.items), self.slow_guide), Hold(held), given:
                        traced.append(owner.run_program(program, stored.particles))
                except UnsupportedProgramError:
                    raise
                except Exception as error:  # whatever a program raises that ran before
                    raise StaleError("The stored values do not fit the program any more.") from error
                if traced[-1].key != stored.key and not stored.is_steered:
                    raise StaleError("The program has another structure.")
            (staged,) = owner.stage(traced, stored.programs, stored.particles)
            return staged


def _with_costs(staged: Staged, layout: Layout) -> dict[str, Any]:
    """What else is stored where costs are not called again: the costs, and what learns from them."""
    assert layout.network is not None
    costs, names = [], set[str]()
    for traced in staged.traced:
        costs.append(given_costs(traced.guide_trace) | given_costs(traced.model_trace))
        names |= {name for name, options in traced.user_costs.items() if options.is_function}
    learning = [cls for cls in layout.classes if cls.spec.components and cls.spec.critic is not None]
    expected = {name for cls in learning for name in cls.names}
    plan = off_policy_plan(layout.network, expected, layout.tabled, names)
    return {"costs": tuple(costs), "plan": plan}


def _reaches(staged: Staged, site: str, held: Collection[str]) -> bool:
    """Whether a rerun of a steered program reaches a site, with exactly the held sites among those before it."""
    layout = staged.signals.layout
    if not layout.is_steered:
        return True
    assert layout.network is not None
    return site in layout.graph.index and known_sites(layout.network, site) == held
