"""POST /v1/chat/completions: conversations, streamed or not. Dialects use `ChatCompletion`, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import INT64_MAX, check_int
from quire.errors import RequestError, UnsupportedError
from quire.frontend.formats.message import MessageSpec
from quire.frontend.tools import requested_tools
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling.thinking import ThinkingBudget
from quire.sampling_params import SamplingParams
from quire.server.chat_message import ChoiceReader, delta, whole_message
from quire.server.context import ModelContext, model_context
from quire.server.field_names import Name
from quire.server.generation import Chunk, Generation, check_stream_fields
from quire.server.logprobs import chat_logprobs, prompt_logprobs
from quire.server.messages import check_messages
from quire.server.parsing import parse_request, process_body
from quire.server.protocol import LOGPROBS_FIELDS, ChatCompletionRequest, body_schema
from quire.server.streaming import EventStream
from quire.server.templates import check_template, template_arguments
from quire.server.tokenize import with_special_tokens

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest, "text/event-stream"))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    body = await parse_request(request, ChatCompletionRequest)
    context = await model_context(request, body.model)
    generation = await process_body(request, lambda: ChatCompletion(context, body))
    await generation.start()
    if body.stream:
        return EventStream(generation.events(), generation.close)
    return await generation.answer()


class ChatCompletion(Generation):
    """A chat request.

    Attributes:
        message_spec: what the message may contain, set by `start`; None for nothing but content.
    """

    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"

    body: ChatCompletionRequest

    def __init__(self, context: ModelContext, body: ChatCompletionRequest, prefix: str = "chatcmpl") -> None:
        super().__init__(context, body, prefix)
        self.messages = check_messages(body.fields)
        self.tools = requested_tools(
            body.tools, body.tool_choice, body.parallel_tool_calls, ignore_unknown=body.ignore_unknown
        )
        self.template_arguments = template_arguments(context, body, self.messages, self.tools.shown)
        check_stream_fields(body)
        self.num_alternatives = self._alternatives(body)
        self.params = self._params(body)
        self.message_spec: MessageSpec | None = None
        self._streamed: list[_StreamedChoice] = []  # choices, once a stream has begun
        self._reasoning: list[ThinkingBudget] = []  # of each choice, where it can be counted

    @staticmethod
    def _alternatives(body: ChatCompletionRequest) -> int | None:
        """Return the number of alternatives per token in the response; None if another field decides it."""
        named = [name for name in LOGPROBS_FIELDS if getattr(body, name) is not None]
        if named and not body.logprobs:
            raise RequestError(f"{named[0]} needs logprobs to be true", param=named[0])
        if body.top_logprobs is None:
            return None if named else 0
        count = check_int("top_logprobs", body.top_logprobs, -1, INT64_MAX)
        if not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return count

    def _params(self, body: ChatCompletionRequest) -> SamplingParams:
        changes: dict[str, Any] = {"logprobs": self.num_alternatives if body.logprobs else None}
        if body.max_completion_tokens is not None:
            changes["max_tokens"] = check_int("max_completion_tokens", body.max_completion_tokens, 1, INT64_MAX)
        elif body.max_tokens is None:
            # None: to the end of the context.
            changes["max_tokens"] = self.context.llm.front_model.sampling_defaults.get("max_tokens")
        return self.request_params(**changes)

    async def render(self) -> list[int]:
        """Return the token ids of the rendered conversation."""
        token_ids = await self.context.llm.chat_prompt(
            self.messages,
            **self.template_arguments,
            truncate_prompt_tokens=self.context.llm.processor.truncation(self.params),
            wait=self.context.until_disconnect,
        )
        await check_template(self.context, self.body, self.tools)
        if self.body.add_special_tokens:
            token_ids = with_special_tokens(self.context.llm, token_ids)
        return token_ids

    async def start(self) -> None:
        """Render the conversation and submit it to the engine."""
        self.context.server.check_room(self.context.model)  # before anything is rendered or tokenized
        await self.submit_prompt(await self.render())

    async def submit_prompt(self, token_ids: list[int]) -> None:
        """Submit the conversation as `render` returned it."""
        self.message_spec = self._message_spec(token_ids)
        if self.message_spec is not None:
            # The marks between the parts of a message are special tokens; the parser takes them out again.
            self.params = self.params.clone(skip_special_tokens=False)
            marks = self.context.llm.front_model.reasoning_tokens(self.message_spec)
            self._reasoning = [] if marks is None else [ThinkingBudget(marks) for _ in range(self.body.n)]
        await self.submit([(token_ids, "messages")], self.params, self.message_spec)

    def _message_spec(self, token_ids: list[int]) -> MessageSpec | None:
        """Return what the message may contain; None for nothing but content."""
        front, tools = self.context.llm.front_model, self.tools
        spec = front.message_spec(token_ids, tools=tools.callable, choice=tools.choice, parallel=tools.parallel)
        continued = self.template_arguments["continue_final_message"]
        if isinstance(continued, str):  # in its reasoning, which may have begun far before the end of the prompt
            spec = msgspec.structs.replace(spec, reasoning_open=front.message_format.can_reason)
        elif continued:  # in its content, behind all reasoning
            spec = msgspec.structs.replace(spec, can_reason=False)
        if not (spec.can_reason or spec.reasoning_open or (spec.tools and spec.choice != "none")):
            return None
        if not self.body.skip_special_tokens:
            raise UnsupportedError(
                "skip_special_tokens must be true where a message may have reasoning or tool calls: their marks are "
                "special tokens; /v1/completions shows them",
                param="skip_special_tokens",
            )
        form = None if self.structured_output is None else self.structured_output.params
        return msgspec.structs.replace(spec, structured_outputs=form)

    def field_names(self) -> dict[str, Name]:
        """As `Generation.field_names`. The frontend numbers the tools that may be called, a client all of them."""
        places = self.tools.places
        names = {**super().field_names(), r"tools\[(\d+)\]": lambda found: f"tools[{places[int(found[1])]}]"}
        if self.structured_output is None:
            names["structured_outputs"] = "tools"
        if self.body.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
        return names

    def reader(self) -> ChoiceReader:
        """As `Generation.reader`."""
        if self.message_spec is None:
            return super().reader()
        parser = self.context.llm.front_model.message_format.parser(self.message_spec)
        return ChoiceReader(parser, named=self.tools.named, reasoning=self.body.include_reasoning)

    def count(self, index: int, output: RequestOutput) -> None:
        """As `Generation.count`; tokens of reasoning are counted as well."""
        super().count(index, output)
        if not self._reasoning:
            return
        for completion in output.outputs:
            budget = self._reasoning[completion.index]
            for token_id in completion.token_ids:
                budget.accept(token_id)
        self.usage.reasoning_tokens = sum(budget.num_tokens for budget in self._reasoning)

    def choices(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """As `Generation.choices`."""
        output = outputs[0]
        choices = []
        for completion in output.outputs:
            reader = self.reader()
            message = whole_message(reader, completion.text)
            end = _ending(completion, reader)
            choices.append({"index": completion.index, "message": message, **self.extras(completion), **end})
        fields: dict[str, Any] = {"choices": choices}
        if self.body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        return fields

    def chunks(self, index: int, output: RequestOutput) -> Iterator[Chunk]:
        """As `Generation.chunks`: the role, the message in deltas, the finish reason."""
        if not self._streamed:
            self._streamed = [_StreamedChoice(self.reader()) for _ in range(self.n)]
            ids = {"prompt_token_ids": self.streams[0].prompt_token_ids} if self.body.return_token_ids else {}
            # Content that may yet be null begins as null.
            first = {"role": "assistant", "content": "" if self.message_spec is None else None}
            for number in range(self.n):
                choice = {"index": number, "delta": first, "logprobs": None, "finish_reason": None}
                yield {"choices": [choice], **ids}
        for completion in output.outputs:
            for part in self._streamed[completion.index].parts(self, completion):
                yield {"choices": [part]}

    def extras(self, output: CompletionOutput) -> dict[str, Any]:
        """Return the fields of a choice about its tokens: log-probabilities and ids."""
        extras: dict[str, Any] = {"logprobs": None}
        if self.body.logprobs and output.token_ids:
            extras["logprobs"] = chat_logprobs(
                output.token_ids,
                output.logprobs or [],
                self.num_alternatives or 0,
                self.context.llm.tokenizer,
                as_ids=self.body.return_tokens_as_token_ids,
                only=getattr(self.params, "logprob_token_ids", None),
            )
        if self.body.return_token_ids:
            extras["token_ids"] = output.token_ids
        return extras


class _StreamedChoice:
    """One choice of a stream."""

    def __init__(self, reader: ChoiceReader) -> None:
        self._reader = reader
        self._pending: dict[str, Any] = {}  # fields about tokens whose text the parser still buffers

    def parts(self, job: ChatCompletion, output: CompletionOutput) -> list[dict[str, Any]]:
        """Return the choice in each chunk of an output: deltas, and the end. The first one has fields about tokens."""
        reader = self._reader
        events = reader.read(output.text, output.finished)
        self._add_pending(job.extras(output))
        parts = [
            {"index": output.index, "delta": item, **self._take_pending(), "finish_reason": None}
            for item in map(delta, events)
            if item is not None
        ]
        if output.finished:
            last = {"content": ""} if reader.is_empty and job.message_spec is not None else {}
            parts.append({"index": output.index, "delta": last, **self._take_pending(), **_ending(output, reader)})
        return parts

    def _add_pending(self, extras: dict[str, Any]) -> None:
        pending = self._pending
        if extras["logprobs"] is not None:
            logprobs = pending.setdefault("logprobs", {"content": [], "refusal": None})
            logprobs["content"] += extras["logprobs"]["content"]
        if extras.get("token_ids"):
            pending["token_ids"] = [*pending.get("token_ids", ()), *extras["token_ids"]]

    def _take_pending(self) -> dict[str, Any]:
        taken, self._pending = self._pending, {}
        return {"logprobs": None, **taken}


def _ending(output: CompletionOutput, reader: ChoiceReader) -> dict[str, Any]:
    return {"finish_reason": reader.finish_reason(output.finish_reason), "stop_reason": output.stop_reason}
