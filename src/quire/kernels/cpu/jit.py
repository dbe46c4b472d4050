"""How kernels are compiled and cached on disk.

An `op` is a compiled function with one fixed C signature, so that a program is a list of addresses and arguments that
compiled code can walk without Python (team.py). Functions that ops call are decorated with `jit`.

Numba keys a function's cache by the file it stands in, not by the files of the functions it calls. So `refresh_cache`
drops all of it when any file of this folder changes.

Numba writes the index of a function's cache before its code. So everything cached has one signature only: processes
that compile a function at the same time write the same index and the same file of code. Their code differs in nothing
but the symbols below, and a file of code has all that its function calls, so any of them may be the last to write it.

Numba names machine code by the function's name and a number that counts functions in a process. So two functions that
were made in one place, by a function that returns them, may have the same symbol if two processes have compiled them,
and where both are loaded from the cache one would be called in the place of the other. So `jit` appends a random word
of this process to a function's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from numba import cfunc, njit, types
from numba.core.caching import FunctionCache

from quire.kernels.cpu.pointers import FLOAT_FORMATS, FORMATS

STAMP = "quire-kernels.stamp"
OP_SIGNATURE = types.void(types.CPointer(types.int64), types.int64, types.int64, types.int64)

PROCESS_SUFFIX = secrets.token_hex(8)
OP_NAMES: dict[int, str] = {}
"""Names of the ops that this process has loaded, by address."""

_JIT_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def jit(function: Callable[..., Any]) -> Any:
    """Decorate a function that ops call; changes its `__qualname__`, of which Numba makes its symbol, in place.

    No fastmath anywhere: the order of every sum is fixed.
    """
    function.__qualname__ += f"_{PROCESS_SUFFIX}"
    return njit(**_JIT_OPTIONS)(function)


inline_jit = njit(**_JIT_OPTIONS, inline="always")
"""Decorates a large function that is called in one place. It becomes part of its caller before LLVM compiles that.

A `jit` function is compiled to machine code by itself, together with all that it calls, and then once more in each of
its callers: a chain of four large ones takes four times as long as one, for the same code in the end.
"""


class Op:
    """A function (args, first, last, scratch) that does items first .. last - 1 of one instruction.

    `args` points to int64 values: addresses (`pointers.f32_ptr(args[0])` and so on), sizes, and the bits of float64
    values (`pointers.float64_from_bits`). Items are independent of one another and may be done in any order by any
    thread. `scratch` is the address of SCRATCH_BYTES of the thread's own, uninitialized.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.name = function.__qualname__
        self.__doc__ = function.__doc__

    @cached_property
    def _compiled(self) -> Any:
        options = {"error_model": "numpy"}
        try:
            return cfunc(OP_SIGNATURE, cache=True, **options)(self.function)
        except RuntimeError:  # neither the package's folder nor the user's cache folder is writable
            return cfunc(OP_SIGNATURE, **options)(self.function)

    @property
    def is_loaded(self) -> bool:
        """Whether this process has compiled or loaded it."""
        return "_compiled" in self.__dict__

    @cached_property
    def address(self) -> int:
        """Address of the compiled function; compiles it, or loads it from disk, at the first call."""
        address = int(self._compiled.address)
        OP_NAMES[address] = self.name
        return address

    def is_cached(self) -> bool:
        """Say whether it is cached on disk, compiled, from the source files as they are now."""
        folder = cache_folder(self.function)
        if folder is None:
            return False
        stem = Path(self.function.__code__.co_filename).stem
        return _read(folder / STAMP) == source_stamp() and any(folder.glob(f"{stem}.{self.name}-*.nbi"))


def op(function: Callable[..., None]) -> Op:
    """Decorate a function with the signature that `Op` describes; it is compiled when its address is first needed."""
    return Op(function)


def op_of(name: str, body: Any, *constant: Any) -> Op:
    """Return the op `name` that calls a `jit` function: body(args, first, last, scratch), with `constant` before them.

    A constant is something that Numba knows while it compiles, such as one of pointers.py's functions. The op has
    globals of its own and no closure: Numba caches no function whose closure holds another compiled one.
    """
    template = _call_with if constant else _call
    place = body.py_func.__code__
    code = template.__code__.replace(co_name=name, co_filename=place.co_filename, co_firstlineno=place.co_firstlineno)
    function = FunctionType(code, {"BODY": body, "CONSTANT": constant[0] if constant else None}, name)
    function.__qualname__, function.__module__, function.__doc__ = name, body.py_func.__module__, body.__doc__
    return Op(function)


def ops_by_dtype(name: str, body: Any, formats: Iterable[str] = FLOAT_FORMATS) -> dict[np.dtype, Op]:
    """Return `name`_float32 and so on by numpy dtype: body(pointer to that format's elements, args, ...)."""
    found = [(format, *FORMATS[format]) for format in formats]
    return {np.dtype(dtype): op_of(f"{name}_{format}", body, pointer) for format, dtype, pointer in found}


def _call(args, first, last, scratch):  # type: ignore[no-untyped-def]
    BODY(args, first, last, scratch)  # type: ignore[name-defined]  # noqa: F821


def _call_with(args, first, last, scratch):  # type: ignore[no-untyped-def]
    BODY(CONSTANT, args, first, last, scratch)  # type: ignore[name-defined]  # noqa: F821


def entry(function: Callable[..., Any]) -> Any:
    """Decorate a function of integers that Python calls: without the GIL, cached where a folder can be written."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # see `Op`
        return njit(**options)(function)


@jit
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


def cache_folder(function: Callable[..., Any]) -> Path | None:
    """Return where `function` is cached, or None where nothing can be."""
    try:
        return Path(FunctionCache(function).cache_path)
    except RuntimeError:
        return None


def refresh_cache() -> None:
    """Drop compiled functions that were made from other source files than today's; call before the first one."""
    folder = cache_folder(source_stamp)
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
