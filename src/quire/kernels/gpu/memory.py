"""A GPU's memory: how much there is, how much a piece of work takes, giving it back, and blocks kept on the host."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from quire.kernels import memory as host
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.block_move import BlockMover
from quire.kernels.gpu.cache import KVCache
from quire.kernels.gpu.host_blocks import GPUHostBlocks
from quire.kernels.gpu.lanes import AtOnce, CudaLanes
from quire.kernels.gpu.pinned import PinnedPool, cuda_register
from quire.kernels.host_blocks import HostBlocks
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

    def host_blocks(self, caches: Sequence[KVCache], num_blocks: int) -> HostBlocks:
        """See `Backend.host_blocks`, and `host_blocks.py` for how blocks move."""
        mover = BlockMover([side for cache in caches for side in cache.sides()])
        on_gpu = self.device.type == "cuda"
        register, unregister = cuda_register(self.device) if on_gpu else (None, None)
        pool = PinnedPool(num_blocks, mover.row_bytes, register, unregister)
        lanes = CudaLanes(self.device) if on_gpu else AtOnce()
        return GPUHostBlocks(mover, self.from_numpy, lanes, pool, num_blocks, self.device)
