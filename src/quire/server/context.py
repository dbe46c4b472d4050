"""State that routes share: `ServerContext`, one per app, and `ModelContext`, one per request that needs a model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from quire.config import EngineConfig
from quire.engine_request import LoRARequest
from quire.errors import OverloadedError
from quire.frontend.async_llm import AsyncLLM
from quire.server.auth import ApiKeys
from quire.server.batches.lines import is_line
from quire.server.batches.store import BatchStore
from quire.server.fronts import Fronts
from quire.server.limits import time_limit
from quire.server.metrics import Metrics
from quire.server.paths import is_admin
from quire.server.relay import is_relayed
from quire.server.responses.store import ResponseStore
from quire.server.served_model import ServedModel
from quire.server.shared_models import SharedModels
from quire.server.streaming import until_disconnect
from quire.server.timeline import RequestRecords
from quire.server.tracing import Tracing

T = TypeVar("T")


class Abortable(Protocol):
    """What the server does to running requests when it shuts down."""

    def abort(self) -> None:
        """End it; its client gets an error."""


class ServerContext:
    """State of a server; there is one for each app, in `app.state.context`.

    Attributes:
        config: options, of which the server's own count here. models: all models. metrics: None without /metrics.
        fronts: this process and the others that serve the same address.
        draining: set once the server has begun to shut down; new requests are refused from then on.
        jobs: those that an engine works on, or whose responses are being sent. records: of these, and of the last
            finished ones. tracing: None without an endpoint for traces. responses: the stored ones.
        batches: stored files and batches. last_job: when the last one was begun that is no line of a batch [monotonic
            seconds].
    """

    def __init__(self, models: SharedModels, config: EngineConfig, metrics: Metrics | None, fronts: Fronts) -> None:
        self.models = models
        self.config = config
        self.metrics = metrics
        self.fronts = fronts
        self.keys = ApiKeys(config.server.api_key, config.server.api_key_file, fronts)
        self.admin_keys = ApiKeys(config.server.admin_api_key) if config.server.admin_api_key else self.keys
        self.draining = False
        self.jobs: set[Abortable] = set()
        self.last_job = -math.inf
        self.responses = ResponseStore(config.server, slot=fronts.row)
        self.batches = BatchStore(config.server)  # behind the other, which takes the data directory
        self.records = RequestRecords()
        self.records.answer_fronts(fronts)
        endpoint = config.server.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing(endpoint)
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def keys_for(self, method: str, path: str) -> ApiKeys:
        """Return the keys that are valid for a route; admin routes may have keys of their own."""
        return self.admin_keys if is_admin(method, path) else self.keys

    def note_rejection(self, reason: str, model: str | None = None) -> None:
        """Count a rejected request, by one of `metrics.REJECTIONS` and the name of its model, if it has come so far."""
        if self.metrics is not None:
            self.metrics.on_rejected(reason, model)

    def check_room(self, model: ServedModel) -> None:
        """Raise `OverloadedError`, and count it, if a model could not take any request now."""
        try:
            model.llm.check_room()
        except OverloadedError:
            self.note_rejection("queue_full", model.names[0])
            raise

    def check_any_room(self) -> None:
        """Raise `OverloadedError`, and count it, if no model could take any request now."""
        models = self.models.models
        for model in models[:-1]:
            with suppress(OverloadedError):
                return model.llm.check_room()
        self.check_room(models[-1])

    @contextmanager
    def open_request(self, scope: Scope) -> Iterator[None]:
        """Count a request as running while the block runs, then release the models it has used.

        One that another front has forwarded counts there. Nobody waits for lines of batches, which go on later.
        """
        count = 0 if is_relayed(scope) or is_line(scope) else 1
        self._count_open(count)
        try:
            yield
        finally:
            for model in scope["state"].pop("models", ()):
                self.models.release(model)
            self._count_open(-count)

    def _count_open(self, change: int) -> None:
        self._num_open += change
        if self._num_open:
            self._idle.clear()
        else:
            self._idle.set()
        if self.metrics is not None:
            self.metrics.on_open(self._num_open)

    @property
    def num_open(self) -> int:
        """Running requests."""
        return self._num_open

    async def wait_idle(self) -> None:
        """Return once no request is running."""
        await self._idle.wait()


class ModelContext:
    """The context of one request that needs a model, which is loaded.

    Attributes:
        request: the HTTP request. state: its state, as the gate and handlers set it.
        server: the context of all requests. model: the model. llm: its engine at the time of the request; the model
            may get another one later. name: the model's name in the response. lora: the adapter that the request names.
    """

    def __init__(self, request: Request, model: ServedModel, name: str, lora: LoRARequest | None = None) -> None:
        self.request = request
        self.state: dict[str, Any] = request.scope["state"]
        self.server = context_of(request)
        self.model = model
        self.llm: AsyncLLM = model.llm
        self.name = name
        self.lora = lora

    @property
    def config(self) -> EngineConfig:
        """Options of the model and the server."""
        return self.model.config

    async def until_disconnect(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work, or until the client is gone: then raise `ClientGoneError`."""
        return await until_disconnect(self.request.receive, work)

    def warn(self, field: str, message: str) -> None:
        """Say in a header of the response that a field of the request changes nothing, and why."""
        self.state.setdefault("warnings", {})[field] = message

    @property
    def key_digest(self) -> bytes | None:
        """Digest of the API key that the request was sent with."""
        return self.state.get("key_digest")


def context_of(request: Request) -> ServerContext:
    """Return the context of the app that serves this request."""
    context: ServerContext = request.app.state.context
    return context


async def model_context(request: Request, name: str | None) -> ModelContext:
    """Return the context of the model of this name (None: the first one), which stays loaded until the response ends.

    It may have to be loaded first; the wait ends if the client disconnects or the deadline is over.

    Raises:
        NotFoundError: there is no such model. QuireError: it cannot be loaded, or not in time.
    """
    server = context_of(request)
    model = server.models.first if name is None else server.models.find(name)

    async def acquire() -> None:
        await server.models.acquire(model)
        request.scope["state"].setdefault("models", []).append(model)

    if server.models.is_available(model):
        await acquire()
    else:
        async with time_limit(request.scope["state"].get("deadline")):
            await until_disconnect(request.receive, acquire())
    lora = None if name is None or name in model.names else model.llm.adapters.find(name)
    if name is None or (lora is None and name not in model.names):
        name = model.names[0]
    return ModelContext(request, model, name, lora)
