"""The stacked tensors of one class of sites in one step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import hardtanh

from pyro_bpq.errors import PlateError, UnsupportedSiteError
from pyro_bpq.rollout.features import (
    Components,
    Neighbours,
    Standardised,
    batch_of,
    count_mean,
    dispersion_score,
    element_log_prob,
    encode_real,
    standardise,
)
from pyro_bpq.rollout.runs import Rollout, SiteRecord
from pyro_bpq.step.classes import SiteClass


class SiteBatch:
    """The tensors of ``G`` like-shaped sites, stacked on first access.

    Args:
        cls: The class of sites.
        rollout: The runs.
        by_value: Whether gradients of finite sites go through ``log q`` of every value, rather than of the sample.
    """

    def __init__(self, cls: SiteClass, rollout: Rollout, by_value: bool = True) -> None:
        self.cls, self.rollout = cls, rollout
        self.by_value = by_value and cls.spec.components is not None and not cls.spec.estimator.is_pathwise
        self.plates = cls.spec.plates
        self.batch_shape = rollout.batch_shape(self.plates)

    @property
    def components(self) -> Components:
        """The finite components of the sites."""
        assert self.cls.spec.components is not None
        return self.cls.spec.components

    def stack(self, pick: Callable[[SiteRecord], Any], event_ndim: int) -> Tensor:
        """Stacks one tensor per site into ``(G, M, plates, event)``."""
        try:
            return self.rollout.stack(lambda run, n: pick(run.sites[n]), self.cls.names, self.plates, event_ndim)
        except UnsupportedSiteError:
            raise
        except RuntimeError as error:
            plates = ", ".join(f"{p.name} (dim {p.dim})" for p in self.plates) or "none"
            raise PlateError(
                f"Sites {list(self.cls.names)}: a tensor does not fit the plates {plates} of batch shape "
                f"{self.batch_shape[1:]}. Put every batch dimension into a pyro.plate or into the event "
                f"with .to_event()."
            ) from error

    @cached_property
    def log_probs(self) -> Tensor:
        """``log q`` of every value of every component, ``(G, M, plates, D, K)``, with gradient."""
        split = self.components
        table = split.log_probs(self.stack(lambda site: split.of_draws(site.fn), split.event_ndim))
        # Impossible values have weight zero. Their log q is kept finite, since 0 * inf is NaN.
        return table.clamp(min=max(-1e6, torch.finfo(table.dtype).min))

    @cached_property
    def log_odds(self) -> Tensor:
        """Log-odds of Bernoulli sites, ``(G, M, plates, D)``, with gradient."""
        stacked = self.stack(lambda site: self.components.of_draws(site.fn), self.components.event_ndim)
        most = min(1e6, torch.finfo(stacked.dtype).max)
        # Its backward pass takes a fraction of the time of that of clamp().
        return hardtanh(self.widened(stacked), -most, most)

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities of all values, detached."""
        return self.log_probs.detach().exp()

    @cached_property
    def index(self) -> Tensor:
        """Index of the sampled value, ``(G, M, plates, D)``."""
        split = self.components
        if split.kind == "support":
            return self.stack(lambda site: split.index(site.value.detach(), site.fn), 1)
        return split.index(self.value)

    @cached_property
    def value(self) -> Tensor:
        """Sampled values, ``(G, M, plates, event)``, detached."""
        return self.stack(lambda site: site.value.detach(), self.cls.value_ndim)

    @cached_property
    def moments(self) -> Standardised:
        """The centred powers of sampled values without finite components, ``(G, M, plates, D, ...)``."""
        ndim = self.cls.value_ndim
        mean, variance = self.stack(lambda site: site.fn.mean, ndim), self.stack(lambda site: site.fn.variance, ndim)
        value, mean, variance = map(self.widened, (self.value, mean, variance))
        return standardise(value.to(mean.dtype), mean, variance)

    @cached_property
    def means(self) -> Tensor:
        """The means of counts, ``(G, M, plates, D)``, with gradient."""
        return self.widened(self.stack(lambda site: count_mean(site.fn), self.cls.value_ndim))

    @cached_property
    def near(self) -> Neighbours:
        """The values next to counts, ``(G, M, plates, D)``."""

        def part(i: int) -> Tensor:
            return self.widened(self.stack(lambda site: site.near[i], self.cls.value_ndim))

        return Neighbours(part(0), part(1), part(2))

    @cached_property
    def dispersion(self) -> Tensor | None:
        """``log q`` of negative binomials as a function of ``total_count`` alone, ``(G, M, plates)``, or ``None``."""
        scores = {id(site): dispersion_score(site.fn, site.value) for site in self._records}
        if all(score is None for score in scores.values()):
            return None
        return self.stack(lambda site: self.like.new_zeros(()) if scores[id(site)] is None else scores[id(site)], 0)

    def widened(self, tensor: Tensor) -> Tensor:
        """A tensor ``(G, M, plates, event)`` like values, with one event dimension."""
        return tensor.reshape(*tensor.shape[: tensor.dim() - self.cls.value_ndim], self.cls.width)

    @property
    def like(self) -> Tensor:
        """A detached tensor with the dtype and device of the sites' parameters."""
        if self.cls.spec.components is not None:
            return self.components.parameters(self._records[0].fn).detach()
        return self.moments.mean if self.cls.spec.has_moments else self.encoded

    @cached_property
    def score(self) -> Tensor:
        """``log q`` of the sample, ``(G, M, plates)``, neither scaled nor masked, with gradient."""
        return self.sampled(self.log_probs).sum(-1) if self.by_value else self.stack(lambda site: site.score, 0)

    @cached_property
    def component_score(self) -> Tensor:
        """``log q`` of each component of the sample, ``(G, M, plates, D)``, with gradient."""
        if self.by_value:
            return self.sampled(self.log_probs)

        def pick(site: SiteRecord) -> Tensor:
            log_prob, _ = element_log_prob(site.fn, site.value.detach())
            return log_prob.reshape(*batch_of(site.fn, site.value), -1)

        return self.stack(pick, 1)

    @property
    def log_q(self) -> Tensor:
        """``log q`` of all values if ``by_value``, else of the sample, with gradient."""
        return self.log_probs if self.by_value else self.score

    @cached_property
    def encoded(self) -> Tensor:
        """Sampled values as critic inputs, ``(G, M, plates, width)``, detached.

        Finite components are centred: -1 and 1, or one-hot minus ``1 / K``. Other values are compressed by ``asinh``.
        """
        if self.cls.spec.components is None:
            return encode_real(self.widened(self.value))
        if self.components.cardinality == 2:
            return 2.0 * self.index.to(self.probs.dtype) - 1.0
        cardinality = self.components.cardinality
        # one_hot() would wait for the device.
        hot = self.index.unsqueeze(-1) == torch.arange(cardinality, device=self.index.device)
        return (hot.to(self.probs.dtype) - 1.0 / cardinality).flatten(-2)

    @cached_property
    def parameters(self) -> Tensor:
        """Parameters of the distributions as critic inputs, detached.

        ``(G, M, plates, width)``: half the log-odds of binary components or the centred log-probabilities, clipped.
        Without finite components ``(G, M, plates, 2 width)``: ``asinh`` of the mean, then the log standard deviation.
        """
        if self.cls.spec.components is None:
            mean, spread = self.moments.mean, self.moments.spread
            return torch.cat((encode_real(mean), spread.log().clamp(-6.0, 6.0)), -1)
        log_probs = self.log_probs.detach()
        if self.components.cardinality == 2:
            return (log_probs[..., 1] - log_probs[..., 0]).clamp(-6.0, 6.0) / 2.0
        return (log_probs - log_probs.mean(-1, keepdim=True)).clamp(-6.0, 6.0).flatten(-2) / 2.0

    @cached_property
    def context(self) -> Tensor:
        """The user's context features, ``(G, M, plates, C)``, detached."""
        return self.stack(lambda site: site.context, 1).detach()

    @cached_property
    def baseline(self) -> Tensor:
        """The user's predictions of the cost-to-go, ``(G, M, plates)``, with gradient."""
        given = {id(site): site.baseline() for site in self._records if site.baseline is not None}
        return self.stack(lambda site: given[id(site)], 0)

    @cached_property
    def scale(self) -> Tensor:
        """Scale of the sites, broadcastable to ``(G, M, plates)``."""
        return self._scales("scale")

    def own_p(self) -> Tensor:
        """The cost ``-log p`` of the model at every value of the site, ``(G, M, plates, D, K)``, detached."""
        split = self.components
        stacked = self.stack(lambda site: split.parameters(site.prior).detach(), split.event_ndim)
        return -self.weighted(split.log_probs(stacked), of="prior_")

    def weighted(self, table: Tensor, of: str = "") -> Tensor:
        """A table ``(G, M, plates, D, K)`` times scale and mask of the sites, or of the model's, ``of="prior_"``."""

        def mask(site: SiteRecord) -> Tensor:
            mask = getattr(site, f"{of}mask")
            return table.new_ones(()) if mask is None else torch.as_tensor(mask, device=table.device).to(table.dtype)

        table = table * (self._scales("prior_scale") if of else self.scale)[..., None, None]
        if all(getattr(site, f"{of}mask") is None for site in self._records):
            return table
        return table * self.stack(mask, 0)[..., None, None]

    def sampled(self, table: Tensor) -> Tensor:
        """The entries of a table ``(..., D, K)`` at the sampled values, ``(..., D)``."""
        return table.gather(-1, self.index.unsqueeze(-1)).squeeze(-1)

    def centred(self, table: Tensor) -> Tensor:
        r"""``Σ_d (T[d, x_d] - E_k T[d, k])``, which has expectation zero given all values sampled before."""
        return (self.sampled(table) - (self.probs * table).sum(-1)).sum(-1)

    @property
    def _records(self) -> list[SiteRecord]:
        return [run.sites[name] for run in self.rollout.runs for name in self.cls.names]

    def _scales(self, name: str) -> Tensor:
        def scale(site: SiteRecord) -> Tensor:
            own = getattr(site, name)
            # A scale may read sampled values and parameters.
            return own.detach().to(like) if isinstance(own, Tensor) else like.new_full((), own)

        like = self.like
        return self.stack(scale, 0)
