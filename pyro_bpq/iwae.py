r"""``TraceBackpropQ_IWAE``: the importance-weighted bound, with leave-one-out signals for discrete sites."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.infer import ELBO
from pyro.util import warn_if_nan
from torch import Tensor, nn

from pyro_bpq.config import SiteOptions
from pyro_bpq.cost_statement import SkipCosts
from pyro_bpq.errors import OptionError, PlateError, UnsupportedSiteError
from pyro_bpq.estimators import Estimator, Pathwise, ScoreFunction
from pyro_bpq.estimators.base import SiteInfo
from pyro_bpq.options import check_not_traced
from pyro_bpq.tracing import TracedRun, trace_run

__all__ = ["TraceBackpropQ_IWAE", "multi_sample_bound"]

_MEANS = ("geometric", "arithmetic", None)


class TraceBackpropQ_IWAE(ELBO, nn.Module):
    r"""Importance-weighted bound on the evidence, with unbiased gradients for sites of any kind.

    .. math::
        J = -E\Big[\log\tfrac1K\textstyle\sum_k w_k\Big],\quad
        \nabla J = -E\Big[\sum_k (\hat L - \hat L_{-k})\,\nabla\log q(z_k) + \sum_k \tilde w_k\,\nabla\log w_k\Big]

    with ``w = exp(log p - log q - costs)``, normalised ``w̃``, ``L̂ = log mean w``. ``L̂_-k`` has ``w_k`` replaced by
    the geometric mean of the other weights, or leaves it out (arithmetic mean); it does not depend on ``z_k``.
    The first sum runs over the sites that are not reparameterised, the others have pathwise gradients.

    Args:
        num_particles: Number of samples ``K`` of one bound, at least 1.
        num_outer: Number of independent bounds whose mean is taken.
        plate: Name of an outermost plate that all sites are in, such as the data points': every row then has
            weights and a bound of its own. ``None``: one weight for all that a sample draws.
        baseline: ``"geometric"`` or ``"arithmetic"`` mean of the other samples' weights, or ``None``: the plain
            score function.
        max_plate_nesting: As in Pyro's ELBOs.
        vectorize_particles: Whether all samples run in one vectorised call.

    Raises:
        OptionError: If an option is out of range.
        PlateError: If ``plate`` is not a plate of every site.

    References:
        | Importance Weighted Autoencoders (Burda et al., 2016), Eqs. 8 and 14
        | Variational Inference for Monte Carlo Objectives (Mnih and Rezende, 2016), Eqs. 8 to 11
    """

    def __init__(
        self,
        num_particles: int = 5,
        num_outer: int = 1,
        plate: str | None = None,
        baseline: str | None = "geometric",
        max_plate_nesting: float = float("inf"),
        vectorize_particles: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        if num_particles < 1 or num_outer < 1:
            raise OptionError(f"num_particles={num_particles!r}, num_outer={num_outer!r}: write positive numbers.")
        if baseline not in _MEANS:
            raise OptionError(f'baseline={baseline!r}: write "geometric", "arithmetic" or None.')
        ELBO.__init__(
            self,
            num_particles=num_particles * num_outer,
            max_plate_nesting=max_plate_nesting,
            vectorize_particles=vectorize_particles,
        )
        self.num_inner, self.num_outer, self.plate, self.baseline = num_particles, num_outer, plate, baseline

    __call__ = ELBO.__call__

    def forward(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The same as :meth:`differentiable_loss`."""
        return self.differentiable_loss(model, guide, *args, **kwargs)

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the bound, in nats, of one draw of all samples.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments.
            **kwargs: Their keyword arguments.

        Returns:
            The loss.
        """
        with torch.no_grad():
            return float(self.differentiable_loss(model, guide, *args, **kwargs))

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Adds the gradients of the loss to ``.grad``.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments.
            **kwargs: Their keyword arguments.

        Returns:
            The loss, minus the bound, in nats.
        """
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        if loss.requires_grad:
            loss.backward()
        return float(loss.detach())

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss, whose ``backward`` gives the gradient estimate.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments.
            **kwargs: Their keyword arguments.

        Returns:
            A scalar: minus the bound, in nats.
        """
        check_not_traced()
        runs = list(self._get_traces(model, guide, args, kwargs))
        rows = [self._rows(run) for run in runs]
        drawn = [run.subsamples[self.plate] for run in runs if self.plate in run.subsamples]
        if any(not torch.equal(drawn[0], index) for index in drawn[1:]):
            raise PlateError(
                f"Each of the samples of plate {self.plate!r} drew a subsample of its own, so that no row has more "
                "than one. Write vectorize_particles=True, or hand minibatches to the model."
            )
        log_w, score = torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])
        shape, scale = (self.num_outer, self.num_inner, -1), rows[0][2] / self.num_outer
        loss, surrogate = multi_sample_bound(log_w.reshape(shape), score.reshape(shape), self.baseline)
        value, surrogate = scale * loss, scale * surrogate
        warn_if_nan(value, "loss")
        return value + (surrogate - surrogate.detach())

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> TracedRun:
        return trace_run(model, guide, args, kwargs, self.max_plate_nesting, _choose, self.num_particles)

    def _guess_max_plate_nesting(self, model: Any, guide: Any, args: Any, kwargs: Any) -> None:
        super()._guess_max_plate_nesting(SkipCosts()(model), SkipCosts()(guide), args, kwargs)

    def _rows(self, traced: TracedRun) -> tuple[Tensor, Tensor, float]:
        """Log-weights with their gradients, and ``log q`` of the sites that need it, ``(samples, rows)`` each."""
        for name, info in traced.infos.items():
            _choose(info, traced.options[name])
        dim, scale = (None, 1.0) if self.plate is None else _row_dim(traced, self.plate)
        costs = list(traced.run.costs.values())
        scores = [record.score for record in traced.run.sites.values() if record.score is not None]
        log_w = -sum((self._reduce(cost, dim) for cost in costs), costs[0].new_zeros((1, 1))) / scale
        score = sum((self._reduce(log_q, dim) for log_q in scores), torch.zeros_like(log_w.detach()))
        return log_w, score.expand_as(log_w), scale

    def _reduce(self, value: Tensor, dim: int | None) -> Tensor:
        """From a batch shape to ``(samples, rows)``."""
        if self.vectorize_particles and self.num_particles > 1:
            ndim = int(self.max_plate_nesting)
            value = value.reshape((1,) * (ndim - value.dim()) + value.shape)
        else:
            value = value.unsqueeze(0)
        if dim is not None:
            return value.movedim(dim, 1).reshape(value.shape[0], value.shape[dim], -1).sum(-1)
        return value.reshape(value.shape[0], -1).sum(1, keepdim=True)


def multi_sample_bound(log_w: Tensor, score: Tensor, baseline: str | None) -> tuple[Tensor, Tensor]:
    r"""Minus the bound, and what has its gradient in expectation.

    Args:
        log_w: Log-weights ``(outer, K, rows)`` in nats, with gradient.
        score: ``log q`` of the sites that are not reparameterised, same shape, with gradient.
        baseline: ``"geometric"``, ``"arithmetic"`` or ``None``.

    Returns:
        The sum over outer samples and rows, detached, and the surrogate, a scalar.
    """
    number = log_w.shape[1]
    bound = log_w.logsumexp(1) - math.log(number)
    with torch.no_grad():
        signal = bound.unsqueeze(1)
        if baseline is not None and number > 1:
            signal = signal - _without_each(log_w, baseline)
    return -bound.detach().sum(), -(signal * score).sum() - bound.sum()


def _without_each(log_w: Tensor, baseline: str) -> Tensor:
    """``L̂_-k`` of every sample."""
    number = log_w.shape[1]
    own = torch.eye(number, dtype=torch.bool, device=log_w.device).unsqueeze(-1)
    # (outer, k, samples, rows)
    others = log_w.unsqueeze(1).expand(-1, number, -1, -1)
    if baseline == "arithmetic":
        return others.masked_fill(own, -math.inf).logsumexp(2) - math.log(number - 1)
    mean = others.masked_fill(own, 0.0).sum(2, keepdim=True) / (number - 1)
    return torch.where(own, mean, others).logsumexp(2) - math.log(number)


def _row_dim(traced: TracedRun, plate: str) -> tuple[int, float]:
    """Dimension of the rows, and the scale by which the plate's subsample stands for all."""
    dim = None
    for name, plates, *_ in traced.key:
        found = next((p.dim for p in plates if p.name == plate), None)
        if found is None:
            raise PlateError(
                f"Site {name!r} is not in the plate {plate!r} (its plates: {[p.name for p in plates]}), so its rows "
                "have no weights of their own; write plate=None."
            )
        dim = found
    assert dim is not None
    nodes = (*traced.guide_trace.nodes.values(), *traced.model_trace.nodes.values())
    frames = [f for node in nodes for f in node.get("cond_indep_stack", ()) if f.name == plate]
    full = frames[0].full_size
    return dim, 1.0 if full is None or full < 0 else full / frames[0].size


def _choose(site: SiteInfo, options: SiteOptions) -> Estimator:
    """Pathwise where that is possible, unless the site says otherwise."""
    chosen = options.estimator or (Pathwise() if site.has_rsample else ScoreFunction())
    reason = chosen.unsupported(site)
    if reason is None and not isinstance(chosen, (Pathwise, ScoreFunction)):
        reason = f"{chosen} is for one-sample objectives; write ScoreFunction() or Pathwise(), or leave it out"
    if reason is None and (options.critic or options.baseline is not None):
        reason = "TraceBackpropQ_IWAE has neither critics nor baselines per site; leave them out"
    if reason is not None:
        raise UnsupportedSiteError(f"Site {site.name!r} ({site.distribution}): {reason}.")
    return chosen
