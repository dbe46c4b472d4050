"""How further processes of ours are started, by module name, and how they end with the one that started them."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.5


def start_module(
    module: str, *arguments: str, on_exit: Callable[[int], None] = lambda code: None, **options: Any
) -> subprocess.Popen[bytes]:
    """Have `main()` of a module run in a process that ends with this one; what it returns is the exit code.

    The package is found if not installed, too. The child is reaped as soon as it ends; nobody has to wait for it.

    Args:
        arguments: `sys.argv[1:]` of the child.
        on_exit: called when it has ended, in another thread, with the exit code. options: of `Popen`.
    """
    root = str(Path(__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    environment = dict(os.environ, PYTHONPATH=root + (os.pathsep + path if path else ""))
    started: Future[subprocess.Popen[bytes]] = Future()

    def keep() -> None:
        try:
            command = [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]
            process = subprocess.Popen(command, env=environment, **options)
        except BaseException as error:  # thread boundary: it is for the caller
            started.set_exception(error)
            return
        started.set_result(process)
        on_exit(process.wait())

    # To Linux the parent is the thread that starts a child, not its process: with that thread the child would die. So
    # it is one that lasts exactly as long as the child. A daemon, for no child may keep the interpreter from ending.
    threading.Thread(target=keep, name=f"{module}-keeper", daemon=True).start()
    return started.result()


def die_with_parent(parent: int) -> None:
    """End this process, by force, when the process `parent` that started it is gone, or is gone already.

    Linux does it, whatever this process is busy with; elsewhere a thread looks twice a second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:

        def look() -> None:
            while os.getppid() == parent:
                time.sleep(_LOOK_SECONDS)
            os._exit(1)

        threading.Thread(target=look, name="parent-watch", daemon=True).start()
    if os.getppid() != parent:  # it ended before it could be arranged
        os._exit(1)


def main() -> None:
    """Entry point of all children; this module imports little, so that what ties them to their parent comes soon."""
    die_with_parent(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]
    sys.exit(importlib.import_module(module).main())


if __name__ == "__main__":
    main()
