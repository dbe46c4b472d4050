"""From a prompt to engine requests in one call, as `LLM` and `AsyncLLM` do it."""

from __future__ import annotations

from typing import Any

from quire.engine_request import EngineRequest
from quire.frontend.input_processor import InputProcessor, Params, Prompt


def engine_requests(
    processor: InputProcessor, prompt: Prompt, params: Params | None, request_id: str, **options: Any
) -> list[EngineRequest]:
    """Tokenize a prompt and build its requests."""
    params = params if params is not None else processor.default_sampling_params()
    token_ids = processor.tokenize(prompt, params, param=options.pop("param", "prompt"))
    return processor.build(token_ids, params, request_id, **options)
