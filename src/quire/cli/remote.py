"""A chat model behind an OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import httpx

from quire.errors import ConfigError, NotFoundError, QuireError, RequestError

TIMEOUT = 600.0  # seconds without a byte
MAX_ERROR_BYTES = 65536


class RemoteModel:
    """Talks to the server at `url`; without a name it uses the first model the server lists.

    A URL without a path is that of a server, whose API is under /v1.

    Raises:
        ConfigError: `url` is not an HTTP address. QuireError: the server cannot be reached or refuses.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, sampling: dict[str, Any]) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"url: {url!r}: {error}", param="url") from None
        if parsed.port is not None and not 0 < parsed.port < 65536:
            raise ConfigError(f"url: {url!r} has a bad port", param="url")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"url: {url!r} must look like http://127.0.0.1:8000/v1", param="url")
        if parsed.path in ("", "/"):
            parsed = parsed.copy_with(path="/v1")
        self._address = parsed.netloc.decode()
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        # Environment variables do not redirect a request that may carry a key.
        self._client = httpx.Client(base_url=parsed, headers=headers, timeout=TIMEOUT, trust_env=False)
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self.name = model or self._first_model()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def reply(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        """Yield the text of a streamed reply; closing the generator closes the connection, which aborts the request."""
        body = {"model": self.name, "messages": messages, "stream": True, **self._sampling}
        try:
            with self._client.stream("POST", "chat/completions", json=body) as response:
                self._check(response)
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise QuireError(_error_message(event))
                    for choice in event.get("choices", []):
                        if text := choice.get("delta", {}).get("content"):
                            yield text
        except httpx.ConnectError as error:
            raise QuireError(f"{self._address}: no answer: {error}") from None
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise QuireError(f"{self._address}: the reply broke off: {error}") from None

    def _first_model(self) -> str:
        try:
            response = self._client.get("models")
            self._check(response)
        except httpx.HTTPError as error:
            raise QuireError(f"{self._address}: no answer: {error}") from None
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise NotFoundError(f"{self._address} offers no model", param="url") from None

    def _check(self, response: httpx.Response) -> None:
        """Raise `RequestError` for a status of 4xx, `QuireError` for another that is not 200."""
        if response.status_code == 200:
            return
        try:
            text = _error_message(json.loads(next(response.iter_bytes(MAX_ERROR_BYTES), b"")))
        except ValueError:
            text = ""
        kind = RequestError if response.is_client_error else QuireError
        raise kind(f"{self._address} answered {response.status_code}: {text or response.reason_phrase}")


def _error_message(body: Any) -> str:
    """Return the message of an OpenAI-style error object, empty if there is none."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else ""
