"""The source files of the package as syntax trees, for the tests of this folder."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "quire"
# For subprocesses: this tree's package, whatever else is installed.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    """Return path within the package -> syntax tree."""
    return {
        name: ast.parse(text_of(name), name)
        for name in (str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py")))
    }


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a module."""
    return tuple(ast.walk(tree))


def functions(tree: ast.Module) -> Iterator[Function]:
    """Yield every function, methods and nested ones too."""
    return (node for node in nodes(tree) if isinstance(node, Function))


@cache
def text_of(name: str) -> str:
    """Return the source of a module, given its path within the package."""
    return (PACKAGE / name).read_text("utf-8")


def public_definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """Yield (dotted name, node) of classes and functions that a reader may use: no underscore, not nested."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node, f"{prefix}{node.name}.")


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules that importing this module imports; those for type checkers only do not count."""
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
        elif isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                stack.extend(node.body)
            stack.extend(node.orelse)
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            stack.extend(ast.iter_child_nodes(node))
