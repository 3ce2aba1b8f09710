"""Random programs: half of 174 by default, all in ``make test-all``, thousands in ``make fuzz``."""

from __future__ import annotations

import gc
import random
import traceback
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from fuzz.oracle import CONFIGS, CONTROLS, check, draw
from fuzz.programs import Allowed, _Draw, from_source, random_program
from fuzz.shrink import shrunk

# Seeds from which programs are drawn, by configuration: 174 in all.
COUNTS = {"one": 62, "pyro": 6} | {name: 8 for name in CONFIGS if name not in ("one", "iwae")} | {"iwae": 2}
CHUNK = 6
# What Trace_ELBO is not right for, by its documentation or by its bound of rows.
NOT_FOR_PYRO = frozenset(("plate read outside", "scale of latents", "control flow", "number of sites"))


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    # Small graphs in great number; the collector takes a quarter of the time.
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def chunks() -> Iterator[tuple[str, int, int]]:
    for config, count in COUNTS.items():
        for start in range(0, count, CHUNK):
            yield config, start, min(start + CHUNK, count)


@pytest.mark.parametrize(("config", "start", "stop"), list(chunks()))
def test_expected_gradients_of_random_programs_are_exact(config: str, start: int, stop: int) -> None:
    bad = []
    for seed in range(start, stop):
        program = draw(seed, config)
        if config in CONTROLS and program.features & NOT_FOR_PYRO:
            continue
        verdict = check(program, config)
        if verdict.is_bad:
            bad.append(f"{verdict}\n{program}")
    assert not bad, f"python -m fuzz --config {config} --show SEED cuts a program down.\n" + "\n".join(bad)


def texts(count: int) -> Iterator[tuple[str, frozenset[str]]]:
    for seed in range(count):
        yield _Draw(random.Random(f"{seed}/0"), Allowed(), 64, None).text()


FEATURES = frozenset(
    (
        *("bits", "coin", "count", "digits", "faces", "onehot", "pick", "point", "real", "spin"),
        *("plates", "nested plates", "subsampled plate", "sequential plate", "many rows", "observed mask"),
        *("mask", "mask of latents", "masked distribution", "scale", "scale of latents"),
        *("left", "left reduction of rows", "loop", "noisy or", "unpacked", "components as rows", "plate read outside"),
        *("escape", "own distribution", "control flow", "number of sites", "steps", "buffer", "vmap", "module"),
        *("cost", "deterministic", "factor", "factor of the guide", "handed over", "shared parameter"),
        *("other order", "vector likelihood"),
    )
)


def test_all_features_occur() -> None:
    found = Counter(feature for _, features in texts(1500) for feature in features)
    assert found.keys() == FEATURES
    assert min(found.values()) >= 3, found


def test_features_of_other_programs() -> None:
    found = [random_program(seed, **CONFIGS["enumeration"].options) for seed in range(20)]
    assert all('"enumerate"' in program.source for program in found)
    assert any("summed out of the model" in program.features for program in found)
    assert not any("left" in program.features or "escape" in program.features for program in found)
    mixed = [random_program(seed, mixing_rows=True) for seed in range(60)]
    assert any("mixing rows" in program.features for program in mixed)


def test_same_seed_same_program() -> None:
    for seed in range(5):
        one, two = random_program(seed), random_program(seed)
        assert one.source == two.source and one.features == two.features
        for name, gradient in one.exact.items():
            assert torch.equal(gradient, two.exact[name])
    assert len({text for text, _ in texts(100)}) == 100


def test_programs_run_and_have_gradients() -> None:
    programs = [random_program(seed) for seed in range(40)]
    # A text that stock Pyro does not run is drawn again: few are.
    assert sum(program.rejected for program in programs) <= 6
    assert all(program.num_states <= 64 for program in programs)
    largest = [max(float(gradient.abs().max()) for gradient in program.exact.values()) for program in programs]
    assert sum(value > 1e-3 for value in largest) >= 36


WRONG = """
from fuzz.prelude import *

def guide():
    z = pyro.sample("z", dist.Bernoulli(logits=pyro.param("q", torch.tensor(0.3))))
    y = pyro.sample("y", dist.Bernoulli(logits=pyro.param("r", torch.tensor(0.9)) + z), infer={"is_auxiliary": True})

def model():
    z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
    pyro.factor("x", 1.3 * z)
"""


def test_a_wrong_gradient_is_seen_and_cut_down() -> None:
    # Pyro's own does not follow auxiliary sites.
    program = from_source(WRONG, seed=1)
    verdict = check(program, "pyro")
    assert verdict.kind == "failed" and verdict.error > 1e-3
    assert check(program, "one").kind == "served"
    small, verdict = shrunk(program, "pyro")
    assert verdict.kind == "failed" and "factor" not in small.source and "auxiliary" in small.source


def test_a_crash_is_seen() -> None:
    program = random_program(3)

    def model() -> None:
        program.model()
        # Stock Pyro has then run already, ours has not.
        if any("pyro_bpq/objectives/" in line for line in _stack()):
            raise RuntimeError("out of coffee")

    broken = from_source(program.source, 3)
    object.__setattr__(broken, "model", model)
    verdict = check(broken, "default")
    assert verdict.kind == "crash" and "out of coffee" in verdict.detail


def _stack() -> list[str]:
    return [frame.filename.replace("\\", "/") for frame in traceback.extract_stack()]
