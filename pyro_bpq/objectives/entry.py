r"""How an objective is entered: by one thread at a time, not in a trace of torch, as a module, overridden or not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from inspect import isfunction
from typing import Any

import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO, TraceGraph_ELBO
from pyro.infer.elbo import ELBOModule
from torch import Tensor

from pyro_bpq.errors import BusyError, UnsupportedProgramError, warn
from pyro_bpq.record.watch import leaf_of
from pyro_bpq.short import alike, listed


class Turn:
    """Refuses a thread while another one is inside; the same thread may enter again.

    Nor may anybody enter in ``torch.jit.trace``. It does not wait: Pyro's handlers, which a waiting step is in already,
    are those of all threads. Copies and pickles are free: the lock belongs to the process.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            # A trace would keep critics, scales and baselines of one step as constants; and sizes are tensors in it, so
            # that no cached structure fits.
            raise UnsupportedProgramError(
                "torch.jit.trace would turn what Python sees, the structure of the program, and all that is learned "
                "(critics, scales, baselines) into constants. "
                "Call the loss untraced; vectorize_particles=True, pyro.plate instead of Python loops and "
                "pyro.enable_validation(False) make a step cheaper. Networks of the model may be traced on their own."
            )
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "A step or elbo.replay(...) of this objective is under way in another thread. Both run programs, whose "
                "handlers, parameters and random numbers all threads share: let them take turns, with one lock around "
                "svi.step(...) and elbo.replay(...), or call elbo.replay(...) between steps."
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return Turn, ()


def warn_of_hooks(objective: ELBO) -> None:
    """Warns if a user's class overrides hooks of Pyro's ELBOs, which nothing calls here."""
    methods = [item for kind in (ELBO, Trace_ELBO, TraceGraph_ELBO) for item in vars(kind).items()]
    hooks = {name for name, value in methods if isfunction(value) and name.startswith("_") and not name.endswith("__")}
    warn_of_overrides(
        objective,
        hooks - {"_guess_max_plate_nesting"},
        "is never called: guide and model run in a way of their own. For the traces of a step read elbo.traces after "
        "it; for another loss override differentiable_loss, which modules call, or loss_and_grads, which SVI calls",
    )


def warn_of_overrides(objective: ELBO, names: Iterable[str], advice: str) -> None:
    """Warns if a user's class overrides one of some methods that are not called; ``advice`` ends the sentence."""
    libraries = "pyro.", "pyro_bpq.", "torch."
    kinds = [kind for kind in type(objective).__mro__ if not kind.__module__.startswith(libraries)]
    own = [f"{kind.__name__}.{name}" for kind in kinds for name in sorted(names) if name in vars(kind)]
    if own:
        warn(f"{', '.join(own)} {advice}.")


class LossModule(ELBOModule):
    """Pyro's module of a loss. Its first call warns of parameters that ``parameters()`` lacks.

    Such are parameters of ``pyro.param`` in plain functions: they lie in Pyro's parameter store, and an optimiser of
    ``parameters()`` would leave them as they are without a word.
    """

    _was_called = False

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The differentiable loss, a scalar in nats."""
        if self._was_called:
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        with poutine.trace(param_only=True) as capture:
            loss: Tensor = super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._was_called = True
        nodes: Any = capture.trace.nodes
        own = {id(parameter) for parameter in self.parameters()}
        lost = [name for name, site in nodes.items() if id(leaf_of(site["value"])) not in own]
        if lost:
            warn(
                f"The parameters {lost} belong to no module, so that parameters() lacks them and an optimiser of it "
                "does not train them. Make model and guide PyroModules that hold them, as by self.w = "
                "PyroParam(torch.zeros(2)); or train with pyro.infer.SVI."
            )
        return loss


@contextlib.contextmanager
def kept_gradients(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Leaves the gradients of some leaves as they were, if what is done within fails."""
    before = [(leaf, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves]
    try:
        yield
    except BaseException:
        for leaf, gradient in before:
            leaf.grad = gradient
        raise


def together(sites: Iterable[tuple[str, str]]) -> str:
    """Names with the same text, together."""
    return "; ".join(f"{listed(names)}: {text}" for text, names in alike(sites).items()) or "none: no site is scored"
