"""Mixtures of experts: routing, and grouped products of tokens with the experts that they chose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import length_hint
from typing import Any

import torch

from quire.errors import ModelError
from quire.kernels.backend import ExpertsWeight
from quire.kernels.experts import Expert, RoutingParams
from quire.kernels.gpu import routing
from quire.kernels.gpu.activations import ACTIVATIONS
from quire.kernels.gpu.experts_kernels import (
    TOGETHER,
    Blocks,
    ExpertGemv,
    GroupedGemm,
    coded_kernel,
    gated_rows,
    grouped_gemm_kernel,
    mixed_rows,
    sort_pairs,
    weighted_sum,
)
from quire.kernels.gpu.kernel_args import rows_of
from quire.kernels.gpu.linear import LinearOps, launch_options
from quire.kernels.gpu.linear_codes import Inputs
from quire.kernels.gpu.linear_weights import GPULinear
from quire.kernels.gpu.quantize import quantize_rows
from quire.kernels.gpu.tuned_configs import KernelConfig

TENSORS = ("data", "bias", "row_scales", "group_scales", "zeros", "order", "table")
# Columns, depth, warps and stages of tiles of both products, by rows of a block.
TILES = {
    32: ((32, 128, 4, 4), (64, 128, 4, 4)),
    64: ((64, 64, 4, 4), (128, 64, 4, 4)),
    128: ((128, 64, 8, 3), (256, 64, 8, 3)),
}
FLOAT32_TILES = (32, 32, 4, 2), (64, 32, 4, 2)
PAIR_TILES = {  # where each pair is computed by itself
    "experts_rows_in": {"BN": 16, "BK": 256, "num_warps": 4, "num_stages": 3},
    "experts_rows_out": {"BN": 8, "BK": 256, "num_warps": 4, "num_stages": 8},
}
MAX_ROWS = 4  # tokens whose experts are each computed by themselves


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """All experts of a layer: weights like those of one expert, but each tensor with a first axis of all experts.

    first: gate, then up [2I, H]. last: down [H, I].
    """

    first: GPULinear
    last: GPULinear

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, inputs of each, and inner values."""
        return self.last.data.shape[0], self.last.outputs, self.last.inputs

    @property
    def is_float(self) -> bool:
        """Whether no weight is quantized."""
        return self.first.kind == self.last.kind == "float"


def _format_of(weight: GPULinear) -> tuple[object, ...]:
    """Return the format and the shapes, which all experts of a layer must share."""
    shapes = [None if (t := getattr(weight, name)) is None else (t.shape, t.dtype) for name in TENSORS]
    return weight.kind, weight.inputs, weight.outputs, weight.group, weight.input_format, *shapes


def stack(experts: Iterable[Expert], number: int, pack_linear: Callable[..., GPULinear]) -> PackedExperts:
    """Pack experts one by one with the backend's `pack_linear` and copy them into memory for all of them.

    Raises ModelError where they differ in size or format.
    """
    made: tuple[GPULinear, GPULinear] | None = None
    count = 0
    for expert in experts:
        pair = pack_linear(*expert.first, gated=True), pack_linear(*expert.last)
        if made is None:
            kinds, made = list(map(_format_of, pair)), (_empty_stack(pair[0], number), _empty_stack(pair[1], number))
        if list(map(_format_of, pair)) != kinds:
            what = "differ in size" if pair[0].kind == made[0].kind == "float" else "are quantized in different ways"
            raise ModelError(f"the experts of a layer {what} (expected the same for all)")
        for whole, one in zip(made, pair, strict=True):
            for name in TENSORS:
                if getattr(one, name) is not None:
                    getattr(whole, name)[count].copy_(getattr(one, name))
        count += 1
    assert made is not None and count == number, "as many experts as were announced"
    return PackedExperts(*made)


def _empty_stack(one: GPULinear, number: int) -> GPULinear:
    """Return a weight with uninitialized tensors for `number` experts."""
    tensors: dict[str, Any] = {name: getattr(one, name) for name in TENSORS}
    rooms: dict[str, Any] = {
        name: None if t is None else t.new_empty((number, *t.shape)) for name, t in tensors.items()
    }
    return replace(one, act_bias=None, launches={}, **rooms)


class ExpertOps(LinearOps):
    """Routing and experts."""

    def route(self, logits: torch.Tensor, params: RoutingParams) -> tuple[torch.Tensor, torch.Tensor]:
        return routing.route(logits, params)

    def pack_experts(self, experts: Iterable[Expert]) -> ExpertsWeight:
        number = length_hint(experts)
        if number == 0:  # views of files: what is unknown is how much device memory they take together
            experts = list(experts)
            number = len(experts)
        return stack(experts, number, self.pack_linear)

    def experts(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: ExpertsWeight, activation: str
    ) -> torch.Tensor:
        tokens, hidden = x.shape
        if tokens == 0:
            return torch.empty((0, hidden), dtype=self.act, device=x.device)
        x, activation_id = x if x.stride(1) == 1 else x.contiguous(), ACTIVATIONS[activation]
        few = packed.is_float and not self.batch_invariant and few_pairs(tokens, ids.shape[1], packed.sizes[0])
        return (self._experts_by_pair if few else self._experts_by_block)(x, ids, weights, packed, activation_id)

    def _experts_by_pair(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: PackedExperts, activation_id: int
    ) -> torch.Tensor:
        """Return `experts`, with one matrix-vector product for each pair of a token and an expert."""
        tokens, top_k = ids.shape
        _, hidden, inner = packed.sizes

        def form(kernel: str, rows: int, columns: int, activation_id: int) -> tuple[ExpertGemv, int]:
            found = self.tuned_configs.get(kernel, f"h{hidden}_i{inner}_pairs{tokens * top_k}", PAIR_TILES[kernel])
            n, k = found["BN"], found["BK"]
            even = rows % n == columns % k == 0
            return ExpertGemv(top_k, even, n, k, found["num_stages"], activation_id), found["num_warps"]

        h = torch.empty((tokens * top_k, inner), dtype=self.act, device=x.device)
        one, warps = form("experts_rows_in", inner, hidden, activation_id)
        gated_rows[(tokens * top_k, -(-inner // one.N))](
            rows_of(x), ids, packed.first.data, packed.first.bias, h, inner, hidden, FORM=one, num_warps=warps
        )
        out = torch.empty((tokens, hidden), dtype=self.act, device=x.device)
        two, warps = form("experts_rows_out", hidden, inner, 0)
        mixed_rows[(tokens, -(-hidden // two.N))](
            h, ids, weights, packed.last.data, packed.last.bias, out, hidden, inner, FORM=two, num_warps=warps
        )
        return out

    def _experts_by_block(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: PackedExperts, activation_id: int
    ) -> torch.Tensor:
        """Return `experts`, with a grouped product: pairs sorted by expert, in blocks of rows."""
        size = 64 if self.batch_invariant else self._block_size(ids.numel(), packed.sizes[0])
        multiply = self._float_product
        if not packed.is_float:
            size, multiply = min(64, size), self._coded_product
        blocks = sort_pairs(ids, packed.sizes[0], size)
        h = multiply(x, packed.first, blocks, ids.shape[1], activation_id)
        return weighted_sum(multiply(h, packed.last, blocks, 1, 0), weights)

    def _float_product(
        self, x: torch.Tensor, weight: GPULinear, blocks: Blocks, top_k: int, activation_id: int
    ) -> torch.Tensor:
        """Return the products of pairs, [pairs, N] of `act`: x [pairs / top_k, K]; gated, act(gate) * up of them."""
        rows, depth, size = weight.outputs // (2 if activation_id else 1), weight.inputs, blocks.size
        kernel, hidden, inner = ("experts_in", depth, rows) if activation_id else ("experts_out", rows, depth)
        default = float_tiles(kernel, size, self.act)
        tile = self.tuned_configs.get(kernel, f"h{hidden}_i{inner}_m{size}", default)
        even = rows % tile["BN"] == depth % tile["BK"] == 0
        form = GroupedGemm(top_k, activation_id, even, size, tile["BN"], tile["BK"])
        pairs, num_blocks = x.shape[0] * top_k, blocks.experts.shape[0]
        out = torch.empty((pairs, rows), dtype=self.act, device=x.device)
        inputs, sizes = rows_of(x), (pairs, num_blocks, rows, depth)
        grouped_gemm_kernel[(num_blocks * -(-rows // form.BN),)](
            inputs, weight.data, weight.bias, blocks[:2], out, *sizes, FORM=form, **launch_options(tile)
        )
        return out

    def _coded_product(
        self, x: torch.Tensor, weight: GPULinear, blocks: Blocks, top_k: int, activation_id: int
    ) -> torch.Tensor:
        """Return the products of pairs, [pairs, N] of `act`: x [pairs / top_k, K]; gated, act(gate) * up of them."""
        pairs, outputs = x.shape[0] * top_k, weight.outputs // (2 if activation_id else 1)
        scales = None
        if weight.input_format is not None:
            x, scales = quantize_rows(x, e4m3=weight.input_format == "e4m3", depth=weight.depth)
        else:
            x = x.to(self.act)
        key = f"{weight.kind}:{weight.outputs}x{weight.inputs}:m{blocks.size}"
        tiles = self.tuned_configs.get("experts_coded", key, coded_tiles(weight, blocks.size, self.act))
        form = self.gemm_form(weight, x.shape[1], {**tiles, "BM": blocks.size, "GROUP": TOGETHER})
        out = torch.empty((pairs, outputs), dtype=self.act, device=x.device)
        num_blocks = blocks.experts.shape[0]
        inputs, sizes = Inputs(x, scales, x.stride(0)), (pairs, num_blocks, outputs, x.shape[1], weight.inputs)
        coded_kernel[(num_blocks * -(-outputs // form.BN),)](
            inputs, weight.tensors(), blocks[:2], out, *sizes, activation_id, top_k, FORM=form, **launch_options(tiles)
        )
        return out

    def _block_size(self, pairs: int, number: int) -> int:
        """Return the rows of a block: about as many as an expert has on average, so that little is padding."""
        each = pairs / number
        default = 16 if each <= 12 else 32 if each <= 32 else 64 if each <= 96 else 128
        return self.tuned_configs.get("experts_blocks", f"{default}", {"m": default})["m"]


def few_pairs(tokens: int, top_k: int, number: int) -> bool:
    """Whether pairs are computed one by one: for one token, or if hardly any two tokens share an expert."""
    return tokens == 1 or (tokens <= MAX_ROWS and 4 * tokens * top_k <= number)


def float_tiles(kernel: str, size: int, act: torch.dtype) -> KernelConfig:
    """Return tiles of the first product ("experts_in") or the second, for blocks of `size` rows."""
    tiles = FLOAT32_TILES if act is torch.float32 else TILES[32 if size <= 32 else min(size, 128)]
    return dict(zip(("BN", "BK", "num_warps", "num_stages"), tiles[kernel == "experts_out"], strict=True))


def coded_tiles(weight: GPULinear, size: int, act: torch.dtype) -> KernelConfig:
    """Return tiles for blocks of `size` rows. fp8 sums are split every 128 inputs, so that BK is at least that."""
    bytes_ = weight.input_format is not None and weight.group == 0
    if act is torch.float32:
        return {"BN": 32, "BK": 128 if bytes_ else 64, "num_warps": 4, "num_stages": 2}
    if size <= 32:
        return {"BN": 64, "BK": 128, "num_warps": 4, "num_stages": 4}
    wide = 64 if size == 64 else 128
    return {"BN": wide, "BK": 128 if bytes_ else 64, "num_warps": 4 if size == 64 else 8, "num_stages": 3}
