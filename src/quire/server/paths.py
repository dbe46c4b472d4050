"""Paths that are treated alike before a route is looked up: who may see them, when they are served, what is logged."""

from __future__ import annotations

import re
from importlib import resources

from starlette.types import Scope

from quire.supervisor.probes import PROBES, without_root

STATE_PATH = "/playground/state"  # what the playground polls; unlike the files of the page it needs the key
PAGE_FOLDER = resources.files("quire.server") / "playground"


def page_path(name: str) -> str:
    """Return the path under which a file of the playground's page is served."""
    return "/" if name == "index.html" else f"/playground/{name}"


OPEN_PATHS = PROBES | {page_path(file.name) for file in PAGE_FOLDER.iterdir()}
# Served whatever the engine's state.
ALWAYS_SERVED = OPEN_PATHS | {
    "/load",
    "/version",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/docs/oauth2-redirect",
    STATE_PATH,
}
UNLOGGED = PROBES | {"/load", "/metrics", STATE_PATH}
# A key's limits do not count these methods, nor the routes that cancel responses and batches: so slots become free.
UNLIMITED_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
CANCEL_PATH = re.compile(r"/v1/(responses|batches|messages/batches)/[^/]+/cancel")
# A POST to these submits requests to an engine.
ENGINE_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/score",
        "/v1/score",
    }
)
ADMIN_PATHS = frozenset(
    {
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/reset_prefix_cache",
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
ADMIN_MODEL_PATH = re.compile(r"/v1/models/.+/(load|unload)", re.DOTALL)


def is_open(method: str, path: str) -> bool:
    """Whether a request needs no API key."""
    return (path in OPEN_PATHS and method in ("GET", "HEAD")) or (method == "POST" and path == "/ping")


def is_admin(method: str, path: str) -> bool:
    """Whether a request would operate models rather than use them."""
    return path in ADMIN_PATHS or (method == "POST" and ADMIN_MODEL_PATH.fullmatch(path) is not None)


def route_path(scope: Scope) -> str:
    """Return the path of a request as the routes know it."""
    return without_root(scope["path"], scope.get("root_path", ""))
