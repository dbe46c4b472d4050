"""Imports every module of the package as the first of it, each in a process of its own; prints those that fail.

Other packages are imported before the processes are forked: only Quire's own modules are in question, and so each
takes a fraction of a second.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
import traceback
from importlib.util import find_spec

OTHERS = ["numpy", "numba", "torch", "triton", "transformers", "fastapi", "uvicorn", "httpx", "jinja2", "tokenizers"]
OTHERS += ["llguidance", "msgspec", "prometheus_client", "yaml", "rich", "matplotlib", "huggingface_hub"]


def module_names() -> list[str]:
    """Return the names of all modules, without importing any."""
    spec = find_spec("quire")
    assert spec is not None and spec.submodule_search_locations is not None
    found, folders = ["quire"], [("quire", [*spec.submodule_search_locations])]
    while folders:
        parent, paths = folders.pop()
        for item in pkgutil.iter_modules(paths, f"{parent}."):
            found.append(item.name)
            if item.ispkg:
                folders.append((item.name, [f"{path}/{item.name.rpartition('.')[2]}" for path in paths]))
    return [name for name in found if not name.endswith("__main__")]  # importing that runs the command


def start(name: str) -> int:
    """Fork a process that imports a module; return its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        importlib.import_module(name)
    except BaseException:
        print(f"--- {name}", traceback.format_exc(), sep="\n", flush=True)
        os._exit(1)
    os._exit(0)


def main() -> int:
    for name in OTHERS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not any(name.partition(".")[0] == "quire" for name in sys.modules)
    running: set[int] = set()
    failed = 0
    names = module_names()
    for name in names:
        if len(running) == (os.cpu_count() or 1):
            pid, status = os.wait()
            running.remove(pid)
            failed += status != 0
        running.add(start(name))
    failed += sum(os.wait()[1] != 0 for _ in running)
    print(f"{len(names)} modules, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
