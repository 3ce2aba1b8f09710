r"""``CompiledSVI``: takes the place of ``pyro.infer.SVI``; a whole step is compiled, with the optimiser's update."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from pyro.infer import SVI
from pyro.optim import PyroOptim
from torch import Tensor
from tqdm.auto import tqdm

from pyro_bpq.compiled.subject import Updates
from pyro_bpq.errors import OptionError
from pyro_bpq.objectives.entry import warn_of_overrides
from pyro_bpq.objectives.objective import Objective

# Seconds between two losses that the progress bar shows.
_SHOWS_EVERY = 0.5


class CompiledSVI(SVI):
    r"""SVI whose steps are compiled as wholes: guide, model, estimators, critics, gradients and the update.

    The first steps run eagerly, as in ``SVI``. When structure, particles and critics are settled, a step is recorded
    and compiled, see :class:`~pyro_bpq.Compile`. From then on a step runs no Python of the programs, and no Python of
    the optimiser. Parameters and the optimiser's state are written in place, so ``optim.get_state()``, schedulers and
    the parameter store show them at any moment. Step sizes are read before each step.

    Recorded updates: Adam, AdamW, SGD and ClippedAdam of ``pyro.optim``, with or without ``clip_args``, alone or in a
    ``PyroLRScheduler``. Other optimisers update the parameters after a compiled step of the loss;
    :func:`~pyro_bpq.compile_report` says so. Gradients of parameters that a recorded update moves are not in ``.grad``.

    Args:
        model: The model.
        guide: The guide.
        optim: One of Pyro's optimisers.
        loss: A :class:`~pyro_bpq.TraceBackpropQ_ELBO`, :class:`~pyro_bpq.ExpectedCost` or
            :class:`~pyro_bpq.TraceBackpropQ_IWAE`. It needs no ``compile=True``.
        compile: As the option of the loss; ``None`` for that of the loss, or ``True`` where it has none.

    Raises:
        OptionError: If the loss or the optimiser is of another kind.
    """

    def __init__(
        self,
        model: Callable[..., Any] | None,
        guide: Callable[..., Any],
        optim: PyroOptim,
        loss: Objective,
        *,
        compile: Any = None,
    ) -> None:
        if not isinstance(loss, Objective):
            raise OptionError(
                f"CompiledSVI(loss={loss!r}): write loss=TraceBackpropQ_ELBO(), or another objective of pyro_bpq; "
                "TraceBackpropQ_ELBO(estimator=ScoreFunction(), critic=None) is the estimator of TraceGraph_ELBO."
            )
        if not isinstance(optim, PyroOptim):
            raise OptionError(
                f"CompiledSVI(optim={type(optim).__name__}): write an optimiser of pyro.optim, such as "
                'pyro.optim.Adam({"lr": 1e-3}).'
            )
        if compile is not None or loss.compiled is None:
            loss.compile_steps(True if compile is None else compile)
        super().__init__(model, guide, optim, loss)  # type: ignore[no-untyped-call]
        warn_of_overrides(loss, ["loss_and_grads"], "is not called by CompiledSVI, whose steps are compiled: write SVI")
        self.objective = loss
        self._updates = Updates(optim)

    def __repr__(self) -> str:
        return f"CompiledSVI({type(self.optim).__name__}, {type(self.objective).__name__})"

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes a step: the gradient of the loss, the critics' learning, the update of the parameters.

        Args:
            *args: Arguments of model and guide.
            **kwargs: Their keyword arguments.

        Returns:
            The loss, in nats: minus the bound.
        """
        return float(self._step(args, kwargs))

    def run(self, steps: int | Iterable[Any], *args: Any, progress: bool = True, **kwargs: Any) -> Tensor:
        """Takes many steps with a progress bar, which reads the loss twice a second.

        Args:
            steps: Number of steps, each with the same arguments; or batches, one per step. A batch that is a tuple or a
                list gives the first arguments, anything else gives the first one.
            *args: Further arguments of model and guide.
            progress: Whether to show the bar.
            **kwargs: Their keyword arguments.

        Returns:
            The losses, ``(steps,)``, in nats, detached.
        """
        losses: list[Tensor] = []
        shown = time.perf_counter()
        batches: Iterable[Any] = itertools.repeat((), steps) if isinstance(steps, int) else steps
        with tqdm(batches, total=operator.length_hint(batches) or None, disable=not progress, desc="loss") as bar:
            for batch in bar:
                first = batch if isinstance(batch, (tuple, list)) else (batch,)
                losses.append(torch.as_tensor(self._step((*first, *args), kwargs)))
                if progress and time.perf_counter() - shown > _SHOWS_EVERY:
                    bar.set_description(f"loss {losses[-1].item():.4g}", refresh=False)
                    shown = time.perf_counter()
        return torch.stack(losses) if losses else torch.zeros(0)

    def _step(self, args: Any, kwargs: Any) -> Tensor | float:
        if self._updates.optim is not self.optim:
            self._updates = Updates(self.optim)
        loss = self.objective.compiled_update(self._updates, self.model, self.guide, *args, **kwargs)
        if loss is not None:
            return loss
        # Where the optimiser stays outside, the loss alone may be compiled.
        runs_alone = bool(self._updates.refuses())
        self.loss_and_grads = self.objective.loss_and_grads if runs_alone else self.objective.eager_loss_and_grads
        return float(super().step(*args, **kwargs))  # type: ignore[no-untyped-call]
