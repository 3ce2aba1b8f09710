r"""Turns a recorded graph into a function of its inputs."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_bpq.compiled.options import Backend

__all__ = ["compile_graph", "missing"]

Compiled = Callable[..., Sequence[Tensor]]


def missing(backend: Backend, device: torch.device) -> str:
    """What a backend lacks on this machine, in words; empty if nothing.

    Args:
        backend: The backend.
        device: The device of the tensors.
    """
    if backend == "cudagraphs" and device.type != "cuda":
        return "cudagraphs serves GPUs only"
    if backend == "inductor" and device.type == "cpu":
        from torch._inductor import config

        names = [config.cpp.cxx] if isinstance(config.cpp.cxx, str) else list(config.cpp.cxx)
        if not any(name and shutil.which(name) for name in (*names, "g++", "clang++")):
            return "this machine has no C++ compiler"
    return ""


def compile_graph(graph: fx.GraphModule, backend: Backend, examples: Sequence[Tensor]) -> Compiled:
    """Compiles a graph.

    Args:
        graph: The graph.
        backend: What compiles it.
        examples: Its inputs at the recording.

    Returns:
        A function of tensors like the examples. It compiles when it is first called.
    """
    if backend == "eager":
        return graph
    if callable(backend):
        return backend(graph, list(examples))
    if backend == "inductor":
        if torch._inductor.config.fallback_random:
            graph = _with_eager_bernoulli(graph)
        # Ahead of time: torch.compile would take the graph apart once more, which doubles the time.
        return torch._inductor.compile(graph, list(examples))
    compiled: Any = torch.compile(graph, backend=backend, dynamic=False, fullgraph=True)

    def kept(*tensors: Tensor) -> Sequence[Tensor]:
        # The next run of a CUDA graph overwrites the results.
        return [result.clone() for result in compiled(*tensors)]

    return kept


def _with_eager_bernoulli(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy that draws coins by the kernel of eager steps, where Inductor would compare other uniform draws."""
    copied = copy.deepcopy(graph)
    for node in copied.graph.nodes:
        if node.target is torch.ops.aten.bernoulli.default:
            with copied.graph.inserting_before(node):
                room = copied.graph.call_function(torch.ops.aten.empty_like.default, (node.args[0],))
                drawn = copied.graph.call_function(torch.ops.aten.bernoulli.Tensor, (room, node.args[0]))
            node.replace_all_uses_with(drawn)
            copied.graph.erase_node(node)
    copied.recompile()
    return copied
