"""A chat model behind an OpenAI-compatible server, over the standard library's HTTP client."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from collections.abc import Generator, Iterator
from typing import Any

from quire.errors import ConfigError, NotFoundError, QuireError, RequestError

TIMEOUT = 600.0
MAX_ERROR_BYTES = 65536


class RemoteModel:
    """Talks to `url`, which ends in /v1; without a name it takes the first model that the server offers.

    Raises:
        ConfigError: the address makes no sense. QuireError: the server cannot be reached or refuses.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, sampling: dict[str, Any]) -> None:
        parts = urllib.parse.urlsplit(url)
        try:
            self._port = parts.port
        except ValueError:
            raise ConfigError(f"url: {url!r} has a bad port", param="url") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url: {url!r} must look like http://127.0.0.1:8000/v1", param="url")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._path = parts.path.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self.name = model or self._first_model()

    def close(self) -> None:
        """Do nothing; each reply has a connection of its own."""

    def reply(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        """Yield the reply; closing the generator closes the connection, which aborts the request."""
        body = {"model": self.name, "messages": messages, "stream": True, **self._sampling}
        connection = self._connect()
        try:
            response = self._send(connection, "POST", "/chat/completions", json.dumps(body).encode())
            for data in _events(response):
                if "error" in data:
                    raise QuireError(_error_text(data))
                for choice in data.get("choices", []):
                    text = choice.get("delta", {}).get("content")
                    if text:
                        yield text
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, QuireError):
                raise
            raise QuireError(f"{self._where}: the reply broke off: {error}") from None
        finally:
            connection.close()

    @property
    def _where(self) -> str:
        return self._host if self._port is None else f"{self._host}:{self._port}"

    def _connect(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._path + path, body=body, headers=self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise QuireError(f"{self._where}: no answer: {error}") from None
        if response.status != 200:
            text = _error_text(_parsed(response.read(MAX_ERROR_BYTES)))
            kind = RequestError if 400 <= response.status < 500 else QuireError
            raise kind(f"{self._where} answered {response.status}: {text or response.reason}")
        return response

    def _first_model(self) -> str:
        connection = self._connect()
        try:
            models = _parsed(self._send(connection, "GET", "/models").read())
        finally:
            connection.close()
        try:
            return str(models["data"][0]["id"])
        except (LookupError, TypeError):
            raise NotFoundError(f"{self._where} offers no model", param="url") from None


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a server-sent event stream, until [DONE] or the end."""
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return {}


def _error_text(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else ""
