"""ReferenceBackend: the Backend ops in torch, written to be read. Runs on any torch device; fast on none.

Same numbers as the CPU backend up to rounding: activations are float32, weights are rounded to `dtype` and keys and
values to `kv_dtype`. Weights that others store as integers are rounded to these here (quantize.py), and stored as
floats. Sums over K or over keys are taken in float64 where the device has it, so that the order of summation, which
torch chooses by batch size, hardly ever shows; in `InvariantReferenceBackend` it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from quire.kernels.backend import (
    Arrays,
    AttentionMetadata,
    AttentionParams,
    Backend,
    DeviceTokens,
    LinearWeight,
    Penalties,
    SamplingOptions,
    Tensor,
    TopLogprobs,
)
from quire.kernels.experts import Expert, RoutingParams
from quire.kernels.host_blocks import HostMemory
from quire.kernels.lora import LoRAChange, LoRARows
from quire.kernels.reference.attention import paged_attention
from quire.kernels.reference.profiling import TorchProfilingOps
from quire.kernels.reference.quantize import quantize_rows, quantize_weight, round_rows_fp8
from quire.kernels.reference.sampling import sample_rows, top_logprobs
from quire.kernels.weight_storage import stored_layout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**TORCH_DTYPES, "int8": torch.float32, "fp8": torch.float32}
GROUP = 64  # of 4-bit weights
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
}


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """weight [N, K] in the backend's dtype, or in float32 if it was quantized; bias float32 [N] or None.

    `round_inputs` is what inputs are quantized by, None if they are not.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    round_inputs: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class ReferenceExpert:
    """The packed weights of an expert: gate and up together, and down."""

    gate_up: LinearWeight
    down: LinearWeight

    @classmethod
    def pack(cls, expert: Expert, pack_linear: Callable[..., LinearWeight]) -> ReferenceExpert:
        """Pack one expert."""
        return cls(pack_linear(*expert.first, gated=True), pack_linear(*expert.last))


@dataclass(frozen=True, slots=True)
class ReferenceLoRA:
    """A `LoRAChange` on the device, its values rounded to the backend's dtype."""

    a: torch.Tensor | None
    b: torch.Tensor | None
    whole: torch.Tensor | None


class ReferenceLoRASlots:
    """One layer's slots: for each, what its parts get; `sizes` are the columns of each part."""

    def __init__(self, num_slots: int, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.parts: list[list[ReferenceLoRA | None]] = [[None] * len(sizes) for _ in range(num_slots)]


def swiglu_oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See "swiglu_oai" at `Backend.gated_linear`."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the `count` largest of each row, the lower id first among equals, NaN after all others."""
    known = torch.where(scores.isnan(), -torch.inf, scores)
    return torch.sort(known, dim=-1, descending=True, stable=True).indices[:, :count]


def within_groups(scores: torch.Tensor, params: RoutingParams) -> torch.Tensor:
    """Return scores [T, E], -inf for experts of groups that are not chosen."""
    if params.num_groups == 1:
        return scores
    groups = scores.unflatten(1, (params.num_groups, -1))
    if params.group_score == "max":
        standing = groups.amax(dim=-1)
    else:
        standing = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(dim=-1)
    chosen = torch.zeros_like(standing, dtype=torch.bool).scatter(1, best(standing, params.top_groups), True)
    return torch.where(chosen[:, :, None], groups, -torch.inf).flatten(1)


def _sequences(metadata: AttentionMetadata) -> Iterator[tuple[slice, int, bool]]:
    """Yield each sequence's tokens of the step, its row in the states, and whether it starts from zeros."""
    assert metadata.state_rows is not None, "a model with states has rows for them"
    starts, lengths, rows = (x.tolist() for x in (metadata.cu_query_lens, metadata.seq_lens, metadata.state_rows))
    for start, stop, length, row in zip(starts, starts[1:], lengths, rows):
        yield slice(start, stop), row, length == stop - start


def _slots_of(slots: ReferenceLoRASlots, rows: LoRARows) -> list[tuple[torch.Tensor, list[ReferenceLoRA | None]]]:
    """Return, for slots that have rows in this step, the rows and what the slot holds."""
    starts = rows.starts.tolist()
    return [
        (rows.order[start:stop], parts)
        for start, stop, parts in zip(starts[:-1], starts[1:], slots.parts, strict=True)
        if stop > start
    ]


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """Round every row of x [..., K] to 8 bits and a scale, and return what they stand for."""
    integers, scales = quantize_rows(x.reshape(-1, x.shape[-1]))
    return (integers.float() * scales[:, None]).reshape(x.shape)


class ReferenceBackend(TorchProfilingOps, HostMemory, Backend):
    """Every op of `quire.kernels.backend.Backend` in plain torch."""

    name = "reference"
    rows = "together"  # how those of a batch are computed

    def __init__(
        self,
        dtype: str = "float32",
        kv_dtype: str = "float32",
        device: str = "cpu",
        num_threads: int | None = None,
        round_linear_inputs: bool = False,
        quantization: str | None = None,
    ) -> None:
        """Hold weights in `dtype` and keys and values in `kv_dtype`, on torch device `device`.

        `round_linear_inputs` rounds the inputs of `linear` and `head_linear` to `dtype`, as a backend may for bfloat16.
        `quantization` is one of `backend.QUANTIZATIONS`.
        """
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.quantization = quantization
        self.device = torch.device(device)
        self._round_linear_inputs = round_linear_inputs
        self.arithmetic = f"{device} torch {torch.__version__}, rounds {round_linear_inputs}, rows {self.rows}"
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    # Arrays

    def from_numpy(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.require(array, requirements=["C", "A", "W"])).to(self.device)

    def to_numpy(self, array: torch.Tensor) -> np.ndarray:
        return (array.float() if array.is_floating_point() else array).detach().cpu().numpy()

    def fetch(self, array: torch.Tensor) -> Callable[[], np.ndarray]:
        copied = self.to_numpy(array.clone())
        return lambda: copied

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def assign(self, target: torch.Tensor, values: np.ndarray) -> None:
        target.copy_(torch.from_numpy(np.ascontiguousarray(values)))

    def graph(self, build: Callable[[], Arrays]) -> Callable[[], Arrays]:
        """Return `build`, which is called each time."""
        return build

    def concat(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(arrays), dim=-1)

    def compiled_before(self) -> bool:
        """Nothing is compiled here."""
        return True

    # Weights

    def vector(self, tensor: Tensor) -> torch.Tensor:
        return self.from_numpy(np.array(tensor.to_float32()))

    def pack_linear(
        self,
        parts: Sequence[Tensor],
        biases: Sequence[Tensor] | None = None,
        *,
        gated: bool = False,
        table: bool = False,
        exact: bool = False,
    ) -> ReferenceLinear:
        bias = None if biases is None else torch.cat([self.vector(part) for part in biases])
        layout = None if exact or self.quantization is not None else stored_layout(parts, self.dtype, table=table)
        if layout is not None:
            return self._as_stored(parts, bias, layout.kind == "integers")
        if self.quantization is None or exact or (table and self.quantization == "fp8"):
            weight_dtype = TORCH_DTYPES[self.dtype]
            return ReferenceLinear(torch.cat([self.vector(part).to(weight_dtype) for part in parts]), bias)
        if self.quantization == "fp8":
            weight = torch.cat([round_rows_fp8(self.vector(part)) for part in parts])
            return ReferenceLinear(weight, bias, round_rows_fp8)
        bits = 4 if self.quantization == "int4" and not table else 8
        weight = torch.cat([quantize_weight(self.vector(part), bits, GROUP).dequantized() for part in parts])
        return ReferenceLinear(weight, bias, None if self.quantization == "int8-weight-only" else round_rows)

    def _as_stored(self, parts: Sequence[Tensor], bias: torch.Tensor | None, integers: bool) -> ReferenceLinear:
        """Return a weight with the numbers that its checkpoint has.

        Integers have their inputs rounded, too. Small floats are rounded only where inputs are.
        """
        weight = torch.cat([self.vector(part) for part in parts])
        if not integers and self._round_linear_inputs:
            weight = weight.to(TORCH_DTYPES[self.dtype])
        return ReferenceLinear(weight, bias, round_rows if integers else None)

    def pack_experts(self, experts: Iterable[Expert]) -> list[ReferenceExpert]:
        return [ReferenceExpert.pack(expert, self.pack_linear) for expert in experts]

    def pack_heads(self, matrices: Sequence[Tensor]) -> torch.Tensor:
        """The result is [H, B, A] in the backend's dtype."""
        return torch.stack([self.vector(matrix).to(TORCH_DTYPES[self.dtype]) for matrix in matrices])

    # Model ops

    def embedding(self, ids: torch.Tensor, weight: ReferenceLinear, first_row: int | None = None) -> torch.Tensor:
        if first_row is None:
            return weight.weight[ids.long()].float()
        local = ids.long() - first_row
        mine = (local >= 0) & (local < len(weight.weight))
        return weight.weight[local * mine].float() * mine[:, None]

    def linear(self, x: torch.Tensor, weight: ReferenceLinear) -> torch.Tensor:
        return self._multiply(x, weight, weight.weight.double())

    def _multiply(self, x: torch.Tensor, weight: ReferenceLinear, wide: torch.Tensor) -> torch.Tensor:
        """Return the product of `linear`; `wide` is the weight in the dtype of sums."""
        if weight.round_inputs is not None:
            x = weight.round_inputs(x)
        elif self._round_linear_inputs:
            x = x.to(weight.weight.dtype)
        out = (x.double() @ wide.T).float()
        return out if weight.bias is None else out + weight.bias

    def head_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.to(weight.dtype) if self._round_linear_inputs else x
        heads = x.double().unflatten(0, (-1, weight.shape[0])).transpose(0, 1)
        return (heads @ weight.double().mT).transpose(0, 1).flatten(0, 1).float()

    def gated_linear(self, x: torch.Tensor, weight: ReferenceLinear, activation: str) -> torch.Tensor:
        return self.gated_activation(self.linear(x, weight), activation)

    def gated_activation(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return swiglu_oai(gate, up) if activation == "swiglu_oai" else self.activation(gate, activation) * up

    def route(self, logits: torch.Tensor, params: RoutingParams) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.float()
        if params.scoring == "softmax_chosen":
            ids = best(logits, params.top_k)
            weights = torch.softmax(logits.gather(1, ids), dim=-1)
        else:
            scores = torch.softmax(logits, dim=-1) if params.scoring == "softmax" else torch.sigmoid(logits)
            compared = scores if params.bias is None else scores + params.bias
            ids = best(within_groups(compared, params), params.top_k)
            weights = scores.gather(1, ids)
        if params.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return ids, weights * params.scale

    def experts(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: list[ReferenceExpert], activation: str
    ) -> torch.Tensor:
        outputs = torch.zeros(*ids.shape, x.shape[1], dtype=x.dtype, device=x.device)
        for number, expert in enumerate(packed):
            tokens, places = torch.where(ids == number)
            if len(tokens):
                outputs[tokens, places] = self.linear(
                    self.gated_linear(x[tokens], expert.gate_up, activation), expert.down
                )
        out = torch.zeros_like(x)
        for place in range(ids.shape[1]):
            out = out + weights[:, place, None] * outputs[:, place]
        return out

    # LoRA adapters

    def new_lora_slots(
        self, num_slots: int, max_rank: int, sizes: Sequence[int], widest: int = 0
    ) -> ReferenceLoRASlots:
        return ReferenceLoRASlots(num_slots, sizes)

    def pack_lora(self, change: LoRAChange, *, lookup: bool = False) -> ReferenceLoRA:
        dtype = torch.bfloat16 if self.dtype == "bfloat16" else torch.float32
        given = [None if m is None else self.from_numpy(m).to(dtype) for m in (change.a, change.b, change.whole)]
        return ReferenceLoRA(*given)

    def set_lora(self, slots: ReferenceLoRASlots, slot: int, parts: Sequence[ReferenceLoRA | None]) -> None:
        slots.parts[slot] = list(parts)

    def lora(self, y: torch.Tensor, x: torch.Tensor, slots: ReferenceLoRASlots, rows: LoRARows) -> None:
        for mine, parts in _slots_of(slots, rows):
            column = 0
            for size, part in zip(slots.sizes, parts, strict=True):
                for row in mine.tolist() if part is not None else ():
                    assert part is not None
                    given = x[row].double()
                    if part.whole is not None:
                        y[row, column : column + len(part.whole)] = (part.whole.double() @ given).float()
                    if part.a is not None and part.b is not None:
                        inner = part.a.double() @ given
                        y[row, column : column + len(part.b)] += (part.b.double() @ inner).float()
                column += size

    def lora_embedding(self, y: torch.Tensor, ids: torch.Tensor, slots: ReferenceLoRASlots, rows: LoRARows) -> None:
        for mine, (part,) in _slots_of(slots, rows):
            for row in mine.tolist() if part is not None else ():
                assert part is not None
                token = int(ids[row])
                if part.whole is not None:
                    y[row] = part.whole[token].float()
                if part.a is not None and part.b is not None:
                    y[row] += (part.b.double() @ part.a[:, token].double()).float()

    def limit_columns(self, x: torch.Tensor, limits: torch.Tensor) -> None:
        for row, limit in enumerate(limits.tolist()):
            x[row, limit:] = -torch.inf

    def take_rows(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x[ids]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        pieces = x.double().unflatten(-1, (-1, weight.shape[0]))
        normed = pieces * torch.rsqrt(pieces.square().mean(dim=-1, keepdim=True) + eps) * weight
        return normed.flatten(-2).float()

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        wide = x.double()
        centred = wide - wide.mean(dim=-1, keepdim=True)
        out = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps) * weight
        return (out if bias is None else out + bias).float()

    def rotary_embedding(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        head_size: int,
        interleaved: bool,
    ) -> None:
        cos, sin = cos_sin[positions.long()][:, None, :].chunk(2, dim=-1)
        half = cos.shape[-1]
        for x in (q, k):
            heads = x.unflatten(-1, (-1, head_size))
            if interleaved:
                first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
            else:
                first, second = heads[..., :half], heads[..., half : 2 * half]
            rotated = first * cos - second * sin, second * cos + first * sin
            first.copy_(rotated[0])
            second.copy_(rotated[1])

    def activation(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return ACTIVATIONS[activation](x)

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        x.copy_(cap * torch.tanh(x / cap))

    # Layers with states

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: AttentionMetadata,
        activation: str | None = None,
    ) -> torch.Tensor:
        taps = weight.shape[0]
        out = torch.empty_like(x)
        for tokens, row, fresh in _sequences(metadata):
            if fresh:
                state[row] = 0
            inputs = torch.cat([state[row], x[tokens]])
            count = tokens.stop - tokens.start
            total = sum(inputs[tap : tap + count].double() * weight[tap] for tap in range(taps))
            out[tokens] = (total if bias is None else total + bias).float()
            state[row] = inputs[count:]
        return out if activation is None else self.activation(out, activation)

    def gated_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute a step's tokens in the dtype of sums; between steps the state is float32."""
        _, heads, depth, width = state.shape
        shared = heads * depth // k.shape[1]
        queries, keys = (x.unflatten(-1, (-1, depth)).repeat_interleave(shared, 1).double() for x in (q, k))
        values, factors = (
            v.unflatten(-1, (heads, width)).double(),
            decay.double().exp()[..., None, None],
        )
        out = torch.empty(q.shape[0], heads, width, dtype=q.dtype, device=q.device)
        for tokens, row, fresh in _sequences(metadata):
            if fresh:
                state[row] = 0
            matrix = state[row].double()
            for t in range(tokens.start, tokens.stop):
                matrix = matrix * factors[t]
                key = keys[t, :, :, None]
                delta = (values[t] - (key * matrix).sum(1)) * beta[t, :, None]
                matrix = matrix + key * delta[:, None]
                out[t] = (queries[t, :, :, None] * matrix).sum(1)
            state[row] = matrix
        return out.flatten(1)

    # KV cache and attention

    def new_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, latent: bool = False
    ) -> torch.Tensor:
        """The cache is [2 (keys, values), num_blocks, block_size, num_kv_heads, head_size].

        Latent ones have a first axis of 1.
        """
        shape = (1 if latent else 2, num_blocks, block_size, num_kv_heads, head_size)
        return torch.zeros(shape, dtype=KV_DTYPES[self.kv_dtype], device=self.device)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        block_size = cache.shape[2]
        block, offset = slot_mapping // block_size, slot_mapping % block_size
        for side, values in enumerate((k, v)):
            heads = values.reshape(-1, *cache.shape[3:])
            cache[side, block, offset] = self._rounded(heads).to(cache.dtype)

    def write_latent(self, x: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        block_size = cache.shape[2]
        cache[0, slot_mapping // block_size, slot_mapping % block_size, 0] = self._rounded(x).to(cache.dtype)

    def _rounded(self, heads: torch.Tensor) -> torch.Tensor:
        """Return what vectors [..., D] of 8 bits and a scale each stand for; others as they are."""
        if self.kv_dtype == "int8":
            return round_rows(heads)
        return round_rows_fp8(heads) if self.kv_dtype == "fp8" else heads

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        return paged_attention(q, cache, metadata, params, by_query=self.rows == "apart")

    def copy_blocks(self, cache: torch.Tensor, pairs: np.ndarray) -> None:
        source, destination = self.from_numpy(pairs.astype(np.int64)).T
        cache[:, destination] = cache[:, source]

    def block_nbytes(self, cache: torch.Tensor) -> int:
        return cache[:, 0].numel() * cache.element_size()

    def read_blocks(self, cache: torch.Tensor, block_ids: np.ndarray) -> np.ndarray:
        blocks = cache[:, self.from_numpy(block_ids)].transpose(0, 1).flatten(1)
        return blocks.contiguous().view(torch.uint8).cpu().numpy()

    def write_blocks(self, cache: torch.Tensor, block_ids: np.ndarray, data: np.ndarray) -> None:
        blocks = self.from_numpy(data).view(cache.dtype).unflatten(1, (cache.shape[0], *cache.shape[2:]))
        cache[:, self.from_numpy(block_ids)] = blocks.transpose(0, 1)

    # Logits and sampling

    def apply_penalties(self, logits: torch.Tensor, penalties: Penalties, last: DeviceTokens | None = None) -> None:
        if last is not None:
            penalties = penalties.with_tokens(self.to_numpy(last.tokens), last.indices)
        rows, starts, ids, counts, repetition, presence, frequency = penalties
        lengths = np.diff(starts)
        times, tokens = self.from_numpy(counts), self.from_numpy(ids.astype(np.int64))
        where = self.from_numpy(np.repeat(rows.astype(np.int64), lengths)), tokens
        factor, per_time, once = (self.from_numpy(np.repeat(x, lengths)) for x in (repetition, frequency, presence))
        picked = logits[where]
        picked = torch.where(picked > 0, picked / factor, picked * factor)
        logits[where] = picked - (per_time * times + once * (times > 0))

    def add_bias(self, logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray, values: np.ndarray) -> None:
        where = self.from_numpy(rows.astype(np.int64)), self.from_numpy(tokens.astype(np.int64))
        logits.index_put_(where, self.from_numpy(values.astype(np.float32)), accumulate=True)

    def put_rows(self, logits: torch.Tensor, rows: np.ndarray, values: np.ndarray) -> None:
        logits[self.from_numpy(rows)] = self.from_numpy(values)

    def apply_bitmask(self, logits: torch.Tensor, rows: np.ndarray, bitmask: np.ndarray) -> None:
        bits = np.unpackbits(bitmask.astype("<i4").view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        index = self.from_numpy(rows)
        logits[index] = logits[index].masked_fill(~self.from_numpy(bits.astype(bool)), float("-inf"))

    def rows_finite(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.isfinite(logits.amax(dim=-1))

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.stack([(row == row.amax()).to(torch.uint8).argmax() for row in logits])

    def sample(self, logits: torch.Tensor, options: SamplingOptions, uniforms: np.ndarray) -> torch.Tensor:
        return self.from_numpy(sample_rows(logits, options, uniforms))

    def top_logprobs(self, logits: torch.Tensor, chosen: torch.Tensor, k: int) -> TopLogprobs:
        return top_logprobs(logits, chosen, k)


def row_by_row(op: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return op(x), for x [T, ...], computed for each of the T rows apart; op keeps their number."""
    if x.shape[0] <= 1:
        return op(x.clone())
    return torch.cat([op(row.clone()) for row in x.split(1)])


class InvariantReferenceBackend(ReferenceBackend):
    """`ReferenceBackend` with every row computed by itself, so that its bits are the same in any batch; slower.

    torch chooses how a product or a sum is cut by the shape of what it is given, and computes the elements that fill a
    vector with other instructions than the few left over. So the same row in another batch may differ in its last bits.
    Here an op is given one row at a time, in memory of its own, and so always the same shape; attention is given one
    query and the keys that this query sees.
    """

    rows = "apart"

    def linear(self, x: torch.Tensor, weight: ReferenceLinear) -> torch.Tensor:
        wide = weight.weight.double()
        return row_by_row(lambda row: self._multiply(row, weight, wide), x)

    def head_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        op = super().head_linear
        return torch.cat([op(token.clone(), weight) for token in x.split(weight.shape[0])])

    def route(self, logits: torch.Tensor, params: RoutingParams) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [super(InvariantReferenceBackend, self).route(row.clone(), params) for row in logits.split(1)]
        ids, weights = zip(*rows)
        return torch.cat(ids), torch.cat(weights)

    def experts(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: list[ReferenceExpert], activation: str
    ) -> torch.Tensor:
        op = super().experts
        rows = zip(x.split(1), ids.split(1), weights.split(1))
        return torch.cat([op(row.clone(), own, weight, packed, activation) for row, own, weight in rows])

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        op = super().rms_norm
        return row_by_row(lambda row: op(row, weight, eps), x)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        op = super().layer_norm
        return row_by_row(lambda row: op(row, weight, bias, eps), x)

    def activation(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        op = super().activation
        return row_by_row(lambda row: op(row, activation), x)

    def top_logprobs(self, logits: torch.Tensor, chosen: torch.Tensor, k: int) -> TopLogprobs:
        op = super().top_logprobs
        rows = [op(row.clone(), chosen[r : r + 1], k) for r, row in enumerate(logits.split(1))]
        return TopLogprobs(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
