"""Lists the files of the package that one streamed chat request runs through, from the application to the kernels.

    python tools/request_path.py [--files]

serves the demo model in this process with the engine in a thread, answers one request before counting (so that what
happens once does not count), and then records every function of the package that a second request calls, in all
threads. Code that Numba has compiled is not seen; the Python that launches it is.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx

import quire
from quire.config import EngineConfig
from quire.frontend.async_llm import AsyncLLM
from quire.server.app import build_app
from quire.server_config import ServerConfig

PACKAGE = Path(quire.__file__).resolve().parent


class Recorder:
    """Collects the code objects that are called while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.called: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """See `sys.setprofile`."""
        if self.on and event == "call":
            self.called.add(frame.f_code)


async def answer(client: httpx.AsyncClient) -> None:
    """Send one streamed chat request and read its events to the end."""
    body = {
        "model": "quire-demo",
        "messages": [{"role": "user", "content": "Hello! What is Quire?"}],
        "temperature": 0.7,
        "seed": 1,
        "max_completion_tokens": 16,
        "stream": True,
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert [line async for line in response.aiter_lines() if line][-1] == "data: [DONE]"


async def record(recorder: Recorder) -> None:
    """Serve the demo model, and record its second request."""
    config = EngineConfig(server=ServerConfig(engine="inline"))
    llm = AsyncLLM(config)
    await llm.start()
    try:
        transport = httpx.ASGITransport(app=build_app(llm, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://quire", timeout=300.0) as client:
            await answer(client)
            recorder.on = True
            await answer(client)
            recorder.on = False
    finally:
        await llm.close()


def main() -> None:
    """Print how many files, functions and lines a request runs through."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="list the files with their lines")
    arguments = parser.parse_args()
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        asyncio.run(record(recorder))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    paths = {Path(code.co_filename) for code in recorder.called}
    lines = {path: path.read_text("utf-8").count("\n") for path in paths if path.is_relative_to(PACKAGE)}
    functions = [code for code in recorder.called if Path(code.co_filename) in lines]
    print(f"{len(lines)} files, {sum(lines.values())} lines; {len(functions)} functions called")
    for path, count in sorted(lines.items()) if arguments.files else ():
        print(f"{count:5} {path.relative_to(PACKAGE)}")


if __name__ == "__main__":
    main()
