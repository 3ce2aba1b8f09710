"""Which settings a graph is compiled with."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_bpq.compiled import backends


def graph_of(elements: int) -> fx.GraphModule:
    return make_fx(lambda x: [x.sin() + x.cos()])(torch.zeros(elements))


def test_small_tensors_get_plain_loops_and_large_ones_vectorised() -> None:
    assert backends._options(graph_of(16))["cpp.simdlen"] == 1
    assert "cpp.simdlen" not in backends._options(graph_of(4096))


def test_the_garbage_collector_rests_while_inductor_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compiler(graph: fx.GraphModule, examples: list[Tensor], options: object) -> fx.GraphModule:
        seen.append(gc.isenabled())
        raise RuntimeError("no luck")

    monkeypatch.setattr(torch._inductor, "compile", compiler)
    with pytest.raises(RuntimeError, match="no luck"):
        backends.compile_graph(graph_of(16), "inductor", [torch.zeros(16)])
    assert seen == [False] and gc.isenabled()
