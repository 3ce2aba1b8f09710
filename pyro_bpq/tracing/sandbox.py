r"""Makes runs of a program free of side effects: generators and module buffers are as before."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from typing_extensions import Self
from typing import Any

from pyro.poutine.runtime import effectful


class BufferedModules:
    """Records each module with buffers that a run calls on its thread, just before the first call."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._own: dict[nn.Module, dict[str, Tensor | None]] = {}

    def __enter__(self) -> Self:
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
        if module._buffers and module not in self._own and threading.get_ident() == self._thread:
            self._own[module] = dict(module._buffers)
            self._called(module)

    def _called(self, module: nn.Module) -> None:
        """Runs before the first call of a module; subclasses override it."""


class UngraphedBuffers(BufferedModules):
    """Detaches the buffers of modules after a run whose sampled values carry gradients."""

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        # After a run whose sampled values have no gradients, the buffers have none either.
        self._detach()


class LentBuffers(BufferedModules):
    """Gives modules copies of their buffers for a run, and drops the copies afterwards unless kept."""

    def __exit__(self, *_: object) -> None:
        for module, buffers in self._own.items():
            module._buffers.update(buffers)
        super().__exit__()
        self._detach()

    def _called(self, module: nn.Module) -> None:
        # The run writes into clones only: autograd may hold the originals.
        own = self._own[module]
        module._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in own.items()})

    def _pairs(self) -> list[tuple[Tensor | None, Tensor | None]]:
        pairs = [(buffer, module._buffers[name]) for module, own in self._own.items() for name, buffer in own.items()]
        return [pair for pair in pairs if pair[0] is not None]

    @property
    def originals(self) -> list[Tensor]:
        """The buffers that were lent."""
        return [buffer for own in self._own.values() for buffer in own.values() if buffer is not None]

    @property
    def fit(self) -> bool:
        """Whether all buffers have the same shapes as before the run."""
        return all(own is not None and lent is not None and own.shape == lent.shape for own, lent in self._pairs())

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the values that the run wrote into the original buffers."""
        for own, lent in self._pairs():
            if own is not None and lent is not None:
                own.copy_(lent)


class Sandbox:
    """Undoes the effects of an extra run on global generators and on module buffers (batch statistics)."""

    def __init__(self, start: Tensor | int, has_buffers: bool = True) -> None:
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        self._start = start
        self._buffers = LentBuffers() if has_buffers else contextlib.nullcontext()

    def __enter__(self) -> Sandbox:
        is_cuda_used = torch.cuda.is_initialized()
        self._devices = list(range(torch.cuda.device_count())) if is_cuda_used else []
        self._states = self._generators()
        if isinstance(self._start, int):
            # torch.manual_seed() is slow: it formats the call stack for every kind of device that is absent.
            torch.default_generator.manual_seed(self._start)
            if is_cuda_used:
                torch.cuda.manual_seed_all(self._start)
        else:
            torch.set_rng_state(self._start)
        self.before = self._generators()
        self._buffers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._buffers.__exit__(None, None, None)
        self.after = self._generators()
        cpu, *others = self._states
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, others, strict=True):
            torch.cuda.set_rng_state(state, device)

    def _generators(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]


# Types of the messages that announce a mark, and a return to it, to handlers that draw in place of the generator.
MARK, REWIND = "bpq_mark", "bpq_rewind"


class Draws:
    """Marks the current state of the global generator of the CPU."""

    def __init__(self) -> None:
        self._state, self._mark = torch.get_rng_state(), _mark()

    def again(self) -> None:
        """Goes back to the mark: the draws since the mark are repeated from now on."""
        torch.set_rng_state(self._state)
        _rewind(self._mark)


@effectful(type=MARK)
def _mark() -> Any:
    return None


@effectful(type=REWIND)
def _rewind(mark: Any) -> Any:
    return None
