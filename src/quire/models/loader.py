"""Building a model from its folder: survey first, so that a bad folder fails before memory is spent; then read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.safetensors import Checkpoint
from quire.checkpoint.tensor import HostTensor
from quire.checkpoint.weights import CheckpointWeights, DummyWeights, WeightSurvey
from quire.errors import ConfigError, ModelError
from quire.kernels.backend import Backend
from quire.layers.builder import Builder
from quire.layers.parallel import ParallelContext
from quire.models.interface import Model
from quire.models.registry import model_class
from quire.step import DTYPE_BYTES

LOAD_FORMATS = ("auto", "safetensors", "dummy")
GIB = 2**30


def load_model(
    info: ModelInfo,
    backend: Backend,
    *,
    max_model_len: int | None = None,
    load_format: str = "auto",
    allow_nonfinite: bool = False,
    seed: int = 0,
    parallel: ParallelContext | None = None,
) -> Model:
    """Build the model of `info` on `backend`, with this rank's share of its weights.

    Args:
        info: from `load_model_info`.
        max_model_len: longest sequence it must serve; `info.max_model_len` if None.
        load_format: "auto" and "safetensors" read the folder's weights, "dummy" invents some from `seed`.
        allow_nonfinite: load weights that hold NaN or infinity, with a warning.

    Raises:
        ModelError: weights are missing, malformed, not finite, or larger than the free memory.
        ConfigError: max_model_len or the number of ranks does not suit the model.
    """
    length = info.max_model_len if max_model_len is None else max_model_len
    if length > info.longest_model_len:
        raise ConfigError(
            f"max_model_len is {length}; this model can serve at most {info.longest_model_len}", param="max_model_len"
        )
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format is {load_format!r}; it must be one of {', '.join(LOAD_FORMATS)}", param="load_format"
        )
    build = model_class(info.architecture)
    parallel = parallel or ParallelContext()
    if load_format == "dummy":
        return build(info, Builder(DummyWeights(seed), backend, parallel), length)

    checkpoint = Checkpoint(info.path)
    survey = WeightSurvey(checkpoint)
    build(info, Builder(survey, cast(Backend, _NoBackend(backend)), parallel), max_model_len=1)
    tied = (r"^lm_head\.weight$",) if info.tie_word_embeddings else ()
    survey.finish(build.ignorable + tied)
    _check_memory(info, backend, survey.num_values // parallel.tp_size)
    weights = CheckpointWeights(checkpoint, allow_nonfinite=allow_nonfinite)
    return build(info, Builder(weights, backend, parallel), length)


def _check_memory(info: ModelInfo, backend: Backend, num_values: int) -> None:
    """Refuse a model that cannot fit before the system starts to swap or kill."""
    needed, free = num_values * DTYPE_BYTES[backend.dtype], backend.available_memory()
    if needed > free:
        raise ModelError(
            f"{info.path}: weights need {needed / GIB:.1f} GiB in {backend.dtype}, {free / GIB:.1f} GiB are available"
        )


class _NoBackend:
    """Stands in for a backend during the survey: takes tensors and makes nothing of them."""

    def __init__(self, backend: Backend) -> None:
        self.name, self.dtype, self.kv_dtype = backend.name, backend.dtype, backend.kv_dtype

    def from_numpy(self, array: np.ndarray) -> Any:
        return None

    def vector(self, tensor: HostTensor) -> Any:
        return None

    def pack_linear(self, parts: Sequence[HostTensor], biases: Sequence[HostTensor] | None = None, **kind: bool) -> Any:
        return None
