"""`quire collect-env`: versions, hardware and limits of this machine, for a bug report.

Versions come from package metadata, without importing numpy or torch. It prints no keys, no paths of the user's, and
only environment variables that change how the kernels run.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.flags import Command, flags_of
from quire.options import option
from quire.version import __version__

EXTRAS = ("torch", "triton", "transformers", "safetensors", "opentelemetry-sdk", "uvloop", "httptools")
VARIABLES = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "NUMBA_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE")
COMPILERS = ("cc", "gcc", "clang")
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectEnvOptions:
    """Output"""

    json: bool = option(False, "Print JSON.")


def run(values: dict[str, Any]) -> int:
    """Print and return 0."""
    found = collect()
    if values.get("json"):
        print(json.dumps(found, indent=2))
        return 0
    for part, values in found.items():
        print(part)
        for name, value in values.items():
            print(f"  {name:<24} {value}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Return name -> value of everything, by section."""
    return {
        "quire": {"version": __version__, "installed from source": str(not _in_site_packages()).lower()},
        "system": {
            "platform": platform.platform(),
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "libc": " ".join(platform.libc_ver()) or "unknown",
            "container": _container(),
        },
        "processor": _processor(),
        "gpus": _gpus(),
        "memory": _memory(),
        "limits": _limits(),
        "packages": _packages(),
        "variables": {name: os.environ.get(name, "not set") for name in VARIABLES},
    }


def _in_site_packages() -> bool:
    return "site-packages" in Path(__file__).parts


def _container() -> str:
    if Path("/.dockerenv").exists():
        return "docker"
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else "none known"


def _processor() -> dict[str, Any]:
    from quire.kernels.cpu import levels

    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", info.read_text("utf-8", "replace"), re.MULTILINE)
        name = match.group(1) if match else name
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": name,
        "machine": platform.machine(),
        "cores": f"{usable} of {os.cpu_count()} usable",
        "instructions of kernels": ", ".join(levels.available_levels()),
    }


def _gpus() -> dict[str, Any]:
    from quire.kernels.gpu.probe import find_gpus

    found: dict[str, Any] = {
        str(
            gpu.index
        ): f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        for gpu in find_gpus()
    }
    # Triton compiles the launcher of a kernel with one of these.
    compilers = [name for name in COMPILERS if shutil.which(name)]
    return {**(found or {"found": "none"}), "C compilers": ", ".join(compilers) or "none"}


def _memory() -> dict[str, Any]:
    from quire.kernels.memory import available_memory

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {"total": f"{total / GIB:.1f} GiB", "available to a process": f"{available_memory() / GIB:.1f} GiB"}


def _limits() -> dict[str, Any]:
    if sys.platform == "win32":
        return {}
    import resource

    def text(kind: int) -> str:
        soft = resource.getrlimit(kind)[0]
        return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)

    return {
        "open files": text(resource.RLIMIT_NOFILE),
        "processes": text(resource.RLIMIT_NPROC),
        "address space": text(resource.RLIMIT_AS),
        "locked memory": text(resource.RLIMIT_MEMLOCK),
    }


def _packages() -> dict[str, str]:
    required = [re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0] for text in _requirements()]
    return {name: _version(name) for name in dict.fromkeys([*required, *EXTRAS])}


def _requirements() -> list[str]:
    try:
        texts = importlib.metadata.requires("quire") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [text for text in texts if "extra ==" not in text]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


COMMAND = Command(
    run=run,
    flags=flags_of((CollectEnvOptions,)),
    description="Print versions, processor, memory and limits, to go with a bug report.",
    arguments=(),
    config_file=False,
)
