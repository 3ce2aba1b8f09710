r"""What all objectives share: how a loss is computed, what a step changes, and how the state is saved."""

from __future__ import annotations

import contextlib
import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pyro.util import warn_if_nan
from torch import Tensor, nn

from pyro_bpq.compiled.options import Compile
from pyro_bpq.critics.learner import CriticLearner
from pyro_bpq.errors import BPQError, OptionError
from pyro_bpq.objectives.critic_trainer import CriticTrainer
from pyro_bpq.objectives.entry import LossModule, Turn, kept_gradients, together, warn_of_hooks
from pyro_bpq.objectives.observation import Mode, Observation, Runner, Transient, shapes_told
from pyro_bpq.objectives.particle_count import CountedELBO
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.watch import inputs_of
from pyro_bpq.rollout.runs import Particles, Program, Schedule, at
from pyro_bpq.short import Pending, restore, snapshot
from pyro_bpq.step.learning import Learning
from pyro_bpq.step.surrogate import Step

if TYPE_CHECKING:
    from pyro_bpq.compiled.recorder import Outcome
    from pyro_bpq.compiled.steps import CompiledSteps
    from pyro_bpq.compiled.subject import Updates


class Objective(CountedELBO, nn.Module):
    """A loss with learned critics, made of a runner, a particle count and a critic trainer; subclasses add the runner.

    Attributes:
        runner: Runs the programs.
        particles: How many particles run, and in which way.
        trainer: Trains the critics.
        critics: Critics and running statistics.
        info: What the last step found out about each site.
        ms: Milliseconds of the parts of the last step.
        compiled: The compiled steps; ``None`` if steps run eagerly.
    """

    runner: Runner
    # How it was made: the call, without options that have their default values.
    made_by = ""
    # Whether gradients of reparameterised sites come from divergences in closed form.
    analytic_kl = False

    def __init__(
        self, learner: CriticLearner | None, seed: int, lam: Schedule, gamma: Schedule, compile: Any, **options: Any
    ) -> None:
        nn.Module.__init__(self)
        CountedELBO.__init__(self, **options)
        self.lam, self.gamma = lam, gamma
        self.trainer, self._turn = CriticTrainer(learner, seed), Turn()
        self.critics = self.trainer.critics
        self.compiled: CompiledSteps | None = None
        self.compile_steps(compile)
        self.info: Mapping[str, dict[str, Any]] = {}
        self.ms: dict[str, float] = {}
        self._traces = Transient()
        warn_of_hooks(self)

    def __call__(self, model: Any, guide: Any) -> LossModule:
        """The loss of a model and a guide as a module, for torch's own optimisers."""
        return LossModule(model, guide, self)

    def __repr__(self) -> str:
        """What runs, how many particles and why, and what was chosen because of which option."""
        found = self._chosen()
        head = f"{self.made_by or type(self).__name__}, after {self.num_steps + bool(self.trainer.waiting)} steps"
        if found is None:
            return f"{head}\n{Pending('plan')}"
        compiled = "" if self.compiled is None else f" Compiled: {len(self.compiled.entries)} recordings."
        now, said = self.particles.now, self.particles.said
        said = said or (f"They run {now.way}." if now.number > 1 else "")
        lines = (
            head,
            f"runs: {self._runs()}{compiled}",
            f"particles: {self._why_so_many()}. {said}".rstrip(),
            f"estimators: {together((name, estimator) for name, estimator, _ in found)}",
            f"critics: {together((name, critic) for name, _, critic in found)}",
        )
        return "\n".join(lines)

    # What subclasses are made of.

    @abstractmethod
    def _chosen(self) -> Sequence[tuple[str, str, str]] | None:
        """The sites, the estimator of each and why, and its critic; ``None`` before the first step."""

    @abstractmethod
    def _why_so_many(self) -> str:
        """The number of particles, and why."""

    def _runs(self) -> str:
        """What runs in a step."""
        return "guide and model."

    @abstractmethod
    def _evaluate(self, seen: Observation, mode: Mode) -> Step:
        """The step on some runs, summed over draws; nothing has learned from it yet."""

    def run_program(self, program: Program, particles: Particles | None = None) -> TracedRun:
        """Runs guide and model as a step does, or for other particles."""
        runner, particles = self.runner, particles or self.particles.drawn
        runner.meet(program, self.mode(learning=False))
        track = runner.recordings.wants(particles, is_step=False)
        return runner.trace(program, particles, step=self.num_steps, track=track)

    def recorded_options(self) -> dict[str, Any]:
        """Further options that a recording depends on, by name."""
        return {}

    @property
    def _num_draws(self) -> int:
        """Number of draws whose mean the loss is."""
        return self.num_particles

    @property
    def _needs_nesting(self) -> bool:
        """Whether dimensions to the left of all plates are used: by particles, or by enumerated values."""
        return self.vectorize_particles or self.runner.enumerates

    @property
    def learner(self) -> CriticLearner | None:
        """Options of the critics' optimiser; ``None`` where the user's optimiser trains them."""
        return self.trainer.learner

    @property
    def num_steps(self) -> int:
        """Number of steps that were learned from."""
        return self.trainer.num_steps

    @property
    def traces(self) -> tuple[Any, Any]:
        """Pyro's traces of model and guide, with log-probabilities, in the last training step.

        They are those of its first particle or, where particles run in one plate, those of all of them, as in Pyro. The
        next step drops them before it runs; copies and pickles have none.

        Raises:
            BPQError: If there are none: before the first step, and after a compiled one, which runs no programs.
        """
        if not self._traces.items:
            raise BPQError("There are no traces: take a step first, e.g. svi.step(...). Compiled steps have none.")
        model, guide = self._traces.items
        return model, guide

    def compile_steps(self, compile: Any) -> None:
        """Sets whether, and how, steps are compiled from now on; recordings are forgotten."""
        chosen, self.compiled = Compile.of(compile), None
        if chosen is not None:
            # Imported only if it is needed, so that import pyro_bpq stays quick.
            from pyro_bpq.compiled.steps import CompiledSteps

            self.compiled = CompiledSteps(chosen)

    # The loss.

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Adds the gradients of the loss to ``.grad``, then lets the critics learn.

        A step that fails or is interrupted while a program runs, that of a stored rollout included, leaves what is
        learned, and ``.grad``, as before; what the programs drew from global generators stays drawn.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments.
            **kwargs: Their keyword arguments.

        Returns:
            The loss, in nats: minus the bound.

        Raises:
            BusyError: If another thread takes a step or replays.
        """
        with self._turn:
            loss = self.compiled_update(Program(model, guide, args, kwargs))
            return self.eager_loss_and_grads(model, guide, *args, **kwargs) if loss is None else float(loss.item())

    def eager_loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """The same as :meth:`loss_and_grads`; the step runs eagerly."""
        with self._turn, self.undoing(self.trainer.replays):
            loss, surrogate = self._eager_step(Program(model, guide, args, kwargs))
            self.trainer.register()
            self._backward(surrogate)
        return float(loss.item())

    def compiled_update(self, program: Program, updates: Updates | None = None) -> Tensor | None:
        """Takes a compiled step, which ends with the update of an optimiser where one is given; returns the loss.

        ``None`` if the step has to run eagerly; nothing was done then.
        """
        with self._turn:
            found = self._compiled_step(program, updates)
            if found is None:
                return None
            found.add_gradients()
            return found.loss

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss, whose ``backward`` gives the gradient estimate.

        In training mode what was learned from the previous call is applied first; what is learned from this
        one waits for the next, so that nothing changes between forward and backward. Second derivatives mean nothing.
        Arguments, errors and units are those of :meth:`loss_and_grads`.
        """
        with self._turn:
            program = Program(model, guide, args, kwargs)
            found = self._compiled_step(program)
            if found is not None:
                return found.differentiable_loss()
            with self.undoing():
                loss, surrogate = self._eager_step(program)
            return loss + (surrogate - surrogate.detach())

    def forward(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The same as :meth:`differentiable_loss`."""
        return self.differentiable_loss(model, guide, *args, **kwargs)

    def warm_up(self, model: Any, guide: Any, *args: Any, steps: int, **kwargs: Any) -> float:
        """Trains critics and running statistics on new rollouts; model and guide stay as they are.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments.
            steps: Number of rollouts.
            **kwargs: Their keyword arguments.

        Returns:
            The mean loss, in nats: minus the bound.

        Raises:
            OptionError: If the critics have no optimiser of their own, or nothing learns now.
        """
        if self.learner is None:
            raise OptionError("warm_up(...) needs critics with an optimiser of their own: learner=CriticLearner().")
        if not self._is_learning:
            raise OptionError("warm_up(...) learns: call elbo.train() first, and not under torch.no_grad().")
        if steps < 1:
            raise OptionError(f"warm_up(steps={steps!r}): write a positive number.")
        self.particles.close()
        losses = []
        for _ in range(steps):
            losses.append(float(self.differentiable_loss(model, guide, *args, **kwargs).item()))
            self.learn()
        return sum(losses) / steps

    # A step.

    def _compiled_step(self, program: Program, updates: Updates | None = None) -> Outcome | None:
        """Applies what the last step taught, and takes a compiled step; ``None`` if the step has to run eagerly."""
        self._learn_waiting()
        if self.compiled is None or not self._is_learning:
            return None
        found = self.compiled.take(self, self._prepared(program), self.num_steps, updates)
        if found is not None:
            self.info, self._traces = found.info, Transient()
            if math.isfinite(found.loss):
                # The step has taught critics and statistics already.
                self.trainer.num_steps += 1
            else:
                warn_if_nan(found.loss, "loss")
        return found

    def _eager_step(self, program: Program) -> tuple[Tensor, Tensor]:
        """The loss, detached, and a scalar that has its gradient."""
        if self._is_learning:
            self._traces = Transient()
        result, surrogate = self.taken(self._prepared(program), self.mode(self._is_learning))
        value = result.loss.detach()
        if not result.learns:  # what is learned from is finite
            warn_if_nan(value, "loss")
        return value, surrogate

    def _prepared(self, program: Program) -> Program:
        """The program for one particle; where there is a plate of particles, its place is known from now on."""
        if self._needs_nesting and math.isinf(self.max_plate_nesting):
            self._guess_max_plate_nesting(*program)
        return program

    def mode(self, learning: bool) -> Mode:
        """What a step is for."""
        keeps, ranks = self.trainer.keeps_staged, self.trainer.ranks is not None
        # Nothing may learn later from a step in program order, and nothing but its costs may matter.
        orders, reused = not (keeps or self.analytic_kl or ranks), self.trainer.is_reused
        return Mode(
            learning, self.training, self.num_steps, by_value=keeps, is_reused=reused, has_ranks=ranks, may_order=orders
        )

    def taken(self, program: Program, mode: Mode) -> tuple[Step, Tensor]:
        """Takes a step, and notes what it teaches; also a scalar that has the gradient of the loss."""
        start = time.perf_counter()
        seen = self.particles.observe(self.runner, program, mode)
        ready = time.perf_counter()
        with shapes_told(seen):
            result = self._evaluate(seen, mode)
        self.ms = {"runs": 1e3 * (ready - start), "signals": 1e3 * (time.perf_counter() - ready)}
        if mode.learning:
            self._traces = Transient(seen.traces)
        surrogate, draws = result.paths + result.surrogate, self._num_draws
        surrogate = surrogate / draws if draws > 1 else surrogate
        if result.learns:
            self.info = result.info
            surrogate = self.trainer.prepare(surrogate, result)
        return result, surrogate

    def _backward(self, loss: Tensor) -> None:
        """Adds the gradients of a loss to ``.grad``, then lets the critics learn; where that fails nothing is added."""
        # Only replay runs programs when gradients are there already.
        with kept_gradients(inputs_of(loss) if self._is_learning and self.trainer.replays else ()):
            if loss.requires_grad:
                loss.backward(retain_graph=self.retain_graph)
            if self._is_learning:
                self.trainer.learn(self)

    def learn(self) -> None:
        """Lets critics and statistics learn from the last step."""
        with self.undoing(deep=True) if self.trainer.replays else contextlib.nullcontext():
            self.trainer.learn(self)

    def _learn_waiting(self) -> None:
        """Applies what the last step taught, if that waits for the next one."""
        if self._is_learning and self.trainer.waiting is not None:
            self.learn()

    def learning(self, mode: Mode | None = None) -> Learning:
        """How targets are formed in the present step, or in the step of a mode."""
        number, own = self.num_steps if mode is None else mode.num_steps, self.trainer.options
        return Learning(
            at(self.lam, number),
            float(at(self.gamma, int(number))),
            own.level_weight,
            slow=own.slow is not None,
            num_steps=number,
            ranks=self.trainer.ranks,
            is_recorded=mode is not None and mode.is_recorded,
            sweep=None if own.sweep is None else own.sweep.at(self.num_steps),
        )

    @property
    def _is_learning(self) -> bool:
        return self.training and torch.is_grad_enabled()

    # Going back, and state.

    def mark(self, deep: bool = False) -> Any:
        """A mark to which :meth:`go_back` takes all that a step finds out; with ``deep`` also what critics learn."""
        learned, tensors = self.trainer.parts(deep)
        parts = (self.particles, *self.runner.parts, *learned)
        kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
        return [(part, snapshot(part)) for part in parts], kept, self.info, self.ms

    @contextlib.contextmanager
    def undoing(self, deep: bool = False) -> Iterator[None]:
        """Undoes what a step finds out within, and with ``deep`` also what critics learn, if it fails."""
        mark = self.mark(deep)
        try:
            yield
        except BaseException:
            self.go_back(mark)
            raise

    @torch.no_grad()
    def go_back(self, mark: Any) -> None:
        """Undoes what was built and found out after a mark."""
        parts, tensors, self.info, self.ms = mark
        for part, own in parts:
            restore(part, own)
        for tensor, value in tensors:
            tensor.copy_(value)

    def get_extra_state(self) -> dict[str, Any]:
        """What tensors and buffers do not hold: optimiser, number of steps, what waits to be learned."""
        known = {"num_noises": self.runner.noise.number, "structure": self.runner.recordings.state_dict()}
        number = None if self.particles.is_open else self.particles.written.number
        return {**self.trainer.state_dict(), **known, "nesting": self.particles.nesting, "particles": number}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`get_extra_state`."""
        self.trainer.load_state_dict(state)
        self.runner.noise.number = state["num_noises"]
        self.runner.recordings.load_state_dict(state["structure"])
        if self.particles.is_open and state["particles"]:
            self.num_particles = state["particles"]  # as after warm_up
        if self._needs_nesting and math.isinf(self.max_plate_nesting):
            # A guess would draw.
            self.max_plate_nesting = state["nesting"] + self.vectorize_particles
