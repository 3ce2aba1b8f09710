r"""Critic updates from rollouts of the past: what a step leaves behind, and how stored rollouts are replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_bpq.critics.learner import SlowTracking, track
from pyro_bpq.critics.replay_buffer import Replay, ReplayBuffer, StoredRollout, off_policy_plan
from pyro_bpq.errors import UnsupportedProgramError
from pyro_bpq.objectives.observation import Staged, Transient
from pyro_bpq.record.further import isolated
from pyro_bpq.record.statements import GiveCosts, SkipCosts, given_costs
from pyro_bpq.reruns.redraw import (
    Hold,
    StaleError,
    guide_leaves,
    held_sites,
    known_sites,
    learned_sites,
    stored_values,
    swapped,
    trainable,
)
from pyro_bpq.step.layout import Layout
from pyro_bpq.step.learning import critic_loss

if TYPE_CHECKING:
    from pyro_bpq.objectives.planned import PlannedObjective


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
        form = self._form(layout.is_steered)
        values = tuple(stored_values(network, traced, form) for traced in staged.traced)
        key, programs = staged.traced[0].key, staged.programs
        stored = StoredRollout(key, network, values, programs, staged.particles, layout.is_steered)
        if self.replay.costs == "stored":
            stored = replace(stored, **_with_costs(staged, layout))
        self.buffer.add(stored)
        if self.slow is not None and self.slow.guide:
            leaves = guide_leaves(staged.traced[0], staged.programs[0][1])
            self._leaves = Transient(leaves.items())
            known = self.slow_guide
            moved = {n: known[n].clone() for n, own in leaves.items() if n in known and known[n].shape == own.shape}
            track([*moved.values()], [leaves[name].detach() for name in moved], self.slow.rate)
            new = {name: leaf.detach().clone() for name, leaf in leaves.items() if name not in moved}
            self.slow_guide = {**known, **moved, **new}

    def gradients(self, owner: PlannedObjective, sites: Collection[str] | None = None) -> dict[str, Tensor]:
        """Gradients of one update, by name of the weight; empty where there is nothing to learn from.

        Only the critics of the given sites learn; ``None`` stands for all.
        """
        generator = torch.Generator()
        generator.set_state(self._state)
        losses = []
        for stored in self.buffer.draw(self.replay.batch_size, generator):
            candidates = [site for site in learned_sites(stored.network) if sites is None or site in sites]
            first, *seeds = torch.randint(1 << 31, (1 + self.replay.draws,), generator=generator, device="cpu").tolist()
            if candidates:
                try:
                    losses += self._mean_loss(owner, stored, candidates[first % len(candidates)], sites, seeds)
                except StaleError:
                    self.buffer.drop(stored)
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

    def _mean_loss(
        self,
        owner: PlannedObjective,
        stored: StoredRollout,
        site: str,
        sites: Collection[str] | None,
        seeds: Sequence[int],
    ) -> list[Tensor]:
        """The mean loss over several draws of what an update redraws; empty if nothing learns."""
        seeds = seeds if self._redraws(stored, site) else seeds[:1]
        found = [self._loss(owner, stored, site, sites, seed) for seed in seeds]
        losses = [loss for loss in found if loss is not None]
        return [torch.stack(losses).mean()] if losses else []

    def _redraws(self, stored: StoredRollout, site: str) -> bool:
        """Whether an update of a site's critics draws anything; else all draws would be alike."""
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
        own = {node.name for node in network.q_nodes(site)}
        chosen = own
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
        # Where nothing may be called, neither may be a function that was not reached before.
        skip = contextlib.nullcontext() if stored.plan is None else SkipCosts()
        with isolated(seed), torch.enable_grad():
            traced = []
            for program, held, paid in zip(stored.programs, values, costs, strict=True):
                try:
                    with swapped(dict(self._leaves.items), self.slow_guide), Hold(held), skip, GiveCosts(paid):
                        traced.append(owner.run_program(program, stored.particles))
                except UnsupportedProgramError:
                    raise
                except Exception as error:  # whatever a program raises that ran before
                    raise StaleError("The stored values do not fit the program any more.") from error
                if traced[-1].key != stored.key and not stored.is_steered:
                    raise StaleError("The program has another structure.")
            return owner.stage(traced, stored.programs, stored.particles)


def _with_costs(staged: Staged, layout: Layout) -> dict[str, Any]:
    """What else is stored where costs are not called again: all values, the costs, what learns from them."""
    assert layout.network is not None
    values, costs, names = [], [], set[str]()
    for traced in staged.traced:
        own = {name: record.value.detach().clone() for name, record in traced.run.sites.items()}
        values.append({**own, **{name: index.clone() for name, index in traced.subsamples.items()}})
        costs.append(given_costs(traced.guide_trace) | given_costs(traced.model_trace))
        names |= {name for name, options in traced.user_costs.items() if options.is_function}
    expected = {
        name for cls in layout.classes if cls.spec.components and cls.spec.critic is not None for name in cls.names
    }
    plan = off_policy_plan(layout.network, expected, layout.tabled, names)
    return {"values": tuple(values), "costs": tuple(costs), "plan": plan}


def _reaches(staged: Staged, site: str, held: Collection[str]) -> bool:
    """Whether a rerun of a steered program reaches a site, with exactly the held sites among those before it."""
    layout = staged.signals.layout
    if not layout.is_steered:
        return True
    assert layout.network is not None
    return site in layout.graph.index and known_sites(layout.network, site) == held
