"""What completions and chat completions share: sampling parameters, bounds, submission, and the way to the response.

Each output of the engine passes `Generation.accept`, which checks and counts it. `Generation.events` makes OpenAI's
chunks of the outputs, `dialects.DialectAnswer` the events of other APIs.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from starlette.responses import Response

from quire.checks import wrong_value
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.formats.message import MessageSpec
from quire.frontend.output_processor import RequestStream
from quire.frontend.prompts import Prompt
from quire.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from quire.sampling_params import RequestOutputKind, SamplingParams, with_recommended
from quire.server.chat_message import ChoiceReader, PlainParser
from quire.server.context import ModelContext
from quire.server.field_names import FieldNames, Name
from quire.server.job import EngineJob, estimate_tokens
from quire.server.json_io import THREAD_CHARS, large_json_response
from quire.server.limits import time_limit
from quire.server.protocol import GenerationRequest
from quire.server.streaming import DONE, event, last_outputs, merge, until_disconnect
from quire.server.structured_outputs import structured_output
from quire.server.timeline import response_metrics
from quire.server.tracing import traced_parameters

Positions = Sequence[TokenLogprobs | None]

MAX_PROMPTS = 256
MAX_ENTRIES = 16384  # sequences of a request, each with the alternatives per token
YIELD_EVERY = 4
MAX_RESPONSE_ENTRIES = 2**22
MAX_BATCH_BYTES = 65536  # of a stream that are encoded before other requests have their turn
CHARS_PER_ENTRY = 16

# Fields that have the same name and meaning in a request and in SamplingParams. Structured output has several names.
SHARED_FIELDS = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationRequest.model_fields and name != "structured_outputs"
)


def refuse_unless_generating(context: ModelContext) -> None:
    """Raise `UnsupportedError` if the model makes vectors or scores."""
    pooling = context.llm.front_model.info.pooling
    if pooling is not None:
        routes = "/v1/embeddings and /pooling" if pooling.task == "embed" else "/classify, /score and /rerank"
        raise UnsupportedError(
            f"the model {echo(context.name)} does not generate text: it is made to {pooling.task}, with {routes}",
            param="model",
            code="unsupported_endpoint",
        )


def request_params(context: ModelContext, body: GenerationRequest, **changes: Any) -> SamplingParams:
    """Return the sampling parameters of a request. Raises `RequestError` naming the field.

    Args:
        changes: fields that the route decides.
    """
    given = {name: getattr(body, name) for name in SHARED_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    if body.vllm_xargs:
        given["extra_args"] = body.vllm_xargs
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    defaults = context.llm.front_model.sampling_defaults
    params = SamplingParams(**with_recommended(defaults, {**given, **changes, "output_kind": kind}))
    _check_logprobs(params, context.config.model.max_logprobs)
    return params


def _check_logprobs(params: SamplingParams, most: int) -> None:
    """Raise `RequestError` for more log-probabilities than this server gives; before they count into the budget."""
    for name, value in (("logprobs", params.num_logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None and most != -1 and not 0 <= value <= most:
            raise wrong_value(name, f"at most {most} (--max-logprobs of this server)", value, "integer_above_max_value")


def check_stream_fields(body: GenerationRequest) -> None:
    """Raise `RequestError` for fields that contradict `stream`."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs cannot be streamed; leave out stream", param="prompt_logprobs")


def check_budget(num_prompts: int, params: SamplingParams, field: str = "n", *, vocab_size: int = MAX_ENTRIES) -> None:
    """Raise `RequestError` for more than `MAX_ENTRIES` sequences times (1 + alternatives per token).

    Called before any prompt is tokenized. One sequence may always have as many alternatives as the server gives.

    Args:
        field: the one that says how many sequences each prompt has. vocab_size: what -1 logprobs are.
    """
    counts = (params.num_logprobs, params.prompt_logprobs)
    logprobs, each = max(vocab_size if count == -1 else count or 0 for count in counts), params.num_sequences
    sequences = num_prompts * each
    if sequences == 1 or sequences * (1 + logprobs) <= MAX_ENTRIES:
        return
    param = "logprobs" if sequences <= MAX_ENTRIES else field if each > 1 else "prompt"
    raise RequestError(
        f"{num_prompts} prompts times {field} = {each} times (1 + {logprobs} logprobs) are "
        f"{sequences * (1 + logprobs)} entries per token; one request may have {MAX_ENTRIES}",
        param=param,
    )


Chunk = dict[str, Any]  # of a stream


class Generation(EngineJob, ABC):
    """A job that generates text: what completions and chat completions share.

    It is made, started, read (once: by `events`, `answer` or a dialect) and closed.

    Attributes:
        n: choices per prompt in the response. structured_output: None for any text.
        usage: token counts so far, set when the prompts are submitted.
        object_type, chunk_type: `object` of whole responses and of the chunks of streams.
    """

    object_type: ClassVar[str]
    chunk_type: ClassVar[str]

    body: GenerationRequest
    usage: Usage

    def __init__(self, context: ModelContext, body: GenerationRequest, prefix: str) -> None:
        super().__init__(context, body, f"{prefix}-{body.request_id or uuid.uuid4().hex}")
        self.n = 1
        refuse_unless_generating(context)
        self.structured_output = structured_output(body)
        self._alarm: asyncio.TimerHandle | None = None
        self._expired = False
        self._num_entries = 0

    async def submit(
        self,
        prompts: Sequence[tuple[Prompt, str]],
        params: SamplingParams,
        message_spec: MessageSpec | None = None,
    ) -> None:
        """Submit the prompts to the engine, all or none.

        Args:
            prompts: each with its name in errors. message_spec: what the message may be, in chats.

        Raises:
            QuireError: as `AsyncLLM.submit`.
        """
        llm = self.context.llm
        count_field = "n" if self.body.best_of is None else "best_of"
        check_budget(len(prompts), params, count_field, vocab_size=llm.vocab_size)
        self.n = self.body.n
        self.register(traced_parameters(params), self.body.request_id)
        try:
            num_prompt_tokens = sum([estimate_tokens(prompt) for prompt, _ in prompts])
            longest = min(params.max_tokens or llm.max_model_len, llm.max_model_len)
            num_tokens = num_prompt_tokens + len(prompts) * params.num_sequences * longest
            await self.limit(num_prompt_tokens, num_tokens, self.body.timeout)
            if self.deadline is not None:
                self._alarm = asyncio.get_running_loop().call_later(self.deadline.left, self._expire)
            options = self.engine_options(self.body.cache_salt)
            for prompt, param in prompts:
                # Ids within the engine are unique, even if clients choose the same one twice.
                internal_id = f"{self.response_id}-{len(self.streams)}-{uuid.uuid4().hex[:12]}"
                submission = llm.submit(
                    prompt,
                    params,
                    internal_id,
                    param=param,
                    message_spec=message_spec,
                    max_ttft=None if self.deadline is None else self.deadline.left,
                    lora_request=self.context.lora,
                    wait=self.context.until_disconnect,
                    **options,
                )
                async with time_limit(self.deadline):
                    self.add(await submission, params)
                self._check_size(params)
                if len(self.streams) % YIELD_EVERY == 0:
                    await asyncio.sleep(0)  # many prompts must not hold up other requests
            self.usage = Usage(self.streams)
        except BaseException as error:
            self.count_rejection(error)
            self.close()
            if isinstance(error, RequestError):
                raise self.explain(error) from None
            raise

    def _check_size(self, params: SamplingParams) -> None:
        """Raise `RequestError` if the response could have more tokens and alternatives than one response may.

        With log-probabilities, each token counts as often as there are alternatives; those of a prompt are in each of
        its choices.
        """
        state, body = self.streams[-1].state, self.body
        vocab_size = self.context.llm.vocab_size

        def entries(count: int | None) -> int:
            return 0 if count is None else 1 + (vocab_size if count == -1 else count)

        repeated = bool(getattr(body, "echo", False)) or body.return_token_ids
        of_prompt = params.n * max(entries(params.prompt_logprobs), int(repeated)) * len(state.prompt_token_ids)
        of_completions = params.num_sequences * entries(params.num_logprobs) * state.max_tokens
        self._num_entries += of_prompt + of_completions
        if self._num_entries > max(MAX_RESPONSE_ENTRIES, 1 + vocab_size):
            names = {
                "prompt_logprobs": of_prompt if params.prompt_logprobs is not None else 0,
                "logprobs": of_completions,
            }
            name = max(names, key=lambda item: names[item]) if any(names.values()) else "n"
            raise RequestError(
                f"the response could have {self._num_entries} tokens and alternatives; the limit is "
                f"{MAX_RESPONSE_ENTRIES}: ask for a smaller max_tokens, n, or {name}",
                param=name,
            )

    def _expire(self) -> None:
        self._expired = True
        self.abort()

    def explain(self, error: RequestError) -> RequestError:
        """Return an error about the engine's parameters with the names of the request's fields."""
        error.param = error.param and error.param.partition("#")[0]  # a JSON pointer is in the message, too
        return FieldNames(self.field_names()).translate(error)

    def field_names(self) -> dict[str, Name]:
        """Return, as for `FieldNames`, which of the engine's parameters have another name in the request."""
        return {"extra_args": "vllm_xargs", **(self.structured_output.names if self.structured_output else {})}

    def request_params(self, **changes: Any) -> SamplingParams:
        """Return `request_params` of the body, with its structured output."""
        if self.structured_output is not None:
            changes["structured_outputs"] = self.structured_output.params
        try:
            return request_params(self.context, self.body, **changes)
        except RequestError as error:
            raise self.explain(error) from None

    def close(self) -> None:
        """As `EngineJob.close`."""
        super().close()
        if self._alarm is not None:
            self._alarm.cancel()

    def check(self, completions: Sequence[CompletionOutput]) -> None:
        """Raise `QuireError` if a completion was aborted or failed."""
        for completion in completions:
            if completion.error is not None:
                error = completion.error
                raise self.explain(error) if isinstance(error, RequestError) else error
            if completion.finish_reason == "abort":
                raise self.deadline.exceeded() if self.deadline is not None and self._expired else self.aborted()

    def reader(self) -> ChoiceReader:
        """Return a reader for one choice."""
        return ChoiceReader(PlainParser())

    def count(self, index: int, output: RequestOutput) -> None:
        """Count the new tokens of an output of stream `index` in `usage`."""
        self.usage.add(index, output)

    def accept(self, index: int, output: RequestOutput) -> None:
        """Check and count an output of stream `index`. Raises as `check`."""
        self.check(output.outputs)
        self.count(index, output)

    @abstractmethod
    def choices(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return `choices` of a whole response, and the fields beside them."""

    @abstractmethod
    def chunks(self, index: int, output: RequestOutput) -> Iterator[Chunk]:
        """Yield the chunks of a stream that an output of prompt `index` adds, without the fields of `head`."""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream of chunks; then usage. Raises as `accept`.

        Events of one output are joined up to `MAX_BATCH_BYTES`; those of a large one are made in a thread.
        """
        chunk_usage = ChunkUsage(self.body, self.usage)
        head = self.head(self.chunk_type)

        def encode(chunks: Iterator[Chunk]) -> bytes:
            data = b""
            for chunk in chunks:
                data += event(chunk_usage.put({**head, **chunk}))
                if len(data) > MAX_BATCH_BYTES:  # the client reads slowly, and much was generated meanwhile
                    break
            return data

        async with aclosing(merge(self.streams)) as outputs:
            async for index, output in outputs:
                self.accept(index, output)
                large = size_of(output.outputs, output.prompt_logprobs) > THREAD_CHARS
                chunks = self.chunks(index, output)
                while data := await asyncio.to_thread(encode, chunks) if large else encode(chunks):
                    yield data
                    if len(data) <= MAX_BATCH_BYTES:
                        break
                    await asyncio.sleep(0)
        last = chunk_usage.last(self, head)
        if last is not None:
            yield event(last)
        yield DONE

    def head(self, kind: str) -> dict[str, Any]:
        """Return the first fields of every response and chunk."""
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.model}

    def add_metrics(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return a response, or the last chunk of one, with its `metrics` if the request asked for them."""
        metrics = response_metrics(self.streams) if self.body.include_metrics else None
        return answer if metrics is None else {**answer, "metrics": metrics}

    async def answer(self) -> Response:
        """Wait for the end and return the whole response; aborts if the client disconnects."""
        try:
            outputs = await until_disconnect(self.context.request.receive, last_outputs(self.streams))
        finally:
            self.close()
        for output in outputs:
            self.check(output.outputs)

        def build() -> dict[str, Any]:
            for index, output in enumerate(outputs):
                self.count(index, output)
            answer = {**self.head(self.object_type), **self.choices(outputs), "usage": self.usage.as_json()}
            outputs.clear()  # here, because it may take as long as the rest
            return self.add_metrics(answer)

        size = sum([size_of(output.outputs, output.prompt_logprobs) for output in outputs])
        return await large_json_response(size, build)


def size_of(completions: Sequence[CompletionOutput], prompt: Positions | None = None) -> int:
    """Return about how many characters completions and a prompt's log-probabilities are as JSON."""
    size = sum([len(completion.text) + len(completion.token_ids) for completion in completions])
    for positions in [prompt, *[completion.logprobs for completion in completions]]:
        if positions:
            size += CHARS_PER_ENTRY * len(positions) * len(positions[-1] or ())
    return size


class Usage:
    """Token counts of a generation so far."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.prompt_tokens = sum(len(stream.prompt_token_ids) for stream in streams)
        self._generated = [0] * len(streams)
        self._cached = [0] * len(streams)
        self.reasoning_tokens: int | None = None  # None where the model does not reason

    def add(self, index: int, output: RequestOutput) -> None:
        """Take over the counts in an output of stream `index`; tokens of sequences that are not returned count too."""
        self._cached[index] = output.num_cached_tokens
        self._generated[index] = output.num_generated_tokens

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        generated = sum(self._generated)
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


class ChunkUsage:
    """The usage in a stream's chunks, according to `stream_options`."""

    def __init__(self, body: GenerationRequest, usage: Usage) -> None:
        options = body.stream_options
        self.usage = usage
        self.at_end = options is not None and options.include_usage
        self.always = options is not None and options.continuous_usage_stats

    def put(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Add "usage" to a chunk with choices, where one belongs."""
        if self.always:
            chunk["usage"] = self.usage.as_json()
        elif self.at_end:
            chunk["usage"] = None
        return chunk

    def last(self, generation: Generation, head: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the last chunk, without choices; None if it would be empty."""
        chunk = generation.add_metrics({**head, "choices": []})
        if self.at_end:
            chunk["usage"] = self.usage.as_json()
        return chunk if "usage" in chunk or "metrics" in chunk else None
