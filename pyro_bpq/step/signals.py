"""The inputs of the estimators for one rollout: cost-to-go, exact immediate costs, critics, control variates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.batching.classes import Known, QGroup, Relation
from pyro_bpq.batching.cost_to_go import component_cost_to_go, cost_to_go, stack_costs, sum_costs
from pyro_bpq.batching.layout import Layout
from pyro_bpq.batching.site_batch import SiteBatch
from pyro_bpq.critics.bank import CriticBank
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import SiteContext
from pyro_bpq.rollout.runs import Rollout, sum_to_plates
from pyro_bpq.step.critic_step import CriticBatch, Learned, evaluate_critics
from pyro_bpq.step.returns import lambda_returns


class Signals:
    """The tensors of one rollout that sites ask for, by position of the class of sites or of the group of Q-nodes.

    Args:
        layout: Classes of sites and costs of the graph.
        rollout: The runs.
        tables: For each site, the model's immediate costs after setting one component, ``(M, plates, D, K)`` in nats.
        bank: Critics and running statistics.
        build: Whether missing critics may be built.
        rerun: Runs the program at other values, :class:`~pyro_bpq.reruns.at_values.Reruns`; ``None`` if that is not
            possible.
        by_value: Whether all gradients go through ``log q`` of every value, or only where an estimator needs it.
        shifts: For each site, how much ``tables`` give for the sample itself beyond what the runs have cost,
            ``(M, plates)``.
    """

    def __init__(
        self,
        layout: Layout,
        rollout: Rollout,
        tables: Mapping[str, Tensor],
        bank: CriticBank,
        build: bool,
        rerun: Any = None,
        by_value: bool = True,
        shifts: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.layout, self.rollout, self.tables, self.bank = layout, rollout, tables, bank
        self._of_tables = shifts
        self.rerun, self.by_value = rerun, by_value
        # Tensors that a signal computes once for all classes, by name of the signal.
        self.shared: dict[str, Any] = {}
        self._shifts: dict[float, dict[int, Tensor]] = {}
        self.batches = [
            SiteBatch(cls, rollout, by_value or "table" in cls.spec.estimator.needs) for cls in layout.classes
        ]
        self.costs = stack_costs(layout, rollout)
        self.active = [c for c, cls in enumerate(layout.classes) if not cls.spec.estimator.is_pathwise]
        # The critic of a reparameterised site corrects earlier sites.
        self.valued = [c for c, cls in enumerate(layout.classes) if c in self.active or cls.spec.critic is not None]
        self.critics = self._evaluated(dict(enumerate(layout.groups)), build)

    def __repr__(self) -> str:
        return f"Signals({self.layout}, {self.rollout.num_particles} particles, {len(self.critics)} groups of critics)"

    def again(self) -> Signals:
        """The same with the critics as they are now; nothing is built."""
        return Signals(
            self.layout, self.rollout, self.tables, self.bank, False, self.rerun, self.by_value, self._of_tables
        )

    def _evaluated(self, groups: Mapping[int, QGroup], build: bool, slow: bool = False) -> dict[int, CriticBatch]:
        """Critics by group, without those that are missing."""
        found = {
            g: evaluate_critics(self.layout, group, self.batches, self.bank, build, slow) for g, group in groups.items()
        }
        return {g: critic for g, critic in found.items() if critic is not None}

    def sum_over_nodes(self, group: QGroup, tensor: Tensor) -> Tensor:
        """Sums ``(Q, ...)`` over the Q-nodes of each site to ``(G, ...)``."""
        member = self.layout.membership(group, tensor)
        return tensor if member is None else member @ tensor

    @cached_property
    def exact(self) -> dict[int, Tensor | None]:
        """Immediate costs at every value of every component, up to a constant per component, by class."""
        return {c: self._exact(c) for c in self.valued}

    @cached_property
    def learned(self) -> dict[int, Learned]:
        """The critics' outputs, summed over the Q-nodes of each site, by class."""
        found: dict[int, Learned] = {}
        for critic in self.critics.values():
            joint, c = critic.joint, critic.group.c
            parts = (critic.level, critic.advantage, None if joint is None else joint.own)
            sums = (None if part is None else self.sum_over_nodes(critic.group, part.detach()) for part in parts)
            own = Learned(*sums)  # type: ignore[arg-type]
            found[c] = own if c not in found else found[c].plus(own)
        return found

    @cached_property
    def variates(self) -> dict[int, tuple[Tensor | None, Tensor | None]]:
        """``A_Y = Q_Y(y) - E_Y[Q_Y]`` of each site, by class: of what critics predict, and of exact costs."""
        found = {}
        for c in self.valued:
            exact, learned, batch = self.exact[c], self.learned.get(c), self.batches[c]
            predicted = None if learned is None else learned.own
            if predicted is None and learned is not None and learned.table is not None:
                predicted = batch.centred(learned.table)
            found[c] = predicted, None if exact is None else batch.centred(exact)
        return found

    def paths(self) -> list[Tensor]:
        """The differentiable costs of each run."""
        return [run.differentiable for run in self.rollout.runs]

    def context(self, c: int, gamma: float = 1.0) -> SiteContext:
        """The input of the estimator of a class of sites, without running statistics and what it asks for itself.

        Args:
            c: Position of the class.
            gamma: Discount per level, for estimators that replace costs by Q-functions.
        """
        cls, batch = self.layout.classes[c], self.batches[c]
        estimator = cls.spec.estimator
        shape, uses = (len(cls.names), *batch.batch_shape), estimator.uses_critic
        score = batch.component_score if cls.spec.by_component else batch.score
        exact = self.exact[c] if uses else None
        cost = cost_to_go(self.layout, self.costs, c, score.detach().new_zeros(shape))
        if cls.spec.by_component:
            # Components, each with a cost-to-go of its own, are a further plate.
            return SiteContext(
                names=cls.names,
                score=score,
                cost=component_cost_to_go(self.layout, self.rollout, c, cost),
                num_particles=self.rollout.num_particles,
                log_probs=batch.log_probs.unsqueeze(-2) if batch.by_value else None,
                index=batch.index.unsqueeze(-1) if batch.by_value else None,
                exact=None if exact is None else exact.unsqueeze(-2),
                exact_cost=None if exact is None else batch.sampled(exact),
            )
        learned = self.learned.get(c) if uses else None
        exact_cost = None if exact is None else self._exact_cost(c)
        if gamma != 1.0 and estimator.replaces_costs:
            # An immediate cost is one level away.
            cost, exact = gamma * cost, None if exact is None else gamma * exact
            exact_cost = None if exact_cost is None else gamma * exact_cost
        if gamma != 1.0 and not estimator.takes_discount:
            names = ", ".join(map(repr, cls.names))
            raise OptionError(f"Sites {names}: {type(estimator).__name__} takes no discount; write gamma=1.0.")
        shift = self._bootstraps(gamma).get(c)
        correction, exact_correction = self._corrections(c) if uses and shift is None else (None, None)
        return SiteContext(
            names=cls.names,
            score=score,
            cost=cost if shift is None else cost + shift,
            num_particles=self.rollout.num_particles,
            log_probs=batch.log_probs if batch.by_value else None,
            index=batch.index if batch.by_value else None,
            exact=exact,
            exact_cost=_expand(exact_cost, shape),
            learned=None if learned is None else learned.table,
            level=None if learned is None else learned.level,
            own=None if learned is None else learned.own,
            moments=batch.moments if uses and cls.spec.has_moments else None,
            correction=_expand(correction, shape),
            exact_correction=_expand(exact_correction, shape),
        )

    def _exact_cost(self, c: int) -> Tensor | None:
        """What the tables say of the costs of the sample; outdated tables do not say what the runs have cost."""
        cost, shifts = sum_costs(self.layout, self.costs, Relation.TABLED, c), self._of_tables
        if cost is None or Known.MODEL not in self.layout.classes[c].spec.tabled:
            return cost
        found = [shifts.get(name) for name in self.layout.classes[c].names]
        own = [None if shift is None else shift.expand(self.batches[c].batch_shape) for shift in found]
        return cost if any(shift is None for shift in own) else cost + torch.stack(own)  # type: ignore[arg-type]

    def _exact(self, c: int) -> Tensor | None:
        tables = [table for table in (self._own_table(c), self._model_table(c)) if table is not None]
        return sum(tables[1:], tables[0]) if tables else None

    def _own_table(self, c: int) -> Tensor | None:
        """The tabled ones of the sites' own ``log q`` and ``-log p``, at every value."""
        tabled, batch = self.layout.classes[c].spec.tabled, self.batches[c]
        if not tabled & {Known.LOG_Q, Known.LOG_P}:
            return None
        table = batch.own_q if Known.LOG_Q in tabled else torch.zeros_like(batch.probs)
        table = table + batch.own_p if Known.LOG_P in tabled else table
        return table.masked_fill(batch.probs == 0, 0.0)

    def _model_table(self, c: int) -> Tensor | None:
        """The model's immediate costs at every value, from its extra run."""
        cls, batch = self.layout.classes[c], self.batches[c]
        if Known.MODEL not in cls.spec.tabled:
            return None
        table = torch.stack([self.tables[name].expand(batch.probs.shape[1:]) for name in cls.names])
        return table.masked_fill(batch.probs == 0, 0.0)

    def _corrections(self, c: int) -> tuple[Tensor | None, Tensor | None]:
        """For each site the sums of later sites' control variates, restricted to the costs downstream of the site.

        Those of what critics predict, and those of exact costs.
        """
        totals: dict[bool, Tensor | None] = {True: None, False: None}
        for k, (learned, exact) in self.variates.items():
            whole = [(Relation.LATER, True, k, learned), (Relation.LATER, False, k, exact)]
            for kind, is_learned, column, part in self._parts[k] if self.layout.is_split(k) else whole:
                term = None if part is None else self._selected(c, k, kind, column, part)
                if term is not None:
                    total = totals[is_learned]
                    totals[is_learned] = term if total is None else total + term
        return totals[True], totals[False]

    def _selected(self, c: int, k: int, kind: Relation, column: int, variate: Tensor) -> Tensor | None:
        """Sums, for each site of a class, the control variates of a later class that a matrix selects."""
        selected, plates = self.layout.matrix(kind, c, column, variate), self.layout.classes[c].spec.plates
        if selected is None:
            return None
        trace = self.layout.classes[c].spec.estimator.trace_decay
        if trace != 1.0:
            distance = self.layout.distance(c, k, variate)
            is_learned = kind is Relation.LATER_LEARNED
            distance = distance[:, list(self.layout.groups[column].sites)] if is_learned else distance
            selected = selected.times(trace**distance)
        return selected @ sum_to_plates(variate, self.layout.classes[k].spec.plates, plates)

    @cached_property
    def _parts(self) -> dict[int, list[tuple[Relation, bool, int, Tensor | None]]]:
        """The parts of ``A_Y`` by class, of tabled costs and of each Q-node.

        Each has a kind of matrix, whether it is learned, a column, and a tensor.
        """
        found: dict[int, list[tuple[Relation, bool, int, Tensor | None]]] = {c: [] for c in self.valued}
        for c in self.valued:
            for kind, table in ((Relation.LATER_OWN, self._own_table(c)), (Relation.LATER_MODEL, self._model_table(c))):
                if table is not None:
                    found[c].append((kind, False, c, self.batches[c].centred(table)))
        for g, critic in self.critics.items():
            if critic.joint is not None:
                found[critic.group.c].append((Relation.LATER_LEARNED, True, g, critic.joint.own))
            elif critic.advantage is not None:
                value, mean = self.value_and_mean(critic)
                found[critic.group.c].append((Relation.LATER_LEARNED, True, g, value.detach() - mean))
        return found

    def values_and_targets(
        self, lam: float | Tensor, gamma: float, slow: bool = False
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """``q_X(x)`` with the critics' gradient and its lambda-return, ``(Q, M, plates)`` each, by group.

        With ``slow`` the critics' slow copies form the targets.
        """
        values, _ = self.q_values
        learned, means = self._slow_values if slow else self.q_values
        targets = self._returns(learned, self.ahead(means, gamma), lam, gamma)
        return {g: (value, targets[g].expand_as(value)) for g, value in values.items()}

    @cached_property
    def q_values(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """``q_X(x)`` with the critics' gradient, and its expectation, ``(Q, M, plates)`` by group."""
        return self._values(self.critics)

    @cached_property
    @torch.no_grad()
    def _slow_values(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        return self._values(self._evaluated({g: critic.group for g, critic in self.critics.items()}, False, slow=True))

    def _values(self, critics: Mapping[int, CriticBatch]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        pairs = {g: self.value_and_mean(critic) for g, critic in critics.items()}
        return {g: value for g, (value, _) in pairs.items()}, {g: mean for g, (_, mean) in pairs.items()}

    def ahead(self, means: Mapping[int, Tensor], gamma: float) -> dict[int, Tensor]:
        """Expectations of Q-functions by group: those of the learned parts, ``means``, and exact immediate costs."""
        return {g: self._with_expected_immediate(self.critics[g], mean, gamma) for g, mean in means.items()}

    def _returns(
        self, values: Mapping[int, Tensor], ahead: Mapping[int, Tensor], lam: float | Tensor, gamma: float
    ) -> dict[int, Tensor]:
        if not values:
            return {}
        groups = {g: critic.group for g, critic in self.critics.items()}
        detached = {g: value.detach() for g, value in values.items()}
        return lambda_returns(self.layout, self.costs, groups, detached, ahead, lam, gamma)

    def _bootstraps(self, gamma: float) -> dict[int, Tensor]:
        """Lambda-return minus cost-to-go by class, for estimators with a ``return_weight``."""
        weights = {c: self.layout.classes[c].spec.estimator.return_weight for c in self.active}
        wanted = {c: lam for c, lam in weights.items() if lam is not None}
        if not wanted or not self.critics:
            return {}
        if gamma not in self._shifts:
            self._shifts[gamma] = self._found_shifts(wanted, gamma)
        return self._shifts[gamma]

    def _found_shifts(self, wanted: Mapping[int, float], gamma: float) -> dict[int, Tensor]:
        values, means = self.q_values
        none = {g: torch.zeros_like(value.detach()) for g, value in values.items()}
        plain = self._returns(none, none, 1.0, 1.0)
        shifts: dict[int, Tensor] = {}
        for lam in sorted(set(wanted.values())):
            targets = self._returns(values, self.ahead(means, gamma), lam, gamma)
            for g, critic in self.critics.items():
                group = critic.group
                if wanted.get(group.c) == lam:
                    # The cost-to-go, times gamma, contains the costs that are not immediate, too.
                    shift = targets[g] - (plain[g] if gamma == 1.0 else gamma * plain[g])
                    shift = self.sum_over_nodes(group, shift)
                    shifts[group.c] = shifts.get(group.c, torch.zeros_like(shift)) + shift
        return shifts

    def value_and_mean(self, critic: CriticBatch) -> tuple[Tensor, Tensor]:
        """``q_X(x)`` with gradient and ``E_X[q_X]`` without, ``(Q, M, plates)`` each."""
        if critic.joint is not None:
            return critic.joint.value, critic.joint.mean
        if critic.advantage is None:
            return critic.level, critic.level.detach()
        batch, pick = self.batches[critic.group.c], critic.group.pick
        index, probs = pick(batch.index).unsqueeze(-1), pick(batch.probs)
        value = critic.level + critic.advantage.gather(-1, index).squeeze(-1).sum(-1)
        mean = critic.level.detach() + (probs * critic.advantage.detach()).sum((-1, -2))
        return value, mean

    def _with_expected_immediate(self, critic: CriticBatch, mean: Tensor, gamma: float) -> Tensor:
        """Replaces sampled immediate costs by their expectation if all tabled costs of the site are the Q-node's."""
        group, tabled = critic.group, self.layout.tabled
        exact = self.exact[group.c]
        if exact is None:
            return mean

        def is_whole() -> list[bool]:
            return [set(node.immediate) >= set(tabled[node.site]) for node in group.nodes]

        whole = group.constant("whole", is_whole, mean.device, mean.dtype)
        centred = group.pick(self.batches[group.c].centred(exact if gamma == 1.0 else gamma * exact))
        return mean - centred * whole.reshape(-1, *(1,) * (mean.dim() - 1))


def _expand(tensor: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    return None if tensor is None else tensor.expand(shape)
