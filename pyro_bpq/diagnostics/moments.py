r"""Mean and variance of the gradient that an ELBO computes, by parameter and by site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.diagnostics.figures import GradientMoments
from pyro_bpq.diagnostics.sampling import Accumulated, accumulate, untouched
from pyro_bpq.errors import OptionError
from pyro_bpq.objectives.planned import PlannedObjective
from pyro_bpq.rollout.runs import Program
from pyro_bpq.testing import Moments
from pyro_bpq.testing.expected import backward
from pyro_bpq.testing.parameters import GradientReader

# Name of the gradient without the sites' terms, i.e. the gradient through values and parameters of the costs.
COSTS = "(differentiable costs)"


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
    program, split = Program(model, guide, args, kwargs), by_site and isinstance(elbo, PlannedObjective)
    with untouched(elbo, seed), torch.enable_grad(), GradientReader(model, guide, parameters) as reader:

        def run() -> dict[Any, Tensor]:
            reader.clear()
            if split:
                return site_gradients(elbo, reader, program)
            backward(elbo, program, False)
            return {(None, key): g for key, g in reader.read().items()}

        found = accumulate(run, elbo, program, num_samples=num_samples, num_outcomes=num_outcomes, exact=exact)
    return named_moments(found, reader)


def named_moments(found: Accumulated, reader: GradientReader) -> GradientMoments:
    """Splits moments by ``(site or None, id of the parameter)`` into those of gradient and sites."""

    def pick(values: Mapping[Any, Tensor], site: str | None) -> dict[str, Tensor]:
        return reader.named({leaf: value for (where, leaf), value in values.items() if where == site})

    names = list(dict.fromkeys(site for site, _ in found.mean if site is not None))
    return GradientMoments(
        mean=pick(found.mean, None),
        variance=pick(found.variance, None),
        sites={site: Moments(pick(found.mean, site), pick(found.variance, site)) for site in names},
        num_samples=found.num_runs,
        is_exact=found.is_exact,
        total_variance_error=found.error(None),
        site_variance_errors={site: found.error(site) for site in names},
    )


def site_gradients(
    elbo: PlannedObjective,
    reader: GradientReader,
    program: Program,
    more: Callable[[Any], Mapping[Any, Tensor]] = lambda signals: {},
) -> dict[Any, Tensor]:
    """The gradient of one step and its summands, by ``(site or None, id of the parameter)``."""
    seen = elbo.observe(program, shows=False)
    signals = [item.signals for item in seen.items]
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
    for part, scalars in ((True, summands), (False, more(signals) if signals else {})):
        for key, scalar in scalars.items():
            if not scalar.requires_grad:
                continue
            grads = torch.autograd.grad(scalar, leaves, retain_graph=True, allow_unused=True)
            for leaf, grad in zip(leaves, grads, strict=True):
                if grad is None:
                    continue
                grad = grad / elbo.num_particles
                found[key, id(leaf)] = grad
                if part:
                    found[None, id(leaf)] = found.get((None, id(leaf)), 0.0) + grad
    return found
