"""Choose a backend by name and import only what it needs. The names are those of `--device`."""

from __future__ import annotations

import importlib.util
from typing import Any

from quire.errors import ConfigError
from quire.kernels.backend import Backend


def create_backend(
    device: str,
    dtype: str,
    kv_dtype: str,
    num_threads: int | None = None,
    quantization: str | None = None,
    simd_level: str | None = None,
    *,
    batch_invariant: bool = False,
    **gpu_options: Any,
) -> Backend:
    """Return the backend called `device`, holding weights in `dtype` and the KV cache in `kv_dtype`.

    Names are checked where options are read (`config.py`).

    Args:
        num_threads: how many CPU threads kernels may use; None is all of this process's cores.
        quantization: one of QUANTIZATIONS, what weights are turned into while they are packed; None leaves them.
        simd_level: of the CPU kernels, see `kernels/cpu/levels.py`; the first choice holds for the whole process.
        batch_invariant: whether a row's bits must be the same in any batch. The CPU kernels always see to that.
        gpu_options: options of `DeviceConfig` that only GPUs have, by name.

    Raises:
        ConfigError: a dtype or level that the device lacks, no GPU, or a backend whose extra is not installed.
    """
    if device == "cpu":
        if "fp8" in (quantization, kv_dtype):
            field = "quantization" if quantization == "fp8" else "kv_cache_dtype"
            raise ConfigError(f"{field}: fp8 needs a GPU (--device cuda); the CPU has int8", param=field)
        from quire.kernels.cpu.levels import select_level

        select_level(simd_level)  # before the first kernel is imported
        from quire.kernels.cpu.backend import CPUBackend

        return CPUBackend(dtype, kv_dtype, num_threads, quantization)
    if simd_level not in (None, "auto"):
        raise ConfigError(
            f"simd_level: {simd_level!r} is not allowed; device {device!r} has no levels", param="simd_level"
        )
    if device == "cuda":
        return _create_gpu(dtype, kv_dtype, quantization=quantization, batch_invariant=batch_invariant, **gpu_options)
    assert device == "reference"
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "device 'reference' needs PyTorch, which is not installed: pip install 'quire[reference]'", param="device"
        )
    from quire.kernels.reference.backend import InvariantReferenceBackend, ReferenceBackend

    kind = InvariantReferenceBackend if batch_invariant else ReferenceBackend
    return kind(dtype, kv_dtype, num_threads=num_threads, quantization=quantization)


def _create_gpu(dtype: str, kv_dtype: str, **options: Any) -> Backend:
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

    return GPUBackend(dtype, kv_dtype, "cpu" if interpreted() else "cuda", **options)
