"""Opening the weights of a model folder: which reader serves its files, and in which numbers they are."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.modules import with_dense_layers
from quire.checkpoint.quantization.source import QuantizedSource
from quire.checkpoint.safetensors import Checkpoint
from quire.checkpoint.weights import TensorSource


def open_weights(info: ModelInfo, load_format: str = "auto") -> TensorSource:
    """Open the weight files of `info`, verify their headers, and read nothing else.

    Args:
        load_format: "auto" takes what the folder holds, "safetensors" only that.

    Raises:
        ModelError: no weights, or files that are not what they should be.
    """
    return with_dense_layers(info, put_together(info, Checkpoint(info.path)))


def put_together(info: ModelInfo, source: TensorSource) -> TensorSource:
    """Return the source with quantized weights in place of their parts, if config.json says that there are any."""
    stored = info.stored_format
    return source if stored is None else QuantizedSource(source, stored)
