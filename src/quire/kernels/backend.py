"""The `Backend` interface, the only thing in Quire that knows what an array is, as protocols by concern.

Each op is declared once, here, with shapes, dtypes and, where its meaning follows from other ops, a default. Backends
inherit `Backend` and implement the rest; `kernels/reference` is the definition of what they compute.

An *array* is a `numpy.ndarray` on the CPU backend and a `torch.Tensor` on the others. Models, layers, the worker and
the sampler call the ops below, plus what both array kinds share: slicing, `reshape`, indexing by an index array of
`from_numpy`, and + - *. Nothing else. Activations are float32 on the CPU and reference backends and `dtype` on the GPU;
there ops take float32 as well, which sums with vectors may be, and logits are float32 everywhere.

Shape legend: T tokens in the step (flat, no padding), S sequences, R rows to sample, H hidden, V vocabulary,
N/K output/input features of a linear, Hq/Hkv query/KV heads, D head size, B blocks, bs block size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from quire.checkpoint.tensor import Tensor
from quire.kernels.experts import Expert, RoutingParams
from quire.kernels.lora import LoRAChange, LoRARows
from quire.kernels.memory import DeviceMemory
from quire.kernels.steps import DirectStager, Stager, StepShape

Array = Any  # numpy.ndarray or torch.Tensor, see the module docstring
Arrays = tuple[Any, ...]  # arrays, or None in place of one
LinearWeight = Any  # opaque: what a backend makes of a weight matrix
HeadsWeight = Any  # opaque: what a backend makes of one matrix for each head
ExpertsWeight = Any  # opaque: what a backend makes of all experts of a layer
HeadNorms = tuple[Array, Array, float]  # see `Backend.rotary_write_kv`
KVCache = Any  # opaque: one layer's keys and values; models are handed it as a `LayerCache`

STAGED_LAYERS = 2  # of which layer-wise offloaded blocks have room on the device at a time
NEG_INF = float("-inf")
EVERYTHING = 1 << 40  # tokens: more than any sequence has
QUANTIZATIONS = ("int8", "int8-weight-only", "int4", "fp8")
"""What weights can be turned into while they are packed; docs/quantization.md says what each is."""


@dataclass(slots=True)
class AttentionMetadata:
    """Where each token of the step belongs; built once a step by the model runner, as backend arrays.

    Attributes:
        cu_query_lens: int32 [S+1]; tokens of sequence s are rows cu_query_lens[s] : cu_query_lens[s+1].
        seq_lens: int32 [S]; context length including this step's tokens. A sequence's queries are its last positions.
        block_tables: int32 [S, max_blocks]; token position p lies in block block_tables[s, p // bs].
        slot_mapping: int64 [T]; block_id * bs + p % bs for each token of the step.
        logits_indices: int64 [R], the tokens whose hidden states are computed to the end; None for all.
        further: block_tables and slot_mapping of groups of layers 1, 2, ...; those above belong to group 0.
        state_rows: int64 [S], the row of each sequence in layers' states; None where no layer has any. Sequences of
            padding share one that no other has. A sequence without computed tokens (seq_lens is as long as its
            part of the step) starts from zeros, whatever is there.
        token_types: int64 [T], 0 or 1, for encoders that mark the two texts of a pair; None for other models.
        inputs_embeds: rows that replace those of the embedding table; None where there are none.
        lengths: cu_query_lens and seq_lens on the host; None where a graph must hold for other steps.
        single: each sequence has exactly one token, so that row s is that of sequence s.
        plans: what a backend computes once for all layers, of any group.

    Entries of a block table for positions that no query of the step sees may be any block of the pool. A graph may be
    padded: rows at the end belong to no sequence, have slots of -1, where nothing is written, and get any result;
    sequences at the end have a seq_len of 0 and, unless `single`, no row.
    """

    cu_query_lens: Array
    seq_lens: Array
    block_tables: Array
    slot_mapping: Array
    logits_indices: Array | None = None
    further: tuple[tuple[Array, Array], ...] = ()
    state_rows: Array | None = None
    token_types: Array | None = None
    inputs_embeds: InputsEmbeds | None = None
    lengths: StepLengths | None = None
    single: bool = False
    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def of_group(self, group: int) -> AttentionMetadata:
        """Return the metadata for layers of this group: the same step, with their blocks."""
        if group == 0:
            return self
        block_tables, slot_mapping = self.further[group - 1]
        return replace(self, block_tables=block_tables, slot_mapping=slot_mapping)


class InputsEmbeds(NamedTuple):
    """Embeddings that do not come from the table of token embeddings, such as those of images.

    Attributes:
        mask: float32 [T, 1], 0 for tokens whose embedding is replaced, 1 for the others.
        rows: float32 [T, H], the replacements; zeros for the others.
    """

    mask: Array
    rows: Array


class StepLengths(NamedTuple):
    """Lengths of a step's sequences on the host: int64 numpy [S], their tokens of this step, and of their context."""

    query_lens: np.ndarray
    seq_lens: np.ndarray


class LayerCache(NamedTuple):
    """The cache of one attention layer, as models receive it, and the group of layers whose block tables it uses.

    A layer whose part of some blocks is on the host has the `offload`, in which it is number `offload_index`.
    """

    cache: KVCache
    group: int = 0
    offload: LayerwiseOffload | None = None
    offload_index: int = 0

    def wait_for_load(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Return the metadata by which this layer writes to its cache and attends; then `save` is to be called."""
        own = metadata.of_group(self.group)
        return own if self.offload is None else self.offload.wait_for_load(self.offload_index, own)

    def save(self) -> None:
        """Say that the layer's attention was computed, to have what it wrote saved if it is offloaded."""
        if self.offload is not None:
            self.offload.save(self.offload_index)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The constants of one attention layer.

    Attributes:
        num_heads, num_kv_heads, head_size: of this rank. scale: multiplies q.k.
        causal: a query sees itself and what is before it. Otherwise (encoders) it sees all of its sequence's tokens
            that are computed, this step's included, so that a text must be in one step.
        sliding_window: w; a query sees itself and the w - 1 tokens before it, and where attention is not causal also
            the w - 1 tokens after it (a `local_attention` of 128 as ModernBERT counts it, 64 to each side, is a w of
            65). None sees all.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2); None is off.
        sinks: float32 [Hq] array of extra logits that only enter the softmax denominator (GPT-OSS), or None.
        alibi_slopes: float32 [Hq] array; slope * (key position - query position) is added to logits, or None. Causal
            attention only.
        value_size: for a latent cache (DeepSeek-V2, section 2.1): all heads share one vector of head_size per token as
            their key, whose first value_size elements are their value; num_kv_heads is 1. None for other caches.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Array | None = None
    alibi_slopes: Array | None = None
    causal: bool = True
    value_size: int | None = None

    def __post_init__(self) -> None:
        assert self.causal or self.alibi_slopes is None
        assert self.value_size is None or self.value_size <= self.head_size

    @property
    def out_size(self) -> int:
        """Elements of a value."""
        return self.head_size if self.value_size is None else self.value_size

    @property
    def reach(self) -> tuple[int, int]:
        """How many tokens before itself, and after itself, a query sees at most."""
        side = EVERYTHING if self.sliding_window is None else self.sliding_window - 1
        return side, 0 if self.causal else side


class SamplingOptions(NamedTuple):
    """Sampling parameters of R rows: numpy arrays [R].

    temperature: floats, 0 for the largest logit. top_k: int64, 0 for all. top_p, min_p: floats.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray


class TopLogprobs(NamedTuple):
    """Log-probabilities of R rows: the chosen token first, then the k best in falling order; ranks start at 1.

    token_ids: int64 [R, 1+k]. logprobs: float32 [R, 1+k]. ranks: int64 [R]: 1 + the number of tokens with a strictly
    larger logit. Arrays of a backend, or numpy ones once they were fetched.
    """

    token_ids: Array
    logprobs: Array
    ranks: Array

    def fetch(self, backend: Backend) -> Callable[[], TopLogprobs]:
        """Start copying the arrays to the host; the returned function waits and returns them as numpy arrays."""
        waiting = [backend.fetch(array) for array in self]
        return lambda: TopLogprobs(*(wait() for wait in waiting))


class DeviceTokens(NamedTuple):
    """Last tokens of R rows that only the device knows: that of row r is tokens[indices[r]].

    `tokens` is an array int64 of the backend, `indices` int64 numpy [R], -1 where the host knows the token.
    """

    tokens: Array
    indices: np.ndarray

    def of(self, rows: np.ndarray) -> DeviceTokens | None:
        """Return the tokens of `rows` int64 [n], in this order; None if the host knows all of them."""
        indices = self.indices[rows]
        return DeviceTokens(self.tokens, indices) if (indices >= 0).any() else None


class Penalties(NamedTuple):
    """Repetition, presence and frequency penalties of P rows of logits, and the tokens that they apply to.

    rows: int64 [P], no two the same. repetition, presence, frequency: float32 [P].
    The tokens of rows[p], in its prompt or output, are ids[starts[p] : starts[p + 1]], none twice, and counts says how
    often each is in the output; starts int64 [P + 1] from 0, ids and counts int32 [starts[P]].
    """

    rows: np.ndarray
    starts: np.ndarray
    ids: np.ndarray
    counts: np.ndarray
    repetition: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray

    def with_tokens(self, tokens: np.ndarray, places: np.ndarray) -> Penalties:
        """Return the same with tokens[places[p]] once more in the output of rows[p], where places[p] is not -1."""
        pieces = []
        for p, place in enumerate(places.tolist()):
            own, times = (values[self.starts[p] : self.starts[p + 1]] for values in (self.ids, self.counts))
            if place >= 0:
                here = own == tokens[place]
                times = times + here.astype(times.dtype)
                if not here.any():
                    own = np.append(own, tokens[place].astype(own.dtype))
                    times = np.append(times, np.ones(1, times.dtype))
            pieces.append((own, times))
        starts = np.cumsum([0, *(len(own) for own, _ in pieces)], dtype=np.int64)
        ids, counts = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        return self._replace(starts=starts, ids=ids, counts=counts)


class ArrayOps(Protocol):
    """Arrays on the device, and their copies to and from the host.

    Attributes:
        name: "cpu", "cuda" or "reference".
        dtype: of weights: "float32", "bfloat16" or "float16". kv_dtype: of the KV cache: one of these, "int8" or "fp8".
        quantization: one of QUANTIZATIONS, or None.
        arithmetic: names what else the bits of a KV cache depend on: instructions, compiler, layout of a block.
    """

    name: str
    dtype: str
    kv_dtype: str
    quantization: str | None
    arithmetic: str

    def from_numpy(self, array: np.ndarray) -> Array:
        """Return `array` on the device; may share memory (CPU). Keeps the dtype."""

    def to_numpy(self, array: Array) -> np.ndarray:
        """Return the array on the host; float values as float32. May share memory."""

    def fetch(self, array: Array) -> Callable[[], np.ndarray]:
        """Start copying what `array` holds now to the host; the function waits for that and returns it as `to_numpy`.

        What changes the array afterwards does not change what is returned. Only this and `to_numpy` wait for a device.
        """

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        """Return a zeroed array."""

    def concat(self, arrays: Sequence[Array]) -> Array:
        """Join [*, n_i] arrays along the last axis."""

    def assign(self, target: Array, values: np.ndarray) -> None:
        """target[...] = values, in place; target may be a slice of an array of `zeros`."""

    def take_rows(self, x: Array, ids: Array) -> Array:
        """Return x[ids]: rows ids int64 [R] of x [T, N]."""

    def gather_tokens(self, target: Array, source: Array, indices: Array) -> None:
        """target[...] = source[indices], in place; all int64 [n], but source [m]. Does not wait for the device."""
        target[...] = source[indices]

    def store_tokens(self, target: Array, indices: Array, tokens: Array, finite: Array) -> Array:
        """target[indices] = tokens, in place, where finite; elsewhere 0. Return the tokens, -1 where not finite.

        `indices`, `tokens` int64 [R], `finite` bool [R]. Does not wait for the device.
        """
        stored: Array = (tokens + 1) * finite - 1
        target[indices] = stored.clip(min=0)
        return stored


class LinearOps(Protocol):
    """Weights of linear layers and embeddings, and products with them."""

    def vector(self, tensor: Tensor) -> Array:
        """Return the array of a norm weight, bias, or table that ops use as it is; float32 on the CPU backend."""

    def pack_linear(
        self,
        parts: Sequence[Tensor],
        biases: Sequence[Tensor] | None = None,
        *,
        gated: bool = False,
        table: bool = False,
        exact: bool = False,
    ) -> LinearWeight:
        """Pack [N_i, K] matrices, stacked along N into one, with an optional bias of the same N.

        Parts are consumed one after the other, so that no second full copy of a model ever exists. They are quantized
        where the backend does so. The result serves `linear`, or with these keywords something else:

        Args:
            gated: two parts of the same size, gate and up, for `gated_linear` only.
            table: an embedding table [V, H], for `embedding` too (tied embeddings are packed once); 8 bits a weight
                where others have 4.
            exact: never quantized.
        """

    def pack_heads(self, matrices: Sequence[Tensor]) -> HeadsWeight:
        """Pack a matrix [B, A] for each of H heads for `head_linear`, in `dtype`; never quantized."""

    def embedding(self, ids: Array, weight: LinearWeight, first_row: int | None = None) -> Array:
        """Look up rows: ids int [T], weight [V, H] -> [T, H]. Ids are in range (checked at the edge).

        With `first_row` the weight has rows first_row : first_row + V of the whole table; other ids give zeros.
        """

    def linear(self, x: Array, weight: LinearWeight) -> Array:
        """x [T, K] @ weight.T (+ bias) -> [T, N], accumulated in float32, independent of T row by row.

        Where weights are bfloat16, a backend may round x to bfloat16 (nearest even), because the fast instructions
        multiply pairs of it; which backends do does not depend on T either. Where weights are quantized, it may
        quantize x, row by row.
        """

    def head_linear(self, x: Array, weight: HeadsWeight) -> Array:
        """Multiply each head with a matrix of its own: x [T*H, A] -> [T*H, B], row t * H + h with matrix h.

        Sums are float32, and each row is by itself; x is rounded where `linear` rounds it.
        """

    def gated_linear(self, x: Array, weight: LinearWeight, activation: str) -> Array:
        """act(gate) * up -> [T, I], where gate and up are the halves of `linear`; `weight` was packed as `gated`.

        `activation` is one of those of the op, or "swiglu_oai": (up + 1) * gate * sigmoid(1.702 * gate), with gate at
        most 7 and up from -7 to 7 (GPT-OSS).
        """

    def gated_activation(self, x: Array, activation: str) -> Array:
        """act(gate) * up -> [T, I] of what `linear` made: x [T, 2 * I], gate in the first half; see `gated_linear`."""


class CollectiveOps(Protocol):
    """Collectives of `world_size` tensor-parallel ranks; this backend is the one of rank `rank`.

    Every rank calls the same ones in the same order. They are model ops, recorded like any other. The defaults are
    those of a single rank.
    """

    rank: int = 0
    world_size: int = 1

    def all_reduce(self, x: Array) -> Array:
        """Return the sum of `x` over all ranks, added in rank order."""
        return x

    def all_gather(self, x: Array) -> Array:
        """Return the ranks' `x` joined along the last axis, in rank order."""
        return x


class ExpertOps(Protocol):
    """Mixtures of experts; see `kernels/experts.py` for what they consist of."""

    def pack_experts(self, experts: Iterable[Expert]) -> ExpertsWeight:
        """Pack the experts of a layer for `experts`, quantized where `pack_linear` would; all of the same shapes.

        They are consumed one by one, so that no second copy of all of them ever exists. If they have a length, a
        backend may make room for all of them when the first has come.
        """

    def route(self, logits: Array, params: RoutingParams) -> tuple[Array, Array]:
        """Choose experts by a router's logits [T, E] -> ids int64 [T, k], no two of a row the same, weights float32.

        Best first, and the lower id first among equals. Each row by itself; ids are in range whatever the logits are.
        """

    def experts(self, x: Array, ids: Array, weights: Array, packed: ExpertsWeight, activation: str) -> Array:
        """Sum weights[t, j] * down(act(gate(x)) * up(x)) of experts ids[t, j] over j, in order: x [T, H] -> [T, H].

        ids and weights [T, k] are those of `route`; `activation` is one of those of `gated_linear`. Inputs of each
        product are rounded as `linear` would. A row's result does not depend on other rows, and only experts that some
        row has chosen are read.
        """


class LoRAOps(Protocol):
    """LoRA adapters; see `kernels/lora.py`."""

    def new_lora_slots(self, num_slots: int, max_rank: int, sizes: Sequence[int], widest: int = 0) -> Any:
        """Return empty slots for the adapters of one layer, whose N outputs are parts of these sizes.

        Each part has factors of its own, of at most `max_rank`. `widest`: most rows of a `LoRAChange.whole`.
        """

    def pack_lora(self, change: LoRAChange, *, lookup: bool = False) -> Any:
        """Pack what an adapter changes in one part, for `lora`, or with `lookup` for `lora_embedding`."""

    def set_lora(self, slots: Any, slot: int, parts: Sequence[Any]) -> None:
        """Put the result of `pack_lora`, or None, for each part into a slot; graphs that use the slot see it."""

    def lora(self, y: Array, x: Array, slots: Any, rows: LoRARows) -> None:
        """In place: y[t] += B A x[t] for rows with an adapter, part by part; or y[t] = W x[t] where it has a whole W.

        x [T, K], y [T, N] is what `linear` made of x. Row by row independent of what else is in the step.
        """

    def lora_embedding(self, y: Array, ids: Array, slots: Any, rows: LoRARows) -> None:
        """In place: y[t] += B A[:, ids[t]] for rows with an adapter, or y[t] = W[ids[t]]; y [T, K], ids [T]."""

    def limit_columns(self, x: Array, limits: Array) -> None:
        """In place: x[r, limits[r] :] = -inf; x [R, N], limits int64 [R]."""


class RowOps(Protocol):
    """Norms, rotary positions and activations: ops on rows of activations."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019) of each piece of H: x [..., n * H], weight [H]."""

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float) -> Array:
        """In place: residual += x; return rms_norm(residual). Both [T, H]."""

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        """(x - mean) / sqrt(var + eps) * weight + bias over the last axis."""

    def rotary_embedding(
        self, positions: Array, q: Array, k: Array, cos_sin: Array, head_size: int, interleaved: bool
    ) -> None:
        """Rotate q [T, Hq*D] and k [T, Hkv*D] in place (Su et al. 2021).

        cos_sin is float32 [max_position, rotary_dim]: cos of the rotary_dim/2 angles, then sin. Only the first
        rotary_dim of each head are rotated. `interleaved` pairs (2i, 2i+1), otherwise (i, i + rotary_dim/2).
        """

    def activation(self, x: Array, activation: str) -> Array:
        """One of "relu", "relu2" (squared), "silu", "gelu" (erf), "gelu_tanh", "quick_gelu", "sigmoid", "softplus"."""

    def softcap(self, x: Array, cap: float) -> None:
        """x = cap * tanh(x / cap) of x [T, N], in place."""


class StateOps(Protocol):
    """Recurrent layers. States are float32 arrays [rows, ...], changed in place; see `AttentionMetadata.state_rows`."""

    def causal_conv(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        state: Array,
        metadata: AttentionMetadata,
        activation: str | None = None,
    ) -> Array:
        """Convolve each channel of each sequence with its last inputs, itself included: x [T, C] -> [T, C].

        out[t, c] = sum over j < K of weight[j, c] * x[t - K + 1 + j, c] (+ bias[c]), then `activation` if
        given; weight float32 [K, C], bias [C]. Inputs of earlier steps come from state [rows, K - 1, C], oldest first.
        """

    def gated_delta(
        self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array, metadata: AttentionMetadata
    ) -> Array:
        """Gated delta rule (Yang et al. 2024, Gated Delta Networks, equation 10), token by token -> [T, Hv*Dv].

        Each head of each sequence has a matrix S [Dk, Dv] in state [rows, Hv, Dk, Dv]. A token makes it
        S' = e^decay S;  S = S' + k (beta (v - k S'))^T, and gives q S. q and k are [T, Hk*Dk], v [T, Hv*Dv]; decay
        (at most 0) and beta [T, Hv]. Value head h goes with key head h // (Hv / Hk). The result does not depend on how
        a prompt is cut into steps.
        """

    def copy_states(self, state: Array, pairs: np.ndarray) -> None:
        """Copy rows of a state: pairs int64 [n, 2] of (source, destination), one after the other."""
        for source, destination in pairs.tolist():
            state[destination] = state[source]


class AttentionOps(RowOps, Protocol):
    """Writes to the paged KV cache, and attention over it."""

    def write_kv(self, k: Array, v: Array, cache: KVCache, slot_mapping: Array) -> None:
        """Store k, v [T, Hkv*D] at slot_mapping [T], rounding to `kv_dtype`."""

    def write_latent(self, x: Array, cache: KVCache, slot_mapping: Array) -> None:
        """Store x [T, D] at slot_mapping [T] of a latent cache, rounding to `kv_dtype`."""

    def rotary_write_kv(
        self,
        positions: Array,
        q: Array,
        k: Array,
        v: Array,
        cos_sin: Array,
        head_size: int,
        interleaved: bool,
        cache: KVCache,
        slot_mapping: Array,
        norms: HeadNorms | None = None,
    ) -> tuple[Array, Array]:
        """`rotary_embedding` of q and k in place, then `write_kv` of k and v; return q and k.

        With `norms` all heads are normed before, which may be in place: weights [D] for those of q and of k, and eps.
        The default is unfused: one op after the other.
        """
        if norms is not None:
            q, k = self.rms_norm(q, norms[0], norms[2]), self.rms_norm(k, norms[1], norms[2])
        self.rotary_embedding(positions, q, k, cos_sin, head_size, interleaved)
        self.write_kv(k, v, cache, slot_mapping)
        return q, k

    def paged_attention(
        self,
        q: Array,
        cache: KVCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
        fresh: tuple[Array, Array] | None = None,
    ) -> Array:
        """Attention of q [T, Hq*D] over each sequence's blocks -> [T, Hq * size of a value].

        One entry for prefill, chunks and decode mixed: the query at row i of sequence s has position
        seq_lens[s] - query_len[s] + i and sees what `params` say, as a rule keys at positions <= its own. A row's
        result does not depend on what else is in the step. Keys of this step are already in the cache (`write_kv`
        comes first); `fresh` are the same once more, k and v [T, Hkv*D] as they were written, for backends that would
        rather not read those of whole prompts back.
        """


class HostBlocks(Protocol):
    """A pool of KV blocks in host memory, each with all layers' bytes of a device block side by side.

    Calls take effect in their order, and in the order of the ops that the backend runs: what a call reads is
    what earlier ones have written, and it reads it before later ones write. That is all that is promised: when bytes
    really move is the backend's business, and nobody waits for it. Ids are int64 numpy [n], none named twice.
    """

    block_nbytes: int

    def copy_out(self, block_ids: np.ndarray, host_block_ids: np.ndarray) -> None:
        """Copy blocks of the device into blocks of the pool."""

    def copy_in(self, host_block_ids: np.ndarray, block_ids: np.ndarray) -> None:
        """Copy blocks of the pool into blocks of the device."""

    def read(self, block_ids: np.ndarray) -> Callable[[], np.ndarray]:
        """Begin to copy blocks of the device to memory of their own.

        The function waits for it, in any thread, and returns uint8 [n, block_nbytes].
        """

    def write(self, block_ids: np.ndarray, data: np.ndarray) -> None:
        """Fill blocks of the device with uint8 [n, block_nbytes], which is free on return."""

    def close(self) -> None:
        """Wait for copies under way, and free the memory. A second call does nothing."""


class LayerwiseOffload(Protocol):
    """The layers of a model that are not resident, with a staging buffer that `STAGED_LAYERS` of them share.

    Blocks from `first_layerwise` on are layerwise: of these the first layers of the model are resident on the device
    (they have caches of their own); the part of each other layer is on the host, and in the staging buffer while the
    layer attends and the next one is loaded. Calls take effect in their order and in that of the backend's ops; nobody
    waits.

    Attributes:
        caches: of the layers, in the model's order. Resident blocks have their own ids in one; layerwise ones those of
            the staging buffer while the layer is loaded.
        first_layerwise: id of the first layerwise block.
    """

    caches: Sequence[KVCache]
    first_layerwise: int

    def start_load(self, block_tables: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray) -> bool:
        """Begin a step in which every layer takes its turn once; False if it has no layerwise blocks.

        Args:
            block_tables: int [S, most blocks], at least as many as there are tokens for.
            query_lens, seq_lens: int [S], tokens of this step, and of the context with them; see `AttentionMetadata`.
        """

    def wait_for_load(self, layer: int, metadata: AttentionMetadata) -> AttentionMetadata:
        """Return the metadata for the cache of a layer: `metadata` itself in a step without layerwise blocks.

        Between this and `save` come all ops on the cache. Layers take turns in their order.
        """

    def save(self, layer: int) -> None:
        """Begin to copy what a layer wrote to layerwise blocks to the host, and release its staging buffer."""

    def copy_blocks(self, pairs: np.ndarray) -> None:
        """See `KVCacheOps.copy_blocks`: in all layers, between blocks of either kind. Not within a step."""

    def close(self) -> None:
        """Wait for copies under way, and free the memory. A second call does nothing."""


class KVCacheOps(Protocol):
    """Memory of the KV cache, and copies of whole blocks."""

    def new_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, latent: bool = False
    ) -> KVCache:
        """Allocate one layer's cache in `kv_dtype`; memory is touched only when written, where the system allows.

        In "int8" and "fp8" (e4m3) every token's key and value has, per head, a float32 scale of its own. A `latent`
        cache holds one vector of head_size per token and nothing else, see `AttentionParams.value_size`; not in "int8".
        """

    def copy_blocks(self, cache: KVCache, pairs: np.ndarray) -> None:
        """Copy whole blocks inside one layer's cache; pairs int64 [n, 2] of (source, destination).

        All sources are read before any destination is written; no destination may be named twice.
        """

    def block_nbytes(self, cache: KVCache) -> int:
        """Return the bytes that `read_blocks` gives for one block."""

    def read_blocks(self, cache: KVCache, block_ids: np.ndarray) -> np.ndarray:
        """Copy whole blocks, block_ids int64 [n], to the host: uint8 numpy [n, block_nbytes], scales included."""

    def write_blocks(self, cache: KVCache, block_ids: np.ndarray, data: np.ndarray) -> None:
        """Undo `read_blocks`, bit for bit, in blocks int64 [n], none named twice. `data` is free on return."""

    def host_blocks(self, caches: Sequence[KVCache], num_blocks: int) -> HostBlocks:
        """Allocate a pool of blocks in the host's memory for the blocks of `caches`, none of which occurs twice.

        Raises:
            ConfigError: there is no room for it.
        """

    def layerwise_offload(
        self,
        num_layers: int,
        num_blocks: int,
        num_layerwise_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        latent: bool = False,
    ) -> LayerwiseOffload:
        """Allocate layers' caches of `num_blocks` blocks, of which the last `num_layerwise_blocks` lie on the host.

        Raises:
            ConfigError: there is no room on the host, or the device is the host.
        """


class SamplingOps(ArrayOps, Protocol):
    """Changes to logits float32 [R, V] of R rows, and sampling from them."""

    def apply_penalties(self, logits: Array, penalties: Penalties, last: DeviceTokens | None = None) -> None:
        """In place: penalize the tokens that each row has in its prompt or its output.

        Repetition first: positive logits of these tokens are divided by it, others multiplied. Then
        logits -= frequency * count + presence * (count > 0). A token of `last` [P] is in the output once more.
        """

    def add_bias(self, logits: Array, rows: np.ndarray, tokens: np.ndarray, values: np.ndarray) -> None:
        """In place: logits[rows[e], tokens[e]] += values[e]; -inf bars a token. Pairs may repeat."""

    def ban_after(
        self, logits: Array, rows: np.ndarray, tokens: np.ndarray, last: DeviceTokens, before: np.ndarray
    ) -> None:
        """In place, for each e: if token e of `last` is before[e], ban tokens[e] in row rows[e].

        The default waits for the tokens.
        """
        hit = self.to_numpy(last.tokens)[last.indices] == before
        self.add_bias(logits, rows[hit], tokens[hit], np.full(int(hit.sum()), NEG_INF, np.float32))

    def put_rows(self, logits: Array, rows: np.ndarray, values: np.ndarray) -> None:
        """In place: `rows` int64 [P] become `values`, float32 numpy [P, V]."""

    def apply_bitmask(self, logits: Array, rows: np.ndarray, bitmask: np.ndarray) -> None:
        """In place: on `rows` int64 [P], no two the same, every token whose bit is clear becomes -inf.

        bitmask is int32 [P, ceil(V / 32)], contiguous; token t is bit t % 32, from the lowest, of word t // 32.
        """

    def rows_finite(self, logits: Array) -> Array:
        """Return bool [R]: whether the row holds no NaN and no +inf, and not only -inf. May be part of a `graph`."""

    def greedy(self, logits: Array) -> Array:
        """Return the first largest logit's token of each row, int64 [R]."""

    def sample(self, logits: Array, options: SamplingOptions, uniforms: np.ndarray) -> Array:
        """Choose one token per row -> int64 [R], which stay on the device. `logits` may be overwritten.

        uniforms: float64 [R] in [0, 1), what the draws depend on.
        Rows with temperature 0 take the first largest logit. Others, in this order: divide by temperature; keep the
        top_k largest (0 = all; ties with the k-th are kept); of those keep tokens whose probability is at least min_p
        times the largest; of those, sorted by falling logit (lower id first among equals), keep the shortest prefix
        whose renormalized probability reaches top_p; then take the first token of that order whose cumulative
        probability exceeds uniforms[r] times the kept mass. So equal logits and uniforms give
        equal tokens on every backend.
        """

    def top_logprobs(self, logits: Array, chosen: Array, k: int) -> TopLogprobs:
        """Return log_softmax of the rows, for the chosen ids int64 [R] and the k most likely; `logits` stay."""


class MemoryOps(Protocol):
    """The device's memory."""

    def available_memory(self) -> int:
        """Return the bytes of device memory free for weights and KV now."""

    def used_memory(self) -> int:
        """Return the bytes of that memory that this process has taken, in use or not."""

    def release_memory(self) -> None:
        """Return unused memory to the system, or to the driver."""

    def measure(self, work: Callable[[], object]) -> DeviceMemory | None:
        """Run `work` and return the memory that is used, and the most that `work` took beside it, `step`.

        None, and `work` does not run, where memory is counted ahead instead.
        """


class GraphOps(ArrayOps, Protocol):
    """Graphs of steps, and events that measure the time between points of the device's work.

    The defaults are those of a device whose ops are done when they return, and that gains nothing by padding.

    Attributes:
        pads: whether `step_shape` may return more than it is given.
    """

    pads: bool = False

    def graph(self, build: Callable[[], Arrays]) -> Callable[[], Arrays]:
        """Return a function that repeats the computation of `build()` on the arrays that `build` read.

        `build` calls model ops only. It is called once or each time; so the arrays it reads must stay where they are,
        and it must not depend on their values. What the function returns is overwritten by the next graph that runs.
        """

    def piecewise_graph(self, build: Callable[[AttentionMetadata], Arrays]) -> Callable[[AttentionMetadata], Arrays]:
        """Like `graph`, in pieces; ops between them go by the metadata given each time."""
        return build

    def step_shape(self, tokens: int, sequences: int, rows: int) -> StepShape:
        """Return the padded sizes in which a step is computed, and whether by `graph`, `piecewise_graph` or neither."""
        return StepShape(tokens, sequences, rows)

    def stager(self) -> Stager:
        """Return the object that copies the inputs of steps to their fixed addresses."""
        return DirectStager(self.assign)

    def compile_ahead(self, steps: Callable[[], None]) -> int:
        """Compile in parallel the kernels that `steps` would launch, and return how many they were.

        `steps` may be called or not, and what it computes is of no use. By default kernels are compiled at first use.
        """
        return 0

    def compiled_before(self) -> bool:
        """Return whether the main kernels are compiled already; on the first start on a machine they may not be."""

    def record_event(self) -> Any:
        """Record an event: the time at which the device has done all that it was given so far."""
        return time.perf_counter()

    def elapsed_seconds(self, earlier: Any, later: Any) -> float:
        """Return the seconds between two recorded events; waits until the device has reached the second one."""
        return float(later - earlier)


class Trace(Protocol):
    """Where a profile goes (`chrome_trace.ChromeTrace`)."""

    def name_thread(self, thread: int, name: str) -> None:
        """Give a thread its name in the picture."""

    def add(self, name: str, begin: int, end: int, *, thread: int = 0, **args: Any) -> None:
        """Add what a thread did from `begin` to `end` [ns of `time.perf_counter_ns`]."""


class ProfilingOps(Protocol):
    """Profiles of what the device does."""

    def start_profile(self, trace: Trace) -> None:
        """Add to `trace` what the device does from now on; called between steps."""

    def stop_profile(self, path: Path) -> list[Path]:
        """End what `start_profile` began; return files written beside the trace, which will be at `path`."""
        return []


class Backend(
    LinearOps,
    CollectiveOps,
    ExpertOps,
    LoRAOps,
    StateOps,
    AttentionOps,
    KVCacheOps,
    SamplingOps,
    MemoryOps,
    GraphOps,
    ProfilingOps,
    Protocol,
):
    """Arrays and ops of one device. Ops return new arrays unless they say "in place"."""
