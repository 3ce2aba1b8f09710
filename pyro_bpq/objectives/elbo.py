r"""``TraceBackpropQ_ELBO``, ``ExpectedCost``, and the arguments with which they are the paper's algorithm."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from pyro import poutine
from pyro.infer import ELBO

from pyro_bpq.compiled.options import Backend, Compile
from pyro_bpq.critics.learner import BackwardSweep, CriticLearner
from pyro_bpq.critics.nets import Critic, MLPCritic, TabularCritic
from pyro_bpq.errors import OptionError, check_choice, is_real, is_whole
from pyro_bpq.estimators import Estimator, QScoreFunction
from pyro_bpq.graph.network import Reduction, check_discounted
from pyro_bpq.graph.scg import Form
from pyro_bpq.objectives.entry import LossModule
from pyro_bpq.objectives.planned import PlannedObjective
from pyro_bpq.objectives.runner import StepRunner
from pyro_bpq.plan.planner import Planner
from pyro_bpq.record.config import OthersDraw, check_critic, check_estimator
from pyro_bpq.rollout.runs import Program
from pyro_bpq.short import changed_options, listed

_ABOUT_CRITICS = ("critic", "reduction", "lam", "gamma", "learner", "window", "immediate", "form")


class TraceBackpropQ_ELBO(PlannedObjective):
    r"""ELBO whose gradients through non-reparameterised sites come from Backprop-Q.

    Each latent site of the guide gets a gradient estimator that fits it; :mod:`pyro_bpq.plan.rules` has the rules.
    Roughly, these are

    - for reparameterised sites the pathwise estimator;
    - in programs of fewer than ten sites, in rows of data and at sites of many components
      :class:`~pyro_bpq.ScoreFunction` with leave-one-out over several particles;
    - for other sites with finite components :class:`~pyro_bpq.AllAction`, with the immediate costs summed exactly over
      their values, critics for the costs further downstream, graph-wise control variates and adaptive scales;
    - for a single site of many components that explains much data
      :class:`~pyro_bpq.estimators.DebiasedStraightThrough`;
    - for several layers of many components :class:`~pyro_bpq.estimators.Hindsight` or
      :class:`~pyro_bpq.estimators.CrossedLeaveOneOut`;
    - for others the score function. From two particles on its baseline is the mean of the other particles. With one
      particle it is a trimmed mean of earlier costs or, at sites of many components, the cost of a second run.

    All of these are unbiased for any state of the critics, first call included. The guide runs ``num_particles`` times.
    The model runs once more if that pays. If the loss can be summed over all values (:mod:`pyro_bpq.reruns.tables`),
    nothing is drawn after the first steps, and the gradient is exact.

    Args:
        num_particles: Number of particles ``M``. ``None`` leaves it open: up to 128 run in one vectorised call if
            :func:`~pyro_bpq.plan.plan.num_particles_for` asks for several, and if particles among others have the
            same costs as alone, for which the first step runs the programs twice. One particle runs if you choose
            an estimator or ``vectorize_particles=True``. It also runs with costs that leave torch or several
            processes, and if sampled values steer the program. If the loss is summed over all values, there
            are no particles; options about critics turn that sum off. ``print(elbo)`` says which option did what.
        max_plate_nesting: As in Pyro's ELBOs.
        max_iarange_nesting: Deprecated, as in Pyro's ELBOs.
        vectorize_particles: Whether particles run in one vectorised call.
        strict_enumeration_warning: As in Pyro's ELBOs.
        ignore_jit_warnings: As in Pyro's ELBOs.
        jit_options: As in Pyro's ELBOs.
        retain_graph: Passed to ``backward``.
        tail_adaptive_beta: As in Pyro's ELBOs.
        estimator: Estimator of every site without ``rsample`` that does not choose its own; ``None`` picks per site.
        critic: How to build the critics of sites that do not choose their own; ``None`` for none. A site of many
            components (``to_event``) has none by default. Sites that :class:`~pyro_bpq.QProp` serves have a
            :class:`~pyro_bpq.MomentCritic`; reparameterised sites only where ``infer`` or ``config_bpq`` asks for it.
        reduction: Reduction of the Backprop-Q network.
        lam: Weight of the lambda-return against the critic in targets, in ``[0, 1]``, or a function of the step.
        gamma: Discount of targets, in ``(0, 1]``, or a function of the step: a cost that is ``d`` edges away, on the
            longest way, counts ``gamma ** d``, whatever the reduction (:mod:`pyro_bpq.critics.targets`).
        learner: Trains the critics with an optimiser of its own; ``None`` adds their loss to the surrogate,
            so that the user's optimiser trains them.
        structure: ``"auto"``, ``"dynamic"`` or ``"dense"``: when dependencies are tracked.
        analytic_kl: Whether the gradient of ``log q - log p`` at reparameterised sites is that of its expectation
            where that is known: the KL divergence, else the entropy. The reported loss stays that of the sample.
        seed: Seed of what the ELBO itself draws: initial weights of critics, noise of estimators, further runs, replay.
        enumeration: What ``infer={"enumerate": ...}`` means: ``"sample"``, the site is sampled, with a warning;
            ``"exact"``, it is summed out as by Pyro's ``TraceEnum_ELBO``.
        window: Number of most recent sites of each kind in its scope that a critic sees as they are; it sees the others
            as one sum. A :class:`~pyro_bpq.TabularCritic` sees its whole scope. ``print(elbo.plan)`` shows what each
            critic reads.
        compile: Whether steps are recorded once and compiled, from then on without the programs' Python: ``True``, the
            name of a backend, or :class:`~pyro_bpq.Compile`. See :doc:`/compiled`.
        immediate: ``"exact"`` sums immediate costs over the values of a site where they are known. ``"learned"``, the
            paper's form, leaves all costs to the critics; there is no extra run of the model.
        form: What a Q-function conditions on: the site and its ancestors, ``"ancestor"``, or all that was sampled so
            far, ``"history"``. Where sampled values steer the program it is always the history.

    Attributes:
        info: After each training step a dictionary for each site, by name; tensors are detached and on their device.
            ``estimator``: the site's gradient estimator. ``cost_to_go``: ``(M, plates)`` in nats, or ``(M, plates, D)``
            if each component has its own. ``baseline``: the running or trimmed mean of earlier costs, in nats, if the
            estimator keeps one. ``scales``: the scales of its control variates, ``(n,)``. ``AllAction`` has five: for
            exact costs, level and differences of the critic, later sites, and exact costs of later sites. ``td_loss``:
            squared error of the critic in units of its targets' spread, with ``sweep`` in squared nats. ``explained``:
            share of the targets' variance that the critic explains, between the particles of a data point or, with one
            particle, between data points; absent with ``sweep``. A site that is summed over all values has only
            ``estimator``.
        ms: Milliseconds of the host in the last step without ``backward``: ``runs`` for the programs, the graph and the
            critics, ``signals`` for estimators and regression.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backprop-Q: Generalized Backpropagation for Stochastic Computation Graphs (Xu et al., 2018)
        | https://arxiv.org/abs/1807.09511
    """

    # Whether cost statements are all that counts: an expected cost instead of an ELBO.
    _only_costs = False

    def __init__(
        self,
        num_particles: int | None = None,
        max_plate_nesting: float = float("inf"),
        max_iarange_nesting: float | None = None,
        vectorize_particles: bool = False,
        strict_enumeration_warning: bool = True,
        ignore_jit_warnings: bool = False,
        jit_options: dict[str, Any] | None = None,
        retain_graph: bool | None = None,
        tail_adaptive_beta: float = -1.0,
        *,
        estimator: Estimator | None = None,
        critic: Critic | None = MLPCritic(),
        reduction: Reduction = "chain",
        lam: float | Callable[[int], float] = 0.97,
        gamma: float | Callable[[int], float] = 1.0,
        learner: CriticLearner | None = CriticLearner(),
        structure: str = "auto",
        analytic_kl: bool = False,
        seed: int = 0,
        enumeration: Literal["sample", "exact"] = "sample",
        window: int = 4,
        compile: bool | Backend | Compile = False,
        immediate: Literal["exact", "learned"] = "exact",
        form: Form = "ancestor",
    ) -> None:
        given = locals()
        changed = changed_options(TraceBackpropQ_ELBO, given)
        _check_options(given)
        options = {name: given[name] for name in inspect.signature(ELBO).parameters}
        super().__init__(learner, seed, lam, gamma, compile, **options | {"num_particles": num_particles or 1})
        self.made_by = f"{type(self).__name__}({', '.join(changed.values())})"
        self.enumeration, self.analytic_kl, enumerates = enumeration, analytic_kl, enumeration == "exact"
        # Without critics nothing about them matters; but costs that are left to critics are not known either.
        read = _ABOUT_CRITICS if critic is not None or immediate == "learned" else ()
        planner = Planner(
            *(estimator, critic, reduction),
            asks=tuple(changed[name] for name in read if name in changed),
            window=window,
            immediate=immediate,
            form=form,
            discounted=callable(gamma) or gamma != 1.0,
            is_elbo=not (self._only_costs or enumerates),
        )
        warns = strict_enumeration_warning
        self.runner = StepRunner(planner, structure, self.critics, self._only_costs, enumerates, warns)
        fixing = {f"{num_particles=}": num_particles is not None, "vectorize_particles=True": vectorize_particles}
        self._fixed_by = next((text for text, fixes in fixing.items() if fixes), "")
        self.particles.is_open = not self._fixed_by

    def _why_so_many(self) -> str:
        number, plan = self.num_particles, self.plan
        if plan and plan.sums:
            return "none, as the loss is summed over all values"
        fixed_by = "" if self.particles.is_open else self._fixed_by or "what was set later"
        drawn_by = fixed_by or ("analytic_kl=True" if self.analytic_kl else "")
        drawn = f"; the loss is not summed over all values, because of {drawn_by}" if drawn_by and plan.summed else ""
        if fixed_by:
            return f"{number}, because of {fixed_by}{drawn}"
        noisy = [name for name in plan.layout.specs if name in plan.noisy | plan.compared] if number > 1 else []
        return f"{number}, left open{drawn}" + (f"; the gradient of {listed(noisy)} is noisy" if noisy else "")


class ExpectedCost(TraceBackpropQ_ELBO):
    r"""Expected sum of the costs of a stochastic program, with the gradients of Backprop-Q.

    .. math:: J = E_{q}\Big[\sum_c c\Big],\qquad \nabla J = E_q\Big[\sum_X \nabla\log q_X\, C_X + \sum_c \nabla c\Big]

    Only :func:`~pyro_bpq.cost` statements count: neither ``log q`` nor ``log p`` does. The options are those of
    :class:`~pyro_bpq.TraceBackpropQ_ELBO`, with the same estimators, critics and structures. The program is

    - a policy, ``SVI(None, policy, optim, loss=ExpectedCost())`` or ``ExpectedCost()(policy)``, a module whose
      call gives the differentiable loss;
    - a policy and an environment, ``SVI(environment, policy, optim, loss=ExpectedCost())``: the environment runs
      after the policy and takes over the values of its sites by name; its other sites are sampled in it, and
      gradients reach their parameters.

    A step calls the function of a cost once per particle, or once for all vectorised particles; with ``exact=True``
    at the cost it may call it more often. Every run of ``evaluate_loss`` calls it too, and so does every replayed
    rollout, unless ``Replay(costs="stored")`` is chosen. Further epochs of :class:`~pyro_bpq.ProximalSVI` do not.

    Raises:
        OptionError: If an option is out of range.
        UnsupportedProgramError: If a site is observed or a factor: conditioning has no place in this objective.

    References:
        | Gradient Estimation Using Stochastic Computation Graphs (Schulman et al., 2015)
        | Backprop-Q: Generalized Backpropagation for Stochastic Computation Graphs (Xu et al., 2018)
    """

    _only_costs = True

    def __call__(self, *programs: Any) -> LossModule:
        """The loss of a policy, or of an environment and a policy, as a module.

        Args:
            *programs: ``policy``, or ``environment, policy``.

        Returns:
            A module that is called with the programs' arguments.
        """
        environment, policy = programs if len(programs) == 2 else (None, *programs)
        return LossModule(environment, policy, self)

    def _prepared(self, program: Program) -> Program:
        environment, policy, *_ = program
        one = policy if environment is None else functools.partial(_in_turn, policy, environment)
        return super()._prepared(program._replace(model=_nothing, guide=one))


def paper_settings(
    reduction: Reduction = "merged",
    lam: float | Callable[[int], float] = 0.0,
    gamma: float | Callable[[int], float] = 1.0,
    *,
    estimator: Estimator = QScoreFunction(),
    critic: Critic = TabularCritic(dueling=False),
    rate: float | Callable[[int], float] = 0.1,
) -> dict[str, Any]:
    r"""The arguments with which ``TraceBackpropQ_ELBO`` and ``ExpectedCost`` run the paper's Algorithm 1 as written.

    Each step takes a rollout, then a step of every critic in a backward sweep, then the gradient with the critics in
    the place of the costs:

        w_X ← w_X + α (G_X - Q_w(Sc_X)) ∇Q_w(Sc_X),   surrogate = Σ_X Q_w(Sc_X) log q(x | Pa_X)

    Every Q-function is learned, immediate costs too, from the sampled values of its children. It sees the scope of the
    site and its ancestors. The gradient is **biased** by the critics' errors, so this is for comparison and for study;
    ``TraceBackpropQ_ELBO()`` is not this algorithm, and is unbiased. Reparameterised sites keep their pathwise
    gradient.

    Args:
        reduction: Reduction of the Backprop-Q network.
        lam: Weight of the lambda-return against the critic in targets; 0 is the one-step target of Algorithm 1.
        gamma: Discount of targets per edge of the longest way.
        estimator: How the Q-function becomes a gradient: any estimator that uses critics.
            :class:`~pyro_bpq.estimators.QScoreFunction`, for any site, and other estimators with ``replaces_costs`` put
            it in place of the costs. :class:`~pyro_bpq.AllAction` and
            :class:`~pyro_bpq.estimators.QControlVariate`, for finite values, use it as a control variate.
        critic: The approximators. Tables serve small finite scopes; else ``MLPCritic()`` with a small ``rate``.
        rate: Step size ``α`` of the critics, or a function of the step.

    Returns:
        Keyword arguments.

    Raises:
        OptionError: If the rate is not positive.

    Example:
        >>> from pyro_bpq import TraceBackpropQ_ELBO
        >>> elbo = TraceBackpropQ_ELBO(**paper_settings("per_cost", lam=0.5))

    References:
        | Backprop-Q (Xu et al., 2018), Algorithm 1
    """
    given = {"estimator": estimator, "critic": critic, "reduction": reduction, "lam": lam, "gamma": gamma}
    return {**given, "learner": CriticLearner(sweep=BackwardSweep(rate)), "immediate": "learned", "form": "ancestor"}


def _check_options(given: Mapping[str, Any]) -> None:
    """Raises :class:`OptionError` for an option that is out of range or of the wrong kind."""
    number, lam, gamma = given["num_particles"], given["lam"], given["gamma"]
    hint = " SVI takes an instance: loss=TraceBackpropQ_ELBO()." if callable(number) else ""
    is_number = number is None or is_whole(number, 1)
    is_lam = callable(lam) or (is_real(lam) and 0.0 <= lam <= 1.0)
    is_gamma = callable(gamma) or (is_real(gamma) and 0.0 < gamma <= 1.0)
    for name, holds, advice in (
        ("num_particles", is_number, f"a positive integer, or None to leave it open.{hint}"),
        ("window", is_whole(given["window"], 1), "a positive integer."),
        ("seed", is_whole(given["seed"]), "a whole number."),
        ("lam", is_lam, "a number in [0, 1] or a function of the step."),
        ("gamma", is_gamma, "a number in (0, 1] or a function of the step."),
        ("learner", isinstance(given["learner"], CriticLearner | None), "CriticLearner(lr=...) or None."),
    ):
        if not holds:
            raise OptionError(f"{name}={given[name]!r}: write {advice}")
    check_choice("immediate", given["immediate"], ("exact", "learned"))
    check_choice("form", given["form"], get_args(Form))
    check_choice("enumeration", given["enumeration"], ("sample", "exact"))
    check_choice("reduction", given["reduction"], get_args(Reduction))
    check_estimator(given["estimator"])
    check_critic(given["critic"], None)
    check_discounted(given["reduction"], callable(gamma) or gamma != 1.0)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The model of a program that is all guide."""


def _in_turn(policy: Any, environment: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs both as one program."""
    trace = poutine.trace(policy).get_trace(*args, **kwargs)
    latent = [name for name, site in trace.nodes.items() if site["type"] == "sample" and not site["is_observed"]]
    with poutine.block(hide=latent), poutine.replay(trace=trace), OthersDraw("environment", "policy", trace, False):
        return environment(*args, **kwargs)
