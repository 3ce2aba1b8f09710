r"""Turns a recorded graph into a function of its inputs."""

from __future__ import annotations

import contextlib
import gc
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_bpq.compiled.editing import Editor, called_draws, eager_draws, fused_draws
from pyro_bpq.compiled.joining import joined
from pyro_bpq.compiled.options import Backend

Compiled = Callable[..., Sequence[Tensor]]

# The oldest release of torch that steps were recorded and compiled with.
OLDEST_TORCH = "2.8"
# Number of operators that Inductor may join in a kernel. Its own number, 64, is for larger tensors.
_FUSED = 512
# Elements of an operator's result, in the mean over a graph, up to which plain loops are as fast as vectorised ones.
_FEW_ELEMENTS = 128


def outdated(version: str) -> str:
    """Why steps are not recorded with a release of torch, as the end of a sentence; empty if they are."""
    numbers = [tuple(map(int, re.findall(r"\d+", each)[:2])) for each in (version, OLDEST_TORCH)]
    return (
        f"torch {version} is older than {OLDEST_TORCH}, the oldest that was tested" if numbers[0] < numbers[1] else ""
    )


def missing(backend: Backend, device: torch.device) -> str:
    """What a backend lacks on this machine, in words; empty if nothing."""
    if backend == "cudagraphs" and device.type != "cuda":
        return "cudagraphs serves GPUs only"
    if backend == "inductor" and device.type == "cpu":
        from torch._inductor import config

        names = [config.cpp.cxx] if isinstance(config.cpp.cxx, str) else list(config.cpp.cxx)
        if not any(name and shutil.which(name) for name in (*names, "g++", "clang++")):
            return "this machine has no C++ compiler"
    return ""


def compile_graph(graph: fx.GraphModule, backend: Backend, examples: Sequence[Tensor]) -> Compiled:
    """Compiles a graph."""
    if backend == "eager":
        return graph
    if callable(backend):
        return backend(graph, list(examples))
    if backend == "inductor":
        options = _options(graph)
        graph = _prepared(graph)
        # Ahead of time: torch.compile would take the graph apart once more, which doubles the time.
        with _uncollected(), warnings.catch_warnings():
            # Those are of torch's own modules.
            warnings.simplefilter("ignore", FutureWarning)
            return torch._inductor.compile(graph, list(examples), options=options)
    compiled: Any = torch.compile(graph, backend=backend, dynamic=False, fullgraph=True)

    def kept(*tensors: Tensor) -> Sequence[Tensor]:
        # The next run of a CUDA graph overwrites the results.
        return [result.clone() for result in compiled(*tensors)]

    return kept


def _prepared(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph that is compiled sooner, and does the same."""
    editor, keeps_draws = Editor(graph), torch._inductor.config.fallback_random
    (eager_draws if keeps_draws else fused_draws)(editor)
    joined(editor, keeps_draws)
    if not keeps_draws:
        called_draws(editor)
    editor.module.recompile()
    return editor.module


def _options(graph: fx.GraphModule) -> dict[str, Any]:
    """Inductor's settings for a graph.

    A long program of small tensors spends its compilation on vectorised loops that never run: there the plain ones
    are as fast, and made in two thirds of the time. Its many small kernels run faster as few large ones.
    """
    found = [node.meta.get("val") for node in graph.graph.nodes if node.op == "call_function"]
    values = [value for value in found if isinstance(value, Tensor)]
    elements = sum(value.numel() for value in values)
    # The shapes of inputs are compared before each step.
    options: dict[str, Any] = {"max_fusion_size": _FUSED, "size_asserts": False}
    if elements <= _FEW_ELEMENTS * len(values) and all(value.device.type == "cpu" for value in values):
        # No instruction set is asked for, so that none needs a trial compilation.
        options |= {"cpp.simdlen": 1, "cpp.vec_isa_ok": True, "reorder_for_peak_memory": False}
        # Of the operators that read the same tensor, neighbours are joined; all pairs would take a third of the time.
        options["max_fusion_buffer_group_pairwise_attempts"] = 16
    return options


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Python's garbage collector at rest: compilation makes millions of objects, and nearly all of them stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
