"""Choose a backend by name and import only what it needs. The names are those of `--device`."""

from __future__ import annotations

import importlib.util

from quire.errors import ConfigError
from quire.kernels.backend import Backend

DEVICES = ("cpu", "reference")
DTYPES = ("float32", "bfloat16", "float16")


def create_backend(device: str, dtype: str, kv_dtype: str, num_threads: int | None = None) -> Backend:
    """Return the backend called `device`, holding weights in `dtype` and the KV cache in `kv_dtype`.

    `num_threads` is how many CPU threads kernels may use; None is all of this process's cores.
    Raises ConfigError for an unknown device or dtype, and where the backend's extra is not installed.
    """
    for field, value in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        if value not in DTYPES:
            raise ConfigError(f"{field} is {value!r}; allowed: {', '.join(DTYPES)}", param=field)
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"num_threads is {num_threads}; it must be at least 1", param="num_threads")
    if device == "cpu":
        from quire.kernels.cpu.backend import CPUBackend

        return CPUBackend(dtype, kv_dtype, num_threads)
    if device == "reference":
        if importlib.util.find_spec("torch") is None:
            raise ConfigError(
                "device 'reference' needs PyTorch, which is not installed: pip install 'quire[reference]'",
                param="device",
            )
        from quire.kernels.reference.backend import ReferenceBackend

        return ReferenceBackend(dtype, kv_dtype, num_threads=num_threads)
    raise ConfigError(f"device is {device!r}; allowed: {', '.join(DEVICES)}", param="device")
