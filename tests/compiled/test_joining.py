"""Joined operators give the same numbers as the recorded ones, in place or not, and there are few of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import BY_NAME
from pyro.optim import ClippedAdam
from steps import repeat, some_quick
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from pyro_bpq import CompiledSVI, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.compiled.backends import fused_draws
from pyro_bpq.compiled.graphs import Editor
from pyro_bpq.compiled.joining import joined

pytestmark = pytest.mark.filterwarnings("ignore")
NUMBER = 12
SHORT = ("plate_subsample", "vector")


def number_of(graph: fx.GraphModule, name: str = "") -> int:
    return sum(node.op == "call_function" and name in str(node.target) for node in graph.graph.nodes)


def results(graph: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """Results, then what the inputs are afterwards."""
    torch.manual_seed(5)
    own = [tensor.detach().clone() for tensor in inputs]
    with torch.no_grad():
        return [*graph(*own), *own]


def check(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
    """Compares a graph with the joined one, and returns that."""
    found = joined(Editor(graph), keeps_draws=True)
    for ours, theirs in zip(results(found, inputs), results(graph, inputs), strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11, equal_nan=True)
    return found


def rejoined(body: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The joined graph of a function, whose results are those of the recorded one."""
    return check(make_fx(body)(*inputs), list(inputs))


def recorded(model: Any, guide: Any, *args: Any, **options: Any) -> tuple[fx.GraphModule, list[Tensor]]:
    """The graph of a whole step, and its inputs."""
    kept: list[Any] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
        kept[:] = graph, [tensor.clone() for tensor in inputs]
        return graph

    pyro.set_rng_seed(0)
    svi = CompiledSVI(model, guide, ClippedAdam({"lr": 0.01}), TraceBackpropQ_ELBO(**options), compile=backend)
    repeat(9, svi.step, *args)
    return kept[0], kept[1]


@pytest.mark.parametrize("name", some_quick(BY_NAME, SHORT))
def test_steps_are_the_same(name: str) -> None:
    case = BY_NAME[name].params()
    try:
        graph, inputs = recorded(case.model, case.guide, *case.args)
    except IndexError:
        # Steered programs run eagerly; those of the default suite are known to be recorded.
        assert name not in SHORT
        pytest.skip("it is not recorded")
    check(graph, inputs)


def chain(sites: int, kind: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Each site reads the one before."""

    def law(own: Tensor, z: Tensor) -> Any:
        if kind == "binary":
            return dist.Bernoulli(logits=own + 0.5 * z)
        if kind == "normal":
            return dist.Normal(own + 0.5 * z, 1.3)
        return dist.Categorical(logits=torch.stack([own, own * z, 0.3 * z + 0.0 * own], -1))

    def last(logits: Any) -> Tensor:
        z = torch.tensor(0.0)
        for t in range(sites):
            z = 1.0 * pyro.sample(f"z_{t}", law(logits[t], z))
        return z

    def model() -> None:
        prior = pyro.param("prior", torch.tensor(0.3))
        pyro.sample("x", dist.Normal(last([prior] * sites), 1.0), obs=torch.tensor(0.7))

    return model, lambda: last(pyro.param("logits", torch.linspace(-1.0, 1.0, sites)))


@pytest.mark.parametrize("kind", ["binary", pytest.param("category", marks=pytest.mark.slow), "normal"])
def test_chains_have_few_operators_a_site(kind: str) -> None:
    sizes = []
    for sites in (10, 20):
        pyro.clear_param_store()
        estimator = None if kind == "normal" else ScoreFunction()
        graph, inputs = recorded(*chain(sites, kind), estimator=estimator, critic=None)
        sizes.append((number_of(graph), number_of(check(graph, inputs))))
    before, after = (sizes[1][i] - sizes[0][i] for i in range(2))
    # Normal values are a chain of their own in the backward pass.
    assert after < (0.6 if kind == "normal" else 0.35) * before


def test_what_is_written_in_place_is_read_before_or_after_as_recorded() -> None:
    def body(x: Tensor, y: Tensor) -> list[Tensor]:
        parts = [x[i] for i in range(NUMBER)]
        early = [(part * y[i]).exp() for i, part in enumerate(parts)]
        x.mul_(2.0)
        seen = [(part * y[i]).exp() for i, part in enumerate(parts)]
        room = torch.zeros_like(x)
        room[0] = 3.0
        late = [(x[i] * y[i]).exp() for i in range(NUMBER)]
        room.add_(1.0)
        return [torch.stack(early) - torch.stack(late), *seen, *late, room, room[0] * y[0]]

    assert number_of(rejoined(body, torch.rand(NUMBER), torch.rand(NUMBER)), "exp") <= 3


def test_backward_passes_from_the_same_numbers_are_one() -> None:
    """Slopes go back from ones for each cost, the gradient of the loss from one for their sum."""

    def body(x: Tensor, y: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
            costs = -(x @ y).sin().sum(-1)
            (slope,) = torch.autograd.grad(costs, x, torch.ones_like(costs), retain_graph=True)
            gradients = torch.autograd.grad(costs.sum(), (x, y))
            return [2.0 * slope, *(3.0 * each for each in gradients), torch.ones_like(costs) * costs]

    inputs = [torch.rand(3, 4), torch.rand(4, 5)]
    graph = make_fx(body)(*inputs)
    assert (number_of(graph, "mm"), number_of(check(graph, inputs), "mm")) == (4, 3)


def test_numbers_may_stand_for_tensors() -> None:
    """``dist.Normal(z, 1.0)`` converts the logarithm of its scale, a number of Python."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    number = graph.call_function(torch.ops.aten._to_copy.default, (0.5,), {"dtype": torch.float64})
    graph.output([graph.call_function(torch.ops.aten.mul.Tensor, (x, number))])
    inputs, module = [torch.rand(3, dtype=torch.float64)], fx.GraphModule({}, graph)
    FakeTensorProp(module).propagate(*inputs)
    check(module, inputs)


@pytest.mark.parametrize("terms", [3, 8, NUMBER])
@pytest.mark.parametrize("reduces", [torch.sum, torch.logsumexp])
def test_stacks_that_were_joined_once_keep_their_dimension(terms: int, reduces: Any) -> None:
    """The total of a run is that of a stack of its costs; there are as many as particles."""

    def body(x: Tensor, y: Tensor) -> list[Tensor]:
        columns = [row.exp().unbind() for row in x.unbind()]
        totals = [reduces(torch.stack([column[i] for column in columns]), 0) for i in range(8)]
        centred = [total - part for total, part in zip(totals, y.unbind(), strict=True)]
        return [torch.stack(centred), torch.stack(totals) * y]

    assert number_of(rejoined(body, torch.rand(terms, 8), torch.rand(8)), "sub") == 1


def test_types_that_rows_would_change_are_left_alone() -> None:
    def body(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x[i] * y[i] for i in range(NUMBER)]

    found = rejoined(body, torch.rand(NUMBER, 3, dtype=torch.float32), torch.rand(NUMBER, dtype=torch.float64))
    assert number_of(found, "mul") == NUMBER


def test_shapes_are_aligned_from_the_right() -> None:
    def body(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        sums = [(x[i] * y[i] + z * y[i][0]).sum() + (x[i].unsqueeze(0) * z).mean([-1])[0] for i in range(NUMBER)]
        parts = [torch.cat([x[i], y[i].expand(2), x[i].view(3, 1).transpose(0, 1)[0]], 0) for i in range(NUMBER)]
        chosen = [torch.log_softmax(x[i], 0).gather(0, torch.tensor([1])) for i in range(NUMBER)]
        return [sum(sums[1:], sums[0]), torch.stack(parts[::-1]), torch.stack(parts, 1), torch.cat(chosen), *sums]

    found = rejoined(body, torch.rand(NUMBER, 3), torch.rand(NUMBER, 1), torch.rand(3))
    assert number_of(found, "log_softmax") == 1 and number_of(found, "add") < NUMBER


def test_reductions_of_all_elements_are_joined() -> None:
    def body(x: Tensor) -> list[Tensor]:
        sums = [x[i].exp().sum() * x[i].mean() for i in range(NUMBER)]
        return [torch.stack(sums), sum(sums, x.sum()), x[0, 0, 0].sum(), x[0].to(torch.int32).sum()]

    found = rejoined(body, torch.rand(NUMBER, 3, 2))
    assert number_of(found, "mean") == 1 and number_of(found, "sum") <= 5


@pytest.mark.parametrize("scale", [1.0, 1.1])
def test_joined_coins_have_their_probabilities(scale: float) -> None:
    probabilities = torch.linspace(0.05, 0.8, NUMBER)
    graph = make_fx(lambda p: [torch.bernoulli(scale * each) for each in p])(probabilities)
    editor = Editor(graph)
    fused_draws(editor)
    found = joined(editor, keeps_draws=False)
    assert number_of(found, "rand") == 1
    torch.manual_seed(0)
    coins = torch.stack([torch.stack(found(probabilities)) for _ in range(4000)])
    errors = (probabilities * (1.0 - probabilities) / len(coins)).sqrt()
    z = ((coins.mean(0) - probabilities) / errors).abs().max()
    # Another probability is seen.
    assert (z < 4.0) == (scale == 1.0)
    both = (coins[:, 0] * coins[:, 1]).mean()
    assert abs(both - coins[:, 0].mean() * coins[:, 1].mean()) < 0.02
