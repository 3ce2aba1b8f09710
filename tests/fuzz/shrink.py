"""Cuts a program that fails down to a small one that fails in the same way."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from fuzz.oracle import Verdict, check
from fuzz.programs import Program, from_source

__all__ = ["shrunk"]


def shrunk(program: Program, config: str, rounds: int = 6) -> tuple[Program, Verdict]:
    """The smallest program that greedy deletions lead to.

    Args:
        program: A program that fails.
        config: The configuration.
        rounds: Largest number of passes over its text.

    Returns:
        A program that fails alike, and how.
    """
    verdict = check(program, config)
    for _ in range(rounds):
        before = program.source
        program, verdict = _pass(program, verdict, config)
        if program.source == before:
            break
    return program, verdict


def _pass(program: Program, verdict: Verdict, config: str) -> tuple[Program, Verdict]:
    position = 0
    while True:
        variant = next(_variants(program.source, position), None)
        if variant is None:
            return program, verdict
        found = _fails(variant, program.seed, config, verdict)
        if found is None:
            position += 1
        else:
            program, verdict = found


def _fails(source: str, seed: int, config: str, like: Verdict) -> tuple[Program, Verdict] | None:
    try:
        program = from_source(source, seed)
        if not program.exact:
            return None
        verdict = check(program, config)
    except Exception:
        return None
    if verdict.kind != like.kind or (like.kind == "failed" and verdict.error < 1e-6):
        return None
    if like.kind == "crash" and verdict.detail.split(":")[0] != like.detail.split(":")[0]:
        return None
    return program, verdict


def _variants(source: str, start: int) -> Iterator[str]:
    """Texts that lack something, from the ``start``-th on."""
    count = 0
    while True:
        tree = ast.parse(source)
        if not _Cut(start + count).cut(tree):
            return
        text = ast.unparse(ast.fix_missing_locations(tree))
        count += 1
        if text != source:
            yield text


class _Cut(ast.NodeTransformer):
    """Makes the change of one number, in the order of the text."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.is_done = False

    def cut(self, tree: ast.AST) -> bool:
        self.visit(tree)
        return self.is_done

    def _is_turn(self) -> bool:
        if self.is_done:
            return False
        self.left -= 1
        self.is_done = self.left < 0
        return self.is_done

    def visit(self, node: ast.AST) -> ast.AST:
        for field in ("body", "orelse"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                for i, statement in enumerate(statements):
                    if self._is_turn():
                        rest: list[ast.stmt] = [ast.Pass()] if len(statements) == 1 else []
                        statements[i : i + 1] = rest
                        return node
                    inner = getattr(statement, "body", None)
                    if isinstance(statement, (ast.With, ast.If, ast.For)) and inner and self._is_turn():
                        statements[i : i + 1] = copy.deepcopy(inner)
                        return node
        for choice in _smaller(node):
            if self._is_turn():
                return choice
        return self.generic_visit(node) if not self.is_done else node


def _smaller(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        if node.func.attr == "as_tensor":
            return [node.args[0]]
        if node.func.attr == "param" and len(node.args) > 1 and not node.keywords:
            return [node.args[1]]
    if isinstance(node, ast.With) and len(node.items) > 1:
        return [ast.With(node.items[:i] + node.items[i + 1 :], node.body) for i in range(len(node.items))]
    return []
