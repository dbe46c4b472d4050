"""Tokens that stay on the device from one step to the next, and when the device came to which of its work."""

from __future__ import annotations

import time
from typing import Any

import torch

from quire.kernels.gpu.arrays import ArrayOps

MILLISECONDS = 1e-3


class FlyingOps(ArrayOps):
    """Tokens that stay on the device, and events. A handful of launches a step, outside of recordings."""

    def take_tokens(self, target: torch.Tensor, source: torch.Tensor, places: torch.Tensor) -> None:
        torch.index_select(source, 0, places, out=target)

    def keep_tokens(
        self, target: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor, finite: torch.Tensor
    ) -> torch.Tensor:
        kept = torch.where(finite, tokens, -1)
        target.index_copy_(0, places, kept.clamp(min=0))
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
