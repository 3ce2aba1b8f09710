"""Runs at many values: each way gives the costs of single runs, or says that it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from steps import trained
from torch import Tensor, nn

from pyro_bpq import AllAction, TraceBackpropQ_ELBO
from pyro_bpq.reruns import row_runs as module
from pyro_bpq.reruns.comparisons import LONGEST, agree, is_due
from pyro_bpq.reruns.row_runs import PROBES, RowProgram, RowRuns, Rows, Way
from pyro_bpq.testing import assert_unbiased
from pyro_bpq.tracing.substitute import Substitute


def guide() -> None:
    logits = pyro.param("q", torch.tensor([0.3, -0.5, 0.9]))
    pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))


def coins() -> Tensor:
    z: Tensor = pyro.sample("z", dist.Bernoulli(torch.tensor([0.1, 0.6, 0.3])).to_event(1))
    return z


def observed(mean: Tensor) -> None:
    pyro.sample("x", dist.Normal(mean, 1.0), obs=torch.tensor(0.7))


def from_the_right() -> None:
    z = coins()
    observed(z[..., 0] - z.sum(-1) * z[..., 1])


def from_the_left() -> None:
    z = coins()
    observed(z[0] - z.sum() * z[1])


def unpacked() -> None:
    a, b, c = coins()
    observed(a - b * c)


def looped() -> None:
    z, total = coins(), torch.tensor(0.0)
    for i in range(3):
        total = total * 0.5 + z[i]
    observed(total)


def stacked() -> None:
    z = coins()
    observed(torch.hstack([z, z[:1] * 2]).mean())


def flattened() -> None:
    observed(coins().reshape(-1)[0])


class Recurrent(nn.Module):
    """Torch's own recurrent layers refuse a hidden dimension."""

    def __init__(self, kind: type[nn.Module], batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer: Any = kind(1, 2, batch_first=batch_first).double()

    def __call__(self) -> None:
        z = coins()
        _, state = self.layer(z.reshape(-1, 3, 1) if self.layer.batch_first else z.reshape(3, 1))
        state = state[0] if isinstance(state, tuple) else state
        observed(state.sum(-1).reshape(z.shape[:-1]))


def written() -> None:
    z, memory = coins(), torch.zeros(3)
    memory[0] = z[..., 0]
    memory[1] = z[..., 2]
    observed(memory.sum())


def normalised() -> Callable[[], None]:
    torch.manual_seed(0)
    net = nn.BatchNorm1d(1).double().train()
    return lambda: observed(net(coins().reshape(3, 1)).reshape(3)[0])


def selected() -> None:
    z = coins()
    observed(z[z > 0].sum() * 0.5)


def rebuilt() -> None:
    z = coins()
    observed(torch.tensor([float(z[0]), float(z[2])]).sum())


def noisy_or() -> None:
    z = coins()
    fails = (1.0 - 0.8 * z[0]) * (1.0 - 0.5 * z[1]) * (1.0 - 0.7 * z[2])
    pyro.sample("x", dist.Bernoulli(1.0 - 0.9 * fails), obs=torch.tensor(1.0))


class Keeping:
    """Keeps what it has drawn and made, to be looked at after the step."""

    def __init__(self, made: bool) -> None:
        self.made = made

    def __call__(self) -> None:
        z = coins()
        self.kept = z * 2.0 if self.made else z
        observed(z[0] - z[1])


def made_anew() -> None:
    z = coins()
    observed(torch.stack([z[..., 0], z[..., 1]])[0])


PROGRAMS: dict[str, tuple[Any, Way | None]] = {
    "right": (from_the_right, Way.BROADCAST),
    "left": (from_the_left, Way.HIDDEN),
    "unpacked": (unpacked, Way.HIDDEN),
    "looped": (looped, Way.HIDDEN),
    "stacked": (stacked, Way.HIDDEN),
    "flattened": (flattened, Way.HIDDEN),
    "LSTM over rows": (Recurrent(nn.LSTM, True), Way.BROADCAST),
    "LSTM": (Recurrent(nn.LSTM, False), Way.SINGLE),
    "GRU": (Recurrent(nn.GRU, False), Way.SINGLE),
    "written": (written, Way.SINGLE),
    "batch norm": (normalised(), Way.SINGLE),
    "stack": (made_anew, Way.BROADCAST),
    "noisy or": (noisy_or, Way.HIDDEN),
    "keeps values": (Keeping(False), Way.SINGLE),
    "keeps results": (Keeping(True), Way.SINGLE),
    # Values leave torch: there is no extra run at all.
    "boolean mask": (selected, None),
    "torch.tensor": (rebuilt, None),
}


def train(model: Any, **options: Any) -> TraceBackpropQ_ELBO:
    return trained(TraceBackpropQ_ELBO(1, **options), model, guide, steps=5)


def ways(elbo: TraceBackpropQ_ELBO) -> list[Way]:
    return [way for way, _ in elbo.runner.row_runs._ways.values()]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("estimator", [None, AllAction(exact=True)], ids=["default", "exact"])
def test_each_program_runs_in_the_fastest_way_that_is_right(name: str, estimator: Any) -> None:
    model, way = PROGRAMS[name]
    elbo = train(model, estimator=estimator)
    assert ways(elbo) == [way] * (way is not None)
    elbo.eval()
    assert_unbiased(elbo, model, guide)


@pytest.mark.parametrize("name", ["left", "looped", "flattened"])
def test_broadcast_rows_that_are_believed_bias_these_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the proof, and with rows taken from whatever the costs hold."""

    def believed(self: RowProgram, rows: Rows) -> dict[str, Tensor]:
        costs = self.costs({**rows.fixed, **rows.varied}, rows.number)
        return {name: cost.reshape(-1)[:1].expand(rows.number) for name, cost in costs.items()}

    monkeypatch.setattr(module, "_prove", lambda *args: Way.BROADCAST)
    monkeypatch.setattr(module, "agree", lambda *args: True)
    monkeypatch.setattr(RowProgram, "_broadcast", believed)
    model, _ = PROGRAMS[name]
    elbo = train(model)
    assert ways(elbo) == [Way.BROADCAST]
    elbo.eval()
    with pytest.raises(AssertionError, match="biased"):
        assert_unbiased(elbo, model, guide)


@pytest.mark.parametrize("seed", range(6))
def test_an_element_of_size_one_beside_a_plate(seed: int) -> None:
    """``w[0]`` takes the only element, not the first row of the extra run."""

    def model() -> None:
        w = pyro.sample("w", dist.Bernoulli(torch.tensor([0.4])).to_event(1))
        with pyro.plate("rows", 3):
            pyro.sample("x", dist.Normal(2.0 * w[0], 1.0), obs=torch.tensor([0.1, 1.2, 2.0]))

    def own_guide() -> None:
        pyro.sample("w", dist.Bernoulli(logits=pyro.param("q", torch.tensor([0.3]))).to_event(1))

    pyro.set_rng_seed(seed)
    elbo = TraceBackpropQ_ELBO()
    for _ in range(5):
        elbo.loss_and_grads(model, own_guide)
    elbo.eval()
    assert_unbiased(elbo, model, own_guide)


def test_a_mean_is_not_lost_in_the_rounding_of_many_observations() -> None:
    """In float32 a mean over the rows of the extra run changes each of 20,000 costs by next to nothing."""
    torch.set_default_dtype(torch.float32)
    data = torch.randn(20_000, generator=torch.Generator().manual_seed(0))

    def model() -> None:
        z = coins()
        with pyro.plate("rows", len(data)):
            pyro.sample("x", dist.Normal(1e-5 * z.mean(), 1.0), obs=data)

    elbo = train(model)
    assert ways(elbo) == [Way.HIDDEN]


def test_a_program_that_does_not_run_at_all_values_is_compared_at_its_own() -> None:
    table = torch.tensor([0.3, 1.2, 0.5])

    def model() -> None:
        # The guide never draws (1, 1, 1), for which there is no entry.
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.3, 0.3, 0.1])))
        observed(table[z])

    def own_guide() -> None:
        logits = pyro.param("q", torch.tensor([0.3, -0.5, 0.9]))
        pyro.sample("z", dist.Categorical(logits=torch.cat([logits, torch.tensor([-torch.inf])])))

    elbo = TraceBackpropQ_ELBO(1)
    for _ in range(5):
        elbo.loss_and_grads(model, own_guide)
    elbo.eval()
    assert_unbiased(elbo, model, own_guide)


@pytest.mark.parametrize("made", [False, True])
def test_what_a_program_keeps_can_be_looked_at(made: bool) -> None:
    model = Keeping(made)
    train(model)
    assert model.kept.shape == (3,) and float(model.kept.sum()) >= 0.0


# One program at a time.


def program_of(model: Callable[[], None]) -> tuple[RowProgram, dict[str, Tensor]]:
    def costs(values: Mapping[str, Any], rows: int | None) -> dict[str, Tensor]:
        trace = poutine.trace(Substitute(values)(model)).get_trace()
        return {"x": -trace.nodes["x"]["fn"].log_prob(trace.nodes["x"]["value"])}

    value = torch.tensor([1.0, 0.0, 1.0])
    sampled = costs({"z": value}, None)
    fn = dist.Bernoulli(torch.full((3,), 0.5)).to_event(1)
    state = torch.get_rng_state()
    shapes = {name: cost.shape for name, cost in sampled.items()}
    return RowProgram(costs, {"z": (fn, value)}, shapes, 0, (state, state)), sampled


ROWS = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
AT = Rows({}, {"z": ROWS})


@pytest.mark.parametrize("name", ["right", "left", "unpacked", "looped", "stacked", "flattened"])
def test_hidden_rows_cost_what_single_runs_cost(name: str) -> None:
    program, *_ = program_of(PROGRAMS[name][0])
    hidden, single = (program.run(way, AT) for way in (Way.HIDDEN, Way.SINGLE))
    assert hidden is not None and single is not None
    torch.testing.assert_close(hidden, single, rtol=0.0, atol=1e-14)


def test_hidden_rows_run_in_parts_where_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    program, *_ = program_of(from_the_left)
    expected = program.run(Way.HIDDEN, AT)
    monkeypatch.setattr(module, "MOST_ELEMENTS", 2)
    found = program.run(Way.HIDDEN, AT)
    assert found is not None and expected is not None
    assert torch.equal(found["x"], expected["x"])


def test_a_program_that_starts_to_mix_is_proved_anew() -> None:
    """With the next comparison, and at once where the sampled row tells."""
    mixes = [False]

    def model() -> None:
        z = coins()
        observed(z.sum() if mixes[0] else z.sum(-1))

    program, sampled = program_of(model)
    runs = RowRuns()
    for use in range(10):
        found = runs.run("key", program, AT, sampled, True)
        assert runs.way("key") is (Way.BROADCAST if use < 5 else Way.HIDDEN)
        torch.testing.assert_close(found, program.run(Way.SINGLE, AT))
        mixes[0] = use >= 4


def test_mixing_that_the_sampled_row_does_not_tell_is_found_where_a_look_is_due() -> None:
    mixes = [False]

    def model() -> None:
        z = coins()
        # The first row reads itself.
        observed(z.sum(-1) + (z.reshape(-1, 3)[0, 1] - z[..., 1] if mixes[0] else 0.0))

    program, sampled = program_of(model)
    runs = RowRuns()
    for use in range(9):
        mixes[0] = use >= 5
        found = runs.run("key", program, AT, sampled, True)
        assert runs.way("key") is (Way.HIDDEN if is_due(use) and mixes[0] else Way.BROADCAST)
    torch.testing.assert_close(found, program.run(Way.SINGLE, AT))


def test_what_is_due() -> None:
    assert [n for n in range(300) if is_due(n)] == [0, 1, 2, 4, 8, 16, 32, 64, LONGEST, 2 * LONGEST]


def test_rounding_agrees_and_a_mixed_mean_does_not() -> None:
    """A mean over 20,000 rows changes each cost by less than rounding may."""
    generator = torch.Generator().manual_seed(0)
    costs = torch.rand(20_000, generator=generator, dtype=torch.float32)
    noise = torch.rand(20_000, generator=generator, dtype=torch.float32) - 0.5
    assert agree([costs * (1.0 + 1e-6 * noise)], [costs])
    assert not agree([costs + 1e-5 * noise.abs()], [costs])
    assert not agree([costs + 1e-3 * (torch.arange(20_000) == 7)], [costs])
    assert agree([torch.tensor([torch.inf, torch.nan])], [torch.tensor([torch.inf, torch.nan])])
    assert not agree([torch.tensor([torch.inf])], [torch.tensor([1.0])])
    assert not agree([torch.zeros(2)], [torch.zeros(1, 2)])


def test_costs_of_another_type_than_the_sample_are_compared() -> None:
    """A scalar observation of a numpy array is float64 beside float32 latents."""
    torch.set_default_dtype(torch.float32)

    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(torch.tensor([0.1, 0.6, 0.3])).to_event(1))
        pyro.sample("x", dist.Normal(z[0], 1.0), obs=torch.tensor(0.3, dtype=torch.float64))
        pyro.sample("y", dist.Normal(z[1], 1.0), obs=torch.tensor(0.3))

    pyro.clear_param_store()
    assert ways(train(model)) == [Way.HIDDEN]
    assert PROBES > 1


class Bare(dist.TorchDistribution):
    """A user's own distribution that says neither what its support is nor how to draw many values."""

    arg_constraints = {}  # noqa: RUF012

    def sample(self, sample_shape: Any = ()) -> Tensor:
        if sample_shape:
            raise NotImplementedError
        return torch.tensor(1.0)

    def log_prob(self, value: Tensor) -> Tensor:
        return torch.zeros(())


def test_a_bare_distribution_beside_others_is_served() -> None:
    def model() -> None:
        z, bare = coins(), pyro.sample("bare", Bare(validate_args=False))
        observed(z[0] * bare + z[1])

    def own_guide() -> None:
        logits = pyro.param("q", torch.tensor([0.3, -0.5, 0.9]))
        options = {"bpq": {"estimator": AllAction(exact=True)}}
        pyro.sample("bare", Bare(validate_args=False))
        pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1), infer=options)

    elbo = TraceBackpropQ_ELBO()
    for _ in range(3):
        elbo.loss_and_grads(model, own_guide)
    assert ways(elbo) == [Way.HIDDEN]


def test_a_program_without_sites_has_nothing_to_compare() -> None:
    elbo = TraceBackpropQ_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=0)
    assert elbo.loss_and_grads(lambda: None, lambda: None) == 0.0


def test_a_program_that_needs_all_values_of_one_shape_gets_them_repeated() -> None:
    """Only the last site differs between rows, and ``torch.stack`` does not broadcast."""

    def stacks() -> None:
        values = [pyro.sample(f"z_{i}", dist.Bernoulli(0.4)) for i in range(3)]
        pyro.sample("x", dist.Normal(torch.stack(values, -1).sum(-1), 1.0), obs=torch.tensor(0.3))

    def each() -> None:
        q = pyro.param("q", torch.tensor([0.3, -0.5, 0.2]))
        for i in range(3):
            pyro.sample(f"z_{i}", dist.Bernoulli(logits=q[i]))

    pyro.clear_param_store()
    elbo = TraceBackpropQ_ELBO(num_particles=1)
    for _ in range(3):
        elbo.loss_and_grads(stacks, each)
    assert ways(elbo) == [Way.REPEATED]
    assert_unbiased(elbo.eval(), stacks, each)
