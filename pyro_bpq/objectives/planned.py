r"""What objectives share whose steps follow a plan: a step on some runs, ways to learn, and what can be looked at."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from pyro.util import warn_if_nan
from torch import Tensor
from torch.distributions.kl import kl_divergence

from pyro_bpq.critics.replay_buffer import ReplayBuffer
from pyro_bpq.errors import OptionError, UnsupportedSiteError, warn
from pyro_bpq.estimators.all_action import AllAction
from pyro_bpq.graph.network import BackpropQNetwork
from pyro_bpq.graph.scg import StochasticComputationGraph, cost_of_model
from pyro_bpq.objectives.local_objective import LocalObjective
from pyro_bpq.objectives.objective import Objective
from pyro_bpq.objectives.observation import Mode, Observation, Staged, Transient, programs_of
from pyro_bpq.objectives.runner import StepRunner
from pyro_bpq.plan.plan import Plan
from pyro_bpq.plan.planner import Planner
from pyro_bpq.record.further import isolated
from pyro_bpq.record.laws import as_drawn, tensors_of
from pyro_bpq.record.statements import SkipCosts
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.rollout.features import base_distribution
from pyro_bpq.rollout.runs import Particles, Program
from pyro_bpq.short import Pending
from pyro_bpq.step.critic_step import NEEDS_LEAF, described
from pyro_bpq.step.program_order import lone_step, order_step
from pyro_bpq.step.signal_table import moved_value, q_slope, q_value
from pyro_bpq.step.signals import Signals
from pyro_bpq.step.surrogate import Step, step


class PlannedObjective(Objective):
    """An objective whose runner follows dependencies, and plans what is done on them; subclasses make the runner.

    Attributes:
        runner: Runs the programs.
    """

    runner: StepRunner

    # Whether options that nothing reads were told.
    _has_told = False

    # A step.

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the ELBO of ``num_particles`` draws, in nats; nothing learns."""
        with torch.no_grad():
            loss = self.observe(Program(model, guide, args, kwargs), shows=False).loss / self.num_particles
        warn_if_nan(loss, "loss")
        return float(loss.item())

    def _evaluate(self, seen: Observation, mode: Mode) -> Step:
        if mode.learning and not self._has_told and self.plan and self.plan.unread:
            self._has_told = True
            warn(self.plan.unread)
        result = self._result(seen, mode)
        if self.analytic_kl:
            # One graph for all particles, or one for each.
            graphs = [item.signals.layout.graph for item in seen.items] * (len(seen.runs) // len(seen.items))
            result = replace(result, paths=sum(map(differentiable_cost, seen.runs, graphs), torch.zeros(())))
        if self.trainer.keeps_staged:
            self.trainer.staged = Transient(replace(item, result=result) for item in seen.items)
        return result

    def _result(self, seen: Observation, mode: Mode) -> Step:
        """The step on some runs: with the graph, in program order, or summed over all values."""
        learning, learns, number, loss = self.learning(mode), mode.learning, self.num_particles, seen.loss
        loss = loss / number if number > 1 else loss
        if seen.summed is not None:
            summed = self.plan.summed if self.plan and learns else None
            info = {name: {"estimator": AllAction()} for name in (summed.components if summed else ())}
            return Step(loss, torch.zeros_like(loss), info=info, learns=learns, paths=seen.summed)
        if seen.is_lone:
            return lone_step(seen.ordered[0], self.trainer.recent, learning, learns)
        if seen.ordered:
            result = order_step(seen.ordered, loss, self.critics, learning, learns)
            # Where no site has a score, the plan says what each got.
            specs = self.plan.layout.specs if result.learns and not self.runner.recordings.is_ordered else {}
            return replace(result, info=result.info | {n: {"estimator": own.estimator} for n, own in specs.items()})
        return step([item.signals for item in seen.items], loss, self.critics, learning, learns)

    def recorded_options(self) -> dict[str, Any]:
        """Further options that a recording depends on, by name."""
        graphs = [known.graph for known in self.runner.recordings.known.values()]
        return {"planner": self.planner, "graphs": graphs, "kl": self.analytic_kl}

    # More ways to learn.

    def bootstrapped_loss(self, model: Any, guide: Any, *args: Any, entropy: float = 0.0, **kwargs: Any) -> Tensor:
        r"""A loss in which critics stand for the costs. It calls no cost function, and no critic learns from it.

            S = Σ_X Σ_x q_X(x) (I_X(x) + Q_X(x) + α log q_X(x)),   new values of all sites from the present guide

        A continuous site adds other terms, see :func:`~pyro_bpq.objectives.planned.bootstrapped_surrogate`. The
        gradient is **biased** by the errors of the critics; with exact ones it is that of the loss, as far as that
        comes through the guide's probabilities. Values are drawn from a generator of the ELBO's own.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments, not necessarily those of a rollout.
            entropy: Weight ``α`` of the sites' negative entropies, in nats of cost per nat. It keeps the guide random:
                from a nearly deterministic guide critics learn nothing about other values.
            **kwargs: Their keyword arguments.

        Returns:
            A scalar, the mean over particles; only its gradient has meaning.

        Raises:
            UnsupportedSiteError: If a site has no critic by choice.
        """
        self.particles.close()
        seed = int(torch.randint(1 << 31, (), generator=self.runner.noise()))
        with isolated(seed, hides_params=False), SkipCosts():
            programs = programs_of(self._prepared(Program(model, guide, args, kwargs)), self.particles.now)
            runs = [self.run_program(each) for each in programs]
            signals = [staged.signals for staged in self.stage(runs, programs)]
        return bootstrapped_surrogate(signals, entropy, self.learning().gamma) / self.num_particles

    def loss_and_signals(self, program: Program) -> tuple[float, LocalObjective]:
        """Like ``loss_and_grads``; also returns the local objective of the rollout."""
        self.trainer.keeps_staged = self.trainer.is_reused = True
        self._learn_waiting()
        model, guide, args, kwargs = program
        with self.undoing(self.trainer.replays):
            loss = self.differentiable_loss(model, guide, *args, **kwargs)
            self.trainer.register()
            objective = LocalObjective(self.trainer.staged.items, self.num_particles)
            self._backward(loss)
        return float(loss.item()), objective

    def replay(self, sites: Collection[str] | None = None, updates: int = 1) -> int:
        """Updates critics from stored rollouts, at any time; an update that is interrupted changes nothing.

        Args:
            sites: The sites whose critics learn, one or several; ``None`` for all.
            updates: Number of updates.

        Returns:
            The number of updates that found something to learn from.

        Raises:
            OptionError: If nothing is stored by choice: ``CriticLearner(replay=None)``.
            BusyError: If another thread takes a step or replays.
        """
        if self.trainer.replayer is None:
            raise OptionError("replay(...) needs stored rollouts: learner=CriticLearner(replay=Replay(capacity=...)).")
        done = 0
        with self._turn:
            for _ in range(updates):
                with self.undoing(deep=True):
                    done += self.trainer.replay(self, sites)
        return done

    # What can be looked at.

    @property
    def planner(self) -> Planner:
        """The options that decide what is done on a structure."""
        return self.runner.plans.planner

    @planner.setter
    def planner(self, planner: Planner) -> None:
        self.runner.plans.planner = planner
        self.runner.plans.forget()

    @property
    def plan(self) -> Plan | Pending:
        """What the last step did on the program's structure; before the first one it is false, and says so."""
        return Pending("plan") if self.runner.plans.last is None else self.runner.plans.last

    @property
    def graph(self) -> StochasticComputationGraph | Pending:
        """The stochastic computation graph of the last step; before the first one it is false, and says so."""
        return self.plan.graph if self.plan else Pending("graph")

    @property
    def network(self) -> BackpropQNetwork | Pending:
        """The Backprop-Q network of the last step, and what its critics read; false, with a reason, without any."""
        if not self.plan:
            return Pending("network")
        return described(self.plan.layout) or BackpropQNetwork(self.plan.graph, ())

    @property
    def num_noises(self) -> int:
        """Number of generators that estimators have drawn from."""
        return self.runner.noise.number

    @num_noises.setter
    def num_noises(self, number: int) -> None:
        self.runner.noise.number = number

    @property
    def replay_buffer(self) -> ReplayBuffer | None:
        """The stored rollouts; ``state_dict()``, copies and pickles leave them out."""
        return None if self.trainer.replayer is None else self.trainer.replayer.buffer

    def stage(
        self, traced: Sequence[TracedRun], programs: Sequence[Program], particles: Particles | None = None
    ) -> tuple[Staged, ...]:
        """Prepares runs of a known structure as a step does, or for other particles; nothing learns."""
        mode, particles = replace(self.mode(learning=False), shows=True), particles or self.particles.drawn
        return self.runner.stage(traced, programs, particles, mode)

    def observe(self, program: Program, shows: bool = True) -> Observation:
        """The runs of a step, and the signals of their sites; nothing learns. For diagnostics.

        With ``shows`` the signals are those of the graph, also if a step goes in program order.
        """
        mode = replace(self.mode(learning=False), shows=shows)
        return self.particles.observe(self.runner, self._prepared(program), mode)

    def tracked_runs(self, program: Program) -> list[TracedRun]:
        """The same runs, tracked: they show what leaves torch. For diagnostics."""
        particles = self.particles.drawn
        programs = programs_of(self._prepared(program), particles)
        return [self.runner.trace(each, particles, step=self.num_steps, track=True) for each in programs]

    def _chosen(self) -> list[tuple[str, str, str]] | None:
        plan = self.plan
        return [(name, plan.estimator(name), plan.critic(name)) for name in plan.layout.specs] if plan else None

    def _runs(self) -> str:
        plan, said = self.plan, self.runner.recordings.said
        if plan.sums and plan.summed is not None:
            return f"guide and model once, in {plan.summed.rows} rows that tell all values."
        return " ".join(filter(None, ["guide and model.", self.runner.recordings.when(), said, *plan.notes]))


def bootstrapped_surrogate(signals: Sequence[Signals], entropy: float = 0.0, gamma: float = 1.0) -> Tensor:
    r"""The sum of what critics expect at every site, as a function of the site's own distribution.

        S = Σ_X Σ_x q_X(x) (I_X(x) + Q_X(x) + α log q_X(x))   with finite components
        S = Σ_X ∂Q_X(x)/∂x x(ε; θ) - α H[q_X]                 without, for estimators that take the slope of the critic
        S = Σ_X (Q_X(x) - V_X) log q_X(x) - α H[q_X]          for others

    ``I``, ``Q`` and its slope are detached.
    """
    terms = []
    for one in signals:
        for c in one.active:
            spec, names = one.layout.classes[c].spec, ", ".join(map(repr, one.layout.classes[c].names))
            if spec.critic is None and not spec.tabled:
                raise UnsupportedSiteError(
                    f"Sites {names} cannot learn from critics alone, since they have none. Write "
                    'infer={"bpq": {"critic": MLPCritic()}} at sites of finite values, {"estimator": QPathwise()} at '
                    "continuous ones, or use pyro.infer.SVI."
                )
            if spec.components is None:
                level = one.learned(c, lambda critic: critic.says.level)
                if level is not None:
                    terms.append(_continuous(one, c, level))
                    terms += [-entropy * _entropy(one, c, names)] if entropy else []
                continue
            exact, learned = one.exact(c), one.learned(c, lambda critic: critic.says.table)
            tables = [] if exact is None else [gamma * exact]
            tables += [] if learned is None else [learned]
            if tables:
                table, log_q = sum(tables[1:], tables[0]), one.batches[c].log_probs
                terms.append((log_q.exp() * (table + entropy * log_q if entropy else table)).sum())
    return torch.stack(terms).sum() if terms else torch.zeros(())


def _continuous(signals: Signals, c: int, level: Tensor) -> Tensor:
    """The term of sites without finite components; ``level`` is what critics expect."""
    if NEEDS_LEAF in signals.layout.classes[c].spec.estimator.needs:
        return (q_slope(signals, c) * moved_value(signals, c)).sum()
    return ((q_value(signals, c) - level) * signals.batches[c].score).sum()


def _entropy(signals: Signals, c: int, names: str) -> Tensor:
    """Sum of the sites' entropies in nats."""
    try:
        return signals.batches[c].stack(lambda site: site.fn.entropy(), 0).sum()
    except NotImplementedError as error:
        raise UnsupportedSiteError(f"Sites {names} have no entropy in closed form; write entropy=0.0.") from error


# Expectations in closed form.


def differentiable_cost(traced: TracedRun, graph: StochasticComputationGraph) -> Tensor:
    r"""The differentiable costs of a run, with expectations in closed form where there are any.

        log q(z) - log p(z)  →  KL(q, p)      where torch registers it and p does not depend on later sites
        log q(z)             →  -H(q)         else, where q has an entropy

    This replaces terms only of sites whose value carries all of their gradient. Given all earlier sites, the closed
    form is the expectation of the terms that it replaces. So the gradient keeps its expectation. The costs-to-go that
    multiply the scores of earlier sites stay those of the sample.
    """
    total = traced.run.differentiable
    for name, record in traced.run.sites.items():
        site = traced.guide_trace.nodes.get(name)
        if record.score is not None or site is None or not traced.infos[name].has_rsample:
            continue
        q, prior = site["fn"], traced.model_trace.nodes.get(name)
        divergence = None if prior is None else _divergence(name, site, prior, graph)
        if divergence is not None:
            total = total - (site["log_prob"].sum() - prior["log_prob"].sum()) + divergence.sum()
            continue
        entropy = _closed_form(lambda q=q: q.entropy(), site)
        if entropy is not None:
            total = total - site["log_prob"].sum() - entropy.sum()
    return total


def _divergence(name: str, site: Any, prior: Any, graph: StochasticComputationGraph) -> Tensor | None:
    """``KL(q, p)`` scaled and masked, if the prior is known before the site is sampled."""
    order = graph.index
    later = [parent for parent in graph.cost(cost_of_model(name)).parents if order[parent] > order[name]]
    same = _equal(site["scale"], prior["scale"]) and _equal(site["mask"], prior["mask"])
    q, p = site["fn"], prior["fn"]
    # Masks within the two may differ, and the divergence of a Delta leaves out its density.
    if later or not (same and as_drawn(q) is q and as_drawn(p) is p):
        return None
    steps = zip(*(getattr(base_distribution(law), "transforms", ()) for law in (q, p)), strict=False)
    # It takes transforms of equal numbers for one, and has no gradient of them.
    if any(tensor.requires_grad for tensor in tensors_of([pair for pair in steps if pair[0] is not pair[1]])):
        return None
    return _closed_form(lambda: kl_divergence(q, p), site)


def _closed_form(compute: Any, site: Any) -> Tensor | None:
    try:
        value = scale_and_mask(compute(), site["scale"], site["mask"])
    except NotImplementedError:
        return None
    # A distribution that broadcasts over a plate that its parameters lack counts once per row.
    return value if value.shape == site["log_prob"].shape else None


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    return one.shape == other.shape and bool((one == other).all())
