"""First-order (Sobolev) fitting: the slopes of critics match the gradient of the costs that they predict.

The program runs once more for each Bernoulli or OneHotCategorical site. Gradients are recorded through the site's
value, and all other sites keep their values. With ``g = ∂C/∂x``, ``C`` the sum of the costs that the critic predicts,
the regression adds

    L = w Σ_d |A_d[1] - A_d[0] - g_d|² / σ_A²                                        (Bernoulli)
    L = w Σ_d Σ_k |A_d[k] - mean_j A_d[j] - (g_dk - mean_j g_dj)|² / σ_A²            (one-hot)

If the program fails with gradients, the critic of that site fits values only, and a warning names the site.

References:
    | Sobolev training for neural networks (Czarnecki et al., 2017), https://arxiv.org/abs/1706.04859
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from pyro_bpq.errors import BPQError, BPQWarning, OptionError, UnsupportedProgramError
from pyro_bpq.estimators.base import site_mean
from pyro_bpq.graph.network import QNode
from pyro_bpq.step.critic_step import CriticBatch
from pyro_bpq.step.signals import Signals


def first_order_loss(signals: Signals, weight: float) -> Tensor:
    """The loss of the slopes of all dueling critics of Bernoulli and one-hot sites, with the critics' gradient."""
    names = ", ".join(repr(name) for cls in signals.layout.classes for name in cls.names)
    if signals.rerun is None:
        raise UnsupportedProgramError(
            f"Sites {names}: sampled values steer this program, so it cannot be run again for gradients of its costs; "
            "write CriticLearner(first_order=0.0)."
        )
    losses = [_loss(signals, critic) for critic in signals.critics.values() if _has_slopes(signals, critic)]
    if not losses:
        raise OptionError(
            f"CriticLearner(first_order={weight}): none of the sites {names} is a Bernoulli or OneHotCategorical with "
            "a critic in dueling form (MLPCritic, LinearCritic, TabularCritic); write first_order=0.0."
        )
    return weight * sum(losses[1:], losses[0])


def _has_slopes(signals: Signals, critic: CriticBatch) -> bool:
    components = signals.layout.classes[critic.group.c].spec.components
    is_float = components is not None and components.kind in ("bernoulli", "one_hot")
    return is_float and critic.joint is None and critic.advantage is not None


def _loss(signals: Signals, critic: CriticBatch) -> Tensor:
    batch, advantage = signals.batches[critic.group.c], critic.advantage
    assert advantage is not None
    found = [
        _gradient(signals, node, batch.value[site])
        for node, site in zip(critic.group.nodes, critic.group.sites, strict=True)
    ]
    # A missing gradient is unknown, not zero.
    known = advantage.new_tensor([gradient is not None for gradient in found])
    is_bit = batch.components.kind == "bernoulli"
    if is_bit:
        slopes = advantage[..., 1] - advantage[..., 0]
    else:
        slopes = advantage - advantage.mean(-1, keepdim=True)
    none = torch.zeros_like(slopes[0])
    target = torch.stack([none if gradient is None else gradient.reshape(none.shape) for gradient in found])
    target = target if is_bit else target - target.mean(-1, keepdim=True)
    target = torch.where(target.isfinite(), target, slopes.detach())
    event = (-1,) if is_bit else (-1, -2)
    lead = (-1, *(1,) * (critic.level.dim() - 1))
    spread = critic.unit * critic.selection.read("spread_advantage", slopes.dtype).reshape(lead)
    error = (slopes - target).square().sum(event) / spread.square()
    # The first step only sets the spread.
    return (site_mean(error) * known * (critic.selection.read("count") > 0)).sum()


def _gradient(signals: Signals, node: QNode, value: Tensor) -> Tensor | None:
    """Gradient of what a Q-node predicts with respect to its site's value, ``(M, plates, event)``."""
    assert signals.rerun is not None
    leaf = value.detach().to(signals.batches[0].like.dtype).requires_grad_()
    try:
        runs = signals.rerun(node.site, leaf, signals.rollout.runs)
        with torch.enable_grad():
            total = sum((run.costs[cost].sum() for run in runs for cost in node.remote), leaf.new_zeros(()))
        if not total.requires_grad:
            return None
        (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
    except BPQError:
        raise
    except RuntimeError as error:
        warnings.warn(
            f"Site {node.site!r}: the program failed while its value carried gradients, for CriticLearner(first_order="
            f"...): {error} The critic fits values only in such steps. Write first_order=0.0, or let the program do "
            "without out=, in-place writes and .numpy() where this value goes in.",
            BPQWarning,
            stacklevel=2,
        )
        return None
    return gradient
