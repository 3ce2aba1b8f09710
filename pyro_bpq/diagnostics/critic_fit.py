r"""Measures how well critics explain costs, and how far the gradient by Q is from the true gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.diagnostics.moments import GradientMoments, measured
from pyro_bpq.diagnostics.sampling import untouched
from pyro_bpq.errors import OptionError
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.rollout.runs import Program
from pyro_bpq.short import number, table
from pyro_bpq.step.signals import Signals
from pyro_bpq.testing import Moments

_LEARNED, _EXACT = "learned", "exact"
_LEGEND = (
    "explained variance compares the critic's predictions with the costs that then came, between samples of the same",
    "    data point: 1 if it predicts all of their differences, 0 if no more than a constant does.",
    "cosine and difference compare the gradient that the critic alone would give with the site's true gradient:",
    "    1 and 0 if they are the same; a constant critic has difference 1.",
    "Costs that are known exactly at every value are left out of both.",
)


@dataclass(frozen=True)
class Fit:
    r"""Quality of the critic of a site.

    Args:
        explained: Explained variance within a data point, ``1 - Var(target - q) / Var(target)``: it compares the
            critic's predictions with the costs that then came, between samples of the same data point. These costs
            are the target, the return with graph-wise corrections (lambda = 1) and without the costs that are known
            exactly. A constant critic has 0.
        cosine: Cosine between the critic's all-action gradient and its reference. The reference is the site's true
            gradient without the part of the exact immediate costs. ``None`` if there is no all-action gradient, or if
            the reference is zero up to noise.
        difference: Norm of the difference between the critic's gradient and the reference, over the norm of the
            reference, or ``None``. A constant critic has 1.
        difference_error: Size that the difference would have from sampling alone; 0 if exact.
    """

    explained: float | None = None
    cosine: float | None = None
    difference: float | None = None
    difference_error: float = 0.0


@dataclass(frozen=True)
class CriticFit:
    """Quality of the critics of a program.

    Args:
        sites: Quality of each critic, by name of the site.
        moments: Moments of the gradient, from the same runs.
    """

    sites: dict[str, Fit]
    moments: GradientMoments

    def __str__(self) -> str:
        how = "exact" if self.moments.is_exact else f"from {self.moments.num_samples} steps"
        rows = [[site, *map(number, astuple(fit))] for site, fit in self.sites.items()]
        head = ["site", "explained variance", "cosine", "difference", "its error"]
        return "\n".join([f"Critics ({how}):", *table(head, rows), *_LEGEND])


def critic_fit(
    elbo: TraceBackpropQ_ELBO,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 100,
    exact: bool | str = "auto",
    num_outcomes: int = 500,
    seed: int = 0,
    **kwargs: Any,
) -> CriticFit:
    r"""Compares critics with the costs that they predict, at the present parameters; nothing learns.

        g_A = E Σ_d Σ_k ∇q_d(k) A_X[d,k]   against   E[g_X] - E Σ_d Σ_k ∇q_d(k) I_X[d,k]

    ``g_A`` is the all-action gradient that treats the critic as the remaining cost, without a correction. It is exact
    with the true Q and biased otherwise. ``g_X`` is the site's summand of the gradient; its expectation is the true
    gradient if the site's estimator is unbiased. ``I_X`` are the site's exact immediate costs.

    Args:
        elbo: The ELBO.
        model: Model.
        guide: Guide.
        *args: Arguments of both.
        num_samples: Number of steps if outcomes are not enumerated.
        exact: As in :func:`gradient_moments`.
        num_outcomes: Largest number of outcomes that are enumerated.
        seed: Seed of the samples; the global generators are restored.
        **kwargs: Keyword arguments of both.

    Returns:
        The quality of the critics, by site.

    Raises:
        OptionError: If an option is out of range, or ``elbo`` is not a :class:`~pyro_bpq.TraceBackpropQ_ELBO`.
        BPQError: If ``exact=True`` and the outcomes cannot be enumerated.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Gradient Difference Between Two Locally Fitted Functions
        | (there the derivative with respect to a continuous value, here differences between discrete values)
    """
    if not isinstance(elbo, TraceBackpropQ_ELBO):
        raise OptionError(
            f"critic_fit() looks at the critics of a TraceBackpropQ_ELBO, not at a {type(elbo).__name__}: "
            "gradient_moments(elbo, model, guide, *args) measures other ELBOs."
        )
    program, pairs = Program(model, guide, args, kwargs), dict[str, list[tuple[Tensor, Tensor]]]()
    with untouched(elbo, seed), torch.enable_grad():
        with torch.no_grad():
            is_subsampled = any(run.subsamples for run in elbo.observe(program).runs)

        def more(signals: Sequence[Signals]) -> dict[Any, Tensor]:
            _note_targets(signals, pairs)
            return _all_action(signals)

        limits: dict[str, Any] = {"num_samples": num_samples, "num_outcomes": num_outcomes, "exact": exact}
        moments, parts = measured(elbo, program, more, **limits)
        if moments.is_exact:
            # Fits need samples: enumeration would give every outcome the same weight.
            pairs.clear()
            for _ in range(num_samples):
                _note_targets([item.signals for item in elbo.observe(program).items], pairs)
    fits = {}
    for site in dict.fromkeys([*pairs, *(name for part, name in parts if part == _LEARNED)]):
        explained = _explained(pairs[site], is_subsampled) if site in pairs else None
        by_critic = parts.get((_LEARNED, site))
        if by_critic is None or site not in moments.sites:
            fits[site] = Fit(explained)
            continue
        scale = 0.0 if moments.is_exact else 1.0 / moments.num_samples
        exact_part = parts.get((_EXACT, site))
        fits[site] = Fit(explained, *_difference(moments.sites[site], exact_part, by_critic, scale))
    return CriticFit(fits, moments)


def _difference(
    whole: Moments, exact: Moments | None, by_critic: Moments, scale: float
) -> tuple[float | None, float | None, float]:
    def flat(moments: Moments) -> Tensor:
        return torch.cat([mean.flatten() for mean in moments.mean.values()])

    variances = [part.total_variance for part in (whole, exact, by_critic) if part is not None]
    noise = math.sqrt(sum(variances) * scale)
    found = flat(by_critic)
    true = flat(whole) - (0.0 if exact is None else flat(exact))
    size, other = float(true.norm()), float(found.norm())
    if size <= max(1e-6 * float(flat(whole).norm()), 2.0 * noise) or size == 0.0:
        return None, None, 0.0
    cosine = float(true @ found) / (size * other) if other else 0.0
    return cosine, float((true - found).norm()) / size, noise / size


def _all_action(signals: Sequence[Signals]) -> dict[Any, Tensor]:
    """Scalars, by part and site, with the all-action gradients of critics and of immediate costs."""
    found: dict[Any, Tensor] = {}
    for one in signals:
        for c in one.active:
            context = one.context(c)
            if context.learned is None or context.log_probs is None:
                continue
            for part, values in ((_LEARNED, context.learned), (_EXACT, context.exact)):
                if values is None:
                    continue
                weighted = context.log_probs.detach().exp() * values * context.log_probs
                for i, name in enumerate(context.names):
                    found[part, name] = found.get((part, name), torch.zeros(())) + weighted[i].sum()
    return found


def _note_targets(signals: Sequence[Signals], pairs: dict[str, list[tuple[Tensor, Tensor]]]) -> None:
    """Appends values and targets ``(M, plates)`` of each site, summed over its Q-nodes."""
    for one in signals:
        with torch.no_grad():
            sums: dict[str, tuple[Tensor, Tensor]] = {}
            for g, (value, target) in one.values_and_targets(1.0, 1.0).items():
                for i, node in enumerate(one.critics[g].group.nodes):
                    old = sums.get(node.site, (torch.zeros(()), torch.zeros(())))
                    sums[node.site] = old[0] + value[i].detach(), old[1] + target[i]
        for site, pair in sums.items():
            pairs.setdefault(site, []).append(pair)


def _explained(pairs: list[tuple[Tensor, Tensor]], is_subsampled: bool) -> float | None:
    """Explained variance: centred over the draws of each data point, then pooled over data points.

    If the draws differ in their data, each draw is centred over its particles.
    """
    if is_subsampled or len({tuple(target.shape[1:]) for _, target in pairs}) > 1:
        groups = [pair for pair in pairs if pair[1].shape[0] > 1]
    else:
        groups = [(torch.cat([value for value, _ in pairs]), torch.cat([target for _, target in pairs]))]
    whole = sum(_spread(target) for _, target in groups)
    scale = sum(float(target.square().sum()) * torch.finfo(target.dtype).eps for _, target in groups)
    return 1.0 - sum(_spread(target - value) for value, target in groups) / whole if whole > scale else None


def _spread(value: Tensor) -> float:
    return float((value - value.mean(0)).square().sum())
