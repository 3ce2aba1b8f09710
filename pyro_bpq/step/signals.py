r"""What estimators get from one rollout: of each site's cost-to-go what is counted, what is known, what is predicted.

    R_X = C_X - I_X(x) - Q_X(x) - Σ_Y A_Y = Σ_f counted[X, f] f - I_X(x) - Q_X(x) - Σ_A predicted[X, A] A

The matrices are those of the :class:`~pyro_bpq.step.layout.Layout`. ``I_X`` is a table of known costs at all values.
``A_Y`` are the control variates of later sites, ``I_Y(y) - E_Y[I_Y]`` of known costs and ``Q_Y(y) - E_Y[Q_Y]`` of
critics. Estimators scale the terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyro_bpq.critics.bank import CriticBank
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators.base import SiteContext
from pyro_bpq.rollout.runs import Rollout
from pyro_bpq.rollout.sums import total
from pyro_bpq.step.classes import Known, QGroup
from pyro_bpq.step.critic_step import CriticBatch, evaluate_critics
from pyro_bpq.step.layout import TABLES, Layout
from pyro_bpq.step.learning import bootstrap
from pyro_bpq.step.site_batch import SiteBatch

T = TypeVar("T")


@dataclass(eq=False, repr=False)
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
    """

    layout: Layout
    rollout: Rollout
    tables: Mapping[str, Tensor]
    bank: CriticBank
    build: InitVar[bool]
    rerun: Any = None
    by_value: bool = True
    # Tensors that are computed once for all classes, by name.
    shared: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self, build: bool) -> None:
        classes, rollout, by_value = self.layout.classes, self.rollout, self.by_value
        self.batches = [SiteBatch(cls, rollout, by_value or "table" in cls.spec.estimator.needs) for cls in classes]
        self.costs = self.layout.stack_costs(rollout)
        self.active = [c for c, cls in enumerate(classes) if not cls.spec.estimator.is_pathwise]
        self.critics = self._evaluated(dict(enumerate(self.layout.groups)), build)

    def again(self) -> Signals:
        """The same with the critics as they are now; nothing is built."""
        return replace(self, build=False)

    def _evaluated(self, groups: Mapping[int, QGroup], build: bool, slow: bool = False) -> dict[int, CriticBatch]:
        """Critics by group, without those that are missing."""
        found = {g: evaluate_critics(self, group, build, slow) for g, group in groups.items()}
        return {g: critic for g, critic in found.items() if critic is not None}

    @cached_property
    @torch.no_grad()
    def slow_critics(self) -> dict[int, CriticBatch]:
        """The critics' slow copies by group."""
        return self._evaluated({g: critic.group for g, critic in self.critics.items()}, False, slow=True)

    def learned(self, c: int, pick: Callable[[CriticBatch], Tensor | None]) -> Tensor | None:
        """What is picked of critics, summed over the Q-nodes of each site of a class, detached; ``None`` if of none."""
        picked = [(critic.group, pick(critic)) for critic in self.critics.values() if critic.group.c == c]
        parts = [group.sum_to_sites(part.detach()) for group, part in picked if part is not None]
        return total(parts) if parts else None

    @cached_property
    def costs_by_name(self) -> dict[str, Tensor]:
        """The costs ``(M, plates)`` by name."""
        pairs = zip(self.layout.cost_classes, self.costs, strict=True)
        return {name: cost for cls, stacked in pairs for name, cost in zip(cls.names, stacked.unbind(0), strict=True)}

    def once(self, name: Any, make: Callable[[], T]) -> T:
        """What a function makes, once for all classes."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

    def shape(self, c: int) -> tuple[int, ...]:
        """The shape ``(G, M, plates)`` of a class."""
        return len(self.layout.classes[c].names), *self.batches[c].batch_shape

    def rows_apart(self, c: int) -> bool:
        """Whether no cost of one row reads a site of a class in another row; never where values steer the program.

        A row may then get what other rows of the site have; sites of the class may read each other.
        """
        return not (self.layout.is_steered or any(map(self.layout.rows_meet, self.layout.classes[c].names)))

    def exact(self, c: int) -> Tensor | None:
        """Immediate costs at every value of every component, up to a constant per component; ``None`` if unknown."""
        tabled = self.layout.classes[c].spec.tabled
        tables = [self._table(c, kinds & tabled) for kinds in TABLES if kinds & tabled]
        return sum(tables[1:], tables[0]) if tables else None

    def _table(self, c: int, kinds: frozenset[Known]) -> Tensor:
        """The immediate costs of some kinds at every value, ``(G, M, plates, D, K)``."""
        if (c, kinds) not in self.shared:
            cls, batch = self.layout.classes[c], self.batches[c]
            parts = [batch.weighted(batch.log_probs.detach())] if Known.LOG_Q in kinds else []
            parts += [batch.own_p()] if Known.LOG_P in kinds else []
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
        places = torch.tensor([whole.nodes.index(node) for node in critic.group.nodes], device=found.device)
        return found.new_zeros(len(whole.nodes), *found.shape[1:]).index_copy(0, places, found)

    def context(self, c: int, gamma: float = 1.0) -> SiteContext:
        """The input of the estimator of a class of sites, without running statistics and what it asks for itself.

        Args:
            c: Position of the class.
            gamma: Discount per level, for estimators that replace costs by Q-functions.
        """
        layout, cls, batch = self.layout, self.layout.classes[c], self.batches[c]
        estimator, by_component, shape = cls.spec.estimator, cls.spec.by_component, self.shape(c)
        score = batch.component_score if by_component else batch.score
        context = SiteContext(
            cls.names,
            score,
            layout.cost_to_go(self.costs, c, score.detach().new_zeros(shape)),
            self.rollout.num_particles,
            log_probs=batch.log_probs if batch.by_value else None,
            index=batch.index if batch.by_value else None,
            exact=self.exact(c) if estimator.uses_critic else None,
            num_rows_apart=len(batch.batch_shape) - 1 if self.rows_apart(c) else 0,
        )
        if by_component:
            return self._by_component(context, c)
        if gamma != 1.0 and not estimator.takes_discount:
            names = ", ".join(map(repr, cls.names))
            raise OptionError(f"Sites {names}: {type(estimator).__name__} takes no discount; write gamma=1.0.")
        shift = bootstrap(self, c, gamma)
        known = None if context.exact is None else self._known(c)
        if gamma != 1.0 and estimator.replaces_costs:
            # An immediate cost is one level away.
            table = None if context.exact is None else gamma * context.exact
            known = None if known is None else gamma * known
            context = replace(context, cost=gamma * context.cost, exact=table)
        if shift is not None:
            context = replace(context, cost=context.cost + shift)
        if not estimator.uses_critic:
            return context
        predicted, later = self.later(c, shape) if shift is None else (None, None)
        return replace(
            context,
            exact_cost=known,
            learned=self.learned(c, lambda critic: critic.says.table),
            level=self.learned(c, lambda critic: critic.says.level),
            own=self.learned(c, lambda critic: critic.says.residual) if cls.spec.has_moments else None,
            moments=batch.moments if cls.spec.has_moments else None,
            correction=predicted,
            exact_correction=later,
        )

    def _by_component(self, context: SiteContext, c: int) -> SiteContext:
        """Components, each with a cost-to-go of its own, are a further plate."""
        log_probs, index, table = context.log_probs, context.index, context.exact
        return replace(
            context,
            cost=self.layout.component_cost_to_go(self.rollout, c, context.cost),
            log_probs=None if log_probs is None else log_probs.unsqueeze(-2),
            index=None if index is None else index.unsqueeze(-1),
            exact=None if table is None else table.unsqueeze(-2),
            exact_cost=None if table is None else self.batches[c].sampled(table),
        )

    def _known(self, c: int) -> Tensor:
        """What the tables say of the sample, ``(G, M, plates)``; outdated ones do not say what the runs have cost."""
        tabled, parts = self.layout.classes[c].spec.tabled, list[Tensor]()
        for kinds in (kinds & tabled for kinds in TABLES if kinds & tabled):
            by_component = self.batches[c].sampled(self._table(c, kinds))
            # Log-probabilities of components add up; each component has the whole costs of the model.
            parts.append(by_component[..., 0] if Known.MODEL in kinds else by_component.sum(-1))
        return total(parts)

    def later(self, c: int, shape: tuple[int, ...]) -> list[Tensor | None]:
        """The sums of later sites' control variates: of those that critics predict, and of those of known costs."""
        return [self.layout.predicted.sums(c, variates, shape) for variates in self._variates]
