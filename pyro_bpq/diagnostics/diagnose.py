r"""Reports in sentences the problems that keep a program from learning, and possible remedies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from pyro_bpq.diagnostics.findings import Diagnosis, Look, findings, listed
from pyro_bpq.diagnostics.moments import gradient_moments, untouched
from pyro_bpq.errors import OptionError
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.plan.plan import Plan
from pyro_bpq.rollout.runs import Program
from pyro_bpq.short import number


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

    Call it after some steps of training. It runs about ``num_samples`` steps.

    Args:
        elbo: The ELBO that trains the program.
        model: Model.
        guide: Guide.
        *args: Arguments of both: a batch.
        num_samples: Number of steps that the figures come from.
        num_outcomes: Largest number of joint outcomes of a step that run in place of samples.
        seed: Seed of the samples; the global generators are restored.
        **kwargs: Keyword arguments of both.

    Returns:
        Findings, the most severe first; ``print`` shows them.

    Raises:
        OptionError: If ``elbo`` is not a :class:`~pyro_bpq.TraceBackpropQ_ELBO`.

    Example:
        >>> print(diagnose(elbo, model, guide, x))  # doctest: +SKIP
    """
    if not isinstance(elbo, TraceBackpropQ_ELBO):
        raise OptionError(
            f"diagnose() looks into a TraceBackpropQ_ELBO, not a {type(elbo).__name__}: hand over the one that was "
            "trained, or measure other ELBOs with compare_estimators(model, guide, *args)."
        )
    program = Program(model, guide, args, kwargs)
    limits: dict[str, Any] = {"num_samples": num_samples, "num_outcomes": num_outcomes, "seed": seed}
    moments = gradient_moments(elbo, model, guide, *args, **limits, **kwargs)
    with untouched(elbo, seed), torch.enable_grad():
        # Runs are tracked, because only tracking shows which values leave torch.
        runs = elbo.tracked_runs(program)
    assert isinstance(elbo.plan, Plan)
    look = Look(elbo, runs, moments, elbo.plan)
    how = "all outcomes of a step" if moments.is_exact else f"{moments.num_samples} steps"
    signal = "zero in each" if math.isnan(ratio := moments.signal_to_noise) else f"signal to noise {number(ratio)}"
    checked = f"after {elbo.num_steps} steps of training; gradients over {how}: {signal}"
    if jumps := sorted(elbo.runner.recordings.jumps):
        checked += f"; costs jump with the values of {listed(jumps)}, which get the score function"
    if look.pathwise:
        checked += f"; jumps of costs with {listed(look.pathwise)} that no draw has met stay unseen"
    return Diagnosis(tuple(findings(look)), checked)
