r"""Findings about how the program is written and what its sites get for that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pyro_bpq.diagnostics.findings import Finding, Look, listed
from pyro_bpq.estimators import Estimator, LeaveOneOut, ScoreFunction
from pyro_bpq.estimators.base import SiteInfo
from pyro_bpq.plan.particles import num_particles_for
from pyro_bpq.plan.plan import Plan
from pyro_bpq.short import number, short
from pyro_bpq.tracing.traced_run import TracedRun
from pyro_bpq.tracing.watch import samples

# A site draws one value only if it does so with at least this probability.
_CERTAIN = 0.999


def check_supports(look: Look) -> Iterator[Finding]:
    """Sites with too many values to sum over."""
    limit = look.elbo.planner.max_support
    for name, spec in look.specs.items():
        components, estimator = look.infos[name].components if name in look.infos else None, spec.estimator
        if components is None or components.cardinality <= limit or not estimator.takes_baseline:
            continue
        yield Finding(
            "support too large",
            "warning",
            f"Site {name!r} has {components.cardinality} values. By default up to {limit} are summed over, which "
            f"takes the noise of the draw away; with more the site uses {estimator!r}, which is noisier.",
            'If memory allows, write infer={"bpq": {"estimator": AllAction(exact=False)}} at the site; or split the '
            "value into several sites; or use more particles.",
            (name,),
        )


def check_collapse(look: Look) -> Iterator[Finding]:
    """Sites whose law has come to one value, and what each site diverges from its prior."""
    runs, traces = look.seen.runs, [(samples(run.guide_trace), samples(run.model_trace)) for run in look.seen.runs]
    still = [name for name, info in look.infos.items() if name in runs[0].run.sites and _draws_one(runs[0], info)]
    if not still:
        return
    nats = dict[str, float]()
    for guide, model in traces:
        for name in look.specs.keys() & guide.keys() & model.keys():
            cost = (guide[name]["log_prob_sum"] - model[name]["log_prob_sum"]).detach()
            nats[name] = nats.get(name, 0.0) + float(cost) / look.elbo.num_particles
    shown = ", ".join(f"{name!r} {number(nats[name])}" for name in look.specs if name in nats)
    yield Finding(
        "collapsed",
        "warning",
        f"{listed(still)}: the guide draws one value only, in at least {_CERTAIN:.1%} of all draws, and learns "
        f"next to nothing about others. log q - log p of each site in this step, in nats: {shown}.",
        "If the posterior is that sure, this is right. Else the guide has settled too early: begin with logits near "
        "zero, take a smaller learning rate for the guide or more particles, or scale log q - log p up slowly "
        "(pyro.poutine.scale). Bounded logits, as by 5 * torch.tanh(logits / 5), keep other values in play.",
        tuple(still),
    )


def _draws_one(run: TracedRun, info: SiteInfo) -> bool:
    """Whether a site has one and the same value in nearly all draws, in all rows."""
    split, fn = info.components, run.run.sites[info.name].fn
    if split is None or split.cardinality < 2:
        return False
    laws = split.log_probs(split.parameters(fn).detach()).exp().reshape(-1, split.size, split.cardinality)
    return bool((laws.mean(0).amax(-1) > _CERTAIN).all())


def check_structure(look: Look) -> Iterator[Finding]:
    """Sampled values that leave torch."""
    escaped = sorted(frozenset().union(*(run.escaped_sites for run in look.tracked)))
    if not escaped:
        return
    structure = look.elbo.runner.recordings
    cached = structure.mode in ("static", "dense") or structure.is_ordered
    crossing = (
        " Rows of a plate may have met, so that each row is charged with the costs of all rows."
        if any(run.crosses for run in look.tracked)
        else ""
    )
    yield Finding(
        "structure not cached",
        "hint" if cached else "warning",
        f"The values of {listed(escaped)} leave torch (.item(), int(), if, .numpy(), a list index): "
        + ("" if cached else "every step is watched anew, which is slow, ")
        + f"the model is not run at other values, and later sites count as dependent on them.{crossing}",
        "Where Python need not look at the value, write torch.where, tensor indexing or masks instead. Where it must, "
        "this is the right behaviour.",
        tuple(escaped),
    )


def check_hidden_rsample(look: Look) -> Iterator[Finding]:
    """Sites whose distribution could be reparameterised, if ``has_rsample`` were not switched off."""
    found: dict[str, list[str]] = {}
    run = look.seen.runs[0]
    for name, spec in look.specs.items():
        # Who has chosen an estimator at the site knows; for some of these rsample is hidden by the library itself.
        if name in run.run.sites and run.options[name].estimator is None and not spec.estimator.is_pathwise:
            kind = _hides_rsample(run.run.sites[name].fn)
            if kind is not None:
                found.setdefault(kind, []).append(name)
    for kind, sites in found.items():
        yield Finding(
            "rsample hidden",
            "warning",
            f"{listed(sites)}: {kind} can be reparameterised, but its has_rsample is False here. So the gradient does "
            "not follow the sampled value into the costs (the pathwise gradient, which has little noise); it uses "
            f"{look.specs[sites[0]].estimator!r}.",
            "Write the plain distribution (dist.Normal, not NonreparameterizedNormal), and leave fn.has_rsample "
            "alone. If costs have no gradient with respect to the value, leave it as it is.",
            tuple(sites),
        )


def _hides_rsample(fn: Any) -> str | None:
    """Name of the class whose ``rsample`` is switched off, in the distribution or in what it wraps."""
    while fn is not None:
        is_able = any(vars(base).get("has_rsample") is True for base in type(fn).__mro__)
        if is_able and not fn.has_rsample:
            return type(fn).__name__
        fn = getattr(fn, "base_dist", None)
    return None


def check_baseline_options(look: Look) -> Iterator[Finding]:
    """Pyro's baseline options where the default would do better without them."""
    run = look.seen.runs[0]
    sites = [name for name, options in run.options.items() if options.baseline is not None and name in look.specs]
    if not sites or run.key != look.planned.key:
        return
    plan, particles = _without_baselines(look, run)
    better = {name: spec.estimator for name, spec in plan.layout.specs.items()}
    texts = []
    if particles > look.elbo.num_particles:
        texts.append(f"{particles} particles would run in one call and serve each other as baselines")
    gains = {name: better[name] for name in sites if _is_gain(better[name], look.specs[name].estimator)}
    for estimator in dict.fromkeys(gains.values()):
        served = [name for name, other in gains.items() if other == estimator]
        texts.append(f"{listed(served)} would be served by {short(estimator)} ({plan.rules[served[0]]})")
    if texts:
        yield Finding(
            "baseline options",
            "hint",
            f"{listed(sites)}: the options infer={{'baseline': {{...}}}} are those of Pyro's TraceGraph_ELBO. They "
            f"keep the default's own choice away: without them {'; '.join(texts)}.",
            "Remove them from the sample statement (pyro.sample(..., infer={'baseline': ...})), and see with "
            "compare_estimators(model, guide, *args) whether it helps.",
            tuple(gains) or tuple(sites),
        )


def _without_baselines(look: Look, run: TracedRun) -> tuple[Plan, int]:
    """What would be done if no site had such options, and with how many particles."""
    elbo, planned = look.elbo, look.planned
    plain = replace(run, options={name: replace(options, baseline=None) for name, options in run.options.items()})
    plans = elbo.runner.plans
    plan = elbo.planner.plan(plain, planned.graph, planned.facts, plans.works("slopes", run.key))
    number = elbo.num_particles
    if elbo.particles.is_open and not planned.facts.is_dynamic:
        number = num_particles_for(plan, plain, number, planned.facts.recorded and planned.facts.recorded.work)
    if number > elbo.num_particles and look.against_one_call:
        number = elbo.num_particles
    return plan, number


def _is_gain(other: Estimator, present: Estimator) -> bool:
    # A running mean is no better than a baseline that somebody has thought of.
    is_running = isinstance(other, ScoreFunction) and not isinstance(other.baseline, LeaveOneOut)
    return other != present and not is_running
