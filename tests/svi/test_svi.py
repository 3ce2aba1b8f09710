"""Controlled steps: the first epoch's gradient, limits on the divergence, the exact objective."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, CASES, Case
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import SGD, Adam
from steps import filtered, fresh, trained
from torch import Tensor

from pyro_bpq import ProximalSVI, ScoreFunction, TraceBackpropQ_ELBO, TrustRegionSVI
from pyro_bpq.objectives.local_objective import LocalObjective
from pyro_bpq.testing import exact_loss

PROGRAMS = ["chain", "diamond", "plate_subsample", "global_local", "vector_layers", "mask_scale", "reordered_guide"]


def values() -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in pyro.get_param_store().named_parameters()}


def gradients() -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in pyro.get_param_store().named_parameters()
    }


def particles(case: Case, number: int) -> dict[str, Any]:
    if number == 1:
        return {"num_particles": 1}
    if case.is_vectorisable:
        return {"num_particles": number, "vectorize_particles": True, "max_plate_nesting": 2}
    return {"num_particles": number}


# The local objective


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_local_objective_has_the_gradient_of_the_step_at_the_guide_of_the_rollout(case: Case, number: int) -> None:
    elbo = trained(TraceBackpropQ_ELBO(**particles(case, number)), *case.programs, params=case.params, steps=3)
    elbo.eval().trainer.keeps_staged = True
    loss = elbo.differentiable_loss(case.model, case.guide, *case.args)
    objective = LocalObjective(elbo.trainer.staged.items, elbo.num_particles)
    leaves = dict(pyro.get_param_store().named_parameters())
    total = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
    # What does not flow through log q of the sites: the model, and reparameterised values.
    rest_of = sum((t.run.differentiable for s in elbo.trainer.staged.items for t in s.traced), torch.zeros(()))
    rest: Any = [None] * len(leaves)
    if rest_of.requires_grad:
        rest = torch.autograd.grad(rest_of / number, list(leaves.values()), retain_graph=True, allow_unused=True)
    nearby = objective.nearby()
    value = objective.value(nearby, clip=0.2).mean()
    local: Any = [None] * len(leaves)
    if value.requires_grad:
        local = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    for name, parts in zip(leaves, zip(total, rest, local, strict=True), strict=True):
        if case.name == "reparam_above_discrete" and name in ("loc", "scale"):
            # They also reach log q(z) through the value of x, which the local objective holds.
            continue
        whole, other, own = (torch.zeros_like(leaves[name]) if part is None else part for part in parts)
        torch.testing.assert_close(own, whole - other, rtol=0, atol=1e-10, msg=name)
    assert all(abs(float(kl.detach())) < 1e-12 for kl in nearby.kl.values())


def one_site() -> tuple[Callable[[], None], Callable[[], None]]:
    prior, costs = torch.tensor([0.2, -0.4, 0.9]), torch.tensor([1.0, -0.5, 0.3])

    def model() -> None:
        z = pyro.sample("z", dist.Categorical(logits=prior))
        pyro.factor("f", -costs[z])

    def guide() -> None:
        pyro.sample("z", dist.Categorical(logits=pyro.param("q", torch.tensor([0.1, 0.5, -0.7]))))

    return model, guide


def test_local_objective_of_one_site_is_the_loss_up_to_a_constant() -> None:
    model, guide = one_site()
    pyro.clear_param_store()
    elbo = TraceBackpropQ_ELBO().eval()
    elbo.trainer.keeps_staged = True
    elbo.differentiable_loss(model, guide)
    objective = LocalObjective(elbo.trainer.staged.items, 1)
    differences = []
    for shift in ([0.0, 0.0, 0.0], [1.0, -0.3, 0.2], [-2.0, 0.0, 1.0]):
        pyro.param("q").data.copy_(torch.tensor([0.1, 0.5, -0.7]) + torch.tensor(shift))
        nearby = objective.nearby()
        differences.append(float(exact_loss(model, guide) - objective.value(nearby).detach().mean()))
        old, new = (dist.Categorical(logits=q) for q in (torch.tensor([0.1, 0.5, -0.7]), pyro.param("q").detach()))
        assert float(nearby.total_kl.detach()) == pytest.approx(float(dist.kl.kl_divergence(old, new)), abs=1e-12)
    # Exact signals are those of all values: the part that is sampled has no noise left with one site.
    assert max(differences) - min(differences) < 1e-10


def test_clipping_by_hand() -> None:
    """Equation 17 of the paper is the objective without the penalty; the cost of the one site is its Q."""
    model, guide = one_site()
    pyro.clear_param_store()
    elbo = TraceBackpropQ_ELBO(estimator=ScoreFunction()).eval()
    elbo.trainer.keeps_staged = True
    pyro.set_rng_seed(3)
    elbo.differentiable_loss(model, guide)
    objective = LocalObjective(elbo.trainer.staged.items, 1)
    z = int(elbo.trainer.staged.items[0].traced[0].run.sites["z"].value)
    before = pyro.param("q").detach().log_softmax(-1)
    for step in (-2.0, 0.05, 2.0):
        pyro.param("q").data[z] = torch.tensor([0.1, 0.5, -0.7])[z] + step
        after = pyro.param("q").detach().log_softmax(-1)
        ratio = float((after - before)[z].exp())
        cost = float(before[z] - torch.tensor([0.2, -0.4, 0.9]).log_softmax(-1)[z] + torch.tensor([1.0, -0.5, 0.3])[z])
        kl = float((after.exp() * (after - before)).sum())
        clipped = max(cost * ratio, cost * min(max(ratio, 0.8), 1.2))
        nearby = objective.nearby()
        assert float(objective.value(nearby, 0.2).detach()) == pytest.approx(clipped + kl, abs=1e-12)
        assert float(objective.value(nearby, 0.2, penalty=False).detach()) == pytest.approx(clipped, abs=1e-12)
        assert float(nearby.reverse_kl["z"].detach()) == pytest.approx(kl, abs=1e-12) and kl > 1e-4
        assert float(nearby.kl["z"].detach()) == pytest.approx(
            float((before.exp() * (before - after)).sum()), abs=1e-12
        )


# Proximal steps


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_first_epoch_is_a_plain_step(name: str, number: int) -> None:
    case = BY_NAME[name]
    ends = []
    for make in (SVI, lambda *args: ProximalSVI(*args, epochs=1)):
        case.params()
        pyro.set_rng_seed(0)
        svi = make(case.model, case.guide, Adam({"lr": 0.05}), TraceBackpropQ_ELBO(**particles(case, number)))
        losses = [svi.step(*case.args) for _ in range(5)]
        ends.append((losses, values()))
    # Without epochs to come, the score function takes log q as it is and not from a table: equal but for rounding.
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-12)
    for key, value in ends[0][1].items():
        torch.testing.assert_close(value, ends[1][1][key], rtol=1e-12, atol=1e-13)


def proximal(case: Case, lr: float = 0.05, **options: Any) -> ProximalSVI:
    case.params()
    pyro.set_rng_seed(0)
    return ProximalSVI(case.model, case.guide, SGD({"lr": lr}), TraceBackpropQ_ELBO(num_particles=8), **options)


def test_later_epochs_move_the_guide_and_not_the_model() -> None:
    case, ends = BY_NAME["chain"], []
    for epochs in (1, 4):
        svi = proximal(case, epochs=epochs)
        svi.step()
        assert svi.last is not None and svi.last.epochs == epochs and not svi.last.stopped_early
        ends.append((values(), svi.last.total_kl))
    assert ends[1][1] > 2 * ends[0][1] > 0
    for name, value in ends[0][0].items():
        assert torch.equal(value, ends[1][0][name]) == (not name.startswith("q"))


def test_target_kl_stops_early() -> None:
    case = BY_NAME["chain"]
    svi = proximal(case, lr=0.5, epochs=10)
    svi.step()
    assert svi.last is not None
    free = svi.last.total_kl
    limited = proximal(case, lr=0.5, epochs=10, target_kl=free / 10)
    limited.step()
    assert limited.last is not None
    assert limited.last.stopped_early and 1 <= limited.last.epochs < 10
    assert free / 10 < limited.last.total_kl < free


def test_reported_kl_is_that_of_the_step() -> None:
    case = BY_NAME["chain"]
    svi = proximal(case, lr=0.3, epochs=3)
    before = pyro.param("qa").detach().clone()
    svi.step()
    assert svi.last is not None
    old, new = dist.Bernoulli(logits=before), dist.Bernoulli(logits=pyro.param("qa").detach())
    # Site a has no ancestors: its divergence is the same in every particle.
    assert svi.last.kl["a"] == pytest.approx(float(dist.kl.kl_divergence(old, new)), abs=1e-12)
    assert svi.last.total_kl == pytest.approx(sum(svi.last.kl.values()))


# Trust-region steps

# Where the interaction between sites is weak enough for a limit of 0.01 nats.
MONOTONE = ["chain", "fork", "plate", "global_local", "auxiliary", "mask_scale", "obs_mask", "nested_plates"]


def trust_region(case: Case, number: int = 200, **options: Any) -> TrustRegionSVI:
    case.params()
    pyro.set_rng_seed(0)
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
        assert svi.last is not None
        accepted += svi.last.epochs
        losses.append(float(exact_loss(case.model, case.guide, *case.args)))
    # What the optimiser does to the model is of order 1e-12.
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(losses))
    assert accepted >= 6 and losses[-1] < losses[0] - 0.1


def test_large_steps_do_make_it_rise() -> None:
    """The test above can fail: without a limit to speak of, the same steps raise the objective."""
    case = BY_NAME["chain"]
    svi = trust_region(case, number=4, max_kl=5.0, confidence=0.0)
    losses = [float(exact_loss(case.model, case.guide))]
    for _ in range(12):
        svi.step()
        losses.append(float(exact_loss(case.model, case.guide)))
    assert any(after > before + 1e-3 for before, after in itertools.pairwise(losses))


@pytest.mark.parametrize("name", [*PROGRAMS, "python_branch", "dynamic_sites", "shared_parameters"])
@pytest.mark.parametrize("max_site_kl", [None, 0.002])
def test_accepted_steps_improve_and_keep_the_limits(name: str, max_site_kl: float | None) -> None:
    case = BY_NAME[name]
    svi = trust_region(case, 4, max_kl=0.01, max_site_kl=max_site_kl)
    accepted = 0
    for _ in range(5):
        before = values()
        svi.step(*case.args)
        step = svi.last
        assert step is not None
        if step.epochs:
            accepted += 1
            assert step.improvement > 0.0
            assert 0.0 < step.total_kl <= 0.01
            assert max_site_kl is None or max(step.kl.values()) <= max_site_kl
        else:
            assert step.total_kl == 0.0
            after = values()
            assert all(torch.allclose(after[key], value, atol=1e-9) for key, value in before.items())
    assert accepted > 0


def test_direction_is_the_natural_gradient() -> None:
    """One categorical site: the step is along the inverse Fisher information times the gradient."""
    model, guide = one_site()
    pyro.clear_param_store()
    start = pyro.param("q", torch.tensor([0.1, 0.5, -0.7])).detach().clone()
    elbo = TraceBackpropQ_ELBO(num_particles=2)
    svi = TrustRegionSVI(model, guide, SGD({"lr": 0.1}), elbo, max_kl=1e-6, damping=1e-8, iterations=20)
    probs = start.softmax(-1)
    fisher = torch.diag(probs) - probs.outer(probs)
    twin = copy.deepcopy(elbo)
    pyro.set_rng_seed(1)
    twin.loss_and_grads(model, guide)
    gradient = pyro.param("q").grad.clone()
    pyro.param("q").grad = None
    pyro.set_rng_seed(1)
    svi.step()
    moved = pyro.param("q").detach() - start
    natural = -torch.linalg.pinv(fisher) @ gradient
    cosine = torch.nn.functional.cosine_similarity(moved - moved.mean(), natural - natural.mean(), dim=0)
    assert float(cosine) == pytest.approx(1.0, abs=1e-5)
    assert svi.last is not None and svi.last.total_kl == pytest.approx(0.96e-6, rel=0.03)


def coin(divergence: str) -> tuple[float, float, Any]:
    """One step on a coin whose guide is far from its model; both divergences by the formula."""

    def model() -> None:
        pyro.sample("z", dist.Bernoulli(logits=torch.tensor(2.0)))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(-2.0))))

    fresh()
    svi = TrustRegionSVI(
        model, guide, SGD({"lr": 0.1}), TraceBackpropQ_ELBO(num_particles=2), max_kl=0.4, divergence=divergence
    )
    svi.step()
    old, new = (dist.Bernoulli(logits=q) for q in (torch.tensor(-2.0), pyro.param("q").detach()))
    pairs = ((old, new), (new, old))
    forward, backward = (float(dist.kl.kl_divergence(p, q)) for p, q in pairs)
    return forward, backward, svi.last


def test_the_divergence_in_the_direction_of_the_paper() -> None:
    """Equation 16 limits KL(new || old); a step towards rare values is shorter then."""
    old_forward, old_backward, old_report = coin("old")
    assert old_report.total_kl == pytest.approx(old_forward, abs=1e-12) and old_forward <= 0.4 < old_backward
    new_forward, new_backward, new_report = coin("new")
    assert new_report.total_kl == pytest.approx(new_backward, abs=1e-12) and new_forward < new_backward <= 0.4
    assert new_forward < old_forward


def test_divergence_without_a_formula_comes_from_the_sample() -> None:

    def flow(name: str, shift: Tensor) -> None:
        base, transform = dist.Normal(shift, 1.0), dist.transforms.AffineTransform(0.0, torch.ones(()))
        pyro.sample(name, dist.TransformedDistribution(base, [transform]))

    elbo = TraceBackpropQ_ELBO(num_particles=4)
    svi = ProximalSVI(
        lambda: flow("x", torch.tensor(1.0)),
        lambda: flow("x", pyro.param("shift", torch.tensor(0.0))),
        SGD({"lr": 0.1}),
        elbo,
    )
    svi.step()
    assert svi.last is not None and svi.last.kl["x"] >= 0.0


# Options and the rest of the contract


@pytest.mark.parametrize("make", [ProximalSVI, TrustRegionSVI])
def test_controlled_steps_are_drop_ins(make: Any) -> None:
    case = BY_NAME["global_local"].params()
    pyro.set_rng_seed(0)
    svi = make(case.model, case.guide, Adam({"lr": 0.02}), TraceBackpropQ_ELBO())
    with filtered("error"):
        losses = [svi.step(*case.args) for _ in range(5)]
    assert isinstance(svi, SVI) and all(isinstance(loss, float) for loss in losses)
    assert isinstance(svi.evaluate_loss(*case.args), float)
    assert all(not gradient.any() for gradient in gradients().values())


@pytest.mark.parametrize("make", [ProximalSVI, TrustRegionSVI])
def test_controlled_steps_need_our_elbo(make: Any) -> None:
    case = BY_NAME["chain"]
    with pytest.raises(ValueError, match="TraceBackpropQ_ELBO"):
        make(case.model, case.guide, Adam({}), Trace_ELBO())


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (ProximalSVI, {"epochs": 0}),
        (ProximalSVI, {"clip": 1.0}),
        (ProximalSVI, {"target_kl": 0.0}),
        (TrustRegionSVI, {"max_kl": 0.0}),
        (TrustRegionSVI, {"max_site_kl": -1.0}),
        (TrustRegionSVI, {"damping": -1.0}),
        (TrustRegionSVI, {"iterations": 0}),
        (TrustRegionSVI, {"confidence": -1.0}),
        (TrustRegionSVI, {"divergence": "both"}),
    ],
)
def test_options_out_of_range_are_refused(make: Any, options: dict[str, Any]) -> None:
    case = BY_NAME["chain"]
    with pytest.raises(ValueError, match=next(iter(options))):
        make(case.model, case.guide, Adam({}), TraceBackpropQ_ELBO(), **options)


def test_an_error_in_the_line_search_leaves_the_guide_where_it_was() -> None:
    start: list[Tensor] = []

    def guide() -> None:
        q = pyro.param("q", torch.tensor([0.4, -0.2]))
        if start and not torch.equal(q.detach(), start[0]):
            raise RuntimeError("on purpose")
        with pyro.plate("coins", 2):
            pyro.sample("z", dist.Bernoulli(logits=q))

    def model() -> None:
        with pyro.plate("coins", 2):
            z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.8)))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.ones(2))

    elbo = TraceBackpropQ_ELBO(200, vectorize_particles=True, max_plate_nesting=1)
    svi = TrustRegionSVI(model, guide, SGD({"lr": 0.1}), elbo, max_kl=0.5)
    svi.step()
    (q,) = (leaf for name, leaf in pyro.get_param_store().named_parameters() if name == "q")
    start.append(q.detach().clone())
    with pytest.raises(RuntimeError, match="on purpose"):
        svi.step()
    assert torch.equal(q.detach(), start[0])
    assert q.grad is None or not q.grad.any()
