r"""Mean and variance of the gradient that an ELBO computes, by parameter and by site."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.diagnostics.sampling import accumulate, untouched
from pyro_bpq.errors import OptionError
from pyro_bpq.objectives.planned import PlannedObjective
from pyro_bpq.rollout.runs import Program
from pyro_bpq.short import number, table
from pyro_bpq.step.signals import Signals
from pyro_bpq.testing import Moments
from pyro_bpq.testing.expected import backward
from pyro_bpq.testing.parameters import GradientReader

# Name of the gradient without the sites' terms, i.e. the gradient through values and parameters of the costs.
COSTS = "(differentiable costs)"
# Makes scalars of the signals of a step, by keys that are no strings.
More = Callable[[Sequence[Signals]], Mapping[Any, Tensor]]


@dataclass(frozen=True)
class GradientMoments:
    r"""Moments of the gradient of one step.

    Args:
        mean: Mean of the gradient of the loss by parameter, in nats per unit, in the parameter's shape, detached.
        variance: Variance of a single step's gradient, in the same form.
        sites: Mean and variance of each site's summand. The means add up to the mean gradient; the variances do not
            add up if summands are correlated. ``COSTS`` names the rest. Empty if the ELBO has no such summands.
        num_samples: Number of steps that were run.
        is_exact: Whether these steps were all outcomes of a step, weighted by their probability.
        total_variance_error: Standard error of the total variance; 0 if exact.
        reached: Names of the parameters that the gradient of some step depends on; the others have none.
    """

    mean: dict[str, Tensor]
    variance: dict[str, Tensor]
    sites: dict[str, Moments]
    num_samples: int
    is_exact: bool
    total_variance_error: float = 0.0
    reached: frozenset[str] = frozenset()

    @property
    def standard_error(self) -> dict[str, Tensor]:
        """Standard error of the mean; zero if exact."""
        scale = 0.0 if self.is_exact else 1.0 / self.num_samples
        return {name: (variance * scale).sqrt() for name, variance in self.variance.items()}

    @property
    def total_variance(self) -> float:
        """Sum of the variances of all components."""
        return sum(float(variance.sum()) for variance in self.variance.values())

    @property
    def signal_to_noise(self) -> float:
        r"""Squared norm of the mean, less its sampling noise, over the total variance; NaN if both are zero."""
        return self._ratio(self.mean, self.total_variance)

    def site_ratios(self) -> dict[str, float]:
        """The same of each site's summand, where that varies."""
        found = {site: (part.mean, part.total_variance) for site, part in self.sites.items()}
        return {site: self._ratio(mean, noise) for site, (mean, noise) in found.items() if noise > 0}

    def _ratio(self, mean: dict[str, Tensor], noise: float) -> float:
        signal = sum(float(part.square().sum()) for part in mean.values())
        if not self.is_exact:
            signal = max(0.0, signal - noise / self.num_samples)
        return signal / noise if noise > 0 else math.inf if signal > 0 else math.nan

    def site_shares(self) -> dict[str, float]:
        """Share of each site's summand in the sum of variances, largest first; empty if the sum is zero."""
        found = {site: moments.total_variance for site, moments in self.sites.items()}
        total = sum(found.values())
        ordered = sorted(found.items(), key=lambda item: -item[1])
        return {site: variance / total for site, variance in ordered} if total > 0 else {}

    def __str__(self) -> str:
        how = f"all {self.num_samples} outcomes" if self.is_exact else f"{self.num_samples} sampled steps"
        rows = [[n, number(float(self.mean[n].norm())), number(float(v.sum()))] for n, v in self.variance.items()]
        lines = table(["parameter", "|mean|", "variance"], rows)
        if self.sites:
            shares = self.site_shares()
            parts = [[site, number(self.sites[site].total_variance), f"{share:.0%}"] for site, share in shares.items()]
            lines += ["", *table(["site", "variance", "share"], parts)]
        error = "" if self.is_exact else f" ± {number(self.total_variance_error)}"
        total = f"total variance {number(self.total_variance)}{error}, signal to noise {number(self.signal_to_noise)}"
        return "\n".join([f"Gradient of one step, from {how}: {total}", "", *lines])


def gradient_moments(
    elbo: Any,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 200,
    exact: bool | str = "auto",
    by_site: bool = True,
    num_outcomes: int = 2000,
    parameters: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> GradientMoments:
    r"""Mean and variance of the gradient of one step at the present parameters; nothing learns or moves.

        mean = E g,   variance = E g² - (E g)²,   g = Σ_X g_X + gradient of the differentiable costs

    The expectation is over everything that the step draws. If the step has few joint outcomes, it runs once for each
    of them, and the moments are exact. Otherwise it runs ``num_samples`` times.

    Args:
        elbo: An ELBO, of this package or of Pyro. If it leaves the number of particles open, one particle runs until
            its first training step has chosen the number.
        model: Model.
        guide: Guide.
        *args: Arguments of both.
        num_samples: Number of steps if outcomes are not enumerated.
        exact: Whether to enumerate; ``"auto"`` enumerates if there are at most ``num_outcomes`` outcomes.
        by_site: Whether to separate the summands ``g_X``, with one backward pass for each of them; only for
            :class:`~pyro_bpq.TraceBackpropQ_ELBO`.
        num_outcomes: Limit on the number of outcomes.
        parameters: Leaves to read, by name. Default: all leaves that the programs reach.
        seed: Seed of the samples; the global generators are restored.
        **kwargs: Keyword arguments of both; the names of the options above are taken.

    Returns:
        The moments, detached; ``print`` shows a table.

    Raises:
        OptionError: If an option is out of range, or ``elbo`` is no ELBO.
        BPQError: If ``exact=True`` and the outcomes cannot be enumerated.
    """
    if isinstance(elbo, type) or not callable(getattr(elbo, "loss_and_grads", None)):
        raise OptionError(
            f"gradient_moments({elbo!r}): write an ELBO such as TraceBackpropQ_ELBO(); an estimator is an option of it."
        )
    program = Program(model, guide, args, kwargs)
    more: More | None = (lambda signals: {}) if by_site and isinstance(elbo, PlannedObjective) else None
    limits: dict[str, Any] = {"num_samples": num_samples, "num_outcomes": num_outcomes, "exact": exact}
    with untouched(elbo, seed):
        return measured(elbo, program, more, parameters, **limits)[0]


def measured(
    elbo: Any, program: Program, more: More | None, parameters: Mapping[str, Tensor] | None = None, **limits: Any
) -> tuple[GradientMoments, dict[Any, Moments]]:
    """Moments of the gradient of a step, and those of the gradients of further scalars by their keys.

    ``more`` makes these scalars of the signals of the sites; without it the summands of sites are not separated.
    """
    with torch.enable_grad(), GradientReader(*program[:2], parameters) as reader:

        def run() -> dict[Any, Tensor]:
            reader.clear()
            if more is not None:
                return site_gradients(elbo, reader, program, more)
            backward(elbo, program, False)
            return {(None, key): g for key, g in reader.read().items()}

        found = accumulate(run, elbo, program, **limits)

    def pick(values: Mapping[Any, Tensor], key: Any) -> dict[str, Tensor]:
        return reader.named({leaf: value for (own, leaf), value in values.items() if own == key})

    keys = dict.fromkeys(key for key, _ in found.mean if key is not None)
    parts = {key: Moments(pick(found.mean, key), pick(found.variance, key)) for key in keys}
    moments = GradientMoments(
        mean=pick(found.mean, None),
        variance=pick(found.variance, None),
        sites={key: part for key, part in parts.items() if isinstance(key, str)},
        num_samples=found.num_runs,
        is_exact=found.is_exact,
        total_variance_error=found.error,
        reached=frozenset(name for name, leaf in reader.leaves.items() if (None, id(leaf)) in found.mean),
    )
    return moments, {key: part for key, part in parts.items() if not isinstance(key, str)}


def site_gradients(elbo: PlannedObjective, reader: GradientReader, program: Program, more: More) -> dict[Any, Tensor]:
    """The gradients of one step: by ``(None, id of the parameter)`` the whole, else that of a site or of ``more``."""
    seen = elbo.observe(program, shows=False)
    result = elbo.step_on(seen, torch.zeros(()))
    summands: dict[Any, Tensor] = {COSTS: result.paths}
    for names, term in result.terms:
        if term.dim() and term.shape[0] == len(names):
            rows = [(name, term[i].sum()) for i, name in enumerate(names)]
        else:
            rows = [(", ".join(names), term.sum())]
        for name, row in rows:
            summands[name] = summands[name] + row if name in summands else row
    leaves, found = reader.tensors, {}
    for key, scalar in {**summands, **more([item.signals for item in seen.items])}.items():
        if not (leaves and scalar.requires_grad):
            continue
        grads = torch.autograd.grad(scalar, leaves, retain_graph=True, allow_unused=True)
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is None:
                continue
            grad = grad / elbo.num_particles
            found[key, id(leaf)] = grad
            if key in summands:
                found[None, id(leaf)] = found.get((None, id(leaf)), 0.0) + grad
    return found
