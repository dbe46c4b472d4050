"""A server of the demo model, the programs that send requests to it, and the ways that lead there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.programs import PROGRAMS, Program, trust_store
from tests.clients.proxies import PROXIES, proxy
from tests.helpers.certificates import certify
from tests.helpers.server import Server, serve

KEY = "a-key-of-the-tests"
MAX_BODY = 600_000  # less than what nginx accepts unless told otherwise
WAYS = ("direct", "tls", *PROXIES)

WriteBody = Callable[..., Path]


@dataclass
class Way:
    """How programs reach a server."""

    name: str
    server: Server
    url: str


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by openssl")
    return certify(tmp_path_factory.mktemp("certificate"), "quire")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, without TLS."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(log, "--max-body-bytes", str(MAX_BODY), key=KEY) as running:
        yield running


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]) -> Iterator[Server]:
    """The server, with TLS."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--max-body-bytes", str(MAX_BODY), "--ssl-certfile", str(certificate[0]))
    with serve(log, *options, "--ssl-keyfile", str(certificate[1]), key=KEY) as running:
        yield running


@pytest.fixture(scope="session", params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    """Each way in turn."""
    name = request.param
    running: Server = request.getfixturevalue("tls_server" if name == "tls" else "server")
    if name not in PROXIES:
        yield Way(name, running, running.url)
        return
    with proxy(name, tmp_path_factory.mktemp(name), running.port) as url:
        yield Way(name, running, url)


@pytest.fixture(scope="session", params=PROGRAMS)
def program(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]
) -> Program:
    """Each program in turn."""
    command = PROGRAMS[request.param](tmp_path_factory.mktemp(request.param))
    store = certificate[0].parent / "trust.p12"
    return Program(request.param, command, certificate[0], store if store.exists() else trust_store(certificate[0]))


@pytest.fixture
def write_body(tmp_path: Path) -> WriteBody:
    """Writes the body of a chat completion into a file."""

    def write(*, blanks: int = 0, **fields: object) -> Path:
        path = tmp_path / "body.json"
        body = {"model": "quire-demo", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
        path.write_bytes(json.dumps({**body, "max_tokens": 20, **fields}).encode() + b" " * blanks)
        return path

    return write
