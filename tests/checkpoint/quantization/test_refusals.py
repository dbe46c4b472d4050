"""Configs and folders that are not supported or broken: refused with file, tensor and reason before reading."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.checkpoint.hf_config import load_model_info
from quire.checkpoint.quantization.parse import parse_quantization
from quire.config import EngineConfig
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError, ModelError
from tests.checkpoint.quantization.conftest import Open
from tests.helpers import quantizers
from tests.helpers.checkpoints import PLAIN_CONFIG
from tests.helpers.quantizers import FORMATS, compressed_config

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def group(**changes: Any) -> dict[str, Any]:
    """Return compressed-tensors' config with changes to its one group."""
    config = compressed_config()
    config["config_groups"]["group_0"].update(changes)
    return config


BAD_CONFIGS: list[tuple[Any, str]] = [
    ({"quant_method": "aqlm"}, "quantization method 'aqlm' is not supported (supported: awq, gptq, "),
    ({}, "quantization method null is not supported"),
    ({"quant_method": "awq", "bits": 3}, "quantization_config.bits is 3 (expected 4, the only bits supported of AWQ)"),
    ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv' (expected gemm"),
    ({"quant_method": "awq", "zero_point": False}, "zero_point is false (expected true"),
    ({"quant_method": "awq", "group_size": 48}, "group_size is 48 (expected one of -1, 32, 64, 128)"),
    ({**GPTQ, "bits": 3}, "quantization_config.bits is 3 (expected 4 or 8, the only ones supported of GPTQ)"),
    ({"quant_method": "gptq"}, "quantization_config.bits is missing"),
    ({**GPTQ, "group_size": 20}, "group_size is 20 (expected -1 or a multiple of 8)"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin' (expected one of gptq, gptq_v2)"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is true (expected false"),
    ({**GPTQ, "dynamic": {"+:(": {}}}, "(expected a regular expression as its name)"),
    ({**GPTQ, "dynamic": {"+:a": {"bits": 2}}}, "dynamic.+:a.bits is 2"),
    (compressed_config(format="marlin-24"), "format is 'marlin-24' (expected one of pack-quantized, "),
    (compressed_config(bits=3), "weights.num_bits is 3 (expected 4 or 8, the only ones supported)"),
    (compressed_config("float", 4), "weights.group_size is missing (expected 16 (NVFP4) or 32 (MXFP4)"),
    (compressed_config(strategy="group"), "weights.group_size is missing (expected a size, for strategy group)"),
    (compressed_config(strategy="tensor_group"), "strategy is 'tensor_group' (expected one of tensor, channel, "),
    ({**compressed_config(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is 'sparse"),
    ({**compressed_config(), "transform_config": {"R1": {}}}, 'transform_config is {"R1": {}} (expected nothing'),
    ({**compressed_config(), "config_groups": {}}, "config_groups is {} (expected an object of schemes)"),
    (group(targets=["re:("]), 'targets is ["re:("] (expected regular expressions after re:'),
    (group(output_activations={"num_bits": 8}), 'output_activations is {"num_bits": 8} (expected null'),
    ({"quant_method": "fp8", "activation_scheme": "x"}, "activation_scheme is 'x' (expected one of dynamic, static)"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128] (expected two sizes)"),
    ({"quant_method": "bitsandbytes"}, "load_in_8bit is missing (expected true, or load_in_4bit"),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
        "bnb_4bit_quant_type is 'int4' (expected one of nf4, fp4)",
    ),
]


@pytest.mark.parametrize(("config", "reason"), BAD_CONFIGS, ids=[reason[:40] for _, reason in BAD_CONFIGS])
def test_configs_that_are_not_supported(config: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**PLAIN_CONFIG, "quantization_config": config}))
    with pytest.raises(ModelError) as caught:
        load_model_info(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert reason in str(caught.value)


def without(suffix: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda parts: parts.__delitem__(suffix)


def changed(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda parts: parts.update({suffix: change(parts[suffix])})


MISSING = "1 part of quantized weights is missing: "
BAD_PARTS: list[tuple[str, Any, str]] = [
    ("awq", without("scales"), MISSING + "'m.scales' (beside 'm.qweight')"),
    ("awq", without("qweight"), MISSING + "'m.qweight' (beside 'm.qzeros')"),
    ("awq", changed("qzeros", lambda t: t[:1]), "'m.qzeros' has the wrong shape (expected [4, 8], got [1, 8])"),
    ("awq", changed("scales", torch.Tensor.int), "'m.scales' has the wrong dtype (expected F16, BF16, F32, got I32)"),
    ("awq", changed("qweight", lambda t: t[:20]), "'m.qweight' has 20 rows (expected a multiple of group_size, 32)"),
    ("gptq", without("qzeros"), MISSING + "'m.qzeros' (beside 'm.qweight')"),
    ("gptq", changed("g_idx", lambda t: t + 9), "'m.g_idx' names group 12 of 4"),
    ("gptq", changed("qweight", lambda t: t[None]), "'m.qweight' has the wrong shape (expected two sizes, got [1, "),
    ("w4a16", without("weight_scale"), MISSING + "'m.weight_scale' (beside 'm.weight_packed')"),
    ("w4a16-asym", without("weight_zero_point"), MISSING + "'m.weight_zero_point' (beside 'm.weight_packed')"),
    ("w4a16", changed("weight_shape", lambda t: t * 2), "'m.weight_shape' is [128, 256] (expected one that fits"),
    ("w8a8", without("weight_scale"), MISSING + "'m.weight_scale' (beside 'm.weight')"),
    ("nvfp4", without("weight_global_scale"), MISSING + "'m.weight_global_scale' (beside 'm.weight_packed')"),
    ("mxfp4", changed("weight_scale", lambda t: t[:, 1:]), "'m.weight_scale' has the wrong shape (expected [64, 4]"),
    ("fp8", without("weight_scale"), MISSING + "'m.weight_scale' (beside 'm.weight')"),
    (
        "fp8-block",
        changed("weight_scale_inv", lambda t: t[1:]),
        "'m.weight_scale_inv' has the wrong shape (expected [2",
    ),
    ("bnb8", without("SCB"), MISSING + "'m.SCB' (beside 'm.weight')"),
    ("bnb8", changed("weight_format", lambda t: t + 1), "'m.weight_format' says that the weight is not stored row by"),
    ("nf4", without("weight.absmax"), MISSING + "'m.weight.absmax' (beside 'm.weight')"),
    ("nf4", changed("weight", lambda t: t[1:]), "'m.weight' has the wrong shape (expected [4096, 1] or [4096]"),
    ("nf4", without("weight.quant_state.bitsandbytes__nf4"), "'m.weight.quant_state.bitsandbytes__nf4' (beside"),
    ("nf4-double", without("weight.nested_absmax"), MISSING + "'m.weight.nested_absmax' (beside 'm.weight')"),
]


@pytest.mark.parametrize(
    ("kind", "spoil", "reason"), BAD_PARTS, ids=[f"{kind}-{number}" for number, (kind, _, _) in enumerate(BAD_PARTS)]
)
def test_parts_that_are_missing_or_do_not_fit(kind: str, spoil: Any, reason: str, opened: Open, tmp_path: Path) -> None:
    config, pack = FORMATS[kind]
    parts, _ = pack(torch.randn(64, 128, generator=torch.Generator().manual_seed(2)))
    spoil(parts)
    with pytest.raises(ModelError) as caught:
        opened(parts, config)
    assert str(caught.value).startswith(str(tmp_path))
    assert reason in str(caught.value)


def test_mxfp4_without_scales(opened: Open) -> None:
    blocks, scales, _ = quantizers.mxfp4(torch.randn(2, 4, 32))
    with pytest.raises(ModelError, match=r"'m\.a_scales' \(beside 'm\.a_blocks'\)"):
        opened({"a_blocks": blocks}, {"quant_method": "mxfp4"})
    with pytest.raises(ModelError, match=r"'m\.a_scales' has the wrong shape"):
        opened({"a_blocks": blocks, "a_scales": scales[:1]}, {"quant_method": "mxfp4"})


def test_settings_of_single_modules(opened: Open) -> None:
    dynamic = {"-:other": {}, "+:m$": {"bits": 8, "group_size": -1}}
    parts, meant = quantizers.gptq(torch.randn(16, 32), 8, -1, symmetric=False)
    source = opened(parts, {**GPTQ, "dynamic": dynamic})
    assert torch.equal(torch.from_numpy(source["m.weight"].read().to_float32()), meant)


def test_scales_of_activations_are_no_unknown_tensors(opened: Open) -> None:
    config, pack = FORMATS["w8a8-static"]
    assert list(opened(pack(torch.randn(8, 16))[0], config)) == ["m.weight"]


@pytest.mark.parametrize(
    ("name", "content", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, "awq"),
    ],
)
def test_configs_of_their_own_beside_older_checkpoints(name: str, content: Any, method: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    stored = parse_quantization({}, tmp_path / "config.json")
    assert stored is not None
    assert stored.name == method


def test_the_option_must_name_what_the_folder_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**PLAIN_CONFIG, "quantization_config": GPTQ}))
    info = load_model_info(tmp_path)
    requested = EngineConfig.from_kwargs(model=str(tmp_path), quantization="gptq")
    assert resolve_config(requested, info).model.quantization is None
    with pytest.raises(ConfigError, match="awq names what a checkpoint holds; this one is quantized with gptq"):
        resolve_config(EngineConfig.from_kwargs(model=str(tmp_path), quantization="awq"), info)
    path.write_text(json.dumps(PLAIN_CONFIG))
    with pytest.raises(ConfigError, match=r"fp8 needs a GPU .* not quantized, as these"):
        resolve_config(EngineConfig.from_kwargs(model=str(tmp_path), quantization="fp8"), load_model_info(tmp_path))
    on_gpu = EngineConfig.from_kwargs(model=str(tmp_path), quantization="fp8", device="cuda")
    assert resolve_config(on_gpu, load_model_info(tmp_path)).model.quantization == "fp8"
