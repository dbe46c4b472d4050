"""Puts one-line faults into the package, one at a time, and says which of them the tests of their room catch.

    python tools/faults.py [--seed 0] [--count 300] [--room NAME ...] [--out FILE] [--only N ...] [--contexts FILE]

A fault flips a comparison, swaps `and` and `or`, drops a `not` or a statement, or moves an integer by one. Faults are
drawn evenly over the files' candidate lines with a seed, so that two runs over one tree try the same ones. Each is
tried in a copy of the checkout against the tests of its room, one of which has to fail; a test that hangs fails by
`--timeout`. One line of JSON is written for each fault: its number, file, line, kind, whether it was caught, and by how
many tests it was tried. Compiled kernel bodies are left out: a fault there is a compilation of minutes.

A test that does not run a line cannot see a fault in it. `--contexts FILE` names the data of a run under coverage.py
with contexts (`pytest --cov=quire --cov-context=test`): a fault is then tried only with tests of its room that run its
line, at most `--tests` of them, drawn with the seed; or with all tests of the room where only child processes run it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = ("kernels/cpu", "kernels/gpu", "demo", "train")
# What takes long to import.
PRELOADED = ("torch", "transformers", "numba", "fastapi", "uvicorn", "httpx", "openai")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--timeout", "60", "-W", "ignore::pytest.PytestAssertRewriteWarning")
# Where the tests of a room are, beside tests/ROOM.
TESTS = {
    ".": ["tests/frontend", "tests/sampling"],
    "executor": ["tests/executor", "tests/engine"],
    "models": ["tests/models", "tests/layers"],
    "layers": ["tests/layers", "tests/models"],
    "worker": ["tests/worker", "tests/e2e/test_one_truth.py"],
    "kernels": ["tests/kernels", "--ignore=tests/kernels/gpu"],
}
FLIPS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Fault:
    """One changed statement: where it stands, what was done to it, and the text that takes its place."""

    number: int
    file: str
    line: int
    kind: str
    text: str

    @property
    def room(self) -> str:
        """The top-level folder of the package, "." for the files beside them."""
        return self.file.partition("/")[0] if "/" in self.file else "."


def change(node: ast.AST) -> tuple[str, ast.AST] | None:
    """Return (kind, what takes the place of `node`) for an expression that a fault can change."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in FLIPS:
        return "comparison", ast.Compare(node.left, [FLIPS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BoolOp):
        return "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "not", node.operand
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return "off by one", ast.Constant(node.value + 1)
    return None


class Replacement(ast.NodeTransformer):
    """Changes the node that carries `position`, and keeps what kind of change that was."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.kind = ""

    def visit(self, node: ast.AST) -> ast.AST:
        """See `ast.NodeTransformer`."""
        if getattr(node, "position", None) == self.position:
            found = change(node)
            assert found is not None
            self.kind, node = found
            return node
        return self.generic_visit(node)


def variants(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (kind, source text) of each way to change one expression of `tree`."""
    positions = []
    for position, node in enumerate(ast.walk(tree)):
        node.position = position  # type: ignore[attr-defined]
        if change(node) is not None:
            positions.append(position)
    for position in positions:
        replacement = Replacement(position)
        changed = replacement.visit(copy.deepcopy(tree))
        yield replacement.kind, ast.unparse(changed)


def candidates(path: str, text: str) -> Iterator[Fault]:
    """Yield all faults of one file: in statements, and in conditions, of one line within functions."""
    simple = ast.Assign | ast.AugAssign | ast.Return | ast.Expr
    lines = text.splitlines()
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.If | ast.While) and node.test.lineno == node.test.end_lineno == node.lineno:
                line = lines[node.lineno - 1].strip()
                condition = ast.get_source_segment(text, node.test) or ""
                for kind, changed in variants(node.test):
                    yield Fault(0, path, node.lineno, kind, line.replace(condition, changed, 1))
            if not isinstance(node, simple) or node.lineno != node.end_lineno:
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # a docstring
            if isinstance(node, ast.AugAssign | ast.Expr):
                yield Fault(0, path, node.lineno, "dropped statement", "pass")
            for kind, changed in variants(node):
                yield Fault(0, path, node.lineno, kind, changed)


def draw(seed: int, count: int, rooms: list[str]) -> list[Fault]:
    """Return `count` faults over all rooms, or those of `rooms`, numbered."""
    package = ROOT / "src" / "quire"
    found: list[Fault] = []
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package))
        if not name.startswith(SKIPPED):
            found.extend(candidates(name, path.read_text("utf-8")))
    found = [fault for fault in dict.fromkeys(found) if not rooms or fault.room in rooms]
    chosen = random.Random(seed).sample(found, min(count, len(found)))
    return [Fault(number, *list(asdict(fault).values())[1:]) for number, fault in enumerate(chosen)]


def tests_of(fault: Fault, contexts: CoverageData | None, most: int, seed: int) -> list[str]:
    """Return the tests to try `fault` with: arguments of pytest; none where no test of the room runs its line."""
    room = TESTS.get(fault.room, [f"tests/{fault.room}"])
    if contexts is None:
        return room
    names = [name for name in contexts.measured_files() if name.endswith(f"/src/quire/{fault.file}")]
    by_line = contexts.contexts_by_lineno(names[0]) if names else {}
    found = by_line.get(fault.line, [])
    tests = sorted({test for context in found if (test := context.partition("|")[0]).startswith(tuple(room))})
    if not tests and "" in found:
        return room
    return random.Random(seed).sample(tests, min(most, len(tests)))


def is_caught(copied: Path, fault: Fault, tests: list[str], seconds: float) -> bool:
    """Put the fault into the copy of the checkout, run `tests`, and take it out again."""
    path = copied / "src" / "quire" / fault.file
    original = path.read_text("utf-8")
    lines = original.splitlines(keepends=True)
    line = lines[fault.line - 1]
    indent = line[: len(line) - len(line.lstrip())]
    lines[fault.line - 1] = f"{indent}{fault.text}\n"
    path.write_text("".join(lines), "utf-8")
    try:
        return not passes(copied, tests, seconds)
    finally:
        path.write_text(original, "utf-8")


def passes(copied: Path, tests: list[str], seconds: float) -> bool:
    """Run tests of the copy in a child of this process, which has imported what takes long; nothing of the package."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            os.chdir(copied)
            os.environ["PYTHONPATH"] = os.pathsep.join([str(copied / "src"), str(copied)])
            sys.path[:0] = [str(copied / "src"), str(copied)]
            code = pytest.main([*OPTIONS, *tests])
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if ended[0] == 0:
        os.waitpid(child, 0)
        return True  # they were too many, and none has failed
    return ended[1] == 0


def main() -> None:
    """Try the faults and print how many were caught."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--room", action="append", default=[], help="only faults of this room; may be repeated")
    parser.add_argument("--only", type=int, action="append", default=[], help="only this number; may be repeated")
    parser.add_argument("--seconds", type=float, default=600.0, help="longest run of a room's tests")
    parser.add_argument("--contexts", type=Path, help="data file of coverage.py with a context for each test")
    parser.add_argument("--tests", type=int, default=40, help="with --contexts: most tests that try one fault")
    parser.add_argument("--out", type=Path, help="file for the lines of JSON; default: standard output")
    parser.add_argument("--list", action="store_true", help="list the faults and try none")
    arguments = parser.parse_args()
    faults = draw(arguments.seed, arguments.count, arguments.room)
    faults = [fault for fault in faults if not arguments.only or fault.number in arguments.only]
    if arguments.list:
        print("\n".join(json.dumps(asdict(fault)) for fault in faults))
        return
    contexts = None
    if arguments.contexts is not None:
        from coverage import CoverageData  # an extra of pytest-cov, needed only here

        contexts = CoverageData(str(arguments.contexts))
        contexts.read()
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    caught, checked = 0, False
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "tree"
        shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".git", ".venv*", ".mypy_cache"))
        for fault in faults:
            tests = tests_of(fault, contexts, arguments.tests, arguments.seed)
            if tests and not checked:
                checked = True
                if not passes(copied, tests, arguments.seconds):
                    sys.exit("these tests fail without a fault: " + " ".join(tests))
            found = bool(tests) and is_caught(copied, fault, tests, arguments.seconds)
            caught += found
            line = json.dumps({**asdict(fault), "caught": found, "tests": len(tests)})
            if arguments.out is None:
                print(line, flush=True)
            else:
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    print(f"{caught} of {len(faults)} faults were caught", file=sys.stderr)


if __name__ == "__main__":
    main()
