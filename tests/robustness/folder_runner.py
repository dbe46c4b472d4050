"""Runs many `quire` commands fast: a process that has everything imported forks a child for each of them.

What a child opens for writing, connects to and starts is recorded by an audit hook, and nothing but Unix sockets can be
connected. `Runner` is the parent's side, `main` the process that forks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.meta.source import ENVIRONMENT, PACKAGE, ROOT

IMPORTED = (
    *("quire.cli.main", "quire.cli.generate", "quire.cli.plan", "quire.cli.chat", "quire.cli.convert"),
    *("quire.cli.run_batch", "quire.frontend.llm", "quire.frontend.async_llm", "quire.engine.core"),
    *(
        "quire.engine.plan",
        "quire.executor.ranks",
        "quire.worker.worker",
        "quire.server.app",
        "quire.server.batches.lines",
    ),
    *("quire.kernels.cpu.backend", "quire.lora.store"),
)
LARGE = ("torch", "transformers", "quire.cli.verify", "quire.verify.check")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PROGRAMS = ("os.system", "os.exec", "os.posix_spawn", "pty.spawn")
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended: exit code, or minus the signal; most memory in bytes; what no command should do."""

    code: int
    out: str
    err: str
    seconds: float
    max_rss: int
    deeds: list[str]


class Runner:
    """The process that forks. Close it at the end.

    Args:
        scratch: an empty folder. large: whether commands will need PyTorch and transformers.
    """

    def __init__(self, scratch: Path, *, large: bool) -> None:
        self._scratch = scratch
        environment = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environment["TMPDIR"] = str(scratch)  # PyTorch writes there when it is imported
        environment["PYTHONPATH"] += os.pathsep + str(ROOT)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.robustness.folder_runner", *(LARGE if large else ())],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, words: Sequence[str], *, seconds: float, memory: int | None, writes: Sequence[Path], stdin: str = ""
    ) -> Done:
        """Run a command.

        Args:
            seconds: after which it is killed. memory: that it may reserve beyond what the imports have, in bytes.
            writes: where it may write, besides the caches of compiled kernels.
        """
        (self._scratch / "in").write_text(stdin)
        allowed = [*map(str, writes), str(Path("~/.cache").expanduser()), str(PACKAGE), "/dev/", "/proc/self/"]
        job = {"words": list(words), "allowed": allowed, "seconds": seconds, "memory": memory}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**job, "scratch": str(self._scratch)}) + "\n")
        self._process.stdin.flush()
        result = json.loads(self._process.stdout.readline())
        out, err = ((self._scratch / name).read_text(errors="replace") for name in ("out", "err"))
        return Done(result["code"], out, err, result["seconds"], result["max_rss"], result["deeds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def watch(allowed: Sequence[str], deeds: list[str]) -> None:
    """Record, from now on, what is written elsewhere than allowed, connected to, or started."""

    def is_allowed(path: Any) -> bool:
        return not isinstance(path, str | bytes) or os.path.abspath(os.fsdecode(path)).startswith(tuple(allowed))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            if (args[2] or 0) & WRITING and not is_allowed(args[0]):
                deeds.append(f"wrote {args[0]}")
        elif event in CHANGES:
            if not is_allowed(args[0]):
                deeds.append(f"{event} {args[0]}")
        elif event == "socket.connect" and args[0].family != socket.AF_UNIX:
            deeds.append(f"connected to {args[1]}")
            raise OSError("there is no network here")
        elif event in PROGRAMS or (event == "subprocess.Popen" and args[0] != sys.executable):
            deeds.append(f"{event} {args[:2]}")

    sys.addaudithook(hook)


def use_adapter(model: str, adapter: str) -> int:
    """Load a model and generate with an adapter; return what a command would."""
    from quire.engine_request import LoRARequest
    from quire.errors import QuireError
    from quire.frontend.llm import LLM
    from quire.sampling_params import SamplingParams

    try:
        with LLM(model=model, enable_lora=True, num_threads=1, kv_cache_memory_bytes=1 << 20) as llm:
            request = LoRARequest("x", 1, adapter)
            [output] = llm.generate("hello", SamplingParams(max_tokens=2), use_tqdm=False, lora_request=request)
            if output.outputs[0].error is not None:
                raise output.outputs[0].error
    except QuireError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return 0


def _child(job: dict[str, Any], report: int) -> int:
    """Run one command; deeds go to the file descriptor `report`."""
    from quire.cli import main as cli_main

    deeds: list[str] = []
    scratch = Path(job["scratch"])
    for number, name in enumerate(("in", "out", "err")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(scratch / name, flags, 0o600), number)
    if job["memory"] is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + job["memory"],) * 2)
    words = job["words"]
    watch([*job["allowed"], str(scratch)], deeds)
    try:
        return use_adapter(*words[1:]) if words[0] == "adapter" else cli_main.main(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(report, json.dumps(deeds[:20]).encode())


@contextlib.contextmanager
def _alarm(seconds: float, ring: Callable[[], None]) -> Iterator[None]:
    signal.signal(signal.SIGALRM, lambda *_: ring())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setsid()
            code = _child(job, writer)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:  # the boundary of a process
            print(f"Traceback: {type(error).__name__}: {str(error)[:500]}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    os.close(writer)
    with _alarm(job["seconds"], lambda: os.kill(pid, signal.SIGKILL)):
        _, status, usage = os.wait4(pid, 0)
    seconds = time.monotonic() - started
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it has started
    deeds = os.read(reader, 1 << 20).decode()
    os.close(reader)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": seconds,
        "max_rss": usage.ru_maxrss * 1024,
        "deeds": json.loads(deeds) if deeds else [],
    }


def main() -> None:
    """Import everything, then fork for each line of standard input."""
    for name in (*IMPORTED, *sys.argv[1:]):
        importlib.import_module(name)
    sys.dont_write_bytecode = True
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
