r"""Training options of the critics, and their optimiser."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from pyro_bpq.critics.backward_sweep import BackwardSweep
from pyro_bpq.critics.bank import MAX_IDLE, CriticBank
from pyro_bpq.critics.block import Block
from pyro_bpq.critics.replay_buffer import Replay
from pyro_bpq.critics.slow import SlowTracking, track
from pyro_bpq.errors import OptionError
from pyro_bpq.rollout.distributed import Ranks

# Number of samples in a step from which the learning rate is no longer lowered for noise.
_MANY_ROWS = 100.0
# Number of steps at the full learning rate, and the smallest share of it in later steps.
_FULL_STEPS, _LEAST_SPEED = 30.0, 0.2


@dataclass(frozen=True)
class CriticLearner:
    """Options of training critics by an optimiser of their own, after the gradients of model and guide.

    Args:
        lr: Learning rate, in units of the spread of a critic's targets. ``None`` takes ``0.1 s`` for
            :class:`AveragedAdam`, ``s = min(√(rows / 100), max(√(30 / n), 0.2), 1)``. Here ``rows`` is the number of
            samples of a critic in a step (particles times plate rows), because few samples give noisy gradients, and
            ``n`` is the number of its steps so far. For another optimiser ``None`` takes 0.01.
        optimizer: Builds the optimiser from parameters and ``lr``; ``None`` for :class:`AveragedAdam`.
        clip: Largest norm of each critic's gradient, or ``None``.
        level_weight: Weight of the level of ``Q`` against its differences within a data point.
        steps: Number of steps of the optimiser on the rollout of each training step.
        replay: Options of learning from stored rollouts as well, or ``None``.
        slow: Options of slowly tracking targets, or ``None`` for targets from the current critics.
        first_order: Weight of the slopes of critics of Bernoulli and OneHotCategorical sites. These critics then also
            fit the gradient of the costs with respect to the value (:mod:`pyro_bpq.step.first_order`), once for every
            rollout. That takes one more run of the program per such site. Other sites fit values only.
        ranks: The processes that train these critics together, if ``torch.distributed`` runs several. With ``None``
            each process has critics and running statistics of its own.
        max_idle: Number of critics and running statistics that are kept for sites that the last step did not use, the
            most recently used first; see :class:`~pyro_bpq.critics.bank.CriticBank`. Programs that alternate, or that
            name sites by data points, need one for each critic and one for the statistics of each site. If every step
            has new names, the rest is forgotten.
        sweep: Options of learning before the gradient of the step, in a backward sweep by plain gradient descent, as in
            the paper's Algorithm 1. Besides it only ``ranks`` and ``max_idle`` may be chosen. ``None`` for learning
            after the gradient, which keeps that unbiased.

    Raises:
        OptionError: If an option is out of range.
    """

    lr: float | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    clip: float | None = None
    level_weight: float = 0.1
    steps: int = 1
    replay: Replay | None = None
    slow: SlowTracking | None = None
    first_order: float = 0.0
    ranks: Ranks | None = Ranks()
    max_idle: int = MAX_IDLE
    sweep: BackwardSweep | None = None

    def __post_init__(self) -> None:
        if self.sweep is not None and not isinstance(self.sweep, BackwardSweep):
            raise OptionError(f"CriticLearner(sweep={self.sweep!r}): write BackwardSweep(rate=...) or None.")
        if self.sweep is not None:
            plain = CriticLearner(ranks=self.ranks, max_idle=self.max_idle)
            unused = [item.name for item in fields(self) if getattr(self, item.name) != getattr(plain, item.name)]
            unused.remove("sweep")
            if unused:
                raise OptionError(
                    f"CriticLearner(sweep=...) learns by plain gradient descent and does not use {', '.join(unused)}. "
                    "Leave them out, or write the step size as BackwardSweep(rate=...)."
                )
        if self.lr is not None and not self.lr > 0:
            raise OptionError(f"CriticLearner(lr={self.lr!r}): write a positive number or None.")
        if not isinstance(self.steps, int) or self.steps < 1:
            raise OptionError(f"CriticLearner(steps={self.steps!r}): write a whole number of at least 1.")
        if self.replay is not None and not isinstance(self.replay, Replay):
            raise OptionError(f"CriticLearner(replay={self.replay!r}): write Replay(capacity=...) or None.")
        if self.slow is not None and not isinstance(self.slow, SlowTracking):
            raise OptionError(f"CriticLearner(slow={self.slow!r}): write SlowTracking(rate=...) or None.")
        if not self.first_order >= 0.0:
            raise OptionError(f"CriticLearner(first_order={self.first_order!r}): write a number that is not negative.")
        if self.ranks is not None and not isinstance(self.ranks, Ranks):
            raise OptionError(f"CriticLearner(ranks={self.ranks!r}): write Ranks(group) or None.")
        if not isinstance(self.max_idle, int) or self.max_idle < 0:
            raise OptionError(f"CriticLearner(max_idle={self.max_idle!r}): write a whole number of at least 0.")
        if self.clip is not None and not self.clip > 0:
            raise OptionError(f"CriticLearner(clip={self.clip!r}): write a positive number or None.")

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

    Gradients ``g`` are taken at the parameters ``y``. These are also the result.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        decay: Weight of the past in the running square ``v`` of the gradient.
        mix: Share of the average in ``y``.
        floor: Smallest weight of an iterate in the average.
        eps: Added to ``√v``.

    References:
        | The Road Less Scheduled (Defazio et al., 2024)
        | https://arxiv.org/abs/2405.15682
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        decay: float = 0.99,
        mix: float = 0.9,
        floor: float = 0.03,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "mix": mix, "floor": floor, "eps": eps, "speed": None})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step along ``.grad``.

        Args:
            closure: Recomputes the loss, as in any optimiser.

        Returns:
            The return value of the closure, or ``None``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if not self.state[p]:
                    self.state[p] = {"z": p.clone(), "x": p.clone(), "v": torch.zeros_like(p), "n": 0}
                if not isinstance(self.state[p]["n"], Tensor):
                    self.state[p]["n"] += 1
            counts = [self.state[p]["n"] for p in parameters]
            tensors = {id(n): n for n in counts if isinstance(n, Tensor)}
            for n in [*sorted({n for n in counts if not isinstance(n, Tensor)}), *tensors.values()]:
                if isinstance(n, Tensor):
                    n.add_(1.0)
                self._advance([p for p, own in zip(parameters, counts, strict=True) if _is_same(own, n)], n, group)
        return loss

    def count_in_tensors(self) -> None:
        """Counts steps in tensors from now on, one for all parameters that have taken equally many.

        A recorded step would freeze a number.
        """
        made: dict[tuple[int, torch.device], Tensor] = {}
        for p, state in self.state.items():
            n = state["n"]
            if not isinstance(n, Tensor):
                new = torch.tensor(float(n), dtype=torch.float64, device=p.device)
                state["n"] = made.setdefault((n, p.device), new)

    def _advance(self, parameters: list[Tensor], n: int | Tensor, group: Mapping[str, Any]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        z, x, v = ([self.state[p][name] for p in parameters] for name in "zxv")
        torch._foreach_mul_(v, group["decay"])
        torch._foreach_addcmul_(v, gradients, gradients, 1.0 - group["decay"])
        scale = torch._foreach_sqrt(v)
        torch._foreach_div_(scale, (1.0 - group["decay"] ** n) ** 0.5)
        torch._foreach_add_(scale, group["eps"])
        if group.get("speed") is not None:
            torch._foreach_div_(scale, [group["speed"]] * len(scale))
        torch._foreach_addcdiv_(z, gradients, scale, -group["lr"])
        if isinstance(n, Tensor):
            weights = [(3.0 / n).clamp(group["floor"], 1.0).to(p.dtype) for p in parameters]
            torch._foreach_lerp_(x, z, weights)
        else:
            torch._foreach_lerp_(x, z, max(min(1.0, 3.0 / n), group["floor"]))
        torch._foreach_copy_(parameters, z)
        torch._foreach_lerp_(parameters, x, group["mix"])


def _is_same(one: int | Tensor, other: int | Tensor) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return one == other


class CriticOptimizer:
    """Applies gradients to the critics of a bank; one optimiser per block, made when it is first needed.

    Args:
        learner: Its options.
    """

    def __init__(self, learner: CriticLearner) -> None:
        self.learner = learner
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._loaded: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"CriticOptimizer({self.learner}, {len(self.optimizers)} blocks)"

    def step(self, bank: CriticBank, gradients: Mapping[str, Tensor]) -> None:
        """One step along the given gradients, by name of the parameter in the bank's ``blocks``."""
        named = bank.weights(dict.fromkeys(name.split(".")[0] for name in gradients))
        touched: dict[str, list[Tensor]] = {}
        for name, gradient in gradients.items():
            if name in named:
                named[name].grad = gradient
                touched.setdefault(name.split(".")[0], []).append(named[name])
        for key, parameters in touched.items():
            if self.learner.clip is not None:
                _clip(parameters, self.learner.clip)
            optimizer, block = self._optimizer(bank, key), bank.blocks[key]
            assert isinstance(block, Block)
            for group in optimizer.param_groups if isinstance(optimizer, AveragedAdam) else ():
                group["speed"] = self.learner.speed(block)
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None
            if self.learner.slow is not None:
                track(list(block.slow_weights().values()), list(block.weights().values()), self.learner.slow.rate)

    def _optimizer(self, bank: CriticBank, key: str) -> torch.optim.Optimizer:
        block = bank.blocks[key]
        assert isinstance(block, Block)
        weights = list(block.weights().values())
        optimizer = self.optimizers.get(key)
        if optimizer is None or any(a is not b for a, b in zip(_held(optimizer), weights, strict=True)):
            # The block is new, or a move to another device or dtype has replaced its tensors.
            state = self._loaded.get(key) if optimizer is None else optimizer.state_dict()
            optimizer = self.optimizers[key] = self.learner.make(weights)
            if state is not None:
                # A copy, because the optimiser would share the tensors of the state.
                optimizer.load_state_dict(copy.deepcopy(state))
        return optimizer

    def snapshot(self, key: str) -> Any:
        """Returns a mark of a block's optimiser; :meth:`restore` takes the optimiser back to it."""
        return copy.deepcopy(self.optimizers[key].state_dict()) if key in self.optimizers else None

    def restore(self, key: str, mark: Any) -> None:
        """Takes a block's optimiser back to ``mark``; the weights, which the bank holds, do not change."""
        if mark is None:
            self.optimizers.pop(key, None)
        else:
            self.optimizers[key].load_state_dict(mark)

    def state_dict(self) -> dict[str, Any]:
        """State of every block's optimiser."""
        return {**self._loaded, **{key: opt.state_dict() for key, opt in self.optimizers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state of every block's optimiser, also for blocks that are not built yet."""
        self.optimizers, self._loaded = {}, copy.deepcopy(dict(state))

    def forget(self, keys: Iterable[str], is_final: bool = False) -> None:
        """Drops the optimisers of forgotten blocks, and with ``is_final`` also their loaded states."""
        for key in keys:
            self.optimizers.pop(key, None)
            if is_final:
                self._loaded.pop(key, None)


def _held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _clip(parameters: list[Tensor], limit: float) -> None:
    """Clips the gradient norm of each critic separately; the leading axis is the site."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    square = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)
    factor = (limit / square.sqrt().clamp(min=1e-12)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.reshape(-1, *(1,) * (gradient.dim() - 1)))
