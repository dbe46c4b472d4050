"""Quire: an LLM inference and serving engine in pure Python.

    from quire import LLM, SamplingParams

    with LLM() as llm:
        print(llm.generate("KING:", SamplingParams(max_tokens=40))[0].outputs[0].text)

The names below load on first use, so that `import quire` costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quire.version import __version__

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine_request import LoRARequest
    from quire.errors import QuireError
    from quire.frontend.async_llm import AsyncLLM
    from quire.frontend.llm import LLM
    from quire.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from quire.pooling_params import PoolingParams
    from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from quire.structured_outputs import StructuredOutputParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "QuireError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputParams",
    "__version__",
]

_HOMES = {
    "LLM": "quire.frontend.llm",
    "AsyncLLM": "quire.frontend.async_llm",
    "BeamSearchOutput": "quire.outputs",
    "BeamSearchParams": "quire.sampling_params",
    "BeamSearchSequence": "quire.outputs",
    "ClassificationRequestOutput": "quire.outputs",
    "CompletionOutput": "quire.outputs",
    "EmbeddingRequestOutput": "quire.outputs",
    "EngineConfig": "quire.config",
    "LoRARequest": "quire.engine_request",
    "PoolingParams": "quire.pooling_params",
    "PoolingRequestOutput": "quire.outputs",
    "QuireError": "quire.errors",
    "RequestOutput": "quire.outputs",
    "RequestOutputKind": "quire.sampling_params",
    "SamplingParams": "quire.sampling_params",
    "ScoringRequestOutput": "quire.outputs",
    "StructuredOutputParams": "quire.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
