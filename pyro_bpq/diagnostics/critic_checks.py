r"""Findings about critics and about the weights of their corrections."""

from __future__ import annotations

from collections.abc import Iterator

from pyro_bpq.diagnostics.figures import Fit
from pyro_bpq.diagnostics.findings import Finding
from pyro_bpq.diagnostics.look import Look, listed
from pyro_bpq.short import number

# After this many steps a critic that explains nothing is unlikely to improve.
_MANY_STEPS = 200
_EXPLAINS = 0.02
_EXPLAINS_WELL = 0.5
_FAR = 0.7
_ZERO_SCALE = 0.05
_WITHIN = "how costs differ within a data point, from one sampled value to another"


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
