"""CUDA graphs without CUDA: launches are noted on a tape, and run again without the Python that led to them.

`TapeCapture` takes the place of `kernels.gpu.graphs.CUDAGraphCapture` on tensors in host memory. As on a device,
nothing is computed while a graph is captured, memory of other tensors included; what would wait for a device, or copy
from the host, is an error; what was written into a graph by mistake stays there. Beyond that the tape is stricter than
a device: before a graph runs, all memory that its pool gave out holds NaN, which whoever reads what was not computed
anew will see, and memory of others that was freed is an error rather than somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from triton.runtime.interpreter import GridExecutor

aten = torch.ops.aten
ODD = -(1 << 24)  # integers that nobody has computed
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
_launch = GridExecutor.__call__


class NotCapturable(RuntimeError):
    """What torch raises on a device if something is called that a graph cannot hold."""


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotCapturable(f"{name} in a graph")

    return refuse


class _Elsewhere:
    """A tensor that the graph does not own: where it lies, as long as it does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._view = tensor.storage_offset(), tensor.size(), tensor.stride()

    def get(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise AssertionError("a graph reads memory that was freed")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class TapeGraph(TorchDispatchMode):
    """One graph: a list of calls with their very tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], None]] = []
        self._stack = ExitStack()
        self._open = False
        self.owned: dict[int, torch.Tensor] = {}  # by storage; the whole of it

    # Capture

    def capture_begin(self) -> None:
        """Note from now on."""
        self._open = True
        enter = self._stack.enter_context
        for name in ("tolist", "numpy", "cpu", "item", "new_tensor", "__array__"):
            enter(mock.patch.object(torch.Tensor, name, _refuse(name)))
        for name in ("from_numpy", "tensor", "as_tensor"):
            enter(mock.patch.object(torch, name, _refuse(name)))
        enter(
            mock.patch.object(GridExecutor, "__call__", lambda launch, *args, **kw: self._add_launch(launch, args, kw))
        )
        enter(self)

    def capture_end(self) -> None:
        """Compute again from now on."""
        self._stack.close()
        self._open = False

    def _note(self, tensors: Any) -> Any:
        """Return arguments as they are kept."""
        return tree_map(lambda x: self._kept(x) if isinstance(x, torch.Tensor) else x, tensors)

    def _kept(self, tensor: torch.Tensor) -> Any:
        mine = tensor.untyped_storage()._cdata in self.owned
        return tensor if mine else _Elsewhere(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WAITS:
            raise NotCapturable(f"{func} in a graph")
        if func in INDEXING and any(at is not None and at.dtype == torch.bool for at in args[1]):
            raise NotCapturable("indexing with a mask in a graph")
        written = [at for at in func._schema.arguments if at.alias_info is not None and at.alias_info.is_write]
        if written:
            self._add(func, args, kwargs, None)
            named = dict(zip([at.name for at in func._schema.arguments], args, strict=False)) | kwargs
            result = tuple(named[at.name] for at in written)
            return result[0] if len(result) == 1 else result
        outputs = func(*args, **kwargs)
        if any(at.alias_info is not None for at in func._schema.returns):
            return outputs  # views: the same memory
        known = {at.untyped_storage()._cdata for at in _tensors((args, kwargs))}
        fresh = [at for at in _tensors(outputs) if at.untyped_storage()._cdata not in known]
        with torch._C._DisableTorchDispatch():
            for tensor in fresh:
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                self.owned[tensor.untyped_storage()._cdata] = whole
                whole.zero_()  # nothing was computed
        if func not in (aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default):
            self._add(func, args, kwargs, outputs)
        return outputs

    def _add(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        noted = self._note((args, kwargs))

        def again() -> None:
            args, kwargs = _given(noted)
            results = func(*args, **kwargs)
            if outputs is not None:
                for old, new in zip(_tensors(outputs), _tensors(results), strict=True):
                    old.copy_(new)

        self._calls.append(again)

    def _add_launch(self, executor: Any, args: Any, kwargs: Any) -> None:
        noted = self._note((args, kwargs))

        def again() -> None:
            args, kwargs = _given(noted)
            _launch(executor, *args, **kwargs)

        self._calls.append(again)

    # Afterwards

    def spoil(self) -> None:
        """Make all memory of the graph useless, as if others had used it."""
        for whole in self.owned.values():
            whole.fill_(float("nan") if whole.is_floating_point() else True if whole.dtype == torch.bool else ODD)

    def replay(self) -> None:
        """Run what was noted."""
        self.spoil()
        for call in self._calls:
            call()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _given(tree: Any) -> Any:
    return tree_map(lambda x: x.get() if isinstance(x, _Elsewhere) else x, tree)


class TapeCapture:
    """See the module docstring. `made` are the graphs, those of one step together."""

    def __init__(self) -> None:
        self.made: list[list[TapeGraph]] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Nothing runs at the same time here."""
        yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """See `CUDAGraphCapture.capturing`."""
        self.made.append([])
        yield

    def begin(self) -> TapeGraph:
        """See `CUDAGraphCapture.begin`."""
        graph = _Pooled(self, self.made[-1])
        graph.capture_begin()
        return graph

    def end(self, graph: TapeGraph) -> None:
        """See `CUDAGraphCapture.end`."""
        graph.capture_end()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `CUDAGraphCapture.alias`; the tape keeps all memory."""
        return tensor.detach()


class _Pooled(TapeGraph):
    """One whose first run in a step spoils what other steps have left in the pool."""

    def __init__(self, capture: TapeCapture, step: list[TapeGraph]) -> None:
        super().__init__()
        self._capture, self._step = capture, step
        step.append(self)

    def replay(self) -> None:
        """See `TapeGraph.replay`."""
        if self is self._step[0]:
            for others in self._capture.made:
                for graph in others:
                    graph.spoil()
        super().replay()
