"""Finite components: splitting a distribution into them, and back."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import pytest
import torch
from models import Die

from pyro_bpq.rollout.features import Components, encode_real, family_of, finite_components, have_same_values

LOGITS = torch.tensor([[0.3, -0.4, 1.1], [0.0, 0.9, -0.6]], dtype=torch.float64)
MASK = torch.tensor([True, False])

FINITE: list[tuple[str, Any, Components]] = [
    ("bernoulli", lambda: dist.Bernoulli(logits=LOGITS[:, 0]), Components("bernoulli", (), 2)),
    ("bernoulli_vector", lambda: dist.Bernoulli(logits=LOGITS).to_event(1), Components("bernoulli", (3,), 2)),
    ("bernoulli_matrix", lambda: dist.Bernoulli(logits=LOGITS).to_event(2), Components("bernoulli", (2, 3), 2)),
    ("categorical", lambda: dist.Categorical(logits=LOGITS), Components("categorical", (), 3)),
    ("categorical_vector", lambda: dist.Categorical(logits=LOGITS).to_event(1), Components("categorical", (2,), 3)),
    ("one_hot", lambda: dist.OneHotCategorical(logits=LOGITS), Components("one_hot", (), 3)),
    ("one_hot_vector", lambda: dist.OneHotCategorical(logits=LOGITS).to_event(1), Components("one_hot", (2,), 3)),
    ("binomial", lambda: dist.Binomial(total_count=3, logits=LOGITS[:, 0]), Components("support", (), 4)),
    ("masked", lambda: dist.Bernoulli(logits=LOGITS[:, 0]).mask(MASK), Components("bernoulli", (), 2)),
    ("masked_vector", lambda: dist.Bernoulli(logits=LOGITS).to_event(1).mask(False), Components("bernoulli", (3,), 2)),
    ("expanded", lambda: dist.Categorical(logits=LOGITS[0]).expand([2]), Components("categorical", (), 3)),
]
each = pytest.mark.parametrize(("make", "expected"), [pytest.param(f, c, id=n) for n, f, c in FINITE])


@each
def test_finite_components_of_each_kind(make: Any, expected: Components) -> None:
    assert finite_components(make()) == expected


def test_a_long_support_is_not_made_to_be_counted() -> None:
    fn = dist.Binomial(10**9, logits=torch.zeros(2))
    assert finite_components(fn) == Components("support", (), 10**9 + 1)


@pytest.mark.parametrize(
    "fn",
    [
        dist.Normal(0.0, 1.0),
        dist.Poisson(1.0),
        dist.OneHotCategoricalStraightThrough(logits=LOGITS),
        dist.Binomial(total_count=torch.tensor([2.0, 2.0]), probs=0.5).to_event(1),
        dist.Binomial(total_count=torch.tensor([2.0, 3.0]), probs=0.5),
        dist.BetaBinomial(1.0, 1.0, total_count=torch.tensor([2.0, 3.0])),
        dist.Multinomial(3, logits=LOGITS),
        dist.MixtureSameFamily(dist.Categorical(logits=LOGITS[0]), dist.Normal(torch.zeros(3), 1.0)),
        dist.Delta(torch.tensor(1.0)),
        # Costs of components that are masked one by one do not follow from the logits and a mask of the batch.
        dist.Bernoulli(logits=LOGITS).mask(torch.tensor([True, False, True])).to_event(1),
        dist.Empirical(torch.tensor([1.0, 2.0]), torch.zeros(2)),  # it takes one value at a time
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_finite_components_is_none_where_there_are_none(fn: Any) -> None:
    assert finite_components(fn) is None


@each
def test_log_probs_at_the_index_sum_to_log_prob_and_values_invert_it(make: Any, expected: Components) -> None:
    fn = make()
    base = fn
    while hasattr(base, "base_dist") and "Masked" in type(base).__name__:
        base = base.base_dist
    torch.manual_seed(0)
    for _ in range(10):
        value = fn.sample()
        index = expected.index(value, fn)
        assert index.shape == (*fn.batch_shape, expected.size) and index.dtype == torch.long
        table = expected.log_probs(expected.parameters(fn))
        found = table.gather(-1, index.unsqueeze(-1)).squeeze(-1).sum(-1)
        torch.testing.assert_close(found, base.log_prob(value).expand(found.shape))
        again = expected.value(index, fn).to(value.dtype)
        assert again.shape == value.shape and torch.equal(again, value)
    assert expected.index(value.expand(4, *value.shape), fn).shape == (4, *index.shape)


def test_value_of_a_single_component_without_batch() -> None:
    split = Components("bernoulli", (), 2)
    assert split.value(torch.tensor([1])).shape == ()


def test_encode_real_is_odd_and_grows_slowly() -> None:
    value = torch.tensor([-1e6, -1e-4, 0.0, 1e-4, 1e6])
    found = encode_real(value)
    torch.testing.assert_close(found, -encode_real(-value))
    assert found[3] == pytest.approx(1e-4) and found[4] < 20.0


def test_supports_of_other_values_or_of_another_order_differ() -> None:
    logits = torch.zeros(3)
    first, second, same = (
        Die(logits, torch.tensor(faces)) for faces in ([1.0, 2.0, 4.0], [4.0, 1.0, 2.0], [1.0, 2.0, 4.0])
    )
    assert have_same_values(first, same) and not have_same_values(first, second)


def test_subclasses_of_wrappers_are_taken_off_too() -> None:
    class Mine(dist.Independent):
        """A wrapper of a user's own."""

    fn = Mine(dist.Bernoulli(logits=torch.tensor([0.3, -0.2])), 1)
    split = finite_components(fn)
    assert split is not None and split.parameters(fn) is fn.base_dist.logits
    assert family_of(fn)[0] is dist.Bernoulli
