"""CPUBackend: the Backend ops on numpy arrays. It checks arguments and dispatches to the op files.

Those files emit instructions (threads.py), which run at once or, inside `graph`, become a program. What samples
tokens is never recorded and may look at values here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import llvmlite.binding as llvm
import numba
import numpy as np

from quire.checkpoint.tensor import QuantizedTensor, Tensor
from quire.kernels.backend import (
    Arrays,
    Backend,
    DeviceTokens,
    Penalties,
    SamplingOptions,
    TopLogprobs,
    Trace,
)
from quire.kernels.cpu import (
    activations,
    arithmetic,
    cache,
    heads,
    kv_write,
    linear_coded,
    linear_int,
    norms,
    rotary,
    rows,
    sampling,
    states,
)
from quire.kernels.cpu import lora as adapters
from quire.kernels.cpu.attention import attend_op, paged_attention, plan
from quire.kernels.cpu.attention_kernels import merge
from quire.kernels.cpu.cache import KV_STORAGE, PAIRED, CPUKVCache
from quire.kernels.cpu.experts import CPUExperts, experts, pack_experts, route
from quire.kernels.cpu.formats import STORAGE, CPULinear, pack
from quire.kernels.cpu.heads import CPUHeads
from quire.kernels.cpu.jit import Op, refresh_cache
from quire.kernels.cpu.levels import current_level
from quire.kernels.cpu.linear import FLOAT_OPS, linear_pairs
from quire.kernels.cpu.linear_int import pack_integers
from quire.kernels.cpu.products import Weight, linear
from quire.kernels.cpu.sampling import RowMaxima, logprobs_of, row_maxima
from quire.kernels.cpu.simd import HAS_BF16_DOT, HAS_VNNI
from quire.kernels.cpu.sizes import INT4_GROUP, can_gate
from quire.kernels.cpu.threads import Launcher
from quire.kernels.experts import Expert
from quire.kernels.host_blocks import HostMemory
from quire.kernels.lora import LoRAChange
from quire.kernels.weight_storage import stored_layout

P = ParamSpec("P")
R = TypeVar("R")


def _array(values: np.ndarray, dtype: type) -> np.ndarray:
    """Return `values` as kernels want them: this dtype, contiguous, aligned, writable; a copy only where needed."""
    if values.dtype == dtype and values.flags.carray:
        return values
    return np.require(values, dtype, ["C", "A", "W"])


def _op(emit: Callable[Concatenate[Launcher, P], R]) -> Callable[Concatenate[CPUBackend, P], R]:
    """Return the method that calls `emit` with the backend's launcher."""

    def method(self: CPUBackend, /, *args: P.args, **options: P.kwargs) -> R:
        return emit(self._launcher, *args, **options)

    return method


class CPUBackend(HostMemory, Backend):
    """Every op of `quire.kernels.backend.Backend` in numpy and Numba; arrays are numpy, activations float32.

    Attributes:
        bf16_dot: whether products use the CPU's dot products of bfloat16 (AVX-512 BF16). Then, with dtype bfloat16,
            `linear` and `head_linear` round their inputs to bfloat16 (nearest even), and attention to a cache of
            bfloat16 or int8 its queries and weights; all else is the same without.
        vnni: whether products of integers use AVX-512 VNNI. They give the same bits without.
    """

    name = "cpu"

    def __init__(
        self,
        dtype: str = "float32",
        kv_dtype: str = "float32",
        num_threads: int | None = None,
        quantization: str | None = None,
        *,
        dot_products: bool = True,
    ) -> None:
        """Hold weights in `dtype` and keys and values in `kv_dtype`; use `num_threads`, None for all cores.

        `quantization` is one of QUANTIZATIONS and replaces `dtype` for the weights of linear layers and tables.
        `dot_products` False leaves the CPU's dot product instructions unused, which tests do.
        """
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.quantization = quantization
        self.bf16_dot, self.vnni = dot_products and HAS_BF16_DOT, dot_products and HAS_VNNI
        self._paired = dtype == "bfloat16" and self.bf16_dot
        self._launcher = Launcher(num_threads)
        self._launcher.recorder = arithmetic.Arithmetic(self._launcher)
        refresh_cache()
        self._linear = linear_pairs if self._paired else FLOAT_OPS[STORAGE[dtype]]
        # Those of the logits that `rows_finite` was given, for `sample`, unless an op changes them in between.
        self._last_maxima: tuple[np.ndarray, RowMaxima] | None = None
        self._paired_kv = kv_dtype in PAIRED and self.bf16_dot
        compiler = f"{current_level()} {numba.config.CPU_NAME or llvm.get_host_cpu_name()} numba {numba.__version__}"
        self.arithmetic = f"{compiler}; {' '.join(self.instructions)}, paired {self._paired_kv}"

    @property
    def num_threads(self) -> int:
        """Threads that kernels use."""
        return self._launcher.num_threads

    @property
    def instructions(self) -> tuple[str, str]:
        """Instruction sets of products of floats and of integers, as files and fingerprints name them."""
        return "avx512_bf16" if self.bf16_dot else "generic", "avx512_vnni" if self.vnni else "generic"

    def compiled_before(self) -> bool:
        """Return whether this backend's main kernels are compiled on disk, so that the first step starts at once."""
        return all(op.is_cached() for op in self._main_ops())

    def _main_ops(self) -> list[Op]:
        """Return the ops that take long to compile and that every model needs, whatever its norms are."""
        storage = KV_STORAGE[self.kv_dtype]
        ops = [*self._products(), kv_write.WRITE[storage], plan, attend_op(storage, self._paired_kv)]
        return [*ops, merge] if self.num_threads > 1 else ops  # one thread splits nothing

    def _products(self) -> list[Op]:
        """Return the ops of linear layers and of the output table."""
        if self.quantization is None:
            return [self._linear]
        if self.quantization == "int8-weight-only":
            return [linear_int.FLOAT_OP]
        widths = (4, 8) if self.quantization == "int4" else (8,)  # tables have eight bits
        return [linear_int.OPS[bits, self.vnni] for bits in widths]

    # Arrays

    def from_numpy(self, array: np.ndarray) -> np.ndarray:
        return np.require(array, requirements=["C", "A", "W"])

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        return array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array

    def fetch(self, array: np.ndarray) -> Callable[[], np.ndarray]:
        copied = np.array(self.to_numpy(array))
        return lambda: copied

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
        return np.zeros(shape, dtype)

    def assign(self, target: np.ndarray, values: np.ndarray) -> None:
        target[...] = values

    def graph(self, build: Callable[[], Arrays]) -> Callable[[], Arrays]:
        """Record the program that repeats it, see threads.py."""
        self._last_maxima = None
        with self._launcher.record() as made:
            recorded = build()
        result = tuple(None if array is None else np.asarray(array) for array in recorded)
        maxima = None
        if self._last_maxima is not None:  # logits that `rows_finite` looked at
            place = next(i for i, array in enumerate(recorded) if array is self._last_maxima[0])
            maxima = result[place], self._last_maxima[1].readable()

        def run() -> Arrays:
            made[0].run()
            self._last_maxima = maxima
            return result

        return run

    def start_profile(self, trace: Trace) -> None:
        """Trace every instruction, with the threads that carry it out."""
        self._launcher.start_trace(trace)

    def stop_profile(self, path: Path) -> list[Path]:
        self._launcher.stop_trace()
        return []

    def collective(
        self, exchange: Callable[[np.ndarray, np.ndarray], None], x: np.ndarray, shape: tuple[int, ...]
    ) -> np.ndarray:
        """Return an array of this shape that `exchange(x, out)` fills with other ranks, in its turn in a recording."""
        out = self._launcher.empty(shape)
        source, target = np.asarray(x), np.asarray(out)
        self._launcher.call(lambda: exchange(source, target))
        return out

    # Weights

    def vector(self, tensor: Tensor) -> np.ndarray:
        return np.array(tensor.to_float32(), np.float32, order="C")

    def pack_linear(
        self,
        parts: Sequence[Tensor],
        biases: Sequence[Tensor] | None = None,
        *,
        gated: bool = False,
        table: bool = False,
        exact: bool = False,
    ) -> Weight:
        gated = gated and can_gate(parts)
        if self.quantization is None and not exact:
            stored = self._as_stored(parts, biases, gated, table)
            if stored is not None:
                return stored
        if self.quantization is None or exact:
            return pack(parts, biases, self.dtype, self._launcher, self._paired, gated)
        bits, group = (4, INT4_GROUP) if self.quantization == "int4" and not table else (8, None)
        return linear_int.pack_floats(parts, biases, self._launcher, bits, group, gated)

    def pack_experts(self, experts: Iterable[Expert]) -> CPUExperts:
        return pack_experts(experts, self.pack_linear)

    def pack_heads(self, matrices: Sequence[Tensor]) -> CPUHeads:
        return heads.pack_heads(self._launcher, matrices, self.dtype, self._paired)

    def _as_stored(
        self, parts: Sequence[Tensor], biases: Sequence[Tensor] | None, gated: bool, table: bool
    ) -> Weight | None:
        """Return a weight of a quantized checkpoint with the numbers it has; None where floats are made of them."""
        layout = stored_layout(parts, self.dtype, table=table)
        if layout is None:
            return None
        stored = [part for part in parts if isinstance(part, QuantizedTensor)]
        if layout.kind == "integers":
            return pack_integers(stored, biases, self._launcher, gated)
        return linear_coded.pack_codes(stored, biases, self._launcher, self._paired, gated)

    # Model ops

    concat = _op(arithmetic.concat)
    take_rows = _op(rows.take_rows)
    head_linear = _op(heads.head_linear)
    route = _op(route)
    lora = _op(adapters.lora)
    lora_embedding = _op(adapters.lora_embedding)
    limit_columns = _op(adapters.limit_columns)
    rms_norm = _op(norms.rms_norm)
    add_rms_norm = _op(norms.add_rms_norm)
    layer_norm = _op(norms.layer_norm)
    rotary_embedding = _op(rotary.rotary)
    softcap = _op(activations.softcap)
    activation = _op(activations.activation)
    gated_activation = _op(activations.gated_activation)
    causal_conv = _op(states.causal_conv)
    gated_delta = _op(states.gated_delta)
    write_kv = _op(kv_write.write_kv)
    write_latent = _op(kv_write.write_latent)
    paged_attention = _op(paged_attention)

    def embedding(self, ids: np.ndarray, weight: Weight, first_row: int | None = None) -> np.ndarray:
        if first_row is not None:
            local = rows.local_ids(self._launcher, ids, first_row, weight.outputs)
            return rows.zero_other_rows(self._launcher, self.embedding(local, weight), ids, first_row, weight.outputs)
        if isinstance(weight, linear_int.IntLinear):
            return linear_int.embed(self._launcher, rows.as_ids(self._launcher, ids), weight)
        assert isinstance(weight, CPULinear), "tables are not stored as codes"
        return rows.embedding(self._launcher, ids, weight.data, weight.inputs, weight.depth, weight.paired)

    def linear(self, x: np.ndarray, weight: Weight) -> np.ndarray:
        return self._product(x, weight)

    def gated_linear(self, x: np.ndarray, weight: Weight, activation: str) -> np.ndarray:
        if weight.gated:
            return self._product(x, weight, activations.GATED_ACTIVATIONS[activation])
        halves = self._product(x, weight)
        return self.gated_activation(halves, activation)

    def experts(
        self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, packed: CPUExperts, activation: str
    ) -> np.ndarray:
        rounded = self.quantization != "int8-weight-only"
        activation_id = activations.GATED_ACTIVATIONS[activation]
        return experts(self._launcher, x, ids, weights, packed, activation_id, self.vnni, rounded)

    def _product(self, x: np.ndarray, weight: Weight, activation_id: int = activations.NO_ACTIVATION) -> np.ndarray:
        if x.shape[1] != weight.inputs:
            raise ValueError(f"linear: x is {x.shape}, the weight has {weight.inputs} inputs")
        rounded = self.quantization != "int8-weight-only"
        return linear(self._launcher, x, weight, activation_id, vnni=self.vnni, round_inputs=rounded)

    set_lora = staticmethod(adapters.set_slot)

    def new_lora_slots(
        self, num_slots: int, max_rank: int, sizes: Sequence[int], widest: int = 0
    ) -> adapters.CPULoRASlots:
        return adapters.new_slots(num_slots, max_rank, sizes, widest, self.dtype)

    def pack_lora(self, change: LoRAChange, *, lookup: bool = False) -> adapters.PackedLoRA:
        return adapters.pack(change, self.dtype, lookup=lookup)

    # KV cache and attention

    def new_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, latent: bool = False
    ) -> CPUKVCache:
        storage = KV_STORAGE[self.kv_dtype]
        if latent:
            return CPUKVCache.allocate_latent(num_blocks, block_size, head_size, storage, self._paired_kv)
        return CPUKVCache.allocate(num_blocks, block_size, num_kv_heads, head_size, storage, self._paired_kv)

    copy_blocks = staticmethod(cache.copy_blocks)
    block_nbytes = staticmethod(cache.block_nbytes)
    read_blocks = staticmethod(cache.read_blocks)
    write_blocks = staticmethod(cache.write_blocks)

    # Logits and sampling

    def apply_penalties(self, logits: np.ndarray, penalties: Penalties, last: DeviceTokens | None = None) -> None:
        self._last_maxima = None
        if last is not None:
            penalties = penalties.with_tokens(last.tokens, last.indices)
        dtypes = (np.int64, np.int64, np.int32, np.int32, np.float32, np.float32, np.float32)
        arrays = (_array(values, dtype) for values, dtype in zip(penalties, dtypes, strict=True))
        sampling.penalize(self._launcher, logits, Penalties(*arrays))

    def add_bias(self, logits: np.ndarray, rows: np.ndarray, tokens: np.ndarray, values: np.ndarray) -> None:
        self._last_maxima = None
        np.add.at(logits, (rows, tokens), values)

    def put_rows(self, logits: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
        self._last_maxima = None
        logits[rows] = values

    def apply_bitmask(self, logits: np.ndarray, rows: np.ndarray, bitmask: np.ndarray) -> None:
        self._last_maxima = None
        sampling.apply_bitmask(self._launcher, logits, _array(rows, np.int64), _array(bitmask, np.int32))

    def rows_finite(self, logits: np.ndarray) -> np.ndarray:
        maxima = row_maxima(self._launcher, logits)
        self._last_maxima = logits, maxima
        return maxima.finite

    def greedy(self, logits: np.ndarray) -> np.ndarray:
        return self._maxima_of(logits).tokens

    def sample(self, logits: np.ndarray, options: SamplingOptions, uniforms: np.ndarray) -> np.ndarray:
        maxima = self._maxima_of(logits)
        if not options.temperature.any():
            return maxima.tokens
        return sampling.sample(self._launcher, maxima, options, uniforms)

    def _maxima_of(self, logits: np.ndarray) -> RowMaxima:
        """Return the maxima that `rows_finite` has computed for these logits, or compute them."""
        last, self._last_maxima = self._last_maxima, None
        return last[1] if last is not None and last[0] is logits else row_maxima(self._launcher, logits)

    def top_logprobs(self, logits: np.ndarray, chosen: np.ndarray, k: int) -> TopLogprobs:
        maxima = row_maxima(self._launcher, logits)
        k = min(int(k), logits.shape[1])
        return logprobs_of(self._launcher, maxima, _array(chosen, np.int64), k)
