r"""Drop-ins for ``pyro.infer.SVI`` that limit how far a step moves the guide."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.util import zero_grads
from torch import Tensor

from pyro_bpq.compiled.subject import distinct
from pyro_bpq.errors import OptionError, check_option, check_whole, is_real
from pyro_bpq.objectives.elbo import TraceBackpropQ_ELBO
from pyro_bpq.objectives.entry import warn_of_overrides
from pyro_bpq.objectives.local_objective import LocalObjective, Nearby
from pyro_bpq.record.watch import gradients_of, leaf_of
from pyro_bpq.rollout.runs import Program

_T = TypeVar("_T")


@dataclass(frozen=True)
class ControlledStep:
    """Report of a controlled step.

    Args:
        loss: Loss of the rollout, minus the ELBO, in nats.
        kl: ``KL(q_0 || q)`` of the step at each site, in nats: summed over plates, mean over particles. It is
            ``KL(q || q_0)`` for ``TrustRegionSVI(divergence="new")``, which limits that.
        epochs: Number of gradient steps on the rollout. A trust-region step has 1 if it was accepted and 0 if not.
        improvement: Decrease of the local objective, in nats.
        stopped_early: Whether ``target_kl`` ended the epochs.
    """

    loss: float
    kl: dict[str, float] = field(default_factory=dict)
    epochs: int = 0
    improvement: float = 0.0
    stopped_early: bool = False

    @property
    def total_kl(self) -> float:
        """The sum of ``kl`` over sites."""
        return sum(self.kl.values(), 0.0)


def shown(svi: SVI) -> str:
    """A call with the options that are given by name."""
    options = [o.name for o in inspect.signature(type(svi)).parameters.values() if o.kind is o.KEYWORD_ONLY]
    return f"{type(svi).__name__}({', '.join(f'{name}={getattr(svi, name)!r}' for name in options)})"


class _ControlledSVI(SVI):
    """Base of both classes: takes a rollout and keeps its signals."""

    def __init__(self, model: Any, guide: Any, optim: Any, loss: TraceBackpropQ_ELBO, **kwargs: Any) -> None:
        if not isinstance(loss, TraceBackpropQ_ELBO):
            raise OptionError(f"{type(self).__name__}(loss={loss!r}): write loss=TraceBackpropQ_ELBO(...).")
        super().__init__(model, guide, optim, loss, **kwargs)  # type: ignore[no-untyped-call]
        own = f"is not called by {type(self).__name__}, which calls differentiable_loss: override that, or write SVI"
        warn_of_overrides(loss, ["loss_and_grads"], own)
        self.elbo = loss
        self.last: ControlledStep | None = None

    def __repr__(self) -> str:
        return f"{shown(self)[:-1]}, last={self.last})"

    def _rollout(self, args: Any, kwargs: Any) -> tuple[float, LocalObjective, list[Tensor]]:
        """Loss, local objective, and parameters, whose ``.grad`` holds the gradient of a plain step."""
        program = Program(self.model, self.guide, args, kwargs)
        (loss, objective), parameters = captured(lambda: self.elbo.loss_and_signals(program))
        return loss, objective, parameters


class ProximalSVI(_ControlledSVI):
    r"""SVI with several epochs on one rollout, by the clipped objective of proximal policy optimisation.

    The first epoch is a plain step: its gradient is the gradient of the ELBO. Later epochs run only the guide, at the
    values of the rollout. They change only the parameters that the ratios of non-reparameterised sites depend on:

        min Σ max(ρ W, clip(ρ, 1 - ε, 1 + ε) W) + KL(q_θ || q_0),   ρ = q_θ / q_0

    ``W`` is the signal that the estimator gives ``log q``. The divergence stands for the costs ``log q`` of the guide,
    which change with it; it is not clipped. Backprop-Q takes costs that do not change with the guide:
    ``penalty=False`` leaves the divergence out, and with ``QScoreFunction()`` the signal ``W`` is the learned ``Q``.
    That is the paper's objective. Both forms have the gradient of the ELBO in the first epoch. Later epochs of the
    paper's form push further from ``q_0``, since nothing tells them that ``log q`` grows.

    Clipping applies to every site, and to every value of a finite site. Only the first epoch calls the model.

    Args:
        model: The model.
        guide: The guide.
        optim: Pyro's optimiser.
        loss: A :class:`TraceBackpropQ_ELBO`.
        epochs: Number of gradient steps on a rollout; 1 is plain SVI.
        clip: ``ε``.
        target_kl: Epochs end when the total ``KL(q_0 || q_θ)`` in nats exceeds this number; ``None`` for no limit.
        penalty: Whether ``KL(q_θ || q_0)`` is added in later epochs; ``False`` for the paper's objective.

    Attributes:
        last: Report of the last step.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Proximal policy optimization algorithms (Schulman et al., 2017), the clipped surrogate objective
        | Backprop-Q (Xu et al., 2018), Appendix, Details for Controlled Policy Optimization, Eq. 17
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        optim: Any,
        loss: TraceBackpropQ_ELBO,
        *,
        epochs: int = 4,
        clip: float = 0.2,
        target_kl: float | None = None,
        penalty: bool = True,
    ) -> None:
        super().__init__(model, guide, optim, loss)
        self.epochs, self.clip, self.target_kl, self.penalty = epochs, clip, target_kl, penalty
        check_whole(self, "epochs", 1)
        check_option(self, "clip", is_real(clip) and 0.0 < clip < 1.0, "a number in (0, 1)")
        is_limit = target_kl is None or (is_real(target_kl) and target_kl > 0.0)
        check_option(self, "target_kl", is_limit, "a positive number or None")

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes the epochs of one rollout.

        Args:
            *args: Arguments of model and guide.
            **kwargs: Their keyword arguments.

        Returns:
            The loss of the rollout, minus the ELBO, in nats.
        """
        loss, objective, parameters = self._rollout(args, kwargs)
        start = sum(float(signal.sum()) for signals in objective.signals for signal in signals.values())
        self.optim(set(parameters))
        zero_grads(parameters)
        for done in range(1, self.epochs + 1):
            nearby, leaves = captured(objective.nearby)
            value = objective.value(nearby, self.clip, self.penalty).mean()
            stopped = self.target_kl is not None and float(nearby.total_kl.detach()) > self.target_kl
            if stopped or done == self.epochs or not value.requires_grad:
                break
            descend(self.optim, value, leaves)
        end = objective.value(nearby, None, self.penalty).detach().mean()
        improvement = start / self.elbo.num_particles - float(end)
        self.last = ControlledStep(loss, _numbers(nearby.kl), done, improvement, stopped and done < self.epochs)
        return loss


class TrustRegionSVI(_ControlledSVI):
    r"""SVI with a limit on the KL divergence of each guide step, by trust region policy optimisation.

        min_θ L(θ)   subject to   KL(q_0 || q_θ) ≤ δ in total, and at each site ≤ δ_site

    The direction solves ``F x = ∇L`` by conjugate gradients on products with the Fisher information ``F`` of all sites
    of the guide. A line search shortens the step until the local objective has decreased and the limits hold. If this
    never happens, the guide does not move.

    The parents of a site have the values of the rollout, which ``q_0`` drew. With the divergence in this direction the
    sum over sites is therefore the divergence of the whole guide. Backprop-Q limits the other direction,
    ``KL(q_θ || q_0) ≤ δ``, for each pair of a node and its parents: write ``divergence="new"`` with ``max_site_kl=δ``.
    To second order both divergences are the same, and so is the direction of the step; they differ in its length. A
    limit on ``KL(q_0 || q_θ)`` forbids giving up values that ``q_0`` draws. A limit on ``KL(q_θ || q_0)`` forbids
    taking up values that ``q_0`` makes rare.

    ``L`` may also depend on parameters other than through the ratios, e.g. through reparameterised values. This
    dependence enters linearly. Parameters that the model reads, or that no site of the guide
    depends on, take a step of the optimiser; the limit does not bound that step. The model runs as often as in a plain
    step.

    Args:
        model: The model.
        guide: The guide.
        optim: Pyro's optimiser, for the model's parameters.
        loss: A :class:`TraceBackpropQ_ELBO`.
        max_kl: Limit ``δ`` in nats, summed over sites and plates, mean over particles.
        max_site_kl: Limit ``δ_site``, or ``None``.
        divergence: ``"old"`` limits ``KL(q_0 || q_θ)``, the expectation under the old guide. ``"new"`` limits
            ``KL(q_θ || q_0)``, as in the paper.
        damping: Multiple of the identity added to ``F``, in units of the curvature of ``F`` along the gradient.
        iterations: Largest number of conjugate-gradient iterations.
        backtracks: Largest number of times that a step is shortened, to 0.8 of its length.
        confidence: Number of standard errors over particles that the decrease of the local objective must exceed.

    Attributes:
        last: Report of the last step.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Trust region policy optimization (Schulman et al., 2015), Appendix C
        | Backprop-Q (Xu et al., 2018), Appendix, Details for Controlled Policy Optimization, Eq. 16
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        optim: Any,
        loss: TraceBackpropQ_ELBO,
        *,
        max_kl: float = 0.01,
        max_site_kl: float | None = None,
        divergence: str = "old",
        damping: float = 0.01,
        iterations: int = 10,
        backtracks: int = 20,
        confidence: float = 1.0,
    ) -> None:
        super().__init__(model, guide, optim, loss)
        self.max_kl, self.max_site_kl = max_kl, math.inf if max_site_kl is None else max_site_kl
        self.divergence, self.confidence = divergence, confidence
        self.damping, self.iterations, self.backtracks = damping, iterations, backtracks
        for name, limit in (("max_kl", self.max_kl), ("max_site_kl", self.max_site_kl)):
            check_option(self, name, is_real(limit) and limit > 0.0, "a positive number of nats")
        for name, number in (("damping", damping), ("confidence", confidence)):
            check_option(self, name, is_real(number) and number >= 0.0, "a number of at least 0")
        check_whole(self, "iterations", 1)
        check_whole(self, "backtracks", 0)
        check_option(self, "divergence", divergence in ("old", "new"), '"old" or "new"')

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes one step.

        Args:
            *args: Arguments of model and guide.
            **kwargs: Their keyword arguments.

        Returns:
            The loss of the rollout, minus the ELBO, in nats.
        """
        loss, objective, parameters = self._rollout(args, kwargs)
        try:
            nearby, leaves = captured(objective.nearby)
            shared = set(objective.model_leaves())
            leaves = [leaf for leaf in leaves if leaf not in shared]
            slopes = gradients_of(nearby.total_kl, leaves, create_graph=True)
            self.last = ControlledStep(loss)
            if slopes:
                self._move(loss, objective, nearby, slopes)
            self.optim(set(parameters) - slopes.keys())
        finally:
            # A gradient that stayed would be added to that of the next step.
            zero_grads(parameters)
        return loss

    def _move(self, loss: float, objective: LocalObjective, nearby: Nearby, slopes: Mapping[Tensor, Tensor]) -> None:
        own, slope = [*slopes], _flat(slopes, slopes)
        gradient = _flat({leaf: leaf.grad for leaf in own if leaf.grad is not None}, own)
        each = objective.value(nearby)
        rest = gradient - _gradient(each.mean(), own)

        def curvature(vector: Tensor) -> Tensor:
            return _gradient((slope * vector).sum(), own)

        square = float(gradient @ gradient)
        if not 0.0 < square < math.inf:
            return
        damping = self.damping * max(float(gradient @ curvature(gradient).detach()) / square, 1e-12)
        direction = _conjugate_gradient(lambda v: curvature(v) + damping * v, gradient, self.iterations)
        quadratic = float(direction @ curvature(direction).detach())
        if not 0.0 < quadratic < math.inf:
            return
        # The factor 0.96 leaves a margin, because the quadratic form is only an approximation of the KL.
        full = -math.sqrt(2.0 * 0.96 * self.max_kl / quadratic) * direction
        start, is_accepted = _flat({leaf: leaf.detach() for leaf in own}, own), False
        try:
            for i in range(self.backtracks + 1):
                change = 0.8**i * full
                _assign(own, start + change)
                with torch.no_grad():
                    try:
                        found, _ = captured(objective.nearby)
                    except (ValueError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                        # Pyro's validation, or a Cholesky factor, where the step left the domain of a distribution.
                        continue
                    gains = each.detach() - objective.value(found) - rest @ change
                improvement = float(gains.mean())
                error = float(gains.std() / len(gains) ** 0.5) if len(gains) > 1 else 0.0
                kl = _numbers(found.kl if self.divergence == "old" else found.reverse_kl)
                holds = sum(kl.values()) <= self.max_kl and all(own <= self.max_site_kl for own in kl.values())
                is_accepted = improvement > self.confidence * error and holds
                if is_accepted:
                    self.last = ControlledStep(loss, kl, 1, improvement)
                    return
        finally:
            if not is_accepted:
                _assign(own, start)


def _numbers(kl: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value.detach()) for name, value in kl.items()}


def descend(optim: Any, objective: Tensor, leaves: Sequence[Tensor]) -> None:
    """One step of a Pyro optimiser on an objective; leaves that the objective does not read do not move."""
    moved = gradients_of(objective, leaves)
    for leaf, gradient in moved.items():
        leaf.grad = gradient
    optim(set(moved))
    zero_grads([*moved])


def captured(function: Callable[[], _T]) -> tuple[_T, list[Tensor]]:
    """What a function returns, and the unconstrained parameters that it reads, each once."""
    with poutine.trace(param_only=True) as capture:
        result = function()
    return result, distinct(leaf_of(site["value"]) for site in capture.trace.nodes.values())


def _flat(tensors: Mapping[Tensor, Tensor], leaves: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensors.get(leaf, torch.zeros_like(leaf)).reshape(-1) for leaf in leaves])


def _gradient(value: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """The gradient of a scalar to some leaves, whether or not it reads them."""
    return _flat(gradients_of(value, leaves, retain_graph=True), leaves)


@torch.no_grad()
def _assign(leaves: Sequence[Tensor], values: Tensor) -> None:
    for leaf, part in zip(leaves, values.split([leaf.numel() for leaf in leaves]), strict=True):
        leaf.copy_(part.reshape(leaf.shape))


def _conjugate_gradient(product: Callable[[Tensor], Tensor], right: Tensor, iterations: int) -> Tensor:
    """Solves ``A x = b`` for a positive definite ``A``."""
    solution, residual = torch.zeros_like(right), right.clone()
    direction, square = residual, residual @ residual
    first = square
    for _ in range(iterations):
        image = product(direction)
        curvature = direction @ image
        if not curvature > 0:
            break
        solution = solution + square / curvature * direction
        residual = residual - square / curvature * image
        before, square = square, residual @ residual
        if square <= 1e-16 * first:
            break
        direction = residual + square / before * direction
    return solution
