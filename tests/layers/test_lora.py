"""Layers and their adapters: however they are split over ranks, together they give what the merged weight gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.tensor import HostTensor, Tensor
from quire.kernels.backend import Backend
from quire.kernels.lora import LoRAChange
from quire.kernels.reference.backend import ReferenceBackend
from quire.layers.builder import Builder
from quire.layers.embedding import LMHead, VocabParallelEmbedding
from quire.layers.linear import ColumnParallelLinear, GatedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.lora import LoRASlots
from tests.helpers.ranks import run_ranks

BACKEND = ReferenceBackend()
IN, RANK = 12, 3
Layer = Callable[[Builder], Any]


class Drawn:
    """Weights of any name and shape, the same for each name, plus what adapters add to some."""

    def __init__(self, changes: dict[str, LoRAChange] | None = None) -> None:
        self._changes = changes or {}

    def __contains__(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        values = draw(name, *shape)
        change = self._changes.get(name.removesuffix(".weight"))
        if change is not None and change.a is not None and change.b is not None:
            product = change.b @ change.a
            values += product if product.shape == values.shape else product.T
        return HostTensor(values, "float32")


def draw(name: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(list(name.encode()))
    return rng.standard_normal(shape).astype(np.float32)


def new_slots() -> LoRASlots:
    return LoRASlots(BACKEND, num_slots=2, max_rank=RANK, vocab_size=9, extra_vocab=0, max_tokens=8, max_rows=8)


def on_ranks(size: int, work: Callable[[Backend], np.ndarray]) -> Sequence[np.ndarray]:
    return [work(BACKEND)] if size == 1 else run_ranks(size, BACKEND, work)


LAYERS: dict[str, tuple[Layer, tuple[str, ...]]] = {
    "columns": (lambda b: ColumnParallelLinear(b, ("up", "gate"), IN, (8, 16)), ("m.up", "m.gate")),
    "fused": (lambda b: ColumnParallelLinear(b, ("both",), IN, (8, 16)), ("m.both",)),
    "gated": (lambda b: GatedColumnParallelLinear(b, ("gate", "up"), IN, 8, "silu"), ("m.gate", "m.up")),
    "rows": (lambda b: RowParallelLinear(b, "down", IN, 8), ("m.down",)),
    "qkv": (
        lambda b: QKVParallelLinear(b, ("q", "k", "v"), IN, num_heads=4, num_kv_heads=2, head_size=2),
        ("m.q", "m.v"),
    ),
    "qkv in one": (
        lambda b: QKVParallelLinear(b, ("qkv",), IN, num_heads=4, num_kv_heads=2, head_size=2),
        ("m.qkv",),
    ),
    "qkv by group": (
        lambda b: QKVParallelLinear(b, ("qkv",), IN, num_heads=4, num_kv_heads=2, head_size=2, by_kv_head=True),
        ("m.qkv",),
    ),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_adapted_rows_are_those_of_the_merged_layer(name: str, size: int) -> None:
    make, modules = LAYERS[name]
    x = draw("x", 4, IN)

    def compute(layer: Any, backend: Backend) -> np.ndarray:
        share = IN // backend.world_size
        own = x[:, backend.rank * share : (backend.rank + 1) * share] if name == "rows" else x
        out = layer(BACKEND.from_numpy(own))
        return np.concatenate([BACKEND.to_numpy(part) for part in (out if isinstance(out, tuple) else (out,))], axis=1)

    def adapted(backend: Backend) -> np.ndarray:
        slots = new_slots()
        layer = make(Builder(Drawn(), backend, lora=slots).under("m"))
        changes = {m: change_of(m, slots.targets[m].outputs) for m in modules}
        slots.fill(1, slots.pack(changes), 9)
        slots.write(np.zeros(4, np.int64), np.array([1, -1, 1, 0]), np.zeros(0, np.int64))
        slots.begin(4, 0, True)
        return compute(layer, backend)

    def plain(backend: Backend, merged: bool) -> np.ndarray:
        changes = {m: change_of(m, new_outputs(make, m)) for m in modules} if merged else {}
        return compute(make(Builder(Drawn(changes), backend).under("m")), backend)

    got = on_ranks(size, adapted)
    merged = on_ranks(size, lambda backend: plain(backend, True))
    base = on_ranks(size, lambda backend: plain(backend, False))
    for rank in range(size):
        np.testing.assert_allclose(got[rank][[0, 2]], merged[rank][[0, 2]], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(got[rank][[1, 3]], base[rank][[1, 3]])
        assert np.abs(got[rank][0] - base[rank][0]).max() > 0.1


def change_of(module: str, outputs: int) -> LoRAChange:
    return LoRAChange(draw(module + "a", RANK, IN), draw(module + "b", outputs, RANK))


def new_outputs(make: Layer, module: str) -> int:
    slots = new_slots()
    make(Builder(Drawn(), BACKEND, lora=slots).under("m"))
    return slots.targets[module].outputs


@pytest.mark.parametrize("size", [1, 2])
def test_tables_and_heads(size: int) -> None:
    ids, hidden = np.array([0, 3, 8, 3]), draw("hidden", 4, IN)
    table = LoRAChange(draw("ta", RANK, 9), draw("tb", IN, RANK))
    head = LoRAChange(draw("ha", RANK, IN), draw("hb", 9, RANK))

    def work(backend: Backend, slots: LoRASlots | None, weights: Drawn) -> np.ndarray:
        builder = Builder(weights, backend, lora=slots).under("m")
        embedding = VocabParallelEmbedding(builder, "embed", 9, IN)
        scores = LMHead(builder, "head", 9, IN, tied_to=None)
        if slots is not None:
            assert {name: t.kind for name, t in slots.targets.items()} == {"m.embed": "embedding", "m.head": "head"}
            slots.fill(0, slots.pack({"m.embed": table, "m.head": head}), 9)
            slots.write(ids, np.array([0, 0, 0, -1]), np.array([0, 0, 0, -1]))
            slots.begin(4, 4, True)
        rows = embedding(BACKEND.from_numpy(ids))
        logits = scores(BACKEND.from_numpy(hidden))
        return np.concatenate([BACKEND.to_numpy(rows), BACKEND.to_numpy(logits)], axis=1)

    (got, *_) = on_ranks(size, lambda backend: work(backend, new_slots(), Drawn()))
    (base, *_) = on_ranks(size, lambda backend: work(backend, None, Drawn()))
    np.testing.assert_array_equal(got[3], base[3])
    expected = base.copy()
    assert table.a is not None and table.b is not None and head.a is not None and head.b is not None
    expected[:3, :IN] += (table.b @ table.a[:, ids[:3]]).T
    expected[:3, IN:] += hidden[:3] @ (head.b @ head.a).T
    np.testing.assert_allclose(got[:3], expected[:3], rtol=1e-4, atol=1e-4)
