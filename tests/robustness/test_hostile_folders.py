"""Generated hostile folders (`hostile_folders.py`): each ends a command with exit code 2 and one line, or is harmless.

Nothing of them is executed, written or fetched, in 10 seconds and 2 GB: `pytest -m slow -s` prints what each took.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.server import ADDRESS
from tests.meta.source import ENVIRONMENT
from tests.robustness.folder_runner import Done, Runner
from tests.robustness.hostile_folders import COUNT, MARK, Hostile, make

SECONDS = 60.0  # then a command is killed; on an idle machine none takes ten
MEMORY = 2 * 10**9
RESERVED = 3 * 2**29  # beyond what the imports have; for every other folder
LONGEST_LINE = 2500  # it may list all architectures
SECRET = "SECRET-8472"
SIZES = ("--num-threads", "1", "--kv-cache-memory-bytes", "1MiB")
OTHERS = ("plan", "convert", "verify", "run-batch", "chat")
SAMPLE = (2, 6, 11, 13, 22, 30, 34, 39, 43, 47, 50, 58)  # of most kinds; without PyTorch
SERVED = range(5, COUNT, 12)
REQUEST = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]},
}


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder for hostile folders, with what they must not touch beside them."""
    (tmp_path / "canary").mkdir()
    (tmp_path / "canary" / "secret").write_text(json.dumps({"secret": SECRET}))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "requests.jsonl").write_text(json.dumps(REQUEST) + "\n")
    return tmp_path


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Forks commands. It imports PyTorch if a test needs it."""
    large = any(item.get_closest_marker("slow") is not None for item in request.session.items)
    made = Runner(tmp_path_factory.mktemp("runner"), large=large)
    yield made
    made.close()


def numbers() -> list[object]:
    """All numbers; those that are no sample are slow."""
    return [pytest.param(number, marks=[] if number in SAMPLE else [pytest.mark.slow]) for number in range(COUNT)]


def words_of(command: str, hostile: Hostile, out: Path) -> list[str]:
    path = str(hostile.path)
    if command == "generate":
        return ["generate", "--model", path, "--prompt", "hi", "--max-tokens", "2", *SIZES, *hostile.options]
    if command == "chat":
        return ["chat", path, "--max-tokens", "2", *SIZES, *hostile.options]
    if command == "plan":
        return ["plan", path, *hostile.options]
    if command == "convert":
        return ["convert", path, str(out / "converted"), "--num-threads", "1", *hostile.options]
    if command == "verify":
        return ["verify", path, "--num-threads", "1", "--prompt-len", "4", "--num-tokens", "2", *hostile.options]
    files = ["-i", str(out / "requests.jsonl"), "-o", str(out / "answers.jsonl")]
    return ["run-batch", *files, "--model", path, "--served-model-name", "m", *SIZES, *hostile.options]


def commands(hostile: Hostile, out: Path) -> list[list[str]]:
    """Return the command lines for a folder: one that loads and computes, and another."""
    if hostile.adapter is not None:
        return [["adapter", str(hostile.path), str(hostile.adapter)]]
    chosen = [OTHERS[hostile.number % len(OTHERS)]] if hostile.number not in SAMPLE else ["plan"]
    if hostile.kind == "template":
        return [words_of(command, hostile, out) for command in ("chat", "run-batch")]
    return [words_of(command, hostile, out) for command in ("generate", *chosen)]


def state(*folders: Path) -> dict[str, tuple[int, ...]]:
    """Return what would show that something was written."""
    found = {}
    for folder in folders:
        for path in [folder, *folder.rglob("*")]:
            status = path.lstat()
            found[str(path)] = status.st_mode, status.st_size, status.st_mtime_ns
    return found


def check_text(err: str, code: int) -> None:
    """Check standard error: short lines, and one of an error if it ended with one."""
    lines = err.splitlines()
    assert "Traceback" not in err
    assert all(len(line) <= LONGEST_LINE for line in lines), [line[:300] for line in lines]
    errors = [line for line in lines if line.startswith("error: ")]
    if code:
        assert errors == lines[-1:], err[-3000:]
        assert errors[0].isprintable()
        assert not errors[0].startswith("error: unexpected ")


def is_harmless(done: Done, command: str) -> bool:
    """Whether a command that did not end with 0 or 2 found nothing wrong with the folder."""
    if command == "plan":
        return done.code == 1 and "does not fit" in done.out
    if command == "verify":
        return done.code == 1 and "differ" in done.out
    return command == "run-batch" and done.code == 1 and "requests failed; their lines say why" in done.err


@pytest.mark.parametrize("number", numbers())
def test_a_hostile_folder_is_refused_in_one_line_or_harmless(world: Path, runner: Runner, number: int) -> None:
    hostile = make(number, world)
    print(f"\n{number} {hostile.kind}: {hostile.what[:100]!r}")
    for words in commands(hostile, world / "out"):
        before = state(*(path for path in world.iterdir() if path.name != "out"))
        done = runner.run(
            words,
            seconds=SECONDS,
            memory=RESERVED if number % 2 else None,
            writes=[world / "out"],
            stdin="hello\n",
        )
        last = (done.err or done.out).strip().rpartition("\n")[2]
        print(f"    {words[0]}: {done.code}, {done.seconds:.1f} s, {done.max_rss >> 20} MiB: {last[:160]!r}")
        assert done.code in (0, 2) or is_harmless(done, words[0]), (done.code, done.err[-3000:])
        if words[0] != "run-batch":  # that reports progress as well
            check_text(done.err, done.code)
        assert done.deeds == []
        assert state(*(path for path in world.iterdir() if path.name != "out")) == before
        assert not (world / "canary" / MARK).exists()
        assert SECRET not in done.out + done.err
        assert done.max_rss < MEMORY
        shutil.rmtree(world / "out" / "converted", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", SERVED)
def test_a_server_refuses_a_hostile_folder_in_one_line_or_serves_it(world: Path, number: int) -> None:
    """The command as users type it, within the folder, with bounded memory."""
    hostile = make(number, world)
    if hostile.adapter is not None:
        options = ["--enable-lora", "--lora-modules", f"x={hostile.adapter}", *hostile.options]
    else:
        options = list(hostile.options)
    before = state(*(path for path in world.iterdir() if path.name != "out"))
    inside = hostile.path if hostile.path.is_dir() else hostile.path.parent
    command = [sys.executable, "-m", "quire", "serve", str(hostile.path), "--port", "0", *SIZES, *options]
    with (world / "out" / "log").open("wb") as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh", *command],
            cwd=inside,
            env={**ENVIRONMENT, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = _wait(process, world / "out" / "log")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = (world / "out" / "log").read_text(errors="replace")
    print(f"\n{number} {hostile.kind}: {hostile.what[:100]!r}: {code}: {text[-300:]!r}")
    assert code in (0, 2), text[-3000:]
    check_text(text, code)
    assert state(*(path for path in world.iterdir() if path.name != "out")) == before
    assert not (world / "canary" / MARK).exists()
    assert SECRET not in text


def _wait(process: subprocess.Popen[bytes], log: Path) -> int:
    """Return the exit code; a server that is ready is told to stop."""
    deadline = time.monotonic() + SECONDS
    told = False
    while process.poll() is None:
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        text = log.read_text(errors="replace")
        if not told and ADDRESS.search(text) and "loaded after" in text:
            process.send_signal(signal.SIGTERM)
            told = True
        time.sleep(0.05)
    return process.returncode
