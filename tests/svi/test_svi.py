"""Controlled steps: the first epoch's gradient, limits on the divergence, the exact objective."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from bounds import gradients as slopes
from models import BY_NAME, CASES, Case, real
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import SGD, Adam
from steps import filtered, fresh, from_seed, stored, trained
from torch import Tensor

from pyro_bpq import LeaveOneOut, ProximalSVI, ScoreFunction, TraceBackpropQ_ELBO, TrustRegionSVI
from pyro_bpq.objectives.local_objective import LocalObjective
from pyro_bpq.svi.controlled import ControlledStep
from pyro_bpq.testing import exact_loss

PROGRAMS = ["chain", "diamond", "plate_subsample", "global_local", "vector_layers", "mask_scale", "reordered_guide"]


def particles(case: Case, number: int) -> dict[str, Any]:
    in_a_plate = {"vectorize_particles": True, "max_plate_nesting": 2}
    return {"num_particles": number, **(in_a_plate if number > 1 and case.is_vectorisable else {})}


# The local objective


def local(elbo: TraceBackpropQ_ELBO, model: Any, guide: Any, *args: Any) -> tuple[Tensor, LocalObjective]:
    """What of the loss of a rollout flows through ``log q`` of the sites, and the local objective there."""
    elbo.eval().trainer.keeps_staged = True
    loss, staged = elbo.differentiable_loss(model, guide, *args), elbo.trainer.staged.items
    # The rest: the model, and reparameterised values.
    rest = sum((traced.run.differentiable for each in staged for traced in each.traced), torch.zeros(()))
    return loss - rest / elbo.num_particles, LocalObjective(staged, elbo.num_particles)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_local_objective_has_the_gradient_of_the_step_at_the_guide_of_the_rollout(case: Case, number: int) -> None:
    elbo = trained(TraceBackpropQ_ELBO(**particles(case, number)), *case.programs, params=case.params, steps=3)
    loss, objective = local(elbo, *case.programs)
    nearby = objective.nearby()
    own = slopes(objective.value(nearby, clip=0.2).mean())
    for name, expected in slopes(loss).items():
        # In one case they also reach log q(z) through the value of x, which the local objective holds.
        if case.name != "reparam_above_discrete" or name not in ("loc", "scale"):
            torch.testing.assert_close(own[name], expected, rtol=0, atol=1e-10, msg=name)
    assert all(abs(float(kl.detach())) < 1e-12 for kl in nearby.kl.values())


KEPT = torch.tensor([True, False])


HIDES = [lambda law: law.to_event(1).mask(False), *(lambda law, m=m: law.mask(m).to_event(1) for m in (False, KEPT))]


@pytest.mark.parametrize("hide", HIDES)
def test_local_objective_scores_what_masks_hide_and_no_density(hide: Any) -> None:
    def guide() -> None:
        pyro.sample("z", hide(dist.Bernoulli(logits=pyro.param("q", real(0.3, -0.4)))))
        pyro.sample("y", dist.Delta(torch.tensor(0.5), log_density=0.7))

    def model() -> None:
        pyro.sample("y", dist.Normal(0.0, 1.0))
        pyro.factor("f", -pyro.sample("z", dist.Bernoulli(real(0.3, 0.6)).to_event(1)).sum(-1))

    elbo = trained(TraceBackpropQ_ELBO(4, estimator=ScoreFunction(LeaveOneOut())), model, guide, steps=1)
    loss, objective = local(elbo, model, guide)
    nearby = objective.nearby()
    expected, own = slopes(loss), slopes(objective.value(nearby).mean())
    assert bool(expected["q"].any()) and float(nearby.total_kl.detach()) == 0.0
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)


START, PRIOR, COSTS = real(0.1, 0.5, -0.7), real(0.2, -0.4, 0.9), real(1.0, -0.5, 0.3)


def one_site_model() -> None:
    z = pyro.sample("z", dist.Categorical(logits=PRIOR))
    pyro.factor("f", -COSTS[z])


def one_site_guide() -> None:
    pyro.sample("z", dist.Categorical(logits=pyro.param("q", START.clone())))


ONE_SITE = one_site_model, one_site_guide


def test_local_objective_of_one_site_is_the_loss_up_to_a_constant() -> None:
    _, objective = local(TraceBackpropQ_ELBO(), *ONE_SITE)
    differences = []
    for shift in ([0.0, 0.0, 0.0], [1.0, -0.3, 0.2], [-2.0, 0.0, 1.0]):
        pyro.param("q").data.copy_(START + torch.tensor(shift))
        nearby = objective.nearby()
        differences.append(float(exact_loss(*ONE_SITE) - objective.value(nearby).detach().mean()))
        old, new = (dist.Categorical(logits=q) for q in (START, pyro.param("q").detach()))
        assert float(nearby.total_kl.detach()) == pytest.approx(float(dist.kl.kl_divergence(old, new)), abs=1e-12)
    # Exact signals are those of all values: the part that is sampled has no noise left with one site.
    assert max(differences) - min(differences) < 1e-10


def test_clipping_by_hand() -> None:
    """Equation 17 of the paper is the objective without the penalty; the cost of the one site is its Q."""
    elbo = TraceBackpropQ_ELBO(estimator=ScoreFunction())
    _, objective = local(elbo, *ONE_SITE)
    z = int(elbo.trainer.staged.items[0].traced[0].run.sites["z"].value)
    before = START.log_softmax(-1)
    cost = float((before - PRIOR.log_softmax(-1) + COSTS)[z])
    for step in (-2.0, 0.05, 2.0):
        pyro.param("q").data[z] = START[z] + step
        after = pyro.param("q").detach().log_softmax(-1)
        ratio = float((after - before)[z].exp())
        kl, reverse = float((before.exp() * (before - after)).sum()), float((after.exp() * (after - before)).sum())
        clipped = max(cost * ratio, cost * min(max(ratio, 0.8), 1.2))
        nearby = objective.nearby()
        values = objective.value(nearby, 0.2), objective.value(nearby, 0.2, penalty=False)
        found = [float(value.detach()) for value in (*values, nearby.kl["z"], nearby.reverse_kl["z"])]
        assert found == pytest.approx([clipped + reverse, clipped, kl, reverse], abs=1e-12) and reverse > 1e-4


# Proximal steps


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_first_epoch_is_a_plain_step(name: str, number: int) -> None:
    case = BY_NAME[name]
    ends = []
    for make in (SVI, lambda *args: ProximalSVI(*args, epochs=1)):
        case.params(seed=0)
        svi = make(case.model, case.guide, Adam({"lr": 0.05}), TraceBackpropQ_ELBO(**particles(case, number)))
        losses = [svi.step(*case.args) for _ in range(5)]
        ends.append((losses, stored()))
    # Without epochs to come, the score function takes log q as it is and not from a table: equal but for rounding.
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-12)
    torch.testing.assert_close(ends[1][1], ends[0][1], rtol=1e-12, atol=1e-13)


def proximal(lr: float = 0.05, **options: Any) -> ControlledStep:
    """A step of a chain."""
    case = BY_NAME["chain"].params(seed=0)
    elbo = TraceBackpropQ_ELBO(num_particles=8)
    svi = ProximalSVI(case.model, case.guide, SGD({"lr": lr}), elbo, **options)
    svi.step()
    return svi.last


def test_later_epochs_move_the_guide_and_not_the_model() -> None:
    ends = []
    for epochs in (1, 4):
        step = proximal(epochs=epochs)
        assert step.epochs == epochs and not step.stopped_early
        ends.append((stored(), step.total_kl))
    assert ends[1][1] > 2 * ends[0][1] > 0
    for name, value in ends[0][0].items():
        assert torch.equal(value, ends[1][0][name]) == (not name.startswith("q"))


def test_target_kl_stops_early() -> None:
    free = proximal(0.5, epochs=10).total_kl
    limited = proximal(0.5, epochs=10, target_kl=free / 10)
    assert limited.stopped_early and 1 <= limited.epochs < 10
    assert free / 10 < limited.total_kl < free


def test_reported_kl_is_that_of_the_step() -> None:
    step = proximal(0.3, epochs=3)
    after = pyro.param("qa").detach().clone()
    BY_NAME["chain"].params()
    old, new = (dist.Bernoulli(logits=logits) for logits in (pyro.param("qa").detach(), after))
    # Site a has no ancestors: its divergence is the same in every particle.
    assert step.kl["a"] == pytest.approx(float(dist.kl.kl_divergence(old, new)), abs=1e-12)
    assert step.total_kl == pytest.approx(sum(step.kl.values()))


# Trust-region steps

# Where the interaction between sites is weak enough for a limit of 0.01 nats.
MONOTONE = ["chain", "fork", "plate", "global_local", "auxiliary", "mask_scale", "obs_mask", "nested_plates"]


def trust_region(case: Case, number: int = 200, **options: Any) -> TrustRegionSVI:
    case.params(seed=0)
    elbo = TraceBackpropQ_ELBO(**particles(case, number))
    return TrustRegionSVI(case.model, case.guide, SGD({"lr": 1e-12}), elbo, **options)


@pytest.mark.parametrize("name", MONOTONE)
def test_exact_objective_does_not_rise(name: str) -> None:
    case = BY_NAME[name]
    # Close to the optimum one standard error lets a rise of 1e-5 through.
    svi = trust_region(case, confidence=3.0)
    losses, accepted = [float(exact_loss(case.model, case.guide, *case.args))], 0
    for _ in range(12):
        svi.step(*case.args)
        accepted += svi.last.epochs
        losses.append(float(exact_loss(case.model, case.guide, *case.args)))
    # What the optimiser does to the model is of order 1e-12.
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(losses))
    assert accepted >= 6 and losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("name", [*PROGRAMS, "python_branch", "dynamic_sites", "shared_parameters"])
@pytest.mark.parametrize("max_site_kl", [None, 0.002])
def test_accepted_steps_improve_and_keep_the_limits(name: str, max_site_kl: float | None) -> None:
    case = BY_NAME[name]
    svi = trust_region(case, 4, max_kl=0.01, max_site_kl=max_site_kl)
    accepted = 0
    for _ in range(5):
        before = stored()
        svi.step(*case.args)
        step = svi.last
        if step.epochs:
            accepted += 1
            assert step.improvement > 0.0 and 0.0 < step.total_kl <= 0.01
            assert max_site_kl is None or max(step.kl.values()) <= max_site_kl
        else:
            assert step.total_kl == 0.0
            torch.testing.assert_close(stored(), before, rtol=1e-5, atol=1e-9)
    assert accepted > 0


def test_direction_is_the_natural_gradient() -> None:
    """One categorical site: the step is along the inverse Fisher information times the gradient."""
    elbo, store = TraceBackpropQ_ELBO(num_particles=2), pyro.get_param_store()
    from_seed(1, copy.deepcopy(elbo).loss_and_grads, *ONE_SITE)
    gradient = store._params["q"].grad.clone()
    store._params["q"].grad = None
    svi = TrustRegionSVI(*ONE_SITE, SGD({"lr": 0.1}), elbo, max_kl=1e-6, damping=1e-8, iterations=20)
    from_seed(1, svi.step)
    moved, probs = pyro.param("q").detach() - START, START.softmax(-1)
    natural = -torch.linalg.pinv(torch.diag(probs) - probs.outer(probs)) @ gradient
    cosine = torch.nn.functional.cosine_similarity(moved - moved.mean(), natural - natural.mean(), dim=0)
    assert float(cosine) == pytest.approx(1.0, abs=1e-5)
    assert svi.last.total_kl == pytest.approx(0.96e-6, rel=0.03)


def test_the_divergence_in_the_direction_of_the_paper() -> None:
    """Equation 16 limits KL(new || old); a step towards rare values is shorter then."""

    def model() -> None:
        pyro.sample("z", dist.Bernoulli(logits=torch.tensor(2.0)))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(-2.0))))

    forward, backward, total = {}, {}, {}
    for name in ("old", "new"):
        fresh()
        elbo = TraceBackpropQ_ELBO(num_particles=2)
        svi = TrustRegionSVI(model, guide, SGD({"lr": 0.1}), elbo, max_kl=0.4, divergence=name)
        svi.step()
        old, new = (dist.Bernoulli(logits=q) for q in (torch.tensor(-2.0), pyro.param("q").detach()))
        forward[name], backward[name] = (float(dist.kl.kl_divergence(*pair)) for pair in ((old, new), (new, old)))
        total[name] = svi.last.total_kl
    assert total["old"] == pytest.approx(forward["old"], abs=1e-12) and forward["old"] <= 0.4 < backward["old"]
    assert total["new"] == pytest.approx(backward["new"], abs=1e-12) and forward["new"] < backward["new"] <= 0.4
    assert forward["new"] < forward["old"]


def test_divergence_without_a_formula_comes_from_the_sample() -> None:
    def flow(shift: Tensor) -> None:
        shifted = dist.transforms.AffineTransform(0.0, torch.ones(()))
        pyro.sample("x", dist.TransformedDistribution(dist.Normal(shift, 1.0), [shifted]))

    guide, elbo = lambda: flow(pyro.param("shift", torch.tensor(0.0))), TraceBackpropQ_ELBO(num_particles=4)
    svi = ProximalSVI(lambda: flow(torch.tensor(1.0)), guide, SGD({"lr": 0.1}), elbo)
    svi.step()
    assert svi.last.kl["x"] >= 0.0


# Options and the rest of the contract


@pytest.mark.parametrize("make", [ProximalSVI, TrustRegionSVI])
def test_controlled_steps_are_drop_ins(make: Any) -> None:
    case = BY_NAME["global_local"].params(seed=0)
    svi = make(case.model, case.guide, Adam({"lr": 0.02}), TraceBackpropQ_ELBO())
    with filtered("error"):
        losses = [svi.step(*case.args) for _ in range(5)]
    assert isinstance(svi, SVI) and all(isinstance(loss, float) for loss in losses)
    assert isinstance(svi.evaluate_loss(*case.args), float)
    assert all(p.grad is None or not p.grad.any() for _, p in pyro.get_param_store().named_parameters())


@pytest.mark.parametrize("make", [ProximalSVI, TrustRegionSVI])
def test_controlled_steps_need_our_elbo(make: Any) -> None:
    with pytest.raises(ValueError, match="TraceBackpropQ_ELBO"):
        make(*ONE_SITE, Adam({}), Trace_ELBO())


def test_an_error_in_the_line_search_leaves_the_guide_where_it_was() -> None:
    start: list[Tensor] = []

    def guide() -> None:
        one_site_guide()
        if start and not torch.equal(pyro.param("q").detach(), start[0]):
            raise RuntimeError("on purpose")

    elbo = TraceBackpropQ_ELBO(200, vectorize_particles=True, max_plate_nesting=1)
    svi = TrustRegionSVI(one_site_model, guide, SGD({"lr": 0.1}), elbo, max_kl=0.5)
    svi.step()
    q = pyro.get_param_store()._params["q"]
    start.append(q.detach().clone())
    with pytest.raises(RuntimeError, match="on purpose"):
        svi.step()
    assert torch.equal(q.detach(), start[0]) and (q.grad is None or not q.grad.any())


@pytest.mark.parametrize("loop", [ProximalSVI, TrustRegionSVI])
def test_counts_are_served(loop: Any) -> None:
    """The default would take ``Differences``, whose signals do not come through the probabilities of values."""

    def counts(rates: Tensor) -> Tensor:
        with pyro.plate("d", 3):
            return pyro.sample("z", dist.Poisson(rates))

    def model() -> None:
        z = counts(real(1.0, 1.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("x", dist.Normal(z, 1.0), obs=real(0.4, 1.0, 2.0))

    fresh()
    guide, elbo = lambda: counts(pyro.param("q", real(0.3, -0.7, 0.8)).exp()), TraceBackpropQ_ELBO()
    svi = loop(model, guide, Adam({"lr": 0.02}), elbo)
    assert all(svi.step() > 0.0 for _ in range(2))
    assert isinstance(svi.elbo.info["z"]["estimator"], ScoreFunction)
