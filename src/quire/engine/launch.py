"""What an engine process shares with its parent, and how it is started. Imports nothing of others.

The child inherits a listener, by which clients are connected (`clients.py`), the memory of its heartbeat
(`heartbeat.py`) and a file for its stacks, and reads its options, which are JSON, from standard input.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from quire import logs
from quire.child_process import start_module
from quire.config import CONFIG_GROUPS, EngineConfig
from quire.options import option_fields

logger = logging.getLogger(__name__)

MODULE = "quire.engine.process"  # whose `main` a child runs
HEARTBEAT_BYTES = 128 + 2 * (1 << 17)
CLOSE_SECONDS = 10.0
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def anonymous_file(name: str) -> int:
    """Return a descriptor of an empty file without a name, in memory where the system can; for a child to inherit."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile(prefix=name) as file:  # unlinked from the beginning
        return os.dup(file.fileno())


def receive_fds(sock: socket.socket, num_bytes: int, num_fds: int) -> tuple[bytes, list[int]]:
    """Receive up to so many bytes and descriptors, which no child inherits: `socket.recv_fds` ignores its flags."""
    fds = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(num_bytes, socket.CMSG_LEN(num_fds * fds.itemsize), CLOSE_ON_EXEC)
    for level, kind, packed in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
    if not CLOSE_ON_EXEC:
        for fd in fds:
            os.set_inheritable(fd, False)
    return data, list(fds)


@contextlib.contextmanager
def options_file(name: str, options: dict[str, Any]) -> Iterator[BinaryIO]:
    """Yield a file with JSON, to be a child's standard input. A pipe could block until the child reads it."""
    with os.fdopen(anonymous_file(name), "w+b") as file:
        file.write(json.dumps(options).encode())
        file.seek(0)
        yield file


class EngineFiles:
    """The parent's and the child's ends of what they share; descriptors that are to be closed.

    Attributes:
        listener: the parent's end, by which connections are passed on; the engine ends when all copies are closed.
        heartbeat, stacks: of files that both ends use. child_listener: the child's end.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            stack.callback(theirs.close)
            self.heartbeat = anonymous_file("quire-heartbeat")
            stack.callback(os.close, self.heartbeat)
            os.ftruncate(self.heartbeat, HEARTBEAT_BYTES)
            self.stacks = anonymous_file("quire-stacks")
            stack.pop_all()
        self.listener, self.child_listener = ours.detach(), theirs.detach()

    @property
    def inherited(self) -> tuple[int, int, int]:
        """The descriptors that the child inherits."""
        return self.child_listener, self.heartbeat, self.stacks

    @property
    def shared(self) -> tuple[int, int, int]:
        """The descriptors that the parent, or a process it passes them on to, keeps."""
        return self.listener, self.heartbeat, self.stacks

    def close_child(self) -> None:
        """Close what only the child needs, once it has been started."""
        os.close(self.child_listener)

    def close(self) -> None:
        """Close the parent's ends."""
        for fd in self.shared:
            os.close(fd)


def engine_options(config: EngineConfig) -> dict[str, Any]:
    """Return the engine's options, without those of the server, which include secrets."""
    values = config.to_kwargs()
    return {item.name: values[item.name] for item in option_fields(CONFIG_GROUPS)}


@dataclass(frozen=True, slots=True)
class LaunchedEngine:
    """An engine process as its user needs it, whoever has started it.

    Attributes:
        pid: process id. listener, heartbeat, stacks: as `EngineFiles.shared`, which are the user's to close.
        exit_code: set when the process has ended. signal: sends it a signal.
        end: called once its user has closed the listener, with whether the process is expected to end by itself;
            returns when the process has ended, or when it goes on for others.
    """

    pid: int
    listener: int
    heartbeat: int
    stacks: int
    exit_code: Future[int]
    signal: Callable[[int], None]
    end: Callable[[bool], Awaitable[None]]


def start_engine(
    options: dict[str, Any], start: Callable[..., subprocess.Popen[bytes]], module: str = MODULE
) -> tuple[subprocess.Popen[bytes], EngineFiles]:
    """Start an engine process, which begins to load its model, without waiting for it.

    Args:
        options: of the engine, JSON-like. start: a function of `child_process`, which runs `main` of `module`.

    Raises `OSError` or `RuntimeError` if the system starts no process.
    """
    files = EngineFiles()
    try:
        listener, heartbeat, stacks = files.inherited
        started = {"listener": listener, "heartbeat": heartbeat, "stacks": stacks, "log": logs.settings()}
        with options_file("quire-engine", {**started, "options": options}) as given:
            process = start(module, stdin=given, pass_fds=files.inherited)
    except BaseException:
        files.close()
        raise
    finally:
        files.close_child()
    return process, files


def launch(options: dict[str, Any], module: str = MODULE) -> LaunchedEngine:
    """Start an engine process as a child of this one, which begins to load its model.

    Args:
        options: of the engine, JSON-like. module: the child runs its `main`; tests pass another module.

    Raises `OSError` or `RuntimeError` if the system starts no process.
    """
    exit_code: Future[int] = Future()
    exit_code.set_running_or_notify_cancel()  # so that it cannot be cancelled
    process, files = start_engine(options, partial(start_module, on_exit=exit_code.set_result), module)

    async def end(reacts: bool) -> None:
        ended = asyncio.wrap_future(exit_code)
        if reacts:
            try:
                await asyncio.wait_for(asyncio.shield(ended), CLOSE_SECONDS)
            except TimeoutError:
                logger.warning("the engine did not stop within %.0f s and is killed", CLOSE_SECONDS)
        process.send_signal(signal.SIGKILL)
        await ended

    return LaunchedEngine(process.pid, *files.shared, exit_code, process.send_signal, end)
