"""README's program runs, and its loss falls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import Trace_ELBO

README = Path(__file__).parent.parent / "README.md"


def test_program_of_the_readme() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    torch.set_default_dtype(torch.float32)
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    names: dict[str, Any] = {}
    exec(compile(blocks[0], str(README), "exec", dont_inherit=True), names)
    judge = Trace_ELBO(num_particles=50, vectorize_particles=True, max_plate_nesting=1)
    after = judge.loss(names["model"], names["guide"], names["x"])
    weights = pyro.get_param_store()["weights"].detach()
    pyro.clear_param_store()
    pyro.param("weights", torch.tensor([0.0, 0.1]))
    before = judge.loss(names["model"], names["guide"], names["x"])
    assert after < before - 10.0 and bool(weights.isfinite().all())
    assert "z" in names["elbo"].info and repr(names["elbo"].graph)
