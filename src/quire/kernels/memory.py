"""How much memory this process can still allocate: the kernel's estimate, capped by control groups.

Reads files under /proc and /sys on Linux and falls back to `sysconf` elsewhere. Nothing here allocates;
`release_memory` returns free memory to the system. A GPU's memory is queried in `gpu/probe.py` and `gpu/memory.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device before its KV cache is allocated, in bytes.

    Attributes:
        total: the bytes of which `gpu_memory_utilization` is a share: free memory on a host, all memory on a GPU.
        used: the part of `total` that is not available: weights, libraries, memory for graphs, other processes.
        step: the most that a step takes in addition, if that was measured; None if it is computed from shapes.
    """

    total: int
    used: int = 0
    step: int | None = None

    @property
    def free(self) -> int:
        """Bytes that are not used."""
        return max(0, self.total - self.used)


@contextlib.contextmanager
def as_memory_error() -> Iterator[None]:
    """Raise `MemoryError` in the place of PyTorch's out-of-memory error."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which need not be installed
            raise
        raise MemoryError(str(error)) from error


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping.

    `root` is where /proc and /sys are found. The smallest of MemAvailable and what each control group above this
    process leaves under its limit (version 1 or 2); reclaimable page cache counts as free.
    """
    candidates = list(_cgroup_headroom(root))
    system = _mem_available(root)
    if system is not None:
        candidates.append(system)
    if not candidates:
        candidates.append(_sysconf_memory())
    return max(0, min(candidates))


def resident_memory(root: Path = Path("/")) -> int:
    """Return the bytes of this process that are in memory; 0 on systems other than Linux."""
    try:
        return int((root / "proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def release_memory() -> None:
    """Return memory to the system that this process does not use: garbage, and free pages that malloc keeps."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others have none, and keep little
        if trim is not None:
            trim(0)


def _mem_available(root: Path) -> int | None:
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _sysconf_memory() -> int:
    """Return the free memory by POSIX `sysconf` where it is known (Linux), else half of all memory (macOS)."""
    page = os.sysconf("SC_PAGE_SIZE")
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return page * os.sysconf("SC_AVPHYS_PAGES")
    return page * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_headroom(root: Path) -> Iterator[int]:
    """Yield limit - usage for each control group of this process that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may name a group of the host that is not mounted here: the mount itself counts.
        for group in (*_groups(PurePosixPath(path)), PurePosixPath(".")):
            headroom = _headroom(mount / group, *names)
            if headroom is not None:
                yield headroom


def _groups(path: PurePosixPath) -> list[PurePosixPath]:
    """Return the group and its parents, relative to the mount point; the root group itself is left out."""
    relative = PurePosixPath(*[part for part in path.parts if part not in ("/", "..")])
    return [group for group in (relative, *relative.parents) if group != PurePosixPath(".")]


def _headroom(folder: Path, limit_name: str, usage_name: str, cache_key: str) -> int | None:
    try:
        limit = int((folder / limit_name).read_text())  # "max" is no number: no limit
        usage = int((folder / usage_name).read_text())
    except (OSError, ValueError):
        return None
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        reclaimable = int(stat.get(cache_key, 0))
    except (OSError, ValueError):
        reclaimable = 0
    return limit - max(0, usage - reclaimable)
