"""POST /v1/chat/completions: conversations, streamed or not."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import INT64_MAX, check_int
from quire.errors import RequestError
from quire.frontend.processor import Params
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import MAX_LOGPROBS
from quire.server.context import ServerContext, context_of
from quire.server.generation import ChunkUsage, Generation, Usage, check_stream_fields, recommended, request_params
from quire.server.logprobs import chat_logprobs, prompt_logprobs
from quire.server.messages import check_messages, check_template_fields
from quire.server.parsing import parse_request
from quire.server.protocol import ChatCompletionRequest, body_schema
from quire.server.streaming import DONE, EventStream, event, merge
from quire.server.tokenize import with_special_tokens

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    server = context.config.server
    body = await parse_request(
        request, ChatCompletionRequest, limit=server.max_body_bytes, ignore_unknown=server.ignore_unknown_fields
    )
    generation = ChatCompletion(context, body)
    await generation.start(request)
    if body.stream:
        return EventStream(generation.events(), generation.close)
    return await generation.answer(request, generation.build)


class ChatCompletion(Generation):
    """One chat request on its way."""

    body: ChatCompletionRequest

    def __init__(self, context: ServerContext, body: ChatCompletionRequest) -> None:
        super().__init__(context, body, "chatcmpl")
        self.messages = check_messages(body.messages, ignore_unknown=context.config.server.ignore_unknown_fields)
        self.template_fields = check_template_fields(
            body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
        )
        check_stream_fields(body)
        self.num_alternatives = self._alternatives(body)
        self.params = self._params(body)

    @staticmethod
    def _alternatives(body: ChatCompletionRequest) -> int:
        if body.top_logprobs is None:
            return 0
        count = check_int("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
        if not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return count

    def _params(self, body: ChatCompletionRequest) -> Params:
        changes: dict[str, Any] = {"logprobs": self.num_alternatives if body.logprobs else None}
        if body.max_completion_tokens is not None:
            changes["max_tokens"] = check_int("max_completion_tokens", body.max_completion_tokens, 1, INT64_MAX)
        elif body.max_tokens is None:
            # None: to the end of the context.
            changes["max_tokens"] = recommended(self.context).get("max_tokens")
        return request_params(self.context, body, **changes)

    async def start(self, request: Request) -> None:
        """Render the conversation and hand it to the engine."""
        token_ids = await self.context.llm.chat_prompt(
            self.messages, **self.template_fields, truncate_prompt_tokens=self.params.truncate_prompt_tokens
        )
        if self.body.add_special_tokens:
            token_ids = with_special_tokens(self.context.llm, token_ids)
        await self.submit(request, [(token_ids, "messages")], self.params)

    def build(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer."""
        output = outputs[0]
        usage = Usage(self.streams)
        usage.add(0, output)
        choices = []
        for completion in output.outputs:
            message = {"role": "assistant", "content": completion.text, "refusal": None}
            choices.append(
                {
                    "index": completion.index,
                    "message": message,
                    **self._extras(completion),
                    **self._ending(completion),
                }
            )
        answer = {**self.head("chat.completion"), "choices": choices, "usage": usage.as_json()}
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the stream's events: the role, the text bit by bit, the reason of the end; then usage."""
        usage = Usage(self.streams)
        chunk_usage = ChunkUsage(self.body, usage)
        head = self.head("chat.completion.chunk")
        begun = False
        async for _, output in merge(self.streams):
            self.check(output.outputs)
            usage.add(0, output)
            data = b""
            if not begun:
                begun = True
                data = b"".join([event(chunk_usage.put({**head, **extra})) for extra in self._first_chunks(output)])
            for completion in output.outputs:
                for choice in self._chunks(completion):
                    data += event(chunk_usage.put({**head, "choices": [choice]}))
            if data:
                yield data
        if chunk_usage.at_end:
            yield event({**head, "choices": [], "usage": usage.as_json()})
        yield DONE

    def _first_chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        ids = {"prompt_token_ids": output.prompt_token_ids} if self.body.return_token_ids else {}
        delta = {"role": "assistant", "content": ""}
        return [
            {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], **ids}
            for index in range(self.n)
        ]

    def _chunks(self, output: CompletionOutput) -> list[dict[str, Any]]:
        """Return the choices of one or two chunks: what is new, and, with nothing new in it, the end."""
        extras = self._extras(output)
        chunks = []
        if output.text or (not output.finished and (extras["logprobs"] or extras.get("token_ids"))):
            delta = {"content": output.text}
            chunks.append({"index": output.index, "delta": delta, **extras, "finish_reason": None})
            extras = {"logprobs": None}
        if output.finished:
            chunks.append({"index": output.index, "delta": {"content": ""}, **extras, **self._ending(output)})
        return chunks

    def _extras(self, output: CompletionOutput) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": None}
        if self.body.logprobs and output.token_ids:
            extras["logprobs"] = chat_logprobs(
                output.token_ids,
                output.logprobs or [],
                self.num_alternatives,
                self.context.llm.tokenizer,
                as_ids=self.body.return_tokens_as_token_ids,
            )
        if self.body.return_token_ids:
            extras["token_ids"] = output.token_ids
        return extras

    @staticmethod
    def _ending(output: CompletionOutput) -> dict[str, Any]:
        return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
