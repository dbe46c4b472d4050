"""`EngineJob`: what one HTTP request submits to an engine, whichever route it came by."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from quire.checks import INT64_MAX, check_int
from quire.errors import OverloadedError, QuireError
from quire.frontend.output_processor import RequestStream
from quire.frontend.prompts import Params, Prompt
from quire.server.access_log import log_prompt
from quire.server.batches.lines import is_line
from quire.server.context import ModelContext
from quire.server.errors import shutting_down
from quire.server.limits import Deadline, Held, Quota, RateLimitError, deadline_of
from quire.server.protocol import EngineBody
from quire.server.timeline import RequestRecord

LOGGED_CHARS = 1000
CHARS_PER_TOKEN = 4


class EngineJob:
    """The engine's requests of one HTTP request, with the deadline, quota and record that they share.

    Attributes:
        response_id, created, model: as in the response. streams: one per prompt, appended as they are submitted.
        deadline: None if there is none.
    """

    def __init__(self, context: ModelContext, body: EngineBody, response_id: str) -> None:
        self.context = context
        self.body = body
        self.response_id = response_id
        self.created = int(time.time())
        self.model = context.name
        self.streams: list[RequestStream] = []
        self.deadline: Deadline | None = None
        self._record: RequestRecord | None = None
        self._reserved: Held | None = None
        policy = context.config.scheduler.scheduling_policy
        if body.priority != 0 and policy != "priority":
            context.warn("priority", f"has no effect: this server runs with --scheduling-policy {policy}")

    def register(self, parameters: Mapping[str, Any], given_id: str | None = None) -> None:
        """Add this to the server's running jobs, and its record to those of logs, traces and timelines.

        Args:
            parameters: attributes for traces. given_id: the body's `request_id`.
        """
        context = self.context
        self._record = RequestRecord(
            self.response_id,
            context.state.get("request_id", ""),
            given_id,
            context.key_digest,
            self.model,
            context.llm,
            self.streams,
            parameters,
        )
        context.state.setdefault("records", []).append(self._record)
        context.server.jobs.add(self)
        if not is_line(context.request.scope):
            context.server.last_job = time.monotonic()
        context.server.records.begin(self._record)

    async def limit(self, num_prompt_tokens: int, num_tokens: int, seconds: float | None = None) -> None:
        """Set the deadline, and reserve `num_tokens` of the key's quota, `num_prompt_tokens` of them for prompts.

        Raises:
            RequestError: priority or timeout are not allowed. RateLimitError: so many tokens are not left.
        """
        context = self.context
        key = context.server.keys.get(context.key_digest)
        if key is not None and key.min_priority is not None:
            check_int("priority", self.body.priority, key.min_priority, INT64_MAX)
        self.deadline = deadline_of(context.state, context.config.server.request_timeout, seconds)
        quota: Quota | None = context.state.get("quota")
        if quota is not None:
            self._reserved = await quota.reserve(num_prompt_tokens, num_tokens)

    def engine_options(self, cache_salt: str | None = None) -> dict[str, Any]:
        """Return the arguments of a submission that follow from the body and the key."""
        keys, digest = self.context.server.keys, self.context.key_digest
        return {
            "priority": self.body.priority,
            "cache_salt": keys.salt(digest, cache_salt),
            "tenant": keys.tenant(digest, self.body.user),
            "background": is_line(self.context.request.scope),
        }

    def add(self, stream: RequestStream, params: Params) -> None:
        """Add a submitted stream; log its prompt if the operator wants that."""
        self.streams.append(stream)
        server = self.context.config.server
        if server.enable_log_requests:
            most = LOGGED_CHARS if server.max_log_len is None else server.max_log_len
            log_prompt(self.response_id, stream, params, most)

    def count_rejection(self, error: BaseException) -> None:
        """Count an error by which this was rejected for lack of room or of quota."""
        if isinstance(error, OverloadedError | RateLimitError):
            reason = "rate_limit" if isinstance(error, RateLimitError) else "queue_full"
            self.context.server.note_rejection(reason, self.context.model.names[0])

    def aborted(self) -> QuireError:
        """Return the error for a job that was aborted from outside."""
        if self.context.server.draining:
            return shutting_down()
        return QuireError("the request was aborted", code="request_aborted")

    def abort(self) -> None:
        """Abort unfinished requests; their streams get a last output."""
        self.context.llm.abort_now([stream.request_id for stream in self.streams if not stream.finished])

    def close(self) -> None:
        """Abort what is unfinished, charge the quota what was used, and finish the record. Later calls do nothing."""
        server = self.context.server
        server.jobs.discard(self)
        self.abort()
        if self._record is not None:
            server.records.end(self._record)
        if self._reserved is not None:
            reserved, self._reserved = self._reserved, None
            reserved.end(sum([len(stream.prompt_token_ids) + stream.num_generated_tokens for stream in self.streams]))


def estimate_tokens(prompt: Prompt) -> int:
    """Return about how many tokens a prompt has, without tokenizing it; of token ids exactly."""
    content = prompt.get("prompt", prompt.get("prompt_token_ids", ())) if isinstance(prompt, Mapping) else prompt
    return -(-len(content) // CHARS_PER_TOKEN) if isinstance(content, str) else len(content)
