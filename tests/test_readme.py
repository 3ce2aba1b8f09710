"""README's program runs, and its loss falls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import Trace_ELBO

README = Path(__file__).parent.parent / "README.md"


def test_program_of_the_readme() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    torch.set_default_dtype(torch.float32)
    names: dict[str, Any] = {}
    exec(compile(blocks[0], str(README), "exec", dont_inherit=True), names)
    assert "compare_estimators(model, guide, x))  #" in blocks[1]
    fewer = blocks[1].replace("x))  #", "x, num_samples=3, num_warmup=3, num_rounds=1, progress=False))  #")
    exec(compile(fewer, str(README), "exec", dont_inherit=True), names)
    judge = Trace_ELBO(num_particles=50, vectorize_particles=True, max_plate_nesting=1)
    after = judge.loss(names["model"], names["guide"], names["x"])
    weights = pyro.get_param_store()["weights"].detach()
    pyro.clear_param_store()
    pyro.param("weights", torch.tensor([0.0, 0.1]))
    before = judge.loss(names["model"], names["guide"], names["x"])
    assert after < before - 10.0 and bool(weights.isfinite().all())
    assert "z" in names["elbo"].info and repr(names["elbo"].graph)


ROOT = README.parent
PAGES = (README, *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
PATH = re.compile(r"`((?:docs|tests|tutorials|benchmarks|demo|gallery)/[\w./*-]*)`")


def missing(page: Path) -> list[str]:
    """Links and paths of a page that lead nowhere."""
    text = page.read_text()
    # The pages of the notebooks are made with the documentation, which checks links among its pages itself.
    places = (page.parent, ROOT) if page.parent.name == "docs" else (page.parent,)
    links = [link for link in LINK.findall(text) if not any((place / link).exists() for place in places)]
    # A notebook is linked to without its ending.
    names = [(path, path.rstrip("/")) for path in PATH.findall(text)]
    paths = [path for path, name in names if not (list(ROOT.glob(name)) or list(ROOT.glob(f"{name}.ipynb")))]
    return [dead for dead in (*links, *paths) if dead != "tutorials/index"]


@pytest.mark.parametrize("page", dict.fromkeys(PAGES), ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    assert missing(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("[a](none.md), [b](https://example.org), `docs/none.md`, `docs/choosing.md`")
    assert missing(tmp_path / "page.md") == ["none.md", "docs/none.md"]
