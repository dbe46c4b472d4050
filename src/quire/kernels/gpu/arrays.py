"""What all ops of the GPU backend share: the device, its types, and arrays to and from the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from quire.kernels.gpu.probe import interpreted
from quire.kernels.gpu.tuned_configs import TunedConfigs

MILLISECONDS = 1e-3
MAX_PINNED = 1 << 23  # bytes of an array that is copied through pinned memory; larger ones are part of no step
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ArrayOps:
    """Arrays. Activations, and weights that are not quantized, are of `act`; kernels add up in float32.

    Attributes:
        device: where arrays are. act: see above. tuned_configs: those stored for the chip, see `tuned_configs.py`.
        num_sms: its multiprocessors. capability: its compute capability.
        batch_invariant: whether a row's bits must not depend on the batch it is in.
        attention_backend, enforce_eager, max_cudagraph_capture_size: options of `DeviceConfig`.
    """

    name = "cuda"

    def __init__(
        self,
        dtype: str = "bfloat16",
        kv_dtype: str = "bfloat16",
        device: str = "cuda",
        quantization: str | None = None,
        *,
        batch_invariant: bool = False,
        attention_backend: str = "auto",
        enforce_eager: bool = False,
        max_cudagraph_capture_size: int = 512,
    ) -> None:
        self.dtype, self.kv_dtype, self.quantization = dtype, kv_dtype, quantization
        self.device = torch.device(device)
        self.act = TORCH_DTYPES[dtype]
        self.batch_invariant, self.attention_backend = batch_invariant, attention_backend
        self.enforce_eager, self.max_cudagraph_capture_size = enforce_eager, max_cudagraph_capture_size
        self._pdl: tuple[TunedConfigs, bool] | None = None
        chip = "Triton's interpreter"
        self.num_sms, self.capability = 4, (9, 0)
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            chip, self.num_sms = properties.name, properties.multi_processor_count
            self.capability = (properties.major, properties.minor)
        self.tuned_configs = TunedConfigs.of_chip(chip)
        self.arithmetic = f"{chip} torch {torch.__version__}, invariant {batch_invariant}"

    @property
    def pdl(self) -> bool:
        """Whether kernels of decode steps use programmatic dependent launch, see `pdl.py`."""
        if self._pdl is None or self._pdl[0] is not self.tuned_configs:
            on = self.tuned_configs.get("pdl", "all", {"on": 0})["on"] == 1
            self._pdl = self.tuned_configs, on and self.capability >= (9, 0) and not interpreted()
        return self._pdl[1]

    def from_numpy(self, array: np.ndarray) -> torch.Tensor:
        """The copy is of what `array` holds now, and nothing waits for it.

        PyTorch keeps pinned memory for reuse, and reuses none that a copy still reads.
        """
        host = torch.from_numpy(np.require(array, requirements=["C", "A", "W"]))
        if self.device.type != "cuda" or array.nbytes > MAX_PINNED:
            return host.to(self.device)
        return host.pin_memory().to(self.device, non_blocking=True)

    def to_numpy(self, array: torch.Tensor) -> np.ndarray:
        """Waits for the device."""
        return (array.float() if array.is_floating_point() else array).detach().cpu().numpy()

    def fetch(self, array: torch.Tensor) -> Callable[[], np.ndarray]:
        """The copy to pinned memory is ordered after the work submitted to the current stream."""
        if self.device.type != "cuda":
            copy = self.to_numpy(array.clone())
            return lambda: copy
        values = (array.float() if array.is_floating_point() else array).detach()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> np.ndarray:
            copied.synchronize()
            return host.numpy()

        return wait

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def assign(self, target: torch.Tensor, values: np.ndarray) -> None:
        target.copy_(self.from_numpy(values))

    def concat(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(arrays), dim=-1)

    # Tokens that stay on the device from one step to the next, and events

    def gather_tokens(self, target: torch.Tensor, source: torch.Tensor, indices: torch.Tensor) -> None:
        torch.index_select(source, 0, indices, out=target)

    def store_tokens(
        self, target: torch.Tensor, indices: torch.Tensor, tokens: torch.Tensor, finite: torch.Tensor
    ) -> torch.Tensor:
        kept = torch.where(finite, tokens, -1)
        target.index_copy_(0, indices, kept.clamp(min=0))
        return kept

    def record_event(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_seconds(self, earlier: Any, later: Any) -> float:
        if self.device.type != "cuda":
            return float(later - earlier)
        later.synchronize()
        return float(earlier.elapsed_time(later)) * MILLISECONDS
