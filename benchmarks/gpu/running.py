"""Processes with a time limit, which end together with all that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 5.0  # seconds in which what a stopped process has printed must be there


@dataclass(frozen=True, slots=True)
class Done:
    """How a process ended: its exit code, None if it was stopped; what it printed, errors included."""

    code: int | None
    text: str


def run_limited(
    command: Sequence[str],
    seconds: float,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    shown: bool = False,
) -> Done:
    """Run a command for so many seconds at most.

    shown: it prints for itself, nothing is kept, and it has a session of its own: all that it has started ends with it,
        and does not go on with the device. What runs within such a one must have none.
    """
    pipe = None if shown else subprocess.PIPE
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=None if env is None else dict(env),
        stdout=pipe,
        stderr=None if shown else subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=shown,
    )
    code: int | None
    try:
        text, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        _end(process, shown)
        try:
            text, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:  # a child of it holds the pipe
            text = None
        code = None
    except BaseException:  # whoever ends this process means that one, too
        _end(process, shown)
        raise
    return Done(code, text or "")


def _end(process: subprocess.Popen[str], whole: bool) -> None:
    """End a process, or the whole of its session."""
    if whole:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
