"""From a prompt to engine requests in one call, as `LLM` and `AsyncLLM` do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.checkpoint.pooling_spec import PoolingSpec
from quire.engine.messages import Ready
from quire.engine_request import EngineRequest
from quire.frontend.front_model import FrontModel
from quire.frontend.input_processor import InputProcessor
from quire.frontend.prompts import Params, Prompt
from quire.tokenizer.tokenizer import Tokenizer
from tests.helpers.fake_engine import model_info


def input_processor(
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int | None = None,
    max_model_len: int = 64,
    max_num_seqs: int = 128,
    eos_token_ids: tuple[int, ...] = (),
    sampling_defaults: Mapping[str, Any] | None = None,
    pooling: PoolingSpec | None = None,
    **options: Any,
) -> InputProcessor:
    """Return a processor for a fake model; `options` are those of `FrontModel`."""
    if vocab_size is None:
        assert tokenizer is not None
        vocab_size = tokenizer.vocab_size
    info = model_info(vocab_size, max_model_len, eos_token_ids, **(sampling_defaults or {}))
    ready = Ready(64, 16, max_model_len, vocab_size, max_num_seqs)
    return InputProcessor(FrontModel(replace(info, pooling=pooling), tokenizer, None, **options), ready)


def engine_requests(
    processor: InputProcessor, prompt: Prompt, params: Params | None, request_id: str, **options: Any
) -> list[EngineRequest]:
    """Tokenize a prompt and build its requests."""
    params = params if params is not None else processor.default_sampling_params()
    token_ids = processor.tokenize(prompt, params, param=options.pop("param", "prompt"))
    return processor.build(token_ids, params, request_id, **options)
