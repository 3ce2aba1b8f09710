"""Reports in sentences the problems that keep a program from learning, and possible remedies.

Functions, each of which looks for one mistake and says it, stand in a table.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.errors import OptionError
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.plan.plan import Plan
from pyro_bpq.record.program_errors import quoted
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.watch import traced_leaves
from pyro_bpq.rollout.features import finite_components
from pyro_bpq.rollout.runs import Program
from pyro_bpq.short import number
from pyro_bpq.testing.moments import GradientMoments, gradient_moments, untouched

# A site draws one value only if it does so with at least this probability.
_CERTAIN = 0.999
# Problem, remedy, and the sites concerned, if any.
_Found = tuple[str, str] | tuple[str, str, tuple[str, ...]]
# Two particles that draw the same value have a gradient of zero: in fewer steps that tells nothing.
_ZERO_SAMPLES = 8


@dataclass(frozen=True)
class Finding:
    """One finding of a diagnosis.

    Args:
        kind: A short fixed name, for programs that read it.
        severity: ``"error"``: results are wrong; ``"warning"``: learning is slower than it could be; ``"hint"``.
        message: Description of the problem, with the figures behind it.
        advice: Suggested remedy.
        sites: The sites concerned.
    """

    kind: str
    severity: str
    message: str
    advice: str
    sites: tuple[str, ...] = ()

    def __str__(self) -> str:
        body = textwrap.wrap(f"{self.severity}: {self.message}", 110, subsequent_indent="    ")
        advice = textwrap.wrap(f"-> {self.advice}", 110, initial_indent="    ", subsequent_indent="       ")
        return "\n".join([*body, *advice])


@dataclass(frozen=True)
class Diagnosis:
    """All findings, the most severe first.

    Args:
        findings: The findings.
        checked: Description of the examined steps, in words.
    """

    findings: tuple[Finding, ...]
    checked: str = ""

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def kinds(self) -> frozenset[str]:
        """The kinds that were found."""
        return frozenset(finding.kind for finding in self.findings)

    def __str__(self) -> str:
        found = [str(finding) for finding in self.findings] or ["No problem was found."]
        return "\n".join([*found, *([f"({self.checked})"] if self.checked else [])])


@dataclass(frozen=True, eq=False)
class Look:
    """What is looked at: an ELBO, its program, and what a step shows of both."""

    elbo: TraceBackpropQ_ELBO
    runs: Sequence[TracedRun]  # runs of guide and model, one for each particle or one of all
    moments: GradientMoments  # of the gradient of a step
    plan: Plan  # what the step does

    @cached_property
    def laws(self) -> dict[str, Any]:
        """The guide's distribution at each latent site."""
        return {name: site.fn for name, site in self.runs[0].run.sites.items()}

    @cached_property
    def still(self) -> list[str]:
        """Parameters of the guide that no step moves."""
        of_guide = {name for run in self.runs for name in traced_leaves(run.guide_trace)}
        mean, variance = self.moments.mean, self.moments.variance
        # Parameters of a module that no pyro statement names are called after the program.
        own = [name for name in mean if (name in of_guide or name.startswith("guide.")) and mean[name].numel()]
        return [name for name in own if not (mean[name].any() or variance[name].any())]


def _errors(look: Look) -> Iterator[_Found]:
    """A loss or a gradient that is no number."""
    bad = [name for name, mean in look.moments.mean.items() if not bool(torch.isfinite(mean).all())]
    if bad or not all(bool(torch.isfinite(run.run.loss)) for run in look.runs):
        yield (
            f"The loss or the gradient of {quoted(bad) or 'some parameter'} is not finite.",
            "Look for a value outside a support, a logarithm of zero, or a too large learning rate; "
            "pyro.enable_validation(True) names the site.",
        )


def _untrained(look: Look) -> Iterator[_Found]:
    """An ELBO that has not learned anything."""
    if not look.elbo.num_steps:
        yield (
            "This ELBO has taken no step of training, so its critics and running means know nothing.",
            "Hand over the ELBO that was trained. It keeps what it has learned: make it once, not in each step.",
        )


def _gradients(look: Look) -> Iterator[_Found]:
    """Parameters of the guide that no site's gradient reaches."""
    cut, nodes = [name for name in look.still if name not in look.moments.reached], look.runs[0].guide_trace.nodes
    densities = {name: nodes[name].get("log_prob") for name in look.laws if name in nodes}
    sites = [name for name, value in densities.items() if isinstance(value, Tensor) and not value.requires_grad]
    where = f" The distribution of {quoted(sites)} has no gradient to any parameter: look there." if sites else ""
    none = "" if look.moments.reached else " No parameter of model or guide gets one."
    if cut:
        yield (
            f"The guide's parameters {quoted(cut)} get no gradient in any of {look.moments.how}: they will never learn."
            f"{where}{none}",
            "Look for what cuts the gradient on the way from the parameter to a site: .detach(), .data, .item(), "
            "torch.no_grad(), torch.tensor(...) of a tensor, or a parameter that no site reads. If it is meant to stay "
            "as it is, this is right.",
            tuple(sites),
        )


def _zeros(look: Look) -> Iterator[_Found]:
    """Parameters of the guide that sites read, whose gradient is zero in every step."""
    zero = [name for name in look.still if name in look.moments.reached]
    if zero and (look.moments.is_exact or look.moments.num_samples >= _ZERO_SAMPLES):
        yield (
            f"The gradient of the guide's parameters {quoted(zero)} is exactly zero in each of {look.moments.how}, "
            "although sites read them.",
            "Look for relu or clamp where it is flat, a weight of zero or a mask behind the parameter, or a model that "
            "does not depend on what the parameter moves. A site that has come to draw one value only looks the same.",
        )


def _collapsed(look: Look) -> Iterator[_Found]:
    """Sites that draw one value only, in all rows, and what each site diverges from its prior."""
    still = [name for name, fn in look.laws.items() if _draws_one(fn)]
    nats = dict[str, float]()
    for guide, model in ((run.guide_trace.nodes, run.model_trace.nodes) for run in look.runs if still):
        for name in (name for name in look.laws if name in guide and name in model):
            cost = float((guide[name]["log_prob_sum"] - model[name]["log_prob_sum"]).detach())
            nats[name] = nats.get(name, 0.0) + cost / look.elbo.num_particles
    if still:
        shown = ", ".join(f"{name!r} {number(own)}" for name, own in nats.items())
        yield (
            f"{quoted(still)}: the guide draws one value only, in at least {_CERTAIN:.1%} of all draws, and learns "
            f"next to nothing about others. log q - log p of each site in this step, in nats: {shown}.",
            "If the posterior is that sure, this is right. Else the guide has settled too early: begin with logits "
            "near zero, take a smaller learning rate for the guide or more particles, or scale log q - log p up slowly "
            "(pyro.poutine.scale). Bounded logits, as by 5 * torch.tanh(logits / 5), keep other values in play.",
            tuple(still),
        )


def _draws_one(fn: Any) -> bool:
    split = finite_components(fn)
    if split is None or split.cardinality < 2:
        return False
    laws = split.log_probs(split.parameters(fn).detach()).exp().reshape(-1, split.size, split.cardinality)
    return bool((laws.mean(0).amax(-1) > _CERTAIN).all())


def _values_that_leave(look: Look) -> Iterator[_Found]:
    """Sampled values that leave torch."""
    met = " Rows of a plate may have met: then each row is charged with the costs of all rows."
    if sites := sorted(frozenset().union(*(run.escaped_sites for run in look.runs))):
        yield (
            f"The values of {quoted(sites)} leave torch (.item(), int(), if, .numpy(), a list index): the model is not "
            "run at other values, and later sites count as dependent on them."
            f"{met * any(run.crosses for run in look.runs)}",
            "Where Python need not look at the value, write torch.where, tensor indexing or masks instead. Where it "
            "must, this is the right behaviour.",
            tuple(sites),
        )


def _particles(look: Look) -> Iterator[_Found]:
    """Rows of data that another particle would give a baseline, where somebody has asked for one particle."""
    sites = [name for name in look.plan.layout.specs if name in look.plan.noisy and look.runs[0].plates.get(name)]
    if sites and look.elbo.num_particles == 1 and not look.elbo.particles.is_open:
        yield (
            f"With one particle the costs of {quoted(sites)} are compared with earlier steps or with a second run, not "
            "with another sample of the same data point.",
            "Leave num_particles out: then several particles run in one call wherever the program allows it, and "
            "compare each data point with other samples of its own (leave-one-out).",
            tuple(sites),
        )


_FINDERS = (
    ("not finite", "error", _errors),
    ("no gradient", "warning", _gradients),
    ("collapsed", "warning", _collapsed),
    ("untrained", "hint", _untrained),
    ("zero gradient", "hint", _zeros),
    ("values leave torch", "hint", _values_that_leave),
    ("one particle", "hint", _particles),
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
    signal = "zero in each" if math.isnan(ratio := moments.signal_to_noise) else f"signal to noise {number(ratio)}"
    checked = f"after {elbo.num_steps} steps of training; gradients over {moments.how}: {signal}"
    if jumps := sorted(elbo.runner.recordings.jumps):
        checked += f"; costs jump with the values of {quoted(jumps)}, which get the score function"
    if pathwise := [name for name, spec in elbo.plan.layout.specs.items() if spec.estimator.is_pathwise]:
        checked += f"; jumps of costs with {quoted(pathwise)} that no draw has met stay unseen"
    found = tuple(Finding(kind, severity, *each) for kind, severity, find in _FINDERS for each in find(look))
    return Diagnosis(found, checked)
