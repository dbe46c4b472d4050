"""Whether the kernels are right on this GPU: the tests of the kernels and of whole models, and memory checkers.

The tests are those that run in Triton's interpreter elsewhere, here on the device, with those that need one. They are
run by pytest, or, where a package of the tests is missing, not at all, which the table says.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from report import Table

ROOT = Path(__file__).resolve().parents[2]
GROUPS = (
    ("kernels", ["tests/kernels/gpu"], "not slow or slow or gpu"),
    ("models and engine", ["tests/e2e", "tests/parity", "tests/worker"], "gpu"),
)
SECONDS = 420
SANITIZED = ("tests/kernels/gpu/test_rows.py", "tests/kernels/gpu/test_attention.py")
SANITIZER_SECONDS = 100


def check(*, small: bool = False, only: str = "") -> list[Table]:
    """Return what pytest and compute-sanitizer said."""
    table = Table("Correctness", ("what", "result", "last line"))
    for name, paths, marks in GROUPS:
        if only not in name:
            continue
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x" if small else "--maxfail=50"]
        command += ["-m", "not slow and not gpu" if small else marks, *paths]
        table.add(name, *_pytest(command, SECONDS))
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    for path in SANITIZED if not small and not only else ():
        if tool is None:
            table.add(f"compute-sanitizer {path}", "not installed", "")
            continue
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", path]
        command = [tool, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9", *pytest]
        table.add(f"compute-sanitizer {path}", *_pytest(command, SANITIZER_SECONDS))
    return [table]


def _pytest(command: list[str], limit: float) -> tuple[str, str]:
    """Return how it ended, and the last line that tells something."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as expired:
        said = expired.stdout.decode(errors="replace") if isinstance(expired.stdout, bytes) else expired.stdout or ""
        return f"stopped after {limit:.0f} s", _last(said)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    return "passed" if done.returncode == 0 else f"exit code {done.returncode}", _last(done.stdout)


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if re.search(r"passed|failed|error|ERROR SUMMARY", line)]
    return lines[-1].replace("|", "/") if lines else ""
