from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from pyro.poutine.runtime import _PYRO_STACK

# Random examples at a desk, where a new one is a find; the same ones each time in CI.
hypothesis.settings.register_profile("desk", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "desk")


HERE = Path(__file__).parent
# Of the cases of these long products one in so many runs by default; `make test-all` runs them all.
THINNED = {
    "diagnostics/test_diagnostics.py::test_comparison_is_data": 2,
    "estimators/test_crossed_leave_one_out.py::test_the_gradient_is_exact": 2,
    "estimators/test_matrix.py::test_expected_gradient_is_exact": 2,
    "estimators/test_matrix.py::test_mean_gradient_is_exact": 2,
    "estimators/test_programs.py::test_expected_gradient_is_exact": 2,
    "estimators/test_relaxed.py::test_gradient_is_unbiased_with_a_trained_variate": 2,
    "estimators/test_relaxed_programs.py::test_step_is_unbiased": 3,
    "fuzz/test_fuzz.py::test_expected_gradients_of_random_programs_are_exact": 2,
    "objectives/test_dtypes.py::test_objectives_of_any_type_train": 3,
    "objectives/test_elbo_resume.py::test_copies_continue_alike": 3,
    "objectives/test_elbo_state.py::test_state_dict_continues_in_a_new_process": 3,
    "objectives/test_expected_cost.py::test_policy_is_unbiased": 3,
    "objectives/test_interrupts.py::test_an_interrupted_step_can_be_taken_again": 2,
    "objectives/test_iwae_critics.py::test_gradient_with_trained_critics_is_exact": 2,
    "objectives/test_memory.py::test_objects_do_not_grow": 3,
    "objectives/test_steered.py::test_step_with_critics_is_unbiased": 2,
    "pyro_zoo/test_zoo_training.py::test_evaluation_changes_nothing": 3,
    "pyro_zoo/test_zoo_training.py::test_loss_and_draws_are_pyros": 3,
    "pyro_zoo/test_zoo_training.py::test_module_with_a_torch_optimiser": 3,
    "pyro_zoo/test_zoo_training.py::test_svi": 3,
    "reruns/test_enumeration.py::test_steps_with_sampled_sites_are_unbiased": 2,
    "reruns/test_immediate.py::test_flipped_costs_equal_runs_at_each_value": 3,
    "reruns/test_immediate.py::test_models_that_do_not_broadcast_stay_unbiased": 2,
    "step/test_per_cost_variates.py::test_unbiased_with_parts_of_later_sites": 3,
    "svi/test_svi.py::test_accepted_steps_improve_and_keep_the_limits": 3,
    "svi/test_svi.py::test_exact_objective_does_not_rise": 2,
    "svi/test_svi.py::test_first_epoch_is_a_plain_step": 2,
    "svi/test_svi.py::test_local_objective_has_the_gradient_of_the_step_at_the_guide_of_the_rollout": 3,
    "test_errors.py::test_clean_models_warn_of_nothing": 3,
    "test_parity.py::test_default_draws_nothing_more_than_pyro": 3,
    "test_parity.py::test_plain_score_function_equals_tracegraph": 3,
    "test_unbiased.py::test_masked_distributions_are_unbiased": 2,
    "test_unbiased.py::test_rows_that_meet_are_not_cut": 3,
    "test_unbiased.py::test_step_is_unbiased": 3,
    "test_unbiased.py::test_step_with_two_particles_is_unbiased": 3,
    "testing/test_testing.py::test_expected_gradient_of_two_sequential_particles": 3,
    "testing/test_testing.py::test_expected_gradient_of_two_vectorised_particles": 2,
    "testing/test_testing.py::test_tracegraph_elbo_is_unbiased_on_static_programs": 2,
    "tracing/test_growth.py::test_sets_held_as_tuples_are_found": 2,
    "tracing/test_plate_rows.py::test_wherever_they_meet": 2,
    "tracing/test_weights.py::test_components_are_charged_with_what_weighs_their_elements": 3,
    "tracing/test_weights.py::test_weights_of_latent_sites_may_read_anything": 3,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device on which tests create their tensors")
    parser.addoption("--quick", action="store_true", help="one case of each test, and no test of not_quick.txt")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    counts = Counter[str]()
    for item in items:
        name = _function(item)
        if name in THINNED and not item.get_closest_marker("slow"):
            if counts[name] % THINNED[name]:
                item.add_marker(pytest.mark.slow)
            counts[name] += 1
    if config.getoption("--quick"):
        left_out = {line.removeprefix("tests/") for line in (HERE / "not_quick.txt").read_text().splitlines()}
        seen, kept = set[str](), []
        for item in items:
            name = _function(item)
            if not (name in left_out or name in seen or item.get_closest_marker("slow")):
                seen.add(name)
                kept.append(item)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    # A step makes many small objects that refer to each other in cycles: with Python's thresholds, the collector takes
    # a fifth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _function(item: pytest.Item) -> str:
    """The file of a test within this folder, and the name of its function."""
    if not item.path.is_relative_to(HERE):
        return item.nodeid
    return f"{item.path.relative_to(HERE).as_posix()}::{item.name.split('[')[0]}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _float64_on_device(_isolated: None, device: torch.device) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    if device.type == "cpu":
        yield
        return
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def _no_handler_left(_isolated: None) -> Iterator[None]:
    yield
    left = list(_PYRO_STACK)
    _PYRO_STACK.clear()
    assert not left, f"handlers left on Pyro's stack: {left}"
