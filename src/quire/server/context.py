"""What routes share: `ServerContext`, one for each app, and `ModelContext`, one for each request that needs a model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from starlette.requests import Request
from starlette.types import Scope

from quire.config import EngineConfig
from quire.engine_request import LoRARequest
from quire.errors import OverloadedError
from quire.frontend.async_llm import AsyncLLM
from quire.server.auth import ApiKeys
from quire.server.errors import HTTPProblem
from quire.server.limits import Deadline, timed_out
from quire.server.metrics import Metrics
from quire.server.model_pool import ModelPool, ServedModel
from quire.server.responses.store import ResponseStore
from quire.server.streaming import CLIENT_CLOSED, ClientGoneError, until_disconnect
from quire.server.timeline import Timelines
from quire.server.tracing import Tracing

ADMIN_PATHS = frozenset(
    {
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
ADMIN_MODEL_PATH = re.compile(r"/v1/models/.+/(load|unload)", re.DOTALL)


class Abortable(Protocol):
    """What `generation.Generation` is to those who only want to end it."""

    def abort(self) -> None:
        """End it; whoever waits for it is told."""


class ServerContext:
    """State of a server; there is one for each app, in `app.state.context`.

    Attributes:
        config: options, of which the server's own count here. models: all models.
        metrics: None where nobody counts.
        draining: set once the server has begun to shut down; new work is refused from then on.
        generations: those that an engine works on, or that are being sent. timelines: what is known of these and of
            the last ones. tracing: None where nobody wants traces.
        responses: those that are kept for later.
    """

    def __init__(self, models: ModelPool, config: EngineConfig, metrics: Metrics | None) -> None:
        self.models = models
        self.config = config
        self.metrics = metrics
        self.keys = ApiKeys(config.server.api_key, config.server.api_key_file)
        self.admin_keys = ApiKeys(config.server.admin_api_key) if config.server.admin_api_key else self.keys
        self.draining = False
        self.generations: set[Abortable] = set()
        self.responses = ResponseStore(config.server)
        self.timelines = Timelines()
        endpoint = config.server.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing(endpoint)
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def keys_for(self, method: str, path: str) -> ApiKeys:
        """Return the keys that are good for a route: those that operate models may have keys of their own."""
        root = self.config.server.root_path.rstrip("/")
        path = path.removeprefix(root) if path.startswith(root + "/") else path
        return self.admin_keys if is_admin_route(method, path) else self.keys

    def note_rejection(self, reason: str, model: str | None = None) -> None:
        """Count a request that is turned away: one of `metrics.REJECTIONS`; `model` is its own name, if it has one."""
        if self.metrics is not None:
            self.metrics.on_rejected(reason, model)

    def check_room(self, model: ServedModel) -> None:
        """Raise `OverloadedError`, and count it, if a model could not take any request now."""
        try:
            model.llm.check_room()
        except OverloadedError:
            self.note_rejection("queue_full", model.names[0])
            raise

    @contextmanager
    def open_request(self, scope: Scope) -> Iterator[None]:
        """Count a request as being worked on while the block runs, then let go of the models it has needed."""
        self._count_open(1)
        try:
            yield
        finally:
            for model in scope["state"].pop("models", ()):
                self.models.release(model)
            self._count_open(-1)

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
        """Requests being worked on."""
        return self._num_open

    async def wait_idle(self) -> None:
        """Return once no request is being worked on."""
        await self._idle.wait()


def is_admin_route(method: str, path: str) -> bool:
    """Whether a request would operate models rather than use them."""
    return path in ADMIN_PATHS or (method == "POST" and ADMIN_MODEL_PATH.fullmatch(path) is not None)


class ModelContext:
    """A server, as a request sees it that is about one model, which is loaded.

    Attributes:
        server: what all requests share. model: the model. llm: its engine, from which the request is answered even if
            the model gets another one meanwhile. name: what the answer calls the model.
        lora: the adapter that the request has named in the place of the model.
    """

    def __init__(self, server: ServerContext, model: ServedModel, name: str, lora: LoRARequest | None = None) -> None:
        self.server = server
        self.model = model
        self.llm: AsyncLLM = model.llm
        self.name = name
        self.lora = lora

    @property
    def config(self) -> EngineConfig:
        """The model's options, and the server's."""
        return self.model.config

    @property
    def ignore_unknown(self) -> bool:
        """Whether unknown request fields are dropped instead of refused."""
        return self.config.server.ignore_unknown_fields

    @property
    def keys(self) -> ApiKeys:
        """Who may use the server."""
        return self.server.keys

    @property
    def generations(self) -> set[Abortable]:
        """As in `ServerContext`."""
        return self.server.generations

    @property
    def draining(self) -> bool:
        """As in `ServerContext`."""
        return self.server.draining

    def note_rejection(self, reason: str) -> None:
        """As in `ServerContext`."""
        self.server.note_rejection(reason, self.model.names[0])


def context_of(request: Request) -> ServerContext:
    """Return the context of the app that serves this request."""
    context: ServerContext = request.app.state.context
    return context


async def model_context(request: Request, name: str | None) -> ModelContext:
    """Return the context of the model called so (None: the first one), which stays loaded until the answer is complete.

    It may have to be loaded first; nobody waits for that whose client has gone, or whose time is over.

    Raises:
        NotFoundError: there is no such model. QuireError: it cannot be loaded, or not in time.
    """
    server = context_of(request)
    model = server.models.first if name is None else server.models.find(name)

    async def acquire() -> None:
        await server.models.acquire(model)
        request.scope["state"].setdefault("models", []).append(model)

    if model.open:
        await acquire()
    else:
        deadline: Deadline | None = request.scope["state"].get("deadline")
        try:
            async with asyncio.timeout(None if deadline is None else deadline.left):
                await until_disconnect(request.receive, acquire())
        except TimeoutError:
            assert deadline is not None
            raise timed_out(deadline.seconds) from None
        except ClientGoneError:
            raise HTTPProblem(CLIENT_CLOSED, "the client has gone", code="client_closed") from None
    lora = None if name is None or name in model.names else model.llm.adapters.find(name)
    if name is None or (lora is None and name not in model.names):
        name = model.names[0]
    return ModelContext(server, model, name, lora)
