r"""Findings about the gradient: whether it is there, how noisy it is, and how long it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pyro_bpq.diagnostics.findings import Finding
from pyro_bpq.diagnostics.look import Look, listed
from pyro_bpq.diagnostics.moments import COSTS, site_gradients
from pyro_bpq.diagnostics.sampling import untouched
from pyro_bpq.estimators import AllAction, SecondRun
from pyro_bpq.reruns.flipped_costs import flipped_costs
from pyro_bpq.short import number, short
from pyro_bpq.testing.expected import backward
from pyro_bpq.testing.parameters import GradientReader
from pyro_bpq.tracing.watch import samples

_NOISE_SAMPLES, _ZERO_SAMPLES = 50, 8
# Steps in which a parameter without a gradient is looked at again, and steps that are timed.
_TRIES, _TIMED = 5, 5
# An extra run of so many rows is timed; it is reported from this share of a step on.
_MANY_ROWS, _MOST = 32, 0.5


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
    reached = _reached(look)
    count = f"{moments.num_samples} {'outcomes' if moments.is_exact else 'sampled steps'}"
    cut = [name for name in still if name not in reached]
    if cut:
        sites = _without_parameters(look)
        where = f" The distribution of {listed(sites)} has no gradient to any parameter: look there." if sites else ""
        yield Finding(
            "no gradient",
            "warning",
            f"The guide's parameters {listed(cut)} get no gradient in any of {count}: they will never learn.{where}",
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


def _reached(look: Look) -> set[str]:
    """The parameters that the surrogate of some steps depends on."""
    found: set[int] = set()
    with untouched(look.elbo, look.seed), torch.enable_grad(), GradientReader(*look.program[:2], None) as reader:
        for _ in range(_TRIES):
            reader.clear()
            steps = site_gradients(look.elbo, reader, look.program)
            found |= {leaf for site, leaf in steps if site is None}
        reader.add_modules()
        return {name for name, leaf in reader.leaves.items() if id(leaf) in found}


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
    infos = {name: info for run in look.tracked for name, info in run.infos.items()}
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


# Time.


def check_time(look: Look) -> Iterator[Finding]:
    """An extra run of the model that takes most of a step."""
    flips = look.planned.plan.flips
    if flips is None or flips.rows < _MANY_ROWS or len(look.seen.items) != 1:
        return
    whole, extra = _times(look)
    if extra < _MOST * whole:
        return
    particles = "num_particles=4" if look.against_one_call else "num_particles=4, vectorize_particles=True"
    sites = tuple(flips.start)
    yield Finding(
        "slow extra run",
        "hint",
        f"{min(1.0, extra / whole):.0%} of the time of a step ({number(1e3 * extra)} of {number(1e3 * whole)} ms) goes "
        f"into running the model once more, at {flips.rows} values at once, to know what each value of "
        f"{listed(sites)} would cost.",
        f"If steps are too slow: estimator=AllAction(exact=False), or estimator=ScoreFunction(LeaveOneOut()) with "
        f"{particles}. Each step is then faster and noisier; compare_estimators(model, guide, *args) tells which is "
        "worth it.",
        sites,
    )


def _times(look: Look) -> tuple[float, float]:
    """Seconds of the processor for a step with its backward pass, and for its extra run."""
    elbo, mark = look.elbo, look.elbo.mark()
    plan, item = look.planned.plan, look.seen.items[0]

    def extra() -> None:
        rollout, runs = item.signals.rollout, elbo.runner.row_runs
        flipped_costs(plan, item.traced, rollout, item.programs[0], runs, learning=False)

    try:
        with untouched(elbo, look.seed), torch.enable_grad(), GradientReader(*look.program[:2], None) as reader:

            def step() -> None:
                reader.clear()
                backward(elbo, look.program, use_differentiable_loss=True)

            whole, part = _middle(step, extra)
    finally:
        elbo.go_back(mark)
    return whole, part


def _middle(*parts: Callable[[], None]) -> Sequence[float]:
    """Median time of each of some calls, which take turns."""
    found: list[list[float]] = [[] for _ in parts]
    for _ in range(_TIMED + 1):
        for part, times in zip(parts, found, strict=True):
            start = time.process_time()
            part()
            times.append(time.process_time() - start)
    # The first turn is not counted: it may build objects that later turns use.
    return [statistics.median(times[1:]) for times in found]
