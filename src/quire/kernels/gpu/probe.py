"""Which NVIDIA GPUs there are and how much memory they have, read from NVIDIA's libraries through ctypes.

Neither PyTorch, which would take a second to import, nor a CUDA context is needed. The driver (libcuda) knows the
devices and their memory, NVML how much of it all processes together have allocated.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError
from quire.kernels.memory import DeviceMemory, available_memory

_NAME_BYTES = 256
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
MIN_CAPABILITY = (8, 0)  # Ampere: bfloat16 and what Triton's kernels count on


@dataclass(frozen=True, slots=True)
class GPU:
    """A device as the driver numbers it: its name, bytes of memory, and compute capability such as (9, 0)."""

    index: int
    name: str
    total_memory: int
    capability: tuple[int, int]


def _library(name: str) -> Any:
    """Return a shared library, or None where it is not installed."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def has_driver() -> bool:
    """Whether there is a driver; asking it what GPUs it has may take it a second."""
    return _library("libcuda.so.1") is not None


def find_gpus() -> list[GPU]:
    """Return the GPUs that this process may use; none where there is no driver, or it does not answer."""
    cuda = _library("libcuda.so.1")
    count = ctypes.c_int()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for index in range(count.value):
        device, memory = ctypes.c_int(), ctypes.c_size_t()
        name = ctypes.create_string_buffer(_NAME_BYTES)
        numbers = (ctypes.c_int * 2)()
        failed = cuda.cuDeviceGet(ctypes.byref(device), index)
        failed = failed or cuda.cuDeviceGetName(name, _NAME_BYTES, device)
        failed = failed or cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        for place, attribute in enumerate((_MAJOR, _MINOR)):
            where = ctypes.byref(numbers, place * ctypes.sizeof(ctypes.c_int))
            failed = failed or cuda.cuDeviceGetAttribute(where, attribute, device)
        if not failed:
            found.append(GPU(index, name.value.decode(errors="replace"), memory.value, (numbers[0], numbers[1])))
    return found


def missing_packages() -> list[str]:
    """Return which of the packages that a GPU needs are not installed."""
    return [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]


def torch_for_cpus() -> str | None:
    """Return PyTorch's version if it is a build for CPUs, from its metadata; PyTorch is not imported."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    return version if version.endswith("+cpu") else None


def usable_gpu() -> GPU | None:
    """Return the GPU that `--device auto` takes: the first, if it is new enough and the packages are installed."""
    if missing_packages() or torch_for_cpus() is not None:
        return None
    gpus = find_gpus()
    return gpus[0] if gpus and gpus[0].capability >= MIN_CAPABILITY else None


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU, on tensors in host memory: Triton's own switch, for tests."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def check_gpu() -> None:
    """Raise `ConfigError` saying what is missing if `--device cuda` cannot work here."""
    missing = missing_packages()
    if missing:
        raise ConfigError(
            f"device 'cuda' needs {' and '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed: "
            "pip install 'quire[gpu]'",
            param="device",
        )
    gpus = find_gpus()
    if interpreted():
        return
    if gpus and gpus[0].capability >= MIN_CAPABILITY:
        version = torch_for_cpus()
        if version is not None:
            raise ConfigError(
                f"device 'cuda' needs a PyTorch that knows GPUs; installed is {version}, which was built for CPUs",
                param="device",
            )
        return
    if not gpus:
        raise ConfigError("device 'cuda' needs an NVIDIA GPU and its driver; none was found", param="device")
    major, minor = gpus[0].capability
    raise ConfigError(
        f"device 'cuda' needs a GPU of compute capability 8.0 or newer; {gpus[0].name} has {major}.{minor}",
        param="device",
    )


_UUID_BYTES = 16


class _NVMLMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_memory() -> DeviceMemory:
    """Return the total memory of the first GPU that this process may use, and the bytes in use.

    Where NVML does not answer, nothing counts as taken; once a model is loaded, PyTorch says it exactly. Where Triton's
    interpreter stands in for a GPU, its memory is the host's.

    Raises:
        ConfigError: there is no GPU that can be used.
    """
    if not missing_packages() and interpreted():
        return DeviceMemory(available_memory())
    gpus = find_gpus()
    if not gpus:
        check_gpu()
    used = used_memory()
    return DeviceMemory(gpus[0].total_memory, 0 if used is None else used)


def used_memory() -> int | None:
    """Return the bytes that all processes have taken of the first GPU; None if NVML does not answer."""
    uuid = _uuid()
    if uuid is None:
        return None
    nvml = _library("libnvidia-ml.so.1")
    if nvml is None or nvml.nvmlInit_v2():
        return None
    try:
        handle, memory = ctypes.c_void_p(), _NVMLMemory()
        # By UUID, since NVML also counts GPUs hidden from this process.
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return None
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        return int(memory.used)
    finally:
        nvml.nvmlShutdown()


def _uuid() -> str | None:
    """Return the UUID of the first GPU as NVML spells it."""
    cuda = _library("libcuda.so.1")
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * _UUID_BYTES)()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if cuda.cuDeviceGetUuid(ctypes.byref(raw), device):
        return None
    text = bytes(raw).hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
