"""What a user reaches says in its docstring what it takes, gives, raises, and where it comes from."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from pyro_bpq import errors

FOLDERS = ("estimators", "diagnostics", "testing", "diagnostics.render")
PACKAGES = ("pyro_bpq", *(f"pyro_bpq.{name}" for name in FOLDERS))
OWN_ERRORS = frozenset(name for name in errors.__all__ if name.endswith("Error"))


def public() -> dict[str, Any]:
    """Classes and functions, by the name that a user imports."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", None) == package]
        for name in getattr(module, "__all__", [name for name in own if not name.startswith("_")]):
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                found.setdefault(id(thing), (f"{package}.{name}", thing))
    return dict(found.values())


PUBLIC = public()


def parameters(thing: Any) -> list[str]:
    """Names of the arguments that a docstring has to explain."""
    if inspect.isclass(thing) and (issubclass(thing, tuple) or getattr(thing, "_is_protocol", False)):
        return []
    return [name for name in inspect.signature(thing).parameters if name != "self"]


def is_explained(name: str, doc: str) -> bool:
    entry = rf"\n\s+(?:\*{{0,2}}\w+, )*\*{{0,2}}{name}(?:, \*{{0,2}}\w+)*: "
    return re.search(entry, doc) is not None


def raised(thing: Any) -> set[str]:
    """Errors of the package that its own body raises; of a class, its construction."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    bodies: list[ast.AST] = [node]
    if isinstance(node, ast.ClassDef):
        makers = ("__init__", "__post_init__", "__new__")
        bodies = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name in makers]
    calls = [x.exc for body in bodies for x in ast.walk(body) if isinstance(x, ast.Raise) and x.exc is not None]
    names = {call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
    return names & OWN_ERRORS


def faults(name: str, thing: Any) -> Iterator[str]:
    """What a docstring lacks."""
    doc = thing.__doc__ or ""
    if not doc.partition("\n\n")[0].rstrip().endswith((".", ":")):
        yield "begins with no sentence"
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return
    refers = re.search(r"options are those of\s+:class:`|see\s+:func:`[^`]+` for the arguments", doc)
    missing = [] if refers else [p for p in parameters(thing) if not is_explained(p, doc)]
    if missing:
        yield f"does not explain {missing}"
    silent = sorted(error for error in raised(thing) if error not in doc)
    if silent:
        yield f"does not say that it raises {silent}"
    if inspect.isfunction(thing) and thing.__annotations__.get("return") not in (None, "None"):
        if not re.search(r"\n\s+(Returns|Yields):\n", doc) and not doc.startswith(("The ", "A ", "Whether ")):
            yield "does not say what it returns"


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_is_whole(name: str) -> None:
    """So is that of an estimator, which tells its source, and of each method of a class."""
    thing = PUBLIC[name]
    found = list(faults(name, thing))
    if hasattr(thing, "is_unbiased") and not name.endswith(".Estimator") and "References:" not in (thing.__doc__ or ""):
        found.append("names no source")
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        own = [method for method, value in vars(thing).items() if inspect.isfunction(value) and method[0] != "_"]
        found += [f"{method} has none" for method in own if not inspect.getdoc(getattr(thing, method))]
    assert not found, f"{name}: {'; '.join(found)}"


@pytest.mark.parametrize("name", PUBLIC)
def test_what_a_user_makes_has_a_repr(name: str) -> None:
    thing = PUBLIC[name]
    if inspect.isclass(thing) and not getattr(thing, "_is_protocol", False):
        assert thing.__repr__ is not object.__repr__, "repr() would show an address"


# The check itself.


def bad(value: int, other: int) -> int:
    """No sentence

    Args:
        value: The number.
    """
    if value < 0:
        raise OptionError("write a positive number")  # noqa: F821
    return 2 * value + other


def test_faults_are_found() -> None:
    found = " ".join(faults("bad", bad))
    for part in ("no sentence", "['other']", "['OptionError']", "returns"):
        assert part in found
