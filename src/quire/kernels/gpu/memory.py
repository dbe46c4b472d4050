"""A GPU's memory: how much there is, how much a piece of work takes, and giving it back."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from quire.kernels import memory as host
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.memory import DeviceMemory


class MemoryOps(ArrayOps):
    """Memory of the device; where Triton's interpreter stands in for one, the host's."""

    def available_memory(self) -> int:
        """What the driver has free, and what PyTorch keeps for later."""
        if self.device.type != "cuda":
            return host.available_memory()
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(torch.cuda.mem_get_info(self.device)[0]) + kept

    def used_memory(self) -> int:
        """What PyTorch holds, in use or kept for later; graphs compute in it as well."""
        if self.device.type != "cuda":
            return host.resident_memory()
        return torch.cuda.memory_reserved(self.device)

    def release_memory(self) -> None:
        """Waits for the device."""
        if self.device.type != "cuda":
            host.release_memory()
            return
        gc.collect()  # what a cycle still holds cannot be given back
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        host.release_memory()

    def measure(self, work: Callable[[], object]) -> DeviceMemory | None:
        """See `Backend.measure`.

        Of PyTorch's memory counts what it has taken from the driver, whole segments with their gaps; of all other
        memory (CUDA's context, libraries, kernels, other processes) what the driver says once `work` has loaded all.
        """
        if self.device.type != "cuda":
            return None
        self.release_memory()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_reserved(self.device)
        work()
        torch.cuda.synchronize(self.device)
        step = torch.cuda.max_memory_reserved(self.device) - before
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        self.release_memory()
        return DeviceMemory(int(total), before + int(others), step)
