"""A black-box endpoint for tests: a character is a token, and the model continues a script that it knows by heart."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class ScriptedEndpoint:
    """Serves completions and chat completions as streams, until it is closed.

    A prompt is continued with what follows its last 12 characters in `script`; a prompt that is not there, and the
    end of the script, end the text. In a chat the prompt is the content of the last message, which is a user's, or that
    of an open assistant's turn.

    Attributes:
        bodies: of all calls, in order. refuse: the status and message of every answer, if set.
        hold: cleared, nothing is answered after the first character. broken: set once a client left in the middle.
    """

    def __init__(self, script: str = "") -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.refuse: tuple[int, str] | None = None
        self.finish_reason: str | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.broken = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                endpoint._answer_json(self, 200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                endpoint._post(self, body)

            def log_message(self, *words: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def continuation(self, prompt: str) -> str:
        """Return all that the model would write behind a prompt."""
        place = self.script.rfind(prompt[-12:]) if prompt else -1
        return "" if place < 0 else self.script[place + len(prompt[-12:]) :]

    @staticmethod
    def _answer_json(handler: BaseHTTPRequestHandler, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        handler.send_response(status)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _post(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        if self.refuse is not None:
            status, message = self.refuse
            self._answer_json(handler, status, {"error": {"message": message}})
            return
        assert body["stream"] is True
        chat = "messages" in body
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        whole = self.continuation(prompt)
        if "structured_outputs" in body:
            whole = body["structured_outputs"].get("choice", [whole])[-1]
        text, reason = _generated(
            whole, body.get("stop") or [], body["max_completion_tokens" if chat else "max_tokens"]
        )
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.end_headers()
        try:
            for index, char in enumerate(text):
                if index:
                    while not self.hold.wait(0.01):
                        _event(handler, _chunk(chat, ""))
                _event(handler, _chunk(chat, char))
            _event(handler, _chunk(chat, "", self.finish_reason or reason))
            handler.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.broken.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _generated(whole: str, stop: str | list[str], most: int) -> tuple[str, str]:
    """Return what a model gives that would write `whole` one character at a time, and the finish reason."""
    stops = [stop] if isinstance(stop, str) else sorted(stop, key=len, reverse=True)
    for length in range(min(most, len(whole)) + 1):
        for item in stops:
            if whole[:length].endswith(item):
                return whole[: length - len(item)], "stop"
    return (whole, "stop") if len(whole) < most else (whole[:most], "length")


def _event(handler: BaseHTTPRequestHandler, value: Any) -> None:
    handler.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
    handler.wfile.flush()


def _chunk(chat: bool, text: str, reason: str | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    if chat:
        choice["delta"] = {"content": text}
    else:
        choice["text"] = text
    return {"id": "x", "object": "chunk", "created": 0, "model": "scripted", "choices": [choice]}
