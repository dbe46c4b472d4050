"""Starts child processes that run a module of this package and end with the process that started them."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
# Of a terminal, its end, and some service managers: they reach all processes of a group, and the parent handles them.
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.5  # of a child, where the system does not kill it with its parent


def start_module(
    module: str, *arguments: str, on_exit: Callable[[int], None] = lambda code: None, **options: Any
) -> subprocess.Popen[bytes]:
    """Run `main()` of a module in a child process; what it returns is the exit code.

    The child finds this package even if it is not installed, and imports nothing from the current directory, which may
    be a model folder. It ignores `GROUP_SIGNALS` from its beginning. It is reaped as soon as it ends, without `wait`.

    Args:
        arguments: `sys.argv[1:]` of the child.
        on_exit: called with the exit code when it has ended, in another thread. options: of `Popen`.
    """
    started: Future[subprocess.Popen[bytes]] = Future()

    def run() -> None:
        try:
            process = start_module_here(module, *arguments, **options)
        except BaseException as error:  # thread boundary: it is for the caller
            started.set_exception(error)
            return
        started.set_result(process)
        on_exit(process.wait())

    # Linux kills the child when the thread that started it ends, not the process. So that thread waits for the child.
    # It is a daemon, because no child may keep the interpreter from ending.
    threading.Thread(target=run, name=f"{module}-keeper", daemon=True).start()
    return started.result()


def start_module_here(
    module: str, *arguments: str, environment: Mapping[str, str] = os.environ, **options: Any
) -> subprocess.Popen[bytes]:
    """As `start_module`, from a thread that lasts as long as this process; the caller waits for the child."""
    root = str(Path(__file__).resolve().parents[1])
    path = environment.get("PYTHONPATH")
    with_path = dict(environment, PYTHONPATH=root + (os.pathsep + path if path else ""))
    command = [sys.executable, "-P", "-m", "quire.child_process", str(os.getpid()), module, *arguments]
    # The child inherits the mask, so that no signal ends it before it can ignore them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        return subprocess.Popen(command, env=with_path, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def ignore_group_signals() -> None:
    """Ignore `GROUP_SIGNALS`, which were blocked until now."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


def die_with_parent(parent: int) -> None:
    """Kill this process when its parent, whose id is `parent`, has ended, or has ended already.

    On Linux the kernel does that, whatever this process is busy with; elsewhere a thread looks twice a second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(POLL_SECONDS)
            os._exit(1)

        threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    if os.getppid() != parent:  # it ended before this was arranged
        os._exit(1)


def main() -> None:
    """Entry point of all children. It imports little, so that a child is tied to its parent as soon as possible."""
    ignore_group_signals()
    die_with_parent(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]
    sys.exit(importlib.import_module(module).main())


if __name__ == "__main__":
    main()
