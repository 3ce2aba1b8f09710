"""Functions that leave torch: one operator of the recording, which reads what it was handed, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.optim import Adam
from steps import WAYS, bias, filtered, repeat, rows, stepped
from steps import trained as steps_of
from torch import Tensor

from pyro_bpq import (
    CriticLearner,
    ExpectedCost,
    ProximalSVI,
    Replay,
    TraceBackpropQ_ELBO,
    cost,
    external,
)
from pyro_bpq.errors import BPQWarning, OptionError, UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.testing import assert_unbiased, exact_gradient

ROWS = 2


class Walk:
    """A simulator with a state: what was handed over so far decides what a step costs."""

    def __init__(self, rows: int = ROWS, *particles: int) -> None:
        self.rows, self.calls = rows, 0
        self.first = np.zeros((*particles, rows)) + np.arange(rows) / 2.0

    def open(self) -> np.ndarray:
        self.place = self.first
        return self.place

    def move(self, move: Tensor) -> tuple[np.ndarray, np.ndarray]:
        self.calls += 1
        self.place = self.place + 2.0 * move.numpy() - 0.7
        return self.place, self.place**2

    def total(self, z: Tensor) -> np.ndarray:
        """The rows meet, and others are added."""
        return self.place.sum() ** 2 * (1.0 + z.numpy())

    def mixed(self, move: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The rows meet."""
        place, _ = self.move(move)
        return place, place * place.sum()


def policy_of(walk: Walk, move: Any = None, steps: int = 2, tells: bool = True) -> Callable[[], None]:
    """A policy whose second move reads where the first one has led; ``tells``: whether each step has its cost."""
    start, move = external(walk.open), move or external(walk.move)

    def policy() -> None:
        q = pyro.param("q", lambda: torch.linspace(-0.4, 0.7, 2 * steps).reshape(steps, 2))
        with pyro.plate("rows", walk.rows):
            place = start()
            for t in range(steps):
                z = pyro.sample(f"z{t}", dist.Bernoulli(logits=q[t, 0] + q[t, 1] * place))
                place, paid = move(z)
                if tells or t == steps - 1:
                    cost(f"c{t}", paid)

    return policy


def one_move(walk: Walk, then: Callable[..., None]) -> Callable[[], None]:
    """A policy of one move, and what follows it: from the place and the square of it."""
    start, move = external(walk.open), external(walk.move)

    def policy() -> None:
        start()
        with pyro.plate("rows", ROWS):
            then(*move(pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.4))))))

    return policy


def trained(policy: Any, steps: int = 15, **options: Any) -> ExpectedCost:
    return steps_of(ExpectedCost(**options), None, policy, steps=steps)


def check(policy: Any, elbo: ExpectedCost) -> None:
    truth = exact_gradient(None, policy, only_costs=True)
    assert bias(elbo.eval(), None, policy, params=lambda: None, truth=truth) < 1e-10


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("options", ["default", "two", "score_function", "dynamic"])
def test_two_steps_of_a_simulator_are_unbiased(options: str, tells: bool) -> None:
    policy = policy_of(Walk(), tells=tells)
    check(policy, trained(policy, **WAYS[options]))


@pytest.mark.parametrize("rows", [1, 2])
def test_other_rows_are_an_unbiased_baseline(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr("pyro_bpq.estimators.base.MANY_ROWS", 2)
    policy = policy_of(Walk(rows))
    check(policy, trained(policy))
    check(policy, trained(policy, critic=None, max_plate_nesting=1))


def test_rows_that_meet_are_no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_bpq.estimators.base.MANY_ROWS", 2)
    walk = Walk()
    policy = policy_of(walk, external(walk.mixed, rowwise=False))
    with pytest.warns(BPQWarning, match=r"Rows of the plate 'rows' meet in cost\(c0\)"):
        elbo = trained(policy)
    check(policy, elbo)


@pytest.mark.parametrize("other", [True, False])
def test_a_sum_over_rows_reads_what_each_of_them_was_handed(other: bool) -> None:
    """A function of all rows shares the state of one that keeps them apart; or a plate of another size follows."""
    walk = Walk()
    start, move = external(walk.open), external(walk.move)
    total = external(walk.total, rowwise=other)

    def policy() -> None:
        start()
        q, size = pyro.param("q", torch.tensor([0.3, -0.6])), 3 if other else ROWS
        with pyro.plate("rows", ROWS):
            move(pyro.sample("z", dist.Bernoulli(logits=q)))
            if not other:
                cost("c", total(torch.ones(size)))
        with pyro.plate("others", size):
            x = pyro.sample("x", dist.Bernoulli(logits=q[0]).expand([size]))
            cost("d", total(x))

    with filtered("ignore"):
        check(policy, trained(policy))


def test_rows_are_told_apart_and_nothing_steers() -> None:
    policy = policy_of(Walk())
    with filtered("error"):
        elbo = trained(policy)
    recordings = elbo.runner.recordings
    assert not (recordings.crosses or recordings.escapes) and recordings.num_recorded < 8
    assert {cost.name: cost.parents for cost in elbo.graph.costs} == {"cost(c0)": ("z0",), "cost(c1)": ("z0", "z1")}


def test_rows_stay_apart_beside_writes_in_place_and_other_shapes() -> None:
    walk = Walk(3)
    start, see = external(walk.open), external(lambda z: {"both": np.stack([z.numpy()[..., 0]] * 2, 1), "one": 2.0})

    def policy() -> None:
        start()
        q, rows = pyro.param("q", torch.tensor([0.3, -0.6])), pyro.plate("rows", 3)
        with rows:
            z = pyro.sample("z", dist.Bernoulli(logits=q).to_event(1))
        seen = see(z)
        total = torch.zeros(3)
        total += seen["both"].sum(-1)
        with rows:
            cost("c", total * z[..., 1])

    with filtered("error"):
        elbo = trained(policy)
    check(policy, elbo)


@pytest.mark.parametrize("mix", [lambda both: both.flip(0), lambda both: both - both.mean(0)])
def test_rows_that_meet_behind_it_are_seen(mix: Any) -> None:
    policy = one_move(Walk(), lambda _, paid: cost("c", mix(paid) ** 2))
    with pytest.warns(BPQWarning, match=r"Rows of the plate 'rows' meet in cost\(c\)"):
        elbo = trained(policy)
    check(policy, elbo)


@pytest.mark.parametrize("options", [{}, {"num_particles": 3}, {"structure": "dynamic"}, {"structure": "dense"}])
def test_it_is_called_once_in_each_step(options: dict[str, Any]) -> None:
    walk = Walk()
    trained(policy_of(walk), steps=20, **options)
    assert walk.calls == 2 * 20 * options.get("num_particles", 1)


def test_it_is_called_once_where_a_step_is_taken_once_more() -> None:
    """A structure that no recorded run had: the run is taken again, recorded, with the answers that it had."""
    walk, runs = Walk(), iter(range(100))

    def pay(_: Tensor, paid: Tensor) -> None:
        if next(runs) in (14, 15):
            cost("more", paid)
        cost("c", paid)

    trained(one_move(walk, pay), steps=20)
    assert walk.calls == 20 and next(runs) == 21


def test_likelihood_of_a_simulator_is_unbiased_and_has_one_particle() -> None:
    walk, data = Walk(), torch.tensor([0.3, 1.4])
    start, move = external(walk.open), external(walk.move)

    moved, guide = rows(lambda z: move(z)[0], data)

    def model() -> None:
        start()
        moved()

    elbo = stepped(10, TraceBackpropQ_ELBO(), model, guide)
    assert elbo.num_particles == 1 and walk.calls == 10
    assert_unbiased(elbo.eval(), model, guide)


def test_particles_in_a_plate_come_first() -> None:
    walk = Walk(ROWS, 4)
    policy = policy_of(walk)
    with filtered("error"):
        elbo = trained(policy, num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    assert walk.calls == 2 * 15 and elbo.vectorize_particles


def test_answers_are_tensors_of_their_own() -> None:
    kept = np.zeros(3, np.float32)
    state = torch.zeros(2, requires_grad=True)
    found = external(lambda: {"array": kept, "flag": True, "number": 3, "none": None, "tensor": (state,)})()
    kept += 1.0
    assert found["array"].tolist() == [0.0] * 3 and found["array"].dtype == torch.get_default_dtype()
    assert found["flag"].dtype is torch.bool and int(found["number"]) == 3 and found["none"] is None
    assert not found["tensor"][0].requires_grad and found["tensor"][0] is not state
    given = torch.zeros(2)
    external(lambda own: own.add_(1.0))(given)
    assert not given.any()


# What is refused.


def refused(policy: Any, error: type[Exception], *words: str, **options: Any) -> None:
    with pytest.raises(error) as caught:
        trained(policy, steps=3, **options)
    for word in ("external function", *words):
        assert word in str(caught.value), str(caught.value)


def one_call(call: Any, fn: Any = lambda q: dist.Bernoulli(logits=q)) -> Callable[[], None]:
    def policy() -> None:
        with pyro.plate("rows", ROWS):
            q = pyro.param("q", torch.tensor([0.3, -0.2]))
            cost("c", call(pyro.sample("z", fn(q))) + 0.0 * q)

    return policy


def normal(q: Tensor) -> Any:
    return dist.Normal(q, 1.0)


number = external(lambda z: z.numpy() ** 2)
REFUSED: dict[str, tuple[Callable[[], None], type[Exception], tuple[str, ...]]] = {
    "no numbers": (one_call(external(lambda z: "far")), OptionError, ("'far'", "return tensors")),
    "a slope": (one_call(number, normal), UnsupportedSiteError, ("'z'", "ScoreFunction()")),
    "a slope of a part": (one_call(lambda z: number(z.detach()) + z, normal), UnsupportedSiteError, ("'z'",)),
    "weight": (one_call(lambda z: number(z * pyro.param("w", torch.ones(())))), UnsupportedSiteError, (".detach()",)),
    "a value that is not handed over": (
        one_call(lambda z: external(lambda: z.numpy() * 2.0)()),
        UnsupportedProgramError,
        ("z", "as an argument"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_end_a_gradient_unseen_is_refused(name: str) -> None:
    policy, error, words = REFUSED[name]
    refused(policy, error, *words)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(OptionError, match="write a function"):
        external(3)  # type: ignore[arg-type]


def test_further_runs_are_refused() -> None:
    policy = policy_of(Walk())
    wide = {"num_particles": 4, "vectorize_particles": True}
    refused(policy, UnsupportedProgramError, "'Walk.open'", "max_plate_nesting", **wide)
    learner = CriticLearner(replay=Replay(capacity=10))
    refused(policy, UnsupportedProgramError, "'Walk.", "pyro_bpq.cost", learner=learner)
    svi = ProximalSVI(None, policy, Adam({"lr": 0.01}), ExpectedCost(), epochs=2)
    with pytest.raises(UnsupportedProgramError, match=r"'Walk\.open'"):
        svi.step()


def test_steps_are_not_compiled() -> None:
    walk = Walk()
    elbo, policy = ExpectedCost(compile="eager"), policy_of(walk)
    with pytest.warns(BPQWarning, match=r"the external function 'Walk\.move'"):
        repeat(8, elbo.loss_and_grads, None, policy)
    assert walk.calls == 16


class Policy(Walk):
    """A simulator that holds the policy too."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.step, self.is_new, self.log = external(self.open), external(self.move), False, [0.0]

    def __call__(self) -> None:
        q = pyro.param("q", lambda: torch.tensor([[0.3, -0.5], [0.7, -0.1]]))
        with pyro.plate("rows", ROWS):
            self.start()
            z, y = (pyro.sample(name, dist.Bernoulli(logits=own)) for name, own in zip("zy", q, strict=True))
            place, _ = self.step(z)
            cost("c", 0.7 * y * torch.arange(1.0, 3.0) if self.is_new else torch.as_tensor(place) * z)

    def move(self, move: Tensor) -> tuple[np.ndarray, np.ndarray]:
        self.log.append(float(move.sum()))
        return super().move(move)


def test_what_else_the_object_of_a_function_holds_is_looked_at() -> None:
    """Only what the function changes is its state."""
    policy = Policy()
    elbo = trained(policy)
    recordings = elbo.runner.recordings
    number = recordings.num_recorded
    repeat(5, elbo.loss_and_grads, None, policy)
    assert recordings.num_recorded - number <= 1
    recordings.now.next = float("inf")  # no step is recorded because it is time
    policy.is_new = True
    check(policy, elbo)


@pytest.mark.parametrize("options", [{}, {"num_particles": 2, "max_plate_nesting": 1, "critic": None}])
def test_what_is_drawn_outside_of_a_plate_belongs_to_all_rows(options: Any) -> None:
    """Also where it has as many elements as the plate has rows."""
    weigh = external(lambda z, w: z.numpy() * (1.0 + w.numpy().sum(-1, keepdims=True)) + w.numpy()[..., :1])

    def policy() -> None:
        q = pyro.param("q", lambda: torch.tensor([[0.3, -0.6], [0.5, 0.1]]))
        w = pyro.sample("w", dist.Bernoulli(logits=q[0]).to_event(1))
        with pyro.plate("rows", ROWS):
            cost("c", weigh(pyro.sample("z", dist.Bernoulli(logits=q[1])), w) * torch.arange(1.0, 3.0))

    check(policy, trained(policy, **options))


def test_a_step_of_few_rows_has_the_baseline_of_steps_of_many() -> None:
    far = external(lambda z: 100.0 + z.numpy())

    def policy(rows: int) -> None:
        with pyro.plate("rows", rows):
            q = pyro.param("q", lambda: torch.tensor(0.3))
            cost("c", far(pyro.sample("z", dist.Bernoulli(logits=q))))

    elbo = stepped(40, ExpectedCost(critic=None), None, policy, 12)
    q = pyro.param("q").unconstrained()
    q.grad = None
    elbo.loss_and_grads(None, policy, 5)
    assert 0.0 < float(q.grad) < 3.0  # the exact gradient is 1.2; without a baseline it is tens from there
