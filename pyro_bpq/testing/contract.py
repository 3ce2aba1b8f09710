r"""The contract of every estimator: one check for the package's own estimators and for those of others."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_bpq.estimators.base import Estimator, SiteInfo
from pyro_bpq.rollout.features import Components
from pyro_bpq.testing.problems import Problem, with_statistics

_WARM_UP = 3
_LATER = 0.1
_POWER = 0.005


def default_problems() -> tuple[Problem, ...]:
    """Sites of one and of several components, of all kinds, with smooth and non-smooth costs."""
    return (
        Problem("bernoulli", size=2),
        Problem("bernoulli", size=1, is_scalar=True),
        Problem("bernoulli", size=2, is_smooth=False),
        Problem("categorical", size=2, cardinality=3),
        Problem("categorical", size=1, cardinality=4, is_scalar=True),
        Problem("one_hot", size=2, cardinality=3),
        Problem("one_hot", size=1, cardinality=4, is_scalar=True),
    )


def check_estimator(estimator: Estimator, *, num_rows: int = 40_000, problems: Sequence[Problem] | None = None) -> None:
    r"""Checks that an estimator follows the protocol, and that it is unbiased if it declares so.

    The estimator must be an immutable value. For a site that it does not support it must say what to write instead. It
    must give finite gradients in both precisions, for all shapes of plates. It must keep sites apart. It must return
    detached statistics of the right shape. An unbiased estimator must have the exact gradient as its mean. The mean is
    over all values of two particles, and over samples of its own noise and of noise from downstream, within four
    standard errors. These are small enough to show a bias of two percent. The check uses sites of one and of several
    Bernoulli, Categorical and OneHotCategorical components, with smooth and non-smooth costs, meaningless critics, and
    running statistics that earlier steps have moved.

    Args:
        estimator: The estimator.
        num_rows: Number of independent calls per site if the estimator draws noise; more if standard errors are too
            large.
        problems: The sites, by default those of :func:`default_problems`; unsupported ones are left out.

    Raises:
        AssertionError: If a check fails; the message says which.
    """
    problems = default_problems() if problems is None else problems
    _check_value(estimator)
    _check_unsupported(estimator, problems)
    if estimator.is_pathwise:
        _check_pathwise(estimator)
        return
    for problem in problems:
        if estimator.unsupported(problem.info) is None:
            _check_calls(estimator, problem)
            _check_sites_apart(estimator, problem)
            if estimator.is_unbiased:
                check_unbiased(estimator, problem, num_rows)


def check_unbiased(estimator: Estimator, problem: Problem, num_rows: int = 40_000) -> None:
    """Checks the mean gradient of an estimator on one problem, see :func:`check_estimator`."""
    largest, error = largest_z_score(estimator, problem, num_rows)
    if _POWER < error < 4.0 * _POWER:
        largest, error = largest_z_score(estimator, problem, int(1.3 * num_rows * (error / _POWER) ** 2))
    assert error < _POWER, f"{estimator}: standard errors of {error:.1%} of the gradient; use more rows. {problem}"
    assert largest < 4.0, f"{estimator} is biased: {largest:.1f} standard errors off the exact gradient on {problem}."


def largest_z_score(estimator: Estimator, problem: Problem, num_rows: int = 40_000) -> tuple[float, float]:
    """Distance of an estimator's mean gradient from the exact gradient.

    The values of all particles are enumerated; noise of the estimator and from downstream is sampled.

    Returns:
        Largest distance in standard errors, and the largest standard error in units of the gradient's largest
        component. Standard errors count as at least 1e-10 of that component, for estimators without noise.
    """
    later = _LATER if "program" in estimator.needs else 0.0
    context, _ = problem.context((64,), seed=100)
    statistics = dict(with_statistics(estimator, context).statistics)
    for step in range(_WARM_UP):
        context, _ = problem.context((64,), seed=101 + step, later=_LATER)
        context = replace(with_statistics(estimator, context, float(step)), statistics=statistics)
        statistics.update(estimator.at(step)(context).statistics)
    outcomes, probabilities = problem.outcomes(problem.particles)
    rows = (len(outcomes), max(num_rows // len(outcomes), 2) if "program" in estimator.needs else 2)
    index = outcomes.transpose(0, 1).reshape(1, problem.particles, rows[0], 1, problem.size)
    index = index.expand(problem.sites, -1, -1, rows[1], -1)
    context, leaf = problem.context(rows, seed=7, later=later, index=index)
    context = replace(with_statistics(estimator, context, float(_WARM_UP)), statistics=statistics)
    (gradient,) = torch.autograd.grad(estimator.at(_WARM_UP)(context).surrogate.sum(), leaf)
    samples, exact = gradient.sum(1), problem.particles * problem.exact_gradient()
    weights = probabilities[..., None, None]
    error = (weights.square() * samples.var(2) / rows[1]).sum(1).sqrt()
    scale = float(exact.abs().max())
    distance = ((weights * samples.mean(2)).sum(1) - exact).abs()
    return float((distance / error.clamp(min=1e-10 * scale)).max()), float(error.max()) / scale


def _check_value(estimator: Any) -> None:
    assert not isinstance(estimator, type), f"{estimator!r} is a class; write an object such as AllAction()."
    assert isinstance(estimator, Estimator), f"{estimator!r} is no estimator; derive its class from Estimator."
    again = copy.deepcopy(estimator)
    assert again == estimator and hash(again) == hash(estimator), f"{estimator!r} is no value: its copy differs."
    thing: Any = estimator
    try:
        thing.is_unbiased = not thing.is_unbiased
    except AttributeError:
        return
    raise AssertionError(f"{type(estimator).__name__} is not immutable; write @dataclass(frozen=True).")


def _check_unsupported(estimator: Estimator, problems: Sequence[Problem]) -> None:
    sites = [
        SiteInfo("z", "Normal", True, None, 1),
        SiteInfo("z", "Poisson", False, None, 1),
        SiteInfo("z", "Gamma", True, None, 1),
        SiteInfo("z", "Categorical", False, Components("categorical", (), 50_000), 1),
        SiteInfo("z", "Bernoulli", False, Components("bernoulli", (), 2), 2),
        *(problem.info for problem in problems),
    ]
    reasons = [estimator.unsupported(site) for site in sites]
    for reason in reasons:
        says = reason is None or "use " in reason or "write " in reason
        assert says, f"{estimator!r} does not say what to write instead: {reason!r}"
    assert None in reasons, f"{estimator!r} supports none of {[site.distribution for site in sites]}."


def _check_pathwise(estimator: Any) -> None:
    context, _ = default_problems()[0].context((3,))
    assert not estimator(context).surrogate.any(), f"{estimator!r} is pathwise but adds a surrogate term."
    for fn, leaf in _distributions():
        split = Components("bernoulli" if isinstance(fn, dist.Bernoulli) else "one_hot", (), fn.event_shape.numel())
        if estimator.unsupported(SiteInfo("z", type(fn).__name__, False, split, 1)) is not None:
            continue
        drawn = fn.sample()
        value = estimator.at(0).attach(fn, drawn, torch.Generator().manual_seed(0))
        assert torch.equal(value.detach(), drawn), f"{estimator!r} changes the drawn value."
        (gradient,) = torch.autograd.grad(
            (value * torch.linspace(0.5, 2.0, drawn.numel()).reshape(drawn.shape)).sum(), leaf
        )
        assert bool(gradient.isfinite().all()) and bool(gradient.any()), f"{estimator!r} attaches no gradient."


def _distributions() -> Iterator[tuple[Any, Tensor]]:
    for cls, shape in ((dist.Bernoulli, (4,)), (dist.OneHotCategorical, (4, 3))):
        leaf = torch.linspace(-1.0, 1.0, math.prod(shape)).reshape(shape).requires_grad_()
        yield cls(logits=leaf), leaf


def _check_calls(estimator: Estimator, problem: Problem) -> None:
    for dtype in (torch.float32, torch.float64):
        for rows in ((), (5,), (2, 3)):
            context, leaf = problem.context(rows, dtype=dtype)
            context = with_statistics(estimator, context)
            term = estimator.at(0)(context)
            (gradient,) = torch.autograd.grad(term.surrogate.sum(), leaf)
            where = f"{estimator!r} with {problem}, rows {rows}, {dtype}"
            assert gradient.dtype == dtype and bool(gradient.isfinite().all()), f"{where}: gradient {gradient}"
            # A biased estimator may not see a cost without slope.
            may_vanish = not rows or not (estimator.is_unbiased or problem.is_smooth)
            assert may_vanish or bool(gradient.any()), f"{where}: the gradient is zero."
            assert set(term.statistics) <= set(context.statistics), f"{where}: statistics that it did not announce."
            for name, value in term.statistics.items():
                old = context.statistics[name]
                assert value.shape == old.shape and value.dtype == dtype, f"{where}: statistic {name!r} {value}"
                assert bool(value.isfinite().all()) and not value.requires_grad, f"{where}: statistic {name!r} {value}"


def _check_sites_apart(estimator: Estimator, problem: Problem) -> None:
    """Changes values and costs of the second site; checks that the gradient of the first stays the same."""
    gradients = []
    for seed in (0, 1):
        contexts = [problem.context((6,), seed=each)[0] for each in (0, seed)]
        index = torch.stack([torch.as_tensor(context.index)[i] for i, context in enumerate(contexts)])
        context, leaf = problem.context((6,), index=index)
        cost = torch.stack([context.cost[i] for i, context in enumerate(contexts)])
        context = with_statistics(estimator, replace(context, cost=cost))
        (gradient,) = torch.autograd.grad(estimator.at(0)(context).surrogate.sum(), leaf)
        gradients.append(gradient)
    first, second = gradients
    same = torch.allclose(first[0], second[0], rtol=1e-9, atol=1e-12)
    assert same, f"{estimator!r}: the cost of one site enters the gradient of another. {problem}"
