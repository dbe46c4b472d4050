"""Measures every format of stored weights and yields the rows of the table "Formats" of docs/models.md.

What is stored is made by the packers of tests.helpers; each is compared with transformers' model of the very weights
that it stands for. `accepted` says what the readers take, `Stored.features` what a row shows of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from quire.checkpoint.gguf import blocks
from quire.checkpoint.gguf.tensors import GGUFTensor
from quire.checkpoint.hf_config import load_model_info
from quire.checkpoint.quantization import awq_gptq, bitsandbytes, compressed, floats
from quire.checkpoint.quantization.parse import METHODS, parse_quantization
from quire.checkpoint.quantization.parts import combine_parts
from quire.checkpoint.safetensors import open_safetensors
from quire.checkpoint.tensor import HostTensor, QuantizedTensor, Tensor
from quire.checkpoint.weights import StoredTensor
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.formats import STORAGE, CPULinear
from quire.kernels.cpu.linear_coded import CodedLinear
from quire.kernels.cpu.linear_int import IntLinear
from quire.models.loader import load_model
from tests.helpers import gguf_files, quantizers
from tests.helpers.checkpoints import load_oracle, logits_of, write_checkpoint
from tests.helpers.model_driver import ModelDriver
from tests.helpers.packed import packed_nbytes
from tests.parity import test_formats
from tests.parity.harness import largest_error, tokens

HEAD = (
    "| format | float32 | greedy 64 | bfloat16 | held as | bits a weight | experts: float32 | greedy 64 | bfloat16 "
    "| held as |",
    "| --- | ---: | --- | ---: | --- | ---: | ---: | --- | ---: | --- |",
)
DENSE, MIXTURE = "llama", "mixtral"
SIDE = 1024  # of the matrix whose bytes are counted: large enough that what every row has is a small part of it
NEEDS_GGUF = "needs the package `gguf`"
FP8_INPUTS = {"num_bits": 8, "type": "float"}

LABELS = {
    "awq": "AWQ, groups of 32",
    "awq-row": "AWQ, rows",
    "gptq": "GPTQ 4 bits, symmetric, groups of 32",
    "gptq-asym": "GPTQ 4 bits, asymmetric, groups of 64, `gptq_v2`",
    "gptq-order": "GPTQ 4 bits, asymmetric, act-order, groups of 32",
    "gptq8": "GPTQ 8 bits, asymmetric, rows",
    "w4a16": "compressed-tensors W4A16, groups of 32",
    "w4a16-asym": "compressed-tensors W4A16, asymmetric, groups of 64",
    "w4a16-order": "compressed-tensors W4A16, act-order, groups of 32",
    "w8a16": "compressed-tensors W8A16, rows",
    "w8a8": "compressed-tensors W8A8, dynamic",
    "w8a8-static": "compressed-tensors W8A8, asymmetric, static",
    "ct-fp8": "compressed-tensors FP8, rows",
    "nvfp4": "compressed-tensors NVFP4",
    "mxfp4": "compressed-tensors MXFP4",
    "fp8": "FP8, one scale",
    "fp8-block": "FP8, blocks of 32 x 32",
    "bnb8": "bitsandbytes int8",
    "nf4": "bitsandbytes NF4, blocks of 64",
    "nf4-double": "bitsandbytes NF4, double quantization",
    "fp4": "bitsandbytes FP4, blocks of 128",
}
"""What the formats of `quantizers.FORMATS` are called in the table."""

FURTHER: dict[str, tuple[dict[str, Any], Any]] = {
    "GPTQ 8 bits, symmetric, groups of 32": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True},
        lambda w: quantizers.gptq(w, 8, 32),
    ),
    "GPTQ 8 bits, asymmetric, act-order, groups of 32": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False, "desc_act": True},
        lambda w: quantizers.gptq(w, 8, 32, symmetric=False, act_order=w.shape[1]),
    ),
    "compressed-tensors W8A8, `naive-quantized`": (
        quantizers.compressed_config(bits=8, format="naive-quantized"),
        quantizers.int8_tensors,
    ),
    "compressed-tensors FP8, one scale": (
        quantizers.compressed_config("float", 8, strategy="tensor", format="float-quantized", inputs=FP8_INPUTS),
        quantizers.fp8,
    ),
    "compressed-tensors FP8, blocks of 32 x 32": (
        quantizers.compressed_config(
            "float", 8, strategy="block", block_structure=[32, 32], format="float-quantized", inputs=FP8_INPUTS
        ),
        lambda w: quantizers.fp8(w, (32, 32)),
    ),
    "FP8, E5M2, one scale": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda w: quantizers.fp8(w, kind=torch.float8_e5m2),
    ),
    "FP8, rows (`fbgemm_fp8`)": ({"quant_method": "fbgemm_fp8"}, lambda w: quantizers.fp8(w, by_row=True)),
}
"""What only this table measures, by what it is called: quantization_config, and the packer."""


@dataclass(frozen=True)
class Stored:
    """A row.

    Attributes:
        features: those of `accepted` that it shows.
        dense, mixture: write a checkpoint into a folder; return what Quire loads, and a folder with what it stands
            for. None where there is no such checkpoint.
        matrix: write a matrix of SIDE rows and columns into a folder, and return it as the reader gives it.
    """

    label: str
    features: frozenset[str]
    dense: Callable[[Path], tuple[Path, Path]] | None
    mixture: Callable[[Path], tuple[Path, Path]]
    matrix: Callable[[Path], Tensor]


@dataclass
class Measured:
    """One model. Errors are largest differences of logits, as a share of the largest logit.

    bfloat16_plain is that of the same weights from a plain checkpoint, held in bfloat16.
    """

    float32: float
    greedy: bool
    bfloat16: float
    bfloat16_plain: float
    held: str


class Watching(CPUBackend):
    """Notes every weight that is packed, and whether the file had it in few bits."""

    def __init__(self) -> None:
        super().__init__("bfloat16", "bfloat16", 1)
        self.packed: list[tuple[Any, bool]] = []

    def pack_linear(self, parts: Sequence[Tensor], *args: Any, **options: Any) -> Any:
        """See `Backend.pack_linear`."""
        made = super().pack_linear(parts, *args, **options)
        self.packed.append((made, any(isinstance(part, QuantizedTensor) for part in parts)))
        return made


def accepted() -> set[str]:
    """Return all that the readers of quantized checkpoints and of GGUF files take, by what a row is to show."""
    found = (
        set(METHODS)
        | {f"gptq {bits} bits" for bits in awq_gptq.GPTQ_BITS}
        | {f"gptq as {kind}" for kind in awq_gptq.GPTQ_FORMATS}
    )
    found |= {f"compressed-tensors {kind}" for kind in (*compressed.FORMATS, *compressed.FP4_FORMATS)}
    found |= {f"compressed-tensors by {strategy}" for strategy in compressed.STRATEGIES}
    found |= {f"compressed-tensors {bits} bits" for bits in compressed.BITS}
    found |= {f"bitsandbytes {kind}" for kind in ("8 bits", *bitsandbytes.KINDS)}
    found |= {f"fp8 {kind}" for kind in floats.KINDS.values()}
    return found | {f"GGUF {name}" for name in blocks.FORMATS}


def shown(config: dict[str, Any], pack: Callable[[torch.Tensor], Any]) -> frozenset[str]:
    """Return what of `accepted` a checkpoint of this config shows."""
    method = config["quant_method"]
    found = {method}
    if method == "gptq":
        found |= {f"gptq {config['bits']} bits", f"gptq as {config.get('checkpoint_format', 'gptq')}"}
    elif method == "compressed-tensors":
        weights = config["config_groups"]["group_0"]["weights"]
        found |= {f"{method} {what}" for what in (config["format"], f"{weights['num_bits']} bits")}
        if config["format"] not in compressed.FP4_FORMATS:  # of which the reader goes by group_size alone
            found.add(f"{method} by {weights['strategy']}")
    elif method == "bitsandbytes":
        eight = config.get("load_in_8bit")
        found.add(f"bitsandbytes {'8 bits' if eight else config.get('bnb_4bit_quant_type', 'fp4')}")
    elif method == "fp8":
        dtype = pack(torch.ones(32, 32))[0]["weight"].dtype
        found.add({torch.float8_e4m3fn: "fp8 e4m3", torch.float8_e5m2: "fp8 e5m2"}[dtype])
    return frozenset(found)


def stored_formats() -> list[Stored]:
    """Return all rows, in the order of the table."""
    named = {LABELS[kind]: made for kind, made in quantizers.FORMATS.items()} | FURTHER
    found = [by_config(label, config, pack) for label, (config, pack) in sorted(named.items(), key=_place)]
    mxfp4 = Stored("MXFP4, experts of GPT-OSS", frozenset(["mxfp4"]), None, write_gpt_oss, mxfp4_matrix)
    return [*found, mxfp4, *(of_gguf(name) for name in blocks.FORMATS)]


def _place(item: tuple[str, tuple[dict[str, Any], Any]]) -> int:
    return list(METHODS).index(item[1][0]["quant_method"])


def by_config(label: str, config: dict[str, Any], pack: Callable[[torch.Tensor], Any]) -> Stored:
    """Return the row of a quantization_config."""

    def write(folder: Path, family: str) -> tuple[Path, Path]:
        sizes = test_formats.SIZES if family == DENSE else test_formats.MOE_SIZES
        plain = write_checkpoint(folder / "plain", family, **sizes)
        return folder / "stored", quantizers.quantize_folder(plain, folder / "stored", (config, pack))

    def matrix(folder: Path) -> Tensor:
        parts, _ = pack(torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)))
        save_file({f"m.{suffix}": part.contiguous() for suffix, part in parts.items()}, folder / "model.safetensors")
        return open_quantized(folder, config)["m.weight"].read()

    dense, mixture = (lambda folder: write(folder, DENSE)), (lambda folder: write(folder, MIXTURE))
    return Stored(label, shown(config, pack), dense, mixture, matrix)


def open_quantized(folder: Path, config: dict[str, Any]) -> Mapping[str, StoredTensor]:
    """Open the tensors of a folder without a model."""
    settings = parse_quantization({"quantization_config": config}, folder / "config.json")
    assert settings is not None
    return combine_parts(open_safetensors(folder), settings).tensors


def write_gpt_oss(folder: Path) -> tuple[Path, Path]:
    """Write GPT-OSS with experts in MXFP4."""
    return folder, test_formats.write_gpt_oss(folder)


def mxfp4_matrix(folder: Path) -> Tensor:
    """Return an expert's matrix in MXFP4."""
    packed, scales, _ = quantizers.mxfp4(torch.randn(1, SIDE, SIDE, generator=torch.Generator().manual_seed(0)))
    save_file({"m_blocks": packed.contiguous(), "m_scales": scales.contiguous()}, folder / "model.safetensors")
    return open_quantized(folder, {"quant_method": "mxfp4"})["m"].read().matrix(0).transposed()


def of_gguf(name: str) -> Stored:
    """Return the row of a type of GGUF's."""
    form = blocks.FORMATS[name]

    def write(folder: Path, family: str) -> tuple[Path, Path]:
        # Rows are whole blocks.
        sizes = test_formats.SIZES if family == DENSE else test_formats.MOE_SIZES
        if form.size > 64:
            sizes = {"hidden_size": form.size, "intermediate_size": form.size, "num_hidden_layers": 1}
        meant = write_checkpoint(folder / "meant", family, seed=3, **sizes)
        back = gguf_files.write_gguf(meant, folder / "model.gguf", name)
        values = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in back.items()}
        save_file(values, meant / "model.safetensors", {"format": "pt"})
        return folder / "model.gguf", meant

    def matrix(folder: Path) -> Tensor:
        data, _ = gguf_files.quantized(np.random.default_rng(0).standard_normal((SIDE, SIDE), np.float32), name)
        if form.decode is None:
            return HostTensor(data.view(np.uint16) if name == "BF16" else data, form.dtype)
        return GGUFTensor(form, data.reshape(SIDE, -1, form.bytes))

    dense, mixture = (lambda folder: write(folder, DENSE)), (lambda folder: write(folder, MIXTURE))
    return Stored(f"GGUF {name}", frozenset([f"GGUF {name}"]), dense, mixture, matrix)


def format_rows() -> Iterator[str]:
    """Measure all formats, and yield a line for each."""
    for stored in stored_formats():
        yield row(stored)


def row(stored: Stored) -> str:
    """Measure a format; return its line, which says so if that takes a package that is not installed."""
    if stored.label.startswith("GGUF") and find_spec("gguf") is None:
        return f"| {stored.label} | {NEEDS_GGUF} | | | | | | | | |"
    with tempfile.TemporaryDirectory() as folder:
        bits = bits_held(stored.matrix(Path(folder)))
    dense, mixture = cells_of(stored.dense), cells_of(stored.mixture)
    return f"| {' | '.join([stored.label, *dense, format(bits, '.2f'), *mixture])} |"


def bits_held(matrix: Tensor) -> float:
    """Return the bits that each weight of a large matrix takes in the default run."""
    return float(packed_nbytes(Watching().pack_linear([matrix])) * 8 / (SIDE * SIDE))


def cells_of(write: Callable[[Path], tuple[Path, Path]] | None) -> list[str]:
    """Return what the table says of a model."""
    if write is None:
        return ["", "", "", ""]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(*write(Path(folder)))
    return [
        format(found.float32, ".1e"),
        "yes" if found.greedy else "no",
        f"{found.bfloat16:.1%} ({found.bfloat16_plain:.1%})",
        found.held,
    ]


def measure(path: Path, meant: Path) -> Measured:
    """Run a checkpoint in float32 and in bfloat16, and the weights that it stands for in bfloat16."""
    oracle, prompt, start = load_oracle(meant), tokens(41), tokens(7, seed=2)
    truth = logits_of(oracle, prompt)
    ours = driver(path, CPUBackend("float32", "float32", 1))
    logits = ours.step({"whole": prompt})["whole"]
    text = ours.greedy(start, 64)
    choices = logits_of(oracle, start + text)[len(start) - 1 : -1].argmax(axis=1).tolist()
    watching = Watching()
    rough = driver(path, watching).step({"whole": prompt})["whole"]
    plain = driver(meant, CPUBackend("bfloat16", "bfloat16", 1)).step({"whole": prompt})["whole"]
    return Measured(
        float32=largest_error(logits, truth),
        greedy=text == choices,
        bfloat16=largest_error(rough, truth),
        bfloat16_plain=largest_error(plain, truth),
        held=held(watching.packed),
    )


def driver(path: Path, backend: CPUBackend) -> ModelDriver:
    """Load a model."""
    return ModelDriver(load_model(load_model_info(path), backend), backend)


def held(packed: Sequence[tuple[Any, bool]]) -> str:
    """Say as what the weights are held that a file has in its format; all of them where it is one of plain numbers."""
    of_format = [weight for weight, quantized in packed if quantized]
    kinds = [_kind(weight, "widened to ") for weight in of_format] or [_kind(weight, "") for weight, _ in packed]
    each = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    if len(each) == 1:
        return kinds[0]
    return "; ".join(f"{count} of {len(kinds)}: {kind}" for kind, count in each.items())


def _kind(weight: Any, before: str) -> str:
    if isinstance(weight, IntLinear):
        return f"integers, {weight.bits} bits"
    if isinstance(weight, CodedLinear):
        return f"codes, {weight.bits} bits"
    assert isinstance(weight, CPULinear)
    return before + next(name for name, dtype in STORAGE.items() if dtype == weight.data.dtype)
