"""Weights of linear layers and products with them: cuBLAS for floats, Triton kernels for what is quantized.

One row and two go through `gemv_kernels.py`, whatever the weight is: there reading it is all that counts. More rows of
floats are cuBLAS's, of E4M3 too where the chip multiplies it; everything else, and everything where a row's bits must
not depend on the batch, is `gemm_kernels.py`. What a weight is made of is in `linear_weights.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from quire.checkpoint.tensor import Tensor
from quire.kernels.gpu.activations import ACTIVATIONS, gate_and_multiply
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.gemm_kernels import Gemm, gemm_kernel
from quire.kernels.gpu.gemv_kernels import Gemv, gemv_kernel
from quire.kernels.gpu.kernel_args import Rows, power_of_two, rows_of
from quire.kernels.gpu.linear_codes import KINDS, Inputs, rows_kernel
from quire.kernels.gpu.linear_weights import GPULinear, Staging, pack_floats, pack_quantized, pack_stored
from quire.kernels.gpu.pdl import launch_dependents, prefetch_pieces, wait_for_dependencies
from quire.kernels.gpu.probe import interpreted
from quire.kernels.gpu.quantize import quantize_rows
from quire.kernels.gpu.tuned_configs import KernelConfig
from quire.kernels.weight_storage import stored_layout

MAX_GEMV_ROWS = 4  # that `gemv_kernel` has sums for
GEMV_ROWS = 2  # that it multiplies by default: with four of floats it took 1.5 to 1.8 times cuBLAS's time on an H200
NIBBLES = ("int4", "table")
NATIVE_FP8 = (8, 9)  # the first compute capability that converts and multiplies E4M3
TILE_ROWS = (16, 32, 64, 128)  # rows of x of a tile
TL_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
ROW_BLOCK, GATE_BLOCK = 1024, 1024  # columns that one program of a row-wise kernel has


@triton.jit
def gate_kernel(x, out, width, ACTIVATION_ID: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[t, i] = act(x[t, i]) * x[t, width + i]. Bound by bandwidth."""
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x.data + t * x.stride + i, mask=i < width, other=0).to(tl.float32)
    up = tl.load(x.data + t * x.stride + width + i, mask=i < width, other=0).to(tl.float32)
    tl.store(out + t * width + i, gate_and_multiply(gate, up, ACTIVATION_ID).to(out.dtype.element_ty), mask=i < width)


def gemv_key(weight: GPULinear, rows: int, *, gated: bool) -> str:
    """Return the key of `gemv_kernel`'s tuned configuration."""
    return f"{weight.kind}:{rows}:{weight.outputs}x{weight.inputs}{':gated' if gated else ''}"


def gemm_key(weight: GPULinear, rows: int, *, invariant: bool) -> str:
    """Return the key of `gemm_kernel`'s tuned configuration; `rows` is one of TILE_ROWS."""
    return f"{weight.kind}:{rows}:{weight.outputs}x{weight.inputs}{':invariant' if invariant else ''}"


def launch_options(config: KernelConfig) -> dict[str, int]:
    """Return the options of a configuration that Triton takes at launch."""
    return {"num_warps": config["num_warps"], "num_stages": config["num_stages"]}


class LinearOps(ArrayOps):
    """Weights, products, embeddings."""

    _staging: Staging | None = None
    _is_compiled: bool | None = None

    @property
    def staging(self) -> Staging:
        """Pinned buffers through which weights are copied to the device."""
        if self._staging is None:
            self._staging = Staging(self.device)
        return self._staging

    # Weights

    def vector(self, tensor: Tensor) -> torch.Tensor:
        """The result is float32."""
        return self.from_numpy(tensor.to_float32())

    def pack_linear(
        self,
        parts: Sequence[Tensor],
        biases: Sequence[Tensor] | None = None,
        *,
        gated: bool = False,
        table: bool = False,
        exact: bool = False,
    ) -> GPULinear:
        """Products with `table` and `exact` weights are float32."""
        made = self._pack(parts, table=table, exact=exact)
        made.gated, made.float32_output = gated, table or exact
        if biases is not None:
            made.bias = torch.cat([self.vector(part).reshape(-1) for part in biases])
            if made.kind == "float" or made.input_format == "e4m3":
                made.act_bias = made.bias.to(self.act)
        return made

    def _pack(self, parts: Sequence[Tensor], *, table: bool, exact: bool) -> GPULinear:
        layout = None if exact or self.quantization is not None else stored_layout(parts, self.dtype, table=table)
        stored = None if layout is None else pack_stored(parts, layout, self.staging)
        if stored is not None:
            return stored
        if self.quantization is None or exact or (table and self.quantization == "fp8"):
            return pack_floats(parts, self.act, self.staging)
        return pack_quantized(parts, self.quantization, self.staging, table=table)

    def pack_heads(self, matrices: Sequence[Tensor]) -> torch.Tensor:
        """The result is [H, B, A] of `act`."""
        data = torch.empty((len(matrices), *matrices[0].shape), dtype=self.act, device=self.device)
        for number, matrix in enumerate(matrices):
            self.staging.floats(matrix, 0, matrix.shape[0], data[number])
        return data

    # Products

    def embedding(self, ids: torch.Tensor, weight: GPULinear, first_row: int | None = None) -> torch.Tensor:
        if first_row is not None:
            local = ids - first_row
            other = (local < 0) | (local >= weight.outputs)
            return self.embedding(local.masked_fill(other, 0), weight).masked_fill_(other[:, None], 0.0)
        if weight.kind == "float":
            return F.embedding(ids, weight.data)
        out = torch.empty((ids.shape[0], weight.inputs), dtype=self.act, device=self.device)
        if ids.shape[0]:
            assert weight.order is None, "a table's columns are in their order"
            grid = ids.shape[0], -(-weight.inputs // ROW_BLOCK)
            kind, group = KINDS[weight.kind], weight.group
            rows_kernel[grid](
                ids, weight.tensors(), out, weight.inputs, KIND=kind, G=group, NATIVE=self._native, BLOCK=ROW_BLOCK
            )
        return out

    def linear(self, x: torch.Tensor, weight: GPULinear) -> torch.Tensor:
        return self._product(x, weight, 0)

    def gated_linear(self, x: torch.Tensor, weight: GPULinear, activation: str) -> torch.Tensor:
        """For a few rows one kernel computes all of it."""
        activation_id = ACTIVATIONS[activation]
        if x.shape[0] <= MAX_GEMV_ROWS and self._is_gemv(x.shape[0], weight):
            return self._product(x, weight, activation_id)
        return self.gated_activation(self._product(x, weight, 0), activation)

    def gated_activation(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """The result is of x's type."""
        activation_id = ACTIVATIONS[activation]
        rows, width = x.shape[0], x.shape[1] // 2
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        if rows:
            block = min(GATE_BLOCK, power_of_two(width))
            gate_kernel[(rows, -(-width // block))](
                rows_of(x), out, width, ACTIVATION_ID=activation_id, BLOCK=block, PDL=self.pdl, launch_pdl=self.pdl
            )
        return out

    def head_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """cuBLAS writes its results in place, between those of other heads."""
        heads, outputs, inputs = weight.shape
        x = self._as_act(x)
        tokens = x.shape[0] // heads
        out = torch.empty((tokens, heads, outputs), dtype=self.act, device=x.device)
        if not self.batch_invariant:
            torch.bmm(x.view(tokens, heads, inputs).transpose(0, 1), weight.mT, out=out.transpose(0, 1))
        elif tokens:
            self._gemm_heads(x, weight, out)
        return out.view(tokens * heads, outputs)

    def _launches(self, weight: GPULinear) -> dict[Any, Any]:
        """Return the cached launch parameters of a weight; loading other configurations clears them."""
        if weight.launches.get("configs") is not self.tuned_configs:
            weight.launches.clear()
            weight.launches["configs"] = self.tuned_configs
        return weight.launches

    @property
    def _compiled(self) -> bool:
        """Whether kernels are compiled; Triton's interpreter needs few, large programs instead."""
        if self._is_compiled is None:
            self._is_compiled = not interpreted()
        return self._is_compiled

    @property
    def _native(self) -> bool:
        return self.capability >= NATIVE_FP8

    def _as_act(self, x: torch.Tensor) -> torch.Tensor:
        """Return x in `act`, with contiguous rows."""
        x = x if x.dtype == self.act else x.to(self.act)
        return x if x.stride(-1) == 1 else x.contiguous()

    def _is_gemv(self, rows: int, weight: GPULinear) -> bool:
        """Whether `gemv_kernel` multiplies so few rows; never if results must be batch-invariant."""
        if self.batch_invariant or not 0 < rows <= MAX_GEMV_ROWS:
            return False
        launches = self._launches(weight)
        known = launches.get("most rows")
        if known is None:
            key = f"{weight.kind}:{weight.outputs}x{weight.inputs}"
            # Triton's interpreter needs seconds for floats.
            default = {"rows": GEMV_ROWS if self._compiled or weight.kind != "float" else 0}
            known = launches["most rows"] = self.tuned_configs.get("gemv_rows", key, default)
        return bool(rows <= known["rows"])

    def _product(self, x: torch.Tensor, weight: GPULinear, activation_id: int) -> torch.Tensor:
        """Return x @ weight.T + bias; with an `activation_id`, activation(gate) * up of it."""
        rows = x.shape[0]
        gemv = self._is_gemv(rows, weight)
        if weight.kind == "float" and not gemv and not self.batch_invariant:
            return self._blas(self._as_act(x), weight)
        scales = None
        if weight.input_format is None:
            x = self._as_act(x)
        else:
            x = x if x.stride(-1) == 1 else x.contiguous()
            x, scales = quantize_rows(x, e4m3=weight.input_format == "e4m3", order=weight.order, depth=weight.depth)
        if scales is not None and not gemv and self._is_scaled_blas(weight):
            return self._scaled_blas(x, scales, weight)
        out_type = torch.float32 if weight.float32_output else self.act
        width = weight.outputs // 2 if activation_id else weight.outputs
        out = torch.empty((rows, width), dtype=out_type, device=self.device)
        if gemv:
            self._gemv(x, scales, weight, out, activation_id)
        elif rows:
            self._gemm(x, scales, weight, out)
        return out

    def _blas(self, x: torch.Tensor, weight: GPULinear) -> torch.Tensor:
        """Multiply floats with cuBLAS."""
        if not weight.float32_output or self.act == torch.float32:
            return F.linear(x, weight.data, weight.act_bias)
        if self.device.type == "cuda":
            out = torch.mm(x, weight.data.t(), out_dtype=torch.float32)
        else:
            out = x.float() @ weight.data.float().t()
        return out if weight.bias is None else out.add_(weight.bias)

    def _is_scaled_blas(self, weight: GPULinear) -> bool:
        """Whether cuBLAS multiplies E4M3 with row scales: for bfloat16 results and sizes that 16 divides."""
        return (
            weight.input_format == "e4m3"
            and not self.batch_invariant
            and self.device.type == "cuda"
            and self.capability >= (9, 0)
            and self.act == torch.bfloat16
            and weight.outputs % 16 == 0
            and weight.depth % 16 == 0
        )

    def _scaled_blas(self, x: torch.Tensor, scales: torch.Tensor, weight: GPULinear) -> torch.Tensor:
        assert weight.row_scales is not None
        return torch._scaled_mm(
            x.view(torch.float8_e4m3fn),
            weight.data.view(torch.float8_e4m3fn).t(),
            scale_a=scales[:, None],
            scale_b=weight.row_scales[None, :],
            bias=weight.act_bias,
            out_dtype=torch.bfloat16,
        )

    def _gemv(
        self, x: torch.Tensor, scales: torch.Tensor | None, weight: GPULinear, out: torch.Tensor, activation_id: int
    ) -> None:
        """Launch `gemv_kernel` for x, which is quantized if there are scales."""
        launches, key = self._launches(weight), ("gemv", activation_id, x.shape[0])
        found = launches.get(key)
        if found is None:
            found = launches[key] = self._gemv_form(weight, x.shape[0], activation_id)
        form, num_warps = found
        inputs, sizes = Inputs(x, scales, x.stride(0)), (out.shape[1], x.shape[1])
        grid, options = (-(-out.shape[1] // form.BN),), {"num_warps": num_warps, "launch_pdl": form.pdl}
        gemv_kernel[grid](inputs, weight.tensors(), rows_of(out), *sizes, FORM=form, **options)

    def _gemv_form(self, weight: GPULinear, rows: int, activation_id: int) -> tuple[Gemv, int]:
        """Return the compile-time constants of `gemv_kernel`, and its number of warps.

        A program reads as many chunks of 16 bytes as a row has, up to four warps of them, and few rows of the weight.
        Memory of 4.2 TB/s that answers after 0.7 us has 22 KB on their way for each of 132 multiprocessors. With 1024
        outputs there are but 8 programs of 128 threads on each: a thread then has two loads of 16 bytes at a time.
        """
        inputs = weight.depth if weight.input_format else weight.inputs
        nibbles, gated = weight.kind in NIBBLES, activation_id > 0
        elements = 16 // weight.data.element_size()
        chunk = 2 * elements if nibbles else elements
        chunks = min(128, max(32, power_of_two(-(-inputs // chunk))))
        width = weight.outputs // 2 if gated else weight.outputs
        least = 4 * self.num_sms  # programs that keep the memory busy
        most = 4 if rows <= 2 or elements < 16 else 2  # what registers have room for
        most //= 2 * min(rows, 2) if nibbles else 1
        most = max(1, most // 2) if gated else most
        if not self._compiled:
            most, least = 64, 1
        each = max([n for n in (1, 2, 4, 64) if n <= most and width >= n * least] or [1])
        default: KernelConfig = {"BN": each, "NCH": chunks, "num_warps": chunks // 32}
        if each == 1 and not gated and rows <= 2 and not nibbles and inputs >= 256 * chunk:
            default["NCH"] = 256
        choice = self.tuned_configs.get("gemv", gemv_key(weight, rows, gated=gated), default)
        pieces = 0
        if self.pdl:
            rows_each = choice["BN"] * (2 if gated else 1)
            row_bytes = weight.data.stride(0) * weight.data.element_size()
            pieces = prefetch_pieces(row_bytes, rows_each, -(-width // choice["BN"]), self.num_sms)
        # An unmasked half of a chunk of nibbles must not pass the end either.
        even, tile = inputs % (choice["NCH"] * chunk) == 0, (choice["BN"], choice["NCH"], elements)
        kind, x_codes = KINDS[weight.kind], weight.input_format == "e4m3"
        form = Gemv(rows, kind, weight.group, x_codes, activation_id, self._native, even, *tile, self.pdl, pieces)
        return form, choice["num_warps"]

    def _gemm(self, x: torch.Tensor, scales: torch.Tensor | None, weight: GPULinear, out: torch.Tensor) -> None:
        """Launch `gemm_kernel` for x, which is quantized if there are scales."""
        rows = 64 if self.batch_invariant else next((m for m in TILE_ROWS if x.shape[0] <= m), TILE_ROWS[-1])
        launches = self._launches(weight)
        found = launches.get(rows)
        if found is None:
            choice = self._gemm_choice(weight, rows)
            found = launches[rows] = self.gemm_form(weight, x.shape[1], choice), launch_options(choice)
        form, options = found
        tiles = -(-x.shape[0] // form.BM) * -(-weight.outputs // form.BN)
        inputs, sizes = Inputs(x, scales, x.stride(0)), (x.shape[0], weight.outputs, x.shape[1])
        gemm_kernel[(tiles, 1)](inputs, weight.tensors(), rows_of(out), *sizes, None, FORM=form, **options)

    def gemm_form(self, weight: GPULinear, depth: int, choice: KernelConfig) -> Gemm:
        """Return the compile-time constants of `gemm_kernel` for rows of `depth` elements."""
        kind, x_codes, even = KINDS[weight.kind], weight.input_format == "e4m3", depth % choice["BK"] == 0
        tile = choice["BM"], choice["BN"], choice["BK"], choice["GROUP"]
        act = TL_TYPES[self.act]
        return Gemm(kind, weight.group, x_codes, self._is_direct(weight), self._native, even, act, *tile)

    def _is_direct(self, weight: GPULinear) -> bool:
        """Whether both operands are multiplied in the formats they are stored in."""
        if weight.kind == "int8":
            return weight.input_format == "int8" and weight.group == 0
        return weight.kind == "float" or (weight.input_format == "e4m3" and self._native and self._compiled)

    def _gemm_choice(self, weight: GPULinear, rows: int) -> KernelConfig:
        """Return the configuration for so many rows of x: K in steps of 128 bytes, larger tiles for more rows."""
        direct = self._is_direct(weight)
        size = weight.data.element_size() if direct else 2
        default: KernelConfig = {"BM": rows, "BN": 128, "BK": 128 // size, "GROUP": 8, "num_warps": 4, "num_stages": 4}
        if rows <= 32:
            default.update(BN=32 if weight.outputs < 64 * self.num_sms else 64, BK=256 // size)
        elif rows >= 128:
            default.update(num_warps=8, num_stages=3)
        elif weight.outputs < 128 * self.num_sms:
            default["BN"] = 64
        else:
            default["num_warps"] = 8
        if self.act == torch.float32 and not (direct and size < 4):
            default.update(BM=min(rows, 64), BN=64, BK=32, num_warps=4, num_stages=2)
        if weight.kind in NIBBLES:
            default["BK"] = max(64, default["BK"])
            default["num_stages"] *= 2 if rows <= 32 else 1
        elif self.batch_invariant and direct:
            default["BN"] = 128 if weight.outputs >= 64 * self.num_sms else 64
        return self.tuned_configs.get("gemm", gemm_key(weight, rows, invariant=self.batch_invariant), default)

    def _gemm_heads(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Launch `gemm_kernel` for one matrix per head; its tile depends on the shape of the weight alone."""
        tokens, heads, outputs = out.shape
        inputs = weight.shape[2]
        default: KernelConfig = {"BM": 64, "BN": 64, "BK": 32, "GROUP": 8, "num_warps": 4, "num_stages": 3}
        choice = self.tuned_configs.get("gemm_heads", f"{heads}x{outputs}x{inputs}", default)
        whole = GPULinear("float", weight.view(heads * outputs, inputs), heads * outputs, inputs, inputs)
        form = self.gemm_form(whole, inputs, choice)
        rows, between = Inputs(x, None, heads * x.stride(0)), (x.stride(0), outputs, outputs)
        sizes = tokens, outputs, inputs
        gemm_kernel[(-(-tokens // form.BM) * -(-outputs // form.BN), heads)](
            rows, whole.tensors(), Rows(out, heads * outputs), *sizes, between, form, **launch_options(choice)
        )
