"""Parts of a server are killed, frozen or taken away under load; the engine, which is one, has `test_faults.py`.

    pytest -m slow -s tests/robustness/test_chaos.py          # --repetitions 20: how often each

Whatever happens to a part, requests that do not need it get the text of a run without faults, those that need it get
that or an error that says what happened, and the server is whole again right after; `docs/reliability.md` has a table.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.faults import Answer, body_of, engine_pid, load, read, show
from tests.helpers.server import Server, serve
from tests.robustness.test_soak import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STREAMS = 12
DISK = "kv"  # folder of the disk tier
# No template of the core has this filter, so it is rendered in a worker.
TEMPLATE = "{% for message in messages %}{{ message.content | urlize | length }}{% endfor %}"


def workers(server: Server, module: str) -> list[psutil.Process]:
    """Return the processes of a worker's module."""
    found = []
    for process in processes(server):
        with contextlib.suppress(psutil.Error):
            if any(word.startswith(module) for word in process.cmdline()):
                found.append(process)
    return found


def signal_workers(module: str, number: signal.Signals) -> Callable[[Server, Path], None]:
    """Return what sends a signal to all processes of a worker's module."""

    def act(server: Server, folder: Path) -> None:
        found = workers(server, module)
        assert found, "it has none"
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    return act


def cut_disk(server: Server, folder: Path) -> None:
    """Cut off all files of the disk tier."""
    files = [path for path in (folder / DISK).rglob("*") if path.is_file()]
    assert files
    for path in files:
        os.truncate(path, 0)


def remove_disk(server: Server, folder: Path) -> None:
    """Remove the folder of the disk tier."""
    shutil.rmtree(folder / DISK, ignore_errors=True)


def structured(number: int) -> dict[str, Any]:
    """Return a request that needs a grammar which no other one has."""
    schema = {"enum": [f"{number} {time.monotonic_ns()}"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return body_of(number, max_tokens=60, response_format=form, ignore_eos=False)


def templated(number: int) -> dict[str, Any]:
    """Return a chat with a template of its own."""
    return {
        "model": "quire-demo",
        "messages": [{"role": "user", "content": f"{number}"}],
        "chat_template": TEMPLATE,
        "max_tokens": 5,
    }


@dataclass(frozen=True)
class Fault:
    """What is done to a part, and the requests that need it: their path and how each is made."""

    act: Callable[[Server, Path], None]
    path: str
    needing: Callable[[int], dict[str, Any]]


FAULTS = {
    "grammar workers killed": Fault(
        signal_workers("quire.frontend.grammars", signal.SIGKILL), "/v1/completions", structured
    ),
    "grammar workers frozen": Fault(
        signal_workers("quire.frontend.grammars", signal.SIGSTOP), "/v1/completions", structured
    ),
    "template workers killed": Fault(
        signal_workers("quire.frontend.chat", signal.SIGKILL), "/v1/chat/completions", templated
    ),
    "template workers frozen": Fault(
        signal_workers("quire.frontend.chat", signal.SIGSTOP), "/v1/chat/completions", templated
    ),
    "files of the disk tier cut off": Fault(cut_disk, "/v1/completions", lambda number: body_of(number, max_tokens=3)),
    "folder of the disk tier removed": Fault(
        remove_disk, "/v1/completions", lambda number: body_of(number, max_tokens=3)
    ),
}


def check(answers: list[Answer], expected: list[Answer]) -> None:
    """All complete, with the text of a run without faults."""
    for answer, right in zip(answers, expected, strict=True):
        assert (answer.status, answer.error, answer.done, answer.reason) == (200, None, True, "length")
        assert answer.text == right.text


@pytest.mark.parametrize("name", FAULTS)
def test_only_what_needs_a_part_notices_that_it_is_gone(tmp_path: Path, repetitions: int | None, name: str) -> None:
    fault = FAULTS[name]
    asked = [body_of(number, max_tokens=150) for number in range(STREAMS)]
    options = ["--num-gpu-blocks-override", "200", "--kv-disk-space", "64MiB", "--kv-disk-dir", str(tmp_path / DISK)]
    rows: list[tuple[object, ...]] = [("no.", "needing it: status", "seconds", "after it: status", "seconds")]
    with serve(tmp_path / "log", *options, "--trust-request-chat-template") as server:
        with load(server, asked) as requests:
            expected = requests.answers()
        assert server.post(fault.path, {**fault.needing(0), "stream": False})[0] == 200
        engine = engine_pid(server)
        for number in range(repetitions or 3):
            with load(server, asked) as requests:
                requests.wait_for_events(100)
                fault.act(server, tmp_path)
                row: list[object] = [number]
                for _ in range(2):
                    began = time.monotonic()
                    status, answer = server.post(fault.path, {**fault.needing(number + 1), "stream": False})
                    assert status == 200 or answer["error"]["code"], answer
                    row += [status, time.monotonic() - began]
                check(requests.answers(), expected)
                assert row[3] == 200, answer
            rows.append(tuple(row))
        assert engine_pid(server) == engine
        assert read(server, body_of(99, max_tokens=3)).reason == "length"
    show(name, rows)
    assert "Traceback" not in (tmp_path / "log").read_text()
