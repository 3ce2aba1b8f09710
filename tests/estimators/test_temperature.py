"""Temperatures as numbers and as functions of the step."""

from __future__ import annotations

import pytest

from pyro_bpq.errors import OptionError
from pyro_bpq.estimators import Concrete
from pyro_bpq.estimators.relaxation import temperature_at


def test_a_temperature_is_a_number_or_a_function() -> None:
    assert temperature_at(0.4, 7) == 0.4
    assert temperature_at(lambda step: 1.0 / (1 + step), 3) == 0.25


def test_temperatures_are_positive() -> None:
    with pytest.raises(OptionError, match=r"Concrete\(temperature=0.0\): write a positive number"):
        Concrete(0.0)
    Concrete(lambda step: -1.0)  # it shows at its step
    with pytest.raises(OptionError, match=r"at step 2 is -1\.0"):
        temperature_at(lambda step: 1.0 - step, 2)
