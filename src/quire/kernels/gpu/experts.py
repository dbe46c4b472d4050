"""Mixtures of experts: routing, and grouped products of tokens with the experts that they chose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from operator import length_hint

import numpy as np
import torch
import triton

from quire.checkpoint.tensor import HostTensor, Tensor
from quire.errors import ModelError
from quire.kernels.backend import ExpertsWeight
from quire.kernels.experts import Expert, RoutingParams
from quire.kernels.gpu import experts_coded, experts_kernels, routing
from quire.kernels.gpu.activations import activation_number
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.experts_coded import CodedExperts, default_tiles, is_direct
from quire.kernels.gpu.experts_kernels import sort_pairs, weighted_sum
from quire.kernels.gpu.linear import TL_TYPES
from quire.kernels.gpu.linear_weights import GPULinear, Staging, pieces
from quire.kernels.gpu.probe import interpreted
from quire.kernels.gpu.tuned_configs import KernelConfig
from quire.kernels.weight_storage import stored_layout

MOST_ROWS = 4  # tokens whose experts are each computed by themselves


@dataclass(frozen=True, slots=True)
class FloatExperts:
    """All experts of a layer: w_in [E, 2I, H] (gate, then up) and w_out [E, H, I] in `act`, biases float32 or None."""

    w_in: torch.Tensor
    w_out: torch.Tensor
    bias_in: torch.Tensor | None
    bias_out: torch.Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, inputs of each, and inner values."""
        return self.w_out.shape[0], self.w_out.shape[1], self.w_out.shape[2]


def to_torch(tensor: Tensor) -> torch.Tensor:
    """Return a tensor's values on the host, as stored where torch has the type, otherwise float32."""
    if isinstance(tensor, HostTensor) and tensor.dtype in ("float32", "float16", "bfloat16"):
        array = np.require(tensor.array, requirements=["C", "A", "W"])
        return (
            torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            if tensor.dtype == "bfloat16"
            else (torch.from_numpy(array))
        )
    return torch.from_numpy(np.require(tensor.to_float32(), requirements=["C", "A", "W"]))


def _stack(experts: Iterable[Expert], number: int, act: torch.dtype, staging: Staging) -> FloatExperts:
    """Copy experts, one after the other, into memory for all of them."""
    made: FloatExperts | None = None
    count, device = 0, staging.device
    for expert in experts:
        inner, hidden = expert.gate.shape
        if made is None:
            empty = torch.empty
            biased = expert.gate_bias is not None, expert.down_bias is not None
            made = FloatExperts(
                empty((number, 2 * inner, hidden), dtype=act, device=device),
                empty((number, hidden, inner), dtype=act, device=device),
                torch.zeros((number, 2 * inner), device=device) if biased[0] else None,
                torch.zeros((number, hidden), device=device) if biased[1] else None,
            )
        if (inner, hidden) != (made.sizes[2], made.sizes[1]) or expert.down.shape != (hidden, inner):
            raise ModelError("the experts of a layer differ in size (expected the same for all)")
        _copy_expert(made, count, expert, staging)
        count += 1
    assert made is not None and count == number, "as many experts as were announced"
    return made


def _copy_expert(made: FloatExperts, number: int, expert: Expert, staging: Staging) -> None:
    inner, own = made.sizes[2], made.w_in[number]
    for part, out in ((expert.gate, own[:inner]), (expert.up, own[inner:]), (expert.down, made.w_out[number])):
        for start, stop in pieces(part):
            staging.floats(part, start, stop, out[start:stop])
    if made.bias_in is not None:
        assert expert.gate_bias is not None and expert.up_bias is not None
        made.bias_in[number, :inner].copy_(to_torch(expert.gate_bias))
        made.bias_in[number, inner:].copy_(to_torch(expert.up_bias))
    if made.bias_out is not None:
        assert expert.down_bias is not None
        made.bias_out[number].copy_(to_torch(expert.down_bias))


class ExpertOps(ArrayOps):
    """Routing and experts."""

    def route(self, logits: torch.Tensor, params: RoutingParams) -> tuple[torch.Tensor, torch.Tensor]:
        return routing.route(logits, params)

    def pack_experts(self, experts: Iterable[Expert]) -> ExpertsWeight:
        number = length_hint(experts)
        if number == 0:  # views of files: what is unknown is how much device memory they take together
            experts = list(experts)
            number = len(experts)
        rest = iter(experts)
        first = next(rest)
        experts = chain([first], rest)
        layouts = [stored_layout(parts, self.dtype) for parts in (first.first[0], first.last[0])]
        if self.quantization is None and layouts == [None, None]:
            return _stack(experts, number, self.act, self.staging)  # type: ignore[attr-defined]
        return experts_coded.stack(experts, number, self.pack_linear)  # type: ignore[attr-defined]

    def experts(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: ExpertsWeight, kind: str
    ) -> torch.Tensor:
        tokens, hidden = x.shape
        if tokens == 0:
            return torch.empty((0, hidden), dtype=self.act, device=x.device)
        x, number = x if x.stride(1) == 1 else x.contiguous(), activation_number(kind, gated=True)
        if isinstance(packed, CodedExperts):
            return self._coded(x, ids, weights, packed, number)
        if not self.batch_invariant and few_pairs(tokens, ids.shape[1], packed.sizes[0]):
            return self._few(x, ids, weights, packed, number)
        return self._many(x, ids, weights, packed, number)

    def _few(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: FloatExperts, kind: int
    ) -> torch.Tensor:
        """Return `experts`, each pair by itself."""
        tokens, top_k = ids.shape
        _, hidden, inner = packed.sizes
        key = f"h{hidden}_i{inner}_pairs{tokens * top_k}"
        one = self.tuned_configs.get("experts_rows_in", key, {"n": 16, "k": 256, "warps": 4, "stages": 3})
        two = self.tuned_configs.get("experts_rows_out", key, {"n": 8, "k": 256, "warps": 4, "stages": 8})
        h = torch.empty((tokens * top_k, inner), dtype=self.act, device=x.device)
        experts_kernels.gated_rows[(tokens * top_k, triton.cdiv(inner, one["n"]))](
            x, x.stride(0), ids, packed.w_in, packed.bias_in, h, inner, hidden, TOP_K=top_k, KIND=kind,
            BIASED=packed.bias_in is not None, EVEN=inner % one["n"] == 0 and hidden % one["k"] == 0,
            N=one["n"], K=one["k"], STAGES=one["stages"], num_warps=one["warps"],
        )  # fmt: skip
        out = torch.empty((tokens, hidden), dtype=self.act, device=x.device)
        experts_kernels.mixed_rows[(tokens, triton.cdiv(hidden, two["n"]))](
            h, ids, weights, packed.w_out, packed.bias_out, out, hidden, inner, TOP_K=top_k,
            BIASED=packed.bias_out is not None, EVEN=hidden % two["n"] == 0 and inner % two["k"] == 0,
            N=two["n"], K=two["k"], STAGES=two["stages"], num_warps=two["warps"],
        )  # fmt: skip
        return out

    def _many(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: FloatExperts, kind: int
    ) -> torch.Tensor:
        """Return `experts`, by blocks of rows of one expert."""
        tokens, top_k = ids.shape
        number, hidden, inner = packed.sizes
        size = 64 if self.batch_invariant else self._block_size(tokens * top_k, number)
        wide = self.act is torch.float32
        blocks = sort_pairs(ids, number, size)
        key = f"h{hidden}_i{inner}_m{size}"
        h = experts_kernels.gated(
            x,
            packed.w_in,
            packed.bias_in,
            blocks,
            top_k,
            kind,
            self.tuned_configs.get("experts_in", key, tiles_in(size, wide)),
        )
        y = experts_kernels.down(
            h, packed.w_out, packed.bias_out, blocks, self.tuned_configs.get("experts_out", key, tiles_out(size, wide))
        )
        return weighted_sum(y, weights)

    def _coded(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: CodedExperts, kind: int
    ) -> torch.Tensor:
        """Return `experts` of quantized weights, by blocks of rows of one expert."""
        tokens, top_k = ids.shape
        number = packed.sizes[0]
        size = 64 if self.batch_invariant else min(64, self._block_size(tokens * top_k, number))
        blocks = sort_pairs(ids, number, size)
        compiled = not interpreted()

        def multiply(given: torch.Tensor, weight: GPULinear, each: int, gate: int) -> torch.Tensor:
            key = f"{weight.kind}:{weight.outputs}x{weight.inputs}:m{size}"
            tiles = self.tuned_configs.get("experts_coded", key, default_tiles(weight, size, self.act))
            direct = is_direct(weight, compiled, self.capability)
            chip = {"DIRECT": direct, "NATIVE": self.capability >= (8, 9), "ACT": TL_TYPES[self.act]}
            return experts_coded.product(given, weight, blocks, each, gate, self.act, {**tiles, **chip})

        return weighted_sum(multiply(multiply(x, packed.first, top_k, kind), packed.last, 1, 0), weights)

    def _block_size(self, pairs: int, number: int) -> int:
        """Return rows of a block: about as many as an expert has, for what a block lacks is computed for nothing."""
        each = pairs / number
        default = 16 if each <= 12 else 32 if each <= 32 else 64 if each <= 96 else 128
        return self.tuned_configs.get("experts_blocks", f"{default}", {"m": default})["m"]


def few_pairs(tokens: int, top_k: int, number: int) -> bool:
    """Whether each pair is computed by itself: with one token, or where hardly any two choose the same expert."""
    return tokens == 1 or (tokens <= MOST_ROWS and 4 * tokens * top_k <= number)


def tiles_in(size: int, wide: bool) -> KernelConfig:
    """Return tiles of the first product, for blocks of `size` rows; `wide` for float32."""
    if wide:
        return {"n": 32, "k": 32, "warps": 4, "stages": 2}
    if size <= 32:
        return {"n": 32, "k": 128, "warps": 4, "stages": 4}
    if size == 64:
        return {"n": 64, "k": 64, "warps": 4, "stages": 4}
    return {"n": 128, "k": 64, "warps": 8, "stages": 3}


def tiles_out(size: int, wide: bool) -> KernelConfig:
    """Return tiles of the second product."""
    if wide:
        return {"n": 64, "k": 32, "warps": 4, "stages": 2}
    if size <= 32:
        return {"n": 64, "k": 128, "warps": 4, "stages": 4}
    if size == 64:
        return {"n": 128, "k": 64, "warps": 4, "stages": 4}
    return {"n": 256, "k": 64, "warps": 8, "stages": 3}
