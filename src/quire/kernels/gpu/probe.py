"""Which NVIDIA GPUs there are, asked of the driver itself: no PyTorch is imported, which would take a second."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from dataclasses import dataclass

from quire.errors import ConfigError

_NAME_BYTES = 256
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
LEAST_CAPABILITY = (8, 0)  # Ampere: bfloat16 and what Triton's kernels count on


@dataclass(frozen=True, slots=True)
class GPU:
    """A device as the driver numbers it: its name, bytes of memory, and compute capability such as (9, 0)."""

    index: int
    name: str
    total_memory: int
    capability: tuple[int, int]


def has_driver() -> bool:
    """Whether there is a driver; asking it what GPUs it has may take it a second."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def find_gpus() -> list[GPU]:
    """Return the GPUs that this process may use; none where there is no driver, or it does not answer."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
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
    """Return PyTorch's version if it is one that knows no GPUs, as its name for a version says; it is not imported."""
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
    return gpus[0] if gpus and gpus[0].capability >= LEAST_CAPABILITY else None


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
    if gpus and gpus[0].capability >= LEAST_CAPABILITY:
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
