r"""Reports in sentences the problems that keep a program from learning, and possible remedies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from pyro_bpq.diagnostics import gradient_checks, program_checks
from pyro_bpq.diagnostics.critic_fit import critic_fit
from pyro_bpq.diagnostics.findings import SEVERITIES, Diagnosis, Look, listed
from pyro_bpq.diagnostics.sampling import untouched
from pyro_bpq.errors import OptionError
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.rollout.runs import Program
from pyro_bpq.short import number

# Findings of the same severity are listed in this order. True where a check is of draws or critics: there are neither
# if the loss is summed over all values.
_CHECKS = (
    (gradient_checks.check_finite, False),
    (gradient_checks.check_steps, False),
    (gradient_checks.check_parameters, False),
    (program_checks.check_collapse, False),
    (gradient_checks.check_bias, False),
    (program_checks.check_hidden_rsample, False),
    (gradient_checks.check_critics, True),
    (gradient_checks.check_gradient_by_critic, True),
    (gradient_checks.check_scales, True),
    (program_checks.check_supports, False),
    (program_checks.check_structure, False),
    (program_checks.check_baseline_options, True),
    (gradient_checks.check_variance, False),
    (gradient_checks.check_particles, True),
)


def diagnose(
    elbo: TraceBackpropQ_ELBO,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 100,
    num_outcomes: int = 500,
    seed: int = 0,
    **kwargs: Any,
) -> Diagnosis:
    """Examines an ELBO and its program at the present parameters; nothing learns or moves.

    Call it after some steps of training: untrained critics explain nothing. It runs about ``2 * num_samples`` steps,
    with one backward pass per site, and a few more where there is something to look at again or to time.

    Args:
        elbo: The ELBO that trains the program.
        model: Model.
        guide: Guide.
        *args: Arguments of both: a batch.
        num_samples: Number of steps that the figures come from.
        num_outcomes: Largest number of joint outcomes of a step for which gradients are compared exactly.
        seed: Seed of the samples; the global generators are restored.
        **kwargs: Keyword arguments of both.

    Returns:
        Findings, the most severe first; ``print`` shows them.

    Raises:
        OptionError: If ``elbo`` is not a :class:`~pyro_bpq.TraceBackpropQ_ELBO`.
    """
    if not isinstance(elbo, TraceBackpropQ_ELBO):
        raise OptionError(
            f"diagnose() looks into a TraceBackpropQ_ELBO, not a {type(elbo).__name__}: hand over the one that was "
            "trained, or measure other ELBOs with compare_estimators(model, guide, *args)."
        )
    program = Program(model, guide, args, kwargs)
    with untouched(elbo, seed), torch.enable_grad():
        # Runs are tracked, because only tracking shows which values leave torch.
        tracked = elbo.tracked_runs(program)
        seen = elbo.observe(program)
        planned = elbo.runner.plans.last
    assert planned is not None
    limits: dict[str, Any] = {"num_samples": num_samples, "num_outcomes": num_outcomes, "seed": seed}
    fit = critic_fit(elbo, model, guide, *args, **limits, **kwargs)
    look = Look(elbo, program, seed, tracked, seen, planned, fit)
    sums = elbo.particles.now.sums
    findings = [finding for check, is_of_draws in _CHECKS if not (sums and is_of_draws) for finding in check(look)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    moments = fit.moments
    how = "all outcomes of a step" if moments.is_exact else f"{moments.num_samples} steps"
    signal = moments.signal_to_noise
    found = "zero in each" if math.isnan(signal) else f"signal to noise {number(signal)}"
    checked = f"after {elbo.num_steps} steps of training; gradients over {how}: {found}"
    pathwise = [name for name, spec in look.specs.items() if spec.estimator.is_pathwise]
    if pathwise:
        checked += (
            f"; not looked for: jumps of the costs at some values of {listed(pathwise)}, as by if, torch.where, round "
            "or an index: pathwise gradients miss them"
        )
    return Diagnosis(tuple(findings), checked)
