"""Reference packers: float matrices to the parts that quantized checkpoints hold, written from their definitions.

Each takes w float32 [N, K] and returns the parts by the suffix that follows the module's name, and the float32 matrix
that the parts stand for. Rounding is to nearest, which is not what AWQ and GPTQ do; what is stored looks the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

Parts = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (
    0.0, 0.005208333333333333, 0.6666666666666666, 1.0, 0.3333333333333333, 0.5, 0.16666666666666666, 0.25,
    -0.0, -0.005208333333333333, -0.6666666666666666, -1.0, -0.3333333333333333, -0.5, -0.16666666666666666, -0.25,
)  # fmt: skip
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def into_words(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack unsigned integers [M, L] along the last axis into int32 [M, L * bits / 32], the lowest bits first."""
    in_word = 32 // bits
    padded = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % in_word))
    words = padded.reshape(len(values), -1, in_word)
    if order is not None:
        words = words[:, :, list(order)]
    packed = sum(words[:, :, i] << (bits * i) for i in range(in_word))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def to_groups(
    w: torch.Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [N, K] (unsigned), zeros [N, G], scales [N, G], the group of each column and the matrix meant."""
    outputs, inputs = w.shape
    group = inputs if group == -1 else group
    groups, top = -(-inputs // group), 2**bits - 1
    of = torch.arange(inputs) // group if order is None else torch.argsort(order) // group
    scales, zeros = torch.empty(outputs, groups, dtype=dtype), torch.empty(outputs, groups)
    for g in range(groups):
        part = w[:, of == g]
        high, low = part.amax(1).clamp(min=0), part.amin(1).clamp(max=0)
        if symmetric:
            scales[:, g] = (2 * torch.maximum(high, -low) / top).to(dtype)
            zeros[:, g] = (top + 1) // 2
        else:
            scales[:, g] = ((high - low) / top).to(dtype)
            zeros[:, g] = torch.round(-low / scales[:, g].float()).clamp(0, top)
    wide, shift = scales.float()[:, of], zeros[:, of]
    q = torch.round(w / wide + shift).clamp(0, top)
    return q, zeros, scales, of, (q - shift) * wide


def awq(w: torch.Tensor, group: int = 32) -> tuple[Parts, torch.Tensor]:
    """AWQ's gemm layout."""
    q, zeros, scales, _, meant = to_groups(w, 4, group, symmetric=False, dtype=torch.float16)
    parts = {
        "qweight": into_words(q.T, 4, AWQ_ORDER),
        "qzeros": into_words(zeros.T, 4, AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }
    return parts, meant


def gptq(
    w: torch.Tensor,
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    act_order: int | None = None,
    v2: bool = False,
) -> tuple[Parts, torch.Tensor]:
    """GPTQ; `act_order` is the seed of the order of columns."""
    generator = torch.Generator().manual_seed(act_order or 0)
    order = None if act_order is None else torch.randperm(w.shape[1], generator=generator)
    q, zeros, scales, of, meant = to_groups(w, bits, group, symmetric=symmetric, dtype=torch.float16, order=order)
    if not v2:
        zeros = zeros.clamp(min=1)  # the first version stores zero - 1
        wide, shift = scales.float()[:, of], zeros[:, of]
        q = torch.round(w / wide + shift).clamp(0, 2**bits - 1)
        meant = (q - shift) * wide
    parts = {
        "qweight": into_words(q, bits).T.contiguous(),
        "qzeros": into_words((zeros - (0 if v2 else 1)).T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": of.to(torch.int32),
    }
    return parts, meant


def packed_tensors(
    w: torch.Tensor, bits: int = 4, group: int = 32, *, symmetric: bool = True, act_order: int | None = None
) -> tuple[Parts, torch.Tensor]:
    """compressed-tensors' pack-quantized."""
    generator = torch.Generator().manual_seed(act_order or 0)
    order = None if act_order is None else torch.randperm(w.shape[1], generator=generator)
    q, zeros, scales, of, meant = to_groups(w, bits, group, symmetric=symmetric, dtype=torch.bfloat16, order=order)
    parts = {
        "weight_packed": into_words(q, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(w.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = into_words(zeros.T, bits).T.contiguous()
    if act_order is not None:
        parts["weight_g_idx"] = of.to(torch.int32)
    return parts, meant


def int8_tensors(w: torch.Tensor, *, symmetric: bool = True, static: bool = False) -> tuple[Parts, torch.Tensor]:
    """compressed-tensors' int-quantized: a scale for each row."""
    q, zeros, scales, _, meant = to_groups(w, 8, -1, symmetric=symmetric, dtype=torch.bfloat16)
    parts = {"weight": (q - 128).to(torch.int8), "weight_scale": scales}
    if not symmetric:
        parts["weight_zero_point"] = (zeros - 128).to(torch.int8)
    if static:
        parts["input_scale"] = torch.tensor([0.05])
    return parts, meant


def fp8(
    w: torch.Tensor, block: tuple[int, int] | None = None, *, by_row: bool = False, name: str = "weight_scale",
    kind: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Parts, torch.Tensor]:  # fmt: skip
    """8-bit floats with a scale for the whole, for each row, or for each block of [rows, columns]."""
    outputs, inputs = w.shape
    rows, columns = block or ((1, inputs) if by_row else (outputs, inputs))
    scales = torch.empty(-(-outputs // rows), -(-inputs // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = w[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = part.abs().max() / torch.finfo(kind).max
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:outputs, :inputs]
    q = (w / spread).to(kind)
    return {"weight": q, name: scales if block or by_row else scales.reshape(1)}, q.float() * spread


def bnb8(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """bitsandbytes' 8 bits: rows over their largest size."""
    sizes = w.abs().amax(1)
    q = torch.round(w * (127 / sizes)[:, None]).to(torch.int8)
    parts = {"weight": q, "SCB": sizes, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, q.float() * (sizes * torch.tensor(7.874015718698502e-3))[:, None]


def bnb4(w: torch.Tensor, kind: str = "nf4", block: int = 64, *, double: bool = False) -> tuple[Parts, torch.Tensor]:
    """bitsandbytes' 4 bits, by blocks of the flattened weight; `double` has the blocks' sizes in 8 bits."""
    table = torch.tensor(NF4 if kind == "nf4" else FP4)
    flat = torch.nn.functional.pad(w.reshape(-1), (0, -w.numel() % block)).reshape(-1, block)
    sizes = flat.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(w.shape)}
    parts: Parts = {"weight.quant_map": table}
    if double:
        offset = sizes.mean()
        codes = torch.cat([-torch.linspace(1, 0, 128), torch.linspace(0, 1, 128)])
        nested = torch.nn.functional.pad(sizes - offset, (0, -len(sizes) % 256)).reshape(-1, 256)
        largest = nested.abs().amax(1)
        found = (nested / largest[:, None])[:, :, None].sub(codes).abs().argmin(2).reshape(-1)[: len(sizes)]
        sizes = codes[found] * largest.repeat_interleave(256)[: len(sizes)] + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        parts |= {"weight.nested_absmax": largest, "weight.nested_quant_map": codes}
        parts["weight.absmax"] = found.to(torch.uint8)
    else:
        parts["weight.absmax"] = sizes
    q = (flat / sizes[:, None])[:, :, None].sub(table).abs().argmin(2)
    meant = (table[q] * sizes[:, None]).reshape(-1)[: w.numel()].reshape(w.shape)
    pairs = q.reshape(-1)[: w.numel()].reshape(-1, 2)
    parts["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None]
    text = json.dumps(state).encode()
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return parts, meant


def mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks [..., K/32, 16], scales [..., K/32] and what they stand for, of w [..., K]."""
    groups = w.unflatten(-1, (-1, 32))
    powers = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    table = torch.tensor(E2M1)
    scaled = groups / torch.exp2(powers)[..., None]
    q = scaled[..., None].sub(table).abs().argmin(-1)
    meant = (table[q] * torch.exp2(powers)[..., None]).flatten(-2)
    return (q[..., 0::2] | q[..., 1::2] << 4).to(torch.uint8), (powers + 127).to(torch.uint8), meant


def fp4_tensors(w: torch.Tensor, group: int) -> tuple[Parts, torch.Tensor]:
    """compressed-tensors' 4-bit floats: NVFP4 with groups of 16, MXFP4 with 32."""
    if group == 32:
        blocks, scales, meant = mxfp4(w)
        return {"weight_packed": blocks.flatten(1), "weight_scale": scales}, meant
    groups, table = w.unflatten(1, (-1, group)), torch.tensor(E2M1)
    divisor = 448 * 6 / w.abs().max()
    scales = (groups.abs().amax(2) / 6 * divisor).to(torch.float8_e4m3fn)
    wide = scales.float() / divisor
    q = (groups / wide[:, :, None])[..., None].sub(table).abs().argmin(3)
    parts = {
        "weight_packed": (q[..., 0::2] | q[..., 1::2] << 4).flatten(1).to(torch.uint8),
        "weight_scale": scales,
        "weight_global_scale": divisor.reshape(1),
    }
    return parts, (table[q] * wide[:, :, None]).flatten(1)


def compressed_config(kind: str = "int", bits: int = 4, **weights: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors for all linear layers; `weights` over the usual fields."""
    fields = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False, **weights}
    stored = fields.pop("format", "pack-quantized")
    inputs = fields.pop("inputs", None)
    group = {"targets": ["Linear"], "weights": fields, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq),
    "awq-row": (
        {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True, "version": "gemm"},
        lambda w: awq(w, -1),
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}, gptq),
    "gptq-asym": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, 4, 64, symmetric=False, v2=True),
    ),
    "gptq-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
        lambda w: gptq(w, 4, 32, symmetric=False, act_order=w.shape[1]),
    ),
    "gptq8": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False},
        lambda w: gptq(w, 8, -1, symmetric=False),
    ),
    "w4a16": (compressed_config(bits=4, strategy="group", group_size=32), packed_tensors),
    "w4a16-asym": (
        compressed_config(bits=4, strategy="group", group_size=64, symmetric=False),
        lambda w: packed_tensors(w, 4, 64, symmetric=False),
    ),
    "w4a16-order": (
        compressed_config(bits=4, strategy="group", group_size=32, actorder="group"),
        lambda w: packed_tensors(w, 4, 32, act_order=w.shape[1]),
    ),
    "w8a16": (compressed_config(bits=8, strategy="channel"), lambda w: packed_tensors(w, 8, -1)),
    "w8a8": (
        compressed_config(bits=8, format="int-quantized", inputs={"num_bits": 8, "type": "int", "dynamic": True}),
        int8_tensors,
    ),
    "w8a8-static": (
        compressed_config(
            bits=8, symmetric=False, format="int-quantized", inputs={"num_bits": 8, "type": "int", "dynamic": False}
        ),
        lambda w: int8_tensors(w, symmetric=False, static=True),
    ),
    "ct-fp8": (
        compressed_config("float", 8, format="float-quantized", inputs={"num_bits": 8, "type": "float"}),
        lambda w: fp8(w, by_row=True),
    ),
    "nvfp4": (
        compressed_config("float", 4, strategy="tensor_group", group_size=16, format="nvfp4-pack-quantized"),
        lambda w: fp4_tensors(w, 16),
    ),
    "mxfp4": (
        compressed_config("float", 4, strategy="group", group_size=32, format="mxfp4-pack-quantized"),
        lambda w: fp4_tensors(w, 32),
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8),
    "fp8-block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        lambda w: fp8(w, (32, 32), name="weight_scale_inv"),
    ),
    "bnb8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, bnb4),
    "nf4-double": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        lambda w: bnb4(w, double=True),
    ),
    "fp4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        lambda w: bnb4(w, "fp4", 128),
    ),
}
"""Formats by a name for tests: quantization_config, and the packer."""


def quantize_folder(
    plain: Path,
    folder: Path,
    kind: str | tuple[dict[str, Any], Any],
    keep: tuple[str, ...] = ("embed", "lm_head", "norm"),
) -> Path:
    """Write the checkpoint `plain` with its matrices in a format, and return a folder with what they stand for.

    `kind` is a key of FORMATS, or what it would hold. Matrices with one of `keep` in their name, or named gate.weight,
    stay as they are.
    """
    from safetensors.torch import load_file, save_file

    config, pack = FORMATS[kind] if isinstance(kind, str) else kind
    meant_folder = folder / "meant"
    meant_folder.mkdir(parents=True)
    stored: Parts = {}
    meant: Parts = {}
    for name, w in load_file(plain / "model.safetensors").items():
        module, matrix = name.removesuffix(".weight"), w.ndim == 2 and name.endswith("weight")
        if not matrix or any(word in name for word in keep) or module.endswith(".gate"):
            stored[name] = meant[name] = w
            continue
        parts, meant[name] = pack(w.float())
        stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file({name: w.contiguous() for name, w in meant.items()}, meant_folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((plain / "config.json").read_text())
    (meant_folder / "config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    return meant_folder
