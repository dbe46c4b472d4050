"""Choose a backend by name and import only what it needs. The names are those of `--device`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError
from quire.kernels.backend import QUANTIZATIONS, Backend

DEVICES = ("cpu", "cuda", "reference")
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8", "fp8")


@dataclass(frozen=True, slots=True)
class GPUOptions:
    """Options of `DeviceConfig` that only GPUs use; `max_graph_tokens` is its `max_cudagraph_capture_size`."""

    enforce_eager: bool = False
    max_graph_tokens: int = 512
    attention_backend: str = "auto"


def create_backend(
    device: str,
    dtype: str,
    kv_dtype: str,
    num_threads: int | None = None,
    quantization: str | None = None,
    simd_level: str | None = None,
    *,
    batch_invariant: bool = False,
    gpu: GPUOptions | None = None,
) -> Backend:
    """Return the backend called `device`, holding weights in `dtype` and the KV cache in `kv_dtype`.

    Args:
        num_threads: how many CPU threads kernels may use; None is all of this process's cores.
        quantization: one of QUANTIZATIONS, what weights are turned into while they are packed; None leaves them.
        simd_level: of the CPU kernels, see `kernels/cpu/levels.py`; the first choice holds for the whole process.
        batch_invariant: whether a row's bits must be the same in any batch. The CPU kernels always see to that.

    Raises:
        ConfigError: an unknown device, dtype or quantization, a level that this process cannot have, no GPU, or a
            backend whose extra is not installed.
    """
    _check(device, dtype, kv_dtype, num_threads, quantization)
    quantized: dict[str, Any] = {} if quantization is None else {"quantization": quantization}
    if device == "cpu":
        from quire.kernels.cpu.levels import select_level

        select_level(simd_level)  # before the first kernel is imported
        from quire.kernels.cpu.backend import CPUBackend

        return CPUBackend(dtype, kv_dtype, num_threads, **quantized)
    if simd_level not in (None, "auto"):
        raise ConfigError(
            f"simd_level: {simd_level!r} is not allowed; device {device!r} has no levels", param="simd_level"
        )
    if device == "cuda":
        return _create_gpu(dtype, kv_dtype, quantized, batch_invariant, gpu or GPUOptions())
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "device 'reference' needs PyTorch, which is not installed: pip install 'quire[reference]'", param="device"
        )
    from quire.kernels.reference.backend import InvariantReferenceBackend, ReferenceBackend

    kind = InvariantReferenceBackend if batch_invariant else ReferenceBackend
    return kind(dtype, kv_dtype, num_threads=num_threads, **quantized)


def _create_gpu(
    dtype: str, kv_dtype: str, quantized: dict[str, Any], batch_invariant: bool, options: GPUOptions
) -> Backend:
    from quire.kernels.gpu.probe import check_gpu, interpreted

    check_gpu()
    import torch

    if not interpreted() and not torch.cuda.is_available():
        raise ConfigError(
            f"device 'cuda': there is a GPU, but PyTorch {torch.__version__} cannot use it; it was built without CUDA, "
            "or for a newer driver",
            param="device",
        )
    from quire.kernels.gpu.backend import GPUBackend

    return GPUBackend(
        dtype,
        kv_dtype,
        "cpu" if interpreted() else "cuda",
        batch_invariant=batch_invariant,
        attention_backend=options.attention_backend,
        enforce_eager=options.enforce_eager,
        max_graph_tokens=options.max_graph_tokens,
        **quantized,
    )


def _check(device: str, dtype: str, kv_dtype: str, num_threads: int | None, quantization: str | None) -> None:
    """Raise `ConfigError` for values that the backend of this name does not support."""
    choices = [("device", device, DEVICES), ("dtype", dtype, DTYPES), ("kv_dtype", kv_dtype, KV_DTYPES)]
    if quantization is not None:
        choices.append(("quantization", quantization, QUANTIZATIONS))
    for field, value, allowed in choices:
        if value not in allowed:
            raise ConfigError(f"{field} is {value!r}; allowed: {', '.join(allowed)}", param=field)
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"num_threads is {num_threads}; it must be at least 1", param="num_threads")
    if device == "cpu" and "fp8" in (quantization, kv_dtype):
        field = "quantization" if quantization == "fp8" else "kv_cache_dtype"
        raise ConfigError(f"{field}: fp8 needs a GPU (--device cuda); the CPU has int8", param=field)
