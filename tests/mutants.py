"""Mutation testing: of so many small changes of the package, how many do the default tests notice?

    python tests/mutants.py --out before.json                     draws 200 mutants and runs them
    python tests/mutants.py --out after.json --same before.json   runs those whose line still exists, wherever it moved

A mutant differs from the package in an operator, a comparison, a constant, a condition or a returned value. It is
caught if a test fails, takes far too long, or cannot be imported. First each default test runs once, and `coverage`
notes the lines that it executes (in files beside the results, which the next run reads). A mutant meets the tests that
execute its statement, those of its own folder first. It meets all tests if its statement runs on import. Mutants with a
result are not run again, so a run that was stopped goes on. Needs `pip install pytest-cov`.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import itertools
import json
import os
import queue
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PACKAGE = "pyro_bpq"
PYTEST = "pytest -v -p no:cacheprovider -p no:xdist -o faulthandler_timeout=3600 -o faulthandler_exit_on_timeout=true"
SWAPS = """
Add + -, Sub - +, Mult * /, Div / *, FloorDiv // *, Mod % *, Pow ** *, BitAnd & |, BitOr | &, LShift << >>,
RShift >> <<, Lt < <=, LtE <= <, Gt > >=, GtE >= >, Eq == !=, NotEq != ==, Is is is_not, IsNot is_not is,
In in not_in, NotIn not_in in, And and or, Or or and, USub -, Not not"""
SWAP = {op: [text.replace("_", " ") for text in texts] for op, *texts in map(str.split, SWAPS.split(","))}
# No result depends on these: texts, types, and checks of what is known.
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
SKIPPED_FIELDS = {"annotation", "returns", "decorator_list"}
SKIPPED_NAMES = {"strict", "stacklevel", "__repr__", "__str__", "warn", "debug", "info", "warning", "error", "cast"}
NO_NUMBER = re.compile(r"""[rf]?['"]|\[|None$|type\b|(\w+\.)*[A-Z][a-z]""")

# A change of the source from `start` to `end`; `copy` numbers equal ones, `lines` is the statement in a function.
Site = namedtuple("Site", "file function line changed copy start end new lines")


def changes(node: Any) -> Iterator[tuple[Any, Any, str, str]]:
    """A node, or the gap between two; its text to be replaced, all of it if empty; the new text."""
    kinds = dict(BinOp="left right", AugAssign="target value", Compare="left comparators", BoolOp="values")
    fields = [getattr(node, field) for field in kinds.get(type(node).__name__, "").split()]
    parts = [part for field in fields for part in (field if isinstance(field, list) else [field])]
    ops = getattr(node, "ops", [getattr(node, "op", None)] * (len(parts) - 1))
    is_text = isinstance(node, ast.BinOp) and any(NO_NUMBER.match(ast.unparse(part)) for part in parts)
    for op, pair in zip(ops, itertools.pairwise(parts), strict=True):
        if type(op).__name__ in SWAP and not is_text:
            yield *pair, *SWAP[type(op).__name__]
    if isinstance(node, ast.UnaryOp) and type(node.op).__name__ in SWAP:
        yield None, node, *SWAP[type(node.op).__name__], ""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield None, node, "", repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    for test in [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else getattr(node, "ifs", []):
        # The swap of a single comparison is its negation, or says more.
        if not isinstance(test, ast.UnaryOp | ast.Compare) and ast.unparse(test) != "TYPE_CHECKING":
            yield None, test, "", "not ({})"
    if isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
        yield None, node.value, "", "None"


def sites(tree: Path, file: Path) -> list[Site]:
    source, found, seen = (tree / file).read_bytes(), [], Counter()
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]

    def add(function: str, lines: range | None, left: Any, node: Any, old: str, new: str) -> None:
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        if left:
            start, end = starts[left.end_lineno - 1] + left.end_col_offset, start
        if old:
            start = source.index(old.encode(), start, end)
            end = start + len(old)
        new, top = new.format(source[start:end].decode()), source.rfind(b"\n", 0, start) + 1
        texts = source[top:], source[top:start] + new.encode() + source[end:]
        key = (str(file), function, *(text.split(b"\n")[0].decode().strip() for text in texts))
        found.append(Site(*key, seen[key], start, end, new, lines))
        seen[key] += 1

    def visit(node: ast.AST, function: str, lines: range | None, is_run: bool) -> None:
        named = node.func if isinstance(node, ast.Call) else node
        names = {getattr(named, field, None) for field in ("name", "arg", "attr", "id")} & SKIPPED_NAMES
        if isinstance(node, SKIPPED) or (names and isinstance(node, ast.Call | ast.FunctionDef | ast.keyword)):
            return
        if is_run and isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            lines = range(node.lineno, body[0].lineno if body else node.end_lineno + 1)
        for change in changes(node):
            add(function, lines, *change)
        for field, value in ast.iter_fields(node):
            below, runs = function, is_run
            if field == "body" and isinstance(node, ast.FunctionDef | ast.ClassDef):
                below, runs = f"{function}.{node.name}".strip("."), isinstance(node, ast.FunctionDef)
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and field not in SKIPPED_FIELDS:
                    visit(child, below, lines, runs)

    visit(ast.parse(source), "", None, False)
    return found


def draw(tree: Path, options: argparse.Namespace) -> list[Site]:
    """Sites in proportion to the files' code lines, one a line if there are enough."""
    kept, sums, chance = [], [0.0], random.Random(options.seed)
    for path in sorted(path for name in options.folders for path in (tree / PACKAGE / name).rglob("*.py")):
        every = sites(tree, path.relative_to(tree))
        kept.append([site for site in every if not re.search(options.leave_out, ":".join(site[:3]))])
        code = {node.lineno for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.expr | ast.stmt)}
        sums.append(sums[-1] + len(code) * len(kept[-1]) / max(len(every), 1))
    spots = ((i + chance.random()) * sums[-1] / options.number for i in range(options.number))
    chosen = []
    for i, count in sorted(Counter(bisect.bisect(sums, spot) - 1 for spot in spots).items()):
        shuffled = chance.sample(kept[i], len(kept[i]))
        chosen += [*dict.fromkeys([*{site[:3]: site for site in shuffled}.values(), *shuffled])][:count]
    return chosen


def same(tree: Path, rows: list[dict[str, Any]]) -> list[Site]:
    """The sites of earlier results that still exist, by name of file, function and line."""
    found = defaultdict(list)
    for path in sorted((tree / PACKAGE).rglob("*.py")):
        for site in sites(tree, path.relative_to(tree)):
            found[(path.name, *site[1:5])].append(site)
    old = [(row["file"], found[(Path(row["file"]).name, *list(row.values())[1:5])]) for row in rows]
    return [min(new, key=lambda site, file=file: site.file != file) for file, new in old if new]


def run(tree: Path, seconds: float, *options: str) -> tuple[int, str]:
    """Runs the default tests in a copy of the tree; the status is negative if a limit ended the run."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    # With CI hypothesis draws the same examples each time.
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CI": "1", "COVERAGE_CORE": "ctrace"}
    command = [sys.executable, "-m", *PYTEST.split(), "-m", "not slow", *options]
    with tree.with_suffix(".log").open("w+") as log:
        status = subprocess.call(command, cwd=tree, env=os.environ | more, stdout=log, stderr=log, preexec_fn=limit)
        log.seek(0)
        return status, log.read()


def met(site: Site, lines: Any, seconds: dict[str, float]) -> dict[str, float]:
    """The tests that a mutant meets, in order, with their seconds."""
    found, near = lines.contexts_by_lineno(site.file), f"/{Path(site.file).parent.name}/"
    contexts = {context for line in site.lines or () for context in found.get(line, ())}
    names = {context.rpartition("|")[0] for context in contexts}
    # Tests of a file may share fixtures and objects: a test that makes none of its own still needs these lines.
    files = {name.split("::")[0] for name in contexts if name.endswith("|setup") or near in name}
    is_all = site.lines is None or "" in contexts
    tests = [name for name in seconds if is_all or name in names or name.split("::")[0] in files]
    tests.sort(key=lambda name: (Path(site.file).stem not in name, near not in name, seconds[name]))
    return {name: seconds[name] for name in tests}


def trial(site: Site, trees: queue.SimpleQueue[Path], tests: dict[str, float]) -> dict[str, Any]:
    """Runs one mutant."""
    tree, start = trees.get(), time.monotonic()
    source = (tree / site.file).read_bytes()
    (tree / site.file).write_bytes(source[: site.start] + site.new.encode() + source[site.end :])
    names = tree.with_suffix(".tests")
    names.write_text("\n".join(tests))
    status, text = run(tree, 120 + 2 * sum(tests.values()), "-x", f"@{names}") if tests else (0, "")
    (tree / site.file).write_bytes(source)
    trees.put(tree)
    by = ["import", *re.findall(r"^(?:FAILED |ERROR )?(tests/\S+)", text, re.MULTILINE)][-1] if status else None
    row = dict(zip(Site._fields[:5], site[:5], strict=True)) | {"caught": status != 0, "by": by, "status": status}
    return row | {"tests": len(tests), "seconds": round(time.monotonic() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of results")
    parser.add_argument("--same", type=Path, help="earlier results, whose mutants run on this tree")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="checkout, which is copied")
    parser.add_argument("--folders", nargs="+", default="graph estimators critics step plan".split())
    parser.add_argument("--leave-out", default="^$", help="no mutants where this expression is in file:function:line")
    for name, value in {"number": 200, "seed": 0, "workers": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    out, tree, trees = options.out.resolve(), options.tree.resolve(), queue.SimpleQueue()
    chosen = same(tree, json.loads(options.same.read_text())) if options.same else draw(tree, options)
    rows = json.loads(out.read_text()) if out.exists() else []
    print(len(chosen), "mutants", flush=True)
    done = {tuple(row.values())[:5] for row in rows}
    noted, lines, settings = (out.with_suffix(end) for end in (".xml", ".lines", ".ini"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        for i in range(options.workers):
            copy = shutil.copytree(tree, Path(folder, str(i)), ignore=shutil.ignore_patterns(".git", ".venv"))
            trees.put(copy)
        if not noted.exists():
            settings.write_text(f"[run]\nrelative_files = true\ndata_file = {lines}\nsource = {PACKAGE}\n")
            cover = f"--cov --cov-context=test --cov-report= --cov-config={settings} --junitxml={noted}"
            print(run(copy, 36000, *cover.split())[1].splitlines()[-1], flush=True)
        from coverage import CoverageData

        data = CoverageData(str(lines))
        data.read()
        passed = [case.attrib for case in ElementTree.parse(noted).iter("testcase") if not len(case)]
        names = [f"{case['classname'].replace('.', '/')}.py::{case['name']}" for case in passed]
        seconds = {name: float(case["time"]) for name, case in zip(names, passed, strict=True)}
        waiting = [pool.submit(trial, site, trees, met(site, data, seconds)) for site in chosen if site[:5] not in done]
        for result in as_completed(waiting):
            rows.append(result.result())
            out.write_text(json.dumps(rows, indent=1))
            print(*rows[-1].values(), sep=" | ", flush=True)
    for row in rows:
        if not row["caught"]:
            print(f"{row['file']}: {row['function']}\n  - {row['line']}\n  + {row['changed']}")
    print(f"{sum(row['caught'] for row in rows)} of {len(rows)} caught")


if __name__ == "__main__":
    main()
