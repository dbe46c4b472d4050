"""Opening the weights of a model folder: which reader serves its files, and in which numbers they are."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.modules import with_dense_layers
from quire.checkpoint.safetensors import Checkpoint
from quire.checkpoint.weights import TensorSource


def open_weights(info: ModelInfo, load_format: str = "auto") -> TensorSource:
    """Open the weight files of `info`, verify their headers, and read nothing else.

    Args:
        load_format: "auto" takes what the folder holds, "safetensors" only that.

    Raises:
        ModelError: no weights, or files that are not what they should be.
    """
    return with_dense_layers(info, Checkpoint(info.path))
