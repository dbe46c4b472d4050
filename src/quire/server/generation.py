"""What completions and chat completions share: sampling parameters, limits, submission, and the parts of an answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import OverloadedError, QuireError, RequestError, UnsupportedError
from quire.frontend.async_llm import RequestStream
from quire.frontend.processor import Prompt
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.server.context import ServerContext
from quire.server.errors import JSON, aborted, shutting_down
from quire.server.protocol import GenerationRequest
from quire.server.streaming import CLIENT_CLOSED, ClientGoneError, last_outputs, until_disconnect

MAX_PROMPTS = 256
MAX_SEQUENCES = 1024
MAX_ENTRIES = 8192
YIELD_EVERY = 16

# Fields that have the same name and meaning in a request and in SamplingParams.
SHARED_FIELDS = tuple(name for name in SamplingParams.__struct_fields__ if name in GenerationRequest.model_fields)


def recommended(context: ServerContext) -> Mapping[str, Any]:
    """Return the sampling values that the model's makers recommend, for fields a request leaves out."""
    front = context.llm.front_model
    return front.info.sampling_defaults if front.use_sampling_defaults else {}


def sampling_params(body: GenerationRequest, defaults: Mapping[str, Any], **changes: Any) -> SamplingParams:
    """Return the parameters a request asks for. Raises `RequestError` naming the field.

    Args:
        defaults: values of fields that the request leaves out. changes: fields that the route decides.
    """
    given = {name: getattr(body, name) for name in SHARED_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**{**defaults, **given, **changes, "output_kind": kind})


def check_stream_fields(body: GenerationRequest) -> None:
    """Raise `RequestError` for fields that contradict `stream`."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs cannot be streamed; leave out stream", param="prompt_logprobs")


def check_budget(num_prompts: int, params: SamplingParams) -> None:
    """Raise `RequestError` if one request asks for more than the server does for one, whatever the single fields say.

    Called before any prompt is tokenized. Bounds: sequences, and sequences times alternatives per token.
    """
    sequences = num_prompts * params.n
    entries = sequences * (1 + max(params.logprobs or 0, params.prompt_logprobs or 0))
    if sequences > MAX_SEQUENCES:
        raise RequestError(
            f"{num_prompts} prompts times n = {params.n} are {sequences} sequences; one request may have "
            f"{MAX_SEQUENCES}",
            param="n" if params.n > 1 else "prompt",
        )
    if entries > MAX_ENTRIES:
        raise RequestError(
            f"{sequences} sequences with so many logprobs are {entries} entries per token; one request may have "
            f"{MAX_ENTRIES}",
            param="logprobs",
        )


class Generation:
    """The sequences of one HTTP request, and what stays the same in everything that is said about them.

    Attributes:
        response_id, created, model: as in the answer. streams: one per prompt. n: choices per prompt.
    """

    def __init__(self, context: ServerContext, body: GenerationRequest, prefix: str) -> None:
        self.context = context
        self.body = body
        self.model = context.check_model(body.model)
        self.response_id = f"{prefix}-{body.request_id or uuid.uuid4().hex}"
        self.created = int(time.time())
        self.streams: list[RequestStream] = []
        self.n = 1
        policy = context.config.scheduler.scheduling_policy
        if body.priority != 0 and policy != "priority":
            raise UnsupportedError(
                f"priority needs a server with --scheduling-policy priority; this one has {policy}", param="priority"
            )

    async def submit(
        self, request: Request, prompts: Iterable[tuple[Prompt, str]], params: SamplingParams, num_prompts: int = 1
    ) -> None:
        """Hand the prompts to the engine, all or none.

        Args:
            prompts: each with the name that errors call it.

        Raises:
            QuireError: as `AsyncLLM.submit`.
        """
        check_budget(num_prompts, params)
        self.n = params.n
        self.context.generations.add(self)
        salt = self.context.keys.salt(request.scope["state"].get("key_digest"), self.body.cache_salt)
        try:
            for prompt, param in prompts:
                # Ids within the engine are unique, even if clients choose the same one twice.
                internal_id = f"{self.response_id}-{len(self.streams)}-{uuid.uuid4().hex[:12]}"
                stream = await self.context.llm.submit(
                    prompt, params, internal_id, priority=self.body.priority, cache_salt=salt, param=param
                )
                self.streams.append(stream)
                if len(self.streams) % YIELD_EVERY == 0:
                    await asyncio.sleep(0)  # many prompts must not hold up everyone else
        except BaseException as error:
            if isinstance(error, OverloadedError):
                self.context.note_rejection("queue_full")
            self.close()
            raise

    def abort(self) -> None:
        """End what is unfinished; its streams get a last output."""
        self.context.llm.abort_now([stream.request_id for stream in self.streams if not stream.finished])

    def close(self) -> None:
        """Say that nobody waits for this any more."""
        self.context.generations.discard(self)
        self.abort()

    def check(self, completions: Sequence[CompletionOutput]) -> None:
        """Raise `QuireError` if a completion did not end by itself."""
        for completion in completions:
            if completion.finish_reason == "error":
                raise QuireError("the model produced numbers that are not finite", code="internal_error")
            if completion.finish_reason == "abort":
                raise shutting_down() if self.context.draining else aborted()

    def head(self, kind: str) -> dict[str, Any]:
        """Return what every answer and every chunk begins with."""
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.model}

    async def answer(self, request: Request, build: Callable[[list[RequestOutput]], dict[str, Any]]) -> Response:
        """Wait for the end and return `build(outputs)`, one output per prompt; aborts if the client goes away."""
        try:
            outputs = await until_disconnect(request.receive, last_outputs(self.streams))
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED)
        finally:
            self.close()
        for output in outputs:
            self.check(output.outputs)
        return Response(msgspec.json.encode(build(outputs)), media_type=JSON)


class Usage:
    """Token counts of a generation, so far or final."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.prompt_tokens = sum(len(stream.prompt_token_ids) for stream in streams)
        self.completion_tokens = 0
        self._cached = [0] * len(streams)

    def add(self, index: int, output: RequestOutput) -> None:
        """Count the tokens in an output of stream `index`."""
        self._cached[index] = output.num_cached_tokens
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }


class ChunkUsage:
    """The usage parts of a stream's chunks, as `stream_options` asks for them."""

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
