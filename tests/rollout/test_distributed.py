"""Two processes, each with its share of the rows, learn what one learns from the joint batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed_worker as worker
import pytest
import torch
from steps import assert_equal

from pyro_bpq.estimators.all_action import SIZE
from pyro_bpq.rollout.sums import Ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
    pytest.mark.xdist_group("distributed"),
]


def chosen(request: pytest.FixtureRequest, test: str) -> list[str]:
    """The cases of a test that run: no others are trained."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    own = (item for item in items if item.module is request.module and item.originalname == test)
    return sorted({item.callspec.params["name"] for item in own})


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    exact = chosen(request, "test_state_is_that_of_one_process_with_the_joint_batch")
    random = chosen(request, "test_state_is_the_same_on_all_ranks")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    environment["OMP_NUM_THREADS"] = "1"
    # Without torch's launcher, which is a third process that imports torch.
    command = [sys.executable, worker.__file__, str(folder), json.dumps([exact, ["default", *random]])]
    started = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(worker.PROCESSES)
    ]
    for process in started:
        try:
            _, errors = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            for other in started:
                other.kill()
            raise
        assert process.returncode == 0, errors
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def without_idle_scales(state: dict[str, Any]) -> dict[str, Any]:
    """The scale of a control variate that is zero throughout, or rounding noise, follows that noise."""
    state = dict(state)
    for key in [key for key in state if key.endswith(".scales")]:
        gram = state[key.removesuffix("scales") + "gram"]
        diagonal = gram.diagonal(dim1=1, dim2=2)[:, :SIZE]
        state[key] = state[key].where(diagonal > 1e-20, 1.0)
    # What waits to be written has such scales too, without their names.
    extra = next(key for key in state if key.endswith("_extra_state") and "critics" not in key)
    # Each process counts the work of its own rows.
    state[extra] = {**state[extra], "waiting": None, "structure": {**state[extra]["structure"], "work": None}}
    return state


@pytest.mark.parametrize("name", list(worker.CASES))
def test_state_is_that_of_one_process_with_the_joint_batch(name: str, ranks: list[dict[str, Any]]) -> None:
    joint = worker.train(name, None)
    start = worker.state_of(worker.make(worker.CASES[name][0]))
    moved = [key for key in start if "elbo" not in key and not torch.equal(start[key], joint[key])]
    assert moved
    for state in ranks:
        assert_equal(without_idle_scales(state["exact"][name]), without_idle_scales(joint), rtol=1e-9)


@pytest.mark.parametrize("name", list(worker.RANDOM_CASES))
def test_state_is_the_same_on_all_ranks(name: str, ranks: list[dict[str, Any]]) -> None:
    left, right = (state["random"][name] for state in ranks)
    assert_equal(left, right)
    assert any(".blocks." in key for key in left)


def test_buffers_that_ddp_broadcasts_are_the_same_already(ranks: list[dict[str, Any]]) -> None:
    assert_equal(ranks[0]["broadcast"], ranks[0]["random"]["default"])
    assert_equal(ranks[1]["broadcast"], ranks[0]["broadcast"])


def test_recorded_steps_train_as_eager_ones(ranks: list[dict[str, Any]]) -> None:
    for state in ranks:
        found = state["compiled"]
        assert found["steps"] > 3
        assert_equal(found["eager"], found["compiled"], rtol=1e-8)
    shared = [key for key in ranks[0]["compiled"]["compiled"] if "elbo" not in key]
    assert shared
    for key in shared:
        assert torch.equal(*(state["compiled"]["compiled"][key] for state in ranks)), key


def test_processes_that_take_other_steps_raise(ranks: list[dict[str, Any]]) -> None:
    for state in ranks:
        assert state["collide"].startswith("UnsupportedProgramError: The processes of this group")
        assert "ranks=None" in state["collide"]


def test_a_loss_that_is_not_finite_teaches_no_rank(ranks: list[dict[str, Any]]) -> None:
    left, right = (state["skip"] for state in ranks)
    assert_equal(left, right)
    (extra,) = (value for key, value in left.items() if key.endswith("elbo._extra_state"))
    assert extra["num_steps"] == 4


def test_one_process_is_alone() -> None:
    assert Ranks().size == 1
