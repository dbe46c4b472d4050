"""Reads `quantization_config`: the method and its settings; refuses those that are not supported. Reads no weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.checkpoint.files import ConfigFields, read_json_object
from quire.checkpoint.quantization.awq_gptq import parse_awq, parse_gptq
from quire.checkpoint.quantization.bitsandbytes import parse_bitsandbytes
from quire.checkpoint.quantization.compressed import parse_compressed
from quire.checkpoint.quantization.floats import FP8, MXFP4, parse_fp8
from quire.checkpoint.quantization.parts import StoredFormat
from quire.errors import ModelError, echo

KEYS = ("quantization_config", "compression_config")  # in config.json
GPTQ_FILE, AWQ_FILE = "quantize_config.json", "quant_config.json"  # of folders older than these keys


METHODS: dict[str, Callable[[ConfigFields], StoredFormat]] = {
    "awq": parse_awq,
    "gptq": parse_gptq,
    "compressed-tensors": parse_compressed,
    "fp8": parse_fp8,
    "fbgemm_fp8": lambda fields: FP8(None),
    "bitsandbytes": parse_bitsandbytes,
    "mxfp4": lambda fields: MXFP4(),
}
NAMES = tuple(name for name in METHODS if name != "fbgemm_fp8")


def parse_quantization(config: Mapping[str, Any], path: Path) -> StoredFormat | None:
    """Return how the weights of a folder are quantized, None where they are not.

    Args:
        config: of the file at `path`, config.json.

    Raises:
        ModelError: a method, or a setting of it, that is not supported.
    """
    fields = ConfigFields(config, path)
    for key in KEYS:
        if isinstance(config.get(key), str):
            raise _unknown(path, config[key])
        inner = fields.inner(key)
        if inner is not None:
            return _parse(inner)
    for name, method in ((GPTQ_FILE, "gptq"), (AWQ_FILE, "awq")):
        beside = path.parent / name
        if os.path.lexists(beside):
            return _parse(ConfigFields({"quant_method": method, **read_json_object(beside)}, beside))
    return None


def _parse(fields: ConfigFields) -> StoredFormat:
    method = fields.values.get("quant_method")
    if method is None and (fields.values.get("load_in_8bit") or fields.values.get("load_in_4bit")):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in METHODS:
        raise _unknown(fields.path, method)
    return METHODS[method](fields)


def _unknown(path: Path, method: Any) -> ModelError:
    return ModelError(f"{path}: quantization method {echo(method)} is not supported (supported: {', '.join(METHODS)})")
