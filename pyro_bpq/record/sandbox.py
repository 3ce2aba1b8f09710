r"""Makes runs of a program free of side effects: generators and module buffers are as before."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.runtime import effectful
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor, nn

from pyro_bpq.critics.bank import is_of_critic
from pyro_bpq.record.external import Answers
from pyro_bpq.record.function import seeded
from pyro_bpq.record.traced_run import TracedRun
from pyro_bpq.record.values import put_back


class LentBuffers:
    """Gives each module that a run calls on its thread copies of its buffers, and takes them back afterwards."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._own: dict[nn.Module, dict[str, Tensor | None]] = {}

    def __enter__(self) -> LentBuffers:
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._lend)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        for module, buffers in self._own.items():
            _put(module, buffers)

    def _lend(self, module: nn.Module, _: object) -> None:
        if threading.get_ident() != self._thread or is_of_critic(module):
            return
        # The parts of a scripted module are called by no hook.
        for part in module.modules() if isinstance(module, torch.jit.ScriptModule) else (module,):
            if part._buffers and part not in self._own:
                own = self._own[part] = dict(part._buffers.items())
                # The run writes into clones only: autograd may hold the originals.
                _put(part, {name: None if buffer is None else buffer.clone() for name, buffer in own.items()})


def _put(module: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    for name, buffer in buffers.items():  # a scripted module has no dictionary to update
        module._buffers[name] = buffer


class _Unheard(BlockMessenger):
    """Keeps statements from the handlers around. No program sees it, so it makes no other call."""


@contextlib.contextmanager
def isolated(seed: int, hides_params: bool = True) -> Iterator[None]:
    """Runs programs from a given seed; generators, module buffers and captured parameters stay unchanged."""
    before = get_rng_state()
    try:
        with seeded(seed), LentBuffers(), _Unheard(hide_types=["param"] if hides_params else []):
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            yield
    finally:
        set_rng_state(before)


class Draws:
    """Marks the state of the CPU's global generator and of buffers, so that a step can run again."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._state, self._mark = torch.get_rng_state(), _mark()
        pairs = [(module, *pair) for module in modules for pair in module._buffers.items()]
        self.answers = Answers()
        self._buffers = [(*pair, None if pair[-1] is None else pair[-1].detach().clone()) for pair in pairs]

    @torch.no_grad()
    def again(self, runs: Sequence[TracedRun] = ()) -> None:
        """Goes back to the mark, and undoes what runs since then have written if they were recorded.

        The draws since the mark are repeated from now on.
        """
        for run in reversed(runs):
            put_back({} if run.recorded is None else run.recorded.recording.written)
        torch.set_rng_state(self._state)
        self.answers.position = 0
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
