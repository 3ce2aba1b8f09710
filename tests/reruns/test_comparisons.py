"""Values at which runs are compared vary, lie in the support, and differ where they should."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import pytest
import torch

from pyro_bpq.reruns.comparisons import Kind, contrasted, probe, probe_generator
from pyro_bpq.rollout.features import finite_components


@pytest.mark.parametrize(
    "fn",
    [
        dist.Bernoulli(torch.full((5,), 0.999)),
        dist.Categorical(torch.tensor([1e-6, 1.0, 1e-6])),
        dist.OneHotCategorical(torch.tensor([[1e-6, 1.0, 1e-6]] * 4)),
        dist.Bernoulli(torch.full((2, 5), 1e-9)).to_event(1),
        dist.Poisson(torch.tensor(1e-6)),
        dist.Geometric(torch.tensor(0.9999)),
        dist.Binomial(3, torch.tensor(1e-9)),
        dist.Normal(torch.zeros(3), 1.0),
        dist.Dirichlet(torch.ones(3)),
        dist.Multinomial(4, torch.ones(3)),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_probes_vary_and_lie_in_the_support(fn: Any) -> None:
    value, state = fn.sample(), torch.get_rng_state()
    drawn = probe(fn, value.expand(64, *value.shape), [Kind.EVEN] * 64, torch.Generator().manual_seed(0))
    assert drawn.shape == (64, *value.shape) and drawn.dtype == value.dtype
    assert bool(fn.support.check(drawn).all())
    assert len({tuple(row.reshape(-1).tolist()) for row in drawn}) > 1
    kinds = [Kind.FIRST, Kind.LAST, Kind.SAMPLED, Kind.EVEN]
    first, last, sampled, _ = probe(fn, value.expand(4, *value.shape), kinds, torch.Generator().manual_seed(0))
    assert torch.equal(sampled, value)
    split = finite_components(fn)
    if split is not None:
        assert (split.index(first, fn) == 0).all() and (split.index(last, fn) == split.cardinality - 1).all()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "fn",
    [
        dist.Bernoulli(torch.full((4, 3), 0.5)),
        dist.Bernoulli(torch.full((4, 3, 2), 0.5)).to_event(1),
        dist.Categorical(torch.ones(4, 3, 5)),
        dist.OneHotCategorical(torch.ones(4, 3, 5)),
        dist.OneHotCategorical(torch.ones(4, 3, 2, 5)).to_event(1),
    ],
    ids=repr,
)
def test_one_particle_differs_from_all_others_and_from_the_last(fn: Any) -> None:
    split, generator = finite_components(fn), probe_generator(0)
    value, last = fn.sample(), 2
    assert split is not None
    for index in (1, 3, 1, 0):
        new = contrasted(fn, value, Kind.EVEN, last, index, generator)
        assert new.shape == value.shape and new.dtype == value.dtype and fn.support.check(new).all()
        before, after = split.index(value, fn), split.index(new, fn)
        assert (after[index] != before[last]).all()
        assert all((after[i] != after[index]).all() for i in range(4) if i != index)
        value, last = new, index
    for kind, expected in ((Kind.FIRST, 0), (Kind.LAST, split.cardinality - 1)):
        after = split.index(contrasted(fn, value, kind, last, 1, generator), fn)
        assert (after[1] == expected).all() and all((after[i] != expected).all() for i in (0, 2, 3))
