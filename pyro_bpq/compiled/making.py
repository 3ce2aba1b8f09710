r"""Compiles a recording, now or in a thread."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_bpq.compiled.backends import compile_graph, missing
from pyro_bpq.compiled.entry import Entry
from pyro_bpq.compiled.options import Compile
from pyro_bpq.errors import BPQWarning
from pyro_bpq.tracing.sandbox import Draws

LOG = logging.getLogger("pyro_bpq")


def make(entry: Entry, options: Compile) -> None:
    """Compiles what an entry has recorded, in the background if that is asked for; notes why it could not."""
    examples = [entry.recording.inputs.tensors[i] for i in entry.recording.used]
    examples += entry.recording.constants
    backend, recording = options.backend, entry.recording
    lack = missing(backend, examples[0].device if examples else torch.device("cpu"))
    if lack:
        entry.note = f"{lack}, so the recorded operators run as they are"
        warnings.warn(f"compile: {entry.note}.", BPQWarning, stacklevel=2)
        return
    if backend == "eager":
        return
    LOG.info("Compiling a step of %d operators.", recording.num_operators)
    copies = [_copy(tensor) for tensor in examples]

    def work() -> None:
        start = time.perf_counter()
        # Its first run draws. A thread cannot take that back: the main one draws meanwhile.
        draws = None if options.background else Draws()
        try:
            with torch.no_grad(), _line(recording.num_operators, options.background):
                compiled = compile_graph(recording.graph, backend, copies)
                compiled(*copies)
        except Exception as error:  # A compiler may raise anything.
            text = str(error).strip().splitlines()
            entry.note = f"the compiler failed ({text[0] if text else type(error).__name__})"
            warnings.warn(f"compile: {entry.note}; the recorded operators run as they are.", BPQWarning, stacklevel=2)
        else:
            entry.run = compiled
        finally:
            if draws is not None:
                draws.again()
        entry.seconds[1] = time.perf_counter() - start

    if options.background:
        entry.thread = threading.Thread(target=work, daemon=True)
        entry.thread.start()
    else:
        work()


def _line(operators: int, is_hidden: bool) -> tqdm[Any]:
    """A line on the terminal that says what the step waits for; it goes when the wait is over."""
    text = f"Compiling a step of {operators} operators, once for all calls like this one"
    # tqdm writes to terminals only.
    hidden = True if is_hidden else None
    return tqdm(total=1, desc=text, bar_format="{desc} ...", leave=False, disable=hidden)


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, which compiled code counts on."""
    own = tensor.detach()
    if own.is_contiguous():
        return own.clone()
    if 0 in own.stride():
        # An expanded tensor; nothing writes into it.
        return own
    return torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device).copy_(own)
