"""Dependencies of tensors on sources: tables of programs, sources, modes, memory."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from steps import filtered
from torch import Tensor
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from pyro_bpq.record.operators import effects_of
from pyro_bpq.record.tape import Tape

Program = Callable[["Inputs"], Any]


def origins_of(tape: Tape, name: str) -> frozenset[str]:
    """What the values of a source depended on before they became it."""
    return tape.names(tape.origins.get(name, 0))


class Inputs:
    """The values a program starts from: sources x, i, b, k, e and plain tensors."""

    def __init__(self, tape: Tape) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.tape = tape
        self.x = tape.source("x", randn(3))  # a float vector
        self.s = tape.source("s", randn().abs() + 0.5)  # a float scalar
        self.i = tape.source("i", torch.tensor(1))  # an int scalar
        self.k = tape.source("k", torch.tensor([0, 2, 1]))  # an int vector
        self.b = tape.source("b", torch.tensor(True))  # a bool scalar
        self.m = tape.source("m", torch.tensor([True, False, True]))  # a bool vector
        self.p = randn(3, 3)
        self.w = nn.Parameter(randn(3, 3))
        self.v = randn(3)
        self.z = torch.zeros(3)


def inplace(action: Callable[[Tensor, Inputs], Any]) -> Program:
    """Runs a write and looks at an alias of the buffer made before."""

    def program(c: Inputs) -> Tensor:
        buffer = torch.zeros(3)
        alias = buffer.view(3, 1)
        action(buffer, c)
        return alias

    return program


def written_stack(c: Inputs) -> Tensor:
    """A stack that another view of it has changed."""
    stack = torch.stack([c.x, c.z])
    stack.view(-1)[:3] += c.s
    return stack


with filtered("ignore"):

    @torch.jit.script
    def scripted_branch(x: Tensor, y: Tensor) -> Tensor:
        if bool(x[0] > 0):
            return y * 2
        return y

    @torch.jit.script
    def scripted_choice(i: Tensor, y: Tensor) -> Tensor:
        return y[i]


def data_assignment(c: Inputs) -> Tensor:
    target = torch.zeros(3)
    target.data = c.x
    return target


def grad_of_choice(c: Inputs) -> Tensor:
    return torch.autograd.grad(c.w[c.i].sum(), c.w)[0]


def grad_of_write(c: Inputs) -> Tensor:
    buffer, value = torch.zeros(3, requires_grad=True) * 1, torch.ones((), requires_grad=True)
    buffer[c.i] = value
    return torch.autograd.grad((buffer * c.v).sum(), value)[0]


def batch_norm(c: Inputs) -> Tensor:
    net = nn.BatchNorm1d(3)
    net(torch.ones(4, 3) * c.x)
    return net.running_mean


def foreach(c: Inputs) -> list[Tensor]:
    out = [torch.zeros(3), torch.zeros(3)]
    torch._foreach_add_(out, [c.x, c.x])
    return out


def out_topk(c: Inputs) -> list[Tensor]:
    out = (torch.zeros(2), torch.zeros(2, dtype=torch.long))
    torch.topk(c.x, 2, out=out)
    return list(out)


def table_after_choice(c: Inputs) -> list[Tensor]:
    _ = c.p[c.i].exp()
    return [c.p, c.p.t(), c.p[0], c.p.exp(), c.p.detach()]


def write_through_choice(c: Inputs) -> Tensor:
    row = c.p[c.i]
    row.fill_(1.0)
    return c.p


def write_into_chosen_table(c: Inputs) -> Tensor:
    row = c.p[c.i]
    c.p.add_(c.s)
    return row


def sparse_values_write(c: Inputs) -> Tensor:
    matrix = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), torch.ones(3), (4,)).coalesce()
    matrix.values().mul_(c.x)
    return matrix


KEPT: dict[str, tuple[Program, str]] = {
    # elementwise, shapes, reductions
    "add": (lambda c: c.x + c.s, "x s"),
    "stack_index": (lambda c: torch.stack([c.s, c.z[0]])[1], ""),
    "stack_negative": (lambda c: torch.stack([c.x, c.z, c.s + c.z], -1)[..., -1], "s"),
    "stack_unbind": (lambda c: torch.stack([c.x, c.s + c.z], -1).unbind(-1)[0], "x"),
    "stack_across": (lambda c: torch.stack([c.x, c.z])[:, 1], "x"),
    "stack_slice": (lambda c: torch.stack([c.x, c.z, c.s + c.z])[:2], "x"),
    "stack_slice_of_slice": (lambda c: torch.stack([c.x, c.x, c.s + c.z, c.i + c.z], -1)[:, 1:][..., 1::2], "s"),
    "stack_slice_from": (lambda c: torch.ops.aten.slice(torch.stack([c.x, c.z, c.s + c.z]), 0, 2), "s"),
    "stack_slice_across": (lambda c: torch.stack([c.x, c.z, c.s + c.z])[:, 1:], "s x"),
    "stack_written": (lambda c: written_stack(c)[0], "s x"),
    "stack_part_written": (lambda c: torch.stack([inplace(lambda t, c: t.copy_(c.x))(c)[:, 0], c.s + c.z])[0], "x"),
    "one_hot": (lambda c: F.one_hot(c.i, 3), "i"),
    "zeros_like": (lambda c: torch.zeros_like(c.x), ""),
    "new_zeros": (lambda c: c.x.new_zeros(2) + c.s, "s"),
    # selections
    "index_scalar": (lambda c: c.p[c.i], "i"),
    "index_tuple": (lambda c: c.p[c.i, c.k[1]], "i k"),
    "index_ellipsis": (lambda c: c.p[..., c.i], "i"),
    "choice_expanded": (lambda c: c.p[c.i].expand(3, 3) + 0.0, "i"),  # it covers its memory
    "choice_strided": (lambda c: c.p[c.i].as_strided((3, 3), (0, 1), 3) + 0.0, "i"),
    "index_list_of_tensors": (lambda c: c.p[[c.i, c.k[0]]], "i k"),
    "choice_leaves_table": (table_after_choice, ""),
    "choice_write": (write_through_choice, "i"),
    "choice_of_written": (write_into_chosen_table, "i s"),
    # writes; an alias made before is looked at
    "setitem_scalar_index": (inplace(lambda t, c: t.__setitem__(c.i, 1.0)), "i"),
    "setitem_vector": (inplace(lambda t, c: t.__setitem__(c.k, c.x)), "k x"),
    "setitem_mask": (inplace(lambda t, c: t.__setitem__(c.m, 1.0)), "m"),
    "setitem_bool": (inplace(lambda t, c: t.__setitem__(c.b, 1.0)), "b"),
    "setitem_list": (inplace(lambda t, c: t.view(3, 1).__setitem__([c.i, torch.tensor(0)], 1.0)), "i"),
    "mul_view": (inplace(lambda t, c: t[1:].mul_(c.s)), "s"),
    "detached_write": (inplace(lambda t, c: t.detach().copy_(c.x)), "x"),
    "data_assignment": (data_assignment, "x"),
    "set_": (lambda c: torch.zeros(1).set_(c.x), "x"),
    "out_tuple": (out_topk, "x"),
    "foreach_": (foreach, "x"),
    "batch_norm_statistics": (batch_norm, "x"),
    # transforms, scripts, autograd
    "vmap_index": (lambda c: torch.func.vmap(lambda j: c.p[j])(c.k), "k"),
    "vmap_row_by_source": (lambda c: torch.func.vmap(lambda row: row[c.i])(c.p), "i"),
    "vmap_source": (lambda c: torch.func.vmap(lambda x: c.tape.source("z", x * 2) + 1)(c.x), "z"),
    "func_grad_index": (lambda c: torch.func.grad(lambda t: t[c.i].sum())(c.p), "i"),
    "grad_of_choice": (grad_of_choice, "i"),
    "grad_of_write": (grad_of_write, "i"),
    "jit_choice": (lambda c: scripted_choice(c.i, c.p), "i"),
    "compiled": (lambda c: torch.compile(lambda x: x.sin() + 1, backend="eager")(c.x), "x"),
    "inference_mode_choice": (lambda c: torch.inference_mode()(lambda: c.p[c.i] * 2)(), "i"),
    # memory of other kinds, and other things
    "pytree": (lambda c: [{"a": c.x}, (c.i, None), "text", 3], "x i"),
    "nothing": (lambda c: None, ""),
    "sparse_values_write": (sparse_values_write, "x"),
    # construction
    "torch_tensor_list": (lambda c: torch.tensor([c.s, c.x[0], 1.0]), "s x"),
    "as_tensor": (lambda c: torch.as_tensor(c.x), "x"),
    "legacy_new": (lambda c: c.v.new([c.s]), "s"),
    "deepcopy": (lambda c: copy.deepcopy(c.x), "x"),
}


def exposed_by(expose: Callable[[Tensor], Any], c: Inputs) -> Any:
    buffer = torch.zeros(3)
    array = expose(buffer)
    buffer.fill_(c.s)
    return array.sum()


def foreign_memory(c: Inputs) -> Any:
    array = np.zeros(3, dtype=np.float32)
    torch.from_numpy(array)[0] = c.s
    return array[0]


def torch_function_wrapped(c: Inputs) -> Any:
    def body(x: Tensor) -> Any:
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(body, (x,), x)
        return x.tolist()

    # handle_torch_function turns a mode off for the body.
    return body(c.x)


ESCAPES: dict[str, tuple[Program, str]] = {
    "jvp_of_choice": (lambda c: torch.func.jvp(lambda t: t[c.i], (c.p,), (c.p + 1,))[1], "i"),
    "bool": (lambda c: bool(c.b), "b"),
    "item": (lambda c: c.s.item(), "s"),
    "complex": (lambda c: complex(c.s), "s"),
    "index": (lambda c: c.i.__index__(), "i"),
    "tolist": (lambda c: c.x.tolist(), "x"),
    "numpy_view": (lambda c: c.x[1:].detach().cpu().numpy(), "x"),
    "array": (lambda c: np.array([c.s, c.s]), "s"),
    "dlpack": (lambda c: np.from_dlpack(c.x), "x"),
    "data_ptr": (lambda c: c.x.data_ptr(), "x"),
    "storage": (lambda c: c.x.untyped_storage()[0], "x"),
    "typed_storage": (lambda c: c.x.storage(), "x"),
    "storage_offset": (lambda c: c.p[c.i].storage_offset(), "i"),
    "legacy_constructor": (lambda c: torch.Tensor([c.s]), "s"),
    "plate_size": (lambda c: pyro.plate("plate", c.i + 1), "i"),
    "math": (lambda c: math.exp(c.s), "s"),
    "cond": (lambda c: torch.cond(c.s > 0.0, torch.sin, torch.cos, (c.p,)), "s"),
    "from_dlpack_then_written": (lambda c: exposed_by(np.from_dlpack, c), "s"),
    "equal": (lambda c: torch.equal(c.x, c.v), "x"),
    "is_nonzero": (lambda c: torch.is_nonzero(c.s), "s"),
    "contains": (lambda c: 0.5 in c.x, "x"),
    "nonzero": (lambda c: c.m.nonzero().shape, "m"),
    "where_one": (lambda c: torch.where(c.m), "m"),
    "mask_index": (lambda c: c.v[c.m], "m"),
    "mask_index_scalar": (lambda c: c.v[c.b], "b"),
    "masked_select": (lambda c: torch.masked_select(c.x, c.m), "m"),
    "unique": (lambda c: c.k.unique(), "k"),
    "repeat_interleave": (lambda c: torch.repeat_interleave(c.v, c.k), "k"),
    "one_hot_unsized": (lambda c: F.one_hot(c.k), "k"),
    "tensor_split": (lambda c: torch.tensor_split(c.v, c.k), "k"),
    "split_sizes": (lambda c: c.v.split(c.k.tolist()), "k"),
    "to_sparse": (lambda c: c.m.to_sparse(), "m"),
    "apply_": (lambda c: c.x.apply_(lambda v: v + 1), "x"),
    "repr": (lambda c: repr(c.x), "x"),
    "format": (lambda c: f"site_{c.i}", "i"),
    "copy": (lambda c: copy.copy(c.x), "x"),
    "jit_branch": (lambda c: [scripted_branch(c.x, c.v) for _ in range(3)], "x"),
    "func_grad_item": (lambda c: torch.func.grad(lambda v: v * (v.item() > 0))(c.s), "s"),
    "from_numpy_then_written": (foreign_memory, "s"),
    "user_distribution_check": (lambda c: dist.constraints.positive.check(c.s).all().item(), "s"),
    "wrapped_by_user": (torch_function_wrapped, "b i k m s x"),
}


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.filterwarnings("ignore")
def test_kept_programs_give_exactly_their_sources(name: str) -> None:
    if name == "vmap_index" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("older torch refuses the program")
    program, expected = KEPT[name]
    with Tape() as tape:
        result = program(Inputs(tape))
        assert tape.sources_of(result) == names(expected)
        assert tape.escaped == frozenset()


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.filterwarnings("ignore")
def test_programs_that_look_at_values_escape(name: str) -> None:
    program, expected = ESCAPES[name]
    with Tape() as tape:
        program(Inputs(tape))
    assert tape.escaped == names(expected)


def test_source_keeps_a_fresh_value_and_its_gradient() -> None:
    loc = torch.zeros(3, requires_grad=True)
    with Tape() as tape:
        value = dist.Normal(tape.source("a", torch.ones(3)) + loc, 1.0).rsample()
        z = tape.source("z", value)
        assert z is value
        assert tape.sources_of(z) == {"z"}
        assert origins_of(tape, "z") == {"a"}
        assert tape.source("z", z) is z  # replayed
        (z**2).sum().backward()
    torch.testing.assert_close(loc.grad, 2 * value.detach())


NOT_ITS_OWN: dict[str, Callable[[], Tensor]] = {
    "leaf": lambda: torch.ones(3, requires_grad=True),
    "expanded": lambda: torch.ones(3).expand(2, 3),
    "slice": lambda: torch.ones(4)[:3],
    "numpy": lambda: torch.as_tensor(np.ones(3)),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("make", NOT_ITS_OWN.values(), ids=NOT_ITS_OWN)
def test_source_copies_what_is_not_its_own(make: Callable[[], Tensor]) -> None:
    with Tape() as tape:
        value = make()
        z = tape.source("z", value)
        assert z is not value
        assert z.is_leaf == (not value.requires_grad)
        assert tape.sources_of(z) == {"z"}
        assert tape.sources_of(value) == frozenset()
        assert torch.equal(z.to_dense(), value.to_dense())


def test_source_of_another_source_is_a_copy() -> None:
    with Tape() as tape:
        a = tape.source("a", torch.ones(3))
        b = tape.source("b", a)
        assert (tape.sources_of(a), tape.sources_of(b)) == ({"a"}, {"b"})
        assert origins_of(tape, "b") == {"a"}


def test_source_that_is_no_tensor_has_escaped() -> None:
    with Tape() as tape:
        assert tape.source("z", 3) == 3
    assert tape.escaped == {"z"}


def test_source_outside_of_the_tape_raises() -> None:
    with pytest.raises(RuntimeError, match="with tape"):
        Tape().source("z", torch.ones(()))


def test_entering_twice_raises_and_entering_again_does_not() -> None:
    tape = Tape()
    with tape:
        z = tape.source("z", torch.ones(2))
        with pytest.raises(RuntimeError, match="active"), tape:
            pass
    with tape:
        assert tape.sources_of(z * 2) == {"z"}


def test_nested_trackers_see_their_own_sources() -> None:
    with Tape() as outer:
        a = outer.source("a", torch.ones(3))
        with Tape() as inner:
            b = inner.source("b", a * 2)
            out = a + b
            assert inner.sources_of(out) == {"b"}
            float(b.sum())
        assert outer.sources_of(out) == {"a"}
    assert (outer.escaped, inner.escaped) == ({"a"}, {"b"})


def test_modes_are_popped_after_an_exception() -> None:
    before = (_len_torch_dispatch_stack(), _len_torch_function_stack())
    with pytest.raises(KeyError), Tape() as tape:
        z = tape.source("z", torch.ones(()))
        with pytest.raises(IndexError):
            torch.ones(2)[z.long() + 5]
        assert torch.ones(2)[z.long()] == 1.0
        raise KeyError
    assert before == (_len_torch_dispatch_stack(), _len_torch_function_stack())
    assert tape.escaped == {"z"}


FAILING: dict[str, tuple[Callable[[Tensor], Any], Any, Any, type[Exception]]] = {
    "index": (lambda i: torch.ones(6)[i], 7, 5, IndexError),
    "factorisation": (torch.linalg.cholesky, [[-1.0]], [[2.0]], torch.linalg.LinAlgError),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_failed_operator_leaves_torch_and_reads_stay_watched(name: str) -> None:
    call, bad, good, error = FAILING[name]
    with Tape() as tape:
        z, y = tape.source("z", torch.tensor(bad)), tape.source("y", torch.tensor(good))
        with pytest.raises(error):
            call(z)
        assert tape.escaped == {"z"}
        call(y)
        assert tape.escaped == {"z"}
        y.tolist()
        assert tape.escaped == {"y", "z"}


def test_other_modes_inside_do_no_harm() -> None:
    with Tape() as tape, torch.device("cpu"):
        z = tape.source("z", torch.ones(3))
        assert tape.sources_of(torch.zeros(3) + z) == {"z"}
        assert tape.escaped == frozenset()


def test_view_made_before_a_choice_counts_with_it() -> None:
    table = torch.ones(2, 2)
    old_view, whole = table.view(4)[:2], table.view(4)
    with Tape() as tape:
        z = tape.source("z", torch.tensor(1))
        assert tape.sources_of(table[z] * 2) == {"z"}
        assert tape.sources_of(table * 2) == frozenset()
        for view in (old_view, whole):  # a superset: they were not seen to be made
            assert tape.sources_of(view) == {"z"}


def test_buffers_that_outlive_a_run_start_clean() -> None:
    memory = torch.zeros(3)
    with Tape() as tape:
        memory[0] = tape.source("z", torch.ones(()))
        assert tape.sources_of(memory) == {"z"}
    with Tape() as tape:
        tape.source("z", torch.ones(()))
        assert tape.sources_of(memory) == frozenset()


@pytest.mark.parametrize("write", [lambda t, z: t.add_(1.0), lambda t, z: t.__setitem__(z, 1.0)], ids=["whole", "at"])
def test_what_is_written_into_is_kept(write: Callable[[Tensor, Tensor], Any]) -> None:
    memory = torch.zeros(3)
    with Tape() as tape:
        z = tape.source("z", torch.tensor(1))
        whole, part = tape.value_of(memory), tape.value_of(memory[1:])
        write(memory, z)
    assert part not in tape.inputs and [*tape.before] == [whole]
    assert torch.equal(tape.before[whole], torch.zeros(3)) and not torch.equal(memory, torch.zeros(3))


def test_memory_is_released_during_and_after_a_run() -> None:
    with Tape() as tape:
        z = tape.source("z", torch.ones(1000))
        for _ in range(500):
            _ = z * 2 + 1
        assert len(tape._tensors) < 10
        temporary = weakref.ref(z + 1)
        assert temporary() is None
    alive = weakref.ref(z)
    del z, _
    assert alive() is None
    assert not tape._tensors and not tape.storages


def test_custom_operators_are_judged_by_their_schemas() -> None:
    @torch.library.custom_op("bpq_test::seems_like", mutates_args=())
    def seems_like(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() + 1)

    @torch.library.custom_op("bpq_test::is_positive", mutates_args=())
    def is_positive(x: Tensor) -> bool:
        return bool((x > 0).all())

    @torch.library.custom_op("bpq_test::write", mutates_args=("out",))
    def write(x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    with Tape() as tape:
        z = tape.source("z", torch.ones(3))
        out = torch.zeros(3)
        write(z, out)
        assert tape.sources_of(seems_like(z)) == tape.sources_of(out) == {"z"}
        assert tape.escaped == frozenset()
        is_positive(z)
        assert tape.escaped == {"z"}


def test_cond_is_an_if_and_has_its_gradient() -> None:
    p = torch.ones(3, requires_grad=True)
    with Tape() as tape:
        z = tape.source("z", torch.ones(()))
        y = torch.cond(z > 0.0, lambda p: 2.0 * p, lambda p: 3.0 * p, (p,))
        assert tape.sources_of(y) == {"z"}
    y.sum().backward()
    assert p.grad is not None and p.grad.tolist() == [2.0] * 3


APART: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "unbind": lambda table: list(table.unbind(0)),
    "torch.unbind": lambda table: list(torch.unbind(table)),
    "list": list,
    "split": lambda table: [part[0] for part in table.split(1)],
    "chunk": lambda table: [part[0] for part in torch.chunk(table, 6)],
    "numbers": lambda table: [table[t] for t in range(6)],
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("apart", APART.values(), ids=APART)
def test_a_table_that_was_taken_apart_before(apart: Callable[[Tensor], list[Tensor]], grad: bool) -> None:
    table = torch.randn(6, 3, 3, requires_grad=grad)
    with Tape() as tape:
        rows = apart(table)
        z = tape.source("z0", torch.tensor(1))
        for t in range(1, 5):
            assert tape.sources_of(rows[t][z].exp()) == {f"z{t - 1}"}
            z = tape.source(f"z{t}", torch.tensor(1))
        # Parts of what was chosen depend on the choice, and so do all parts of what is written.
        assert all(tape.sources_of(part) == {"z4"} for part in rows[5][z].unbind(0))
        if not grad:
            table[0, 0, 0] = z
            assert all(tape.sources_of(row) >= {"z4"} for row in rows)


def test_operators_that_fail_at_some_whole_numbers_are_not_total_in_place_either() -> None:
    aten = torch.ops.aten
    assert not any(effects_of(func).is_total for func in (aten.div_.Tensor, aten.pow_.Scalar, aten.fmod_.Tensor))
    assert effects_of(aten.add_.Tensor).is_total
