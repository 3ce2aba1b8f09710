r"""Makes runs of a program free of side effects: generators and module buffers are as before."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pyro.poutine.runtime import effectful
from torch import Tensor, nn

from pyro_bpq.critics.bank import is_of_critic


class BufferedModules:
    """Records each module with buffers that a run calls on its thread, just before the first call."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._own: dict[nn.Module, dict[str, Tensor | None]] = {}

    def __enter__(self) -> Any:
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def __bool__(self) -> bool:
        """Whether the run called any module with buffers."""
        return bool(self._own)

    def _detach(self) -> None:
        for module in self._own:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.grad_fn is not None:
                    module._buffers[name] = buffer.detach()

    def _note(self, module: nn.Module, _: object) -> None:
        if threading.get_ident() != self._thread or is_of_critic(module):
            return
        # The parts of a scripted module are called by no hook.
        for part in module.modules() if isinstance(module, torch.jit.ScriptModule) else (module,):
            if part._buffers and part not in self._own:
                self._own[part] = dict(part._buffers.items())
                self._called(part)

    def _called(self, module: nn.Module) -> None:
        """Runs before the first call of a module; subclasses override it."""


class LentBuffers(BufferedModules):
    """Gives modules copies of their buffers for a run, and drops the copies afterwards unless kept."""

    def __exit__(self, *_: object) -> None:
        for module, buffers in self._own.items():
            _put(module, buffers)
        super().__exit__()
        self._detach()

    def _called(self, module: nn.Module) -> None:
        # The run writes into clones only: autograd may hold the originals.
        own = self._own[module]
        _put(module, {name: None if buffer is None else buffer.clone() for name, buffer in own.items()})

    def _pairs(self) -> list[tuple[Tensor, Tensor | None]]:
        """Each buffer that was lent, and what has become of its copy."""
        lent = [(own, getattr(module, name, None)) for module, all_ in self._own.items() for name, own in all_.items()]
        return [(own, copy) for own, copy in lent if own is not None]

    @property
    def originals(self) -> list[Tensor]:
        """The buffers that were lent."""
        return [own for own, _ in self._pairs()]

    @property
    def fit(self) -> bool:
        """Whether all buffers have the same shapes as before the run."""
        return all(copy is not None and own.shape == copy.shape for own, copy in self._pairs())

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the values that the run wrote into the original buffers."""
        for own, copy in self._pairs():
            if copy is not None:
                own.copy_(copy)


def _put(module: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    for name, buffer in buffers.items():  # a scripted module has no dictionary to update
        module._buffers[name] = buffer


class Sandbox:
    """Undoes the effects of an extra run on global generators and on module buffers (batch statistics).

    ``start`` is the initial state of the CPU's generator, or a seed for all devices. ``before`` and ``after`` are the
    states of the generators, CPU first, at the start and the end of the run. Watching for buffers takes a hook on all
    modules, which makes ``torch.compile`` recompile: say ``has_buffers=False`` where there are none.
    """

    def __init__(self, start: Tensor | int, has_buffers: bool = True) -> None:
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        self._start = start
        self._buffers = LentBuffers() if has_buffers else contextlib.nullcontext()

    def __enter__(self) -> Sandbox:
        self._devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        self._fork = torch.random.fork_rng(self._devices)
        self._fork.__enter__()
        if isinstance(self._start, int):
            # torch.manual_seed() is slow: it formats the call stack for every kind of device that is absent.
            torch.default_generator.manual_seed(self._start)
            if self._devices:
                torch.cuda.manual_seed_all(self._start)
        else:
            torch.set_rng_state(self._start)
        self.before = self._generators()
        self._buffers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._buffers.__exit__(None, None, None)
        self.after = self._generators()
        self._fork.__exit__(None, None, None)

    def _generators(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]


class Draws:
    """Marks the state of the CPU's global generator and of buffers, so that a step can run again."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._state, self._mark = torch.get_rng_state(), _mark()
        pairs = [(module, *pair) for module in modules for pair in module._buffers.items()]
        self._buffers = [(*pair, None if pair[-1] is None else pair[-1].detach().clone()) for pair in pairs]

    @torch.no_grad()
    def again(self) -> None:
        """Goes back to the mark: the draws since the mark are repeated from now on."""
        torch.set_rng_state(self._state)
        _rewind(self._mark)
        for module, name, own, kept in self._buffers:
            module._buffers[name] = own if own is None or kept is None else own.copy_(kept)


# These messages tell handlers that draw in place of the generator of a mark, and of a return to it.


@effectful(type="bpq_mark")
def _mark() -> Any:
    return None


@effectful(type="bpq_rewind")
def _rewind(mark: Any) -> Any:
    return None
