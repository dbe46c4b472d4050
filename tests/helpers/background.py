"""Programs that run in the background of a test until it stops them, in processes of their own, and then report."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def in_background(module: str, *arguments: str) -> Iterator[list[Any]]:
    """Run a module's `main` beside the block. Afterwards the list has one item: what it reported."""
    found: list[Any] = []
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield found
        finally:
            reported, _ = process.communicate()
        assert process.returncode == 0, f"{module} failed"
        found.append(json.loads(reported))


def stop_requested(seconds: float) -> bool:
    """Wait for so long in such a program, or until it is to stop; return whether it is."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def report(value: Any) -> None:
    """Report from such a program, once, at its end."""
    json.dump(value, sys.stdout)


def change_priority(by: int) -> None:
    """Let other processes go first, or go before them if that is allowed."""
    with contextlib.suppress(OSError):
        os.nice(by)
