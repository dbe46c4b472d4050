"""`quire convert`: write a model folder with other weights: packed for this machine, or safetensors for any engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import logs
from quire.cli.flags import Argument, Command, flags_of
from quire.cli.offline import LogOptions, engine_config, options_from
from quire.config import DeviceConfig, EngineConfig, ModelConfig
from quire.errors import ConfigError, ModelError
from quire.options import option

if TYPE_CHECKING:
    from quire.checkpoint.hf_config import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Convert"""

    format: str = option(
        "packed",
        "What is written: packed, as this engine holds weights on this machine, mapped at load without any work; or "
        "safetensors, for any engine, with --quantization int8 or int4 in the format of compressed-tensors.",
        choices=("packed", "safetensors"),
    )
    force: bool = option(False, "Write into a folder that is not empty; files of the same names are replaced.")


FLAGS = flags_of((ModelConfig, DeviceConfig, LogOptions, ConvertOptions))
# Files of a model folder other than weights, including those in sub-folders.
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "[0-9]_*/*",
)
MAX_COPIED_BYTES = 2**30
STORED = ("quantization_config", "compression_config", "quire_packed")  # keys of config.json about weights


def run(values: dict[str, Any]) -> int:
    """Convert, print the path and size of the result, and return 0."""
    options = options_from(ConvertOptions, values)
    out = Path(values.pop("out")).expanduser()
    config = engine_config(values)
    logs.setup(values.get("log_level", "warning"))
    _check_out(out, force=options.force)
    from quire.engine.resolve import load_info, resolve_config

    info = load_info(config)
    if options.format == "packed" and config.device.device == "auto":  # packed weights are the CPU's
        config = config.replace(device="cpu")
    if options.format == "safetensors" and config.model.quantization == "fp8" and info.stored_format is None:
        raise ConfigError(
            "quantization: fp8 cannot be written (allowed: int8, int8-weight-only, int4); on a GPU, weights are "
            "turned into it while they are loaded",
            param="quantization",
        )
    resolved = resolve_config(config, info)
    inside = info.path if info.path.is_dir() else info.path.parent
    if out.exists() and out.resolve() == inside.resolve():
        raise ConfigError(f"{out}: is the model's own folder", param="out")
    written = (_write_packed if options.format == "packed" else _write_safetensors)(resolved, info, out)
    print(f"{written}: {written.stat().st_size / 1e6:.1f} MB")
    return 0


def _check_out(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: is a file (expected a folder)", param="out")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise ConfigError(f"{out}: is not empty (--force writes into it)", param="out")


def _write_packed(config: EngineConfig, info: ModelInfo, out: Path) -> Path:
    """Load the model as the engine would, and write the weights that it packs."""
    from quire.checkpoint.hf_config import load_model_info
    from quire.checkpoint.open import is_packed, open_weights, weight_files
    from quire.checkpoint.packed import CONFIG_KEY, PACKED_FILE, write_packed
    from quire.kernels.cpu.packed_weights import Record, packing_traits, recording_weights
    from quire.kernels.create import create_backend
    from quire.models.loader import config_digest, load_model
    from quire.version import __version__
    from quire.worker.fingerprint import digest_file

    model, device = config.model, config.device
    if is_packed(info):
        raise ModelError(f"{info.path}: is packed already (expected the model that it was made of)")
    backend = create_backend(
        device.device, model.dtype, "float32", device.num_threads, model.quantization, device.simd_level
    )
    header, records = packing_traits(backend), list[Record]()
    with recording_weights(backend, records):
        load_model(
            info,
            backend,
            max_model_len=model.max_model_len,
            load_format=model.load_format,
            allow_nonfinite=model.allow_nonfinite,
            seed=model.seed,
        )
    dummy = model.load_format == "dummy"
    files = [] if dummy else weight_files(info, model.load_format)
    header |= {
        "quire": __version__,
        "source": config.model.model,
        "fingerprint": [[path.name, digest_file(path)] for path in files],
        "names": [] if dummy else list(open_weights(info, model.load_format).tensors),
    }
    out.mkdir(parents=True, exist_ok=True)
    _write_config(info, out, model, {CONFIG_KEY: {"quantization": model.quantization}})
    header["config"] = config_digest(load_model_info(out))
    write_packed(out / PACKED_FILE, header, records)
    return out / PACKED_FILE


def _write_safetensors(config: EngineConfig, info: ModelInfo, out: Path) -> Path:
    """Write the weights one by one, in another dtype or quantized."""
    from quire.checkpoint.open import open_weights
    from quire.checkpoint.packed import PACKED_FILE
    from quire.checkpoint.safetensors import SINGLE_FILE
    from quire.checkpoint.write import plain_parts, quantized_parts, write_safetensors
    from quire.kernels.cpu.formats import to_storage

    model = config.model
    checkpoint = open_weights(info, model.load_format)
    extra: dict[str, Any] = {}
    if model.quantization is None:
        parts = list(plain_parts(checkpoint, model.dtype, to_storage))
    else:
        parts = list(quantized_parts(checkpoint, model.dtype, to_storage, 4 if model.quantization == "int4" else 8))
        extra = {"quantization_config": _quantization(model.quantization, parts)}
    out.mkdir(parents=True, exist_ok=True)
    _write_config(info, out, model, extra)
    write_safetensors(out / SINGLE_FILE, parts)
    (out / PACKED_FILE).unlink(missing_ok=True)  # an earlier one, which would be loaded in place of this file
    return out / SINGLE_FILE


def _quantization(name: str, parts: list[Any]) -> dict[str, Any]:
    """Return the `quantization_config` of quantized parts, for config.json."""
    from quire.checkpoint.write import quantization_config

    bits = 4 if name == "int4" else 8
    ends = ".weight_packed" if bits == 4 else ".weight_scale"
    modules = {part.name.removesuffix(ends): part for part in parts if part.name.endswith(ends)}
    ignored = sorted(
        part.name.removesuffix(".weight")
        for part in parts
        if len(part.shape) == 2 and part.name.endswith(".weight") and part.name.removesuffix(".weight") not in modules
    )
    scales = {part.name: part for part in parts if part.name.endswith(".weight_scale")}
    groups = {8 * part.shape[1] // scales[f"{module}.weight_scale"].shape[1] for module, part in modules.items()}
    group = groups.pop() if bits == 4 else None
    return quantization_config(bits, inputs=name == "int8", ignored=ignored, group=group)


def _write_config(info: ModelInfo, out: Path, model: ModelConfig, extra: Mapping[str, Any]) -> None:
    """Write config.json, and copy the other files of a model folder except the weights."""
    from quire.checkpoint.gguf.source import is_gguf
    from quire.checkpoint.hf_config import CONFIG_FILE, read_config

    _, config = read_config(info.path, model.hf_overrides)
    kept = {key: value for key, value in config.items() if key not in STORED and key not in ("dtype", "torch_dtype")}
    text = json.dumps({**kept, "dtype": model.dtype, **extra}, indent=2)
    (out / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    if is_gguf(info.path):
        if not model.skip_tokenizer_init:
            _write_tokenizer(info.path, out)
        return
    found = [path for pattern in COPIED for path in info.path.glob(pattern) if path.is_file()]
    size = sum(path.stat().st_size for path in found)
    if size > MAX_COPIED_BYTES:
        raise ModelError(
            f"{info.path}: the files beside the weights, such as the tokenizer's, take {size} bytes (expected at most "
            f"{MAX_COPIED_BYTES})"
        )
    for path in found:
        target = out / path.relative_to(info.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(path, target)
        except OSError as error:
            raise ModelError(f"{path}: cannot be copied to {target} ({error.strerror or error})") from None


def _write_tokenizer(path: Path, out: Path) -> None:
    """Write the tokenizer of a GGUF file as the files of a model folder."""
    from quire.frontend.tokenizer_check import load_tokenizer
    from quire.tokenizer.files import (
        CONFIG_FILE,
        TEMPLATE_FILE,
        TOKENIZER_FILE,
        TOOL_TEMPLATE_FILE,
        read_tokenizer_folder,
    )

    load_tokenizer(path)  # it is tried out
    files = read_tokenizer_folder(path)
    files.backend.save(str(out / TOKENIZER_FILE))
    (out / CONFIG_FILE).write_text(json.dumps(files.special_tokens, indent=2) + "\n", encoding="utf-8")
    for name, template in ((TEMPLATE_FILE, files.chat_template), (TOOL_TEMPLATE_FILE, files.tool_template)):
        if template is not None:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(template, encoding="utf-8")


COMMAND = Command(
    run=run,
    flags=FLAGS,
    description="Write a model folder with the weights of MODEL (folder, GGUF file, Hugging Face id) as --dtype and "
    "--quantization say; config, tokenizer and templates come along.",
    arguments=(
        Argument("model", "model folder, GGUF file, Hugging Face id, or quire-demo", required=True),
        Argument("out", "folder to write; it must be empty, or not exist", required=True),
    ),
    config_file=False,
)
