"""One HTTP request for vectors or scores on its way: limits, the engine's requests, and the answers of all routes."""

from __future__ import annotations

import asyncio
import base64 as encoding
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import INT64_MAX, check_int
from quire.errors import GenerationError, OverloadedError, UnsupportedError
from quire.frontend.output_processor import RequestStream
from quire.frontend.pooling import ABORTED, Pooled, PoolingInput
from quire.outputs import ScoringRequestOutput
from quire.server.access_log import log_prompt
from quire.server.context import ModelContext
from quire.server.errors import aborted, shutting_down
from quire.server.generation import LOGGED_CHARS, estimate_tokens
from quire.server.json_io import large_json_response
from quire.server.limits import Quota, RateLimitError, deadline_of, timed_out
from quire.server.streaming import CLIENT_CLOSED, ClientGoneError, until_disconnect
from quire.server.timeline import Visited

if TYPE_CHECKING:
    from quire.server.pooling import PoolingRequest


@dataclass(frozen=True, slots=True)
class Answered:
    """What an answer is made of.

    Attributes:
        head: id, time and model. found: what came of each request; scored: and of each pair, if it was about pairs.
        usage: as in OpenAI's answers.
    """

    head: dict[str, Any]
    found: list[Pooled]
    scored: list[ScoringRequestOutput]
    usage: dict[str, Any]


class PoolingJob:
    """The engine's requests for one HTTP request.

    Raises `UnsupportedError` for a priority that the server does not know of.
    """

    def __init__(self, context: ModelContext, body: PoolingRequest, prefix: str) -> None:
        self.context, self.body = context, body
        self.response_id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.streams: list[RequestStream] = []
        self._quota: Quota | None = None
        self._reserved = 0
        policy = context.config.scheduler.scheduling_policy
        if body.priority != 0 and policy != "priority":
            raise UnsupportedError(
                f"priority needs a server with --scheduling-policy priority; this one has {policy}", param="priority"
            )

    async def answer(
        self,
        request: Request,
        inputs: Sequence[PoolingInput],
        write: Callable[[Answered], dict[str, Any]],
        score: Callable[[list[Pooled]], list[ScoringRequestOutput]] = lambda found: [],
    ) -> Response:
        """Run the requests and return what `write` makes of the results; aborts them if the client goes away.

        Raises:
            QuireError: as `AsyncLLM.submit`, or one of the requests failed.
        """
        try:
            found = await self.run(request, inputs)
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED)

        def build() -> dict[str, Any]:
            return write(Answered(self._head(), found, score(found), self._usage(found)))

        return await large_json_response(num_values(found), build)

    async def run(self, request: Request, inputs: Sequence[PoolingInput]) -> list[Pooled]:
        """Run the requests. Raises `QuireError`, and `ClientGoneError`."""
        state, context = request.scope["state"], self.context
        digest = state.get("key_digest")
        context.generations.add(self)
        visited = Visited(
            self.response_id, state.get("request_id", ""), None, digest, context.name, context.llm, self.streams, {}
        )
        state.setdefault("visited", []).append(visited)
        context.server.timelines.begin(visited)
        try:
            self._limit(state, inputs)
            deadline = deadline_of(request, context.config.server.request_timeout)
            work = context.llm.pool_all(
                inputs,
                note=self._note(inputs),
                priority=self.body.priority,
                cache_salt=context.keys.salt(digest, None),
                tenant=context.keys.tenant(digest, self.body.user),
            )
            try:
                async with asyncio.timeout(None if deadline is None else deadline.left):
                    return await until_disconnect(request.receive, work)
            except TimeoutError:
                assert deadline is not None
                raise timed_out(deadline.seconds) from None
        except GenerationError as error:
            if error.code != ABORTED:
                raise
            raise (shutting_down() if context.draining else aborted()) from None
        except (OverloadedError, RateLimitError) as error:
            context.note_rejection("rate_limit" if isinstance(error, RateLimitError) else "queue_full")
            raise
        finally:
            context.generations.discard(self)
            context.server.timelines.end(visited)
            if self._quota is not None:
                used = sum([len(stream.prompt_token_ids) for stream in self.streams])
                self._quota.settle(self._reserved, used)

    def abort(self) -> None:
        """End what is unfinished."""
        self.context.llm.abort_now([stream.request_id for stream in self.streams if not stream.finished])

    def _limit(self, state: dict[str, Any], inputs: Sequence[PoolingInput]) -> None:
        """Take what the key may have of tokens. Raises `RateLimitError`."""
        rules = self.context.keys.rules(state.get("key_digest"))
        if rules is not None and rules.min_priority is not None:
            check_int("priority", self.body.priority, rules.min_priority, INT64_MAX)
        quota: Quota | None = state.get("quota")
        if quota is not None:
            num_tokens = sum([estimate_tokens(item.prompt) for item in inputs])
            self._reserved = quota.reserve(num_tokens, num_tokens)
            self._quota = quota

    def _note(self, inputs: Sequence[PoolingInput]) -> Callable[[RequestStream], None]:
        server = self.context.config.server

        def note(stream: RequestStream) -> None:
            self.streams.append(stream)
            if server.enable_log_requests:
                most = LOGGED_CHARS if server.max_log_len is None else server.max_log_len
                log_prompt(self.response_id, stream, inputs[len(self.streams) - 1].params, most)

        return note

    def _head(self) -> dict[str, Any]:
        return {"id": self.response_id, "created": self.created, "model": self.context.name}

    @staticmethod
    def _usage(found: Sequence[Pooled]) -> dict[str, Any]:
        num_tokens = sum([len(output.prompt_token_ids) for output in found])
        return {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": sum([output.num_cached_tokens for output in found])},
        }


def num_values(found: Sequence[Pooled]) -> int:
    """Return how many numbers the results have."""
    return sum([output.outputs.data.size for output in found])


def embedding_answer(answered: Answered, *, base64: bool) -> dict[str, Any]:
    """OpenAI's answer."""
    data = [
        {"object": "embedding", "index": index, "embedding": _written(output.outputs.data, base64)}
        for index, output in enumerate(answered.found)
    ]
    return {"object": "list", **answered.head, "data": data, "usage": answered.usage}


def pooling_answer(answered: Answered, *, base64: bool) -> dict[str, Any]:
    """vLLM's answer about whatever a model makes of texts."""
    data = [
        {"object": "pooling", "index": index, "data": _written(output.outputs.data, base64)}
        for index, output in enumerate(answered.found)
    ]
    return {"object": "list", **answered.head, "data": data, "usage": answered.usage}


def classification_answer(answered: Answered, *, labels: Sequence[str]) -> dict[str, Any]:
    """vLLM's answer about classes: all numbers, and the name of the class with the largest one."""
    data = []
    for index, output in enumerate(answered.found):
        probs = output.outputs.data
        label = labels[int(probs.argmax())]
        data.append({"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
    return {"object": "list", **answered.head, "data": data, "usage": answered.usage}


def score_answer(answered: Answered) -> dict[str, Any]:
    """vLLM's answer about pairs."""
    data = [
        {"object": "score", "index": index, "score": output.outputs.score}
        for index, output in enumerate(answered.scored)
    ]
    return {"object": "list", **answered.head, "data": data, "usage": answered.usage}


def rerank_answer(answered: Answered, *, documents: Sequence[str] | None, top_n: int | None) -> dict[str, Any]:
    """Jina's and Cohere's answer: documents by falling score; of equal ones the first comes first."""
    values = [output.outputs.score for output in answered.scored]
    order = sorted(range(len(values)), key=lambda index: -values[index])[:top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": values[index]} for index in order]
    if documents is not None:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    return {**answered.head, "results": results, "usage": answered.usage}


def _written(values: np.ndarray, base64: bool) -> Any:
    """Return numbers as a list, or as the text of their bytes."""
    if not base64:
        return values.tolist()
    return encoding.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode("ascii")
