"""`RequestStream`: what a caller of `AsyncLLM.submit` reads. It holds no queue, and lets go of what nobody reads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire.frontend.output_processor import RequestState
from quire.outputs import RequestOutput

if TYPE_CHECKING:
    from quire.frontend.async_llm import AsyncLLM


class RequestStream:
    """The outputs of one request, as an async iterator; ends after the finished one.

    Raises (while iterating): `EngineDeadError` if the engine died.
    """

    def __init__(self, llm: AsyncLLM, state: RequestState, news: asyncio.Event) -> None:
        self._llm = llm
        self._state = state
        self._news = news

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self._state.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, tokenized."""
        return self._state.prompt_token_ids

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all sequences so far."""
        return self._state.num_generated_tokens

    @property
    def state(self) -> RequestState:
        """All that the front knows of the request, for reading only."""
        return self._state

    @property
    def finished(self) -> bool:
        """Whether the request has ended, though perhaps not every output was read."""
        return self._state.finished or self._state.error is not None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            output = self._state.take()
            if output is not None:
                return output
            if self._state.error is not None:
                raise self._state.error
            if self._state.finished:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop reading; an unfinished request is aborted."""
        self.close()

    def close(self) -> None:
        """As `aclose`; there is nothing to wait for."""
        if not self.finished:
            self._llm.abort_now([self.request_id])

    def __del__(self) -> None:
        # A stream dropped without being closed; the collector may run in any thread.
        if not self.finished:
            self._llm.abort_from_anywhere(self.request_id)
