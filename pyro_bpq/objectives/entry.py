r"""How an objective is entered: by one thread at a time, as a module, by compiled steps; overridden or not."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from inspect import isfunction
from typing import TYPE_CHECKING, Any

import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO, TraceGraph_ELBO
from pyro.infer.elbo import ELBOModule
from torch import Tensor

from pyro_bpq.compiled.subject import Place, untraced
from pyro_bpq.critics.learner import AveragedAdam
from pyro_bpq.errors import BPQWarning, BusyError, UnsupportedProgramError
from pyro_bpq.record.further import LentBuffers
from pyro_bpq.record.watch import leaf_of
from pyro_bpq.rollout.runs import Program
from pyro_bpq.rollout.schedule import RecordedStep
from pyro_bpq.short import listed
from pyro_bpq.snapshots import restore, snapshot
from pyro_bpq.step.surrogate import Step

if TYPE_CHECKING:
    from pyro_bpq.objectives.objective import Objective


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
        warnings.warn(f"{', '.join(own)} {advice}.", BPQWarning, stacklevel=3)


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
            warnings.warn(
                f"The parameters {lost} belong to no module, so that parameters() lacks them and an optimiser of it "
                "does not train them. Make model and guide PyroModules that hold them, as by self.w = "
                "PyroParam(torch.zeros(2)); or train with pyro.infer.SVI.",
                BPQWarning,
                stacklevel=2,
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
    found: dict[str, list[str]] = {}
    for name, text in sites:
        found.setdefault(text, []).append(name)
    return "; ".join(f"{listed(names)}: {text}" for text, names in found.items()) or "none, as no site is drawn"


class Recordable:
    """What compiled steps ask of an objective."""

    def __init__(self, objective: Objective) -> None:
        self.objective, self.noise = objective, objective.runner.noise
        self.mark, self.go_back = partial(objective.mark, deep=True), objective.go_back
        self.learn, self.look_again = objective.learn, objective.runner.recordings.look_again

    def refuses(self) -> str:
        """Why steps are not recorded, as the end of a sentence; empty if they are."""
        trainer, optimizers = self.objective.trainer, self.objective.trainer.optimizer.optimizers.values()
        called = self.objective.runner.recordings.externals
        several = "something learns later from what a step worked on (steps > 1, or a controlled SVI)"
        own = "an optimiser of your own trains the critics, and counts its steps in Python"
        reasons = {
            "critics learn from stored rollouts (replay)": trainer.replayer is not None,
            "several processes train the critics together": trainer.ranks is not None,
            several: trainer.keeps_staged,
            "gamma is a function of the step": callable(self.objective.gamma),
            "critics learn in a backward sweep": trainer.options.sweep is not None,
            f"the results of {next(iter(called.values()))[0].name if called else ''} would be frozen": bool(called),
            own: not all(isinstance(each, AveragedAdam) for each in optimizers),
        }
        return next((why for why, holds in reasons.items() if holds), self.objective.runner.refuses_recording())

    def is_settled(self) -> bool:
        """Whether structure and particles are settled for the call that was looked at last."""
        objective = self.objective
        is_waiting = objective.trainer.waiting is not None or bool(objective.trainer.late[0])
        return not is_waiting and objective.particles.is_settled(objective.runner) and objective.runner.is_settled

    def meet(self, program: Program) -> bool:
        """Looks at a call whose step is recorded, and says whether all is settled for it.

        A new call takes a step that is undone, as where a tensor stands in place of a number.
        """
        objective, recordings = self.objective, self.objective.runner.recordings
        mode = objective.mode(learning=True)
        objective.runner.meet(program, mode)
        if not (recordings.now.recorded or recordings.is_dense):
            with untraced(self), LentBuffers():
                objective.taken(program, mode)
                found = snapshot(recordings)
            restore(recordings, found)
        return self.is_settled()

    def options(self) -> dict[str, Any]:
        """The options that a recording depends on, by name."""
        objective = self.objective
        return {
            "training": objective.training,
            "particles": astuple(objective.particles.now),
            "lam": objective.lam,
            "gamma": objective.gamma,
            "learner": objective.learner,
            "critics": sorted(objective.critics.blocks),
            **objective.recorded_options(),
        }

    def places(self) -> list[Place]:
        """Critics, statistics and the state of the critics' optimiser."""
        optimizers = self.objective.trainer.optimizer.optimizers
        modules = self.objective.critics.modules()
        tables: list[Any] = [table for module in modules for table in (module._parameters, module._buffers)]
        tables += [state for optimizer in optimizers.values() for state in optimizer.state.values()]
        found = [Place(table, name, held) for table in tables for name, held in table.items() if held is not None]
        counts = [Place(group, "n", group["n"]) for each in optimizers.values() for group in each.param_groups]
        return [*found, *counts, *(Place(optimizers, key, optimizer) for key, optimizer in optimizers.items())]

    def recorded_step(self, program: Program, number: RecordedStep) -> tuple[Step, Tensor]:
        """Takes a step, and gives a scalar that has its gradient; what the step teaches is noted, not applied."""
        mode = replace(self.objective.mode(learning=True), num_steps=number, is_recorded=True)
        found = self.objective.taken(program, mode)
        self.objective.trainer.announce()
        return found
