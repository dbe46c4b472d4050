"""`Compiling`: requests whose grammar is being compiled, which the scheduler does not know yet.

Whoever compiles, and where, is the executor's business; the engine only asks from step to step what is ready.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from quire.errors import RequestError, echo
from quire.executor.base import Executor
from quire.scheduler.request import Request
from quire.step import SequenceOutput
from quire.structured.lark import GRAMMAR_FAILED


class Live(Protocol):
    """What is asked of a scheduler."""

    def is_live(self, request_id: str) -> bool:
        """Whether a request of this id was added and has not ended."""


class Compiling:
    """Requests on their way to the scheduler, and the grammars that live requests use.

    Args:
        executor: who compiles grammars and is told when nobody uses one any more.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._requests: dict[str, Request] = {}
        self._sequence_ids: set[str] = set()
        self._grammars: dict[str, str] = {}  # by request id, of those here and of those that run

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that are here."""
        return list(self._requests)

    def check_names(self, request: Request) -> None:
        """Raise `RequestError` if one of those here is called like `request` or one of its sequences."""
        if request.request_id in self._requests or not self._sequence_ids.isdisjoint(request.sequence_ids):
            raise RequestError(f"request id {echo(request.request_id)} is in use already", param="request_id")

    def add(self, request: Request) -> None:
        """Keep `request` until its grammar is compiled."""
        assert request.grammar is not None
        self._requests[request.request_id] = request
        self._sequence_ids.update(request.sequence_ids)
        self._grammars[request.request_id] = request.grammar
        self._executor.grammars.prepare(request.grammar)

    def abort(self, names: Iterable[str]) -> None:
        """Forget those of the requests and sequences called so that are here."""
        for name in names:
            if name in self._requests:
                self._leave(self._requests[name])
            elif name in self._sequence_ids:
                request = next(held for held in self._requests.values() if name in held.sequence_ids)
                request.dropped.add(name)
                if request.dropped.issuperset(request.sequence_ids):
                    self._leave(request)

    def ready(self, wait: float) -> tuple[list[Request], list[SequenceOutput]]:
        """Return requests that can be queued now, and news of those whose grammar cannot be used.

        With nothing to tell it waits for it up to `wait` seconds.
        """
        found = self._executor.grammars.poll(wait)
        able: list[Request] = []
        news: list[SequenceOutput] = []
        for request in list(self._requests.values()):
            if request.grammar not in found:
                continue
            self._leave(request)
            error = found[request.grammar]
            if error is None:
                able.append(request)
                continue
            if not error.startswith("structured output"):
                error = GRAMMAR_FAILED + error
            news += [
                SequenceOutput(sequence_id, [], finish_reason="error", error=error, refused=True)
                for sequence_id in request.sequence_ids
                if sequence_id not in request.dropped
            ]
        return able, news

    def release(self, live: Live) -> None:
        """Let go of the grammars of requests that are neither here nor `live`."""
        ended = [name for name in self._grammars if not (name in self._requests or live.is_live(name))]
        for request_id in ended:
            self._executor.grammars.release(self._grammars.pop(request_id))

    def _leave(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._sequence_ids.difference_update(request.sequence_ids)
