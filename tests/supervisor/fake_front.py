"""A front that imports no server, and a program that supervises it: `python -m tests.supervisor.fake_front`.

The program's arguments are the server's options as JSON, and modes: how each start of a front behaves, the last one
for all later ones. "serve" answers each connection with the front's process id, "die" ends at once, "refuse" says why
it cannot start, "freeze" serves until its first connection and then hangs, "deaf" never serves, "stubborn" serves and
does not stop when it is told to, "parent" has a child of its own, which ends with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import time

from quire import logs
from quire.child_process import start_module_here
from quire.errors import QuireError
from quire.server_config import ServerConfig
from quire.supervisor.board import Board
from quire.supervisor.channel import Channel, ConnectionQueue
from quire.supervisor.listen import listening
from quire.supervisor.supervisor import Supervisor

MODES = "QUIRE_TEST_MODES"
PR_SET_CHILD_SUBREAPER = 36
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"


def main() -> int:
    """Entry point of the front, and of its child."""
    if sys.argv[1:] == ["child"]:
        time.sleep(600)
    front_args = json.loads(sys.stdin.buffer.read())
    mode = next_mode()
    if mode == "die":
        return 3
    if mode == "refuse":
        channel = Channel(socket.socket(fileno=front_args["channel"]))
        channel.send({"type": "exit", "code": 2, "error": "there is no certificate"})
        return 2
    if mode == "parent":
        start_module_here("tests.supervisor.fake_front", "child", stdin=subprocess.DEVNULL)
    channel = Channel(socket.socket(fileno=front_args["channel"]))
    queue = ConnectionQueue(socket.socket(fileno=front_args["queue"]))
    board = Board(front_args["board"], front_args["num_rows"])
    board.beat(front_args["row"])
    if mode != "deaf":
        channel.send({"type": "serving"})
        channel.send({"type": "ready", "model": "fake"})
    while True:
        board.beat(front_args["row"])
        select.select([channel, queue], [], [], 0.05)
        taken = queue.take()
        if taken is not None:
            message, fd = taken
            channel.send({"type": "taken", "number": message["number"]})
            if mode == "freeze":
                time.sleep(600)
            serve(fd, message["excess"])
            channel.send({"type": "closed", "numbers": [message["number"]]})
        for message, _ in channel.receive():
            if message["type"] == "drain" and mode != "stubborn":
                channel.send({"type": "exit", "code": 0, "error": ""})
                return 0


def next_mode() -> str:
    """Return the mode of this start, and move on to that of the next one."""
    with open(os.environ[MODES], "r+", encoding="utf-8") as file:
        modes = file.read().split()
        file.seek(0)
        file.truncate()
        file.write(" ".join(modes[1:] or modes))
    return modes[0]


def serve(fd: int, excess: str) -> None:
    """Answer one connection."""
    with socket.socket(fileno=fd) as connection:
        connection.settimeout(5.0)
        connection.recv(4096)
        body = json.dumps({"front": os.getpid(), "excess": excess}).encode()
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)


def run(options: str) -> int:
    """Run a supervisor; its exit code."""
    logs.setup("info")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # as the first process of a container
    server = ServerConfig(**json.loads(options))
    try:
        with listening(server) as listener:
            return Supervisor(server, {}, listener, module="tests.supervisor.fake_front").run()
    except QuireError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))
