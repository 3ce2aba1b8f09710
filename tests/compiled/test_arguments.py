"""Floats that change become tensors; new arrays are told apart."""

from __future__ import annotations

import numpy as np
import torch

from pyro_bpq.compiled.steps import Arguments
from pyro_bpq.record.key import Call, reach
from pyro_bpq.rollout.runs import Program


def program(*args: object) -> Program:
    return Program(print, print, args, {})


def call(*arrays: object) -> Call:
    return reach({"args": arrays})


def test_only_floats_that_change_become_tensors_from_then_on() -> None:
    arguments = Arguments()
    assert arguments.with_tensors(program(0.1, 2.0)).args == (0.1, 2.0)
    changed, kept = arguments.with_tensors(program(0.2, 2.0)).args
    assert isinstance(changed, torch.Tensor) and kept == 2.0
    assert isinstance(arguments.with_tensors(program(0.2, 2.0)).args[0], torch.Tensor)


def test_arrays_are_new_once() -> None:
    arguments, array = Arguments(), np.zeros(2)
    assert arguments.new_arrays(call(array)) == [0] and arguments.new_arrays(call(array)) == []
    assert arguments.new_arrays(call(array, np.zeros(2))) == [1] and arguments.num_new_arrays == 1
