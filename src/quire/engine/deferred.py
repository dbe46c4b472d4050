"""`Prerequisites`: what requests wait for before they are scheduled (`RequestStatus.DEFERRED`).

A prerequisite is prepared beside the steps, by the executor: a LoRA adapter is loaded, a grammar is compiled. One that
fails ends the requests that need it and nothing else. It stays in use until its requests have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from quire.engine_request import EngineRequest, LoRARequest
from quire.errors import ErrorData, QuireError, RequestError
from quire.executor.base import Adapters, Executor
from quire.scheduler.request import Request
from quire.step import AdapterResult

Answer = Callable[[dict[str, Any] | QuireError], None]
"""Takes the result of a call, JSON-like, or its error."""


class Prerequisite(Protocol):
    """One kind of prerequisite, and the requests that use it."""

    def needed_by(self, engine_request: EngineRequest) -> bool:
        """Whether a request needs it."""

    def prepare(self, engine_request: EngineRequest) -> None:
        """Begin to prepare it; a call of `release` must follow. Raises `RequestError` if this engine has none."""

    def poll(self, requests: list[Request], wait: float) -> dict[str, ErrorData | None]:
        """Return the ids of those of `requests` for which it was prepared, each with an error or None.

        If there are none it waits for one up to `wait` seconds.
        """

    def release(self, engine_request: EngineRequest) -> None:
        """End the use, or the wait, of a request."""


class CompiledGrammar:
    """The compiled grammar of a request with structured output."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def needed_by(self, engine_request: EngineRequest) -> bool:
        return engine_request.grammar is not None

    def prepare(self, engine_request: EngineRequest) -> None:
        assert engine_request.grammar is not None
        self._executor.grammars.prepare(engine_request.grammar)

    def poll(self, requests: list[Request], wait: float) -> dict[str, ErrorData | None]:
        ready = self._executor.grammars.poll(wait)
        return {
            request.request_id: ready[request.engine_request.grammar]
            for request in requests
            if request.engine_request.grammar in ready
        }

    def release(self, engine_request: EngineRequest) -> None:
        assert engine_request.grammar is not None
        self._executor.grammars.release(engine_request.grammar)


class LoadedAdapter:
    """The LoRA adapter of a request; also loads adapters ahead of any request (`load`)."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._results: dict[str, AdapterResult] = {}  # by user: the id of a request, or of a `load`
        self._loads: dict[str, tuple[LoRARequest, Answer]] = {}  # by user
        self._numbers = itertools.count()

    @property
    def _adapters(self) -> Adapters:
        adapters = self._executor.adapters
        if adapters is None:
            raise RequestError("this engine serves no LoRA adapters (--enable-lora)", param="lora_request")
        return adapters

    def needed_by(self, engine_request: EngineRequest) -> bool:
        return engine_request.lora is not None

    def prepare(self, engine_request: EngineRequest) -> None:
        assert engine_request.lora is not None
        self._adapters.prepare(engine_request.lora, engine_request.request_id)

    def poll(self, requests: list[Request], wait: float) -> dict[str, ErrorData | None]:
        """See `Prerequisite`; sets the digest of the adapter in requests that can use it."""
        self._poll(wait)
        found: dict[str, ErrorData | None] = {}
        for request in requests:
            result = self._results.pop(request.request_id, None)
            if result is not None:
                assert request.engine_request.lora is not None
                error = result.error or _unknown_token(request, result)
                message = f"adapter {request.engine_request.lora.lora_name}: {error}"
                failed = ErrorData("RequestError", message, code="request_refused")
                found[request.request_id] = None if error is None else failed
                request.adapter_digest = result.digest
        return found

    def release(self, engine_request: EngineRequest) -> None:
        self._results.pop(engine_request.request_id, None)
        self._adapters.release(engine_request.lora_int_id, engine_request.request_id)

    @property
    def is_loading(self) -> bool:
        """Whether a `load` was not answered yet."""
        return bool(self._loads)

    def load(self, request: LoRARequest, answer: Answer) -> None:
        """Begin to load an adapter that no request needs yet, to see whether it can be used.

        `finish_loads` calls `answer`. Raises `RequestError` if this engine serves no adapters.
        """
        user = f"\0load {next(self._numbers)}"  # no request has such an id
        self._adapters.prepare(request, user)
        self._loads[user] = request, answer

    def finish_loads(self, wait: float) -> None:
        """Answer each `load` that has ended; if there is none, wait for one up to `wait` seconds."""
        self._poll(wait)
        for user in self._loads.keys() & self._results.keys():
            (request, answer), result = self._loads.pop(user), self._results.pop(user)
            self._adapters.release(request.lora_int_id, user)
            if result.error is None:
                answer({"vocab_size": result.vocab_size, "num_logits": result.num_logits, "digest": result.digest})
            else:
                message = f"the adapter {request.lora_name} cannot be used: {result.error}"
                answer(RequestError(message, param="lora_path", code="invalid_adapter"))

    def unload(self, number: int) -> None:
        """Unload an adapter as soon as no request uses it."""
        self._adapters.unload(number)

    def _poll(self, wait: float) -> None:
        self._results.update(self._adapters.poll(wait))


def _unknown_token(request: Request, adapter: AdapterResult) -> str | None:
    """Return an error if a request has token ids beyond the vocabulary of its adapter."""
    highest = max(max(sequence.token_ids) for sequence in request.sequences)
    if highest >= adapter.vocab_size:
        return f"token id {highest} is not below its vocabulary of {adapter.vocab_size}"
    return None


class Prerequisites:
    """What deferred requests wait for, and what live requests use."""

    def __init__(self, kinds: Iterable[Prerequisite]) -> None:
        self._kinds = list(kinds)
        self._missing: dict[str, list[Prerequisite]] = {}  # by request id

    def prepare(self, engine_request: EngineRequest) -> bool:
        """Begin to prepare what a request needs; return whether it needs anything.

        Raises `RequestError` if this engine cannot; nothing is prepared then.
        """
        prepared: list[Prerequisite] = []
        try:
            for kind in self._kinds:
                if kind.needed_by(engine_request):
                    kind.prepare(engine_request)
                    prepared.append(kind)
        except RequestError:
            for kind in prepared:
                kind.release(engine_request)
            raise
        if prepared:
            self._missing[engine_request.request_id] = prepared
        return bool(prepared)

    def poll(self, requests: list[Request], wait: float) -> dict[str, ErrorData | None]:
        """Return the ids of those of the deferred `requests` that are ready, or cannot run, with an error or None.

        If there are none it waits for one up to `wait` seconds.
        """
        found: dict[str, ErrorData | None] = {}
        missing = [kind for kind in self._kinds if any(kind in kinds for kinds in self._missing.values())]
        for kind in missing:
            waiting = [request for request in requests if kind in self._missing.get(request.request_id, ())]
            ready = kind.poll(waiting, wait if kind is missing[-1] and not found else 0.0)
            for request_id, error in ready.items():
                self._missing[request_id].remove(kind)
                if error is not None or not self._missing[request_id]:
                    found[request_id] = error
                    del self._missing[request_id]
        return found

    def release(self, engine_request: EngineRequest) -> None:
        """End the use of prerequisites by a request that has ended."""
        self._missing.pop(engine_request.request_id, None)
        for kind in self._kinds:
            if kind.needed_by(engine_request):
                kind.release(engine_request)
