"""`Supervisor`: accepts connections, hands them to fronts, and replaces a front that dies or does not react.

Engines are its children too, so that they survive the fronts that use them. A front is given the engines there are, and
what earlier fronts have published. `channel.py` carries the messages; those of a front are handled by `_HANDLERS`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from quire.errors import QuireError
from quire.server_config import ServerConfig
from quire.supervisor import systemd
from quire.supervisor.board import create_board
from quire.supervisor.channel import QUEUE_KIND, ConnectionQueue, Message
from quire.supervisor.connections import counter_of, default_connections
from quire.supervisor.engines import Engine, Engines
from quire.supervisor.front import Front, how_ended
from quire.supervisor.listen import CERT_REQS, url_of
from quire.supervisor.probes import DRAINING, LOADING, RESTARTING, STALLED, ProbeAnswers
from quire.supervisor.quotas import Quotas
from quire.supervisor.waiting import Accepted, WaitingConnections

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
WAITING_POLL_SECONDS = 0.02  # while connections wait for a front
MAX_ACCEPTED = 64  # at a time
MAX_WAITING = min(1024, default_connections() // 2)  # connections that no front has taken
DOUBTFUL_SECONDS = 5.0  # until a connection that nobody has is counted no longer
STOPPING_SECONDS = 0.8  # without a heartbeat, of a front that keeps the server from its end
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN)  # what may be there again soon
MAX_FAILED_STARTS = 3  # in a row
RETRY_SECONDS = 0.5  # before the second start in a row
MAX_RETRIES_APART = 60  # times as long
FRONT_MODULE = "quire.server.run"
FORWARDED = ("ask", "answer", "relay")  # messages between fronts
FAREWELL_SECONDS = 10.0  # beyond the shutdown timeout, until fronts are killed


class FrontEndedError(QuireError):
    """A front has ended the server, or dies at every start; `exit_code` is the server's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]


class Supervisor:
    """The parent process of a server.

    Args:
        server: options. front_args: what fronts are given of the command line, JSON-like.
        listener: the listening socket, which is the caller's to close.
        module: fronts run its `main`; tests pass another one.
    """

    def __init__(
        self, server: ServerConfig, front_args: dict[str, Any], listener: socket.socket, module: str = FRONT_MODULE
    ) -> None:
        self._server = server
        self._front_args = front_args
        self._module = module
        self._listener = listener
        self._url = url_of(listener, tls=server.ssl_certfile is not None)
        listener.setblocking(False)
        self._counter = counter_of(server)
        self._board_fd, self._board = create_board(server.api_server_count, len(front_args.get("entries") or [None]))
        self._queue = ConnectionQueue(*socket.socketpair(socket.AF_UNIX, QUEUE_KIND))
        self._queued: dict[int, Accepted] = {}  # those in the queue, or just taken from it
        self._doubtful: dict[int, float] = {}  # those that may have ended with a front, and since when
        self._waiting = WaitingConnections(
            ProbeAnswers(server.path_prefix), None if server.ssl_certfile is None else self._tls_context
        )
        self.engines = Engines()
        self._quotas = Quotas()
        self._fronts: dict[int, Front] = {}
        self._serving: list[Front] = []  # in the order in which they began
        self._start_at: dict[int, float] = dict.fromkeys(range(server.api_server_count), 0.0)
        self._published: dict[str, Any] = {}
        self._replies: dict[int, list[tuple[Front, int]]] = {}  # calls that are answered when an engine has ended
        self._tls: tuple[tuple[int, ...], ssl.SSLContext] | None = None
        self._selector = selectors.DefaultSelector()
        self._num_accepted = 0
        self._num_failed_starts: Counter[int] = Counter()  # in a row, by row of the board
        self._num_replaced = 0
        self._was_ready = False
        self._num_signals = 0
        self._kill_at: float | None = None
        self._exit: tuple[int, str] | None = None  # exit code and error, once a front has ended the server
        self._watchdog = systemd.watchdog_seconds()
        self._watchdog_at = 0.0
        self._signal_read, self._signal_write = os.pipe()

    def run(self) -> int:
        """Serve until a signal, or a front, ends the server; return the exit code.

        Raises `FrontEndedError` if it is not 0.
        """
        handlers = self._catch_signals()
        self._selector.register(self._signal_read, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._announce(f"listening url={self._url}")
        try:
            while not self._done():
                self._step()
        finally:
            self._close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self._exit is not None and self._exit[0]:
            raise FrontEndedError(self._exit[1], self._exit[0])
        return 0

    # ---- the loop ----

    def _step(self) -> None:
        self._check_fronts()
        self._watch_channels()
        seconds = WAITING_POLL_SECONDS if len(self._waiting) else POLL_SECONDS
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd == self._signal_read:
                self._on_signals(os.read(self._signal_read, 256))
            else:
                self._serve(key.data)
        self._reap()
        self.engines.check()
        self._hand_over()
        self._answer_waiting()
        self._board.set_connections(self._counter.num_connections, crowded=self._counter.is_crowded)
        self._notify_watchdog()

    def _done(self) -> bool:
        return self._stopping and not self._fronts

    @property
    def _stopping(self) -> bool:
        return self._num_signals > 0 or self._exit is not None

    @property
    def _reacting(self) -> bool:
        """Whether there is a front that takes connections."""
        return any(front.reacts for front in self._fronts.values())

    def _status(self) -> str | None:
        """Why connections wait for a front, a key of `probes.REASONS`; None if they need not wait."""
        if self._reacting:
            return None
        if self._stopping:
            return DRAINING
        if any(front.serving and not front.killed for front in self._fronts.values()):
            return STALLED
        return RESTARTING if self._was_ready else LOADING

    def _watch_channels(self) -> None:
        """Poll channels for what they send, and those that have unsent messages for room."""
        for front in self._fronts.values():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if front.channel.unsent else 0)
            key = self._selector.get_map().get(front.channel.fileno())
            if key is not None and key.events != events:
                self._selector.modify(front.channel, events, front)

    # ---- connections ----

    def _accept(self) -> None:
        """Accept connections."""
        for _ in range(MAX_ACCEPTED):
            try:
                accepted, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in SCARCE:
                    logger.warning("no connection can be accepted: %s", error.strerror)
                    time.sleep(WAITING_POLL_SECONDS)  # else it would be tried without a pause
                    return
                continue  # the client is gone again
            accepted.setblocking(False)
            self._num_accepted += 1
            self._waiting.add(Accepted(self._num_accepted, accepted, self._counter.add(peer)))

    def _answer_waiting(self) -> None:
        """Answer connections that no front can, and close those that are too many."""
        ended = self._waiting.poll(self._status()) + self._waiting.shrink(MAX_WAITING)
        for connection in ended:
            self._counter.remove(connection.admission)

    def _offer(self, connection: Accepted) -> bool:
        """Put a connection into the queue; return whether there was room."""
        admission = connection.admission
        message = {"number": connection.number, "excess": admission.excess, "may_probe": admission.may_probe}
        if not self._queue.put(message, connection.fileno()):
            return False
        connection.close()
        self._queued[connection.number] = connection
        return True

    def _hand_over(self) -> None:
        """Move connections to the queue once there is a front, and back while there is none."""
        self._count_lost()
        if not self._reacting:
            self._take_back()
            return
        waiting = self._waiting.take()
        for place, connection in enumerate(waiting):
            if not self._offer(connection):
                for other in waiting[place:]:
                    self._waiting.add(other)
                break

    def _take_back(self) -> None:
        """Let the connections in the queue wait here."""
        while (taken := self._queue.take()) is not None:
            message, fd = taken
            connection = self._queued.pop(message["number"])
            self._doubtful.pop(connection.number, None)
            if fd is None:  # as many files are open as may be
                self._counter.remove(connection.admission)
                continue
            connection.socket = socket.socket(fileno=fd)
            connection.socket.setblocking(False)  # also for what wraps it
            self._waiting.add(connection)

    def _count_lost(self) -> None:
        """Count those no longer that a front has taken, and died before it said so."""
        now = time.monotonic()
        for number in [number for number, since in self._doubtful.items() if now - since > DOUBTFUL_SECONDS]:
            del self._doubtful[number]
            connection = self._queued.pop(number, None)
            if connection is not None:
                self._counter.remove(connection.admission)

    def _tls_context(self) -> ssl.SSLContext:
        """Return the context for handshakes here, with the certificate as the file has it now."""
        server = self._server
        assert server.ssl_certfile is not None
        changed = tuple(os.stat(path).st_mtime_ns for path in (server.ssl_certfile, server.ssl_keyfile) if path)
        if self._tls is not None and self._tls[0] == changed:
            return self._tls[1]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile)
        if server.ssl_ca_certs is not None:
            context.load_verify_locations(server.ssl_ca_certs)
        context.verify_mode = CERT_REQS[server.ssl_cert_reqs]
        self._tls = (changed, context)
        return context

    # ---- fronts ----

    def _check_fronts(self) -> None:
        """Start the fronts that are missing, and kill those that do not react, or take too long to stop."""
        now = time.monotonic()
        for row, start_at in list(self._start_at.items()):
            if row not in self._fronts and not self._stopping and now >= start_at:
                self._start_front(row)
        for front in self._fronts.values():
            if front.killed:
                continue
            silent = front.silent_for()
            if silent > self._stall_timeout(front):
                stacks = front.dump_stacks()
                front.kill()
                logger.error("front %d has not reacted for %.1f s and is killed", front.pid, silent)
                if stacks:
                    logger.error("front %d was here:\n%s", front.pid, stacks)
            elif self._kill_at is not None and now >= self._kill_at:
                logger.warning("front %d did not stop in time and is killed", front.pid)
                front.kill()

    def _stall_timeout(self, front: Front) -> float:
        """Return the seconds after which a silent front is killed: few if only it keeps the server from its end."""
        impatient = self._num_signals > 1 or (self._stopping and len(self._start_at) > len(self._fronts) == 1)
        return STOPPING_SECONDS if impatient else self._server.front_stall_timeout

    def _start_front(self, row: int) -> None:
        front_args = {
            **self._front_args,
            "url": self._url,
            "published": self._published,
            "resumed": self._was_ready,
        }
        try:
            front = Front(self._module, front_args, row, self._board, self._board_fd, self._queue, self._quotas.share())
        except OSError as error:
            logger.error("no front can be started: %s", error)
            if error.errno not in SCARCE:
                self._note_failed_start(row, f"it cannot be started: {error.strerror}")
                return
            self._start_at[row] = time.monotonic() + RETRY_SECONDS
            for connection in self._waiting.shrink(len(self._waiting) // 2):
                self._counter.remove(connection.admission)
            return
        self._fronts[row] = front
        self._selector.register(front.channel, selectors.EVENT_READ, front)

    def _note_failed_start(self, row: int, reason: str, code: int = 1) -> None:
        """Try again, later and later; end the server once no front could be started a few times in a row."""
        self._num_failed_starts[row] += 1
        self._start_at[row] = time.monotonic() + RETRY_SECONDS * min(
            self._num_failed_starts[row] - 1, MAX_RETRIES_APART
        )
        if all(self._num_failed_starts[row] >= MAX_FAILED_STARTS for row in self._start_at):
            self._shut_down(code, f"the process that serves HTTP dies at every start: {reason}")

    def _shut_down(self, code: int, error: str) -> None:
        """End because of a front: the others stop as after a signal."""
        self._exit = self._exit or (code, error)
        self._drain()

    def _reap(self) -> None:
        """Note which children have ended."""
        for engine in self.engines.reap():
            for front in self._fronts.values():
                if front.row in engine.users:
                    front.channel.send({"type": "exited", "engine": engine.number, "code": engine.exit_code})
            self._answer_ended(engine)
        for front in list(self._fronts.values()):
            if front.process.poll() is not None:
                self._serve(front)  # its last messages
                self._on_front_end(front)
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        """Reap what ended children have left behind: in a container this process is the parent of all orphans."""
        ours = {front.pid for front in self._fronts.values()} | {engine.process.pid for engine in self.engines}
        if not hasattr(os, "waitid"):  # not on every platform
            return
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in ours:
                    break  # it has ended just now
                os.waitpid(ended.si_pid, 0)

    def _on_front_end(self, front: Front) -> None:
        del self._fronts[front.row]
        self._selector.unregister(front.channel)
        for admission in front.connections.values():
            self._counter.remove(admission)
        front.quotas.release()
        self.engines.forget(front.row)
        for number, calls in self._replies.items():
            self._replies[number] = [(caller, call) for caller, call in calls if caller is not front]
        code = front.process.returncode
        if not front.exiting and not self._stopping:
            how = how_ended(code)
            connections = len(front.connections)
            logger.error("front %d has ended (%s), with %d connections; it is replaced", front.pid, how, connections)
            stacks = front.read_stacks() if code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS) else ""
            if stacks:
                logger.error("front %d was here:\n%s", front.pid, stacks)
            self._start_at[front.row] = 0.0
            self._num_replaced += 1
            if not front.ready:
                self._note_failed_start(front.row, how)
        front.close()
        self._take_back()  # what is not in the queue has another front, which will say so, or had this one
        self._doubtful.update(dict.fromkeys(self._queued, time.monotonic()))
        self._tell_fronts()

    # ---- messages ----

    def _serve(self, front: Front) -> None:
        front.channel.flush()
        for message, fds in front.channel.receive():
            try:
                if message["type"] in FORWARDED:
                    self._forward(front, message, fds)
                else:
                    self._HANDLERS[message["type"]](self, front, message)
            except Exception:  # boundary: one front must not end the others
                front.kill()
                logger.exception("a message of front %d cannot be handled; it is killed", front.pid)
            for fd in fds:
                os.close(fd)
        if front.channel.closed and front.process.poll() is None and not front.exiting:
            front.kill()

    def _on_serving(self, front: Front, message: Message) -> None:
        front.serving = True
        self._tell_fronts()
        if self._num_signals:
            front.channel.send({"type": "drain"})

    def _on_ready(self, front: Front, message: Message) -> None:
        front.ready = True
        self._num_failed_starts[front.row] = 0
        if not self._was_ready:
            self._was_ready = True
            self._announce(f"ready url={self._url} model={message['model']}")
            systemd.notify("READY=1")

    def _on_stopping(self, front: Front, message: Message) -> None:
        front.serving = False
        self._tell_fronts()

    def _on_taken(self, front: Front, message: Message) -> None:
        connection = self._queued.pop(message["number"], None)
        if connection is not None:
            front.connections[connection.number] = connection.admission

    def _on_closed(self, front: Front, message: Message) -> None:
        for number in message["numbers"]:
            admission = front.connections.pop(number, None)
            if admission is not None:
                self._counter.remove(admission)

    def _on_publish(self, front: Front, message: Message) -> None:
        self._publish(message["key"], message["value"], front)

    def _publish(self, key: str, value: Any, publisher: Front | None = None) -> None:
        """Give all fronts, also later ones, a value; the publisher has it."""
        self._published[key] = value
        for front in self._fronts.values():
            if front is not publisher:
                front.channel.send({"type": "published", "key": key, "value": value})

    def _on_quota(self, front: Front, message: Message) -> None:
        value = front.quotas.answer(message["method"], message["arguments"])
        if "call" in message:
            front.channel.send({"type": "result", "call": message["call"], "value": value})

    def _forward(self, front: Front, message: Message, fds: list[int]) -> None:
        """Pass a message on to the front of the row `to`; say so if there is none that reacts."""
        to = self._fronts.get(message["to"])
        if to is not None and to.reacts:
            to.channel.send({**message, "from": front.row}, fds)
        elif message["type"] == "ask":
            front.channel.send({"type": "answer", "call": message["call"], "from": message["to"], "error": "gone"})

    def _tell_fronts(self) -> None:
        """Tell all fronts which of them serve, after a change; the first one, which decides, is so until it ends."""
        serving = [front for front in self._fronts.values() if front.serving and not front.exiting]
        kept = [front for front in self._serving if front in serving]
        self._serving = kept + [front for front in serving if front not in kept]
        rows = [front.row for front in self._serving]
        for front in self._fronts.values():
            front.channel.send({"type": "fronts", "rows": rows})
        self._publish("supervisor", {"fronts_serving": len(rows), "front_restarts": self._num_replaced})

    def _on_engine(self, front: Front, message: Message) -> None:
        reply: Message = {"type": "result", "call": message["call"]}
        try:
            engine = self.engines.find(message["name"], message["options"], message["replaced"])
            front.channel.send({**reply, "engine": engine.number, "pid": engine.process.pid}, engine.files.shared)
        except OSError as error:
            front.channel.send({**reply, "error": str(error)})
            return
        engine.users.add(front.row)

    def _on_signal_engine(self, front: Front, message: Message) -> None:
        engine = self.engines.get(message["engine"])
        if engine is not None:
            engine.process.send_signal(message["signal"])

    def _on_release(self, front: Front, message: Message) -> None:
        """The front does not need an engine any more, or does not want the one of a name that it has asked for."""
        name = message.get("name")
        engine = self.engines.get(message["engine"]) if name is None else self.engines.current(name)
        if engine is not None and front.row in engine.users:
            self.engines.release(engine, front.row, reacts=message["reacts"])
            if not engine.users:
                self._replies.setdefault(engine.number, []).append((front, message["call"]))
                return
        front.channel.send({"type": "result", "call": message["call"]})

    def _answer_ended(self, engine: Engine) -> None:
        for front, call in self._replies.pop(engine.number, ()):
            front.channel.send({"type": "result", "call": call})

    def _on_exit(self, front: Front, message: Message) -> None:
        """End the server, unless a front that follows another one cannot start: what it misses may come back."""
        front.exiting = True
        code, error = message["code"], message["error"]
        if code and self._was_ready and not front.ready and not self._stopping:
            logger.error("front %d cannot start: %s", front.pid, error)
            self._note_failed_start(front.row, error, code)
        elif code or not self._stopping:
            self._shut_down(code, error)

    _HANDLERS: dict[str, Callable[[Supervisor, Front, Message], None]] = {
        "serving": _on_serving,
        "ready": _on_ready,
        "stopping": _on_stopping,
        "taken": _on_taken,
        "closed": _on_closed,
        "publish": _on_publish,
        "quota": _on_quota,
        "engine": _on_engine,
        "signal": _on_signal_engine,
        "release": _on_release,
        "exit": _on_exit,
    }

    # ---- signals, systemd, the end ----

    def _catch_signals(self) -> dict[int, Any]:
        """Let signals arrive through a pipe; return the handlers as they were."""
        for fd in (self._signal_read, self._signal_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._signal_write, warn_on_full_buffer=False)
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        return {number: signal.signal(number, lambda *_: None) for number in numbers}

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGHUP:
                for front in self._fronts.values():
                    front.channel.send({"type": "reload"})
            elif number in (signal.SIGTERM, signal.SIGINT):
                self._num_signals += 1
                self._drain()

    def _drain(self) -> None:
        """Have all fronts stop; those that do not serve yet are killed."""
        if self._kill_at is None:
            systemd.notify("STOPPING=1")
            self._kill_at = time.monotonic() + self._server.shutdown_timeout + FAREWELL_SECONDS
        for front in self._fronts.values():
            if front.serving:
                front.channel.send({"type": "drain"})
            else:
                front.kill()

    def _notify_watchdog(self) -> None:
        """Send systemd's watchdog what it expects while the server is alive: fronts that do not react are replaced."""
        now = time.monotonic()
        if self._watchdog is None or not self._was_ready or now < self._watchdog_at:
            return
        self._watchdog_at = now + self._watchdog / 3
        if all(self._board.is_alive(front.row) for front in self._fronts.values() if front.serving):
            systemd.notify("WATCHDOG=1")

    def _announce(self, line: str) -> None:
        with contextlib.suppress(OSError):  # standard output was closed
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def _close(self) -> None:
        """End all children and release everything."""
        for front in self._fronts.values():  # there are some only after an error of this process
            front.kill()
            front.process.wait()
            front.close()
        self._take_back()
        self._accept()
        self._waiting.poll(DRAINING)
        self._waiting.close()
        self._queue.close()
        for engine in self.engines:
            self.engines.end(engine, reacts=engine.is_loaded)
        while list(self.engines):
            self.engines.check()
            self.engines.reap()
            time.sleep(WAITING_POLL_SECONDS)
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for fd in (self._board_fd, self._signal_read, self._signal_write):
            os.close(fd)
