"""`ResponseRun`: one response from start to end, read by a client or run in the background; the response object."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from starlette.types import Scope

from quire.errors import ContextLengthError, QuireError, RequestError
from quire.frontend.formats.message import Event
from quire.outputs import CompletionOutput
from quire.server.chat import ChatCompletion
from quire.server.context import ModelContext
from quire.server.dialects import DialectAnswer
from quire.server.errors import error_object
from quire.server.generation import Usage
from quire.server.limits import ConcurrencySlot
from quire.server.responses.conversation import turns, without_beginning
from quire.server.responses.custom_tools import CUSTOM, shown
from quire.server.responses.events import OutputBuilder, StreamEvent, encode_event
from quire.server.responses.protocol import Reasoning, ResponseRequest
from quire.server.responses.store import ResponseStore, StoredResponse
from quire.server.responses.translate import NAMES, TOOL_FIELDS, conversation_id

logger = logging.getLogger(__name__)

FITTING_SECONDS = 10.0  # after which no other cut of a conversation is tried
STORED_IN = ("store", "conversation")  # fields that say so
ANSWER_SHARE = 4  # of a context, one part in so many is left for the answer when a conversation is cut


async def start_fitting(chat: ChatCompletion, *, truncate: bool) -> None:
    """Start a chat; with `truncate`, one that does not fit the context goes without its first turns."""
    chat.context.server.check_room(chat.context.model)
    try:
        token_ids = await chat.render()
    except ContextLengthError as error:
        starts = turns(chat.messages) if truncate else []
        if not starts:
            raise
        token_ids = await _truncated(chat, starts, error)
    await chat.submit_prompt(token_ids)


async def _truncated(chat: ChatCompletion, starts: Sequence[int], too_long: ContextLengthError) -> list[int]:
    """Return the prompt of a chat from the first of `starts` on from which it fits, or else from the last.

    Raises:
        ContextLengthError: not even that fits; `too_long`, if there is no time to find it out.
    """
    begun = time.monotonic()
    messages = chat.messages
    most = chat.context.llm.max_model_len
    room = min(getattr(chat.params, "max_tokens", None) or most // ANSWER_SHARE, most // 2)
    low, high = 0, len(starts) - 1  # the first of `starts` from which on it fits; the last one is tried in any case
    while low < high:
        if time.monotonic() - begun > FITTING_SECONDS:
            raise too_long  # rendering it takes so long that others have waited enough
        middle = (low + high) // 2
        chat.messages = without_beginning(messages, starts[middle])
        if await _fits(chat, most - room):
            high = middle
        else:
            low = middle + 1
    chat.messages = without_beginning(messages, starts[low])
    return await chat.render()


async def _fits(chat: ChatCompletion, most: int) -> bool:
    try:
        return len(await chat.render()) <= most
    except ContextLengthError:
        return False


class ResponseRun(DialectAnswer):
    """One running response.

    Args:
        chat: started. stored: holds the same response object. store: None if nothing of it is to be stored, nor in a
            conversation. builder: of its output. obfuscated: as for `encode_event`.

    Attributes:
        error: what ended it, if it did not end by itself. added: as `ResponseStore.add` returns it.
    """

    def __init__(
        self,
        chat: ChatCompletion,
        stored: StoredResponse,
        store: ResponseStore | None,
        builder: OutputBuilder,
        *,
        obfuscated: bool = False,
    ) -> None:
        super().__init__(chat)
        self.chat = chat
        self.encode = partial(encode_event, obfuscated=obfuscated)
        self.stored = stored
        self.response = stored.response
        self.error: QuireError | None = None
        self._store = store
        self._builder = builder
        self._aborted = False
        self._ended = False
        stored.abort = self.abort
        stored.output = lambda: self._builder.output
        self.added = store.add(stored) if store is not None and self.response["store"] else None

    def abort(self) -> None:
        """End it as cancelled."""
        self._aborted = True
        self.chat.abort()

    async def steps(self) -> AsyncGenerator[list[StreamEvent], None]:
        """As `DialectAnswer.steps`, but a failure is an event, too."""
        try:
            first = "response.queued" if self.response["status"] == "queued" else "response.in_progress"
            yield await self._kept([self._lifecycle("response.created"), self._lifecycle(first)])
            try:
                async with contextlib.aclosing(super().steps()) as steps:
                    async for made in steps:
                        yield await self._kept(made)
            except QuireError as error:
                made = self._failed(error)
                if made:
                    yield await self._kept(made)
            await self._end_stored()
        except (GeneratorExit, asyncio.CancelledError):
            self._aborted = True
            raise
        finally:
            self._end()

    async def _kept(self, made: list[StreamEvent]) -> list[StreamEvent]:
        """Return events once they are kept, and the last ones once the response is: then it can be continued."""
        events = [] if self.stored.events is None else [encode_event(event) for event in made]
        if self.stored.finished:
            await self._end_stored(events)
            for event in made:  # whether it is stored has turned out now
                if "response" in event:
                    event["response"].update({name: self.response[name] for name in STORED_IN if name in self.response})
        elif self.stored.events is not None:
            self.stored.events += events
            self.stored.notify()
        return made

    async def _end_stored(self, last: Sequence[bytes] = ()) -> None:
        self._end(last)
        await self.stored.ended.wait()

    def close(self) -> None:
        """End it as cancelled unless it has ended; its events are not read any more."""
        self._aborted = True
        self._end()

    def result(self) -> dict[str, Any]:
        """As `DialectAnswer.result`. Raises `QuireError` if the response failed."""
        if self.error is not None:
            raise self.error
        return self.response

    def add(self, output: CompletionOutput, events: list[Event]) -> list[StreamEvent]:
        """As `DialectAnswer.add`."""
        made: list[StreamEvent] = []
        if self.response["status"] == "queued":
            self.response["status"] = "in_progress"
            made.append(self._lifecycle("response.in_progress"))
        made += self._builder.add(events, self._logprobs(output))
        if output.finished:
            complete(self.response, output.finish_reason)
            made += self._builder.finish(complete=self.response["status"] == "completed")
            made.append(self._final())
        return made

    def _logprobs(self, output: CompletionOutput) -> list[dict[str, Any]]:
        """Return the log-probabilities of new tokens, but for one that ends the text and is no part of it."""
        logprobs = self.chat.extras(output)["logprobs"]
        if logprobs is None:
            return []
        content: list[dict[str, Any]] = logprobs["content"]
        ends = {output.stop_reason, *self.chat.context.llm.model_info.eos_token_ids}
        return content[:-1] if output.finish_reason == "stop" and output.token_ids[-1] in ends else content

    def _failed(self, error: QuireError) -> list[StreamEvent]:
        """Note the error that ended it; a cancelled one needs no events."""
        self.error = error = NAMES.translate(error) if isinstance(error, RequestError) else error
        if self._aborted:
            return []
        fail(self.response, error)
        details = error_object(error)["error"]
        made = self._builder.finish(complete=False)
        shown = {name: details[name] for name in ("code", "message", "param")}
        made.append(self._builder.event("error", **shown))
        return [*made, self._final()]

    def _final(self) -> StreamEvent:
        self.response["output"] = self._builder.output
        self.response["usage"] = usage_object(self.chat.usage)
        return self._lifecycle(f"response.{self.response['status']}")

    def _lifecycle(self, kind: str) -> StreamEvent:
        return self._builder.event(kind, response={**self.response})

    def _end(self, last: Sequence[bytes] = ()) -> None:
        """Finish it, however it ended: a client that disconnects cancels its response. `last`: its last events."""
        if self._ended:
            return
        self._ended = True
        if not self.stored.finished:
            self._builder.finish(complete=False)
            self.response["output"] = self._builder.output
            self.response["usage"] = usage_object(self.chat.usage)
            if self._aborted:
                self.response["status"] = "cancelled"
            else:
                fail(self.response, QuireError("the server failed on this request"))
        self.chat.close()
        if self._store is None:
            self.stored.mark_ended()
        else:
            self._store.finish(self.stored, last)


async def in_background(run: ResponseRun, scope: Scope) -> None:
    """Run a response that its client does not wait for.

    Args:
        scope: what `lease` returned.
    """
    stored = run.stored
    slot: ConcurrencySlot | None = scope["state"].get("slot")
    with run.chat.context.server.open_request(scope), slot or contextlib.nullcontext():
        try:
            async with contextlib.aclosing(run.steps()) as steps:
                async for _ in steps:
                    pass
        except Exception:  # task boundary
            logger.exception("the response %s failed", stored.response_id)


async def lease(context: ModelContext) -> Scope:
    """Keep a model loaded, and the place among the requests of a key, beyond the answer to the request.

    `in_background` lets go of both.
    """
    await context.server.models.acquire(context.model)
    state = context.state
    slot: ConcurrencySlot | None = state.get("slot")
    if slot is not None:
        slot.extend()
    return {"type": "http", "state": {**state, "models": [context.model]}}


def spawn(run: ResponseRun, scope: Scope, store: ResponseStore) -> None:
    """Run a response in a task of its own."""
    store.keep_task(asyncio.create_task(in_background(run, scope), name=f"quire-{run.stored.response_id}"))


def new_response(body: ResponseRequest, chat: ChatCompletion, response_id: str) -> dict[str, Any]:
    """Return the initial response object."""
    params = chat.params
    text = body.text
    response: dict[str, Any] = {
        "id": response_id,
        "object": "response",
        "created_at": chat.created,
        "status": "queued" if body.background else "in_progress",
        "completed_at": None,
        "background": body.background,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": chat.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": _reasoning(body.reasoning),
        "service_tier": "default",
        "store": body.store,
        "temperature": float(getattr(params, "temperature", 1.0)),
        "text": {
            "format": _format(None if text is None else text.format),
            "verbosity": (None if text is None else text.verbosity) or "medium",
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_tool(tool) for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": float(getattr(params, "top_p", 1.0)),
        "truncation": body.truncation,
        "metadata": body.metadata or {},
    }
    for name in ("user", "safety_identifier", "prompt_cache_key"):  # the schema knows no null in the first
        if getattr(body, name) is not None:
            response[name] = getattr(body, name)
    if body.conversation is not None:
        response["conversation"] = {"id": conversation_id(body)}
    return response


def _format(value: dict[str, Any] | None) -> dict[str, Any]:
    fields = {"type": "text"} if value is None else value
    return {name: item for name, item in fields.items() if item is not None}


def _reasoning(reasoning: Reasoning | None) -> dict[str, Any]:
    if reasoning is None:
        return {"effort": None, "summary": None}
    return {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] == CUSTOM:
        return shown(tool)
    fields = {name: tool.get(name) for name in TOOL_FIELDS}
    return {**fields, "strict": tool.get("strict") or False}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return the token counts. No cache writes are counted: every prompt is cached, without being asked."""
    counts = usage.as_json()
    reasoning = counts.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning["reasoning_tokens"]},
        "total_tokens": counts["total_tokens"],
    }


def complete(response: dict[str, Any], finish_reason: str | None) -> None:
    """Set the final status for a finish reason."""
    if finish_reason in ("length", "repetition"):
        response["status"] = "incomplete"
        # The schema has no reason for repetition.
        response["incomplete_details"] = {"reason": "max_output_tokens"} if finish_reason == "length" else {}
    else:
        response["status"] = "completed"
        response["completed_at"] = int(time.time())


def fail(response: dict[str, Any], error: QuireError) -> None:
    """Set the status and error of a failed response."""
    response["status"] = "failed"
    code = "invalid_prompt" if isinstance(error, RequestError) else "server_error"
    response["error"] = {"code": code, "message": error_object(error)["error"]["message"]}
