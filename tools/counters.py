"""Counts what the source tree consists of: lines by room, the largest pieces, repetition, files that a change touches.

    python tools/counters.py [ROOT] [--json]

reads the package at ROOT/src/quire (by default of this checkout) as text and syntax trees; nothing of it is imported.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

LONG_FUNCTION = 40  # lines
DUPLICATE_LINES = 6  # consecutive equal lines of code that count as one duplicate block
# A word that stands only where the thing itself is handled, so that the files with it are those a new one touches.
WITNESSES = {
    "sampling option (min_p)": r"\bmin_p\b",
    "sampling option (logprob_token_ids)": r"\blogprob_token_ids\b",
    "model (Olmo2)": r"\b(Olmo2ForCausalLM|olmo2|OLMO2)\b",
    "scheduling policy (lpm)": r"\blpm\b",
    "endpoint (/v1/rerank)": r"/rerank\b",
    "option (max_overtake_seconds)": r"\bmax_overtake_seconds\b",
}


def read(root: Path) -> dict[str, str]:
    """Return path within the package -> text of each Python file below `root`/src/quire."""
    package = root / "src" / "quire"
    return {str(path.relative_to(package)): path.read_text("utf-8") for path in sorted(package.rglob("*.py"))}


def rooms(files: dict[str, str]) -> dict[str, dict[str, int]]:
    """Return files and lines of each top-level folder of the package; files beside them are one room, "."."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"files": 0, "lines": 0})
    for path, text in files.items():
        room = found[path.partition("/")[0] if "/" in path else "."]
        room["files"] += 1
        room["lines"] += text.count("\n")
    return dict(sorted(found.items()))


def definitions(files: dict[str, str]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Return (lines, "file: name") of all functions, and of all classes, longest first."""
    functions, classes = [], []
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                item = ((node.end_lineno or node.lineno) - node.lineno + 1, f"{path}: {node.name}")
                (classes if isinstance(node, ast.ClassDef) else functions).append(item)
    return sorted(functions, reverse=True), sorted(classes, reverse=True)


def duplicate_blocks(files: dict[str, str]) -> int:
    """Count maximal runs of at least `DUPLICATE_LINES` lines of code that stand in two places; imports do not count."""
    lines_of: dict[str, list[str]] = {}
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path, text in files.items():
        lines = [" ".join(line.split()) for line in text.splitlines()]
        code = [line for line in lines if re.search(r"\w", line) and not re.match(r"#|from \S+ import|import ", line)]
        lines_of[path] = code
        for start in range(len(code) - DUPLICATE_LINES + 1):
            places[tuple(code[start : start + DUPLICATE_LINES])].append((path, start))
    runs = 0
    for found in places.values():
        (first, start), *others = found
        for path, other in others:
            before = start > 0 and other > 0 and lines_of[first][start - 1] == lines_of[path][other - 1]
            runs += not before  # a run is counted where it begins
    return runs


def touched(files: dict[str, str]) -> dict[str, int]:
    """Return, for one example of each kind of addition, how many files of the package know of it."""
    return {
        kind: sum(re.search(pattern, text) is not None for text in files.values())
        for kind, pattern in WITNESSES.items()
    }


def count(root: Path) -> dict[str, Any]:
    """Return all counters of the tree at `root`."""
    files = read(root)
    lengths = Counter({path: text.count("\n") for path, text in files.items()})
    functions, classes = definitions(files)
    return {
        "lines": lengths.total(),
        "files": len(files),
        "median_file": statistics.median(lengths.values()),
        "files_up_to_75_lines": sum(1 < length <= 75 for length in lengths.values()),
        "largest_files": lengths.most_common(5),
        "largest_functions": functions[:5],
        "largest_classes": classes[:5],
        "functions": len(functions),
        "functions_over_40_lines": sum(length > LONG_FUNCTION for length, _ in functions),
        "fmt_skip": sum(text.count("# fmt: skip") for text in files.values()),
        "comment_lines": sum(line.lstrip().startswith("#") for text in files.values() for line in text.splitlines()),
        "duplicate_blocks": duplicate_blocks(files),
        "files_touched_by_a_new": touched(files),
        "rooms": rooms(files),
    }


def main() -> None:
    """Print the counters of a tree."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    counters = count(arguments.root)
    if arguments.json:
        print(json.dumps(counters, indent=1))
        return
    for name, value in counters.items():
        if isinstance(value, dict):
            print(name.replace("_", " "))
            for key, item in value.items():
                print(f"  {key}: {item}")
        else:
            print(f"{name.replace('_', ' ')}: {value}")


if __name__ == "__main__":
    main()
