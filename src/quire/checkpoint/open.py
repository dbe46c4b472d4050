"""Opens the weights of a model folder with the reader of its file format, and combines parts of quantized weights."""

from __future__ import annotations

import os
from pathlib import Path

from quire.checkpoint.gguf.source import is_gguf, open_gguf
from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.mapped import read_ahead
from quire.checkpoint.packed import PACKED_FILE
from quire.checkpoint.pickled import open_pickles
from quire.checkpoint.quantization.parts import combine_parts
from quire.checkpoint.safetensors import open_safetensors
from quire.checkpoint.weights import Checkpoint
from quire.errors import ModelError


def open_weights(info: ModelInfo, load_format: str = "auto", strategy: str = "lazy") -> Checkpoint:
    """Open the weight files of `info`, verify their headers, and read nothing else.

    Args:
        load_format: "auto" reads safetensors or GGUF files; "safetensors" and "gguf" only these; "pt" reads pickles.
        strategy: "lazy" maps the files, "prefetch" also reads them ahead in a thread, "eager" reads them now.

    Raises:
        ModelError: there are no weights, or a file is malformed.
    """
    checkpoint = _open(info, load_format, eager=strategy == "eager")
    if strategy == "prefetch":
        read_ahead(dict.fromkeys(tensor.path for tensor in checkpoint.tensors.values()))
    if info.stored_format is not None:
        checkpoint = combine_parts(checkpoint, info.stored_format)
    # sentence-transformers has dense layers in folders beside the model: "2_Dense.linear.weight".
    for dense in info.pooling.dense if info.pooling is not None else ():
        for name, tensor in open_safetensors(info.path / dense.folder).tensors.items():
            checkpoint.add(f"{dense.folder}.{name}", tensor)
    return checkpoint


def _open(info: ModelInfo, load_format: str, *, eager: bool) -> Checkpoint:
    if is_gguf(info.path):
        if load_format not in ("auto", "gguf"):
            raise ModelError(f"{info.path}: is a GGUF file (load_format is {load_format})")
        return open_gguf(info.path, eager=eager)
    if load_format == "gguf":
        raise ModelError(f"{info.path}: is no GGUF file; name the file, or FOLDER:Q4_K_M")
    if load_format == "pt":
        return open_pickles(info.path)
    return open_safetensors(info.path, eager=eager)


def has_weights(info: ModelInfo, load_format: str = "auto") -> bool:
    """Whether there are any weights that could be read."""
    return load_format == "pt" or is_gguf(info.path) or any(info.path.glob("*.safetensors"))


def is_packed(info: ModelInfo) -> bool:
    """Whether the folder holds weights as `quire convert --format packed` writes them, which need no reading."""
    return not is_gguf(info.path) and os.path.lexists(info.path / PACKED_FILE)


def weight_files(info: ModelInfo, load_format: str = "auto") -> list[Path]:
    """Return every file that holds weights, sorted. Raises ModelError as `open_weights` does."""
    if load_format == "auto" and is_packed(info):
        return [info.path / PACKED_FILE]
    return sorted({tensor.path for tensor in open_weights(info, load_format).tensors.values()})
