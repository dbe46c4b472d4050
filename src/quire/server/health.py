"""Probes: liveness, readiness and load of the server. No call to an engine is made here.

Liveness is false only if a restart of the server would help: a server that loads, drains or replaces its engine is
alive. Readiness tells a load balancer whether to send requests now; requests that arrive while an engine is being
replaced wait for it.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import ServerContext, context_of
from quire.server.json_io import json_response
from quire.supervisor.probes import DRAINING, LOADING, REASONS, RESTARTING, STALLED

router = APIRouter()

DEAD = "dead"
ENGINE_REASONS = {
    **REASONS,
    RESTARTING: "the engine died and is being replaced; requests wait",
    STALLED: "the engine does not react",
    DEAD: "the engine died and is not replaced",
}


def readiness(context: ServerContext) -> str:
    """Return "ok", or the first key of `ENGINE_REASONS` that applies to the server or one of its models."""
    if context.draining:
        return DRAINING
    if context.models.fatal:
        return DEAD
    if context.models.starting:
        return LOADING
    llms = [model.llm for model in context.models.models]
    if any(llm.recovering for llm in llms):
        return RESTARTING
    return STALLED if any(llm.stalled for llm in llms) else "ok"


def liveness(context: ServerContext) -> str:
    """Return "ok"; or "dead" or "stalled" if only a restart of the server can help."""
    if context.models.fatal:
        return DEAD
    stuck = any(model.llm.stalled and not model.llm.replaceable for model in context.models.models)
    return STALLED if stuck else "ok"


@router.head("/livez", include_in_schema=False)
@router.get("/livez")
async def livez(request: Request) -> Response:
    """Liveness: 200, or 503 with dead or stalled."""
    return _answer(liveness(context_of(request)), explain=True)


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Readiness: 200, or 503 with loading, draining, restarting, stalled or dead."""
    return _answer(readiness(context_of(request)), explain=True)


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """As /readyz, under older names, and without the reason."""
    return _answer(readiness(context_of(request)))


@router.post("/ping")
@router.head("/ping", include_in_schema=False)
@router.get("/ping")
async def ping(request: Request) -> Response:
    """As /health, for SageMaker."""
    return _answer(readiness(context_of(request)))


@router.get("/load")
async def load(request: Request) -> Response:
    """Return the number of open requests, those of all fronts."""
    context = context_of(request)
    others = await context.fronts.ask_others("load")
    return json_response({"server_load": context.num_open + sum(others.values())})


def answer_fronts(context: ServerContext) -> None:
    """Answer what other fronts ask about the load."""

    async def load(value: None) -> int:
        return context.num_open

    context.fronts.handlers["load"] = load


def _answer(status: str, *, explain: bool = False) -> Response:
    if status == "ok":
        return json_response({"status": "ok"})
    body = {"status": status, "reason": ENGINE_REASONS[status]} if explain else {"status": status}
    return json_response(body, 503)
