"""REBAR and RELAX on whole programs: sites downstream, plates, vectors; against the exact gradient."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME, Case
from steps import assert_equal, repeat, run, trained

from pyro_bpq import TraceBackpropQ_ELBO
from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.estimators import REBAR, RELAX, RELAXQ, NetworkVariate, QControlVariate
from pyro_bpq.record import tracer
from pyro_bpq.reruns.at_values import SiteProgramRuns
from pyro_bpq.testing import sample_gradients, z_scores


def worst_z(case: Case | str, estimator: Any, samples: int = 180) -> float:
    """Largest z-score of steps whose standard error is below 0.5 % of the gradient."""
    case = BY_NAME[case] if isinstance(case, str) else case
    elbo = TraceBackpropQ_ELBO(800, vectorize_particles=True, max_plate_nesting=2, estimator=estimator)
    trained(elbo, *case.programs, params=case.params, steps=30).eval()
    found = sample_gradients(elbo, *case.programs, num_samples=samples)
    scores = z_scores(found, case.exact(), max_relative_error=0.005)
    return max(float(z.abs().max()) for name, z in scores.items() if name.startswith(("q", "slope")))


SERVED = [
    # A one-hot site with a site downstream of it, in the same plateless program.
    *(("onehot", REBAR(scale=1.0)), ("vector_layers", REBAR(scale=0.6)), ("global_local", RELAX())),
    *(("onehot", RELAX()), ("plate", REBAR()), ("nested_plates", REBAR(scale=0.5)), ("mask_scale", REBAR())),
    *(("chain", RELAX()), ("chain", RELAXQ()), ("chain", QControlVariate())),
]


@pytest.mark.parametrize(("name", "estimator"), SERVED, ids=str)
def test_step_is_unbiased(name: str, estimator: Any) -> None:
    assert worst_z(name, estimator) < 4


def branches_guide() -> None:
    for i in "12":
        a = pyro.sample("a" + i, dist.Bernoulli(logits=pyro.param("q" + i)))
        pyro.sample("b" + i, dist.Bernoulli(logits=2.0 * a + pyro.param("slope" + i)))


def branches_model() -> None:
    for i in "12":
        a = pyro.sample("a" + i, dist.Bernoulli(torch.tensor(0.4)))
        b = pyro.sample("b" + i, dist.Bernoulli(torch.tensor(0.7)))
        pyro.factor("f" + i, 2.0 * a * b - b - 0.5 * a)


def test_sites_downstream_of_each_site_of_a_class_take_values_of_its_own_run() -> None:
    case = Case("branches", branches_model, branches_guide, dict.fromkeys(("q1", "q2", "slope1", "slope2"), ()))
    assert worst_z(case, REBAR(scale=1.0)) < 4


def test_draws_downstream_that_follow_the_relaxed_value_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiteProgramRuns, "held", lambda self, value: self)
    assert worst_z("vector_layers", REBAR(scale=1.0)) > 6


def test_rounding_in_the_log_probability_of_a_one_hot_site_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "relaxed_log_prob", lambda fn, value: fn.log_prob(value))
    assert worst_z("onehot", REBAR(scale=1.0)) > 6


def test_network_learns_and_is_saved() -> None:
    case = BY_NAME["global_local"].params()
    elbos = [TraceBackpropQ_ELBO(estimator=RELAX(NetworkVariate((4,)))) for _ in range(2)]
    repeat(5, elbos[0].loss_and_grads, *case.programs)
    weights = [value for name, value in elbos[0].state_dict().items() if name.endswith("phi")]
    assert len(weights) == 2 and all(bool(value[:, -4:].any()) for value in weights)
    elbos[1].load_state_dict(elbos[0].state_dict())
    assert_equal(*(run(elbo, case, 1) for elbo in elbos))


def test_rebar_of_a_categorical_names_what_to_write() -> None:
    case = BY_NAME["constrained"].params()
    with pytest.raises(UnsupportedSiteError, match=r"'k'.*OneHotCategorical, RELAX\(\) or AllAction\(\)"):
        TraceBackpropQ_ELBO(estimator=REBAR()).loss_and_grads(case.model, case.guide)
