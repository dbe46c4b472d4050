"""Records of packed weights, as files hold them: what a backend packs is recorded, and replayed in the same order.

A model's constructor calls `vector`, `pack_linear` and `pack_heads` in an order that follows from its config alone. So
the results, in order, are a loaded model: `recording_weights` lists them, and `replaying_weights` returns them one by
one without reading the tensors it is given. The file's format is in `checkpoint/packed.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from quire.checkpoint.tensor import HostTensor, QuantizedTensor, Tensor
from quire.errors import ModelError
from quire.kernels.backend import Backend
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.formats import CPULinear
from quire.kernels.cpu.heads import CPUHeads
from quire.kernels.cpu.linear_coded import CodedLinear
from quire.kernels.cpu.linear_int import IntLinear

LAYOUT = 1  # to be raised whenever the arrays of any of these classes change their meaning
KINDS: dict[str, type] = {kind.__name__: kind for kind in (CPULinear, IntLinear, CodedLinear, CPUHeads)}
OPS = ("vector", "pack_linear", "pack_heads")

Record = dict[str, Any]
"""One call: "op", "shapes" of the tensors given, and what came of it: its class, "kind", and "fields"."""


def packing_traits(backend: Backend) -> dict[str, Any]:
    """Return the settings of a backend that packed weights depend on. Raises ModelError for backends but the CPU's."""
    if not isinstance(backend, CPUBackend):
        raise ModelError(f"packed weights are for the CPU (device is {backend.name})")
    return {
        "layout": LAYOUT,
        "dtype": backend.dtype,
        "quantization": backend.quantization,
        "simd": list(backend.instructions),
    }


@contextmanager
def recording_weights(backend: Backend, records: list[Record]) -> Iterator[None]:
    """Add a record of everything that the backend packs inside the context to `records`."""

    def wrap(op: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **options: Any) -> Any:
            made = call(*args, **options)
            records.append({"op": op, "shapes": _shapes(args[0]), **_fields_of(made)})
            return made

        return recorded

    with _replaced_ops(backend, {op: wrap(op, getattr(backend, op)) for op in OPS}):
        yield


@contextmanager
def replaying_weights(backend: Backend, records: Sequence[Record], where: str) -> Iterator[None]:
    """Make the backend return the weights of `records`, in order, in place of packing any.

    Raises:
        ModelError: starting with `where`, if the model requests something else, or less.
    """
    left = iter(records)

    def answer(op: str) -> Callable[..., Any]:
        def replayed(first: Any, *args: Any, **options: Any) -> Any:
            record = next(left, None)
            if record is None or record["op"] != op or record["shapes"] != _shapes(first):
                raise ModelError(f"{where}: was packed for a model built in another way; convert it again")
            return _weight_of(record, where)

        return replayed

    with _replaced_ops(backend, {op: answer(op) for op in OPS}):
        yield
    if next(left, None) is not None:
        raise ModelError(f"{where}: holds more than the model has; convert it again")


@contextmanager
def _replaced_ops(backend: Backend, calls: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace ops of this backend object by `calls` inside the context."""
    for name, call in calls.items():
        setattr(backend, name, call)
    try:
        yield
    finally:
        for name in calls:
            delattr(backend, name)


def _shapes(given: Tensor | Sequence[Tensor]) -> list[list[int]]:
    tensors = [given] if isinstance(given, HostTensor | QuantizedTensor) else given
    return [list(tensor.shape) for tensor in tensors]


def _fields_of(made: Any) -> Record:
    if isinstance(made, np.ndarray):
        return {"kind": "array", "fields": {"array": made}}
    name = type(made).__name__
    assert name in KINDS, "every class of packed weights is listed"
    return {"kind": name, "fields": {item.name: getattr(made, item.name) for item in dataclasses.fields(made)}}


def _weight_of(record: Record, where: str) -> Any:
    if record["kind"] == "array":
        return record["fields"]["array"]
    kind = KINDS.get(record["kind"])
    if kind is None or {item.name for item in dataclasses.fields(kind)} != set(record["fields"]):
        raise ModelError(f"{where}: holds weights of a kind that this version does not know; convert it again")
    return kind(**record["fields"])
