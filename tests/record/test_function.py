"""Functions cut out of a recording."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyro_bpq.record.function import flat

# Programs, and whether they write into what they were given.
PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "new memory": (lambda x: torch.ones_like(x).sub_(x)[1:].mul_(2.0), False),
    "a view of what was made": (lambda x: x.exp().view(3, 1)[1:].add_(x[1:, None]).mul_(2.0), False),
    "out": (lambda x: torch.mul(2.0, torch.exp(x), out=torch.empty(3)), False),
    "a view": (lambda x: x.view(-1)[1:].mul_(2.0), True),
    "a part": (lambda x: x.unsafe_chunk(3)[1].add_(1.0), True),
    "what comes back": (lambda x: torch.nn.functional.dropout(x, 0.5, training=False).mul_(2.0), True),
    "set memory": (lambda x: torch.empty(0).set_(x).mul_(2.0), True),
}


@pytest.mark.parametrize("infers", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_given_stays_and_is_copied_only_where_it_must_be(name: str, infers: bool) -> None:
    (program, spoils), given = PROGRAMS[name], torch.tensor([1.0, 2.0, 3.0])
    with torch.inference_mode(infers):
        function = flat(lambda x: [program(x)], [given.clone()])
        wanted = program(given.clone())
        for _ in range(2):
            (found,) = function.at({function.given[0]: given})
            torch.testing.assert_close(found, wanted)
    assert given.tolist() == [1.0, 2.0, 3.0] and function.spoils is spoils
