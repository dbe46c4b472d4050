"""How kernels are compiled and cached on disk.

Numba keys a kernel's cache by the file it stands in, not by the files of the parts it calls, and it writes its index
before the code. So three rules hold here. A kernel has one signature only: whoever wins a race between two processes
writes the same thing. Kernels are called with contiguous, writable arrays and Python numbers. And `refresh_cache`
drops all compiled kernels when any file of this folder has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

STAMP = "quire-kernels.stamp"

part = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorates what kernels are made of. No fastmath anywhere: the order of every sum is fixed."""


def kernel(function: Callable[..., Any]) -> Any:
    """Decorate a function that Python calls: parallel, without the GIL, cached where a folder can be written."""
    options = {"parallel": True, "nogil": True, "error_model": "numpy"}
    try:
        return njit(**options, cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache folder is writable
        return njit(**options)(function)


@part
def share(count, chunk, chunks):
    """Return first and last + 1 of the `count` things that fall to number `chunk` of `chunks`."""
    return count * chunk // chunks, count * (chunk + 1) // chunks


def source_stamp() -> str:
    """Return a word that changes when a file of this folder does."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def cache_folder(any_kernel: Any) -> Path | None:
    """Return where `any_kernel` is cached, or None where it is not."""
    path = any_kernel.stats.cache_path
    return None if path is None else Path(path)


def is_cached(any_kernel: Any) -> bool:
    """Say whether this kernel lies compiled on disk, from the source files as they are now."""
    folder = cache_folder(any_kernel)
    if folder is None:
        return False
    name = f"{Path(any_kernel.py_func.__code__.co_filename).stem}.{any_kernel.py_func.__qualname__}-*.nbi"
    return _read(folder / STAMP) == source_stamp() and any(folder.glob(name))


def refresh_cache(any_kernel: Any) -> None:
    """Drop compiled kernels that were made from other source files than today's; call before the first kernel."""
    folder = cache_folder(any_kernel)
    stamp = source_stamp()
    if folder is None or _read(folder / STAMP) == stamp:
        return
    modules = [path.stem for path in Path(__file__).parent.glob("*.py")]
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for module in modules:
            for suffix in ("nbi", "nbc"):
                for path in folder.glob(f"{module}.*.{suffix}"):
                    path.unlink(missing_ok=True)
        temporary = folder / f"{STAMP}.{os.getpid()}"
        temporary.write_text(stamp)
        temporary.replace(folder / STAMP)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
