"""`MetaBackend` runs a model on arrays without data, like PyTorch's meta device, and counts memory and work.

Its arrays have a shape, strides and a place in an arena that has addresses only; of a weight it keeps the sizes. Ops
allocate what those of `kernels/cpu` allocate, in the same order, and free it at the same time, so that the arena grows
to the same size (tests/worker/test_footprint.py compares the two, byte by byte). Nothing here imports Numba: sizes of
kernels are in `cpu/sizes.py`. For a GPU the size is an estimate: activations are of `dtype`, products write to their
final place and pack nothing; the engine measures a real step once the model is loaded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quire.checkpoint.tensor import Tensor
from quire.kernels.backend import (
    Arrays,
    AttentionMetadata,
    AttentionOps,
    AttentionParams,
    CollectiveOps,
    GraphOps,
)
from quire.kernels.cpu.arrays import ALIGNMENT, MetaArena
from quire.kernels.cpu.sizes import (
    CHUNK,
    COLUMNS,
    DEPTH_UNIT,
    INT4_GROUP,
    LANES,
    RECORD,
    WORD_COUNT,
    can_gate,
    expert_rows,
    head_groups,
    padded_rows,
    plan_sizes,
    round_up,
)
from quire.kernels.experts import Expert, RoutingParams
from quire.kernels.lora import LoRARows
from quire.kernels.weight_storage import stored_layout, stored_size

WORD_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# S' = e^decay S (1), k S' (2), S' + k (...)^T (2), q S (2): operations for each element of a delta net's state.
DELTA_FLOPS = 7

WeightKind = Literal["vector", "matrix", "heads", "expert"]


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


@dataclass(frozen=True, slots=True, eq=False)
class MetaWeight:
    """A packed weight: `bits` is 0 for floats, `group` the inputs that share a scale; a `table`'s products are logits.

    Of `pack_heads` it is one head's matrix, and `nbytes` are those of all heads.
    """

    outputs: int
    inputs: int
    depth: int
    nbytes: int
    gated: bool = False
    bits: int = 0
    group: int = 0
    table: bool = False

    @property
    def padded(self) -> int:
        """Rows as stored."""
        return round_up(self.outputs, COLUMNS)


@dataclass(frozen=True, slots=True)
class MetaExperts:
    """Packed experts of a layer: how many, the sizes of gate and up together and of down, and bytes of all."""

    number: int
    first: MetaWeight
    last: MetaWeight
    nbytes: int


@dataclass(frozen=True, slots=True)
class MetaCache:
    """One layer's cache: only its block size matters."""

    block_size: int


@dataclass(frozen=True, slots=True)
class Mixture:
    """Layers of experts: `num_bytes` of all of them, `number` in each layer, of which a token sees `chosen`."""

    number: int
    chosen: int
    num_bytes: int

    def touched(self, rows: int) -> float:
        """Return the bytes that `rows` tokens are expected to read, each with experts drawn evenly from all.

        An expert is read by none of them with the probability (1 - chosen / number) ** rows.
        """
        return self.num_bytes * (1.0 - (1.0 - self.chosen / self.number) ** rows)


@dataclass(frozen=True, slots=True)
class Work:
    """What some rows of a step read and compute.

    Attributes:
        num_bytes: of weights read once, however many rows there are. flops: of each row.
        mixtures: weights of which more are read the more rows there are.
    """

    num_bytes: float
    flops: float
    mixtures: tuple[Mixture, ...] = ()

    def read(self, rows: int) -> float:
        """Return the bytes of weights that `rows` rows read."""
        return self.num_bytes + sum(mixture.touched(rows) for mixture in self.mixtures) if rows else 0.0


class MetaBackend(CollectiveOps):
    """The model ops of `Backend`, without numbers. Products with adapters do not count as work.

    Attributes:
        num_bytes: what was packed and taken as vectors so far. num_elements: of all matrices but experts and heads.

        Since `reset`: input_bytes: of arrays of `zeros`. arena: of recordings. num_instructions: of the longest one.
        pair_flops: of attention, per pair of a query and a key.

    Args:
        processor: of the CPU that is meant; None for a GPU.
        on_weight: called with the kind and the bytes of each weight when it is packed, and `num_bytes` then.
    """

    name = "meta"
    pads = False
    rotary_write_kv = AttentionOps.rotary_write_kv
    step_shape, stager, record_event = GraphOps.step_shape, GraphOps.stager, GraphOps.record_event

    def __init__(
        self,
        dtype: str,
        kv_dtype: str,
        quantization: str | None,
        num_threads: int,
        processor: Processor | None,
        on_weight: Callable[[WeightKind, int, int], None],
    ) -> None:
        self.dtype, self.kv_dtype, self.quantization = dtype, kv_dtype, quantization
        self.num_threads, self._processor = num_threads, processor
        self._paired = dtype == "bfloat16" and processor is not None and processor.pairs
        narrow = processor is None and WORD_BYTES[dtype] == 2
        self._act: Any = np.float16 if narrow else np.float32  # float16 stands for bfloat16 as well
        self._on_weight = on_weight
        self.num_bytes = self.num_elements = self._matrix_bytes = 0
        self._within_experts = False
        self.reset()

    def reset(self) -> None:
        """Forget recordings and work; weights stay."""
        self.arena = MetaArena()
        self.num_instructions = self.input_bytes = self._count = 0
        self._used: set[MetaWeight] = set()
        self._mixtures: Counter[tuple[int, int]] = Counter()
        self._flops = self.pair_flops = 0.0

    def work(self, weights: int) -> Work:
        """Return what was done since `reset`, for all rows together.

        Args:
            weights: bytes of the whole model. Of tables only a few rows are read, and vectors are always read.
        """
        read = sum(weight.nbytes for weight in self._used)
        mixtures = tuple(Mixture(*kind, size) for kind, size in sorted(self._mixtures.items()))
        return Work(weights - self._matrix_bytes + read, self._flops, mixtures)

    # Weights

    def from_numpy(self, array: np.ndarray) -> np.ndarray:
        """Count a table."""
        self.num_bytes += array.nbytes
        return array

    def vector(self, tensor: Tensor) -> np.ndarray:
        """Count a vector, which is stored in float32; the values mean nothing."""
        self._add(tensor.array.size * 4, "vector")
        return np.broadcast_to(np.float32(0), tensor.array.shape)

    def pack_linear(
        self,
        parts: Sequence[Tensor],
        biases: Sequence[Tensor] | None = None,
        *,
        gated: bool = False,
        table: bool = False,
        exact: bool = False,
    ) -> MetaWeight:
        """Count a weight, see `formats.pack`, `linear_int`, and for what a checkpoint stores `stored_size`."""
        outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
        gated = gated and can_gate(parts)
        padded, bits, group, depth = round_up(outputs, COLUMNS), 0, 0, self._float_depth(inputs)
        layout = None if exact or self.quantization is not None else stored_layout(parts, self.dtype, table=table)
        if layout is not None:  # products with codes work like those with floats
            size = stored_size(layout, outputs, inputs)
            nbytes = round_up(size.data, ALIGNMENT) + size.rest
            if layout.kind == "integers":
                bits, depth, group = layout.bits, size.depth, size.group or size.depth
        elif self.quantization is None or exact or (table and self.quantization == "fp8"):
            nbytes = round_up(padded * depth * WORD_BYTES[self.dtype], ALIGNMENT)
        else:
            bits = 4 if self.quantization == "int4" and not table else 8
            depth = round_up(inputs, INT4_GROUP if bits == 4 else DEPTH_UNIT)
            group = INT4_GROUP if bits == 4 else depth
            nbytes = round_up(padded * depth * bits // 8, ALIGNMENT)
            nbytes += padded * (4 + (depth // group * 2 if bits == 4 else 0))
        nbytes += 4 * padded if biases else 0
        # A table that the checkpoint stores as integers is multiplied like any other weight of it.
        table = table and layout is None
        self._add(nbytes, "expert" if self._within_experts else "matrix")
        if not self._within_experts:
            self.num_elements += outputs * inputs
        return MetaWeight(outputs, inputs, depth, nbytes, gated, bits, group, table)

    def pack_experts(self, experts: Iterable[Expert]) -> MetaExperts:
        """Count the experts of a layer."""
        before, self._within_experts = self.num_bytes, True
        pairs = [(self.pack_linear(*expert.first, gated=True), self.pack_linear(*expert.last)) for expert in experts]
        self._within_experts = False
        return MetaExperts(len(pairs), *pairs[0], self.num_bytes - before)

    def pack_heads(self, matrices: Sequence[Tensor]) -> MetaWeight:
        """Count the matrices of a layer's heads, see `heads.pack_heads`."""
        outputs, inputs = matrices[0].shape
        depth = self._float_depth(inputs)
        nbytes = round_up(len(matrices) * round_up(outputs, COLUMNS) * depth * WORD_BYTES[self.dtype], ALIGNMENT)
        self._add(nbytes, "heads")
        return MetaWeight(outputs, inputs, depth, nbytes)

    def _float_depth(self, inputs: int) -> int:
        """Return the inputs of a row of floats as stored."""
        return inputs + inputs % 2 * self._paired

    def _add(self, nbytes: int, kind: WeightKind) -> None:
        self.num_bytes += nbytes
        self._matrix_bytes += 0 if kind == "vector" else nbytes
        self._on_weight(kind, nbytes, self.num_bytes)

    # Recording

    def graph(self, build: Callable[[], Arrays]) -> Callable[[], Arrays]:
        """Run `build` as a recording of its own, once."""
        self.arena.restart()
        self._count = 0
        result = build()
        self.num_instructions = max(self.num_instructions, self._count)
        return lambda: result

    def empty(self, shape: tuple[int, ...], dtype: Any = None) -> np.ndarray:
        """Return an array of the arena, of activations if no type is named."""
        return self.arena.empty(shape, self._act if dtype is None else dtype, self)

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
        """Return an input of recordings, which is no part of the arena."""
        self.input_bytes += math.prod(shape) * np.dtype(dtype).itemsize
        return np.broadcast_to(np.zeros((), dtype), shape)

    def assign(self, target: np.ndarray, values: np.ndarray) -> None:
        """Nothing to write to."""

    def _out(self, shape: tuple[int, ...], dtype: Any = None, *, instructions: int = 1) -> np.ndarray:
        """Emit instructions and return the array that they write."""
        self._count += instructions
        return self.empty(shape, dtype)

    def _in_place(self, *args: Any) -> None:
        """Emit an instruction that changes arrays there are."""
        self._count += 1

    def combine(self, kind: int, x: Any, y: Any, out: np.ndarray | None) -> np.ndarray:
        # Not np.shape, which calls into the arrays themselves; they refuse.
        shape = np.broadcast_shapes(*(getattr(array, "shape", ()) for array in (x, y)))
        self._count += 1
        return self.empty(shape) if out is None else out

    def contiguous(self, x: np.ndarray) -> np.ndarray:
        return x if x.flags.c_contiguous else self._out(x.shape)

    def concat(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        width = sum(array.shape[-1] for array in arrays)
        return self._out((*arrays[0].shape[:-1], width), instructions=len(arrays))

    # Model ops

    rotary_embedding = softcap = limit_columns = write_kv = write_latent = _in_place

    def embedding(self, ids: np.ndarray, weight: MetaWeight, first_row: int | None = None) -> np.ndarray:
        return self._out((len(ids), weight.inputs))

    def take_rows(self, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return self._out((len(ids), x.shape[1]))

    def head_linear(self, x: np.ndarray, weight: MetaWeight) -> np.ndarray:
        self._multiply(x.shape[0], weight)
        return self._out((x.shape[0], weight.outputs))

    def gated_linear(self, x: np.ndarray, weight: MetaWeight, activation: str) -> np.ndarray:
        out = self.linear(x, weight)
        return out if weight.gated else self.gated_activation(out, activation)

    def _multiply(self, rows: int, weight: MetaWeight) -> None:
        """Count the work of a product."""
        if rows:
            self._used.add(weight)
            self._flops += 2.0 * rows * weight.outputs * weight.inputs

    def linear(self, x: np.ndarray, weight: MetaWeight) -> np.ndarray:
        rows, outputs = x.shape[0], weight.outputs // (2 if weight.gated else 1)
        self._multiply(rows, weight)
        if self._processor is None:
            return self._gpu_product(rows, weight)
        if rows == 0:
            return self.empty((0, outputs))
        whole = rows // self._processor.tile_rows * self._processor.tile_rows
        return self._packed_product(weight, padded_rows(rows), whole, rows)[:rows, :outputs]

    def _packed_product(self, weight: MetaWeight, tiles: int, whole: int, rows: int) -> np.ndarray:
        """Allocate what `products.multiply` does, for `tiles` rows in tiles and `whole` rows in whole tiles."""
        width = weight.padded // 2 if weight.gated else weight.padded
        if weight.bits:
            out = self._out((rows, width), instructions=2)
            if self.quantization == "int8-weight-only":
                sizes = [tiles * weight.depth]  # inputs as floats
            else:  # as bytes, four in a word, with starts and scales
                sizes = [tiles * weight.depth // 4, tiles * (weight.depth // weight.group), tiles]
            packed = [self.empty((size,)) for size in sizes]
        else:
            packed = [self.empty((tiles * ((weight.inputs + 1) // 2) if self._paired else whole * weight.inputs,))]
            out = self._out((tiles if self._paired else rows, width), instructions=2)
        del packed
        return out

    def _gpu_product(self, rows: int, weight: MetaWeight) -> np.ndarray:
        """Return a product on a GPU; rows that are quantized are so before it, and gates are applied after it."""
        rounded = self.empty((rows, weight.depth), np.int8) if weight.bits else None
        out = self._out((rows, weight.outputs), np.float32 if weight.table else None)
        del rounded
        return self.empty((rows, weight.outputs // 2)) if weight.gated else out

    def route(self, logits: np.ndarray, params: RoutingParams) -> tuple[np.ndarray, np.ndarray]:
        shape = logits.shape[0], params.top_k
        return self._out(shape, np.int64), self.empty(shape)

    def experts(
        self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, packed: MetaExperts, activation: str
    ) -> np.ndarray:
        """See `experts` and `Products` in `cpu/experts.py`."""
        if ids.size == 0:
            return self.empty((0, packed.last.outputs))
        self._mixtures[packed.number, ids.shape[1]] += packed.nbytes
        self._flops += sum(2.0 * ids.size * part.outputs * part.inputs for part in (packed.first, packed.last))
        capacity = expert_rows(ids.size, packed.number)
        sorting = [self.empty((size,), np.int64) for size in (8 * (min(ids.size, packed.number) + 1), 6, ids.size)]
        spread = self.empty((capacity, x.shape[1]))
        inner = self._grouped_product(capacity, packed.first)
        if not packed.first.gated:
            inner = self._out((capacity, packed.first.outputs // 2))
        del spread
        results = self._grouped_product(capacity, packed.last)
        del inner
        out = self._out((ids.shape[0], packed.last.outputs), instructions=3)
        del sorting, results
        return out

    def _grouped_product(self, capacity: int, weight: MetaWeight) -> np.ndarray:
        if self._processor is None:
            return self._gpu_product(capacity, weight)
        return self._packed_product(weight, capacity, capacity, capacity)

    def gated_activation(self, x: np.ndarray, activation: str) -> np.ndarray:
        source = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        return self._out((*x.shape[:-1], source.shape[1] // 2))

    def _rows(self, x: np.ndarray, *args: Any) -> np.ndarray:
        """Return an array like x, of which a copy may be made before if its rows are scattered."""
        source = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        out = self._out(x.shape)
        del source
        return out

    activation = rms_norm = layer_norm = _rows

    def add_rms_norm(self, x: np.ndarray, residual: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        return self._rows(residual)

    # LoRA adapters: a layer's slots are the columns between its factors

    def new_lora_slots(self, num_slots: int, max_rank: int, sizes: Sequence[int], widest: int = 0) -> tuple[int, int]:
        self.num_bytes += 3 * num_slots * len(sizes) * 5 * 8  # tables of addresses
        return len(sizes) * round_up(max_rank, LANES), widest

    def lora(self, y: np.ndarray, x: np.ndarray, slots: tuple[int, int], rows: LoRARows) -> None:
        if x.shape[0]:
            self._out((x.shape[0], slots[0]), instructions=2 + (slots[1] > 0))

    def lora_embedding(self, y: np.ndarray, ids: np.ndarray, slots: tuple[int, int], rows: LoRARows) -> None:
        if len(ids):
            self._out((len(ids), slots[0]), instructions=3)

    # Layers with states

    def causal_conv(self, x: np.ndarray, weight: np.ndarray, *args: Any) -> np.ndarray:
        """Each channel is a convolution by itself."""
        self._flops += 2.0 * x.size * weight.shape[0]
        return self._out(x.shape)

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
        """One pass over the state [rows, Hv, Dk, Dv] for each token."""
        self._flops += DELTA_FLOPS * v.size * state.shape[2]
        return self._out(v.shape)

    # Attention

    def paged_attention(
        self, q: np.ndarray, cache: MetaCache, metadata: AttentionMetadata, params: AttentionParams, fresh: Any = None
    ) -> np.ndarray:
        """The work is that of comparing a query with a key, and of adding its value, in all heads."""
        self.pair_flops += 2.0 * params.num_heads * (params.head_size + params.out_size)
        out = self.empty((q.shape[0], params.num_heads * params.out_size))
        if params.value_size is not None:
            params = replace(params, num_kv_heads=head_groups(params.num_heads))
        if self._processor is None:
            return out  # parts of long contexts are a few MiB, whatever the model
        key = (*params.reach, params.num_heads, params.num_kv_heads, params.out_size, cache.block_size)
        if key not in metadata.plans:
            metadata.plans[key] = self._plan(q.shape[0], metadata, params, cache.block_size)
        self._count += 4 if self.num_threads > 1 else 1
        return out

    def _plan(
        self, tokens: int, metadata: AttentionMetadata, params: AttentionParams, block_size: int
    ) -> tuple[np.ndarray, ...]:
        sizes = plan_sizes(self.num_threads, tokens, metadata.block_tables.shape[1] * block_size, params)
        items, merges = (sizes.items, RECORD), (sizes.merges, RECORD)
        staged = self.empty(items, np.int64)
        records = self.empty(items, np.int64), self.empty(merges, np.int64), self.empty((WORD_COUNT,), np.int64)
        partials = self._out((sizes.num_partials, sizes.partial_size))
        del staged
        return (*records, partials)

    # Logits

    def rows_finite(self, logits: np.ndarray) -> np.ndarray:
        rows, size = logits.shape
        chunks = -(-size // CHUNK)
        arrays = [self.empty((rows, LANES * chunks)), self.empty((rows, chunks))]
        arrays += [self.empty((rows,), kind) for kind in (np.float32, np.int64, np.bool_)]
        self._count += 2
        return arrays[-1]
