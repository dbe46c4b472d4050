"""SIMD levels: which instructions kernels are compiled for, and so which variants of them there are.

Numba compiles all of a process for one CPU, by default this one with all its features ("auto"). `select_level` makes it
another, lesser one; that must happen before the first kernel module is imported, so nothing here imports one. What a
level offers is read off the features it names (`simd.has_feature`). Numba keeps what it compiled for one CPU apart from
what it compiled for another, on disk too.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass

import llvmlite.binding as llvm
import numba
from numba.core.registry import cpu_target

from quire.errors import ConfigError

AUTO = "auto"
X86 = ("x86_64", "amd64")
ARM = ("aarch64", "arm64")
SSE4 = ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16")
AVX2 = (*SSE4, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
FIRST_KERNEL_MODULE = "quire.kernels.cpu.simd"  # reads off what there is, once


@dataclass(frozen=True, slots=True)
class Level:
    """A CPU as LLVM knows it: its name and all features that kernels may ask for."""

    cpu: str
    features: tuple[str, ...]
    machines: tuple[str, ...] = X86

    @property
    def flags(self) -> str:
        """The features as LLVM and Numba spell them."""
        return ",".join(f"+{name}" for name in self.features)


# Best first. x86-64-v3 and -v4 are the levels of the x86-64 psABI.
LEVELS = {
    "avx512-bf16-vnni": Level("x86-64-v4", (*AVX512, "avx512bf16", "avx512vnni")),
    "avx512": Level("x86-64-v4", AVX512),
    "avx2": Level("x86-64-v3", AVX2),
    "neon": Level("generic", ("neon",), ARM),
}
BASE = {machine: Level("x86-64", ()) for machine in X86}
GENERIC = "generic"


def level_of(name: str) -> Level:
    """Return a level by name; "generic" is the least that this kind of machine has."""
    return BASE.get(platform.machine().lower(), Level("generic", ())) if name == GENERIC else LEVELS[name]


def available_levels() -> tuple[str, ...]:
    """Return the names of the levels that this CPU has, best first."""
    features = llvm.get_host_cpu_features()
    machine = platform.machine().lower()
    found = [
        name
        for name, level in LEVELS.items()
        if machine in level.machines and all(features.get(feature, False) for feature in level.features)
    ]
    return (*found, GENERIC)


def current_level() -> str:
    """Return the level that this process compiles for, "auto" for the CPU as it is.

    If Numba's own environment variables say something else, it is the name of the CPU they give.
    """
    name, features = numba.config.CPU_NAME, numba.config.CPU_FEATURES
    if name is None and features is None:
        return AUTO
    for level in (*LEVELS, GENERIC):
        if (name, features) == (level_of(level).cpu, level_of(level).flags):
            return level
    return str(name or "the CPU of NUMBA_CPU_FEATURES")


def select_level(level: str | None) -> str:
    """Make this process compile for `level` and return the one it compiles for.

    None and "auto" leave it as it is: what an earlier call chose, or else all that this CPU has.

    Raises:
        ConfigError: this CPU lacks the level, or the process has begun to compile for another one.
    """
    current = current_level()
    if level in (None, AUTO, current):
        return current
    allowed = available_levels()
    if level not in allowed:
        raise ConfigError(
            f"simd_level: {level!r} is not allowed; on this CPU it must be one of {', '.join((AUTO, *allowed))}",
            param="simd_level",
        )
    if _is_selected() or current != AUTO:
        raise ConfigError(
            f"simd_level: {level!r} is not allowed; this process compiles for {current!r} already, so it must be "
            f"{' or '.join(dict.fromkeys((AUTO, current)))}, or be chosen in a new process",
            param="simd_level",
        )
    chosen = level_of(level)
    numba.config.CPU_NAME, numba.config.CPU_FEATURES = chosen.cpu, chosen.flags
    return level


def _is_selected() -> bool:
    """Say whether Numba has asked what CPU it compiles for, or a kernel module has."""
    return FIRST_KERNEL_MODULE in sys.modules or "_toplevel_target_context" in vars(cpu_target)
