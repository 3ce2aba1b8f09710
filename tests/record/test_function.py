"""Functions cut out of a recording."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyro_bpq.record.function import flat


def in_new_memory(x: Tensor) -> Tensor:
    return torch.ones_like(x).sub_(x)[1:].mul_(2.0)


def in_a_view(x: Tensor) -> Tensor:
    return x.view(-1)[1:].mul_(2.0)


def in_a_view_of_what_was_made(x: Tensor) -> Tensor:
    return x.exp().view(3, 1)[1:].add_(x[1:, None]).mul_(2.0)


def in_a_part(x: Tensor) -> Tensor:
    return x.unsafe_chunk(3)[1].add_(1.0)


def in_what_comes_back(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5, training=False).mul_(2.0)


def in_set_memory(x: Tensor) -> Tensor:
    return torch.empty(0).set_(x).mul_(2.0)


def by_out(x: Tensor) -> Tensor:
    return torch.mul(2.0, torch.exp(x), out=torch.empty(3))


SPOILING = (in_a_view, in_a_part, in_what_comes_back, in_set_memory)


@pytest.mark.parametrize("infers", [False, True])
@pytest.mark.parametrize("program", [in_new_memory, in_a_view_of_what_was_made, by_out, *SPOILING])
def test_what_is_given_stays_and_is_copied_only_where_it_must_be(
    program: Callable[[Tensor], Tensor], infers: bool
) -> None:
    with torch.inference_mode(infers):
        check(program)


def check(program: Callable[[Tensor], Tensor]) -> None:
    given = torch.tensor([1.0, 2.0, 3.0])
    function = flat(lambda x: [program(x)], [given.clone()])
    wanted = program(given.clone())
    for _ in range(2):
        (found,) = function.at({function.given[0]: given})
        torch.testing.assert_close(found, wanted)
    assert given.tolist() == [1.0, 2.0, 3.0] and function.spoils == (program in SPOILING)
