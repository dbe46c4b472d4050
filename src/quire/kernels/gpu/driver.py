"""What NVIDIA's libraries say of a GPU's memory, asked through ctypes: neither PyTorch nor a context is needed.

The driver (libcuda) knows how much there is, and NVML how much all processes together have taken.
"""

from __future__ import annotations

import ctypes
from typing import Any

from quire.errors import ConfigError
from quire.kernels.gpu.probe import check_gpu, find_gpus, interpreted, missing_packages
from quire.kernels.memory import DeviceMemory, available_memory

_UUID_BYTES = 16


class _NVMLMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_memory(index: int = 0) -> DeviceMemory:
    """Return what GPU `index`, as this process counts them, has, and what of it is taken before anything is loaded.

    Where NVML does not answer, nothing counts as taken; once a model is loaded, PyTorch says it exactly. Where Triton's
    interpreter stands in for a GPU, its memory is the host's.

    Raises:
        ConfigError: there is no GPU that can be used.
    """
    if not missing_packages() and interpreted():
        return DeviceMemory(available_memory())
    gpus = find_gpus()
    if len(gpus) <= index:
        check_gpu()
        raise ConfigError(f"device: there is no GPU {index}; {len(gpus)} can be used", param="device")
    used = used_memory(index)
    return DeviceMemory(gpus[index].total_memory, 0 if used is None else used)


def used_memory(index: int = 0) -> int | None:
    """Return the bytes that all processes have taken of a GPU; None if NVML does not tell."""
    uuid = _uuid(index)
    if uuid is None:
        return None
    try:
        nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        handle, memory = ctypes.c_void_p(), _NVMLMemory()
        # By its name, for NVML counts GPUs that this process may not use.
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return None
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        return int(memory.used)
    finally:
        nvml.nvmlShutdown()


def _uuid(index: int) -> str | None:
    """Return a GPU's name as NVML spells it."""
    try:
        cuda: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * _UUID_BYTES)()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index):
        return None
    if cuda.cuDeviceGetUuid(ctypes.byref(raw), device):
        return None
    text = bytes(raw).hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
