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
    from quire.cli.engine_args import EngineArgs
    from quire.cli.engine_args import EngineArgs as AsyncEngineArgs
    from quire.config import EngineConfig
    from quire.engine_request import LoRARequest
    from quire.errors import QuireError
    from quire.frontend.async_llm import AsyncLLM
    from quire.frontend.async_llm import AsyncLLM as AsyncLLMEngine
    from quire.frontend.llm import LLM
    from quire.frontend.llm_engine import LLMEngine
    from quire.frontend.prompts import TextPrompt, TokensPrompt
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
    from quire.structured_outputs import StructuredOutputParams as StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "LLMEngine",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "QuireError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_NAMES = {
    "quire.cli.engine_args": ("EngineArgs",),
    "quire.config": ("EngineConfig",),
    "quire.engine_request": ("LoRARequest",),
    "quire.errors": ("QuireError",),
    "quire.frontend.async_llm": ("AsyncLLM",),
    "quire.frontend.llm": ("LLM",),
    "quire.frontend.llm_engine": ("LLMEngine",),
    "quire.frontend.prompts": ("TextPrompt", "TokensPrompt"),
    "quire.pooling_params": ("PoolingParams",),
    "quire.sampling_params": ("BeamSearchParams", "RequestOutputKind", "SamplingParams"),
    "quire.structured_outputs": ("StructuredOutputParams",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
# vLLM's, for the same.
_OTHER_NAMES = {
    "AsyncEngineArgs": "EngineArgs",
    "AsyncLLMEngine": "AsyncLLM",
    "StructuredOutputsParams": "StructuredOutputParams",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    name = _OTHER_NAMES.get(name, name)
    return getattr(importlib.import_module(_MODULES.get(name, "quire.outputs")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
