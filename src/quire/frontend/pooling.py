"""Pooling requests: their inputs, made of texts and pairs of texts, and their outputs as vectors and scores.

Prompts of sentence-transformers are put before texts here, and the two texts of a pair are joined: as the tokenizer
does it for cross-encoders, or in a conversation that a generative reranker answers with yes or no.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from quire.checkpoint.pooling_spec import PoolingSpec
from quire.checks import wrong_value
from quire.errors import GenerationError, RequestError, UnsupportedError
from quire.frontend.front_model import FrontModel
from quire.frontend.input_processor import InputProcessor
from quire.frontend.output_processor import RequestState
from quire.frontend.prompts import Prompt, RequestInput, TokensOfText, as_prompts, one_each, request_inputs
from quire.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import PoolingParams
from quire.tokenizer.tokenizer import Tokenizer, text_called

Pooled = PoolingRequestOutput[PoolingOutput]
T = TypeVar("T")

# Which of a folder's prompts belong to the two sides of a search, as sentence-transformers names them.
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# The prompt of Qwen3-Reranker (Zhang et al. 2025, section 2), and its default instruction.
RERANKER_PROMPT = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
ABORTED = "request_aborted"
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PAIR_ROLES = (re.compile(r"""["']query["']"""), re.compile(r"""["']document["']"""))


def spec_of(front: FrontModel) -> PoolingSpec:
    """Return how the model makes vectors or scores. Raises `UnsupportedError` if it generates text."""
    if front.info.pooling is None:
        raise UnsupportedError(
            "this model generates text; vectors and scores need a model for them, or --runner pooling",
            param="model",
            code="unsupported_endpoint",
        )
    return front.info.pooling


def check_task(spec: PoolingSpec, *tasks: str) -> None:
    """Raise `UnsupportedError` unless the model can do one of these."""
    if not set(tasks) & set(spec.tasks):
        raise UnsupportedError(
            f"this model cannot {' or '.join(tasks)}; it can {' and '.join(spec.tasks)}",
            param="model",
            code="unsupported_endpoint",
        )


def with_prompt(front: FrontModel, prompt: Prompt, name: str | None) -> Prompt:
    """Return a text with the prompt of this name before it, or with the folder's default one; token ids as they are."""
    if not isinstance(prompt, str):
        if name is not None:
            raise RequestError("prompt_name needs texts; token ids have no prompt", param="prompt_name")
        return prompt
    spec = spec_of(front)
    if name is not None and name not in spec.prompts:
        known = ", ".join(spec.prompts) or "none"
        raise wrong_value("prompt_name", f"one of the model's prompts ({known})", name)
    name = name if name is not None else spec.default_prompt
    return prompt if name is None else spec.prompts[name] + prompt


def pair_input(
    front: FrontModel,
    processor: InputProcessor,
    query: str,
    document: str,
    params: PoolingParams,
    *,
    instruction: str | None = None,
    param: str = "documents",
) -> RequestInput:
    """Return the request that scores a pair with a cross-encoder.

    Args:
        instruction: what a generative reranker judges by; None: its default.

    Raises:
        RequestError: the pair cannot be made; ContextLengthError: it can never fit.
    """
    spec, tokenizer = spec_of(front), front.tokenizer
    if tokenizer is None:
        raise RequestError("pairs of texts need a tokenizer, and this engine runs without one (skip_tokenizer_init)")
    most = processor.truncation(params)
    if most is None:
        processor.limit.check_chars(len(query) + len(document), param)
    else:
        longest = (most + 64) * tokenizer.max_chars_per_token
        query, document = query[:longest], document[:longest]
    if spec.logit_score is not None:
        with text_called(param):
            ids = _reranker_prompt(front, processor, tokenizer, query, document, instruction)
        if most is not None and len(ids) > most:
            raise UnsupportedError(
                f"{param}: the pair has {len(ids)} tokens, and what the model is asked cannot be cut to {most}",
                param="truncate_prompt_tokens",
            )
        return RequestInput(TokensOfText(ids), params, param)
    if instruction is not None:
        raise UnsupportedError("instruction is for models that are asked for yes or no", param="instruction")
    with text_called(param):
        ids, start = tokenizer.encode_pair(query, document, most)
    return RequestInput(TokensOfText(ids), params.clone(token_type_start=start), param)


def _reranker_prompt(
    front: FrontModel,
    processor: InputProcessor,
    tokenizer: Tokenizer,
    query: str,
    document: str,
    instruction: str | None,
) -> list[int]:
    """Return the conversation that ends where the model says yes or no; texts cannot spell control tokens."""
    spec, template = spec_of(front), front.chat_template
    if template is not None and all(pattern.search(template.source) for pattern in PAIR_ROLES):
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": instruction})
        return template.encode(messages, processor.limit)
    default = DEFAULT_INSTRUCTION if spec.default_prompt is None else spec.prompts[spec.default_prompt]
    body = f"<Instruct>: {instruction or default}\n<Query>: {query}\n<Document>: {document}"
    control = tokenizer.control_tokens
    if "<|im_start|>" in control and "<|im_end|>" in control:
        start, end = control["<|im_start|>"], control["<|im_end|>"]
        turns: list[str | int] = [
            start,
            f"system\n{RERANKER_PROMPT}",
            end,
            "\n",
            start,
            f"user\n{body}",
            end,
            "\n",
        ]
        return tokenizer.encode_segments([*turns, start, "assistant\n<think>\n\n</think>\n\n"])
    if template is None:
        return tokenizer.encode_segments([f"{RERANKER_PROMPT}\n{body}\n"])
    messages = [{"role": "system", "content": RERANKER_PROMPT}, {"role": "user", "content": body}]
    return template.encode(messages, processor.limit, variables={"enable_thinking": False})


def pooling_inputs(
    front: FrontModel,
    prompts: Any,
    params: PoolingParams | Sequence[PoolingParams] | None,
    *,
    task: str | None = None,
    truncate_prompt_tokens: int | None = None,
    prompt_name: str | None = None,
) -> list[RequestInput]:
    """Return a request for each prompt. Task and truncation replace those of `params`, if they are given.

    Raises:
        RequestError: the model generates text, or something is malformed.
    """
    spec_of(front)
    items = [with_prompt(front, prompt, prompt_name) for prompt in as_prompts(prompts)]
    chosen = one_each(params or PoolingParams(), len(items), "pooling_params", PoolingParams)
    given = {"task": task, "truncate_prompt_tokens": truncate_prompt_tokens}
    changes = {name: value for name, value in given.items() if value is not None}
    return request_inputs(items, [item.clone(**changes) for item in chosen])


class PairScoring:
    """The scores of pairs of texts: one query with all documents, or each with its own.

    A model of classes reads both texts of a pair together. With a model of vectors, the score is the cosine of those of
    the two texts.

    Args:
        names: what errors call each query and each document.

    Attributes:
        inputs: the requests to run, one for each pair or for each text.

    Raises:
        RequestError: the numbers of texts do not match, or a pair cannot be made.
        UnsupportedError: the model has several classes, or generates text.
    """

    def __init__(
        self,
        front: FrontModel,
        processor: InputProcessor,
        queries: Sequence[str],
        documents: Sequence[str],
        params: PoolingParams,
        instruction: str | None = None,
        *,
        names: tuple[Sequence[str], Sequence[str]] | None = None,
    ) -> None:
        if not queries or not documents:
            message = "there must be at least one query and one document"
            raise RequestError(message, param="documents", code="empty_array")
        if len(queries) not in (1, len(documents)):
            message = f"there must be one query, or as many as documents ({len(documents)}), got {len(queries)}"
            raise RequestError(message, param="queries")
        spec = spec_of(front)
        check_task(spec, "score", "embed")
        self._pairs = [(0 if len(queries) == 1 else index, index) for index in range(len(documents))]
        self._num_queries = len(queries)
        self._by_class = spec.task == "classify"
        if names is None:
            names = [f"queries[{i}]" for i in range(len(queries))], [f"documents[{i}]" for i in range(len(documents))]
        self.inputs: list[RequestInput]
        if self._by_class:
            params = params.clone(task="score")
            self.inputs = [
                pair_input(
                    front, processor, queries[i], documents[j], params, instruction=instruction, param=names[1][j]
                )
                for i, j in self._pairs
            ]
            return
        if instruction is not None:
            raise RequestError("instruction is for models that are asked for yes or no", param="instruction")
        params = params.clone(task="embed")
        self.inputs = []
        for texts, prompts, labels in ((queries, QUERY_PROMPTS, names[0]), (documents, DOCUMENT_PROMPTS, names[1])):
            prompt = next((name for name in prompts if name in spec.prompts), None)
            sides = zip(texts, labels, strict=True)
            self.inputs += [RequestInput(with_prompt(front, text, prompt), params, label) for text, label in sides]

    def scores(self, outputs: Sequence[Pooled]) -> list[ScoringRequestOutput]:
        """Return the score of each pair; `outputs` are those of `inputs`."""
        if self._by_class:
            return [_convert(output, ScoringOutput(float(output.outputs.data[0]))) for output in outputs]
        return [_similarity(outputs[i], outputs[self._num_queries + j]) for i, j in self._pairs]


def as_texts(value: Any, name: str) -> list[str]:
    """Return a text or a list of texts as a list. Raises `RequestError` for anything else."""
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{name} must be a text or a list of texts", param=name, code="invalid_type")
    return [text for text in texts if isinstance(text, str)]


# ---- outputs ----


def pooled_output(state: RequestState) -> Pooled:
    """Return the output of a request that has ended. Raises `QuireError` if it failed or was aborted."""
    if state.error is not None:
        raise state.error
    [completion] = state.completions
    if completion.error is not None:
        raise completion.error
    if state.pooled is None:
        raise GenerationError("the request was aborted", code=ABORTED)
    values = np.frombuffer(state.pooled.data, "<f4").reshape(state.pooled.shape)
    return PoolingRequestOutput(
        state.request_id, PoolingOutput(values), state.prompt_token_ids, num_cached_tokens=state.num_cached_tokens
    )


def as_embedding(output: Pooled) -> EmbeddingRequestOutput:
    """Return a vector as numbers."""
    return _convert(output, EmbeddingOutput(output.outputs.data.tolist()))


def as_classification(output: Pooled) -> ClassificationRequestOutput:
    """Return the scores of classes as numbers."""
    return _convert(output, ClassificationOutput(output.outputs.data.tolist()))


def _convert(output: Pooled, outputs: T) -> PoolingRequestOutput[T]:
    return PoolingRequestOutput(
        output.request_id, outputs, output.prompt_token_ids, num_cached_tokens=output.num_cached_tokens
    )


def _similarity(first: Pooled, second: Pooled) -> ScoringRequestOutput:
    """Return the cosine of two vectors, as the score of the pair."""
    left, right = (item.outputs.data.astype(np.float64) for item in (first, second))
    scale = float(np.linalg.norm(left) * np.linalg.norm(right))
    cosine = float(left @ right) / scale if scale else 0.0
    return PoolingRequestOutput(
        f"{first.request_id}_{second.request_id}",
        ScoringOutput(cosine),
        first.prompt_token_ids + second.prompt_token_ids,
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
    )
