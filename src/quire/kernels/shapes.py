"""`ShapeBackend`: runs a model on shapes alone and says how much memory the CPU backend, or a GPU, would take for it.

Its arrays have a shape, strides and a piece of an imaginary arena, but no memory; its weights are counted and dropped.
Ops allocate what those of `kernels/cpu` allocate, in the same order, and free it at the same time, so that the arena
grows to the same size (a test compares the two, byte by byte). Nothing here imports Numba: sizes that kernels settle
are repeated here, and compared by the test as well. For a GPU it is an estimate: activations are of `dtype`, products
write where they are told to and pack nothing; the engine measures a real step there once the model is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.tensor import Layout, Tensor
from quire.kernels.backend import Arrays, AttentionMetadata, AttentionOps, AttentionParams, GraphOps
from quire.kernels.cpu.arrays import ALIGNMENT, Recorded, as_rows
from quire.kernels.experts import Expert, RoutingParams
from quire.kernels.held import held_layout, held_size
from quire.kernels.lora import LoRARows
from quire.kernels.shape_arena import ShapeArena

LANES = 16
COLUMNS = 32  # rows of weights are padded to a multiple
INT_DEPTH = 16  # and the inputs of 8-bit ones
INT4_GROUP = 64  # and of 4-bit ones
DOT_ROWS = 8  # rows of a tile of pairs
CHUNK, PIECE = 1024, 16  # of `survey.py`
UNIT_ROWS, SPLIT_ROWS, SHARES = 64, 16, 4  # of `paged_plan.py`, as are those below
RECORD, WORD_COUNT, PARTIAL_BYTES = 10, 4, 1 << 26
SEGMENT = 128  # of `paged_tiles.py`
SCRATCH_BYTES = 1 << 20  # of a thread
INSTRUCTION_BYTES = 8 * 32
WORD_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Processor:
    """What of a CPU decides about sizes: whether it multiplies pairs of bfloat16, and rows of a float tile."""

    pairs: bool
    tile_rows: int

    @classmethod
    def of_level(cls, level: str = "auto", root: Path = Path("/")) -> Processor:
        """Return that of a SIMD level, see `kernels/cpu/levels.py`; "auto" asks the system (Linux; others: least)."""
        if level == "auto":
            flags = _cpu_flags(root)
            wide = "avx512f" in flags
            return cls(wide and "avx512_bf16" in flags, 8 if wide else 2)
        return cls(level == "avx512-bf16-vnni", 8 if level.startswith("avx512") else 2)


def _cpu_flags(root: Path) -> set[str]:
    try:
        with (root / "proc/cpuinfo").open() as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "flags":
                    return set(value.split())
    except OSError:
        pass
    return set()


class ShapeArray(Recorded):
    """An array without memory: reading or writing an element of it would be a fault, and nothing does."""

    piece: Any

    def __array_finalize__(self, source: Any) -> None:
        """Views keep the piece of what they are views of."""
        super().__array_finalize__(source)
        self.piece = getattr(source, "piece", None)


@dataclass(frozen=True, slots=True)
class ShapeWeight:
    """A packed weight's sizes; `bits` is 0 for floats, and `group` the inputs that share a scale.

    Products with a `table` are logits.
    """

    outputs: int
    inputs: int
    depth: int
    gated: bool
    bits: int = 0
    group: int = 0
    table: bool = False

    @property
    def padded(self) -> int:
        """Rows as stored."""
        return -(-self.outputs // COLUMNS) * COLUMNS


@dataclass(frozen=True, slots=True)
class ShapeExperts:
    """Packed experts' sizes: gate and up together, and down, of so many experts."""

    number: int
    first: ShapeWeight
    last: ShapeWeight


@dataclass(frozen=True, slots=True)
class ShapeHeads:
    """A packed matrix for each head."""

    heads: int
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class ShapeCache:
    """One layer's cache: only its block size matters."""

    block_size: int


class ShapeBackend:
    """The model ops of `Backend`, without numbers.

    Attributes:
        num_bytes: what was packed and taken as vectors so far. input_bytes: of arrays of `zeros`.
        arena: of recordings. num_instructions: of the longest one.

    Args:
        processor: of the CPU that is meant; None for a GPU.
    """

    name = "shapes"
    pads = False
    rotary_write_kv = AttentionOps.rotary_write_kv
    step_shape, stager, mark = GraphOps.step_shape, GraphOps.stager, GraphOps.mark

    def __init__(
        self,
        dtype: str,
        kv_dtype: str,
        quantization: str | None,
        num_threads: int,
        processor: Processor | None,
    ) -> None:
        self.dtype, self.kv_dtype, self.quantization = dtype, kv_dtype, quantization
        self.num_threads, self._processor = num_threads, processor
        self._paired = dtype == "bfloat16" and processor is not None and processor.pairs
        narrow = processor is None and WORD_BYTES[dtype] == 2
        self._act: Any = np.float16 if narrow else np.float32  # float16 stands for bfloat16 as well
        self.arena = ShapeArena()
        self.num_bytes = 0
        self.num_instructions = 0
        self.input_bytes = 0
        self._count = 0

    # Weights

    def from_numpy(self, array: np.ndarray) -> np.ndarray:
        """Count a table."""
        self.num_bytes += array.nbytes
        return array

    def vector(self, tensor: Tensor) -> np.ndarray:
        """Count a vector, which is held in float32; the values mean nothing."""
        self.num_bytes += tensor.array.size * 4
        return np.broadcast_to(np.float32(0), tensor.array.shape)

    def pack_linear(
        self,
        parts: Sequence[Tensor],
        biases: Sequence[Tensor] | None = None,
        *,
        gated: bool = False,
        table: bool = False,
        exact: bool = False,
    ) -> ShapeWeight:
        """Count a weight, see `formats.pack` and `linear_int`."""
        outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
        gated = gated and len(parts) == 2 and parts[0].shape == parts[1].shape and parts[0].shape[0] % LANES == 0
        layout = None if exact or self.quantization is not None else held_layout(parts, self.dtype, table=table)
        if layout is not None:
            return self._stored(layout, outputs, inputs, gated, biases is not None)
        plain = self.quantization is None or exact or (table and self.quantization == "fp8")
        bits = 0 if plain else 4 if self.quantization == "int4" and not table else 8
        if bits == 0:
            depth, group = inputs + inputs % 2 * self._paired, 0
        else:
            unit = INT4_GROUP if bits == 4 else INT_DEPTH
            depth = -(-inputs // unit) * unit
            group = unit if bits == 4 else depth
        weight = ShapeWeight(outputs, inputs, depth, gated, bits, group, table)
        if bits == 0:
            self.num_bytes += _aligned(weight.padded * depth * WORD_BYTES[self.dtype])
        else:
            scales = weight.padded * (4 + (depth // group * 2 if bits == 4 else 0))
            self.num_bytes += _aligned(weight.padded * depth * bits // 8) + scales
        self.num_bytes += 4 * weight.padded if biases else 0
        return weight

    def _stored(self, layout: Layout, outputs: int, inputs: int, gated: bool, biased: bool) -> ShapeWeight:
        """Count a weight that is held as its checkpoint has it; products with codes work like those with floats."""
        size = held_size(layout, outputs, inputs)
        integers = layout.kind == "integers"
        depth = size.depth if integers else inputs + inputs % 2 * self._paired
        bits, group = (layout.bits, size.group or size.depth) if integers else (0, 0)
        weight = ShapeWeight(outputs, inputs, depth, gated, bits, group)
        self.num_bytes += _aligned(size.data) + size.rest + (4 * weight.padded if biased else 0)
        return weight

    def pack_experts(self, experts: Iterable[Expert]) -> ShapeExperts:
        """Count the experts of a layer."""
        pairs = [(self.pack_linear(*expert.first, gated=True), self.pack_linear(*expert.last)) for expert in experts]
        return ShapeExperts(len(pairs), *pairs[0])

    def pack_heads(self, matrices: Sequence[Tensor]) -> ShapeHeads:
        """Count the matrices of a layer's heads, see `heads.pack_heads`."""
        outputs, inputs = matrices[0].shape
        padded, depth = -(-outputs // COLUMNS) * COLUMNS, inputs + inputs % 2 if self._paired else inputs
        self.num_bytes += _aligned(len(matrices) * padded * depth * WORD_BYTES[self.dtype])
        return ShapeHeads(len(matrices), outputs, inputs)

    # Recording

    def graph(self, build: Callable[[], Arrays]) -> Callable[[], Arrays]:
        """Run `build` as a recording of its own, once."""
        self.arena.restart()
        before, self._count = self.num_instructions, 0
        result = build()
        self.num_instructions = max(before, self._count)
        return lambda: result

    def empty(self, shape: tuple[int, ...], dtype: Any = None) -> ShapeArray:
        """Return an array of the arena, of activations if no type is named."""
        kind = np.dtype(self._act if dtype is None else dtype)
        size = max(1, -(-math.prod(shape) * kind.itemsize // ALIGNMENT)) * ALIGNMENT
        piece = self.arena.piece(size)
        steps = [kind.itemsize] * len(shape)
        for axis in range(len(shape) - 1, 0, -1):
            steps[axis - 1] = steps[axis] * shape[axis]
        array = np.lib.stride_tricks.as_strided(np.zeros(1, kind), shape, steps).view(ShapeArray)
        array.recorder, array.piece = self, piece
        return array

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
        """Return an input of recordings, which is no part of the arena."""
        self.input_bytes += math.prod(shape) * np.dtype(dtype).itemsize
        return np.broadcast_to(np.zeros((), dtype), shape)

    def assign(self, target: np.ndarray, values: np.ndarray) -> None:
        """Nothing to write to."""

    def _emit(self, count: int = 1) -> None:
        self._count += count

    def combine(self, kind: int, x: Any, y: Any, out: np.ndarray | None) -> np.ndarray:
        """See `arithmetic.combine`."""
        # Not np.shape, which would ask the arrays themselves; they refuse.
        shape = np.broadcast_shapes(*(getattr(array, "shape", ()) for array in (x, y)))
        self._emit()
        return self.empty(shape) if out is None else out

    def contiguous(self, x: np.ndarray) -> np.ndarray:
        """See `arithmetic.contiguous`."""
        if x.flags.c_contiguous:
            return x
        self._emit()
        return self.empty(x.shape)

    def concat(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        self._emit(len(arrays))
        return self.empty((*arrays[0].shape[:-1], sum(array.shape[-1] for array in arrays)))

    # Model ops

    def embedding(self, ids: np.ndarray, weight: ShapeWeight) -> np.ndarray:
        self._emit()
        return self.empty((len(ids), weight.inputs))

    def linear(self, x: np.ndarray, weight: ShapeWeight) -> np.ndarray:
        return self._product(x, weight)

    def head_linear(self, x: np.ndarray, weight: ShapeHeads) -> np.ndarray:
        self._emit()
        return self.empty((x.shape[0], weight.outputs))

    def gated_linear(self, x: np.ndarray, weight: ShapeWeight, kind: str) -> np.ndarray:
        if weight.gated:
            return self._product(x, weight)
        return self._activation(self._product(x, weight), gated=True)

    def _product(self, x: np.ndarray, weight: ShapeWeight) -> np.ndarray:
        if self._processor is None:
            return self._gpu_product(x.shape[0], weight)
        rows, halves = x.shape[0], 2 if weight.gated else 1
        outputs, width = weight.outputs // halves, weight.padded // halves
        if weight.bits:
            return self._integer_product(rows, width, weight)[:, :outputs]
        if rows == 0:
            return self.empty((0, outputs))
        self._emit(2)
        if self._paired:
            packed = self.empty((padded_rows(rows) * ((x.shape[1] + 1) // 2),), np.uint32)
            out = self.empty((padded_rows(rows), width))
        else:
            tiles = self._processor.tile_rows
            packed = self.empty((rows // tiles * tiles * x.shape[1],))
            out = self.empty((rows, width))
        del packed
        return out[:rows, :outputs]

    def _gpu_product(self, rows: int, weight: ShapeWeight) -> np.ndarray:
        """Count a product; rows that are quantized are so before it, and gates are applied after it."""
        self._emit()
        rounded = self.empty((rows, weight.depth), np.int8) if weight.bits else None
        out = self.empty((rows, weight.outputs), np.float32 if weight.table else None)
        del rounded
        if not weight.gated:
            return out
        return self.empty((rows, weight.outputs // 2))

    def _integer_product(self, rows: int, width: int, weight: ShapeWeight) -> np.ndarray:
        out = self.empty((rows, width))
        if rows == 0:
            return out
        self._emit(2)
        padded = padded_rows(rows)
        if self.quantization == "int8-weight-only":
            self.empty((padded * weight.depth,))
            return out
        packed = self.empty((padded * weight.depth // 4,), np.uint32)
        starts = self.empty((padded * (weight.depth // weight.group),), np.int32)
        scales = self.empty((padded,))
        del packed, starts, scales
        return out

    def gated_activation(self, x: np.ndarray, kind: str) -> np.ndarray:
        return self._activation(x, gated=True)

    # LoRA adapters: a layer's slots are the columns between its factors

    def new_lora_slots(self, num_slots: int, max_rank: int, sizes: Sequence[int], widest: int = 0) -> tuple[int, int]:
        self.num_bytes += 3 * num_slots * len(sizes) * 5 * 8  # tables of addresses
        return len(sizes) * -(-max_rank // LANES) * LANES, widest

    def lora(self, y: np.ndarray, x: np.ndarray, slots: tuple[int, int], rows: LoRARows) -> None:
        """In place."""
        if x.shape[0]:
            self._emit(2 + (slots[1] > 0))
            self.empty((x.shape[0], slots[0]))

    def lora_embedding(self, y: np.ndarray, ids: np.ndarray, slots: tuple[int, int], rows: LoRARows) -> None:
        """In place."""
        if len(ids):
            self._emit(3)
            self.empty((len(ids), slots[0]))

    def limit_columns(self, x: np.ndarray, limits: np.ndarray) -> None:
        """In place."""
        self._emit()

    def route(self, logits: np.ndarray, params: RoutingParams) -> tuple[np.ndarray, np.ndarray]:
        self._emit()
        shape = logits.shape[0], params.top_k
        return self.empty(shape, np.int64), self.empty(shape)

    def experts(
        self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, packed: ShapeExperts, kind: str
    ) -> np.ndarray:
        """See `Backend.experts`, and `experts` and `Products` in `cpu/experts.py`."""
        if ids.size == 0:
            return self.empty((0, packed.last.outputs))
        capacity = ids.size + min(ids.size, 3 * packed.number)
        sorting = [self.empty((size,), np.int64) for size in (8 * (min(ids.size, packed.number) + 1), 6, ids.size)]
        spread = self.empty((capacity, x.shape[1]))
        inner = self._grouped_product(capacity, packed.first)
        if not packed.first.gated:
            inner = self.empty((capacity, packed.first.outputs // 2))
            self._emit()
        del spread
        results = self._grouped_product(capacity, packed.last)
        del inner
        out = self.empty((ids.shape[0], packed.last.outputs))
        self._emit(3)
        del sorting, results
        return out

    def _grouped_product(self, capacity: int, weight: ShapeWeight) -> np.ndarray:
        if self._processor is None:
            return self._gpu_product(capacity, weight)
        width, rounded = weight.padded // 2 if weight.gated else weight.padded, weight.bits > 0
        if rounded and self.quantization == "int8-weight-only":
            made = [self.empty((capacity * weight.depth,))]
        elif rounded:
            made = [self.empty((capacity * weight.depth // 4,), np.uint32)]
            made += [self.empty((capacity * (weight.depth // weight.group),), np.int32), self.empty((capacity,))]
        elif self._paired:
            made = [self.empty((capacity * ((weight.inputs + 1) // 2),), np.uint32)]
        else:
            made = [self.empty((capacity * weight.inputs,))]
        out = self.empty((capacity, width))
        self._emit(2)
        del made
        return out

    def take_rows(self, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
        self._emit()
        return self.empty((len(ids), x.shape[1]))

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        return self._rows(x)

    def add_rms_norm(self, x: np.ndarray, residual: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        return self._rows(residual)

    def layer_norm(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> np.ndarray:
        return self._rows(x)

    def _rows(self, x: np.ndarray) -> np.ndarray:
        source = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        out = self.empty(x.shape)
        self._emit()
        del source
        return out

    def rotary_embedding(
        self,
        positions: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        cos_sin: np.ndarray,
        head_size: int,
        interleaved: bool,
    ) -> None:
        """In place."""
        self._emit()

    def activation(self, x: np.ndarray, kind: str) -> np.ndarray:
        return self._activation(x, gated=False)

    def softcap(self, x: np.ndarray, cap: float) -> None:
        """In place."""
        self._emit()

    def _activation(self, x: np.ndarray, *, gated: bool) -> np.ndarray:
        source = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        out = self.empty((*x.shape[:-1], source.shape[1] // 2 if gated else source.shape[1]))
        self._emit()
        return out

    # Layers with states

    def causal_conv(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None,
        state: np.ndarray,
        metadata: AttentionMetadata,
        activation: str | None = None,
    ) -> np.ndarray:
        self._emit()
        return self.empty(x.shape)

    def gated_delta(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        decay: np.ndarray,
        beta: np.ndarray,
        state: np.ndarray,
        metadata: AttentionMetadata,
    ) -> np.ndarray:
        self._emit()
        return self.empty(v.shape)

    # Attention

    def write_kv(self, k: np.ndarray, v: np.ndarray, cache: ShapeCache, slot_mapping: np.ndarray) -> None:
        """In place."""
        self._emit()

    def write_latent(self, x: np.ndarray, cache: ShapeCache, slot_mapping: np.ndarray) -> None:
        """In place."""
        self._emit()

    def paged_attention(
        self, q: np.ndarray, cache: ShapeCache, metadata: AttentionMetadata, params: AttentionParams, fresh: Any = None
    ) -> np.ndarray:
        out = self.empty((q.shape[0], params.num_heads * params.out_size))
        if params.value_size is not None:  # see `paged.head_groups`
            heads = params.num_heads
            groups = next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= UNIT_ROWS)
            params = replace(params, num_kv_heads=groups)
        if self._processor is None:
            return out  # parts of long contexts are a few MiB, whatever the model
        key = (*params.reach, params.num_heads, params.num_kv_heads, params.out_size, cache.block_size)
        if key not in metadata.plans:
            metadata.plans[key] = self._plan(q.shape[0], metadata, params, cache.block_size)
            self._emit()
        self._emit(4 if self.num_threads > 1 else 1)
        return out

    def _plan(
        self, tokens: int, metadata: AttentionMetadata, params: AttentionParams, block_size: int
    ) -> tuple[np.ndarray, ...]:
        """See `paged_plan.make_plan`."""
        group = params.num_heads // params.num_kv_heads
        wanted = SHARES * self.num_threads if self.num_threads > 1 else 0
        slot_rows = -(-max(group, SPLIT_ROWS) // LANES) * LANES
        segments = -(-metadata.block_tables.shape[1] * block_size // SEGMENT)
        slot = 2 * (slot_rows + LANES) + slot_rows * (-(-params.out_size // 32) * 32)
        capacity = min(wanted * segments, PARTIAL_BYTES // (4 * slot))
        items, merges = (tokens + 2 * wanted + 1, RECORD), (wanted + 1, RECORD)
        staged = self.empty(items, np.int64)
        kept = self.empty(items, np.int64), self.empty(merges, np.int64), self.empty((WORD_COUNT,), np.int64)
        partials = self.empty((capacity, slot))
        del staged
        return (*kept, partials)

    # Logits

    def rows_finite(self, logits: np.ndarray) -> np.ndarray:
        """See `Backend.rows_finite` and `survey.survey`."""
        source, _ = as_rows(logits)
        rows, size = source.shape
        chunks = -(-size // CHUNK)
        self._emit(2)
        arrays = [self.empty((rows, LANES * chunks)), self.empty((rows, chunks))]
        arrays += [self.empty((rows,), kind) for kind in (np.float32, np.int64, np.bool_)]
        return arrays[-1]


def padded_rows(rows: int) -> int:
    """Return the rows of all tiles of pairs that compute `rows` rows."""
    rest = rows % DOT_ROWS
    return rows - rest + (0 if rest == 0 else 8 if rest > 4 else 4 if rest > 1 else 1)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
