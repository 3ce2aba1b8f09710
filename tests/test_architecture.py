"""The layering of DESIGN, read from the sources by ``ast``; what modules hold, from the modules themselves."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TypeGuard

import pytest
import torch
from code_lines import code_lines, sizes
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor, nn

from pyro_bpq.graph.scg import CostNode

PACKAGE = "pyro_bpq"
ROOT = Path(__file__).parents[1] / PACKAGE
MAX_LINES = 400

# A folder imports from those before it; modules of one folder import each other without cycles.
ORDER = (
    *("errors", "short", "distributions", "graph", "rollout", "estimators", "critics"),
    *("record", "step", "plan", "reruns", "compiled", "objectives", "svi", "testing", "diagnostics"),
    "__init__",
)
TENSOR_FREE = frozenset(("errors", "short", "graph"))
MAY_IMPORT_PYRO = frozenset(
    ("distributions", "record", "plan", "reruns", "compiled", "objectives", "svi", "testing", "diagnostics")
)


# Sources of ``elbo``, ``estimators.__init__``, ``estimators.pathwise``, ...
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text(encoding="utf-8")
    for file in sorted(ROOT.rglob("*.py"))
}


def layer_of(name: str) -> int | None:
    head = name.split(".")[0]
    return ORDER.index(head) if head in ORDER else None


def imported(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and absolute dotted name of each import, wherever it stands."""
    package = [PACKAGE, *name.split(".")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join(base + ([node.module] if node.module else []))
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif is_import_by_name(node) and isinstance(node.args[0], ast.Constant):
            yield node.lineno, str(node.args[0].value)


def own_module(target: str, known: frozenset[str]) -> str | None:
    """The module of the package that ``target`` (a module, or a name in one) comes from, if it is ours."""
    head, *rest = target.split(".")
    if head != PACKAGE:
        return None
    for end in range(len(rest), -1, -1):
        for name in (".".join(rest[:end]), ".".join([*rest[:end], "__init__"])):
            if name in known:
                return name
    return "__init__"


def dependencies(name: str, tree: ast.Module, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    for line, target in imported(name, tree):
        module = own_module(target, known)
        if module is not None:
            yield line, module


def import_faults(name: str, tree: ast.Module, known: frozenset[str]) -> Iterator[str]:
    layer, head = layer_of(name), name.split(".")[0]
    if layer is None:
        yield "has no place: add its folder to ORDER"
        return
    for line, module in dependencies(name, tree, known):
        below = layer_of(module)
        if below is None or below > layer:
            yield f"line {line}: imports {module}, which is not above it"
    for line, target in imported(name, tree):
        root = target.split(".")[0]
        if root in ("pyro", "pyroapi") and head not in MAY_IMPORT_PYRO:
            yield f"line {line}: imports {root}"
        if root in ("torch", "numpy") and head in TENSOR_FREE:
            yield f"line {line}: imports {root} into the structure layers"
    for node in ast.walk(tree):
        if is_import_by_name(node) and not isinstance(node.args[0], ast.Constant):
            yield f"line {node.lineno}: imports a module whose name is computed"


def called(node: ast.expr) -> str:
    """Last part of the name that a call calls, for ``TypeVar(..)`` and ``typing.TypeVar(..)`` alike."""
    func = node.func if isinstance(node, ast.Call) else node
    if isinstance(func, ast.Attribute):
        return func.attr
    return func.id if isinstance(func, ast.Name) else ""


def is_import_by_name(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and called(node) in ("__import__", "import_module") and bool(node.args)


def state_faults(module: object) -> Iterator[str]:
    """Names of a module whose values can change: containers, tensors, and objects of classes that are not frozen."""
    for name, value in vars(module).items():
        if not name.startswith("__") and value is not _PYRO_STACK and can_change(value):
            yield f"{name} is module-level mutable state"


def can_change(value: object) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return any(map(can_change, value))
    is_own = type(value).__module__.split(".")[0] == PACKAGE and not isinstance(value, (type, Enum))
    is_frozen = is_own and is_dataclass(value) and type(value).__dataclass_params__.frozen
    return isinstance(value, (list, dict, set, bytearray, Tensor, nn.Module)) or (is_own and not is_frozen)


def form_faults(source: str, tree: ast.Module) -> Iterator[str]:
    lines = len(source.splitlines())
    if lines > MAX_LINES:
        yield f"has {lines} lines, more than {MAX_LINES}"
    if not ast.get_docstring(tree):
        yield "has no docstring"
    if any(isinstance(node, ast.Global) for node in ast.walk(tree)):
        yield "has a global statement"


def faults(name: str, source: str, known: frozenset[str]) -> list[str]:
    tree = ast.parse(source)
    return [f"{name}: {fault}" for fault in (*import_faults(name, tree, known), *form_faults(source, tree))]


def import_cycle(sources: Mapping[str, str]) -> list[str]:
    """A cycle of modules that import each other, or nothing. What only types need does not count."""
    known = frozenset(sources)
    edges = {}
    for name, source in sources.items():
        tree = ast.parse(source)
        tree.body = [node for node in tree.body if ast.unparse(getattr(node, "test", node)) != "TYPE_CHECKING"]
        edges[name] = {module for _, module in dependencies(name, tree, known)} - {name}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("name", sorted(MODULES))
def test_module_keeps_the_house_rules(name):
    module = importlib.import_module(f"{PACKAGE}.{name}".removesuffix(".__init__"))
    assert not [*faults(name, MODULES[name], frozenset(MODULES)), *state_faults(module)]


@pytest.mark.parametrize("folder", sorted(name.split(".")[0] for name in MODULES if name.endswith(".__init__")))
def test_folder_says_what_it_may_import_and_what_to_read_first(folder):
    text = " ".join((ast.get_docstring(ast.parse(MODULES[f"{folder}.__init__"])) or "").split())
    assert re.search("[Ii]mport", text), text
    first = re.search(r"Read ``(\w+)\.py`` first", text)
    assert first is not None and f"{folder}.{first[1]}" in MODULES, text


# Code lines by folder, as ``code_lines.py`` counts; number of modules; words of docs. Numbers only ever fall.
BUDGETS = {
    "pyro_bpq": 15397,
    "modules": 110,
    "top": 251,
    "compiled/": 1303,
    "critics/": 772,
    "diagnostics/": 563,
    "estimators/": 1418,
    "graph/": 684,
    "objectives/": 1719,
    "plan/": 971,
    "record/": 3793,
    "reruns/": 1033,
    "rollout/": 495,
    "step/": 1266,
    "svi/": 277,
    "testing/": 852,
    "tests": 18498,
    "benchmarks": 2999,
    "words of docs": 15986,
}


def test_every_folder_has_a_budget_and_none_grows():
    found = sizes()
    assert found.keys() == BUDGETS.keys()
    assert not {name: size for name, size in found.items() if size > BUDGETS[name]}


def test_lines_of_code_are_counted():
    text = '"""A."""\n\nimport os\n\n# A comment.\ndef f(x):\n    """B."""\n    return (\n        x\n    )\n'
    assert code_lines(text) == 4


def test_package_has_no_import_cycle():
    assert not import_cycle(MODULES)


def highest_floor(sources: Mapping[str, str]) -> int:
    """The longest chain of imports between folders; the errors and texts at the top do not count."""
    known, below = frozenset(sources), dict[str, set[str]]()
    for name, source in sources.items():
        found = {module.split(".")[0] for _, module in dependencies(name, ast.parse(source), known)}
        below.setdefault(name.split(".")[0], set()).update(found)
    height = dict.fromkeys(("errors", "short", "distributions", "__init__"), 0)
    for folder in TopologicalSorter({folder: found - {folder} for folder, found in below.items()}).static_order():
        height.setdefault(folder, 1 + max((height[other] for other in below[folder] - {folder}), default=0))
    return max(height.values())


def test_no_chain_of_folders_is_longer_than_ten():
    assert highest_floor(MODULES) <= 10
    assert highest_floor({"a.b": "", "errors": "", "c.d": "from pyro_bpq.a import b\nimport pyro_bpq.errors"}) == 2


PREAMBLE = '"""A module."""\n\n'
KNOWN = frozenset(
    f"{folder}__init__" for folder in ("", "graph.", "critics.", "estimators.", "record.", "objectives.")
) | {"errors", "critics.rules", "critics.learner"}


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("graph.scg", "from pyro_bpq.critics.rules import td", "imports critics.rules"),
        ("graph.scg", "from pyro_bpq import critics", "imports critics"),
        ("graph.scg", "import pyro_bpq.critics.rules", "imports critics.rules"),
        ("graph.scg", "from .. import critics", "imports critics"),
        ("graph.scg", "from ..critics import td", "imports critics"),
        ("graph.scg", "from pyro_bpq.unheard_of import f", "imports __init__"),
        ("critics", "from pyro_bpq import __version__", "imports __init__"),
        ("estimators.pathwise", "from pyro_bpq.critics import td", "imports critics.__init__"),
        ("estimators.pathwise", "from ..record import config_bpq", "imports record"),
        ("estimators.pathwise", "import pyro.distributions as dist", "imports pyro"),
        ("critics.learner", "def f():\n    from pyro.infer import ELBO", "imports pyro"),
        ("critics.learner", "f = lambda: __import__('pyro')", "imports pyro"),
        ("critics.learner", "f = lambda x: importlib.import_module(x)", "name is computed"),
        ("__init__", "import pyro", "imports pyro"),
        ("graph.network", "import torch", "imports torch into"),
        ("unheard_of", "", "has no place"),
        ("critics", "N = 0\ndef f():\n    global N", "global"),
        ("critics", "\n" * MAX_LINES, f"more than {MAX_LINES}"),
    ],
)
def test_planted_fault_is_found(name, text, fault):
    (found,) = faults(name, PREAMBLE + text, KNOWN | {name})
    assert fault in found


def test_missing_docstring_is_found():
    assert faults("critics", "N = 0", KNOWN) == ["critics: has no docstring"]


def test_mutable_state_is_found():
    own = type("Own", (), {"__module__": PACKAGE})
    sound = {"A": 1, "B": ("a", 2.0), "C": MappingProxyType({}), "D": own, "E": re.compile("a"), "F": CostNode("f")}
    faulty = {"A": {}, "B": ([],), "C": set(), "D": own(), "E": torch.zeros(())}
    for values, number in ((sound, 0), (faulty, len(faulty))):
        assert len([*state_faults(SimpleNamespace(**values))]) == number


@pytest.mark.parametrize(
    ("sources", "cycle"),
    [
        ({"elbo": "from pyro_bpq.svi import f", "svi": "from . import elbo"}, {"elbo", "svi"}),
        ({"elbo": "from pyro_bpq.svi import f", "svi": "import torch"}, set()),
        ({"a.__init__": "from pyro_bpq.a.b import f", "a.b": "from pyro_bpq.a import g"}, {"a.__init__", "a.b"}),
    ],
)
def test_import_cycle_is_found(sources, cycle):
    assert set(import_cycle(sources)) == cycle
