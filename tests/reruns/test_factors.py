"""Names of costs that are sums over values."""

from __future__ import annotations

import pytest

from pyro_bpq.reruns.enumeration import Recipe


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (Recipe(("x",)), "-log p(x)"),
        (Recipe(("z",), is_guide=True), "log q(z)"),
        (Recipe(("x",), averaged=("z",)), "E[-log p(x)]"),
        (Recipe(("x", "z"), summed=("z",)), "-log sum(z)"),
        (Recipe(("x",), summed=("a", "b", "c", "d"), averaged=("z",)), "E[-log sum(a, b, c, ...)]"),
    ],
)
def test_names_say_how_a_cost_is_made(recipe: Recipe, name: str) -> None:
    assert recipe.name == name
