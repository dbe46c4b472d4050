"""`Adapting`: requests whose LoRA adapter is being read, which the scheduler does not know yet.

An adapter that cannot be used is the end of the requests for it, and of nothing else. Reading and checking happen
beside the steps; who does it is the executor's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from quire.engine.compiling import Live
from quire.engine_request import LoRARequest
from quire.errors import ConfigError, RequestError, echo
from quire.executor.base import Adapters, Executor
from quire.scheduler.request import Request
from quire.step import AdapterNews, SequenceOutput


class LoadLoRA(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call "load_lora"; fields as in `LoRARequest`."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class OfLoRA(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the calls "lora_status" and "unload_lora"."""

    lora_int_id: int


class Adapting:
    """Requests on their way to the scheduler, and the adapters that live requests use.

    Args:
        executor: who has the adapters.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._requests: dict[str, Request] = {}
        self._sequence_ids: set[str] = set()
        self._used: dict[str, int] = {}  # by request id, of those here and of those that run
        self._found: dict[str, AdapterNews] = {}  # by request id
        self._asked: dict[int, AdapterNews | None] = {}  # by calls of `load`

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def _adapters(self) -> Adapters:
        adapters = self._executor.adapters
        if adapters is None:
            raise RequestError("this engine serves no LoRA adapters (--enable-lora)", param="lora_request")
        return adapters

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that are here."""
        return list(self._requests)

    def names(self) -> list[str]:
        """Return the names of the adapters that requests here wait for."""
        return [request.lora.lora_name for request in self._requests.values() if request.lora is not None]

    def check_names(self, request: Request) -> None:
        """Raise `RequestError` if one of those here is called like `request` or one of its sequences."""
        if request.request_id in self._requests or not self._sequence_ids.isdisjoint(request.sequence_ids):
            raise RequestError(f"request id {echo(request.request_id)} is in use already", param="request_id")

    def add(self, request: Request) -> None:
        """Keep `request` until its adapter is there. Raises `RequestError` if this engine has none."""
        assert request.lora is not None
        number = request.lora.lora_int_id
        self._adapters.prepare(request.lora, request.request_id)
        self._requests[request.request_id] = request
        self._sequence_ids.update(request.sequence_ids)
        self._used[request.request_id] = number

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
        """Return requests that can go on now, and news of those whose adapter cannot be used.

        With nothing to tell it waits for it up to `wait` seconds.
        """
        self._poll(wait)
        able: list[Request] = []
        news: list[SequenceOutput] = []
        for request in list(self._requests.values()):
            assert request.lora is not None
            found = self._found.pop(request.request_id, None)
            if found is None:
                continue
            self._leave(request)
            error = found.error or _misfit(request, found)
            if error is None:
                request.adapter_digest = found.digest
                able.append(request)
                continue
            error = f"adapter {request.lora.lora_name}: {error}"
            news += [
                SequenceOutput(sequence_id, [], finish_reason="error", error=error, refused=True)
                for sequence_id in request.sequence_ids
                if sequence_id not in request.dropped
            ]
        return able, news

    def release(self, live: Live, waiting: Iterable[str]) -> None:
        """Let go of the adapters of requests that are neither here, nor `waiting` elsewhere, nor `live`."""
        if not self._used:
            return
        others = set(waiting)
        for request_id in [name for name in self._used if not (name in self._requests or name in others)]:
            if not live.is_live(request_id):
                self._found.pop(request_id, None)
                self._adapters.release(self._used.pop(request_id), request_id)

    def load(self, arguments: LoadLoRA) -> dict[str, Any]:
        """Begin to read an adapter that no request needs yet, so that it is known to be good."""
        request = LoRARequest(arguments.lora_name, arguments.lora_int_id, arguments.lora_path)
        self._asked[request.lora_int_id] = None
        self._adapters.prepare(request, _call_of(request.lora_int_id))
        return self.status(request.lora_int_id)

    def status(self, number: int) -> dict[str, Any]:
        """Return what became of `load`: "state" is "loading", "ready" or "failed"."""
        self._poll(0.0)
        if number not in self._asked:
            raise ConfigError(f"nobody has asked for adapter {number}", param="lora_int_id")
        news = self._asked[number]
        if news is None:
            return {"state": "loading"}
        del self._asked[number]
        if news.error is not None:
            return {"state": "failed", "error": news.error}
        return {"state": "ready", "vocab_size": news.vocab_size, "num_logits": news.num_logits, "digest": news.digest}

    def unload(self, number: int) -> dict[str, Any]:
        """Let an adapter go as soon as no request uses it."""
        self._adapters.forget(number)
        return {}

    def _poll(self, wait: float) -> None:
        if self._executor.adapters is None:
            return
        self._found.update(self._adapters.poll(wait))
        for number in [number for number in self._asked if _call_of(number) in self._found]:
            self._asked[number] = self._found.pop(_call_of(number))
            self._adapters.release(number, _call_of(number))

    def _leave(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._sequence_ids.difference_update(request.sequence_ids)


def _call_of(number: int) -> str:
    """Return the name of the user that a call of `load` is; no request is called so."""
    return f"\0load {number}"


def _misfit(request: Request, adapter: AdapterNews) -> str | None:
    """Return what is wrong if a request has ids that its adapter does not know."""
    highest = max(max(sequence.token_ids) for sequence in request.sequences)
    if highest >= adapter.vocab_size:
        return f"token id {highest} is not below its vocabulary of {adapter.vocab_size}"
    return None
