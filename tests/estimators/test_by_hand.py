"""What enumeration does not show, since it changes no mean: numbers by hand of scales, variates and made-up slopes."""

from __future__ import annotations

from dataclasses import replace

import pyro
import pyro.distributions as dist
import torch
from steps import CHAIN, trained
from torch import Tensor

from pyro_bpq import ExpectedCost, ScoreFunction, SlowTracking, TraceBackpropQ_ELBO
from pyro_bpq import cost as charge
from pyro_bpq.estimators import CriticBaseline, CrossedLeaveOneOut, NetworkVariate, QProp, ReinMax
from pyro_bpq.estimators.all_action import CRITIC, _moment_terms
from pyro_bpq.estimators.relax import _features
from pyro_bpq.estimators.relaxation import signs
from pyro_bpq.rollout.features import Standardised
from pyro_bpq.testing.contract import default_problems, with_statistics


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_mean_change_of_crossed_costs_is_subtracted() -> None:
    context, _ = default_problems()[0].context((4,))
    estimator, change = CrossedLeaveOneOut(), drawn(*context.cost.shape)
    known = {"moments": torch.tensor([[0.3, 0.2, 1.09]], dtype=torch.float64).expand(2, 3)}
    filled = replace(with_statistics(estimator, context, learned=known), signals={"crossed": change})
    cost = context.cost
    # Two particles: the other one is the baseline. The scale is 0.2 / (1.09 - 0.3²).
    wanted = (cost - cost.flip(1) - 0.2 * (change - 0.3)) * context.score
    torch.testing.assert_close(estimator(filled).surrogate, wanted)


def test_rows_are_charged_with_their_own_costs() -> None:
    logits = drawn(3).requires_grad_()
    weights, values = torch.tensor([1.0, 10.0, 1e6], dtype=torch.float64), []

    def program() -> None:
        with pyro.plate("rows", 3):
            z = pyro.sample("z", dist.Bernoulli(logits=logits))
            charge("c", weights * (1.0 + z))
        values.append(z)

    ExpectedCost(1, estimator=ScoreFunction(None), critic=None).loss_and_grads(None, program)
    z = values[-1]
    torch.testing.assert_close(logits.grad, weights * (1.0 + z) * (z - logits.detach().sigmoid()))


def test_signs_are_even() -> None:
    found = signs(torch.zeros(1000), torch.Generator().manual_seed(0))
    assert found.unique().tolist() == [-1.0, 1.0]
    assert abs(float(found.mean())) < 4.0 / 1000**0.5


def test_reinmax_keeps_one_hot_components_apart() -> None:
    values, logits = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]).double(), drawn(2, 3)

    def slope(rows: slice) -> Tensor:
        own = logits[rows].clone().requires_grad_()
        fn = dist.OneHotCategorical(logits=own).to_event(1)
        value = ReinMax().attach(fn, values[rows], torch.Generator())
        return torch.autograd.grad((value * drawn(2, 3, seed=1)[rows]).sum(), own)[0]

    torch.testing.assert_close(slope(slice(0, 2)), torch.cat([slope(slice(0, 1)), slope(slice(1, 2))]))


def test_the_guide_is_not_followed_by_default() -> None:
    assert not SlowTracking().guide


def test_a_baseline_that_reads_critics_gets_them() -> None:
    elbo = TraceBackpropQ_ELBO(1, estimator=CriticBaseline())
    trained(elbo, CHAIN.model, CHAIN.guide, params=CHAIN.params, steps=2)
    assert any("MLPCritic" in block.kind for block in elbo.critics.blocks.values())


def test_a_critic_of_the_moments_is_differentiated_to_mean_and_log_deviation() -> None:
    """Of ``g e + ½ h (e² - 1)``: ``d/dμ = g / σ``, and ``d/dlog σ`` of ``½ h σ² / s²`` is ``h``, at ``σ = s``."""
    context, _ = default_problems()[0].context((4,))
    learned, powers = drawn(2, 2, 4, 1, 2), drawn(2, 2, 4, 1, 2, seed=1)
    moments = Standardised(*[powers] * len(Standardised._fields))
    own = context.cost * 0.3
    filled = replace(with_statistics(QProp(), context), learned=learned, moments=moments, own=own)
    offset = _moment_terms(filled).offsets[CRITIC]
    torch.testing.assert_close(offset, torch.stack((learned[..., 0], 2.0 * learned[..., 1]), -1))


def test_a_network_variate_starts_at_zero_with_weights_that_are_not() -> None:
    variate = NetworkVariate((3,))
    known = variate.statistics(2, extra=1)
    first, rest = known["phi"][: 2 * 3], known["phi"][2 * 3 :]
    assert known["spread"] == 1.0 and bool((first != 0.0).all()) and not bool(rest.any())
    assert len(rest) == 3 + (3 + 1) + 1


def test_relaxed_values_are_centred() -> None:
    logits, none = drawn(1, 1, 5, 2), torch.zeros(1, 1, 5, 2, dtype=torch.long)
    found = _features(4.0 * logits, logits, torch.tensor(0.5).double(), none)
    torch.testing.assert_close(found, torch.cat((2.0 * (8.0 * logits).sigmoid() - 1.0, logits / 2.0), -1))
