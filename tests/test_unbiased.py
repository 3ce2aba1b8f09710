"""The main test: the expectation of what a step computes is the exact gradient, without sampling.

Critics are trained for some steps while the guide moves, then frozen; parameters go back to where they
were, so that one exact gradient serves all estimators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, CASES, Case
from pyro import poutine
from steps import bias, trained

from pyro_bpq import (
    AllAction,
    LeaveOneOut,
    LinearCritic,
    MLPCritic,
    Pathwise,
    RunningBaseline,
    ScoreFunction,
    TabularCritic,
    TraceBackpropQ_ELBO,
)
from pyro_bpq.estimators.base import SiteContext, SiteTerm
from pyro_bpq.graph.bitsets import Reads
from pyro_bpq.rollout import sums
from pyro_bpq.testing import assert_unbiased, expected_moments

ATOL = 1e-10
STEPS = 30
MAX_OUTCOMES = 300

ONE_PARTICLE: dict[str, dict[str, Any]] = {
    "default": {},
    "no_critic": {"critic": None},
    "linear_critic": {"critic": LinearCritic()},
    "tabular_critic": {"critic": TabularCritic()},
    "score_function": {"estimator": ScoreFunction()},
    "running_baseline": {"estimator": ScoreFunction(RunningBaseline())},
    "all_action_sampled": {"estimator": AllAction(exact=False)},
    "all_action_exact": {"estimator": AllAction(exact=True)},
    "fixed_scales": {"estimator": AllAction(adaptive=False)},
    "no_learner": {"learner": None},
    "dense": {"structure": "dense"},
    "dynamic": {"structure": "dynamic"},
}
TWO_PARTICLES: dict[str, dict[str, Any]] = {
    "default": {},
    "all_action_exact": {"estimator": AllAction(exact=True)},
    "all_action_sampled": {"estimator": AllAction(exact=False)},
    "leave_one_out": {"estimator": ScoreFunction(LeaveOneOut())},
    "running_baseline": {"estimator": ScoreFunction(RunningBaseline())},
    "no_learner": {"learner": None},
}
# Scopes with real values, or with sites in plates that the site lacks, have no table.
NOT_TABULAR: frozenset[str] = frozenset()

# What the default run covers: chain, fork, diamond, plates, global and local latents, reparameterised
# sites, vectors, masks, Python control flow. The full product is marked slow.
QUICK = frozenset(
    [
        *("chain", "diamond", "plate_subsample", "global_local", "discrete_above_reparam"),
        *("vector_layers", "mask_scale", "python_branch", "dynamic_sites", "component_chain"),
    ]
)
QUICK_OPTIONS = frozenset(
    ["default", "linear_critic", "running_baseline", "all_action_sampled", "all_action_exact", "no_learner"]
)
QUICK_CASES = frozenset([("chain", "tabular_critic")])
QUICK_PAIRS = frozenset(["fork", "plate", "discrete_above_reparam", "dynamic_sites"])


def train(elbo: TraceBackpropQ_ELBO, case: Case, steps: int = STEPS, lr: float = 0.02) -> None:
    """Trains critics with a moving guide, freezes them, and puts the parameters back."""
    trained(elbo, *case.programs, params=case.params, steps=steps, lr=lr)
    assert elbo.num_steps == steps
    elbo.eval()


def error(elbo: Any, case: Case, **options: Any) -> float:
    return bias(elbo, *case.programs, params=case.params, truth=case.exact(), **options)


def one_particle() -> Iterator[Any]:
    for case in CASES:
        for name, options in ONE_PARTICLE.items():
            if name == "tabular_critic" and case.name in NOT_TABULAR:
                continue
            is_quick = (case.name in QUICK and name in QUICK_OPTIONS) or (case.name, name) in QUICK_CASES
            marks = () if is_quick else (pytest.mark.slow,)
            yield pytest.param(case, options, id=f"{case.name}-{name}", marks=marks)


def two_particles() -> Iterator[Any]:
    for case in CASES:
        if case.num_states**2 > MAX_OUTCOMES:
            continue
        for name, options in TWO_PARTICLES.items():
            for is_vectorised in (False, True) if case.is_vectorisable else (False,):
                # The dimension of the particles lies to the left of all plates.
                more = {"vectorize_particles": True, "max_plate_nesting": 2} if is_vectorised else {}
                is_quick = case.name in QUICK_PAIRS and name in ("default", "leave_one_out")
                yield pytest.param(
                    case,
                    {**options, **more, "num_particles": 2},
                    id=f"{case.name}-{name}-{'vectorised' if is_vectorised else 'sequential'}",
                    marks=() if is_quick else (pytest.mark.slow,),
                )


@pytest.mark.parametrize(("case", "options"), list(one_particle()))
def test_step_is_unbiased(case: Case, options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(1, **options)
    train(elbo, case)
    assert error(elbo, case) < ATOL


@pytest.mark.parametrize(("case", "options"), list(two_particles()))
def test_step_with_two_particles_is_unbiased(case: Case, options: dict[str, Any]) -> None:
    elbo = TraceBackpropQ_ELBO(**options)
    train(elbo, case)
    assert error(elbo, case) < ATOL


@pytest.mark.parametrize("name", ["chain", "global_local", "discrete_above_reparam", "python_branch"])
def test_first_step_is_unbiased(name: str) -> None:
    case = BY_NAME[name]
    assert error(TraceBackpropQ_ELBO().eval(), case) < ATOL


@pytest.mark.parametrize("name", ["chain", "plate_subsample"])
def test_differentiable_loss_is_unbiased(name: str) -> None:
    case, elbo = BY_NAME[name], TraceBackpropQ_ELBO(1)
    train(elbo, case, 50)
    assert error(elbo, case, use_differentiable_loss=True) < ATOL


def scrambled(elbo: TraceBackpropQ_ELBO, scale: float = 1.0) -> None:
    """Sets critics, statistics and scales to nonsense."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in elbo.critics.blocks.state_dict(keep_vars=True).items():
            if not name.endswith(("count", "_extra_state")):
                tensor.add_(scale * torch.rand(tensor.shape, generator=generator))


@pytest.mark.parametrize("reduction", ["per_cost", "merged", "tree", "chain", "single"])
@pytest.mark.parametrize("name", ["diamond", "global_local", "reordered_guide"])
def test_nonsense_critics_are_harmless(name: str, reduction: Any) -> None:
    case, elbo = BY_NAME[name], TraceBackpropQ_ELBO(1, reduction=reduction)
    train(elbo, case, 5)
    scrambled(elbo)
    assert error(elbo, case) < ATOL


@pytest.mark.parametrize("name", ["chain", "diamond", "global_local", "component_chain", "dynamic_sites"])
def test_small_programs_as_large_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # No matrices, sums along runs of rows, a backward pass along the rules.
    for limit in ("DENSE", "FULL", "FEW"):
        monkeypatch.setattr(sums, limit, 0)
    monkeypatch.setattr("pyro_bpq.step.learning.MOST_SOLVED", 2)
    case, elbo = BY_NAME[name], TraceBackpropQ_ELBO(1)
    train(elbo, case, 30)
    assert error(elbo, case) < ATOL


def test_trained_critics_lower_the_variance() -> None:
    case, variances = BY_NAME["chain"], []
    for elbo in (TraceBackpropQ_ELBO(1), TraceBackpropQ_ELBO(estimator=ScoreFunction(RunningBaseline()))):
        train(elbo, case, 300, lr=0.0)
        moments = expected_moments(elbo, case.model, case.guide)
        variances.append(sum(float(moments.variance[name].sum()) for name in ("qa", "qb", "qc")))
    assert variances[0] < 0.3 * variances[1]


@pytest.mark.slow
def test_critics_stay_stable_over_many_steps() -> None:
    # A scale of the critics that followed their own error once made them diverge after a thousand steps.
    case, elbo = BY_NAME["chain"], TraceBackpropQ_ELBO(1)
    train(elbo, case, 3000, lr=0.0)
    moments = expected_moments(elbo, case.model, case.guide)
    plain = TraceBackpropQ_ELBO(estimator=ScoreFunction(RunningBaseline()))
    train(plain, case, 300, lr=0.0)
    rival = expected_moments(plain, case.model, case.guide)
    for name in ("qa", "qb", "qc"):
        assert float(moments.variance[name].sum()) < 0.7 * float(rival.variance[name].sum())


# Plates: a row reaches other rows through what lies outside of the plate, or outside of torch.


def rows_model() -> None:
    rows = pyro.plate("rows", 3, dim=-1)
    with rows:
        a = pyro.sample("a", dist.Bernoulli(logits=torch.tensor(0.2)))
    g = pyro.sample("g", dist.Bernoulli(logits=0.7 * a.sum(-1, keepdim=True) - 1.0))
    with rows:
        b = pyro.sample("b", dist.Bernoulli(logits=g - a))
        pyro.sample("x", dist.Normal(a + 1.3 * b * g, 1.0), obs=torch.tensor([0.1, 1.2, 2.0]))


def rows_guide() -> None:
    rows = pyro.plate("rows", 3, dim=-1)
    with rows:
        a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("qa", torch.tensor([0.3, -0.2, 0.5]))))
    g = pyro.sample("g", dist.Bernoulli(logits=pyro.param("qg", torch.tensor(0.4)) * a.sum(-1, keepdim=True)))
    with rows:
        pyro.sample("b", dist.Bernoulli(logits=pyro.param("qb", torch.tensor(0.9)) * (g - 0.3) + a))


def steered_model() -> None:
    with pyro.plate("rows", 3, dim=-1):
        a = pyro.sample("a", dist.Bernoulli(logits=torch.tensor(0.2)))
        shift = 0.7 if bool(a.sum() > 1) else -0.4
        pyro.sample("x", dist.Normal(a + shift, 1.0), obs=torch.tensor([0.1, 1.2, 2.0]))


def steered_guide() -> None:
    with pyro.plate("rows", 3, dim=-1):
        pyro.sample("a", dist.Bernoulli(logits=pyro.param("qa", torch.tensor([0.3, -0.2, 0.5]))))


@pytest.mark.parametrize("structure", ["auto", "dense", "dynamic"])
@pytest.mark.parametrize(("model", "guide"), [(rows_model, rows_guide), (steered_model, steered_guide)])
def test_rows_that_meet_are_not_cut(model: Any, guide: Any, structure: str) -> None:
    for options in ({}, {"estimator": ScoreFunction()}, {"estimator": AllAction(exact=True)}):
        elbo = trained(TraceBackpropQ_ELBO(1, structure=structure, **options), model, guide)
        assert_unbiased(elbo.eval(), model, guide)


def masked_model() -> None:
    with pyro.plate("rows", 3):
        with poutine.mask(mask=torch.tensor([True, True, False])):
            a = pyro.sample("a", dist.Bernoulli(torch.tensor([0.3, 0.6, 0.2])).mask(torch.tensor([False, True, True])))
        b = pyro.sample(
            "b", dist.Bernoulli(torch.full((3, 2), 0.4)).to_event(1).mask(torch.tensor([True, False, True]))
        )
        pyro.sample("x", dist.Normal(a + b.sum(-1), 1.0), obs=torch.tensor([0.1, 1.2, 2.0]))


def masked_guide() -> None:
    with pyro.plate("rows", 3):
        logits = pyro.param("qa", torch.tensor([0.3, -0.2, 0.5]))
        a = pyro.sample("a", dist.Bernoulli(logits=logits).mask(torch.tensor([True, False, True])))
        logits = pyro.param("qb", torch.tensor([[0.3, -0.2], [0.1, 0.5], [-0.4, 0.2]]))
        fn = dist.Bernoulli(logits=logits * (0.5 + a).unsqueeze(-1))
        pyro.sample("b", fn.to_event(1).mask(torch.tensor([False, True, True])))


@pytest.mark.parametrize("exact", [True, False])
def test_masked_distributions_are_unbiased(exact: bool) -> None:
    elbo = trained(TraceBackpropQ_ELBO(estimator=AllAction(exact=exact)), masked_model, masked_guide, steps=10)
    assert_unbiased(elbo.eval(), masked_model, masked_guide)


def test_rows_that_do_not_meet_are_cut() -> None:
    # The gradient of a row's logit does not read the other rows' costs.
    case, elbo = BY_NAME["global_local"], TraceBackpropQ_ELBO(estimator=ScoreFunction())
    case.params()
    elbo.loss_and_grads(case.model, case.guide, *case.args)
    (plan,) = elbo.runner.plans.plans.values()
    assert not plan.layout.rows_meet("z") and not plan.layout.rows_meet("g")


# Planted biases: the same check has to see each of them.


@dataclass(frozen=True)
class FlippedTable(AllAction):
    def __call__(self, context: SiteContext) -> SiteTerm:
        assert context.exact is not None and context.exact_cost is not None
        flipped = replace(context, exact=-context.exact, cost=context.cost)
        return super().__call__(flipped)


@dataclass(frozen=True)
class CountedTwice(AllAction):
    """Leaves the sampled immediate costs in the residual."""

    def __call__(self, context: SiteContext) -> SiteTerm:
        assert context.exact_cost is not None
        return super().__call__(replace(context, exact_cost=torch.zeros_like(context.exact_cost)))


@dataclass(frozen=True)
class WrongCritic(AllAction):
    """Subtracts the critic without adding its all-action term."""

    def __call__(self, context: SiteContext) -> SiteTerm:
        if context.learned is None:
            return super().__call__(context)
        probs = context.log_probs.detach().exp()
        own = context.learned.gather(-1, context.index.unsqueeze(-1)).squeeze(-1)
        own = (own - (probs * context.learned).sum(-1)).sum(-1)
        return super().__call__(replace(context, cost=context.cost - own))


@dataclass(frozen=True)
class HalvedScore(ScoreFunction):
    def __call__(self, context: SiteContext) -> SiteTerm:
        return SiteTerm(super().__call__(context).surrogate / 2)


@dataclass(frozen=True)
class ReadsOwnValue(ScoreFunction):
    """A baseline that the site's own value enters."""

    def __call__(self, context: SiteContext) -> SiteTerm:
        assert context.index is not None
        return super().__call__(replace(context, cost=context.cost - 0.3 * context.index.sum(-1)))


@dataclass(frozen=True)
class OwnParticleInBaseline(ScoreFunction):
    """Leave-one-out that leaves nobody out."""

    def __call__(self, context: SiteContext) -> SiteTerm:
        return super().__call__(replace(context, cost=context.cost - context.cost.mean(1, keepdim=True)))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"estimator": FlippedTable()}, id="wrong_sign"),
        pytest.param({"estimator": CountedTwice(adaptive=False)}, id="counted_twice"),
        pytest.param({"estimator": WrongCritic(exact=False)}, id="wrong_critic"),
        pytest.param({"estimator": HalvedScore()}, id="halved_score"),
        pytest.param({"estimator": ReadsOwnValue()}, id="reads_own_value"),
        pytest.param({"estimator": OwnParticleInBaseline(), "num_particles": 2}, id="own_particle"),
    ],
)
def test_largest_error_sees_a_planted_bias(options: dict[str, Any]) -> None:
    case, elbo = BY_NAME["fork" if "num_particles" in options else "chain"], TraceBackpropQ_ELBO(**options)
    train(elbo, case)
    assert error(elbo, case) > 1e-3


def test_largest_error_sees_a_missing_dependency() -> None:
    # A graph that lost an edge: the cost downstream of the last site is not counted.
    case, elbo = BY_NAME["chain"], TraceBackpropQ_ELBO(1)
    train(elbo, case, 12)
    lost = {"-log p(x)": frozenset({"b"})}
    for key, known in elbo.runner.recordings.known.items():
        graph, reads = _without(known.graph, "-log p(x)", "c"), Reads.over(known.reads.sites, {**known.reads, **lost})
        elbo.runner.recordings.known[key] = replace(known, graph=graph, reads=reads)
    elbo.runner.plans.forget()
    assert error(elbo, case) > 1e-3


def _without(graph: Any, cost: str, parent: str) -> Any:
    costs = tuple(
        replace(c, parents=tuple(p for p in c.parents if p != parent)) if c.name == cost else c for c in graph.costs
    )
    return replace(graph, costs=costs)


def test_every_estimator_that_claims_to_be_unbiased_is_covered() -> None:
    chosen = {type(o["estimator"]) for o in [*ONE_PARTICLE.values(), *TWO_PARTICLES.values()] if "estimator" in o}
    assert chosen | {Pathwise} == {AllAction, Pathwise, ScoreFunction}
    assert all(kind.is_unbiased for kind in (AllAction, Pathwise, ScoreFunction))
    assert isinstance(ONE_PARTICLE["linear_critic"]["critic"], LinearCritic) and MLPCritic() == MLPCritic((32,))
