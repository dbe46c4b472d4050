"""Choose a backend by name and import only what it needs. The names are those of `--device`."""

from __future__ import annotations

import importlib.util
from typing import Any

from quire.errors import ConfigError
from quire.kernels.backend import QUANTIZATIONS, Backend

DEVICES = ("cpu", "reference")
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8")


def create_backend(
    device: str,
    dtype: str,
    kv_dtype: str,
    num_threads: int | None = None,
    quantization: str | None = None,
    simd_level: str | None = None,
    *,
    batch_invariant: bool = False,
) -> Backend:
    """Return the backend called `device`, holding weights in `dtype` and the KV cache in `kv_dtype`.

    Args:
        num_threads: how many CPU threads kernels may use; None is all of this process's cores.
        quantization: one of QUANTIZATIONS, what weights are turned into while they are packed; None leaves them.
        simd_level: of the CPU kernels, see `kernels/cpu/levels.py`; the first choice holds for the whole process.
        batch_invariant: whether a row's bits must be the same in any batch. The CPU kernels always see to that.

    Raises:
        ConfigError: an unknown device, dtype or quantization, a level that this process cannot have, or a backend
            whose extra is not installed.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"quantization is {quantization!r}; allowed: {', '.join(QUANTIZATIONS)}", param="quantization"
        )
    for field, value, allowed in (("dtype", dtype, DTYPES), ("kv_dtype", kv_dtype, KV_DTYPES)):
        if value not in allowed:
            raise ConfigError(f"{field} is {value!r}; allowed: {', '.join(allowed)}", param=field)
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"num_threads is {num_threads}; it must be at least 1", param="num_threads")
    quantized: dict[str, Any] = {} if quantization is None else {"quantization": quantization}
    if device == "cpu":
        from quire.kernels.cpu.levels import settle

        settle(simd_level)  # before the first kernel is imported
        from quire.kernels.cpu.backend import CPUBackend

        return CPUBackend(dtype, kv_dtype, num_threads, **quantized)
    if simd_level not in (None, "auto"):
        raise ConfigError(
            f"simd_level: {simd_level!r} is not allowed; device {device!r} has no levels", param="simd_level"
        )
    if device == "reference":
        if importlib.util.find_spec("torch") is None:
            raise ConfigError(
                "device 'reference' needs PyTorch, which is not installed: pip install 'quire[reference]'",
                param="device",
            )
        from quire.kernels.reference.backend import ReferenceBackend
        from quire.kernels.reference.invariant import InvariantReferenceBackend

        kind = InvariantReferenceBackend if batch_invariant else ReferenceBackend
        return kind(dtype, kv_dtype, num_threads=num_threads, **quantized)
    raise ConfigError(f"device is {device!r}; allowed: {', '.join(DEVICES)}", param="device")
