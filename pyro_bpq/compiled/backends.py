r"""How a recording is compiled: its graph becomes a function of its inputs, with draws that Inductor can compile."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import clone_preserve_strides
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from tqdm import tqdm

from pyro_bpq.compiled.graphs import Editor, value_of
from pyro_bpq.compiled.joining import joined
from pyro_bpq.compiled.options import Backend, Compile
from pyro_bpq.compiled.recorder import Recording
from pyro_bpq.compiled.watch import first_line
from pyro_bpq.errors import warn
from pyro_bpq.record.further import Draws

LOG = logging.getLogger("pyro_bpq")
Compiled = Callable[..., Sequence[Tensor]]

_ATEN = torch.ops.aten
# Number of operators above which a step is compiled in the background, where that is left open.
_LONG = 5_000
# Number of operators that Inductor may join in a kernel. Its own number, 64, is for larger tensors.
_FUSED = 512
# Elements of an operator's result, in the mean over a graph, up to which plain loops are as fast as vectorised ones.
_FEW_ELEMENTS = 128
# Smallest exponential time: torch's own draws have no smaller one in single precision.
_SHORTEST = 2.0**-25
# Uniform numbers from which on torch's generator, four times as fast, is worth a call that nothing joins.
_MANY = 2048


def compile_graph(graph: fx.GraphModule, backend: Backend, examples: Sequence[Tensor]) -> Compiled:
    """Compiles a graph."""
    FakeTensorProp(graph).propagate(*examples)  # notes what results look like
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
    graph = joined(editor, keeps_draws)
    if not keeps_draws:
        called_draws(editor)
        graph.recompile()
    return graph


def _options(graph: fx.GraphModule) -> dict[str, Any]:
    """Inductor's settings for a graph.

    A long program of small tensors spends its compilation on vectorised loops that never run: there the plain ones
    are as fast, and made in two thirds of the time. Its many small kernels run faster as few large ones.
    """
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    results = [value for value in map(value_of, calls) if value is not None]
    elements = sum(value.numel() for value in results)
    # The shapes of inputs are compared before each step.
    options: dict[str, Any] = {"max_fusion_size": _FUSED, "size_asserts": False}
    if elements <= _FEW_ELEMENTS * len(results) and all(value.device.type == "cpu" for value in results):
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


def make(recording: Recording, options: Compile) -> None:
    """Compiles a recording, in the background if that is asked for; notes why it could not."""
    backend, background, examples = options.backend, options.background, recording.inputs
    if backend == "eager":
        return
    if background is None:
        background = recording.num_operators > _LONG
    LOG.info("Compiling a step of %d operators.", recording.num_operators)
    line = _line(recording.num_operators, background)
    copies = [clone_preserve_strides(tensor.detach()) for tensor in examples]  # compiled code counts on strides

    def work() -> None:
        start = time.perf_counter()
        # Its first run draws. A thread cannot take that back: the main one draws meanwhile.
        draws = None if background else Draws()
        try:
            with torch.no_grad(), line:
                compiled = compile_graph(recording.graph, backend, copies)
                compiled(*copies)
        except Exception as error:  # A compiler may raise anything.
            recording.note = f"the compiler failed ({first_line(error)})"
            warn(f"compile: {recording.note}; the recorded operators run as they are.")
        else:
            recording.run = compiled
        finally:
            if draws is not None:
                draws.again()
        recording.seconds[1] = time.perf_counter() - start

    if background:
        recording.thread = threading.Thread(target=work, daemon=True)
        recording.thread.start()
    else:
        work()


def _line(operators: int, background: bool) -> contextlib.AbstractContextManager[Any]:
    """A line that says what is compiled; on a terminal it goes when the wait is over."""
    text = f"Compiling a step of {operators} operators, once for all calls like this one"
    if background:
        tqdm.write(f"{text}; steps go on meanwhile.", file=sys.stderr)
        return contextlib.nullcontext()
    return tqdm(total=1, desc=text, bar_format="{desc} ...", leave=not sys.stderr.isatty())


# Draws that Inductor can compile.


def eager_draws(editor: Editor) -> None:
    """Draws coins by the kernel of eager steps, where Inductor would compare other uniform draws."""
    for node in _replaced(editor, _ATEN.bernoulli.default, lambda node: not node.kwargs):
        room = editor.call(_ATEN.empty_like.default, node.args[0])
        node.replace_all_uses_with(editor.call(_ATEN.bernoulli.Tensor, room, node.args[0]))


def fused_draws(editor: Editor) -> None:
    r"""Draws coins and values from uniform numbers, which wait for nothing.

    ``u < p`` with ``u ~ Uniform(0, 1)`` has the probability ``p``. One value of several is drawn by a race, in place of
    ``multinomial``, which Inductor does not compile: the winner of ``argmin_v T_v`` with independent
    ``T_v ~ Exponential(p_v)`` is ``v`` with probability ``p_v / Σ_w p_w``. Eager steps do the same, after a dozen
    operators that check the probabilities.
    """
    call = editor.call
    for node in _replaced(editor, _ATEN.bernoulli.default, lambda node: not node.kwargs):
        own = node.meta["val"]
        uniform = call(_ATEN.rand.default, list(own.shape), dtype=torch.float32, device=own.device)
        is_one = call(_ATEN.lt.Tensor, uniform, node.args[0])
        node.replace_all_uses_with(call(_ATEN._to_copy.default, is_one, dtype=own.dtype))
    for node in _replaced(editor, _ATEN.multinomial.default, lambda node: not node.kwargs and bool(node.args[1] == 1)):
        own = node.args[0].meta["val"]  # type: ignore[union-attr]
        uniform = call(_ATEN.rand.default, list(own.shape), dtype=own.dtype, device=own.device)
        log = call(_ATEN.log1p.default, call(_ATEN.neg.default, uniform))
        times = call(_ATEN.clamp.default, call(_ATEN.neg.default, log), _SHORTEST)
        node.replace_all_uses_with(call(_ATEN.argmax.default, call(_ATEN.div.Tensor, node.args[0], times), -1, True))


def called_draws(editor: Editor) -> None:
    """Draws many uniform numbers on a CPU by torch's kernel, where Inductor would compute each from a counter."""

    def is_large(node: fx.Node) -> bool:
        own = node.meta["val"]
        return bool(own.device.type == "cpu" and own.numel() >= _MANY)

    for node in _replaced(editor, _ATEN.rand.default, is_large):
        own = node.meta["val"]
        room = editor.call(_ATEN.empty.memory_format, list(own.shape), dtype=own.dtype, device=own.device)
        node.replace_all_uses_with(editor.call(_ATEN.uniform.default, room))


def _replaced(editor: Editor, target: Any, fits: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """The calls of an operator, each of which goes when it was replaced by what is added before it."""
    graph = editor.module.graph
    for node in filter(fits, graph.find_nodes(op="call_function", target=target)):
        with graph.inserting_before(node):
            yield node
        graph.erase_node(node)
