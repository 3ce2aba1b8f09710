r"""An objective near the guide that made a rollout: signals times probability ratios, plus a KL divergence.

A step's surrogate is a function of the ``log q`` of its sites. Its derivative there is the signal ``W``, whatever
the estimator: a cost-to-go minus baselines, critics and control variates for the sample, or a summand for every
value of a finite site. The local objective replaces ``log q`` by the ratio to the guide ``q_0`` of the rollout,

    L(θ) = Σ_sites Σ_k W_k ρ_k + KL(q_θ || q_0),   ρ_k = q_θ(k) / q_0(k),   W_k = ∂S / ∂log q(k),

whose gradient at ``q_0`` is the step's own. The divergence stands for the costs ``log q`` of the guide's own sites,
which change with the guide; a site whose ``log q`` is no cost goes without. Backprop-Q's objective has costs that do
not change with the guide, and therefore no divergence. Both have the same gradient at ``q_0``. Of one site whose ``W``
are exact, ``L`` is the loss itself up to a constant. Only the guide runs again, with all sites held.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro.distributions import MaskedDistribution
from pyro.distributions.util import is_identically_zero, scale_and_mask
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_bpq.errors import UnsupportedSiteError
from pyro_bpq.graph.scg import cost_of_guide
from pyro_bpq.objectives.observation import Staged
from pyro_bpq.record.further import Hold
from pyro_bpq.record.laws import as_drawn, mapped, score_of
from pyro_bpq.record.statements import SkipCosts
from pyro_bpq.record.watch import gradients_of, traced_leaves
from pyro_bpq.rollout.runs import Run, SiteRecord
from pyro_bpq.step.site_batch import SiteBatch


@dataclass(frozen=True)
class Nearby:
    """The guide's sites under other parameters, at the values of the rollout."""

    log_q: tuple[dict[int, Tensor], ...]  # by rollout and class of sites, as :attr:`SiteBatch.log_q`
    kl: dict[str, Tensor]  # ``KL(q_0 || q_θ)`` of each site in nats, summed over plates, mean over particles
    # ``KL(q_θ || q_0)`` of each site, likewise. Its parents have the values of the rollout.
    reverse_kl: dict[str, Tensor]
    penalty: Tensor  # ``KL(q_θ || q_0)`` of all sites whose ``log q`` is a cost, scaled and masked as that, by particle

    @property
    def total_kl(self) -> Tensor:
        """Sum of ``kl`` over sites, in nats."""
        return torch.stack(list(self.kl.values())).sum() if self.kl else torch.zeros(())


class LocalObjective:
    """Signals of one rollout."""

    def __init__(self, items: Sequence[Staged], num_particles: int) -> None:
        _check(items)
        self.items, self.num_particles = tuple(items), num_particles
        self.signals: list[dict[int, Tensor]] = []
        self.old: list[dict[int, Tensor]] = []
        for staged in items:
            assert staged.result is not None
            tensors = {c: staged.signals.batches[c].log_q for c in staged.signals.active}
            scored = [tensor for tensor in tensors.values() if tensor.requires_grad]
            slopes = gradients_of(staged.result.surrogate, scored, retain_graph=True)
            self.signals.append({c: slopes[tensor] for c, tensor in tensors.items() if tensor in slopes})
            self.old.append({c: _kept(tensor) for c, tensor in tensors.items()})
        # Distributions may hold the parameters themselves, which an optimiser changes in place.
        runs = [[traced.run for traced in staged.traced] for staged in items]
        self.frozen = [[{n: mapped(site.fn, _kept) for n, site in run.sites.items()} for run in own] for own in runs]

    def model_leaves(self) -> list[Tensor]:
        """The leaf parameters that the model reads."""
        return [leaf for staged in self.items for t in staged.traced for leaf in traced_leaves(t.model_trace).values()]

    def nearby(self) -> Nearby:
        """Runs the guide again with its present parameters and all sites held."""
        tables, penalties = [], []
        kl, reverse = dict[str, Tensor](), dict[str, Tensor]()
        for staged, signals, old, frozen in zip(self.items, self.signals, self.old, self.frozen, strict=True):
            runs = [_held_run(t.run, t.subsamples, p) for t, p in zip(staged.traced, staged.programs, strict=True)]
            rollout = replace(staged.signals.rollout, runs=tuple(runs))
            classes, free = staged.signals.layout.classes, _without_cost(staged)
            penalty = runs[0].loss.new_zeros(rollout.num_particles)
            tables.append({c: SiteBatch(classes[c], rollout).log_q for c in old})
            for c, cls in enumerate(classes):
                for name in cls.names:
                    pairs = {id(r): _divergences(f[name], r.sites[name]) for r, f in zip(runs, frozen, strict=True)}
                    for pair in pairs.values():
                        for total, part in zip((kl, reverse), pair, strict=True):
                            total[name] = total.get(name, 0.0) + part.sum() / self.num_particles
                    if c in signals and name not in free:
                        pick = functools.partial(_backward, pairs)
                        penalty = penalty + _by_particle(rollout.stack(pick, (name,), cls.spec.plates))[0]
            penalties.append(penalty)
        return Nearby(tuple(tables), kl, reverse, torch.cat(penalties))

    def value(self, nearby: Nearby, clip: float | None = None, penalty: bool = True) -> Tensor:
        r"""The local objective of each particle, ``(M,)``, in nats.

            Σ W ρ + KL,   or   Σ max(W ρ, W clip(ρ, 1 - ε, 1 + ε)) + KL,   KL = KL(q_θ || q_0) where log q is a cost

        References:
            | Proximal policy optimization algorithms (Schulman et al., 2017), the clipped surrogate objective
            | Backprop-Q (Xu et al., 2018), Appendix, Details for Controlled Policy Optimization, Eq. 16 and 17
        """
        totals = []
        for staged, signals, old, new in zip(self.items, self.signals, self.old, nearby.log_q, strict=True):
            rollout = staged.signals.rollout
            total = rollout.runs[0].loss.new_zeros(rollout.num_particles)
            for c, signal in signals.items():
                ratio = torch.where(signal != 0, new[c] - old[c], torch.zeros_like(signal)).exp()
                term = signal * ratio
                if clip is not None:
                    term = torch.maximum(term, signal * ratio.clamp(1.0 - clip, 1.0 + clip))
                total = total + _by_particle(term).sum(0)
            totals.append(total)
        return torch.cat(totals) + nearby.penalty if penalty else torch.cat(totals)


def _check(items: Sequence[Staged]) -> None:
    for staged in items:
        for c in staged.signals.active:
            spec, names = staged.signals.layout.classes[c].spec, staged.signals.layout.classes[c].names
            has_critic = spec.has_moments and spec.critic is not None and spec.estimator.uses_critic
            if has_critic or (spec.components is None and "program" in spec.estimator.needs):
                raise UnsupportedSiteError(
                    f"Sites {', '.join(map(repr, names))}: part of the gradient of {spec.estimator} comes through "
                    "parameters of the distribution and not through its probabilities; write ScoreFunction() there, or "
                    "use pyro.infer.SVI."
                )
        found = [name for name in staged.traced[0].enumerated if name in staged.traced[0].guide_trace.nodes]
        if found:
            raise UnsupportedSiteError(
                f"Sites {', '.join(map(repr, sorted(found)))} of the guide are summed out, so there are no values to "
                "hold them at; sample them, or use pyro.infer.SVI."
            )


def _held_run(run: Run, subsamples: Any, program: Any) -> Run:
    _, guide, args, kwargs = program
    values = {name: record.value.detach() for name, record in run.sites.items()}
    hold = Hold({**values, **subsamples})
    with hold, SkipCosts():
        guide(*args, **kwargs)
    sites = {}
    for name, record in run.sites.items():
        fn, value = hold.fns.get(name, record.fn), values[name]
        score: Any = score_of(fn, value)
        score = as_drawn(fn).log_prob(value) if is_identically_zero(score) else score
        sites[name] = replace(record, fn=fn, value=value, score=score)
    return replace(run, sites=sites)


def _without_cost(staged: Staged) -> frozenset[str]:
    """Sites whose ``log q`` is no cost."""
    traced = staged.traced[0]
    if traced.only_costs:
        return frozenset(traced.run.sites)
    return traced.untraced | {name for name in traced.run.sites if cost_of_guide(name) not in traced.run.costs}


def _divergences(old: Any, record: SiteRecord) -> tuple[Tensor, Tensor]:
    """``KL(q_0 || q_θ)`` and ``KL(q_θ || q_0)`` of each row.

    Analytic where they are registered, else from the sample, as under masks within an event. Other masks hide nothing.
    """
    new = record.fn
    while isinstance(new, MaskedDistribution):
        old, new = old.base_dist, new.base_dist
    with contextlib.suppress(NotImplementedError):
        if as_drawn(new) is new:
            return kl_divergence(old, new), kl_divergence(new, old)
    # Unbiased under q_0 and never negative; the curvature is the sampled Fisher information.
    log_ratio = new.log_prob(record.value) - old.log_prob(record.value)
    ratio = log_ratio.exp()
    return ratio - 1.0 - log_ratio, ratio * log_ratio - ratio + 1.0


def _backward(pairs: Mapping[int, tuple[Tensor, Tensor]], run: Run, name: str) -> Tensor:
    return scale_and_mask(pairs[id(run)][1], run.sites[name].scale, run.sites[name].mask)


def _by_particle(tensor: Tensor) -> Tensor:
    """Sums ``(G, M, ...)`` to ``(G, M)``."""
    return tensor.reshape(*tensor.shape[:2], -1).sum(-1)


def _kept(tensor: Tensor) -> Tensor:
    """A tensor that stays as it is, without gradient."""
    return tensor.detach().clone()
