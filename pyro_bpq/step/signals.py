r"""What estimators get from one rollout: of each site's cost-to-go what is counted, what is known, what is predicted.

    R_X = C_X - I_X(x) - Q_X(x) - Σ_Y A_Y
        = Σ_f counted[X, f] f - Σ_f known[X, f] f - Q_X(x) - Σ_A predicted[X, A] A

The matrices are those of the :class:`~pyro_bpq.batching.layout.Layout`. ``A_Y`` are the control variates of later
sites, ``I_Y(y) - E_Y[I_Y]`` of known costs and ``Q_Y(y) - E_Y[Q_Y]`` of critics. Estimators scale the terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bpq.batching.classes import Known, QGroup
from pyro_bpq.batching.layout import TABLES, Layout
from pyro_bpq.batching.matrix import component_cost_to_go, cost_to_go, stack_costs
from pyro_bpq.batching.site_batch import SiteBatch
from pyro_bpq.critics.bank import CriticBank
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import SiteContext
from pyro_bpq.rollout.runs import Rollout
from pyro_bpq.step.critic_step import CriticBatch, evaluate_critics
from pyro_bpq.step.returns import bootstraps


class Learned(NamedTuple):
    """The critics' outputs for the sites of a class, summed over their Q-nodes, in nats, detached."""

    level: Tensor  # `V` of a dueling critic, `E[Q]` of a joint critic; `(G, M, plates)`
    table: Tensor | None  # Table `(G, M, plates, D, K)` of the critic, or `None`
    own: Tensor | None  # Residual of mean zero of a joint critic, `(G, M, plates)`, or `None`


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
        self.rerun, self.shifts, self.by_value = rerun, shifts, by_value
        # Tensors that are computed once for all classes, by name.
        self.shared: dict[Any, Any] = {}
        self.batches = [
            SiteBatch(cls, rollout, by_value or "table" in cls.spec.estimator.needs) for cls in layout.classes
        ]
        self.costs = stack_costs(layout, rollout)
        self.active = [c for c, cls in enumerate(layout.classes) if not cls.spec.estimator.is_pathwise]
        self.critics = self._evaluated(dict(enumerate(layout.groups)), build)

    def __repr__(self) -> str:
        return f"Signals({self.layout}, {self.rollout.num_particles} particles, {len(self.critics)} groups of critics)"

    def again(self) -> Signals:
        """The same with the critics as they are now; nothing is built."""
        return Signals(self.layout, self.rollout, self.tables, self.bank, False, self.rerun, self.by_value, self.shifts)

    def _evaluated(self, groups: Mapping[int, QGroup], build: bool, slow: bool = False) -> dict[int, CriticBatch]:
        """Critics by group, without those that are missing."""
        is_steered = self.layout.is_steered
        found = {g: evaluate_critics(q, self.batches, self.bank, build, slow, is_steered) for g, q in groups.items()}
        return {g: critic for g, critic in found.items() if critic is not None}

    @cached_property
    @torch.no_grad()
    def slow_critics(self) -> dict[int, CriticBatch]:
        """The critics' slow copies by group."""
        return self._evaluated({g: critic.group for g, critic in self.critics.items()}, False, slow=True)

    @cached_property
    def learned(self) -> dict[int, Learned]:
        """The critics' outputs by class."""
        found: dict[int, Learned] = {}
        for critic in self.critics.values():
            says, is_joint = critic.says, critic.batch.cls.spec.has_moments
            parts = (says.level, says.table, says.residual if is_joint else None)
            own = [None if part is None else critic.group.sum_to_sites(part.detach()) for part in parts]
            if (old := found.get(critic.group.c)) is not None:
                own = [None if a is None or b is None else a + b for a, b in zip(old, own, strict=True)]
            found[critic.group.c] = Learned(*own)  # type: ignore[arg-type]
        return found

    def exact(self, c: int) -> Tensor | None:
        """Immediate costs at every value of every component, up to a constant per component; ``None`` if unknown."""
        tabled = self.layout.classes[c].spec.tabled
        tables = [self._table(c, kinds & tabled) for kinds in TABLES if kinds & tabled]
        return sum(tables[1:], tables[0]) if tables else None

    def _table(self, c: int, kinds: frozenset[Known]) -> Tensor:
        """The immediate costs of some kinds at every value, ``(G, M, plates, D, K)``."""
        if (c, kinds) not in self.shared:
            cls, batch = self.layout.classes[c], self.batches[c]
            parts = [batch.own_q] if Known.LOG_Q in kinds else []
            parts += [batch.own_p] if Known.LOG_P in kinds else []
            if Known.MODEL in kinds:
                parts.append(torch.stack([self.tables[name].expand(batch.probs.shape[1:]) for name in cls.names]))
            self.shared[c, kinds] = sum(parts[1:], parts[0]).masked_fill(batch.probs == 0, 0.0)
        return self.shared[c, kinds]

    @cached_property
    def _variates(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The control variates of the layout: those that critics predict, and those of known costs."""
        predicted, known = [], []
        for own in self.layout.variates:
            critic = self.critics.get(own.group)
            predicted.append(None if critic is None else self._residual(critic, own.group))
            known.append(self.batches[own.c].centred(self._table(own.c, own.table)) if own.table else None)
        return predicted, known

    def _residual(self, critic: CriticBatch, g: int) -> Tensor | None:
        """``Q_Y(y) - E_Y[Q_Y]`` of a whole group; zero for critics that are missing."""
        found, whole = critic.says.residual, self.layout.groups[g]
        if found is None or critic.group is whole:
            return found
        names = {node.name: i for i, node in enumerate(whole.nodes)}
        places = torch.tensor([names[node.name] for node in critic.group.nodes], device=found.device)
        return found.new_zeros(len(whole.nodes), *found.shape[1:]).index_copy(0, places, found)

    def context(self, c: int, gamma: float = 1.0) -> SiteContext:
        """The input of the estimator of a class of sites, without running statistics and what it asks for itself.

        Args:
            c: Position of the class.
            gamma: Discount per level, for estimators that replace costs by Q-functions.
        """
        cls, batch = self.layout.classes[c], self.batches[c]
        estimator, shape = cls.spec.estimator, (len(cls.names), *batch.batch_shape)
        is_apart = not (self.layout.is_steered or any(map(self.layout.rows_meet, cls.names)))
        num_apart = len(batch.batch_shape) - 1 if is_apart else 0
        score = batch.component_score if cls.spec.by_component else batch.score
        counted = cost_to_go(self.layout, self.costs, c, score.detach().new_zeros(shape))
        log_probs, index = (batch.log_probs, batch.index) if batch.by_value else (None, None)
        table = self.exact(c) if estimator.uses_critic else None
        if cls.spec.by_component:
            # Components, each with a cost-to-go of its own, are a further plate.
            return SiteContext(
                names=cls.names,
                score=score,
                cost=component_cost_to_go(self.layout, self.rollout, c, counted),
                num_particles=self.rollout.num_particles,
                num_rows_apart=num_apart,
                log_probs=None if log_probs is None else log_probs.unsqueeze(-2),
                index=None if index is None else index.unsqueeze(-1),
                exact=None if table is None else table.unsqueeze(-2),
                exact_cost=None if table is None else batch.sampled(table),
            )
        known = None if table is None else self.known(c)
        if gamma != 1.0 and estimator.replaces_costs:
            # An immediate cost is one level away.
            counted = gamma * counted
            table, known = (None if part is None else gamma * part for part in (table, known))
        if gamma != 1.0 and not estimator.takes_discount:
            names = ", ".join(map(repr, cls.names))
            raise OptionError(f"Sites {names}: {type(estimator).__name__} takes no discount; write gamma=1.0.")
        bootstrap = bootstraps(self, gamma).get(c)
        learned = self.learned.get(c) if estimator.uses_critic else None
        predicted, known_later = (None, None) if bootstrap is not None or not estimator.uses_critic else self.later(c)
        return SiteContext(
            names=cls.names,
            score=score,
            cost=counted if bootstrap is None else counted + bootstrap,
            num_particles=self.rollout.num_particles,
            num_rows_apart=num_apart,
            log_probs=log_probs,
            index=index,
            exact=table,
            exact_cost=None if known is None else known.expand(shape),
            learned=None if learned is None else learned.table,
            level=None if learned is None else learned.level,
            own=None if learned is None else learned.own,
            moments=batch.moments if estimator.uses_critic and cls.spec.has_moments else None,
            correction=None if predicted is None else predicted.expand(shape),
            exact_correction=None if known_later is None else known_later.expand(shape),
        )

    def known(self, c: int) -> Tensor | None:
        """What the tables say of the costs of the sample; outdated tables do not say what the runs have cost."""
        cost, names = self.layout.known.sums(c, self.costs), self.layout.classes[c].names
        if cost is None or any(name not in self.shifts for name in names):
            return cost
        return cost + torch.stack([self.shifts[name].expand(self.batches[c].batch_shape) for name in names])

    def later(self, c: int) -> tuple[Tensor | None, Tensor | None]:
        """The sums of later sites' control variates: of those that critics predict, and of those of known costs."""
        predicted, known = self._variates
        return self.layout.predicted.sums(c, predicted), self.layout.predicted.sums(c, known)
