r"""Reports in sentences the problems that keep a program from learning, and possible remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyro_bpq.diagnostics.critic_fit import CriticFit, Fit, critic_fit
from pyro_bpq.diagnostics.findings import SEVERITIES, Diagnosis, Finding
from pyro_bpq.diagnostics.moments import COSTS
from pyro_bpq.diagnostics.sampling import untouched
from pyro_bpq.diagnostics.text import number
from pyro_bpq.errors import OptionError
from pyro_bpq.estimators import SecondRun
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.step.signals import Signals
from pyro_bpq.tracing.traced_run import TracedRun

__all__ = ["diagnose"]

# After this many steps a critic that explains nothing is unlikely to improve.
_MANY_STEPS = 200
_EXPLAINS = 0.02
_FAR = 0.7
_ZERO_SCALE = 0.05
_NOISE_SAMPLES = 50
_CORRECTIONS = ("exact immediate costs", "level of the critic", "differences of the critic", "later sites")


@dataclass(frozen=True)
class _Look:
    """The inputs of all checks."""

    elbo: TraceBackpropQ_ELBO
    runs: Sequence[TracedRun]
    signals: Sequence[Signals]
    fit: CriticFit


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
    with one backward pass per site.

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
        raise OptionError(f"diagnose() looks into a TraceBackpropQ_ELBO, not a {type(elbo).__name__}.")
    with untouched(elbo, seed), torch.enable_grad():
        # Runs are tracked, because only tracking shows which values leave torch.
        tracked = elbo.tracked_runs(model, guide, args, kwargs)
        signals = [item.signals for item in elbo.observe(model, guide, args, kwargs).items]
    limits: dict[str, Any] = {"num_samples": num_samples, "num_outcomes": num_outcomes, "seed": seed}
    fit = critic_fit(elbo, model, guide, *args, **limits, **kwargs)
    look = _Look(elbo, tracked, signals, fit)
    checks = (
        _finite,
        _biased,
        _critics,
        _gradient_by_q,
        _scales,
        _supports,
        _structure,
        _extra_run,
        _variance,
        _particles,
    )
    findings = [finding for check in checks for finding in check(look)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    moments = fit.moments
    how = "all outcomes of a step" if moments.is_exact else f"{moments.num_samples} steps"
    checked = (
        f"after {elbo.num_steps} steps of training; gradients over {how}: "
        f"signal to noise {number(moments.signal_to_noise)}"
    )
    return Diagnosis(tuple(findings), checked)


def _specs(look: _Look) -> dict[str, Any]:
    return {name: cls.spec for one in look.signals for cls in one.layout.classes for name in cls.names}


def _finite(look: _Look) -> Iterator[Finding]:
    bad = [n for n, v in look.fit.moments.mean.items() if not bool(torch.isfinite(v).all())]
    if bad or not all(bool(torch.isfinite(run.run.loss)) for run in look.runs):
        yield Finding(
            "not finite",
            "error",
            f"The loss or the gradient of {_listed(bad) or 'some parameter'} is not finite.",
            "Look for a value outside a support, a logarithm of zero, or a too large learning rate; "
            "pyro.enable_validation(True) names the site.",
        )


def _biased(look: _Look) -> Iterator[Finding]:
    sites = [name for name, spec in _specs(look).items() if not spec.estimator.is_unbiased]
    if sites:
        text = ", ".join(sorted({repr(_specs(look)[name].estimator) for name in sites}))
        yield Finding(
            "biased estimator",
            "hint",
            f"The gradient of {_listed(sites)} is biased by design ({text}).",
            "Compare it with an unbiased one: compare_estimators(model, guide, *args).",
            tuple(sites),
        )


def _critics(look: _Look) -> Iterator[Finding]:
    steps = look.elbo.num_steps
    poor = {site: fit.explained for site, fit in look.fit.sites.items() if _is_useless(fit)}
    if not poor:
        return
    figures = ", ".join(f"{site!r} {value:.0%}" for site, value in list(poor.items())[:5] if value is not None)
    if steps < _MANY_STEPS:
        yield Finding(
            "critic untrained",
            "hint",
            f"Critics explain nothing yet of how costs differ within a data point ({figures}), after {steps} steps.",
            f"Train on and look again after {_MANY_STEPS} steps or more.",
            tuple(poor),
        )
        return
    yield Finding(
        "critic explains nothing",
        "warning",
        f"After {steps} steps the critic explains nothing of how costs differ within a data point: explained "
        f"variance {figures}. A site that the remaining costs do not depend on looks the same, and is no harm.",
        "Raise CriticLearner(lr=...), give the critic what the costs depend on (infer={'bpq': {'context': ...}}), "
        "start with lam=1, or leave critics out (critic=None), which is cheaper.",
        tuple(poor),
    )


def _is_useless(fit: Fit) -> bool:
    # Noise downstream lowers the explained variance of any critic: one with a right gradient is not useless.
    return (
        fit.explained is not None and fit.explained <= _EXPLAINS and (fit.difference is None or fit.difference > _FAR)
    )


def _gradient_by_q(look: _Look) -> Iterator[Finding]:
    if look.elbo.num_steps < _MANY_STEPS:
        return
    for site, fit in look.fit.sites.items():
        if fit.difference is None or fit.cosine is None or fit.difference - 3 * fit.difference_error < 1.0:
            continue
        if _is_useless(fit):
            continue  # _critics has reported it already
        how = "exact" if look.fit.moments.is_exact else f"standard error {number(fit.difference_error)}"
        yield Finding(
            "critic gradient",
            "warning",
            f"The all-action gradient by the critic of {site!r} is {fit.difference:.0%} of what it should be away "
            f"from it, with cosine {number(fit.cosine)} ({how}); a constant critic, no worse than none, has 100%. "
            "The correction makes up for that, at the price of variance.",
            "Do not use this Q as a cost (a biased estimator). Train the critic longer or with another learning rate, "
            "or try TabularCritic() where the scope is small.",
            (site,),
        )


def _scales(look: _Look) -> Iterator[Finding]:
    if look.elbo.num_steps < _MANY_STEPS:
        return
    off: dict[str, list[str]] = {}
    unused = []
    for one in look.signals:
        for c in one.active:
            context = one.context(c)
            present = (context.exact, context.level, context.learned, context.correction)
            for name in context.names:
                scales = look.elbo.info.get(name, {}).get("scales")
                if scales is None or len(scales) != len(present):
                    continue
                low = [part is not None and s < _ZERO_SCALE for part, s in zip(present, scales.tolist(), strict=True)]
                if low[1] and low[2]:
                    unused.append(name)
                    low[1:3] = False, False
                for text, is_low in zip(_CORRECTIONS, low, strict=True):
                    if is_low:
                        off.setdefault(text, []).append(name)
    if unused:
        yield Finding(
            "scale at zero",
            "warning",
            f"Both adaptive scales of the critic are at zero for {_listed(unused)}: it brought more noise than it "
            "removed, or repeated what the other control variates do, and is switched off.",
            "Nothing breaks: what is left is leave-one-out, or the running baseline. See to the critic's fit, or save "
            "its time with critic=None.",
            tuple(unused),
        )
    for text, sites in off.items():
        yield Finding(
            "one scale at zero",
            "hint",
            f"The adaptive scale of one control variate, the {text}, is at zero for {_listed(sites)}: the others "
            "do its work, or it brings more noise than it removes.",
            "Nothing to do.",
            tuple(sites),
        )


def _supports(look: _Look) -> Iterator[Finding]:
    limit = look.elbo.planner.max_support
    infos = {name: info for run in look.runs for name, info in run.infos.items()}
    for name, spec in _specs(look).items():
        components, estimator = infos[name].components if name in infos else None, spec.estimator
        if components is None or components.cardinality <= limit or not estimator.takes_baseline:
            continue
        yield Finding(
            "support too large",
            "warning",
            f"Site {name!r} has {components.cardinality} values, more than the {limit} that are summed over by "
            f"default: it uses {estimator!r}.",
            'If memory allows, write infer={"bpq": {"estimator": AllAction(exact=False)}} at the site; or split the '
            "value into several sites; or use more particles.",
            (name,),
        )


def _structure(look: _Look) -> Iterator[Finding]:
    escaped = sorted(frozenset().union(*(run.escaped_sites for run in look.runs)))
    if not escaped:
        return
    cached = look.elbo.runner.structure.mode in ("static", "dense")
    crossing = (
        " Rows of a plate may have met, so that credit is not cut by plates."
        if any(run.crosses for run in look.runs)
        else ""
    )
    yield Finding(
        "structure not cached",
        "hint" if cached else "warning",
        f"The values of {_listed(escaped)} leave torch (.item(), int(), if, .numpy(), a list index): "
        + ("" if cached else "every step is tracked and no structure is cached, ")
        + f"there is no extra run of the model, and later sites count as dependent on them.{crossing}",
        "Where Python need not look at the value, write torch.where, tensor indexing or masks instead. Where it must, "
        "this is the right behaviour.",
        tuple(escaped),
    )


def _extra_run(look: _Look) -> Iterator[Finding]:
    keys = look.elbo.runner.plans.unflippable
    if any(run.key in keys for run in look.runs):
        yield Finding(
            "extra run impossible",
            "warning",
            "The model could not be run at other values of its sites, so that immediate costs are not summed over "
            "them: it does not broadcast over values on the left, torch.func.vmap refuses it, and runs one after the "
            "other would be too many, or cost something else each time.",
            "Leave out what torch.func.vmap refuses (writes of sampled values into plain buffers, recurrent layers, "
            "batch norm in training mode, .item()) and state that changes from run to run; or index and reduce from "
            "the right (z[..., 0], z.sum(-1)), so that the model broadcasts.",
        )


def _variance(look: _Look) -> Iterator[Finding]:
    moments = look.fit.moments
    summands = {site: m.total_variance for site, m in moments.sites.items() if site != COSTS}
    total = sum(summands.values())
    if len(summands) > 1 and total > 0:
        site, variance = max(summands.items(), key=lambda item: item[1])
        share, fair = variance / total, 1.0 / len(summands)
        if share > max(0.5, 2.0 * fair) or (len(summands) == 2 and share > 0.8):
            estimator = _specs(look)[site].estimator if site in _specs(look) else None
            yield Finding(
                "dominating site",
                "hint",
                f"{share:.0%} of the variance of the sites' gradients comes from {site!r} (estimator {estimator!r}).",
                "Spend effort there: another estimator for this site alone "
                '(infer={"bpq": {"estimator": ...}}), a critic of its own, or more particles.',
                (site,),
            )
    if not moments.is_exact and moments.num_samples >= _NOISE_SAMPLES and moments.signal_to_noise == 0.0:
        yield Finding(
            "noise",
            "hint",
            f"The mean gradient of {moments.num_samples} steps is within its sampling error: its signal to noise is "
            f"below 1/{moments.num_samples}. At an optimum this is as it should be.",
            "Away from an optimum: more particles, a larger batch, or a smaller learning rate with momentum.",
        )


def _particles(look: _Look) -> Iterator[Finding]:
    specs = _specs(look)
    if look.elbo.num_particles > 1:
        return
    again = [name for name, spec in specs.items() if spec.estimator == SecondRun()]
    if again:
        yield Finding(
            "second run",
            "hint",
            f"The baseline of {_listed(again)} is a second run of guide and model, without gradients.",
            "num_particles=2, vectorize_particles=True takes about as long, and both runs then have gradients.",
            tuple(again),
        )
    sites = [n for n, spec in specs.items() if not (spec.estimator.is_pathwise or "program" in spec.estimator.needs)]
    if sites:
        yield Finding(
            "one particle",
            "hint",
            f"With one particle the baseline of {_listed(sites)} is a running mean, the same for every data point.",
            "num_particles=2 gives each data point a baseline of its own (leave-one-out), for twice the runs; "
            "vectorize_particles=True makes them cheap.",
            tuple(sites),
        )


def _listed(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more
