"""Weights of the sum by distance, and the parents' critics as baseline: unbiased with the whole return alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import BY_NAME
from problems import scrambled
from steps import CHAIN, settled, stepped

from pyro_bpq import AllAction, TabularCritic, TraceBackpropQ_ELBO
from pyro_bpq.critics import targets as module
from pyro_bpq.errors import OptionError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.estimators import LambdaReturn, ParentAdvantage, ScoreFunction
from pyro_bpq.testing import assert_unbiased, expected_gradient, expected_moments

PROGRAMS = ["chain", "fork", "diamond", "plate", "discrete_above_reparam", "global_local", "reparam_above_discrete"]
WHOLE = [(ParentAdvantage(1.0), name) for name in PROGRAMS]
WHOLE.insert(3, (LambdaReturn(1.0), "chain"))


@pytest.mark.parametrize(("estimator", "name"), WHOLE, ids=str)
def test_the_whole_return_is_unbiased(estimator: Any, name: str) -> None:
    case = BY_NAME[name]
    assert_unbiased(scrambled(case, 20, estimator=estimator), *case.programs)


@pytest.mark.parametrize("estimator", [ParentAdvantage(0.9), *map(LambdaReturn, (0.0, 0.5, 0.9))], ids=repr)
def test_without_the_whole_return_critics_bias_it(estimator: Any) -> None:
    assert not estimator.is_unbiased
    with pytest.raises(AssertionError, match="biased"):
        assert_unbiased(scrambled(CHAIN, 20, estimator=estimator), *CHAIN.programs)


def test_a_baseline_that_reads_the_value_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(network: Any, site: str, q: Any, *_: Any) -> Any:
        return 0.5 * sum((q[node.name] for node in network.q_nodes(site) if node.name in q), torch.zeros(()))

    monkeypatch.setattr(module, "_baseline", own)
    with pytest.raises(AssertionError, match="biased"):
        assert_unbiased(scrambled(CHAIN, estimator=ParentAdvantage(1.0)), *CHAIN.programs)


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_with_critics_that_are_right_nothing_is_off(lam: float) -> None:
    """The sum over values with the same critics has their bias alone; so has the advantage, whatever the baseline."""
    elbo = settled(CHAIN, 20, estimator=ParentAdvantage(lam), critic=TabularCritic(), lam=0.0).eval()
    found = expected_gradient(elbo, *CHAIN.programs)
    for block in elbo.critics.blocks.values():
        # A constant added to the Q-function of the first site, which is nobody's child, moves a baseline alone.
        if block.critic is not None and any(key.startswith("a") for key in block.keys):
            row = next(i for i, key in enumerate(block.keys) if key.startswith("a"))
            with torch.no_grad():
                block.critic.table[row] += 3.0
    other = expected_gradient(elbo, *CHAIN.programs)
    for name in ("qb", "qc"):
        assert float(found[name].abs().max()) > 1e-3
        torch.testing.assert_close(other[name], found[name], rtol=0.0, atol=1e-10)


def test_the_baseline_lowers_the_variance() -> None:
    variance = {}
    for estimator in (ParentAdvantage(1.0), ScoreFunction(), AllAction()):
        moments = expected_moments(settled(CHAIN, 30, estimator=estimator).eval(), *CHAIN.programs)
        variance[type(estimator)] = sum(float(moments.variance[name].sum()) for name in ("qa", "qb", "qc"))
    # The first site has no parent; the sum over its values needs none.
    assert variance[AllAction] < variance[ParentAdvantage] < 0.8 * variance[ScoreFunction]


def test_refusals_say_what_to_write() -> None:
    case = BY_NAME["chain"].params()
    with pytest.raises(UnsupportedSiteError, match=r"'a'.*MLPCritic"):
        TraceBackpropQ_ELBO(estimator=ParentAdvantage(), critic=None).loss_and_grads(case.model, case.guide)
    with pytest.raises(OptionError, match=r"ParentAdvantage takes no discount; write gamma=1\.0"):
        TraceBackpropQ_ELBO(estimator=ParentAdvantage(), gamma=0.9).loss_and_grads(case.model, case.guide)
    case = BY_NAME["python_branch"].params()
    with pytest.raises(UnsupportedProgramError, match="LambdaReturn"):
        stepped(3, TraceBackpropQ_ELBO(estimator=ParentAdvantage()), case.model, case.guide)
