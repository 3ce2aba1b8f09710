"""Tutorials run as scripts, and their notebooks are those of the scripts, with outputs."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "tutorials"
SCRIPTS = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
each = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def cells(text: str) -> list[tuple[str, str]]:
    """What the script that builds notebooks makes of a script."""
    return runpy.run_path(str(FOLDER / "build.py"))["cells"](text)


def test_cells_are_split_at_marks() -> None:
    text = "# %% [markdown]\n# # A title\n#\n# Text.\n\n# %%\nx = 1  # %% not here\n\n\n# %%\nx\n"
    assert cells(text) == [("markdown", "# A title\n\nText."), ("code", "x = 1  # %% not here"), ("code", "x")]


def test_every_notebook_has_a_script() -> None:
    assert [path.with_suffix(".py") for path in sorted(FOLDER.glob("*.ipynb"))] == SCRIPTS


@each
def test_notebook_is_that_of_its_script(script: Path) -> None:
    notebook = json.loads(script.with_suffix(".ipynb").read_text())
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert found == cells(script.read_text()), f"run: python tutorials/build.py {script.stem[:2]}"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code) and any(cell["outputs"] for cell in code)
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])


@pytest.mark.slow
@each
def test_script_runs(script: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    path = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "SMOKE_TEST": "1", "MPLBACKEND": "agg", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
