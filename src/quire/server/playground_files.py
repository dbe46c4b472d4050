"""The files of the playground's page: their names, which are open to everybody, and their contents.

They are package data in the folder `playground`, served as they are. No route lives here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

PAGE = "index.html"
FILES = (
    PAGE,
    "api.js",
    "base.css",
    "chat.css",
    "chat.js",
    "conversation.js",
    "dom.js",
    "engine.css",
    "engine.js",
    "icon.svg",
    "main.js",
    "markdown.js",
    "message.js",
    "plots.js",
    "pool.js",
    "queues.js",
    "settings.js",
    "snippets.js",
)
CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def path_of(name: str) -> str:
    """Return the path under which a file is served; the page itself is the root."""
    return "/" if name == PAGE else f"/playground/{name}"


PATHS = frozenset(path_of(name) for name in FILES)
STATE_PATH = "/playground/state"  # what the page polls; needs the key


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is sent; `etag` changes with its content."""

    data: bytes
    content_type: str
    etag: str


def load_files() -> dict[str, PageFile]:
    """Return all files by path."""
    folder = resources.files("quire.server") / "playground"
    found = {}
    for name in FILES:
        data = (folder / name).read_bytes()
        etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        found[path_of(name)] = PageFile(data, CONTENT_TYPES[name.rsplit(".", 1)[1]], etag)
    return found
