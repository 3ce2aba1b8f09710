"""The layering of DESIGN, read from the sources by ``ast``: nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeGuard

import pytest
from code_lines import code_lines, sizes

PACKAGE = "pyro_bpq"
ROOT = Path(__file__).parents[1] / PACKAGE
MAX_LINES = 500

# A folder imports from those before it; modules of one folder import each other without cycles.
ORDER = (
    "errors",
    "short",
    "snapshots",
    "distributions",
    "graph",
    "rollout",
    "critics",
    "estimators",
    "record",
    "step",
    "plan",
    "reruns",
    "compiled",
    "objectives",
    "svi",
    "testing",
    "diagnostics",
    "__init__",
)
TENSOR_FREE = frozenset(("errors", "short", "snapshots", "graph"))
MAY_IMPORT_PYRO = frozenset(
    ("distributions", "record", "plan", "reruns", "compiled", "objectives", "svi", "testing", "diagnostics")
)

# What a module may call to make a constant: the results are immutable or, as a logger, not ours.
CONSTANT_MAKERS = frozenset(
    "NewType ParamSpec TypeVar TypeVarTuple bool complex float getLogger int singledispatch str".split()
)
PURE_CALLS = frozenset("math.exp math.log math.sqrt re.compile".split())
# These may be handed a mutable display, since they copy or wrap it.
WRAPPERS = frozenset("MappingProxyType NamedTuple bytes frozenset namedtuple tuple".split())
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)


def module_names() -> dict[str, Path]:
    """Maps ``elbo``, ``estimators.__init__``, ``estimators.pathwise``, ... to their files."""
    files = sorted(ROOT.rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


MODULES = {name: file.read_text(encoding="utf-8") for name, file in module_names().items()}


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
        if is_import_by_name(node) and not (
            isinstance(node.args[0], ast.Constant) or is_own_module(name, node.args[0])
        ):
            yield f"line {node.lineno}: imports a module whose name is computed"


def is_own_module(name: str, path: ast.expr) -> bool:
    """Whether a folder's ``__init__`` imports one of its own modules, as in ``f"{__name__}.{module}"``."""
    return name.endswith(".__init__") and ast.unparse(path).startswith("f'{__name__}.{")


def called(node: ast.expr) -> str:
    """Last part of the name that a call calls, for ``TypeVar(..)`` and ``typing.TypeVar(..)`` alike."""
    func = node.func if isinstance(node, ast.Call) else node
    if isinstance(func, ast.Attribute):
        return func.attr
    return func.id if isinstance(func, ast.Name) else ""


def is_import_by_name(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and called(node) in ("__import__", "import_module") and bool(node.args)


def value_classes(tree: ast.Module) -> frozenset[str]:
    """Classes of the module whose instances are immutable: named tuples, enumerations, frozen dataclasses."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = {called(base) for base in node.bases}
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if bases & {"NamedTuple", "Enum"} or any("frozen=True" in text for text in decorators):
                found.add(node.name)
    return frozenset(found)


def is_constant(node: ast.expr, classes: frozenset[str] = frozenset()) -> bool:
    """Whether an expression at module level makes no mutable object."""
    if isinstance(node, MUTABLE):
        return False
    if isinstance(node, ast.Call):
        if called(node) in WRAPPERS or ast.unparse(node.func) in PURE_CALLS:
            return True
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        return called(node) in CONSTANT_MAKERS | classes and all(is_constant(arg, classes) for arg in arguments)
    if isinstance(node, ast.Subscript):
        return is_constant(node.value, classes)  # an alias such as Callable[[int], str] has lists in its slice
    if isinstance(node, ast.Lambda):
        return True
    children = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
    return all(is_constant(child, classes) for child in children)


def module_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements run at import, also those inside ``if``, ``try``, ``with`` and loops."""
    for node in body:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from module_statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from module_statements(handler.body)


def state_faults(tree: ast.Module) -> Iterator[str]:
    classes = value_classes(tree)
    for node in module_statements(tree.body):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets, value = [node.target], node.value
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if called(node.value) != "register":  # of a singledispatch function
                yield f"line {node.lineno}: calls {ast.unparse(node.value.func)} at import"
            continue
        else:
            continue
        text = ", ".join(map(ast.unparse, targets))
        if text == "__all__" or value is None:
            continue
        if any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets):
            yield f"line {node.lineno}: assigns to {text} at import"
        elif isinstance(node, ast.AugAssign) or not is_constant(value, classes):
            yield f"line {node.lineno}: {text} is module-level mutable state"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"


def form_faults(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    lines = len(source.splitlines())
    if lines > MAX_LINES:
        yield f"has {lines} lines, more than {MAX_LINES}"
    if not ast.get_docstring(tree):
        yield "has no docstring"


def faults(name: str, source: str, known: frozenset[str]) -> list[str]:
    tree = ast.parse(source)
    found = [*import_faults(name, tree, known), *state_faults(tree), *form_faults(name, source, tree)]
    return [f"{name}: {fault}" for fault in found]


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
    assert not faults(name, MODULES[name], frozenset(MODULES))


@pytest.mark.parametrize("folder", sorted(name.split(".")[0] for name in MODULES if name.endswith(".__init__")))
def test_folder_says_what_it_may_import_and_what_to_read_first(folder):
    text = " ".join((ast.get_docstring(ast.parse(MODULES[f"{folder}.__init__"])) or "").split())
    assert re.search("[Ii]mport", text), text
    first = re.search(r"Read ``(\w+)\.py`` first", text)
    assert first is not None and f"{folder}.{first[1]}" in MODULES, text


# Code lines by folder, as ``code_lines.py`` counts; number of modules; words of docs. Numbers only ever fall.
BUDGETS = {
    "pyro_bpq": 15286,
    "modules": 120,
    "top": 243,
    "compiled/": 1171,
    "critics/": 782,
    "diagnostics/": 570,
    "estimators/": 1424,
    "graph/": 683,
    "objectives/": 1769,
    "plan/": 965,
    "record/": 3643,
    "reruns/": 1110,
    "rollout/": 492,
    "step/": 1297,
    "svi/": 277,
    "testing/": 860,
    "tests": 20561,
    "benchmarks": 3000,
    "words of docs": 15955,
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


def test_package_was_found():
    assert {"__init__", "errors", "graph.scg", "objectives.elbo"} <= set(MODULES)


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
        ("critics", "from pyro_bpq.estimators import Pathwise", "imports estimators.__init__"),
        ("estimators.pathwise", "from ..record import config_bpq", "imports record"),
        ("estimators.pathwise", "import pyro.distributions as dist", "imports pyro"),
        ("critics.learner", "def f():\n    from pyro.infer import ELBO", "imports pyro"),
        ("critics.learner", "f = lambda: __import__('pyro')", "imports pyro"),
        ("critics.learner", "f = lambda x: importlib.import_module(x)", "name is computed"),
        ("estimators.pathwise", "f = lambda x: importlib.import_module(f'{__name__}.{x}')", "name is computed"),
        ("estimators.__init__", "f = lambda x: importlib.import_module(f'{x}')", "name is computed"),
        ("__init__", "import pyro", "imports pyro"),
        ("graph.network", "import torch", "imports torch into"),
        ("unheard_of", "", "has no place"),
        ("critics", "CACHE = {}", "CACHE is module-level mutable state"),
        ("critics", "CACHE: dict[str, int] = dict()", "CACHE is module-level mutable state"),
        ("critics", "if True:\n    CACHE = []", "CACHE is module-level mutable state"),
        ("critics", "CACHE = ((), [])", "CACHE is module-level mutable state"),
        ("critics", "class C: pass\nONE = C()", "ONE is module-level mutable state"),
        ("critics", "class C(NamedTuple):\n    x: list\nONE = C([])", "ONE is module-level mutable state"),
        ("critics", "ZERO = torch.zeros(())", "ZERO is module-level mutable state"),
        ("critics", "N = 0\nN += 1", "N is module-level mutable state"),
        ("critics", "N = 0\ndef f():\n    global N", "global N"),
        ("critics", "torch.set_default_dtype(torch.float64)", "calls torch.set_default_dtype at import"),
        ("objectives.elbo", "import pyro\npyro.infer.ELBO = None", "assigns to pyro.infer.ELBO at import"),
        ("critics", "\n" * MAX_LINES, "more than 500"),
    ],
)
def test_planted_fault_is_found(name, text, fault):
    found = faults(name, PREAMBLE + text, KNOWN | {name})
    assert len(found) == 1
    assert fault in found[0]


def test_missing_docstring_is_found():
    assert faults("critics", "N = 0", KNOWN) == ["critics: has no docstring"]


@pytest.mark.parametrize(
    "text",
    [
        "from pyro_bpq.graph.scg import StochasticNode\nfrom pyro_bpq import errors\nimport torch",
        "Rule = Callable[[int], str]\nForm = Literal['a', 'b']\nNumber = int | float",
        "T = typing.TypeVar('T')\nLOG = logging.getLogger(__name__)\nINF = -float('inf')",
        "NAMES = ('a', 'b')\nKEYS = frozenset(['a'])\nTABLE = MappingProxyType({'a': 1})",
        "HALF = 0.5 * math.log(2 * math.pi)\nINDEX = re.compile('[0-9]+')\nneg = lambda x: [x]",
        "@singledispatch\ndef f(x): return []\n@f.register\ndef _(x: int): return {}\nf.register(str, len)",
        "class C(NamedTuple):\n    x: int = 0\nZERO = C()",
        "@dataclass(frozen=True)\nclass C:\n    x: int = 0\nONE = C(1)",
        "__all__: list[str] = []",
        "class C:\n    names: ClassVar = ('a',)\n    def f(self): self.x = []",
    ],
)
def test_sound_module_passes(text):
    assert not faults("critics", PREAMBLE + text, KNOWN)


@pytest.mark.parametrize(
    ("sources", "cycle"),
    [
        ({"elbo": "from pyro_bpq.svi import f", "svi": "from . import elbo"}, {"elbo", "svi"}),
        ({"elbo": "from pyro_bpq.svi import f", "svi": "import torch"}, set()),
        (
            {
                "estimators.__init__": "from pyro_bpq.estimators.pathwise import Pathwise",
                "estimators.pathwise": "from pyro_bpq.estimators import Estimator",
            },
            {"estimators.__init__", "estimators.pathwise"},
        ),
    ],
)
def test_import_cycle_is_found(sources, cycle):
    assert set(import_cycle(sources)) == cycle
