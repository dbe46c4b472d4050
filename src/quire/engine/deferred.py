"""`DeferredRequests`: requests that wait for their prerequisites, before the scheduler knows them.

A prerequisite is prepared beside the steps, by the executor: a LoRA adapter is loaded, a grammar is compiled. One that
fails ends the requests that need it and nothing else. It stays in use until its requests have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from quire.engine_request import EngineRequest, LoRARequest
from quire.errors import ErrorData, QuireError, RequestError, echo
from quire.executor.base import Adapters, Executor
from quire.scheduler.request import Request
from quire.step import AdapterResult, SequenceOutput

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


class DeferredRequests:
    """Requests on their way to the scheduler, and the prerequisites in use by live requests.

    Attributes:
        sequence_ids: of the requests that wait.
    """

    def __init__(self, prerequisites: Iterable[Prerequisite]) -> None:
        self._prerequisites = list(prerequisites)
        self._waiting: dict[str, Request] = {}
        self._missing: dict[str, list[Prerequisite]] = {}  # by id of those that wait
        self.sequence_ids: set[str] = set()
        self._users: dict[str, EngineRequest] = {}  # by id: those that wait and those that run

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that wait."""
        return list(self._waiting)

    @property
    def adapter_names(self) -> set[str]:
        """The LoRA adapters of the requests that wait."""
        return {
            request.engine_request.lora.lora_name
            for request in self._waiting.values()
            if request.engine_request.lora is not None
        }

    def check_ids(self, request: Request) -> None:
        """Raise `RequestError` if one that waits has the id of `request`, or of one of its sequences."""
        if request.request_id in self._waiting or not self.sequence_ids.isdisjoint(request.engine_request.sequence_ids):
            raise RequestError(f"request id {echo(request.request_id)} is in use already", param="request_id")

    def must_wait(self, request: Request) -> bool:
        """Whether a request needs anything that must be prepared."""
        return any(item.needed_by(request.engine_request) for item in self._prerequisites)

    def add(self, request: Request) -> None:
        """Prepare what a request needs. Raises `RequestError` if this engine cannot."""
        engine_request = request.engine_request
        needed = [item for item in self._prerequisites if item.needed_by(engine_request)]
        for item in needed:
            item.prepare(engine_request)
        self._waiting[engine_request.request_id], self._missing[engine_request.request_id] = request, needed
        self.sequence_ids.update(engine_request.sequence_ids)
        self._users[engine_request.request_id] = engine_request

    def abort(self, names: Iterable[str]) -> None:
        """Drop the requests and sequences with these ids that wait."""
        for name in names:
            if name in self._waiting:
                self._remove(self._waiting[name])
            elif name in self.sequence_ids:
                request = next(item for item in self._waiting.values() if name in item.engine_request.sequence_ids)
                request.aborted_ids.add(name)
                if request.aborted_ids.issuperset(request.engine_request.sequence_ids):
                    self._remove(request)

    def poll(self, wait: float) -> tuple[list[Request], list[SequenceOutput]]:
        """Return the requests that have all they need, and the outputs of those that cannot run.

        If there are none it waits for one up to `wait` seconds.
        """
        failed: list[SequenceOutput] = []
        last = [item for item in self._prerequisites if any(item in missing for missing in self._missing.values())][-1]
        for item in self._prerequisites:
            requests = [self._waiting[name] for name, missing in self._missing.items() if item in missing]
            if not requests:
                continue
            any_ready = bool(failed) or not all(self._missing.values())
            found = item.poll(requests, wait if item is last and not any_ready else 0.0)
            for request_id, error in found.items():
                self._missing[request_id].remove(item)
                if error is not None:
                    request = self._waiting[request_id]
                    self._remove(request)
                    failed += [
                        SequenceOutput(sequence_id, [], finish_reason="error", error=error)
                        for sequence_id in request.engine_request.sequence_ids
                        if sequence_id not in request.aborted_ids
                    ]
        ready = [self._waiting[name] for name, missing in self._missing.items() if not missing]
        for request in ready:
            self._remove(request)
        return ready, failed

    def release(self, get_request: Callable[[str], Request | None]) -> None:
        """End the use of prerequisites by requests that neither wait nor are live in the scheduler."""
        for request_id in [name for name in self._users if not (name in self._waiting or get_request(name))]:
            engine_request = self._users.pop(request_id)
            for item in self._prerequisites:
                if item.needed_by(engine_request):
                    item.release(engine_request)

    def _remove(self, request: Request) -> None:
        del self._waiting[request.request_id], self._missing[request.request_id]
        self.sequence_ids.difference_update(request.engine_request.sequence_ids)
