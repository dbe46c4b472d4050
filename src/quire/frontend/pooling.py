"""Pooling requests: their inputs, made of texts and pairs of texts, and their outputs as vectors and scores.

Prompts of sentence-transformers are put before texts here, and the two texts of a pair are joined: as the tokenizer
does it for cross-encoders, or in a conversation that a generative reranker answers with yes or no.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from quire.checkpoint.pooling_spec import PoolingSpec
from quire.errors import GenerationError, RequestError, UnsupportedError, echo
from quire.frontend.front_model import FrontModel
from quire.frontend.input_processor import InputProcessor, Prompt
from quire.frontend.output_processor import RequestState
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
from quire.tokenizer.tokenizer import Tokenizer

Pooled = PoolingRequestOutput[PoolingOutput]
T = TypeVar("T")

# Which of a folder's prompts belong to the two sides of a search, as sentence-transformers names them.
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# What the makers of Qwen3-Reranker ask their model (Zhang et al. 2025, section 2), and their instruction.
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
ABORTED = "request_aborted"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PAIR_ROLES = (re.compile(r"""["']query["']"""), re.compile(r"""["']document["']"""))


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One request to the engine, and what errors call its text."""

    prompt: Prompt
    params: PoolingParams
    param: str = "prompt"


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
        raise RequestError(
            f"prompt_name must be one of the model's prompts ({known}), got {echo(name)}", param="prompt_name"
        )
    name = name if name is not None else spec.default_prompt
    return prompt if name is None else spec.prompts[name] + prompt


def prompt_named(front: FrontModel, names: Sequence[str]) -> str | None:
    """Return the first of these names that the model has a prompt for."""
    return next((name for name in names if name in spec_of(front).prompts), None)


def tokenizer_of(front: FrontModel) -> Tokenizer:
    """Return the tokenizer. Raises `RequestError` if the engine runs without one."""
    if front.tokenizer is None:
        raise RequestError("pairs of texts need a tokenizer, and this engine runs without one (skip_tokenizer_init)")
    return front.tokenizer


def pair_input(
    front: FrontModel,
    processor: InputProcessor,
    query: str,
    document: str,
    params: PoolingParams,
    *,
    instruction: str | None = None,
    param: str = "documents",
) -> PoolingInput:
    """Return the request that scores a pair with a cross-encoder.

    Args:
        instruction: what a generative reranker judges by; None: its default.

    Raises:
        RequestError: the pair cannot be made; ContextLengthError: it can never fit.
    """
    spec, tokenizer = spec_of(front), tokenizer_of(front)
    keep = params.truncate_prompt_tokens
    most = None if keep is None else processor.max_model_len if keep == -1 else min(keep, processor.max_model_len)
    if most is None:
        processor.check_chars(len(query) + len(document), param)
    else:
        longest = (most + 64) * tokenizer.max_chars_per_token
        query, document = query[:longest], document[:longest]
    if spec.logit_score is not None:
        ids = _question(front, processor, tokenizer, query, document, instruction)
        if most is not None and len(ids) > most:
            raise UnsupportedError(
                f"{param}: the pair has {len(ids)} tokens, and what the model is asked cannot be cut to {most}",
                param="truncate_prompt_tokens",
            )
        return PoolingInput(ids, params, param)
    if instruction is not None:
        raise UnsupportedError("instruction is for models that are asked for yes or no", param="instruction")
    ids, start = tokenizer.encode_pair(query, document, most)
    return PoolingInput(ids, params.clone(token_type_start=start), param)


def _question(
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
        return template.encode(messages, processor)
    default = INSTRUCTION if spec.default_prompt is None else spec.prompts[spec.default_prompt]
    body = f"<Instruct>: {instruction or default}\n<Query>: {query}\n<Document>: {document}"
    control = tokenizer.control_tokens
    if "<|im_start|>" in control and "<|im_end|>" in control:
        start, end = control["<|im_start|>"], control["<|im_end|>"]
        turns: list[str | int] = [start, f"system\n{JUDGE}", end, "\n", start, f"user\n{body}", end, "\n"]
        return tokenizer.encode_segments([*turns, start, "assistant\n<think>\n\n</think>\n\n"])
    if template is None:
        return tokenizer.encode_segments([f"{JUDGE}\n{body}\n"])
    messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": body}]
    return template.encode(messages, processor, variables={"enable_thinking": False})


def paired(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[int, int]]:
    """Return which query goes with which document: one with all, or each with its own. Raises `RequestError`."""
    if not queries or not documents:
        raise RequestError("there must be at least one query and one document", param="documents", code="empty_array")
    if len(queries) not in (1, len(documents)):
        raise RequestError(
            f"there must be one query, or as many as documents ({len(documents)}), got {len(queries)}", param="queries"
        )
    return [(0 if len(queries) == 1 else index, index) for index in range(len(documents))]


def score_inputs(
    front: FrontModel,
    processor: InputProcessor,
    queries: Sequence[str],
    documents: Sequence[str],
    pairs: Sequence[tuple[int, int]],
    params: PoolingParams,
    instruction: str | None = None,
    *,
    names: tuple[Sequence[str], Sequence[str]] | None = None,
) -> list[PoolingInput]:
    """Return the requests that score these pairs: one for each, or with a model of vectors one for each text.

    `names` are what errors call each text. Raises `RequestError`; `UnsupportedError` if the model has several classes.
    """
    spec = spec_of(front)
    check_task(spec, "score", "embed")
    if names is None:
        names = [f"queries[{i}]" for i in range(len(queries))], [f"documents[{i}]" for i in range(len(documents))]
    if spec.task == "classify":
        return [
            pair_input(
                front,
                processor,
                queries[left],
                documents[right],
                params.clone(task="score"),
                instruction=instruction,
                param=names[1][right],
            )
            for left, right in pairs
        ]
    if instruction is not None:
        raise RequestError("instruction is for models that are asked for yes or no", param="instruction")
    params = params.clone(task="embed")
    sides = ((queries, QUERY_PROMPTS, names[0]), (documents, DOCUMENT_PROMPTS, names[1]))
    return [
        PoolingInput(with_prompt(front, text, prompt_named(front, prompts)), params, name)
        for texts, prompts, labels in sides
        for text, name in zip(texts, labels, strict=True)
    ]


def as_prompts(prompts: Any) -> list[Prompt]:
    """Tell one prompt from a list of prompts: a list of ints is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, list | tuple):
        if prompts and all(isinstance(item, int) for item in prompts):
            return [list(prompts)]
        return list(prompts)
    raise RequestError(
        f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}",
        param="prompts",
        code="invalid_type",
    )


def params_for_prompts(
    given: PoolingParams | Sequence[PoolingParams] | None, count: int, task: str | None, truncate: int | None
) -> list[PoolingParams]:
    """Return the parameters of each prompt, with a task and a truncation that the caller gave beside them."""
    chosen: list[Any] = list(given) if isinstance(given, list | tuple) else [given or PoolingParams()] * count
    if len(chosen) != count:
        raise RequestError(f"pooling_params has {len(chosen)} items for {count} prompts", param="pooling_params")
    for item in chosen:
        if not isinstance(item, PoolingParams):
            raise RequestError(
                f"pooling_params must be PoolingParams, got {type(item).__name__}",
                param="pooling_params",
                code="invalid_type",
            )
    changes: dict[str, Any] = {} if task is None else {"task": task}
    if truncate is not None:
        changes["truncate_prompt_tokens"] = truncate
    return [item.clone(**changes) for item in chosen]


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


def scores(
    front: FrontModel, found: Sequence[Pooled], num_queries: int, pairs: Sequence[tuple[int, int]]
) -> list[ScoringRequestOutput]:
    """Return a score for each pair of what came of `score_inputs`."""
    if spec_of(front).task == "classify":
        return [_convert(output, ScoringOutput(float(output.outputs.data[0]))) for output in found]
    return [_similarity(found[left], found[num_queries + right]) for left, right in pairs]
