"""LoRA slots: where a model's layers find the adapters of a step's rows.

While a model is built with `Builder.lora`, each layer that an adapter can change registers here under the name that
transformers gives it. In a step it calls its `LoRALayer` with its output and input. How adapters are read from files,
and which adapter lies in which slot, is decided in `quire.lora`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from quire.checkpoint.tensor import HostTensor, Tensor
from quire.kernels.backend import Array, Backend
from quire.kernels.lora import LoRAChange, LoRARows

Shard = Callable[[int, Tensor], list[Tensor]]  # (number of the matrix, whole [N, *]) -> pieces of this rank's rows
Split = Callable[[Tensor], list[Tensor]]  # a tensor of several matrices -> one for each


@dataclass(frozen=True, slots=True)
class LoRATarget:
    """A module that adapters may change, by its name in transformers.

    Attributes:
        kind: "linear"; "embedding", a table that is looked up; "head", which scores the vocabulary.
        inputs, outputs: of the whole layer on all ranks; of a table the width and the number of its rows.
        layer: number of the `LoRALayer` that computes it. part: which of that layer's parts it is.
        shard: the change of the whole -> this rank's.
    """

    name: str
    kind: Literal["linear", "embedding", "head"]
    inputs: int
    outputs: int
    layer: int
    part: int
    shard: Callable[[LoRAChange], LoRAChange]


Put = Callable[[Array, np.ndarray], None]  # `Stager.put`
PackedAdapter = dict[int, list[Any]]  # by number of the layer, what each of its parts gets, or None


class LoRALayer:
    """One layer's slots."""

    def __init__(self, owner: LoRASlots, sizes: Sequence[int], *, lookup: bool = False, widest: int = 0) -> None:
        self._owner, self._backend, self._lookup = owner, owner.backend, lookup
        self.sizes, self.num_parts = list(sizes), len(sizes)
        self.slots = owner.backend.new_lora_slots(owner.num_slots, owner.max_rank, sizes, widest)

    def __call__(self, y: Array, x: Array) -> Array:
        """Return y, the layer's output of x (rows, or the ids that were looked up), changed in place."""
        rows = self._owner.rows_of(y.shape[0])
        if rows is not None:
            if self._lookup:
                self._backend.lora_embedding(y, self._owner.true_ids(x), self.slots, rows)
            else:
                self._backend.lora(y, x, self.slots, rows)
        return y


class _Buffers:
    """The slots of rows: `LoRARows` in arrays at fixed addresses."""

    def __init__(self, backend: Backend, num_rows: int, num_slots: int) -> None:
        self._num_slots = num_slots
        self._rows = LoRARows(
            backend.zeros((num_rows,), "int64"),
            backend.zeros((num_rows,), "int64"),
            backend.zeros((num_slots + 1,), "int64"),
        )

    def write(self, slots: np.ndarray, put: Put) -> None:
        order = np.argsort(slots, kind="stable")
        starts = np.searchsorted(slots[order], np.arange(self._num_slots + 1))
        put(self._rows.slots, slots)
        put(self._rows.order, order[starts[0] :])
        put(self._rows.starts, starts - starts[0])

    def first(self, count: int) -> LoRARows:
        return LoRARows(self._rows.slots[:count], self._rows.order[:count], self._rows.starts)


class LoRASlots:
    """All layers of a model that adapters may change, and the slots of a step's rows.

    Args:
        num_slots: most adapters in one step. max_rank: of any of them.
        vocab_size: of the model. extra_vocab: by how many ids an adapter may enlarge it.
        max_tokens, max_rows: most tokens of a step, and most rows whose logits are computed at a time.

    Attributes:
        targets: by name.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        num_slots: int,
        max_rank: int,
        vocab_size: int,
        extra_vocab: int,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self.backend, self.num_slots, self.max_rank = backend, num_slots, max_rank
        self.base_vocab, self.extra_vocab = vocab_size, extra_vocab
        self.targets: dict[str, LoRATarget] = {}
        self._layers: list[LoRALayer] = []
        self._tokens = _Buffers(backend, max_tokens, num_slots)
        self._rows = _Buffers(backend, max_rows, num_slots)
        self._vocab_sizes = np.full(num_slots + 1, vocab_size, np.int64)  # of each slot; the last is for no slot
        self._limits = backend.zeros((max_rows,), "int64") if extra_vocab else None
        self._ids = backend.zeros((max_tokens,), "int64") if extra_vocab else None
        self._extra_columns = backend.zeros((max_rows, extra_vocab)) if extra_vocab else None
        self._counts = (0, 0, False)

    # ---- while the model is built ----

    def linear(
        self,
        prefix: str,
        names: Sequence[str],
        inputs: int,
        sizes: Sequence[int],
        shard: Shard,
        split: Split,
        columns: tuple[int, int] | None,
    ) -> LoRALayer:
        """Register a linear layer of one or more matrices [size, inputs], of which `shard` takes this rank's rows.

        There is one name per size, or a single one for a tensor of all matrices, which `split` splits. `columns`: this
        rank's columns, (first, last + 1), where the inputs are split over ranks.
        """

        def rows(number: int, whole: Tensor) -> np.ndarray:
            return np.concatenate([piece.to_float32() for piece in shard(number, whole)])

        mine = [len(rows(i, HostTensor(np.zeros((size, 1), np.float32), "float32"))) for i, size in enumerate(sizes)]
        single = len(names) < len(sizes)
        layer = self._add(LoRALayer(self, [sum(mine)] if single else mine))

        def shard_change(number: int, change: LoRAChange) -> LoRAChange:
            assert change.a is not None and change.b is not None, "linear layers are changed by factors"
            a, b = change.a if columns is None else change.a[:, slice(*columns)], HostTensor(change.b, "float32")
            if not single:
                return LoRAChange(a, rows(number, b))
            return LoRAChange(a, np.concatenate([rows(i, matrix) for i, matrix in enumerate(split(b))]))

        for number, name in enumerate(names):
            outputs = sum(sizes) if single else sizes[number]
            self._register(prefix + name, "linear", inputs, outputs, layer, number, partial(shard_change, number))
        return self._layers[layer]

    def embedding(self, name: str, num_rows: int, width: int) -> LoRALayer:
        """Register a table that is looked up; every rank changes whole rows."""
        layer = self._add(LoRALayer(self, [width], lookup=True))
        self._register(name, "embedding", width, num_rows, layer, 0, lambda change: change)
        return self._layers[layer]

    def head(self, name: str, num_rows: int, width: int) -> LoRALayer:
        """Register the layer that scores the vocabulary; every rank changes whole rows."""
        layer = self._add(LoRALayer(self, [num_rows + self.extra_vocab], widest=num_rows + self.extra_vocab))
        self._register(name, "head", width, num_rows, layer, 0, lambda change: change)
        return self._layers[layer]

    def _add(self, layer: LoRALayer) -> int:
        self._layers.append(layer)
        return len(self._layers) - 1

    def _register(self, name: str, *rest: Any) -> None:
        self.targets[name] = LoRATarget(name, *rest)

    # ---- contents of the slots ----

    def pack(self, changes: Mapping[str, LoRAChange]) -> PackedAdapter:
        """Return what `fill` takes, of changes by the names of targets. May be called in any thread."""
        packed: PackedAdapter = {}
        for name, change in changes.items():
            target = self.targets[name]
            parts = packed.setdefault(target.layer, [None] * self._layers[target.layer].num_parts)
            parts[target.part] = self.backend.pack_lora(target.shard(change), lookup=target.kind == "embedding")
        return packed

    def fill(self, slot: int, packed: PackedAdapter, vocab_size: int) -> None:
        """Replace the adapter of a slot; call it between steps."""
        for number, layer in enumerate(self._layers):
            self.backend.set_lora(layer.slots, slot, packed.get(number, [None] * layer.num_parts))
        self._vocab_sizes[slot] = vocab_size

    def warm_up(self) -> None:
        """Compile every op that adapters need, with empty slots; between steps."""
        self.write(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64))
        self.begin(1, 1, True)
        zeros = self.backend.zeros
        for kind in ("embedding", "linear", "head"):
            target = next((target for target in self.targets.values() if target.kind == kind), None)
            if target is not None:
                x = zeros((1,), "int64") if kind == "embedding" else zeros((1, target.inputs))
                width = target.inputs if kind == "embedding" else sum(self._layers[target.layer].sizes)
                self._layers[target.layer](zeros((1, width)), x)
        self.limit(zeros((1, self.base_vocab + self.extra_vocab)))

    # ---- in a step ----

    def write(
        self, input_ids: np.ndarray, token_slots: np.ndarray, row_slots: np.ndarray, put: Put | None = None
    ) -> np.ndarray:
        """Write the slots of a step's tokens and of the rows whose logits are computed, int64, -1 for none.

        There may be more slots than tokens or rows, for padding. `put` copies to the arrays of the slots, by default at
        once. Returns the ids with those that the model's own table lacks replaced.
        """
        put = put or self._put
        self._tokens.write(token_slots, put)
        self._write_rows(row_slots, put)
        if self._ids is None:
            return input_ids
        ids = input_ids
        if len(token_slots) > len(ids):
            ids = np.zeros(len(token_slots), np.int64)
            ids[: len(input_ids)] = input_ids
        put(self._ids, ids)
        return np.minimum(input_ids, self.base_vocab - 1)

    def begin(self, num_tokens: int, num_rows: int, active: bool) -> None:
        """Begin a forward pass of so many tokens and rows of logits; `active`: any of them has an adapter."""
        self._counts = (num_tokens, num_rows, active)

    def begin_rows(self, slots: np.ndarray) -> None:
        """Like `write` and `begin`, for rows of which nothing but logits is computed."""
        self._write_rows(slots, self._put)
        self.begin(0, len(slots), bool((slots >= 0).any()))

    def _write_rows(self, slots: np.ndarray, put: Put) -> None:
        self._rows.write(slots, put)
        if self._limits is not None:
            put(self._limits, self._vocab_sizes[slots])

    def _put(self, target: Array, values: np.ndarray) -> None:
        self.backend.assign(target[: len(values)], values)

    def rows_of(self, count: int) -> LoRARows | None:
        """Return the slots of the rows of an array of so many; None if none of the step has an adapter.

        If there are as many rows of logits as tokens, they are the same.
        """
        num_tokens, num_rows, active = self._counts
        if not active:
            return None
        if count == num_tokens:
            return self._tokens.first(count)
        assert count == num_rows, f"{count} rows, but the step has {num_tokens} tokens and {num_rows} rows of logits"
        return self._rows.first(count)

    def true_ids(self, ids: Array) -> Array:
        """Return the step's ids, also those that the model's own table lacks."""
        return ids if self._ids is None else self._ids[: len(ids)]

    def widen(self, logits: Array) -> Array:
        """Return logits [R, V] with columns for the ids that adapters may add, [R, V + extra]."""
        if self._extra_columns is None:
            return logits
        return self.backend.concat([logits, self._extra_columns[: logits.shape[0]]])

    def limit(self, logits: Array) -> Array:
        """Return logits, changed in place so that no row has ids that are not in its adapter's vocabulary."""
        if self._limits is not None:
            self.backend.limit_columns(logits, self._limits[: logits.shape[0]])
        return logits
