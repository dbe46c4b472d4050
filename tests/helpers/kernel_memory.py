"""What the kernels of a launch do to memory: which addresses they may use, and who read and wrote what.

Triton's interpreter is made to ask by `kernel_checks.py`, which also says what findings mean.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch.multiprocessing.reductions import StorageWeakRef
from triton.runtime.interpreter import TensorHandle

MAX_SHADOWED = 1 << 30  # bytes of memory of which it is known who touched what; of larger ones, bounds alone
MANY = -1


@dataclass
class Findings:
    """What was found: text, by what it is and where, so that a loop says it once."""

    errors: dict[tuple[str, ...], str] = field(default_factory=dict)
    notes: dict[tuple[str, ...], str] = field(default_factory=dict)
    reachable: Callable[[torch.Tensor], None] = lambda tensor: None

    def __str__(self) -> str:
        return "\n".join(self.errors.values())


class _Span:
    """One storage in one launch. Cells are of `unit` bytes; `readers` and `writers` have epochs, 0 for nobody."""

    def __init__(self, start: int, nbytes: int, unit: int) -> None:
        self.start, self.end, self.unit = start, start + nbytes, unit
        self.names: list[str] = []
        self.allowed: np.ndarray | None = None  # cells of elements, where tensors are parts of the storage
        self.shadowed = nbytes <= MAX_SHADOWED
        cells = -(-nbytes // unit) if self.shadowed else 0
        self.readers, self.writers = np.zeros(cells, np.int32), np.zeros(cells, np.int32)

    def admit(self, tensors: list[torch.Tensor]) -> None:
        """Allow the elements of these tensors, and no others."""
        nbytes = self.end - self.start
        if not self.shadowed or any(t.numel() * t.itemsize == nbytes and t.is_contiguous() for t in tensors):
            return
        allowed = torch.zeros(len(self.readers), dtype=torch.bool)
        for t in tensors:
            pieces = t.itemsize // self.unit
            steps = [step * pieces for step in t.stride()]
            allowed.as_strided((*t.shape, pieces), (*steps, 1), t.storage_offset() * pieces).fill_(True)
        self.allowed = allowed.numpy()


def _where() -> str:
    """Return file and line of the kernel that is at work."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/triton/" not in file and Path(file).parent != Path(__file__).parent:
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, tuple | list):
        for place, item in enumerate(value):
            yield from _tensors(f"{name}[{place}]", item)
    elif isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(getattr(value, "base", None), torch.Tensor):
        yield name, value.base


class Memory:
    """What is known of the launch that runs."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.known: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self.kernel, self.program = "", (0, 0, 0)
        self.spans: list[_Span] = []
        self.starts: list[int] = []
        self.epoch = self.first = 1  # between barriers; the first one of this program

    def reachable(self, tensor: torch.Tensor) -> None:
        """Let kernels reach a tensor by address."""
        if tensor.device.type == "cpu" and tensor.numel():
            storage = tensor.untyped_storage()
            self.known[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes(), tensor.itemsize

    def begin(self, kernel: str, arguments: dict[str, Any]) -> None:
        """Take note of what a launch may touch."""
        self.kernel, self.epoch, self.first = kernel, 0, 0
        together: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, value in arguments.items():
            for label, tensor in _tensors(name, value):
                if tensor.numel():
                    together.setdefault(tensor.untyped_storage().data_ptr(), []).append((label, tensor))
        self.spans = []
        for start, found in together.items():
            tensors = [tensor for _, tensor in found]
            span = _Span(start, tensors[0].untyped_storage().nbytes(), min(t.itemsize for t in tensors))
            span.names = [name for name, _ in found]
            span.admit(tensors)
            self.spans.append(span)
        self.known = {start: entry for start, entry in self.known.items() if not entry[0].expired()}
        for start, (_, nbytes, unit) in self.known.items():
            if start not in together:
                self.spans.append(_Span(start, nbytes, unit))
                self.spans[-1].names = ["an address in a table"]
        self.spans.sort(key=lambda span: span.start)
        self.starts = [span.start for span in self.spans]

    def next_program(self, program: tuple[int, int, int]) -> None:
        """Begin another program of the launch."""
        self.program = program
        self.barrier()
        self.first = self.epoch

    def barrier(self) -> None:
        """What comes now sees what the program wrote before."""
        self.epoch += 1

    def found(self, kind: str, detail: str, *, note: bool = False) -> None:
        """Add a finding, unless there is one of this kind for this line."""
        where = _where()
        into = self.findings.notes if note else self.findings.errors
        into.setdefault((kind, self.kernel, where), f"{kind} in {self.kernel} at {where}: {detail}")

    def name(self, address: int) -> str:
        """Say where an address is."""
        nearest = min(self.spans, key=lambda s: max(s.start - address, address - s.end, 0), default=None)
        if nearest is None:
            return f"address {address:#x}"
        place, nbytes = address - nearest.start, nearest.end - nearest.start
        return f"byte {place} of {nbytes} of {' or '.join(nearest.names)}, program {self.program}"

    def admitted(self, pointers: TensorHandle, mask: Any, kind: str, same: Callable[[], np.ndarray] | None) -> Any:
        """Look at an access, and return the mask of the lanes that may go on.

        same: whether a store leaves what is there, for each lane of the mask; None for loads and atomics.
        """
        given = mask.data if isinstance(mask, TensorHandle) else mask
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        wanted = np.broadcast_to(given, pointers.data.shape).astype(bool)
        at = pointers.data[wanted].astype(np.int64)
        if not len(at):
            return mask
        bad = at % size != 0
        if bad.any():
            self.found("misaligned access", f"{kind} of {size} bytes at {self.name(int(at[bad][0]))}")
        index = bisect_right(self.starts, int(at.min())) - 1
        owners = np.full(len(at), index)
        if index < 0 or int(at.max()) + size > self.spans[index].end:
            owners = np.searchsorted(np.array(self.starts, np.int64), at, "right") - 1
            ends = np.array([span.end for span in self.spans], np.int64)
            bad |= (owners < 0) | (at + size > ends[owners])
        for owner in np.unique(owners[~bad]):
            mine = ~bad & (owners == owner)
            bad[mine] |= self._touch(self.spans[owner], at, mine, size, kind, same)
        outside = bad & (at % size == 0)
        if outside.any():
            self.found("out of bounds", f"{kind} of {self.name(int(at[outside][0]))}, {int(outside.sum())} lanes")
        if not bad.any():
            return mask
        kept = wanted.copy()
        kept[wanted] = ~bad
        return TensorHandle(kept, tl.int1)

    def _touch(
        self, span: _Span, at: np.ndarray, mine: np.ndarray, size: int, kind: str, same: Callable[[], np.ndarray] | None
    ) -> np.ndarray:
        """Check lanes `mine` of an access, which are all within a storage; return which are between its elements."""
        bad = np.zeros(int(mine.sum()), bool)
        if not span.shadowed:
            return bad
        cells = ((at[mine] - span.start) // span.unit)[:, None] + np.arange(max(1, size // span.unit))
        if span.allowed is not None:
            bad = ~span.allowed[cells].all(1)
        writers, readers = span.writers[cells], span.readers[cells]
        others = ((writers > 0) & (writers < self.first)).any(1)
        if kind == "load":
            if others.any():
                place = self.name(int(at[mine][others][0]))
                self.found("race", f"load of {place}, which another program writes")
            if (writers == self.epoch).any():
                place = self.name(int(at[mine][(writers == self.epoch).any(1)][0]))
                self.found("no barrier", f"load of {place}, which the program wrote just before", note=True)
            span.readers[cells] = np.where((readers == 0) | (readers >= self.first), self.epoch, MANY)
        elif kind == "store" and same is not None:
            others |= ((readers == MANY) | ((readers > 0) & (readers < self.first))).any(1)
            if others.any():
                changed = others & ~same()[mine]
                place = self.name(int(at[mine][changed if changed.any() else others][0]))
                detail = f"store to {place}, which another program reads or writes"
                self.found("race" if changed.any() else "same value written", detail, note=not changed.any())
            span.writers[cells] = self.epoch
        return bad
