"""What `LLM` and `AsyncLLM` offer for vectors and scores: encode, embed, classify, score. They are mixed into both."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.errors import OverloadedError, RequestError
from quire.frontend.loading import FrontModel
from quire.frontend.output_processor import RequestState
from quire.frontend.pooling import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    PoolingInput,
    as_classification,
    as_embedding,
    as_score,
    check_task,
    pair_input,
    paired,
    pooled_output,
    prompt_named,
    similarity,
    spec_of,
    with_prompt,
)
from quire.frontend.processor import Params, Processor, Prompt
from quire.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import PoolingParams

if TYPE_CHECKING:
    from quire.frontend.request_stream import RequestStream

Pooled = PoolingRequestOutput[PoolingOutput]
WINDOW = 128  # requests of one call that are with the engine at a time; the queue is there for others, too
QUEUE_PART = 4  # of which a call takes at most one part in so many
YIELD_EVERY = 4


class PoolingCalls:
    """Synchronous; the methods of `LLM`."""

    _front: FrontModel
    _processor: Processor

    def _run_states(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Params],
        priority: int | Sequence[int],
        use_tqdm: bool,
        tenant: str | Sequence[str],
    ) -> list[RequestState]:
        raise TypeError("mixed into a class that runs requests")

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
    ) -> list[Pooled]:
        """Return what the model makes of each prompt, as arrays.

        Args:
            prompts: as for `generate`.
            pooling_params: for all prompts, or one for each.
            pooling_task: "embed", "token_embed", "classify" or "score"; None: what the model is made for.
            truncate_prompt_tokens: as in `PoolingParams`.
            prompt_name: which of the prompts in the model's folder is put before texts; None: its default, if any.
            use_tqdm, priority, tenant: as for `generate`.

        Raises:
            RequestError: a prompt or parameter is bad, or the model generates text. GenerationError: it failed.
        """
        spec_of(self._front)
        items = [with_prompt(self._front, prompt, prompt_name) for prompt in as_prompts(prompts)]
        chosen = _params_for(pooling_params, len(items), pooling_task, truncate_prompt_tokens)
        states = self._run_states(items, chosen, priority, use_tqdm, tenant)
        return [pooled_output(state) for state in states]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt. Arguments and errors as for `encode`."""
        check_task(spec_of(self._front), "embed")
        found = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="embed",
            truncate_prompt_tokens=truncate_prompt_tokens,
            prompt_name=prompt_name,
        )
        return [as_embedding(output) for output in found]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return how well each class fits each prompt. Arguments and errors as for `encode`."""
        check_task(spec_of(self._front), "classify")
        found = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="classify",
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return [as_classification(output) for output in found]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each document fits the query, or its query.

        A cross-encoder reads both together. With a model of vectors it is their cosine, of queries and documents with
        the prompts that the folder has for them.

        Args:
            queries: one, or as many as documents. instruction: what rerankers that are asked for yes or no judge by.
            The others as for `encode`.
        """
        asked, texts = _texts(queries, "queries"), _texts(documents, "documents")
        front, pairs = self._front, paired(asked, texts)
        params = _params_for(pooling_params, 1, None, truncate_prompt_tokens)[0]
        inputs = score_inputs(front, self._processor, asked, texts, pairs, params, instruction)
        states = self._run_states([item.prompt for item in inputs], [item.params for item in inputs], 0, use_tqdm, "")
        return scores(front, [pooled_output(state) for state in states], len(asked), pairs)


class AsyncPoolingCalls:
    """The methods of `AsyncLLM`."""

    if TYPE_CHECKING:  # what `AsyncLLM` has
        submit: Callable[..., Coroutine[Any, Any, RequestStream]]
        most_requests: int

        async def start(self) -> None: ...

        @property
        def front_model(self) -> FrontModel: ...

        @property
        def processor(self) -> Processor: ...

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_name: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str = "",
    ) -> AsyncGenerator[Pooled, None]:
        """Yield what the model makes of a prompt, once; closing the generator aborts it.

        Arguments and errors as for `LLM.encode` and `AsyncLLM.submit`.
        """
        await self.start()
        text = with_prompt(self.front_model, prompt, prompt_name)
        stream = await self.submit(
            text,
            pooling_params or PoolingParams(),
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
        )
        try:
            yield await finished(stream)
        finally:
            stream.close()

    async def embed(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt; options are those of `encode`."""
        return [as_embedding(output) for output in await self._encode_all(prompts, "embed", options)]

    async def classify(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[ClassificationRequestOutput]:
        """Return how well each class fits each prompt; options are those of `encode`."""
        return [as_classification(output) for output in await self._encode_all(prompts, "classify", options)]

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each document fits the query, or its query; as `LLM.score`."""
        await self.start()
        asked, texts = _texts(queries, "queries"), _texts(documents, "documents")
        front, pairs = self.front_model, paired(asked, texts)
        params = pooling_params or PoolingParams()
        inputs = await asyncio.to_thread(score_inputs, front, self.processor, asked, texts, pairs, params, instruction)
        return scores(front, await self.pool_all(inputs), len(asked), pairs)

    async def pool_all(
        self,
        inputs: Sequence[PoolingInput],
        *,
        note: Callable[[RequestStream], None] = lambda stream: None,
        **options: Any,
    ) -> list[Pooled]:
        """Run requests side by side, not too many at a time; return what came of each, in order.

        All are aborted if one fails. `note` is told of each; options are those of `AsyncLLM.submit`.
        """
        window = max(1, min(WINDOW, self.most_requests // QUEUE_PART))
        under_way: deque[RequestStream] = deque()
        found: list[Pooled] = []
        try:
            for count, item in enumerate(inputs, 1):
                while True:
                    if len(under_way) == window:
                        found.append(await finished(under_way[0]))
                        under_way.popleft()
                    try:
                        stream = await self.submit(item.prompt, item.params, param=item.param, **options)
                        break
                    except OverloadedError:
                        if not under_way:
                            raise
                        found.append(await finished(under_way[0]))  # which makes room
                        under_way.popleft()
                under_way.append(stream)
                note(stream)
                if count % YIELD_EVERY == 0:
                    await asyncio.sleep(0)  # many texts must not hold up everyone else
            while under_way:
                found.append(await finished(under_way[0]))
                under_way.popleft()
            return found
        finally:
            for stream in under_way:
                stream.close()

    async def _encode_all(
        self, prompts: Prompt | Sequence[Prompt], task: str, options: Mapping[str, Any]
    ) -> list[Pooled]:
        await self.start()
        front, rest = self.front_model, dict(options)
        check_task(spec_of(front), task)
        name = rest.pop("prompt_name", None)
        params = (rest.pop("pooling_params", None) or PoolingParams()).clone(task=task)
        texts = [with_prompt(front, prompt, name) for prompt in as_prompts(prompts)]
        return await self.pool_all([PoolingInput(text, params) for text in texts], **rest)


async def finished(stream: RequestStream) -> Pooled:
    """Wait for a request and return what came of it. Raises `QuireError` if it failed."""
    async for _ in stream:
        pass
    return pooled_output(stream.state)


def score_inputs(
    front: FrontModel,
    processor: Processor,
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


def scores(
    front: FrontModel, found: Sequence[Pooled], num_queries: int, pairs: Sequence[tuple[int, int]]
) -> list[ScoringRequestOutput]:
    """Return a score for each pair of what came of `score_inputs`."""
    if spec_of(front).task == "classify":
        return [as_score(output) for output in found]
    return [similarity(found[left], found[num_queries + right]) for left, right in pairs]


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


def _params_for(
    given: PoolingParams | Sequence[PoolingParams] | None, count: int, task: str | None, truncate: int | None
) -> list[PoolingParams]:
    """Return the parameters of each prompt."""
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


def _texts(value: Any, name: str) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{name} must be a text or a list of texts", param=name, code="invalid_type")
    return [text for text in texts if isinstance(text, str)]
