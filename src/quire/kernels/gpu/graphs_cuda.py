"""CUDA graphs through torch: on a stream of their own, all in one pool of memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class _Memory:
    """Bytes on a device, as torch takes them in without keeping their owner."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def rebuild(raw: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `raw`, the bytes that `tensor` spans, with its type, sizes and strides."""
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def spanned(tensor: torch.Tensor) -> int:
    """Return how many bytes lie between the first of a tensor's elements and the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()


def end_broken_capture(pool: Any) -> None:
    """Have torch forget a capture that broke off, and its pool.

    Its allocator goes on asking the graph about every piece of memory, and random numbers are refused, as if it were
    still under way.
    """
    device = torch.cuda.current_device()
    with suppress(RuntimeError, AttributeError):  # it knew, or never does
        torch._C._cuda_endAllocateToPool(device, pool)
    with suppress(RuntimeError, AttributeError):
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())


class CudaRecorder:
    """Records on one device. Captures forbid only to its own thread what cannot be captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # that have the pool
        self._broken: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Compute on the stream that captures, after what was launched before, and before what is launched after."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Be ready to capture: on the stream for it, with no garbage collected, which might call the driver.

        A pool ends with its last graph: torch takes no more captures for it then.
        """
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        collects = gc.isenabled()
        gc.disable()
        try:
            with self.aside():
                yield
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()  # one whose capture broke off is not taken again
            self._graphs.clear()
            raise
        finally:
            if collects:
                gc.enable()

    def begin(self) -> torch.cuda.CUDAGraph:
        """See `Recorder.begin`."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.add(graph)
        return graph

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        """See `Recorder.end`; a graph that is none stays, for torch may go on asking it."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._broken.append(graph)
            end_broken_capture(self._pool)
            raise

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Recorder.alias`."""
        nbytes = spanned(tensor)
        if nbytes == 0:
            return tensor
        return rebuild(torch.as_tensor(_Memory(tensor.data_ptr(), nbytes), device=self._device), tensor)

    def taken(self) -> int:
        """Return how many bytes of the device are taken, by whomever."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free
