"""The scale of a control variate, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyro_bpq.estimators.base import SiteContext
from pyro_bpq.estimators.variates import (
    OptimalScale,
    centre,
    read_scale,
    scale_statistics,
    update_means,
    update_scale,
)


def context(count: float, products: tuple[float, float] = (0.0, 0.0), scale: float = 1.0) -> SiteContext:
    statistics = {"products": torch.tensor([products]), "scales": torch.tensor([[scale]])}
    zeros = torch.zeros(1, 1, 4)
    return SiteContext(("z",), zeros, zeros, num_particles=1, statistics=statistics, count=torch.tensor([count]))


def updated(plain: Tensor, variate: Tensor, count: float = 1e6) -> float:
    made = OptimalScale(decay=0.0, max_scale=1.5)
    return float(update_scale(made, context(count), plain, variate)["scales"])


def test_the_scale_is_the_regression_of_the_gradient_on_the_variate() -> None:
    plain, variate = torch.tensor([[[1.0, -2.0, 0.5, 0.0]]]), torch.tensor([[[2.0, -1.0, 1.0, 3.0]]])
    # u·v = 2 + 2 + 0.5, v·v = 4 + 1 + 1 + 9; after a million steps the ridge is gone.
    assert updated(plain, variate) == pytest.approx(4.5 / 15.0, rel=1e-5)


def test_it_stays_between_zero_and_its_bound_and_is_one_without_a_variate() -> None:
    variate = torch.tensor([[[2.0, -1.0, 1.0, 3.0]]])
    assert updated(-variate, variate) == 0.0 and updated(9.0 * variate, variate) == 1.5
    assert updated(variate, torch.zeros_like(variate)) == 1.0


def test_the_first_steps_are_drawn_towards_one() -> None:
    variate = torch.tensor([[[2.0, -1.0, 1.0, 3.0]]])
    # Four samples: a ridge of 3/4 of v·v towards 1, for an optimum of 0.
    assert updated(torch.zeros_like(variate), variate, 0.0) == pytest.approx(0.75 / 1.75)


def test_fixed_scales_have_no_statistics() -> None:
    assert scale_statistics(0.5) == {} and update_scale(0.5, context(1.0), torch.zeros(1), torch.zeros(1)) == {}
    assert read_scale(0.5, context(1.0)).tolist() == [[[0.5]]]
    assert read_scale(OptimalScale(), context(1.0, scale=0.3)).flatten().tolist() == pytest.approx([0.3])


@pytest.mark.parametrize(("product", "share"), [(-1.0, 0.0), (0.0, 0.0), (2.0, 0.5), (4.0, 1.0)])
def test_particles_centre_each_other_as_far_as_their_costs_go_together(product: float, share: float) -> None:
    cost = torch.tensor([[[7.0], [6.0]]])
    statistics = {"means": torch.tensor([[5.0, 0.0]]), "pairs": torch.tensor([[product, 4.0]])}
    made = SiteContext(("z",), cost, cost, num_particles=2, statistics=statistics, count=torch.tensor([9.0]))
    # Less the mean of earlier steps they are 2 and 1; less each other 1 and -1.
    expected = [2.0 - share * 1.0, 1.0 - share * 2.0]
    assert centre(cost, torch.zeros_like(cost), made)[0].flatten().tolist() == pytest.approx(expected)
    new = update_means(cost, torch.zeros_like(cost), made, decay=0.0)
    assert new["pairs"].tolist() == [[2.0, 2.5]] and new["means"].tolist() == [[6.5, 0.0]]
