"""Training options of the critics, and their optimiser."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.critics.bank import MAX_IDLE, Block, CriticBank
from pyro_bpq.critics.replay_buffer import Replay
from pyro_bpq.errors import Checked, OptionError, option, optional, whole
from pyro_bpq.rollout.sums import Ranks

# Number of samples in a step from which the learning rate is no longer lowered for noise.
_MANY_ROWS = 100.0
# Number of steps at the full learning rate, and the smallest share of it in later steps.
_FULL_STEPS, _LEAST_SPEED = 30.0, 0.2


@dataclass(frozen=True)
class SlowTracking(Checked):
    """Option to compute targets from copies of the critics that track them slowly, ``θ ← (1 - α) θ + α w``.

    Args:
        rate: Weight ``α`` of the current parameters ``w``, in ``(0, 1]``, per step of the critics' optimiser; 1 turns
            tracking off.
        guide: Whether replay also redraws from a slowly tracking copy of the guide's parameters, updated once per
            training step with the same rate. Critics then learn the costs under the slower guide.

    Raises:
        OptionError: If an option is out of range.

    References:
        | Backprop-Q (Xu et al., 2018), Appendix, Details for Slow-tracking Target
        | Continuous control with deep reinforcement learning (Lillicrap et al., 2016)
    """

    rate: float = option(0.05, lambda rate: 0.0 < rate <= 1.0, "a number in (0, 1]")
    guide: bool = False


@torch.no_grad()
def track(slow: list[Tensor], current: list[Tensor], rate: float) -> None:
    """Moves slow copies towards the current parameters, in place: ``θ ← (1 - α) θ + α w``."""
    if slow:
        torch._foreach_lerp_(slow, current, rate)


@dataclass(frozen=True)
class BackwardSweep(Checked):
    r"""Option to let critics learn in a backward sweep, before the gradient of the step is formed.

        w_X ← w_X + α (G_X - Q_w(Sc_X)) ∇Q_w(Sc_X),   G_X from the children *after* their step

    This is plain gradient descent on half the squared error, in the units of the costs. It averages over particles and
    plate rows; a table averages over those that read the same entry. Targets are sample backups,
    :func:`~pyro_bpq.critics.targets.lambda_return` without expectations.

    The critics then depend on the rollout whose gradient they enter. So the gradient is **biased**, also with
    estimators that are otherwise unbiased. Critics learn in ``differentiable_loss`` itself; a step that fails takes
    that back.

    Args:
        rate: Step size ``α``, or a function of the step. A table takes any ``α`` below 2, a net needs a small one.

    Raises:
        OptionError: If the rate is not positive.

    References:
        | Backprop-Q (Xu et al., 2018), Algorithm 1, lines 10 to 13
    """

    rate: float | Callable[[int], float] = option(
        0.1, lambda rate: callable(rate) or rate > 0.0, "a positive number or a function of the step"
    )

    def at(self, step: int) -> float:
        """The step size after so many steps."""
        return float(self.rate(step)) if callable(self.rate) else float(self.rate)


@dataclass(frozen=True)
class CriticLearner(Checked):
    """Options of training critics by an optimiser of their own, after the gradients of model and guide.

    Args:
        lr: Learning rate, in units of the spread of a critic's targets. ``None`` takes ``0.1 s`` for
            :class:`AveragedAdam`, ``s = min(√(rows / 100), max(√(30 / n), 0.2), 1)``. Here ``rows`` is the number of
            samples of a critic in a step (particles times plate rows), because few samples give noisy gradients, and
            ``n`` is the number of its steps so far. For another optimiser ``None`` takes 0.01.
        optimizer: Builds the optimiser from parameters and ``lr``; ``None`` for :class:`AveragedAdam`.
        level_weight: Weight of the level of ``Q`` against its differences within a data point.
        steps: Number of steps of the optimiser on the rollout of each training step. A copy, or a saved state, that is
            taken before the last training step was learned from goes on with the first of them alone.
        replay: Options of learning from stored rollouts as well, or ``None``.
        slow: Options of slowly tracking targets, or ``None`` for targets from the current critics.
        ranks: The processes that train these critics together, if ``torch.distributed`` runs several. With ``None``
            each process has critics and running statistics of its own.
        max_idle: Number of critics and running statistics that are kept for sites that the last step did not use, the
            most recently used first; see :class:`~pyro_bpq.critics.bank.CriticBank`. Programs that alternate, or that
            name sites by data points, need one for each critic and one for the statistics of each site.
        sweep: Options of learning before the gradient of the step, as in the paper's Algorithm 1, or ``None``. Besides
            it only ``ranks`` and ``max_idle`` may be chosen.

    Raises:
        OptionError: If an option is out of range.
    """

    lr: float | None = option(None, lambda lr: lr is None or lr > 0, "a positive number or None")
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    level_weight: float = 0.1
    steps: int = whole(1)
    replay: Replay | None = optional(Replay, "Replay(capacity=...)")
    slow: SlowTracking | None = optional(SlowTracking, "SlowTracking(rate=...)")
    ranks: Ranks | None = optional(Ranks, "Ranks(group)", default=Ranks())
    max_idle: int = whole(MAX_IDLE, least=0)
    sweep: BackwardSweep | None = optional(BackwardSweep, "BackwardSweep(rate=...)")

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        unused = [name for name in changed if name not in ("sweep", "ranks", "max_idle")]
        if self.sweep is not None and unused:
            raise OptionError(
                f"CriticLearner(sweep=...) learns by plain gradient descent and does not use {', '.join(unused)}. "
                "Leave them out, or write the step size as BackwardSweep(rate=...)."
            )

    def make(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Builds an optimiser of the given parameters of critics."""
        if self.optimizer is not None:
            return self.optimizer(parameters, lr=0.01 if self.lr is None else self.lr)
        return AveragedAdam(parameters, lr=0.1 if self.lr is None else self.lr)

    def speed(self, block: Block) -> Tensor | None:
        """Factor on the learning rate of a block of critics, or ``None`` for 1."""
        if self.lr is not None or self.optimizer is not None:
            return None
        rows, steps = (block.get_buffer(name).max() for name in ("rows", "count"))
        settled = (_FULL_STEPS / steps.clamp(min=_FULL_STEPS)).sqrt().clamp(min=_LEAST_SPEED)
        return torch.minimum((rows / _MANY_ROWS).clamp(max=1.0).sqrt(), settled)


class AveragedAdam(torch.optim.Optimizer):
    r"""Adam with a running average of its iterates, so that a large step size leaves little noise.

        z ← z - lr speed g / √v,   x ← x + c (z - x),   y = (1 - mix) z + mix x,   c = max(min(1, 3/n), floor)

    Gradients ``g`` are taken at the parameters ``y``, which are also the result. ``decay`` is the weight of the past in
    the running square ``v`` of the gradient; ``eps`` is added to ``√v``. Parameters of a group take equally many steps.

    References:
        | The Road Less Scheduled (Defazio et al., 2024)
        | https://arxiv.org/abs/2405.15682
    """

    decay, mix, floor, eps = 0.99, 0.9, 0.03, 1e-6

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "speed": None, "n": None})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step along ``.grad``."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if not self.state[p]:
                    self.state[p] |= {"z": p.clone(), "x": p.clone(), "v": torch.zeros_like(p)}
            if parameters:
                self._advance(parameters, group)

    def _advance(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        z, x, v = ([self.state[p][name] for p in parameters] for name in "zxv")
        if group["n"] is None:
            # A tensor, as a recorded step would freeze a number.
            group["n"] = torch.zeros((), dtype=torch.float64, device=z[0].device)
        n = group["n"].add_(1.0)
        torch._foreach_mul_(v, self.decay)
        torch._foreach_addcmul_(v, gradients, gradients, 1.0 - self.decay)
        scale = torch._foreach_sqrt(v)
        torch._foreach_div_(scale, (1.0 - self.decay**n).sqrt())
        torch._foreach_add_(scale, self.eps)
        if group["speed"] is not None:
            torch._foreach_div_(scale, group["speed"])
        torch._foreach_addcdiv_(z, gradients, scale, -group["lr"])
        torch._foreach_lerp_(x, z, [(3.0 / n).clamp(self.floor, 1.0).to(x[0].dtype)] * len(x))
        torch._foreach_copy_(parameters, z)
        torch._foreach_lerp_(parameters, x, self.mix)


class CriticOptimizer:
    """Applies gradients to the critics of a bank; one optimiser per block, made when it is first needed."""

    def __init__(self, learner: CriticLearner) -> None:
        self.learner = learner
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._loaded: dict[str, Any] = {}

    def step(self, bank: CriticBank, gradients: Mapping[str, Tensor]) -> None:
        """One step along the given gradients, by name of the parameter in the bank's ``blocks``."""
        names = dict.fromkeys(name.split(".")[0] for name in gradients)
        for name, weight in bank.weights(names).items():
            if name in gradients:
                weight.grad = gradients[name].to(weight)  # the module may have moved since
        for key in (name for name in names if name in bank.blocks):
            optimizer, block = self._optimizer(bank, key), bank.blocks[key]
            for group in optimizer.param_groups if isinstance(optimizer, AveragedAdam) else ():
                group["speed"] = self.learner.speed(block)
            optimizer.step()
            optimizer.zero_grad()
            if self.learner.slow is not None:
                track([*block.slow_weights().values()], [*block.weights().values()], self.learner.slow.rate)

    def _optimizer(self, bank: CriticBank, key: str) -> torch.optim.Optimizer:
        weights = list(bank.blocks[key].weights().values())
        optimizer = self.optimizers.get(key)
        held = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        if optimizer is None or any(a is not b for a, b in zip(held, weights, strict=True)):
            # The block is new, or a move to another device or dtype replaced its tensors.
            state = self._loaded.get(key) if optimizer is None else optimizer.state_dict()
            optimizer = self.optimizers[key] = self.learner.make(weights)
            if state is not None:
                # A copy, because the optimiser would share the tensors of the state.
                optimizer.load_state_dict(copy.deepcopy(state))
        return optimizer

    def state_dict(self) -> dict[str, Any]:
        """State of every block's optimiser."""
        return {**self._loaded, **{key: opt.state_dict() for key, opt in self.optimizers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state of every block's optimiser, also for blocks that are not built yet."""
        # In place: a compiled step sees that they are gone.
        self.optimizers.clear()
        self._loaded = copy.deepcopy(dict(state))

    def keep(self, names: Container[str]) -> None:
        """Drops the optimisers of all other blocks, and their loaded states."""
        for table in (self.optimizers, self._loaded):
            for key in [key for key in table if key not in names]:
                del table[key]
