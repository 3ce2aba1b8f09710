"""Code lines by folder: lines that hold code, without docstrings, comments, blanks and imports; and words of docs."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUIET = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}
SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """Number of lines of a source text that hold code."""
    skip, found = set(), set()
    for node in ast.walk(ast.parse(text)):
        quiet = node if isinstance(node, (ast.Import, ast.ImportFrom)) else None
        if isinstance(node, SCOPES) and ast.get_docstring(node, clean=False) is not None:
            quiet = node.body[0]
        if quiet is not None:
            skip |= set(range(quiet.lineno, quiet.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in QUIET:
            found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - skip)


def sizes() -> dict[str, int]:
    """Code lines of the package by folder, of the whole, of tests and benchmarks; modules, and words of docs."""
    found: dict[str, int] = {"modules": 0}
    for top in ("pyro_bpq", "tests", "benchmarks"):
        for path in (ROOT / top).rglob("*.py"):
            lines, parts = code_lines(path.read_text(encoding="utf-8")), path.relative_to(ROOT).parts
            found[top] = found.get(top, 0) + lines
            if top == "pyro_bpq":
                folder = f"{parts[1]}/" if len(parts) > 2 else "top"
                found[folder] = found.get(folder, 0) + lines
                found["modules"] += 1
    # These pages are made with the others, out of the two folders.
    pages = (path for path in (ROOT / "docs").glob("*.md") if path.stem not in ("benchmarks", "gallery"))
    found["words of docs"] = sum(len(path.read_text(encoding="utf-8").split()) for path in pages)
    return found
