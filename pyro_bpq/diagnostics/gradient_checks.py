r"""Findings about the gradient: whether it is there, how noisy it is, how long it takes, and what critics do for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_bpq.diagnostics.critic_fit import Fit
from pyro_bpq.diagnostics.findings import Finding, Look, listed
from pyro_bpq.diagnostics.moments import COSTS
from pyro_bpq.diagnostics.sampling import times_in_turn, untouched
from pyro_bpq.estimators import AllAction, SecondRun
from pyro_bpq.reruns.flipped_costs import flipped_costs
from pyro_bpq.short import number, short
from pyro_bpq.testing.expected import backward
from pyro_bpq.testing.parameters import GradientReader
from pyro_bpq.tracing.watch import samples

_NOISE_SAMPLES, _ZERO_SAMPLES = 50, 8
# Steps that are timed.
_TIMED = 5
# An extra run of so many rows is timed; it is reported from this share of a step on.
_MANY_ROWS, _MOST = 32, 0.5
# After this many steps a critic that explains nothing is unlikely to improve.
_MANY_STEPS = 200
_EXPLAINS = 0.02
_EXPLAINS_WELL = 0.5
_FAR = 0.7
_ZERO_SCALE = 0.05
_WITHIN = "how costs differ within a data point, from one sampled value to another"


def check_finite(look: Look) -> Iterator[Finding]:
    """Losses and gradients that are no numbers."""
    bad = [n for n, v in look.fit.moments.mean.items() if not bool(torch.isfinite(v).all())]
    if bad or not all(bool(torch.isfinite(run.run.loss)) for run in look.tracked):
        yield Finding(
            "not finite",
            "error",
            f"The loss or the gradient of {listed(bad) or 'some parameter'} is not finite.",
            "Look for a value outside a support, a logarithm of zero, or a too large learning rate; "
            "pyro.enable_validation(True) names the site.",
        )


def check_steps(look: Look) -> Iterator[Finding]:
    """An ELBO that has not learned anything."""
    if not look.elbo.num_steps:
        yield Finding(
            "untrained",
            "hint",
            "This ELBO has taken no step of training, so its critics and running means know nothing.",
            "Train first, and hand over the ELBO that was trained. It keeps what it has learned: make it once, not in "
            "each step.",
        )


def check_bias(look: Look) -> Iterator[Finding]:
    """Estimators that are biased by design."""
    sites = [name for name, spec in look.specs.items() if not spec.estimator.is_unbiased]
    if sites:
        text = ", ".join(sorted({repr(look.specs[name].estimator) for name in sites}))
        yield Finding(
            "biased estimator",
            "hint",
            f"The gradient of {listed(sites)} is biased by design ({text}): even its mean over many steps is off.",
            "Compare it with an unbiased one: compare_estimators(model, guide, *args).",
            tuple(sites),
        )


# Parameters without a gradient.


def check_parameters(look: Look) -> Iterator[Finding]:
    """Parameters of the guide that no sampled step moves."""
    moments = look.fit.moments
    of_guide = {name for run in look.tracked for name, node in run.guide_trace.nodes.items() if node["type"] == "param"}
    still = [
        name
        for name, mean in moments.mean.items()
        # Parameters of a module that no pyro statement names are called after the program.
        if (name in of_guide or name.startswith("guide."))
        and mean.numel()
        and not (mean.any() or moments.variance[name].any())
    ]
    if not still:
        return
    reached = moments.reached
    count = f"{moments.num_samples} {'outcomes' if moments.is_exact else 'sampled steps'}"
    cut = [name for name in still if name not in reached]
    if cut:
        sites = _without_parameters(look)
        where = f" The distribution of {listed(sites)} has no gradient to any parameter: look there." if sites else ""
        yield Finding(
            "no gradient",
            "warning",
            f"The guide's parameters {listed(cut)} get no gradient in any of {count}: they will never learn.{where}"
            + ("" if reached else " No parameter of model or guide gets one."),
            "Look for what cuts the gradient on the way from the parameter to a site: .detach(), .data, .item(), "
            "torch.no_grad(), torch.tensor(...) of a tensor, or a parameter that no site reads. If it is meant to "
            "stay as it is, this is right.",
            tuple(sites),
        )
    zero = [name for name in still if name in reached]
    # Two particles that draw the same value have a gradient of zero, too: few samples show nothing.
    if zero and (moments.is_exact or moments.num_samples >= _ZERO_SAMPLES):
        yield Finding(
            "zero gradient",
            "hint",
            f"The gradient of the guide's parameters {listed(zero)} is exactly zero in each of {count}, although "
            "sites read them.",
            "Look for relu or clamp where it is flat, a weight of zero or a mask behind the parameter, or a model that "
            "does not depend on what the parameter moves. A site that has come to draw one value only looks the same.",
        )


def _without_parameters(look: Look) -> list[str]:
    """Sites of the guide whose distributions have no gradient to any parameter."""
    run = look.seen.runs[0]
    densities = {name: site.get("log_prob") for name, site in samples(run.guide_trace).items() if name in run.run.sites}
    return [name for name, value in densities.items() if isinstance(value, Tensor) and not value.requires_grad]


# Noise.


def check_variance(look: Look) -> Iterator[Finding]:
    """One site that makes most of the noise, and gradients that are lost in it."""
    moments = look.fit.moments
    summands = {site: m.total_variance for site, m in moments.sites.items() if site != COSTS}
    total = sum(summands.values())
    if len(summands) > 1 and total > 0:
        site, variance = max(summands.items(), key=lambda item: item[1])
        share, fair = variance / total, 1.0 / len(summands)
        if share > max(0.5, 2.0 * fair) or (len(summands) == 2 and share > 0.8):
            estimator = look.specs[site].estimator if site in look.specs else None
            advice = (
                "Spend effort there: another estimator for this site alone "
                '(infer={"bpq": {"estimator": ...}}), a critic of its own, or more particles.'
            )
            if site in look.specs and _is_summed(look, site):
                advice = (
                    "All that it costs is summed over its values. What is left comes from the sites before it: "
                    "more particles or a larger batch average over those."
                )
            yield Finding(
                "dominating site",
                "hint",
                f"{share:.0%} of the noise (variance) of the sites' gradients comes from {site!r}, which is served by "
                f"{short(estimator)}.",
                advice,
                (site,),
            )
    if not moments.is_exact and moments.num_samples >= _NOISE_SAMPLES and moments.signal_to_noise == 0.0:
        yield Finding(
            "noise",
            "hint",
            f"The gradient is lost in its noise: its mean over {moments.num_samples} steps cannot be distinguished "
            "from zero. At the end of training this is normal.",
            "Before that: more particles, a larger batch, or a smaller learning rate with momentum.",
        )


def _is_summed(look: Look, name: str) -> bool:
    """Whether all costs of a site are known at all of its values: their sum has no noise that a baseline could take."""
    spec = look.specs[name]
    if not isinstance(spec.estimator, AllAction) or spec.components is None or spec.components.size > 1:
        return False
    layouts = [one.layout for one in look.signals if name in one.layout.specs]
    return all({*one.tabled.get(name, ())}.issuperset(one.graph.downstream_costs(name)) for one in layouts)


def check_particles(look: Look) -> Iterator[Finding]:
    """What a second particle would give."""
    if look.elbo.num_particles > 1:
        return
    again = [name for name, spec in look.specs.items() if spec.estimator == SecondRun()]
    if again and not look.against_one_call:
        yield Finding(
            "second run",
            "hint",
            f"The costs of {listed(again)} are compared with those of a second run of guide and model, which itself "
            "gives no gradient.",
            "num_particles=2, vectorize_particles=True takes about as long, and both runs then give gradients.",
            tuple(again),
        )
    specs = look.specs
    sites = [n for n, spec in specs.items() if not (spec.estimator.is_pathwise or "program" in spec.estimator.needs)]
    # Outside of plates there is one data point, and a running mean knows it as well as another particle does.
    infos = look.infos
    sites = [name for name in sites if name in infos and infos[name].plates and not _is_summed(look, name)]
    if sites:
        cheap = "vectorize_particles=True makes them cheap."
        if look.against_one_call:
            cheap = f"They run one after the other (vectorize_particles=False): {look.against_one_call}."
        yield Finding(
            "one particle",
            "hint",
            f"With one particle the costs of {listed(sites)} are compared with a running mean over earlier steps (the "
            "baseline), which is the same for every data point.",
            "num_particles=2 compares each data point with another sample of the same data point (leave-one-out), for "
            f"twice the runs. {cheap}",
            tuple(sites),
        )


# Critics, and the weights of their corrections.


def check_critics(look: Look) -> Iterator[Finding]:
    """Critics that predict nothing."""
    steps = look.elbo.num_steps
    poor = {site: fit for site, fit in look.fit.sites.items() if _is_useless(fit)}
    if not poor:
        return
    figures = _figures(poor)
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
        f"After {steps} steps the critic explains nothing of {_WITHIN} (share of that variance that it predicts: "
        f"{figures}). A site that the remaining costs do not depend on looks the same, and is no harm.",
        "More particles help without a critic: num_particles=8, vectorize_particles=True. Give the critic what the "
        "costs depend on (infer={'bpq': {'context': ...}}, or window=... where they are many sites), raise "
        "CriticLearner(lr=...), or leave critics out (critic=None), which is cheaper. "
        "compare_estimators(model, guide, *args) measures what is best.",
        tuple(poor),
    )


def _figures(fits: dict[str, Fit]) -> str:
    """The explained variances of the first sites."""
    shares = {site: f"{fit.explained:.0%}" for site, fit in list(fits.items())[:5]}
    return ", ".join(f"{site!r} {'0%' if share == '-0%' else share}" for site, share in shares.items())


def _is_useless(fit: Fit) -> bool:
    # Noise downstream lowers the explained variance of any critic: one with a right gradient is not useless.
    return (
        fit.explained is not None and fit.explained <= _EXPLAINS and (fit.difference is None or fit.difference > _FAR)
    )


def check_gradient_by_critic(look: Look) -> Iterator[Finding]:
    """Critics whose own gradient would be worse than none."""
    if look.elbo.num_steps < _MANY_STEPS:
        return
    for site, fit in look.fit.sites.items():
        if fit.difference is None or fit.cosine is None or fit.difference - 3 * fit.difference_error < 1.0:
            continue
        if _is_useless(fit):
            continue  # check_critics has reported it already
        how = "exact" if look.fit.moments.is_exact else f"standard error {number(fit.difference_error)}"
        yield Finding(
            "critic gradient",
            "warning",
            f"The critic of {site!r} points the wrong way: the gradient that it alone would give is off the true one "
            f"by {fit.difference:.0%} of the true one's length, with cosine {number(fit.cosine)} ({how}). A critic "
            "that predicts the same cost for every value is off by 100%. Your gradient stays right on average, "
            "because it is corrected, but it has more noise.",
            "Do not let this critic replace the costs, as biased estimators such as QScoreFunction() do. Train the "
            "critic longer or with another learning rate, or try TabularCritic() where it reads few values.",
            (site,),
        )


def check_scales(look: Look) -> Iterator[Finding]:
    """Corrections of the gradient that are switched off."""
    if look.elbo.num_steps < _MANY_STEPS:
        return
    unused: list[str] = []
    for one in look.signals:
        for c in one.active:
            context = one.context(c)
            has_critic = context.level is not None and context.learned is not None
            for name in context.names:
                scales = look.elbo.info.get(name, {}).get("scales", ())
                # The second and the third scale belong to the critic.
                if has_critic and len(scales) >= 3 and all(scale < _ZERO_SCALE for scale in scales[1:3]):
                    unused.append(name)
    fits = look.fit.sites.items()
    good = {name: fit for name, fit in fits if name in unused and (fit.explained or 0.0) > _EXPLAINS_WELL}
    if good:
        yield Finding(
            "good critic unused",
            "hint",
            f"The critic predicts well {_WITHIN} (share of that variance: {_figures(good)}), and the gradient makes no "
            f"use of it: its weights in elbo.info[site]['scales'] are below {_ZERO_SCALE}. Both can be true: what is "
            "known exactly, or the comparison with other particles, already takes away the noise that this critic "
            "could take.",
            "Nothing is broken. critic=None is cheaper and probably as good; compare_estimators(model, guide, *args) "
            "shows whether it is.",
            tuple(good),
        )
    unused = [name for name in unused if name not in good]
    if unused:
        yield Finding(
            "scale at zero",
            "warning",
            f"The gradient of {listed(unused)} makes no use of its critic: both of the critic's weights in "
            "elbo.info[site]['scales'] have gone to zero, because it brought more noise than it took away, or "
            "repeated what the rest does.",
            "Nothing breaks: the gradient falls back on comparing costs with those of the other particles, or with "
            "their running mean. critic_fit(elbo, model, guide, *args) shows how well the critic predicts; "
            "critic=None leaves it out and saves its time.",
            tuple(unused),
        )
