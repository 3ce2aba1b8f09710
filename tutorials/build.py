"""Turns the scripts of this folder into notebooks and runs them.

    python tutorials/build.py               # all: run in full, write the notebooks with their outputs
    python tutorials/build.py 03 06         # those whose names start so
    python tutorials/build.py --text        # takes over changed text; outputs stay where no code has changed
    python tutorials/build.py --smoke       # run with SMOKE_TEST=1, which shortens training; write nothing

A script is the source of its notebook: ``# %%`` starts a cell of code, ``# %% [markdown]`` a cell of text.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def scripts() -> list[Path]:
    """The tutorials, in order."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def cells(text: str) -> list[tuple[str, str]]:
    """Kind (``"code"`` or ``"markdown"``) and source of each cell of a script."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("# %%"):
            found.append(("markdown" if "[markdown]" in line else "code", []))
        elif found:
            kind, lines = found[-1]
            lines.append(line.removeprefix("#").removeprefix(" ") if kind == "markdown" else line)
    return [(kind, "\n".join(lines).strip("\n")) for kind, lines in found]


def notebook(script: Path) -> Any:
    """The notebook of a script, without outputs."""
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    make = {"code": new_code_cell, "markdown": new_markdown_cell}
    made = [make[kind](source, id=f"cell-{i}") for i, (kind, source) in enumerate(cells(script.read_text()))]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=made, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def execute(script: Path, smoke: bool, timeout: int = 1800) -> Any:
    """Runs a script's notebook in a kernel of its own and returns it with its outputs."""
    from nbclient import NotebookClient

    made = notebook(script)
    os.environ["SMOKE_TEST"] = "1" if smoke else ""
    NotebookClient(made, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}).execute()
    for cell in made.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = kept(cell.outputs)
    return made


def kept(outputs: list[Any]) -> list[Any]:
    """The outputs without progress bars and the tools' remarks on stderr; what was printed in one piece."""
    found: list[Any] = []
    for output in outputs:
        if output.output_type != "stream":
            found.append(output)
        elif output.name == "stdout" and found and found[-1].output_type == "stream":
            found[-1].text += output.text
        elif output.name == "stdout":
            found.append(output)
    return found


def with_new_text(script: Path) -> Any:
    """The notebook of a script with the outputs that it has; ``None`` if its code has changed."""
    import nbformat

    old, new = nbformat.read(script.with_suffix(".ipynb"), as_version=4), notebook(script)
    ran = [cell for cell in old.cells if cell.cell_type == "code"]
    code = [cell for cell in new.cells if cell.cell_type == "code"]
    if [cell.source for cell in ran] != [cell.source for cell in code]:
        return None
    for cell, before in zip(code, ran, strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    new.metadata = old.metadata
    return new


def main() -> None:
    """Builds the tutorials named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="starts of names; all without")
    parser.add_argument("--text", action="store_true", help="run nothing, take over text")
    parser.add_argument("--smoke", action="store_true", help="short runs, nothing is written")
    options = parser.parse_args()
    chosen = [s for s in scripts() if not options.names or s.name.startswith(tuple(options.names))]
    if not chosen:
        parser.error(f"no tutorial starts with {' or '.join(options.names)}")
    for script in chosen:
        start = time.perf_counter()
        if options.text:
            import nbformat

            made = with_new_text(script) if script.with_suffix(".ipynb").exists() else None
            if made is not None:
                nbformat.write(made, script.with_suffix(".ipynb"))
            print(
                f"{script.stem}: {'text taken over' if made is not None else 'code has changed: build it'}", flush=True
            )
            continue
        made = execute(script, options.smoke)
        if not options.smoke:
            import nbformat

            nbformat.write(made, script.with_suffix(".ipynb"))
        print(f"{script.stem}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
