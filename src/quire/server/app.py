"""`build_app`: the FastAPI application around an `AsyncLLM`. It starts nothing and closes nothing; `run` does."""

from __future__ import annotations

import asyncio
import time

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response

from quire.config import EngineConfig
from quire.errors import QuireError
from quire.frontend.async_llm import AsyncLLM
from quire.server import (
    admin,
    chat,
    completions,
    debug,
    health,
    models,
    playground,
    pooling,
    relay,
    timeline,
    tokenize,
)
from quire.server.anthropic import batches as message_batches
from quire.server.anthropic import routes as anthropic
from quire.server.batches import openai as batches
from quire.server.batches.records import ANTHROPIC, OPENAI
from quire.server.batches.runner import CONCURRENCY_SHARE, BatchRunner
from quire.server.context import ServerContext
from quire.server.cors import CrossOrigin
from quire.server.errors import on_http_exception, on_quire_error
from quire.server.fronts import Fronts
from quire.server.gate import Gate
from quire.server.metrics import Metrics
from quire.server.model_pool import ModelPool
from quire.server.ollama import routes as ollama
from quire.server.openapi import describe
from quire.server.responses import conversation_routes as conversations
from quire.server.responses import routes as responses
from quire.server.served_model import ServedModel
from quire.server.shared_models import SharedModels
from quire.version import __version__


def build_app(
    llm: AsyncLLM | ModelPool, config: EngineConfig, metrics: Metrics | None = None, fronts: Fronts | None = None
) -> FastAPI:
    """Return the application. Until `llm` is started, everything but health, version and metrics answers 503.

    Args:
        llm: the only model's engine, or several models. config: of which the server's options count.
        metrics: of them, those of the model must be a listener of `llm`; without it there is no /metrics.
        fronts: the other processes that serve the same address; by default there are none.
    """
    docs = not config.server.disable_fastapi_docs
    app = FastAPI(
        title="Quire",
        version=__version__,
        docs_url="/docs" if docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if docs else None,
        redirect_slashes=False,
    )
    pool = llm if isinstance(llm, ModelPool) else ModelPool([ServedModel(config, llm)])
    fronts = fronts or Fronts()
    shared = SharedModels(pool, fronts, may_unload=config.server.enable_admin_endpoints)
    context = ServerContext(shared, config, metrics, fronts)
    if metrics is not None and isinstance(llm, AsyncLLM):
        metrics.model(context.models.first.names[0]).attach(llm)
    app.state.context = context
    app.state.batch_runner = BatchRunner(
        app,
        context.batches,
        shared,
        context.fronts,
        formats={OPENAI: batches.OpenAIFormat(), ANTHROPIC: message_batches.AnthropicFormat()},
        concurrency=config.server.max_batch_concurrency or max(config.scheduler.max_num_seqs // CONCURRENCY_SHARE, 1),
        max_body_bytes=config.server.max_body_bytes,
        seconds_idle=lambda: time.monotonic() - context.last_job,
    )
    relay.answer_fronts(context.fronts)
    health.answer_fronts(context)
    playground.answer_fronts(context)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    _describe_in_thread(app)
    app.add_middleware(Gate, context=context)
    if config.server.allowed_origins:
        app.add_middleware(CrossOrigin, server=config.server)
    app.add_exception_handler(QuireError, on_quire_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    for module in (
        *(completions, chat, responses, conversations, batches, anthropic, message_batches, ollama),
        *(pooling, tokenize, timeline, models, health),
    ):
        app.include_router(module.router)
    app.state.disabled_routes = {}
    profiled = any(model.config.profiler.profiler_dir is not None for model in pool.models)
    for router, flag, enabled in (
        (admin.router, "--enable-admin-endpoints", config.server.enable_admin_endpoints),
        (admin.profiler_router, "--profiler-dir", profiled),
        (debug.router, "--enable-debug-endpoints", config.server.enable_debug_endpoints),
    ):
        if enabled:
            app.include_router(router)
        else:
            app.state.disabled_routes[flag] = router.routes
    if not config.server.disable_playground:
        app.include_router(playground.make_router())
    return app


def _describe_in_thread(app: FastAPI) -> None:
    """Make the API description in a thread, with the first request for it: it takes a tenth of a second."""
    found = [route for route in app.router.routes if isinstance(route, Route) and route.path == app.openapi_url]
    if not found:
        return
    [route] = found

    async def send(request: Request) -> Response:
        await asyncio.to_thread(app.openapi)
        response: Response = await route.endpoint(request)
        return response

    route.app = request_response(send)
